"""The kinds of tensors: plain ones, and those of which each rank holds a part."""

from __future__ import annotations

import torch

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def is_sharded(value: object) -> bool:
    """Returns whether a value is a DTensor, of which each rank holds a part."""
    if type(value) in PLAIN_TENSORS:  # asking a tensor for what it lacks takes long
        return False
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def is_of_several_ranks(value: object) -> bool:
    """Returns whether a value is a tensor of several ranks: a DTensor or a ShardedTensor."""
    if type(value) in PLAIN_TENSORS or not isinstance(value, torch.Tensor):
        return False
    return is_sharded(value) or hasattr(value, "local_shards")
