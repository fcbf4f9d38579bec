"""LocalTier: the directories on the nodes in front of a root, and the ranks that share each.

The module decides whether the tier can be used and which of its steps the root lacks, and removes
none that the root has not had.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from fastckpt.arguments.environment import Memory
from fastckpt.arguments.quantities import shown_size
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.formats.manifest import Manifest
from fastckpt.formats.step_names import DRAINED, REPLICATED, SPARES, tier_name
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.ranks.round import Round
from fastckpt.saving.lease import Lease
from fastckpt.saving.ring import SMALL_BYTES, Ring
from fastckpt.steps.copies import Fetch
from fastckpt.steps.newest_whole import Apart, readable, survey_of_copy
from fastckpt.steps.pins import deleted
from fastckpt.steps.posix import PosixSteps
from fastckpt.steps.store import Committed, StepStore
from fastckpt.storage.file_system import NEW_MODE, reported, room_text
from fastckpt.storage.keep import Entry, Policy, victims
from fastckpt.storage.machine import this_machine
from fastckpt.tiers.drain import Drainer
from fastckpt.tiers.nodes import (
    NodesSteps,
    RanksByNode,
    check_alike,
    named_parts,
    parts_of,
    warn_of_loopback,
)
from fastckpt.tiers.replicas import Replicas

log = logging.getLogger("fastckpt")

# The pauses before the steps of the nodes are listed again, while a job beside changes them.
_LOOK_PAUSES_S = (0.05, 0.1, 0.2, 0.4)
_DRAIN_POLL_S = 0.5
SLOW_S = 10.0  # a tier is slow if it took longer than this for a save, and longer than the root


class Undrained(NamedTuple):
    """A step that the nodes hold together and the root lacks.

    Attributes:
        step, nonce: the step's number, and what tells it from all others.
        names: the step's directory on each node that has it, by the node's first rank.
        parts: as Drain's, for each node, by the node's first rank.
    """

    step: int
    nonce: str
    names: dict[int, str]
    parts: dict[int, list[int]]


class LocalTier:
    """The local tier as one rank sees it.

    Args:
        directory: as Checkpointer's `local`; steps of several roots may lie in it.
        keep: how many of the newest steps stay.
        memory: if the directory is in memory, what says so; else None.
        root: the steps of the root, which these are drained to.
        coordinator, timeout_s: the Checkpointer's.

    Attributes:
        steps: the root's steps that lie in the local directory.
        root, keep, memory: as the arguments.
        drainer: brings steps from here to the root.
        ring: if the directory is in memory and can be used, the memory there.

    Raises:
        ValueError: the directory lies on the root's file system, or as Ring.limit().
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
        # Of its own: it may be long until a step goes to the root, or that may be out of reach.
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
                f"local {directory!r} lies on the same file system as the root {root.root!r}: it "
                "would be no faster, and would be lost with the root"
            )
        self._rank = coordinator.rank
        self._coordinator, self._timeout_s = coordinator, timeout_s
        self.replicas: Replicas | None = None
        if memory and self.ring and memory.peers and coordinator.world_size > 1:
            host = memory.address or coordinator.own_address()
            self.replicas = Replicas(memory, self.steps, self.ring, self._rank, host, timeout_s)
        self._meeting = self._begin("local tier")
        self._lock = threading.Lock()
        self._nodes: RanksByNode | None = None  # under _lock
        self._told = ""
        self._sequence: int | None = None
        self._highest = 0  # the highest sequence number that a step of any node has
        # Nonces of steps of which the root has a later attempt, or a step that takes their place.
        self._useless: set[str] = set()
        self._incomplete: set[str] = set()  # nonces of steps of which no node has some parts
        # By nonce, of the steps that the nodes hold together, the name on each node, and its files.
        self._held: dict[str, dict[int, tuple[str, list[int]]]] = {}
        self._order_of: dict[str, tuple[int, int]] = {}  # their steps and sequence numbers
        self._why_undrained = ""  # why this job does not copy them to the root now, in words
        self._drained_beside: set[str] = set()  # nonces of steps that another job is to copy there
        self._newest = -1  # the highest sequence number in the root when the steps were listed
        self._is_beside = False  # whether another job saved here when the steps were listed

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
        return self._coordinator.begin(label, self._timeout_s, "the local tier keeps what it has")

    def close(self) -> None:
        """Leaves the round in which the nodes meet, and serves none any more. Idempotent."""
        self._meeting.close(linger_s=0.0)
        if self.replicas is not None:
            self.replicas.close()
        if self.ring is not None:
            if self._nodes is not None and self.is_first():
                self.ring.clear()
            self.ring.close()
        self._lease.release(self._timeout_s)

    # ---- whether it can be used

    def nodes(self) -> RanksByNode:
        """Returns which ranks share a directory. All ranks find that out together, once."""
        with self._lock:
            if self._nodes is None:
                try:
                    with self._meeting.failing():
                        self._nodes = self._met(self._meeting)
                except BaseException:  # the ranks meet again when they are needed next
                    self._meeting = self._begin("local tier")
                    raise
                self._meeting.close()
            return self._nodes

    def is_first(self) -> bool:
        """Returns whether this rank is the first one on its node."""
        return self.nodes().first(self._rank) == self._rank

    def _met(self, meeting: Round) -> RanksByNode:
        """Has all ranks tell which directory they see, and where they listen for each other."""
        replicas = self.replicas
        group = None if self.memory is None else self.memory.groups
        at = None if replicas is None else (*replicas.address, group or f"rank {self._rank}")
        every = 1 if self.memory is None else self.memory.root_every
        here = (item.manifest.sequence for item in readable(self.steps))
        identity = [self._identity(), at, every, max(here, default=0)]
        meeting.put("identity", json.dumps(identity).encode())
        if self._rank == 0:
            first: dict[str, int] = {}
            records = [json.loads(record) for record in meeting.gather("identity")]
            check_alike([every for _identity, _at, every, _highest in records])
            self._highest = max(highest for *_, highest in records)
            told = [(identity, at) for identity, at, *_ in records]
            shared = [first.setdefault(identity, rank) for rank, (identity, _at) in enumerate(told)]
            listening = [at for _identity, at in told]
            warn_of_loopback(told)
            secret = None if replicas is None else secrets.token_hex(32)
            meeting.put("nodes", json.dumps([shared, listening, secret]).encode())
        shared, listening, secret = json.loads(meeting.get("nodes"))
        nodes = RanksByNode(shared)
        if replicas is not None and (len(nodes.firsts) == 1 or None in listening):
            replicas.close()
            self.replicas = None
        elif replicas is not None:
            replicas.begin(nodes, listening, secret)
        return nodes

    def _identity(self) -> str:
        """Returns a name that only ranks with the same directory share."""
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
        """Returns why nothing can be written to the tier now, in words; "" if it can be."""
        if not self._refusal:
            try:
                if self._device_of(self._directory) != self._device:
                    return f"{self._directory!r} is no longer on the file system it was on"
            except StorageError as error:
                return str(error)
        return self._refusal

    def refuse(self, why: str) -> None:
        """Ends the use of the tier by this process; `why` completes "the local tier ..."."""
        self._refusal = self._refusal or why

    def check_room(self, nbytes: int) -> None:
        """Raises StorageError if there is no room for so many bytes and SMALL_BYTES."""
        root, needed = self.steps.root, nbytes + SMALL_BYTES
        with reported("allocate", root):
            left = self._storage.free_bytes(root)
        if left < needed:
            raise StorageError("allocate", root, errno.ENOSPC, detail=room_text(needed, left))

    def no_room_on_node(self, name: str, nbytes: int, recycled: int = 0) -> str:
        """Returns why a step that this node writes, `recycled` bytes of it in slots, would exceed
        the tier's budget, in words; "" if it would not, once recycled files and older steps are
        removed. Only the first rank of a node calls it.
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
            f"{shown_size(SMALL_BYTES)} of it for indexes, and steps that have to stay take "
            f"{shown_size(used)}; Memory(budget='{needed_mib}MiB') would keep it there"
        )

    def _outdated(self) -> bool:
        """Finds the steps that need not stay, since a newer one went past the tier to the root, and
        says whether there are some.
        """
        last = max((item.manifest.sequence for item in readable(self.root)), default=-1)
        old = {
            item.manifest.nonce
            for item in readable(self.steps)
            if item.manifest.sequence < last and not self.is_due(item.manifest.step)
        }
        is_new = not old <= self._useless
        self._useless |= old
        return is_new

    def settle(self, name: str, is_replicated: bool) -> None:
        """Notes that all files of a step which this node is to have are there. Only the first rank
        of a node calls it.
        """
        if self.ring is not None:
            self.ring.settle(name)
        if is_replicated:
            self._note(name, REPLICATED)

    def is_due(self, step: int) -> bool:
        """Returns whether a step is to go from here to the root."""
        return self.memory is None or self.memory.is_due(step)

    def warn(self, step: int, why: str) -> None:
        """Logs that a save goes past the tier; as a warning if the reason is new."""
        level = logging.DEBUG if why == self._told else logging.WARNING
        self._told = why
        log.log(level, "step %d goes straight to %s: the local tier %s", step, self.root.root, why)

    def next_sequence(self, steps: StepStore) -> int:
        """Returns the sequence number of the next commit, above those in all tiers; on rank 0."""
        if self._sequence is None:  # asked once: a commit to the local tier must not wait for it
            self._sequence = self.root.next_sequence()
        self._sequence = steps.next_sequence(max(self._sequence, self._highest))
        return self._sequence

    # ---- what is there, and what may go

    def near(self, manifest: Manifest, holding: ExitStack) -> tuple[list[str], Fetch | None]:
        """Returns this node's directory of a step, if any, held until `holding` is closed, and what
        fetches files to it that other nodes have.
        """
        for item in readable(self.steps):
            if item.manifest.nonce == manifest.nonce:
                with suppress(CheckpointError):  # the step is being removed
                    holding.enter_context(self.steps.hold(item.name))
                    return [self.steps.path(item.name)], self.fetching(item)
        return [], None

    def fetching(self, item: Committed) -> Fetch | None:
        """Returns what fetches files of a step of an earlier job that other nodes have."""
        replicas, copies = self.replicas, self._held.get(item.manifest.nonce)
        if replicas is None or copies is None:
            return None
        own, parts = self.nodes().first(self._rank), parts_of(item.manifest).items()
        part_of = {file: part for part, files in parts for file in files}

        def fetch(file: str, is_damaged: bool) -> str:
            there = [
                at for at, (_name, its) in copies.items() if part_of[file] in its and at != own
            ]
            return replicas.fetch(item, there, file, is_damaged)

        return fetch

    def gathered(
        self, agreement: Round, found: list[Undrained], number: int = 0
    ) -> tuple[list[StepStore], list[Apart]]:
        """Has every node take part in steps that only some hold, where its budget allows that. All
        ranks call it, after survey(), with the same number.

        Returns:
            The steps of the nodes of which each rank can have all files, none without neighbours;
                and with several nodes, all steps that they hold together, each with the reason why
                it may be none of those.
        """
        firsts, own = self.nodes().firsts, self.nodes().first(self._rank)
        if len(firsts) == 1:
            return [self.steps], []
        if self.replicas is None:
            why = "ranks need files of other nodes, which send each other none"
            return [], [self._apart(nonce, why) for nonce in self._held]
        if own == self._rank:
            agreement.put(f"names {number}", json.dumps(self._adopted(self.replicas)).encode())
        if self._rank == 0:
            told = {first: json.loads(agreement.get(f"names {number}", first)) for first in firsts}
            agreement.put(f"gathered {number}", json.dumps(told).encode())
        told = json.loads(agreement.get(f"gathered {number}"))
        names = {int(at): its for at, (its, _whys) in told.items()}
        whys = {nonce: why for _its, each in told.values() for nonce, why in each.items()}
        for each in found:
            each.names.update(
                {at: its[each.nonce] for at, its in names.items() if each.nonce in its}
            )
        common = set(names[0]).intersection(*names.values())
        own_names = {names[0][nonce]: names[own][nonce] for nonce in common}
        unlisted = "its manifest is damaged on the first node, or was removed there"
        apart = [self._apart(nonce, whys.get(nonce, unlisted)) for nonce in self._held]
        return [NodesSteps(self.steps, own_names, common)], apart

    def _apart(self, nonce: str, why: str) -> Apart:
        if self._why_undrained:
            why += f"; and it is not copied to the root, since {self._why_undrained}"
        return Apart(*self._order_of[nonce], nonce, why)

    def _adopted(self, replicas: Replicas) -> tuple[dict[str, str], dict[str, str]]:
        """Returns this node's names of the steps that the nodes hold together and whose files all
        fit into its budget; and of the others, why that is not so.
        """
        names, whys = dict[str, str](), dict[str, str]()
        for nonce, copies in self._held.items():
            name, parts = copies.get(self._rank, ("", []))
            try:
                if not name and self._is_beside:
                    raise CheckpointError("the job that saves there has not put it there")
                if not name:
                    name = replicas.adopt(self._order_of[nonce][0], nonce, [*copies])
                manifest = self.steps.read(name)
                of = parts_of(manifest)
                needed = sum(sum(of[part].values()) for part in of.keys() - {*parts})
                if not self.has_room(needed):
                    raise CheckpointError(
                        f"the budget has no room for the {shown_size(needed)} that it lacks there"
                    )
                names[nonce] = name
            except CheckpointError as error:
                whys[nonce] = f"{self.steps.root!r} cannot have it: {error}"
        return names, whys

    def has_room(self, nbytes: int) -> bool:
        """Returns whether files of so many bytes fit into the budget; removes recycled files for
        that. Only the first rank of a node calls it.
        """
        return self.ring is not None and self.ring.make_room(self.ring.nbytes - nbytes)

    def note_drained(self, name: str) -> None:
        """Notes on disk, on the first rank of a node, that a step may be removed here from now on,
        and removes what may go.
        """
        if self.is_first():
            self._note(name, DRAINED)
            self.evict()

    def _note(self, name: str, what: str) -> None:
        path = self.steps.path(name, what)
        try:
            self._storage.close(self._storage.create(path, NEW_MODE))
        except (FileExistsError, FileNotFoundError):
            return  # noted before, or removed
        except OSError as error:
            log.warning("%s was %s, but that could not be noted: %s", name, what, error)

    def evict(self, nbytes_max: int | None = None) -> None:
        """Removes steps of no use, and those beyond `keep` that the root has had, or need not have;
        of those within `keep` the oldest while all together take more than `nbytes_max`. Only the
        first rank of a node calls it.
        """
        entries, of_use, has_safe = list[Entry](), list[Entry](), False
        found = readable(self.steps)
        nonces = {item.name: item.manifest.nonce for item in found}
        for item in found:
            is_useless = item.manifest.nonce in self._useless
            is_safe = self._is_safe(item.name)
            is_needed = self.is_due(item.manifest.step) or not of_use or (is_safe and not has_safe)
            is_needed = is_needed and not (is_useless or self._has(item.name, DRAINED))
            # Its files are still being sent, here or from here.
            is_awaited = self.ring is not None and self.ring.is_reserved(item.name)
            is_needed = is_needed or is_awaited
            if item.manifest.nonce in self._incomplete:
                # Nodes that are not of this job may have the rest: a newer step has to be here.
                is_needed, is_useless = is_awaited or not of_use, True
            is_useless = is_useless or item.manifest.nonce in self.steps.verdicts.damaged
            entries.append(Entry(item.name, is_pinned=is_needed, is_useless=is_useless))
            if not is_useless:
                of_use.append(entries[-1])
                has_safe = has_safe or is_safe
        going = victims(entries, Policy(self.keep))
        for name in going:
            self._remove(name, nonces[name])
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
                    self._remove(entry.name, nonces[entry.name])
                    has_room = self.ring.make_room(most)

    def _is_safe(self, name: str) -> bool:
        """Returns whether a step outlives this node, or none does."""
        return self.replicas is None or self._has(name, REPLICATED) or self._has(name, DRAINED)

    def _remove(self, name: str, nonce: str) -> None:
        try:
            self.steps.remove(name, nonce)
        except (StorageError, OSError) as error:
            log.warning("%s could not be removed: %s", name, error)

    def drop_replaced(self, step: int) -> None:
        """Removes attempts at a step that were committed before the root's own last one: they are
        not that step any more. Only the first rank of a node calls it, after such a commit.
        """
        if self.refusal():
            return  # it is not to be touched: a later job's survey finds them
        attempts = [item.manifest for item in readable(self.steps) if item.manifest.step == step]
        if attempts:
            last = _last_of(readable(self.root)).get(step, -1)
            self._useless |= {each.nonce for each in attempts if each.sequence < last}
            self.evict()

    def survey(self, agreement: Round, is_able: bool, number: int = 0) -> list[Undrained]:
        """Returns the steps that the nodes hold together and the root lacks, newest first; none if
        a rank is not able to drain them, or the job lives that saves them. All ranks call it, with
        another `number` each time in one round.
        """
        for look, pause_s in enumerate((*_LOOK_PAUSES_S, None)):
            key = f"{number} {look}"
            told = self._surveyed(agreement, key, is_able, is_last=pause_s is None)
            if not told["again"]:
                break
            time.sleep(pause_s or 0.0)
        self._order_of = {nonce: (step, at) for nonce, (step, at, _its) in told["held"].items()}
        self._held = {
            nonce: {int(first): (name, parts) for first, (name, parts) in copies.items()}
            for nonce, (_step, _sequence, copies) in told["held"].items()
        }
        return [
            Undrained(
                step,
                nonce,
                {int(first): name for first, name in names.items()},
                {int(first): mine for first, mine in parts.items()},
            )
            for step, nonce, names, parts in told["undrained"]
        ]

    def _surveyed(self, agreement: Round, key: str, is_able: bool, is_last: bool) -> dict[str, Any]:
        """Has each node list its steps, and the first rank sort them; keeps what it says of those
        of this node.
        """
        is_first = self.is_first()
        self._is_beside = is_first and self._lease.is_of_another()
        why = "" if is_able else "a rank has too little staging memory for that"
        if self._is_beside:
            why = f"another job saves to {self.steps.root!r}"
        found = survey_of_copy(self.steps) if is_first else []
        there = {item.manifest.nonce: item for item in found}
        listed = [*map(self._listed, there.values())]
        agreement.put(f"local {key}", json.dumps([why, self._is_beside, listed]).encode())
        if self._rank == 0:
            records = [json.loads(record) for record in agreement.gather(f"local {key}")]
            merged = self._merged([listing for *_, listing in records])
            # The job beside may have removed a step here after it was listed there.
            is_beside = any(beside for _why, beside, _listing in records)
            merged["again"] = is_beside and not is_last and bool(merged["lost"])
            why = next((why for why, *_ in records if why), "")
            if not merged["again"]:
                self._tell_survey(merged, why)
            due = [nonce for step, nonce, *_ in merged["undrained"] if self.is_due(step)]
            merged["drained beside"] = due if is_beside else []
            merged["undrained"] = [] if why else merged["undrained"]
            merged["why"] = why
            agreement.put(f"survey {key}", json.dumps(merged).encode())
        told: dict[str, Any] = json.loads(agreement.get(f"survey {key}"))
        if not self._is_beside:  # else the job that saves here marks its own
            for what, nonces in ((DRAINED, told["drained"]), (REPLICATED, told["replicated"])):
                for nonce in there.keys() & {*nonces}:
                    self._note(there[nonce].name, what)
        self._useless = there.keys() & {*told["useless"]}
        self._incomplete = there.keys() & {*told["incomplete"]}
        for nonce in there.keys() & {*told["deleted"]}:
            self._remove(there[nonce].name, nonce)
        self._why_undrained, self._drained_beside = told["why"], {*told["drained beside"]}
        return told

    def is_drained_beside(self, nonce: str) -> bool:
        """Returns whether the job beside is to copy a step to the root."""
        return nonce in self._drained_beside

    def await_drain_beside(self, nonce: str) -> None:
        """Waits on the first rank, once, until that is done, or a newer step has come there, since
        the step may have failed to, or gone already; for half of timeout_s, since the other ranks
        wait for this one. Raises StorageError.
        """
        self._drained_beside.discard(nonce)
        number, sequence = self._order_of[nonce]
        beyond = max(sequence, self._newest)
        until = time.monotonic() + self._timeout_s / 2
        while self._rank == 0:
            there = [item.manifest for item in readable(self.root)]
            if any(each.nonce == nonce or each.sequence > beyond for each in there):
                return
            if time.monotonic() > until:
                detail = f"step {number}, which another job is to copy there, has "
                detail += f"not come within {self._timeout_s / 2:.0f} s, half of timeout_s"
                raise StorageError("read", self.root.root, errno.ETIMEDOUT, detail=detail)
            time.sleep(_DRAIN_POLL_S)

    def _tell_survey(self, merged: dict[str, Any], why: str) -> None:
        """Logs which steps stay on the nodes alone, and which are lost, on the first rank."""
        if why and merged["undrained"]:
            steps = ", ".join(str(step) for step, *_ in merged["undrained"])
            log.warning("not copied to %s yet: steps %s; %s", self.root.root, steps, why)
        for step, missing in merged["lost"]:
            log.warning(
                "skipping step %d of %s: no node of this job has %s, so it is lost if they were "
                "on nodes that are gone, or was not committed",
                *(step, self.steps.root, missing),
            )

    def _listed(self, item: Committed) -> dict[str, Any]:
        """Returns what a node tells the others of its copy of a step."""
        manifest = item.manifest
        of = parts_of(manifest)
        parts = [part for part in of if all(self._has(item.name, *its) for its in of[part].items())]
        return {
            "name": item.name,
            "step": manifest.step,
            "nonce": manifest.nonce,
            "sequence": manifest.sequence,
            "parts": parts,
            "of": [*of],
            "drained": self._has(item.name, DRAINED),
            "replicated": self._has(item.name, REPLICATED),
        }

    def _has(self, name: str, file: str, nbytes: int | None = None) -> bool:
        """Returns whether a step has a file here, of this size if one is given."""
        try:
            status = self._storage.status(self.steps.path(name, file))
        except OSError:
            return False
        return status is not None and nbytes in (None, status.st_size)

    def _merged(self, listings: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Sorts the steps in the nodes' listings, on the first rank, by what is to be done."""
        found, _faults = self.root.survey()
        in_root = {item.manifest.nonce for item in found}
        newest, last = found[0].manifest.sequence if found else -1, _last_of(found)
        self._newest = newest
        gone = deleted(self.root)
        of: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for rank, listing in enumerate(listings):
            for each in listing:
                self._highest = max(self._highest, each["sequence"])
                if each["nonce"] not in gone:
                    of.setdefault(each["nonce"], []).append((rank, each))
        told: dict[str, Any] = {"drained": [], "useless": [], "undrained": [], "held": {}}
        told |= {"deleted": sorted(gone), "incomplete": [], "lost": [], "replicated": []}
        has_newest = False  # whether a step that is newer than all in the root is here, whole
        for nonce, copies in sorted(of.items(), key=lambda pair: -pair[1][0][1]["sequence"]):
            one = copies[0][1]
            holder = {part: rank for rank, each in reversed(copies) for part in each["parts"]}
            was_drained = any(each["drained"] for _rank, each in copies)
            step, sequence, is_newer = one["step"], one["sequence"], one["sequence"] > newest
            missing = [part for part in one["of"] if part not in holder]
            if any(each["replicated"] for _rank, each in copies):  # all ranks agreed on that
                told["replicated"].append(nonce)
            if not missing:
                its = {rank: (each["name"], each["parts"]) for rank, each in copies}
                told["held"][nonce] = step, sequence, its
            # The root lacks a drained step because retention removed it, or, if it is newer than
            # all that the root has, because the root has lost it: then it is drained again.
            if sequence < last.get(step, -1) and nonce not in in_root:
                told["useless"].append(nonce)
            elif (
                nonce in in_root
                or (was_drained and not is_newer)
                or (sequence < newest and not self.is_due(step))
            ):
                told["drained"].append(nonce)
            elif missing:
                told["incomplete"].append(nonce)
                if is_newer and not has_newest:
                    told["lost"].append((step, named_parts(missing)))
            elif self.is_due(step) or not has_newest:
                parts: dict[int, list[int]] = {}
                for part, rank in sorted(holder.items()):
                    parts.setdefault(rank, []).append(part)
                names = {rank: each["name"] for rank, each in copies}
                told["undrained"].append([step, nonce, names, parts])
            has_newest = has_newest or (is_newer and not missing)
        return told


def _last_of(found: list[Committed]) -> dict[int, int]:
    """Returns the highest sequence number of each step among the attempts at it."""
    ordered = sorted(found, key=lambda item: item.manifest.sequence)
    return {item.manifest.step: item.manifest.sequence for item in ordered}
