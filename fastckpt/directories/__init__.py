"""Directories in the formats of others, committed as a whole. It must not know which framework they
are for.
"""
