"""Saves of directories in other libraries' formats, committed atomically. It must not know the
frameworks.
"""
