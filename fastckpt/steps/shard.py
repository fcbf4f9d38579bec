"""The shard of one writer: the pieces it writes, laid out as a file, and the index of that file.

The module must not know files, other ranks' shards, or how anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch

from fastckpt.formats import safetensors
from fastckpt.formats.shard_index import PER_RANK, Piece, ShardIndex, entry_name
from fastckpt.plan.boxes import Held, plan
from fastckpt.plan.image import BLOCK_BYTES, Image, ItemRun
from fastckpt.state.tree import Leaf

# The bits that are all ones in what is infinite or not a number: the exponent's. float8_e4m3fn has
# no infinity, and no other value with all ones but for the sign.
_NON_FINITE = {
    torch.float64: 0x7FF << 52,
    torch.float32: 0xFF << 23,
    torch.bfloat16: 0xFF << 7,
    torch.float16: 0x1F << 10,
    torch.float8_e5m2: 0x1F << 2,
    torch.float8_e4m3fn: 0x7F,
}


class Shard:
    """The file of one writer, laid out, and its index once it is written.

    Args:
        leaves, per_rank: as in Content.
        rank: this rank.

    Attributes:
        image: the file's; empty if the shard is.
        nbytes: the size of the file.
    """

    def __init__(self, leaves: Sequence[Leaf], per_rank: bytes, rank: int) -> None:
        self._rank = rank
        entries: list[safetensors.Entry] = []
        owners: list[object] = []
        is_holder: dict[int, bool] = {}  # holders are shared between leaves
        held = []
        for leaf in leaves:
            if is_holder.setdefault(id(leaf.holders), rank in leaf.holders):
                held.append(leaf)
        pieces = plan([held_of(leaf) for leaf in held], rank)
        for piece in pieces:
            leaf = held[piece.held]
            local = leaf.local
            address = local.data_ptr() + piece.begin * local.element_size()
            name = entry_name(leaf.key, leaf.shape, piece.box)
            entries.append(safetensors.Entry(name, local.dtype, piece.box.sizes, address))
            owners.append(local)
        self._pieces = [(held[piece.held], piece.box) for piece in pieces]
        self._per_rank_nbytes = len(per_rank)
        if per_rank:
            values = bytearray(per_rank)
            tensor = torch.frombuffer(values, dtype=torch.uint8)
            owners.append(tensor)
            entries.append(
                safetensors.Entry(PER_RANK, torch.uint8, (len(values),), tensor.data_ptr())
            )
        self.is_empty = not entries
        self.image, self._offsets = safetensors.layout(entries, owners, {"format": "pt"})
        if self.is_empty:
            self.image = Image.tailless()
        self.nbytes = self.image.body_nbytes

    def runs(self) -> list[ItemRun]:
        """Returns where runs of equal items begin in the file, of which the header is the first."""
        dtypes = [leaf.local.dtype for leaf, _box in self._pieces]
        dtypes += [torch.uint8] * (len(self._offsets) - len(dtypes))  # of the per_rank values
        found = [ItemRun(0, 1, False)]
        for begin, dtype in sorted(zip(self._offsets, dtypes, strict=True), key=itemgetter(0)):
            run = ItemRun(begin, dtype.itemsize, dtype.is_floating_point)
            if run[1:] != found[-1][1:]:
                found.append(run)
        return found

    def look_at_numbers(self) -> list[str]:
        """Has the image's floating-point numbers looked at; returns the names of their tensors."""
        names = []
        pieces = zip(self._pieces, self._offsets, strict=False)
        for (leaf, box), begin in sorted(pieces, key=itemgetter(1)):
            width, mask = leaf.local.element_size(), _NON_FINITE.get(leaf.local.dtype)
            if mask is not None and box.numel:
                self.image.numbers.extend((begin, begin + box.numel * width, width, mask))
                names.append(leaf.key)
        return names

    def index(
        self,
        nonce: str,
        name: str,
        block_crcs: list[int],
        codec: str | None = None,
        frames: tuple[int, ...] = (),
    ) -> ShardIndex:
        pieces = [
            Piece(leaf.key, safetensors.NAMES[leaf.local.dtype], leaf.shape, box, begin)
            for (leaf, box), begin in zip(self._pieces, self._offsets, strict=False)
        ]
        own = (self._offsets[-1], self._per_rank_nbytes) if self._per_rank_nbytes else None
        return ShardIndex(
            nonce=nonce,
            rank=self._rank,
            file=name,
            file_nbytes=self.nbytes if codec is None else sum(frames),
            nbytes=self.nbytes,
            block_bytes=BLOCK_BYTES,
            block_crcs=tuple(block_crcs),
            codec=codec,
            frames=frames,
            pieces=tuple(pieces),
            per_rank=own,
        )


def held_of(leaf: Leaf) -> Held:
    """Returns a leaf in the planner's form."""
    return Held(leaf.key, leaf.local.element_size(), leaf.shape, leaf.box, leaf.holders)
