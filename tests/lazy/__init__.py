"""Random access: what is asked for is read, verified where it can be, and nothing is run."""
