"""Shards: who writes which piece of which tensor, and where the bytes of a piece go on a load.

Small jobs of random meshes, placements and holders are played through in one process and judged by
oracles that look at every element: counters, torch's slices, torch.chunk, torch's own DTensor
arithmetic. Large jobs are only planned. Knows fastckpt.plan.boxes; must not know files or formats.
"""

from __future__ import annotations

import ast
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fastckpt.plan import boxes as rows
from fastckpt.plan import boxes as shards
from fastckpt.plan.boxes import (
    UNCUT_BYTES,
    Box,
    CopyRow,
    Held,
    Piece,
    copies,
    covers,
    intersect,
    mesh_holders,
    plan,
    shard_box,
    span,
)
from tests.kit.storm import Chance

MIB = 1 << 20
BLOCK = 8 * MIB
# An element so large that tensors of a few elements are worth cutting.
HEAVY = 2 * UNCUT_BYTES
DTENSOR = "torch.distributed.tensor._utils"
GUARD = 0xA5

relaxed = settings(
    max_examples=Chance.examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
deep_shapes = st.lists(st.integers(3, 6), min_size=4, max_size=5).map(tuple)


class Part(NamedTuple):
    """A box of a tensor and the ranks that hold it."""

    box: Box
    holders: tuple[int, ...]


class Spread(NamedTuple):
    """A tensor of a job: its global shape and who holds which part of it."""

    shape: tuple[int, ...]
    itemsize: int
    parts: list[Part]


class Mesh(NamedTuple):
    ranks: list[int]
    shape: tuple[int, ...]
    placements: tuple[int | None, ...]

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Coordinates in the order of ranks."""
        return product(*map(range, self.shape))


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def slices(box: Box, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
    """What to index a tensor with to get the box, if its first element is `origin`."""
    origin = origin or (0,) * len(box.sizes)
    return tuple(
        slice(offset - first, offset - first + size)
        for offset, size, first in zip(box.offsets, box.sizes, origin, strict=True)
    )


def times_covered(shape: Sequence[int], boxes: Sequence[Box]) -> torch.Tensor:
    counts = torch.zeros(tuple(shape), dtype=torch.int64)
    for box in boxes:
        counts[slices(box)] += 1
    return counts


def held_by(job: Sequence[Spread], rank: int) -> list[Held]:
    return [
        Held(f"layer.{number}.weight", spread.itemsize, spread.shape, *part)
        for number, spread in enumerate(job)
        for part in spread.parts
        if rank in part.holders
    ]


def replicated(shapes: Sequence[tuple[int, ...]], ranks: int, itemsize: int = 4) -> list[Held]:
    """Tensors that ranks 0, 1, ... all hold in full."""
    holders = tuple(range(ranks))
    return [
        Held(f"layer.{number}.weight", itemsize, shape, whole(shape), holders)
        for number, shape in enumerate(shapes)
    ]


def nbytes(pieces: Sequence[Piece], held: Sequence[Held]) -> int:
    return sum(piece.box.numel * held[piece.held].itemsize for piece in pieces)


@st.composite
def meshes(draw: st.DrawFn, ndim: int, world: int) -> Mesh:
    shape: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        shape.append(draw(st.integers(1, max(1, min(5, world // math.prod(shape))))))
    ranks = draw(st.permutations(range(world)))[: math.prod(shape)]
    dims = st.integers(-ndim, ndim - 1) if ndim else st.none()
    placements = st.tuples(*(st.one_of(st.none(), dims) for _ in shape))
    return Mesh(ranks, tuple(shape), draw(placements))


@st.composite
def boxes_within(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    edges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in edges), tuple(high - low for low, high in edges))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that divide a tensor, each cut made within one of the boxes left by those before."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        for begin, size in ((0, at), (at, box.sizes[dim] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += begin
            sizes[dim] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


@st.composite
def spreads(draw: st.DrawFn, shape: tuple[int, ...], itemsize: int, world: int) -> Spread:
    if draw(st.booleans()):
        mesh = draw(meshes(len(shape), world))
        parts = {
            mesh_holders(mesh.ranks, mesh.shape, at, mesh.placements): shard_box(
                shape, mesh.shape, at, mesh.placements
            )
            for at in mesh.coordinates()
        }
        return Spread(shape, itemsize, [Part(box, holders) for holders, box in parts.items()])
    some_ranks = st.sets(st.integers(0, world - 1), min_size=1).map(lambda ranks: sorted(ranks))
    boxes = draw(tilings(shape))
    return Spread(shape, itemsize, [Part(box, tuple(draw(some_ranks))) for box in boxes])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, list[Spread]]:
    """A world size and some tensors held in it."""
    world = draw(st.integers(1, 10))
    itemsizes = st.sampled_from([1, 4, HEAVY, 3 * HEAVY])
    tensors = [draw(spreads(draw(shapes), draw(itemsizes), world)) for _ in range(3)]
    # Most jobs are the same few layers over and over.
    return world, tensors * draw(st.integers(1, 2))


@st.composite
def loads(draw: st.DrawFn) -> tuple[int, Spread, int, Spread]:
    """A tensor as one job saves it and as another job wants it, with their world sizes."""
    shape, itemsize = draw(shapes), draw(st.sampled_from([1, 3, 8]))
    saving, loading = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    saved = draw(spreads(shape, itemsize, saving))
    return saving, saved, loading, draw(spreads(shape, itemsize, loading))


def runs(rows: Sequence[CopyRow]) -> Iterator[tuple[int, int, int]]:
    for file_offset, address, size, count, file_stride, address_stride in rows:
        for i in range(count):
            yield file_offset + i * file_stride, address + i * address_stride, size


# --- plan


@relaxed
@given(jobs())
def test_every_element_is_written_once(drawn: tuple[int, list[Spread]]) -> None:
    world, job = drawn
    written: dict[str, list[Box]] = {}
    for rank in range(world):
        held = held_by(job, rank)
        pieces = plan(held, rank)
        assert pieces == sorted(pieces, key=lambda piece: (piece.held, piece.begin))
        for piece in pieces:
            written.setdefault(held[piece.held].key, []).append(piece.box)
        for index, count in Counter(piece.held for piece in pieces).items():
            assert count <= max(1, 2 * len(held[index].shape) - 1)
    for number, spread in enumerate(job):
        boxes = written.get(f"layer.{number}.weight", [])
        assert all(box.numel for box in boxes)
        assert torch.equal(times_covered(spread.shape, boxes), torch.ones(spread.shape).long())


@relaxed
@given(jobs())
def test_a_piece_is_one_run_of_memory(drawn: tuple[int, list[Spread]]) -> None:
    world, job = drawn
    for rank in range(world):
        held = held_by(job, rank)
        for piece in plan(held, rank):
            box = held[piece.held].box
            memory = torch.arange(box.numel).reshape(box.sizes)
            elements = memory[slices(piece.box, box.offsets)].flatten()
            first = piece.begin
            assert torch.equal(elements, torch.arange(first, first + piece.box.numel))


@relaxed
@given(st.lists(st.integers(0, 200), min_size=8, max_size=12), st.integers(1, 8))
def test_intervals_differ_by_one_element(sizes: list[int], ranks: int) -> None:
    held = replicated([(size,) for size in sizes], ranks, itemsize=HEAVY)
    shares = [nbytes(plan(held, rank), held) for rank in range(ranks)]
    assert max(shares) - min(shares) <= HEAVY
    assert sum(shares) == sum(sizes) * HEAVY


def test_intervals_follow_the_order_of_holders() -> None:
    held = replicated([(1000, 1000), (7, 130_000), (3_000_000,)], 3)
    order = [(piece.held, piece.begin) for rank in range(3) for piece in plan(held, rank)]
    assert order == sorted(order)
    assert order[0] == (0, 0)


@pytest.mark.parametrize("ranks", range(1, 65))
def test_replicated_state_is_balanced(ranks: int) -> None:
    layer = [(4096, 4096), (14336, 4096), (4096, 14336), (4096,), (64,), (), (8, 1024, 2048)]
    held = replicated([(128256, 4096), *layer * 12, (131, 997, 1009)], ranks)
    plans = [plan(held, rank) for rank in range(ranks)]
    shares = [nbytes(pieces, held) for pieces in plans]
    assert max(shares) <= 1.01 * sum(shares) / ranks
    for index, item in enumerate(held):
        parts = [piece.box for pieces in plans for piece in pieces if piece.held == index]
        assert covers(item.box, parts)


def test_small_state_is_balanced_to_a_block() -> None:
    held = replicated([(size,) for size in range(1, 20_000, 37)], 64)
    shares = [nbytes(plan(held, rank), held) for rank in range(64)]
    assert sum(shares) == sum(item.box.numel * 4 for item in held)
    assert max(shares) - min(shares) <= 2 * UNCUT_BYTES <= BLOCK


def test_small_tensors_are_not_cut() -> None:
    shapes = [(UNCUT_BYTES // 4 - 1,), (), (3, 5), (127, 128), (300, 300)] * 40
    held = replicated(shapes, 32)
    found = Counter(piece.held for rank in range(32) for piece in plan(held, rank))
    small = [index for index, item in enumerate(held) if item.box.numel * 4 < UNCUT_BYTES]
    assert len(small) == 160
    assert all(found[index] == 1 for index in small)
    assert sum(found.values()) > len(held)  # the others are


def test_cuts_are_rounded_to_rows_that_are_small() -> None:
    held = replicated([(1_000_003, 250)], 9)  # a row of 1000 bytes, intervals of over 100 MB
    plans = [plan(held, rank) for rank in range(9)]
    assert [len(pieces) for pieces in plans] == [1] * 9
    assert all(piece.begin % 250 == 0 for pieces in plans for piece in pieces)
    shares = [nbytes(pieces, held) for pieces in plans]
    assert max(shares) - min(shares) <= 1000
    # The same bytes in rows of a hundredth of an interval: exact, and up to three rectangles.
    held = replicated([(1003, 250_000)], 9)
    plans = [plan(held, rank) for rank in range(9)]
    assert max(len(pieces) for pieces in plans) == 3
    shares = [nbytes(pieces, held) for pieces in plans]
    assert max(shares) - min(shares) <= 4


def test_experts_are_cut_between_rows_of_a_matrix() -> None:
    """Where a slice along the first dimension is large, the ones within it may be small enough."""
    held = replicated([(8, 14336, 4096)], 7)
    plans = [plan(held, rank) for rank in range(7)]
    assert all(piece.begin % 4096 == 0 for pieces in plans for piece in pieces)
    assert max(len(pieces) for pieces in plans) <= 3


def test_the_only_tensor_of_a_line_goes_to_anyone() -> None:
    """Many lines that share rank 0, each with one tensor that is not cut."""
    written: Counter[int] = Counter()
    for other in range(1, 401):
        holders = (0, other, other + 1000, other + 2000)
        for number, rank in enumerate(holders):
            held = [Held(f"layer.{other}.bias", 4, (512,), Box((0,), (512,)), holders)]
            written[number] += len(plan(held, rank))
    assert sum(written.values()) == 400
    assert all(60 <= written[number] <= 140 for number in range(4))


def test_rotation_does_not_depend_on_the_process() -> None:
    """Each rank plans alone; Python's own hash of a str would differ from rank to rank."""
    writers = []
    for key in ("model.norm.weight", "model.embed_tokens.weight", "lm_head.bias", "step"):
        held = [Held(key, 4, (512,), Box((0,), (512,)), tuple(range(10, 17)))]
        writers += [rank for rank in range(10, 17) if plan(held, rank)]
    assert writers == [14, 15, 11, 12]


def test_equal_holders_make_one_line() -> None:
    """Whether holders are one tuple or equal ones: ranks cannot know which it is elsewhere."""
    held = replicated([(1000, 1000)] * 5, 3)
    copied = [item._replace(holders=tuple(list(item.holders))) for item in held]
    assert copied[0].holders is not copied[1].holders
    for rank in range(3):
        assert plan(copied, rank) == plan(held, rank)


class CountedTuple(tuple[int, ...]):
    """Holders that count how often they are looked at, and how often as a whole."""

    looks = 0
    walks = 0

    def __getitem__(self, index: Any) -> Any:
        CountedTuple.looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        CountedTuple.walks += 1
        return super().__iter__()

    def __hash__(self) -> int:
        CountedTuple.walks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedTuple.walks += 1
        return super().__eq__(other)

    def __contains__(self, rank: object) -> bool:
        CountedTuple.walks += 1
        return super().__contains__(rank)


def test_ten_thousand_ranks() -> None:
    """A rank's plan looks at its holders a few times, not once for each tensor."""
    world = 10_240
    mesh = list(range(world))
    everyone = CountedTuple(mesh)
    pair = CountedTuple(mesh_holders(mesh, (2, world // 2), (1, 33), (None, 0)))
    assert pair == (33, 33 + world // 2)
    held = []
    for number in range(500):
        shape = (world * 3, 512)
        box = shard_box(shape, (2, world // 2), (1, 33), (None, 0))
        held.append(Held(f"layer.{number}.weight", 2, shape, box, pair))
        held.append(Held(f"layer.{number}.norm", 2, (512,), Box((0,), (512,)), everyone))
    CountedTuple.looks = CountedTuple.walks = 0
    pieces = plan(held, 33)
    assert CountedTuple.walks <= 10
    assert CountedTuple.looks <= 100
    assert 200 <= len(pieces) <= 300
    assert sum(len(plan(held, rank)) for rank in pair) >= 500


def test_a_rank_that_is_no_holder_is_refused() -> None:
    held = replicated([(3,)], 4)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=rf"rank {rank} .*'layer\.0\.weight'"):
            plan(held, rank)
    assert plan(replicated([(0, 3)], 4), 2) == []
    assert plan([], 5) == []


# --- meshes


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh]:
    shape = draw(st.lists(st.integers(0, 20), max_size=4).map(tuple))
    return shape, draw(meshes(len(shape), world=24))


@relaxed
@given(sharded())
def test_shards_are_those_of_torch_chunk(drawn: tuple[tuple[int, ...], Mesh]) -> None:
    shape, mesh = drawn
    elements = torch.arange(math.prod(shape)).reshape(shape)
    for at in mesh.coordinates():
        expected = elements
        for ranks, position, dim in zip(mesh.shape, at, mesh.placements, strict=True):
            if dim is not None:
                chunks = torch.chunk(expected, ranks, dim)
                expected = (
                    chunks[position] if position < len(chunks) else expected.narrow(dim, 0, 0)
                )
        box = shard_box(shape, mesh.shape, at, mesh.placements)
        assert torch.equal(elements[slices(box)], expected)


@relaxed
@given(sharded())
@example(((5, 2), Mesh(list(range(12)), (2, 2, 3), (0, 0, None))))
@example(((3,), Mesh(list(range(8)), (2, 4), (0, -1))))
def test_shards_are_those_of_dtensor(drawn: tuple[tuple[int, ...], Mesh]) -> None:
    oracle = getattr(pytest.importorskip(DTENSOR), "_compute_local_shape_and_global_offset", None)
    if oracle is None:
        pytest.skip(f"this torch has no {DTENSOR}._compute_local_shape_and_global_offset")
    from torch.distributed.tensor import Replicate, Shard

    shape, mesh = drawn
    placements = [
        Replicate() if dim is None else Shard(dim % len(shape)) for dim in mesh.placements
    ]
    for at in mesh.coordinates():
        sizes, offsets = oracle(shape, mesh.shape, list(at), placements)
        box = shard_box(shape, mesh.shape, at, mesh.placements)
        assert (box.numel == 0) == (math.prod(sizes) == 0)
        if box.numel:
            assert box == (tuple(offsets), tuple(sizes))


@relaxed
@given(sharded())
def test_holders_differ_along_replicated_dimensions(drawn: tuple[tuple[int, ...], Mesh]) -> None:
    _, mesh = drawn
    rank_at = dict(zip(mesh.coordinates(), mesh.ranks, strict=True))
    split = [at for at, dim in enumerate(mesh.placements) if dim is not None]
    for here in rank_at:
        alike = [r for at, r in rank_at.items() if all(at[dim] == here[dim] for dim in split)]
        found = mesh_holders(mesh.ranks, mesh.shape, here, mesh.placements)
        assert found == tuple(sorted(alike))


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="no dimension 2"):
        shard_box((3, 4), (2,), (0,), (2,))
    with pytest.raises(ValueError, match="no dimension -3"):
        shard_box((3, 4), (2,), (0,), (-3,))
    with pytest.raises(ValueError, match="no dimension 0"):
        shard_box((), (2,), (0,), (0,))
    with pytest.raises(ValueError, match="one coordinate and one"):
        shard_box((3, 4), (2, 2), (0, 1), (0,))
    with pytest.raises(ValueError, match="outside of a mesh"):
        shard_box((3, 4), (2,), (2,), (0,))
    with pytest.raises(ValueError, match="outside of a mesh"):
        mesh_holders([0, 1], (2,), (-1,), (None,))
    with pytest.raises(ValueError, match="3 ranks"):
        mesh_holders([0, 1, 2], (2, 2), (0, 0), (None, 0))


# --- intersections and copies


@relaxed
@given(st.data(), shapes)
def test_intersection(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_within(shape)), data.draw(boxes_within(shape))
    both = times_covered(shape, [a]) * times_covered(shape, [b])
    common = intersect(a, b)
    assert common == intersect(b, a)
    assert torch.equal(times_covered(shape, [] if common is None else [common]), both)
    assert common is None or common.numel > 0


def test_boxes_of_different_tensors_do_not_intersect() -> None:
    with pytest.raises(ValueError):
        intersect(Box((0,), (3,)), Box((0, 0), (3, 3)))


@relaxed
@given(loads(), st.booleans(), st.randoms(use_true_random=False))
def test_any_mesh_loads_any_mesh(drawn: Any, heavy: bool, random: Any) -> None:
    """Files of pieces are written, then read into guarded memory; every byte arrives once."""
    saving, saved, loading, wanted = drawn
    itemsize = saved.itemsize
    content = torch.tensor(list(random.randbytes(math.prod(saved.shape) * itemsize)))
    content = content.to(torch.uint8).reshape(*saved.shape, itemsize)
    files: list[bytes] = []
    stored: list[tuple[Box, int, int]] = []  # with the number of its file and its place there
    for rank in range(saving):
        held = held_by([saved._replace(itemsize=HEAVY)] if heavy else [saved], rank)
        file = b""
        for piece in plan(held, rank):
            memory = bytes(content[slices(held[piece.held].box)].flatten().tolist())
            begin = piece.begin * itemsize
            file += random.randbytes(random.randrange(8))  # pieces need not touch
            stored.append((piece.box, rank, len(file)))
            file += memory[begin : begin + piece.box.numel * itemsize]
        files.append(file)
    for rank in range(loading):
        for target in (item.box for item in held_by([wanted], rank)):
            size, margin = target.numel * itemsize, random.randrange(1, 9)
            memory = bytearray([GUARD]) * (size + 2 * margin)
            arrivals = [0] * len(memory)
            for box, number, at in stored:
                for source, address, length in runs(copies(box, at, target, margin, itemsize)):
                    memory[address : address + length] = files[number][source : source + length]
                    for byte in range(address, address + length):
                        arrivals[byte] += 1
            assert arrivals == [0] * margin + [1] * size + [0] * margin
            expected = bytes(content[slices(target)].flatten().tolist())
            assert memory == bytes([GUARD]) * margin + expected + bytes([GUARD]) * margin


@relaxed
@given(st.data(), st.one_of(shapes, deep_shapes), st.sampled_from([1, 4]))
def test_runs_are_as_long_as_they_can_be(
    data: st.DataObject, shape: tuple[int, ...], itemsize: int
) -> None:
    piece, target = data.draw(boxes_within(shape)), data.draw(boxes_within(shape))
    rows = copies(piece, 1000, target, 5000, itemsize)
    places = torch.full(shape, -1)
    places[slices(piece)] = 1000 + itemsize * torch.arange(piece.numel).reshape(piece.sizes)
    addresses = torch.full(shape, -1)
    addresses[slices(target)] = 5000 + itemsize * torch.arange(target.numel).reshape(target.sizes)
    expected: list[tuple[int, int, int]] = []
    for place, address in zip(places.flatten().tolist(), addresses.flatten().tolist(), strict=True):
        if place < 0 or address < 0:
            continue
        before = expected[-1] if expected else (0, 0, 0)
        if (place, address) == (before[0] + before[2], before[1] + before[2]):
            expected[-1] = (before[0], before[1], before[2] + itemsize)
        else:
            expected.append((place, address, itemsize))
    assert list(runs(rows)) == expected  # in the order of the file, so rows do not interleave
    for _, _, nbytes, _, file_stride, address_stride in rows:
        assert nbytes <= min(file_stride, address_stride)


def test_a_pattern_in_two_dimensions_is_one_row() -> None:
    # All of the piece, to consecutive memory.
    rows = copies(Box((2, 0), (3, 10)), 64, Box((0, 0), (9, 10)), 0, 4)
    assert rows == [(64, 80, 120, 1, 120, 120)]
    # Columns of a matrix.
    rows = copies(Box((0, 0), (100, 10)), 64, Box((0, 5), (100, 10)), 0, 4)
    assert rows == [(84, 0, 20, 100, 40, 40)]
    # Leading dimensions that go on where the one inside them ends fold into one count.
    rows = copies(Box((0, 0, 0), (7, 5, 8)), 0, Box((0, 0, 4), (7, 5, 4)), 0, 2)
    assert rows == [(8, 0, 8, 35, 16, 8)]
    # Those that do not are one row each.
    rows = copies(Box((0, 0, 0), (3, 5, 8)), 0, Box((0, 1, 4), (3, 2, 4)), 0, 2)
    assert rows == [(24 + 80 * i, 16 * i, 8, 2, 16, 8) for i in range(3)]
    rows = copies(Box((0, 0, 0, 0), (3, 3, 3, 3)), 0, Box((1, 1, 1, 1), (2, 2, 2, 2)), 0, 1)
    outer = [(40, 0), (49, 4), (67, 8), (76, 12)]
    assert rows == [(in_file, in_memory, 2, 2, 3, 2) for in_file, in_memory in outer]
    # A dimension of one element is no dimension.
    rows = copies(Box((0, 0, 0), (3, 1, 8)), 0, Box((0, 0, 4), (3, 5, 4)), 0, 2)
    assert rows == [(8, 0, 8, 3, 16, 40)]
    assert copies(Box((), ()), 96, Box((), ()), 7, 8) == [(96, 7, 8, 1, 8, 8)]
    assert copies(Box((0, 0), (2, 2)), 0, Box((2, 0), (2, 2)), 0, 1) == []


# --- covers


@relaxed
@given(st.data(), shapes)
def test_a_tiling_covers_until_it_is_disturbed(data: st.DataObject, shape: tuple[int, ...]) -> None:
    parts = data.draw(tilings(shape))
    assert covers(whole(shape), parts)
    for _ in range(data.draw(st.integers(1, 2))):
        index = data.draw(st.integers(0, len(parts)))
        change = data.draw(st.sampled_from(["drop", "add", "exchange"]))
        parts[index : index + (change != "add")] = (
            [] if change == "drop" else [data.draw(boxes_within(shape))]
        )
    target = data.draw(st.one_of(st.just(whole(shape)), boxes_within(shape)))
    counts = times_covered(shape, parts)[slices(target)]
    assert covers(target, parts) == torch.equal(counts, torch.ones_like(counts))


def test_equal_volume_is_not_enough() -> None:
    square = whole((4, 4))
    halves = [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))]
    assert covers(square, halves)
    assert not covers(square, [halves[0], halves[0]])
    assert not covers(square, [halves[0], Box((0, 0), (4, 2))])
    assert not covers(square, [square, *halves])
    assert not covers(square, [])
    assert not covers(square, [Box((0,), (16,))])
    assert covers(whole((4, 0)), [])
    assert covers(Box((), ()), [Box((), ())])
    assert not covers(Box((), ()), [Box((), ())] * 2)
    assert not covers(Box((), ()), [])


@pytest.mark.parametrize("dims", [12, 60])
def test_a_corner_cut_along_many_dimensions(dims: int) -> None:
    """Time does not double with each dimension."""
    parts = [
        Box((0,) * k + (1,) + (0,) * (dims - k - 1), (1,) * (k + 1) + (2,) * (dims - k - 1))
        for k in range(dims)
    ]
    parts.append(Box((0,) * dims, (1,) * dims))
    assert covers(whole((2,) * dims), parts)
    assert not covers(whole((2,) * dims), parts[:-1] + parts[-2:-1])
    moved = Box((1, *parts[-1].offsets[1:]), parts[-1].sizes)
    assert not covers(whole((2,) * dims), [*parts[:-1], moved])


def test_the_rest_is_not_told_by_a_pattern() -> None:
    """Four arms around a middle: no straight cut divides them."""
    arms = [Box((0, 0), (2, 3)), Box((0, 3), (3, 2)), Box((3, 2), (2, 3)), Box((2, 0), (3, 2))]
    assert covers(whole((5, 5)), [*arms, Box((2, 2), (1, 1))])
    assert not covers(whole((5, 5)), [*arms, Box((2, 1), (1, 1))])


@pytest.mark.parametrize("dim", [0, 2])
def test_forty_thousand_parts(dim: int) -> None:
    """Comparing each with each would run into the time limit of a test."""
    shape = tuple(20_000 if other == dim else 10 for other in range(3))
    parts = []
    for i, j in product(range(10_000), range(4)):
        offsets, sizes = [0, 0, 0], [10, 10, 10]
        offsets[dim], sizes[dim] = 2 * i, 2
        across = (dim + 1) % 3
        offsets[across], sizes[across] = (0, 3, 4, 8)[j], (3, 1, 4, 2)[j]
        parts.append(Box(tuple(offsets), tuple(sizes)))
    assert covers(whole(shape), parts)
    assert not covers(whole(shape), parts[4:] + parts[-4:])
    assert not covers(whole(shape), parts[1:])


# --- spans


def exact_span(box: Box, shape: Sequence[int]) -> tuple[Fraction, Fraction]:
    first = last = 0
    for offset, size, length in zip(box.offsets, box.sizes, shape, strict=True):
        first, last = first * length + offset, last * length + offset + size - 1
    return Fraction(first, math.prod(shape)), Fraction(last + 1, math.prod(shape))


@relaxed
@given(st.data(), st.lists(st.integers(1, 1 << 40), max_size=4).map(tuple))
def test_a_span_is_never_too_small(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_within(shape))
    low, high = span(box, shape)
    if box.numel == 0:
        assert (low, high) == (0, 0)
        return
    exact_low, exact_high = exact_span(box, shape)
    assert 0 <= low <= exact_low < exact_high <= high <= 1
    assert math.nextafter(low, 1) > exact_low or low == exact_low
    assert math.nextafter(high, 0) < exact_high or high == exact_high


@relaxed
@given(st.data(), shapes)
def test_a_span_bounds_the_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_within(shape))
    elements = torch.arange(math.prod(shape)).reshape(shape)[slices(box)]
    low, high = span(box, shape)
    if elements.numel():
        numel = math.prod(shape)
        assert Fraction(low) <= Fraction(int(elements.min()), numel)
        assert Fraction(high) >= Fraction(int(elements.max()) + 1, numel)
        assert high - low <= (int(elements.max()) + 1 - int(elements.min())) / numel + 1e-12


def test_spans_of_neighbours_touch_where_that_is_exact() -> None:
    quarters = [span(Box((2 * i, 0), (2, 5)), (8, 5)) for i in range(4)]
    assert quarters == [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)]
    thirds = [span(Box((i,), (1,)), (3,)) for i in range(3)]
    assert all(before[1] > after[0] for before, after in pairwise(thirds))
    assert span(Box((), ()), ()) == (0, 1)
    assert span(Box((0, 0), (3, 0)), (3, 0)) == (0, 0)


@pytest.mark.parametrize("module", [shards, rows])
def test_it_imports_nothing_but_the_standard_library(module: ModuleType) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    modules.discard("fastckpt.plan.boxes")
    assert {name.partition(".")[0] for name in modules} <= set(sys.stdlib_module_names)
