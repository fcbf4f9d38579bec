"""The node-local tier in front of a root: its directories, which ranks share one, what may go.

Responsible for deciding whether the tier can be used, for telling what of it the root lacks, and
for removing no step from it that the root has not had. It must not know how a step is written,
copied or read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import socket
import threading
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from fastckpt.arguments.checks import check_count, check_path, optional
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.formats.manifest import Manifest
from fastckpt.options import Pacing
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.ranks.round import Round
from fastckpt.steps.root import Committed, Steps
from fastckpt.storage.file_system import NEW_MODE, Storage, reported, room_text

log = logging.getLogger("fastckpt")

KEEP_LOCAL = 2
DRAINED = "drained"  # a file in a step's directory: the root has had the step
OBJECTS_PART = -1
SPARE_BYTES = 16 << 20  # for what is written beside shards and objects: indexes, the manifest
# A local tier is slow if it took longer than this for a save, and longer than the root did.
SLOW_S = 10.0


class Nodes:
    """The nodes of a job: which ranks see the same directory.

    Args:
        first: for each rank the first of those that see the same.

    Attributes:
        firsts: the first rank of each node, ascending.
    """

    def __init__(self, first: list[int]) -> None:
        self._first = first
        self.firsts = sorted(set(first))

    def first(self, rank: int) -> int:
        """The first of the ranks on the node of this one."""
        return self._first[rank]

    def beside(self, rank: int) -> list[int]:
        """All ranks on the node of this one, ascending."""
        return [other for other, first in enumerate(self._first) if first == self._first[rank]]


class Undrained(NamedTuple):
    """A step that nodes hold together, and the root has not.

    Attributes:
        step: its number.
        names: of its directory on each node, by the node's first rank.
        parts: what each node is to copy, by its first rank: ranks of writers, OBJECTS_PART.
        is_newer: than all that the root has.
    """

    step: int
    names: dict[int, str]
    parts: dict[int, list[int]]
    is_newer: bool


class LocalTier:
    """The node-local tier as one rank sees it.

    Args:
        storage: the seam to the file system.
        directory: as Checkpointer's `local`; steps of several roots may lie in it.
        keep: so many steps stay, the newest.
        root: where they are drained to.
        coordinator: of the ranks.
        timeout_s: the longest that ranks wait for each other.

    Attributes:
        steps: those of the root in the local directory.
        root, keep: as given.

    Raises:
        ValueError: the directory lies on the root's file system.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        keep: int,
        root: Steps,
        coordinator: Coordinator,
        timeout_s: float,
    ) -> None:
        self._storage = storage
        self._directory = os.path.realpath(directory)
        self._refusal, self._device = "", -1
        try:
            self._device, other = self._device_of(self._directory), self._device_of(root.root)
        except StorageError as error:  # a node whose disk has failed takes part without it
            self._refusal, other = f"failed: {error}", -2
        if self._device == other:
            raise ValueError(
                f"local {directory!r} lies on the same file system as the root {root.root!r}: it "
                "would be no faster, and be lost with it"
            )
        # Steps of another root in the same place are never taken for this one's.
        known_as = hashlib.sha256(os.fsencode(root.root)).hexdigest()[:12]
        name = f"{os.path.basename(root.root) or 'root'}-{known_as}"
        self.steps = Steps(storage, os.path.join(self._directory, name))
        self.root, self.keep = root, keep
        self._rank = coordinator.rank
        self._coordinator, self._timeout_s = coordinator, timeout_s
        self._meeting = self._begin("local tier")
        self._lock = threading.Lock()
        self._nodes: Nodes | None = None  # under _lock
        self._told = ""
        self._sequence: int | None = None
        self._highest = 0  # sequence of any step that some node was seen to have
        self._incomplete: set[str] = set()  # names of steps whose other parts are lost

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
        """Leaves what was begun. Idempotent."""
        self._meeting.close(linger_s=0.0)

    # ---- whether it can be used

    def nodes(self) -> Nodes:
        """Returns which ranks share a directory, found out once, by all ranks together."""
        with self._lock:
            if self._nodes is None:
                try:
                    with self._meeting.failing():
                        self._nodes = Nodes(self._met(self._meeting))
                except BaseException:  # the ranks meet again when they are needed next
                    self._meeting = self._begin("local tier")
                    raise
                self._meeting.close()
            return self._nodes

    def _met(self, meeting: Round) -> list[int]:
        """For each rank the first that has the same directory."""
        meeting.put("identity", self._identity().encode())
        if self._rank == 0:
            first: dict[bytes, int] = {}
            told = enumerate(meeting.gather("identity"))
            shared = [first.setdefault(identity, rank) for rank, identity in told]
            meeting.put("nodes", json.dumps(shared).encode())
        found: list[int] = json.loads(meeting.get("nodes"))
        return found

    def _identity(self) -> str:
        """Of the directory; of this rank alone where there is none."""
        if self.refusal():
            return f"rank {self._rank}"
        try:
            self._storage.make_directories(self.steps.root)
            status = self._storage.status(self.steps.root)
            assert status is not None
        except OSError:
            return f"rank {self._rank}"
        return f"{_machine()} {status.st_dev} {status.st_ino}"

    def refusal(self) -> str:
        """Says why nothing is to be written there now; "" if it may be."""
        if not self._refusal:
            try:
                if self._device_of(self._directory) != self._device:
                    return f"{self._directory!r} is no longer on the file system it was on"
            except StorageError as error:
                return str(error)
        return self._refusal

    def refuse(self, why: str) -> None:
        """From now on nothing is written there."""
        self._refusal = self._refusal or why

    def check_room(self, nbytes: int) -> None:
        """Raises StorageError if there is no room for so much, and a little more."""
        root, needed = self.steps.root, nbytes + SPARE_BYTES
        with reported("allocate", root):
            left = self._storage.free_bytes(root)
        if left < needed:
            raise StorageError("allocate", root, errno.ENOSPC, detail=room_text(needed, left))

    def warn(self, step: int, why: str) -> None:
        """Tells that a save goes past the tier; aloud if that is news."""
        level = logging.DEBUG if why == self._told else logging.WARNING
        self._told = why
        log.log(level, "step %d goes straight to %s: the local tier %s", step, self.root.root, why)

    def next_sequence(self, steps: Steps) -> int:
        """The place of the next commit, in whichever tier, in the order of all; on the first rank.

        The root is asked once: a commit to the local tier is not to wait for it.
        """
        if self._sequence is None:
            self._sequence = self.root.next_sequence()
        self._sequence = steps.next_sequence(max(self._sequence, self._highest))
        return self._sequence

    # ---- what is there, and what may go

    def near(self, manifest: Manifest, holding: ExitStack) -> list[str]:
        """The directory of a step on this node, kept while `holding` lasts; or nothing."""
        for item in self.steps.readable():
            if item.manifest.nonce == manifest.nonce:
                with suppress(CheckpointError):  # it is just being removed
                    holding.enter_context(self.steps.hold(item.name))
                    return [self.steps.path(item.name)]
        return []

    def note_drained(self, name: str) -> None:
        """Notes on disk that the root has a step: from now on it may go."""
        path = self.steps.path(name, DRAINED)
        try:
            self._storage.close(self._storage.create(path, NEW_MODE))
        except FileExistsError:
            return  # noted before
        except OSError as error:
            log.warning("%s was drained, but that could not be noted: %s", name, error)

    def _is_drained(self, name: str) -> bool:
        try:
            return self._storage.status(self.steps.path(name, DRAINED)) is not None
        except OSError:
            return False

    def evict(self) -> list[str]:
        """Removes steps beyond those that are kept, but none that the root has not had; returns
        their names. On the first rank of a node.
        """
        removed, kept = [], 0
        for item in self.steps.readable():
            is_whole = item.name not in self._incomplete and not self.steps.is_damaged(item)
            may_go = item.name in self._incomplete or self._is_drained(item.name)
            if not may_go or (is_whole and kept < self.keep):
                kept += is_whole
                continue
            try:
                if self.steps.remove_unread(item.name):
                    removed.append(item.name)
            except (StorageError, OSError) as error:
                log.warning("%s could not be removed: %s", item.name, error)
        with suppress(CheckpointError):  # a tier that cannot be listed is told of above
            self.steps.remove_dead()
        return removed

    def survey(self, agreement: Round, is_able: bool) -> list[Undrained]:
        """Returns what the nodes hold that the root has not, newest first; all ranks call it.

        Nothing if one of them is not able to drain it.
        """
        nodes = self.nodes()
        is_first = nodes.first(self._rank) == self._rank
        found = self.steps.survey_of_copy() if is_first else []
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
        self._incomplete = {there[each].name for each in there.keys() & set(told["incomplete"])}
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
        """A step as its node tells the others of it."""
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
            "drained": self._is_drained(item.name),
        }

    def _has(self, name: str, file: str, nbytes: int) -> bool:
        try:
            status = self._storage.status(self.steps.path(name, file))
        except OSError:
            return False
        return status is not None and status.st_size == nbytes

    def _merged(self, listings: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """On the first rank: what all listings mean, beside what the root has."""
        found, _faults = self.root.survey()
        in_root = {item.manifest.nonce for item in found}
        newest = found[0].manifest.sequence if found else -1
        of: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for rank, listing in enumerate(listings):
            for each in listing:
                self._highest = max(self._highest, each["sequence"])
                of.setdefault(each["nonce"], []).append((rank, each))
        told: dict[str, Any] = {"drained": [], "incomplete": [], "undrained": []}
        for nonce, copies in sorted(of.items(), key=lambda pair: -pair[1][0][1]["sequence"]):
            one = copies[0][1]
            holder = {part: rank for rank, each in reversed(copies) for part in each["parts"]}
            was_drained = any(each["drained"] for _rank, each in copies)
            # Of steps that were drained the root removes old ones; a new one it has lost.
            if nonce in in_root or (was_drained and one["sequence"] <= newest):
                told["drained"].append(nonce)
            elif len(holder) < one["of"]:
                told["incomplete"].append(nonce)
            else:
                parts: dict[int, list[int]] = {}
                for part, rank in sorted(holder.items()):
                    parts.setdefault(rank, []).append(part)
                names = {rank: each["name"] for rank, each in copies}
                is_newer = one["sequence"] > newest
                told["undrained"].append([one["step"], names, parts, is_newer])
        return told


def _machine() -> str:
    """Returns a name that tells this machine from others, whatever containers call it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def local_tier(
    storage: Storage,
    directory: str | os.PathLike[str] | None,
    keep: int | None,
    root: Steps,
    coordinator: Coordinator,
    pacing: Pacing,
) -> LocalTier | None:
    """The tier that the arguments of a Checkpointer ask for, if they do.

    Raises:
        ValueError: they are out of range, or contradict each other.
    """
    keep = optional(check_count, "keep_local", keep)
    if directory is None:
        if keep is not None:
            raise ValueError("keep_local without local: there is no local tier to keep steps in")
        return None
    if pacing.writers_per_node is not None:
        raise ValueError("writers_per_node with local: the local tier has a file for each rank")
    path = check_path("local", directory)
    return LocalTier(storage, path, keep or KEEP_LOCAL, root, coordinator, pacing.timeout_s)
