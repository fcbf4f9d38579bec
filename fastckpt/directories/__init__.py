"""Directories in the formats of others, committed as a whole; it must not know the frameworks."""
