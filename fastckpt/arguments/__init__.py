"""What callers pass, checked, and the sizes, rates and names that people read. It does not know
what the arguments are for.
"""
