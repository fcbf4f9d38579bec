"""Small shards of one node in one file, in which each rank writes its own part.

Responsible for the file's layout over the shards of several ranks, for who writes which part of it,
and for its checksums, which are made of theirs. What ranks say of their shards goes through memory
that they share; the bytes themselves are written from where they were staged. It must not know how
files are made or committed.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from fastckpt.agreement import Round
from fastckpt.errors import CheckpointError, PeerFailed
from fastckpt.formats import safetensors
from fastckpt.formats.shard_index import (
    PER_RANK,
    Piece,
    ShardIndex,
    entry_name,
    padding_key,
    per_rank_key,
)
from fastckpt.handle import SaveHandle
from fastckpt.image import BLOCK_BYTES, Image, block_count
from fastckpt.nodes import Neighbour, groups
from fastckpt.shard import Shard, index_of
from fastckpt.shards import Box
from fastckpt.staging import combine_crcs
from fastckpt.storage import Storage, reported

_WHAT = "memory that ranks share"
GATHERED_BYTES_MAX = 256 << 20  # a shard from this on has a file of its own
# Parts begin at multiples of it, so that no two ranks write to one page; and runs that have a
# checksum end there at the latest, so that those of the file's blocks can be made of them wherever
# a part begins.
GRAIN_BYTES = 64 << 10
assert BLOCK_BYTES % GRAIN_BYTES == 0


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
    """Where a rank says what it writes: an index of a file of its own, without checksums yet."""

    pid: int
    fd: int
    nbytes: int
    header_nbytes: int
    crc32: int


class Runs:
    """The CRC-32 of each block of a file, as far as they are covered, from those of runs.

    Args:
        begin: where the first run lies in the file.

    Attributes:
        blocks: bytes and CRC-32 of what is covered of each block.
    """

    def __init__(self, begin: int) -> None:
        self.blocks: list[tuple[int, int]] = []
        self._begin = self._end = begin

    def append(self, nbytes: int, crc: int) -> None:
        """Adds what follows. No run crosses the end of a block."""
        assert self._end % BLOCK_BYTES + nbytes <= BLOCK_BYTES
        if self._end == self._begin or self._end % BLOCK_BYTES == 0:
            self.blocks.append((nbytes, crc))
        else:
            before, crc_before = self.blocks[-1]
            self.blocks[-1] = before + nbytes, combine_crcs(crc_before, crc, nbytes)
        self._end += nbytes

    def append_bytes(self, content: bytes | bytearray) -> None:
        """The same for bytes that are at hand, and may cross blocks."""
        at = 0
        while at < len(content):
            size = min(len(content) - at, BLOCK_BYTES - self._end % BLOCK_BYTES)
            self.append(size, zlib.crc32(memoryview(content)[at : at + size]))
            at += size


def is_small(shard: Shard) -> bool:
    """Whether a shard shares a file with others."""
    return not shard.is_empty and shard.image.body_nbytes < GATHERED_BYTES_MAX


def part_of(shard: Shard) -> Image:
    """What follows the header of a shard's own image, cut into segments whose checksums are
    reported: by slots beyond the end.
    """
    part = Image(tail_nbytes=0, tail=lambda _blocks, _slots: b"", sources=shard.image.sources)
    for _offset, nbytes, address in islice(shard.image.rows(), 1, None):
        end = address + nbytes
        while address < end:
            size = min(end - address, GRAIN_BYTES - part.body_nbytes % GRAIN_BYTES)
            part.append(address, size)
            address += size
    for number in range(len(part.segments) // 3):
        part.slots.extend((part.body_nbytes + 4 * number, number))
    return part


class Gathering:
    """The agreement on one file, in one save on one rank.

    Args:
        pool: of this rank's Checkpointer.
        storage: the seam.
        agreement: the save's round.
        handle: of the save.
        count: of files for this node.
    """

    def __init__(
        self, pool: Pool, storage: Storage, agreement: Round, handle: SaveHandle, count: int
    ) -> None:
        self._pool = pool
        self._count = count
        self._storage = storage
        self._agreement = agreement
        self._handle = handle

    def place(self, shard: Shard, part: Image, nonce: str) -> AnyShard:
        """Says what this rank's shard holds, and finds out which file it goes to: that of the first
        of those that share one, which makes it. All ranks call it.

        Args:
            shard: this rank's.
            part: what is written of it; see part_of().
            nonce: of the save.

        Returns:
            A Gathered, for the rank that makes the file; a Guest, for one that writes to it; the
                shard, if it is empty or has a file of its own.

        Raises:
            PeerFailed: another rank failed, or is missing. StorageError: there is not memory
                enough. CheckpointError: what a rank lends cannot be opened, or is damaged.
        """
        rank, agreement = self._agreement.rank, self._agreement
        if not is_small(shard):
            agreement.put("lent", b"")
            return shard
        self._lend(shard, nonce)
        ranks = next(each for each in groups(self._pool.neighbours, self._count) if rank in each)
        for host in ranks[: ranks.index(rank)]:
            if agreement.get("lent", host):
                return Guest(self._storage, agreement, host, part)
        return Gathered(self._storage, agreement, ranks[ranks.index(rank) :], part)

    def _lend(self, shard: Shard, nonce: str) -> None:
        storage, blocks = self._storage, block_count(shard.image.body_nbytes, BLOCK_BYTES)
        fd = self._pool.take(storage, self._handle)
        index = shard.index(nonce, "lent", [0] * blocks, None).to_bytes()
        with reported("write", _WHAT):
            storage.write_at(fd, index, 0)
        header_nbytes = shard.image.segments[1]
        lent = Lent(os.getpid(), fd, len(index), header_nbytes, zlib.crc32(index))
        self._agreement.put("lent", json.dumps(lent).encode())


class _Entry(NamedTuple):
    """A tensor of the file, and which piece it is; None: the values of the rank that makes it."""

    begin: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    piece: Piece | None


class _Part(NamedTuple):
    """What one rank writes, behind the header, where `begin` and `end` are counted from."""

    rank: int
    begin: int
    end: int
    entries: list[_Entry]


class Gathered:
    """The shards of several ranks as one, on the rank that makes their file. Has what a Shard has.

    Args:
        storage: opens the others' memory.
        agreement: the save's round.
        ranks: that may lend theirs, this one first.
        part: this rank's own.

    Attributes:
        header: the bytes before the first part.
        begin: of this rank's part, behind them.
        nbytes: of the file.

    Raises:
        PeerFailed: one of them failed, or is missing.
        CheckpointError: what one of them lends cannot be read, or is damaged.
    """

    is_empty = False

    def __init__(
        self, storage: Storage, agreement: Round, ranks: Sequence[int], part: Image
    ) -> None:
        self._agreement = agreement
        self._part = part
        lent = {rank: agreement.get("lent", rank) for rank in ranks}
        parts, end = list[_Part](), 0
        for rank in (rank for rank in ranks if lent[rank]):
            begin = -(-end // GRAIN_BYTES) * GRAIN_BYTES
            parts.append(_part(storage, Lent(*json.loads(lent[rank])), rank, begin, ranks[0]))
            end = parts[-1].end
        self._parts = parts
        self.header = bytearray(_header(parts))
        self.begin = len(self.header)
        self.nbytes = self.begin + end

    def announce(self, fd: int) -> None:
        """Tells the others that their file is there."""
        begins = {str(part.rank): self.begin + part.begin for part in self._parts}
        place = {"pid": os.getpid(), "fd": fd, "begins": begins}
        self._agreement.put("file", json.dumps(place).encode())

    def index(
        self, nonce: str, name: str, slot_crcs: Sequence[int], frames: tuple[int, ...] | None
    ) -> ShardIndex:
        """As Shard's, when this rank has written its part; waits for those of the others.

        Raises:
            PeerFailed: another rank failed, or is missing.
        """
        rank, runs, end = self._agreement.rank, Runs(0), 0
        runs.append_bytes(self.header)
        for part in self._parts:
            runs.append_bytes(bytes(part.begin - end))
            if part.rank == rank:
                told = _runs(self.begin, self._part, slot_crcs)
            else:
                told = json.loads(self._agreement.get("part", part.rank))
            for nbytes, crc in told:
                runs.append(nbytes, crc)
            end = part.end
        assert sum(nbytes for nbytes, _crc in runs.blocks) == self.nbytes
        pieces, per_rank = list[Piece](), None
        for each in (entry for part in self._parts for entry in part.entries):
            if each.piece is None:
                per_rank = (self.begin + each.begin, each.shape[0])
            else:
                pieces.append(each.piece._replace(begin=self.begin + each.begin))
        crcs = [crc for _nbytes, crc in runs.blocks]
        return index_of(rank, self.nbytes, nonce, name, crcs, frames, pieces, per_rank)


class Guest:
    """A shard that goes to another rank's file.

    Args:
        storage: opens that.
        agreement: the save's round.
        host: the rank that makes it.
        part: what this rank writes.

    Attributes:
        begin: of the part in the file; once it is open.
        nbytes: of the part.
    """

    is_empty = False
    header = b""

    def __init__(self, storage: Storage, agreement: Round, host: int, part: Image) -> None:
        self.nbytes = part.body_nbytes
        self._storage = storage
        self._agreement = agreement
        self._host = host
        self._part = part
        self.begin = 0

    def open(self) -> int:
        """The file, once it is there, for this rank to write its part.

        Raises:
            PeerFailed: another rank failed, or is missing. CheckpointError: this rank may not.
        """
        place: dict[str, Any] = json.loads(self._agreement.get("file", self._host))
        self.begin = place["begins"][str(self._agreement.rank)]
        return _opened(self._storage, self._host, place["pid"], place["fd"])

    def written(self, slot_crcs: Sequence[int]) -> None:
        """Tells the one that makes the file what this rank has written."""
        told = _runs(self.begin, self._part, slot_crcs)
        self._agreement.put("part", json.dumps(told).encode())


def _runs(begin: int, part: Image, slot_crcs: Sequence[int]) -> list[tuple[int, int]]:
    runs = Runs(begin)
    for (_offset, nbytes, _address), crc in zip(part.rows(), slot_crcs, strict=True):
        runs.append(nbytes, crc)
    return runs.blocks


def _part(storage: Storage, lent: Lent, rank: int, begin: int, host: int) -> _Part:
    """What one rank lends, laid out from `begin` on, behind the header."""
    index = ShardIndex.from_bytes(_read(storage, lent, rank))
    shift, entries = begin - lent.header_nbytes, list[_Entry]()
    for piece in index.pieces:
        name = entry_name(piece.key, piece.shape, piece.box)
        entries.append(_Entry(piece.begin + shift, name, piece.dtype, piece.box.sizes, piece))
    if index.per_rank is not None:
        at, nbytes = index.per_rank
        name, sizes = PER_RANK if rank == host else per_rank_key(rank), (nbytes,)
        values = None if rank == host else Piece(name, "U8", sizes, Box((0,), sizes), 0)
        entries.append(_Entry(at + shift, name, "U8", sizes, values))
    entries.sort(key=lambda entry: entry.begin)
    return _Part(rank, begin, index.nbytes + shift, entries)


def _read(storage: Storage, lent: Lent, rank: int) -> bytes:
    fd = _opened(storage, rank, lent.pid, lent.fd)
    try:
        with reported("read", _WHAT):
            content = storage.read_at(fd, lent.nbytes, 0)
    finally:
        storage.close(fd)
    if zlib.crc32(content) != lent.crc32:
        raise CheckpointError(f"what rank {rank} says of its shard is damaged: its CRC-32 differs")
    return content


def _opened(storage: Storage, rank: int, pid: int, fd: int) -> int:
    try:
        return storage.open_of(pid, fd)
    except FileNotFoundError:
        raise PeerFailed(f"rank {rank}: its process, {pid}, has ended", (rank,)) from None
    except OSError as error:
        raise CheckpointError(
            f"a file of rank {rank} cannot be opened through its process, {pid}: {error}; nothing "
            "was committed: writers_per_node is for ranks that may see each other's memory"
        ) from error


def _header(parts: Iterable[_Part]) -> bytes:
    """Of a safetensors file of these parts; what is between them is a tensor, too."""
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    end = 0
    for part in parts:
        if part.begin > end:
            tensors.append((padding_key(part.rank), "U8", (part.begin - end,)))
        tensors += [(entry.name, entry.dtype, entry.shape) for entry in part.entries]
        end = part.end
    return safetensors.header(tensors, {"format": "pt"}, GRAIN_BYTES)


AnyShard = Shard | Gathered | Guest
