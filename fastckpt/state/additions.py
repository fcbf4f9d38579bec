"""The tensors that a restore adds because the state lacks them. They are created in the form in
which they were saved, if this job supports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from fastckpt.arguments.names import listed
from fastckpt.formats.partial_objects import notes_in
from fastckpt.formats.value_names import items_in
from fastckpt.plan.boxes import Box, shard_box, whole
from fastckpt.state.dtensors import PARTS, SPREAD, Spread, dtensor_part, local_of, part_kind
from fastckpt.state.kinds import PLAIN_TENSORS, is_sharded
from fastckpt.state.targets import Place, Target
from fastckpt.state.tree import (
    ATOMS,
    DEPTH_MAX,
    OwnValues,
    Parted,
    Stored,
    is_stateful,
    parted_of,
    stored_of,
    unescaped,
    unwrapped,
)


class NoMesh(Exception):
    """The state has no mesh on which a tensor can be created; the text is the reason."""


class Room(NamedTuple):
    """The place of a new DTensor: its mesh, its placements on the mesh, and this rank's part.

    Attributes:
        mesh, placements: see DTensor.
        shape: the shape of the complete tensor.
        box: this rank's part.
        device: the device of the part's memory.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    box: Box
    device: torch.device

    def tensor(self, local: torch.Tensor) -> Any:
        """Returns the DTensor whose part on this rank is `local`."""
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.shape, device="meta").stride()
        with torch.no_grad():
            dtensor = DTensor.from_local(
                local,
                self.mesh,
                self.placements,
                run_check=False,
                shape=torch.Size(self.shape),
                stride=stride,
            )
            # from_local() moves parts to the mesh's device, from which FSDP may have offloaded.
            return dtensor if local_of(dtensor).device == self.device else dtensor.to(self.device)


class Meshes:
    """The meshes of the DTensors in a state.

    Args:
        state, saved: see Template.
    """

    def __init__(self, state: Any, saved: Any) -> None:
        self._devices: dict[Any, torch.device] = {}  # of the parts, by mesh
        self._is_plain = False  # whether it has a plain tensor where a DTensor was saved
        self._is_new = not has_spread(saved)
        for tensor, stored in _pairs(state, saved, 0):
            if not is_sharded(tensor):
                self._is_plain = self._is_plain or has_spread(stored)
            elif tensor.device_mesh.get_coordinate() is not None:
                self._devices.setdefault(tensor.device_mesh, local_of(tensor).device)

    @property
    def are_new(self) -> bool:
        """Whether this job has DTensors, and the job that saved had none."""
        return self._is_new and bool(self._devices)

    def room(self, shape: tuple[int, ...], spread: Spread) -> Room | None:
        """Returns the place of a new DTensor; None if this job uses plain tensors instead.

        Raises:
            NoMesh: the state has no matching mesh, or several.
        """
        if not self._devices:
            if self._is_plain or not _is_distributed():
                return None
            raise NoMesh("no tensor of the state is on a mesh of this job")
        mesh = self._mesh(spread)
        sizes, coordinate, order = tuple(mesh.mesh.shape), mesh.get_coordinate(), spread.order
        box = shard_box(
            shape,
            [sizes[number] for number in order],
            [coordinate[number] for number in order],
            [spread.dims[number] for number in order],
        )
        return Room(mesh, _placements(sizes, spread), shape, box, self._devices[mesh])

    def _mesh(self, spread: Spread) -> Any:
        """Returns the mesh most similar to the one on which a tensor was saved."""
        fitting = [mesh for mesh in self._devices if mesh.ndim == len(spread.sizes)]
        named = [mesh for mesh in fitting if tuple(mesh.mesh_dim_names or ()) == spread.names]
        fitting = named or fitting
        if len(fitting) > 1:
            fitting = [mesh for mesh in fitting if tuple(mesh.mesh.shape) == spread.sizes]
        if len(fitting) != 1:
            there = ", ".join(str(tuple(mesh.mesh.shape)) for mesh in self._devices)
            raise NoMesh(f"the state must have exactly one matching mesh, and has {there}")
        return fitting[0]


def _placements(sizes: tuple[int, ...], spread: Spread) -> tuple[Any, ...]:
    """Returns the placements of a spread on a mesh with other sizes."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements: list[Any] = []
    for number, (dim, is_late) in enumerate(zip(spread.dims, spread.strided, strict=True)):
        if dim is None:
            placements.append(Replicate())
        elif is_late:
            right = range(number + 1, len(sizes))
            parts = prod(sizes[other] for other in right if spread.dims[other] == dim)
            placements.append(_StridedShard(dim, split_factor=parts))
        else:
            placements.append(Shard(dim))
    return tuple(placements)


def _pairs(value: Any, saved: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """Yields the tensors of a state, each with the value saved in its place. An optimizer may have
    no tensors yet, so its parameters are yielded with everything that was saved of the optimizer.
    """
    if depth > DEPTH_MAX:
        return
    value, saved = unwrapped(value), unescaped(saved)
    if isinstance(value, torch.Tensor):
        yield value, saved
        return
    if isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from ((parameter, saved) for parameter in group["params"])
    nest = value.state_dict() if is_stateful(value) else value
    if isinstance(nest, dict | list | tuple):
        theirs = dict(items_in(saved)) if isinstance(saved, dict | list | tuple) else {}
        for key, item in items_in(nest):
            yield from _pairs(item, theirs.get(key), depth + 1)


def has_spread(saved: Any) -> bool:
    """Returns whether the saved value contains a DTensor."""
    ahead, visited = [saved], set[int]()
    while ahead:
        value = ahead.pop()
        if not isinstance(value, dict | list | tuple) or id(value) in visited:
            continue
        if isinstance(value, dict) and SPREAD in value:
            return True
        visited.add(id(value))
        ahead += [item for _, item in items_in(value) if type(item) not in ATOMS]
    return False


def _is_distributed() -> bool:
    """Returns whether this process can have a mesh."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


_HOW = (
    "Add an object on that mesh, such as the model, to the state; or let the object that owns "
    "the tensors create them before the restore (an optimizer does so in a step with zero "
    "gradients); or read complete tensors with load()"
)


class Additions:
    """The tensors that one restore adds to a state.

    Args:
        state, saved, per_rank, find: see Template.
        targets: receives the targets to be read.
        refused: receives the names of the values that weights_only left out, each with its maker.
    """

    def __init__(
        self,
        state: Any,
        saved: Any,
        per_rank: OwnValues | None,
        find: Callable[[Sequence[Place]], object],
        targets: list[Target],
        refused: list[tuple[str, str]],
    ) -> None:
        self._state, self._saved, self._per_rank, self._find = state, saved, per_rank, find
        self._targets, self._refused = targets, refused
        self._made: dict[str, Any] = {}  # by key, or by the name of parts
        self._known_meshes: Meshes | None = None
        self._reasons: dict[str, list[str]] = {}  # names of what cannot be added, by the reason

    def misfits(self) -> list[str]:
        """Returns messages about the tensors that cannot be added."""
        reasons = self._reasons.items()
        return [f"{listed(map(repr, names))} {reason}" for reason, names in reasons]

    def check(self, saved: Any, name: str) -> None:
        """Records the tensors of an optimizer's state whose placement is unknown, because the job
        that saved them had no DTensors and this job has. Scalars need none, as they are the same on
        all ranks.
        """
        if _has_numbers(saved) and self._meshes.are_new:
            self._cannot(
                name,
                "was saved by a job without DTensors, but this job uses them, so its placement "
                "is unknown. Let the object that owns it create its state before the restore (an "
                "optimizer does so in a step with zero gradients), or leave it out of the state",
            )

    def tensor(self, stored: Stored, spread: Spread | None) -> Any:
        """Returns a new tensor for a tensor of the shards, and adds its target. It is a DTensor if
        a DTensor was saved and this job has DTensors.
        """
        if stored.key not in self._made:
            self._made[stored.key] = self._tensor(stored, spread)
        return self._made[stored.key]

    def _tensor(self, stored: Stored, spread: Spread | None) -> Any:
        key, dtype, shape = stored
        if spread is not None and spread.kind:
            return self._cannot(
                key,
                f"was saved as a DTensor whose parts are {spread.kind}, which only the object "
                "that owns them can create: let it create its state before the restore",
            )
        try:
            room = None if spread is None else self._meshes.room(shape, spread)
        except NoMesh as error:
            return self._cannot(key, f"was saved as a DTensor, {spread}, but {error}. {_HOW}")
        box = whole(shape) if room is None else room.box
        self._find([(*stored, box)])  # raises before memory is taken in vain
        device = "cpu" if room is None else room.device
        result = local = torch.empty(box.sizes, dtype=dtype, device=device)
        if room is not None:
            result = room.tensor(local)
            local, _box = dtensor_part(key, result)
        self._targets.append(Target(*stored, box, local))
        return result

    def parted(self, parted: Parted) -> Any:
        """Returns a DTensor made from the part that this rank saved."""
        if parted.name not in self._made:
            self._made[parted.name] = self._parted(*parted)
        return self._made[parted.name]

    def _parted(self, name: str, shape: tuple[int, ...], spread: Spread) -> Any:
        try:
            room = self._meshes.room(shape, spread)
        except NoMesh as error:
            return self._cannot(name, f"was saved as a DTensor, {spread}, but {error}. {_HOW}")
        box = whole(shape) if room is None else room.box
        part = self.part(Parted(name, shape, spread), box)
        return part if part is None or room is None else room.tensor(part)

    def part(self, parted: Parted, box: Box) -> Any:
        """Returns the saved part of a DTensor at this place; None if no rank saved it."""
        values = self._per_rank
        assert values is not None
        own = None if values.own is None else values.own.get(parted.name)
        if notes := [*notes_in(own, parted.name)]:
            self._refused += notes
            return None
        piece = _at(box, [own])
        piece = _at(box, values.of_all(parted.name)) if piece is None else piece
        if piece is None:
            self._cannot(
                parted.name,
                f"was saved as a DTensor, {parted.spread}, whose parts are {parted.spread.kind} "
                "and cannot be divided differently: restore it on the same number of ranks with "
                "the same placements, or leave the object that owns it out of the state",
            )
        return piece

    def _cannot(self, name: str, reason: str) -> None:
        self._reasons.setdefault(reason, []).append(name)

    @property
    def _meshes(self) -> Meshes:
        if self._known_meshes is None:
            self._known_meshes = Meshes(self._state, self._saved)
        return self._known_meshes


def saved_kind(saved: Any) -> str | None:
    """Returns the part_kind() of a saved tensor; None for nested tensors and other values."""
    if isinstance(saved, torch.Tensor):
        if saved.is_nested:
            return None
        return "" if type(saved) in PLAIN_TENSORS else type(saved).__qualname__
    if (parted := parted_of(saved)) is not None:
        return parted.spread.kind
    return None if stored_of(saved) is None else str(saved.get(PARTS, ""))


def saved_shape(saved: Any) -> tuple[int, ...] | None:
    """Returns the shape of a saved tensor; None for nested tensors and other values."""
    if isinstance(saved, torch.Tensor):
        return None if saved.is_nested else tuple(saved.shape)
    if (parted := parted_of(saved)) is not None:
        return parted.shape
    return None if (stored := stored_of(saved)) is None else stored.shape


def is_other(tensor: Any, saved: Any) -> bool:
    """Returns whether a saved value cannot fill a tensor, and can only replace it. This is true if
    the value is not a tensor, or if only a class can interpret one of the two.
    """
    mine, theirs = part_kind(tensor), saved_kind(saved)
    if theirs is None:
        return True
    return bool(mine or theirs) and (mine != theirs or stored_of(saved) is None)


def _has_numbers(saved: Any) -> bool:
    """Returns whether the saved value contains floating-point tensors with several elements."""
    ahead, visited = [saved], set[int]()
    while ahead:
        value = ahead.pop()
        tensor = value if isinstance(value, torch.Tensor) else stored_of(value)
        if tensor is not None:
            if tensor.dtype.is_floating_point and prod(tensor.shape) > 1:
                return True
        elif isinstance(value, dict | list | tuple) and id(value) not in visited:
            visited.add(id(value))
            ahead += [item for _, item in items_in(value) if type(item) not in ATOMS]
    return False


def _at(box: Box, parts: Sequence[Any]) -> Any:
    """Returns the part at this place, from several saved parts of a DTensor."""
    for part in parts:
        local = part.get("local") if isinstance(part, dict) else None
        is_alike = isinstance(local, torch.Tensor) and tuple(local.shape) == box.sizes
        if is_alike and part["offsets"] == [*box.offsets]:
            return local
    return None
