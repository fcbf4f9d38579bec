"""A save of one rank, from the state to the commit, whatever it writes and wherever that goes.

A Plan says what this rank writes, as Outputs, and what ranks compare; a Place says where it becomes
visible. This module tells the order of the stages, once. What would need a branch here needs a
method of Plan, Place or Output instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from fastckpt.engine.devices import Reads
from fastckpt.engine.gds_trial import Choice
from fastckpt.engine.staging import stager_count
from fastckpt.engine.transfer import Fetch
from fastckpt.handle import SaveHandle
from fastckpt.options import Pacing, WriteOptions
from fastckpt.plan.image import BLOCK_BYTES, Image, block_count
from fastckpt.ranks.round import Round
from fastckpt.saving.fence import Watched
from fastckpt.saving.image_file import ImageFile, Make
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Job, Pipeline
from fastckpt.storage.file_system import Storage
from fastckpt.storage.lustre_layout import Purpose


class Output:
    """One file that this rank writes, or its part of one.

    Attributes:
        image: what this rank writes; its body is staged before there is a file.
        path: the file's path, for messages.
        is_small: whether more threads or GPUDirect would not pay.
        file: brings the image to the disk; set when the image is staged.
        begin: the offset of the body in the file; known when the file is open.
    """

    is_small = False
    file: ImageFile

    def __init__(self, image: Image, path: str) -> None:
        self.image = image
        self.path = path
        self.begin = 0

    @property
    def nbytes(self) -> int:
        """The bytes that this rank writes, once the file is open."""
        return self.image.nbytes

    def open(self) -> None:
        """Makes the file or opens another rank's; does neither if this rank writes nothing."""
        raise NotImplementedError

    def fill_in(self) -> None:
        """Writes what depends on checksums; called when everything has been copied."""
        raise NotImplementedError

    def end(self) -> None:
        """Waits until the file has arrived, and closes it unless the commit needs it open."""
        raise NotImplementedError


class WholeFile(Output):
    """A file that one rank writes all of.

    Args:
        image, path: as the attributes of Output.
        make, purpose: as ImageFile.make()'s.

    Attributes:
        tail: the image's tail, once that is written.
    """

    def __init__(self, image: Image, path: str, make: Make, purpose: Purpose) -> None:
        super().__init__(image, path)
        self.tail = bytearray()
        self._make = make
        self._purpose = purpose

    def open(self) -> None:
        self.file.make(self._make, self._purpose)

    def fill_in(self) -> None:
        self.tail = self.file.complete()

    def end(self) -> None:
        self.file.end(self.image.nbytes)
        self.file.close()  # some file systems rename no directory in which a file is open


class Plan:
    """A plan says what one rank writes of a save, and what ranks compare and tell each other of it.

    Args:
        reads: the memory of the state that lies on devices.
        watched: the tensors that must not change before they have been copied.

    Attributes:
        way: "host", "gds" or "auto"; overrides fastckpt.save's `staging` unless it is None.
        whole: whether blocks are written whole, whatever the pace.
    """

    way: str | None = None
    whole = False

    def __init__(self, reads: Reads, watched: Sequence[Watched]) -> None:
        self.reads = reads
        self.watched = watched

    def lay_out(self, pace: Pace) -> Sequence[Output]:
        """Returns the files that this rank writes; those that are best synced early come last."""
        raise NotImplementedError

    def samples(self) -> list[tuple[int, bytearray]]:
        """Returns memory to copy beside the files: addresses, and what receives the bytes."""
        return []

    def agree(self, pace: Pace, nbytes: int) -> None:
        """Agrees with the other ranks on where the files go; this rank writes `nbytes`."""
        if pace.meets:
            pace.meet(nbytes)

    def compare(self) -> None:
        """Raises RanksDisagree unless ranks hold the same of what they hold in common."""

    def record(self) -> bytes:
        """Returns what this rank tells the first one when all of its files have arrived."""
        return b""

    def publish(self, records: list[bytes]) -> None:
        """Commits, on the first rank, with the records of all."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drops references to what was copied; called once, when everything has been."""
        raise NotImplementedError

    def release(self) -> None:
        """Drops every reference to what was saved."""

    def committed(self) -> None:
        """Learns that the save was committed, after the caller has been told."""


class Place:
    """A place is where a save becomes visible. In this base class most methods do nothing.

    Attributes:
        directory: the directory that the files go to.
    """

    directory: str

    def admit(self, previous: Sequence[SaveHandle], pipeline: Pipeline) -> None:
        """Waits until this save may begin to stage.

        Args:
            previous: saves in flight to the same place that were begun before this one.
            pipeline: the pipeline that runs the save.
        """

    def pacing(self, asked: Pacing) -> Pacing:
        """Returns the pacing that this place needs, given what the caller asked for."""
        return asked

    def begin(self) -> None:
        """Makes what the files go into. The fence opens only after this, so that several saves of
        one caller make theirs in order.
        """

    def open(self, outputs: Sequence[Output], pace: Pace) -> None:
        """Opens the files of all outputs."""
        for output in outputs:
            output.open()

    def wait_turn(self, previous: Sequence[SaveHandle]) -> None:
        """Waits, on the first rank, until the saves before this one have published or failed."""
        for handle in previous:
            handle.wait_done()

    def follow(self, previous: Sequence[SaveHandle]) -> None:
        """Does the work that other ranks have while the first one publishes."""

    def go_on(self, save: Save, pipeline: Pipeline) -> None:
        """Goes on from this commit to the one that the caller waits for, if that is another."""

    def abandon(self) -> None:
        """Removes what this rank has made for a save that failed."""

    def fail(self, error: BaseException) -> None:
        """Learns of the failure, after abandon()."""

    def close(self) -> None:
        """Closes what is still open; the save has been committed or has failed."""

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        """Frees what the save has replaced, after the caller has been told the result."""


class Save(Job):
    """A save, as one rank runs it. The files of `plan` become visible in `place`; rest as Job's."""

    def __init__(
        self,
        handle: SaveHandle,
        agreement: Round,
        plan: Plan,
        place: Place,
        options: WriteOptions,
        *,
        fence: str,
        lane: str,
    ) -> None:
        super().__init__(handle, agreement, plan.reads, plan.watched, fence=fence, lane=lane)
        plan.reads = Reads()  # the job has them from now on, and lets go of them in the end
        self.plan: Plan | None = plan
        self.place = place
        self.options = options

    def write(self, pipeline: Pipeline) -> None:
        plan, place, stats = self.plan, self.place, self.handle.stats
        assert plan is not None
        place.admit(self.previous, pipeline)
        pacing, rates = place.pacing(self.options.pacing), pipeline.rates
        pace = Pace(pacing, self.agreement, rates, self.lane, stats, whole=plan.whole)
        outputs = plan.lay_out(pace)
        nbytes = sum(output.image.nbytes for output in outputs)
        with ExitStack() as moving, self._telling():  # a failure is told before files are closed
            # No file exists yet, so copies wait for no metadata server and for no other rank.
            fetch = self._stage(pipeline, outputs, moving)
            place.begin()
            self.copying.watch()  # from here on the caller may be let go at any time
            plan.agree(pace, nbytes)
            place.open(outputs, pace)
            stats.nbytes = sum(output.nbytes for output in outputs)
            pace.begin(nbytes)
            opened = [output for output in outputs if output.file.is_open]
            # All files begin before anything waits for copies: with an allowance of one block, the
            # blocks of one file have to be written before those of the next can be copied.
            for output in opened:
                output.file.begin(output.begin, pace)
            pace.end(*(output.file.transfer for output in opened))
            self.copying.wait()
            fetch.fill()
            plan.compare()
            # The last files come first: they are small, and synced while others are being written.
            for output in reversed(opened):
                output.fill_in()
                output.file.wait_written()
                stats.written_s = self.handle.elapsed_s()
                output.end()
            held = [output.file.transfer.staged_bytes_max() for output in outputs]
            stats.staged_bytes_max = max(held, default=0)
            self.conclude(plan.record(), plan.publish)

    def _stage(self, pipeline: Pipeline, outputs: Sequence[Output], moving: ExitStack) -> Fetch:
        """Begins to copy everything: the bytes of the files, and the samples beside them."""
        plan, staging, options = self.plan, pipeline.staging, self.options
        assert plan is not None
        allowance = staging.allowance(options.limit_bytes)
        blocks = sum(block_count(output.image.nbytes, BLOCK_BYTES) for output in outputs)
        self.staging_nbytes = min(allowance.blocks, blocks + 1) * BLOCK_BYTES
        # With the step fence one CPU is left to the training that goes on meanwhile.
        stagers = max(1, stager_count() - (self.fence == "step"))
        samples, path = plan.samples(), self.handle.path
        fetch = Fetch(staging, pipeline.storage, samples, path, allowance, self.reads)
        self.copying.transfers.append(moving.enter_context(fetch).transfer)
        self.choice = Choice(pipeline.storage, staging, plan.way or options.staging, self.reads)
        direct = self.choice.direct(self.place.directory, self.handle.stats)
        for output in outputs:
            how = (
                (1, self.reads)
                if output.is_small
                else (stagers, self.reads, direct, self.handle.stats)
            )
            output.file = ImageFile(pipeline, output.image, output.path, options, allowance, *how)
            self.copying.transfers.append(moving.enter_context(output.file).transfer)
        return fetch

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tells other ranks of a failure while the files are still open: a rank that is about to
        open one would report that it is gone, or find another file under the same descriptor.
        """
        try:
            yield
        except BaseException as error:
            self.agreement.fail(error)
            raise

    def commit(self, pipeline: Pipeline) -> None:
        try:
            super().commit(pipeline)
            self.place.go_on(self, pipeline)
        except BaseException as error:
            self.place.fail(error)
            raise
        finally:
            self.place.close()

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
        plan, self.plan = self.plan, None
        failure = self.handle.failure()
        super().end(pipeline)
        if plan is not None and failure is None:
            plan.committed()
        self.place.end(pipeline, failure)
