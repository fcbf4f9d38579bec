"""The kinds of checkpoints of a Checkpointer: a step, an uncommitted step, and a run, which is a
directory of steps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

import torch

from fastckpt.engine.staging import Staging
from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    StorageError,
)
from fastckpt.formats import file_list, safetensors
from fastckpt.formats.hugging_face import INDEX_SUFFIX
from fastckpt.formats.manifest import MANIFEST, OBJECTS, Manifest, Writer
from fastckpt.formats.step_names import NAME, OURS
from fastckpt.formats.strict_json import KINDS_MAX
from fastckpt.formats.value_names import keys_of
from fastckpt.lazy.extents import Described
from fastckpt.lazy.kind import OF_ANOTHER, Debris, Kind, NotCommitted, Part, Place, refused
from fastckpt.lazy.source import Rest, Shard, Source, Stored, Wanted
from fastckpt.lazy.torch_file import zip_of_ours
from fastckpt.reading.kept_blocks import KeptBlocks
from fastckpt.saving.lease import Lease
from fastckpt.state.targets import Target
from fastckpt.state.tree import Stored as Placeholder
from fastckpt.steps.copies import StepCopies
from fastckpt.steps.load import StepReader, base_beside
from fastckpt.steps.no_steps import is_step, what_is_there
from fastckpt.steps.root import store_at
from fastckpt.steps.store import StepStore
from fastckpt.storage.file_system import Storage
from fastckpt.storage.vanishing import listed_anew


class StepSource:
    """A Source of the tensors of a step: those in the shards and those in the file of objects.

    Args:
        storage, staging: read the files.
        steps, name: the step's root, and the step's name in it.
        close: releases the step, so that it may be removed.

    Raises:
        CorruptCheckpoint: the manifest, an index or the file of objects is damaged.
        IncompatibleCheckpoint: a newer fastckpt wrote the step.
        StorageError: it cannot be read.
    """

    kind, is_verified, has_paths = "a step of fastckpt", True, True

    def __init__(
        self,
        storage: Storage,
        staging: Staging,
        steps: StepStore,
        name: str,
        close: Callable[[], None],
    ) -> None:
        manifest, path = steps.read(name), steps.path(name)
        self._files = ExitStack()
        blocks = KeptBlocks()
        copies = StepCopies(storage, staging, [path], open_shards=self._files, kept=blocks)
        base = base_beside(storage, staging, steps, name, self._files)
        self._reader = StepReader(staging, path, manifest, copies, base)
        self._close = close
        self.facts: dict[str, int | str] = {
            "step": manifest.step,
            "saved": manifest.created,
            "ranks": manifest.world_size,
            "files": 1 + len(manifest.writers),
        }
        if manifest.kept is not None:
            self.facts["thinned to"] = ", ".join(manifest.kept)
        parts = _Parts(path, self._reader)
        with ExitStack() as failing:
            failing.callback(self._files.close)
            body = self._files.enter_context(copies.body(manifest))
            objects = zip_of_ours(body, is_of_step=True)
            if manifest.kept is not None:
                keys = frozenset(manifest.kept)
                tensors = objects.tensors.items()
                there = {name: view for name, view in tensors if keys_of(name)[0] in keys}
                rest = objects.rest._replace(digests=partial(_digests_of, objects.rest, keys))
                objects = objects._replace(tensors=there, rest=rest)
            self._objects = objects.source(self.kind, kept=blocks)
            self.rest = objects.rest
            parts.check(objects.tensors)
            self._places = objects.tensors
            small, in_shards = self._objects.stored, parts.stored
            self.tensors: Mapping[str, Stored] = Described(
                objects.tensors,
                lambda view: in_shards(view) if isinstance(view, Placeholder) else small(view),
            )
            failing.pop_all()

    def check_sizes(self) -> None:
        """Raises CorruptCheckpoint if a shard's file is missing or its size differs from the
        manifest; raises StorageError if it cannot be opened.
        """
        writers = self._reader.manifest.writers
        for file, nbytes in {writer.file: writer.nbytes for writer in writers}.items():
            with self._reader.copies.opened(file, nbytes):
                pass

    def read(self, wanted: Sequence[Wanted]) -> None:
        targets, small = list[Target](), list[Wanted]()
        for want in wanted:
            place = self._places[want.name]
            if isinstance(place, Placeholder):
                targets.append(Target(*place, want.box, want.target))
            else:
                small.append(want)
        if targets:
            self._reader.read(targets)
        self._objects.read(small)

    def positions(self) -> Mapping[str, tuple[str, int]]:
        in_shards: dict[str, tuple[str, int]] = {}
        for file, pieces in self._reader.pieces():
            for piece in pieces:
                in_shards.setdefault(piece.key, (file, piece.begin))
        small, none = self._objects.positions(), ("", 0)  # of a tensor without elements
        return {
            name: in_shards.get(place.key, none) if isinstance(place, Placeholder) else small[name]
            for name, place in self._places.items()
        }

    def close(self) -> None:
        try:
            self._objects.close()
            self._files.close()
        finally:
            self._close()


def _digests_of(rest: Rest, keys: frozenset[str]) -> dict[str, str | None]:
    """Returns the digests of the values under these keys of the state."""
    digests = rest.digests()
    return {name: digest for name, digest in digests.items() if keys_of(name)[0] in keys}


# The dtype and shape of a tensor, and its shards.
_Found: TypeAlias = tuple[tuple[torch.dtype, tuple[int, ...]], Sequence[Shard]]


class _Parts:
    """The tensors of a step that its indexes describe."""

    def __init__(self, path: str, reader: StepReader) -> None:
        self._path = path
        self._found: dict[str, _Found] = {}  # by key
        self._described: dict[int, Stored] = {}  # by the identity of what was found
        for file, pieces in reader.pieces():
            alike: dict[tuple[str, int, int], _Found] = {}  # by what pieces have in common
            for key, dtype, shape, box, _begin in pieces:
                form = dtype, id(shape), id(box)
                its = alike.get(form)
                if its is None:
                    its = alike[form] = (safetensors.DTYPES[dtype], shape), (Shard(file, box),)
                known = self._found.setdefault(key, its)
                if known is its:
                    continue
                if known[0] != its[0]:
                    raise CorruptCheckpoint(f"{path!r} holds {key!r} in two dtypes or shapes")
                if type(known[1]) is list:
                    known[1].extend(its[1])
                else:
                    self._found[key] = known[0], [*known[1], *its[1]]

    def check(self, tensors: Mapping[str, object]) -> None:
        """Raises CorruptCheckpoint if a placeholder has no shards."""
        for name, view in tensors.items():
            if type(view) is not Placeholder:
                continue
            key, dtype, shape = view
            entry = self._found.get(key)
            if (0 not in shape) if entry is None else entry[0] != (dtype, shape):
                raise CorruptCheckpoint(
                    f"{self._path!r} has no shards of {name!r} with the dtype and shape that its "
                    "objects record"
                )

    def stored(self, placeholder: Placeholder) -> Stored:
        """Returns the tensor of a placeholder; many tensors share one description."""
        entry = self._found.get(placeholder.key)
        if entry is None:  # it has no elements
            return Stored(placeholder.dtype, placeholder.shape, ())
        stored = self._described.get(id(entry))
        if stored is None:
            if len(self._described) >= KINDS_MAX:
                self._described.clear()
            (dtype, shape), shards = entry
            stored = self._described[id(entry)] = Stored(dtype, shape, tuple(shards))
        return stored


log = logging.getLogger("fastckpt")


def is_named_step(place: Place) -> bool:
    """Returns whether a directory has the name of a step."""
    return NAME.match(os.path.basename(place.path)) is not None


class Step(Kind):
    """A directory with a manifest."""

    hint = "it is a step: load it with fastckpt.Checkpointer({path!r}).load() or restore()"

    def recognise(self, place: Place) -> bool:
        # Others write files of this name, too, and beside any checkpoint. A step without its
        # objects is a damaged one, and no directory with a single safetensors file.
        if MANIFEST not in place.names:
            return False
        has_index = any(name.endswith(INDEX_SUFFIX) for name in place.names)
        is_named = is_named_step(place) and not has_index
        return OBJECTS in place.names or is_named or is_step(place.path)

    def open(self, place: Place) -> tuple[str, Source]:
        return place.path, _opened(place, store_at(place.storage, place.path), "")

    def verify(self, place: Place) -> Iterator[Part]:
        if place.has(MANIFEST, link=True):
            steps = store_at(place.storage, place.path)
            yield Part(place.path, partial(_verify, place, steps, "", False))


class DamagedStep(Step):
    """A directory with a malformed manifest that is of no other kind."""

    def recognise(self, place: Place) -> bool:
        return MANIFEST in place.names and not any(map(NAME.match, place.names))


class UncommittedStep(Kind):
    """A directory with files of a step, or its name, but without a manifest."""

    def recognise(self, place: Place) -> bool:
        return MANIFEST not in place.names and any(map(OURS.fullmatch, place.names))

    def open(self, place: Place) -> tuple[str, Source]:
        raise CheckpointError(
            f"{place.path!r} has files of a Checkpointer's step, but no {MANIFEST}: its save was "
            "not committed, or it was not copied completely; open another step"
        )

    def verify(self, place: Place) -> Iterator[Part]:
        if is_named_step(place) and not place.has(file_list.NAME, link=True):
            why = "this step was never committed, or is being saved"
            yield refused(place.path, f"{place.path!r} has no {MANIFEST}: {why}")


class Run(Kind):
    """A directory of steps. Opens the newest step whose files all have the right sizes."""

    hint = "it is a root: load it with fastckpt.Checkpointer({path!r}).load() or restore()"

    def recognise(self, place: Place) -> bool:
        return any(map(NAME.match, place.names))

    def open(self, place: Place) -> tuple[str, Source]:
        return _newest(place, store_at(place.storage, place.path))

    def verify(self, place: Place, *, is_local: bool = False) -> Iterator[Part]:
        """Yields uncommitted steps first, then the others. `is_local`: the directory is in a local
        tier, and has the files of one node only.
        """
        steps = store_at(place.storage, place.path)
        incomplete = [name for name in steps.incomplete() if not _has(place, name, MANIFEST)]
        for name in incomplete:
            if not is_export(place, name):
                yield Part(steps.path(name), mention)
        for name in sorted(steps.names()):
            if name not in incomplete:
                yield Part(steps.path(name), partial(_verify, place, steps, name, is_local))

    def debris(self, place: Place) -> Iterator[Debris]:
        steps = store_at(place.storage, place.path)
        for name, is_ours, remove in steps.debris():
            what = "a step that was never committed" + ("" if is_ours else OF_ANOTHER)
            yield place.debris([name], steps.path(name), what, is_ours, remove)
        lease = Lease(place.storage, place.path)
        if lease.is_left():
            name = os.path.basename(lease.path)
            what = "the lease of a dead job"
            yield place.debris([name], lease.path, what, True, lease.remove_left)


def is_export(place: Place, name: str) -> bool:
    """Returns whether a directory with the name of a step is an export, which has a list of its
    files but no manifest.
    """
    if not NAME.match(name) or _has(place, name, MANIFEST):
        return False
    return _has(place, name, file_list.NAME)


def _has(place: Place, name: str, file: str) -> bool:
    return place.has(os.path.join(name, file), link=True)


def _opened(place: Place, steps: StepStore, name: str) -> StepSource:
    with ExitStack() as holding:
        holding.enter_context(steps.hold(name))
        closing = ExitStack()
        source = StepSource(place.storage, place.staging, steps, name, closing.close)
        closing.push(holding.pop_all())
        return source


def _newest(place: Place, steps: StepStore) -> tuple[str, Source]:
    root = steps.root
    problems: list[CheckpointError] = []

    def newest() -> tuple[str, Source] | None:
        choice, faults = steps.survey()
        for fault in faults:  # one of these may be the newest
            if str(fault.error) not in map(str, problems):
                log.warning("skipping %s: %s", steps.path(fault.name), fault.error)
                problems.append(fault.error)
        for item in choice:
            try:
                with ExitStack() as failing:
                    step = _opened(place, steps, item.name)
                    failing.callback(step.close)
                    step.check_sizes()
                    failing.pop_all()
                    return steps.path(item.name), step
            except CorruptCheckpoint as error:
                log.warning("skipping %s: %s", steps.path(item.name), error)
                problems.append(error)
        return None

    choice = listed_anew(newest)  # a save may remove steps meanwhile
    if choice is None and problems:
        is_newer = isinstance(problems[0], IncompatibleCheckpoint)
        kind = IncompatibleCheckpoint if is_newer else CorruptCheckpoint
        raise kind(f"no step under {root!r} is complete and readable: {problems[0]}")
    if choice is None:
        what = what_is_there(steps)
        raise CheckpointError(f"{root!r} holds no checkpoint of a known format: {what}")
    return choice


def mention() -> int:
    raise NotCommitted(f"it has no {MANIFEST}: it was never committed, or is being saved")


def _verify_bases(reader: StepReader) -> int:
    """Verifies the shards of all steps that a step builds on; returns the bytes."""
    return sum(
        _verify_writer(base.copies, base.manifest, writer)
        for base in reader.bases()
        for writer in base.manifest.writers
    )


def _verify(place: Place, steps: StepStore, name: str, is_local: bool) -> int:
    """Verifies every file that the manifest names, and protects the step from removal until the
    end. If `is_local`, verifies only the files of this node's writers.
    """
    with steps.hold(name), ExitStack() as holding:
        manifest = steps.read(name)
        copies = StepCopies(place.storage, place.staging, [steps.path(name)])
        there = {*steps.storage.names(steps.path(name))}
        checks = []
        if not is_local or manifest.objects[0] in there:
            checks.append(partial(_verify_objects, copies, manifest))
        for writer in manifest.writers:
            if not is_local or {writer.index, writer.file} & there:
                checks.append(partial(_verify_writer, copies, manifest, writer))
        if manifest.bases and not is_local:
            base = base_beside(place.storage, place.staging, steps, name, holding)
            reader = StepReader(place.staging, steps.path(name), manifest, copies, base)
            checks.append(partial(reader.check_bases))
            if not name:  # the step alone is verified: of a root, each base is another step
                checks.append(partial(_verify_bases, reader))
        nbytes, damage = 0, []
        unread: StorageError | None = None
        for check in checks:
            try:
                nbytes += check()
            except CorruptCheckpoint as error:
                damage.append(str(error))
            except StorageError as error:
                unread = error
        # Without locks, as in a bucket, a save may have removed it or thinned it.
        if (damage or unread is not None) and steps.read(name) != manifest:
            return _verify(place, steps, name, is_local)
        if damage:
            raise CorruptCheckpoint("; ".join(damage))
        if unread is not None:
            raise unread
        return nbytes


def verify_file_of_step(place: Place, directory: str, file: str) -> int:
    """Verifies one file of a step with the checksums in the manifest and index."""
    steps = store_at(place.storage, directory)
    if not Place(place.storage, place.staging, directory).has(MANIFEST):
        raise CheckpointError(
            f"{file!r} belongs to a step that was never committed: {directory!r} has no "
            f"{MANIFEST}, which lists the files of a step"
        )
    copies = StepCopies(place.storage, place.staging, [directory])
    with steps.hold(""):
        manifest = steps.read("")
        if file == manifest.objects[0]:
            return _verify_objects(copies, manifest)
        for writer in manifest.writers:
            if file in (writer.file, writer.index):
                return _verify_writer(copies, manifest, writer)
        if file == MANIFEST:
            return len(manifest.to_bytes())
        raise CheckpointError(f"the manifest of {directory!r} does not list {file!r}")


def _verify_objects(copies: StepCopies, manifest: Manifest) -> int:
    with copies.objects(manifest) as file:
        file.verify_all()
        return file.nbytes


def _verify_writer(copies: StepCopies, manifest: Manifest, writer: Writer) -> int:
    """Verifies the index of one writer, and its shard by the checksums in the index."""
    index, _content = copies.index(writer, manifest.nonce)
    unpadded: list[int] = []
    with copies.shard(index, unpadded=unpadded) as body:
        body.verify()
        if unpadded:
            first, path = min(unpadded), body.path
            end = sum(index.frames[: first + 1])
            raise CorruptCheckpoint(
                f"{path!r} is damaged: the padding of block {first}, before byte {end}, "
                "differs from the written one; all tensors are intact, but `zstd -d` may refuse "
                "the file"
            )
    return writer.index_nbytes + writer.nbytes
