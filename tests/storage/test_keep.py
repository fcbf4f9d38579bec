"""Retention, whatever the checkpoints are: what stays is what was asked for, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastckpt.storage.keep import Entry, may_go

FLAGS = st.tuples(st.none() | st.integers(0, 6), st.booleans(), st.booleans())


def entries_of(flags: list[tuple[int | None, bool, bool]]) -> list[Entry]:
    return [
        Entry(f"{place}", number, counts or pinned, pinned)
        for place, (number, counts, pinned) in enumerate(flags)
    ]


@given(
    st.lists(FLAGS, max_size=12).map(entries_of),
    st.integers(1, 5),
    st.none() | st.integers(1, 4),
    st.integers(-1, 11),
)
def test_what_stays(entries: list[Entry], last: int, every: int | None, best: int) -> None:
    chosen = None if best < 0 else f"{best}"
    going = may_go(entries, last, every, chosen)
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
    # Nothing more goes when it is asked again, and with a higher `last` no more either.
    assert may_go(left, last, every, chosen) == []
    assert {*may_go(entries, last + 1, every, chosen)} <= {*going}


@given(st.integers(0, 12), st.integers(1, 5), st.integers(0, 11))
def test_no_more_stays_than_was_asked_for(count: int, last: int, best: int) -> None:
    entries = [Entry(f"{place}") for place in range(count)]
    assert may_go(entries, last) == [f"{place}" for place in range(last, count)]
    going = may_go(entries, last, best=f"{best}")
    kept = {"0", f"{best}"} if best < count else {"0"}
    assert count - len(going) == min(count, max(last, len(kept)))
    assert not kept & {*going}


def test_what_does_not_count_stays_until_enough_newer_ones_do() -> None:
    damaged = [
        Entry("e", 5, counts=False),
        Entry("d", 4),
        Entry("c", 3, counts=False),
        Entry("b", 2),
    ]
    assert may_go(damaged, 1) == ["c", "b"]
    assert may_go(damaged, 2) == []
    assert may_go([*damaged, Entry("a", 1)], 2) == ["a"]
