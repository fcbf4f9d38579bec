"""The DCP planner that divides a save among the ranks of a job.

Responsible for writing each element once, by a rank that holds it. A tensor that data parallel
replicas hold is split into bands of rows, one per replica, so that all write the same number of
bytes.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from fastckpt import IncompatibleCheckpoint
from fastckpt.directories.dcp_metadata import check_cover

# Smaller shards are not split, because splitting gains less than another item costs.
CUT_BYTES_MIN = 1 << 20
# The states of a parameter are written in turns: the bytes of each state per turn, which are more
# if a rank would have more than TURNS_MAX turns.
TURN_BYTES_MIN, TURNS_MAX = 512 << 10, 256

# The part of a checkpoint that a rank holds, in the preferred order of writing: shards by key and
# offset, and the bytes of objects by unique key.
Holdings = Mapping[Any, "ShardedTensor | io.BytesIO"]


def may_write(replica_id: int | tuple[int, ...]) -> bool:
    """Whether a replica certainly has the same bytes as the main replica, which Megatron would
    save. This holds if only its last coordinate, the data parallel one, differs; other replicas may
    differ in practice.
    """
    return isinstance(replica_id, int) or all(number == 0 for number in replica_id[:-1])


class DividingSavePlanner(SavePlanner):
    """Plans a save of Holdings; every rank offers all items that it may write."""

    def set_up_planner(
        self,
        state_dict: Any,
        storage_meta: Any = None,
        is_coordinator: bool = False,
    ) -> None:
        self._held: Holdings = state_dict
        self._shards: dict[str, list[ShardedTensor]] = {}
        for held in self._held.values():
            if isinstance(held, ShardedTensor):
                self._shards.setdefault(held.key, []).append(held)

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                _item(held)
                if isinstance(held, ShardedTensor)
                else WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
                for key, held in self._held.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return divide(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key, data = write_item.index.fqn, write_item.tensor_data
        if data is not None:
            return _part(self._shards[key], data.chunk)
        content = self._held[key]
        assert isinstance(content, io.BytesIO)
        return content


def divide(offers: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Assigns the offered items to ranks; returns the ranks' plans and the metadata.

    Raises:
        IncompatibleCheckpoint: shards overlap or leave gaps, or ranks offer one tensor with
            different shapes or dtypes.
    """
    holders: dict[MetadataIndex, list[int]] = {}
    offered: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(offers):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            offered.setdefault(item.index, item)
    loads = [0] * len(offers)
    # The largest items are assigned first, so that small items even out the loads. Items are
    # written in the order of the offer, because items adjacent in memory will be read together.
    places = [{item.index: at for at, item in enumerate(plan.items)} for plan in offers]
    parts: list[list[tuple[int, WriteItem]]] = [[] for _ in offers]
    for index in sorted(offered, key=lambda index: -_nbytes(offered[index])):
        for rank, part in _assigned(offered[index], holders[index], loads):
            loads[rank] += max(_nbytes(part), 1)
            parts[rank].append((places[rank][index], part))
    written = [
        list(_in_turns([part for _, part in sorted(each, key=lambda pair: pair[0])]))
        for each in parts
    ]
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    plans = [
        dataclasses.replace(plan, items=[_noted(item, described) for item in items])
        for plan, items in zip(offers, written, strict=True)
    ]
    for key, tensor in described.items():
        if isinstance(tensor, TensorStorageMetadata):
            check_cover(key, tensor)
    return plans, Metadata(described)


def _item(shard: ShardedTensor) -> WriteItem:
    offset = torch.Size(shard.global_offset)
    sizes = torch.Size((1,) * shard.prepend_axis_num + tuple(shard.local_shape))
    return WriteItem(
        MetadataIndex(shard.key, offset),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=sizes),
            properties=TensorProperties(dtype=shard.dtype),
            size=torch.Size(shard.global_shape),
        ),
    )


def _assigned(
    item: WriteItem, ranks: list[int], loads: list[int]
) -> Iterator[tuple[int, WriteItem]]:
    """Yields (rank, part): a band of rows for each rank, or the whole item for the least loaded
    rank.
    """
    if item.tensor_data is None or _nbytes(item) < CUT_BYTES_MIN:
        yield min(ranks, key=lambda rank: loads[rank]), item
        return
    chunk = item.tensor_data.chunk
    axis = next((axis for axis, size in enumerate(chunk.sizes) if size > 1), 0)
    rows, begin = chunk.sizes[axis], 0
    for number, rank in enumerate(sorted(ranks), 1):
        end = rows * number // len(ranks)
        if end > begin:
            yield rank, _band(item, axis, begin, end)
        begin = end


def _in_turns(items: list[WriteItem]) -> Iterator[WriteItem]:
    """Yields items in the order of writing. 1-D items of the same chunk, such as a parameter's
    states in a bucket, are interleaved in bands, because a reader needs the same range of each
    item.
    """
    band_bytes = max(TURN_BYTES_MIN, sum(map(_nbytes, items)) // TURNS_MAX)
    for place, alike in itertools.groupby(items, _flat_place):
        group = list(alike)
        turns = -(-_nbytes(group[0]) // band_bytes) if place is not None else 1
        if len(group) == 1 or turns == 1:
            yield from group
            continue
        rows = math.prod(place.sizes)
        for turn in range(turns):
            begin, end = rows * turn // turns, rows * (turn + 1) // turns
            yield from (_band(item, 0, begin, end) for item in group)


def _flat_place(item: WriteItem) -> Any:
    """Returns a 1-D item's chunk in its tensor; None for other items."""
    data = item.tensor_data
    return data.chunk if data is not None and len(data.chunk.sizes) == 1 else None


def _band(item: WriteItem, axis: int, begin: int, end: int) -> WriteItem:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    offset, sizes = list(chunk.offsets), list(chunk.sizes)
    offset[axis] += begin
    sizes[axis] = end - begin
    band = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(sizes))
    return dataclasses.replace(
        item,
        index=dataclasses.replace(item.index, offset=band.offsets),
        tensor_data=dataclasses.replace(item.tensor_data, chunk=band),
    )


def _noted(
    item: WriteItem, described: dict[str, TensorStorageMetadata | BytesStorageMetadata]
) -> WriteItem:
    """Adds an item to the metadata; returns the item with its index there."""
    key, data = item.index.fqn, item.tensor_data
    if data is None:
        if key in described:
            raise IncompatibleCheckpoint(f"{key!r} is both an object and a tensor")
        described[key] = BytesStorageMetadata()
        return item
    fresh = TensorStorageMetadata(properties=data.properties, size=data.size, chunks=[])
    tensor = described.setdefault(key, fresh)
    if not isinstance(tensor, TensorStorageMetadata):
        raise IncompatibleCheckpoint(f"{key!r} is both an object and a tensor")
    if tensor.size != data.size or tensor.properties.dtype != data.properties.dtype:
        raise IncompatibleCheckpoint(
            f"{key!r} is {tuple(tensor.size)} {tensor.properties.dtype} on one rank, "
            f"{tuple(data.size)} {data.properties.dtype} on another"
        )
    tensor.chunks.append(data.chunk)
    place = dataclasses.replace(item.index, index=len(tensor.chunks) - 1)
    return dataclasses.replace(item, index=place)


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    dtype: torch.dtype = item.tensor_data.properties.dtype
    return math.prod(item.tensor_data.chunk.sizes) * dtype.itemsize


def _part(shards: list[ShardedTensor], chunk: ChunkStorageMetadata) -> torch.Tensor:
    """Returns the elements of a chunk, from the shard that contains it."""
    for shard in shards:  # a bucket has many shards with few chunks each
        shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        begins = [at - base for at, base in zip(chunk.offsets, shard.global_offset, strict=True)]
        if all(
            begin >= 0 and begin + size <= whole
            for begin, size, whole in zip(begins, chunk.sizes, shape, strict=True)
        ):
            part: torch.Tensor = shard.data.detach().view(shape)
            for axis, (begin, size) in enumerate(zip(begins, chunk.sizes, strict=True)):
                part = part.narrow(axis, begin, size)
            return part
    raise AssertionError(f"no shard holds {chunk}")
