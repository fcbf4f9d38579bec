"""One file in torch's format: its save and its load. It must not know steps or directories."""
