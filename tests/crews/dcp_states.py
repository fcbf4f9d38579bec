"""States for the tests of torch.distributed.checkpoint, and whether two of them are the same.

Every value is a function of a seed, so that each process can make what another one has saved. Must
not know how they are saved.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool)
DTYPES += (torch.int64, torch.uint8, torch.float64, torch.float16, torch.uint16)


def numbers(seed: int, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of random bits that mean numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*sizes, generator=generator)
    if dtype == torch.bool:
        return values > 0
    return (values if dtype.is_signed else values.abs()).mul(10).to(dtype)


def plain(seed: int) -> dict[str, Any]:
    """A nest of what one process can hold."""
    return {
        "model": {
            "weight": numbers(seed + 1, 700, 900),
            "nested": [numbers(seed + 2, 4), {"deep": numbers(seed + 3, 2, 2, 2)}],
            "parameter": torch.nn.Parameter(numbers(seed + 4, 9)),
        },
        "dtypes": {str(dtype)[6:]: numbers(seed, 3, 5, dtype=dtype) for dtype in DTYPES},
        "scalar": torch.tensor(3.5 + seed),
        "empty": torch.zeros(0, 3),
        "view": numbers(seed + 5, 100, 200)[10:20, 5:50],
        "transposed": numbers(seed + 6, 30, 40).t(),
        "channels_last": numbers(seed + 7, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        "lr": 0.1 + seed,
        "none": None,
        "text": "x" * seed,
        "long": [1, 2.5, "three", {"four": seed}],
    }


def sharded(seed: int, mesh: DeviceMesh, without_old: bool = False) -> dict[str, Any]:
    """What ranks hold parts of: DTensors in several placements, ShardedTensors, replicas."""
    state = {
        "rows": distribute_tensor(numbers(seed, 301, 40), mesh, [Shard(0)]),
        "columns": distribute_tensor(numbers(seed + 1, 60, 301), mesh, [Shard(1)]),
        "everywhere": distribute_tensor(numbers(seed + 2, 50, 3), mesh, [Replicate()]),
        "few": distribute_tensor(numbers(seed + 3, 2, 8), mesh, [Shard(0)]),  # some have none
        "replica": numbers(seed + 4, 77),
        "step": seed,
    }
    return state if without_old else state | {"old": _old(seed, mesh.size(), mesh.get_local_rank())}


def _old(seed: int, size: int, rank: int) -> Any:
    """A ShardedTensor; the first rank has two shards of it."""
    begin, end = (rank * 13) // size, ((rank + 1) * 13) // size
    cuts = [begin, begin + 1, end] if rank == 0 else [begin, end]
    rows = numbers(seed + 9, 13, 6)
    shards = [
        LocalShard.from_tensor_and_offsets(rows[a:b].clone(), [a, 0], rank)
        for a, b in pairwise(cuts)
    ]
    return init_from_local_shards(shards, 13, 6)


def whole(seed: int) -> dict[str, Any]:
    """What sharded() holds, in one place."""
    return {
        "rows": numbers(seed, 301, 40),
        "columns": numbers(seed + 1, 60, 301),
        "everywhere": numbers(seed + 2, 50, 3),
        "few": numbers(seed + 3, 2, 8),
        "old": numbers(seed + 9, 13, 6),
        "replica": numbers(seed + 4, 77),
        "step": seed,
    }


def blank(value: Any) -> Any:
    """A state of the same kind with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return value if value is None else type(value)()


def is_same(a: Any, b: Any) -> bool:
    """Whether two states have the same values, tensors bit by bit."""
    if isinstance(a, DTensor):
        a, b = a.to_local(), b.to_local()
    if hasattr(a, "local_shards"):
        return is_same(
            [its.tensor for its in a.local_shards()], [its.tensor for its in b.local_shards()]
        )
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        bits = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (a, b)]
        return torch.equal(*bits)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and a == b
