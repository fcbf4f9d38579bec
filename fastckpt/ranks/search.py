"""The search for the newest checkpoint that is intact on every rank, by candidates and verdicts.

All ranks try the candidates that the first rank has listed, in its order. If any rank finds damage,
all ranks continue with the next candidate together.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    PeerFailed,
    StorageError,
    Telling,
    Vanished,
)
from fastckpt.ranks.round import Round

log = logging.getLogger("fastckpt")

T = TypeVar("T")
Candidate = tuple[int, str]  # whatever two values tell ranks which checkpoint it is

# Verdicts; others say what is wrong with a candidate.
GONE = "removed"  # it was removed meanwhile
COMING = "coming"  # a rank could not read it where it lies, but it is on its way to all ranks
_TOLD = (CorruptCheckpoint, IncompatibleCheckpoint, CheckpointError)


class Trial(Generic[T]):
    """An attempt to read one candidate on one rank.

    Args:
        path: the candidate's path.
        stages: the functions that read it, called one after another. Each is called on all ranks,
            or on none if a rank found damage before. The last one returns the result. They raise
            CorruptCheckpoint for damage, and Vanished if the candidate was removed; any other error
            ends the search.
        is_gone: called after damage; returns whether the candidate was removed, which looks like
            damage.

    Attributes:
        verdict: the verdict of all ranks: "" if the candidate is intact, GONE, COMING, or the
            message of the first rank that found damage.
    """

    def __init__(
        self, path: str, stages: Sequence[Callable[[], T]], is_gone: Callable[[], bool]
    ) -> None:
        self.path, self.stages, self.is_gone, self.verdict = path, stages, is_gone, ""

    def is_coming(self) -> bool:
        """Returns whether the candidate is being copied to storage that all ranks can read. If this
        is true on one rank, await_coming() is called on all.
        """
        return False

    def await_coming(self) -> None:
        """Waits until the copy is complete. Raises CorruptCheckpoint if the copy proved damaged on
        this rank, and PeerFailed if another rank has the cause. Any other error ends the search.
        """

    def end(self, error: BaseException | None) -> None:
        """Cleans up when the verdict is known, or when the search ends with this error. The method
        may raise another error instead.
        """


class Search(Generic[T]):
    """One search. Each rank creates its own Search, and calls look() by listed_anew().

    Args:
        agreement: a round for this search alone.
        candidates: lists the candidates on the first rank, best first. If it raises an error, all
            ranks raise it.
        trial_of: creates this rank's trial of a candidate.
        warns: whether to log skipped candidates.

    Attributes:
        damaged: the verdicts on damaged candidates.
        has_lost: whether a candidate was removed during the search.
    """

    def __init__(
        self,
        agreement: Round,
        candidates: Callable[[], Sequence[Candidate]],
        trial_of: Callable[[Candidate], Trial[T]],
        *,
        warns: bool = True,
    ) -> None:
        self._agreement, self._candidates, self._trial_of = agreement, candidates, trial_of
        self._warns, self._numbers = warns, itertools.count()
        self.damaged: dict[Candidate, str] = {}
        self.has_lost = False

    def look(self) -> T | None:
        """Returns the result for the best intact candidate, or None. Raises Vanished if a candidate
        was removed during the search. A newer candidate must exist then, so the caller lists again.
        """
        # List again after damage: one that was committed meanwhile may be whole.
        while candidates := [each for each in self._listed() if each not in self.damaged]:
            for candidate in candidates:
                trial = self._trial_of(candidate)
                with Telling(trial.end):
                    outcome = self._outcome(trial)
                trial.end(None)
                if not trial.verdict:
                    return outcome
                if trial.verdict == GONE:
                    self.has_lost = True
                    raise Vanished(trial.path)
                if trial.verdict == COMING:
                    break  # it is there now: list again
                self.damaged[candidate] = trial.verdict
                if self._warns:
                    log.warning("skipping %s: %s", trial.path, trial.verdict)
        # A rank that searches elsewhere is missed here, as it is where there is a candidate.
        self._verdict("")
        return None

    def _listed(self) -> list[Candidate]:
        """Returns the first rank's candidates. If listing fails there, every rank raises the
        error.
        """
        agreement, key = self._agreement, f"candidates {next(self._numbers)}"
        if agreement.rank == 0:
            try:
                listing: list[Any] = [None, [*self._candidates()]]
            except StorageError:  # the others hear of it by the failure of the round
                raise
            except CheckpointError as error:
                listing = [type(error).__name__, str(error)]
            agreement.put(key, json.dumps(listing).encode())
        kind_name, content = json.loads(agreement.get(key))
        if kind_name is None:
            return [(number, name) for number, name in content]
        raise next((kind for kind in _TOLD if kind.__name__ == kind_name), CheckpointError)(content)

    def _outcome(self, trial: Trial[T]) -> T | None:
        """Tries a candidate and receives the verdict of all ranks; returns the result on this
        rank.
        """
        result = None
        for stage in trial.stages:
            problem, unread = "", None
            try:
                result = stage()
            except Vanished:
                problem = GONE
            except CorruptCheckpoint as error:
                problem = GONE if trial.is_gone() else str(error)
            except StorageError as error:  # where locks keep nothing, a part may be gone first
                if error.errno in (errno.ENOENT, errno.ESTALE) and trial.is_gone():
                    problem = GONE
                elif trial.is_coming():
                    problem, unread = COMING, error
                else:
                    raise
            trial.verdict = self._verdict(problem)
            if trial.verdict == COMING:
                trial.verdict = self._arrival(trial, unread) or COMING
            if trial.verdict:
                return None  # nor keeps this rank what it read of it
        return result

    def _arrival(self, trial: Trial[T], unread: StorageError | None) -> str:
        """Waits for the copy of a candidate. Returns the message of the first rank that found
        damage, or "". If the copy fails for another reason, raises that error, combined with
        `unread`, this rank's earlier error.
        """
        problem, failure = "", None
        try:
            trial.await_coming()
        except CorruptCheckpoint as error:
            problem = str(error)
        except PeerFailed as error:  # that rank says whether it was damage
            failure = error
        except CheckpointError as error:
            raise _neither(unread, error) from error
        verdict = self._verdict(problem)
        if failure is not None and not verdict:
            raise _neither(unread, failure) from failure
        return verdict

    def _verdict(self, problem: str) -> str:
        """Returns the problem of the first rank that has one; "" if no rank has one.

        If a rank finds that the candidate was removed, this is the verdict, because damage on other
        ranks may be a result of the removal. Damage takes precedence over parts that could not be
        read.
        """
        agreement, number = self._agreement, next(self._numbers)
        agreement.put(f"tried {number}", problem.encode(errors="replace"))
        if agreement.rank == 0:
            answers = agreement.gather(f"tried {number}")
            coming = COMING.encode()
            bad = (rank for rank, answer in enumerate(answers) if answer not in (b"", coming))
            first = next(bad, answers.index(coming) if coming in answers else 0)
            is_told = len(answers) > 1 and answers[first] not in (b"", coming)
            verdict = f"rank {first}: " * is_told + answers[first].decode()
            verdict = GONE if GONE.encode() in answers else verdict
            agreement.put(f"verdict {number}", verdict.encode())
        return agreement.get(f"verdict {number}").decode()


def _neither(unread: StorageError | None, failure: CheckpointError) -> CheckpointError:
    """Returns the error for a candidate that this rank could not read and that was not copied
    either.
    """
    if unread is None:
        return failure
    number, detail = unread.errno or errno.EIO, f"{unread.detail}; " if unread.detail else ""
    detail += f"copying it to storage that all ranks can read failed: {failure}"
    return StorageError(unread.op, unread.path, number, unread.offset, detail)
