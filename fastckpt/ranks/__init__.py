"""All that ranks of a job tell each other. It must not know files or tensors."""
