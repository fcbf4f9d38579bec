"""Reuse: a rank's shard shares with that of the last step, on the disk, what both have in common.

The module finds the last step's shard, opens it, and decides whether what was shared may be
committed. It must not know how anything is compared or cloned.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from fastckpt.engine.reuse import CHUNK_BYTES, Cloner, OtherFile, refusal_to_clone
from fastckpt.engine.save_stats import SaveStats
from fastckpt.errors import CheckpointError, CorruptCheckpoint, Vanished
from fastckpt.formats.manifest import Writer
from fastckpt.formats.shard_index import ShardIndex
from fastckpt.plan.chunk_hashes import HASH_BYTES, ChunkHashes
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.reading.verified import opened_regular, read_small
from fastckpt.saving.image_file import ImageFile
from fastckpt.steps.root import Committed, Steps
from fastckpt.storage.file_system import naming, reported

log = logging.getLogger("fastckpt")


@dataclass(frozen=True)
class _LastShard:
    """A rank's shard in a committed step, by the name of that; its file is open for reading."""

    step: str
    index: ShardIndex
    file: OtherFile


class Reuse:
    """The reuse of the last step's shard by a rank's next one.

    Args:
        rank: this rank.
        stats: the save's numbers, which get the bytes that were reused.
    """

    def __init__(self, rank: int, stats: SaveStats) -> None:
        self._rank = rank
        self._stats = stats
        self._path = ""
        self._steps: Steps | None = None
        self._last: _LastShard | None = None
        self._cloner: Cloner | None = None

    def known(self, steps: Steps | None, nbytes: int, files: ExitStack) -> Cloner | None:
        """Returns what has the last shard's bytes, so that they need not be staged: if that shard
        was written here, so that nothing but its file has to be opened before all is staged.

        Args:
            steps: the steps among which the new one will be, unless the save fails.
            nbytes: the new shard's size.
            files: keeps the last shard's file open.
        """
        if steps is None or steps.own_index is None:
            return None
        last = _opened(steps, self._rank, files, steps.own_index)
        if last is None:
            return None
        self._steps, self._last = steps, last
        self._cloner = Cloner(steps.storage, nbytes, last.file.hashes.key, last.file)
        return self._cloner

    def open(
        self, steps: Steps, file: ImageFile, path: str, nbytes: int, make: Callable[..., str]
    ) -> None:
        """Makes the new shard's file, whose blocks are compared with the last shard's from now on
        if the file system can clone ranges, or if known() has compared them.

        Args:
            steps: the steps among which the last one is looked for.
            file, path, nbytes: the new shard's.
            make: makes the file, as ImageFile.make(), whose `allocates` it takes.
        """
        storage, self._path = steps.storage, path
        if self._cloner is not None:
            make(allocates=False)
            self._begin(file, nbytes)
            return
        if steps.is_uncloned:  # the last shard need not be looked for
            make(allocates=True)
            return
        self._steps = steps
        with ExitStack() as others:
            last = self._last = _opened(steps, self._rank, others)
            make(allocates=last is None)  # what is shared needs no blocks of its own
            file.keep_open(others.pop_all())
        refusal = refusal_to_clone(storage, file.fd, path)
        if refusal is not None:
            if not steps.is_uncloned:
                log.info(
                    "everything is written, nothing is reused, now and in later saves: %s", refusal
                )
            steps.is_uncloned = True
            if last is not None:
                file.allocate(nbytes)
            return
        if last is None:
            key, other = bytes.fromhex(secrets.token_hex(HASH_BYTES)), None
        else:
            key, other = last.file.hashes.key, last.file
        self._cloner = Cloner(storage, nbytes, key, other)
        self._begin(file, nbytes)

    def _begin(self, file: ImageFile, nbytes: int) -> None:
        assert self._cloner is not None and self._steps is not None
        if self._last is not None:
            with reported("truncate", self._path):
                self._steps.storage.truncate(file.fd, nbytes)
        file.clone_by(self._cloner)

    def hashes(self, crcs: list[int]) -> ChunkHashes | None:
        """Returns the hashes for the new shard's index, once all has been written; None if none
        were computed.

        Args:
            crcs: the CRC-32 of each block, from memory.

        Raises:
            CorruptCheckpoint: a block that the last shard has as well, by its hashes, has another
                CRC-32 there; or what had to be read from there is not what its hash says. The next
                save does not compare with that step.
            StorageError: what had to be read from there could not be.
        """
        last, cloner, steps = self._last, self._cloner, self._steps
        if cloner is None:
            return None
        assert steps is not None
        loss, refusal = cloner.loss(), cloner.refusal(self._path)
        if loss is not None:
            assert last is not None
            if isinstance(loss, CorruptCheckpoint):
                steps.known(last.step).note_read(is_whole=False)
            loss.reword(
                f"{loss}; they were to be written again, since {refusal}; nothing was committed"
            )
            raise loss
        for number in cloner.shared_blocks:
            assert last is not None
            if crcs[number] != last.index.block_crcs[number]:
                steps.known(last.step).note_read(is_whole=False)
                raise CorruptCheckpoint(
                    f"block {number} of {last.file.path!r} has the hash of what was to be saved, "
                    f"but the CRC-32 {last.index.block_crcs[number]:08x} instead of "
                    f"{crcs[number]:08x}: its index is wrong, or memory or a processor is faulty; "
                    "nothing was committed, and the next save does not reuse this step"
                )
        if refusal is not None:
            log.warning("the rest is written, not reused: %s", refusal)
        self._stats.reused_nbytes = cloner.cloned_nbytes
        return cloner.hashes

    def note(self, index: ShardIndex) -> None:
        """Keeps the new shard's index for the next save."""
        if self._steps is not None and index.hashes is not None:
            self._steps.own_index = index


def _opened(
    steps: Steps, rank: int, files: ExitStack, own: ShardIndex | None = None
) -> _LastShard | None:
    """Opens the shard of a rank in the step that was committed last, of those not known to be
    damaged. Returns None if it has none with hashes; or if it cannot be read, which is logged.

    Args:
        files: keeps the shard's file open.
        own: the shard's index; if it is another shard's, None is returned.
    """
    try:
        found, _faults = steps.committed(afresh=False)
        for item in found:
            known = steps.known(item.name)
            if not (known.is_damaged or known.is_unread):
                # Held until the file is open: that outlives its name, so retention need not wait
                # for this save.
                with steps.hold(item.name):
                    return _opened_of(steps, item, rank, files, own)
    except Vanished:
        return None  # retention was faster
    except (CheckpointError, OSError) as error:
        log.warning("everything is written, nothing is reused: %s", error)
    return None


def _opened_of(
    steps: Steps, item: Committed, rank: int, files: ExitStack, own: ShardIndex | None
) -> _LastShard | None:
    if own is not None and own.nonce != item.manifest.nonce:
        return None
    writer = next((each for each in item.manifest.writers if each.rank == rank), None)
    if writer is None:
        return None
    index = own or _index(steps, item, writer)
    hashes = index.hashes
    if hashes is None or (hashes.chunk_bytes, index.block_bytes) != (CHUNK_BYTES, BLOCK_BYTES):
        return None
    path = steps.path(item.name, index.file)
    fd = files.enter_context(opened_regular(steps.storage, path))
    with reported("open", path):
        nbytes = steps.storage.fstat(fd).st_size
    if nbytes != index.nbytes:
        raise CorruptCheckpoint(f"{path!r} has {nbytes} bytes, must have {index.nbytes}")
    return _LastShard(item.name, index, OtherFile(fd, path, nbytes, hashes))


def _index(steps: Steps, item: Committed, writer: Writer) -> ShardIndex:
    path = steps.path(item.name, writer.index)
    content = read_small(steps.storage, path, writer.index_nbytes + 1)
    with naming(path):
        return writer.parse_index(content, item.manifest.nonce)
