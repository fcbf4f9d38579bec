"""LocalTier: the steps on this node in front of a root. It combines a PosixSteps, a Ring if the
tier is in memory, a Drainer to the root, and Peers.

The module decides whether the tier can be used, and which steps may be removed: a step that must
reach the root stays until it has been drained. survey.py determines which steps all nodes hold
together.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import threading
from contextlib import ExitStack, suppress
from typing import NamedTuple

from fastckpt.arguments.environment import Memory
from fastckpt.arguments.quantities import shown_size
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.formats.manifest import Manifest
from fastckpt.formats.step_names import DRAINED, REPLICATED, SPARES, tier_name
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.ranks.round import Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.lease import Lease
from fastckpt.saving.ring import SMALL_BYTES, Ring
from fastckpt.steps.copies import Fetch
from fastckpt.steps.newest_whole import readable
from fastckpt.steps.options import StepOptions
from fastckpt.steps.posix import PosixSteps
from fastckpt.steps.store import Committed, StepStore
from fastckpt.storage.file_system import NEW_MODE, reported, room_text
from fastckpt.storage.keep import Entry, Policy, victims
from fastckpt.storage.machine import this_machine
from fastckpt.tiers.drain import Drain, Drainer, StepInfo
from fastckpt.tiers.nodes import (
    RanksByNode,
    check_alike,
    parts_of,
    warn_of_loopback,
)
from fastckpt.tiers.peers import Peers

log = logging.getLogger("fastckpt")


class Copy(NamedTuple):
    """A node's copy of a step.

    Attributes:
        first: the first rank of the node.
        name: the step's directory on the node.
        parts: the parts that are complete on the node; see parts_of().
    """

    first: int
    name: str
    parts: list[int]


class LocalTier:
    """The local tier as one rank sees it.

    Args:
        directory: Checkpointer's `local`; it may hold steps of several roots.
        keep: how many of the newest steps stay.
        memory: the caller's Memory if the directory is in memory; else None.
        root: the steps of the root, the target of drains.
        coordinator, timeout_s: the Checkpointer's.

    Attributes:
        steps: the steps of this root in the local directory.
        root, keep, memory: the arguments.
        drainer: copies steps from the tier to the root.
        ring: the memory of the directory, if it is in memory and can be used.
        peers: the neighbours, if nodes send each other files.
        highest: on the first rank, the highest sequence number of any node's steps.
        copies_of: by nonce, the nodes' copies of each earlier job's step that is complete on the
            nodes together.
        needs_each_step: whether a step whose copy to the root failed stays until it is copied, also
            if the root has a newer one.
        useless: nonces of steps that are replaced by a later attempt or by a newer step in the
            root.
        incomplete: nonces of steps with parts that no node has.

    Raises:
        ValueError: the directory is on the root's file system, or Ring.limit() raises it.
    """

    def __init__(
        self,
        directory: str,
        keep: int,
        memory: Memory | None,
        root: StepStore,
        coordinator: Coordinator,
        timeout_s: float,
    ) -> None:
        self._storage = storage = root.storage
        self._directory = os.path.realpath(directory)
        self._refusal, self._device = "", -1
        try:
            self._device, other = self._device_of(self._directory), self._device_of(root.root)
        except StorageError as error:  # a node whose disk has failed takes part without it
            self._refusal, other = f"failed: {error}", -2
        path = os.path.join(self._directory, tier_name(root.root))
        # The tier has its own lease: a drain may begin much later, or the root be out of reach.
        self._lease = Lease(storage, path, of_node=True)
        self._lease.release_with(self)
        self.steps = PosixSteps(storage, path, self._lease)
        self.root, self.keep, self.memory = root, keep, memory
        self.drainer = Drainer(self.steps, root, coordinator, timeout_s)
        self.ring: Ring | None = None
        try:
            if memory is not None:
                self.ring = self._made_ring(memory)
        except StorageError as error:
            self._refusal = f"failed: {error}"
        if self._device == other:
            raise ValueError(
                f"local {directory!r} must be on another file system than the root {root.root!r}: "
                "on the same one, it would be no faster, and would be lost with the root"
            )
        self._rank = coordinator.rank
        self._coordinator, self._timeout_s = coordinator, timeout_s
        self.peers: Peers | None = None
        if memory and self.ring and memory.peers and coordinator.world_size > 1:
            host = memory.address or coordinator.own_address()
            self.peers = Peers(memory, self.steps, self.ring, self._rank, host, timeout_s)
        self._meeting = self._begin("local tier")
        self._lock = threading.Lock()
        self._nodes: RanksByNode | None = None  # under _lock
        self._last_why = ""
        self._sequence: int | None = None
        self.highest = 0
        self.needs_each_step = True
        self.useless, self.incomplete = set[str](), set[str]()
        self.copies_of: dict[str, list[Copy]] = {}

    def _device_of(self, path: str) -> int:
        with reported("stat", path):
            while (status := self._storage.status(path)) is None:
                path = os.path.dirname(path)
            return status.st_dev

    def _made_ring(self, memory: Memory) -> Ring:
        ring = Ring(self._storage, self.steps.root, SPARES)
        ring.limit(memory)
        self.steps.keep_files = ring.keep
        return ring

    def _begin(self, label: str) -> Round:
        return self._coordinator.begin(label, self._timeout_s, "the local tier keeps its steps")

    def close(self) -> None:
        """Leaves the round in which the nodes meet, and stops serving the neighbours.
        Idempotent.
        """
        self._meeting.close(linger_s=0.0)
        if self.peers is not None:
            self.peers.close()
        if self.ring is not None:
            if self._nodes is not None and self.is_first():
                self.ring.clear()
            self.ring.close()
        self._lease.release(self._timeout_s)

    # ---- whether it can be used

    def nodes(self) -> RanksByNode:
        """Returns which ranks share a directory. All ranks determine this together, once."""
        with self._lock:
            if self._nodes is None:
                try:
                    with self._meeting.failing():
                        self._nodes = self._meet(self._meeting)
                except BaseException:  # the ranks meet again when they are needed next
                    self._meeting = self._begin("local tier")
                    raise
                self._meeting.close()
            return self._nodes

    def is_first(self) -> bool:
        """Returns whether this rank is the first rank on its node."""
        return self.nodes().first(self._rank) == self._rank

    def _meet(self, meeting: Round) -> RanksByNode:
        """Exchanges with all ranks the directory that each rank sees and the address at which it
        listens.
        """
        peers = self.peers
        group = None if self.memory is None else self.memory.groups
        at = None if peers is None else (*peers.address, group or f"rank {self._rank}")
        every = 1 if self.memory is None else self.memory.root_every
        here = (item.manifest.sequence for item in readable(self.steps))
        identity = [self._identity(), at, every, max(here, default=0)]
        meeting.put("identity", json.dumps(identity).encode())
        if self._rank == 0:
            first: dict[str, int] = {}
            records = [json.loads(record) for record in meeting.gather("identity")]
            check_alike([every for _identity, _at, every, _highest in records])
            self.highest = max(highest for *_, highest in records)
            identities = [(identity, at) for identity, at, *_ in records]
            shared = [first.setdefault(name, rank) for rank, (name, _at) in enumerate(identities)]
            listening = [at for _identity, at in identities]
            warn_of_loopback(identities)
            secret = None if peers is None else secrets.token_hex(32)
            meeting.put("nodes", json.dumps([shared, listening, secret]).encode())
        shared, listening, secret = json.loads(meeting.get("nodes"))
        nodes = RanksByNode(shared)
        if peers is not None and (len(nodes.firsts) == 1 or None in listening):
            peers.close()
            self.peers = None
        elif peers is not None:
            peers.begin(nodes, listening, secret)
        return nodes

    def _identity(self) -> str:
        """Returns a text that is the same only on ranks that share a directory."""
        if self.refusal():
            return f"rank {self._rank}"
        try:
            self._storage.make_directory(self.steps.root, parents=True)
            status = self._storage.status(self.steps.root)
            assert status is not None
        except OSError:
            return f"rank {self._rank}"
        return f"{this_machine()} {status.st_dev} {status.st_ino}"

    def refusal(self) -> str:
        """Returns why nothing can be written to the tier now; "" if it can be written to."""
        if not self._refusal:
            try:
                if self._device_of(self._directory) != self._device:
                    return (
                        f"is unavailable: {self._directory!r} is no longer on the same file system"
                    )
            except StorageError as error:
                return f"is unavailable: {error}"
        return self._refusal

    def refuse(self, why: str) -> None:
        """Stops this process from using the tier; `why` completes the sentence "the local tier
        ...".
        """
        self._refusal = self._refusal or why

    def check_room(self, nbytes: int) -> None:
        """Raises StorageError if fewer than nbytes + SMALL_BYTES bytes are free."""
        root, needed = self.steps.root, nbytes + SMALL_BYTES
        with reported("allocate", root):
            free = self._storage.free_bytes(root)
        if free < needed:
            raise StorageError("allocate", root, errno.ENOSPC, detail=room_text(needed, free))

    def no_room_on_node(self, name: str, nbytes: int, recycled: int = 0) -> str:
        """Returns why a step that this node writes would exceed the tier's budget; "" if it fits
        after recycled files and older steps are removed. `recycled` bytes of the step are in slots.
        Only the first rank of a node calls this.
        """
        if (ring := self.ring) is None:
            return ""
        ring.recycled_max = nbytes = nbytes + SMALL_BYTES
        most = max(0, ring.nbytes - nbytes + recycled)
        self.evict(most)
        used = ring.reserve(name, nbytes, recycled)
        if used is not None and self._outdated():
            self.evict(most)
            used = ring.reserve(name, nbytes, recycled)
        if used is None:
            return ""
        needed_mib = -(-(used - recycled + nbytes) >> 20)
        return (
            f"has a budget of {ring.why} on this node: the step needs {shown_size(nbytes)}, "
            f"including {shown_size(SMALL_BYTES)} for indexes, but steps that must stay take "
            f"{shown_size(used)}: pass Memory(budget='{needed_mib}MiB') to fit both"
        )

    def _outdated(self) -> bool:
        """If the root has a newer step, marks older steps that need not stay as useless; returns
        whether any step was newly marked.
        """
        last = max((item.manifest.sequence for item in readable(self.root)), default=-1)
        old = {
            item.manifest.nonce
            for item in readable(self.steps)
            if item.manifest.sequence < last
            and not (self.needs_each_step and self.is_due(item.manifest.step))
        }
        is_new = not old <= self.useless
        self.useless |= old
        return is_new

    def settle(self, name: str, is_replicated: bool) -> None:
        """Records that this node has all its files of a step. Only the first rank of a node calls
        this.
        """
        if self.ring is not None:
            self.ring.settle(name)
        if is_replicated:
            self.note(name, REPLICATED)

    def is_due(self, step: int) -> bool:
        """Returns whether a step must be drained to the root."""
        return self.memory is None or self.memory.is_due(step)

    def warn(self, step: int, why: str) -> None:
        """Logs that a save bypasses the tier, as a warning if the reason has changed."""
        level = logging.DEBUG if why == self._last_why else logging.WARNING
        self._last_why = why
        log.log(
            level, "step %d is saved directly to %s: the local tier %s", step, self.root.root, why
        )

    def next_sequence(self, steps: StepStore) -> int:
        """Returns the next commit's sequence number, which exceeds those in all tiers. Only rank 0
        calls this.
        """
        if self._sequence is None:  # asked once: a commit to the local tier must not wait for it
            self._sequence = self.root.next_sequence()
        self._sequence = steps.next_sequence(max(self._sequence, self.highest))
        return self._sequence

    # ---- what is there, and what may be removed

    def drain(
        self,
        handle: InnerHandle,
        agreement: Round,
        options: StepOptions,
        info: StepInfo,
        is_resumed: bool = False,
    ) -> Drain:
        """Returns the object that copies a step to the root. For the arguments see Drain."""
        return Drain(
            handle,
            agreement,
            self.drainer,
            options,
            info,
            self.fetching,
            self.note_drained,
            is_resumed,
        )

    def near(self, manifest: Manifest, holding: ExitStack) -> tuple[list[str], Fetch | None]:
        """Returns this node's directory of a step, if there is one, and a function that fetches
        files from other nodes into it. The directory is held until `holding` is closed.
        """
        for item in readable(self.steps):
            if item.manifest.nonce == manifest.nonce:
                with suppress(CheckpointError):  # the step is being removed
                    holding.enter_context(self.steps.hold(item.name))
                    return [self.steps.path(item.name)], self.fetching(item)
        return [], None

    def fetching(self, item: Committed) -> Fetch | None:
        """Returns a function that fetches files of an earlier job's step from other nodes, or
        None.
        """
        peers, copies = self.peers, self.copies_of.get(item.manifest.nonce)
        if peers is None or copies is None:
            return None
        own, parts = self.nodes().first(self._rank), parts_of(item.manifest).items()
        part_of = {file: part for part, files in parts for file in files}

        def fetch(file: str, is_damaged: bool) -> str:
            there = [copy.first for copy in copies if part_of[file] in copy.parts]
            there = [first for first in there if first != own]
            return peers.fetch(item, there, file, is_damaged)

        return fetch

    def has_room(self, nbytes: int) -> bool:
        """Returns whether files of `nbytes` bytes fit into the budget after recycled files are
        removed. Only the first rank of a node calls this.
        """
        return self.ring is not None and self.ring.make_room(self.ring.nbytes - nbytes)

    def note_drained(self, name: str) -> None:
        """On the first rank of a node, records on disk that the root has a step, and removes the
        steps that need not stay.
        """
        if self.is_first():
            self.note(name, DRAINED)
            self.evict()

    def note(self, name: str, what: str) -> None:
        """Records DRAINED or REPLICATED as a file in a step's directory."""
        path = self.steps.path(name, what)
        try:
            self._storage.close(self._storage.create(path, NEW_MODE))
        except (FileExistsError, FileNotFoundError):
            return  # noted before, or removed
        except OSError as error:
            log.warning("cannot record that %s was %s: %s", name, what, error)

    def evict(self, nbytes_max: int | None = None) -> None:
        """Removes useless steps, and steps beyond `keep` that have been drained or need no drain.
        Then removes the oldest steps within `keep` until all steps together take at most
        `nbytes_max`. Only the first rank of a node calls this.
        """
        entries, of_use, has_safe = list[Entry](), list[Entry](), False
        committed = readable(self.steps)
        nonces = {item.name: item.manifest.nonce for item in committed}
        for item in committed:
            is_useless = item.manifest.nonce in self.useless
            is_safe = self._is_safe(item.name)
            is_needed = self.is_due(item.manifest.step) or not of_use or (is_safe and not has_safe)
            is_needed = is_needed and not (is_useless or self.has(item.name, DRAINED))
            # Its files are still being sent or received here.
            is_awaited = self.ring is not None and self.ring.is_reserved(item.name)
            is_needed = is_needed or is_awaited
            if item.manifest.nonce in self.incomplete:
                # Nodes outside this job may have the rest, so it stays until a newer step is here.
                is_needed, is_useless = is_awaited or not of_use, True
            is_useless = is_useless or item.manifest.nonce in self.steps.verdicts.damaged
            entries.append(Entry(item.name, is_pinned=is_needed, is_useless=is_useless))
            if not is_useless:
                of_use.append(entries[-1])
                has_safe = has_safe or is_safe
        going = victims(entries, Policy(self.keep))
        for name in going:
            self.remove(name, nonces[name])
        with suppress(CheckpointError):  # readable() has warned of a tier that cannot be listed
            self.steps.remove_dead()
            if self.ring is None:
                return
            most = self.ring.nbytes if nbytes_max is None else nbytes_max
            has_room = self.ring.make_room(most)
            for entry in reversed(of_use):
                if nbytes_max is None or has_room:
                    break
                if not entry.is_pinned and entry.name not in going:
                    self.remove(entry.name, nonces[entry.name])
                    has_room = self.ring.make_room(most)

    def _is_safe(self, name: str) -> bool:
        """Returns whether a step survives the loss of this node. True as well if there are no
        neighbours, because then no step does.
        """
        return self.peers is None or self.has(name, REPLICATED) or self.has(name, DRAINED)

    def remove(self, name: str, nonce: str) -> None:
        """Removes a step that is not being read; logs an error."""
        try:
            self.steps.remove(name, nonce)
        except (StorageError, OSError) as error:
            log.warning("%s could not be removed: %s", name, error)

    def drop_replaced(self, step: int) -> None:
        """Removes attempts at a step that were replaced by a later attempt in the root. Only the
        first rank of a node calls this, after a commit to the root.
        """
        if self.refusal():
            return  # the tier must not be touched: a later job's survey finds them
        attempts = [item.manifest for item in readable(self.steps) if item.manifest.step == step]
        if attempts:
            last = last_of(readable(self.root)).get(step, -1)
            self.useless |= {each.nonce for each in attempts if each.sequence < last}
            self.evict()

    def has(self, name: str, file: str, nbytes: int | None = None) -> bool:
        """Returns whether the tier has a file of a step, and of this size if `nbytes` is given."""
        try:
            status = self._storage.status(self.steps.path(name, file))
        except OSError:
            return False
        return status is not None and nbytes in (None, status.st_size)


def last_of(committed: list[Committed]) -> dict[int, int]:
    """Returns, for each step, the highest sequence number among its attempts."""
    ordered = sorted(committed, key=lambda item: item.manifest.sequence)
    return {item.manifest.step: item.manifest.sequence for item in ordered}
