"""Verified reading, for all loads: bytes are checked before use. It must not know their use."""
