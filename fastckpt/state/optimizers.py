"""The states of optimizers: checks whether a saved state matches, and creates tensors for state
that an optimizer has not created yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from fastckpt.state.additions import saved_kind, saved_shape
from fastckpt.state.dtensors import empty_beside, part_kind
from fastckpt.state.tree import stored_of, unescaped


def is_of_optimizer(value: dict[Any, Any]) -> bool:
    """Returns whether a dict looks like the result of an optimizer's state_dict(), or of torch's
    get_optimizer_state_dict(), which may join its keys by dots.
    """
    if "state" in value and "param_groups" in value:
        return True
    return any(isinstance(key, str) and key.startswith("param_groups.") for key in value)


def counts_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether load_state_dict() is torch's own, which refuses another number of
    parameters.
    """
    is_own = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return is_own and not optimizer._optimizer_load_state_dict_pre_hooks


def other_parameters(at: object, own: Mapping[str, Any], saved: Any) -> str:
    """Returns the message for an optimizer with other parameter groups than the saved one."""
    theirs = sizes(saved) if isinstance(saved, dict) else None
    return (
        f"{at} is an optimizer with groups of {sizes(own)} parameters, but the checkpoint has "
        f"{'none' if theirs is None else theirs}: create it with the same groups or, if the "
        "model has changed, leave it out of the state or exclude it with only="
    )


def sizes(state: Mapping[str, Any]) -> list[int] | None:
    """Returns how many parameters each group of an optimizer's state_dict() has."""
    groups = state.get("param_groups")
    if not isinstance(groups, list | tuple):
        return None
    return [len(group.get("params", ())) if isinstance(group, dict) else 0 for group in groups]


def parameters_of(
    optimizer: torch.optim.Optimizer, own: Mapping[str, Any]
) -> dict[Any, torch.Tensor]:
    """Returns the parameters by their numbers in an optimizer's state_dict()."""
    parameters: dict[Any, torch.Tensor] = {}
    for group, described in zip(optimizer.param_groups, own["param_groups"], strict=True):
        parameters.update(zip(described["params"], group["params"], strict=True))
    return parameters


def reshaped(own: Mapping[Any, Any], saved: Mapping[Any, Any]) -> Iterator[tuple[Any, ...]]:
    """Yields the keys that lead to the state of each parameter of which a tensor has another shape
    in the checkpoint. Where the keys are joined by dots, these are all keys of this state.
    """

    def differs(item: Any, there: Any) -> bool:
        shape = saved_shape(there)
        return isinstance(item, torch.Tensor) and shape not in (None, tuple(item.shape))

    state, theirs = own.get("state"), unescaped(saved.get("state"))
    if isinstance(state, dict):
        theirs = theirs if isinstance(theirs, dict) else {}
        for number, items in state.items():
            there = unescaped(theirs.get(number))
            are_dicts = isinstance(items, dict) and isinstance(there, dict)
            if are_dicts and any(differs(value, there.get(name)) for name, value in items.items()):
                yield "state", number
        return
    parameter = {key: key.rpartition(".")[0] for key in own if isinstance(key, str)}
    changed = {parameter[key] for key in parameter if differs(own[key], saved.get(key))}
    yield from ((key,) for key in parameter if parameter[key] in changed)


def completed(
    optimizer: torch.optim.Optimizer,
    own: dict[str, Any],
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the state_dict of an optimizer, with tensors added for state that it has not created
    yet. State with a parameter's shape is spread over ranks like the parameter.
    """
    state = own.get("state")
    theirs = unescaped(saved.get("state"))
    if not isinstance(state, dict) or not isinstance(theirs, dict):
        return own
    parameters = parameters_of(optimizer, own)
    # State of another shape, and of later parameters, is left out: load_state_dict() deals with it.
    matching = {number: items for number, items in state.items() if number in theirs}
    for number, items in theirs.items():
        parameter, items = parameters.get(number), unescaped(items)
        if parameter is None or not isinstance(items, dict):
            continue
        had, mine = state.get(number, {}), {}
        for name, item in items.items():
            kind, there = saved_kind(item), had.get(name)
            stored = item if isinstance(item, torch.Tensor) else stored_of(item)
            if kind is None or stored is None:
                continue
            is_there = isinstance(there, torch.Tensor) and part_kind(there) == kind
            if is_there and tuple(there.shape) == tuple(stored.shape):
                mine[name] = there
            elif is_lazy(parameter):  # its state can only be what was saved
                continue
            elif not kind and tuple(stored.shape) == tuple(parameter.shape) != ():
                mine[name] = empty_beside(parameter, stored.dtype)
        matching[number] = mine
    return own | {"state": matching}
