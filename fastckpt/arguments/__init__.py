"""Checks arguments, and reads and shows sizes, rates and names; not what they are used for."""
