"""The choice of the step to restore: all ranks agree on the newest step that is intact on every
rank.

The module orders the candidates, defines damage, and reports why steps were skipped.
"""

from __future__ import annotations

import errno
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol, TypeVar

from fastckpt.arguments.names import listed
from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    PeerFailed,
    StorageError,
    Vanished,
)
from fastckpt.formats.manifest import Manifest
from fastckpt.formats.step_names import step_name
from fastckpt.ranks.round import Round
from fastckpt.ranks.search import COMING, GONE, Candidate, Search, Trial
from fastckpt.saving.pipeline import Pipeline
from fastckpt.steps.copies import Fetch, StepCopies
from fastckpt.steps.load import StepReader, base_beside
from fastckpt.steps.no_steps import (
    holds_export,
    no_directories,
    no_such_step,
    warn_once,
    what_is_there,
)
from fastckpt.steps.store import BEGUN, DONE, Committed, StepStore, in_order
from fastckpt.storage.file_system import OWN_SHORTAGES, persistently
from fastckpt.storage.vanishing import listed_anew

log = logging.getLogger("fastckpt")

T = TypeVar("T")
# Returns directories with copies of a step's files, and a function that fetches more files into the
# first of them. It enters contexts that keep the directories from being removed.
Near = Callable[[Manifest, ExitStack], tuple[list[str], Fetch | None]]
_APART = -1  # the shelf number of steps that are on no shelf


class Apart(NamedTuple):
    """A committed step that some ranks may be unable to read.

    Attributes:
        step, sequence, nonce: those of its manifest.
        why: the reason why a rank cannot read the step.
    """

    step: int
    sequence: int
    nonce: str
    why: str


class Elsewhere(Protocol):
    """The committed steps that are on no shelf, or that some ranks cannot read completely there.
    All ranks have the same list.

    Attributes:
        apart: the steps. A step that is also on a shelf is read from there.
    """

    apart: list[Apart]

    def look_again(self) -> None:
        """Lists these steps and the shelves again on all ranks, because a step has vanished."""

    def is_coming(self, nonce: str) -> bool:
        """Returns whether a step is being copied to the first shelf."""

    def await_coming(self, nonce: str) -> None:
        """Waits once until the copy of the step is complete; raises the error if the copy
        failed.
        """


def first_whole(
    agreement: Round,
    current: Pipeline,
    shelves: Sequence[StepStore],
    step: int | None,
    read: Callable[[StepReader], T],
    near: Near | None = None,
    required: bool = False,
    elsewhere: Elsewhere | None = None,
) -> tuple[int, T] | None:
    """Reads the newest step in which no rank finds damage; all ranks call this together.

    If a rank cannot read a step in several attempts, the step may still be intact. In that case an
    error is raised, no older step is read instead, and retention keeps the step. If the step is
    being copied to the root, the function waits for the copy and reads it from the root.

    Args:
        agreement: a round for this restore alone.
        current: the pipeline that reads; no save of it to this root is in flight.
        shelves: the root, and other directories of steps that every rank sees.
        step: the step to read. None: the step committed last; if it is damaged, the step before it;
            thinned steps after all others.
        read: reads everything that this rank needs from a step.
        near: returns directories with copies of a step's files, which are preferred.
        required: raise an error if there is no step.
        elsewhere: the committed steps that some ranks cannot read on the shelves.

    Returns:
        The step and the result of `read`; None if no step was committed and `step` is None.

    Raises:
        CorruptCheckpoint: no step is intact.
        IncompatibleCheckpoint: a newer fastckpt wrote the step, or the step does not fit the state.
        CheckpointError: there is no such step, or no step at all.
        StorageError: a step cannot be read.
        PeerFailed: another rank failed.
    """

    def listed() -> list[Candidate]:
        is_first = not (search.has_lost or search.damaged)
        apart = () if elsewhere is None else elsewhere.apart
        return candidates(shelves, step, required and not search.has_lost, is_first, apart)

    def trial_of(place: Candidate) -> Trial[tuple[int, T]]:
        number, name = place
        if elsewhere is not None and number == _APART:
            (item,) = (each for each in elsewhere.apart if each.nonce == name)
            return _ApartTrial(shelves[0].path(step_name(item.step)), item, elsewhere)
        damaged = search.damaged
        return _StepTrial(current, shelves[number], name, read, near, damaged, elsewhere)

    def look() -> tuple[int, T] | None:
        if search.has_lost and elsewhere is not None:
            elsewhere.look_again()
        return search.look()

    search: Search[tuple[int, T]] = Search(agreement, listed, trial_of, warns=step is None)
    result = listed_anew(look)
    if result is None and search.damaged:
        which = f"step {step}" if step is not None else "no step"
        state = "damaged" if step is not None else "intact"
        problems = "; ".join([*search.damaged.values()][:3])
        raise CorruptCheckpoint(
            f"{which} under {shelves[0].root!r} is {state}: {problems}; a state that was being "
            "restored may have been partly overwritten"
        )
    return result


class _StepTrial(Trial[tuple[int, T]]):
    """The trial of one step, which is held during the trial (see StepStore.hold)."""

    def __init__(
        self,
        current: Pipeline,
        steps: StepStore,
        name: str,
        read: Callable[[StepReader], T],
        near: Near | None,
        damaged: Mapping[Candidate, str],
        elsewhere: Elsewhere | None,
    ) -> None:
        super().__init__(steps.path(name), [self._tried], self._is_gone)
        self._current, self._steps, self._name = current, steps, name
        self._read, self._near, self._damaged = read, near, damaged
        self._elsewhere = elsewhere
        self._holding = ExitStack()
        self._manifest: Manifest | None = None

    def _tried(self) -> tuple[int, T]:
        steps, staging = self._steps, self._current.staging
        self._holding.enter_context(steps.hold(self._name))
        self._manifest = manifest = persistently(lambda: steps.read(self._name), self.path)
        near = self._near
        nearer, fetch = ([], None) if near is None else near(manifest, self._holding)
        copies = StepCopies(self._current.storage, staging, [*nearer, self.path], fetch=fetch)
        base = base_beside(self._current.storage, staging, steps, self._name, self._holding)
        return manifest.step, self._read(StepReader(staging, self.path, manifest, copies, base))

    def _is_gone(self) -> bool:
        """Returns whether the step was removed, replaced or thinned. On file systems where hosts do
        not see each other's locks, a removal during the read looks like damage.
        """
        if self._manifest is None:
            return not self._steps.may_be_committed(self._name)
        try:
            return self._steps.read(self._name) != self._manifest
        except Vanished:
            return True
        except CheckpointError:
            return False

    def is_coming(self) -> bool:
        manifest, elsewhere = self._manifest, self._elsewhere
        return (
            elsewhere is not None and manifest is not None and elsewhere.is_coming(manifest.nonce)
        )

    def await_coming(self) -> None:
        assert self._elsewhere is not None and self._manifest is not None
        self._elsewhere.await_coming(self._manifest.nonce)

    def end(self, error: BaseException | None) -> None:
        self._holding.close()
        verdicts, damaged = self._steps.verdicts, [*self._damaged.values()]
        manifest = self._manifest
        if error is None and self.verdict not in (GONE, COMING) and manifest is not None:
            item = Committed(self._name, manifest)
            verdicts.note_read(item, is_whole=not self.verdict)
        if isinstance(error, StorageError | PeerFailed | MemoryError):
            verdicts.unread.add(self._name if manifest is None else manifest.nonce)
        if isinstance(error, StorageError):
            raise _may_be_whole(error) from error
        notes = [f"a newer step is damaged: {damaged[-1]}"] if damaged else []
        if manifest is not None and manifest.kept is not None:
            notes.append(self._thinned(manifest.kept))
        if isinstance(error, IncompatibleCheckpoint) and notes:
            raise IncompatibleCheckpoint("; ".join([str(error), *notes])) from None

    def _thinned(self, kept: Sequence[str]) -> str:
        """Describes a step that keep_parts has thinned, and names the newest step that is whole."""
        damaged = self._steps.verdicts.damaged
        whole = [
            item.manifest.step
            for item in readable(self._steps)
            if item.manifest.kept is None and item.manifest.nonce not in damaged
        ]
        newest = (
            f"the newest whole step is step {whole[0]}: restore that one, or"
            if whole
            else ("and no step is whole:")
        )
        return (
            f"of this step only {listed(map(repr, kept))} was kept (see keep_parts), {newest} pass "
            f'only={kept[0] + "/*"!r} or missing="keep"'
        )


class _ApartTrial(Trial[Any]):
    """The trial of a step that is on no shelf: the trial waits for its copy, or fails."""

    def __init__(self, path: str, item: Apart, elsewhere: Elsewhere) -> None:
        super().__init__(path, [self._tried], lambda: False)
        self._item, self._elsewhere = item, elsewhere

    def _tried(self) -> None:
        detail = f"step {self._item.step} was committed on the nodes only: {self._item.why}"
        raise StorageError("read", self.path, errno.EREMOTE, detail=detail)

    def is_coming(self) -> bool:
        return self._elsewhere.is_coming(self._item.nonce)

    def await_coming(self) -> None:
        self._elsewhere.await_coming(self._item.nonce)

    def end(self, error: BaseException | None) -> None:
        if isinstance(error, StorageError):
            raise _may_be_whole(error) from error


def _may_be_whole(error: StorageError) -> StorageError:
    """Returns the error for an unreadable step, with advice."""
    detail = f"{error.detail}; " if error.detail else ""
    detail += "the step may be intact, so no earlier step was restored: if it is lost, restore "
    detail += "another step by its number"
    return StorageError(error.op, error.path, error.errno or errno.EIO, error.offset, detail)


def candidates(
    shelves: Sequence[StepStore],
    step: int | None,
    required: bool = False,
    warn: bool = True,
    apart: Sequence[Apart] = (),
) -> list[Candidate]:
    """Returns the directories to try, the best first, each with the number of its shelf. Only the
    first rank calls this. For errors see first_whole().

    Args:
        shelves, step, required: see first_whole().
        warn: log which directories are not steps, or that there are no steps.
        apart: further steps. A step that is also on a shelf is read from there.
    """
    steps = shelves[0]
    committed, faults = steps.survey(step)
    steps.note_seen(committed)
    shelf_of = {item.manifest.nonce: 0 for item in committed}
    for number, other in enumerate(shelves[1:], 1):
        for item in survey_of_copy(other):
            if shelf_of.setdefault(item.manifest.nonce, number) == number:
                committed.append(item)
    committed.sort(key=in_order, reverse=True)
    ordered = [(in_order(item), (shelf_of[item.manifest.nonce], item.name)) for item in committed]
    ordered += [
        ((item.sequence, item.step), (_APART, item.nonce))
        for item in apart
        if item.nonce not in shelf_of
    ]
    ordered.sort(reverse=True)
    if step is not None:
        chosen = [place for (_, number), place in ordered if number == operator.index(step)]
        if not chosen:
            numbers = [number for (_, number), _place in ordered]
            raise no_such_step(steps, operator.index(step), numbers, faults)
        return chosen[:1]
    last = committed[0].manifest.step if committed else -1
    for fault in faults:
        number = last + 1 if fault.step is None else fault.step
        if isinstance(fault.error, IncompatibleCheckpoint) and number > last:
            numbers = sorted({item.manifest.step for item in committed})
            raise IncompatibleCheckpoint(
                str(fault.error) + f", or restore one of the steps {numbers[-10:]}" * bool(numbers)
            )
        if warn:
            log.warning("skipping %s: %s", steps.path(fault.name), fault.error)
    for name in persistently(steps.incomplete, steps.root) if warn else ():
        if steps.attempts.get(name) in (BEGUN, DONE):  # a drain writes it or has written it by now
            continue
        if not holds_export(steps, name):
            log.warning("skipping %s: its save was not committed", steps.path(name))
    there = {item.name for item in committed} | {fault.name for fault in faults}
    for name in persistently(lambda: no_directories(steps, there), steps.root) if warn else ():
        log.warning("skipping %s: it is a link or a file, not a directory", steps.path(name))
    if faults and not ordered:
        raise CorruptCheckpoint(f"no step under {steps.root!r} is intact: {faults[0].error}")
    if not ordered:
        if required:
            raise CheckpointError(
                f"{steps.root!r} holds no committed step: {what_is_there(steps)}; nothing was "
                "restored"
            )
        if warn:
            warn_once(steps)
    # A job goes back to a whole step rather than to a newer one that was thinned.
    thinned = {
        (shelf_of[item.manifest.nonce], item.name)
        for item in committed
        if item.manifest.kept is not None
    }
    return sorted((place for _order, place in ordered), key=thinned.__contains__)


def survey_of_copy(steps: StepStore) -> list[Committed]:
    """Returns the committed steps of a directory that may be lost, like survey(). Steps that are
    damaged or cannot be read are left out, with a warning.

    Raises:
        StorageError: this process is out of descriptors or memory; the disk may be fine.
    """
    try:
        committed, faults = steps.survey()
        for fault in faults:
            log.warning("skipping a copy of a step: %s", fault.error)
        return committed
    except StorageError as error:
        if error.errno in OWN_SHORTAGES:
            raise
        log.warning("not all steps in %s can be read: %s", steps.root, error)
    return readable(steps)


def readable(steps: StepStore) -> list[Committed]:
    """Returns the committed steps that can be read now. If the root cannot be listed, logs a
    warning and returns an empty list.
    """
    try:
        return steps.committed()[0]
    except StorageError as error:
        log.warning("%s cannot be read: %s", steps.root, error)
        return []
