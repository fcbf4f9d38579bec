"""Arithmetic on bytes and boxes, which decides the position of each byte. It imports no torch and
uses no files or threads.
"""
