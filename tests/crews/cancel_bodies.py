"""What each rank does in the tests of cancelled and refused saves.

Responsible for saving, for cancelling on some ranks, and for telling what came of it. Must not know
what should.
"""

from __future__ import annotations

import logging
import os

import torch

import fastckpt
from fastckpt import Checkpointer, PerRank
from tests.crews.group_crew import Member, Outcome, Told, attempt
from tests.crews.steps_bodies import meet
from tests.kit.options import gathered

MIB = 1 << 20


def cancel_step(
    member: Member, root: str, cancelling: list[int]
) -> tuple[Outcome, Outcome, list[str], int | None]:
    """Some ranks cancel a step that is written more slowly than the crew waits; then all save
    another one.

    Returns what came of either, what was left of the first, and the step that is found in the end.
    """
    slow = {"drain_rate": 50e3 * member.world_size, "timeout_s": 600}
    with Checkpointer(root, **gathered(**slow)) as checkpointer:
        handle = checkpointer.save(1, {"own": PerRank(torch.ones(2 * MIB))})
        meet(member)
        if member.rank in cancelling:
            assert handle.cancel()
        cancelled = attempt(handle.result)
        assert handle.cancel() is (type(cancelled.error) is fastckpt.SaveCancelled)
        meet(member)
        left = [name for name in os.listdir(root) if name != "lease.json"]
        meet(member)
    with Checkpointer(root) as checkpointer:
        after = attempt(checkpointer.save(2, {"own": PerRank(torch.ones(4))}).result)
        return cancelled, after, left, checkpointer.latest()


def cancel_in_turn(member: Member, root: str) -> list[Outcome]:
    """All ranks cancel the second of three steps in flight, each in its own time."""
    with Checkpointer(root) as checkpointer:
        handles = [checkpointer.save(step, {"own": PerRank(step)}) for step in (1, 2, 3)]
        handles[1].cancel()
        return [attempt(handle.result) for handle in handles]


def cancel_unasked(member: Member, root: str, cancelling: int) -> tuple[Outcome, list[str]]:
    """A rank cancels a step, of which nobody asks; returns what came of the next one, and the
    warnings that were logged.
    """
    told = Told()
    logging.getLogger("fastckpt").addHandler(told)
    with Checkpointer(root, drain_rate=50e3 * member.world_size) as checkpointer:
        handle = checkpointer.save(1, {"own": PerRank(torch.ones(2 * MIB))})
        if member.rank == cancelling:
            handle.cancel()
        handle.wait_done()
        meet(member)
        after = attempt(lambda: checkpointer.save(2, {"own": PerRank(1)}).result())
    logging.getLogger("fastckpt").removeHandler(told)
    return after, [line for line in told.lines if "cancelled" in line]


def refuse(member: Member, root: str, refusing: int) -> tuple[list[Outcome], list[str], int | None]:
    """One rank refuses to commit a step; returns what came of it and of the step after it, the
    digests that were seen, and the step that is found.
    """
    digests: list[str] = []

    def look(stats: fastckpt.SaveStats, digest: str) -> None:
        digests.append(digest)
        assert stats.synced_s is not None and stats.committed_s is None
        if member.rank == refusing and len(digests) == 2:
            raise ValueError("loss is nan")

    outcomes = []
    with Checkpointer(root, before_commit=look) as checkpointer:
        for step in (1, 2, 3):
            state = {"own": PerRank(torch.full((100,), float(member.rank)))}
            outcomes.append(attempt(checkpointer.save(step, state).result))
        return outcomes, digests, checkpointer.latest()


def refuse_numbers(member: Member, root: str) -> tuple[Outcome, Outcome]:
    """All ranks hold a tensor that ends with a number which is none, then one without; returns what
    came of either step.
    """
    held = {"w": torch.ones(2 * MIB // 4), "small": torch.ones(3)}
    with Checkpointer(root, check_finite=True) as checkpointer:
        held["w"][-1] = torch.nan
        refused = attempt(checkpointer.save(1, held).result)
        held["w"][-1] = 1.0
        return refused, attempt(checkpointer.save(2, held).result)
