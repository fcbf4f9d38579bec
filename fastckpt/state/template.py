"""The restore into a state that exists: which stored value goes where in it.

Responsible for walking a state beside the nest that was saved, for making tensors that the state
lacks, and for putting values in place once all have been read. It must not know files or ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fastckpt.arguments.near_names import instead_of, listed
from fastckpt.errors import IncompatibleCheckpoint
from fastckpt.plan.boxes import Box
from fastckpt.state.dtensors import dtensor_part, is_sharded
from fastckpt.state.targets import Place, Target
from fastckpt.state.tree import (
    ATOMS,
    DEPTH_MAX,
    PER_RANK,
    TENSOR,
    PerRank,
    Stored,
    fill,
    is_stateful,
    stored_of,
    unescaped,
    unwrapped,
)


def whole(shape: tuple[int, ...]) -> Box:
    """Returns the box of a whole tensor."""
    return Box((0,) * len(shape), shape)


class Template:
    """A state to restore, beside what was saved. Only the memory of targets changes before put().

    Args:
        state, saved: as given to Checkpointer.restore; and the nest of objects of a step.
        per_rank: this rank's values by name; None if the saving job had no such rank.
        find: raises unless the step holds all the parts of tensors it is given (StepReader.find).
        where: the path of the step, for messages.

    Attributes:
        targets: the parts of tensors that must be read before put().

    Raises:
        IncompatibleCheckpoint: the state has something that was not saved, or of another shape.
        TypeError: it has a tensor that nothing can be put into.
    """

    def __init__(
        self,
        state: Any,
        saved: Any,
        per_rank: Mapping[str, Any] | None,
        find: Callable[[Sequence[Place]], object],
        where: str,
    ) -> None:
        self._where = where
        self.targets: list[Target] = []
        self._find = find
        self._per_rank = per_rank
        self._actions: list[Callable[[], object]] = []
        self._ignored: list[str] = []
        self._whole: dict[str, torch.Tensor] = {}
        self._saved = saved
        self._filled: dict[int, Any] = {}  # by identity; self._saved keeps the objects alive
        if not isinstance(state, dict | list) and not is_stateful(state):
            raise TypeError(f"state is {type(state).__name__}, must be a dict, a list or stateful")
        new = self._visit(state, saved, "state", 0)
        if new is not state and isinstance(state, list):
            if not isinstance(new, list):
                raise self._misfit(f"state is a list, in the checkpoint {_described(new)}")
            self._actions.append(lambda: state.__setitem__(slice(None), new))

    @property
    def ignored(self) -> str:
        """The names of saved values that the state does not ask for; "" if there are none."""
        return listed(self._ignored)

    def _misfit(self, text: str) -> IncompatibleCheckpoint:
        return IncompatibleCheckpoint(f"{self._where!r} does not fit: {text}")

    def put(self) -> None:
        """Gives the values to the state; the targets have been read."""
        for action in self._actions:
            action()

    def _visit(self, value: Any, saved: Any, path: str, depth: int) -> Any:
        """Returns the value that belongs here after the restore: the old object where it can be."""
        if depth > DEPTH_MAX:
            raise self._misfit(f"{path} is nested more than {DEPTH_MAX} deep")
        if isinstance(value, PerRank):
            self._own_value(value, saved, path)
            return value
        if isinstance(value, torch.Tensor):
            self._tensor(value, saved, path)
            return value
        if is_stateful(value):
            self._stateful(value, saved, path, depth)
            return value
        if isinstance(value, dict) and (value or not depth):
            self._dict(value, unescaped(saved), path, depth)
            return value
        if isinstance(value, list | tuple) and _holds_tensors(value):
            if not isinstance(saved, list | tuple) or len(saved) != len(value):
                raise self._misfit(
                    f"{path} has {len(value)} items, the checkpoint {_described(saved)}"
                )
            items = [
                self._visit(item, saved[i], f"{path}[{i}]", depth + 1)
                for i, item in enumerate(value)
            ]
            if isinstance(value, list):
                self._actions.append(lambda: value.__setitem__(slice(None), items))
                return value
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        return self._loaded(saved)

    def _dict(self, value: dict[Any, Any], saved: Any, path: str, depth: int) -> None:
        if not isinstance(saved, dict):
            raise self._misfit(f"{path} is a dict, in the checkpoint {_described(saved)}")
        missing = [key for key in value if key not in saved]
        if missing:
            raise self._misfit(
                f"{path} has {missing[0]!r}"
                + (f" and {len(missing) - 1} more keys" if len(missing) > 1 else "")
                + ", which the checkpoint has not"
                + (instead_of(missing, saved) or ": restore it into a state as it was saved")
            )
        self._ignored += [f"{path}[{key!r}]" for key in saved if key not in value]
        for key, item in value.items():
            new = self._visit(item, saved[key], f"{path}[{key!r}]", depth + 1)
            if new is not item:
                self._actions.append(partial(value.__setitem__, key, new))

    def _own_value(self, value: PerRank, saved: Any, path: str) -> None:
        if not isinstance(saved, dict) or not isinstance(saved.get(PER_RANK), str):
            raise self._misfit(f"{path} is PerRank, in the checkpoint it is not")
        if self._per_rank is None or saved[PER_RANK] not in self._per_rank:
            self._actions.append(lambda: setattr(value, "found", False))
            return
        own = self._per_rank[saved[PER_RANK]]

        def put() -> None:
            if is_stateful(value.value):
                value.value.load_state_dict(own)
            else:
                value.value = own
            value.found = True

        self._actions.append(put)

    def _tensor(self, tensor: Any, saved: Any, path: str) -> None:
        """Makes a target or an action that fills a tensor with its part of a stored one."""
        if tensor.is_nested or torch.nn.parameter.is_lazy(tensor):
            raise TypeError(f"{path} has no shape (yet): it cannot be restored in place")
        stored, shape = stored_of(saved), tuple(tensor.shape)
        if stored is not None:
            found = stored.shape
        elif isinstance(saved, torch.Tensor):
            found = tuple(saved.shape)
        else:
            raise self._misfit(f"{path} is a tensor, in the checkpoint {_described(saved)}")
        if found != shape:
            raise self._misfit(f"{path} has shape {list(shape)}, in the checkpoint {list(found)}")
        local, box = tensor, whole(shape)
        if is_sharded(tensor):
            local, box = dtensor_part(path, tensor)
        _check_target(local, saved, path)
        if stored is not None:
            self.targets.append(Target(stored.key, local, shape, box))
            return
        part = saved
        if box != whole(shape):
            parts = zip(box.offsets, box.sizes, strict=True)
            part = saved[tuple(slice(offset, offset + size) for offset, size in parts)]

        def put() -> None:
            with torch.no_grad():
                local.copy_(part)

        if local.numel():
            self._actions.append(put)

    def _stateful(self, value: Any, saved: Any, path: str, depth: int) -> None:
        """Restores an object by its load_state_dict(), after its tensors in place."""
        value = unwrapped(value)
        own = value.state_dict()
        saved = unescaped(saved)
        if not isinstance(own, dict) or not (own or isinstance(saved, dict)):
            loaded = self._loaded(saved)
            self._actions.append(lambda: value.load_state_dict(loaded))
            return
        if not isinstance(saved, dict):
            raise self._misfit(f"{path} has a dict, in the checkpoint {_described(saved)}")
        if isinstance(value, torch.optim.Optimizer):
            own = _completed(value, own, saved)
        unknown = [key for key in saved if key not in own]
        own = _copied(own)  # it may be the very dict that the object keeps its state in
        self._add_missing(own, saved, depth)
        self._dict(own, saved, path, depth)
        if unknown and _is_strict(value):
            raise self._misfit(
                f"{path} is a module that has no {listed(unknown)}, which the checkpoint has: "
                "restore into a dict of what is wanted of it"
            )
        self._actions.append(lambda: value.load_state_dict(own))

    def _add_missing(self, own: dict[Any, Any], saved: Mapping[Any, Any], depth: int) -> None:
        """Adds to a state_dict the keys it lacks: load_state_dict() decides whether they fit."""
        for key, item in saved.items():
            if key not in own:
                own[key] = None
            elif depth < DEPTH_MAX and isinstance(item, dict) and _is_filled_dict(own[key]):
                self._add_missing(own[key], unescaped(item), depth + 1)

    def _loaded(self, saved: Any) -> Any:
        """Returns a saved value as a new object, with tensors of the shards read whole."""
        return fill(saved, self._whole_tensor, self._whole_own_value, self._filled)

    def _whole_tensor(self, stored: Stored) -> torch.Tensor:
        key, dtype, shape = stored
        if key not in self._whole:
            self._find([(key, shape, whole(shape))])  # raises before memory is taken in vain
            self._whole[key] = torch.empty(shape, dtype=dtype, device="cpu")
            self.targets.append(Target(key, self._whole[key], shape, whole(shape)))
        return self._whole[key]

    def _whole_own_value(self, name: str) -> PerRank:
        value = PerRank()
        value.found = self._per_rank is not None and name in self._per_rank
        if value.found and self._per_rank is not None:
            value.value = self._per_rank[name]
        return value


def _check_target(tensor: torch.Tensor, saved: Any, path: str) -> None:
    """Raises TypeError unless the memory of a tensor can take what was saved."""
    meta, kind = False, str(torch.strided)
    if isinstance(saved, torch.Tensor):
        meta, kind = saved.is_meta, _memory_kind(saved)
    if tensor.is_meta != meta:
        where = "is" if tensor.is_meta else "was, when it was saved,"
        why = f"{where} on the meta device, where tensors have no values"
    elif _memory_kind(tensor) != kind:
        why = f"is {_memory_kind(tensor)}, in the checkpoint {kind}"
    elif kind == str(torch.strided) and _may_overlap(tensor):
        why = "has elements that share memory, as expand() makes them (clone() it before)"
    else:
        return
    raise TypeError(f"{path} {why}: it cannot be restored in place")


def _memory_kind(tensor: torch.Tensor) -> str:
    return "quantized" if tensor.is_quantized else str(tensor.layout)


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Returns whether two elements may lie in the same memory."""
    if tensor.numel() < 2 or tensor.is_contiguous():
        return False
    extent = 0  # distance of the last element from the first, along the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= extent:
                return True
            extent += (size - 1) * stride
    return False


def _completed(
    optimizer: torch.optim.Optimizer,
    own: dict[str, Any],
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the state_dict of an optimizer, with tensors for the state it has not made yet; state
    of a parameter's shape is spread over ranks as the parameter is.
    """
    state = own.get("state")
    theirs = unescaped(saved.get("state"))
    if not isinstance(state, dict) or not isinstance(theirs, dict):
        return own
    parameters: dict[Any, torch.Tensor] = {}
    for group, described in zip(optimizer.param_groups, own["param_groups"], strict=True):
        parameters.update(zip(described["params"], group["params"], strict=True))
    # State of another shape, and of later parameters, is left out: load_state_dict() deals with it.
    completed = {number: items for number, items in state.items() if number in theirs}
    for number, items in theirs.items():
        parameter, items = parameters.get(number), unescaped(items)
        if parameter is None or not isinstance(items, dict):
            continue
        had, mine = state.get(number, {}), {}
        for name, item in items.items():
            found, there = _kind(item), had.get(name)
            if found is None:
                continue
            if isinstance(there, torch.Tensor) and tuple(there.shape) == found.shape:
                mine[name] = there
            elif found.shape == tuple(parameter.shape) != ():
                mine[name] = torch.empty_like(parameter.detach(), dtype=found.dtype)
        completed[number] = mine
    return own | {"state": completed}


def _copied(value: Any, depth: int = 0) -> Any:
    """Returns a copy of a nest of dicts, of the same types."""
    if not isinstance(value, dict) or depth > DEPTH_MAX:
        return value
    new = copy.copy(value)
    for key, item in value.items():
        new[key] = _copied(item, depth + 1)
    return new


def _is_filled_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _kind(item: Any) -> Stored | None:
    """Returns dtype and shape of a saved tensor, in the shards or not; None for other values."""
    if isinstance(item, torch.Tensor):
        return Stored("", item.dtype, tuple(item.shape))
    return stored_of(item)


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor | PerRank) or is_stateful(value):
        return True
    if depth > DEPTH_MAX:
        return False
    if isinstance(value, dict):
        return any(_holds_tensors(item, depth + 1) for item in value.values())
    return isinstance(value, list | tuple) and any(
        type(item) not in ATOMS and _holds_tensors(item, depth + 1) for item in value
    )


def _is_strict(value: Any) -> bool:
    """Returns whether load_state_dict() is torch's own, which refuses keys that a module lacks."""
    if not isinstance(value, torch.nn.Module):
        return False
    hooks = (module._load_state_dict_pre_hooks for module in value.modules())
    return type(value).load_state_dict is torch.nn.Module.load_state_dict and not any(hooks)


def _described(saved: Any) -> str:
    if isinstance(saved, dict) and TENSOR in saved:
        return "a tensor"
    if isinstance(saved, list | tuple):
        return f"{len(saved)} items"
    return f"a {type(saved).__name__}"
