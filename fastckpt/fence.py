"""What a step-fence save checks after copying: that no tensor changed meanwhile.

Responsible for comparing version counters and for naming the tensor. It must not know how tensors
are copied or what happens to the save.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from fastckpt.errors import StagingConflict
from fastckpt.formats.torch_pickle import SMALL_BYTES


class Watched:
    """Tensors that must not change before they were copied.

    They are looked at once: by the thread that goes on to change them, or by the save when all was
    copied, whichever comes first.

    Args:
        tensors: with the version counters (torch.Tensor._version) they had when they were captured;
            emptied when they were looked at.
        obj: what was saved; used to name a tensor.
        copied_nbytes: storages up to this size were copied before save() returned: they may change.
    """

    def __init__(
        self,
        tensors: list[tuple[torch.Tensor, int]],
        obj: object,
        copied_nbytes: int = SMALL_BYTES,
    ) -> None:
        self._lock = threading.Lock()
        self._tensors = tensors
        self._obj = obj
        self._copied_nbytes = copied_nbytes
        self._changed: tuple[torch.Tensor, object] | None = None

    def look(self) -> None:
        """Compares version counters; from now on the tensors may change."""
        with self._lock:
            try:
                for tensor, version in self._tensors:
                    if tensor._version != version and not _is_copied(tensor, self._copied_nbytes):
                        self._changed = tensor, self._obj
                        break
            finally:
                # In place: the pickler's class refers to this list, in a circle.
                self._tensors.clear()
                self._obj = None

    def forget(self) -> None:
        """Lets go of everything; nobody will ask any more."""
        with self._lock:
            self._tensors.clear()
            self._obj = self._changed = None

    def check(self) -> None:
        """Looks if nobody has.

        Raises:
            StagingConflict: a tensor was changed in place before it was copied.
        """
        self.look()
        changed, self._changed = self._changed, None
        if changed is not None:
            raise StagingConflict(
                f"{name_of(*changed)} was changed in place before the save had copied it, so "
                "that checkpoint was not committed: update it in an optimizer step, call "
                'wait_staged() first, or save with fence="call"'
            )


def _is_copied(tensor: torch.Tensor, copied_nbytes: int) -> bool:
    try:
        return tensor.untyped_storage().nbytes() <= copied_nbytes
    except (NotImplementedError, RuntimeError):
        return False  # sparse and other tensors without a storage of their own


def named_tensors(obj: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a nest of dicts, lists, modules and other objects, each once, with names as
    "obj['model'].weight". Equal nests give equal names in equal order.
    """
    seen: set[int] = set()
    pending: list[tuple[str, object]] = [("obj", obj)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            pending += [(f"{name}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(f"{name}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, torch.nn.Module):
            pending += [(f"{name}.{key}", item) for key, item in value.named_buffers()]
            pending += [(f"{name}.{key}", item) for key, item in value.named_parameters()]
        elif hasattr(value, "__dict__"):
            pending.append((name, vars(value)))


_LEAVES = (str, bytes, int, float, bool, type(None), type, torch.dtype)


def name_of(tensor: torch.Tensor, obj: object) -> str:
    """Where a tensor stands in obj, as "tensor obj['model'].weight"."""
    try:
        for name, value in named_tensors(obj):
            if value is tensor:
                return f"tensor {name}"
    except Exception:
        pass  # the object is being changed meanwhile: it goes without a name
    return f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
