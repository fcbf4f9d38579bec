"""States, taken apart into named tensors and values, and put together again; no files, no ranks."""
