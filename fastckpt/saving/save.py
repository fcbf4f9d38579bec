"""A save of one rank, from the state to the commit, for all kinds of saves.

A Plan decides which files this rank writes, as Outputs, and which values ranks compare; a Place
decides where the files become visible. Only this module defines the order of the stages. If a kind
of save differs, add a method to Plan, Place or Output instead of a branch here.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import filterfalse
from typing import TypeAlias

from fastckpt.arguments.options import WriteOptions
from fastckpt.engine.devices import DeviceSources
from fastckpt.engine.save_stats import Progress, SaveStats
from fastckpt.engine.staging import stager_count
from fastckpt.engine.transfer import MemoryCopy
from fastckpt.errors import CheckpointError
from fastckpt.plan.image import BLOCK_BYTES, block_count
from fastckpt.ranks.round import CANCEL_LOOK_S, Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.image_file import ImageFile
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Job, Pipeline
from fastckpt.saving.plan import Output, Place, Plan
from fastckpt.storage.file_system import Storage

# The type of before_commit, called with the statistics so far and a digest: an exception refuses.
Veto: TypeAlias = Callable[[SaveStats, str], object]


class Save(Job):
    """A save on one rank.

    Args:
        plan, place: the plan of the files and the place where they become visible.
        before_commit: see fastckpt.save().
        rate_group: saves of one group share a drain_rate. None: the saves of one queue share it.
        note: called with the handle after the result is set.
        handle, agreement, options, queue: see Job.
    """

    def __init__(
        self,
        handle: InnerHandle,
        agreement: Round,
        plan: Plan,
        place: Place,
        options: WriteOptions,
        before_commit: Veto | None = None,
        *,
        queue: str,
        rate_group: str | None = None,
        note: Callable[[InnerHandle], None] | None = None,
    ) -> None:
        super().__init__(
            handle, agreement, plan.reads, plan.watched, fence=options.fence, queue=queue
        )
        plan.reads = DeviceSources()  # from now on the job has them, and frees them in the end
        self.plan: Plan | None = plan
        self.place = place
        self.before_commit, self.note = before_commit, note
        agreement.is_cancelled = handle.is_cancelled
        self.options = options
        self.rate_group = queue if rate_group is None else rate_group

    def write(self, pipeline: Pipeline) -> None:
        plan, place, stats = self.plan, self.place, self.handle.stats
        assert plan is not None
        for handle in place.awaited(self.previous, pipeline):
            while not handle.wait_done(CANCEL_LOOK_S):
                self.agreement.raise_if_ended()
        self.agreement.raise_if_ended()
        pacing, rates = place.pacing(self.options.pacing), pipeline.rates
        pace = Pace(
            pacing,
            self.agreement,
            rates,
            self.rate_group,
            stats,
            whole=plan.whole,
            raise_if_ended=self.life.raise_if_ended,
        )
        outputs = plan.lay_out(pace)
        nbytes = sum(output.image.nbytes for output in outputs)
        self.moving.callback(self.handle.mark_writing, None)
        # No file exists yet, so copies do not wait for a metadata server or another rank.
        fetch = self._stage(pipeline, plan, outputs)
        self.handle.mark_writing(partial(_progress, [*outputs]))
        place.begin()
        self.life.placed()
        place = self.place = place.chosen(outputs, pace)
        plan.go_to(place)
        plan.agree(pace, nbytes)
        place.open(outputs, pace)
        stats.nbytes = sum(output.nbytes for output in outputs)
        pace.begin(nbytes)
        stats.opened_s = self.handle.elapsed_s()
        opened = [output for output in outputs if output.file.is_open]
        # All files begin before anything waits for copies: with an allowance of one block, the
        # blocks of one file must be written before those of the next file can be copied.
        for output in opened:
            output.file.begin(output.begin, pace)
        pace.end(*(output.file.transfer for output in opened))
        # Small files are copied first, and synced while the others are copied and written.
        for output in filter(_is_small, opened):
            self.life.wait_for(output.file.transfer)
            self._complete(output)
        self.life.wait_copied()
        fetch.fill()
        self._check_numbers(outputs)
        plan.compare()
        # The last files come first: they are synced while others are being written.
        for output in filterfalse(_is_small, reversed(opened)):
            self._complete(output)
        for output in outputs:
            transfer = output.file.transfer
            transfer.count_writes(stats)
            nbytes_max = transfer.staged_bytes_max()
            stats.staged_bytes_max = max(stats.staged_bytes_max, nbytes_max)
        stats.synced_s = self.handle.elapsed_s()
        self._ask(outputs)
        self.conclude(plan.record(), plan.publish)

    def _stage(self, pipeline: Pipeline, plan: Plan, outputs: Sequence[Output]) -> MemoryCopy:
        """Begins to copy everything: the bytes of the files, and the samples of the plan."""
        staging, options = pipeline.staging, self.options
        allowance = staging.allowance(options.limit_bytes)
        # With the step fence, training continues during the copies: leave it one CPU.
        stagers = max(1, stager_count() - (self.fence == "step"))
        samples, path = plan.samples(), self.handle.path
        fetch = MemoryCopy(staging, pipeline.storage, samples, path, allowance, self.reads)
        self.life.transfers.append(self.moving.enter_context(fetch).transfer)
        queue = self.reads.ranges[0].queue if self.reads.ranges else None
        direct, why = staging.gds.way(plan.way or options.staging, queue)
        if direct is None and why:
            self.handle.stats.staging_why = why
        blocks = 1
        for output in sorted(outputs, key=_is_small, reverse=True):
            slot = None if direct else self.place.slot(output)
            blocks += 0 if slot else block_count(output.image.nbytes, BLOCK_BYTES)
            is_small = output.is_small
            output.file = ImageFile(
                pipeline,
                output.image,
                output.path,
                options,
                allowance,
                self.agreement.timeout_s,
                1 if is_small else stagers,
                self.reads,
                None if is_small else direct,
                None if is_small else self.handle.stats,
                None if is_small else slot,
            )
            self.life.transfers.append(self.moving.enter_context(output.file).transfer)
        self.staging_nbytes = min(allowance.blocks, blocks) * BLOCK_BYTES
        return fetch

    def _complete(self, output: Output) -> None:
        """Completes a file on the disk after its bytes have been copied."""
        output.fill_in()
        output.file.wait_written()
        self.handle.stats.written_s = self.handle.elapsed_s()
        output.end()

    def _check_numbers(self, outputs: Sequence[Output]) -> None:
        """Refuses the commit if staged numbers that must be finite are not."""
        faults = [
            (name, count)
            for output in outputs
            for name, count in zip(output.names, output.file.transfer.non_finite(), strict=True)
            if count
        ]
        if faults:
            name, count = faults[0]
            more = f", and {len(faults) - 1} more tensors have such elements" if faults[1:] else ""
            raise CheckpointError(
                f"check_finite refused the save to {self.handle.path!r}: {name!r} has elements "
                f"that are infinite or not a number ({count} on rank {self.agreement.rank}){more}; "
                "nothing was committed"
            )

    def _ask(self, outputs: Sequence[Output]) -> None:
        """Calls the caller's before_commit, which may refuse the commit by raising an exception."""
        if self.before_commit is None:
            return
        crcs = [crc for output in outputs for crc in output.file.transfer.block_crcs()]
        digest = hashlib.sha256(b"".join(crc.to_bytes(4, "little") for crc in crcs)).hexdigest()
        try:
            with self.handle.deciding():
                answer = self.before_commit(self.handle.stats, digest)
            if inspect.isawaitable(answer):
                raise TypeError(
                    f"it returned a {type(answer).__name__}, which would never be awaited: pass a "
                    "plain function"
                )
        except BaseException as error:  # a SystemExit is also only a refusal here
            raise CheckpointError(
                f"before_commit refused the save to {self.handle.path!r} with "
                f"{type(error).__name__}: {error}; nothing was committed"
            ) from error

    def commit(self, pipeline: Pipeline) -> None:
        try:
            super().commit(pipeline)
            self.place.after_commit(self, pipeline)
        except BaseException as error:
            self.place.fail(error)
            raise
        finally:
            self.place.close()

    def give_up(self, error: BaseException) -> BaseException:
        error = super().give_up(error)
        self.place.fail(error)
        return error

    def wait_turn(self) -> None:
        self.place.wait_turn(self.previous)

    def follow(self) -> None:
        self.place.follow(self.previous)

    def abandon(self, storage: Storage) -> None:
        self.place.abandon()

    def forget(self) -> None:
        assert self.plan is not None
        self.plan.forget()

    def release(self) -> None:
        if self.plan is not None:
            self.plan.release()

    def end(self, pipeline: Pipeline) -> None:
        self.plan = None
        failure = self.handle.failure()
        super().end(pipeline)
        if self.note is not None:
            self.note(self.handle)
        self.place.end(pipeline, failure)


def _is_small(output: Output) -> bool:
    return output.is_small


def _progress(outputs: Sequence[Output]) -> Progress:
    transfers = [output.file.transfer for output in outputs]
    return Progress(
        sum(transfer.nbytes_written() for transfer in transfers),
        sum(transfer.nbytes for transfer in transfers),
    )
