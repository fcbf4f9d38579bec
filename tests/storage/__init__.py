"""The seam to file systems: which kind of file system it is, what it can, what it does wrong."""
