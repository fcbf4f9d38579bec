"""Formats: each module lays out one as an Image and parses its bytes; none opens files."""
