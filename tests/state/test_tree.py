"""What a state may consist of, and how it is restored: taken apart and put together without a disk,
then saved and restored by a Checkpointer, in place, into fresh objects, and into states that do not
fit. Knows nothing of directories, faults or other ranks.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import logging
import os
import pickle
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import fastckpt
from fastckpt import Checkpointer, PerRank
from fastckpt.arguments.names import nearest
from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.state.dtensors import Parts
from fastckpt.state.template import Template
from fastckpt.state.tree import (
    DEPTH_MAX,
    ESCAPED,
    PER_RANK,
    TENSOR,
    Flat,
    OfSomeRanks,
    Stored,
    facts_of,
    fill,
    flatten,
    is_stateful,
    stored_of,
    tensors_in,
)
from tests.kit.programs import run_python
from tests.kit.saves import warnings_in
from tests.kit.storm import Chance
from tests.kit.trees import EVERY_DTYPE, MALFORMED, bits, random_bits

WAIT_S = 60.0
BIG = 300_000  # float32 elements: more than 1 MiB, which goes to the shards
Same = Callable[[Any, Any], None]
unsurprised = pytest.mark.filterwarnings(  # that torch will once do without what is saved here
    "ignore:(torch.quantize|Sparse CSR|TypedStorage)"
)


def big(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of the shards, whatever the dtype: it has 2 MiB or more."""
    return torch.full((2 << 20,), value).to(dtype)


def taken_apart(state: Any) -> Flat:
    return flatten(state, 0, 1)


def keys_of(state: Any) -> list[str]:
    return [leaf.key for leaf in taken_apart(state).leaves]


def put_together(flat: Flat) -> Any:
    tensors = {leaf.key: leaf.local for leaf in flat.leaves}
    own = flat.per_rank
    return fill(
        flat.objects, lambda stored, _: tensors[stored.key], lambda name, _: own[name].value
    )


# ---- taken apart ----


def test_keys_are_paths() -> None:
    state = {
        "model": {"a/b": big(), "c~d": big(), "": big()},
        "list": [big(), (big(), {3: big()})],
        "own": PerRank(5),
    }
    flat = taken_apart(state)
    assert [leaf.key for leaf in flat.leaves] == [
        "model/a~1b",
        "model/c~0d",
        "model/",
        "list/0",
        "list/1/0",
        "list/1/1/3",
    ]
    assert flat.objects["own"] == {PER_RANK: "own"} and list(flat.per_rank) == ["own"]
    assert flat.objects["list"][1][1][3] == {
        TENSOR: "list/1/1/3",
        "dtype": "F32",
        "shape": [2 << 20],
    }


def test_keys_that_would_collide_are_told_apart() -> None:
    state = {
        0: big(0),
        "0": big(1),
        "0#2": big(2),
        "a": {"b": big(3)},
        "a/b": big(4),
        "a~1b": big(5),
        True: PerRank(6),
        "True": PerRank(7),
        None: big(8),
        "None": big(9),
        (1, 2): big(10),
        "(1, 2)": big(11),
        1.5: big(12),
    }
    flat = taken_apart(state)
    keys = [leaf.key for leaf in flat.leaves]
    assert len(set(keys)) == len(keys) == 11 and len(flat.per_rank) == 2
    values = [leaf.local[0].item() for leaf in flat.leaves]
    assert values == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12]
    together = put_together(flat)
    assert list(together) == list(state)
    assert [int(v if isinstance(v, int) else 0) for v in (together[True], together["True"])] == [
        6,
        7,
    ]


def test_a_tensor_that_stands_there_twice_is_stored_once() -> None:
    weight = big()
    turned = weight.view(2, -1)
    state = {
        "a": weight,
        "b": [weight],
        "parameter": torch.nn.Parameter(weight),
        "view": weight[: 1 << 20],
        "shape": turned,
        "turned": turned.t(),
        "bits": weight.view(torch.int32),
        "copy": weight.clone(),
    }
    assert keys_of(state) == ["a", "view", "shape", "turned", "bits", "copy"]
    flat = taken_apart(state)
    assert (
        flat.objects["b"] == [flat.objects["a"]] and flat.objects["parameter"] == flat.objects["a"]
    )


@unsurprised
def test_tensors_from_1_mib_on_go_to_the_shards() -> None:
    limit = 1 << 18
    state = {
        "below": torch.ones(limit - 1),
        "at": torch.ones(limit),
        "bytes": torch.ones(1 << 20, dtype=torch.uint8),
        "empty": torch.empty(0, 5),
        "complex": torch.ones(limit, dtype=torch.complex64),
        "meta": torch.empty(limit, device="meta"),
        "sparse": torch.eye(2000).to_sparse(),
        "conjugate": torch.ones(limit, dtype=torch.complex64).conj(),
        "imaginary": torch.ones(limit, dtype=torch.complex64).conj().imag,
        "quantized": torch.quantize_per_tensor(torch.ones(1 << 20), 0.1, 0, torch.qint8),
        "fnuz": torch.ones(1 << 20).to(torch.float8_e4m3fnuz),
    }
    flat = taken_apart(state)
    assert [leaf.key for leaf in flat.leaves] == ["at", "bytes"]
    for name in set(state) - {"at", "bytes"}:
        assert flat.objects[name] is state[name]


@pytest.mark.parametrize("count", [128, 129, 150])
def test_of_many_small_tensors_the_largest_go_to_the_shards(count: int) -> None:
    """64 MiB stay: 128 of half a MiB do, and of more, those that come first in size go."""
    half = 1 << 19
    state = {f"{n}": torch.empty(half, dtype=torch.uint8) for n in range(count)}
    state |= {"tiny": torch.empty(10), "larger": torch.empty(half + 1, dtype=torch.uint8)}
    keys = keys_of(state)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    moved = sum(state[key].nbytes for key in keys)
    assert nbytes - moved <= 64 << 20 < nbytes - moved + half + 1
    assert keys == [*(f"{n}" for n in range(len(keys) - 1)), "larger"]


def test_a_small_view_does_not_bring_its_large_storage() -> None:
    whole = big(3)
    view = whole[5:15]
    kept = taken_apart({"whole": whole, "view": view, "own": whole[:10].clone()}).objects["view"]
    assert torch.equal(kept, view) and kept.untyped_storage().nbytes() == view.nbytes
    small = torch.arange(100)  # of a small storage the sharing is kept
    objects = taken_apart({"a": small, "b": small[3:]}).objects
    assert objects["b"].untyped_storage().data_ptr() == objects["a"].untyped_storage().data_ptr()


class Pair(NamedTuple):
    """A namedtuple."""

    tensor: torch.Tensor
    number: int


def test_what_is_no_plain_container_is_left_as_it_is() -> None:
    state = {
        "counter": Counter("abracadabra"),
        "default": defaultdict(list, {TENSOR: [1], "a": [2]}),
        "named": Pair(big(), 1),
        "set": {1, 2},
        "size": torch.Size([1, 2]),
        "type": dict,
        "module class": torch.nn.Linear,
    }
    flat = taken_apart(state)
    assert flat.leaves == []
    for name, value in put_together(flat).items():
        assert value is state[name], name


def test_nesting_has_a_bound() -> None:
    def nest(depth: int) -> Any:
        value: Any = big()
        for number in range(depth):
            value = ({"k": value}, [value], (value,))[number % 3]
        return value

    together = put_together(taken_apart(nest(DEPTH_MAX)))
    assert str(together) == str(nest(DEPTH_MAX))
    with pytest.raises(ValueError, match=r"nested more than 200 deep at '(0/0/k/)+"):
        taken_apart(nest(DEPTH_MAX + 1))
    itself: dict[str, Any] = {}
    itself["me"] = itself
    for state, where in ((itself, "the state"), ({"a": [itself]}, "the value at 'a/0'")):
        with pytest.raises(ValueError, match=f"contains itself: .*me' is {where} again"):
            taken_apart(state)
        with pytest.raises(ValueError, match=f"contains itself: .*me' is {where} again"):
            list(tensors_in(state))
    with pytest.raises(IncompatibleCheckpoint, match="too deeply"):
        fill(nest(2 * DEPTH_MAX + 1), str, str)


def test_a_path_that_is_no_text_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'a/\\ud800' must be Unicode text"):
        taken_apart({"a": {"\ud800": big()}})
    assert taken_apart({"\ud800": torch.ones(3)}).leaves == []  # pickle takes it


scalars = st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.none(), st.binary())
names = st.one_of(
    st.sampled_from([TENSOR, PER_RANK, ESCAPED, "dtype", "shape", "0", "a/b", "~"]),
    st.integers(0, 2),
    st.text(max_size=2),
)
nests = st.recursive(
    st.one_of(scalars, st.integers(0, 2).map(functools.cache(big))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(names, inner, max_size=3),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=Chance.examples(18))
@given(nest=nests)
def test_any_nest_comes_back(nest: Any) -> None:
    flat = taken_apart(nest)
    together = put_together(flat)

    def same(a: Any, b: Any) -> bool:
        if isinstance(b, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(b, list | tuple):
            return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
        if isinstance(b, dict):
            return list(a) == list(b) and all(same(a[key], b[key]) for key in b)
        return type(a) is type(b) and bool(a == b)

    assert same(together, nest)


LOOKALIKES: list[Any] = [
    {TENSOR: "w", "dtype": "F32", "shape": [3]},
    {TENSOR: 1},
    {PER_RANK: "own"},
    {ESCAPED: {}},
    {ESCAPED: {"a": 1}},
    {ESCAPED: 5},
    {ESCAPED: {ESCAPED: {ESCAPED: {TENSOR: 1}}}},
    {ESCAPED: {TENSOR: "w"}, "other": 1},
    {TENSOR: {PER_RANK: {ESCAPED: {}}}, PER_RANK: {TENSOR: 1}},
]


@pytest.mark.parametrize("value", LOOKALIKES, ids=str)
def test_what_looks_like_a_placeholder_comes_back(disk: Path, value: Any) -> None:
    state = {"value": value, "in a list": [value, (value,)], "weight": big()}
    assert put_together(taken_apart(value)) == value
    with Checkpointer(disk / "run", options=fastckpt.SaveOptions(durable=False)) as checkpointer:
        checkpointer.save(1, state)
        loaded = checkpointer.load()
        assert loaded["value"] == value and loaded["in a list"] == [value, (value,)]
        target = {"value": None, "in a list": 0, "weight": big(0)}
        checkpointer.restore(target)
        assert target["value"] == value and target["in a list"] == [value, (value,)]
        target["value"] = copy.deepcopy(value)
        checkpointer.restore(target)
        assert target["value"] == value


@pytest.mark.parametrize("value", MALFORMED, ids=str)
def test_a_malformed_placeholder_is_damage(value: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match="placeholder for a tensor is malformed"):
        stored_of(value)


def test_a_placeholder_is_what_it_says() -> None:
    value = {TENSOR: "w", "dtype": "BF16", "shape": [0, 3]}
    assert stored_of(value) == Stored("w", torch.bfloat16, (0, 3))
    assert stored_of(OrderedDict(value)) is None and stored_of({}) is None and stored_of(3) is None


def test_pickles_name_what_a_rank_has_of_its_own_by_its_public_name() -> None:
    """So that a file outlives any move of modules."""
    assert b"fastckpt.state" not in (pickled := pickle.dumps(PerRank(1)))
    assert pickle.loads(pickled).value == 1


EMPTY_SHARDS = """
import json, os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from fastckpt.state.tree import flatten

def part(full, rank, mesh):
    pieces = full.chunk(4)
    local = pieces[rank].clone() if rank < len(pieces) else full.new_empty(0, *full.shape[1:])
    return DTensor.from_local(local, mesh, [Shard(0)], shape=full.shape, stride=full.stride(),
                              run_check=False)

class Fresh:
    "Its state_dict makes new tensors each time, which are gone as soon as nobody holds them."
    def __init__(self, parts): self.parts = parts
    def state_dict(self): return {k: v.detach() for k, v in self.parts.items()}
    def load_state_dict(self, state): raise NotImplementedError

found = []
for rank in (0, 1, 3):
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with os.fdopen(reader) as pipe:
            found.append(json.load(pipe))
        continue
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    tied = part(torch.ones(2, 3), rank, mesh)
    state = [
        Fresh({"a": tied, "b": tied, f"c": part(torch.ones(2, 3), rank, mesh)}),
        *(Fresh({"d": part(torch.ones(2, 3), rank, mesh)}) for _ in range(9)),
    ]
    flat = flatten(state, rank, 4)
    with os.fdopen(writer, "w") as pipe:
        json.dump([leaf.key for leaf in flat.leaves], pipe)
    os._exit(0)
assert found[0] == ["0/a", "0/b", "0/c", *(f"{n}/d" for n in range(1, 10))], found[0]
assert found.count(found[0]) == 3, found
"""


def test_ranks_without_a_part_see_the_same_tensors() -> None:
    """Where memory does not tell everywhere what is tied, nowhere is it asked."""
    run_python(EMPTY_SHARDS, imports="tests.crews.steps_imports", limit_s=240)


def test_ranks_describe_a_tensor_of_some_ranks_alike_whether_they_hold_it_or_not() -> None:
    ranks, weight = (1, 2), torch.rand(3, 5)
    held = flatten({"weight": OfSomeRanks(ranks, weight)}, 1, 4)
    facts = facts_of(Parts(4, None), "weight", OfSomeRanks(ranks, weight))
    known = flatten({"weight": OfSomeRanks(ranks, None, facts)}, 0, 4)
    assert held.objects == known.objects
    (here,), (there,) = held.leaves, known.leaves
    assert here.local.data_ptr() == weight.data_ptr() and there.local.numel() == 0
    for leaf in (here, there):
        assert (leaf.key, leaf.shape, leaf.holders) == ("weight", (3, 5), ranks)
        assert leaf.placement == "replicated on the ranks (1, 2)"
    with pytest.raises(TypeError, match=r"'weight' is a Tensor, which shards cannot hold"):
        flatten({"weight": OfSomeRanks(ranks, weight.to_sparse())}, 1, 4)


# ---- saved and restored ----


@pytest.fixture
def run(disk: Path) -> Iterator[Callable[..., Any]]:
    """`run(state, target)`: saves state, restores it into target, returns what load() gives."""
    with Checkpointer(disk / "run", options=fastckpt.SaveOptions(durable=False)) as checkpointer:

        def save_and_restore(state: Any, *targets: Any, weights_only: bool = True) -> Any:
            checkpointer.save(1, state).result(WAIT_S)
            for target in targets:
                assert checkpointer.restore(target, weights_only=weights_only) == 1
            return checkpointer.load(weights_only=weights_only)

        yield save_and_restore


Run = Callable[..., Any]


def test_every_dtype_in_place_bit_for_bit(run: Run) -> None:
    state = {
        str(d): random_bits(d, (1 << 20) // d.itemsize + 5, n) for n, d in enumerate(EVERY_DTYPE)
    }
    state |= {f"{d} few": random_bits(d, 5, n) for n, d in enumerate(EVERY_DTYPE)}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    places = {name: tensor.data_ptr() for name, tensor in target.items()}
    loaded = run(state, target)
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(bits(loaded[name]), bits(tensor)), name
        assert torch.equal(bits(target[name]), bits(tensor)), name
        assert target[name].data_ptr() == places[name], f"{name} was replaced"


@unsurprised
def test_special_tensors(run: Run, assert_same: Same) -> None:
    state = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "empty and large": torch.empty(1 << 40, 0),
        "sparse": torch.eye(300).to_sparse(),
        "csr": torch.eye(300).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(1 << 20), 0.5, 3, torch.quint8),
        "complex": torch.full((200_000,), 1 + 2j),
        "conjugate": torch.full((9,), 1 + 2j).conj(),
        "parameter": torch.nn.Parameter(torch.ones(5), requires_grad=False),
        "meta": torch.empty(5, device="meta"),
    }
    assert_same(run(state), state)
    target = {
        name: torch.zeros_like(state[name]) for name in ("scalar", "empty", "empty and large")
    }
    target["complex"] = torch.zeros(200_000, dtype=torch.complex64)
    run(state, target)
    assert target["scalar"].item() == 3.5 and bool((target["complex"] == 1 + 2j).all())


def test_strides_are_the_targets_own(run: Run) -> None:
    base = torch.arange(4 << 18, dtype=torch.float32).reshape(1024, 1024)
    small = torch.arange(12.0).reshape(3, 4)
    state = {
        "turned": base.t(),
        "every second": base[:, ::2],
        "channels last": base.reshape(4, 16, 128, 128).to(memory_format=torch.channels_last),
        "expanded": torch.arange(1024.0).expand(1024, 1024),
        "small": small.t(),
        "straight": base.clone(),
        "straight small": small.clone(),
    }
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    target["straight"] = torch.zeros(1024, 1024).t()
    target["straight small"] = torch.zeros(4, 3).t()
    target["expanded"] = torch.zeros(1024, 1024)
    before = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in target.items()}
    loaded = run(state, target)
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor) and torch.equal(loaded[name], tensor), name
        assert (target[name].data_ptr(), target[name].stride()) == before[name], name


def test_only_the_named_part_of_a_storage_is_written(run: Run) -> None:
    whole = torch.zeros(3, BIG)
    run({"w": torch.ones(BIG), "s": torch.ones(5)}, {"w": whole[1], "s": whole[2, 5:10]})
    assert whole.sum(1).tolist() == [0, BIG, 5] and whole[2, 5:10].sum() == 5


def test_tied_tensors_restore_into_tied_and_untied_ones(run: Run) -> None:
    weight = big(4)
    state = {"a": weight, "b": weight, "c": [weight[:9], weight[:9]]}
    tied = big(0)
    target = {"a": tied, "b": tied, "c": [tied[:9], torch.zeros(9)]}
    apart = {"a": big(0), "b": big(0), "c": [torch.zeros(9), torch.zeros(9)]}
    loaded = run(state, target, apart)
    assert target["a"] is target["b"] is tied
    for values in (target, apart, loaded):
        assert all(bool((t == 4).all()) for t in (values["a"], values["b"], *values["c"]))
    assert apart["a"].data_ptr() != apart["b"].data_ptr()


@pytest.mark.parametrize("elements", [2 << 20, 7], ids=["shard", "object"])
def test_autograd_notices_a_restore_in_place(run: Run, elements: int) -> None:
    weight = torch.nn.Parameter(torch.ones(elements))
    other = torch.nn.Parameter(torch.ones(elements))
    loss = (weight * weight).sum()
    untouched = (other * other).sum()
    before = weight._version
    run({"w": torch.full((elements,), 3.0)}, {"w": weight})
    assert weight._version > before and weight.requires_grad and weight.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    untouched.backward()
    (weight * weight).sum().backward()
    assert weight.grad is not None and weight.grad[0].item() == 6


def test_other_values_are_replaced(run: Run) -> None:
    state = {
        "int": 5,
        "none": None,
        "text": "a",
        "list": [1, [2, 3]],
        "tuple": (1, torch.ones(2)),
        "empty": {},
        "grown": {"a": 1},
        "longer": [1, 2, 3],
        "tensors": [torch.ones(2), 7, {"k": torch.ones(BIG)}],
        "ordered": OrderedDict(b=1, a=2),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
    }
    inner, item = {"k": torch.zeros(BIG)}, torch.zeros(2)
    target = {
        "int": 0,
        "none": 3,
        "text": None,
        "list": [],
        "tuple": (0, item),
        "empty": {},
        "grown": {},
        "longer": [9],
        "tensors": (tensors := [torch.zeros(2), 0, inner]),
        "ordered": {},
        "device": None,
        "dtype": None,
    }
    loaded = run(state, target)
    assert target["tuple"][0] == 1 and target["tuple"][1] is item and item.tolist() == [1, 1]
    assert target["tensors"] is tensors and tensors[2] is inner and tensors[1] == 7
    assert bool((inner["k"] == 1).all()) and tensors[0].tolist() == [1, 1]
    for name in ("int", "none", "text", "list", "empty", "grown", "longer", "device", "dtype"):
        assert target[name] == state[name] == loaded[name], name
    assert (
        list(loaded["ordered"].items()) == [("b", 1), ("a", 2)] == list(target["ordered"].items())
    )
    assert type(loaded["tuple"]) is tuple and loaded["tensors"][1] == 7


def test_a_list_as_a_state(run: Run) -> None:
    for state in ([1, 2, 3], [torch.ones(3), 5, big()], [PerRank(1), []], []):
        plain = not any(isinstance(item, torch.Tensor | PerRank) for item in state)
        target: list[Any] = [9] * 5 if plain else copy.deepcopy(state)
        loaded = run(state, target)
        assert str(target) == str(loaded) == str(state)
    with pytest.raises(
        IncompatibleCheckpoint, match="state is a list, but the checkpoint has a dict"
    ):
        run({"a": 1}, [1])
    with pytest.raises(
        IncompatibleCheckpoint, match="state is a dict, but the checkpoint has 1 item"
    ):
        run([1], {"a": 1})


def test_a_namedtuple_is_restored_with_weights_only_off(run: Run) -> None:
    tensor = torch.zeros(3)
    target = {"pair": Pair(tensor, 0)}
    run({"pair": Pair(torch.ones(3), 5)}, target, weights_only=False)
    assert type(target["pair"]) is Pair and target["pair"].number == 5
    assert target["pair"].tensor is tensor and tensor.tolist() == [1, 1, 1]


def test_big_lists(run: Run) -> None:
    order = list(range(100_000))
    random.Random(5).shuffle(order)
    state = {"order": order, "nested": [[n, str(n), None] for n in range(5_000)]}
    target: dict[str, Any] = {"order": [], "nested": None}
    assert run(state, target) == state == target


def test_more_than_64_mib_of_small_tensors(run: Run) -> None:
    state = {f"{n}": torch.full((1 << 19,), n % 256, dtype=torch.uint8) for n in range(140)}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    loaded = run(state, target)
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor) and torch.equal(loaded[name], tensor)


# ---- what does not fit ----


def test_nothing_changes_where_something_does_not_fit(disk: Path) -> None:
    class Living:
        """Hands out the very dict it lives by."""

        def __init__(self, **inner: Any) -> None:
            self.inner = inner

        def state_dict(self) -> dict[str, Any]:
            return {"inner": self.inner}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.inner = state["inner"]

    def made(value: int) -> dict[str, Any]:
        model = torch.nn.Linear(600, 600)
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        return {
            "model": model,
            "optimizer": optimizer,
            "own": PerRank(value),
            "living": Living(
                a=value, t=torch.full((3,), value), **({"b": 1} if value == 1 else {})
            ),
            "nest": [{"w": big(value)}, torch.full((3,), value), value],
        }

    def frozen(state: dict[str, Any]) -> str:
        return str({k: v.state_dict() if is_stateful(v) else v for k, v in state.items()})

    saved = made(1)
    changes: list[tuple[str, Any, str]] = [
        ("x", torch.zeros(4), r"has shape \[4\], but \[3\] in the checkpoint"),
        ("large", torch.zeros(2, 1 << 20), r"'large' has shape \[2, 1048576\]"),
        ("missing", 5, "'missing' is missing in the checkpoint"),
        ("text", torch.zeros(3), r"'text' is a tensor, but the checkpoint has a str"),
        ("x", {"a": 1}, r"'x' is a dict, but the checkpoint has a tensor"),
        ("large", {"a": 1}, "'large' is a dict, but the checkpoint has a tensor"),
        ("own", {"a": 1}, "'own' is a dict, but the checkpoint has a PerRank"),
        ("nest", [{"w": big(), "v": 1}, torch.zeros(3), 1], "'nest/0/v' is missing in"),
        ("items", [torch.zeros(1)], r"'items' has 1 item, but the checkpoint has 2 items"),
        ("items", PerRank(1), "is a PerRank, but the checkpoint has 2 items"),
        ("x", PerRank(1), "is a PerRank, but the checkpoint has a tensor"),
        ("own", torch.zeros(3), r"'own' is a tensor, but the checkpoint has a PerRank"),
        ("items", torch.nn.Linear(2, 2), r"'items' has a dict, but the checkpoint has 2 items"),
        ("x", torch.nn.Linear(2, 2), r"'x' has a dict, but the checkpoint has a tensor"),
        ("large", torch.nn.Linear(2, 2), r"'large' has a dict, but the checkpoint has a tensor"),
        ("model", torch.nn.Linear(600, 601), r"'model/weight' has shape \[601, 600\]"),
        (
            "model",
            torch.nn.Sequential(torch.nn.Linear(2, 2)),
            "'model/0.weight', 'model/0.bias' are miss",
        ),
        (
            "model",
            torch.nn.Linear(600, 600, bias=False),
            r"'model' is a module without 'model/bias'",
        ),
    ]
    extra = {
        "x": torch.zeros(3),
        "large": big(),
        "text": "a",
        "items": [torch.zeros(1), {"weight": 0}],
    }
    with Checkpointer(disk / "run", options=fastckpt.SaveOptions(durable=False)) as checkpointer:
        checkpointer.save(1, saved | extra)
        before = frozen(made(2))
        for name, wrong, message in changes:
            target = made(2)
            with pytest.raises(IncompatibleCheckpoint, match=message):
                checkpointer.restore(target | {name: wrong})
            assert frozen(target) == before, f"{name} changed something"
            assert target["own"].value == 2 and target["own"].found is None


def test_what_is_not_asked_for_is_told_and_left_out(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = {f"{n}": torch.ones(3) for n in range(9)}
    state |= {"deep": {"a": big(), "b": 1, "c": torch.ones(3)}}
    target: dict[str, Any] = {"0": torch.zeros(3), "deep": {"b": 0, "c": torch.zeros(3)}}
    with caplog.at_level(logging.WARNING, "fastckpt"):
        run(state, target)
    assert target["0"].tolist() == [1, 1, 1] and len(target) == 2
    assert target["deep"]["b"] == 1 and list(target["deep"]) == ["b", "c"]
    (record,) = warnings_in(caplog.records)
    assert "'1', '2', '3', '4', '5' and 4 more" in record.message
    caplog.clear()
    run(state, {})
    assert "'0'" in caplog.text
    caplog.clear()
    run(state, {name: torch.zeros(3) for name in list(state)[:9]} | {"deep": {}})
    assert caplog.text == ""


class Settings:
    """An object that only pickle can save."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


UNFILLABLE: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.empty(BIG, device="meta"), "is on the meta device"),
    "expanded": (lambda: torch.zeros(1).expand(BIG), "has elements that share memory"),
    "overlapping": (
        lambda: torch.zeros(2 * BIG).as_strided((BIG // 2, 2), (1, 1)),
        "has elements that share memory",
    ),
    "sparse": (
        lambda: torch.zeros(BIG).to_sparse(),
        "is torch.sparse_coo, but torch.strided in the checkpoint",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.zeros(BIG), 0.1, 0, torch.qint8),
        "is quantized, but torch.strided in the checkpoint",
    ),
    "lazy": (lambda: torch.nn.UninitializedParameter(), "has no shape"),
}


@unsurprised
@pytest.mark.parametrize(
    ("name", "elements"),
    [*((name, BIG) for name in UNFILLABLE), ("meta", 40), ("expanded", 40), ("quantized", 40)],
)
def test_tensors_that_nothing_can_be_put_into(disk: Path, name: str, elements: int) -> None:
    make, message = UNFILLABLE[name]
    made = make() if elements == BIG else make()[:elements]
    shape = (BIG // 2, 2) if name == "overlapping" else (elements,)
    target = {"first": torch.zeros(3), "w": [made]}
    with Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"first": torch.ones(3), "w": [torch.ones(shape)]})
        with pytest.raises(TypeError, match=rf"'w/0' {message}.*in place"):
            checkpointer.restore(target)
    assert target["first"].tolist() == [0, 0, 0]


@unsurprised
@pytest.mark.parametrize("fence", ["call", "step"])
@pytest.mark.parametrize("rows", [3, 600])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_come_back(disk: Path, layout: torch.layout, rows: int, fence: Any) -> None:
    parts = [torch.randn(rows, 40), torch.randn(rows + 2, 40)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    other = torch.nested.nested_tensor([torch.zeros(1, 40)], layout=layout)
    with Checkpointer(disk / "run", options=fastckpt.SaveOptions(fence=fence)) as checkpointer:
        checkpointer.save(1, {"t": nested, "l": [nested, 1], "plain": torch.ones(3)}).result(60)
        target = {"t": other, "l": [other, 0], "plain": torch.zeros(3)}
        assert checkpointer.restore(target) == 1
        for found in (checkpointer.load()["t"], target["t"], target["l"][0]):
            assert found.is_nested and found.layout is layout
            assert all(map(torch.equal, found.unbind(), parts))
        assert target["plain"].tolist() == [1, 1, 1] and target["l"][1] == 1
        with pytest.raises(
            IncompatibleCheckpoint, match=r"'t' is a tensor, but the .* a nested te"
        ):
            checkpointer.restore({"t": torch.zeros(3)}, unexpected="ignore")
        with pytest.raises(
            IncompatibleCheckpoint, match=r"'plain' is a nested tensor, but the .* a t"
        ):
            checkpointer.restore({"plain": other}, unexpected="ignore")
        checkpointer.save(2, nested).result(60)
        with pytest.raises(TypeError, match="is a nested tensor, which cannot be restored in pla"):
            checkpointer.restore(other)


def test_what_has_no_values_is_not_restored(run: Run) -> None:
    with pytest.raises(TypeError, match="was saved on the meta device"):
        run({"w": torch.empty(5, device="meta")}, {"w": torch.zeros(5)})


@pytest.mark.parametrize("elements", [BIG, 40], ids=["shards", "objects"])
def test_negative_views_get_the_values_and_not_the_bytes(run: Run, elements: int) -> None:
    target = {"w": torch._neg_view(torch.zeros(elements))}
    run({"w": torch.ones(elements)}, target)
    assert target["w"].is_neg() and bool((target["w"] == 1).all())


class Doubled(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, half: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)

    def __init__(self, half: torch.Tensor) -> None:
        self.half = half

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        assert func is torch.ops.aten.copy_.default, func
        args[0].half.copy_(args[1] / 2)
        return args[0]


def test_a_tensor_without_memory_of_its_own(run: Run) -> None:
    target = {"w": Doubled(torch.zeros(BIG))}
    run({"w": torch.full((BIG,), 6.0)}, target)
    assert bool((target["w"].half == 3).all())


def shared(depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = {"x": [value, value], "y": (value,)}
    return value


def test_what_is_shared_is_filled_once() -> None:
    """40 levels of it would be 2^60 lists."""
    calls: list[Stored] = []

    def tensor(stored: Stored, spread: object) -> Any:
        assert spread is None
        calls.append(stored)
        return stored.key

    filled = fill(shared(40, {TENSOR: "w", "dtype": "F32", "shape": [1]}), tensor, str)
    assert len(calls) == 1 and filled["x"][0] is filled["x"][1] is filled["y"][0]
    assert str(fill(shared(3, 5), tensor, str)) == str(shared(3, 5))


@pytest.mark.parametrize("own", [False, True], ids=["object", "per rank"])
def test_objects_need_weights_only_off(disk: Path, own: bool) -> None:
    state = {"settings": PerRank(Settings(5)) if own else Settings(5), "w": big()}
    with Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, state)
        target: dict[str, Any] = {"settings": PerRank(0) if own else 0, "w": big(0)}
        before = str(target)
        message = r"^'.*step-00000001'.* 'settings' .made with '.*\.Settings'\)\. .* runs code"
        with pytest.raises(Exception, match=message) as caught:
            checkpointer.restore(target)
        assert "\n" not in str(caught.value)
        assert type(caught.value).__name__ == "UnpicklingError"
        assert str(target) == before
        with pytest.raises(Exception, match="weights_only"):
            checkpointer.load()
        assert checkpointer.restore(target, weights_only=False) == 1
        found = target["settings"].value if own else target["settings"]
        assert found == Settings(5) and bool((target["w"] == 1).all())
        with torch.serialization.safe_globals([Settings]):
            loaded = checkpointer.load()["settings"]
        assert (loaded.value if own else loaded) == Settings(5)


class Harm:
    """Unpickled, it would leave a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def beside(disk: Path) -> Iterator[Checkpointer]:
    """A step with weights beside objects that weights_only=True refuses."""
    model = torch.nn.Linear(600, 600)
    torch.nn.init.ones_(model.weight)
    state = {
        "model": model,
        "args": argparse.Namespace(out=disk / "out"),
        "harm": Harm(disk / "trace"),
        "own": PerRank({"numpy": numpy.array([{}]), "epoch": 3}),
        "nest": {"out": [disk, 5], "n": 7, "small": torch.ones(3)},
        "optimizer": torch.optim.SGD(model.parameters(), lr=numpy.float64(0.5)),
    }
    with Checkpointer(disk / "run", options=fastckpt.SaveOptions(durable=False)) as checkpointer:
        checkpointer.save(1, state).result(WAIT_S)
        yield checkpointer
    assert not (disk / "trace").exists()


def test_weights_come_without_the_objects_beside_them(beside: Checkpointer) -> None:
    model = torch.nn.Linear(600, 600)
    nest = {"nest": {"n": 0, "small": torch.zeros(3)}}
    assert beside.restore({"model": model} | nest) == 1 and bool((model.weight == 1).all())
    assert nest["nest"]["n"] == 7 and bool((nest["nest"]["small"] == 1).all())
    state = {"model": torch.nn.Linear(600, 600), "args": 1, "own": PerRank(1)}
    beside.restore(state, only="model/*")
    assert torch.equal(state["model"].weight, model.weight) and state["args"] == 1
    beside.restore({"net": state["model"]}, rename={"^model/": "net/"})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    beside.restore({"optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == numpy.float64(0.5)
    fastckpt.load_into({"model": state["model"]}, os.path.join(beside.root, "step-00000001"))
    with fastckpt.open(beside.root) as tensors:
        assert {*tensors} == {"model/weight", "model/bias", "nest/small"}


@pytest.mark.parametrize(
    ("state", "name", "maker"),
    [
        ({"args": 1}, "args", "argparse.Namespace"),
        ({"args": {"out": 1}}, "args", "argparse.Namespace"),
        ({"args": torch.zeros(1)}, "args", "argparse.Namespace"),
        ({"harm": 1}, "harm", f"{os.mkdir.__module__}.mkdir"),
        ({"own": PerRank(0)}, "own/numpy", "numpy.dtype"),
        ({"own": 0}, "own/numpy", "numpy.dtype"),
        ({"nest": {"out": 0}}, "nest/out/0", "pathlib.*PosixPath"),
        ({"nest": {"out": [torch.zeros(1), 0]}}, "nest/out/0", "pathlib.*PosixPath"),
    ],
)
def test_an_object_that_is_asked_for_is_named(
    beside: Checkpointer, state: dict[str, Any], name: str, maker: str
) -> None:
    before = str(state)
    words = f"step-00000001': .*refuses '{name}' .made with '{maker}'.*only=.*load_into"
    with pytest.raises(pickle.UnpicklingError, match=words):
        beside.restore(state, unexpected="ignore")
    assert str(state) == before, "nothing changes"


def test_all_objects_that_a_load_would_need_are_named(beside: Checkpointer) -> None:
    names = r"'args'.*'harm'.*'nest/out/0'.*'own/num"
    with pytest.raises(
        pickle.UnpicklingError, match=rf"{names}.*Get the rest with restore\(\), with"
    ):
        beside.load()


@pytest.mark.parametrize("value", [collections.deque([1]), collections.defaultdict(list, a=[1])])
def test_what_torch_cannot_be_made_to_load_is_told(
    disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    torch.save(value, disk / "by torch")
    allowed = torch.serialization.safe_globals([type(value), list])
    with suppress(pickle.UnpicklingError), allowed:  # as newer ones refuse it, allowed or not
        torch.load(disk / "by torch", weights_only=True)
        pytest.skip(f"this torch can be made to load a {type(value).__name__}")
    monkeypatch.setattr("fastckpt.steps.plan._checked_makers", set())
    with Checkpointer(disk / "run", options=fastckpt.SaveOptions(durable=False)) as checkpointer:
        checkpointer.save(1, {"a": value}).result(WAIT_S)
        allowed = torch.serialization.safe_globals([type(value), list])
        with allowed, pytest.raises(pickle.UnpicklingError) as caught:
            checkpointer.restore({"a": None})
    (warned,) = caplog.messages
    for told in (warned, str(caught.value)):
        assert "add_safe_globals cannot allow a deque or a defaultdict: save a list" in told


class OfTheUsers:
    """A class that torch does not allow."""


class AnotherOfThem(OfTheUsers):
    """Another one."""


def test_a_save_names_what_its_restore_will_refuse(
    disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastckpt.steps.plan._checked_makers", set())
    state = {
        "w": torch.ones(600, 600),
        "small": {"t": torch.ones(3), "numpy": numpy.arange(3), "n": collections.OrderedDict(a=1)},
        "queue": [1, {"last": collections.deque([1, OfTheUsers()])}],
        "users": OfTheUsers(),
        "own": PerRank({"at": [torch.ones(3), AnotherOfThem()]}),
        "text": "cos\nsystem\n",
        "array": numpy.array([None]),
        "range": range(3),
    }
    with Checkpointer(disk / "run", options=fastckpt.SaveOptions(durable=False)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).result(WAIT_S)
        dates = {"plain": numpy.arange(3), "date": numpy.datetime64("2026-01-01")}
        checkpointer.save(3, dates).result(WAIT_S)
    told, of_dates = caplog.messages
    assert "'date' (made with numpy.dtype)" in of_dates and "plain" not in of_dates
    assert "'array' (made with numpy.dtype)" in told
    assert "'range' (made with builtins.range)" in told
    assert "cannot allow a deque" in told and "cannot allow" not in of_dates
    assert "'queue/1/last' (made with collections.deque)" in told and "weights_only=False" in told
    assert f"'users' (made with {__name__}.OfTheUsers)" in told
    assert f"'own/at/1' (made with {__name__}.AnotherOfThem)" in told
    assert "step-00000001" in told and "text" not in told and "small" not in told


# ---- values of each rank ----


def test_values_of_a_rank(run: Run) -> None:
    generator = torch.Generator().manual_seed(5)
    draws = torch.rand(3, generator=generator.clone_state())
    python = random.Random(7)
    model = torch.nn.Linear(3, 3)
    state = {
        "rng": PerRank(generator.get_state()),
        "python": PerRank(python.getstate()),
        "tuple": PerRank((1, torch.ones(2), {"a": [2]})),
        "model": PerRank(model),
        "none": PerRank(),
        "deep": [{"0": PerRank(1), 0: PerRank(2)}],
        "large": PerRank(big(3)),
    }
    fresh = torch.nn.Linear(3, 3)
    weight = fresh.weight
    target = {
        "rng": PerRank(0),
        "python": PerRank(),
        "tuple": PerRank(),
        "model": PerRank(fresh),
        "none": PerRank("something"),
        "deep": [{"0": PerRank(), 0: PerRank()}],
        "large": PerRank(big(0)),
    }
    loaded = run(state, target)
    for values in (target, loaded):
        restored = torch.Generator()
        restored.set_state(values["rng"].value)
        assert torch.equal(torch.rand(3, generator=restored), draws)
        assert values["python"].value == python.getstate()
        assert str(values["tuple"].value) == str(state["tuple"].value)
        assert values["none"].value is None and values["none"].found
        assert values["deep"][0]["0"].value == 1 and values["deep"][0][0].value == 2
        assert bool((values["large"].value == 3).all())
        assert all(
            isinstance(values[name], PerRank) and values[name].found
            for name in values
            if name != "deep"
        )
    assert target["model"].value is fresh and fresh.weight is weight
    assert torch.equal(fresh.weight, model.weight)
    assert torch.equal(loaded["model"].value["weight"], model.weight)


def test_a_rank_value_in_place_of_something_else(run: Run) -> None:
    """A value that the target does not declare as PerRank comes as one."""
    target: dict[str, Any] = {"a": None}
    run({"a": PerRank(5)}, target)
    assert isinstance(target["a"], PerRank) and target["a"].value == 5 and target["a"].found


def test_per_rank_shows_itself() -> None:
    value = PerRank()
    assert (value.value, value.found) == (None, None) and repr(PerRank([1])) == "PerRank([1])"


# ---- modules, optimizers and what goes with them ----


class Net(torch.nn.Module):
    """With everything that a state_dict may hold: buffers, tied weights, extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(1500, 256)
        self.norm = torch.nn.BatchNorm1d(256)
        self.layer = torch.nn.Linear(256, 64)
        self.head = torch.nn.Linear(256, 1500, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("scratch", torch.rand(5), persistent=False)
        self.epoch = seed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens))
        return self.head(hidden) + self.layer(hidden).sum()

    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        tokens = torch.arange(20) * (number + 7) % 1500
        net(tokens).square().mean().backward()
        optimizer.step()


def test_a_module_in_place(run: Run) -> None:
    net, fresh = Net(1), Net(2)
    net.norm.running_mean.fill_(0.25)
    places = {
        name: tensor.data_ptr()
        for name, tensor in fresh.state_dict().items()
        if name != "_extra_state"
    }
    scratch = fresh.scratch.clone()
    loaded = run({"net": net}, {"net": fresh})
    for name, tensor in net.state_dict().items():
        if name != "_extra_state":
            assert torch.equal(fresh.state_dict()[name], tensor), name
            assert fresh.state_dict()[name].data_ptr() == places[name], name
    assert fresh.epoch == 1 and fresh.head.weight is fresh.embedding.weight
    assert torch.equal(fresh.scratch, scratch)
    other = Net(3)
    other.load_state_dict(loaded["net"])
    assert torch.equal(other.layer.weight, net.layer.weight) and other.epoch == 1
    root = Net(4)
    run(net, root)  # a module by itself is a state, too
    assert torch.equal(root.layer.weight, net.layer.weight)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "amsgrad": functools.partial(torch.optim.AdamW, amsgrad=True),
    "capturable lr": functools.partial(torch.optim.Adam, lr=torch.tensor(0.01), foreach=False),
    "momentum": functools.partial(torch.optim.SGD, lr=1e-5, momentum=0.9),
    "plain": functools.partial(torch.optim.SGD, lr=1e-5),
    "adagrad": torch.optim.Adagrad,
    "lbfgs": functools.partial(torch.optim.LBFGS, lr=1e-5, max_iter=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(run: Run, name: str) -> None:
    """A fresh optimizer has no state yet; one that was used has another."""

    def made(seed: int) -> dict[str, Any]:
        net = Net(seed)
        groups = [{"params": [p]} for p in net.parameters()]
        if name == "lbfgs":
            groups = [{"params": list(net.parameters())}]
        optimizer = OPTIMIZERS[name](groups)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        return {"net": net, "optimizer": optimizer, "schedule": schedule}

    def trained(state: dict[str, Any], steps: int) -> None:
        net, optimizer = state["net"], state["optimizer"]
        if name != "lbfgs":
            train(net, optimizer, steps)
        else:
            for _ in range(steps):

                def closure() -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = net(torch.arange(20)).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)
        state["schedule"].step()

    straight, fresh, used = made(1), made(2), made(3)
    trained(used, 5)
    trained(straight, 3)
    run(straight, fresh, used)
    for state in (straight, fresh, used):
        trained(state, 2)
    for state in (fresh, used):
        for tensor_name, tensor in straight["net"].named_parameters():
            assert torch.equal(dict(state["net"].named_parameters())[tensor_name], tensor)
            assert bool(tensor.isfinite().all())
        expected, found = straight["optimizer"].state_dict(), state["optimizer"].state_dict()
        assert str(found["param_groups"]) == str(expected["param_groups"])
        assert found["state"].keys() == expected["state"].keys()
        assert state["schedule"].state_dict() == straight["schedule"].state_dict()


def test_state_of_an_optimizer_is_restored_in_place(run: Run) -> None:
    net, other = Net(1), Net(2)
    optimizer, used = (torch.optim.Adam(n.parameters()) for n in (net, other))
    train(net, optimizer, 2)
    train(other, used, 1)
    moments = {p: (s["exp_avg"], s["exp_avg"].data_ptr()) for p, s in used.state.items()}
    run({"o": optimizer}, {"o": used})
    for parameter, (moment, place) in moments.items():
        assert used.state[parameter]["exp_avg"] is moment and moment.data_ptr() == place
    for mine, theirs in zip(used.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"]) and mine["step"] == 2


def test_an_optimizer_goes_back_to_before_its_first_step(run: Run) -> None:
    net = Net(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
    saved = torch.optim.Adam(net.parameters(), lr=0.25)
    train(net, optimizer, 1)
    run({"o": saved}, {"o": optimizer})
    assert len(optimizer.state) == 0 and optimizer.param_groups[0]["lr"] == 0.25


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "warm up": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        milestones=[2],
    ),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "function": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(run: Run, name: str) -> None:
    def made() -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "schedule": SCHEDULES[name](optimizer)}

    def advance(state: dict[str, Any], steps: int) -> list[float]:
        rates = []
        for number in range(steps):
            state["optimizer"].step()
            state["schedule"].step(*([number] if name == "plateau" else []))
            rates.append(state["optimizer"].param_groups[0]["lr"])
        return rates

    straight, fresh = made(), made()
    advance(straight, 3)
    run(straight, fresh)
    assert advance(fresh, 6) == advance(straight, 6)


class Scaler:
    """Like a GradScaler: numbers, and a tensor that is not there before the first use."""

    def __init__(self) -> None:
        self.scale: torch.Tensor | None = None
        self.growth = 0

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scale is None else {"scale": self.scale, "growth": self.growth}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.growth = state["scale"], state["growth"]


class Odd:
    """Its state_dict is none."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def test_other_objects_with_a_state_dict(run: Run) -> None:
    scaler, fresh = Scaler(), Scaler()
    scaler.scale, scaler.growth = torch.tensor(1024.0), 7
    real = torch.amp.GradScaler("cpu", init_scale=64.0)
    loaded = torch.amp.GradScaler("cpu", init_scale=2.0)
    state = {"scaler": scaler, "real": real, "odd": Odd([1, big(5)]), "number": Odd(3)}
    target = {"scaler": fresh, "real": loaded, "odd": Odd(None), "number": Odd({})}
    run(state, target)
    assert fresh.growth == 7 and fresh.scale is not None and fresh.scale.item() == 1024
    assert loaded.get_scale() == 64
    assert target["number"].value == 3
    assert target["odd"].value[0] == 1 and bool((target["odd"].value[1] == 5).all())
    used = Scaler()
    used.scale = kept = torch.tensor(1.0)
    run(state, {"scaler": used})
    assert used.scale is kept and kept.item() == 1024, "in place where there is one"


def test_an_object_that_does_not_take_its_state_is_named(run: Run) -> None:
    class Refusing(Odd):
        def load_state_dict(self, state: Any) -> None:
            raise ValueError("no, thanks")

    with pytest.raises(ValueError, match=r"'net/x', Refusing, rejected .*step-00000001.*: no, tha"):
        run({"net": {"x": Odd(1)}}, {"net": {"x": Refusing(2)}})
    own = {"rng": PerRank(Refusing(2))}
    with pytest.raises(ValueError, match=r"'rng', Refusing, rejected .*: no, thanks"):
        run({"rng": PerRank(Odd(1))}, own)


def test_a_class_is_no_object_with_state() -> None:
    assert not is_stateful(torch.nn.Linear) and is_stateful(torch.nn.Linear(1, 1))
    assert not is_stateful(collections.OrderedDict()) and not is_stateful(torch.ones(1))


def test_a_module_inside_distributed_data_parallel(disk: Path, run: Run) -> None:
    """Its state is that of the module inside: it restores into either, wrapped or not."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with Checkpointer(disk / "wrapped") as checkpointer:  # of the default group, by then
            wrapped = torch.nn.parallel.DistributedDataParallel(Net(1))
            plain, other = Net(2), torch.nn.parallel.DistributedDataParallel(Net(3))
            checkpointer.save(1, {"net": wrapped})
            assert checkpointer.restore({"net": plain}) == 1
            assert checkpointer.restore({"net": other}) == 1
            assert torch.equal(plain.layer.weight, wrapped.module.layer.weight)
            assert torch.equal(other.module.layer.weight, wrapped.module.layer.weight)
            assert "embedding.weight" in checkpointer.load()["net"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "saved", "told"),
    [
        ("a.weight", {"_orig_mod.a.weight": 0}, " \\(similar names there: .*'_orig_mod.a.weight'"),
        ("submodule.w", {"sub.w": 0}, " \\(similar names there: 'sub.w'"),
        ("model", {"modle": 0, "own": 1}, " \\(similar names there: 'modle'"),
        ("weight", {"net": {"weight": 0}, "x": 1}, " \\(similar names there: 'net/weight'"),
        ("model", {"x": 0, 7: 1}, r" \(pass missing=\"keep\" to keep .*, or rename= if they have"),
    ],
)
def test_a_missing_name_is_told_with_what_is_there_instead(
    name: str, saved: dict[Any, Any], told: str
) -> None:
    with pytest.raises(IncompatibleCheckpoint, match=f"{name}' is missing in the checkpoint{told}"):
        Template({name: 1}, saved, None, lambda _places: None, "run")


def test_names_of_missing_values_are_whole() -> None:
    state = {"model": {"net": {"w": torch.ones(1)}}}
    saved: Any = {"model": {"net": {"module.w": 0}}}
    told = "'model/net/w' is missing .*similar names there: 'model/net', 'model/net/module.w'"
    with pytest.raises(IncompatibleCheckpoint, match=told):
        Template(state, saved, None, lambda _places: None, "run")
    nested: Any = {}
    for _ in range(40):  # of which each level stands there twice
        nested = {"a": nested, "b": nested}
    with pytest.raises(IncompatibleCheckpoint, match="'c' is missing in the checkpoint"):
        Template({"c": 1}, nested, None, lambda _places: None, "run")


def test_names_among_very_many_are_found_at_once() -> None:
    for separator in "./":
        there = [f"layers.{n}.mlp{separator}weight" for n in range(100_000)] + ["embedding.wieght"]
        near = nearest(f"layers.7.mpl{separator}weight", there)
        assert f"'layers.7.mlp{separator}weight'" in near
