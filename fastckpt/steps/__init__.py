"""Steps: directories in which each rank writes its shard, committed by a manifest.

The room must not know tiers.
"""
