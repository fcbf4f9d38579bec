"""All that ranks of a job tell each other."""
