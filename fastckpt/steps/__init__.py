"""A step: a directory in which each rank writes its shard, committed by a manifest. It must not
know tiers.
"""
