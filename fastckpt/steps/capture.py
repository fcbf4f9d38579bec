"""The capture of a state while the caller waits: tensors by reference, all other values by copy."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from fastckpt.engine.devices import Devices, DeviceSources
from fastckpt.errors import retold, telling
from fastckpt.formats import torch_pickle
from fastckpt.formats.torch_pickle import torch_save
from fastckpt.formats.value_names import below, items_in, key_among
from fastckpt.ranks.same_state import Description
from fastckpt.saving.mutation_check import WatchedTensors
from fastckpt.state.kinds import PLAIN_TENSORS, copied_later
from fastckpt.state.tree import Flat, Leaf, PerRank, flatten, is_stateful


@dataclass
class Content:
    """One rank's part of a state to be saved. It must not change until it has been staged.

    Attributes:
        leaves: the tensors of the shards; every rank has the same keys in the same order.
        objects: all other values, pickled on the first rank; None on the other ranks.
        per_rank: torch zips of this rank's own values, by the key of the state that they are under;
            None for those under keys without a file of their own.
        description: the description of the state that ranks compare.
        small: the tensors among the objects, with their versions at the capture; ranks compare
            samples of them.
        reads: the device memory that must be read.
        watched: the tensors that must not change before they have been copied.
    """

    leaves: list[Leaf]
    objects: torch_pickle.Capture | None
    per_rank: dict[str | None, bytes]
    description: Description
    small: dict[str, tuple[torch.Tensor, int]]
    reads: DeviceSources
    watched: list[WatchedTensors]


@torch_pickle.collection_paused()
def captured(
    state: Any,
    rank: int,
    world_size: int,
    rank_of: dict[int, int] | None,
    devices: Devices,
    *,
    differing: frozenset[str],
    watch: bool,
    checks_numbers: bool = False,
    parts: Collection[str] = (),
) -> Content:
    """Captures a state. Tensors that are contiguous, and on the host or on a readable GPU, are not
    copied.

    Args:
        state: see Checkpointer.save.
        rank, world_size, rank_of, checks_numbers: see flatten().
        devices: determines which devices' memory can be read later.
        differing: keys of tensors whose contents differ between ranks; the first rank's are saved.
        watch: record the tensors' versions, for a save that runs in parallel with training, and
            copy small tensors now.
        parts: the keys of the state that have files of their own.

    Raises:
        Exception: see Checkpointer.save.
    """
    flat = flatten(
        state,
        rank,
        world_size,
        first_rank=differing,
        rank_of=rank_of,
        checks_numbers=checks_numbers,
        apart=parts,
    )
    readable = devices.readable()
    objects = None
    if rank == 0:
        with _named({None: flat.objects}):
            objects = _objects(flat.objects, watch, readable)
    leaves = []
    for leaf in flat.leaves:
        local = copied_later(leaf.local, readable, watch)
        leaves.append(leaf if local is leaf.local else leaf._replace(local=local))
    watched = []
    if watch:
        versions = [(leaf.local, leaf.local._version) for leaf in leaves]
        names = {leaf.key: leaf.local for leaf in leaves}
        watched.append(WatchedTensors(versions, names, are_aliases=True))
    storages: Iterable[torch.UntypedStorage] = (leaf.local.untyped_storage() for leaf in leaves)
    if objects is not None:
        watched.append(WatchedTensors(objects.tensors, flat.objects if watch else None))
        storages = chain(storages, objects.storages())
    small = {
        name: (value, -1 if value.is_inference() else value._version)
        for name, value in flat.aside.items()
        if isinstance(value, torch.Tensor) and value.device.type in readable
    }
    storages = chain(storages, (value.untyped_storage() for value, _version in small.values()))
    description = Description(_texts(flat), differing)
    description.aside = {
        name: value for name, value in flat.aside.items() if not isinstance(value, torch.Tensor)
    }
    return Content(
        leaves,
        objects,
        _pickled(flat, parts),
        description,
        small,
        devices.reads(storages),
        watched,
    )


def _texts(flat: Flat) -> Callable[[], list[tuple[str, str]]]:
    """Returns a function that describes, as texts, everything that all ranks must have in
    common.
    """
    # The texts are made later, since the caller waits now. Until then no tensor must be referenced.
    rows = [(leaf.key, leaf.local.dtype, leaf.shape, leaf.placement) for leaf in flat.leaves]
    own, kinds = list(flat.per_rank), flat.kinds

    def texts() -> list[tuple[str, str]]:
        described = [
            (key, f"{str(dtype)[6:]} {list(shape)}, {placement}")
            for key, dtype, shape, placement in rows
        ]
        described += [(name, "a PerRank value") for name in own]
        return described + sorted(kind.text() for kind in kinds)

    return texts


def _pickled(flat: Flat, parts: Collection[str]) -> dict[str | None, bytes]:
    """Returns Content.per_rank."""
    values = {
        name: own.value.state_dict() if is_stateful(own.value) else own.value
        for name, own in flat.per_rank.items()
    }
    values = {k: v.value if isinstance(v, PerRank) else v for k, v in values.items()}
    divided: dict[str | None, dict[str, Any]] = {}
    for name, value in values.items():
        divided.setdefault(key_among(parts, name), {})[name] = value
    pickled = {}
    with _named(values):
        for part, members in divided.items():
            buffer = io.BytesIO()
            torch_save(members, buffer)
            pickled[part] = buffer.getvalue()
    return pickled


def _objects(nest: object, watch: bool, readable: frozenset[str]) -> torch_pickle.Capture:
    protocol = torch.serialization.DEFAULT_PROTOCOL
    return torch_pickle.capture(nest, pickle, protocol, False, watch, readable)


@telling
def _named(error: BaseException, nests: Mapping[Any, object]) -> None:
    """Adds the name of the value that caused a pickling error to the error. `nests` maps names to
    values.
    """
    if not isinstance(error, Exception):  # such as Ctrl-C, which must not pickle all of it again
        return
    refusals = (_refused(nest, name) for name, nest in nests.items())
    refused = next(filter(None, refusals), None)
    if refused is None or refused[0] is None:
        return
    name, value = refused
    advice = ""
    if isinstance(value, torch.Tensor) and type(value) not in PLAIN_TENSORS:
        advice = (
            f" (it is a tensor of the class {type(value).__name__}: leave it out of the state, and "
            "save its parts in a PerRank)"
        )
    raise retold(error, f"the value at {name!r} cannot be pickled: {error}{advice}") from error


def _refused(nest: object, name: str | None) -> tuple[str | None, object] | None:
    """Returns the first value in a nest that cannot be pickled, preceded by its name."""
    try:
        _objects(nest, False, frozenset({"cpu"}))
    except Exception:  # of any class: the value's own code raises it
        inner = items_in(nest) if type(nest) in (dict, list, tuple) else ()
        refusals = (_refused(value, below(name, str(key))) for key, value in inner)
        return next(filter(None, refusals), (name, nest))
    return None
