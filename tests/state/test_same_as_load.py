"""A restore gives a state what load() returns, whatever the state held before: nothing is left of
its dicts of numbers, nor of the states of its objects.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from fastckpt import Checkpointer, PerRank, SaveOptions
from fastckpt.errors import IncompatibleCheckpoint
from fastckpt.state.tree import ESCAPED, PER_RANK, TENSOR
from tests.kit.storm import Chance

Restored = Callable[..., Any]
SHARD = 1 << 18  # float32 elements: a tensor of 1 MiB lies in the shards


class Kept:
    """An object whose state is a nest."""

    def __init__(self, nest: Any) -> None:
        self.nest = nest

    def state_dict(self) -> Any:
        return self.nest

    def load_state_dict(self, nest: Any) -> None:
        self.nest = copy.deepcopy(nest)


@pytest.fixture
def restored(disk: Path) -> Iterator[Restored]:
    """`restored(saved, state)`: restores the one into the other; returns what load() gives."""
    with Checkpointer(disk / "run", options=SaveOptions(durable=False)) as checkpointer:

        def run(saved: Any, state: Any, **how: Any) -> Any:
            checkpointer.save(1, saved).result(60)
            assert checkpointer.restore(state, weights_only=False, **how) == 1
            return checkpointer.load(weights_only=False)

        yield run


# ---- dicts of a state ----


def test_a_dict_without_tensors_is_replaced_in_place(restored: Restored) -> None:
    def state(
        history: dict[str, Any], counts: Counter[str], order: OrderedDict[str, int], w: float
    ) -> dict[str, Any]:
        return {
            "w": torch.full((3,), w),
            "history": history,
            "deep": {"counts": counts, "order": order},
            "lists": defaultdict(list, history),
        }

    saved = state({"epoch0": 0.5, "epoch1": {"a": 1}}, Counter(a=2), OrderedDict(y=1, x=2), 1)
    fresh = state({}, Counter(), OrderedDict(), 0)
    used = state({"epoch9": 0.9, "epoch1": {"b": 2}}, Counter(a=7, b=7), OrderedDict(x=3, z=0), 0)
    for target in (fresh, used):
        history, deep, lists = target["history"], target["deep"], target["lists"]
        inside = history.get("epoch1"), deep["counts"], deep["order"]
        restored(saved, target)
        assert repr(target) == repr(saved)
        assert target["history"] is history and target["deep"] is deep
        assert target["lists"] is lists and lists.default_factory is list
        assert deep["counts"] is inside[1] and deep["order"] is inside[2]
        assert inside[0] is None or history["epoch1"] is inside[0]


@pytest.mark.parametrize("how", [{}, {"missing": "keep"}, {"unexpected": "raise"}])
def test_what_may_be_missing_is_no_part_of_a_dict_of_numbers(
    how: dict[str, Any], restored: Restored, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"w": torch.ones(3), "history": {"epoch1": 1}}
    state = {"w": torch.zeros(3), "history": {"epoch0": 0, "epoch9": 9}}
    restored(saved, state, **how)
    assert state["history"] == {"epoch1": 1} and caplog.text == ""


def test_an_entry_that_was_not_saved_is_kept_as_a_whole(restored: Restored) -> None:
    state = {"w": torch.zeros(1), "history": {"epoch0": 0}, "ema": {"w": torch.zeros(1), "n": 4}}
    with pytest.raises(IncompatibleCheckpoint, match="'history', 'ema' are missing"):
        restored({"w": torch.ones(1)}, state)
    restored({"w": torch.ones(1)}, state, missing="keep")
    assert str(state) == (
        "{'w': tensor([1.]), 'history': {'epoch0': 0}, 'ema': {'w': tensor([0.]), 'n': 4}}"
    )


def test_only_chooses_a_dict_or_entries_of_it(restored: Restored) -> None:
    saved = {"w": torch.ones(1), "history": {"a": 1, "b": {"c": 1}, "new": 1}}

    def after(only: str) -> Any:
        state = {"w": torch.zeros(1), "history": {"a": 0, "b": {"c": 0, "d": 0}, "old": 0}}
        restored(saved, state, only=only, missing="keep")
        assert not state["w"].any()
        return state["history"]

    for whole in ("history", "history/*", "h*"):
        assert after(whole) == saved["history"]
    assert after("history/a") == {"a": 1, "b": {"c": 0, "d": 0}, "old": 0}
    assert after("history/b/*") == {"a": 0, "b": {"c": 1}, "old": 0}
    assert after("history/*c") == {"a": 0, "b": {"c": 1, "d": 0}, "old": 0}


# ---- objects ----


class Shards:
    """A reader of shards, of which one is open at a time."""

    def __init__(self) -> None:
        self.cursor, self.seen = {"shard-000": 0}, {"web": 0}

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "seen": self.seen}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.cursor, self.seen = dict(saved["cursor"]), dict(saved["seen"])


@pytest.mark.parametrize(
    "how", [{}, {"missing": "keep"}, {"unexpected": "ignore"}, {"only": "data"}]
)
def test_an_object_gets_what_it_saved(how: dict[str, Any], restored: Restored) -> None:
    data, target = Shards(), Shards()
    data.cursor, data.seen = {"shard-017": 123}, {"web": 5, "code": 7}
    restored({"data": data}, {"data": target}, **how)
    assert target.cursor == data.cursor and target.seen == data.seen


@pytest.mark.parametrize("milestones", [[2, 5, 9], [2], [2, 4]])
@pytest.mark.parametrize("how", [{}, {"missing": "keep"}])
def test_a_schedule_gets_the_saved_milestones(
    milestones: list[int], how: dict[str, Any], restored: Restored
) -> None:
    def schedule(at: list[int]) -> lr_scheduler.MultiStepLR:
        return lr_scheduler.MultiStepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), at)

    fresh = schedule(milestones)
    restored({"schedule": schedule([2, 4])}, {"schedule": fresh}, **how)
    assert fresh.milestones == Counter({2: 1, 4: 1})


@pytest.mark.parametrize("how", [{}, {"missing": "keep"}])
def test_an_object_decides_about_entries_that_are_no_tensors(
    how: dict[str, Any], restored: Restored
) -> None:
    """As a loader for other numbers of workers, which would begin anew if its own were kept."""

    class Loader(Kept):
        def load_state_dict(self, nest: Any) -> None:
            assert "workers" in nest, "no workers were saved"
            self.nest = nest

    saved, state = Kept({"yielded": 4}), Loader({"workers": {"0": 0}, "main": 0})
    with pytest.raises(AssertionError, match=r"'loader', Loader, rejected .*: no workers were"):
        restored({"loader": saved}, {"loader": state}, **how)
    assert state.nest == {"workers": {"0": 0}, "main": 0}


def test_an_object_gets_other_values_in_place_of_its_tensors(restored: Restored) -> None:
    w = torch.zeros(2)
    target = Kept({"best": torch.zeros(2), "queue": [torch.zeros(1)], "w": w, "now": {"a": w}})
    saved = {"best": None, "queue": [torch.ones(1), torch.ones(1)], "w": torch.ones(2), "now": 5}
    restored({"it": Kept(saved)}, {"it": target})
    assert str(target.nest) == str(saved) and w.tolist() == [1, 1], "what it has is filled in place"


@pytest.mark.parametrize("elements", [1, SHARD])
def test_tensors_of_an_object_that_was_not_saved_so_are_told_or_kept(
    elements: int, restored: Restored
) -> None:
    """As those of a model inside of it, into which a layer has come and from which one has gone."""

    def application(value: int, *layers: str) -> Kept:
        names: dict[str, Any] = {name: torch.full((elements,), float(value)) for name in layers}
        return Kept({"model": names | {"extra": {layers[-1]: value}}, "step": value})

    saved = {"app": application(1, "body", "old")}
    with pytest.raises(IncompatibleCheckpoint, match="'app/model/new' is missing in"):
        restored(saved, {"app": application(0, "body", "new")})
    with pytest.raises(IncompatibleCheckpoint, match="the checkpoint has 'app/model/old', but"):
        restored(saved, {"app": application(0, "body")}, unexpected="raise")
    target = application(0, "body", "new")
    restored(saved, {"app": target}, missing="keep", unexpected="ignore")
    names = target.nest["model"]
    assert names.pop("body").eq(1).all() and names.pop("new").eq(0).all()
    assert target.nest == {"model": {"extra": {"old": 1}}, "step": 1}


def test_an_extra_state_of_a_module_is_what_it_saved(restored: Restored) -> None:
    class Layer(torch.nn.Module):
        def __init__(self, **extra: Any) -> None:
            super().__init__()
            self.w, self.extra = torch.nn.Parameter(torch.zeros(2)), extra

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    saved = Layer(scale=torch.ones(1), history={"a": 1}, recipe="new")
    target = Layer(scale=torch.zeros(1), history={"b": 2}, other=1)
    restored({"m": saved}, {"m": target}, missing="keep")
    assert str(target.extra) == str(saved.extra)


# ---- any state ----


class Spec(NamedTuple):
    """The form of a value, of which make() makes one with given numbers."""

    kind: str
    inner: Any = None


KEYS = st.sampled_from(["a", "b", "a/b", 0, "0", TENSOR, PER_RANK, ESCAPED, "shape"])
FEW_KEYS = st.sampled_from(["a", "b", 0])
NUMBERS = st.just(Spec("number"))
TENSORS = st.sampled_from([Spec("tensor", 3), Spec("tensor", 3), Spec("tensor", SHARD)])
PLAIN = st.recursive(
    st.one_of(NUMBERS, NUMBERS, TENSORS),
    lambda inner: st.one_of(
        st.builds(Spec, st.sampled_from(["list", "tuple"]), st.lists(inner, max_size=2)),
        st.builds(Spec, st.just("dict"), st.dictionaries(FEW_KEYS, inner, max_size=3)),
    ),
    max_leaves=4,
)
SPECS = st.recursive(
    st.one_of(
        NUMBERS,
        TENSORS,
        st.just(Spec("own")),
        st.builds(Spec, st.just("counter"), st.dictionaries(KEYS, NUMBERS, max_size=3)),
        st.builds(Spec, st.just("default"), st.dictionaries(KEYS, PLAIN, max_size=2)),
    ),
    lambda inner: st.one_of(
        st.builds(Spec, st.sampled_from(["list", "tuple"]), st.lists(inner, max_size=3)),
        st.builds(
            Spec, st.sampled_from(["dict", "ordered"]), st.dictionaries(KEYS, inner, max_size=4)
        ),
        st.builds(Spec, st.just("object"), st.dictionaries(KEYS, inner, max_size=3)),
    ),
    max_leaves=12,
)
DICTS: dict[str, Callable[[], dict[Any, Any]]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": Counter,
    "default": lambda: defaultdict(list),
}


def holds(spec: Spec, *kinds: str) -> bool:
    items = spec.inner.values() if isinstance(spec.inner, dict) else spec.inner
    return spec.kind in kinds or (
        isinstance(items, list | type({}.values())) and any(holds(item, *kinds) for item in items)
    )


def make(spec: Spec, number: int, *, is_used: bool, is_inside: bool = False) -> Any:
    """Returns a value of this form.

    `is_used`: it has other entries where these may differ, in dicts without tensors and in all
    dicts of an object; `is_inside` says that it is in one of these.
    """
    kind, inner = spec
    if kind == "number":
        return number
    if kind == "tensor":
        return torch.full((inner,), float(number))
    if kind == "own":
        return PerRank(number)
    if kind == "object":
        made = make(Spec("dict", inner), number, is_used=is_used, is_inside=True)
        return Kept(made)
    is_inside = is_inside or not holds(spec, "tensor", "own", "object")
    if kind in ("list", "tuple"):
        items = [make(item, number, is_used=is_used, is_inside=is_inside) for item in inner]
        return items if kind == "list" else tuple(items)
    new = DICTS[kind]()
    if is_used and is_inside:
        new["used"] = number
    for key, item in inner.items():
        if not (is_used and is_inside and item.kind == "number"):
            new[key] = make(item, number, is_used=is_used, is_inside=is_inside)
    return new


def shown(value: Any) -> Any:
    """Returns a value as load() gives it, but with all that can be compared."""
    if isinstance(value, Kept):
        return shown(value.nest)
    if isinstance(value, PerRank):
        return "own", value.value
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), float(value[0]), bool((value == value[0]).all())
    if isinstance(value, dict):
        kind = dict if type(value) is OrderedDict else type(value)
        return kind, [(key, shown(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shown(item) for item in value]
    return value


@settings(deadline=None, max_examples=Chance.examples(40))
@given(spec=st.dictionaries(KEYS, SPECS, min_size=1, max_size=4), is_used=st.booleans())
def test_a_restore_gives_what_a_load_gives(
    spec: dict[Any, Spec], is_used: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def state(number: int, *, is_used: bool) -> dict[Any, Any]:
        return {key: make(each, number, is_used=is_used) for key, each in spec.items()}

    root = tmp_path_factory.mktemp("run")
    with Checkpointer(root, options=SaveOptions(durable=False)) as checkpointer:
        checkpointer.save(1, state(1, is_used=False)).result(60)
        target = state(2, is_used=is_used)
        checkpointer.restore(target, weights_only=False)
        assert not any(checkpointer.differences)
        loaded = checkpointer.load(weights_only=False)
    assert shown(target) == shown(loaded) == shown(state(1, is_used=False))
