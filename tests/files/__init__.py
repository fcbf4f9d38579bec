"""One file: torch's contract, one whole checkpoint under the path at any moment, damage noticed."""
