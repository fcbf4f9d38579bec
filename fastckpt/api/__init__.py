"""The public signatures: fastckpt.save and load in files.py, Checkpointer in checkpointer.py."""
