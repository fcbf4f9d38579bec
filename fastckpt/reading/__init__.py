"""All loads share this room: bytes of a file are verified before they are used. It must not know
what they are used for.
"""
