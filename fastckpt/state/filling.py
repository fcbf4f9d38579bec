"""The tensors of a state that are filled in place: which part of a stored tensor each receives, and
which ones do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from fastckpt.arguments.names import listed, missing_from_checkpoint
from fastckpt.plan.boxes import Box, whole
from fastckpt.state.dtensors import dtensor_part, identity_of
from fastckpt.state.fit import Fit
from fastckpt.state.kinds import PLAIN_TENSORS, is_sharded, memory_of

_PART_BYTES = 64 << 20  # of each value that is compared at a time
_ITEM_BYTES = 16  # of the largest dtype


class _Taker(NamedTuple):
    """A name in a state, its memory, and the stored value that fills it.

    `source` is equal for names that receive the same stored value; `stored` identifies that value
    for a reader.
    """

    name: str
    memory: torch.Tensor
    box: Box
    source: Hashable
    stored: Any


class Tied:
    """The tensors of a state that will be filled, by their memory."""

    def __init__(self) -> None:
        self._by_memory: dict[Hashable, list[_Taker]] = {}

    def add(self, name: str, memory: torch.Tensor, box: Box, source: Hashable, stored: Any) -> None:
        """Records the memory that a stored value will fill.

        Args:
            name: the tensor's name in the state.
            memory: this rank's part of the tensor.
            box: the place of the part.
            source: equal for names that receive the same stored value.
            stored: passed to the reader of conflicts().
        """
        place = memory_of(memory) if type(memory) in PLAIN_TENSORS else None
        if place is not None:
            taker = _Taker(name, memory, box, source, stored)
            self._by_memory.setdefault(place, []).append(taker)

    def conflicts(self, read: Callable[[Any, Box], torch.Tensor]) -> list[str]:
        """Returns a message for each pair of names that share memory but would receive different
        values. Values are read only if such names have several sources, and are compared in the
        memory's dtype.

        Args:
            read: reads a part of a stored value; its errors are raised.
        """
        texts = []
        for first, *others in self._by_memory.values():
            sources = {first.source}
            for other in others:
                if other.source not in sources and not _are_same(first, other, read):
                    texts.append(
                        f"{first.name} and {other.name} are one tensor in the state, but have "
                        "different values in the checkpoint"
                    )
                sources.add(other.source)
        return texts


def _are_same(a: _Taker, b: _Taker, read: Callable[[Any, Box], torch.Tensor]) -> bool:
    if a.box != b.box:
        return False
    dtype = a.memory.dtype
    return all(
        torch.equal(_bits(read(a.stored, part), dtype), _bits(read(b.stored, part), dtype))
        for part in _parts(a.box)
    )


def _bits(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    value = value.detach().to("cpu", dtype).resolve_conj().resolve_neg()
    return value.contiguous().view(-1).view(torch.uint8)


def _parts(box: Box) -> Iterator[Box]:
    """Divides a rectangle along its first dimensions into rectangles of bounded size."""
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or box.numel * _ITEM_BYTES <= _PART_BYTES:
        yield box
        return
    size = box.sizes[dim]
    rows = max(1, _PART_BYTES // (box.numel // size * _ITEM_BYTES))
    for begin in range(0, size, rows):
        offsets, sizes = [*box.offsets], [*box.sizes]
        offsets[dim] += begin
        sizes[dim] = min(rows, size - begin)
        yield from _parts(Box(tuple(offsets), tuple(sizes)))


class _Stored(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Filling:
    """The tensors that one restore fills.

    Args:
        fit: how the state may differ from the checkpoint.
        overwritten: names of tensors in the state that may contain bytes of another step.

    Attributes:
        misfits: messages about values that do not fit.
        cast: the names of tensors whose stored dtype differs.
        mismatched: the names of tensors whose stored shape differs, and which therefore stay.
        tied: all tensors to be filled, by their memory.
        optimizers: for each optimizer's name, the names of the tensors that stay in it if they are
            not filled. Its other tensors are dropped together with its present state.
    """

    def __init__(self, fit: Fit, overwritten: Collection[str] = ()) -> None:
        self._fit, self._overwritten, self._names = fit, overwritten, set[str]()
        self.misfits: list[str] = []
        self.cast: list[str] = []
        self.mismatched: list[str] = []
        self.tied = Tied()
        self.optimizers: dict[str, set[str]] = {}
        # By a tensor's memory: its first name, and whether it has the shape that is stored there.
        self._firsts: dict[object, tuple[str, bool]] = {}

    def place(
        self,
        at: str,
        name: str,
        tensor: Any,
        key: Any,
        stored: _Stored,
        known: Any = None,
        there: str = "in the checkpoint",
    ) -> tuple[torch.Tensor, Box] | None:
        """Returns this rank's memory of a tensor, and the part of the stored tensor that fills it.
        If the shapes differ, notes this and returns None.

        Args:
            at, name: the tensor's place for messages, and its name in the state.
            key: equal for names that receive the same stored tensor.
            stored: the stored tensor.
            known: the argument for the reader of tied.conflicts(). Default: stored.
            there: where the stored tensor is, for messages.

        Raises:
            TypeError: the tensor cannot be filled.
        """
        check_shape(at, tensor)
        shape = tuple(tensor.shape)
        is_fitting = tuple(stored.shape) == shape
        first, fits = self._firsts.setdefault(identity_of(tensor), (name, is_fitting))
        if is_fitting != fits and self._fit.mismatched == "keep":
            self.misfits.append(
                f"{at} and {first!r} are one tensor, but only one of them has its shape {there}: "
                'leave the other one out, with rename={"its name": None}'
            )
        if not is_fitting:
            self.note_mismatch(name, f"{at} has shape {[*shape]}, but {[*stored.shape]} {there}")
            return None
        self._names.add(name)
        if stored.dtype != tensor.dtype:
            self.cast.append(name)
            if self._fit.dtype == "raise":
                self.misfits.append(f"{at} is {tensor.dtype}, but {stored.dtype} {there}")
        local, box = dtensor_part(at, tensor) if is_sharded(tensor) else (tensor, whole(shape))
        _check_target(local, stored, at)
        self.tied.add(at, local, box, key, stored if known is None else known)
        return local, box

    @property
    def is_refused(self) -> bool:
        """Whether some tensors do not fit because of their shape."""
        return bool(self.mismatched) and self._fit.mismatched == "error"

    def note_mismatch(self, name: str, misfit: str) -> None:
        """Notes a tensor with another stored shape, which stays as it is or is a misfit."""
        self.mismatched.append(name)
        if self._fit.mismatched == "error":
            self._names.add(name)
            self.misfits.append(misfit)

    def lost(self) -> list[str]:
        """Returns a message about overwritten tensors that would not be filled, if there are
        any.
        """

        def stays(name: str) -> bool:
            for optimizer, staying in self.optimizers.items():
                if name.startswith(f"{optimizer}/") or not optimizer:
                    return name in staying
            return True

        lost = [name for name in self._overwritten if name not in self._names and stays(name)]
        advice = (
            ", and their old values in the state may have been overwritten (create the state "
            "again, and restore this step by its number)"
        )
        unkeepable = [name for name in lost if name in self.mismatched]
        absent = [name for name in lost if name not in unkeepable]
        reasons = [f"{listed(map(repr, unkeepable))} cannot be kept{advice}"] if unkeepable else []
        return [*reasons, missing_from_checkpoint(absent, advice)] if absent else reasons


def part_at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Returns a view of a rectangle of a tensor."""
    parts = zip(box.offsets, box.sizes, strict=True)
    return tensor[tuple(slice(offset, offset + size) for offset, size in parts)]


def check_shape(at: str, tensor: Any) -> None:
    """Raises TypeError for a tensor without a shape."""
    if tensor.is_nested:
        raise TypeError(
            f"{at} is a nested tensor, which cannot be restored in place: put it into a dict or a "
            "list, where a Checkpointer's restore() replaces it"
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(f"{at} has no shape (yet): it cannot be restored in place")


def _check_target(tensor: torch.Tensor, saved: Any, path: str) -> None:
    """Raises TypeError if the saved value cannot fill the tensor's memory."""
    meta, kind = False, str(torch.strided)
    if isinstance(saved, torch.Tensor):
        meta, kind = saved.is_meta, _memory_kind(saved)
    if tensor.is_meta != meta:
        where = "is" if tensor.is_meta else "was saved"
        why = f"{where} on the meta device, where tensors have no values"
    elif _memory_kind(tensor) != kind:
        why = f"is {_memory_kind(tensor)}, but {kind} in the checkpoint"
    elif kind == str(torch.strided) and _may_overlap(tensor):
        why = "has elements that share memory, as after expand() (clone() it first)"
    else:
        return
    raise TypeError(f"{path} {why}: it cannot be restored in place")


def _memory_kind(tensor: torch.Tensor) -> str:
    return "quantized" if tensor.is_quantized else str(tensor.layout)


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Returns whether two elements may share memory."""
    if tensor.numel() < 2 or tensor.is_contiguous():
        return False
    extent = 0  # distance of the last element from the first, along the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= extent:
                return True
            extent += (size - 1) * stride
    return False
