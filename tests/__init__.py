"""The tests: a folder for each room of the package, and beside them what they share."""
