"""StepStore, the steps under one root in any kind of store; and Draft, a step that one rank is
writing. posix.py and bucket.py implement both; root.py chooses between them.

The module reads committed steps, orders commits, and remembers facts about steps for this process.
It must not know how a step is made, committed or removed.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError, Vanished
from fastckpt.formats.manifest import MANIFEST, MANIFEST_BYTES_MAX, SEQUENCE_MAX, Manifest
from fastckpt.formats.step_names import step_name, step_of
from fastckpt.latch import SERVER_S, within
from fastckpt.saving.lease import Lease
from fastckpt.storage.file_system import (
    NoRegularFile,
    Storage,
    naming,
    persistently,
)
from fastckpt.storage.lustre_layout import Purpose
from fastckpt.storage.object_upload import Upload
from fastckpt.storage.vanishing import listed_anew

TAKEN = "another process considered this save dead and removed its files: save again"


class Committed(NamedTuple):
    """A step with a valid manifest."""

    name: str
    manifest: Manifest


class Fault(NamedTuple):
    """A directory whose manifest is invalid or cannot be read, and the error."""

    name: str
    error: CheckpointError

    @property
    def step(self) -> int | None:
        """The step's number according to the name; None if the name is empty."""
        return step_of(self.name) if self.name else None


Listed: TypeAlias = tuple[list[Committed], list[Fault]]  # the step committed last first


def in_order(item: Committed) -> tuple[int, int]:
    """Returns the key that sorts steps in the order of their commits."""
    return item.manifest.sequence, item.manifest.step


class Verdicts:
    """The steps that retention must not rely on, by the nonces of their manifests.

    Attributes:
        damaged: steps that were read and found damaged.
        unread: steps that could not be read in the last attempt but may be intact; by name, if the
            manifest could not be read.
        doubtful: steps that this process committed, but perhaps not durably.
    """

    def __init__(self) -> None:
        self.damaged, self.unread, self.doubtful = set[str](), set[str](), set[str]()

    def note_read(self, item: Committed, *, is_whole: bool) -> None:
        """Records that a step was read, and whether it was intact."""
        nonce = item.manifest.nonce
        self.unread -= {item.name, nonce}
        (self.damaged.discard if is_whole else self.damaged.add)(nonce)

    def is_unread(self, item: Committed) -> bool:
        return not self.unread.isdisjoint((item.name, item.manifest.nonce))

    def may_stay_alone(self, item: Committed) -> bool:
        """Returns whether this step is reliable enough to permit the removal of older steps."""
        is_bad = item.manifest.nonce in self.damaged | self.doubtful
        return not (is_bad or self.is_unread(item))


BEGUN, DONE, FAILED = "begun", "done", "failed"  # states of an attempt of this process


class StepStore:
    """The steps under one root.

    Args:
        storage: the interface to the file system.
        root: the root's path; the first begin() creates it.
        lease: must be taken to begin or commit a step; None: several jobs may save here.

    Attributes:
        is_step: whether the root is itself a step, with any name, and holds only that step.
        verdicts: the steps that retention must not rely on.
        attempts: the state of each attempt of this process, by name.
        warned_of_empty: whether the warning that there are no steps was logged.
        warned_of_metric: whether the warning that the metric of keep_best is missing was logged.
        warned_of_parts: whether the warning was logged that steps with other parts are removed.
    """

    EMPTY_IS_NONE = False  # whether an empty manifest says that there will never be one

    def __init__(self, storage: Storage, root: str, lease: Lease | None = None) -> None:
        self.storage = storage
        self.root, self.lease, self.is_step = root, lease, False
        self.verdicts, self.attempts = Verdicts(), dict[str, str]()
        self.warned_of_empty = self.warned_of_metric = self.warned_of_parts = False
        self._manifests: dict[str, tuple[Hashable, Manifest]] = {}  # with the version of the file
        self._thinned = dict[str, frozenset[str]]()  # the keys that are left, by nonce
        self._seen_nonces: set[str] | None = None  # see note_seen(); None: nobody has looked yet
        self._lock = threading.Lock()
        self._sequence = 0  # of the last commit that was begun here
        self._tenure = 0  # of the lease, when steps were last listed for a number
        self._is_clean = False  # whether what dead saves have left was removed

    # ---- what each store does in its own way

    def names(self) -> list[str]:
        """Returns the directories named like steps, committed or not, in no particular order. If
        the root is itself a step, that step's name is "". Raises StorageError.
        """
        raise NotImplementedError

    def looks(self) -> Callable[[], Listed]:
        """Returns a function that lists the root, reads new manifests, and returns the result of
        committed(). It raises Vanished if steps vanish before they are read, and StorageError.
        """
        raise NotImplementedError

    def incomplete(self) -> list[str]:
        """Returns the directories without a manifest, which belong to running or dead saves."""
        raise NotImplementedError

    def may_be_committed(self, name: str) -> bool:
        """Returns whether the manifest exists, or may exist but cannot be read now."""
        raise NotImplementedError

    def draft(self, check: Callable[[], object]) -> Draft:
        """Returns a draft for one rank. `check` raises an error if the save has failed in the
        meantime.
        """
        raise NotImplementedError

    def hold(self, name: str) -> AbstractContextManager[None]:
        """Prevents the removal of a committed step while the body reads it, where the store
        supports this. Raises Vanished, CorruptCheckpoint or StorageError.
        """
        raise NotImplementedError

    def confirm(self, name: str) -> None:
        """Raises Vanished if a step was removed although it was held."""

    def remove(self, name: str, nonce: str) -> bool:
        """Removes a committed step, except if it is held or pinned; returns whether it is gone.
        Raises StorageError.

        Args:
            name, nonce: the step's name and nonce; another step may have taken the name.
        """
        raise NotImplementedError

    def thin(self, name: str, nonce: str, parts: Collection[str]) -> bool:
        """Reduces a committed step to some keys of the state, except if it is held or pinned;
        returns whether it is reduced. First the manifest is replaced, then the files that the new
        manifest does not name are removed. Raises StorageError.

        Args:
            name, nonce: see remove().
            parts: the keys, which the step still has.
        """
        raise NotImplementedError

    def is_thinned(self, item: Committed, parts: Collection[str]) -> bool:
        """Returns whether this process has reduced a step to these keys of the state, so that no
        other files are left.
        """
        return self._thinned.get(item.manifest.nonce) == frozenset(parts)

    def remove_dead(self) -> list[str]:
        """Removes the leftovers of saves that are certainly dead; returns the names."""
        raise NotImplementedError

    def debris(self) -> Iterator[tuple[str, bool, Callable[[], bool]]]:
        """Yields, for each leftover of a dead save, its name, whether the save ran on this host and
        has ended, and a function that removes the leftover and returns whether it was removed.
        Raises StorageError.
        """
        raise NotImplementedError

    def make_mark(self, path: str) -> None:
        """Creates an empty file if it does not exist; it may not be durable. Raises
        StorageError.
        """
        raise NotImplementedError

    def make_root(self) -> None:
        """Creates the root if it is missing. Raises StorageError."""

    def sync_grown(self) -> None:
        """Makes the directory entries durable that make_root() created here. Raises
        StorageError.
        """

    def after_commit(self) -> None:
        """Does the work that can wait until a commit has been acknowledged. Raises StorageError."""

    # ---- paths, and manifests

    def path(self, name: str, *parts: str) -> str:
        return os.path.join(self.root, *filter(None, (name, *parts)))

    def plain_path(self, step: int) -> str:
        """Returns the default path of a step, which it has unless another attempt has that path."""
        return self.path(step_name(step))

    def read(self, name: str) -> Manifest:
        """Returns the manifest of a step.

        Raises:
            Vanished: there is no manifest.
            CorruptCheckpoint: the manifest is damaged, or belongs to another step.
            IncompatibleCheckpoint: a newer fastckpt wrote the manifest.
            StorageError: the manifest cannot be read.
        """
        path = self.path(name, MANIFEST)
        try:
            content = self.storage.read_file(path, MANIFEST_BYTES_MAX + 1)
        except FileNotFoundError:
            raise Vanished(path) from None
        except OSError as error:
            raise unreadable("read", path, error) from error
        if not content and self.EMPTY_IS_NONE:
            raise Vanished(path)
        with naming(path):
            manifest = Manifest.from_bytes(content)
            if name and manifest.step != step_of(name):
                raise CorruptCheckpoint(
                    f"the manifest belongs to step {manifest.step}, not to {name!r}"
                )
        return manifest

    def manifest_of(self, name: str, version: Hashable) -> Manifest:
        """Returns the manifest of a step, from a cache if it was read in this version of its file.
        For errors see read().
        """
        cached = self._manifests.get(name)
        if cached is None or cached[0] != version:
            cached = self._manifests[name] = version, self.read(name)
        return cached[1]

    def note_committed(self, name: str, manifest: Manifest, version: Hashable) -> None:
        """Records a commit of this process."""
        self.attempts[name], self._manifests[name] = DONE, (version, manifest)
        self._seen_nonces = (self._seen_nonces or set()) | {manifest.nonce}

    def forget(self, name: str) -> None:
        """Forgets a removed name, except that an attempt of this name failed: the name is not
        reused.
        """
        self._manifests.pop(name, None)
        if self.attempts.get(name) != FAILED:
            self.attempts.pop(name, None)

    def has_another(self, name: str) -> bool:
        """Returns whether there may be another committed attempt at the step of `name`, as far as
        this process knows.
        """
        own = self._manifests.get(name)
        if own is None:
            return True
        manifests = [*self._manifests.values()]
        return sum(manifest.step == own[1].step for _version, manifest in manifests) > 1

    # ---- what is committed

    def committed(self) -> Listed:
        """Returns the committed steps, newest first, and a Fault for every other directory with a
        manifest.

        If a step vanishes between the listing and the read, the save that removed it had already
        committed a newer step. So the root is listed again.

        Raises:
            StorageError: the root cannot be listed, or steps vanish in each of many listings.
        """
        listing = listed_anew(self.looks())
        assert listing is not None
        if self._seen_nonces is None:
            self.note_seen(listing[0])
        return listing

    def note_seen(self, committed: list[Committed]) -> None:
        """Records the steps that existed when this process first listed the root, or restored. Any
        later step that is not its own was committed by another job that does not know of this job.
        """
        nonces = {item.manifest.nonce for item in committed}
        self._seen_nonces = (self._seen_nonces or set()) | nonces

    def has_seen(self, item: Committed) -> bool:
        """Returns whether note_seen() recorded a step, or this process committed it."""
        return item.manifest.nonce in (self._seen_nonces or ())

    def survey(self, step: int | None = None) -> Listed:
        """Returns the result of committed(), but retries for seconds if a step cannot be read, and
        then raises StorageError, because the caller may want that very step.

        Args:
            step: the only step that must be readable; None: all steps must be readable.
        """
        failed: list[str] = []

        def looked() -> Listed:
            failed.clear()
            committed, faults = self.committed()
            for fault in faults:
                is_asked_for = step is None or fault.step in (None, step)
                if isinstance(fault.error, StorageError) and is_asked_for:
                    failed.append(fault.name)
                    raise fault.error
            return committed, faults

        try:
            return persistently(looked, self.root)
        finally:
            self.verdicts.unread.update(failed)

    # ---- commits of this process

    def begin(self, step: int, passing: bool = False) -> Draft:
        """Begins a new attempt at a step, written by one rank alone. A committed attempt at the
        step stays. For errors see Draft.begin().
        """
        draft = self.draft(lambda: None)
        draft.begin(step, passing)
        return draft

    @contextmanager
    def in_passing(self) -> Iterator[None]:
        """Holds the lease while the body copies a step here. For errors see Draft.begin()."""
        if self.lease is None:
            yield
            return
        self.make_root()
        self.lease.take(passing=True)
        try:
            yield
        finally:
            self.lease.give_back()

    def make_root_soon(self, timeout_s: float) -> None:
        """Creates the root, if the server answers soon."""
        with suppress(OSError):  # a save tries again, and fails if it has to
            within(min(SERVER_S, timeout_s), self.make_root)

    def next_sequence(self, above: int = 0) -> int:
        """Returns the sequence number of the next commit, which is larger than `above` and all
        known numbers here.

        While this process has the lease, the steps are listed only once to compute the number,
        because no other job commits then. The numbers of damaged steps, and of steps that earlier
        jobs left on nodes, may be unknown. The first number of this process is taken from the clock
        to exceed them.
        """
        tenure, last = 0 if self.lease is None else self.lease.tenure, 0
        if not tenure or tenure != self._tenure:
            committed, faults = self.committed()
            last = committed[0].manifest.sequence if committed else 0
            if faults or not self._sequence:
                last = max(last, int(time.time() * 1000))
        with self._lock:
            self._tenure = tenure
            self._sequence = min(max(self._sequence, last, above) + 1, SEQUENCE_MAX)
            return self._sequence

    def renewed(self, manifest: Manifest) -> Manifest:
        """Renews the lease for a commit; returns the manifest. If the lease had to be taken anew,
        another job may have committed in the meantime, and the returned manifest has a higher
        number. For errors see Draft.commit().
        """
        if self.lease is not None:
            self.lease.renew()
            if manifest.sequence == self._sequence and self.lease.tenure != self._tenure:
                return replace(manifest, sequence=self.next_sequence(manifest.sequence))
        return manifest


class Draft:
    """A step that one rank is writing, before a manifest commits the step.

    Attributes:
        steps: the store.
        name: the directory's name; "" until it is known.
        is_begun: whether this rank began the step, and therefore commits it.
    """

    def __init__(self, steps: StepStore, check: Callable[[], object]) -> None:
        self.steps, self.name, self.is_begun = steps, "", False
        self._storage, self._check = steps.storage, check
        self._own_paths = list[str]()  # paths of files

    def begin(self, step: int, passing: bool = False) -> str:
        """Begins a save of this step; returns the directory's name. A committed attempt at the step
        stays.

        Args:
            passing: the draft is a copy of a step that this job did not save; in_passing() holds
                the lease.

        Raises:
            StorageError: the root or the directory cannot be created.
            RootInUse: another job saves to the root.
        """
        steps = self.steps
        if steps.lease is not None and not passing:
            if not steps.lease.is_held:
                steps.make_root()
            steps.lease.take()
        self.name = self._new_attempt(step)
        self.is_begun, steps.attempts[self.name] = True, BEGUN
        return self.name

    def _new_attempt(self, step: int) -> str:
        raise NotImplementedError

    def join(self, name: str) -> None:
        """Sets the directory's name, received from the rank that began the step."""
        self.name = name

    def path(self, *names: str) -> str:
        return self.steps.path(self.name, *names)

    def made(self, name: str, purpose: Purpose) -> AbstractContextManager[tuple[int | Upload, str]]:
        """Creates a file for ImageFile, which is open while the body runs. Raises StorageError."""
        raise NotImplementedError

    def write(self, name: str, content: bytes, beside: int | None, durable: bool) -> None:
        """Creates a small file with this content, and syncs it if `durable`. `beside` is an open
        file on the same file system; the policy of that file system decides whether to retry.
        """
        raise NotImplementedError

    def has_beside(self, path: str) -> bool:
        """Returns whether a file is under the root of these steps."""
        return path.startswith(os.path.join(self.steps.root, ""))

    def adopt(self, name: str, source: str) -> int:
        """Renames a file under the root into the step's directory; returns a new descriptor."""
        raise NotImplementedError

    def sync_own_directory(self) -> None:
        """Makes the directory entries durable on a file system that the first rank does not see."""

    def commit(self, manifest: Manifest, durable: bool) -> None:
        """Commits the step on the rank that began it; all of its files have been written.

        Args:
            manifest: names the files.
            durable: sync the manifest and the directories.

        Raises:
            StorageError: the step is not committed. If the error is `visible`, the step is
                committed, but perhaps not durably.
            RootInUse: another job has taken over the root.
        """
        raise NotImplementedError

    def abandon(self) -> None:
        """Removes the files of this rank after its save failed, even if the step was committed."""
        raise NotImplementedError

    def share(self) -> None:
        """Lets other processes read the committed step from now on. The step cannot be removed
        before close().
        """

    def close(self) -> None:
        """Releases the locks that show other processes that the save is alive."""


def unreadable(op: str, path: str, error: OSError) -> CheckpointError:
    """Returns the error for a manifest that cannot be opened: CorruptCheckpoint if it is not a
    regular file, else StorageError.
    """
    if isinstance(error, NoRegularFile):
        return CorruptCheckpoint(f"{path!r} is not a regular file")
    return StorageError(op, path, error.errno or errno.EIO)
