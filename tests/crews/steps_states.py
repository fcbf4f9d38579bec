"""States that ranks save: tensors in every placement, and a small one that tells its step.

Responsible for what they hold, which follows from names and steps alone, so that any rank of any
job knows it. Must not know how or when they are saved.
"""

from __future__ import annotations

import functools
import os
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fastckpt import PerRank
from tests.crews.group_crew import Member

# torch's store asks for the name of every process that connects. Where names are not served, that
# is to cost one second and not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

Spread = tuple[tuple[int, ...], tuple[Any, ...]]  # shape of a mesh, placements on it

# With rows and columns that no number of ranks divides, and too few of them for four ranks.
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((512, 1024), torch.float32),
    "uneven": ((257, 1031), torch.float32),
    "three rows": ((3, 70_001), torch.float32),
    "one row": ((1, 5), torch.bfloat16),
    "line": ((140_003,), torch.int64),
    "deep": ((6, 5, 4, 5001), torch.bfloat16),
    "small": ((8, 4), torch.float16),
    "empty": ((0, 7), torch.float32),
    "scalar": ((), torch.float64),
}


@functools.cache
def content(key: str) -> torch.Tensor:
    """What the tensor of this name holds, NaNs of every kind among it."""
    shape, dtype = TENSORS[key]
    random = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    nbytes = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
    octets = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random)
    return octets.view(dtype).reshape(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are alike in dtype, shape and every bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


@functools.cache
def mesh(*shape: int) -> DeviceMesh:
    """All ranks of the job, made once: every mesh brings process groups of its own."""
    return init_device_mesh("cpu", shape)


def spreads(world_size: int) -> list[Spread | None]:
    """Every way in which tensors are spread over so many ranks; None: not a DTensor."""
    found: list[Spread | None] = [None]
    found += [((world_size,), (each,)) for each in (Shard(0), Shard(1), Replicate())]
    if world_size == 4:
        pairs: list[tuple[Any, ...]] = [
            (Shard(0), Shard(1)),
            (Replicate(), Shard(0)),
            (Shard(1), Replicate()),
            (Shard(0), Shard(0)),
            (Shard(1), Shard(0)),
        ]
        found += [((2, 2), pair) for pair in pairs]
    return found


def distributed(whole: torch.Tensor, over: DeviceMesh, placements: list[Any]) -> DTensor:
    """This rank's part of what every rank holds; without a word to other ranks."""
    if torch.__version__ >= (2, 7):
        return distribute_tensor(whole, over, placements, src_data_rank=None)
    everywhere = [Replicate()] * over.ndim
    return DTensor.from_local(whole, over, everywhere, run_check=False).redistribute(
        over, placements
    )


def spread(whole: torch.Tensor, how: Spread | None) -> torch.Tensor:
    """This rank's part of a tensor; without a word to other ranks."""
    if how is None:
        return whole
    shape, placements = how
    fitting = [
        Shard(each.dim % whole.dim()) if each.is_shard() and whole.dim() else Replicate()
        for each in placements
    ]
    return distributed(whole, mesh(*shape), fitting)


def arranged(member: Member, variation: int, blank: bool = False) -> dict[str, torch.Tensor]:
    """All tensors, each spread in another way; in the next variation in the next way."""
    ways = spreads(member.world_size)
    tensors = {}
    for number, key in enumerate(TENSORS):
        whole = content(key)
        tensors[key] = spread(
            torch.zeros_like(whole) if blank else whole, ways[(number + variation) % len(ways)]
        )
    return tensors


def differing(member: Member, state: dict[str, torch.Tensor], variation: int) -> list[str]:
    """Names of the tensors that do not hold what arranged() makes of them."""
    wanted = arranged(member, variation)
    return [key for key in TENSORS if not same_bits(local(state[key]), local(wanted[key]))]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Part:
    """A rank's place in a group that is not the whole job."""

    rank: int
    group: Any


ROWS, COLUMNS = 514, 1031
ELEMENTS = ROWS * COLUMNS


def numbers(step: int, count: int = ELEMENTS) -> torch.Tensor:
    """Every element tells its place and the step, exactly as long as both are below 2**23."""
    return torch.arange(step, step + count, dtype=torch.float32)


def stamped(member: Member | Part, step: int) -> dict[str, Any]:
    """A state of 2 MB on each rank, sharded, replicated and its own, in which all tells the step.

    Both the replicated tensor and the sharded one are large enough for the shards.
    """
    whole = numbers(step).view(ROWS, COLUMNS)
    return {
        "sharded": spread_by_group(member, whole),
        "same": whole.flatten(),
        "own": PerRank([member.rank, step]),
        "note": {"step": step},
    }


def spread_by_group(member: Member | Part, whole: torch.Tensor) -> torch.Tensor:
    """Rows over the ranks of a group."""
    return distributed(whole, group_mesh(member.group), [Shard(0)])


@functools.cache
def group_mesh(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def restamp(member: Member | Part, state: dict[str, Any], step: int) -> None:
    """Changes a stamped state in place, as training does."""
    new = stamped(member, step)
    state["sharded"].to_local().copy_(new["sharded"].to_local())
    state["same"].copy_(new["same"])
    state["own"].value = new["own"].value
    state["note"] = new["note"]


def step_of(member: Member | Part, state: dict[str, Any]) -> int:
    """The step that all of a state is of; fails if that are several."""
    step: int = state["note"]["step"]
    wanted = stamped(member, step)
    assert torch.equal(local(state["sharded"]), local(wanted["sharded"])), f"not all of {step}"
    assert torch.equal(state["same"], wanted["same"]), f"not all of step {step}"
    own = state["own"]
    if own.found is not False:
        assert own.value == [member.rank, step], f"rank {member.rank} has {own.value}"
    return step
