"""Steps: directories in which each rank writes its shard. A manifest commits the step.

The room must not know tiers.
"""
