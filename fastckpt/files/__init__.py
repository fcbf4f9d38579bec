"""Saves and loads of one file in torch's format."""
