"""A training state as a tree: which of its leaves are tensors of the shards, which are objects.

Responsible for taking a state apart into named tensors with their place in a global tensor, values
of single ranks, and a nest of the rest; and for putting restored values back. It must not know
files, who writes what, or how ranks talk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats import safetensors
from fastckpt.formats.arrangement import SMALL_BYTES, SMALL_SUM_BYTES_MAX
from fastckpt.shards import Box, mesh_holders, shard_box

TENSOR, PER_RANK, ESCAPED = "fastckpt.tensor", "fastckpt.per_rank", "fastckpt.escaped"
_PLACEHOLDERS = frozenset({TENSOR, PER_RANK, ESCAPED})
DEPTH_MAX = 200
ATOMS = frozenset({int, float, bool, str, bytes, type(None)})  # of which long lists are made


class PerRank:
    """A value that each rank has its own of, such as the state of a random generator.

    Anything picklable. restore() puts back what this very rank saved; on a rank that the saving job
    did not have, `value` stays as it is and `found` is False.

    Attributes:
        value: the value.
        found: after restore() or load(): whether the checkpoint holds a value of this rank; None
            before.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.found: bool | None = None

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class Stored(NamedTuple):
    """A tensor of the shards, as its placeholder tells."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_of(value: object) -> Stored | None:
    """What a placeholder stands for; None if the value is none.

    Raises:
        CorruptCheckpoint: it is one that flatten() does not make.
    """
    if type(value) is not dict or TENSOR not in value:
        return None
    key, dtype, shape = value[TENSOR], value.get("dtype"), value.get("shape")
    try:
        if not isinstance(key, str):
            raise ValueError("its key is no string")
        safetensors.nbytes_of(dtype, shape, key)
    except ValueError as error:
        raise CorruptCheckpoint(f"a placeholder for a tensor is malformed: {error}") from None
    return Stored(key, safetensors.DTYPES[str(dtype)], tuple(shape or ()))


def _placeholder(leaf: Leaf) -> dict[str, Any]:
    dtype = safetensors.NAMES[leaf.local.dtype]
    return {TENSOR: leaf.key, "dtype": dtype, "shape": list(leaf.shape)}


class Leaf(NamedTuple):
    """One tensor of the shards, as this rank holds it.

    Attributes:
        key: its name, unique in the state: path components joined by "/".
        local: the part in this rank's memory; its size is the box's.
        shape: of the global tensor.
        box: the part of the global tensor that `local` is.
        holders: ranks that hold the same part, ascending; shared between leaves.
        placement: how the global tensor is spread, in words; equal on all ranks.
    """

    key: str
    local: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...]
    placement: str


@dataclass
class Flat:
    """A state taken apart.

    Attributes:
        leaves: tensors for the shards, in the order of the state.
        objects: the state with placeholders where leaves and values of single ranks were.
        per_rank: values of this rank, by name.
    """

    leaves: list[Leaf] = field(default_factory=list)
    objects: Any = None
    per_rank: dict[str, PerRank] = field(default_factory=dict)


def is_stateful(value: object) -> bool:
    """Whether an object is saved by its state_dict() and restored by its load_state_dict()."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def unwrapped(value: Any) -> Any:
    """The module inside a DistributedDataParallel, whose state has no prefix then."""
    if isinstance(value, torch.nn.parallel.DistributedDataParallel):
        return value.module
    return value


def is_sharded(value: object) -> bool:
    """Whether a tensor is a DTensor, of which each rank holds a part."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def flatten(
    state: object,
    rank: int,
    world_size: int,
    *,
    first_rank: frozenset[str] = frozenset(),
    rank_of: Mapping[int, int] | None = None,
) -> Flat:
    """Takes a state apart.

    Args:
        state: nested dicts, lists and tuples of tensors, DTensors, PerRank, objects with state_dict
            and load_state_dict, and anything picklable.
        rank, world_size: in the group that saves; plain tensors are the same on all its ranks.
        first_rank: keys of tensors of which only the first rank's copy counts.
        rank_of: rank in the group of a global rank; None where they are the same.

    Raises:
        TypeError: a DTensor with a placement that cannot be saved (Partial), or on a mesh that
            lacks ranks of the group or has others.
        ValueError: it is nested too deeply, or contains itself.
    """
    return _Flattening(rank, world_size, first_rank, rank_of).run(state)


class _Small(NamedTuple):
    """A tensor too small for the shards, unless there are too many of them."""

    tensor: torch.Tensor
    path: tuple[str, ...]


class _Flattening:
    """The state of one flatten()."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        first_rank: frozenset[str],
        rank_of: Mapping[int, int] | None,
    ) -> None:
        self.rank = rank
        self.everybody = tuple(range(world_size))
        self.first_rank = first_rank
        self.rank_of = rank_of
        self.flat = Flat()
        self.keys: set[str] = set()
        self.small: list[_Small] = []
        self.leaf_of: dict[tuple[Any, ...], Leaf] = {}
        self.meshes: dict[int, tuple[int, ...]] = {}
        self.holders: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def run(self, state: object) -> Flat:
        nest = self.visit(state, (), 0)
        sizes = [item.tensor.numel() * item.tensor.element_size() for item in self.small]
        left, moved = sum(sizes), set()
        for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
            if left <= SMALL_SUM_BYTES_MAX:
                break
            left -= sizes[number]
            moved.add(id(self.small[number]))
        self.flat.objects = self.settled(nest, moved)
        return self.flat

    def settled(self, value: Any, moved: set[int]) -> Any:
        """The nest with each small tensor in its place: here, or in the shards."""
        if type(value) is _Small:
            if id(value) in moved:
                return _placeholder(self._leaf(value.tensor, value.path))
            return _apart(value.tensor)
        if type(value) is dict:
            return {k: self.settled(v, moved) for k, v in value.items()}
        if type(value) is list:
            return [v if type(v) in ATOMS else self.settled(v, moved) for v in value]
        if type(value) is tuple:
            return tuple(self.settled(v, moved) for v in value)
        return value

    def visit(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise ValueError(f"state is nested more than {DEPTH_MAX} deep at {_joined(path)!r}")
        if isinstance(value, PerRank):
            name = self._unique(path)
            self.flat.per_rank[name] = value
            return {PER_RANK: name}
        if isinstance(value, torch.Tensor):
            if not is_sharded(value) and not _fits_shard(value):
                return value
            if is_sharded(value) or value.numel() * value.element_size() >= SMALL_BYTES:
                return _placeholder(self._leaf(value, path))
            self.small.append(_Small(value, path))
            return self.small[-1]
        if is_stateful(value):
            return self.visit(unwrapped(value).state_dict(), path, depth + 1)
        if type(value) in (dict, OrderedDict):
            nest = {k: self.visit(v, (*path, str(k)), depth + 1) for k, v in value.items()}
            return {ESCAPED: nest} if nest.keys() & _PLACEHOLDERS else nest
        if type(value) in (list, tuple):
            items = [
                v if type(v) in ATOMS else self.visit(v, (*path, str(i)), depth + 1)
                for i, v in enumerate(value)
            ]
            return items if type(value) is list else tuple(items)
        return value

    def _unique(self, path: tuple[str, ...]) -> str:
        key = base = _joined(path)
        number = 1
        while key in self.keys:  # 0 and "0" are two keys of a dict
            number += 1
            key = f"{base}#{number}"
        self.keys.add(key)
        return key

    def _leaf(self, tensor: Any, path: tuple[str, ...]) -> Leaf:
        """Adds a leaf; a tensor that stands in the state twice is saved once."""
        local = (tensor.to_local() if is_sharded(tensor) else tensor).detach()
        shape = tuple(tensor.shape)
        # Where a rank holds nothing of a tensor, which tensors are one must be told all the same.
        memory = local.data_ptr() if local.numel() else local.untyped_storage()._cdata
        identity = (memory, local.shape, local.stride(), local.dtype, shape)
        if identity in self.leaf_of:
            return self.leaf_of[identity]
        key = self._unique(path)
        if is_sharded(tensor):
            box, holders, placement = self._place(key, tensor)
            if box.sizes != tuple(local.shape) and (local.numel() or 0 not in box.sizes):
                raise TypeError(
                    f"{key!r} holds {tuple(local.shape)} here, but {placement} of {shape} means "
                    f"{box.sizes}: this placement cannot be saved"
                )
        else:
            box, placement = Box((0,) * len(shape), shape), "replicated"
            holders = (0,) if key in self.first_rank else self.everybody
        leaf = Leaf(key, local, shape, box, holders, placement)
        self.flat.leaves.append(leaf)
        self.leaf_of[identity] = leaf
        return leaf

    def _place(self, key: str, tensor: Any) -> tuple[Box, tuple[int, ...], str]:
        """The part of a DTensor in this rank, and who else has it."""
        box = dtensor_box(key, tensor)
        mesh = tensor.device_mesh
        if id(mesh) not in self.meshes:
            ranks = mesh.mesh.flatten().tolist()
            if self.rank_of is not None:
                ranks = [self.rank_of.get(rank, -1) for rank in ranks]
            if sorted(ranks) != list(self.everybody):
                raise TypeError(
                    f"{key!r} is spread over a mesh of {len(ranks)} ranks that are not the "
                    f"{len(self.everybody)} ranks of the group which saves it"
                )
            self.meshes[id(mesh)] = tuple(ranks)
        dims, _order = _dims(key, tensor.placements)
        identity = (id(mesh), tuple(dim is None for dim in dims))
        if identity not in self.holders:
            coordinate = tuple(mesh.get_coordinate())
            sizes = tuple(mesh.mesh.shape)
            self.holders[identity] = mesh_holders(self.meshes[id(mesh)], sizes, coordinate, dims)
        placement = f"{tuple(tensor.placements)} on a mesh {tuple(mesh.mesh.shape)}"
        return box, self.holders[identity], placement


def dtensor_box(key: str, tensor: Any) -> Box:
    """The part of the global tensor that a DTensor holds in this rank.

    Raises:
        TypeError: its placement is Partial, or unknown, or this rank is not in its mesh.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise TypeError(f"{key!r} is a DTensor on a mesh that lacks this rank")
    dims, order = _dims(key, tensor.placements)
    sizes = tuple(mesh.mesh.shape)
    return shard_box(
        tuple(tensor.shape),
        tuple(sizes[i] for i in order),
        tuple(coordinate[i] for i in order),
        tuple(dims[i] for i in order),
    )


def _dims(key: str, placements: Sequence[Any]) -> tuple[tuple[int | None, ...], list[int]]:
    """The tensor dimension that each mesh dimension shards, and in which order they apply."""
    dims: list[int | None] = []
    late = []
    for number, placement in enumerate(placements):
        if placement.is_replicate():
            dims.append(None)
        elif hasattr(placement, "dim") and not placement.is_partial():
            dims.append(int(placement.dim))
            # FSDP over TP shards what TP has sharded: the mesh dimension on its left applies last.
            if type(placement).__name__ == "_StridedShard":
                late.append(number)
        else:
            raise TypeError(
                f"{key!r} is a DTensor with placement {placement!r}: reduce it first, "
                "for example by redistribute() to Replicate or Shard"
            )
    order = [number for number in range(len(dims)) if number not in late]
    return tuple(dims), order + late[::-1]


def _fits_shard(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
        and safetensors.supported(tensor.dtype)
    )


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A small tensor without the large storage it may be a view of: pickle would write all that."""
    if tensor.untyped_storage().nbytes() < SMALL_BYTES:
        return tensor
    return tensor.detach().clone()


def _joined(path: Sequence[str]) -> str:
    return "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)


def fill(objects: Any, tensor: Callable[[Stored], Any], per_rank: Callable[[str], Any]) -> Any:
    """Puts values back where flatten() left placeholders.

    Args:
        objects: as in Flat, from a file.
        tensor, per_rank: give the value of a tensor, or of this rank under a name.

    Raises:
        IncompatibleCheckpoint: the nest is deeper than flatten() makes them.
        CorruptCheckpoint: a placeholder is malformed.
    """

    def visit(value: Any, depth: int) -> Any:
        if depth > 2 * DEPTH_MAX:
            raise IncompatibleCheckpoint("objects are nested too deeply")
        if type(value) is dict:
            stored = stored_of(value)
            if stored is not None:
                return tensor(stored)
            if isinstance(value.get(PER_RANK), str):
                return per_rank(value[PER_RANK])
            return {k: visit(v, depth + 1) for k, v in unescaped(value).items()}
        if type(value) is list:
            return [v if type(v) in ATOMS else visit(v, depth + 1) for v in value]
        if type(value) is tuple:
            return tuple(visit(v, depth + 1) for v in value)
        return value

    return visit(objects, 0)


def unescaped(value: Any) -> Any:
    """A user's dict that looked like a placeholder, as it was."""
    if type(value) is dict and len(value) == 1 and type(value.get(ESCAPED)) is dict:
        return value[ESCAPED]
    return value
