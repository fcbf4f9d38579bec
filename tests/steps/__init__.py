"""Step directories: what is committed is restored, by any number of ranks."""
