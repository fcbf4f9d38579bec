"""Random access to a checkpoint: its tensors by name, read only in the requested parts."""
