"""Drainer: copies steps from a source to a target. Each node has its own source; the root is the
target.

Every rank copies and verifies its share of a step. When all ranks have succeeded, the first rank
publishes the same manifest in the target. The module must not know why a step is drained.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from fastckpt.errors import CorruptCheckpoint, PeerFailed, Vanished, is_visible
from fastckpt.formats.manifest import Manifest, Writer
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.ranks.round import CANCEL_LOOK_S, Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.image_file import write_portions
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Job, Pipeline
from fastckpt.steps.copies import Fetch, StepCopies
from fastckpt.steps.options import StepOptions
from fastckpt.steps.retention import tidy
from fastckpt.steps.store import Committed, StepStore
from fastckpt.storage.file_system import Storage
from fastckpt.storage.lustre_layout import Purpose
from fastckpt.tiers.nodes import OBJECTS_PART

log = logging.getLogger("fastckpt")

DRAIN_BLOCKS_MIN = 2  # of staging memory: one to read a block into while another is written
_MARGIN = 1.5  # a step is saved directly only if the time left is this many times a drain's


class StepInfo(NamedTuple):
    """A step to be drained, as one rank sees it.

    Attributes:
        step, nonce: the number of the step, and the nonce of its manifest.
        name: the step's directory in this node's source; "" if the node has none.
        sender: the rank that sends the manifest to the first rank; None if the first rank has it.
        parts: the parts that this rank copies: ranks of writers, and OBJECTS_PART for the objects.
    """

    step: int
    nonce: str
    name: str
    sender: int | None
    parts: Sequence[int]


class Drainer:
    """The source and the target of drains, and the durations of recent ones. Each drain is a Job,
    with a thread and states like a save. A hung target, a cancellation or Ctrl-C therefore ends a
    drain in the same way as a save.

    Args:
        source: the steps of this node.
        target: the steps of the root.
        coordinator, timeout_s: the Checkpointer's.
    """

    def __init__(
        self,
        source: StepStore,
        target: StepStore,
        coordinator: Coordinator,
        timeout_s: float,
    ) -> None:
        self.source, self.target = source, target
        self._coordinator, self._timeout_s = coordinator, timeout_s
        self._times_s: tuple[float, float] | None = None

    def begin(self, step: int) -> Round:
        """Begins the round in which ranks agree that a step is in the target."""
        label, note = f"step {step} to the root", "the local tier keeps its steps"
        return self._coordinator.begin(label, self._timeout_s, note)

    def note_times(self, local_s: float, drain_s: float) -> None:
        """Records how long a step took to be committed in the source, and how long its drain
        took.
        """
        self._times_s = local_s, drain_s

    def too_late(self, left_s: float) -> str:
        """Returns why a step should be saved directly to the target if the job ends in `left_s`
        seconds. The result is "" if the step would reach the target in time through the source, if
        a direct save would be too late as well, or if no drain was timed yet.
        """
        if self._times_s is None:
            return ""
        local_s, drain_s = self._times_s
        if local_s + drain_s < left_s or _MARGIN * drain_s > left_s:
            return ""
        return (
            f"would take too long: the previous step took {local_s + drain_s:.1f} s to reach the "
            f"root through the tier, including {drain_s:.1f} s for the drain, but the job ends in "
            f"{left_s:.1f} s"
        )


class Drain(Job):
    """The drain of one step. Each rank runs one; all write to the same directory in the target.

    Args:
        handle: the handle of the save, or one for this drain; its path becomes that in the target.
        agreement: a round of Drainer.begin() for this drain alone.
        drainer: has the source and the target.
        options: how the target is written, and which steps stay there.
        info: the step.
        fetching: returns a function that fetches files of the step from other nodes, or None.
        drained: called with the step's name in the source, once the target has the step.
        is_resumed: whether an earlier job saved the step; the handle is then for this drain alone.

    Attributes:
        copied_s: the duration of this rank's copies.
        took_s: the time from the start of the drain until the target had the step.
    """

    def __init__(
        self,
        handle: InnerHandle,
        agreement: Round,
        drainer: Drainer,
        options: StepOptions,
        info: StepInfo,
        fetching: Callable[[Committed], Fetch | None],
        drained: Callable[[str], None],
        is_resumed: bool = False,
    ) -> None:
        super().__init__(handle, agreement, fence="call", queue=drainer.target.root)
        self._drainer = drainer
        self._options = options
        self._info, self._fetching, self._drained = info, fetching, drained
        self._place = drainer.target.draft(agreement.check)
        self._is_resumed, self._passing = is_resumed, ExitStack()
        self.deed = "drained" if is_resumed else "saved"
        agreement.is_cancelled = handle.is_given_up
        self.copied_s = self.took_s = 0.0

    def forget(self) -> None:
        """Does nothing, because a drain holds nothing of the caller's."""

    def release(self) -> None:
        """Does nothing; see forget()."""

    def commit(self, pipeline: Pipeline) -> None:
        try:
            super().commit(pipeline)
        finally:
            self._place.close()

    def abandon(self, storage: Storage) -> None:
        self._place.abandon()

    def write(self, pipeline: Pipeline) -> None:
        for earlier in self.previous:  # the target does not take two steps faster than one
            while not earlier.wait_done(CANCEL_LOOK_S):
                self.agreement.raise_if_ended()
        root, start_s = self._drainer.target, time.monotonic()
        manifest = self._manifest()
        if self.agreement.rank == 0:
            assert manifest is not None
            if self._is_resumed:
                self._passing.enter_context(root.in_passing())
            self.agreement.put("place", self._place.begin(manifest.step, self._is_resumed).encode())
        self._place.join(self.agreement.get("place").decode())
        pace = Pace(
            self._options.pacing, self.agreement, pipeline.rates, root.root, self.handle.stats
        )
        nbytes = 0 if manifest is None else _nbytes_of(manifest, self._info.parts)
        self.moving.callback(self.handle.mark_writing, None)
        self.handle.mark_writing(partial(pace.progress, nbytes))
        if self._is_resumed:
            self.handle.stats.nbytes = nbytes
        if pace.meets:
            pace.meet(nbytes)
        pace.begin(nbytes)
        if manifest is not None:
            self._copy(manifest, pipeline, pace)
        pace.end()
        if self._options.durable:
            root.sync_grown()
            self._place.sync_own_directory()
        self.copied_s = time.monotonic() - start_s
        self.conclude(b"", lambda _records: self._publish(manifest))
        self.took_s = time.monotonic() - start_s
        self.handle.path = self._place.path()

    def _copy(self, manifest: Manifest, pipeline: Pipeline, pace: Pace) -> None:
        """Copies this rank's parts from this node's directory. A file that is damaged here is first
        fetched from other nodes, if they may have it. Raises CorruptCheckpoint if no copy is
        intact, and StorageError.
        """
        place, options, drainer = self._place, self._options, self._drainer
        directory = drainer.source.path(self._info.name)
        fetch = self._fetching(Committed(self._info.name, manifest))
        source = StepCopies(pipeline.storage, pipeline.staging, [directory], fetch=fetch)

        def write(name: str, nbytes: int, portions: Iterator[bytearray]) -> None:
            make = partial(place.made, name)
            purpose = Purpose(nbytes, 1, options.striping, drainer.target.root)
            write_portions(pipeline, portions, place.path(name), options, pace, make, purpose)

        for part in self._info.parts:
            if part == OBJECTS_PART:
                if fetch is not None:
                    self._fetch_damaged(source, manifest, None)
                with source.stored_objects(manifest) as portions:
                    write(manifest.objects.file, manifest.objects.nbytes, portions)
            for writer in manifest.writers_of(part):
                if fetch is not None:
                    self._fetch_damaged(source, manifest, writer)
                index, content = source.index(writer, manifest.nonce)
                with source.stored_shard(index) as portions:
                    write(index.file, index.file_nbytes, portions)
                place.write(writer.index, content, None, options.durable)

    def _fetch_damaged(self, source: StepCopies, manifest: Manifest, writer: Writer | None) -> None:
        """Verifies a writer's files, or the objects if `writer` is None, and fetches damaged
        ones.
        """

        def verify_objects() -> None:
            with source.body(manifest) as body:
                body.verify()

        if writer is None:
            source.whole(manifest.objects.file, verify_objects)
            return
        index, _content = source.whole(writer.index, lambda: source.index(writer, manifest.nonce))

        def verify_shard() -> None:
            with source.shard(index) as body:
                body.verify()

        source.whole(writer.file, verify_shard)

    def _manifest(self) -> Manifest | None:
        """Returns the manifest on this node. If this node has none, the first rank receives the
        manifest from another node, and other ranks return None.
        """
        name, sender = self._info.name, self._info.sender
        rank, steps = self.agreement.rank, self._drainer.source
        if not name:
            if rank != 0:
                return None
            assert sender is not None
            return Manifest.from_bytes(self.agreement.get("manifest", sender))
        try:
            manifest = steps.read(name)
        except Vanished as error:  # this library removes no step before the root has it
            raise CorruptCheckpoint(f"{steps.path(name)!r} is missing: {error}") from None
        if rank == sender:
            self.agreement.put("manifest", manifest.to_bytes())
        return manifest

    def _publish(self, manifest: Manifest | None) -> None:
        assert manifest is not None
        self._place.commit(manifest, self._options.durable)

    def end(self, pipeline: Pipeline) -> None:
        super().end(pipeline)
        self._passing.close()
        name, failure = self._info.name, self.handle.failure()
        if is_visible(failure):
            log.warning("%s is also kept in the local tier: %s", name, failure)
        elif failure is not None and not isinstance(failure, PeerFailed):
            log.warning("%s is only in the local tier: %s", name, failure)
        elif failure is None and name:
            self._drained(name)
        if self._place.is_begun and failure is None:
            tidy(self._drainer.target, self._place.name, self._options)


def _nbytes_of(manifest: Manifest, parts: Sequence[int]) -> int:
    """Returns the total size of the files of these parts, without their indexes."""
    shards = sum(each.nbytes for each in manifest.writers if each.rank in parts)
    return shards + (manifest.objects.nbytes if OBJECTS_PART in parts else 0)
