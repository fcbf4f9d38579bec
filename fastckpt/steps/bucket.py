"""Steps in a bucket. A conditional put of the manifest commits a step; the put fails if the
manifest exists. The manifest names objects under a prefix that contains a random number. No two
attempts share a prefix, so nothing has to be claimed, locked or renamed.

A process that considers an attempt dead first puts an empty manifest there, under the same
condition. Either the attempt is committed first, or it can never be committed.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from fastckpt.errors import CheckpointError, StorageError, Vanished, mark_visible
from fastckpt.formats.manifest import MANIFEST, MANIFEST_BYTES_MAX, Manifest
from fastckpt.formats.step_names import ATTEMPT_BYTES, NAME, OURS, PINNED, step_name
from fastckpt.saving.lease import LASTS_S, Lease
from fastckpt.steps.store import (
    FAILED,
    TAKEN,
    Committed,
    Draft,
    Fault,
    Listed,
    StepStore,
    in_order,
)
from fastckpt.storage.atomic import DEAD_AFTER_S
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.lustre_layout import Purpose
from fastckpt.storage.object_upload import Upload
from fastckpt.storage.objects import objects_of

_under_way = set[str]()  # paths of this process's attempts


class BucketSteps(StepStore):
    """The steps below a URL. For arguments and attributes see StepStore."""

    EMPTY_IS_NONE = True

    def __init__(self, storage: Storage, root: str, lease: Lease | None = None) -> None:
        super().__init__(storage, root, lease)
        self.objects = objects_of(storage)

    # ---- what is there

    def _listed(self) -> dict[str, dict[str, Any] | None]:
        """Returns the store's entry for the manifest of each attempt; None if the attempt has no
        manifest.
        """
        with reported("list", self.root):
            manifests = self.objects.below(self.root, MANIFEST)
        return {name: manifests[name] for name in sorted(manifests) if NAME.match(name)}

    def names(self) -> list[str]:
        if self.is_step:
            return [""]
        return [name for name, entry in self._listed().items() if entry is None or entry["size"]]

    def looks(self) -> Callable[[], Listed]:
        return partial(self._look, set[str]())

    def _look(self, vanished: set[str]) -> Listed:
        """Lists the root once. When a step vanishes for the first time, adds it to `vanished` and
        raises Vanished, so that the caller lists the root again.
        """
        committed, faults = list[Committed](), list[Fault]()
        listed = {"": None} if self.is_step else self._listed()
        for name, entry in listed.items():
            if name and (entry is None or not entry["size"]):
                continue
            try:
                manifest = self.manifest_of(name, None if entry is None else entry["e_tag"])
                committed.append(Committed(name, manifest))
            except Vanished:
                if name not in vanished:
                    vanished.add(name)
                    raise
            except CheckpointError as error:
                faults.append(Fault(name, error))
        return sorted(committed, key=in_order, reverse=True), faults

    def incomplete(self) -> list[str]:
        if self.is_step:
            return [] if self.may_be_committed("") else [""]
        return [name for name, entry in self._listed().items() if entry is None]

    def may_be_committed(self, name: str) -> bool:
        try:
            return bool(self.storage.read_file(self.path(name, MANIFEST), 1))
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def hold(self, name: str) -> AbstractContextManager[None]:
        """Does nothing, because a bucket has no locks."""
        return nullcontext()

    def confirm(self, name: str) -> None:
        if not self.may_be_committed(name):
            raise Vanished(self.path(name, MANIFEST))

    def make_mark(self, path: str) -> None:
        with reported("create", path), suppress(FileExistsError):  # it is there
            self.objects.put_new(path, b"")

    # ---- attempts

    def draft(self, check: Callable[[], object]) -> BucketDraft:
        return BucketDraft(self, check)

    def after_commit(self) -> None:
        """Removes the leftovers of dead saves once, and again after each failed save of this
        process. While this process has the lease, no other job has a live attempt.
        """
        lease = self.lease
        if self._is_clean or lease is None or not lease.is_held or lease.is_lost():
            return
        self._is_clean = True
        self.remove_dead()

    def remove_dead(self) -> list[str]:
        listed = self._listed()
        for name, entry in listed.items():
            if entry is not None and not entry["size"]:
                self._sweep(name, entry)
        return [
            name for name, entry in listed.items() if entry is None and self.remove_if_dead(name)
        ]

    def remove_if_dead(self, name: str) -> bool:
        """Removes an uncommitted attempt that this process is not writing; returns whether it was
        removed. An attempt that is committed first, or that contains foreign objects, stays.
        """
        with suppress(OSError):  # it is left to a later call
            entries = self._entries(name)
            if self.path(name) in _under_way or not all(map(OURS.fullmatch, entries)):
                return False
            self.objects.put_new(self.path(name, MANIFEST), b"")
            self._remove(name, entries)
            return True
        return False

    def _sweep(self, name: str, mark: dict[str, Any]) -> None:
        """Removes objects that a late save added to a removed attempt. The empty manifest of the
        attempt is removed as well after a day without such objects. A save that resumes even later
        detects by itself that its attempt was removed (see BucketDraft).
        """
        with suppress(OSError):  # as above
            late = [each for each in self._entries(name) if each != MANIFEST]
            if late and all(map(OURS.fullmatch, late)):
                self._remove(name, late)
            path = self.path(name, MANIFEST)
            if not late and time.time() - self.objects.made_at(path, mark) >= DEAD_AFTER_S:
                self._remove(name, [MANIFEST])

    def _entries(self, name: str) -> list[str]:
        try:
            return self.storage.names(self.path(name))
        except FileNotFoundError:
            return []

    def _remove(self, name: str, entries: list[str]) -> None:
        if entries:
            self.storage.remove_all(self.path(name), entries)

    def debris(self) -> Iterator[tuple[str, bool, Callable[[], bool]]]:
        """Yields nothing while a job has the lease, because the job's attempts may be alive."""
        if not Lease(self.storage, self.root).is_of_another():
            for name in self.incomplete():
                yield name, True, partial(self.remove_if_dead, name)

    def remove(self, name: str, nonce: str) -> bool:
        path = self.path(name)
        try:
            if self.read(name).nonce != nonce:
                return True
            with reported("remove", path):
                entries = self._entries(name)
                if PINNED in entries:
                    return False
                self._remove(name, [MANIFEST])
                self._manifests.pop(name, None)
        except Vanished:
            return True
        except StorageError:
            raise
        except CheckpointError:
            return False  # it is damaged by now
        with suppress(OSError):  # what stays is an attempt without a manifest
            self._remove(name, [entry for entry in entries if OURS.fullmatch(entry)])
            self.forget(name)
        return True

    def thin(self, name: str, nonce: str, parts: Collection[str]) -> bool:
        path, objects = self.path(name, MANIFEST), self.objects
        try:
            content, version = objects.get(path, MANIFEST_BYTES_MAX)
            manifest = Manifest.from_bytes(content)
            # The retention of a later save may have been first.
            is_other = manifest.nonce != nonce or not manifest.thinnable.issuperset(parts)
            if is_other or PINNED in self._entries(name):
                return False
            thinned = manifest.thinned(parts)
            # The condition fails if another job has removed the step in the meantime.
            if thinned != manifest:  # else only objects are left over
                version = objects.put_over(path, thinned.to_bytes(), version)
            entries = self._entries(name)
            if PINNED in entries:  # pin() has seen the whole step
                objects.put_over(path, content, version)
                return False
        except (OSError, CheckpointError) as error:
            if isinstance(error, StorageError):
                raise
            return False
        finally:
            self._manifests.pop(name, None)
        with suppress(OSError):  # what stays is left to the next save
            self._remove(name, thinned.superfluous(entries))
            self._thinned[nonce] = frozenset(parts)
        return True


class BucketDraft(Draft):
    """The prefix under which a rank puts its objects."""

    steps: BucketSteps

    def _new_attempt(self, step: int) -> str:
        name = step_name(step, secrets.token_hex(ATTEMPT_BYTES))
        _under_way.add(self.steps.path(name))
        return name

    @contextmanager
    def made(self, name: str, purpose: Purpose) -> Iterator[tuple[Upload, str]]:
        path = self.path(name)
        with reported("open", path):
            upload = self.steps.objects.upload(path, purpose.nbytes, ends_with_file=True)
        self._own_paths.append(path)
        with closing(upload):
            yield upload, path

    def write(self, name: str, content: bytes, beside: int | None, durable: bool) -> None:
        path = self.path(name)
        with reported("write", path):
            self.steps.objects.put(path, content)
        self._own_paths.append(path)

    def commit(self, manifest: Manifest, durable: bool) -> None:
        steps, path, since = self.steps, self.path(MANIFEST), _now_s()
        manifest = steps.renewed(manifest)
        steps.verdicts.doubtful.add(manifest.nonce)
        with reported("create", path):
            try:
                answer = steps.objects.put_new(path, manifest.to_bytes())
            except FileExistsError:
                raise StorageError("create", path, errno.EEXIST, detail=TAKEN) from None
            except StorageError as error:
                if error.op == "read":  # the answer was lost, and a look at what is there failed
                    mark_visible(error, in_doubt=True)
                raise
        if _now_s() - since >= LASTS_S / 2:
            self._check_whole(manifest)
        steps.note_committed(self.name, manifest, answer["e_tag"])
        steps.verdicts.doubtful.discard(manifest.nonce)
        self._own_paths.clear()

    def _check_whole(self, manifest: Manifest) -> None:
        """Checks after a slow commit that all objects that the manifest names still exist, and
        otherwise revokes the commit before it is acknowledged: another job may have taken the lease
        and removed the attempt. The step is in doubt if the objects cannot be listed or the
        manifest cannot be removed.
        """
        path = self.path(MANIFEST)
        try:
            with reported("list", self.path()):
                if manifest.sizes.keys() <= {*self.steps._entries(self.name)}:
                    return
            with reported("remove", path), suppress(FileNotFoundError):  # it is gone
                self._storage.remove(path)
        except StorageError as error:
            mark_visible(error, in_doubt=True)
            raise
        raise StorageError("create", path, errno.ENOENT, detail=TAKEN)

    def abandon(self) -> None:
        steps, path = self.steps, self.path()
        names, self._own_paths = [*map(os.path.basename, self._own_paths)], []
        with suppress(OSError):  # what stays is an attempt without a manifest
            if self.is_begun:
                steps.attempts[self.name], steps._is_clean = FAILED, False
                names = [
                    MANIFEST,
                    *(each for each in steps._entries(self.name) if each != MANIFEST),
                ]
            if names:
                self._storage.remove_all(path, names)
        self.is_begun = False

    def close(self) -> None:
        _under_way.discard(self.path())


def _now_s() -> float:
    """Returns the time of a clock that continues while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
