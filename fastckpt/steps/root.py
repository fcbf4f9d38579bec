"""The directories of steps under one root: their names, which are committed, what is dead.

Responsible for making a step's directory, for the manifest as its commit record, and for removing
what is surely dead. It must not know what the files in a step hold, nor which steps are kept.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError
from fastckpt.formats.manifest import MANIFEST, MANIFEST_BYTES_MAX, SEQUENCE_MAX, Manifest
from fastckpt.formats.step_names import NAME, OURS, step_name
from fastckpt.storage import atomic
from fastckpt.storage.file_system import (
    NEW_MODE,
    NO_FILE,
    OWN_SHORTAGES,
    Storage,
    naming,
    patiently,
    persistently,
    reported,
)
from fastckpt.storage.vanishing import Vanished, kept, listed_anew

log = logging.getLogger("fastckpt")

_ATTEMPTS_MAX = 1000  # directories tried for one step
_CREATES_MAX = 5  # times that one of them is made
_UNSEEN = (0, 0, 0)  # version of a manifest that was not looked at
_LOOKS_MAX = 5  # at a root of whose steps some vanish while they are looked at, but not all
# A save that another host began and did not commit counts as dead after a day.
DEAD_AFTER_S = 24 * 3600.0


class Committed(NamedTuple):
    """A step whose manifest validates."""

    name: str
    manifest: Manifest


class Fault(NamedTuple):
    """A directory that has a manifest which does not validate, or cannot be read, and why."""

    name: str
    error: CheckpointError

    @property
    def step(self) -> int:
        """The number that the directory's name says."""
        return int(self.name.split("-")[1])


class _Look(NamedTuple):
    """One listing of a root, as Steps.committed() returns it.

    Attributes:
        found, faults: that.
        gone: names that are no longer there when their turn comes.
        bare: names of directories without anything that tells of a save: one is removed, or made.
    """

    found: list[Committed]
    faults: list[Fault]
    gone: set[str]
    bare: set[str]


@dataclass(frozen=True)
class Begun:
    """A directory that a save is writing to.

    Attributes:
        name: of the directory, within the root.
        manifest_fd: the manifest to be, under its temporary name; its lock says the save is alive.
        temporary: its path.
    """

    name: str
    manifest_fd: int
    temporary: str


def in_order(item: Committed) -> tuple[int, int]:
    """By what steps are sorted in the order of their commits."""
    return item.manifest.sequence, item.manifest.step


class Steps:
    """The steps under one root.

    Args:
        storage: the seam to the file system.
        root: a directory; made when a step is begun.
    """

    def __init__(self, storage: Storage, root: str) -> None:
        self.storage = storage
        self.root = root
        self._warned: set[str] = set()
        self._known: dict[str, tuple[tuple[int, int, int], Manifest]] = {}
        self._cleaned = False
        self._lock = threading.Lock()
        # Held while a directory is removed, which has no manifest then and seems dead: a save that
        # begins took its name, and lost what it made there.
        self._removing = threading.RLock()
        self._sequence = 0  # of the last commit that was begun here
        self._failed: dict[int, int] = {}  # attempts at a step that failed here
        self._damaged: set[str] = set()  # names
        self._doubtful: set[str] = set()  # names of those that were committed, perhaps not durably
        self._unread: set[str] = set()  # names of steps that may be whole, but could not be read
        self.told_empty = False  # that no step is there
        self._begun: set[str] = set()  # names that saves of this process are writing to
        self._left: set[str] = set()  # names of directories that are empty but for what lingers
        self._grown: list[str] = []  # directories above the root whose new entry is not durable yet

    def path(self, name: str, *parts: str) -> str:
        return os.path.join(self.root, name, *parts)

    def names(self) -> list[str]:
        """Directories that are steps by their name, committed or not, in no order.

        A symbolic link is none: what it leads to is not this root's to read or to remove.
        """
        try:
            return [name for name in self.storage.directories(self.root) if NAME.match(name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError("list", self.root, error.errno or errno.EIO) from error

    def read(self, name: str) -> Manifest:
        """The manifest of a step.

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
            match = NAME.match(name)
            if match is None or int(match[1]) != manifest.step:
                raise CorruptCheckpoint(f"the manifest is of step {manifest.step}")
        return manifest

    def committed(self, *, afresh: bool = True) -> tuple[list[Committed], list[Fault]]:
        """Steps whose manifest validates, the one committed last first; and what is wrong with
        every other directory that has a manifest.

        A save that removes a step between its being listed and looked at has committed a newer one
        before, which the next listing has, unless this machine remembers an old one. So the root
        is listed, a bounded number of times, until nothing new vanishes and there is a step; once
        more if nothing is committed, because a listing that takes long may miss both.

        Args:
            afresh: False: manifests that were looked at before are not looked at again.

        Raises:
            StorageError: the root cannot be listed, or steps vanish however often it is.
        """
        looks: list[_Look] = []

        def settled() -> tuple[list[Committed], list[Fault]]:
            look = self._looked(afresh)
            vanished = look.gone | look.bare
            looks.append(look)
            is_new = not vanished <= (looks[-2].gone | looks[-2].bare if looks[1:] else set())
            if look.found:
                again = is_new and len(looks) < _LOOKS_MAX
            else:
                again = is_new or any(each.gone for each in looks)
                again = again or not (look.faults or looks[1:])
            if again:
                raise Vanished(self.root)
            return look.found, look.faults

        found = listed_anew(settled)
        assert found is not None
        return found

    def _looked(self, afresh: bool) -> _Look:
        """One listing, and a look at all that it holds."""
        found: list[Committed] = []
        faults: list[Fault] = []
        gone: set[str] = set()
        bare: set[str] = set()
        # Older steps first: what was committed before one of them was removed is seen then.
        for name in sorted(self.names()):
            if not afresh and name in self._known:
                found.append(Committed(name, self._known[name][1]))
                continue
            try:
                manifest = self._manifest(name)
                if manifest is None:
                    self._sort_unmarked(name, gone, bare)
                else:
                    found.append(Committed(name, manifest))
            except Vanished:
                gone.add(name)
            except CheckpointError as error:
                faults.append(Fault(name, error))
        found.sort(key=in_order, reverse=True)
        return _Look(found, faults, gone, bare)

    def _manifest(self, name: str) -> Manifest | None:
        """What read() returns, read only if it is another than the last time; None if there is
        none.
        """
        path = self.path(name, MANIFEST)
        try:
            status = self.storage.status(path)
        except OSError as error:
            raise _unreadable("open", path, error) from error
        if status is None:
            return None
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._known.get(name)
        if known is None or known[0] != version:
            known = self._known[name] = (version, self.read(name))
        return known[1]

    def _sort_unmarked(self, name: str, gone: set[str], bare: set[str]) -> None:
        """Adds a directory without a manifest to those that are gone or should have one, or to
        those without a temporary one, too: nobody is writing them, or somebody removes them.
        """
        path = self.path(name, MANIFEST)
        try:
            names = self.storage.names(self.path(name))
        except OSError as error:
            (gone if error.errno in (errno.ENOENT, errno.ESTALE) else bare).add(name)
            return
        if MANIFEST in names and self.storage.leads_nowhere(path):
            raise CorruptCheckpoint(f"{path!r} is a link that leads nowhere")
        if MANIFEST in names:
            gone.add(name)
        elif not atomic.temporaries_among(names, path):
            bare.add(name)

    def survey(self, step: int | None = None) -> tuple[list[Committed], list[Fault]]:
        """As committed(), but what could not be read is tried again, for seconds, and is an error
        then: it may be the very step that is asked for.

        Args:
            step: what cannot be read of other steps does not matter; None: all matter.
        """
        failed: list[str] = []

        def looked() -> tuple[list[Committed], list[Fault]]:
            failed.clear()
            found, faults = self.committed()
            for fault in faults:
                if isinstance(fault.error, StorageError) and step in (None, fault.step):
                    failed.append(fault.name)
                    raise fault.error
            return found, faults

        try:
            return persistently(looked, self.root)
        finally:
            self._unread.update(failed)

    def survey_of_copy(self) -> list[Committed]:
        """The committed steps, as survey() finds them, of a directory that may be lost: what cannot
        be read of it is left out, with a warning.

        Raises:
            StorageError: this process is short of descriptors or memory, which is not the disk's
                fault.
        """
        try:
            return self.survey()[0]
        except StorageError as error:
            if error.errno in OWN_SHORTAGES:
                raise
            log.warning("not all of %s can be read: %s", self.root, error)
        return self.readable()

    def readable(self) -> list[Committed]:
        """The committed steps, as far as they can be read now; with a warning if there is no
        telling.
        """
        try:
            return self.committed()[0]
        except StorageError as error:
            log.warning("%s cannot be read: %s", self.root, error)
            return []

    def incomplete(self) -> list[str]:
        """Directories without a manifest: saves that run, or that did not come to their commit."""
        return sorted(name for name in self.names() if not self.may_be_committed(name))

    def may_be_committed(self, name: str) -> bool:
        """Whether a directory has a manifest, or what cannot be looked at in its place."""
        try:
            return self.storage.status(self.path(name, MANIFEST)) is not None
        except OSError:
            return True

    def begin(self, step: int) -> Begun:
        """Makes a directory for a save of this step; the newest committed one of it stays.

        Raises:
            StorageError: the root or the directory cannot be made.
        """
        with self._removing:  # saves that begin at once find what is left removed, or not begun
            self.remove_left()
            # The disk may be full of what earlier jobs left, or ranks too late for a failed save.
            if not self._cleaned or self._failed:
                self._cleaned = True
                self.remove_dead()
        # Not the name of an attempt that failed: a rank that is late may still write there.
        for attempt in range(self._failed.get(step, 0), _ATTEMPTS_MAX):
            name = step_name(step, attempt)
            for _ in range(_CREATES_MAX):
                if not self._make(name):
                    break
                temporary = atomic.temporary_path(self.path(name, MANIFEST))
                with reported("open", temporary):
                    try:
                        fd = self.storage.create(temporary, NEW_MODE)
                    except FileNotFoundError:
                        continue  # while it was empty, another save took it for a dead one's
                begun = Begun(name, fd, temporary)
                try:
                    atomic.claim(self.storage, fd, temporary)
                except BaseException:
                    self.abandon(begun)
                    raise
                self._begun.add(name)
                return begun
        raise StorageError("make directory", self.path(step_name(step)), errno.EEXIST)

    def _make_root(self) -> None:
        with reported("make directory", self.root):
            path, grown = self.root, []
            while self.storage.status(path) is None:
                path = os.path.dirname(path)
                grown.append(path)
            self.storage.make_directories(self.root)
            self._grown += grown

    def _make(self, name: str) -> bool:
        """Makes the directory, where the name is free or only what is surely dead has it."""
        with self._removing:
            for _ in range(3):
                try:
                    with reported("make directory", self.path(name)):
                        self.storage.make_directory(self.path(name))
                    self._left.discard(name)
                    return True
                except StorageError as error:
                    if error.errno == errno.ENOENT:
                        self._make_root()
                    elif error.errno != errno.EEXIST:
                        raise
                    elif not self.remove_if_dead(name):
                        break
            return False

    def next_sequence(self, above: int = 0) -> int:
        """The place of the next commit in the order of commits under this root, and above one."""
        with self._lock:
            # Another Checkpointer may have committed meanwhile.
            found, faults = self.committed(afresh=False)
            last = found[0].manifest.sequence if found else 0
            if faults:  # their places are not known: milliseconds are ahead of any count
                last = max(last, int(time.time() * 1000))
            self._sequence = min(max(self._sequence, last, above) + 1, SEQUENCE_MAX)
            return self._sequence

    def publish(self, begun: Begun, manifest: Manifest, durable: bool) -> None:
        """THE commit of a step: its files have arrived, and the manifest takes its name.

        Args:
            begun: of this save.
            manifest: names the files.
            durable: sync the manifest and the directories.

        Raises:
            StorageError: the step is not committed; or if the error is `visible`, it is, but
                perhaps not durably.
        """
        storage, directory = self.storage, self.path(begun.name)
        self.note_whole(begun.name)  # what was found there was another one
        with reported("write", begun.temporary):
            content, fd = manifest.to_bytes(), begun.manifest_fd
            patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
        if durable:
            with reported("sync", begun.temporary):
                storage.sync(begun.manifest_fd)
            # The names of the files that the manifest names, then of the directories they are in.
            for path in (directory, self.root, *self._grown):
                with reported("sync directory", path):
                    storage.sync_directory(path)
            self._grown = []
        name = self.path(begun.name, MANIFEST)
        with atomic.naming_in(storage, [directory] if durable else [], name) as make_durable:
            with reported("rename", name):
                patiently(storage, fd, lambda: storage.rename(begun.temporary, name))
            self._known[begun.name] = _UNSEEN, manifest
            self._begun.discard(begun.name)
            # Until that has succeeded a crash may take the step away: it keeps no other from
            # staying.
            self._doubtful.add(begun.name)
            make_durable()
            self._doubtful.discard(begun.name)

    def abandon(self, begun: Begun) -> None:
        """Ends a save that failed: closes its manifest and removes its directory, whose name is not
        taken again here.
        """
        # A network client keeps a file that is open when it is removed, and with it the directory.
        atomic.close_quietly(self.storage, begun.manifest_fd)
        match = NAME.match(begun.name)
        assert match is not None
        self._failed[int(match[1])] = int(match[2] or 0) + 1
        self._begun.discard(begun.name)
        self.discard(begun.name)

    def has_another(self, name: str, step: int) -> bool:
        """Whether another attempt at a step than `name` was committed, as far as is known here."""
        return any(
            known[1].step == step for other, known in list(self._known.items()) if other != name
        )

    def discard(self, name: str) -> None:
        """Removes a directory as far as may be: one without a manifest, or with it first."""
        with self._removing, suppress(OSError):  # what stays is left to the next removal
            self._remove_manifest(name)
            self._empty(name, self.storage.names(self.path(name)))

    def _remove_manifest(self, name: str) -> None:
        """From now on it is no committed step, and not after a power cut, either, which must not
        bring it back without the files it names.
        """
        self._known.pop(name, None)
        with suppress(FileNotFoundError):  # gone already
            self.storage.remove(self.path(name, MANIFEST))
            self.storage.sync_directory(self.path(name))

    def _empty(self, name: str, entries: list[str]) -> None:
        """Removes these entries of a directory, but for those that no save makes, and then it."""
        # Temporaries of the manifest tell who owns the directory: last.
        for entry in sorted(entries, key=lambda entry: entry.startswith(".")):
            if OURS.fullmatch(entry):
                with suppress(FileNotFoundError):  # somebody else removes it, too
                    self.storage.remove(self.path(name, entry))
        try:
            self.storage.remove_directory(self.path(name))
        except OSError as error:
            # Some process has a file open that was removed: see policies.LINGERING.
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and all(map(OURS.fullmatch, entries)):
                self._left.add(name)
            raise

    def remove_left(self) -> None:
        """Removes directories that did not go with what was in them, if they do now."""
        with self._removing:
            for name in [*self._left]:
                try:
                    self.storage.remove_directory(self.path(name))
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                        continue
                self._left.discard(name)

    def remove_if_dead(self, name: str) -> bool:
        """Removes a directory without manifest whose save is surely over; whether it is gone.

        Surely over: no temporary manifest is left, which its save removes last; or none whose owner
        may live: on this host its process is gone, on another a day has passed. A directory that
        holds anything else than a save makes is not ours, and stays.
        """
        storage, manifest = self.storage, self.path(name, MANIFEST)
        try:
            if not storage.is_directory(self.path(name)) or self.may_be_committed(name):
                return False
            # Removed is only what is there now: a save that begins meanwhile keeps its directory.
            entries = storage.names(self.path(name))
            if not all(map(OURS.fullmatch, entries)):
                return False
            atomic.remove_debris(storage, manifest)
            for path in atomic.temporaries(storage, manifest):
                if not self._is_of_the_dead(name, path):
                    return False
            if self.may_be_committed(name):  # it was renamed meanwhile: that save lived
                return False
            self._empty(name, entries)
        except OSError:  # it is left to a later call
            return False
        return True

    def _is_of_the_dead(self, name: str, temporary: str) -> bool:
        """Whether a temporary manifest that is left belongs to a save of another host, long ago."""
        status = self.storage.status(temporary)
        if status is None or atomic.is_of_this_host(temporary):
            return False
        if time.time() - status.st_mtime >= DEAD_AFTER_S:
            return True
        if temporary not in self._warned:
            self._warned.add(temporary)
            log.warning(
                "%s was begun on another host and not committed: it is removed a day after that, "
                "or by you",
                self.path(name),
            )
        return False

    def remove_dead(self) -> list[str]:
        """Removes every directory that is surely dead; returns their names."""
        with self._removing:
            return [name for name in self.incomplete() if self.remove_if_dead(name)]

    def is_being_written(self, name: str) -> bool:
        """Whether a save of this process is at a step."""
        return name in self._begun

    def note_damaged(self, name: str) -> None:
        """Remembers that a step was read and found wrong."""
        self._damaged.add(name)
        self._unread.discard(name)

    def note_unread(self, name: str) -> None:
        """Remembers that a step could not be read, so that it may be whole."""
        self._unread.add(name)

    def note_whole(self, name: str) -> None:
        """Remembers that a step was read and found whole."""
        self._damaged.discard(name)
        self._unread.discard(name)

    def is_damaged(self, item: Committed) -> bool:
        """Whether that was found out here."""
        return item.name in self._damaged

    def is_doubtful(self, item: Committed) -> bool:
        """Whether it was committed here, and making that durable failed."""
        return item.name in self._doubtful

    def is_unread(self, item: Committed) -> bool:
        """Whether the last attempt to read it here failed, without finding damage."""
        return item.name in self._unread

    def remove_unread(self, name: str) -> bool:
        """Removes a committed step unless somebody reads it; whether it is gone."""
        path = self.path(name, MANIFEST)
        try:
            fd = self.storage.open_to_lock(path)
        except OSError:
            return False  # removed by somebody else
        # Until it is empty no save that begins may take the name.
        with self._removing:
            try:
                with reported("lock", path):
                    if not self.storage.lock(fd):
                        return False
                self._remove_manifest(name)
            except StorageError:
                raise
            except OSError:  # what stays is left to the next removal
                return True
            finally:
                # Whoever waits to read it finds that it is gone. A network client keeps a file that
                # is open when it is removed, and with it the directory.
                atomic.close_quietly(self.storage, fd)
            with suppress(OSError):  # what stays is left to the next removal
                self._empty(name, self.storage.names(self.path(name)))
            return True

    def hold(self, name: str) -> AbstractContextManager[None]:
        """Keeps a committed step from being removed while the body reads it.

        Raises:
            As kept().
        """
        return kept(self.storage, self.path(name, MANIFEST))


def _unreadable(op: str, path: str, error: OSError) -> CheckpointError:
    """Returns the error that an OSError means for a manifest: damage, where it is no file."""
    if error.errno in NO_FILE:
        return CorruptCheckpoint(f"{path!r} is not a regular file")
    return StorageError(op, path, error.errno or errno.EIO)
