"""Conversion of a checkpoint to one that stock Megatron loads on any parallelism, or a copy as is.

Responsible for what the new directory holds: the distributed optimizer's buckets become the state
of whole parameters, cut as the model's own tensors are. It must not know models or optimizers: all
it uses is in the directory.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from fastckpt import IncompatibleCheckpoint
from fastckpt.integrations import dcp
from fastckpt.integrations.megatron.optimizer import CONTENT, SHARDING
from fastckpt.integrations.megatron.partial_reads import box_item, read_boxes, read_objects
from fastckpt.integrations.megatron.reshard import Piece, Runs, split_at
from fastckpt.integrations.megatron.save_planner import DividingSavePlanner
from fastckpt.integrations.megatron.stored_buckets import (
    GROUPS_APART,
    StoredBuckets,
    chunks_in_order,
)
from fastckpt.integrations.megatron.strategies import (
    Writer,
    object_keys,
    serialized,
    stored_common,
    stored_metadata,
)

LAYOUTS = ("fully_reshardable", "as_is")


def convert(
    src: str,
    dst: str,
    *,
    optimizer: str = "fully_reshardable",
    weights_only: bool = True,
    timeout_s: float = 600.0,
) -> None:
    """Writes a checkpoint anew, into another directory; returns when it is committed.

    The result is a torch_dist directory that stock Megatron loads. If torch.distributed is
    initialized, all ranks call this; each holds its share of the checkpoint in memory.

    Args:
        src: directory of one iteration, saved by fastckpt or by stock Megatron.
        dst: the new directory; made if it is missing. It must not hold a checkpoint.
        optimizer: "fully_reshardable": the distributed optimizer's state is laid out so that stock
            Megatron loads it on other tensor and pipeline parallel sizes. "as_is": it is copied.
        weights_only: as torch.load's.
        timeout_s: the longest that ranks wait for each other, in seconds.

    Raises:
        ValueError: optimizer is unknown, or dst holds a checkpoint, as it does if it is src.
        IncompatibleCheckpoint: stock Megatron saved the buckets, without a map: only it loads them.
        CorruptCheckpoint: src is damaged.
    """
    if optimizer not in LAYOUTS:
        raise ValueError(f"optimizer is {optimizer!r}, must be one of {LAYOUTS}")
    if os.path.exists(os.path.join(dst, ".metadata")):
        raise ValueError(f"{dst!r} holds a checkpoint: give a directory that holds none")
    metadata = stored_metadata(src)
    common = stored_common(src, metadata, weights_only)
    parts, objects = list(_kept_tensors(metadata)), object_keys(metadata)
    content = common.get(CONTENT) or {}
    if optimizer == "fully_reshardable" and content.get(SHARDING) == "dp_reshardable":
        buckets = StoredBuckets(src, metadata, weights_only)
        if not buckets.groups:
            raise IncompatibleCheckpoint(
                f"{src!r} was saved by stock Megatron, without the map of its optimizer's buckets "
                "that converting them needs"
            )
        old = tuple(f"{group}." for group in buckets.groups)
        parts = [part for part in parts if not part.key.startswith(old)]
        objects = [key for key in objects if not key.startswith(old)]
        parts += _unpacked(buckets, metadata, content)
        common = _common(common, buckets, content)
    _write(src, dst, parts, objects, common, weights_only, timeout_s)


@dataclass(frozen=True)
class _Part:
    """A chunk to write, and the stored boxes that it is made of.

    Attributes:
        key, size, dtype: of the tensor; offset, shape: of the chunk in it.
        flat: shape of what is read: the chunk's, or 1-D, from which `strides` picks the chunk.
        reads: (stored key, stored chunk, offset in it, offset in flat, lengths).
    """

    key: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    flat: tuple[int, ...]
    strides: tuple[int, ...] | None
    reads: list[tuple[str, ChunkStorageMetadata, list[int], list[int], list[int]]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.flat) * self.dtype.itemsize

    def shard(self, data: torch.Tensor) -> ShardedTensor:
        if self.strides is not None:
            data = data.as_strided(self.shape, self.strides).contiguous()
        return ShardedTensor(
            self.key, data, self.dtype, self.shape, self.size, self.offset, None, replica_id=0
        )


def _kept_tensors(metadata: Metadata) -> Iterator[_Part]:
    stored: dict[str, Any] = dict(metadata.state_dict_metadata)
    for key, tensor in stored.items():
        for chunk in getattr(tensor, "chunks", []):
            none = [0] * len(chunk.sizes)
            shape = tuple(chunk.sizes)
            yield _Part(
                key,
                tuple(tensor.size),
                tuple(chunk.offsets),
                shape,
                tensor.properties.dtype,
                shape,
                None,
                [(key, chunk, none, none, list(shape))],
            )


def _unpacked(
    buckets: StoredBuckets, metadata: Metadata, content: dict[str, Any]
) -> Iterator[_Part]:
    """Yields the state of whole parameters, a chunk for each box that a bucket holds."""
    prefixed = not content.get("chained_optim_avoid_prefix", False)
    tensors: dict[str, Any] = dict(metadata.state_dict_metadata)
    done: set[tuple[str, tuple[int, ...]]] = set()
    for array, pieces in buckets.arrays().items():
        chained = array.partition(GROUPS_APART)[0] if prefixed else ""
        states = [key[len(array) + 1 :] for key in tensors if key.startswith(f"{array}.")]
        for piece in pieces:
            for state in states:
                key = f"{chained}optimizer.state.{state}.{piece.key}"
                if (key, piece.offset) in done:  # a replica of it is
                    continue
                done.add((key, piece.offset))
                if piece.key not in tensors:
                    raise IncompatibleCheckpoint(
                        f"the checkpoint has optimizer state for {piece.key!r}, but not its value"
                    )
                size = tuple(tensors[piece.key].size)
                yield _unpacked_part(key, size, piece, f"{array}.{state}", tensors)


def _unpacked_part(
    key: str, size: tuple[int, ...], piece: Piece, array: str, tensors: Any
) -> _Part:
    steps = zip(piece.shape, piece.strides, strict=True)
    span = 1 + sum((count - 1) * stride for count, stride in steps)
    chunks, starts, sizes = chunks_in_order(tensors[array])
    cuts = split_at(Runs.one(piece.start, 0, span), starts, sizes)
    return _Part(
        key,
        size,
        piece.offset,
        piece.shape,
        tensors[array].properties.dtype,
        (span,),
        piece.strides,
        [(array, chunks[number], [at], [to], [length]) for number, at, to, length in cuts],
    )


def _common(
    common: dict[str, Any], buckets: StoredBuckets, content: dict[str, Any]
) -> dict[str, Any]:
    """Returns the common state of a fully_reshardable checkpoint, which has parameter groups."""
    states = {
        chained: {
            **buckets.load_state([group for group in buckets.groups if group.startswith(chained)]),
            "param_state_sharding_type": "fully_reshardable",
        }
        for chained in sorted({g.partition(GROUPS_APART)[0] for g in buckets.groups})
    }
    optimizer = next(iter(states.values())) if "" in states else dict(enumerate(states.values()))
    layout = {SHARDING: "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
    return {**common, "optimizer": optimizer, CONTENT: {**content, **layout}}


def _write(
    src: str,
    dst: str,
    parts: list[_Part],
    objects: list[str],
    common: dict[str, Any],
    weights_only: bool,
    timeout_s: float,
) -> None:
    alone = not (dist.is_available() and dist.is_initialized())
    rank, ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    mine = _share(parts, rank, ranks)
    tensors = {
        str(number): torch.empty(p.flat, dtype=p.dtype, device="cpu")
        for number, p in enumerate(mine)
    }
    read_boxes(src, _items(mine), tensors)
    held: dict[Any, Any] = {}
    for number, part in enumerate(mine):
        held[part.key, part.offset] = part.shard(tensors.pop(str(number)))
    contents: dict[str, io.BytesIO] = read_objects(src, objects, weights_only) if rank == 0 else {}
    dcp.async_save(
        held | contents,
        storage_writer=Writer(dst, serialized(common).getvalue()),
        planner=DividingSavePlanner(),
        no_dist=alone,
        timeout_s=timeout_s,
    ).result()


def _share(parts: list[_Part], rank: int, ranks: int) -> list[_Part]:
    """Returns the parts for one rank; all ranks get nearly as many bytes as each other."""
    loads = [0] * ranks
    mine = []
    for part in sorted(parts, key=lambda part: -part.nbytes):
        least = loads.index(min(loads))
        loads[least] += part.nbytes
        if least == rank:
            mine.append(part)
    return mine


def _items(parts: Iterable[_Part]) -> Iterator[ReadItem]:
    for number, part in enumerate(parts):
        for key, chunk, at, to, lengths in part.reads:
            yield box_item(str(number), to, key, chunk, at, lengths)
