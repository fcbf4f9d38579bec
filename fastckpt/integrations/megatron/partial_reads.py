"""Reads selected parts of a DCP directory: boxes of stored chunks, and the bytes of objects.

Responsible for reading exactly these parts with a Reader, without a collective.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.safe_globals import SAFE_GLOBALS, _reconstruct
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from fastckpt import IncompatibleCheckpoint
from fastckpt.formats.torch_pickle import torch_load
from fastckpt.integrations import dcp

# The classes that Megatron allows in common.pt. numpy 2 moved the function that makes its arrays.
# If CUDA graphs are used, states of random number generators are stored as generators.
_ALLOWED: list[Any] = [
    *SAFE_GLOBALS,
    torch.Generator,
    *((_reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
]


def box_item(
    target: str,
    to: Sequence[int],
    key: str,
    chunk: ChunkStorageMetadata,
    at: Sequence[int],
    lengths: Sequence[int],
) -> ReadItem:
    """Returns a ReadItem for one box, from offset `at` in a stored chunk of `key` to offset `to` in
    `target`.
    """
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(target),
        torch.Size(to),
        MetadataIndex(key, chunk.offsets),
        torch.Size(at),
        torch.Size(lengths),
    )


def read_boxes(
    directory: str, items: Iterable[ReadItem], targets: Mapping[str, torch.Tensor]
) -> None:
    """Reads boxes into tensors; see read()."""
    chosen = _Chosen(list(items), targets)
    if chosen.items:
        read(directory, chosen, {})


def read_objects(
    directory: str, keys: Iterable[str], weights_only: bool = True
) -> dict[str, io.BytesIO]:
    """Returns the bytes of objects, by key; see read()."""
    none = torch.Size([0])
    indices = [MetadataIndex(key) for key in keys]
    chosen = _Chosen(
        [ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none) for index in indices], {}
    )
    if chosen.items:
        read(directory, chosen, {}, weights_only=weights_only)
    return chosen.contents


def read(
    directory: str, planner: LoadPlanner, state: dict[str, Any], *, weights_only: bool = True
) -> None:
    """Reads the items of a planner's plan, like torch.distributed.checkpoint.load on one rank.

    Raises:
        CorruptCheckpoint: bytes differ from those that were written. KeyError: a key is missing.
        IncompatibleCheckpoint: an object needs weights_only=False.
    """
    reader = dcp.Reader(directory, weights_only=weights_only)
    try:
        with _allowed():
            metadata = reader.read_metadata()
            planner.set_up_planner(state, metadata, True)
            reader.set_up_storage_reader(metadata, True)
            plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
            reader.read_data(plan, planner).wait()
    except pickle.UnpicklingError as error:
        raise IncompatibleCheckpoint(str(error)) from error


def _allowed() -> Any:
    """Allows the classes that Megatron allows, within the context."""
    # The context removes only the classes that it added, so classes that others allowed stay
    # allowed.
    allowed = torch.serialization.get_safe_globals()
    return torch.serialization.safe_globals([each for each in _ALLOWED if each not in allowed])


def unpickled(content: io.BytesIO, name: str, weights_only: bool = True) -> Any:
    """Returns an object that torch.save wrote, with the classes allowed that Megatron allows."""
    try:
        with _allowed():
            return torch_load(content, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise IncompatibleCheckpoint(f"{name!r} needs weights_only=False: {error}") from error


class _Chosen(DefaultLoadPlanner):
    """A planner for a plan that was made elsewhere."""

    def __init__(self, items: list[ReadItem], targets: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.items, self._targets = items, targets
        self.contents: dict[str, io.BytesIO] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self.items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.contents[read_item.dest_index.fqn] = value

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        part = self._targets[read_item.dest_index.fqn].detach()
        places = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for axis, (start, length) in enumerate(places):
            part = part.narrow(axis, start, length)
        return part
