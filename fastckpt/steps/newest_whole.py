"""The choice of the step to restore: the newest that is whole on every rank, by common decision.

The module orders the candidates, decides what counts as damage, and tells what was wrong with those
that were skipped. It must not know what is read of a step.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    PeerFailed,
    StorageError,
)
from fastckpt.formats.manifest import Manifest
from fastckpt.ranks.round import Round
from fastckpt.saving.pipeline import Pipeline
from fastckpt.steps.copies import StepCopies
from fastckpt.steps.load import StepReader
from fastckpt.steps.no_steps import is_export, warn_once, what_is_there
from fastckpt.steps.root import Steps, in_order
from fastckpt.storage.file_system import persistently
from fastckpt.storage.vanishing import Vanished, listed_anew

log = logging.getLogger("fastckpt")

T = TypeVar("T")
# Returns directories with copies of a step's files, and enters contexts that keep them there.
Near = Callable[[Manifest, ExitStack], list[str]]

_REMOVED = "removed"  # the verdict on a step that is gone; others say what is wrong with it
_TOLD = (CorruptCheckpoint, IncompatibleCheckpoint, CheckpointError)


def first_whole(
    agreement: Round,
    current: Pipeline,
    shelves: Sequence[Steps],
    step: int | None,
    read: Callable[[StepReader], T],
    near: Near | None = None,
    required: bool = False,
) -> tuple[int, T] | None:
    """Reads the newest step in which no rank meets damage; all ranks call this together.

    A step that a rank cannot read, however often it tries, may be whole. So it is an error: no
    older step is read in its place, and retention leaves it alone.

    Args:
        agreement: a round for this restore alone.
        current: the pipeline that reads; it has no save to this root in flight.
        shelves: the root, and other directories of steps that every rank sees.
        step: the step to read. None: the one committed last, or if that is damaged the one before.
        read: reads all that this rank needs of a step.
        near: names directories with copies of some of a step's files, which are preferred.
        required: raise if there is no step.

    Returns:
        The step and what `read` returned; None if no step was committed and `step` is None.

    Raises:
        CorruptCheckpoint: no step is whole. IncompatibleCheckpoint: a newer fastckpt wrote the
            step, or it does not fit the state. CheckpointError: there is no such step, or none at
            all. StorageError: a step cannot be read. PeerFailed: another rank failed.
    """
    problems: list[str] = []
    damaged: set[tuple[int, str]] = set()
    listings, numbers = itertools.count(), itertools.count(1)
    was_removed = False

    def look() -> tuple[int, T] | None:
        nonlocal was_removed
        # List again after damage: a step that was committed meanwhile may be whole.
        while True:
            is_error = required and not was_removed
            listed = _candidates(agreement, shelves, step, next(listings), is_error)
            places = [place for place in listed if place not in damaged]
            if not places:
                return None
            for place in places:
                with ExitStack() as holding:  # this rank holds the step until all have read it
                    trial = _Trial(current, shelves[place[0]], place[1], near, holding)
                    verdict, found = trial.outcome(agreement, next(numbers), read, problems)
                if not verdict:
                    return found
                if verdict == _REMOVED:  # so a newer one was committed: list again
                    was_removed = True
                    raise Vanished(trial.path)
                damaged.add(place)
                problems.append(verdict)
                if step is None:
                    log.warning("skipping %s: %s", trial.path, verdict)

    found = listed_anew(look)
    if found is None and problems:
        which = f"step {step}" if step is not None else "no step"
        state = "damaged" if step is not None else "whole"
        raise CorruptCheckpoint(
            f"{which} under {shelves[0].root!r} is {state}: {'; '.join(problems[:3])}; a state "
            "that was being restored may have been partly overwritten"
        )
    return found


class _Trial:
    """One attempt to read one step, on this rank.

    Args:
        current, near: as first_whole's.
        steps, name: the step's directory.
        holding: keeps the step from being removed until it is closed.
    """

    def __init__(
        self, current: Pipeline, steps: Steps, name: str, near: Near | None, holding: ExitStack
    ) -> None:
        self._current, self._steps, self._name = current, steps, name
        self._near, self._holding = near, holding
        self.path = steps.path(name)

    def outcome(
        self,
        agreement: Round,
        number: int,
        read: Callable[[StepReader], T],
        problems: Sequence[str],
    ) -> tuple[str, tuple[int, T] | None]:
        """Reads the step. Returns the common verdict, which is "" if it is whole on all ranks, and
        the step's number with what was read here, or None if it is damaged here.

        Args:
            number: the number of this attempt, the same on all ranks.
            problems: the verdicts on newer steps.

        Raises:
            StorageError: this rank cannot read it. PeerFailed: another one cannot.
            IncompatibleCheckpoint: it does not fit the state.
        """
        try:
            problem, found = self._tried(read)
            verdict = _verdict(agreement, number, problem)
        except IncompatibleCheckpoint as error:
            if not problems:
                raise
            raise IncompatibleCheckpoint(
                f"{error}; a newer step was damaged, and may have been partly read into "
                f"the state: {problems[-1]}"
            ) from None
        except (StorageError, PeerFailed, MemoryError):
            self._steps.known(self._name).is_unread = True
            raise
        if verdict != _REMOVED:
            self._steps.known(self._name).note_read(is_whole=not verdict)
        return verdict, found

    def _tried(self, read: Callable[[StepReader], T]) -> tuple[str, tuple[int, T] | None]:
        """Returns what is wrong with the step on this rank, or "", its number and what was read."""
        steps, name = self._steps, self._name
        storage, staging = self._current.storage, self._current.staging
        manifest: Manifest | None = None
        try:
            self._holding.enter_context(steps.hold(name))
            manifest = persistently(lambda: steps.read(name), self.path)
            nearer = [] if self._near is None else self._near(manifest, self._holding)
            copies = StepCopies(storage, staging, [*nearer, self.path])
            reader = StepReader(staging, self.path, manifest, copies)
            return "", (manifest.step, read(reader))
        except Vanished:
            return _REMOVED, None
        except CorruptCheckpoint as error:
            return str(error) if self._is_there(manifest) else _REMOVED, None
        except StorageError as error:
            detail = f"{error.detail}; " if error.detail else ""
            detail += "the step may be whole, so none before it was restored: ask for one by its "
            detail += "number if this one is lost"
            raise StorageError(
                error.op, error.path, error.errno or errno.EIO, error.offset, detail
            ) from error

    def _is_there(self, manifest: Manifest | None) -> bool:
        """Returns whether the step is still the same. On file systems whose locks other hosts do
        not see it may be removed while it is read, which looks like damage.
        """
        if manifest is None:
            return self._steps.may_be_committed(self._name)
        try:
            return self._steps.read(self._name).nonce == manifest.nonce
        except Vanished:
            return False
        except CheckpointError:
            return True


def _candidates(
    agreement: Round, shelves: Sequence[Steps], step: int | None, listing: int, required: bool
) -> list[tuple[int, str]]:
    """Returns the candidates of the first rank; every rank raises the error that it met."""
    key = f"candidates {listing}"
    if agreement.rank == 0:
        try:
            told: list[Any] = [None, candidates(shelves, step, required, warn=listing == 0)]
        except StorageError:  # the others hear of it by the failure of the round
            raise
        except CheckpointError as error:
            told = [type(error).__name__, str(error)]
        agreement.put(key, json.dumps(told).encode())
    kind_name, content = json.loads(agreement.get(key))
    if kind_name is None:
        return [(number, name) for number, name in content]
    raise next(kind for kind in _TOLD if kind.__name__ == kind_name)(content)


def _verdict(agreement: Round, number: int, problem: str) -> str:
    """Returns what the first rank that met a problem says of a step; "" if there is none.

    If a rank finds the step gone, that is the verdict: damage on the others may mean the same.
    """
    agreement.put(f"tried {number}", problem.encode(errors="replace"))
    if agreement.rank == 0:
        answers = agreement.gather(f"tried {number}")
        told = next((f"rank {r}: {a.decode()}" for r, a in enumerate(answers) if a), "")
        told = _REMOVED if _REMOVED.encode() in answers else told
        agreement.put(f"verdict {number}", told.encode())
    return agreement.get(f"verdict {number}").decode()


def candidates(
    shelves: Sequence[Steps], step: int | None, required: bool = False, warn: bool = True
) -> list[tuple[int, str]]:
    """Returns the directories to try, the best first, each after the number of its shelf; the first
    rank calls this for all. Raises as first_whole().

    Args:
        shelves, step, required: as first_whole's.
        warn: log which directories are no steps, or that there is none.
    """
    steps = shelves[0]
    found, faults = steps.survey(step)
    shelf_of = {item.manifest.nonce: 0 for item in found}
    for number, other in enumerate(shelves[1:], 1):
        for item in other.survey_of_copy():
            if shelf_of.setdefault(item.manifest.nonce, number) == number:
                found.append(item)
    found.sort(key=in_order, reverse=True)
    if step is not None:
        chosen = [item for item in found if item.manifest.step == operator.index(step)]
        if not chosen:
            known = sorted({item.manifest.step for item in found})
            raise CheckpointError(
                f"{steps.root!r} holds no committed step {step}: there are {known[-10:]}"
                + (f"; {faults[0].error}" if faults else f"; {what_is_there(steps)}" * (not known))
            )
        return [(shelf_of[item.manifest.nonce], item.name) for item in chosen[:1]]
    last = found[0].manifest.step if found else -1
    for fault in faults:
        if isinstance(fault.error, IncompatibleCheckpoint) and fault.step > last:
            known = sorted({item.manifest.step for item in found})
            raise IncompatibleCheckpoint(
                f"{fault.error}" + (f", or ask for one of the steps {known[-10:]}" * bool(known))
            )
        if warn:
            log.warning("skipping a step: %s", fault.error)
    for name in persistently(steps.incomplete, steps.root) if warn else ():
        # A drain writes it, and it is read from the local tier; or it is no save of a step.
        if steps.known(name).is_begun or is_export(steps, name):
            continue
        log.warning("skipping %s: its save was not committed", steps.path(name))
    if faults and not found:
        raise CorruptCheckpoint(f"no step under {steps.root!r} is whole: {faults[0].error}")
    if not found:
        if required:
            raise CheckpointError(
                f"{steps.root!r} holds no committed step: {what_is_there(steps)}; nothing was "
                "restored"
            )
        if warn:
            warn_once(steps)
    return [(shelf_of[item.manifest.nonce], item.name) for item in found]
