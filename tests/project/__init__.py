"""The tree itself: its style, its directions, its examples and benchmarks."""
