"""Directories in others' formats: the whole directory or none."""
