"""Placements of tensors on ranks of which only one is there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastckpt.ranks.same_state import Description, disagreement
from fastckpt.state.tree import Flat, comparable
from fastckpt.steps.capture import _texts


@contextmanager
def rank_of(world_size: int, rank: int) -> Iterator[None]:
    """This process is one rank of a job meanwhile."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_ranks(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    found = []
    for rank in range(world_size):
        with rank_of(world_size, rank):
            found.append(work(rank))
    return found


def held(local: torch.Tensor, mesh: Any, placements: Any, shape: tuple[int, ...]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def described(flat: Flat, world_size: int) -> Description:
    description = Description(_texts(flat))
    description.sample(comparable(flat.leaves, world_size, ()), 5)
    for address, memory in description.samples():
        memory[:] = ctypes.string_at(address, len(memory))
    return description


def difference(*descriptions: Description) -> tuple[str, set[str]]:
    assert len({each.digest() for each in descriptions}) == len(descriptions)
    error, unequal = disagreement(
        [([rank], d.detail()) for rank, d in enumerate(descriptions)], "a"
    )
    return str(error), unequal
