"""Arithmetic on bytes and boxes: which bytes go where. It knows no torch, no files and no
threads.
"""
