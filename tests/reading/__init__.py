"""Reading a file of ours: every byte verified, or the error that says why not."""
