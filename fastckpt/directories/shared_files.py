"""Safetensors files that several ranks write together, each the elements that it holds: which bytes
of a file are this rank's, and of which dtype they are there.
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
    """Returns the CRC-32 of so many zeros, in steps that double their number."""
    crc, power, length = 0, zlib.crc32(b"\0"), 1
    while length <= nbytes:
        if nbytes & length:
            crc = combine(crc, power, length)
        power, length = combine(power, power, length), 2 * length
    return crc


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
        dtype, stored = str(self.leaf.local.dtype)[6:], str(self.dtype)[6:]
        return f"{dtype} {[*self.leaf.shape]}, {self.leaf.placement}, as {stored}"


class SharedFile:
    """A file as one rank writes it.

    Args:
        name: the file's name in its directory.
        tensors: all that the file holds, in any order; the same on all ranks.
        pieces: of each tensor, which elements this rank writes.
        metadata: as safetensors.layout()'s.
        is_first: whether this is the rank that makes the file, and writes the header.

    Attributes:
        name: the file's.
        nbytes: its size.
        image: what this rank writes: elements in the order of its memory, and the header.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[SharedTensor],
        pieces: Sequence[Sequence[Piece]],
        metadata: Mapping[str, str],
        is_first: bool,
    ) -> None:
        # Those that fill whole pages come first, since pages that hold parts of two tensors cost
        # writes of their own; then those with larger items, so that each is aligned to its items.
        order = sorted(
            range(len(tensors)),
            key=lambda number: (
                tensors[number].nbytes % PAGE_BYTES > 0,
                -tensors[number].dtype.itemsize,
            ),
        )
        entries = [
            (tensors[n].name, safetensors.NAMES[tensors[n].dtype], tensors[n].leaf.shape)
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
        self._names: list[str] = []  # of the tensors that these are of
        if is_first:
            content = torch.frombuffer(header, dtype=torch.uint8)
            self._add(content.data_ptr(), len(header), content)
            rows = [(0, 0, len(header), 1, 0, 0)]
            self._elements.append(Elements(len(header), torch.uint8, torch.uint8, 0, rows))
            self._names.append("")
        # No element may lie across two blocks: the order is that of the file. So whole pages of the
        # file are whole pages of the memory, too, and are written from there.
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
        """Returns what writes this rank's part."""
        return Scatterer(self.nbytes, self._elements)

    def names_of(self, numbers: set[int]) -> set[str]:
        """Returns the tensors of these elements, which are segments of the image, too."""
        return {self._names[number] for number in numbers}

    def joined(self, parts: Sequence[File]) -> File:
        """Returns the size and CRC-32 of the file, given what Scatterer.written() was on each rank.

        Raises:
            CheckpointError: together they have not written the bytes of the file.
        """
        whole = File(0, crc_of_zeros(self.nbytes, combine_crcs))
        for part in parts:
            whole = File(whole.nbytes + part.nbytes, whole.crc32 ^ part.crc32)
        if whole.nbytes != self.nbytes:  # no assert, for a wrong file must never be committed
            raise CheckpointError(
                f"ranks have written {whole.nbytes} bytes of {self.name!r}, which has "
                f"{self.nbytes}: this is a bug of fastckpt, please report it"
            )
        return whole


def _staged(tensor: SharedTensor) -> torch.dtype:
    """Returns the dtype in which a tensor is staged: the file's, if the host can convert it on the
    way; what comes from a device is converted when it is written.
    """
    local = tensor.leaf.local
    return tensor.dtype if local.device.type == "cpu" else local.dtype


class SharedFiles:
    """The files of a directory that ranks write together, as this rank has captured them.

    Args:
        tensors: those of each file, by its name; alike on all ranks, and in the same order.
        metadata: as safetensors.layout()'s.
        alike: names and values of what else all ranks must have alike.
        first_rank: the keys of leaves of which only the first rank's copy counts.
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
        # By `first_rank`, too, ranks know which elements are whose.
        self.structure = Description([*alike, *texts], first_rank)
        self.contents = Description([], first_rank)

    def storages(self) -> list[torch.UntypedStorage]:
        """Returns the storages that are copied."""
        return [leaf.local.untyped_storage() for leaf in self._leaves()]

    def lay_out(self, rank: int, world_size: int, seed: int) -> list[SharedFile]:
        """Returns the files as this rank writes them, and chooses samples of what all ranks hold,
        as Description.sample() does.
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
        """Drops references to what was copied."""
        self._tensors = {}
        for file in self._files:
            file.image.sources.clear()

    def _leaves(self) -> list[Leaf]:
        return [tensor.leaf for tensors in self._tensors.values() for tensor in tensors]


def _pieces(leaves: Sequence[Leaf], rank: int) -> list[list[Piece]]:
    """Returns of each leaf what this rank writes."""
    ours = [number for number, leaf in enumerate(leaves) if rank in leaf.holders]
    held = [
        Held(leaf.key, leaf.local.itemsize, leaf.shape, leaf.box, leaf.holders)
        for leaf in map(leaves.__getitem__, ours)
    ]
    pieces: list[list[Piece]] = [[] for _leaf in leaves]
    for piece in plan(held, rank):
        pieces[ours[piece.held]].append(piece)
    return pieces
