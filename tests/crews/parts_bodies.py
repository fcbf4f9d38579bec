"""What each rank does in the tests of steps that are thinned; the module whose functions the ranks
call. Must not know what should come of it.
"""

from __future__ import annotations

from typing import Any

import torch

from fastckpt import Checkpointer, Memory, PerRank
from tests.crews.group_crew import WAIT_S, Member, Outcome, attempt
from tests.crews.steps_states import local, numbers, spread_by_group

ROWS, COLUMNS = 514, 1031


def parts(member: Member, step: int) -> dict[str, Any]:
    """A state with sharded tensors and values of single ranks under several keys."""
    whole = numbers(step, ROWS * COLUMNS).view(ROWS, COLUMNS)
    return {
        "model": {
            "w": spread_by_group(member, whole),
            "same": numbers(step + 1, 300_000),
            "rng": PerRank([member.rank, step]),
        },
        "optimizer": {"m": spread_by_group(member, whole + 1), "own": PerRank([step])},
        "own": PerRank(torch.full((5,), 10 * member.rank + step)),
    }


def save_parts(member: Member, root: str, steps: list[int], options: dict[str, Any]) -> None:
    with Checkpointer(root, group=member.group, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, parts(member, step)).result()


def save_in_memory(member: Member, root: str, locals_: list[str], steps: list[int]) -> list[bool]:
    """Saves in the memory of the nodes alone; returns whether the neighbours had each step."""
    local = Memory(directory=locals_[member.rank], budget="256MiB", root_every=100)
    options: dict[str, Any] = {"keep_last": 1, "keep_parts": {"model": 2, "own": 1}}
    with Checkpointer(root, group=member.group, local=local, **options) as checkpointer:
        handles = [checkpointer.save(step, parts(member, step)) for step in steps]
        return [handle.wait_memory(WAIT_S) for handle in handles]


def save_without_a_key(member: Member, root: str) -> Outcome:
    """The first rank's state lacks the key of keep_parts."""
    options: dict[str, Any] = {"keep_last": 1, "keep_parts": {"model": 1}}
    state = parts(member, 1)
    if member.rank == 0:
        del state["model"]

    def body() -> None:
        checkpointer.save(1, state).result()

    with Checkpointer(root, group=member.group, **options) as checkpointer:
        return attempt(body)


def save_other_metadata(member: Member, root: str) -> Outcome:
    """The first rank's metadata is no JSON."""
    metadata = float("nan") if member.rank == 0 else None

    def body() -> None:
        checkpointer.save(1, parts(member, 1), metadata=metadata).result()

    with Checkpointer(root, group=member.group) as checkpointer:
        return attempt(body)


def restore_parts(
    member: Member,
    root: str,
    step: int,
    kept: list[str] | None,
    ranks: int,
    locals_: list[str] | None = None,
) -> Outcome:
    """Restores these keys of a step that so many ranks saved, or all; looks at each value."""
    local_ = locals_ and Memory(directory=locals_[member.rank], budget="256MiB", root_every=100)

    def body() -> None:
        wanted = parts(member, step)
        state = parts(member, 0)
        for key in state.keys() - set(wanted if kept is None else kept):
            del state[key]
        assert checkpointer.restore(state, step) == step
        for key in state.keys() & {"model", "optimizer"}:
            for name, its in state[key].items():
                if isinstance(its, torch.Tensor):
                    assert torch.equal(local(its), local(wanted[key][name])), (key, name)
        own = [state["model"]["rng"]] + ([state["own"]] if "own" in state else [])
        assert {each.found for each in own} == {member.rank < ranks}
        if member.rank < ranks:
            assert state["model"]["rng"].value == [member.rank, step]
            assert "own" not in state or torch.equal(state["own"].value, wanted["own"].value)

    with Checkpointer(root, group=member.group, local=local_ or None) as checkpointer:
        return attempt(body)
