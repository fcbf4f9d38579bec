"""This room checks what callers pass, and reads and shows sizes, rates and names. It does not know
what the arguments are for.
"""
