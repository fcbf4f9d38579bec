"""Arithmetic on bytes and boxes: images, intervals, shards, by comparison with plain renderings."""
