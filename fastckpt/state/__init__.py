"""A state, taken apart into named tensors and values, and put together again. It must not know
files or ranks.
"""
