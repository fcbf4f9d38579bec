"""A Place says where a save becomes visible: the names, and what is left under them of a failure.

Responsible for what Save asks of any of them. It must not know what the files hold. CONTRIBUTING.md
has the steps to add one.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastckpt.arguments.options import Pacing
from fastckpt.engine.landing import Landing
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Job, Pipeline
from fastckpt.saving.plan import Output


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

    def landing(self, output: Output) -> Landing | None:
        """Returns a file among those of this place to stage an output in, if there is one."""
        return None

    def begin(self) -> None:
        """Makes what the files go into. The fence opens only after this, so that several saves of
        one caller make theirs in order.
        """

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

    def go_on(self, save: Job, pipeline: Pipeline) -> None:
        """Goes on from this commit to the one that the caller waits for, if that is another."""

    def abandon(self) -> None:
        """Removes what this rank has made for a save that failed."""

    def fail(self, error: BaseException) -> None:
        """Learns of the failure, after abandon()."""

    def close(self) -> None:
        """Closes what is still open; the save has been committed or has failed."""

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        """Frees what the save has replaced, after the caller has been told the result."""
