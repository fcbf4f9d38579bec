"""File formats: each module lays an object out as an Image and parses a written file to an Index.

Nothing is responsible here beyond naming the package; formats must not know files, threads or
ranks.
"""
