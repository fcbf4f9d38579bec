"""What a step-fence save checks after copying: that no tensor changed meanwhile.

Responsible for comparing version counters and for naming the tensor. It must not know how tensors
are copied or what happens to the save.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fastckpt.errors import StagingConflict
from fastckpt.formats.torch_pickle import SMALL_BYTES


def check_unchanged(tensors: Iterable[tuple[torch.Tensor, int]], obj: object) -> None:
    """Compares version counters with those noted before copying (torch.Tensor._version).

    Args:
        tensors: tensors and their version counters when they were captured.
        obj: what was saved; used to name a tensor.

    Raises:
        StagingConflict: a tensor was changed in place meanwhile. Small ones may: they were copied
            before save() returned.
    """
    for tensor, version in tensors:
        if tensor._version != version and not _is_small(tensor):
            raise StagingConflict(
                f"{name_of(tensor, obj)} was changed in place before the save had copied it, so "
                "that checkpoint was not committed: update it in an optimizer step, call "
                'wait_staged() first, or save with fence="call"'
            )


def _is_small(tensor: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().nbytes() <= SMALL_BYTES
    except (NotImplementedError, RuntimeError):
        return False  # sparse and other tensors without a storage of their own


def name_of(tensor: torch.Tensor, obj: object) -> str:
    """Where a tensor stands in a nest of dicts, lists and modules, as "obj['model'].weight"."""
    seen: set[int] = set()
    pending: list[tuple[str, object]] = [("obj", obj)]
    while pending:
        name, value = pending.pop()
        if value is tensor:
            return f"tensor {name}"
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            pending += [(f"{name}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(f"{name}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, torch.nn.Module):
            pending += [(f"{name}.{key}", item) for key, item in value.named_buffers()]
            pending += [(f"{name}.{key}", item) for key, item in value.named_parameters()]
        elif hasattr(value, "__dict__"):
            pending.append((name, vars(value)))
    return f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
