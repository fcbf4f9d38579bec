"""Plan, Place and Output: the interfaces of Save to the kinds of saves.

A Plan decides which files one rank writes, as Outputs; a Place decides where they become visible.
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
    """The place where a save becomes visible. In this base class most methods do nothing.

    Each Place also has methods for its Plan: one creates the files of Outputs; Plan.publish() calls
    publish() on the first rank when every file is complete. publish() gives the files their names
    in one atomic operation.

    Attributes:
        directory: the directory of the files.
    """

    directory: str

    def awaited(self, previous: Sequence[InnerHandle], pipeline: Pipeline) -> Sequence[InnerHandle]:
        """Returns the saves that must end before this one may begin to stage.

        Args:
            previous: saves in flight to the same place that were begun before this one.
            pipeline: the pipeline that runs the save.
        """
        return ()

    def pacing(self, asked: Pacing) -> Pacing:
        """Returns the pacing that this place needs, given the caller's pacing."""
        return asked

    def slot(self, output: Output) -> Slot | None:
        """Returns a recycled file of this place to stage an output in, if there is one."""
        return None

    def begin(self) -> None:
        """Creates the directory of the files. The fence opens only after this call, so that several
        saves of one caller create their directories in order.
        """

    def chosen(self, outputs: Sequence[Output], pace: Pace) -> Place:
        """Returns the final place of the save, before a byte is written: this one or another one.
        If it is another place, that place has already begun, and this one has removed all of its
        files. All ranks choose the same place.
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
        """Does the work of the other ranks while the first one publishes."""

    def after_commit(self, save: Job, pipeline: Pipeline) -> None:
        """Runs after the first commit; here a tier drains the step to the root."""

    def abandon(self) -> None:
        """Removes everything that this rank has made for a failed save."""

    def fail(self, error: BaseException) -> None:
        """Receives the save's error, after abandon()."""

    def close(self) -> None:
        """Closes all open files after the save has been committed or has failed."""

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        """Frees replaced files, after the result of the save is set."""


class Output:
    """One file that this rank writes, or this rank's part of a file.

    Attributes:
        image: the bytes that this rank writes; their staging begins before the file exists.
        path: the file's path, for messages.
        names: the names of the tensors in the runs of image.numbers, if there are any.
        is_small: whether the file is too small to benefit from several threads or GPUDirect. Small
            files are copied first, and completed while the other files are still being copied.
        slot_label: the file's name, by which a slot in memory is chosen for the image; "": the
            image is not staged in a slot.
        file: writes the image to the disk; set when the image is staged.
        begin: the offset of the body in the file; valid after the file is open.
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
        """The number of bytes that this rank writes; valid after the file is open."""
        return self.image.nbytes

    def open(self) -> None:
        """Creates the file, or opens another rank's file; does nothing without bytes to write."""
        raise NotImplementedError

    def fill_in(self) -> None:
        """Writes the parts of the file that depend on checksums, after the image's copy."""
        raise NotImplementedError

    def end(self) -> None:
        """Waits until the file is complete, and closes it unless the commit needs it open."""
        raise NotImplementedError


class WholeFile(Output):
    """A file that one rank writes alone.

    Args:
        image, path: see Output.
        make, purpose: see ImageFile.make().

    Attributes:
        tail: the image's tail; set when it is written.
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
        self.file.close()  # some file systems cannot rename a directory with an open file


class Plan:
    """The files that one rank writes in a save, and the facts that ranks compare and exchange.

    Args:
        reads: the memory of the state on devices.
        watched: the tensors that must not change before they have been copied.

    Attributes:
        way: "host" or "gds"; overrides fastckpt.save's `staging` unless it is None.
        whole: whether each block is written at once, even if the save is paced.
    """

    way: str | None = None
    whole = False

    def __init__(self, reads: DeviceSources, watched: Sequence[WatchedTensors]) -> None:
        self.reads = reads
        self.watched = watched

    def lay_out(self, pace: Pace) -> Sequence[Output]:
        """Returns the files that this rank writes; files to sync early come last."""
        raise NotImplementedError

    def samples(self) -> list[tuple[int, bytearray]]:
        """Returns additional ranges of memory to copy: addresses and target buffers."""
        return []

    def go_to(self, place: Place) -> None:
        """Sets the final place of the save."""

    def agree(self, pace: Pace, nbytes: int) -> None:
        """Agrees with the other ranks on the place of the files; this rank writes `nbytes`."""
        if pace.meets:
            pace.meet(nbytes)

    def compare(self) -> None:
        """Raises RanksDisagree if values that ranks have in common differ."""

    def record(self) -> bytes:
        """Returns the record for the first rank, after all files of this rank are complete."""
        return b""

    def publish(self, records: list[bytes]) -> None:
        """Commits, on the first rank, with the records of all ranks."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drops references to the state; called once, after everything has been copied."""
        raise NotImplementedError

    def release(self) -> None:
        """Drops every reference to the saved state."""
