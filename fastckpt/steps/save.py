"""Saves of one step: a directory in which each rank writes its pieces, committed by a manifest.

Responsible for the order of the stages: pieces are planned and staged, the first rank makes the
directory, every rank writes and syncs its shard and index, the first one the objects, and then the
manifest. It must not know the bytes of the formats, how a block moves, or how ranks talk.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

from fastckpt.arguments.checks import CODECS, Codec, check_choice, check_count, optional
from fastckpt.engine.codec import FrameWriter
from fastckpt.engine.devices import Reads
from fastckpt.engine.gds_trial import Choice
from fastckpt.engine.transfer import Fetch
from fastckpt.formats import torch_pickle, torch_zip
from fastckpt.formats.manifest import OBJECTS, Manifest, ObjectsFile, Writer
from fastckpt.formats.shard_index import index_name, shard_name
from fastckpt.handle import SaveHandle
from fastckpt.options import WriteOptions
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.ranks.round import Round
from fastckpt.ranks.same_state import Description, disagreement
from fastckpt.saving.fence import Watched
from fastckpt.saving.image_file import ImageFile
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Job, Pipeline
from fastckpt.state.tree import Leaf
from fastckpt.steps.place import StepPlace
from fastckpt.steps.retention import tidy
from fastckpt.steps.root import Steps
from fastckpt.steps.shard import Shard, comparable
from fastckpt.steps.shard_parts import part_of
from fastckpt.steps.shared_shard import AnyShard, Gathered, Gathering, Guest, Pool, is_small
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import Storage
from fastckpt.storage.lustre_layout import Purpose


@dataclass
class Content:
    """One rank's part of a state to be saved; nothing of it changes until it was staged.

    Attributes:
        leaves: tensors of the shards; every rank has the same keys in the same order.
        objects: on the first rank, what was pickled of the rest; None on the others.
        per_rank: a torch zip of this rank's own values, or nothing.
        description: what ranks compare.
        reads: what of it lies on devices.
        watched: what must not change before it was copied.
    """

    leaves: list[Leaf]
    objects: torch_pickle.Capture | None
    per_rank: bytes
    description: Description
    reads: Reads
    watched: list[Watched]


@dataclass(frozen=True)
class StepOptions(WriteOptions):
    """How steps are written, and how many stay: arguments of Checkpointer of the same names.

    Raises:
        ValueError, TypeError: one of them is none that can be, or does not go with another one.
    """

    codec: Codec | None = None
    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("codec", self.codec, CODECS)
        if self.keep_last is not None:
            check_count("keep_last", self.keep_last, ", or None to keep all")
        optional(check_count, "keep_every", self.keep_every)
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("keep_every without keep_last: all steps are kept anyway")
        if self.codec is not None and self.pacing.writers_per_node is not None:
            raise ValueError("writers_per_node with codec: what is compressed has its own file")


class StepSave(Job):
    """One step. Each rank runs its own, for the same directory.

    Args:
        handle, agreement, fence: as Job's.
        steps: where to.
        step: its number.
        content: what this rank has of it.
        options: how.
        pool: what ranks of a node lend each other, for shards that share a file.
        differing: called with the keys of tensors whose contents differ between ranks.
    """

    def __init__(
        self,
        handle: SaveHandle,
        agreement: Round,
        steps: Steps,
        step: int,
        content: Content,
        options: StepOptions,
        pool: Pool,
        differing: Callable[[set[str]], None],
        *,
        fence: str,
    ) -> None:
        super().__init__(
            handle, agreement, content.reads, content.watched, fence=fence, lane=steps.root
        )
        self.place = StepPlace(steps, agreement)
        self.step = step
        self.content: Content | None = content
        self.options = options
        self.pool = pool
        self.differing = differing

    def release(self) -> None:
        self.content = None

    def commit(self, pipeline: Pipeline) -> None:
        try:
            super().commit(pipeline)
        finally:
            self.place.close()

    def abandon(self, storage: Storage) -> None:
        self.place.abandon()

    def write(self, pipeline: Pipeline) -> None:
        agreement, content = self.agreement, self.content
        assert content is not None
        own = Shard(content.leaves, content.per_rank, agreement.rank)
        pace = self._paced(pipeline)
        body = part_of(own.image) if pace.gathers and is_small(own) else own.image
        limit_bytes = self.options.limit_bytes
        limit, stagers = self.take_budget(pipeline.staging, body.body_nbytes, limit_bytes)
        compared = comparable(content.leaves, agreement.world_size)
        content.description.sample(compared, zlib.crc32(agreement.label.encode()))
        # Whatever happens, blocks in flight arrive before the files they go to are closed.
        with ExitStack() as files, self.telling(), ExitStack() as moving:
            samples = content.description.samples()
            fetch = moving.enter_context(
                Fetch(pipeline.staging, pipeline.storage, samples, self.handle.path, self.reads)
            )
            way = "host" if self.options.codec or pace.gathers else self.options.staging
            self.choice = Choice(pipeline.storage, pipeline.staging, way, self.reads)
            direct = self.choice.direct(self.place.steps.root, self.handle.stats)
            size = (limit - 1, stagers)
            file = moving.enter_context(
                ImageFile(pipeline, body, self.handle.path, *size, self.reads, direct)
            )
            self.copying.transfers += [fetch.transfer, file.transfer]
            objects = self._stage_objects(pipeline, moving) if limit > 1 else None
            if limit > 1 and agreement.rank != 0:
                self.copying.watch()
            nbytes = body.body_nbytes + (0 if objects is None else objects.nbytes)
            gathering = Gathering(self.pool, pipeline.storage, agreement, self.handle)
            if pace.gathers:
                gathering.lend(own)
            agreed = self._begin(pace)
            self.place.name, nonce = agreed["name"], agreed["nonce"]
            if limit > 1 and agreement.rank == 0:  # saves make their directories in order
                self.copying.watch()
            self.handle.path = self.place.path()
            if agreed["meet"]:
                self.pool.neighbours = pace.meet(nbytes)
            shard = gathering.place(own, body, pace.files_per_node) if pace.gathers else own
            writer = self._open_shard(pipeline, files, shard, file)
            self.handle.stats.nbytes += shard.head.body_nbytes + body.body_nbytes
            pace.begin(nbytes)
            if file.is_open:
                file.begin(shard.begin, pace)
            if limit == 1:  # of which the objects need that one block
                file.wait_written()
                objects = self._stage_objects(pipeline, moving)
            if objects is not None:
                self._write_objects(files, objects, pace)
            pace.end(*(each.transfer for each in (file, objects) if each is not None))
            self.copying.wait()
            fetch.fill()
            if not isinstance(shard, Shard):
                shard.describe(file.transfer.slot_crcs())
            written = None if objects is None else self._finish_objects(objects)
            self._compare(content)
            file.wait_written()
            staged = file.transfer.staged_bytes_max() + BLOCK_BYTES
            self.handle.stats.staged_bytes_max = min(staged, limit * BLOCK_BYTES)
            self.handle.stats.written_s = self.handle.elapsed_s()
            record = b""
            if file.is_open:
                record = self._finish_shard(file, writer, shard, nonce)
        self.conclude(record, lambda records: self._publish(nonce, written, records))

    def _paced(self, pipeline: Pipeline) -> Pace:
        rates, root, stats = pipeline.rates, self.place.steps.root, self.handle.stats
        whole = self.options.codec is not None  # a frame is of a block
        return Pace(self.options.pacing, self.agreement, rates, root, stats, whole=whole)

    def _begin(self, pace: Pace) -> dict[str, Any]:
        """The directory and the nonce of this save, which the first rank decides on, and whether
        ranks of a node meet first.
        """
        if self.agreement.rank != 0:
            agreed: dict[str, Any] = json.loads(self.agreement.get("place"))
            return agreed
        name = self.place.begin(self.step)
        meet = pace.meets or (pace.gathers and not self.pool.is_settled)
        agreed = {"name": name, "nonce": secrets.token_hex(16), "meet": meet}
        self.agreement.put("place", json.dumps(agreed).encode())
        return agreed

    def _shard_name(self) -> str:
        return shard_name(self.agreement.rank, self.options.codec)

    def _open_shard(
        self, pipeline: Pipeline, files: ExitStack, shard: AnyShard, file: ImageFile
    ) -> FrameWriter | None:
        """Makes the shard's file, or opens the shared file that the shard is part of; where it goes
        through a codec, returns what writes its frames.
        """
        if shard.is_empty:
            return None
        stats = self.handle.stats
        name, options, storage = self._shard_name(), self.options, pipeline.storage
        path, made = self.place.path(name), partial(self.place.made, name)
        if isinstance(shard, Guest):
            path = self.place.path(shard_name(shard.host, options.codec))
            files.callback(close_quietly, storage, fd := shard.open())
            at = None if shard.is_direct else shard.begin
            route = pipeline.staging.route(fd, path, options.backend, writing=True, offset=at)
            file.join(fd, route, stats)
            return None
        plain = options.codec is None
        purpose = Purpose(shard.nbytes, 1, options.striping, self.place.steps.root)
        timed = plain and isinstance(shard, Shard) and not options.pacing
        how = (purpose, options.backend, stats, path)
        file.make(files, made, *how, allocates=plain, timed=timed)
        if isinstance(shard, Gathered):
            shard.announce(file.fd, file.route.direct)
        if plain:
            return None
        writer = FrameWriter(storage, file.fd, path, shard.nbytes, BLOCK_BYTES)
        file.route = files.enter_context(pipeline.staging.through(file.fd, writer.transfer))
        return writer

    def _finish_shard(
        self, file: ImageFile, writer: FrameWriter | None, shard: AnyShard, nonce: str
    ) -> bytes:
        """Makes shard and index durable. Returns what the manifest will say of this writer."""
        if isinstance(shard, Guest):
            shard.written()
            return b""
        if isinstance(shard, Gathered):
            file.add(shard.head, 0)
            shard.wait_written()
            index = shard.index(nonce, self._shard_name())
        else:
            frames = None if writer is None else writer.frames()
            index = shard.index(nonce, self._shard_name(), file.transfer.block_crcs(), frames)
        file.end(self.options.durable, shard.nbytes)
        name, content = index_name(self.agreement.rank), index.to_bytes()
        self.place.write(name, content, file.fd, self.options.durable)
        if self.options.durable:
            self.place.sync_own_directory()
        return Writer.of(index, name, content).to_bytes()

    def forget(self) -> None:
        assert self.content is not None
        self.content.leaves.clear()

    def _stage_objects(self, pipeline: Pipeline, moving: ExitStack) -> ImageFile | None:
        """On the first rank, begins to stage what is not in shards."""
        assert self.content is not None
        captured, self.content.objects = self.content.objects, None
        if captured is None:
            return None
        image, path = torch_zip.layout(captured), os.path.join(self.handle.path, OBJECTS)
        objects = moving.enter_context(ImageFile(pipeline, image, path, 1, 1, self.reads))
        self.copying.transfers.append(objects.transfer)
        return objects

    def _write_objects(self, files: ExitStack, objects: ImageFile, pace: Pace) -> None:
        """Makes their file, and writes to it what has been staged."""
        options, path = self.options, self.place.path(OBJECTS)
        # A number of stripes is meant for shards: this file is small, and a layout costs the
        # metadata server a word.
        stripe = "keep" if options.stripe == "keep" else "auto"
        purpose = Purpose(objects.nbytes, 1, stripe, self.place.steps.root)
        made = partial(self.place.made, OBJECTS)
        objects.make(files, made, purpose, options.backend, None, path)
        objects.begin(0, pace)

    def _finish_objects(self, objects: ImageFile) -> ObjectsFile:
        """Writes what depends on their checksums, when they were staged."""
        tail = objects.complete(self.options.durable)
        self.handle.stats.nbytes += objects.nbytes
        return ObjectsFile(OBJECTS, objects.nbytes, torch_zip.closing_crc(tail))

    def _compare(self, content: Content) -> None:
        description = content.description
        groups = self.agreement.same("state", description.digest(), description.detail)
        if groups is not None:
            error, unequal = disagreement(groups, self.handle.path)
            self.differing(unequal)
            raise error

    def _publish(self, nonce: str, objects: ObjectsFile | None, records: list[bytes]) -> None:
        assert objects is not None
        manifest = Manifest(
            step=self.step,
            nonce=nonce,
            sequence=self._next_sequence(),
            world_size=self.agreement.world_size,
            created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            objects=objects,
            writers=tuple(Writer.from_bytes(record) for record in records if record),
        )
        self._make_visible(manifest)

    def _next_sequence(self) -> int:
        return self.place.steps.next_sequence()

    def _make_visible(self, manifest: Manifest) -> None:
        self.place.publish(manifest, self.options.durable)

    def end(self, pipeline: Pipeline) -> None:
        super().end(pipeline)
        if self.agreement.rank == 0 and self.place.is_begun and self.handle.failure() is None:
            self.pool.is_settled = self.options.pacing.writers_per_node is not None
            keep_last, keep_every = self.options.keep_last, self.options.keep_every
            tidy(self.place.steps, self.place.name, self.step, keep_last, keep_every)
