"""What two clients of one shared file system may rely on; run by hand.

docs/guides/shared-storage.md says how.
"""
