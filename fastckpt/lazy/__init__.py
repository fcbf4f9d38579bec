"""Random access to a checkpoint: its tensors by name, of which only what is asked for is read."""
