"""WeightSubscriber: inference workers, evaluators or other readers prepare a version of a model's
weights, verified, before they change their own model.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch

from fastckpt.arguments.checks import check_deadline, check_path
from fastckpt.arguments.names import listed
from fastckpt.arguments.urls import StorageOptions, path_of
from fastckpt.directories.export import check_dtype as check_dtype
from fastckpt.directories.export import check_storable, chosen, export, names_in_model, take_name
from fastckpt.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint, Vanished
from fastckpt.formats.manifest import Manifest
from fastckpt.formats.step_names import tier_name
from fastckpt.formats.value_names import joined
from fastckpt.plan.boxes import Box, whole
from fastckpt.saving import pipeline
from fastckpt.state.dtensors import dtensor_part, local_of, wraps_others
from fastckpt.state.fit import Rename
from fastckpt.state.kinds import is_sharded
from fastckpt.state.targets import Target
from fastckpt.state.tree import State, stored_of, tensors_in
from fastckpt.steps.copies import StepCopies
from fastckpt.steps.load import StepInMemory, StepReader, base_beside, hold_all
from fastckpt.steps.newest_whole import readable
from fastckpt.steps.no_steps import real_path
from fastckpt.steps.root import store_at
from fastckpt.steps.store import Committed, StepStore, in_order

log = logging.getLogger("fastckpt")

POLL_S = 0.2  # between two looks for a new version
Places: TypeAlias = list[tuple[StepStore, Committed]]  # of one version, the nearest first
# Returns the part of a tensor that a reader wants, given its name and shape; None: all of it.
Part: TypeAlias = Callable[[str, tuple[int, ...]], Sequence[slice] | None]


def named(
    state: Any, dtype: torch.dtype | None, rename: Rename | None, only: str | None
) -> dict[str, torch.Tensor]:
    """Returns the tensors to publish, converted, by the names that the model has for them. The
    arguments are fastckpt.export's. Raises ValueError and TypeError as export().
    """
    tensors = [(joined(keys), tensor) for keys, tensor in tensors_in(state)]
    facts = [(name, tensor.dtype) for name, tensor in tensors]
    result, names = dict[str, torch.Tensor](), dict[str, str]()
    for number, name, stored in chosen(facts, dtype, rename, only):
        old, tensor = tensors[number]
        take_name(name, old, names)
        if is_sharded(tensor):
            if wraps_others(local_of(tensor)):
                raise TypeError(f"{old!r} is a DTensor whose parts are of a tensor subclass")
            result[name] = tensor.detach().to(stored)
        else:
            check_storable(old, tensor)
            result[name] = tensor.detach().resolve_neg().to(stored)
    if not result:
        raise ValueError("the state holds no tensor to publish")
    return result


class WeightUpdate:
    """A version that is prepared: fetched, verified and put together in host memory. It is valid
    until its subscriber's next call of next() or close().

    Attributes:
        version: its number.
        nonce: the random name of the version among all, as 32 hex digits.
        tensors: the host tensors by name, or their parts that the subscriber wants.
    """

    def __init__(
        self,
        subscriber: WeightSubscriber,
        version: int,
        nonce: str,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        self._subscriber = subscriber
        self.version, self.nonce, self.tensors = version, nonce, tensors

    def __repr__(self) -> str:
        return f"<WeightUpdate version={self.version}, {len(self.tensors)} tensors>"

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and tensors, in the order of the published state."""
        for name, tensor in self.tensors.items():
            self._check_valid()
            yield name, tensor

    def apply(self, model: State) -> None:
        """Copies the weights into a model, in place; converts dtypes as Tensor.copy_ does. A
        misfit is found before the first byte of the model changes.

        Args:
            model: a module, a state dict or a nest of these with the names of the version; its
                DTensors receive their part.

        Raises:
            IncompatibleCheckpoint: the model and the version differ in names or shapes.
            CheckpointError: the update is no longer valid.
        """
        self._check_valid()
        own = _tensors_of(model)
        _refuse(f"version {self.version} has no tensor", own.keys() - self.tensors.keys())
        _refuse("the model has no tensor", self.tensors.keys() - own.keys())
        targets = {name: _local(name, tensor) for name, tensor in own.items()}
        for name, target in targets.items():
            if target.shape != self.tensors[name].shape:
                raise IncompatibleCheckpoint(
                    f"version {self.version} has another shape for {name!r}: "
                    f"{list(self.tensors[name].shape)}, must be {list(target.shape)}"
                )
        self._subscriber.version = None  # until all of it is there
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(self.tensors[name])
        self._subscriber.version = self.version

    def to_directory(self, path: str | os.PathLike[str], **arguments: Any) -> None:
        """Writes the version as a Hugging Face directory, committed atomically; as fastckpt.export,
        whose arguments these are.

        Raises:
            ValueError: the subscriber wants parts, by `like` or `part`. Otherwise as export().
        """
        self._check_valid()
        if self._subscriber.wants_parts:
            raise ValueError("a subscriber with like= or part= may not have the whole version")
        export(dict(self.tensors), path, **arguments).result()

    def _check_valid(self) -> None:
        if self._subscriber.nonce != self.nonce:
            raise CheckpointError(
                f"version {self.version} is no longer held: the subscriber has read another one "
                "since, or is closed"
            )


class WeightSubscriber:
    """Prepares the versions that a WeightPublisher has committed, in host memory.

    It holds one copy of the weights that it wants. From the version that it holds it reads only
    differences; otherwise a full version, and all differences since.

    Args:
        root: the publisher's.
        like: a module, a state dict or a nest of these: only tensors with these names are wanted,
            and of DTensors only this rank's part. None: all tensors.
        local: the directory of the publisher's Memory, on a node of the trainer: files that are in
            this node's memory are read there, and a version is prepared before it is in the root if
            this node has all of its files, as the only node of a job has, and both of two nodes
            with peers=1. None: the root is read.
        part: of each tensor, the part that is wanted, such as the slice of a tensor-parallel
            worker; a function of name and shape that returns a slice without a step for each
            dimension, or None for all of it. Only the blocks that hold it are read.
        storage_options: as Checkpointer's.
        timeout_s: for how long a server may not answer.

    Attributes:
        version: the version that was applied last; None: none was, or not all of it.
        nonce: of the version that is held; "": none is.
        wants_parts: whether `like` or `part` was passed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        like: State | None = None,
        local: str | os.PathLike[str] | None = None,
        part: Part | None = None,
        storage_options: StorageOptions | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        path = real_path(path_of("root", root, storage_options, timeout_s), timeout_s)
        self._storage = pipeline.current().storage
        self._steps = store_at(self._storage, path)
        self._near: StepStore | None = None
        if local is not None:
            directory = os.path.realpath(check_path("local", local))
            self._near = store_at(self._storage, os.path.join(directory, tier_name(path)))
        self._boxes: dict[str, tuple[torch.Size, Box]] | None = None  # of `like`, and its shapes
        if like is not None:
            tensors = _tensors_of(like).items()
            self._boxes = {name: (tensor.shape, _box(name, tensor)) for name, tensor in tensors}
        self._part = part
        self.wants_parts = like is not None or part is not None
        self._lock = threading.Lock()  # of one look at a time, which writes to the memory
        self._held: StepReader | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._contents: dict[int, tuple[str, Box, int]] = {}  # of tensors, see _content()
        self._sequence = 0
        self._damaged = set[str]()  # by nonce and root; of manifests that are damaged, names
        self._update: WeightUpdate | None = None  # the one that is held
        self._lost = ""  # the nonce of the one that was held, before a read failed
        self._closed = threading.Event()
        self.version: int | None = None
        self.nonce = ""

    def next(self, timeout_s: float = 0.0) -> WeightUpdate | None:
        """Prepares the newest version that was committed after the one held.

        Every byte of it is verified by checksums, with the chain of differences, before this
        returns. A damaged version is passed over, with a warning, for an older one that is new; if
        there is none, the version that was held is read again, and stays valid.

        Args:
            timeout_s: how long to wait for a new version.

        Returns:
            The version; None if there is none in time.

        Raises:
            StorageError: the root cannot be read. IncompatibleCheckpoint: a newer fastckpt wrote
            the version, or it does not fit `like` or `part`. An earlier update is invalid then.
            ValueError: the subscriber is closed.
        """
        until = time.monotonic() + check_deadline("timeout_s", timeout_s)
        while True:
            with self._lock:
                if self._closed.is_set():
                    raise ValueError(f"the WeightSubscriber of {self._steps.root!r} is closed")
                update = self._look()
            if self._closed.is_set():  # meanwhile, by another thread
                self.close()
                continue
            remaining_s = until - time.monotonic()
            if update is not None or remaining_s <= 0:
                return update
            time.sleep(min(POLL_S, remaining_s))

    def newest(self) -> str:
        """Returns the nonce of the version in the root that was committed last, without reading it;
        "" if there is none. Raises StorageError if the root cannot be listed.
        """
        committed, _faults = self._steps.committed()
        return committed[0].manifest.nonce if committed else ""

    def wait_for(
        self, version: int | None = None, *, after: str | None = None, timeout_s: float = 0.0
    ) -> WeightUpdate:
        """Prepares the newest version as next() does, or returns it if it is held already. The
        readers of a model call this when the trainer has told them the number of a version that it
        has committed.

        Args:
            version: the number that the newest version must have; None: any.
            after: a nonce that newest() returned before the trainer began to publish: this version
                is not waited for, even if it has the number.
            timeout_s: how long to wait until the newest version is such a one.

        Raises:
            TypeError: the version is not an integer.
            CheckpointError: it is none at the end of that time; or before, if the version with the
                number is damaged, or is followed by another one. Otherwise as next().
        """
        until, remaining_s = time.monotonic() + check_deadline("timeout_s", timeout_s), 0.0
        version = None if version is None else operator.index(version)
        while True:
            self.next(remaining_s)  # at first 0, since what is held may be the newest
            update = self._update
            if update is not None and version in (None, update.version) and update.nonce != after:
                return update
            remaining_s = until - time.monotonic()
            if remaining_s <= 0 or self._is_past(version, after):
                newest = "no version" if update is None else f"version {update.version}"
                goal = "a version" if version is None else f"version {version}"
                raise CheckpointError(
                    f"the newest intact version in {self._steps.root!r} must be {goal}"
                    + f", after the one with nonce {after}" * (after is not None)
                    + f"; found {newest}"
                )

    def _is_past(self, version: int | None, after: str | None) -> bool:
        """Returns whether the version with a number is damaged, or older than the one that is held,
        so that it is never the newest whole one.
        """
        for item in self._steps.committed()[0]:
            manifest = item.manifest
            if manifest.step == version and manifest.nonce != after:
                is_older = self._held is not None and manifest.sequence < self._sequence
                return is_older or self._attempt(manifest, self._steps) in self._damaged
        return False

    def _attempt(self, manifest: Manifest, steps: StepStore) -> str:
        return f"{manifest.nonce} in {steps.root}"

    def _look(self) -> WeightUpdate | None:
        committed, faults = self._steps.committed()
        for fault in faults:
            if isinstance(fault.error, IncompatibleCheckpoint):
                raise fault.error
            if isinstance(fault.error, CorruptCheckpoint) and fault.name not in self._damaged:
                self._damaged.add(fault.name)
                log.warning("%r is passed over: %s", fault.name, fault.error)
        versions = dict[str, Places]()
        near = [] if self._near is None else [(self._near, item) for item in readable(self._near)]
        for steps, item in [*near, *((self._steps, item) for item in committed)]:
            versions.setdefault(item.manifest.nonce, []).append((steps, item))
        for places in sorted(versions.values(), key=lambda its: in_order(its[-1][1]), reverse=True):
            steps, (_name, manifest) = places[-1]
            is_lost = manifest.nonce == self._lost
            if manifest.sequence <= self._sequence and not is_lost:  # a listing may be stale
                break
            attempt = self._attempt(manifest, steps)
            if attempt in self._damaged or not self._is_whole(manifest.nonce, versions):
                continue
            try:
                self._prepare(manifest, places)
            except Vanished:  # retention has removed it, since there is a newer one
                continue
            except CorruptCheckpoint as error:
                self._damaged.add(attempt)
                log.warning("version %d is passed over: %s", manifest.step, error)
                continue
            self.nonce, self._sequence = manifest.nonce, manifest.sequence
            self._update = WeightUpdate(self, manifest.step, manifest.nonce, self._tensors)
            self._lost = ""
            return None if is_lost else self._update
        return None

    def _is_whole(self, nonce: str, versions: Mapping[str, Places]) -> bool:
        """Returns whether this node and the root have all files of a version and of those that it
        differs from. What the root has committed is whole.
        """
        if self._held is not None and nonce == self._held.manifest.nonce:
            return True
        if nonce not in versions:
            return False
        steps, (name, manifest) = versions[nonce][-1]
        if steps is self._steps:
            return True
        files = [manifest.objects.file]
        for writer in manifest.writers:
            files += [writer.file, writer.index]
        return all(
            self._storage.status(steps.path(name, file)) is not None for file in files
        ) and all(self._is_whole(base, versions) for base in manifest.bases)

    def _prepare(self, manifest: Manifest, places: Places) -> None:
        """Reads a version into the tensors that are held."""
        staging, root, near = pipeline.current().staging, self._steps, self._near
        self._lost = self.nonce or self._lost  # until everything is read, nothing is held
        base_step, self._held, self._update, self.nonce = self._held, None, None, ""
        with ExitStack() as holding:
            paths, (_steps, (name, _manifest)) = hold_all(places, holding), places[-1]
            base = base_beside(self._storage, staging, root, name, holding, near=near)
            copies = StepCopies(self._storage, staging, paths)
            reader = StepReader(staging, paths[-1], manifest, copies, base)
            tensors, targets = self._targets(reader.objects(weights_only=True), paths[-1])
            if base_step is not None and all(
                self._contents.get(id(target.tensor)) == _content(target) for target in targets
            ):  # otherwise some memory holds nothing yet, another part, or what others wrote to it
                memory = StepInMemory(base_step, base)
                base = base_beside(self._storage, staging, root, name, holding, memory, near)
                reader = StepReader(staging, paths[-1], manifest, copies, base)
            reader.read(targets, in_place=True)
            self._tensors, self._held = tensors, reader.alone()
            self._contents = {id(each.tensor): _content(each) for each in targets}

    def _targets(self, saved: Any, path: str) -> tuple[dict[str, torch.Tensor], list[Target]]:
        """Returns the tensors of a version by name, in memory that is held already where it fits,
        and the parts to read into them.
        """
        if not isinstance(saved, dict):
            raise IncompatibleCheckpoint(f"{path!r} was not written by a WeightPublisher")
        if self._boxes is not None:
            _refuse(f"{path!r} has no tensor", self._boxes.keys() - saved.keys())
        tensors, targets = dict[str, torch.Tensor](), list[Target]()
        for name, value in saved.items():
            stored = stored_of(value)
            if self._boxes is not None and name not in self._boxes:
                continue
            if stored is None and not isinstance(value, torch.Tensor):
                raise IncompatibleCheckpoint(f"{path!r} was not written by a WeightPublisher")
            dtype, shape = (value.dtype, value.shape) if stored is None else stored[1:]
            box = self._wanted(name, tuple(shape))
            memory = self._tensors.get(name)
            if memory is None or (memory.dtype, memory.shape) != (dtype, box.sizes):
                with torch.inference_mode(False):  # its tensors have no versions
                    memory = torch.empty(box.sizes, dtype=dtype, device="cpu")
            tensors[name] = memory
            if stored is None:  # it is small, and among the objects
                begins_ends = zip(box.offsets, box.sizes, strict=True)
                memory.copy_(value[tuple(slice(at, at + size) for at, size in begins_ends)])
            else:
                targets.append(Target(*stored, box, memory))
        return tensors, targets

    def _wanted(self, name: str, shape: tuple[int, ...]) -> Box:
        box = whole(shape)
        if self._boxes is not None:
            expected, box = self._boxes[name]
            if tuple(expected) != shape:
                raise IncompatibleCheckpoint(
                    f"{name!r} has the shape {list(shape)} in the version, {list(expected)} in like"
                )
        slices: Any = None if self._part is None else self._part(name, shape)
        if slices is None:
            return box
        is_fit = isinstance(slices, Sequence) and len(slices) == len(shape)
        if not is_fit or not all(
            isinstance(each, slice) and each.step in (None, 1) for each in slices
        ):
            raise ValueError(
                f"part returned {slices!r} for {name!r}, must be slices without steps, one for "
                f"each of {len(shape)} dimensions"
            )
        bounds = [each.indices(size) for each, size in zip(slices, shape, strict=True)]
        begins = tuple(begin for begin, _end, _step in bounds)
        return Box(begins, tuple(max(0, end - begin) for begin, end, _step in bounds))

    def close(self) -> None:
        """Frees the memory; an update is no longer valid. Idempotent."""
        self._closed.set()
        if self._lock.acquire(blocking=False):  # else another thread's next() does this at its end
            try:
                self._held, self._update, self.nonce, self._lost = None, None, "", ""
                self._tensors, self._contents = {}, {}
            finally:
                self._lock.release()

    def __enter__(self) -> WeightSubscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _content(target: Target) -> tuple[str, Box, int]:
    """Returns what the memory of a target holds after a read: of another part, or after somebody
    has written to it, this is another tuple.
    """
    return target.key, target.box, target.tensor._version


def _tensors_of(state: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a state by the names that they are published with."""
    tensors = [(joined(keys), tensor) for keys, tensor in tensors_in(state)]
    names = names_in_model([name for name, _tensor in tensors])
    return {name: tensor for name, (_old, tensor) in zip(names, tensors, strict=True)}


def _local(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return dtensor_part(name, tensor)[0] if is_sharded(tensor) else tensor


def _box(name: str, tensor: torch.Tensor) -> Box:
    return dtensor_part(name, tensor)[1] if is_sharded(tensor) else whole(tuple(tensor.shape))


def _refuse(what: str, names: Any) -> None:
    if names:
        raise IncompatibleCheckpoint(f"{what} {listed(map(repr, sorted(names)))}")
