"""LocalTier: the directories on the nodes in front of a root, and the ranks that share each.

The module decides whether the tier can be used and which of its steps the root lacks, and removes
none that the root has not had. It must not know how a step is written, copied or read.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from fastckpt.arguments.memory import Memory
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.formats.manifest import Manifest
from fastckpt.formats.step_names import tier_name
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.ranks.round import Round
from fastckpt.steps.newest_whole import readable, survey_of_copy
from fastckpt.steps.root import Committed, Steps
from fastckpt.storage.file_system import NEW_MODE, reported, room_text
from fastckpt.storage.keep import Entry, may_go
from fastckpt.storage.machine import this_machine
from fastckpt.tiers.memory_budget import MemoryBudget

log = logging.getLogger("fastckpt")

DRAINED = "drained"  # a file in a step's directory: the root has had it, or need not have it
OBJECTS_PART = -1  # the objects' place among parts, which else are ranks of writers
SPARE_BYTES = 16 << 20  # room for indexes and the manifest, beside shards and objects
_MARGIN = 1.5  # a step goes straight to the root only if that is hoped to take so much less
SLOW_S = 10.0  # a tier is slow if it took longer than this for a save, and longer than the root


class Undrained(NamedTuple):
    """A step that the nodes hold together and the root lacks.

    Attributes:
        step: the step's number.
        names: the step's directory on each node that has it, by the node's first rank.
        parts: as Drain's, for each node, by the node's first rank.
        is_newer: whether it was committed after all that the root has.
    """

    step: int
    names: dict[int, str]
    parts: dict[int, list[int]]
    is_newer: bool


class RanksByNode:
    """The nodes of a job; a node is the ranks that see the same directory.

    Args:
        first: for each rank, the first rank of its node.

    Attributes:
        firsts: the first rank of each node, ascending.
    """

    def __init__(self, first: list[int]) -> None:
        self._first = first
        self.firsts = sorted(set(first))

    def first(self, rank: int) -> int:
        """Returns the first rank on the node of a rank."""
        return self._first[rank]

    def beside(self, rank: int) -> list[int]:
        """Returns all ranks on the node of a rank, ascending."""
        return [other for other, first in enumerate(self._first) if first == self._first[rank]]


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

    Raises:
        ValueError: the directory lies on the root's file system, or as MemoryBudget.
    """

    def __init__(
        self,
        directory: str,
        keep: int,
        memory: Memory | None,
        root: Steps,
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
        if self._device == other:
            raise ValueError(
                f"local {directory!r} lies on the same file system as the root {root.root!r}: it "
                "would be no faster, and would be lost with the root"
            )
        self.steps = Steps(storage, os.path.join(self._directory, tier_name(root.root)))
        self.root, self.keep, self.memory = root, keep, memory
        self._budget = None if memory is None else MemoryBudget(memory, self.steps)
        self._rank = coordinator.rank
        self._coordinator, self._timeout_s = coordinator, timeout_s
        self._meeting = self._begin("local tier")
        self._lock = threading.Lock()
        self._nodes: RanksByNode | None = None  # under _lock
        self._told = ""
        self._sequence: int | None = None
        self._highest = 0  # the highest sequence number that a step of any node has
        # Nonces of steps of which no node has some parts, or the root has a later attempt.
        self._useless: set[str] = set()
        self._times_s: tuple[float, float] | None = None

    def _device_of(self, path: str) -> int:
        with reported("stat", path):
            while (status := self._storage.status(path)) is None:
                path = os.path.dirname(path)
            return status.st_dev

    def _begin(self, label: str) -> Round:
        return self._coordinator.begin(label, self._timeout_s, "the local tier keeps what it has")

    def begin_drain(self, step: int) -> Round:
        """Begins the round in which ranks agree that a step is in the root."""
        return self._begin(f"step {step} to the root")

    def close(self) -> None:
        """Leaves the round in which the nodes meet. Idempotent."""
        self._meeting.close(linger_s=0.0)

    # ---- whether it can be used

    def nodes(self) -> RanksByNode:
        """Returns which ranks share a directory. All ranks find that out together, once."""
        with self._lock:
            if self._nodes is None:
                try:
                    with self._meeting.failing():
                        self._nodes = RanksByNode(self._met(self._meeting))
                except BaseException:  # the ranks meet again when they are needed next
                    self._meeting = self._begin("local tier")
                    raise
                self._meeting.close()
            return self._nodes

    def _met(self, meeting: Round) -> list[int]:
        """Returns, for each rank, the first that sees the same directory."""
        meeting.put("identity", self._identity().encode())
        if self._rank == 0:
            first: dict[bytes, int] = {}
            told = enumerate(meeting.gather("identity"))
            shared = [first.setdefault(identity, rank) for rank, identity in told]
            meeting.put("nodes", json.dumps(shared).encode())
        found: list[int] = json.loads(meeting.get("nodes"))
        return found

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

    def note_times(self, local_s: float, drain_s: float) -> None:
        """Notes how long the writing and the commit to the tier took for a step, and its drain."""
        self._times_s = local_s, drain_s

    def too_late(self, left_s: float) -> str:
        """Returns why a step should go straight to the root if the job ends in so many seconds, in
        words; "" if it should not: by way of the tier it would be in the root in time, too, or it
        would be in time in neither way, or nothing is known.
        """
        if self._times_s is None:
            return ""
        local_s, drain_s = self._times_s
        if local_s + drain_s < left_s or _MARGIN * drain_s > left_s:
            return ""
        return (
            f"would take too long: by way of it the step before came to the root in "
            f"{local_s + drain_s:.1f} s, {drain_s:.1f} s of which were its drain, and the job "
            f"ends in {left_s:.1f} s"
        )

    def check_room(self, nbytes: int) -> None:
        """Raises StorageError if there is no room for so many bytes and SPARE_BYTES."""
        root, needed = self.steps.root, nbytes + SPARE_BYTES
        with reported("allocate", root):
            left = self._storage.free_bytes(root)
        if left < needed:
            raise StorageError("allocate", root, errno.ENOSPC, detail=room_text(needed, left))

    def no_room_on_node(self, name: str, nbytes: int) -> str:
        """Returns why a step that this node writes would exceed the tier's budget, in words; "" if
        it would not, once older ones are removed. Only the first rank of a node calls it.
        """
        if self._budget is None:
            return ""
        nbytes += SPARE_BYTES
        self.evict(max(0, self._budget.nbytes - nbytes))
        return self._budget.take(name, nbytes)

    def is_due(self, step: int) -> bool:
        """Returns whether a step is to go from here to the root."""
        return self.memory is None or self.memory.is_due(step)

    def warn(self, step: int, why: str) -> None:
        """Logs that a save goes past the tier; as a warning if the reason is new."""
        level = logging.DEBUG if why == self._told else logging.WARNING
        self._told = why
        log.log(level, "step %d goes straight to %s: the local tier %s", step, self.root.root, why)

    def next_sequence(self, steps: Steps) -> int:
        """Returns the sequence number of the next commit, above those in all tiers; on rank 0."""
        if self._sequence is None:  # asked once: a commit to the local tier must not wait for it
            self._sequence = self.root.next_sequence()
        self._sequence = steps.next_sequence(max(self._sequence, self._highest))
        return self._sequence

    # ---- what is there, and what may go

    def near(self, manifest: Manifest, holding: ExitStack) -> list[str]:
        """Returns this node's directory of a step, if any, held until `holding` is closed."""
        for item in readable(self.steps):
            if item.manifest.nonce == manifest.nonce:
                with suppress(CheckpointError):  # the step is being removed
                    holding.enter_context(self.steps.hold(item.name))
                    return [self.steps.path(item.name)]
        return []

    def note_drained(self, name: str) -> None:
        """Notes on disk that a step may be removed here from now on."""
        path = self.steps.path(name, DRAINED)
        try:
            self._storage.close(self._storage.create(path, NEW_MODE))
        except FileExistsError:
            return  # noted before
        except OSError as error:
            log.warning("%s was drained, but that could not be noted: %s", name, error)

    def evict(self, nbytes_max: int | None = None) -> None:
        """Removes steps of no use, and those beyond `keep` that the root has had, or need not have;
        of those within `keep` the oldest while all together take more than `nbytes_max`. Only the
        first rank of a node calls it.
        """
        going, of_use, has_newer = list[str](), list[Entry](), False
        for item in readable(self.steps):
            is_useless = item.manifest.nonce in self._useless
            is_needed = self.is_due(item.manifest.step) or not has_newer
            is_needed = is_needed and not (is_useless or self._has(item.name, DRAINED))
            if not is_useless and not self.steps.known(item.name).is_damaged:
                of_use.append(Entry(item.name, is_pinned=is_needed))
                has_newer = True
            elif not is_needed:
                going.append(item.name)
        beyond = may_go(of_use, self.keep)
        for name in [*going, *beyond]:
            self._remove(name)
        for entry in reversed(of_use):
            if self._budget is None or nbytes_max is None or self._budget.used() <= nbytes_max:
                break
            if not entry.is_pinned and entry.name not in beyond:
                self._remove(entry.name)
        with suppress(CheckpointError):  # readable() has warned of a tier that cannot be listed
            self.steps.remove_dead()

    def _remove(self, name: str) -> None:
        try:
            self.steps.remove_unread(name)
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

    def survey(self, agreement: Round, is_able: bool) -> list[Undrained]:
        """Returns the steps that the nodes hold together and the root lacks, newest first; none if
        a rank is not able to drain them. All ranks call it.
        """
        nodes = self.nodes()
        is_first = nodes.first(self._rank) == self._rank
        found = survey_of_copy(self.steps) if is_first else []
        there = {item.manifest.nonce: item for item in found}
        listed = [*map(self._listed, there.values())]
        agreement.put("local", json.dumps([is_able, listed]).encode())
        if self._rank == 0:
            told = [json.loads(record) for record in agreement.gather("local")]
            merged = self._merged([listing for _able, listing in told])
            if not all(able for able, _listing in told):
                merged["undrained"] = []
            agreement.put("survey", json.dumps(merged).encode())
        told = json.loads(agreement.get("survey"))
        for nonce in there.keys() & set(told["drained"]):
            self.note_drained(there[nonce].name)
        self._useless = there.keys() & set(told["useless"])
        return [
            Undrained(
                step,
                {int(first): name for first, name in names.items()},
                {int(first): mine for first, mine in parts.items()},
                is_newer,
            )
            for step, names, parts, is_newer in told["undrained"]
        ]

    def _listed(self, item: Committed) -> dict[str, Any]:
        """Returns what a node tells the others of its copy of a step."""
        manifest, parts = item.manifest, []
        for writer in manifest.writers:
            files = {writer.file: writer.nbytes, writer.index: writer.index_nbytes}
            if all(self._has(item.name, file, nbytes) for file, nbytes in files.items()):
                parts.append(writer.rank)
        if self._has(item.name, manifest.objects.file, manifest.objects.nbytes):
            parts.append(OBJECTS_PART)
        return {
            "name": item.name,
            "step": manifest.step,
            "nonce": manifest.nonce,
            "sequence": manifest.sequence,
            "parts": parts,
            "of": len(manifest.writers) + 1,
            "drained": self._has(item.name, DRAINED),
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
        safe = newest  # of steps committed before it the root gets those alone that are due
        of: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for rank, listing in enumerate(listings):
            for each in listing:
                self._highest = max(self._highest, each["sequence"])
                of.setdefault(each["nonce"], []).append((rank, each))
        told: dict[str, Any] = {"drained": [], "useless": [], "undrained": []}
        for nonce, copies in sorted(of.items(), key=lambda pair: -pair[1][0][1]["sequence"]):
            one = copies[0][1]
            holder = {part: rank for rank, each in reversed(copies) for part in each["parts"]}
            was_drained = any(each["drained"] for _rank, each in copies)
            # The root lacks a drained step because retention removed it, or, if it is newer than
            # all that the root has, because the root has lost it: then it is drained again.
            if one["sequence"] < last.get(one["step"], -1) and nonce not in in_root:
                told["useless"].append(nonce)
            elif (
                nonce in in_root
                or (was_drained and one["sequence"] <= newest)
                or (one["sequence"] < safe and not self.is_due(one["step"]))
            ):
                told["drained"].append(nonce)
            elif len(holder) < one["of"]:
                told["useless"].append(nonce)
            else:
                parts: dict[int, list[int]] = {}
                for part, rank in sorted(holder.items()):
                    parts.setdefault(rank, []).append(part)
                names = {rank: each["name"] for rank, each in copies}
                is_newer = one["sequence"] > newest
                safe = max(safe, one["sequence"])
                told["undrained"].append([one["step"], names, parts, is_newer])
        return told


def _last_of(found: list[Committed]) -> dict[int, int]:
    """Returns the highest sequence number of each step among the attempts at it."""
    ordered = sorted(found, key=lambda item: item.manifest.sequence)
    return {item.manifest.step: item.manifest.sequence for item in ordered}
