"""A save of one rank, from the state to the commit, whatever it writes and wherever that goes.

A Plan says what this rank writes, as Outputs, and what ranks compare; a Place says where it becomes
visible. This module is the order of the stages, told once. What would need a branch here needs a
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
        path: of the file, for messages.
        is_small: one thread copies it, and GPUDirect would not be worth it.
        file: takes it to the disk; set when it is staged.
        begin: where in the file the body goes; known when the file is open.
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
        """Makes the file, or opens the one that another rank has made; or neither, where nothing
        is written.
        """
        raise NotImplementedError

    def fill_in(self) -> None:
        """Writes what depends on checksums; called when everything was copied."""
        raise NotImplementedError

    def end(self) -> None:
        """Waits until the file has arrived, makes what stands beside it, and closes it, unless it
        is to be open when it becomes visible.
        """
        raise NotImplementedError


class WholeFile(Output):
    """A file that one rank writes all of.

    Args:
        image: of the file.
        path: of the file.
        make: makes it; see ImageFile.make().
        purpose: what it is for.

    Attributes:
        tail: what the image ends with, once that is written.
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
        reads: what of it lies on devices.
        watched: what must not change before it was copied.

    Attributes:
        way: "host", "gds" or "auto", as fastckpt.save's `staging`; set by a plan that cannot go
            any way.
        whole: blocks are written whole, whatever the pace.
    """

    way: str | None = None
    whole = False

    def __init__(self, reads: Reads, watched: Sequence[Watched]) -> None:
        self.reads = reads
        self.watched = watched

    def lay_out(self, pace: Pace) -> Sequence[Output]:
        """The files that this rank writes. Those that are best synced early come last."""
        raise NotImplementedError

    def samples(self) -> list[tuple[int, bytearray]]:
        """Memory that is copied beside the files: addresses, and what receives the bytes."""
        return []

    def agree(self, pace: Pace, nbytes: int) -> None:
        """Finds out from other ranks where the files go.

        Args:
            pace: of this save.
            nbytes: that this rank is about to write.
        """
        if pace.meets:
            pace.meet(nbytes)

    def compare(self) -> None:
        """Makes sure that ranks hold the same of what they hold in common.

        Raises:
            RanksDisagree: they do not.
        """

    def record(self) -> bytes:
        """Returns what this rank tells the first one, when all of its files have arrived."""
        return b""

    def publish(self, records: list[bytes]) -> None:
        """THE commit, on the first rank, with the records of all."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drops references to what was copied; called once, when all was."""
        raise NotImplementedError

    def release(self) -> None:
        """Drops every reference to what was saved."""

    def committed(self) -> None:
        """Called when the caller has been told that the save was committed."""


class Place:
    """A place is where a save becomes visible. As it is here, nothing has to be made or removed.

    Attributes:
        directory: that the files go to.
    """

    directory: str

    def admit(self, previous: Sequence[SaveHandle], pipeline: Pipeline) -> None:
        """Waits until this save may begin to stage.

        Args:
            previous: saves in flight that were begun before this one, to the same place.
            pipeline: of the save.
        """

    def pacing(self, asked: Pacing) -> Pacing:
        """Returns how writing to this place is to be limited."""
        return asked

    def begin(self) -> None:
        """Makes what the files go into. A caller that waits at its fence is let go after this, so
        what its saves make is in their order.
        """

    def open(self, outputs: Sequence[Output], pace: Pace) -> None:
        """Opens all files."""
        for output in outputs:
            output.open()

    def wait_turn(self, previous: Sequence[SaveHandle]) -> None:
        """Waits, on the first rank, until it may publish: when those before have, or failed."""
        for handle in previous:
            handle.wait_done()

    def follow(self, previous: Sequence[SaveHandle]) -> None:
        """Does what is the other ranks' to do while the first one publishes."""

    def go_on(self, save: Save, pipeline: Pipeline) -> None:
        """Does what is left between this commit and the one that the caller waits for."""

    def abandon(self) -> None:
        """Removes what this rank has made for a save that failed."""

    def fail(self, error: BaseException) -> None:
        """Hears of the failure, after abandon()."""

    def close(self) -> None:
        """Lets go of what was open; the save has been committed or has failed."""

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        """Does what is left when the caller has been told: frees what the save has replaced."""


class Save(Job):
    """One save. Each rank runs its own, for the same place.

    Args:
        handle, agreement, fence, lane: as Job's.
        plan: what this rank writes.
        place: where it becomes visible.
        options: how it is written.
    """

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
        plan.reads = Reads()  # the job's from now on, which lets go of it in the end
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
        # A failure is told before the files are closed and removed.
        with ExitStack() as moving, self._telling():
            fetch = self._stage(pipeline, outputs, moving)
            place.begin()
            self.copying.watch()  # from here on the caller may be let go at any time
            plan.agree(pace, nbytes)
            place.open(outputs, pace)
            stats.nbytes = sum(output.nbytes for output in outputs)
            pace.begin(nbytes)
            opened = [output for output in outputs if output.file.is_open]
            # Every file, before anything waits for copies: with an allowance of one block, the
            # blocks of one file have to be written for those of the next to be copied.
            for output in opened:
                output.file.begin(output.begin, pace)
            pace.end(*(output.file.transfer for output in opened))
            self.copying.wait()
            fetch.fill()
            plan.compare()
            # The last ones first: they are small, and synced while the others are being written.
            for output in reversed(opened):
                output.fill_in()
                output.file.wait_written()
                stats.written_s = self.handle.elapsed_s()
                output.end()
            held = [output.file.transfer.staged_bytes_max() for output in outputs]
            stats.staged_bytes_max = max(held, default=0)
            self.conclude(plan.record(), plan.publish)

    def _stage(self, pipeline: Pipeline, outputs: Sequence[Output], moving: ExitStack) -> Fetch:
        """Begins to copy everything: the files' bytes, and samples beside them."""
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
        """Tells of a failure at once: other ranks may be about to open what this one made, and
        would report what they no longer find, or find another file by its number.
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
