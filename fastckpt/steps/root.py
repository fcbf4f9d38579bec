"""The directories of steps under one root: which are committed, which are begun, which are dead.

The module makes a step's directory, commits it by its manifest, and removes what is surely dead.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import NamedTuple

from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError, Vanished
from fastckpt.formats.manifest import MANIFEST, MANIFEST_BYTES_MAX, SEQUENCE_MAX, Manifest
from fastckpt.formats.step_names import (
    ATTEMPT_BYTES,
    NAME,
    OURS,
    PINNED,
    is_unique,
    step_name,
    step_of,
)
from fastckpt.latch import SERVER_S, within
from fastckpt.saving.lease import Lease
from fastckpt.steps import dead
from fastckpt.steps.known import UNSEEN, Begun, Known
from fastckpt.storage import atomic, calls
from fastckpt.storage.file_system import (
    NEW_MODE,
    NoRegularFile,
    Storage,
    naming,
    patiently,
    persistently,
    reported,
)
from fastckpt.storage.vanishing import kept, leads_nowhere, listed_anew

log = logging.getLogger("fastckpt")

_CREATES_MAX = 5  # directories that are made for one save, and names that are tried for each
_LOOKS_MAX = 5  # listings of a root in which some steps, but not all, vanish while they are read


class Committed(NamedTuple):
    """A step whose manifest is valid."""

    name: str
    manifest: Manifest


class Fault(NamedTuple):
    """A directory whose manifest is invalid or cannot be read, and the error that says why."""

    name: str
    error: CheckpointError

    @property
    def step(self) -> int | None:
        """The step that it would be; None if its name does not tell."""
        return step_of(self.name) if self.name else None


ALONE_S, _LOCK_POLL_S = 5.0, 0.01  # for how long ranks of a failed save wait for each other
TAKEN = "another process took the directory for one that was left behind: save again"
# The kinds of directory in which no manifest was found:
_GONE = "gone"  # a step: it vanished after it was seen, now or earlier, with a manifest
_UNSEEN = "unseen"  # it had vanished when it was looked at: a step, or of a save that failed
_BARE = "bare"  # it has not even a temporary one: it is being removed, or has just been made


class _Look(NamedTuple):
    """One listing of a root: what Steps.committed() returns, and the marks of other names."""

    found: list[Committed]
    faults: list[Fault]
    marks: dict[str, str]


def _unique_name(step: int) -> str:
    return step_name(step, secrets.token_hex(ATTEMPT_BYTES))


def in_order(item: Committed) -> tuple[int, int]:
    """Returns the key that sorts steps in the order of their commits."""
    return item.manifest.sequence, item.manifest.step


class Steps:
    """The steps under one root.

    Args:
        storage: the seam to the file system.
        root: the root's path; the directory is made when a step is begun.
        lease: without which nothing is begun or committed; None: several jobs may.

    Attributes:
        is_step: whether the root is itself a step, of whatever name, and so holds that one alone.
    """

    def __init__(self, storage: Storage, root: str, lease: Lease | None = None) -> None:
        self.storage = storage
        self.root, self.lease, self.is_step = root, lease, False
        self._told: set[str] = set()  # see dead.left_in()
        self._names: dict[str, Known] = {}
        self._cleaned = False
        self._is_shared: bool | None = None  # see may_be_taken_again(); None: not known yet
        self._seen: set[str] | None = None  # see note_seen(); None: nobody has looked yet
        self._lock = threading.Lock()
        # Held while a directory is removed. It has no manifest then and seems dead, so a save that
        # began meanwhile would take its name and lose the files it made there.
        self._removing = calls.NotedLock("removal", root)
        self._sequence = 0  # of the last commit that was begun here
        self.told_empty = False  # whether it was told that there are no steps
        self.told_metric = False  # whether it was told that metrics lack the one of keep_best
        # Takes files out of a directory that is being removed; returns the names that it leaves.
        self.keep_files: Callable[[str, list[str]], list[str]] | None = None
        self._grown: list[str] = []  # directories above the root whose new entry is not durable yet

    def path(self, name: str, *parts: str) -> str:
        return os.path.join(self.root, *filter(None, (name, *parts)))

    def plain_path(self, step: int) -> str:
        """Returns the path that a step has unless another attempt has it."""
        return self.path(step_name(step))

    def known(self, name: str) -> Known:
        """Returns what this process knows of a name."""
        return self._names.setdefault(name, Known())

    def take(self, name: str) -> None:
        """Drops what is known of a name that a save has taken: it was about an earlier save."""
        self._names[name] = Known()

    def names(self) -> list[str]:
        """Returns the directories named as steps, committed or not, in no order. Symbolic links are
        left out, since this root may not remove what they lead to. The step that the root itself is
        has the name "".
        """
        if self.is_step:
            return [""]
        try:
            return [
                name for name in self.storage.names(self.root, directories=True) if NAME.match(name)
            ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError("list", self.root, error.errno or errno.EIO) from error

    def read(self, name: str) -> Manifest:
        """Returns the manifest of a step.

        Raises:
            Vanished: there is none.
            CorruptCheckpoint: it is damaged, or of another step.
            IncompatibleCheckpoint: a newer fastckpt wrote it. StorageError: it cannot be read.
        """
        path = self.path(name, MANIFEST)
        try:
            content = self.storage.read_file(path, MANIFEST_BYTES_MAX + 1)
        except FileNotFoundError:
            raise Vanished(path) from None
        except OSError as error:
            raise _unreadable("read", path, error) from error
        with naming(path):
            manifest = Manifest.from_bytes(content)
            if name and manifest.step != step_of(name):
                raise CorruptCheckpoint(f"the manifest is of step {manifest.step}, not of {name!r}")
        return manifest

    def committed(self, *, afresh: bool = True) -> tuple[list[Committed], list[Fault]]:
        """Returns the committed steps, the one committed last first, and what is wrong with every
        other directory that has a manifest.

        If a step vanishes between the listing and the look at it, the save that removed it has
        committed a newer one before, which the next listing shows (unless this machine has cached
        the old one). So the root is listed again, up to a limit, until nothing new vanishes and a
        step is found. A name that vanished unseen may be of a save that failed, after which there
        is no step: there is none, either, if two listings in a row hold no such name any more. One
        is not enough, since a slow listing may miss both the old and the new.

        Args:
            afresh: whether to look again at manifests that were read before.

        Raises:
            StorageError: the root cannot be listed, or steps vanish however often it is.
        """
        looks: list[_Look] = []

        def settled() -> tuple[list[Committed], list[Fault]]:
            look = self._looked(afresh)
            is_new = not look.marks.keys() <= (looks[-1].marks.keys() if looks else set())
            looks.append(look)
            again = is_new and len(looks) < _LOOKS_MAX
            if not look.found:
                ever, lately = (
                    {mark for each in some for mark in each.marks.values()}
                    for some in (looks, looks[-2:])
                )
                again = is_new or _GONE in ever or _UNSEEN in lately
                again = again or not (look.faults or looks[1:])
            if again:
                raise Vanished(self.root)
            return look.found, look.faults

        found = listed_anew(settled)
        assert found is not None
        if self._seen is None:
            self.note_seen(found[0])
        return found

    def note_seen(self, found: list[Committed]) -> None:
        """Notes the steps that were there when this process first looked, or restored. What comes
        later, and is not its own, another job has committed that does not know of this one.
        """
        self._seen = (self._seen or set()) | {item.manifest.nonce for item in found}

    def has_seen(self, item: Committed) -> bool:
        """Returns whether a step was noted by note_seen(), or is this process's own."""
        return item.manifest.nonce in (self._seen or ())

    def _looked(self, afresh: bool) -> _Look:
        look = _Look([], [], {})
        # Older steps first: the newer one, committed before one of them was removed, is seen then.
        for name in sorted(self.names()):
            manifest = self.known(name).manifest
            if not afresh and self.known(name).is_begun:  # it is committed here, or not at all
                continue
            try:
                if afresh or manifest is None:
                    manifest = self._manifest(name)
                if manifest is not None:
                    look.found.append(Committed(name, manifest))
                elif mark := self._mark(name):
                    look.marks[name] = mark
            except Vanished:
                look.marks[name] = _GONE
            except CheckpointError as error:
                look.faults.append(Fault(name, error))
        look.found.sort(key=in_order, reverse=True)
        return look

    def _manifest(self, name: str) -> Manifest | None:
        """Returns the manifest, read only if it has changed; None if there is none."""
        path = self.path(name, MANIFEST)
        try:
            status = self.storage.status(path)
        except OSError as error:
            raise _unreadable("open", path, error) from error
        if status is None:
            return None
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self.known(name)
        if known.manifest is None or known.version != version:
            manifest = self.read(name)
            if known.manifest is not None and known.manifest.nonce != manifest.nonce:
                self.take(name)  # another process saved the step
                known = self.known(name)
            known.manifest, known.version = manifest, version
        return known.manifest

    def _mark(self, name: str) -> str:
        """Returns what a directory is in which no manifest was found: _GONE also if it has one now
        or is a step known here; "" if a save is writing there, or one of this process has failed.
        """
        path, known = self.path(name, MANIFEST), self.known(name)
        try:
            names = self.storage.names(self.path(name))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                return _BARE
            return _GONE if known.manifest is not None else _UNSEEN * (not known.is_abandoned)
        if MANIFEST in names and leads_nowhere(self.storage, path):
            raise CorruptCheckpoint(f"{path!r} is a link that leads nowhere")
        if MANIFEST in names:
            return _GONE
        return "" if atomic.temporaries_among(names, path) else _BARE

    def survey(self, step: int | None = None) -> tuple[list[Committed], list[Fault]]:
        """Does what committed() does, but tries for seconds to read every step, and then raises
        StorageError: it may be the very step that is asked for.

        Args:
            step: the only step that has to be readable; None: all have to be.
        """
        failed: list[str] = []

        def looked() -> tuple[list[Committed], list[Fault]]:
            failed.clear()
            found, faults = self.committed()
            for fault in faults:
                is_asked_for = step is None or fault.step in (None, step)
                if isinstance(fault.error, StorageError) and is_asked_for:
                    failed.append(fault.name)
                    raise fault.error
            return found, faults

        try:
            return persistently(looked, self.root)
        finally:
            for name in failed:
                self.known(name).is_unread = True

    def incomplete(self) -> list[str]:
        """Returns the directories without a manifest: of saves that are running, or never ended."""
        return sorted(
            name
            for name in self.names()
            if not dead.may_be_committed(self.storage, self.path(name))
        )

    def begin(self, step: int, passing: bool = False) -> Begun:
        """Makes a new directory for a save of this step; a committed one of the step stays.

        Args:
            passing: it is no save of this job; in_passing() has the lease.

        Raises:
            StorageError: the root or the directory cannot be made.
            RootInUse: another job saves to the root.
        """
        if self.lease is not None and not passing:
            if not self.lease.is_held:
                self.make_root()
            self.lease.take()
        with self._removing:  # a save that begins meanwhile sees no half-removed directory
            self.remove_left()
            # Earlier jobs, or ranks that were late for a failed save, may have filled the disk.
            failed = any(known.is_abandoned for known in [*self._names.values()])
            if failed or not self._cleaned:
                self._cleaned = True
                self.remove_dead()
        for _ in range(_CREATES_MAX):
            name = self._make(step)
            temporary = atomic.temporary_path(self.path(name, MANIFEST))
            with reported("open", temporary):
                try:
                    fd = self.storage.create(temporary, NEW_MODE)
                except FileNotFoundError:
                    continue  # another save found the directory empty and removed it as dead
            begun = Begun(name, fd, temporary)
            self.known(name).is_begun = True
            try:
                atomic.claim(self.storage, fd, temporary)
            except BaseException:
                self.abandon(begun)
                raise
            return begun
        raise StorageError("make directory", self.plain_path(step), errno.EEXIST)

    @contextmanager
    def in_passing(self) -> Iterator[None]:
        """Has the lease while the body runs that copies a step here. Raises as begin()."""
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
        """Makes the root, if the server answers soon."""
        with suppress(OSError):  # a save tries again, and fails if it has to
            within(min(SERVER_S, timeout_s), self.make_root)

    def make_root(self) -> None:
        """Makes the root, if it is missing. Raises StorageError."""
        with reported("make directory", self.root):
            path, grown = self.root, []
            while (status := self.storage.status(path)) is None:
                path = os.path.dirname(path)
                grown.append(path)
            if grown:
                self.storage.make_directory(self.root, parents=True)
                self._grown += grown
            elif not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    def sync_grown(self) -> None:
        """Makes the names durable that make_root() has made here. Raises StorageError."""
        for path in [*self._grown]:
            with reported("sync directory", path):
                self.storage.sync_directory(path)
            with suppress(ValueError):  # another save of this rank has done so, too
                self._grown.remove(path)

    def _make(self, step: int) -> str:
        """Makes the directory of a new attempt at a step; returns its name: the plain one if that
        may be taken again and is free, or its directory is dead.

        Nor is it that of an attempt that failed here, since a late rank may still write there.
        """
        name = step_name(step)
        if not self.may_be_taken_again(name) or self.known(name).is_abandoned:
            name = _unique_name(step)
        with self._removing:
            for _ in range(_CREATES_MAX):
                try:
                    with reported("make directory", self.path(name)):
                        self.storage.make_directory(self.path(name))
                    self.take(name)
                    return name
                except StorageError as error:
                    if error.errno == errno.ENOENT:
                        self.make_root()
                    elif error.errno != errno.EEXIST:
                        raise
                    elif is_unique(name) or not self.remove_if_dead(name):
                        name = _unique_name(step)
        raise StorageError("make directory", self.path(name), errno.EEXIST)

    def may_be_taken_again(self, name: str) -> bool:
        """Returns whether a later attempt may have this name, which then proves nothing: that holds
        for plain names on a local file system, where everybody sees everybody's locks. A job of
        another host might come back at any time to a directory that it takes for its own.
        """
        if is_unique(name):
            return False
        if self._is_shared is None:
            with reported("open directory", self.root):
                try:
                    fd = self.storage.open(self.root, "directory")
                except FileNotFoundError:
                    self.make_root()
                    fd = self.storage.open(self.root, "directory")
                try:
                    self._is_shared = self.storage.policy(fd)[1].remote
                finally:
                    atomic.close_quietly(self.storage, fd)
        return not self._is_shared

    @contextmanager
    def alone(self, name: str, within_s: float = 0.0) -> Iterator[bool]:
        """Yields whether this process alone may empty a directory while the body runs.

        A directory whose name may be taken again is locked for that: else another process might
        find it half emptied and take it for dead, a save take the name, and lose its files here.

        Args:
            within_s: for how long to wait for others who have the lock, such as ranks of one save.
        """
        if not self.may_be_taken_again(name):
            yield True
            return
        fd = self.storage.open(self.path(name), "directory")
        try:
            until = time.monotonic() + within_s
            while not (is_locked := self.storage.lock(fd)) and time.monotonic() < until:
                time.sleep(_LOCK_POLL_S)
            now = self.storage.status(self.path(name))
            yield is_locked and now is not None and os.path.samestat(now, self.storage.fstat(fd))
        finally:
            atomic.close_quietly(self.storage, fd)

    def next_sequence(self, above: int = 0) -> int:
        """Returns the sequence number of the next commit: above that of any here, and `above`.

        Other steps may exist whose numbers are unknown: damaged ones, and those of earlier jobs on
        nodes. The clock puts the first number of this process above theirs.
        """
        found, faults = self.committed(afresh=False)
        last = found[0].manifest.sequence if found else 0
        if faults or not self._sequence:
            last = max(last, int(time.time() * 1000))
        with self._lock:
            self._sequence = min(max(self._sequence, last, above) + 1, SEQUENCE_MAX)
            return self._sequence

    def publish(self, begun: Begun, manifest: Manifest, durable: bool) -> None:
        """Commits a step, whose files are all written: gives the manifest its name.

        Args:
            begun: the directory of this save.
            manifest: names the files.
            durable: sync the manifest and the directories.

        Raises:
            StorageError: the step is not committed, unless the error is `visible`: then it is, but
                perhaps not durably.
            RootInUse: another job has taken the root over.
        """
        storage, directory, known = self.storage, self.path(begun.name), self.known(begun.name)
        with reported("write", begun.temporary):
            content, fd = manifest.to_bytes(), begun.manifest_fd
            patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
        if durable:
            with reported("sync", begun.temporary):
                storage.sync(begun.manifest_fd)
            # A manifest that survives a crash must find its files: their names, and those of the
            # directories they are in, become durable before it is renamed.
            for path in (directory, self.root):
                with reported("sync directory", path):
                    storage.sync_directory(path)
            self.sync_grown()
        if self.lease is not None:
            self.lease.renew()
        name = self.path(begun.name, MANIFEST)
        with atomic.naming_in(storage, [directory] if durable else [], name) as make_durable:
            # Until the rename is durable a crash may undo it, so retention does not count this step
            # among those that stay: nor does it if the rename is given up, and happens later.
            known.is_doubtful = True
            with reported("rename", name):
                try:
                    patiently(
                        storage, fd, lambda: storage.rename(begun.temporary, name, replaces=False)
                    )
                except FileNotFoundError:
                    raise StorageError("rename", name, errno.ENOENT, detail=TAKEN) from None
            known.manifest, known.version, known.is_begun = manifest, UNSEEN, False
            self._seen = (self._seen or set()) | {manifest.nonce}
            make_durable()
            known.is_doubtful = False

    def abandon(self, begun: Begun) -> None:
        """Ends a save that failed: closes its manifest, and removes its directory if that is still
        its own, although it was published. The name is not used again here.
        """
        name, known = begun.name, self.known(begun.name)
        with ExitStack() as closing:
            closing.callback(atomic.close_quietly, self.storage, begun.manifest_fd)
            known.is_abandoned, known.is_begun = True, False  # before it vanishes
            with self._removing, ExitStack() as alone:
                is_own = False
                with suppress(OSError):  # it is gone, or is left to the next removal
                    is_own = alone.enter_context(self.alone(name, ALONE_S)) and self._is_own(begun)
                # Before _empty(): a network client keeps an open file, and so its directory.
                closing.close()
                if is_own:
                    with suppress(OSError):  # as above
                        entries = self.storage.names(self.path(name))
                        if MANIFEST in entries:
                            self._remove_manifest(name)
                        self._empty(name, [entry for entry in entries if entry != MANIFEST])

    def _is_own(self, begun: Begun) -> bool:
        """Returns whether a directory is the one that a save has made: others may have taken it for
        dead, and its name. The inode that is open here is nobody else's, whichever name it has: the
        manifest is published if the save failed after that, on another node.
        """
        if not self.may_be_taken_again(begun.name):
            return True
        own = self.storage.fstat(begun.manifest_fd)
        paths = (begun.temporary, self.path(begun.name, MANIFEST))
        found = (self.storage.status(path) for path in paths)
        return any(status is not None and os.path.samestat(status, own) for status in found)

    def has_another(self, name: str) -> bool:
        """Returns whether this process knows another committed attempt at the step of `name`."""
        manifests = [known.manifest for known in [*self._names.values()]]
        steps = [manifest.step for manifest in manifests if manifest is not None]
        own = self.known(name).manifest
        return own is None or steps.count(own.step) > 1

    def _remove_manifest(self, name: str) -> None:
        self.known(name).manifest = None
        with suppress(FileNotFoundError):  # gone already
            self.storage.remove(self.path(name, MANIFEST))
            # A power cut must not bring the manifest back once the files it names are removed.
            self.storage.sync_directory(self.path(name))

    def _empty(self, name: str, entries: list[str]) -> None:
        """Removes those of the entries that a save makes, and then the directory."""
        # Temporary manifests last: they tell who owns the directory.
        ours = sorted(filter(OURS.fullmatch, entries), key=lambda entry: entry.startswith("."))
        if ours and self.keep_files is not None:
            ours = self.keep_files(self.path(name), ours)
        if ours:
            self.storage.remove_all(self.path(name), ours)
        try:
            self.storage.remove_directory(self.path(name))
        except OSError as error:
            # A network client keeps a removed file that is open: see policies.LINGERING.
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and all(map(OURS.fullmatch, entries)):
                self.known(name).is_left = True
            raise
        self._forget(name)

    def _forget(self, name: str) -> None:
        """Drops what is known of a name that is no more, but that it must not be used again."""
        if not self.known(name).is_abandoned:
            self._names.pop(name, None)

    def remove_left(self) -> None:
        """Removes the directories that open files kept, if they can be removed now."""
        with self._removing:
            for name, known in [*self._names.items()]:
                if not known.is_left:
                    continue
                try:
                    self.storage.remove_directory(self.path(name))
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                        continue
                known.is_left = False
                self._forget(name)

    def remove_if_dead(self, name: str, others_after_s: float = atomic.DEAD_AFTER_S) -> bool:
        """Removes a directory without a manifest if its save is surely over; returns whether.

        Should that save come back, either it commits or its directory is removed, whatever happens
        when: this removes the temporary manifest first, which is there no more if it was renamed
        before. Where no file is renamed, the save looks for it after it has made its manifest.
        """
        storage, path = self.storage, self.path(name)
        with suppress(OSError), self.alone(name) as is_alone:  # it is left to a later call
            entries = dead.left_in(storage, path, others_after_s, self._told) if is_alone else None
            if entries is None:
                return False
            temporaries = atomic.temporaries_among(entries, MANIFEST)
            for temporary in temporaries:
                storage.remove(os.path.join(path, temporary))
            if dead.may_be_committed(storage, path):
                return False
            self._empty(name, [entry for entry in entries if entry not in temporaries])
            return True
        return False

    def remove_dead(self) -> list[str]:
        """Removes the directories of saves that are surely over; returns their names."""
        with self._removing:
            return [name for name in self.incomplete() if self.remove_if_dead(name)]

    def remove_unread(self, name: str, nonce: str) -> bool:
        """Removes a committed step unless somebody holds it or it is pinned; returns whether it is
        gone. Raises StorageError.

        Args:
            name, nonce: of the step: by now another one may have the name.
        """
        path = self.path(name, MANIFEST)
        # Held until the directory is empty, so that no save that begins takes its name before.
        with self._removing, ExitStack() as alone:
            try:
                fd = self.storage.open(path, "lock")
            except FileNotFoundError:
                return True  # removed by somebody else
            except OSError:
                return False
            try:
                with reported("lock", path):
                    if not self.storage.lock(fd):
                        return False
                if self.read(name).nonce != nonce:
                    return True
                if not alone.enter_context(self.alone(name)):
                    return False
                entries = self.storage.names(self.path(name))
                if PINNED in entries:
                    return False
                self._remove_manifest(name)
            except Vanished:
                return True
            except StorageError:
                raise
            except CheckpointError:
                return False  # it is damaged by now
            except OSError as error:
                raise StorageError("remove", path, error.errno or errno.EIO) from error
            finally:
                # Closed, and so unlocked, only now: a reader that waits for the lock finds the step
                # gone. Closed before _empty(): a network client keeps open files, see abandon().
                atomic.close_quietly(self.storage, fd)
            with suppress(OSError):  # what stays is left to the next removal
                self._empty(name, [entry for entry in entries if entry != MANIFEST])
            return True

    def hold(self, name: str) -> AbstractContextManager[None]:
        """Keeps a committed step from being removed while the body reads it. Raises as kept()."""
        return kept(self.storage, self.path(name, MANIFEST))


def _unreadable(op: str, path: str, error: OSError) -> CheckpointError:
    """Returns the error for a manifest that cannot be opened: it is corrupt if it is no file."""
    if isinstance(error, NoRegularFile):
        return CorruptCheckpoint(f"{path!r} is not a regular file")
    return StorageError(op, path, error.errno or errno.EIO)
