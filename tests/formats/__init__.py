"""Bytes on disk: every format is what its document says, and stock readers open it."""
