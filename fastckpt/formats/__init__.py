"""Formats: a module for each lays it out as an Image and parses its bytes; none opens files.

CONTRIBUTING.md has the steps to add one.
"""
