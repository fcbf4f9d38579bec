"""The parts of DTensors: which part this rank holds, which ranks hold the same part, and which
DTensors are refused.

The module alone accesses a DTensor's mesh and placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import torch

from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats import safetensors
from fastckpt.formats.strict_json import decode, encode
from fastckpt.plan.boxes import Box, mesh_holders, shard_box
from fastckpt.state.kinds import NO_MEMORY, PLAIN_TENSORS, is_sharded, memory_of

# ---- The way a DTensor is spread over a mesh, as the placeholder of a checkpoint says it.

SPREAD, PARTS = "spread", "parts"  # keys of a placeholder
_CHARACTERS_MAX = 4096  # of the text under SPREAD


class Spread(NamedTuple):
    """How a saved DTensor was spread over a mesh.

    Attributes:
        sizes, names: the mesh dimensions' sizes and names; a name may be None.
        dims: for each mesh dimension, the tensor dimension that it shards; None if it replicates.
        strided: for each mesh dimension, whether it is applied after those to its right
            (_StridedShard).
        kind: the class name of the parts; "" if they are plain tensors.
    """

    sizes: tuple[int, ...]
    names: tuple[str | None, ...]
    dims: tuple[int | None, ...]
    strided: tuple[bool, ...]
    kind: str = ""

    def __str__(self) -> str:
        placements = ", ".join("R" if dim is None else f"S({dim})" for dim in self.dims)
        return f"({placements}) on a mesh {self.sizes}"

    @property
    def order(self) -> list[int]:
        """The mesh dimensions in the order in which they divide the tensor."""
        late = [number for number, is_late in enumerate(self.strided) if is_late]
        return [number for number in range(len(self.dims)) if number not in late] + late[::-1]

    def text(self) -> str:
        """Returns the text of the spread for a placeholder's SPREAD entry: a row for each mesh
        dimension.
        """
        columns = zip(self.sizes, self.names, self.dims, self.strided, strict=True)
        return encode([*columns])


def spread_of(placeholder: Mapping[str, Any]) -> Spread | None:
    """Returns the spread in a placeholder; None if a plain tensor was saved.

    Raises CorruptCheckpoint for a spread that no save writes.
    """
    text, kind = placeholder.get(SPREAD), placeholder.get(PARTS, "")
    if text is None:
        return None
    ndim, rows = len(shape_of(placeholder)), None
    if type(text) is str and len(text) <= _CHARACTERS_MAX and type(kind) is str:
        with suppress(ValueError, RecursionError):  # it is no JSON
            rows = decode(text.encode())
    if type(rows) is not list or not rows or not all(_is_row(row, ndim) for row in rows):
        raise CorruptCheckpoint("a placeholder for a DTensor has a malformed mesh or placements")
    sizes, names, dims, strided = zip(*rows, strict=True)
    return Spread(sizes, names, dims, strided, kind)


def shape_of(placeholder: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the shape of the complete tensor. Raises CorruptCheckpoint if the shape is
    malformed.
    """
    shape = placeholder.get("shape")
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise CorruptCheckpoint("a placeholder for a DTensor is malformed: its shape")
    return tuple(shape)


def _is_row(row: object, ndim: int) -> bool:
    if type(row) is not list or len(row) != 4:
        return False
    size, name, dim, strided = row
    return (
        type(size) is int
        and size > 0
        and isinstance(name, str | None)
        and (dim is None or (type(dim) is int and 0 <= dim < ndim))
        and type(strided) is bool
    )


class OtherRanks(TypeError):
    """A DTensor is not spread over exactly the ranks that save it."""


class Part(NamedTuple):
    """A rank's part of a DTensor.

    Attributes:
        local, box: its memory, and its place in the global tensor.
        holders: the ranks of the group with the same part, ascending; equal tuples are one object.
        placement: a description of the placement, which is the same on all ranks.
        spread: the placement for a placeholder; one object for all tensors with the same spread.
        identity: equal for DTensors that share their memory; on all ranks, the same ones are equal.
    """

    local: torch.Tensor
    box: Box
    holders: tuple[int, ...]
    placement: str
    spread: str
    identity: tuple[Any, ...]


class _Alike(NamedTuple):
    """The facts that depend only on mesh, placements and shape, which many tensors of a model
    share.
    """

    box: Box
    holders: tuple[int, ...]
    placement: str
    spread: str
    is_empty_somewhere: bool


class Parts:
    """Finds this rank's parts of DTensors, and keeps the DTensors alive. `rank_of` maps global
    ranks to ranks in the group; None if they are the same.
    """

    def __init__(self, world_size: int, rank_of: Mapping[int, int] | None) -> None:
        self.everybody = tuple(range(world_size))
        self._rank_of = rank_of
        self._ranks: dict[Any, tuple[int, ...]] = {}
        self._holders: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._alike: dict[tuple[Any, ...], _Alike] = {}
        self._some: dict[tuple[int, ...], tuple[int, ...]] = {}  # the objects of equal tuples
        self._kept: list[Any] = []  # keeps tensors alive, so that their ids stay theirs

    def of(self, key: str, tensor: Any, among: tuple[int, ...] | None = None) -> Part:
        """Returns this rank's part of a DTensor, which is spread over the ranks `among` of the
        group, or over all of them (None). `key` is its name in messages.

        Raises:
            TypeError: see dtensor_part(); or shards cannot hold its elements.
            OtherRanks: its mesh has other ranks.
        """
        self._kept.append(tensor)
        mesh, placements, shape = tensor.device_mesh, tuple(tensor.placements), tensor.shape
        spread_by = (mesh, placements, shape, getattr(tensor._spec, "shard_order", None), among)
        alike = self._alike.get(spread_by)
        if alike is None:
            among = self.everybody if among is None else self.some(among)
            alike = self._alike[spread_by] = self._facts(key, tensor, among)
        local = local_of(tensor)
        _check_local(key, tensor, local, alike.box)
        is_told = not (alike.is_empty_somewhere or wraps_others(local))
        if not wraps_others(local):
            _check_storable(key, local)
        # If some ranks have no memory to tell tensors by, no rank uses its own.
        memory = memory_of(local) if is_told else None
        identity = (id(tensor),) if memory is None else (memory, spread_by)
        return Part(local, alike.box, alike.holders, alike.placement, alike.spread, identity)

    def some(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Returns a tuple of ranks, which is always the same object for equal tuples."""
        return self._some.setdefault(ranks, ranks)

    def _facts(self, key: str, tensor: Any, among: tuple[int, ...]) -> _Alike:
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        box = box_on_rank(key, tensor, tuple(tensor.shape))
        if mesh not in self._ranks:
            ranks = mesh.mesh.flatten().tolist()
            if self._rank_of is not None:
                ranks = [self._rank_of.get(rank, -1) for rank in ranks]
            self._ranks[mesh] = tuple(ranks)
        if sorted(self._ranks[mesh]) != list(among):
            over = f"{key!r} is spread over a mesh of {len(self._ranks[mesh])} ranks"
            if len(self.everybody) == 1:
                raise OtherRanks(
                    f"{over}, but this process saves alone: pass group=, such as "
                    "torch.distributed.group.WORLD, on all of these ranks"
                )
            of_what = "saving group" if among is self.everybody else "pipeline stage that holds it"
            raise OtherRanks(
                f"{over}, but must be spread over the {len(among)} ranks of the {of_what}: "
                "distribute it over all dimensions of the mesh, with Replicate where ranks hold "
                "the same values"
            )
        sizes = tuple(mesh.mesh.shape)
        dims, order = _dims(key, tensor, sizes)
        layout = (mesh, tuple(dim is None for dim in dims))
        if layout not in self._holders:
            holders = mesh_holders(self._ranks[mesh], sizes, tuple(mesh.get_coordinate()), dims)
            self._holders[layout] = (
                self.everybody if holders == self.everybody else self.some(holders)
            )
        words = f"{placements} on a mesh {sizes}"
        if among is not self.everybody:
            words += f" of the ranks {among}"
        spread = Spread(sizes, _names(mesh), dims, _strided(tensor))
        is_empty_somewhere = _is_empty_somewhere(tensor.shape, dims, order, sizes)
        return _Alike(box, self._holders[layout], words, spread.text(), is_empty_somewhere)


def _is_empty_somewhere(
    shape: Sequence[int], dims: Sequence[int | None], order: Sequence[int], sizes: Sequence[int]
) -> bool:
    """Returns whether, on a mesh of these sizes, some rank has no element of a tensor."""
    ends = [{size} for size in shape]  # sizes that occur along each dimension
    for number in order:
        dim = dims[number]
        if dim is not None:
            ends[dim] = {part for size in ends[dim] for part in _chunks(size, sizes[number])}
    return any(0 in found for found in ends)


def dtensor_identity(tensor: Any) -> object:
    """Returns an identity that is equal for DTensors with the same elements in memory, while they
    live. On all ranks, the same DTensors are equal.
    """
    mesh, placements, shape = tensor.device_mesh, tuple(tensor.placements), tensor.shape
    sizes = tuple(mesh.mesh.shape)
    try:
        dims, order = _dims("it", tensor, sizes)
    except TypeError:  # such tensors cannot be filled, and need not be told apart
        return id(tensor)
    # As in Parts.of().
    is_told = not _is_empty_somewhere(shape, dims, order, sizes)
    memory = memory_of(local_of(tensor)) if is_told else None
    return id(tensor) if memory is None else (memory, mesh, placements, shape)


def identity_of(tensor: torch.Tensor) -> object:
    """Returns a key that is equal for tensors that are the same elements in memory."""
    if torch.nn.parameter.is_lazy(tensor):
        return id(tensor)
    return dtensor_identity(tensor) if is_sharded(tensor) else memory_of(tensor) or id(tensor)


def dtensor_part(key: str, tensor: Any) -> tuple[torch.Tensor, Box]:
    """Returns a DTensor's memory on this rank, and its place in the global tensor.

    Raises:
        TypeError: its placement is Partial or unknown, does not divide it into rectangles, or does
            not match its memory; or this rank is not in its mesh.
    """
    box, local = box_on_rank(key, tensor, tuple(tensor.shape)), local_of(tensor)
    _check_local(key, tensor, local, box)
    return local, box


def local_of(tensor: Any) -> torch.Tensor:
    """Returns this rank's part of a DTensor. If a collective is still computing it, waits for the
    result.
    """
    with torch.no_grad():  # else to_local() adds a node to a graph
        local: torch.Tensor = tensor.to_local()
    if type(local) not in PLAIN_TENSORS and hasattr(local, "wait"):
        arrived: torch.Tensor = local.wait()  # a collective may still be computing it
        return arrived
    return local


def wraps_others(local: torch.Tensor) -> bool:
    """Returns whether a rank's part of a DTensor stores its elements in other tensors, like
    quantized tensors, so that only its class can interpret them.
    """
    kind = type(local)
    if kind in PLAIN_TENSORS:
        return False
    has_parts = hasattr(kind, "__tensor_flatten__")
    return has_parts or (local.numel() > 0 and not local.is_meta and memory_of(local) is None)


def part_kind(tensor: Any) -> str:
    """Returns the name of a tensor's class or, for a DTensor, that of its parts; "" for plain
    tensors.
    """
    kind = type(local_of(tensor)) if is_sharded(tensor) else type(tensor)
    return "" if kind in PLAIN_TENSORS else kind.__qualname__


def empty_beside(tensor: Any, dtype: torch.dtype) -> Any:
    """Returns a new tensor in plain memory, with the shape, device and placement of another
    tensor.
    """
    tensor = tensor.detach()
    if not part_kind(tensor):
        return torch.empty_like(tensor, dtype=dtype)
    if not is_sharded(tensor):
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    local = local_of(tensor)
    empty = torch.empty(local.shape, dtype=dtype, device=local.device)
    return (
        type(tensor)
        .from_local(
            empty,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        .to(local.device)
    )


def box_on_rank(key: str, tensor: Any, shape: tuple[int, ...]) -> Box:
    """Returns this rank's part of a tensor of some shape that is spread like a DTensor."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise TypeError(
            f"{key!r} is a DTensor on a mesh that does not include this rank: save and restore "
            "it on the ranks of its mesh"
        )
    sizes = tuple(mesh.mesh.shape)
    dims, order = _dims(key, tensor, sizes)
    return shard_box(
        shape,
        tuple(sizes[i] for i in order),
        tuple(coordinate[i] for i in order),
        tuple(dims[i] for i in order),
    )


def _check_local(key: str, tensor: Any, local: torch.Tensor, box: Box) -> None:
    """Raises TypeError if a part's sizes differ from those that its placement implies."""
    if box.sizes != tuple(local.shape) and (local.numel() or 0 not in box.sizes):
        raise TypeError(
            f"{key!r} has a part of shape {tuple(local.shape)} on this rank, but "
            f"{tuple(tensor.placements)} of {tuple(tensor.shape)} on a mesh "
            f"{tuple(tensor.device_mesh.mesh.shape)} implies {box.sizes}: this placement cannot "
            "be saved or restored"
        )


def _check_storable(key: str, local: torch.Tensor) -> None:
    """Raises TypeError if shards cannot hold the elements."""
    kind, advice = None, "convert it first, for example by view_as_real() if it is complex"
    if not safetensors.supported(local.dtype):
        kind = f"of {local.dtype}"
    elif local.layout != torch.strided:
        kind = f"of layout {local.layout}"
    elif local.device.type == "meta":
        kind = "on the meta device"
    elif local.numel() and memory_of(local) is None:
        kind, advice = NO_MEMORY, "gather it first"
    if kind is not None:
        raise TypeError(f"{key!r} is a DTensor {kind}, which shards cannot hold: {advice}")


def _chunks(size: int, ranks: int) -> set[int]:
    """Returns the sizes into which shard_box() divides a dimension: full, smaller and empty
    ones.
    """
    chunk = -(-size // ranks)
    positions = (0, min(size // max(1, chunk), ranks - 1), ranks - 1)
    return {max(0, min(chunk, size - position * chunk)) for position in positions}


def _dims(key: str, tensor: Any, sizes: Sequence[int]) -> tuple[tuple[int | None, ...], list[int]]:
    """Returns the tensor dimension that each mesh dimension shards, and the order in which they
    apply.
    """
    dims: list[int | None] = []
    late = [number for number, is_late in enumerate(_strided(tensor)) if is_late]
    for placement in tensor.placements:
        if placement.is_replicate():
            dims.append(None)
        elif hasattr(placement, "dim") and not placement.is_partial():
            dim = int(placement.dim)
            dims.append(dim + tensor.dim() if dim < 0 else dim)
        else:
            raise TypeError(
                f"{key!r} is a DTensor with placement {placement!r}: reduce it first, "
                "for example by redistribute() to Replicate or Shard"
            )
    for number in late:
        # With any other split factor a rank holds rows at intervals, which are no rectangle.
        parts = prod(sizes[i] for i in range(number + 1, len(dims)) if dims[i] == dims[number])
        if tensor.placements[number].split_factor != parts:
            _refuse_placement(key, tensor, "under which a rank's part is not a rectangle")
    orders = getattr(getattr(tensor, "_spec", None), "shard_order", None) or ()
    if not late and any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in orders):
        _refuse_placement(key, tensor, f"applied in the order {orders}")
    order = [number for number in range(len(dims)) if number not in late]
    return tuple(dims), order + late[::-1]


def _strided(tensor: Any) -> tuple[bool, ...]:
    """Returns, for each mesh dimension, whether it is applied after those to its right. FSDP over
    TP, for example, shards tensors that TP has already sharded.
    """
    return tuple(type(placement).__name__ == "_StridedShard" for placement in tensor.placements)


def _names(mesh: Any) -> tuple[str | None, ...]:
    return tuple(mesh.mesh_dim_names or [None] * mesh.ndim)


def _refuse_placement(key: str, tensor: Any, why: str) -> None:
    raise TypeError(
        f"{key!r} is a DTensor with placements {tuple(tensor.placements)}, {why}: this cannot be "
        "saved or restored; redistribute() it to Shard or Replicate first"
    )
