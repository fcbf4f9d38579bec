"""Arithmetic on bytes and boxes: which bytes go where. It knows no torch, files or threads."""
