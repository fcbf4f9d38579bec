"""The course of all saves: their order, when the state may change, how fast they write. It must not
know what a save writes.
"""
