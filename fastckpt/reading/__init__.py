"""What all loads have in common: bytes of a file, verified before they are used. It must not know
what they are used for.
"""
