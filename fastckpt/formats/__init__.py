"""File formats. Each module describes files of one format as Images and parses their bytes.

No module opens files. CONTRIBUTING.md has the steps to add a format.
"""
