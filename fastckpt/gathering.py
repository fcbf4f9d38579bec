"""Small shards of one node gathered into the file of one rank, through memory that processes share.

Responsible for that memory, for the file's layout over the shards of several ranks, and for the
bytes that arrive being those that were staged. It must not know how files are made or committed,
nor which ranks gather.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import threading
import zlib
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from typing import NamedTuple

from fastckpt.agreement import Round
from fastckpt.errors import CheckpointError
from fastckpt.formats import safetensors
from fastckpt.formats.shard_index import (
    PER_RANK,
    Piece,
    ShardIndex,
    entry_name,
    per_rank_key,
)
from fastckpt.handle import SaveHandle
from fastckpt.image import Image
from fastckpt.nodes import Neighbour, groups
from fastckpt.shard import Shard, index_of
from fastckpt.shards import Box
from fastckpt.staging import Staging, stager_count
from fastckpt.storage import Storage, reported
from fastckpt.transfer import Transfer

_WHAT = "memory that ranks share"
_CRC_BYTES = 4
GATHERED_BYTES_MAX = 256 << 20  # a shard from this on has a file of its own


class Pool:
    """Files in memory for other processes to read, used by one save after the other.

    They have no names (memfd_create(2)), so whatever becomes of this process, none stays behind.

    Attributes:
        neighbours: ranks of this node, once they have met.
        is_settled: whether all ranks know theirs: a save in which they met was committed.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._taken: list[tuple[Storage, int, SaveHandle]] = []
        self.neighbours: list[Neighbour] = []
        self.is_settled = False

    def take(self, storage: Storage, handle: SaveHandle) -> int:
        """A descriptor for a save, until that is done: then all have read what they will."""
        with self._lock:
            for number, (_storage, fd, earlier) in enumerate(self._taken):
                if earlier.done():
                    self._taken[number] = (storage, fd, handle)
                    return fd
            with reported("open", _WHAT):
                fd = storage.scratch()
            self._taken.append((storage, fd, handle))
            return fd

    def close(self) -> None:
        """Frees them; no save is in flight."""
        with self._lock:
            taken, self._taken = self._taken, []
        for storage, fd, _handle in taken:
            if os.getpid() == self._pid:  # a child of fork() has none of them
                storage.close(fd)


class Lent(NamedTuple):
    """Where one rank's shard lies: behind its image its index, and the CRC-32 of each entry."""

    pid: int
    fd: int
    image_nbytes: int
    index_nbytes: int
    crcs: int
    crc32: int  # of what is behind the image


def describe(image: Image) -> None:
    """Has the CRC-32 of each entry of a safetensors image reported, by slots beyond its end."""
    for number in range(1, len(image.segments) // 3):
        image.slots.extend((image.body_nbytes + _CRC_BYTES * (number - 1), number))


class Gathering:
    """The exchange of shards in one save on one rank.

    Args:
        pool: of this rank's Checkpointer.
        staging: copies, and has backends.
        agreement: the save's round.
        handle: of the save.
        count: of files for this node.
    """

    def __init__(
        self, pool: Pool, staging: Staging, agreement: Round, handle: SaveHandle, count: int
    ) -> None:
        self._pool = pool
        self._count = count
        self._staging = staging
        self._agreement = agreement
        self._handle = handle

    def exchange(
        self,
        shard: AnyShard,
        transfer: Transfer,
        nonce: str,
        blocks_limit: int,
        moving: ExitStack,
    ) -> tuple[Image, Transfer, AnyShard]:
        """Lends this rank's shard, if it is small; gathers those of others, if that is for this
        rank to do: for the first of those that share a file.

        Args:
            shard, transfer: this rank's own, described, and on its way to memory.
            nonce: of the save.
            blocks_limit: as Transfer's.
            moving: is left when nothing is to be in flight any more.

        Returns:
            What this rank writes: the image of all and its transfer; nothing, where another one
                writes; its own, if that is not small.

        Raises:
            PeerFailed: another rank failed, or is missing. StorageError: there is not memory
                enough. CheckpointError: what a rank lends cannot be read, or is damaged.
        """
        assert isinstance(shard, Shard)
        rank, agreement = self._agreement.rank, self._agreement
        if shard.is_empty or shard.image.body_nbytes >= GATHERED_BYTES_MAX:
            agreement.put("lent", b"")
            return (_nothing() if shard.is_empty else shard.image), transfer, shard
        self._lend(shard, transfer, nonce)
        ranks = next(each for each in groups(self._pool.neighbours, self._count) if rank in each)
        if any(agreement.get("lent", other) for other in ranks[: ranks.index(rank)]):
            return _nothing(), transfer, shard
        gathered = Gathered(self._staging.storage, agreement, ranks[ranks.index(rank) :], moving)
        path, threads = self._handle.path, stager_count()
        moved = Transfer(self._staging, gathered.image, path, blocks_limit, threads)
        return gathered.image, moving.enter_context(moved), gathered

    def _lend(self, shard: Shard, transfer: Transfer, nonce: str) -> None:
        """Puts what was staged where the rank that gathers finds it, and says so."""
        storage, nbytes = self._staging.storage, shard.image.body_nbytes
        fd = self._pool.take(storage, self._handle)
        transfer.write_to(fd, 0, self._staging.route(fd, _WHAT, "threads", writing=True))
        transfer.wait_written()
        index = shard.index(nonce, "lent", transfer.block_crcs(), None).to_bytes()
        crcs = array("I", transfer.slot_crcs())
        end = index + crcs.tobytes()
        with reported("write", _WHAT):
            storage.write_at(fd, end, nbytes)
        lent = Lent(os.getpid(), fd, nbytes, len(index), len(crcs), zlib.crc32(end))
        self._agreement.put("lent", json.dumps(lent).encode())


def _nothing() -> Image:
    return Image(tail_nbytes=0, tail=lambda _blocks, _slots: b"")


class _Entry(NamedTuple):
    """One entry of the file: where it lies, its checksum, and what it is; None: the first rank's
    own values.
    """

    entry: safetensors.Entry
    crc: int
    piece: Piece | None


class Gathered:
    """The shards of several ranks as one. Has what a Shard has.

    Args:
        storage: opens the others' memory.
        agreement: the save's round.
        ranks: that may lend theirs, the one that gathers first.
        stack: keeps the memory mapped.

    Raises:
        PeerFailed: one of them failed, or is missing.
        CheckpointError: what one of them lends cannot be read, or is damaged.
    """

    is_empty = False

    def __init__(
        self, storage: Storage, agreement: Round, ranks: Sequence[int], stack: ExitStack
    ) -> None:
        self._rank = ranks[0]
        self._entries: list[_Entry] = []
        owners: list[object] = []
        for rank in ranks:
            record = agreement.get("lent", rank)
            if not record:
                continue
            lent = Lent(*json.loads(record))
            memory = _mapped(storage, lent, rank, stack)
            owners.append(memory)
            self._entries += _entries(memory, lent, rank, own=rank == ranks[0])
        entries = [each.entry for each in self._entries]
        self.image, self._offsets = safetensors.layout(entries, owners, {"format": "pt"})
        describe(self.image)

    def check(self, slot_crcs: Sequence[int]) -> None:
        """Makes sure that what went to the file is what the ranks staged.

        Raises:
            CheckpointError: it is not.
        """
        order = sorted(zip(self._offsets, self._entries, strict=True), key=lambda each: each[0])
        for (_offset, each), found in zip(order, slot_crcs, strict=True):
            if each.crc != found:
                raise CheckpointError(
                    f"{each.entry.name!r} changed between the rank that staged it and rank "
                    f"{self._rank}, which writes it: its CRC-32 differs; nothing was committed"
                )

    def index(
        self, nonce: str, name: str, block_crcs: list[int], frames: tuple[int, ...] | None
    ) -> ShardIndex:
        """As Shard's."""
        pieces: list[Piece] = []
        per_rank = None
        for (entry, _crc, piece), begin in zip(self._entries, self._offsets, strict=True):
            if piece is None:
                per_rank = (begin, prod(entry.shape))
            else:
                pieces.append(piece._replace(begin=begin))
        return index_of(self._rank, self.image, nonce, name, block_crcs, frames, pieces, per_rank)


def _mapped(storage: Storage, lent: Lent, rank: int, stack: ExitStack) -> mmap.mmap:
    nbytes = lent.image_nbytes + lent.index_nbytes + _CRC_BYTES * lent.crcs
    try:
        fd = storage.open_scratch(lent.pid, lent.fd)
        try:
            memory = mmap.mmap(fd, nbytes)
        finally:
            storage.close(fd)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the shard of rank {rank} cannot be read from process {lent.pid}: {error}; nothing "
            "was committed: writers_per_node is for ranks that may see each other's memory"
        ) from error
    stack.callback(memory.close)
    return memory


def _entries(memory: mmap.mmap, lent: Lent, rank: int, *, own: bool) -> list[_Entry]:
    """What one rank lends, in the order of its image."""
    end = memory[lent.image_nbytes :]
    if zlib.crc32(end) != lent.crc32:
        raise CheckpointError(f"what rank {rank} says of its shard is damaged: its CRC-32 differs")
    index = ShardIndex.from_bytes(end[: lent.index_nbytes])
    places: list[tuple[int, str, str, tuple[int, ...], Piece | None]] = [
        (at, entry_name(key, shape, box), dtype, box.sizes, Piece(key, dtype, shape, box, at))
        for key, dtype, shape, box, at in index.pieces
    ]
    if index.per_rank is not None:
        begin, nbytes = index.per_rank
        name = PER_RANK if own else per_rank_key(rank)
        box = Box((0,), (nbytes,))
        piece = None if own else Piece(name, "U8", box.sizes, box, begin)
        places.append((begin, name, "U8", box.sizes, piece))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    crcs = array("I", end[lent.index_nbytes :])
    return [
        _Entry(safetensors.Entry(name, safetensors.DTYPES[dtype], sizes, address + at), crc, piece)
        for (at, name, dtype, sizes, piece), crc in zip(sorted(places), crcs, strict=True)
    ]


AnyShard = Shard | Gathered
