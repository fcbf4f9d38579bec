"""A save of one rank, from the state to the commit, whatever it writes and wherever that goes.

A Plan says what this rank writes, as Outputs, and what ranks compare; a Place says where it becomes
visible. This module tells the order of the stages, once. What would need a branch here needs a
method of Plan, Place or Output instead.
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

# Says no to a commit by an exception: before_commit's, of the statistics so far and the path.
Veto: TypeAlias = Callable[[SaveStats, str], object]


class Save(Job):
    """A save, as one rank runs it.

    Args:
        plan, place: which files it writes, and where they become visible.
        before_commit: as fastckpt.save's.
        rate_group: saves of one group share a drain_rate. None: those of the queue.
        note: called with the handle once the result has been told.
        handle, agreement, options, queue: as Job's.
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
        plan.reads = DeviceSources()  # the job has them from now on, and lets go of them in the end
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
        # No file exists yet, so copies wait for no metadata server and for no other rank.
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
        # blocks of one file have to be written before those of the next can be copied.
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
            held = transfer.staged_bytes_max()
            stats.staged_bytes_max = max(stats.staged_bytes_max, held)
        stats.synced_s = self.handle.elapsed_s()
        self._ask(outputs)
        self.conclude(plan.record(), plan.publish)

    def _stage(self, pipeline: Pipeline, plan: Plan, outputs: Sequence[Output]) -> MemoryCopy:
        """Begins to copy everything: the bytes of the files, and the samples beside them."""
        staging, options = pipeline.staging, self.options
        allowance = staging.allowance(options.limit_bytes)
        # With the step fence one CPU is left to the training that goes on meanwhile.
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
        """Brings a file that has been copied to the disk."""
        output.fill_in()
        output.file.wait_written()
        self.handle.stats.written_s = self.handle.elapsed_s()
        output.end()

    def _check_numbers(self, outputs: Sequence[Output]) -> None:
        """Refuses the commit if numbers that were to be finite are not, as they were staged."""
        found = [
            (name, count)
            for output in outputs
            for name, count in zip(output.names, output.file.transfer.non_finite(), strict=True)
            if count
        ]
        if found:
            name, count = found[0]
            more = f", and {len(found) - 1} more tensors have such elements" if found[1:] else ""
            raise CheckpointError(
                f"check_finite refused the save to {self.handle.path!r}: {name!r} has elements "
                f"that are infinite or not a number ({count} on rank {self.agreement.rank}){more}; "
                "nothing was committed"
            )

    def _ask(self, outputs: Sequence[Output]) -> None:
        """Lets the caller's before_commit look, which may refuse the commit by raising."""
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
        except BaseException as error:  # a SystemExit, too, is no more than a refusal here
            raise CheckpointError(
                f"before_commit refused the save to {self.handle.path!r} by "
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
