"""Peers: sends the files of a node's ranks to the memory of neighbouring nodes, and fetches them
back.

The receiver verifies a file before it renames the file to its final name. It compares the file with
the manifest, which every node has published, and with the CRC-32 of each block.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from fastckpt.arguments.environment import Memory
from fastckpt.arguments.quantities import shown_size
from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError
from fastckpt.formats.manifest import MANIFEST, MANIFEST_BYTES_MAX, Manifest
from fastckpt.ranks.peer_link import Listener, PeerLink, connected
from fastckpt.saving.pipeline import current
from fastckpt.saving.ring import Ring
from fastckpt.steps.copies import StepCopies, write_parts
from fastckpt.steps.newest_whole import readable
from fastckpt.steps.posix import PosixSteps
from fastckpt.steps.store import Committed
from fastckpt.storage import atomic
from fastckpt.storage.file_system import reported
from fastckpt.tiers.nodes import RanksByNode

log = logging.getLogger("fastckpt")

_PART_OF_TIMEOUT = 3  # ranks wait for each other while one waits for a neighbour
_LOCK_POLL_S = 0.02


class Peers:
    """One rank's exchange of files with its neighbours: it sends, fetches and serves files.

    Args:
        memory: the caller's argument.
        steps: the steps of this node.
        ring: recycles files of removed steps.
        rank: this rank.
        host: the address at which this rank listens.
        timeout_s: how long ranks wait for each other.

    Raises:
        ValueError: this rank cannot listen at `host`.
    """

    def __init__(
        self,
        memory: Memory,
        steps: PosixSteps,
        ring: Ring,
        rank: int,
        host: str,
        timeout_s: float,
    ) -> None:
        self._memory, self._steps, self._ring, self._rank = memory, steps, ring, rank
        self._within_s = timeout_s / _PART_OF_TIMEOUT
        # The holder limits the rate of each connection.
        self._turn: AbstractContextManager[Any] = nullcontext()
        if memory.rate_bytes is not None:
            self._turn = threading.Lock()
        try:
            self._listener = Listener(host)
        except (OSError, TypeError) as error:  # a TypeError: it cannot be a host's name
            raise ValueError(
                f"cannot listen at {host!r} ({error}): pass Memory(address=...) with an address of "
                "this node"
            ) from None
        self.address = self._listener.address
        self._secret = b""
        self._nodes = RanksByNode([0])
        self._addresses: list[tuple[str, int]] = []
        self._neighbours: dict[int, list[int]] = {}
        self._passed_until: dict[
            int, float
        ] = {}  # ranks that hung, and until when they are skipped

    def begin(self, nodes: RanksByNode, listeners: Sequence[Sequence[Any]], secret: str) -> None:
        """Sets the address and the group of each rank, and starts the server."""
        self._nodes, self._secret = nodes, bytes.fromhex(secret)
        self._addresses = [(str(host), int(port)) for host, port, _group in listeners]
        groups = [str(group) for _host, _port, group in listeners]
        self._neighbours = {first: self._chosen(first, groups) for first in nodes.firsts}
        self._listener.start(self._secret, self._serve)

    def close(self) -> None:
        """Stops the server. Idempotent."""
        self._listener.close()

    # ---- which node has whose files

    def _chosen(self, first: int, groups: Sequence[str]) -> list[int]:
        """Chooses the nodes that hold copies of a node's files; returns their first ranks. The next
        nodes of other groups come first, then nodes of the same group.
        """
        firsts, own = self._nodes.firsts, groups[first]
        place = firsts.index(first)
        ring = firsts[place + 1 :] + firsts[:place]
        apart = [other for other in ring if groups[other] != own]
        # Nodes of one group begin at different ones, so that the copies are spread evenly.
        turn = sum(groups[other] == own for other in firsts[:place]) % max(1, len(apart))
        near = [other for other in ring if groups[other] == own]
        return [*apart[turn:], *apart[:turn], *near][: self._memory.peers]

    def neighbours(self, first: int) -> list[int]:
        """Returns the first ranks of the nodes that hold copies of a node's files."""
        return self._neighbours[first]

    def sources(self, first: int) -> list[int]:
        """Returns the ranks on other nodes whose files a node holds."""
        near = [other for other, holders in self._neighbours.items() if first in holders]
        return [rank for other in near for rank in self._nodes.beside(other)]

    def _rank_on(self, first: int) -> int:
        """Returns the rank on another node with which this rank communicates."""
        own, others = self._nodes.beside(self._rank), self._nodes.beside(first)
        return others[own.index(self._rank) % len(others)]

    def _named(self, rank: int) -> str:
        return "rank {} at {}:{}".format(rank, *self._addresses[rank])

    @contextmanager
    def _linked(self, rank: int) -> Iterator[PeerLink]:
        """Yields a connection to a rank. After a timeout, the rank is skipped for a while."""
        if time.monotonic() < self._passed_until.get(rank, 0.0):
            raise TimeoutError("the rank did not answer an earlier request in time")
        try:
            with connected(self._addresses[rank], self._secret, self._within_s) as link:
                yield link
        except TimeoutError:
            self._passed_until[rank] = time.monotonic() + _PART_OF_TIMEOUT * self._within_s
            raise

    # ---- sending, right after the commit on the nodes

    def send(self, name: str, manifest: Manifest, files: Mapping[str, int]) -> str:
        """Sends files of a step to the neighbours within a third of the timeout. `files` maps names
        to sizes. Returns which neighbours did not receive all files, and why; "" if all did.
        """
        near = self.neighbours(self._nodes.first(self._rank))
        if too_slow := self._too_slow(sum(files.values()), len(near)):
            return too_slow
        troubles, until = [], time.monotonic() + self._within_s
        for rank in map(self._rank_on, near):
            try:
                if time.monotonic() > until:
                    raise TimeoutError("earlier neighbours used up the time")
                why = self._sent(rank, name, manifest.nonce, files)
            except (OSError, CheckpointError) as error:
                why = str(error) or type(error).__name__
            if why:
                troubles.append(f"sending to {self._named(rank)} failed: {why}")
        return "; ".join(troubles)

    def _too_slow(self, nbytes: int, count: int) -> str:
        """Returns why `nbytes` bytes cannot reach `count` neighbours in time; "" if they can."""
        rate = self._memory.rate_bytes
        takes_s = 0.0 if rate is None else nbytes * max(1, count - 1) / rate
        if takes_s <= self._within_s:
            return ""
        return (
            f"sending {shown_size(nbytes)} to each neighbour ({count}) takes {takes_s:.0f} s at "
            f"Memory(rate={self._memory.rate!r}), but may take only a third of timeout_s, "
            f"{self._within_s:.0f} s: raise the rate or timeout_s"
        )

    def _sent(self, rank: int, name: str, nonce: str, files: Mapping[str, int]) -> str:
        steps, storage = self._steps, self._steps.storage
        with self._linked(rank) as link:
            link.limit(time.monotonic() + self._within_s, self._memory.rate_bytes)
            for file, nbytes in files.items():
                link.send({"put": file, "nonce": nonce})
                answer = link.receive()
                if answer.get("takes"):
                    fd = storage.open(steps.path(name, file))
                    try:
                        answer = link.send_file(fd, nbytes)
                    finally:
                        atomic.close_quietly(storage, fd)
                if answer.get("error"):
                    return str(answer["error"])
        return ""

    # ---- serving, on threads of the listener

    def _serve(self, link: PeerLink) -> None:
        while True:
            link.limit(time.monotonic() + self._within_s, self._memory.rate_bytes)
            request = link.receive()
            link.limit(time.monotonic() + self._within_s)
            try:
                if "put" in request:
                    self._take_offered(link, str(request["put"]), str(request.get("nonce")))
                else:
                    self._give(link, str(request.get("get")), str(request.get("nonce")))
            except CheckpointError as error:
                link.send({"error": f"{type(error).__name__}: {error}"})
                if isinstance(error, StorageError):
                    return  # the file may still be coming

    def _step_of(self, nonce: str) -> Committed:
        for item in readable(self._steps):
            if item.manifest.nonce == nonce:
                return item
        raise CheckpointError(f"{self._steps.root!r} holds no step with the nonce {nonce}")

    def _take_offered(self, link: PeerLink, file: str, nonce: str) -> None:
        # The step's save is not over on any node, so the step is not removed.
        item = self._step_of(nonce)
        nbytes = item.manifest.sizes.get(file)
        if nbytes is None:
            raise CheckpointError(f"{file!r} is not a file of the step")
        takes = not self._has(item.name, file, nbytes)
        link.send({"takes": takes})
        if takes:
            self._receive(link, item, file, nbytes)
            link.send({})

    def _give(self, link: PeerLink, file: str, nonce: str) -> None:
        item = self._step_of(nonce)
        with self._steps.hold(item.name):
            path = self._steps.path(item.name, file)
            if file != MANIFEST and file not in item.manifest.sizes:
                raise CheckpointError(f"{file!r} is not a file of the step")
            with reported("open", path):
                fd = self._steps.storage.open(path, "regular")
            try:
                nbytes = self._steps.storage.fstat(fd).st_size
                link.send({"nbytes": nbytes, "path": path})
                link.send_file(fd, nbytes)
            finally:
                atomic.close_quietly(self._steps.storage, fd)

    def _has(self, name: str, file: str, nbytes: int) -> bool:
        with suppress(OSError):  # then it is sent
            status = self._steps.storage.status(self._steps.path(name, file))
            return status is not None and status.st_size == nbytes
        return False

    def _receive(self, link: PeerLink, item: Committed, file: str, nbytes: int) -> None:
        """Receives a file under a temporary name, verifies it and renames it. Raises OSError, and
        CorruptCheckpoint if the file is damaged or differs from the one that the manifest names.
        """
        storage, path = self._steps.storage, self._steps.path(item.name, file)
        self._make_way(path)
        with atomic.temporary(storage, path) as (new, temporary):
            with self._ring.lent(file, nbytes, temporary) as recycled:
                if recycled is None:
                    with reported("allocate", path):  # an error here goes to the sender
                        storage.allocate(new, nbytes)
                fd = new if recycled is None else recycled
                crcs = write_parts(storage, fd, path, link.receive_parts(nbytes))
            self._verify(item, file, os.path.basename(temporary), crcs)
            with reported("rename", path):
                storage.rename(temporary, path)

    def _make_way(self, path: str) -> None:
        """Removes a directory or other entry at this path, which is not part of the step; a regular
        file stays. Raises StorageError.
        """
        storage = self._steps.storage
        with reported("remove", path):
            status = storage.status(path, link=True)
            if status is None or stat.S_ISREG(status.st_mode):
                return
            log.warning("replacing %r, which is not a regular file, with a neighbour's copy", path)
            if stat.S_ISDIR(status.st_mode):
                atomic.remove_directory(storage, path, atomic.temporary_path(path))
            else:
                storage.remove(path)

    def _verify(self, item: Committed, file: str, temporary: str, crcs: list[int]) -> None:
        """Raises CorruptCheckpoint if a file is damaged. `crcs` has the CRC-32 of each of its
        blocks.
        """
        manifest, directory = item.manifest, self._steps.path(item.name)
        copies = StepCopies(self._steps.storage, current().staging, [directory])
        if file == manifest.objects.file:
            objects = manifest.objects._replace(file=temporary)
            with copies.body(replace(manifest, objects=objects)) as body:
                body.verify()
        for writer in manifest.writers:
            if file == writer.index:
                copies.index(replace(writer, index=temporary), manifest.nonce)
            elif file == writer.file:
                index, _content = copies.index(writer, manifest.nonce)
                if index.codec is None and (*crcs,) == index.block_crcs:
                    return  # otherwise it is read, for an error with names
                with copies.shard(replace(index, file=temporary)) as body:
                    body.verify()

    # ---- fetching, during a restore

    def adopt(self, step: int, nonce: str, holders: Sequence[int]) -> str:
        """Creates a directory on this node for a step that other nodes hold, containing only the
        manifest; returns the directory's name. Only the first rank of a node calls this. Raises
        CheckpointError.
        """
        troubles = []
        for rank in map(self._rank_on, holders):
            try:
                with self._linked(rank) as link:
                    nbytes, _path = self._request(link, MANIFEST, nonce)
                    content = link.receive_bytes(min(nbytes, MANIFEST_BYTES_MAX))
                    link.send({})
                manifest = Manifest.from_bytes(content)
                if (manifest.step, manifest.nonce) != (step, nonce):
                    raise CheckpointError(f"its manifest belongs to another step, {manifest.step}")
                with self._steps.in_passing():
                    draft = self._steps.begin(step, passing=True)
                    try:
                        draft.commit(manifest, durable=False)
                    except BaseException:
                        draft.abandon()
                        raise
                    finally:
                        draft.close()
                return draft.name
            except (OSError, CheckpointError) as error:
                troubles.append(f"{self._named(rank)}: {str(error) or type(error).__name__}")
                log.warning("step %d could not be fetched from %s", step, troubles[-1])
        raise CheckpointError(f"its manifest could not be fetched from {'; '.join(troubles)}")

    def _request(self, link: PeerLink, file: str, nonce: str) -> tuple[int, str]:
        """Requests a file from a peer; returns the file's size and its path there."""
        link.send({"get": file, "nonce": nonce})
        answer = link.receive()
        nbytes = answer.get("nbytes")
        if not isinstance(nbytes, int) or nbytes < 0:
            raise CheckpointError(str(answer.get("error", "it sent no size")))
        return nbytes, str(answer.get("path"))

    @contextmanager
    def _alone(self, path: str) -> Iterator[None]:
        """Excludes ranks of this node that fetch the same file while the body runs. The lock is on
        `path`: the index for its shard, or the step's directory for its other files.
        """
        storage = self._steps.storage
        until = time.monotonic() + 2 * self._within_s
        with reported("lock", path):
            fd = storage.open(path, "lock")
            try:
                while not storage.lock(fd):
                    if time.monotonic() > until:
                        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                    time.sleep(_LOCK_POLL_S)
                yield
            finally:
                atomic.close_quietly(storage, fd)

    def fetch(self, item: Committed, holders: Sequence[int], file: str, is_damaged: bool) -> str:
        """Fetches a file of a step from the first holder with an intact copy, except if another
        rank has fetched it already. If `is_damaged`, replaces the file here. Returns the source of
        the copy; "" if there is none, or if this node's memory was removed.

        Raises:
            StorageError: a holder may have a copy, but the copy could not be fetched or stored.
        """
        index = next((each.index for each in item.manifest.writers if each.file == file), "")
        sizes, path = item.manifest.sizes, self._steps.path(item.name, file)
        has_index = not index or self._has(item.name, index, sizes[index])
        if not has_index and not self.fetch(item, holders, index, False):
            return ""  # without the index the file cannot be verified
        with ExitStack() as alone:
            try:
                alone.enter_context(self._alone(self._steps.path(item.name, index)))
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
                log.warning("%r could not be fetched: %s", path, error)
                return ""
            if not is_damaged and self._has(item.name, file, sizes[file]):
                return path
            return self._fetched(item, holders, file)

    def _fetched(self, item: Committed, holders: Sequence[int], file: str) -> str:
        nbytes, path = item.manifest.sizes[file], self._steps.path(item.name, file)
        troubles, number = list[str](), 0
        for rank in map(self._rank_on, holders):
            try:
                with self._turn, self._linked(rank) as link:
                    link.limit(time.monotonic() + self._within_s)
                    size, there = self._request(link, file, item.manifest.nonce)
                    if size != nbytes:
                        raise CorruptCheckpoint(f"its copy has {size} bytes, must have {nbytes}")
                    self._receive(link, item, file, nbytes)
                    link.send({})
                for why in troubles:
                    log.warning("%r could not be fetched from %s", path, why)
                return f"{self._addresses[rank][0]}:{there}"
            except (OSError, CheckpointError) as error:
                why = f"{self._named(rank)}: {str(error) or type(error).__name__}"
                if isinstance(error, CorruptCheckpoint):
                    log.warning("%r could not be fetched from %s", path, why)
                    continue
                is_late = isinstance(error, TimeoutError)  # its copy may be whole
                own = error.errno if isinstance(error, OSError) else None
                number = own or (errno.ETIMEDOUT if is_late else errno.EIO)
                troubles.append(why)
        if troubles:
            detail = f"step {item.manifest.step} could not be fetched from {'; '.join(troubles)}"
            raise StorageError("fetch", path, number, detail=detail)
        return ""
