"""What ranks tell each other of a state that all of them should hold, and how the records of a file
are arranged that they write together. Pure: no process, no file, no store.

Ranks are played by calling the same functions several times. Must not know how descriptions travel,
nor how an arrangement becomes bytes, beyond that every rank must find the same body.
"""

from __future__ import annotations

import ctypes
import logging
import pickle
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt.errors import RanksDisagree
from fastckpt.formats import torch_zip
from fastckpt.formats.torch_pickle import Capture, Pickle
from fastckpt.formats.torch_zip import (
    SMALL_BYTES,
    SMALL_SUM_BYTES_MAX,
    RecordDivision,
    arrange,
    nbytes_of,
)
from fastckpt.plan.image import address_of
from fastckpt.ranks import same_state
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.ranks.same_state import SAMPLED_BYTES, Description, Sampled, disagreement
from tests.kit.storm import Chance

MIB = 1 << 20

Texts = list[tuple[str, str]]


def described(
    texts: Texts,
    contents: dict[str, bytes] | None = None,
    seed: int = 0,
    first_rank: tuple[str, ...] = (),
    storages: Sequence[tuple[str, str]] = (),
) -> Description:
    """What a rank tells that holds these tensors, with these contents."""
    description = Description(texts, first_rank)
    description.lay_out(storages)
    memory = {name: bytearray(content) for name, content in (contents or {}).items()}
    parts = [Sampled(name, address_of(each), len(each)) for name, each in memory.items()]
    take(description, parts, seed)
    return description


def take(description: Description, parts: Sequence[Sampled], seed: int) -> None:
    """Chooses samples, and copies them as a save does."""
    description.sample(parts, seed)
    for address, memory in description.samples():
        memory[:] = ctypes.string_at(address, len(memory))


def compare(*groups: tuple[list[int], Description]) -> tuple[str, set[str]]:
    """The message and the names of tensors with other contents, for groups of ranks."""
    assert len({description.digest() for _, description in groups}) == len(groups)
    error, unequal = disagreement([(ranks, each.detail()) for ranks, each in groups], "a")
    assert type(error) is RanksDisagree and type(pickle.loads(pickle.dumps(error))) is RanksDisagree
    assert str(error).startswith("ranks disagree about 'a': ") and "nothing was committed" in str(
        error
    )
    return str(error), unequal


def test_texts_are_made_when_they_are_needed() -> None:
    made: list[int] = []

    def texts() -> Texts:
        made.append(1)
        return [("w", "float32 [3]")]

    late = Description(texts)
    assert not made
    assert late.digest() == Description(texts()).digest()
    assert late.detail() == Description(texts()).detail() and len(made) == 3


# --- samples


@pytest.mark.parametrize("count", [0, 1, 3, 100, 1023, 1024, 1025, 4096, 4097, 10_000, 100_000])
def test_samples_are_few(count: int) -> None:
    memory = bytearray(random.Random(0).randbytes(MIB))
    address = address_of(memory)
    parts = [Sampled(f"w{number}", address + number, MIB - number) for number in range(count)]
    description = Description([])
    description.sample(parts, seed=5)
    read = [(begin, len(content)) for begin, content in description.samples()]
    assert sum(nbytes for _, nbytes in read) <= SAMPLED_BYTES == 65536
    assert len(read) >= min(count, SAMPLED_BYTES // 128 // 2)
    assert all(address <= begin and begin + nbytes <= address + MIB for begin, nbytes in read)


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(0, 2**32))
def test_samples_lie_in_the_tensor(sizes: list[int], seed: int) -> None:
    """Were a byte beyond an end looked at, other neighbours would change the sample."""
    samples = []
    for fill in (b"\0", b"\xff"):
        memory = bytearray(fill * (sum(sizes) + 200 * (len(sizes) + 1)))
        parts, begin = [], 200
        for number, nbytes in enumerate(sizes):
            memory[begin : begin + nbytes] = bytes(range(nbytes))
            parts.append(Sampled(str(number), address_of(memory) + begin, nbytes))
            begin += nbytes + 200
        description = Description([])
        take(description, parts, seed)
        samples.append(description.digest())
    assert samples[0] == samples[1]


def test_every_tensor_has_its_turn() -> None:
    memory = bytearray(64)
    parts = [Sampled(f"w{number}", address_of(memory), 64) for number in range(10_000)]
    seen: set[str] = set()
    for seed in range(20):
        one, other = Description([]), Description([])
        take(one, parts, seed)
        memory[:] = bytes(64)
        take(other, parts, seed)
        assert one.digest() == other.digest()
        memory[:] = b"x" * 64
        changed = Description([])
        take(changed, parts, seed)
        _, unequal = compare(([0], one), ([1], changed))
        assert unequal.isdisjoint(seen)
        seen |= unequal
        memory[:] = bytes(64)
    assert len(seen) == 10_000


def test_other_places_are_sampled_each_time() -> None:
    """So a difference in a tenth of a tensor is found sooner or later."""
    content = bytearray(random.Random(1).randbytes(MIB))
    changed = bytearray(content)
    changed[MIB // 2 : MIB // 2 + MIB // 10] = bytes(MIB // 10)
    found = [
        described([], {"w": bytes(content)}, seed).digest()
        != described([], {"w": bytes(changed)}, seed).digest()
        for seed in range(100)
    ]
    assert 10 < sum(found) < 90, "four places, each with a chance of a tenth"


def test_other_contents_are_named() -> None:
    texts = [("a", "float32 [2]"), ("b", "float32 [3]"), ("c", "float32 [4]")]
    ours = described(texts, {"a": b"a" * 100, "b": b"b" * 100, "c": b"c" * 100})
    theirs = described(texts, {"a": b"a" * 100, "b": b"x" * 100, "c": b"c" * 100})
    others = described(texts, {"a": b"a" * 100, "b": b"y" * 100, "c": b"z" * 100})
    text, unequal = compare(([0, 3], ours), ([1, 2], theirs), ([4], others))
    assert unequal == {"b", "c"}
    assert (
        "the content of b differs: one on ranks 0, 3, another on ranks 1, 2, another on rank 4;"
        in text
    )
    assert "the content of c differs: one on ranks 0, 1, 2, 3, another on rank 4;" in text
    assert "content of a" not in text
    assert "from the next save on they are taken from rank 0" in text and "PerRank" in text


def test_ranks_that_agree_are_named_whoever_is_alone() -> None:
    alone, others = described([], {"a": b"a" * 100}), described([], {"a": b"x" * 100})
    text, _ = compare(([*range(1, 100)], others), ([0], alone))
    assert (
        "differs: one on rank 0, another on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 91 more; nothing"
        in text
    )
    assert "whose contents may not be the right ones" in text
    each = [([rank], described([], {"a": bytes([rank]) * 100})) for rank in range(9)]
    text, _ = compare(*each)
    assert (
        "differs: one on rank 0, another on rank 1, another on rank 2, another on rank 3, 5 more"
        in text
    )


def told_of(*contents: bytes) -> tuple[list[str], list[set[str]]]:
    """What ranks with these contents of b log, of which they know that it differed before."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    named: list[set[str]] = []
    store = dist.HashStore()

    def save(rank: int) -> None:
        its = described([("b", "int8")], {"a": b"a" * 100, "b": contents[rank]}, first_rank=("b",))
        agreement = Coordinator(store, rank, len(contents), "replicas").begin("step 1")
        with agreement.failing():
            same_state.compare(agreement, "state", its, "step 1", named.append)
        agreement.close()

    logger = logging.getLogger("fastckpt")
    logger.addHandler(handler)
    try:
        with ThreadPoolExecutor(len(contents)) as pool:
            [*pool.map(save, range(len(contents)))]
    finally:
        logger.removeHandler(handler)
    return heard, named


def test_contents_of_the_first_rank_are_warned_of_as_long_as_others_differ() -> None:
    for _ in range(2):
        (line,), named = told_of(b"b" * 100, b"x" * 100, b"x" * 100)
        assert (
            "the content of b differs: one on rank 0, another on ranks 1, 2" in line and not named
        )
        assert "'step 1' is saved with the contents of rank 0" in line
    assert told_of(b"b" * 100, b"b" * 100, b"b" * 100) == ([], [])


# --- structure

BASE = [("a", "float32 [2]"), ("b", "float32 [3]"), ("c", "int8 []")]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (BASE[:2], "c is missing on ranks 1, 2"),
        ([*BASE, ("d", "int8 []")], "d is on ranks 1, 2 but not on rank 0"),
        (
            [BASE[0], ("b", "float32 [4]"), BASE[2]],
            "b is float32 [4] on ranks 1, 2 but float32 [3] on rank 0",
        ),
        (
            [BASE[1], BASE[0], BASE[2]],
            "the order of the tensors on ranks 1, 2 differs from that on",
        ),
    ],
)
def test_other_structure_is_named(texts: Texts, words: str) -> None:
    # What follows from it, storages and samples that do not match, is not told.
    ours = described(BASE, {"a": b"1"}, storages=[("a", "data/0 of 4 bytes")])
    theirs = described(texts, {"a": b"2"}, storages=[("a", "data/1 of 4 bytes")])
    for groups in ([([0], ours), ([2, 1], theirs)], [([1, 2], theirs), ([0], ours)]):
        text, unequal = compare(*groups)
        assert words in text and unequal == set()
        assert "content" not in text and "storage" not in text and "taken from rank 0" not in text
        assert "every rank must save the same tensors" in text


def test_other_storages_are_named() -> None:
    ours = described(BASE, storages=[("a", "data/0 of 4 bytes"), ("b", "data/1 of 4 bytes")])
    theirs = described(BASE, storages=[("a", "data/0 of 8 bytes"), ("b", "data/1 of 4 bytes")])
    text, unequal = compare(([0], ours), ([1], theirs))
    assert "the storage of a is data/0 of 8 bytes on rank 1 but data/0 of 4 bytes on rank" in text
    assert "storage of b" not in text and not unequal


def test_ranks_that_did_not_see_the_same_before() -> None:
    ours = described(BASE, first_rank=("b",))
    text, unequal = compare(([0], ours), ([1], described(BASE)))
    assert "rank 1 missed that b differed in an earlier save" in text and not unequal
    assert described(BASE, first_rank=("b", "a")).digest() == (
        described(BASE, first_rank=("a", "b")).digest()
    )


def test_long_lists_are_cut() -> None:
    ours = described([(f"w{number}", "int8 []") for number in range(50)])
    text, _ = compare(([0], ours), (list(range(1, 30)), described([])))
    assert "w0 is missing on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 21 more" in text
    assert "(and 47 more differences)" in text and "w3 " not in text and len(text) < 500


# --- the arrangement of records

Content = bytes | torch.UntypedStorage


def captured(contents: list[Content], pickled: bytes = b"pickle") -> Capture:
    """Records in the order in which torch's pickler gives them."""
    others: list[tuple[str, Content]] = [(".format_version", b"1"), (".storage_alignment", b"64")]
    others.append(("byteorder", b"little"))
    others += [(f"data/{number}", content) for number, content in enumerate(contents)]
    return Capture(Pickle(pickled), others, [])


def storage(nbytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes)


def names(records: list[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in records]


def test_big_is_shared_and_small_is_behind() -> None:
    sizes = [MIB, 5, MIB - 1, 3 * MIB, 0, 2 * MIB]
    arrangement = arrange(captured([storage(size) for size in sizes]), {"data/3"})
    assert names(arrangement.front) == ["data/3"]
    assert names(arrangement.shared) == ["data/0", "data/5"]
    assert names(arrangement.tail) == ["data.pkl", "byteorder", "data/1", "data/2", "data/4"]
    assert arrangement.small_nbytes == MIB + 4


def test_of_too_much_that_is_small_the_largest_goes_to_the_front() -> None:
    sizes = [700 << 10] * 50 + [900 << 10] * 2 + [600 << 10] * 60
    arrangement = arrange(captured([storage(size) for size in sizes]), set())
    moved = names(arrangement.front)
    assert {"data/50", "data/51"} <= set(moved)
    # Of equal ones as many as must, in an order that is the same everywhere.
    rest = sorted(f"data/{number}" for number in range(50))
    assert set(moved) - {"data/50", "data/51"} == set(rest[: len(moved) - 2])
    left = SMALL_SUM_BYTES_MAX - arrangement.small_nbytes
    assert 0 <= left < 700 << 10


def test_first_ranks_small_tensor_stays_where_it_is() -> None:
    arrangement = arrange(captured([storage(MIB), storage(100)]), {"data/1"})
    assert names(arrangement.front) == [] and "data/1" in names(arrangement.tail)


sizes_drawn = st.lists(
    st.sampled_from([0, 1, 5000, 65536, MIB - 1, MIB, MIB + 1, 3 * MIB]) | st.integers(0, 2 * MIB),
    max_size=150,
)


@settings(max_examples=Chance.examples(18), deadline=None)
@given(sizes_drawn, st.sets(st.integers(0, 149)))
def test_every_record_has_one_place(sizes: list[int], chosen: set[int]) -> None:
    contents = [storage(size) for size in sizes]
    capture = captured(contents)
    first_rank = {f"data/{number}" for number in chosen}
    arrangement = arrange(capture, first_rank)
    placed = names(arrangement.front) + names(arrangement.shared) + names(arrangement.tail)
    computed = {".format_version", ".storage_alignment"}
    assert sorted(placed) == sorted(set(names(capture.records)) - computed)
    assert all(nbytes_of(content) >= SMALL_BYTES for _, content in arrangement.shared)
    assert first_rank.isdisjoint(names(arrangement.shared))
    behind = [nbytes_of(content) for name, content in arrangement.tail if name.startswith("data/")]
    assert arrangement.small_nbytes == sum(behind) <= SMALL_SUM_BYTES_MAX
    assert max(behind, default=0) < SMALL_BYTES
    for part in (arrangement.front, arrangement.shared, arrangement.tail):
        order = [names(capture.records).index(name) for name in names(part)]
        assert order == sorted(order)


def with_copies(contents: list[torch.UntypedStorage], nbytes_max: int) -> list[Content]:
    """What is small as bytes, as a save with the step fence has it."""
    return [
        bytes(content.nbytes()) if content.nbytes() <= nbytes_max else content
        for content in contents
    ]


@settings(max_examples=Chance.examples(10), deadline=None)
@given(sizes_drawn)
def test_copies_are_placed_as_what_they_are_of(sizes: list[int]) -> None:
    contents = [storage(size) for size in sizes]
    copies = with_copies(contents, 64 << 10)
    plain, copied = arrange(captured([*contents]), set()), arrange(captured(copies), set())
    for part in ("front", "shared", "tail"):
        assert names(getattr(plain, part)) == names(getattr(copied, part))
    assert plain.small_nbytes == copied.small_nbytes


def test_what_cannot_be_compared_is_the_first_ranks() -> None:
    """Where torch lends no storages, all there is are copies."""
    contents = with_copies([storage(MIB), storage(9), storage(2 * MIB)], 1 << 40)
    arrangement = arrange(captured(contents), set())
    assert names(arrangement.front) == ["data/0", "data/2"] and arrangement.shared == []


def body(arrangement: RecordDivision) -> Any:
    image, front_nbytes = torch_zip.layout_shared(arrangement)
    slots = list(image.slots)
    segments = [(segment.offset, segment.nbytes) for segment in image.rows()]
    return image.body_nbytes, front_nbytes, slots, segments


@pytest.mark.parametrize("make", [storage, bytes], ids=["call fence", "step fence"])
def test_the_body_is_the_same_whatever_else_a_rank_holds(make: Callable[[int], Content]) -> None:
    sizes = [2 * MIB, 3, MIB, 50_000, 0, 8 * MIB + 1]
    sizes += [60_000] * 1200  # some go to the front
    bodies = []
    for pickled in (b"short", b"long" * 5000):
        contents = [storage(size) if size >= SMALL_BYTES else make(size) for size in sizes]
        bodies.append(body(arrange(captured(contents, pickled), {"data/2"})))
    assert bodies[0] == bodies[1]
    nbytes, front_nbytes, slots, _ = bodies[0]
    assert MIB < front_nbytes < nbytes and slots


def test_values_that_no_text_holds_are_not_compared() -> None:
    description = Description([])
    description.aside = {"huge": (10**5000, 1), "n": 1, "list": ("list", 1, 10**5000)}
    assert description.own_values().keys() == {"huge", "n", "list"}
