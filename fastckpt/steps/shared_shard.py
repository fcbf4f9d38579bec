"""Small shards of one node in one file, in which each rank writes its own part.

Responsible for ranks agreeing on that file: what they say of their shards goes through memory that
they share, the bytes themselves are written from where they were staged. It must not know how files
are made or committed.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from fastckpt.errors import CheckpointError, PeerFailed
from fastckpt.formats.shard_index import Piece, ShardIndex
from fastckpt.handle import SaveHandle
from fastckpt.plan.image import BLOCK_BYTES, Image, block_count
from fastckpt.ranks.nodes import Neighbour, groups
from fastckpt.ranks.round import Round
from fastckpt.steps.shard import Shard, index_of
from fastckpt.steps.shard_parts import GRAIN_BYTES, Part, Runs, header_of, laid_out, runs_of
from fastckpt.storage.file_system import Storage, reported

_WHAT = "memory that ranks share"
_NO_NONCE = "0" * 16
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

    def __del__(self) -> None:
        self.close()  # nobody did, and every save has let go of it


class Lent(NamedTuple):
    """A rank says here what it writes: an index of a file of its own, without checksums yet."""

    pid: int
    fd: int
    nbytes: int
    header_nbytes: int
    crc32: int


def is_small(shard: Shard) -> bool:
    """Whether a shard shares a file with others."""
    return not shard.is_empty and shard.image.body_nbytes < GATHERED_BYTES_MAX


class Gathering:
    """The agreement on one file, in one save on one rank.

    Args:
        pool: of this rank's Checkpointer.
        storage: the seam.
        agreement: the save's round.
        handle: of the save.
    """

    def __init__(self, pool: Pool, storage: Storage, agreement: Round, handle: SaveHandle) -> None:
        self._pool = pool
        self._storage = storage
        self._agreement = agreement
        self._handle = handle

    def lend(self, shard: Shard) -> None:
        """Says what this rank's shard holds. All ranks call it, and then place().

        Raises:
            StorageError: there is not memory enough.
        """
        if not is_small(shard):
            self._agreement.put("lent", b"")
            return
        storage, blocks = self._storage, block_count(shard.nbytes, BLOCK_BYTES)
        fd = self._pool.take(storage, self._handle)
        index = shard.index(_NO_NONCE, "lent", [0] * blocks, None).to_bytes()
        with reported("write", _WHAT):
            storage.write_at(fd, index, 0)
        header_nbytes = shard.image.segments[1]
        lent = Lent(os.getpid(), fd, len(index), header_nbytes, zlib.crc32(index))
        self._agreement.put("lent", json.dumps(lent).encode())

    def place(self, shard: Shard, part: Image, count: int) -> AnyShard:
        """Finds out which file this rank's shard goes to: that of the first of those that share
        one, which makes it.

        Args:
            shard: this rank's.
            part: what is written of it; see parts.part_of().
            count: of files for this node.

        Returns:
            A Gathered, for the rank that makes the file; a Guest, for one that writes to it; the
                shard, if it is empty or has a file of its own.

        Raises:
            PeerFailed: another rank failed, or is missing. CheckpointError: what a rank lends
                cannot be opened, or is damaged.
        """
        rank, agreement = self._agreement.rank, self._agreement
        if not is_small(shard):
            return shard
        ranks = next(each for each in groups(self._pool.neighbours, count) if rank in each)
        for host in ranks[: ranks.index(rank)]:
            if agreement.get("lent", host):
                return Guest(self._storage, agreement, host, part)
        return Gathered(self._storage, agreement, ranks[ranks.index(rank) :], part)


class Gathered:
    """The shards of several ranks as one, on the rank that makes their file. Has what a Shard has.

    Args:
        storage: opens the others' memory.
        agreement: the save's round.
        ranks: that may lend theirs, this one first.
        part: this rank's own.

    Attributes:
        head: the file's header.
        begin: of this rank's part, behind it.
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
        self._crcs: list[int] = []
        lent = {rank: agreement.get("lent", rank) for rank in ranks}
        parts, end = list[Part](), 0
        for rank in (rank for rank in ranks if lent[rank]):
            begin = -(-end // GRAIN_BYTES) * GRAIN_BYTES
            told = Lent(*json.loads(lent[rank]))
            with _explained(agreement):
                content = _read(storage, told, rank)
            index = ShardIndex.from_bytes(content)
            parts.append(laid_out(index, told.header_nbytes, rank, begin, ranks[0]))
            end = parts[-1].end
        self._parts = parts
        self._header = header_of(parts)
        self.head = Image.of_bytes(bytearray(self._header))
        self.begin = len(self._header)
        self.nbytes = self.begin + end

    def announce(self, fd: int, is_direct: bool) -> None:
        """Tells the others that their file is there, and whether it takes O_DIRECT."""
        begins = {str(part.rank): self.begin + part.begin for part in self._parts}
        place = {"pid": os.getpid(), "fd": fd, "direct": is_direct, "begins": begins}
        self._agreement.put("file", json.dumps(place).encode())

    def describe(self, slot_crcs: Sequence[int]) -> None:
        """Makes the checksums of the file's blocks when this rank's part, of which these are, was
        staged; waits until those of the others were.

        Raises:
            PeerFailed: another rank failed, or is missing.
        """
        runs, end = Runs(0), 0
        runs.append_bytes(self._header)
        for part in self._parts:
            runs.append_bytes(bytes(part.begin - end))
            if part.rank == self._agreement.rank:
                told = runs_of(self.begin, self._part, slot_crcs)
            else:
                told = json.loads(self._agreement.get("part", part.rank))
            for nbytes, crc in told:
                runs.append(nbytes, crc)
            end = part.end
        assert sum(nbytes for nbytes, _crc in runs.blocks) == self.nbytes
        self._crcs = [crc for _nbytes, crc in runs.blocks]

    def wait_written(self) -> None:
        """Waits until the other ranks have written their parts.

        Raises:
            PeerFailed: another rank failed, or is missing.
        """
        for part in self._parts[1:]:
            self._agreement.get("written", part.rank)

    def index(self, nonce: str, name: str) -> ShardIndex:
        """As Shard's, of what was described."""
        pieces, per_rank = list[Piece](), None
        for each in (entry for part in self._parts for entry in part.entries):
            if each.piece is None:
                per_rank = (self.begin + each.begin, each.shape[0])
            else:
                pieces.append(each.piece._replace(begin=self.begin + each.begin))
        rank = self._agreement.rank
        return index_of(rank, self.nbytes, nonce, name, self._crcs, None, pieces, per_rank)


class Guest:
    """A shard that goes to another rank's file.

    Args:
        storage: opens that.
        agreement: the save's round.
        host: the rank that makes it.
        part: what this rank writes.

    Attributes:
        host: as given.
        begin, is_direct: of the part in the file, and whether that takes O_DIRECT; once it is open.
        nbytes: of the part.
    """

    is_empty = False

    def __init__(self, storage: Storage, agreement: Round, host: int, part: Image) -> None:
        self.nbytes = part.body_nbytes
        self._storage = storage
        self._agreement = agreement
        self.host = host
        self._part = part
        self.begin, self.is_direct = 0, False
        self.head = Image.tailless()

    def open(self) -> int:
        """The file, once it is there, for this rank to write its part.

        Raises:
            PeerFailed: another rank failed, or is missing. CheckpointError: this rank may not.
        """
        place: dict[str, Any] = json.loads(self._agreement.get("file", self.host))
        self.begin, self.is_direct = place["begins"][str(self._agreement.rank)], place["direct"]
        with _explained(self._agreement):
            fd = _opened(self._storage, self.host, place["pid"], place["fd"])
        try:
            self._agreement.check()  # the host tells of a failure before that is another file's
        except BaseException:
            self._storage.close(fd)
            raise
        return fd

    def describe(self, slot_crcs: Sequence[int]) -> None:
        """Tells the one that makes the file the checksums of this rank's part, now staged."""
        told = runs_of(self.begin, self._part, slot_crcs)
        self._agreement.put("part", json.dumps(told).encode())

    def written(self) -> None:
        """Tells it that the part was written."""
        self._agreement.put("written", b"")


@contextmanager
def _explained(agreement: Round) -> Iterator[None]:
    """If the save has failed meanwhile, that is why the body fails."""
    try:
        yield
    except CheckpointError:
        agreement.check()
        raise


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


AnyShard = Shard | Gathered | Guest
