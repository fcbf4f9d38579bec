"""Saves of one step by way of a node-local tier: committed there first, then drained to the root.

Responsible for what differs from a save that writes to the root: each node has a directory of its
own, all nodes publish the same manifest, and a tier that cannot take the step is gone past. It
must not know how a shard is written, nor how a step is drained.
"""

from __future__ import annotations

import errno
import json
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from fastckpt.engine.codec import FrameWriter
from fastckpt.errors import CheckpointError, PeerFailed, StorageError
from fastckpt.formats.manifest import Manifest, ObjectsFile
from fastckpt.handle import SaveHandle
from fastckpt.options import Pacing
from fastckpt.ranks.round import Round
from fastckpt.saving.image_file import ImageFile
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Pipeline
from fastckpt.steps.place import StepPlace
from fastckpt.steps.save import StepSave
from fastckpt.steps.shared_shard import AnyShard
from fastckpt.tiers.drain import DRAIN_BLOCKS_MIN, Drain, receive, send
from fastckpt.tiers.local_tier import OBJECTS_PART, SLOW_S, LocalTier


class TieredSave(StepSave):
    """One step. Each rank runs its own.

    Args:
        tier: the local tier.
        draining: the round in which ranks agree on the commit to the root.
        earlier: handles of the saves before, of those that are not done.
        args, options: StepSave's, whose `steps` is the root.
    """

    def __init__(
        self,
        tier: LocalTier,
        draining: Round,
        earlier: Sequence[SaveHandle],
        *args: Any,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.place = StepPlace(tier.steps, self.agreement)
        self._tier = tier
        self._draining = draining
        # That has to be in the root before this one is written, or too much would be in the tier.
        self._awaited = earlier[-tier.keep - 1] if len(earlier) > tier.keep else None
        self._drain: Drain | None = None
        self._pace: Pace | None = None
        self._trouble = ""
        self._objects_nbytes = 0
        self._opened_s = 0.0
        self._wrote_shard = False
        self._is_told = False

    @property
    def _is_local(self) -> bool:
        return self.place.steps is self._tier.steps

    def commit(self, pipeline: Pipeline) -> None:
        try:
            # Before anything is staged: a drain needs staging memory, too, to read and to write.
            if pipeline.staging.blocks_limit(None) < DRAIN_BLOCKS_MIN:
                self._tier.refuse("cannot be drained with staging memory of one block")
            if self._awaited is not None:
                self._awaited.wait_done()
                self._awaited = None
            super().commit(pipeline)
            if self._is_local:
                self._go_on(pipeline)
        except BaseException as error:
            self._draining.fail(error)
            raise

    def write(self, pipeline: Pipeline) -> None:
        try:
            super().write(pipeline)
        except StorageError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if self._is_local and error.path.startswith(self.place.steps.root) and not is_full:
                self._tier.refuse(f"failed: {error}")
            raise

    def _go_on(self, pipeline: Pipeline) -> None:
        """From the commit in the local tier to that in the root."""
        self.handle.mark_local()
        self.copying.close()
        self.release()
        stats, rank, nodes = self.handle.stats, self.agreement.rank, self._tier.nodes()
        wrote = [rank] if self._wrote_shard else []
        parts = [*wrote, OBJECTS_PART] if rank == 0 else wrote
        names = {0: self.place.name, nodes.first(rank): self.place.name}
        drain = Drain(self.handle, self._draining, self._tier, self.options, names, parts)
        drain.previous, self._drain = self.previous, drain
        drain.commit(pipeline)
        local_s = (stats.written_s or 0.0) - self._opened_s
        # With a codec it is compression that took the time, which is no shorter without a tier.
        if self.options.codec is None and local_s > max(SLOW_S, drain.copied_s):
            self._tier.refuse(
                f"is slow: it took {local_s:.1f} s for what {self._tier.root.root} took in "
                f"{drain.copied_s:.1f} s"
            )

    # ---- the directories, or the way past them

    def _paced(self, pipeline: Pipeline) -> Pace:
        """Not at all until it goes past the tier: what was asked for is to spare the root."""
        rates, root, stats = pipeline.rates, self._tier.root.root, self.handle.stats
        whole = self.options.codec is not None
        self._pace = Pace(Pacing(), self.agreement, rates, root, stats, whole=whole)
        return self._pace

    def _begin(self, pace: Pace) -> dict[str, Any]:
        """A directory on each node, which its first rank makes; the nonce of rank 0."""
        nodes, agreement = self._tier.nodes(), self.agreement
        first = nodes.first(agreement.rank)
        if first == agreement.rank:
            self._trouble = self._tier.refusal()
            if not self._trouble:
                try:
                    self.place.begin(self.step)
                except StorageError as error:
                    self._trouble = f"failed: {error}"
            own = {"name": self.place.name, "nonce": secrets.token_hex(16)}
            agreement.put("local place", json.dumps(own).encode())
        name = json.loads(agreement.get("local place", first))["name"]
        nonce = json.loads(agreement.get("local place"))["nonce"]
        return {"name": name, "nonce": nonce, "meet": False}

    def _stage_objects(self, pipeline: Pipeline, moving: ExitStack) -> ImageFile | None:
        objects = super()._stage_objects(pipeline, moving)
        self._objects_nbytes = 0 if objects is None else objects.nbytes
        return objects

    def _open_shard(
        self, pipeline: Pipeline, files: ExitStack, shard: AnyShard, file: ImageFile
    ) -> FrameWriter | None:
        """In the local tier where every rank has room; before the first byte is written, for what
        was written is no longer in memory.
        """
        with ExitStack() as trial:
            writer = None
            self._trouble = self._trouble or self._tier.refusal()
            try:
                if self.place.name and not self._trouble:
                    writer = super()._open_shard(pipeline, trial, shard, file)
                    coded = shard.nbytes if self.options.codec is not None else 0
                    beside = self._tier.nodes().beside(self.agreement.rank)
                    self._tier.check_room(self._objects_nbytes + coded * len(beside))
            except StorageError as error:
                self._trouble = f"failed: {error}"
            why = self._agreed()
            if not why:
                self._opened_s = self.handle.elapsed_s()
                self._wrote_shard = file.is_open
                files.push(trial.pop_all())
                return writer
        self._go_past(pipeline, why, shard.nbytes + self._objects_nbytes)
        return super()._open_shard(pipeline, files, shard, file)

    def _agreed(self) -> str:
        """Says why some rank cannot write to the local tier; "" if all can."""
        agreement = self.agreement
        agreement.put("local", self._trouble.encode(errors="replace"))
        if agreement.rank == 0:
            troubles = enumerate(agreement.gather("local"))
            why = next((f"of rank {r} {text.decode()}" for r, text in troubles if text), "")
            agreement.put("tier", why.encode())
        return agreement.get("tier").decode()

    def _go_past(self, pipeline: Pipeline, why: str, nbytes: int) -> None:
        """Leaves the local tier as it was, and turns to the root, to write so much there."""
        if self.agreement.rank == 0 or self._trouble:
            self._tier.warn(self.step, why)
        self.abandon(pipeline.storage)
        self.place = StepPlace(self._tier.root, self.agreement)
        stats = self.handle.stats
        stats.local_why, stats.nbytes = f"the local tier {why}", 0
        pace = self._pace
        assert pace is not None
        pace.heed(self.options.pacing)
        self.place.name = super()._begin(pace)["name"]
        self.handle.path = self.place.path()
        if pace.meets:
            pace.meet(nbytes)

    # ---- the commit in the local tier

    def wait_turn(self) -> None:
        if self._is_local:
            for handle in self.previous:
                handle.wait_first()
        else:
            super().wait_turn()

    def _next_sequence(self) -> int:
        return self._tier.next_sequence(self.place.steps)

    def _publish(self, nonce: str, objects: ObjectsFile | None, records: list[bytes]) -> None:
        try:
            super()._publish(nonce, objects, records)
        except BaseException:
            if self._is_local and not self._is_told:
                send(self.agreement, "manifest", b"")
            raise

    def _make_visible(self, manifest: Manifest) -> None:
        """On every node; if one fails, on none."""
        agreement = self.agreement
        others = [rank for rank in self._tier.nodes().firsts if rank] if self._is_local else []
        if others:
            self._is_told = True
            send(agreement, "manifest", manifest.to_bytes())
        self._make_visible_here(manifest)
        for rank in others:
            failure = agreement.get("published", rank).decode()
            if failure:
                raise PeerFailed(f"rank {rank}: {failure}", (rank,))

    def _make_visible_here(self, manifest: Manifest) -> None:
        """In the local tier what is visible is enough for the failure of a process, which is all
        that the tier promises: where it may not be durable, the step is drained as ever, and the
        tier is not used again.
        """
        try:
            super()._make_visible(manifest)
        except StorageError as error:
            if not (error.visible and self._is_local):
                raise
            self._tier.refuse(f"failed: {error}")

    def follow(self) -> None:
        """On the first rank of another node: publishes there what rank 0 publishes on its own."""
        if not self._is_local:
            self.wait_for_previous()  # as rank 0 does
            return
        if not self.place.is_begun:
            return
        content = receive(self.agreement, "manifest", 0)
        if not content:
            return
        failure = ""
        try:
            self._make_visible_here(Manifest.from_bytes(content))
        except (CheckpointError, OSError) as error:
            failure = f"{type(error).__name__}: {error}"
        self.agreement.put("published", failure.encode(errors="replace"))

    def end(self, pipeline: Pipeline) -> None:
        if not self._is_local:
            super().end(pipeline)
        self.agreement.close()
        drain, self._drain = self._drain, None
        if drain is not None:
            drain.end(pipeline)
        self._draining.close()
