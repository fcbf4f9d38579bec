"""Verified reading, for all loads: bytes are checked before use."""
