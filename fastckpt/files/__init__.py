"""One file in torch's format: its save and its load."""
