"""A Plan says what one rank writes of a save, as Outputs; each kind of save has its own.

Responsible for what Save asks of any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastckpt.arguments.options import Pacing
from fastckpt.engine.devices import DeviceSources
from fastckpt.engine.slot import Slot
from fastckpt.plan.image import Image
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.image_file import ImageFile, Make
from fastckpt.saving.mutation_check import WatchedTensors
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Job, Pipeline
from fastckpt.storage.lustre_layout import Purpose


class Place:
    """A place is where a save becomes visible. In this base class most methods do nothing.

    Each Place also has what its own Plan needs: a way to make the files that Outputs open, and a
    publish(), which Plan.publish() calls on the first rank when every file has arrived. publish()
    is the one atomic act that gives the files their names.

    Attributes:
        directory: the directory that the files go to.
    """

    directory: str

    def awaited(self, previous: Sequence[InnerHandle], pipeline: Pipeline) -> Sequence[InnerHandle]:
        """Returns the saves that have to end before this one may begin to stage.

        Args:
            previous: saves in flight to the same place that were begun before this one.
            pipeline: the pipeline that runs the save.
        """
        return ()

    def pacing(self, asked: Pacing) -> Pacing:
        """Returns the pacing that this place needs, given what the caller asked for."""
        return asked

    def slot(self, output: Output) -> Slot | None:
        """Returns a recycled file of this place to stage an output in, if there is one."""
        return None

    def begin(self) -> None:
        """Makes what the files go into. The fence opens only after this, so that several saves of
        one caller make theirs in order.
        """

    def chosen(self, outputs: Sequence[Output], pace: Pace) -> Place:
        """Returns where the save goes, before a byte is written: here, or to another place, which
        has begun, and of which this one has removed what it had made. All ranks choose the same.
        """
        return self

    def open(self, outputs: Sequence[Output], pace: Pace) -> None:
        """Opens the files of all outputs."""
        for output in outputs:
            output.open()

    def wait_turn(self, previous: Sequence[InnerHandle]) -> None:
        """Waits, on the first rank, until the saves before this one have published or failed."""
        for handle in previous:
            handle.wait_done()

    def follow(self, previous: Sequence[InnerHandle]) -> None:
        """Does the work that other ranks have while the first one publishes."""

    def after_commit(self, save: Job, pipeline: Pipeline) -> None:
        """Goes on from this commit to the one that the caller waits for, if that is another."""

    def abandon(self) -> None:
        """Removes what this rank has made for a save that failed."""

    def fail(self, error: BaseException) -> None:
        """Learns of the failure, after abandon()."""

    def close(self) -> None:
        """Closes what is still open; the save has been committed or has failed."""

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        """Frees what the save has replaced, after the caller has been told the result."""


class Output:
    """One file that this rank writes, or its part of one.

    Attributes:
        image: what this rank writes; its body is staged before there is a file.
        path: the file's path, for messages.
        names: of the tensors in the runs of image.numbers, if there are any.
        is_small: whether more threads or GPUDirect would not pay. Small files are copied first, and
            completed while the others are still copied.
        slot_label: the label of slots in memory that the image can be staged in, and the file's
            name; "": in none.
        file: brings the image to the disk; set when the image is staged.
        begin: the offset of the body in the file; known when the file is open.
    """

    is_small = False
    slot_label = ""
    file: ImageFile

    def __init__(self, image: Image, path: str) -> None:
        self.image = image
        self.path = path
        self.names: Sequence[str] = ()
        self.begin = 0

    @property
    def nbytes(self) -> int:
        """The bytes that this rank writes, once the file is open."""
        return self.image.nbytes

    def open(self) -> None:
        """Makes the file or opens another rank's; does neither if this rank writes nothing."""
        raise NotImplementedError

    def fill_in(self) -> None:
        """Writes what depends on checksums; called when the image has been copied."""
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
        way: "host" or "gds"; overrides fastckpt.save's `staging` unless it is None.
        whole: whether blocks are written whole, whatever the pace.
    """

    way: str | None = None
    whole = False

    def __init__(self, reads: DeviceSources, watched: Sequence[WatchedTensors]) -> None:
        self.reads = reads
        self.watched = watched

    def lay_out(self, pace: Pace) -> Sequence[Output]:
        """Returns the files that this rank writes; those that are best synced early come last."""
        raise NotImplementedError

    def samples(self) -> list[tuple[int, bytearray]]:
        """Returns memory to copy beside the files: addresses, and what receives the bytes."""
        return []

    def go_to(self, place: Place) -> None:
        """Learns where the save goes."""

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
