"""PlanExchange that ranks make over a store: when they are exchanged, and what each rank is given.

Ranks are threads here, over a store in memory. Must not know what is planned for.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from fastckpt import CheckpointError, PeerFailed
from fastckpt.integrations.dcp.plan_exchange import PlanExchange
from fastckpt.ranks.coordinator import Coordinator

RANKS = 3


class Job:
    """Ranks that plan together, one call of plan() after the other."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self.coordinators = [Coordinator(store, rank, RANKS, "plans") for rank in range(RANKS)]
        self.plans = [PlanExchange() for _ in range(RANKS)]
        self.seen: list[list[SavePlan]] = []

    def plan(
        self, names: list[str], settings: object = 0, **writers: int
    ) -> list[tuple[SavePlan, object]]:
        """What each rank is given that has items of these names, joined by blanks. `writers`: the
        ranks that the planner has write some of them; default: the first that has the item.
        """

        def plan_all(locals_: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            self.seen.append(locals_)
            central = [SavePlan([], planner_data=len(self.seen)) for _ in locals_]
            items = {item.index: (rank, item) for rank, item in reversed(held(locals_))}
            for rank, item in items.values():
                central[writers.get(item.index.fqn, rank)].items.append(item)
            return central, Metadata({}, planner_data=len(self.seen))

        def run(rank: int) -> tuple[SavePlan, object]:
            agreement = self.coordinators[rank].begin("plan", 20.0)
            with agreement.failing():
                offer = self.plans[rank].offer(settings, plan_of(names[rank]))
                offer.staged = offer.guess
                given = self.plans[rank].central(agreement, offer, plan_all)
            if rank == 0:
                agreement.put("over", b"")
            else:
                agreement.get("over")
            agreement.close()
            return given

        with ThreadPoolExecutor(RANKS) as threads:
            begun = [threads.submit(run, rank) for rank in range(RANKS)]
            wait(begun)  # map() gives up those that have not begun when one has failed
            return [rank.result() for rank in begun]


def plan_of(name: str) -> SavePlan:
    if name == "bad":
        return SavePlan([], planner_data=lambda: None)  # no other rank can be told of it
    names = name.split(" ") if name else []
    return SavePlan(
        [WriteItem(MetadataIndex(its, torch.Size([0])), WriteItemType.TENSOR) for its in names]
    )


def held(plans: list[SavePlan]) -> list[tuple[int, WriteItem]]:
    return [(rank, item) for rank, plan in enumerate(plans) for item in plan.items]


def names_of(given: list[tuple[SavePlan, object]]) -> list[str]:
    return [" ".join(item.index.fqn for item in plan.items) for plan, _metadata in given]


def made(given: list[tuple[SavePlan, object]]) -> set[int]:
    """Which of the central plans the ranks were given."""
    return {plan.planner_data for plan, _metadata in given}


def test_plans_are_used_again_until_one_of_them_changes() -> None:
    job = Job()
    first, second = ["a", "b", "c"], ["a", "B", "c"]
    for names, exchanges, number in (
        (first, 1, 1),
        (first, 1, 1),
        (second, 2, 2),  # two ranks are asked for what they thought to be known
        (second, 2, 2),
        (first, 2, 1),  # in turn, as a model and an optimizer may be saved
        (second, 2, 2),
        (["A", "B", "C"], 3, 3),
    ):
        given = job.plan(names)
        assert names_of(given) == names and made(given) == {number}
        assert len(job.seen) == exchanges == job.plans[0].exchanges
        metadata = given[0][1]
        assert isinstance(metadata, Metadata) and metadata.planner_data == number
        assert [its for _plan, its in given[1:]] == [None, None]


def test_other_settings_are_another_plan() -> None:
    job = Job()
    assert made(job.plan(["a", "b", "c"], settings=1)) == {1}
    assert made(job.plan(["a", "b", "c"], settings=2)) == {2}
    assert made(job.plan(["a", "b", "c"], settings=1)) == {1}


def test_only_the_last_few_are_kept() -> None:
    job = Job()
    for number in range(6):
        job.plan([f"a{number}", "b", "c"])
    assert made(job.plan(["a5", "b", "c"])) == {6}
    assert made(job.plan(["a0", "b", "c"])) == {7}


def test_a_rank_that_fails_is_told_of_and_the_next_plan_works() -> None:
    job = Job()
    job.plan(["a", "b", "c"])
    with pytest.raises(PeerFailed, match="rank 1 failed"):  # says rank 0
        job.plan(["a", "bad", "c"])
    given = job.plan(["a", "b", "d"])
    assert names_of(given) == ["a", "b", "d"]


def test_large_plans_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastckpt.ranks.round._PART_BYTES", 50)
    given = Job().plan(["x" * 10, "".join(map(chr, range(40, 400))), "z"])
    assert names_of(given)[1] == "".join(map(chr, range(40, 400)))


def test_what_a_rank_has_not_staged_is_written_by_one_that_can() -> None:
    for before, now, expected in (
        (0, 1, ["w", "", "z"]),  # the first has staged it
        (2, 0, ["", "", "w z"]),  # the last has a new plan, and so has not staged anything
    ):
        job = Job()
        first = ["", "", ""]
        first[before] = "w"
        assert names_of(job.plan(["w", "w", "w"], w=before)) == first
        assert names_of(job.plan(["w", "w", "w z"], w=now)) == expected
        assert names_of(job.plan(["w", "w", "w z"], w=now)) == expected


def test_what_nobody_has_staged_fails_once() -> None:
    job = Job()
    assert names_of(job.plan(["w y", "w", "y"], w=1, y=2)) == ["", "w", "y"]
    with pytest.raises(CheckpointError, match="rank 0 must write 'y', but had not copied it"):
        job.plan(["w y", "w", "x"], w=1)
    assert names_of(job.plan(["w y", "w", "x"], w=1)) == ["y", "w", "x"]
