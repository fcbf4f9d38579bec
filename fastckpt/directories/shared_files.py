"""Safetensors files that several ranks write together, each the elements that it holds: which bytes
of a file are this rank's, and of which dtype they are there.

The module must not know names of checkpoints, where files become visible, or how ranks talk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from fastckpt.engine.scattered_writes import Elements, Scatterer, number_of
from fastckpt.engine.staging import combine_crcs
from fastckpt.errors import CheckpointError
from fastckpt.formats import safetensors
from fastckpt.formats.file_list import File
from fastckpt.plan.boxes import Box, Held, Piece, copies, plan, whole
from fastckpt.plan.image import PAGE_BYTES, Image
from fastckpt.plan.layouts import Form
from fastckpt.plan.scattered_crc import crc_of_zeros
from fastckpt.ranks.same_state import Description
from fastckpt.state.tree import Leaf, comparable


class SharedTensor(NamedTuple):
    """A tensor of a file: its name and dtype there, and which leaves, by their numbers, it is made
    of.
    """

    name: str
    dtype: torch.dtype
    form: Form

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor in the file."""
        return prod(self.form.shape) * self.dtype.itemsize

    def text(self, leaves: Sequence[Leaf]) -> str:
        """Returns what all ranks must have alike of the tensor."""
        texts, is_source = list[str](), self.form.is_source
        for each in self.form.slices:
            leaf = leaves[each.source]
            held = f"{str(leaf.local.dtype)[6:]} {[*leaf.shape]}, {leaf.placement}"
            texts.append(held if is_source else f"{[*each.box]} of {leaf.key} ({held})")
        return f"{' and '.join(texts)}, as {str(self.dtype)[6:]}"


class _Run(NamedTuple):
    """Elements that follow each other in this rank's memory: which box of a tensor they are, and
    at which element of the leaf they begin.
    """

    number: int
    leaf: Leaf
    box: Box
    begin: int
    staged: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.staged.itemsize


class SharedFile:
    """A file as one rank writes it.

    Args:
        name: the file's name in its directory.
        tensors: all that the file holds, in any order; the same on all ranks.
        leaves: what these are made of, as this rank holds it.
        pieces: which elements this rank writes, by the numbers of the leaves.
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
        leaves: Sequence[Leaf],
        pieces: Mapping[int, Sequence[Piece]],
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
            (tensors[n].name, safetensors.NAMES[tensors[n].dtype], tensors[n].form.shape)
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
        runs = sorted(
            _runs(tensors, leaves, pieces),
            key=lambda run: (run.nbytes % PAGE_BYTES > 0, -run.staged.itemsize),
        )
        for run in runs:
            local, its, tensor = run.leaf.local, run.staged, tensors[run.number]
            rows = copies(whole(tensor.form.shape), 0, run.box, 0, 1)
            address = local.data_ptr() + run.begin * local.itemsize
            segment = self._add(address, run.nbytes, local)
            if its != local.dtype:
                self.image.conversions.extend((segment, number_of(local.dtype), number_of(its)))
            offset = offsets[run.number]
            self._elements.append(Elements(run.nbytes, its, tensor.dtype, offset, rows))
            self._names.append(tensor.name)

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


def _runs(
    tensors: Sequence[SharedTensor], leaves: Sequence[Leaf], pieces: Mapping[int, Sequence[Piece]]
) -> list[_Run]:
    """Returns what this rank writes of these tensors."""
    runs = list[_Run]()
    for number, tensor in enumerate(tensors):
        for its in tensor.form.slices:
            leaf = leaves[its.source]
            # In the dtype of the file, if the host can convert it on the way; what comes from a
            # device is converted when it is written.
            staged = tensor.dtype if leaf.local.device.type == "cpu" else leaf.local.dtype
            for piece in pieces.get(its.source, ()):
                for box, begin in its.runs(piece.box):
                    runs.append(_Run(number, leaf, box, piece.begin + begin, staged))
    return runs


class SharedFiles:
    """The files of a directory that ranks write together, as this rank has captured them.

    Args:
        tensors: those of each file, by its name; alike on all ranks, and in the same order.
        leaves: what these are made of, as this rank holds it; in the same order on all ranks.
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
        leaves: Sequence[Leaf],
        metadata: Mapping[str, str],
        alike: Sequence[tuple[str, str]],
        first_rank: Collection[str],
        differing: Callable[[set[str]], None],
    ) -> None:
        self.differing = differing
        self._tensors = tensors
        self._leaves = leaves
        self._metadata = metadata
        self._files: list[SharedFile] = []
        texts = [
            (tensor.name, f"{tensor.text(leaves)} in {file}")
            for file, its in tensors.items()
            for tensor in its
        ]
        # By `first_rank`, too, ranks know which elements are whose.
        self.structure = Description([*alike, *texts], first_rank)
        self.contents = Description([], first_rank)

    def storages(self) -> list[torch.UntypedStorage]:
        """Returns the storages that are copied."""
        return [leaf.local.untyped_storage() for leaf in self._leaves]

    def lay_out(self, rank: int, world_size: int, seed: int) -> list[SharedFile]:
        """Returns the files as this rank writes them, and chooses samples of what all ranks hold,
        as Description.sample() does.
        """
        pieces: dict[int, list[Piece]] = {}
        for piece in _pieces(self._leaves, rank):
            pieces.setdefault(piece.held, []).append(piece)
        self._files = [
            SharedFile(file, tensors, self._leaves, pieces, self._metadata, rank == 0)
            for file, tensors in self._tensors.items()
        ]
        of_all = comparable(self._leaves, world_size, self.contents.first_rank)
        self.contents.sample(of_all, seed)
        return self._files

    def forget(self) -> None:
        """Drops references to what was copied."""
        self._tensors, self._leaves = {}, ()
        for file in self._files:
            file.image.sources.clear()


def _pieces(leaves: Sequence[Leaf], rank: int) -> list[Piece]:
    """Returns what this rank writes of these leaves, `held` being their numbers."""
    ours = [number for number, leaf in enumerate(leaves) if rank in leaf.holders]
    held = [
        Held(leaf.key, leaf.local.itemsize, leaf.shape, leaf.box, leaf.holders)
        for leaf in map(leaves.__getitem__, ours)
    ]
    return [piece._replace(held=ours[piece.held]) for piece in plan(held, rank)]
