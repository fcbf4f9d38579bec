"""The seam to file systems, and every way in which a file or directory becomes visible there."""
