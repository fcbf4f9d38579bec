"""Safetensors files that several ranks write together, each the elements that it holds: which bytes
of a file are this rank's, and how they come there, converted where the file has another dtype.

The module must not know names of checkpoints, where files become visible, or how ranks talk.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from fastckpt.engine.staging import combine_crcs
from fastckpt.errors import CheckpointError
from fastckpt.formats import safetensors
from fastckpt.formats.file_list import File
from fastckpt.plan.boxes import Box, Held, Piece, copies, plan
from fastckpt.plan.image import Image
from fastckpt.plan.runs import CopyRow
from fastckpt.plan.scattered_crc import contribution, crc_of_zeros
from fastckpt.ranks.same_state import Description, Sampled
from fastckpt.state.tree import Leaf
from fastckpt.storage.file_system import Storage, patiently

# torch divides what has more elements among threads, which training needs.
_CONVERTED_AT_ONCE = 32768


class SharedTensor(NamedTuple):
    """A tensor of a file: its name and dtype there, and the part of it that this rank holds."""

    name: str
    dtype: torch.dtype
    leaf: Leaf

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor in the file."""
        return prod(self.leaf.shape) * self.dtype.itemsize

    def text(self) -> str:
        """Returns what all ranks must have alike of the tensor."""
        held, stored = str(self.leaf.local.dtype)[6:], str(self.dtype)[6:]
        return f"{held} {[*self.leaf.shape]}, {self.leaf.placement}, as {stored}"


class _Elements(NamedTuple):
    """Elements that this rank writes, which follow each other in memory.

    Attributes:
        begin, end: the bytes of the image that they are.
        held, stored: their dtypes in memory and in the file.
        offset: where in the file their tensor begins.
        rows: as boxes.copies() gives them, in elements of the tensor and of these.
    """

    begin: int
    end: int
    held: torch.dtype
    stored: torch.dtype
    offset: int
    rows: Sequence[CopyRow]

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yields where elements [first, last) go, as (offset in the file, number of elements)."""
        # Rows differ in nothing but where they begin.
        _element, _first, size, count, stride, _step = self.rows[0]
        while first < last:
            number, inside = divmod(first, size)
            row, place = divmod(number, count)
            element = self.rows[row][0] + place * stride + inside
            length = min(size - inside, last - first)
            yield self.offset + element * self.stored.itemsize, length
            first += length


class SharedFile:
    """A file as one rank writes it.

    Args:
        name: the file's name in its directory.
        tensors: all that the file holds, in any order; the same on all ranks.
        pieces: which elements this rank writes, with the numbers of tensors as `held`.
        metadata: as safetensors.layout()'s.
        is_first: whether this is the rank that makes the file, and writes the header.

    Attributes:
        name: the file's.
        nbytes: its size.
        image: what this rank writes: elements as they lie in memory, and the header.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[SharedTensor],
        pieces: Sequence[Piece],
        metadata: Mapping[str, str],
        is_first: bool,
    ) -> None:
        # Those with larger items come first, so that each is aligned to its items.
        order = sorted(range(len(tensors)), key=lambda number: -tensors[number].dtype.itemsize)
        entries = [
            (tensors[n].name, safetensors.NAMES[tensors[n].dtype], tensors[n].leaf.shape)
            for n in order
        ]
        header = bytearray(safetensors.header(entries, metadata, safetensors.LENGTH_BYTES))
        self.name, self.nbytes = name, len(header)
        offsets = [0] * len(tensors)
        for number in order:
            offsets[number] = self.nbytes
            self.nbytes += tensors[number].nbytes
        self.image = Image.tailless()
        self._elements: list[_Elements] = []
        # No element may lie across two blocks: so here those with larger items come first, too.
        for piece in sorted(pieces, key=lambda piece: -tensors[piece.held].leaf.local.itemsize):
            _name, dtype, leaf = tensors[piece.held]
            whole = Box((0,) * len(leaf.shape), leaf.shape)
            rows = copies(whole, 0, piece.box, 0, 1)
            address = leaf.local.data_ptr() + piece.begin * leaf.local.itemsize
            nbytes, how = piece.box.numel * leaf.local.itemsize, (leaf.local.dtype, dtype)
            self._add(address, nbytes, leaf.local, *how, offsets[piece.held], rows)
        if is_first:
            content = torch.frombuffer(header, dtype=torch.uint8)
            nbytes, how = len(header), (torch.uint8, torch.uint8)
            self._add(content.data_ptr(), nbytes, content, *how, 0, [(0, 0, nbytes, 1, 0, 0)])

    def _add(
        self,
        address: int,
        nbytes: int,
        owner: torch.Tensor,
        held: torch.dtype,
        stored: torch.dtype,
        offset: int,
        rows: Sequence[CopyRow],
    ) -> None:
        begin = self.image.body_nbytes
        self.image.append(address, nbytes)
        self.image.sources.append(owner)
        self._elements.append(_Elements(begin, begin + nbytes, held, stored, offset, rows))

    def writer(self, storage: Storage) -> PartWriter:
        """Returns what writes this rank's part."""
        return PartWriter(storage, self.nbytes, self._elements)

    def joined(self, parts: Sequence[File]) -> File:
        """Returns the size and CRC-32 of the file, given what PartWriter.part was on each rank.

        Raises:
            CheckpointError: together they have not written the bytes of the file.
        """
        whole = File(0, crc_of_zeros(self.nbytes, combine_crcs))
        for part in parts:
            whole = _summed(whole, part)
        if whole.nbytes != self.nbytes:  # no assert, for a wrong file must never be committed
            raise CheckpointError(
                f"ranks have written {whole.nbytes} bytes of {self.name!r}, which has "
                f"{self.nbytes}: this is a bug of fastckpt, please report it"
            )
        return whole


class PartWriter:
    """Writes blocks of one rank's part to where they belong in the file.

    Several threads may call transfer() at once. The descriptor must not have O_DIRECT.

    Args:
        storage: the seam to the file system.
        nbytes: the size of the file.
        elements: what this rank writes, in the order of its image.

    Attributes:
        part: how many bytes were written, and their contribution to the file's CRC-32.
    """

    def __init__(self, storage: Storage, nbytes: int, elements: Sequence[_Elements]) -> None:
        self._storage = storage
        self._elements = elements
        self._begins = [each.begin for each in elements]
        self._lock = threading.Lock()
        self._file_nbytes = nbytes
        self.part = File(0, 0)

    def transfer(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        """Writes the bytes of the image from this offset on; returns their number.

        Raises:
            OSError: they could not be written.
        """
        assert kind == "write"
        end, part = offset + len(memory), File(0, 0)
        number = bisect_right(self._begins, offset) - 1
        while number < len(self._elements) and self._begins[number] < end:
            each = self._elements[number]
            low, high = max(each.begin, offset), min(each.end, end)
            first = (low - each.begin) // each.held.itemsize
            part = _summed(part, self._write(fd, each, memory[low - offset : high - offset], first))
            number += 1
        with self._lock:  # only now: if a write fails, the engine may try all of them once more
            self.part = _summed(self.part, part)
        return len(memory)

    def _write(self, fd: int, each: _Elements, memory: memoryview, first: int) -> File:
        """Writes elements from the one with the number `first` on, and returns what they add."""
        held, stored, part = each.held.itemsize, each.stored.itemsize, File(0, 0)
        if each.held == each.stored:
            return self._place(fd, each, memory, first)
        for begin in range(0, len(memory) // held, _CONVERTED_AT_ONCE):
            some = memory[begin * held : (begin + _CONVERTED_AT_ONCE) * held]
            content = bytearray(len(some) // held * stored)
            converted = torch.frombuffer(content, dtype=each.stored)
            converted.copy_(torch.frombuffer(some, dtype=each.held))
            part = _summed(part, self._place(fd, each, memoryview(content), first + begin))
        return part

    def _place(self, fd: int, each: _Elements, content: memoryview, first: int) -> File:
        at, crc, itemsize = 0, 0, each.stored.itemsize
        for offset, count in each.runs(first, first + len(content) // itemsize):
            run = content[at : at + count * itemsize]
            patiently(self._storage, fd, partial(self._storage.write_at, fd, run, offset))
            crc ^= contribution(run, self._file_nbytes - offset - len(run), combine_crcs)
            at += len(run)
        return File(at, crc)


def _summed(one: File, other: File) -> File:
    """Returns what two parts of a file are together."""
    return File(one.nbytes + other.nbytes, one.crc32 ^ other.crc32)


class SharedFiles:
    """The files of a directory that ranks write together, as this rank has captured them.

    Args:
        tensors: those of each file, by its name; alike on all ranks, and in the same order.
        metadata: as safetensors.layout()'s.
        alike: names and values of what else all ranks must have alike.
        first_rank: the names of tensors of which only the first rank's copy counts.
        differing: called with the names of tensors whose contents differ between ranks.

    Attributes:
        structure, contents: describe to the other ranks which tensors are where and whose they are,
            and by samples what is in those that all ranks hold.
    """

    def __init__(
        self,
        tensors: Mapping[str, Sequence[SharedTensor]],
        metadata: Mapping[str, str],
        alike: Sequence[tuple[str, str]],
        first_rank: Iterable[str],
        differing: Callable[[set[str]], None],
    ) -> None:
        self.differing = differing
        self._tensors = tensors
        self._metadata = metadata
        self._files: list[SharedFile] = []
        texts = [
            (tensor.name, f"{tensor.text()} in {file}")
            for file, its in tensors.items()
            for tensor in its
        ]
        # By `first_rank`, too, ranks know which elements are whose.
        self.structure = Description([*alike, *texts], first_rank)
        self.contents = Description([])

    def storages(self) -> list[torch.UntypedStorage]:
        """Returns the storages that are copied."""
        return [leaf.local.untyped_storage() for leaf in self._leaves()]

    def lay_out(self, rank: int, world_size: int, seed: int) -> list[SharedFile]:
        """Returns the files as this rank writes them, and chooses samples of what all ranks hold,
        as Description.sample() does.
        """
        leaves = self._leaves()
        pieces_in: dict[str, list[Piece]] = {file: [] for file in self._tensors}
        begins = [*accumulate(map(len, self._tensors.values()), initial=0)][:-1]
        files = [*self._tensors]
        for piece in _pieces(leaves, rank):
            number = bisect_right(begins, piece.held) - 1
            pieces_in[files[number]].append(piece._replace(held=piece.held - begins[number]))
        self._files = [
            SharedFile(file, tensors, pieces_in[file], self._metadata, rank == 0)
            for file, tensors in self._tensors.items()
        ]
        common = [
            Sampled(leaf.key, leaf.local.data_ptr(), leaf.local.numel() * leaf.local.itemsize)
            for leaf in leaves
            if len(leaf.holders) == world_size > 1
        ]
        self.contents.sample(common, seed)
        return self._files

    def forget(self) -> None:
        """Drops references to what was copied."""
        self._tensors = {}
        for file in self._files:
            file.image.sources.clear()

    def _leaves(self) -> list[Leaf]:
        return [tensor.leaf for tensors in self._tensors.values() for tensor in tensors]


def _pieces(leaves: Sequence[Leaf], rank: int) -> list[Piece]:
    """Returns what this rank writes of these tensors, `held` being their numbers."""
    ours = [number for number, leaf in enumerate(leaves) if rank in leaf.holders]
    held = [
        Held(leaf.key, leaf.local.itemsize, leaf.shape, leaf.box, leaf.holders)
        for leaf in map(leaves.__getitem__, ours)
    ]
    return [piece._replace(held=ours[piece.held]) for piece in plan(held, rank)]
