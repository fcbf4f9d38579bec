"""The interface to file systems and object stores, and the ways to make a file or directory
visible.
"""
