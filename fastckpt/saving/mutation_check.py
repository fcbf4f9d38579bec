"""The verdict on a save with the step fence: whether the tensors stayed unchanged between the call
of save() and their copies.

Responsible for comparing version counters and samples of memory at a moment when equality proves
that nothing has changed, and for naming a changed tensor.
"""

from __future__ import annotations

import ctypes
import logging
import random
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from fastckpt.errors import StagingConflict
from fastckpt.plan.image import BY_VALUE_BYTES
from fastckpt.saving.thread_calls import ThreadCalls, positions

log = logging.getLogger("fastckpt")

PATIENCE_S = 60.0  # the longest wait for one call of another thread to end
_NOTICE_S = 1.0
# Samples detect writes that torch does not count: all writes to the whole of a sampled tensor, and
# some writes to a part of it.
_SAMPLED_TENSORS = 64
_SAMPLE_BYTES = 64
_SAMPLED_ELEMENTS = 8  # of a tensor whose memory is not contiguous
_OF_TORCH = (torch.Tensor, torch.nn.Parameter)
_RANDOM = random.Random()  # separate, so that the user's random numbers do not change

_UNCOUNTED = "changed (by an operation that was still running or that torch does not count)"
_ADVICE = 'update it in an optimizer step, call wait_staged() first, or save with fence="call"'


class MutationCheck:
    """The verdict whether the watched tensors stayed unchanged until they had been copied. It is
    given once, by the thread that is about to change them or by the save.

    torch increments a tensor's version counter at the end of an in-place operation. So after
    everything has been copied, the current calls of all threads are recorded, and the counters are
    compared after all these calls have ended. Every operation that began before the end of the
    copies is either in one of these calls or already counted.
    """

    def __init__(self, watched: Sequence[WatchedTensors]) -> None:
        self._watched = watched
        # Calls that began before the save race with save() itself, as they would with torch.save.
        self._before = positions() if any(part.is_open() for part in watched) else {}
        self._lock = threading.Lock()
        self._running = ""  # a call that did not end in time

    def give(self) -> None:
        """Gives the verdict. Called after everything has been copied, or while devices copy in the
        order of the caller's streams. Waits for calls that may be changing tensors. Afterwards the
        tensors may change.
        """
        with self._lock:
            parts = [part for part in self._watched if part.is_open()]
            if not parts:
                return
            calls = ThreadCalls(self._before)
            try:
                ended = calls.have_ended() or any([part.has_changed() for part in parts])
                if not ended:
                    self._wait(calls)
            finally:
                calls.forget()
            # Not reached if a signal handler interrupted the wait: then the save gives the verdict.
            for part in parts:
                part.look()

    def _wait(self, calls: ThreadCalls) -> None:
        if calls.wait(_NOTICE_S):
            return
        log.info("a save waits for %s, which may be changing the state", calls.text())
        if not calls.wait(PATIENCE_S):
            self._running = calls.text()

    def check(self, path: str) -> None:
        """Gives the verdict if it has not been given.

        Raises:
            StagingConflict: a tensor was, or may have been, changed in place before it was copied.
        """
        self.give()
        running, self._running = self._running, ""
        for part in self._watched:
            part.check(path)
        if running:
            raise StagingConflict(
                f"{running} has been in one call for {PATIENCE_S:.0f} s, since before the save to "
                f"{path!r} had copied the state. That call may have changed a tensor of the state: "
                f"{_ADVICE}"
            )

    def forget(self) -> None:
        """Drops all references; nobody will ask any more."""
        for part in self._watched:
            part.forget()
        self._watched = ()


class WatchedTensors:
    """Tensors that must not change before they have been copied.

    Args:
        tensors: tensors with their version counters (torch.Tensor._version) at the time of capture.
            The list is emptied. Tensors with storages of at most BY_VALUE_BYTES may change, since
            they were copied before save() returned.
        obj: the saved object, which gives the tensors their names.
        are_aliases: whether only the save has references to these tensors, so that no other code
            can replace their memory.
    """

    def __init__(
        self, tensors: list[tuple[torch.Tensor, int]], obj: object, are_aliases: bool = False
    ) -> None:
        self._lock = threading.Lock()
        with torch._C._DisableTorchDispatch():  # a dispatch mode of the caller must not see this
            lasting = [item for item in tensors if not _is_copied(item[0])]
            if are_aliases:
                self._counters = [(alias, alias, version) for alias, version in lasting]
            else:
                self._counters = [(tensor, _alias(tensor), version) for tensor, version in lasting]
        tensors.clear()  # in place: the pickler's class refers to this list, in a cycle
        self._samples = _samples(self._counters)
        self._obj = obj
        self._changed: tuple[torch.Tensor, object, str] | None = None

    def is_open(self) -> bool:
        """Returns whether any tensor is still watched."""
        return bool(self._counters)

    def has_changed(self) -> bool:
        """Returns whether a tensor has changed; keeps the first one for check()."""
        with self._lock:
            if self._changed is None:
                self._changed = self._change()
            return self._changed is not None

    def _change(self) -> tuple[torch.Tensor, object, str] | None:
        for tensor, alias, version in self._counters:
            if alias._version != version:
                return tensor, self._obj, "changed in place"
        for sample in self._samples:
            if sample.differs():
                return sample.tensor, self._obj, _UNCOUNTED
        return None

    def look(self) -> None:
        """Checks for changes for the last time; from now on the tensors may change."""
        try:
            self.has_changed()
        finally:
            with self._lock:
                self._counters, self._samples, self._obj = [], [], None

    def forget(self) -> None:
        """Drops all references; nobody will ask any more."""
        with self._lock:
            self._counters, self._samples = [], []
            self._obj = self._changed = None

    def check(self, path: str) -> None:
        """Raises StagingConflict if a change was found."""
        changed, self._changed = self._changed, None
        if changed is not None:
            tensor, obj, how = changed
            raise StagingConflict(
                f"{name_of(tensor, obj)} was {how} before the save to {path!r} had "
                f"copied it: {_ADVICE}"
            )


# A tensor of the state, for its name; an alias with the saved memory and this memory's version
# counter; and the counter's value at the call of save(). The tensor's own memory and counter can be
# replaced by `set_`, `.data =` and swap_tensors. It is a plain tuple because the caller waits.
_Counter: TypeAlias = tuple[torch.Tensor, torch.Tensor, int]


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that keeps this tensor's memory and version counter, if there can be one."""
    if type(tensor) not in _OF_TORCH or tensor.layout is not torch.strided:
        return tensor
    return tensor.detach()


class _Sample(NamedTuple):
    """A copy of a few bytes of a tensor's memory, made at the call of save()."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    offset: int
    content: bytes

    def differs(self) -> bool:
        """Returns whether the bytes have changed."""
        if self.offset + len(self.content) > self.storage.nbytes():
            return False  # a resize freed the memory, and no check can make that safe
        now = ctypes.string_at(self.storage.data_ptr() + self.offset, len(self.content))
        return now != self.content


def _samples(counters: Sequence[_Counter]) -> list[_Sample]:
    """Samples a few bytes at random positions of each tensor on the host."""
    if len(counters) > _SAMPLED_TENSORS:
        counters = _RANDOM.sample(counters, _SAMPLED_TENSORS)
    samples: list[_Sample] = []
    with torch._C.DisableTorchFunctionSubclass():
        for tensor, alias, _version in counters:
            try:
                samples += _samples_of(tensor, alias)
            except (NotImplementedError, RuntimeError):
                continue  # the tensor does not own memory
    return samples


def _samples_of(named: torch.Tensor, tensor: torch.Tensor) -> Iterator[_Sample]:
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
        return
    storage, size = tensor.untyped_storage(), tensor.element_size()
    address, count = storage.data_ptr(), tensor.numel()
    if not address or not count:
        return
    begin = int(tensor.storage_offset()) * size
    if tensor.is_contiguous() and count * size > 4 * _SAMPLE_BYTES:
        apart = int(_RANDOM.random() * (count * size // 4 - _SAMPLE_BYTES))
        offsets = [begin + apart, begin + count * size - apart - _SAMPLE_BYTES]
        nbytes = _SAMPLE_BYTES
    else:  # memory between its elements may belong to other tensors
        offsets = [begin + size * _any_element(tensor) for _ in range(_SAMPLED_ELEMENTS)]
        nbytes = size
    for offset in offsets:
        content = ctypes.string_at(address + offset, nbytes)
        yield _Sample(named, storage, offset, content)


def _any_element(tensor: torch.Tensor) -> int:
    """Returns the offset of a random element, in elements from the first one."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return sum(_RANDOM.randrange(size) * stride for size, stride in axes)


def _is_copied(tensor: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().nbytes() <= BY_VALUE_BYTES
    except (NotImplementedError, RuntimeError):
        return False  # sparse and other tensors without a storage


def named_tensors(obj: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor in a nest of dicts, lists, modules and other objects once, with its name,
    such as "model/0.weight"; a tensor that is the whole nest is "obj". Equal nests give equal names
    in equal order.
    """
    ids: set[int] = set()
    pending: list[tuple[str | None, object]] = [(None, obj)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, _LEAVES) or id(value) in ids:
            continue
        ids.add(id(value))
        if isinstance(value, torch.Tensor):
            yield "obj" if name is None else name, value
        elif isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(_below(name, str(key)), item) for key, item in items]
        elif isinstance(value, torch.nn.Module):
            pending += [(_below(name, key), item) for key, item in value.named_buffers()]
            pending += [(_below(name, key), item) for key, item in value.named_parameters()]
        elif hasattr(value, "__dict__"):
            pending.append((name, vars(value)))


def _below(name: str | None, key: str) -> str:
    """Returns the name of a value under a key, in the spelling of formats.value_names."""
    key = key.replace("~", "~0").replace("/", "~1")
    return key if name is None else f"{name}/{key}"


_LEAVES = (str, bytes, int, float, bool, type(None), type, torch.dtype)


def name_of(tensor: torch.Tensor, obj: object) -> str:
    """Returns the name of a tensor in obj, such as "tensor 'model/0.weight'"."""
    try:
        for name, value in named_tensors(obj):
            if value is tensor:
                return f"tensor {name!r}"
    except Exception:
        pass  # the object is changing: describe its tensor without a name
    return f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
