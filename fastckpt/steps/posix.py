"""Steps in directories of a file system. A save first creates the step's directory, and commits the
step by renaming its manifest. A removal first locks the manifest.

On a local file system, a later attempt may reuse a plain name, so open inodes and locks prove who
owns a directory. On other file systems, hosts may not see each other's locks. Therefore the name of
an attempt is random there and never reused, and having the name proves ownership.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import NamedTuple, TypeAlias

from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError, Vanished
from fastckpt.formats.manifest import MANIFEST, Manifest
from fastckpt.formats.step_names import ATTEMPT_BYTES, NAME, OURS, PINNED, is_unique, step_name
from fastckpt.saving.lease import Lease
from fastckpt.steps.store import (
    BEGUN,
    FAILED,
    TAKEN,
    Committed,
    Draft,
    Fault,
    Listed,
    StepStore,
    in_order,
    unreadable,
)
from fastckpt.storage import atomic, calls
from fastckpt.storage.file_system import NEW_MODE, Storage, is_directory, patiently, reported
from fastckpt.storage.lustre_layout import Purpose
from fastckpt.storage.vanishing import is_removed, is_unlocked, leads_nowhere, locked_shared

log = logging.getLogger("fastckpt")

_LOOKS_MAX = 5  # listings of a root in which some steps, but not all, vanish while they are read
_CREATES_MAX = 5  # directories that are made for one save, and names that are tried for each
_Begin: TypeAlias = Callable[[Manifest, list[str]], Callable[[], None] | None]
_ALONE_S, _LOCK_POLL_S = 5.0, 0.01  # for how long ranks of a failed save wait for each other


# Why no manifest was found in a directory:
_GONE = "gone"  # it was seen, now or earlier, and has vanished
_UNSEEN = "unseen"  # the directory had vanished when it was looked at
_BARE = "bare"  # there is not even a temporary one: it is being removed, or has just been made


class _Look(NamedTuple):
    """One listing of a root: the result of committed(), and for each other name why it is no
    step.
    """

    committed: list[Committed]
    faults: list[Fault]
    marks: dict[str, str]


class PosixSteps(StepStore):
    """The steps under a directory. For arguments and attributes see StepStore.

    Attributes:
        keep_files: moves files to keep out of a directory that is being removed, and returns the
            names of the files to remove.
        removal: the lock that is held while a directory is emptied.
    """

    def __init__(self, storage: Storage, root: str, lease: Lease | None = None) -> None:
        super().__init__(storage, root, lease)
        self._is_shared: bool | None = None  # see may_be_taken_again(); None: not known yet
        # Held while a directory is removed. It has no manifest then and seems dead, so a save that
        # began meanwhile would reuse its name and lose the files it made there.
        self.removal = calls.NotedLock("removal", root)
        self.keep_files: Callable[[str, list[str]], list[str]] | None = None
        self._grown: list[str] = []  # directories above the root whose new entry is not durable yet

    # ---- what is there

    def names(self) -> list[str]:
        """See StepStore.names. Symbolic links are left out, because this root may not remove their
        targets.
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

    def looks(self) -> Callable[[], Listed]:
        """Returns a function that lists the root. The caller repeats it while it raises Vanished.
        It does so, up to a limit, until no more names vanish and a step is found, because this
        machine may have cached an old listing.

        A directory that vanishes before it is read may belong to a failed save, so there may be no
        step at all. This is certain once two consecutive listings contain no such name. A single
        slow listing may miss both an old step and its successor.
        """
        looks: list[_Look] = []

        def settled() -> Listed:
            look = self._look()
            is_new = not look.marks.keys() <= (looks[-1].marks.keys() if looks else set())
            looks.append(look)
            again = is_new and len(looks) < _LOOKS_MAX
            if not look.committed:
                ever, lately = (
                    {mark for each in some for mark in each.marks.values()}
                    for some in (looks, looks[-2:])
                )
                again = is_new or _GONE in ever or _UNSEEN in lately
                again = again or not (look.faults or looks[1:])
            if again:
                raise Vanished(self.root)
            return look.committed, look.faults

        return settled

    def _look(self) -> _Look:
        look = _Look([], [], {})
        # Older steps first: the newer one, committed before one of them was removed, is seen then.
        for name in sorted(self.names()):
            try:
                manifest = self._manifest(name)
                if manifest is not None:
                    look.committed.append(Committed(name, manifest))
                elif mark := self._mark(name):
                    look.marks[name] = mark
            except Vanished:
                look.marks[name] = _GONE
            except CheckpointError as error:
                look.faults.append(Fault(name, error))
        look.committed.sort(key=in_order, reverse=True)
        return look

    def _manifest(self, name: str) -> Manifest | None:
        path = self.path(name, MANIFEST)
        try:
            status = self.storage.status(path)
        except OSError as error:
            raise unreadable("open", path, error) from error
        if status is None:
            return None
        return self.manifest_of(name, (status.st_ino, status.st_mtime_ns, status.st_size))

    def _mark(self, name: str) -> str:
        """Returns why a directory has no manifest. The result is _GONE also if a manifest exists
        now or existed earlier, and "" if a save is writing there or a save of this process failed
        there.
        """
        path = self.path(name, MANIFEST)
        try:
            names = self.storage.names(self.path(name))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                return _BARE
            has_failed = self.attempts.get(name) == FAILED
            return _GONE if name in self._manifests else _UNSEEN * (not has_failed)
        if MANIFEST in names and leads_nowhere(self.storage, path):
            raise CorruptCheckpoint(f"{path!r} is a link to a missing file")
        if MANIFEST in names:
            return _GONE
        return "" if atomic.temporaries_among(names, path) else _BARE

    def incomplete(self) -> list[str]:
        return sorted(name for name in self.names() if not self.may_be_committed(name))

    def may_be_committed(self, name: str) -> bool:
        try:
            return self.storage.status(self.path(name, MANIFEST)) is not None
        except OSError:
            return True

    def hold(self, name: str) -> AbstractContextManager[None]:
        return locked_shared(self.storage, self.path(name, MANIFEST))

    # ---- the root

    def make_mark(self, path: str) -> None:
        with reported("open", path), suppress(FileExistsError):  # it is there
            fd = self.storage.create(path, NEW_MODE)
            try:
                self.storage.sync(fd)
            finally:
                atomic.close_quietly(self.storage, fd)

    def make_root(self) -> None:
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
        for path in [*self._grown]:
            with reported("sync directory", path):
                self.storage.sync_directory(path)
            with suppress(ValueError):  # another save of this rank has removed it
                self._grown.remove(path)

    # ---- whose a directory is

    def draft(self, check: Callable[[], object]) -> PosixDraft:
        return PosixDraft(self, check)

    def may_be_taken_again(self, name: str) -> bool:
        """Returns whether a later attempt may reuse this name, so that the name does not prove who
        owns the directory. This is true for plain names on a local file system, where all processes
        see each other's locks. On other file systems, a job on another host might resume writing to
        the directory at any time.
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
        """Yields whether this process alone has the right to empty a directory while the body runs.

        A directory whose name may be reused is locked for this. Without the lock, another process
        might find the directory half empty and consider its save dead, and a new save that reuses
        the name would lose files.

        Args:
            within_s: how long to wait for other holders of the lock, such as ranks of one save.
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

    def make_attempt(self, step: int) -> str:
        """Creates the directory of a new attempt at a step; returns its name. This is the plain
        name if it may be reused, and is free or belongs to a dead save.

        The name of an attempt that failed in this process is not reused, because a late rank may
        still write there.
        """
        name = step_name(step)
        if not self.may_be_taken_again(name) or self.attempts.get(name) == FAILED:
            name = _unique_name(step)
        with self.removal:
            for _ in range(_CREATES_MAX):
                try:
                    with reported("make directory", self.path(name)):
                        self.storage.make_directory(self.path(name))
                    self.forget(name)
                    return name
                except StorageError as error:
                    if error.errno == errno.ENOENT:
                        self.make_root()
                    elif error.errno != errno.EEXIST:
                        raise
                    elif is_unique(name) or not self.remove_if_dead(name):
                        name = _unique_name(step)
        raise StorageError("make directory", self.path(name), errno.EEXIST)

    # ---- removal

    def remove_manifest(self, name: str) -> None:
        self._manifests.pop(name, None)
        with suppress(FileNotFoundError):  # gone already
            self.storage.remove(self.path(name, MANIFEST))
            # A power cut must not bring the manifest back once the files it names are removed.
            self.storage.sync_directory(self.path(name))

    def empty(self, name: str, entries: list[str]) -> None:
        """Removes the entries that are files of a save, and then the directory."""
        # Temporary manifests last: they tell who owns the directory.
        ours = sorted(filter(OURS.fullmatch, entries), key=lambda entry: entry.startswith("."))
        if ours and self.keep_files is not None:
            ours = self.keep_files(self.path(name), ours)
        if ours:
            self.storage.remove_all(self.path(name), ours)
        try:
            self.storage.remove_directory(self.path(name))
        except OSError:
            # A network client keeps a removed file that is open (policies.LINGERING), and with it
            # the directory, which is then removed before the next save.
            self._is_clean = False
            raise
        self.forget(name)

    def clean(self) -> None:
        """Removes the leftovers of dead saves once, and again if a later save failed here or left
        files. Leftovers may have filled the disk.
        """
        with self.removal:  # a save that begins meanwhile sees no half-removed directory
            if not self._is_clean or FAILED in [*self.attempts.values()]:
                self._is_clean = True
                self.remove_dead()

    def remove_dead(self) -> list[str]:
        with self.removal:
            return [name for name in self.incomplete() if self.remove_if_dead(name)]

    def remove_if_dead(self, name: str, others_after_s: float = atomic.DEAD_AFTER_S) -> bool:
        """Removes a directory without a manifest if its save is certainly dead; returns whether it
        was removed.

        If the save is alive after all, it either commits or loses its directory: this function
        removes the temporary manifest first, and the commit renames that same file.
        """
        storage, path = self.storage, self.path(name)
        with suppress(OSError), self.alone(name) as is_alone:  # it is left to a later call
            entries = self._left_in(name, others_after_s) if is_alone else None
            if entries is None:
                return False
            temporaries = atomic.temporaries_among(entries, MANIFEST)
            for temporary in temporaries:
                storage.remove(os.path.join(path, temporary))
            if self.may_be_committed(name):
                return False
            self.empty(name, [entry for entry in entries if entry not in temporaries])
            return True
        return False

    def _left_in(self, name: str, others_after_s: float) -> list[str] | None:
        """Returns the entries of a directory without a manifest if its save is certainly dead; else
        None.

        The save is dead if there is no temporary manifest, which a save removes last. It is also
        dead if every temporary manifest is unlocked, and its process either ran on this host and
        has ended, or wrote it on another host `others_after_s` ago. A directory that contains
        foreign files stays.
        """
        storage, directory = self.storage, self.path(name)
        with suppress(OSError):  # it was removed meanwhile, or cannot be read
            # Only what is there now is removed, so a save that begins meanwhile keeps its files.
            if not is_directory(storage, directory) or self.may_be_committed(name):
                return None
            entries = storage.names(directory)
            if MANIFEST in entries or not all(map(OURS.fullmatch, entries)):
                return None
            for temporary in atomic.temporaries_among(entries, MANIFEST):
                path = os.path.join(directory, temporary)
                is_dead = atomic.is_of_dead(storage, path) and is_unlocked(storage, path)
                if not is_dead and not self._is_of_other_dead(path, others_after_s):
                    return None
            if not self.may_be_committed(name):  # nor has it committed meanwhile
                return entries
        return None

    def _is_of_other_dead(self, temporary: str, after_s: float) -> bool:
        """Returns whether a temporary manifest was written by another host, is at least `after_s`
        old, and is unlocked.
        """
        status = self.storage.status(temporary)
        if status is None or atomic.is_of_this_host(temporary):
            return False
        if not after_s or time.time() - status.st_mtime >= after_s:  # clocks may differ
            return is_unlocked(self.storage, temporary)
        log.warning(
            "%s was begun on another host and not committed: remove it, or a save will remove it "
            "after a day",
            os.path.dirname(temporary),
        )
        return False

    def debris(self) -> Iterator[tuple[str, bool, Callable[[], bool]]]:
        for name in self.incomplete():
            if self._left_in(name, 0.0) is not None:
                temporaries = atomic.temporaries(self.storage, self.path(name, MANIFEST))
                is_ours = all(map(atomic.is_of_this_host, temporaries))
                yield name, is_ours, partial(self.remove_if_dead, name, others_after_s=0.0)

    def remove(self, name: str, nonce: str) -> bool:
        def begin(_manifest: Manifest, entries: list[str]) -> Callable[[], None]:
            self.remove_manifest(name)
            return partial(self.empty, name, [entry for entry in entries if entry != MANIFEST])

        return self._reduced(name, nonce, begin)

    def thin(self, name: str, nonce: str, parts: Collection[str]) -> bool:
        def begin(whole: Manifest, entries: list[str]) -> Callable[[], None] | None:
            if not whole.thinnable.issuperset(parts):  # the retention of a later save was first
                return None
            if (manifest := whole.thinned(parts)) != whole:  # else only files are left over
                self._replace_manifest(name, manifest)
                if PINNED in self.storage.names(self.path(name)):  # pin() has seen the whole step
                    self._replace_manifest(name, whole)
                    return None
            return partial(end, manifest.superfluous(entries))

        def end(superfluous: list[str]) -> None:
            self.storage.remove_all(self.path(name), superfluous)
            self._thinned[nonce] = frozenset(parts)

        return self._reduced(name, nonce, begin, replaces=True)

    def _replace_manifest(self, name: str, manifest: Manifest) -> None:
        path, content = self.path(name, MANIFEST), manifest.to_bytes()
        fd = atomic.replace_file(self.storage, path, content, durable=True)
        if fd is not None:
            atomic.close_quietly(self.storage, fd)

    def _reduced(self, name: str, nonce: str, begin: _Begin, replaces: bool = False) -> bool:
        """Removes files of a step, except if it is held or pinned; returns whether they are gone.

        Args:
            begin: called with the manifest and the directory's entries while the manifest is
                locked; returns what remains to be done after that, or None if all files stay.
            replaces: whether `begin` replaces the manifest. Where an open file is not replaced
                atomically (see atomic.publish), it is closed and unlocked before.
        """
        path = self.path(name, MANIFEST)
        # Held until the directory is empty, so that no new save reuses its name before that.
        with self.removal, ExitStack() as alone, ExitStack() as locked:
            try:
                fd = self.storage.open(path, "lock")
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ESTALE):  # removed by somebody else
                    return not self.may_be_committed(name)
                raise StorageError("open", path, error.errno or errno.EIO) from error
            locked.callback(atomic.close_quietly, self.storage, fd)
            try:
                with reported("lock", path):
                    if not self.storage.lock(fd):
                        return False
                if is_removed(self.storage, fd, path):  # or replaced, by one that is not locked
                    return self.storage.status(path) is None
                manifest = self.read(name)
                if manifest.nonce != nonce:
                    return True
                if not alone.enter_context(self.alone(name)):
                    return False
                entries = self.storage.names(self.path(name))
                if PINNED in entries:
                    return False
                if replaces and self.storage.policy(fd)[1].remote:
                    locked.close()
                rest = begin(manifest, entries)
            except StorageError:
                raise
            except CheckpointError as error:
                return isinstance(error, Vanished)  # else it is damaged by now
            except OSError as error:
                raise StorageError("remove", path, error.errno or errno.EIO) from error
            # Closed, and so unlocked, only now: a reader that waits for the lock finds the step
            # gone. Closed before empty(): a network client keeps open files, see abandon().
            locked.close()
            if rest is None:
                return False
            with suppress(OSError):  # what stays is left to the next removal
                rest()
            return True


def _unique_name(step: int) -> str:
    return step_name(step, secrets.token_hex(ATTEMPT_BYTES))


class PosixDraft(Draft):
    """The directory that a rank writes to. A rank that sees another file system than the first rank
    creates the directory as well.
    """

    steps: PosixSteps

    def __init__(self, steps: PosixSteps, check: Callable[[], object]) -> None:
        super().__init__(steps, check)
        # The manifest under a temporary name; its lock says that the save is alive.
        self._manifest_fd, self._temporary = -1, ""
        # The open directory, where its name may be reused: there it proves who owns the directory.
        self._directory = -1
        self._has_own_directory = False

    def _new_attempt(self, step: int) -> str:
        steps, storage = self.steps, self._storage
        steps.clean()
        for _ in range(_CREATES_MAX):
            name = steps.make_attempt(step)
            temporary = atomic.temporary_path(steps.path(name, MANIFEST))
            with reported("open", temporary):
                try:
                    fd = storage.create(temporary, NEW_MODE)
                except FileNotFoundError:
                    continue  # another save found the directory empty and removed it as dead
            self.name, self._manifest_fd, self._temporary = name, fd, temporary
            self.is_begun, steps.attempts[name] = True, BEGUN
            try:
                atomic.claim(storage, fd, temporary)
            except BaseException:
                self.abandon()
                raise
            return name
        raise StorageError("make directory", steps.plain_path(step), errno.EEXIST)

    # ---- files

    @contextmanager
    def made(self, name: str, purpose: Purpose) -> Iterator[tuple[int, str]]:
        fd = self._created(name, purpose)
        try:
            yield fd, self.path(name)
        finally:
            atomic.close_quietly(self._storage, fd)

    def _created(self, name: str, purpose: Purpose) -> int:
        path, storage = self.path(name), self._storage
        with reported("open", path):
            try:
                fd = storage.create(path, 0o666, purpose)
            except FileNotFoundError:
                self._check()  # the directory is gone if the save has failed meanwhile
                storage.make_directory(os.path.dirname(path), parents=True)
                self._has_own_directory = True
                fd = storage.create(path, 0o666, purpose)
            except FileExistsError:
                if path not in self._own_paths:  # it is from a late rank of an earlier save
                    raise
                storage.remove(path)  # from a first try that had no room
                fd = storage.create(path, 0o666, purpose)
            return self._register(path, fd)

    def _register(self, path: str, fd: int) -> int:
        """Records that this rank created a file; returns the file's descriptor."""
        try:
            proves_it = self._directory >= 0 or self.is_begun
            if not proves_it and self.steps.may_be_taken_again(self.name):
                self._directory = self._storage.open(self.path(), "directory")
            self._own_paths.append(path)
        except BaseException:
            atomic.close_quietly(self._storage, fd)
            raise
        return fd

    def adopt(self, name: str, source: str) -> int:
        path, storage = self.path(name), self._storage
        with reported("rename", path):
            if path in self._own_paths:
                storage.remove(path)
            storage.rename(source, path, replaces=False)
        with reported("open", path):
            return self._register(path, storage.open(path, "write"))

    def write(self, name: str, content: bytes, beside: int | None, durable: bool) -> None:
        path, storage = self.path(name), self._storage
        small = Purpose(0, stripe="keep", directory=self.steps.root)
        create = partial(self._created, name, small)
        fd = create() if beside is None else patiently(storage, beside, create)
        try:
            with reported("write", path):
                patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
            atomic.settle(storage, fd, path, durable)
        finally:
            atomic.close_quietly(storage, fd)

    def sync_own_directory(self) -> None:
        if self._has_own_directory:
            for path in (self.path(), self.steps.root):
                with reported("sync directory", path):
                    self._storage.sync_directory(path)

    # ---- the end

    def commit(self, manifest: Manifest, durable: bool) -> None:
        storage, steps, directory = self._storage, self.steps, self.path()
        fd, temporary, doubtful = self._manifest_fd, self._temporary, steps.verdicts.doubtful
        self._write_manifest(manifest, durable)
        if (renewed := steps.renewed(manifest)) is not manifest:
            manifest = renewed  # its number is higher, so its text is not shorter than the first
            self._write_manifest(manifest, durable)
        name = self.path(MANIFEST)
        with atomic.naming_in(storage, [directory] if durable else [], name) as make_durable:
            # Until the rename is durable a crash may undo it, so retention does not count this step
            # among those that stay. The same holds if the rename is abandoned and happens later.
            doubtful.add(manifest.nonce)
            with reported("rename", name):
                try:
                    patiently(storage, fd, lambda: storage.rename(temporary, name, replaces=False))
                except FileNotFoundError:
                    raise StorageError("rename", name, errno.ENOENT, detail=TAKEN) from None
            steps.note_committed(self.name, manifest, None)
            make_durable()
            doubtful.discard(manifest.nonce)
        self._own_paths.clear()

    def _write_manifest(self, manifest: Manifest, durable: bool) -> None:
        """Writes the manifest under its temporary name."""
        storage, steps, temporary = self._storage, self.steps, self._temporary
        fd = self._manifest_fd
        with reported("write", temporary):
            content = manifest.to_bytes()
            patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
        if durable:
            with reported("sync", temporary):
                storage.sync(fd)
            # A manifest that survives a crash must find its files: their names, and those of the
            # directories they are in, become durable before it is renamed.
            for path in (self.path(), steps.root):
                with reported("sync directory", path):
                    storage.sync_directory(path)
            steps.sync_grown()

    def abandon(self) -> None:
        if self.is_begun:
            self.is_begun = False
            self._abandon_directory()
        elif self._own_paths:
            with suppress(OSError):  # it is gone, or left to remove_dead()
                self._remove_made()

    def _abandon_directory(self) -> None:
        """Closes the manifest, and removes the directory if this save still owns it. This process
        does not reuse the name.
        """
        name, steps = self.name, self.steps
        with ExitStack() as closing:
            closing.callback(self._close_manifest)
            steps.attempts[name] = FAILED  # before it vanishes
            with steps.removal, ExitStack() as alone:
                is_own = False
                with suppress(OSError):  # it is gone, or is left to the next removal
                    is_own = alone.enter_context(steps.alone(name, _ALONE_S)) and self._is_own()
                # Before empty(): a network client keeps an open file, and so its directory.
                closing.close()
                if is_own:
                    with suppress(OSError):  # as above
                        entries = self._storage.names(self.path())
                        if MANIFEST in entries:
                            steps.remove_manifest(name)
                        steps.empty(name, [entry for entry in entries if entry != MANIFEST])

    def _is_own(self) -> bool:
        """Returns whether this save still owns the directory. Another process may have considered
        the save dead and reused the name. The proof is the open inode of the manifest: it has its
        temporary name or, if the save failed on another node after the commit, its final name.
        """
        if not self.steps.may_be_taken_again(self.name):
            return True
        own = self._storage.fstat(self._manifest_fd)
        paths = (self._temporary, self.path(MANIFEST))
        statuses = (self._storage.status(path) for path in paths)
        return any(status is not None and os.path.samestat(status, own) for status in statuses)

    def _remove_made(self) -> None:
        """Removes this rank's files, except if the directory now belongs to another save."""
        with self.steps.alone(self.name, _ALONE_S) as is_alone:
            if is_alone and (self._directory < 0 or self._is_own_directory()):
                self._storage.remove_all(self.path(), [*map(os.path.basename, self._own_paths)])
                # This fails while another rank has files there. The first rank could not remove
                # the directory if this rank had files there.
                self._storage.remove_directory(self.path())

    def _is_own_directory(self) -> bool:
        status = self._storage.status(self.path())
        return status is not None and os.path.samestat(status, self._storage.fstat(self._directory))

    def share(self) -> None:
        if self._manifest_fd >= 0:
            with suppress(OSError):  # as when it was claimed
                self._storage.lock(self._manifest_fd, shared=True)

    def _close_manifest(self) -> None:
        fd, self._manifest_fd = self._manifest_fd, -1
        if fd >= 0:
            atomic.close_quietly(self._storage, fd)

    def close(self) -> None:
        self._close_manifest()
        directory, self._directory = self._directory, -1
        if directory >= 0:
            atomic.close_quietly(self._storage, directory)
