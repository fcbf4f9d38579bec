"""Retention, whatever the checkpoints are: what stays is what was asked for, and nothing else."""

from __future__ import annotations

from math import inf, isfinite, nan

from hypothesis import given
from hypothesis import strategies as st

from fastckpt.storage.keep import Entry, Policy, best_first, victims

SCORES = st.sampled_from([None, nan, inf, -inf, -1.0, -0.0, 0.0, 1.0, 2.5])
FLAGS = st.tuples(st.none() | st.integers(0, 6), st.booleans(), st.booleans(), SCORES)
ENTRIES = st.lists(FLAGS, max_size=12).map(
    lambda flags: [
        Entry(f"{place}", number, counts or pinned, pinned, score)
        for place, (number, counts, pinned, score) in enumerate(flags)
    ]
)


@given(
    ENTRIES,
    st.integers(1, 5),
    st.none() | st.integers(1, 4),
    st.integers(-1, 11),
    st.integers(0, 4),
)
def test_what_stays(
    entries: list[Entry], last: int, every: int | None, best: int, top: int
) -> None:
    chosen = None if best < 0 else f"{best}"
    going = victims(entries, Policy(last, every, chosen, top))
    left = [entry for entry in entries if entry.name not in going]
    assert left[:1] == entries[:1]  # the one just committed
    for entry in entries:  # pinned ones, multiples, the best, and with it the newest
        is_multiple = bool(every) and entry.number is not None and entry.number % every == 0
        if entry.is_pinned or is_multiple or entry.name == chosen:
            assert entry in left
    # Enough that count stay, where attempts at one number are one, and of these the newest.
    there, counted = (
        {entry.number if entry.number is not None else entry.name for entry in each if entry.counts}
        for each in (entries, left)
    )
    assert len(counted) >= min(last, len(there))
    for place, entry in enumerate(entries):
        newer = [each for each in entries[:place] if each.number == entry.number and each.counts]
        if entry.number is not None and newer and not (entry.is_pinned or every):
            assert entry not in left or entry.name == chosen
    # Nothing more goes when it is asked again, and with a higher `last` or `top` no more either.
    assert victims(left, Policy(last, every, chosen, top)) == []
    assert {*victims(entries, Policy(last + 1, every, chosen, top))} <= {*going}
    assert {*victims(entries, Policy(last, every, chosen, top + 1))} <= {*going}


def test_the_best_takes_no_place_if_it_does_not_count() -> None:
    """Else the last complete checkpoint would go while the best one is not complete yet."""
    entries = [Entry("best", counts=False), Entry("complete"), Entry("older")]
    assert victims(entries, Policy(1, best="best")) == ["older"]


@given(ENTRIES, st.integers(1, 5), st.integers(1, 4))
def test_the_best_stay(entries: list[Entry], last: int, top: int) -> None:
    going = victims(entries, Policy(last, top=top))
    for place, entry in enumerate(entries):
        if entry.score is None or not isfinite(entry.score):
            continue
        newer, older = entries[:place], entries[place + 1 :]
        better = {
            each.key
            for each in entries
            if each.counts
            and each.score is not None
            and isfinite(each.score)
            and (each.score > entry.score or (each.score == entry.score and each in older))
        }
        is_replaced = any(each.counts and each.key == entry.key for each in newer)
        assert is_replaced or len(better) >= top or entry.name not in going
    # What has no score takes nobody's place.
    for entry in entries:
        without = [each._replace(score=None) if each is entry else each for each in entries]
        assert {*victims(without, Policy(last, top=top))} - {entry.name} <= {*going}


@given(ENTRIES)
def test_the_order_of_the_best(entries: list[Entry]) -> None:
    ordered = best_first(entries)
    scores = [(-(each.score or 0.0), -int(each.name)) for each in ordered]
    assert scores == sorted(scores) and all(map(isfinite, [score for score, _name in scores]))
    counted = [each.key for each in ordered if each.counts]
    assert len(counted) == len({*counted})


@given(st.integers(0, 12), st.integers(1, 5), st.integers(0, 11))
def test_no_more_stays_than_was_asked_for(count: int, last: int, best: int) -> None:
    entries = [Entry(f"{place}") for place in range(count)]
    assert victims(entries, Policy(last)) == [f"{place}" for place in range(last, count)]
    going = victims(entries, Policy(last, best=f"{best}"))
    kept = {"0", f"{best}"} if best < count else {"0"}
    assert count - len(going) == min(count, max(last, len(kept)))
    assert not kept & {*going}


def test_no_more_of_the_best_stay_than_was_asked_for() -> None:
    scores = [1.0, 3.0, nan, 3.0, 2.0, None, 4.0]
    entries = [Entry(f"{9 - place}", score=score) for place, score in enumerate(scores)]
    assert [each.name for each in best_first(entries)] == ["3", "6", "8", "5", "9"]
    assert victims(entries, Policy(1, top=1)) == ["8", "7", "6", "5", "4"]
    assert victims(entries, Policy(1, top=2)) == ["8", "7", "5", "4"]
    entries[-1] = entries[-1]._replace(counts=False)  # damaged, say: it takes no place
    assert victims(entries, Policy(1, top=2)) == ["7", "5", "4"]


def test_what_does_not_count_stays_until_enough_newer_ones_do() -> None:
    damaged = [
        Entry("e", 5, counts=False),
        Entry("d", 4),
        Entry("c", 3, counts=False),
        Entry("b", 2),
    ]
    assert victims(damaged, Policy(1)) == ["c", "b"]
    assert victims(damaged, Policy(2)) == []
    assert victims([*damaged, Entry("a", 1)], Policy(2)) == ["a"]


def test_what_is_of_no_use_goes_unless_it_is_pinned() -> None:
    entries = [Entry("d", is_useless=True), Entry("c"), Entry("b", is_useless=True), Entry("a")]
    assert victims(entries, Policy(2)) == ["d", "b"]
    entries[0] = entries[0]._replace(is_pinned=True)
    assert victims(entries, Policy(1)) == ["b", "a"], "it does not count"
