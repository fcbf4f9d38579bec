"""Safetensors files that several ranks write together. This module computes the ranges and dtypes
of each rank's elements in a file.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from math import prod
from typing import NamedTuple

import torch

from fastckpt.engine.staging import Elements, Scatterer, combine_crcs, number_of
from fastckpt.errors import CheckpointError
from fastckpt.formats import safetensors
from fastckpt.formats.file_list import File
from fastckpt.plan.boxes import Held, Piece, copies, plan, whole
from fastckpt.plan.image import PAGE_BYTES, Image
from fastckpt.ranks.same_state import Description
from fastckpt.state.tree import Leaf, comparable

Combine = Callable[[int, int, int], int]  # (crc of a, crc of b, len(b)) -> crc of a + b


@lru_cache(maxsize=1024)
def crc_of_zeros(nbytes: int, combine: Combine) -> int:
    """Returns the CRC-32 of `nbytes` zeros, by repeated doubling."""
    crc, power, length = 0, zlib.crc32(b"\0"), 1
    while length <= nbytes:
        if nbytes & length:
            crc = combine(crc, power, length)
        power, length = combine(power, power, length), 2 * length
    return crc


class SharedTensor(NamedTuple):
    """A tensor of a file: its name and dtype in the file, and this rank's part of the tensor."""

    name: str
    dtype: torch.dtype
    leaf: Leaf

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.leaf.shape

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in the file, in bytes."""
        return prod(self.leaf.shape) * self.dtype.itemsize

    def text(self) -> str:
        """Returns the tensor's attributes that must be the same on all ranks."""
        dtype, stored = str(self.leaf.local.dtype)[6:], str(self.dtype)[6:]
        return f"{dtype} {[*self.leaf.shape]}, {self.leaf.placement}, as {stored}"


class SharedFile:
    """A shared file, and the part that one rank writes.

    Args:
        name: the file's name in its directory.
        tensors: all tensors of the file, in any order; the same on all ranks.
        pieces: for each tensor, the elements that this rank writes.
        metadata: like safetensors.layout()'s.
        is_first: whether this rank creates the file and writes the header.

    Attributes:
        name: the file's name.
        nbytes: the file's size.
        image: the bytes that this rank writes: elements in the order of its memory and, on the
            first rank, the header.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[SharedTensor],
        pieces: Sequence[Sequence[Piece]],
        metadata: Mapping[str, str],
        is_first: bool,
    ) -> None:
        # Tensors that fill whole pages come first, because a page with parts of two tensors costs
        # an extra write; then tensors with larger items, so that each is aligned to its items.
        order = sorted(
            range(len(tensors)),
            key=lambda number: (
                tensors[number].nbytes % PAGE_BYTES > 0,
                -tensors[number].dtype.itemsize,
            ),
        )
        entries = [
            (tensors[n].name, *safetensors.written(tensors[n].dtype, tensors[n].shape))
            for n in order
        ]
        header = bytearray(safetensors.header(entries, metadata, PAGE_BYTES))
        self.name, self.nbytes = name, len(header)
        offsets = [0] * len(tensors)
        for number in order:
            offsets[number] = self.nbytes
            self.nbytes += tensors[number].nbytes
        self.image = Image.tailless()
        self._elements: list[Elements] = []
        self._names: list[str] = []  # the tensor's name, for each of _elements
        if is_first:
            content = torch.frombuffer(header, dtype=torch.uint8)
            self._add(content.data_ptr(), len(header), content)
            rows = [(0, 0, len(header), 1, 0, 0)]
            self._elements.append(Elements(len(header), torch.uint8, torch.uint8, 0, rows))
            self._names.append("")
        # No element may span two blocks, so the order is that of the file. Then whole pages of the
        # file are also whole pages of memory, and are written directly from there.
        staged = [_staged(tensor) for tensor in tensors]
        runs = [
            (number, piece, piece.box.numel * staged[number].itemsize)
            for number, its in enumerate(pieces)
            for piece in its
        ]
        runs.sort(key=lambda run: (run[2] % PAGE_BYTES > 0, -staged[run[0]].itemsize))
        for number, piece, nbytes in runs:
            (name, dtype, leaf), its = tensors[number], staged[number]
            local = leaf.local
            rows = copies(whole(leaf.shape), 0, piece.box, 0, 1)
            segment = self._add(local.data_ptr() + piece.begin * local.itemsize, nbytes, local)
            if its != local.dtype:
                self.image.conversions.extend((segment, number_of(local.dtype), number_of(its)))
            self._elements.append(Elements(nbytes, its, dtype, offsets[number], rows))
            self._names.append(name)

    def _add(self, address: int, nbytes: int, owner: torch.Tensor) -> int:
        self.image.sources.append(owner)
        return self.image.append(address, nbytes)

    def scatterer(self) -> Scatterer:
        """Returns the Scatterer that writes this rank's part."""
        return Scatterer(self.nbytes, self._elements)

    def names_of(self, numbers: set[int]) -> set[str]:
        """Returns the names of the tensors with these elements, which are also segments of the
        image.
        """
        return {self._names[number] for number in numbers}

    def joined(self, parts: Sequence[File]) -> File:
        """Returns the size and CRC-32 of the file, given the Scatterer.written() of each rank.

        Raises:
            CheckpointError: the ranks together have not written every byte of the file.
        """
        whole = File(0, crc_of_zeros(self.nbytes, combine_crcs))
        for part in parts:
            whole = File(whole.nbytes + part.nbytes, whole.crc32 ^ part.crc32)
        if whole.nbytes != self.nbytes:  # no assert: it must never be committed
            raise CheckpointError(
                f"ranks have written {whole.nbytes} bytes of {self.name!r}, which must have "
                f"{self.nbytes}: this is a bug in fastckpt, please report it"
            )
        return whole


def _staged(tensor: SharedTensor) -> torch.dtype:
    """Returns the dtype in which a tensor is staged: the file's dtype, if the host can convert it
    during the copy. Tensors of devices are converted when they are written.
    """
    local = tensor.leaf.local
    return tensor.dtype if local.device.type == "cpu" else local.dtype


class SharedFiles:
    """The files of a directory that ranks write together, with this rank's captured tensors.

    Args:
        tensors: the tensors of each file, by the file's name; the same on all ranks, in the same
            order.
        metadata: like safetensors.layout()'s.
        alike: names and values of other settings that must be the same on all ranks.
        first_rank: the keys of leaves of which only the first rank's copy is used.
        differing: called with the names of tensors whose contents differ between ranks.

    Attributes:
        structure, contents: descriptions for the other ranks: the tensors' locations and owners,
            and samples of the contents of tensors that all ranks hold.
    """

    def __init__(
        self,
        tensors: Mapping[str, Sequence[SharedTensor]],
        metadata: Mapping[str, str],
        alike: Sequence[tuple[str, str]],
        first_rank: Collection[str],
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
        # `first_rank` also determines which rank writes which elements.
        self.structure = Description([*alike, *texts], first_rank)
        self.contents = Description([], first_rank)

    def storages(self) -> list[torch.UntypedStorage]:
        """Returns the storages that are copied."""
        return [leaf.local.untyped_storage() for leaf in self._leaves()]

    def lay_out(self, rank: int, world_size: int, seed: int) -> list[SharedFile]:
        """Returns the files with this rank's parts, and chooses samples of tensors that all ranks
        hold, like Description.sample().
        """
        leaves = self._leaves()
        pieces = iter(_pieces(leaves, rank))
        self._files = [
            SharedFile(file, its, [*islice(pieces, len(its))], self._metadata, rank == 0)
            for file, its in self._tensors.items()
        ]
        self.contents.sample(comparable(leaves, world_size, self.contents.first_rank), seed)
        return self._files

    def forget(self) -> None:
        """Drops the references to the captured tensors."""
        self._tensors = {}
        for file in self._files:
            file.image.sources.clear()

    def _leaves(self) -> list[Leaf]:
        return [tensor.leaf for tensors in self._tensors.values() for tensor in tensors]


def _pieces(leaves: Sequence[Leaf], rank: int) -> list[list[Piece]]:
    """Returns the pieces of each leaf that this rank writes."""
    ours = [number for number, leaf in enumerate(leaves) if rank in leaf.holders]
    held = [
        Held(leaf.key, leaf.local.itemsize, leaf.shape, leaf.box, leaf.holders)
        for leaf in map(leaves.__getitem__, ours)
    ]
    pieces: list[list[Piece]] = [[] for _leaf in leaves]
    for piece in plan(held, rank):
        pieces[ours[piece.held]].append(piece)
    return pieces
