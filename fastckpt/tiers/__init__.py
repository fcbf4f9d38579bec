"""Steps on each node's own storage: saves to it, drains to the root, and restores."""
