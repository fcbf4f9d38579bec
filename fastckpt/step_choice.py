"""Which step is restored: the newest that is whole on every rank, decided by all of them together.

Responsible for the order in which steps are tried and for telling what was wrong with those that
were skipped. It must not know what is read of a step.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from fastckpt.agreement import Round
from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    StorageError,
)
from fastckpt.formats.manifest import Manifest
from fastckpt.pipeline import Pipeline
from fastckpt.step_copies import Copies
from fastckpt.step_load import StepReader
from fastckpt.steps import Committed, Steps, in_order

log = logging.getLogger("fastckpt")

T = TypeVar("T")
# Directories that hold copies of files of a step; what it enters keeps them.
Near = Callable[[Manifest, ExitStack], list[str]]

_LISTINGS_MAX = 3
_TOLD = (CorruptCheckpoint, IncompatibleCheckpoint, CheckpointError)


def first_whole(
    agreement: Round,
    current: Pipeline,
    shelves: Sequence[Steps],
    step: int | None,
    read: Callable[[StepReader], T],
    near: Near | None = None,
) -> tuple[int, T] | None:
    """What `read` makes of the newest step for which no rank meets damage; all ranks call it.

    Args:
        agreement: a round of its own.
        current: reads, and has no save to this root in flight.
        shelves: the root, and what else may hold steps that every rank sees.
        step: which; None: the one committed last, and if that is damaged the one before it.
        read: reads all that this rank needs of a step.
        near: tells directories with copies of some files of a step, which are read rather.

    Returns:
        The step and what `read` returned; None if no step was committed and `step` is None.

    Raises:
        CorruptCheckpoint: none is whole. IncompatibleCheckpoint: a newer fastckpt wrote what is
            there, or it does not fit. CheckpointError: there is no such step. PeerFailed.
    """
    problems: list[str] = []
    tried: set[tuple[int, str]] = set()
    for listing in range(_LISTINGS_MAX):
        # Again after a failure: where steps are removed, those that were listed may all be gone.
        places = [n for n in _candidates(agreement, shelves, step, listing) if n not in tried]
        if not places:
            break
        for place in places:
            tried.add(place)
            steps, name = shelves[place[0]], place[1]
            with ExitStack() as holding:  # until all have read it, the first rank above all
                try:
                    problem, found = _tried(current, steps, name, read, near, holding)
                except IncompatibleCheckpoint as error:
                    if not problems:
                        raise
                    raise IncompatibleCheckpoint(
                        f"{error}; a newer step was damaged, and may have been partly read into "
                        f"the state: {problems[-1]}"
                    ) from None
                verdict = _verdict(agreement, len(tried), problem)
            if not verdict:
                assert found is not None
                return found
            problems.append(verdict)
            steps.note_damaged(name)
            if step is None:
                log.warning("skipping %s: %s", steps.path(name), verdict)
    if problems:
        which = f"step {step}" if step is not None else "no step"
        state = "damaged" if step is not None else "whole"
        raise CorruptCheckpoint(
            f"{which} under {shelves[0].root!r} is {state}: {'; '.join(problems[:3])}; the state "
            "may have been partly overwritten"
        )
    return None


def _candidates(
    agreement: Round, shelves: Sequence[Steps], step: int | None, listing: int
) -> list[tuple[int, str]]:
    """What the first rank lists; every rank raises what it raised."""
    key = f"candidates {listing}"
    if agreement.rank == 0:
        try:
            told: list[Any] = [None, candidates(shelves, step, warn=listing == 0)]
        except StorageError:  # concerns this rank
            raise
        except CheckpointError as error:
            told = [type(error).__name__, str(error)]
        agreement.put(key, json.dumps(told).encode())
    kind_name, content = json.loads(agreement.get(key))
    if kind_name is None:
        return [(number, name) for number, name in content]
    raise next(kind for kind in _TOLD if kind.__name__ == kind_name)(content)


def _verdict(agreement: Round, number: int, problem: str) -> str:
    """What is wrong with a step on the first rank that has something to say; nothing if it fits."""
    agreement.put(f"tried {number}", problem.encode(errors="replace"))
    if agreement.rank == 0:
        answers = agreement.gather(f"tried {number}")
        told = next((f"rank {r}: {a.decode()}" for r, a in enumerate(answers) if a), "")
        agreement.put(f"verdict {number}", told.encode())
    return agreement.get(f"verdict {number}").decode()


def candidates(
    shelves: Sequence[Steps], step: int | None, warn: bool = True
) -> list[tuple[int, str]]:
    """Directories to try, the best first, each after the number of its shelf; decided by the first
    rank for all.
    """
    steps = shelves[0]
    found, faults = steps.committed()
    shelf_of = {item.manifest.nonce: 0 for item in found}
    for number, other in enumerate(shelves[1:], 1):
        for item in other.committed()[0]:
            if shelf_of.setdefault(item.manifest.nonce, number) == number:
                found.append(item)
    found.sort(key=in_order, reverse=True)
    if step is not None:
        chosen = [item for item in found if item.manifest.step == operator.index(step)]
        if not chosen:
            known = sorted({item.manifest.step for item in found})
            raise CheckpointError(
                f"{steps.root!r} holds no committed step {step}: there are {known[-10:]}"
                + (f"; {faults[0].error}" if faults else "")
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
    for name in steps.incomplete() if warn else ():
        if steps.is_being_written(name):  # from a local tier, and read there
            continue
        log.warning("skipping %s: its save was not committed", steps.path(name))
    if faults and not found:
        raise CorruptCheckpoint(f"no step under {steps.root!r} is whole: {faults[0].error}")
    return [(shelf_of[item.manifest.nonce], item.name) for item in found]


def _tried(
    current: Pipeline,
    steps: Steps,
    name: str,
    read: Callable[[StepReader], T],
    near: Near | None,
    holding: ExitStack,
) -> tuple[str, tuple[int, T] | None]:
    """What is damaged about a step, or else its number and what was read."""
    try:
        holding.enter_context(steps.hold(name))
        item = Committed(name, steps.read(name))
        nearer = [] if near is None else near(item.manifest, holding)
        copies = Copies(current.storage, [*nearer, steps.path(name)])
        reader = StepReader(current.storage, current.staging, steps, name, item.manifest, copies)
        return "", (item.manifest.step, read(reader))
    except (CorruptCheckpoint, StorageError) as error:
        return str(error), None
