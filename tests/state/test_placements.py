"""DTensors as Checkpointer sees them: which rectangle a rank holds, which tensors are one, what is
refused and by which name, and what ranks compare of each other. Each rank of a job is played in
turn, over a process group that sends nothing. What real ranks save is test_ranks.py's business.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fastckpt.plan.boxes import Box
from fastckpt.ranks.same_state import Description
from fastckpt.state.template import Template
from fastckpt.state.tree import flatten
from tests.kit.placements import described, difference, held, on_ranks

PLACES = [Shard(0)]


def chunk(full: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    pieces = full.chunk(ranks)
    return pieces[rank].clone() if rank < len(pieces) else full[:0].clone()


def part(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


def refused(state: dict[str, Any], world_size: int, rank: int, message: str) -> None:
    """As something to be saved, and as something to be restored."""
    with pytest.raises(TypeError, match=message):
        flatten(state, rank, world_size)
    saved = {name: torch.zeros(value.shape) for name, value in state.items()}
    with pytest.raises(TypeError, match=message.replace("'", "[\"']+.*")):
        Template(state, saved, None, lambda _places: None, "run")


# ---- which part a rank holds ----


@pytest.mark.parametrize("rows", range(1, 14))
def test_fsdp_over_tp_is_a_rectangle(rows: int) -> None:
    full = torch.arange(rows * 3.0).reshape(rows, 3)

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        data, model = mesh.get_coordinate()
        local = chunk(chunk(full, 2, model), 2, data)
        tensor = held(local, mesh, [_StridedShard(0, split_factor=2), Shard(0)], (rows, 3))
        (leaf,) = flatten({"w": tensor}, rank, 4).leaves
        assert torch.equal(part(full, leaf.box), local) and leaf.holders == (rank,)

    on_ranks(4, work)


def test_a_mesh_of_some_ranks_is_refused_with_what_to_do() -> None:
    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor = held(torch.zeros(2, 3), mesh["dp"], PLACES, (4, 3))
        with pytest.raises(
            TypeError, match=r"2 ranks, but must be spread over the 4.*with Replicate"
        ):
            flatten({"y": tensor}, rank, 4)

    on_ranks(4, work)


def test_what_is_no_rectangle_is_refused() -> None:
    full = torch.arange(24.0).reshape(4, 6)

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        half = full[:, 3 * rank : 3 * rank + 3].contiguous()
        turned = held(half, mesh, [Shard(1)], (4, 6))
        every_third = held(half.flatten(), mesh, [_StridedShard(0, split_factor=4)], (24,))
        message = "'y'.* is a DTensor with placements .*_StridedShard.*not a rectangle"
        refused({"y": every_third}, 2, rank, message)
        flat = turned.flatten()
        if any(type(each) is _StridedShard for each in flat.placements):
            refused({"y": flat}, 2, rank, message)
        uneven = held(full[rank : rank * 3 + 1], mesh, [Shard(0)], (4, 6))
        refused(
            {"y": uneven}, 2, rank, r"'y'.* of shape \((1|3), 6\) on this rank.* implies \(2, 6\)"
        )

    on_ranks(2, work)


@pytest.mark.parametrize("split", [1, 3, 4])
def test_another_split_factor_is_refused(split: int) -> None:
    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        places = [_StridedShard(0, split_factor=split), Shard(0)]
        refused(
            {"y": held(torch.zeros(2, 3), mesh, places, (8, 3))}, 4, rank, "'y'.*not a rectangle"
        )

    on_ranks(4, work)


def test_another_order_of_the_mesh_is_refused() -> None:
    spec = pytest.importorskip("torch.distributed.tensor._dtensor_spec")
    if not hasattr(spec, "ShardOrderEntry"):
        pytest.skip("this torch knows one order only")

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for order in ((0, 1), (1, 0)):
            described = spec.DTensorSpec(
                mesh,
                (Shard(0), Shard(0)),
                tensor_meta=spec.TensorMeta(torch.Size((8, 3)), (3, 1), torch.float32),
                shard_order=(spec.ShardOrderEntry(0, order),),
            )
            tensor = DTensor(torch.zeros(2, 3), described, requires_grad=False)
            if order == (0, 1):
                assert flatten({"y": tensor}, rank, 4).leaves[0].box.offsets == (2 * rank, 0)
            else:
                refused({"y": tensor}, 4, rank, "'y'.*applied in the order")

    on_ranks(4, work)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 3, dtype=torch.complex64),
        lambda: torch.zeros(2, 3, device="meta"),
        lambda: torch.zeros(2, 3).to(torch.float8_e4m3fnuz),
        lambda: freed(torch.zeros(2, 3)),
    ],
    ids=["complex", "meta", "fnuz", "freed"],
)
def test_what_shards_cannot_hold_is_refused_by_name(make: Callable[[], torch.Tensor]) -> None:
    def work(rank: int) -> None:
        tensor = held(make(), init_device_mesh("cpu", (2,)), PLACES, (4, 3))
        with pytest.raises(TypeError, match=r"'a/c' is a DTensor .*, which shards cannot hold"):
            flatten({"a": {"c": tensor}}, rank, 2)

    on_ranks(2, work)


# ---- which tensors are one ----


def keys(world_size: int, make: Callable[[int, Any], dict[str, DTensor]]) -> list[list[str]]:
    def work(rank: int) -> list[str]:
        state = make(rank, init_device_mesh("cpu", (world_size,)))
        return [leaf.key for leaf in flatten(state, rank, world_size).leaves]

    return on_ranks(world_size, work)


def test_views_of_one_buffer_are_told_apart_on_all_ranks() -> None:
    def make(rank: int, mesh: Any) -> dict[str, DTensor]:
        flat = torch.zeros(2 if rank < 2 else 0, 4)  # ranks 2 and 3 hold nothing
        a, b = (flat[:1], flat[1:]) if rank < 2 else (flat[0:0], flat[0:0])
        return {name: held(each, mesh, PLACES, (2, 4)) for name, each in (("a", a), ("b", b))}

    assert keys(4, make) == [["a", "b"]] * 4


@pytest.mark.parametrize("rows", [2, 4, 5, 8, 9])
def test_tied_tensors_are_one_on_all_ranks_or_on_none(rows: int) -> None:
    def make(rank: int, mesh: Any) -> dict[str, DTensor]:
        local = chunk(torch.zeros(rows, 3), 4, rank)
        tied, again = (held(each, mesh, PLACES, (rows, 3)) for each in (local, local.detach()))
        other = held(chunk(torch.zeros(rows, 3), 4, rank), mesh, PLACES, (rows, 3))
        return {"a": tied, "same": tied, "b": again, "c": other}

    empty_somewhere = -(-rows // -(-rows // 4)) < 4
    assert keys(4, make) == [["a", "b", "c"] if empty_somewhere else ["a", "c"]] * 4


@pytest.mark.parametrize("rows", range(0, 20))
def test_who_holds_nothing_is_known_to_all(rows: int) -> None:
    """Two tensors of one memory are two as soon as any rank has nothing of them."""

    def work(rank: int) -> tuple[int, bool]:
        mesh = init_device_mesh("cpu", (3, 4))
        first, second = mesh.get_coordinate()
        local = chunk(chunk(torch.zeros(rows, 2), 3, first), 4, second)
        state = {
            name: held(local.detach(), mesh, [Shard(0), Shard(0)], (rows, 2)) for name in ("a", "b")
        }
        leaves = flatten(state, rank, 12).leaves
        return len(leaves), local.numel() == 0

    counts, empty = zip(*on_ranks(12, work), strict=True)
    assert counts == ((2 if any(empty) else 1),) * 12


# ---- inside of what is pickled ----


class Pair(NamedTuple):
    """A namedtuple."""

    a: Any


@dataclasses.dataclass
class Record:
    """Any object."""

    a: Any


class Slots:
    """An object without a dict."""

    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a


class Reduced:
    """An object that says itself what is pickled of it."""

    def __init__(self, a: Any) -> None:
        self._make = lambda: a

    def __reduce__(self) -> Any:
        return Reduced, (self._make(),)


HIDING: dict[str, Callable[[Any], Any]] = {
    "namedtuple": Pair,
    "defaultdict": lambda x: collections.defaultdict(list, {"a": x}),
    "UserDict": lambda x: collections.UserDict({"a": x}),
    "deque": lambda x: collections.deque([x]),
    "set": lambda x: {x},
    "key": lambda x: {1: Record({"deep": [x]})},
    "dataclass": Record,
    "slots": Slots,
    "reduced": Reduced,
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", HIDING)
def test_dtensors_inside_of_objects_are_refused_on_every_rank(name: str, world_size: int) -> None:
    def work(rank: int) -> None:
        tensor = held(
            torch.zeros(2, 3), init_device_mesh("cpu", (world_size,)), PLACES, (2 * world_size, 3)
        )
        state = {"n": 1, "b/c": [0, HIDING[name](tensor)]}
        message = r"'b~1c/1(/1)?' is a DTensor inside a \w+, .*plain dicts, lists and tuples"
        with pytest.raises(TypeError, match=message):
            flatten(state, rank, world_size)

    on_ranks(world_size, work)


def test_other_kinds_of_shards_are_refused() -> None:
    class ShardedTensor(torch.Tensor):
        def local_shards(self) -> list[Any]:
            return []

    tensor = torch.zeros(3).as_subclass(ShardedTensor)
    with pytest.raises(TypeError, match="'t' is a ShardedTensor, and only this rank's part"):
        flatten({"t": tensor}, 0, 1)
    with pytest.raises(TypeError, match="'t' is a ShardedTensor inside a Record"):
        flatten({"t": Record(tensor)}, 0, 1)


def test_other_objects_are_left_to_pickle() -> None:
    itself: Any = Record(None)
    itself.a = itself
    state = {
        "record": Record({"w": torch.zeros(300_000), "p": torch.nn.Parameter(torch.zeros(3))}),
        "lock": Record(threading.Lock()),  # the pickler itself will say so
        "itself": itself,
        "module": torch.nn.Linear,
        "size": torch.Size([1]),
    }
    flat = flatten(state, 0, 1)
    assert flat.objects == state and not flat.leaves


# ---- what ranks compare ----


@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_contents_of_replicated_dtensors_are_compared(shape: tuple[int, ...]) -> None:
    def work(rank: int) -> tuple[Description, tuple[int, ...], tuple[int, ...]]:
        mesh = init_device_mesh("cpu", shape)
        places = [Shard(0), Replicate()][-len(shape) :]
        local = torch.full((64 << 10,), float(rank))
        state = {"r": held(local, mesh, places, (64 << 10,)), "s": torch.zeros(300_000)}
        flat = flatten(state, rank, 2)
        again = flatten(state, rank, 2, first_rank=frozenset({"r"})).leaves[0]
        return described(flat, 2), flat.leaves[0].holders, again.holders

    descriptions, holders, holders_again = zip(*on_ranks(2, work), strict=True)
    assert holders == ((0, 1),) * 2 and holders_again == ((0,),) * 2
    text, unequal = difference(*descriptions)
    assert "the content of r differs: one on rank 0, another on rank 1" in text and unequal == {"r"}


def test_parts_that_differ_by_right_are_not_compared() -> None:
    def work(rank: int) -> bytes:
        mesh = init_device_mesh("cpu", (2, 2))
        _, model = mesh.get_coordinate()
        tensor = held(torch.full((4, 3), float(model)), mesh, [Replicate(), Shard(0)], (8, 3))
        return described(flatten({"w": tensor}, rank, 4), 4).digest()

    assert len(set(on_ranks(4, work))) == 1


def small(**changes: Any) -> Description:
    state = {"a": torch.zeros(3), "b": {"c": torch.zeros(2, 2), "e": torch.empty(0)}} | changes
    return described(flatten(state, 0, 2), 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"a": torch.zeros(4)}, "a is float32 [4] on rank 1 but float32 [3] on rank 0"),
        ({"a": torch.zeros(3).double()}, "a is float64 [3] on rank 1 but float32 [3] on rank 0"),
        ({"b": {"c": torch.zeros(2, 2)}}, "b/e is missing on rank 1"),
        ({"d": torch.zeros(1)}, "d is on rank 1 but not on rank 0"),
        ({"a": torch.zeros(3, dtype=torch.cfloat)}, "a is complex64 [3] on rank 1"),
        ({"a": torch.zeros(300_000)}, "a is float32 [300000], replicated on rank 1"),
    ],
)
def test_small_tensors_are_compared(changes: dict[str, Any], words: str) -> None:
    text, unequal = difference(small(), small(**changes))
    assert words in text and not unequal


def test_values_and_order_of_small_tensors_are_the_first_ranks() -> None:
    turned = {"b": {"e": torch.empty(0), "c": torch.ones(2, 2)}, "a": torch.ones(3), "n": 5}
    assert described(flatten(turned, 0, 2), 2).digest() == small().digest()
