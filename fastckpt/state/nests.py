"""The nests that a restore walks: those of a state, those of a step, and the places in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastckpt.formats.partial_objects import left_out
from fastckpt.formats.value_names import items_in, joined
from fastckpt.state.tree import (
    ATOMS,
    DEPTH_MAX,
    PER_RANK,
    TENSOR,
    PerRank,
    is_stateful,
    unescaped,
)


class At(NamedTuple):
    """A place in a state, given by the keys that lead to it."""

    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return repr(self.name) if self.keys else "the state"

    @property
    def name(self) -> str:
        return joined(self.keys)

    def of(self, key: Any) -> At:
        """Returns the place of an item."""
        return At((*self.keys, str(key)))


def nest_of(saved: Any) -> dict[Any, Any] | None:
    """Returns a dict of saved values; None for placeholders and values that are not dicts."""
    inner = unescaped(saved)
    if not isinstance(inner, dict) or left_out(saved) is not None:
        return None
    is_placeholder = TENSOR in saved or isinstance(saved.get(PER_RANK), str)
    return None if is_placeholder and inner is saved and type(saved) is dict else inner


def holds_stored(saved: Any) -> bool:
    """Returns whether a saved value is or contains a tensor or a PerRank."""
    ahead, visited = [saved], set[int]()
    while ahead:
        value = ahead.pop()
        if isinstance(value, torch.Tensor) or (isinstance(value, dict) and nest_of(value) is None):
            return True
        if isinstance(value, dict | list | tuple) and id(value) not in visited:
            ahead += [item for _, item in items_in(unescaped(value))]
            visited.add(id(value))
    return False


def counted(value: Sequence[Any]) -> str:
    """Returns the number of items in words."""
    return "1 item" if len(value) == 1 else f"{len(value)} items"


def described(saved: Any) -> str:
    """Returns words for what a checkpoint has at some place."""
    if isinstance(saved, dict) and nest_of(saved) is None:
        return "a tensor" if TENSOR in saved else "a PerRank"
    if isinstance(saved, list | tuple):
        return counted(saved)
    if isinstance(saved, torch.Tensor):
        return "a nested tensor" if saved.is_nested else "a tensor"
    return f"a {type(saved).__name__}"


def names_within(value: Any, at: At) -> Iterator[str]:
    """Yields the name of each value and of each container in a nest of containers. A container
    that occurs several times is visited once.
    """
    ahead, visited = [(at, value)], set[int]()
    while ahead:
        at, value = ahead.pop()
        yield at.name
        is_nest = isinstance(value, dict) and TENSOR not in value and left_out(value) is None
        if (is_nest or isinstance(value, list | tuple)) and id(value) not in visited:
            ahead += [(at.of(key), item) for key, item in items_in(unescaped(value))]
        visited.add(id(value))


def holds_tensors(value: Any, depth: int = 0) -> bool:
    """Returns whether a value of a state is or contains a tensor, a PerRank or an object."""
    if isinstance(value, torch.Tensor | PerRank) or is_stateful(value):
        return True
    if depth > DEPTH_MAX:
        return False
    return isinstance(value, dict | list | tuple) and any(
        type(item) not in ATOMS and holds_tensors(item, depth + 1) for _, item in items_in(value)
    )


def copied(value: Any, depth: int = 0) -> Any:
    """Returns a copy of a nest of dicts, with the same types."""
    if not isinstance(value, dict) or depth > DEPTH_MAX:
        return value
    new = copy.copy(value)
    for key, item in value.items():
        new[key] = copied(item, depth + 1)
    return new


def refill(value: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    """Replaces the content of a dict item by item, because a subclass may store and count items in
    its own way.
    """
    value.clear()
    for key, item in items.items():
        value[key] = item
