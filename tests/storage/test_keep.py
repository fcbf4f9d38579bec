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
    for entry in entries:  # pinned ones, multiples, the best, and with it the newest
        is_multiple = bool(every) and entry.number is not None and entry.number % every == 0
        if entry.is_pinned or is_multiple or entry.name == chosen:
            assert entry in left
    # Enough that count stay: attempts at one number are one.
    there = {entry.number for entry in entries if entry.counts and entry.number is not None}
    single = sum(entry.counts and entry.number is None for entry in entries)
    counted = {entry.number for entry in left if entry.counts and entry.number is not None}
    alone = sum(entry.counts and entry.number is None for entry in left)
    assert len(counted) + alone >= min(last, len(there) + single)
    # Each number's newest attempt that counts is the last of them to go.
    for entry in entries:
        newer = [each for each in entries[: entries.index(entry)] if each.number == entry.number]
        if entry in left and entry.number is not None and not entry.is_pinned and not every:
            assert entry.name == chosen or not any(each.counts for each in newer)
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
