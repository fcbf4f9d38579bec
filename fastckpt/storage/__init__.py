"""The seam to file systems, and every way in which a file or directory becomes visible there. It
must not know what the bytes mean.
"""
