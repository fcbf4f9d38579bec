"""Drain: copies a step of the local tier into the root, verifies it, and commits it there.

Every rank copies its share, all agree, and the first rank publishes the same manifest in the root.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

from fastckpt.errors import CorruptCheckpoint, PeerFailed, Vanished, is_visible
from fastckpt.formats.manifest import Manifest, Writer
from fastckpt.ranks.round import HEED_S, Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.image_file import write_portions
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Job, Pipeline
from fastckpt.steps.copies import StepCopies
from fastckpt.steps.options import StepOptions
from fastckpt.steps.retention import tidy
from fastckpt.steps.store import Committed
from fastckpt.storage.file_system import Storage
from fastckpt.storage.lustre_layout import Purpose
from fastckpt.tiers.local_tier import LocalTier
from fastckpt.tiers.nodes import OBJECTS_PART

log = logging.getLogger("fastckpt")

DRAIN_BLOCKS_MIN = 2  # of staging memory: one to read a block into while another is written


class Drain(Job):
    """The drain of one step. Each rank runs its own, for the same directory in the root.

    Args:
        handle: the save's, or one for this drain; gets the step's path once the root has the step.
        agreement: a round for this drain alone.
        tier: the local tier, which knows the root.
        options: how the root is written, and which steps stay there.
        names: the step's directory on each node that has it, by the node's first rank.
        parts: ranks of the writers whose files this rank copies, and OBJECTS_PART for the objects.
        is_resumed: whether an earlier job has saved the step, and the handle is for this drain.

    Attributes:
        copied_s: how long this rank copied.
        took_s: how long it was until all ranks had copied and the root had the step, from when the
            drain began.
    """

    def __init__(
        self,
        handle: InnerHandle,
        agreement: Round,
        tier: LocalTier,
        options: StepOptions,
        names: dict[int, str],
        parts: Sequence[int],
        is_resumed: bool = False,
    ) -> None:
        super().__init__(handle, agreement, fence="call", lane=tier.root.root)
        self._tier = tier
        self._options = options
        self._names = names
        self._parts = parts
        self._place = tier.root.draft(agreement.check)
        self._is_resumed, self._passing = is_resumed, ExitStack()
        self.deed = "drained" if is_resumed else "saved"
        agreement.is_cancelled = handle.is_given_up
        self.copied_s = self.took_s = 0.0

    def forget(self) -> None:
        """Does nothing: a drain holds nothing of the caller's."""

    def release(self) -> None:
        """Does nothing, as forget()."""

    def commit(self, pipeline: Pipeline) -> None:
        try:
            super().commit(pipeline)
        finally:
            self._place.close()

    def abandon(self, storage: Storage) -> None:
        self._place.abandon()

    def write(self, pipeline: Pipeline) -> None:
        for earlier in self.previous:  # the root does not take two steps faster than one
            while not earlier.wait_done(HEED_S):
                self.agreement.heed()
        root, begun = self._tier.root, time.monotonic()
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
        nbytes = 0 if manifest is None else _nbytes_of(manifest, self._parts)
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
        self.copied_s = time.monotonic() - begun
        self.conclude(b"", lambda _records: self._publish(manifest))
        self.took_s = time.monotonic() - begun
        self.handle.path = self._place.path()

    def _copy(self, manifest: Manifest, pipeline: Pipeline, pace: Pace) -> None:
        """Copies this rank's parts from this node's directory to the root; with neighbours, a file
        that is damaged here is fetched from them first. Raises CorruptCheckpoint if no copy is
        whole, or StorageError.
        """
        place, options, tier = self._place, self._options, self._tier
        directory = tier.steps.path(self._own_name)
        fetch = tier.fetching(Committed(self._own_name, manifest))
        source = StepCopies(pipeline.storage, pipeline.staging, [directory], fetch=fetch)

        def write(name: str, nbytes: int, portions: Iterator[bytearray]) -> None:
            make = partial(place.made, name)
            purpose = Purpose(nbytes, 1, options.striping, tier.root.root)
            write_portions(pipeline, portions, place.path(name), options, pace, make, purpose)

        writers = {writer.rank: writer for writer in manifest.writers}
        for part in self._parts:
            if fetch is not None:
                self._fetch_damaged(source, manifest, writers.get(part))
            if part == OBJECTS_PART:
                with source.stored_objects(manifest) as portions:
                    write(manifest.objects.file, manifest.objects.nbytes, portions)
                continue
            index, content = source.index(writers[part], manifest.nonce)
            with source.stored_shard(index) as portions:
                write(index.file, index.file_nbytes, portions)
            place.write(writers[part].index, content, None, options.durable)

    def _fetch_damaged(self, source: StepCopies, manifest: Manifest, writer: Writer | None) -> None:
        """Verifies the files of a writer, or (None) of the objects, before they are copied."""

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

    @property
    def _own_name(self) -> str:
        """The name of the step's directory on this node; "" if it has none."""
        return self._names.get(self._tier.nodes().first(self.agreement.rank), "")

    def _manifest(self) -> Manifest | None:
        """Returns the manifest on this node. If there is none, the first rank receives it from
        another node, and other ranks return None.
        """
        source, rank, steps = min(self._names), self.agreement.rank, self._tier.steps
        travels = self._tier.nodes().first(0) not in self._names
        if not self._own_name:
            if rank != 0:
                return None
            return Manifest.from_bytes(self.agreement.get("manifest", source))
        try:
            manifest = steps.read(self._own_name)
        except Vanished as error:  # this library removes no step before the root has it
            raise CorruptCheckpoint(f"{steps.path(self._own_name)!r} is missing: {error}") from None
        if travels and rank == source:
            self.agreement.put("manifest", manifest.to_bytes())
        return manifest

    def _publish(self, manifest: Manifest | None) -> None:
        assert manifest is not None
        self._place.commit(manifest, self._options.durable)

    def end(self, pipeline: Pipeline) -> None:
        super().end(pipeline)
        self._passing.close()
        tier, rank, failure = self._tier, self.agreement.rank, self.handle.failure()
        if is_visible(failure):
            log.warning("%s stays in the local tier as well: %s", self._own_name, failure)
        elif failure is not None and not isinstance(failure, PeerFailed):
            log.warning("%s stays in the local tier alone: %s", self._own_name, failure)
        elif failure is None and self._own_name and tier.nodes().first(rank) == rank:
            tier.note_drained(self._own_name)
            tier.evict()
        if self._place.is_begun and failure is None:
            tidy(tier.root, self._place.name, self._options)


def _nbytes_of(manifest: Manifest, parts: Sequence[int]) -> int:
    """Returns the size of the files of these parts, without their indexes."""
    shards = sum(each.nbytes for each in manifest.writers if each.rank in parts)
    return shards + (manifest.objects.nbytes if OBJECTS_PART in parts else 0)
