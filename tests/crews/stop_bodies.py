"""What each rank does in the tests of StopSignals; the module whose functions the ranks call.

Must not know what should come of it.
"""

from __future__ import annotations

import os
import signal
import time

import torch

from fastckpt import Checkpointer, StopSignals
from tests.crews.group_crew import Member
from tests.crews.steps_bodies import meet

CALLS_MAX = 100_000


def loop_until_stopped(member: Member, root: str, sender: int, receiver: int) -> tuple[int, int]:
    """Trains, each rank at its own pace and without a collective, until the job is to stop; saves
    and ends. One rank sends another one, and no other, a signal after its 20th step.

    Returns the number of steps, and the step that is committed.
    """
    member.store.set(f"pid/{root}/{member.rank}", str(os.getpid()))
    with (
        StopSignals(member.group) as signals,
        Checkpointer(root, group=member.group) as checkpointer,
    ):
        meet(member)
        for step in range(1, CALLS_MAX):
            time.sleep(0.001 * (1 + 2 * member.rank))  # the paces
            if step == 20 and member.rank == sender:
                pid = int(member.store.get(f"pid/{root}/{receiver}"))
                os.kill(pid, signal.SIGUSR1)
            if signals.requested():
                checkpointer.save(step, {"step": torch.tensor([step])})
                break
    meet(member)
    return step, Checkpointer(root, group=member.group).latest() or 0
