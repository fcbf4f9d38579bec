"""Transfers of blocks of bytes between memory and open files by the extension's threads."""
