"""DLIO's checkpoint workloads, by fastckpt: the mechanisms that it loads, and one that compares."""
