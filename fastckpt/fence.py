"""The verdict on a step-fence save: whether what it copied was, all of it, as it was at the call.

Responsible for comparing version counters and samples of memory, at a moment that proves something,
and for naming the tensor. It must not know how tensors are copied or what happens to the save.
"""

from __future__ import annotations

import ctypes
import logging
import random
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fastckpt.errors import StagingConflict
from fastckpt.formats.torch_pickle import SMALL_BYTES
from fastckpt.running_calls import RunningCalls, positions

log = logging.getLogger("fastckpt")

PATIENCE_S = 60.0  # the longest wait for one call of another thread to end
_NOTICE_S = 1.0
_SAMPLED_TENSORS = 64
_SAMPLE_BYTES = 64
_RANDOM = random.Random()  # not the user's, whose numbers stay what they are

_ADVICE = 'update it in an optimizer step, call wait_staged() first, or save with fence="call"'


class Verdict:
    """Whether what a save watches stayed as it was until it was copied. It is given once: by the
    thread that goes on to change it, or by the save when all was copied, whichever comes first.

    An operation counts its change of a tensor when it ends. So the counters are compared when every
    call has ended that some thread was inside of after the copy had: an operation that began before
    the copy's end is in one of these calls, or has counted by then.

    Args:
        watched: what is watched, in parts.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = watched
        # Calls that began before the save did race with save() itself, as with torch.save.
        self._before = positions() if any(part.is_open() for part in watched) else {}
        self._lock = threading.Lock()
        self._running = ""  # a call that did not end

    def give(self) -> None:
        """Called when everything was copied, or is in the order of the caller's streams. Waits for
        calls that may be changing what was; when it returns, the tensors may change.
        """
        with self._lock:
            parts = [part for part in self._watched if part.is_open()]
            if not parts:
                return
            calls = RunningCalls(self._before)
            try:
                ended = calls.have_ended() or any([part.has_changed() for part in parts])
                if not ended and any(part.is_read_late() for part in parts):
                    self._wait(calls)
            finally:
                calls.forget()
            # Not if a signal handler has ended the wait: then the save will give the verdict.
            for part in parts:
                part.look()

    def _wait(self, calls: RunningCalls) -> None:
        if calls.wait(_NOTICE_S):
            return
        log.info("a save waits for %s, which may be changing what is saved", calls.text())
        if not calls.wait(PATIENCE_S):
            self._running = calls.text()

    def check(self, path: str) -> None:
        """Gives the verdict if nobody has.

        Raises:
            StagingConflict: a tensor was changed in place before it was copied, or may have been.
        """
        self.give()
        running, self._running = self._running, ""
        for part in self._watched:
            part.check(path)
        if running:
            raise StagingConflict(
                f"{running} has been in one call for {PATIENCE_S:.0f} s, since before everything "
                f"was copied that the save to {path!r} needs. It cannot be told whether that call "
                f"changes a tensor of the state: {_ADVICE}"
            )

    def forget(self) -> None:
        """Lets go of everything; nobody will ask any more."""
        for part in self._watched:
            part.forget()
        self._watched = ()


class Watched:
    """Tensors that must not change before they were copied.

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
        self._samples = _samples([tensor for tensor, _ in tensors])
        self._obj = obj
        self._copied_nbytes = copied_nbytes
        self._changed: tuple[torch.Tensor, object, str] | None = None

    def is_open(self) -> bool:
        """Whether there is something to look at."""
        return bool(self._tensors)

    def is_read_late(self) -> bool:
        """Whether not all of it was copied before save() returned."""
        with self._lock:
            return any(not _is_copied(tensor, self._copied_nbytes) for tensor, _ in self._tensors)

    def has_changed(self) -> bool:
        """Whether a change is to be seen already; the first one is kept for check()."""
        with self._lock:
            if self._changed is None:
                self._changed = self._change()
            return self._changed is not None

    def _change(self) -> tuple[torch.Tensor, object, str] | None:
        for tensor, version in self._tensors:
            if tensor._version != version and not _is_copied(tensor, self._copied_nbytes):
                return tensor, self._obj, "changed in place"
        for sample in self._samples:
            if sample.differs():
                return sample.tensor, self._obj, "written to in a way that torch does not count"
        return None

    def look(self) -> None:
        """Looks for the last time; from now on the tensors may change."""
        try:
            self.has_changed()
        finally:
            with self._lock:
                # In place: the pickler's class refers to this list, in a circle.
                self._tensors.clear()
                self._samples, self._obj = [], None

    def forget(self) -> None:
        """Lets go of everything; nobody will ask any more."""
        with self._lock:
            self._tensors.clear()
            self._samples, self._obj, self._changed = [], None, None

    def check(self, path: str) -> None:
        """Tells of a change that was seen.

        Raises:
            StagingConflict: there was one.
        """
        changed, self._changed = self._changed, None
        if changed is not None:
            tensor, obj, how = changed
            raise StagingConflict(
                f"{name_of(tensor, obj)} was {how} before the save to {path!r} had "
                f"copied it: {_ADVICE}"
            )


class _Sample(NamedTuple):
    """A few bytes of a tensor's memory, as they were at the call."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    offset: int
    content: bytes

    def differs(self) -> bool:
        """Whether they are others now."""
        if self.offset + len(self.content) > self.storage.nbytes():
            return False  # freed by resizing it, which no check can make safe
        now = ctypes.string_at(self.storage.data_ptr() + self.offset, len(self.content))
        return now != self.content


def _samples(tensors: Sequence[torch.Tensor]) -> list[_Sample]:
    """Bytes at two places, others each time, of large tensors on the host."""
    if len(tensors) > _SAMPLED_TENSORS:
        tensors = _RANDOM.sample(tensors, _SAMPLED_TENSORS)
    found = []
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes <= SMALL_BYTES or tensor.layout is not torch.strided:
            continue
        if not tensor.is_contiguous():
            continue
        storage = tensor.untyped_storage()
        address, begin = storage.data_ptr(), int(tensor.storage_offset()) * tensor.element_size()
        apart = int(_RANDOM.random() * (nbytes // 4 - _SAMPLE_BYTES))
        for offset in (begin + apart, begin + nbytes - apart - _SAMPLE_BYTES):
            content = ctypes.string_at(address + offset, _SAMPLE_BYTES)
            found.append(_Sample(tensor, storage, offset, content))
    return found


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
