"""Blocks between memory and files: every byte once, checksummed, and nothing left behind."""
