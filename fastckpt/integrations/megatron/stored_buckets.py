"""The stored buckets of Megatron's distributed optimizer, and the objects saved with them.

Responsible for reading ranges of buckets with few reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer.distrib_optimizer import param_group_identifier_keys
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from fastckpt import IncompatibleCheckpoint
from fastckpt.integrations.megatron.partial_reads import (
    box_item,
    read_boxes,
    read_objects,
    unpickled,
)
from fastckpt.integrations.megatron.reshard import Indices, Piece, Runs, Uncovered, split_at
from fastckpt.integrations.megatron.strategies import object_keys

MAP, ONE_OF_ONE = "fastckpt_map", "/shard_0_1"
GROUPS_APART = "optimizer.distributed."  # the part before it identifies a chained optimizer


@dataclass(frozen=True)
class BucketCopy:
    """A copy of runs from a stored array to a 1-D tensor."""

    array: str
    tensor: torch.Tensor
    runs: Runs


class StoredBuckets:
    """The buckets of a checkpoint.

    Attributes:
        groups: the prefixes (see distributed()) of groups of ranks that saved buckets with a map.
    """

    def __init__(self, directory: str, metadata: Metadata, weights_only: bool = True) -> None:
        self._directory, self._metadata = directory, metadata
        self._weights_only = weights_only
        self._objects: dict[str, Any] = {}  # the objects read so far, by group
        ending = f".{MAP}{ONE_OF_ONE}"
        keys = object_keys(metadata)
        self.groups = sorted(key.removesuffix(ending) for key in keys if key.endswith(ending))

    def arrays(self, own: str, expected: dict[str, list[Piece]]) -> dict[str, list[Piece]]:
        """Returns the pieces that are stored in each array, by the array's name without the state's
        name.

        Args:
            own: the group whose arrays come first.
            expected: if that group has just these arrays, only they are returned.
        """
        pieces: dict[str, list[Piece]] = {}
        if own in self.groups:
            pieces = self._pieces(own)
            if pieces == expected:
                return pieces
        self._fetch(self.groups)
        for group in self.groups:
            if group != own:
                pieces |= self._pieces(group)
        return pieces

    def load_state(self, groups: list[str]) -> dict[str, Any]:
        """Returns the parameter groups and gradient scaler of groups of ranks, for
        load_state_dict.
        """
        self._fetch(groups)
        state_of: dict[tuple[Any, ...], Any] = {}
        for group in groups:
            for values in self._objects[f"{group}.optimizer"]["param_groups"]:
                state_of.setdefault(identity(values), values)
        scaler = self._objects.get(f"{groups[0]}.grad_scaler")
        state: dict[str, Any] = {"optimizer": {"param_groups": list(state_of.values())}}
        return state | ({} if scaler is None else {"grad_scaler": scaler})

    def read(self, copies: Iterable[BucketCopy]) -> None:
        """Copies runs of stored arrays into 1-D tensors."""
        items: list[ReadItem] = []
        targets: dict[str, torch.Tensor] = {}
        scattered: list[tuple[torch.Tensor, Runs, torch.Tensor]] = []
        for copy in copies:
            tensor: Any = self._metadata.state_dict_metadata.get(copy.array)
            if tensor is None or tensor.properties.dtype != copy.tensor.dtype:
                has = "is missing" if tensor is None else f"is {tensor.properties.dtype}"
                raise IncompatibleCheckpoint(
                    f"{copy.array!r} {has} in {self._directory!r}, expected {copy.tensor.dtype}"
                )
            chunks, starts, sizes = chunks_in_order(tensor)
            for span in copy.runs.spans():
                one, tensor_of = span, copy.tensor
                if len(span.length) > 1:  # one read, then copies in memory
                    base = int(span.source[0])
                    one = Runs.one(base, 0, int(span.source[-1] + span.length[-1]) - base)
                    tensor_of = torch.empty(
                        int(one.length[0]), dtype=copy.tensor.dtype, device="cpu"
                    )
                    scattered.append((tensor_of, span, copy.tensor))
                target = str(len(targets))
                targets[target] = tensor_of
                try:
                    cuts = split_at(one, starts, sizes)
                except Uncovered as error:
                    raise IncompatibleCheckpoint(f"{copy.array!r}: {error}") from error
                for number, at, to, length in cuts:
                    items.append(box_item(target, [to], copy.array, chunks[number], [at], [length]))
        read_boxes(self._directory, items, targets)
        for content, span, tensor in scattered:
            _scatter(content, span, tensor.detach())

    def _pieces(self, group: str) -> dict[str, list[Piece]]:
        self._fetch([group])
        try:
            return {
                str(name): [Piece.of(record) for record in records]
                for name, records in self._objects[f"{group}.{MAP}"].items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise IncompatibleCheckpoint(f"{group!r} has no map of buckets: {error}") from error

    def _fetch(self, groups: list[str]) -> None:
        """Reads the objects of all groups at once, because they are small and stored together."""
        names = self._metadata.state_dict_metadata
        wanted = {
            f"{group}.{name}": f"{group}.{name}{ONE_OF_ONE}"
            for group in groups
            for name in (MAP, "optimizer", "grad_scaler")
            if f"{group}.{MAP}" not in self._objects
        }
        keys = {name: key for name, key in wanted.items() if key in names}
        contents = read_objects(self._directory, keys.values(), self._weights_only)
        for name, key in keys.items():
            self._objects[name] = unpickled(contents[key], key, self._weights_only)[0]


def chunks_in_order(tensor: Any) -> tuple[list[Any], Indices, Indices]:
    """Returns the stored chunks of a 1-D tensor, their starts and their sizes."""
    chunks = sorted(tensor.chunks, key=lambda chunk: chunk.offsets[0])
    starts = np.array([chunk.offsets[0] for chunk in chunks], dtype=np.int64)
    return chunks, starts, np.array([chunk.sizes[0] for chunk in chunks], dtype=np.int64)


def identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the values that identify a parameter group in Megatron."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)


def _scatter(content: torch.Tensor, runs: Runs, tensor: torch.Tensor) -> None:
    """Copies runs from a span that was read to their targets."""
    base = int(runs.source[0])
    # Usually all runs but the first and last, which may be shorter, are rows of a matrix.
    rows = Runs(runs.source[1:-1], runs.target[1:-1], runs.length[1:-1])
    steps = rows.steps()
    if steps is None:
        rest = range(len(runs.length))
    else:
        rest = range(0, len(runs.length), len(runs.length) - 1)
        shape = (len(rows.length), int(rows.length[0]))
        source, target = int(rows.source[0]) - base, int(rows.target[0])
        tensor[target:].as_strided(shape, (steps[1], 1), tensor.storage_offset() + target).copy_(
            content.as_strided(shape, (steps[0], 1), source)
        )
    for number in rest:
        at, to = int(runs.source[number]) - base, int(runs.target[number])
        length = int(runs.length[number])
        tensor[to : to + length].copy_(content[at : at + length])
