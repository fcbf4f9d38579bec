"""File formats. Each module lays out files of one format as Images and parses their bytes; none
opens files.

CONTRIBUTING.md has the steps to add a format.
"""
