"""The control of all saves: their order, when the caller may change the state, and their write
rate. It must not know the contents of a save.
"""
