"""Small shards of one node in one file: the ranks agree on it, and each writes its own part.

Ranks describe their shards to each other in shared memory; the shards' bytes are written from where
they were staged. The module must not know how files are made or committed.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastckpt.errors import CheckpointError, PeerFailed, ensure, telling
from fastckpt.formats.shard_index import Piece, ShardIndex
from fastckpt.handle import SaveHandle
from fastckpt.plan.image import BLOCK_BYTES, Image, block_count
from fastckpt.ranks.nodes import Neighbour, groups
from fastckpt.ranks.round import Round
from fastckpt.steps.shard import Shard, index_of
from fastckpt.steps.shared_shard_layout import (
    GRAIN_BYTES,
    BlockCrcs,
    RankPart,
    header_of,
    laid_out,
    runs_of,
)
from fastckpt.storage.file_system import Storage, reported

_WHAT = "memory that ranks share"  # the path in error messages
_NO_NONCE = "0" * 16
GATHERED_BYTES_MAX = 256 << 20  # a shard from this on has a file of its own


class SharedMemory:
    """Files in memory for other processes to read, used by one save after the other.

    They have no names (memfd_create(2)), so none stays behind when this process ends.

    Attributes:
        neighbours: the ranks of this node, once they have met.
        is_settled: whether a save in which ranks met was committed, so that all know neighbours.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._taken: list[tuple[Storage, int, SaveHandle]] = []
        self.neighbours: list[Neighbour] = []
        self.is_settled = False

    def take(self, storage: Storage, handle: SaveHandle) -> int:
        """Returns a descriptor for a save; the next save may have it when that one is done."""
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
        with self._lock:
            taken, self._taken = self._taken, []
        for storage, fd, _handle in taken:
            if os.getpid() == self._pid:  # in a child of fork() the numbers may be of other files
                storage.close(fd)

    def __del__(self) -> None:
        self.close()  # its Checkpointer was not closed; no save refers to it any more


class ShardDescription(NamedTuple):
    """A rank's description of its shard: the descriptor, size and CRC-32 of an index as for a file
    of its own but without checksums, and the header size of that file.
    """

    pid: int
    fd: int
    nbytes: int
    header_nbytes: int
    crc32: int


def is_small(shard: Shard) -> bool:
    """Returns whether a shard may share a file with others."""
    return not shard.is_empty and shard.image.body_nbytes < GATHERED_BYTES_MAX


class Gathering:
    """The agreement of one save, on one rank, on the file that its shard goes to."""

    def __init__(
        self, pool: SharedMemory, storage: Storage, agreement: Round, handle: SaveHandle
    ) -> None:
        self._pool = pool
        self._storage = storage
        self._agreement = agreement
        self._handle = handle

    def lend(self, shard: Shard) -> None:
        """Describes this rank's shard to the others. All ranks call it, and then place(). Raises
        StorageError if memory is short.
        """
        if not is_small(shard):
            self._agreement.put("lent", b"")
            return
        storage, blocks = self._storage, block_count(shard.nbytes, BLOCK_BYTES)
        fd = self._pool.take(storage, self._handle)
        index = shard.index(_NO_NONCE, "lent", [0] * blocks).to_bytes()
        with reported("write", _WHAT):
            storage.write_at(fd, index, 0)
        header_nbytes = shard.image.segments[1]
        lent = ShardDescription(os.getpid(), fd, len(index), header_nbytes, zlib.crc32(index))
        self._agreement.put("lent", json.dumps(lent).encode())

    def place(self, shard: Shard, part: Image, count: int) -> AnyShard:
        """Decides which file this rank's shard goes to. The first of the ranks that share a file
        makes it.

        Args:
            shard: this rank's.
            part: the bytes of it that are written; see shared_shard_layout.part_of().
            count: the number of files for this node.

        Returns:
            A Gathered for the rank that makes a file, a Guest for one that writes to another's, or
                the shard if it is empty or has a file of its own.

        Raises:
            PeerFailed: another rank failed or is missing. CheckpointError: a rank's description
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
    """The shards of several ranks as one, on the rank that makes their file; like a Shard in use.

    Args:
        storage, agreement: the save's.
        ranks: the ranks that may share the file, this one first.
        part: this rank's part.

    Attributes:
        head: the file's header.
        begin: the offset of this rank's part, after the header.
        nbytes: the size of the file.

    Raises:
        As Gathering.place().
    """

    is_empty = False

    def __init__(
        self, storage: Storage, agreement: Round, ranks: Sequence[int], part: Image
    ) -> None:
        self._agreement = agreement
        self._part = part
        self._crcs: list[int] = []
        lent = {rank: agreement.get("lent", rank) for rank in ranks}
        parts, end = list[RankPart](), 0
        for rank in (rank for rank in ranks if lent[rank]):
            begin = -(-end // GRAIN_BYTES) * GRAIN_BYTES
            told = ShardDescription(*json.loads(lent[rank]))
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
        """Tells the other ranks that the file is open here, and whether it takes O_DIRECT."""
        begins = {str(part.rank): self.begin + part.begin for part in self._parts}
        place = {"pid": os.getpid(), "fd": fd, "direct": is_direct, "begins": begins}
        self._agreement.put("file", json.dumps(place).encode())

    def describe(self, slot_crcs: Sequence[int]) -> None:
        """Combines the checksums of the file's blocks from those of this rank's segments and those
        that the other ranks tell, for which it waits. Raises PeerFailed.
        """
        runs, end = BlockCrcs(0), 0
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
        described = sum(nbytes for nbytes, _crc in runs.blocks)
        ensure(described == self.nbytes, f"{described} bytes are described, not {self.nbytes}")
        self._crcs = [crc for _nbytes, crc in runs.blocks]

    def wait_written(self) -> None:
        """Waits until the other ranks have written their parts. Raises PeerFailed."""
        for part in self._parts[1:]:
            self._agreement.get("written", part.rank)

    def index(self, nonce: str, name: str) -> ShardIndex:
        """Returns the index of the whole file, after describe()."""
        pieces, per_rank = list[Piece](), None
        for each in (entry for part in self._parts for entry in part.entries):
            if each.piece is None:
                per_rank = (self.begin + each.begin, each.shape[0])
            else:
                pieces.append(each.piece._replace(begin=self.begin + each.begin))
        rank = self._agreement.rank
        return index_of(rank, self.nbytes, nonce, name, self._crcs, pieces, per_rank)


class Guest:
    """A shard that goes to another rank's file.

    Attributes:
        host: the rank that makes the file.
        begin, is_direct: the part's offset, and whether the file takes O_DIRECT; once it is open.
    """

    is_empty = False

    def __init__(self, storage: Storage, agreement: Round, host: int, part: Image) -> None:
        self._storage = storage
        self._agreement = agreement
        self.host = host
        self._part = part
        self.begin, self.is_direct = 0, False
        self.head = Image.tailless()

    def open(self) -> int:
        """Waits for the file and opens it. Raises PeerFailed, or CheckpointError if this rank may
        not open a file of the other's process.
        """
        place: dict[str, Any] = json.loads(self._agreement.get("file", self.host))
        self.begin, self.is_direct = place["begins"][str(self._agreement.rank)], place["direct"]
        with _explained(self._agreement):
            fd = _opened(self._storage, self.host, place["pid"], place["fd"])
        try:
            # The host tells of a failure before it closes the file. If it has told of none, the
            # descriptor that was opened is not another file's.
            self._agreement.check()
        except BaseException:
            self._storage.close(fd)
            raise
        return fd

    def describe(self, slot_crcs: Sequence[int]) -> None:
        """Tells the host the checksums of this rank's part, which has been staged."""
        told = runs_of(self.begin, self._part, slot_crcs)
        self._agreement.put("part", json.dumps(told).encode())

    def written(self) -> None:
        """Tells the host that the part has been written."""
        self._agreement.put("written", b"")


@telling
def _explained(error: BaseException, agreement: Round) -> None:
    """Raises the save's failure instead of the body's error, if the save has failed meanwhile."""
    if isinstance(error, CheckpointError):
        agreement.check()


def _read(storage: Storage, lent: ShardDescription, rank: int) -> bytes:
    fd = _opened(storage, rank, lent.pid, lent.fd)
    try:
        with reported("read", _WHAT):
            content = storage.read_at(fd, lent.nbytes, 0)
    finally:
        storage.close(fd)
    if zlib.crc32(content) != lent.crc32:
        raise CheckpointError(
            f"rank {rank}'s description of its shard is damaged: its CRC-32 differs"
        )
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
