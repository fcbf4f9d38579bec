"""Tensors whose elements are at known positions in files. They are read by rows, and verified if
the file has checksums of blocks.

Responsible for turning parts of tensors into rows of files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

import torch

from fastckpt.engine.staging import Staging
from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats.strict_json import KINDS_MAX
from fastckpt.lazy.source import Rest, Shard, Stored, Unreadable, Wanted
from fastckpt.plan.boxes import CopyRow, blocks_of, row_major, strided_copies, whole
from fastckpt.reading.kept_blocks import KeptBlocks
from fastckpt.reading.verified import Body
from fastckpt.state.targets import takes_bytes

P = TypeVar("P")


class Described(Mapping[str, Stored], Generic[P]):
    """A mapping of names to tensors.

    Args:
        places: the position of each tensor, by name.
        describe: returns the tensor at a position.
    """

    def __init__(self, places: Mapping[str, P], describe: Callable[[P], Stored]) -> None:
        self._places, self._describe = places, describe

    def __getitem__(self, name: str) -> Stored:
        return self._describe(self._places[name])

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def items(self) -> ItemsView[str, Stored]:
        return _Items(self)

    def pairs(self) -> Iterator[tuple[str, Stored]]:
        """Returns an iterator over names and tensors."""
        return zip(self._places, map(self._describe, self._places.values()), strict=True)


class _Items(ItemsView[str, Stored]):
    """The items of Described, iterated without a lookup of each name."""

    _mapping: Described[object]

    def __iter__(self) -> Iterator[tuple[str, Stored]]:
        return self._mapping.pairs()


_RUNS_MAX = 64  # more copies to a device go through the host: each takes microseconds to begin


class Form(NamedTuple):
    """The attributes that many tensors have in common.

    Attributes:
        file: the number of the file.
        dtype, shape: the tensor's.
        strides: the tensor's strides, in elements.
        is_conj, is_neg: whether the elements are the conjugates or the negatives of the stored
            ones.
        unreadable: see Stored.
    """

    file: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_conj: bool = False
    is_neg: bool = False
    unreadable: Unreadable | None = None


# A tensor's form, and where its first element lies: in a record of the file, if it has any, so many
# bytes behind the record's beginning. It needs so many bytes of the record.
Place = tuple[Form, str, int, int]


class _Part(NamedTuple):
    """A requested part, and the memory that receives its bytes: the target's, or host memory."""

    want: Wanted
    memory: torch.Tensor
    strides: tuple[int, ...]  # of the part in the memory
    begin: int  # of the part in the file
    steps: tuple[int, ...]  # in the file, along the dimensions of the memory


class _Forms:
    """The descriptions of tensors, one for each form."""

    def __init__(self, bodies: Sequence[Body]) -> None:
        self._bodies = bodies
        self._described: dict[int, tuple[Form, Stored]] = {}  # by the identity of the form

    def stored(self, place: Place) -> Stored:
        form = place[0]
        entry = self._described.get(id(form))
        return self._describe(form) if entry is None else entry[1]

    def _describe(self, form: Form) -> Stored:
        shards = (Shard(self._bodies[form.file].path, whole(form.shape)),)
        repeated = frozenset(dim for dim, stride in enumerate(form.strides) if not stride)
        stored = Stored(form.dtype, form.shape, shards, repeated, form.unreadable)
        if len(self._described) >= KINDS_MAX:
            self._described.clear()
        self._described[id(form)] = form, stored
        return stored


class ExtentsSource:
    """A Source of undivided tensors in files that stay open.

    Args:
        kind: the name of the format for users.
        staging: reads the files.
        bodies: the files. A tensor may also be in the tail after a body.
        places: the position of each tensor, by name.
        close: closes the files.
        rest: the checkpoint's other values; None: there are none, and names are not paths of keys.
        begin_of: returns the offset of a record in the file, or raises; default: there are no
            records.
        kept: keeps blocks of these files and others; default: of these alone.

    Attributes:
        stored: returns the tensor at a position.
    """

    def __init__(
        self,
        kind: str,
        staging: Staging,
        bodies: Sequence[Body],
        places: Mapping[str, Place],
        close: Callable[[], None],
        rest: Rest | None = None,
        begin_of: Callable[[str], int] = len,
        kept: KeptBlocks | None = None,
    ) -> None:
        self.kind = kind
        self.facts: dict[str, int | str] = {"files": len(bodies)}
        self.is_verified = bool(bodies) and all(body.index.block_crcs for body in bodies)
        self.rest, self.has_paths = rest or Rest(), rest is not None
        self.stored = _Forms(bodies).stored
        self.tensors: Mapping[str, Stored] = Described(places, self.stored)
        self._places, self._begin_of = places, begin_of
        self._staging, self._bodies, self._close = staging, bodies, close
        self._lock = threading.Lock()
        self._routed: dict[int, Body] = {}
        self._kept = kept or KeptBlocks()
        self._files = ExitStack()

    def _body(self, file: int) -> Body:
        """Returns a file with the route for its reads. The route is chosen only once, because it
        takes long to find which parts of a large file are in the page cache.
        """
        with self._lock:
            if file not in self._routed:
                body = self._bodies[file]
                own = self._staging.own(body.file, self._files)
                route = self._staging.input_route(own)
                self._routed[file] = replace(body, file=own, route=route)
            return self._routed[file]

    def read(self, wanted: Sequence[Wanted]) -> None:
        parts: dict[int, list[_Part]] = {}
        for want in wanted:
            if want.box.numel:
                parts.setdefault(self._form(want).file, []).append(self._part(want))
        for file, its in parts.items():
            body = self._bodies[file]
            end = body.index.body_nbytes
            self._move(file, [part for part in its if part.begin < end])
            for part in its:
                if part.begin >= end:
                    _copy(body.index.tail, part.begin - end, part.memory)
        with torch.no_grad():
            for want, memory, strides, _begin, _steps in chain.from_iterable(parts.values()):
                if memory is not want.target:
                    values = memory.as_strided(want.box.sizes, strides)
                    form = self._form(want)
                    values = values.conj() if form.is_conj else values
                    want.target.copy_(values.neg() if form.is_neg else values)

    def positions(self) -> Mapping[str, tuple[str, int]]:
        return {
            name: (self._bodies[form.file].path, begin + (self._begin_of(record) if record else 0))
            for name, (form, record, begin, _nbytes) in self._places.items()
        }

    def _form(self, want: Wanted) -> Form:
        return self._places[want.name][0]

    def _part(self, want: Wanted) -> _Part:
        (form, record, begin, _nbytes), sizes = self._places[want.name], want.box.sizes
        dtype, begin = want.target.dtype, begin + (self._begin_of(record) if record else 0)
        is_in_body = begin < self._bodies[form.file].index.body_nbytes
        begin += dtype.itemsize * sum(map(int.__mul__, want.box.offsets, form.strides))
        # In the file, the dimensions of a transposed tensor have another order.
        order = [*range(len(sizes))]
        if not _is_ascending(sizes, form.strides):
            order.sort(key=lambda dim: -form.strides[dim])
        ordered = tuple(sizes[dim] for dim in order)
        steps = tuple(form.strides[dim] for dim in order)
        if not is_in_body or not _is_ascending(ordered, steps):
            # Elements overlap: everything from the first to the last is read, and they are picked
            # from that.
            span = 1 + sum(step * (size - 1) for size, step in zip(ordered, steps, strict=True))
            memory = torch.empty(span, dtype=dtype, device="cpu")
            return _Part(want, memory, form.strides, begin, (1,))
        strides = [0] * len(sizes)
        for dim, stride in zip(order, row_major(ordered), strict=True):
            strides[dim] = stride
        part = _Part(want, want.target, tuple(strides), begin, steps)
        is_as_stored = order == sorted(order) and not form.is_conj and not form.is_neg
        if is_as_stored and takes_bytes(want.target, self._staging.devices.readable()):
            is_on_host = want.target.device.type == "cpu"
            if is_on_host or sum(row[3] for row in self._rows(part)) <= _RUNS_MAX:
                return part
        return part._replace(memory=torch.empty(ordered, dtype=dtype, device="cpu"))

    def _rows(self, part: _Part) -> list[CopyRow]:
        """Returns the rows that copy a part's bytes to its memory."""
        memory, sizes = part.memory, tuple(part.memory.shape)
        return strided_copies(
            sizes,
            part.begin,
            part.steps,
            memory.data_ptr(),
            row_major(sizes),
            memory.element_size(),
        )

    def _move(self, file: int, parts: Sequence[_Part]) -> None:
        rows = sorted(row for part in parts for row in self._rows(part))
        if not rows:
            return
        body = self._body(file)
        if all(part.memory.device.type == "cpu" for part in parts) and self._kept.gives(body, rows):
            return
        devices = self._staging.devices.reads(
            part.memory.untyped_storage() for part in parts if part.memory.device.type != "cpu"
        )
        with closing(body.stream(blocks_of(rows, body.index.block_bytes))) as stream:
            body.move(stream, rows, devices.ranges)
            body.check(stream, stream.arrive())

    def close(self) -> None:
        try:
            self._kept.clear()
            self._files.close()
        finally:
            self._close()


def _copy(tail: bytes, begin: int, memory: torch.Tensor) -> None:
    """Copies the bytes from `begin` on to a tensor's memory."""
    nbytes = memory.numel() * memory.element_size()
    if begin + nbytes > len(tail):
        raise CorruptCheckpoint("a tensor reaches beyond the end of its file")
    part = torch.frombuffer(bytearray(tail[begin : begin + nbytes]), dtype=torch.uint8)
    memory.copy_(part.view(memory.dtype))


def _is_ascending(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether elements in row-major order have ascending addresses, perhaps with gaps."""
    inner = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1:
            if stride < inner:
                return False
            inner = size * stride
    return True
