"""Ranks of a job talk to each other by this room. It must not know files or tensors."""
