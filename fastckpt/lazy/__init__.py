"""Random access to a checkpoint: its tensors by name, of which only the requested parts are
read.
"""
