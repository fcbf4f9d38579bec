"""The search for the newest checkpoint that is whole on all ranks: what becomes of a candidate of
which ranks have different things to say. Ranks are threads; must not know what a candidate is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch.distributed as dist

from fastckpt.errors import CorruptCheckpoint, Vanished
from fastckpt.ranks.round import Round
from fastckpt.ranks.search import Candidate, Search, Trial
from fastckpt.storage.vanishing import listed_anew
from tests.kit.coordinators import on_each, opened

GONE, DAMAGED, WHOLE = "gone", "damaged", "whole"


def look(begun: Round, met: str) -> tuple[str | None, list[str]]:
    """Searches for 2, of which this rank meets `met` at its first look, and then for 1, which is
    whole. Returns what was found, and what was called damaged.
    """
    looks = itertools.count()

    def tried_two() -> str:
        if next(looks) or met == WHOLE:
            return "2"
        raise Vanished("2") if met == GONE else CorruptCheckpoint("a byte differs")

    def trial_of(candidate: Candidate) -> Trial[str]:
        stages: list[Callable[[], str]] = [tried_two if candidate[1] == "2" else lambda: "1"]
        return Trial(candidate[1], stages, lambda: False)

    search: Search[str] = Search(begun, lambda: [(0, "2"), (0, "1")], trial_of)
    return listed_anew(search.look), [*search.damaged.values()]


PAIRS = [*itertools.product((WHOLE, DAMAGED, GONE), repeat=2)]


@pytest.mark.parametrize("met", PAIRS, ids="-".join)
def test_all_ranks_go_on_together_and_gone_outweighs_damage(met: tuple[str, str]) -> None:
    """What is being removed looks damaged to who reads it late: then they list again, and nothing
    is called damaged. Else damage on either rank passes the candidate over on both.
    """
    ranks = opened(dist.HashStore(), 2)
    found = on_each(ranks, lambda begun: look(begun, met[begun.rank]))
    assert found[0] == found[1]
    if GONE in met:
        assert found[0] == ("2", [])
    elif DAMAGED in met:
        assert found[0] == ("1", [f"rank {met.index(DAMAGED)}: a byte differs"])
    else:
        assert found[0] == ("2", [])
