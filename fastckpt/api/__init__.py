"""The public signatures: fastckpt.save and load, and Checkpointer."""
