"""A step by way of each node's own storage: saved there, drained, restored."""
