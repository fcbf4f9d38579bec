"""Steps that go by way of each node's own storage: saved there, drained to the root, restored."""
