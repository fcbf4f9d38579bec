"""What two clients of one shared file system may rely on; run by hand, see docs/filesystems.md."""
