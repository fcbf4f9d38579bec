"""The verified reading of files, which all loads use: bytes are checked before use."""
