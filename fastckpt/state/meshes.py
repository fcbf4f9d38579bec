"""The meshes of a state, and the DTensors that are made on them where the state lacks those that
were saved. It must not know files, nor read tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch

from fastckpt.formats.value_names import items_in
from fastckpt.plan.boxes import Box, shard_box
from fastckpt.state.dtensors import local_of
from fastckpt.state.kinds import is_sharded
from fastckpt.state.spread import SPREAD, Spread
from fastckpt.state.tree import ATOMS, DEPTH_MAX, is_stateful, unescaped, unwrapped


class NoMesh(Exception):
    """The state has no mesh on which a tensor can be made; the text says why."""


class Room(NamedTuple):
    """The place of a new DTensor: its mesh, its placements there, and this rank's part.

    Attributes:
        mesh, placements: as DTensor has them.
        shape: of the whole tensor.
        box: this rank's part.
        device: of the part's memory.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    box: Box
    device: torch.device

    def tensor(self, local: torch.Tensor) -> Any:
        """Returns the DTensor of which this rank's part is `local`."""
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.shape, device="meta").stride()
        with torch.no_grad():
            made = DTensor.from_local(
                local,
                self.mesh,
                self.placements,
                run_check=False,
                shape=torch.Size(self.shape),
                stride=stride,
            )
            # from_local() moves parts to the mesh's device, from which FSDP may have offloaded.
            return made if local_of(made).device == self.device else made.to(self.device)


class Meshes:
    """The meshes of the DTensors in a state.

    Args:
        state, saved: as Template's.
    """

    def __init__(self, state: Any, saved: Any) -> None:
        self._devices: dict[Any, torch.device] = {}  # of the parts, by mesh
        self._is_plain = False  # whether it has a plain tensor where a DTensor was saved
        self._is_new = not has_spread(saved)
        for tensor, its in _pairs(state, saved, 0):
            if not is_sharded(tensor):
                self._is_plain = self._is_plain or has_spread(its)
            elif tensor.device_mesh.get_coordinate() is not None:
                self._devices.setdefault(tensor.device_mesh, local_of(tensor).device)

    @property
    def are_new(self) -> bool:
        """Whether this job has DTensors, and the one that saved had none."""
        return self._is_new and bool(self._devices)

    def room(self, shape: tuple[int, ...], spread: Spread) -> Room | None:
        """Returns where a saved DTensor is to be made; None: this job has plain tensors instead.

        Raises:
            NoMesh: the state has no mesh for it, or several.
        """
        if not self._devices:
            if self._is_plain or not _is_distributed():
                return None
            raise NoMesh("the state has no tensor that tells the mesh of this job")
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
        """Returns the mesh that is most like the one on which a tensor was saved."""
        fitting = [mesh for mesh in self._devices if mesh.ndim == len(spread.sizes)]
        named = [mesh for mesh in fitting if tuple(mesh.mesh_dim_names or ()) == spread.names]
        fitting = named or fitting
        if len(fitting) > 1:
            fitting = [mesh for mesh in fitting if tuple(mesh.mesh.shape) == spread.sizes]
        if len(fitting) != 1:
            there = ", ".join(str(tuple(mesh.mesh.shape)) for mesh in self._devices)
            raise NoMesh(f"the meshes of the state are {there}, and not one of them is like that")
        return fitting[0]


def _placements(sizes: tuple[int, ...], spread: Spread) -> tuple[Any, ...]:
    """Returns the placements of a spread on a mesh of other sizes."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: list[Any] = []
    for number, (dim, is_late) in enumerate(zip(spread.dims, spread.strided, strict=True)):
        if dim is None:
            found.append(Replicate())
        elif is_late:
            right = range(number + 1, len(sizes))
            parts = prod(sizes[other] for other in right if spread.dims[other] == dim)
            found.append(_StridedShard(dim, split_factor=parts))
        else:
            found.append(Shard(dim))
    return tuple(found)


def _pairs(value: Any, saved: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """Yields the tensors of a state, each with what was saved in its place: of an optimizer, which
    may have none yet, its parameters with all that was saved of it.
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
    """Returns whether a DTensor is in what was saved."""
    ahead, seen = [saved], set[int]()
    while ahead:
        value = ahead.pop()
        if not isinstance(value, dict | list | tuple) or id(value) in seen:
            continue
        if isinstance(value, dict) and SPREAD in value:
            return True
        seen.add(id(value))
        ahead += [item for _, item in items_in(value) if type(item) not in ATOMS]
    return False


def _is_distributed() -> bool:
    """Returns whether this process can have a mesh at all."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
