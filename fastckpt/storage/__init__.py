"""The seam to file systems, and every way in which bytes become visible there. It must not know
what the bytes mean.
"""
