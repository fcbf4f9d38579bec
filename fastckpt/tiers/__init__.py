"""Steps in each node's own storage: saved there, drained to the root, and restored."""
