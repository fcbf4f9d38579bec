"""Ranks that begin on different terms hear soon in what they differ, and nobody else does: neither
a rank that is late, nor one that begins several things in another order. Must not know what ranks
agree on.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from fastckpt.ranks import coordinator as module
from fastckpt.ranks.coordinator import Coordinator, KnownTerms

A, B = {"root": "'a'", "keep": "3"}, {"root": "'b'", "keep": "3"}


def known(*told: dict[str, str]) -> KnownTerms:
    """What a rank knows that is ready for all of these terms."""
    made = KnownTerms("terms")
    for terms in told:
        made.session(terms)
    return made


def test_terms_that_differ_are_named() -> None:
    store, one, other = dist.HashStore(), known(A), known(B, A | {"keep": "4"})
    one.tell(store, 0, A, "")
    assert one.differing(store, 1, A, 0) == "", "the other rank has not told anything"
    other.tell(store, 1, B, "")
    assert one.differing(store, 1, A, 0) == "has root='b', where rank 0 has root='a',"
    assert other.differing(store, 0, B, 1) == "has root='a', where rank 1 has root='b',"
    other.tell(store, 1, A | {"keep": "4"}, "")
    assert one.differing(store, 1, A, 0) == "has keep=4, where rank 0 has keep=3,"
    other.session(A)
    other.tell(store, 1, A, "")
    assert one.differing(store, 1, A, 0) == "", "it has taken part on these, too"


def test_another_order_is_no_difference() -> None:
    """Both are ready for A and B; one begins with A, and the other with B."""
    store, one, other = dist.HashStore(), known(A, B), known(A, B)
    one.tell(store, 0, A, "")
    other.tell(store, 1, B, "")
    assert one.differing(store, 1, A, 0) == other.differing(store, 0, B, 1) == ""
    late = known(B)  # it is not ready for A yet, but takes part in nothing that rank 0 does not
    late.tell(store, 2, B, "")
    assert one.differing(store, 2, A, 0) == ""


def test_a_rank_that_could_not_begin_says_why() -> None:
    store, one, other = dist.HashStore(), known(A), known(A | {"keep": "0"})
    one.tell(store, 0, A, "")
    other.tell(store, 1, A | {"keep": "0"}, "could not begin (ValueError: keep is 0)")
    assert one.differing(store, 1, A, 0) == "could not begin (ValueError: keep is 0)"


def test_an_earlier_life_of_the_job_is_not_heard() -> None:
    """It has left its keys in a store that outlives it."""
    store = dist.HashStore()
    for terms in (A, B):  # of rank 1, in each life
        one, other = known(A), known(terms)
        one.tell(store, 0, A, "")
        assert one.differing(store, 1, A, 0) == ""
        other.tell(store, 1, terms, "")
    assert one.differing(store, 1, A, 0)


def test_a_process_with_very_many_terms_tells_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOLD_MAX", 2)
    store, one, other = dist.HashStore(), known(A), known(B)
    one.tell(store, 0, A, "")
    other.tell(store, 1, B, "")
    assert one.differing(store, 1, A, 0)
    for number in range(2):
        other.session({"root": str(number)})
    other.tell(store, 1, B, "")
    assert one.differing(store, 1, A, 0) == ""


def test_coordinators_of_one_purpose_keep_apart_by_their_terms(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/pg", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        first, second = (Coordinator.of_group(group, "steps", terms) for terms in (A, B))
        assert first.session is not second.session
        assert Coordinator.of_group(group, "steps", A).session is first.session
    finally:
        dist.destroy_process_group()
