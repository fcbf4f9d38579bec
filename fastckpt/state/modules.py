"""Modules whose own code loads their tensors, which may therefore have other shapes in a checkpoint
than in the module: torch's lazy modules, and modules with a _load_from_state_dict or hooks of their
own, for example one that pads or crops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastckpt.state.additions import Room
from fastckpt.state.dtensors import box_on_rank, local_of
from fastckpt.state.fit import SHAPE_ADVICE
from fastckpt.state.kinds import is_sharded


def is_strict(value: Any) -> bool:
    """Returns whether load_state_dict() is torch's own, which refuses keys that a module lacks."""
    if not isinstance(value, torch.nn.Module):
        return False
    return type(value).load_state_dict is torch.nn.Module.load_state_dict and not any(
        module._load_state_dict_pre_hooks or _loads_itself(module) for module in value.modules()
    )


def adapted(
    module: torch.nn.Module,
    own: Mapping[Any, Any],
    saved_shape: Callable[[Any], tuple[int, ...] | None],
) -> dict[Any, torch.Tensor]:
    """Returns new tensors of the saved shapes, by key, for those tensors of a module that have
    another shape in the checkpoint, if code of the module's own loads them.

    Args:
        own: the module's state_dict.
        saved_shape: returns the shape that a checkpoint has for a key; None if it has no tensor.
    """
    tensors = dict[Any, torch.Tensor]()
    for key, tensor in own.items():
        if isinstance(tensor, torch.Tensor) and (shape := saved_shape(key)) is not None:
            is_lazy = torch.nn.parameter.is_lazy(tensor)
            if is_lazy or (_is_other(tensor, shape) and _is_loaded_by_own_code(module, key)):
                tensors[key] = _of_shape(tensor, shape)
    return tensors


def load(
    module: Any, state_dict: Any, replaced: Mapping[Any, torch.Tensor], keeps: bool
) -> list[Any]:
    """Makes a module load its state_dict. With `keeps`, tensors whose shape the module's code
    refuses stay as they are; returns their keys.

    Args:
        replaced: the module's tensors in whose place the state_dict has those of adapted().
    """
    try:
        module.load_state_dict(state_dict)
    except RuntimeError as error:
        refused = [key for key in replaced if f"size mismatch for {key}:" in str(error)]
        if not refused:
            raise
        if not keeps:
            raise RuntimeError(f"{error}{SHAPE_ADVICE}") from error
        state_dict.update((key, replaced[key]) for key in refused)
        module.load_state_dict(state_dict)
        return refused
    return []


def _is_loaded_by_own_code(module: torch.nn.Module, key: object) -> bool:
    """Returns whether a module, or one inside it on the way to a key, loads itself."""
    inner: torch.nn.Module | None = module
    for name in str(key).split("."):
        if inner is None:
            return False
        if _loads_itself(inner):
            return True
        inner = inner._modules.get(name)
    return False


def _loads_itself(module: torch.nn.Module) -> bool:
    """Returns whether code of a module's own, and not only of torch's, loads its values."""
    hooks = [getattr(each, "hook", each) for each in module._load_state_dict_pre_hooks.values()]
    makers = [
        getattr(function, "__module__", "") for function in (module._load_from_state_dict, *hooks)
    ]
    return any(maker.split(".")[0] != "torch" for maker in makers)


def _is_other(tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Returns whether a shape is not a tensor's; placements are kept only by equal dimensions."""
    if tensor.is_nested or tuple(tensor.shape) == shape:
        return False
    return not is_sharded(tensor) or tensor.ndim == len(shape)


def _of_shape(tensor: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a new tensor of another shape, with a tensor's dtype, device and placements."""
    if not is_sharded(tensor):
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    box, device = box_on_rank("it", tensor, shape), local_of(tensor).device
    local = torch.empty(box.sizes, dtype=tensor.dtype, device=device)
    new: torch.Tensor = Room(
        tensor.device_mesh, tuple(tensor.placements), shape, box, device
    ).tensor(local)
    return new
