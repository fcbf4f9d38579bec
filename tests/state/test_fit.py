"""A part of a checkpoint, or one with other names, goes into a state: what fits is restored, what
does not is named or raises, and nothing else changes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastckpt
from fastckpt.errors import IncompatibleCheckpoint
from fastckpt.state.fit import Fit, renamed
from fastckpt.state.tree import flatten
from tests.kit.storm import Chance

BIG = 300_000  # float32 elements: more than 1 MiB, which goes to the shards
Restore = Callable[..., fastckpt.Differences]


def filled(module: torch.nn.Module, value: float) -> torch.nn.Module:
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module


def backbone(value: float) -> torch.nn.Sequential:
    return torch.nn.Sequential(filled(torch.nn.Linear(3, 600), value), torch.nn.Linear(600, 600))


@pytest.fixture
def restore(disk: Path) -> Restore:
    """Returns a function that saves a state, and restores another one from that."""

    def run(saved: Any, state: Any, **how: Any) -> fastckpt.Differences:
        with fastckpt.Checkpointer(
            disk / "run", options=fastckpt.SaveOptions(durable=False)
        ) as checkpointer:
            checkpointer.save(7, saved).result(60)
            assert checkpointer.restore(state, **how) == 7
            return checkpointer.differences

    return run


def test_nothing_differs(restore: Restore) -> None:
    state = {"w": torch.zeros(3)}
    assert restore({"w": torch.ones(3)}, state) == ((), (), {}, (), ()) and state["w"].sum() == 3


def test_what_was_not_saved_is_kept_and_named(restore: Restore) -> None:
    state = {
        "model": torch.nn.ModuleDict({"old": filled(torch.nn.Linear(2, 2), 0)}),
        "new": [torch.zeros(3), {"a": 5}],
        "count": 3,
        "own": fastckpt.PerRank(9),
    }
    state["model"]["head"] = filled(torch.nn.Linear(2, 2), 8)
    saved = {"model": torch.nn.ModuleDict({"old": filled(torch.nn.Linear(2, 2), 1)})}
    with pytest.raises(IncompatibleCheckpoint, match="'new', 'count', 'own' are missing"):
        restore(saved, state)
    found = restore(saved, state, missing="keep")
    head = ("model/head.weight", "model/head.bias")
    assert found.missing == (*head, "new/0", "new/1", "count", "own")
    values = {name: float(p.detach().mean()) for name, p in state["model"].named_parameters()}
    assert values == {"old.weight": 1, "old.bias": 1, "head.weight": 8, "head.bias": 8}
    assert state["new"][1] == {"a": 5} and state["count"] == 3 and state["own"].value == 9


def test_what_differed_is_forgotten_by_the_next_restore(disk: Path) -> None:
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"a": torch.ones(3)}).result(60)
        checkpointer.restore({"a": torch.ones(3), "b": torch.ones(3)}, missing="keep")
        assert checkpointer.differences.missing == ("b",) and checkpointer.restored_from
        with pytest.raises(fastckpt.CheckpointError, match="step 2"):
            checkpointer.restore({"a": torch.ones(3)}, step=2)
        assert not any(checkpointer.differences) and not checkpointer.restored_from


def test_all_shapes_that_differ_are_told_at_once(restore: Restore) -> None:
    saved = {
        "a": torch.ones(2),
        "b": torch.ones(BIG),
        "c": {"d": torch.ones(3)},
        "e": torch.ones(1),
    }
    state = {
        "a": torch.zeros(3),
        "b": torch.zeros(BIG, 1),
        "c": {"d": torch.zeros(3, 1)},
        "e": torch.zeros(1),
    }
    with pytest.raises(IncompatibleCheckpoint) as caught:
        restore(saved, state)
    told = str(caught.value)
    assert re.search(r"'a' has shape \[3\], but \[2\] in the checkpoint; 'b'", told)
    assert r"'c/d' has shape [3, 1], but [3] in the checkpoint" in told
    assert state["e"].item() == 0, "nothing changes"


def test_what_the_state_has_not(restore: Restore, caplog: pytest.LogCaptureFixture) -> None:
    saved = {"model": backbone(1), "extra": torch.ones(3), "step": 5}
    state: dict[str, Any] = {"model": torch.nn.Sequential(filled(torch.nn.Linear(3, 600), 0))}
    with pytest.raises(IncompatibleCheckpoint, match=r"without 'model/1\.weight', 'model/1\.bias'"):
        restore(saved, state)
    with pytest.raises(IncompatibleCheckpoint, match=r"has 'extra', 'step', 'model/1\.w"):
        restore(saved, state, unexpected="raise")
    assert all(not parameter.detach().any() for parameter in state["model"].parameters())
    with caplog.at_level(logging.WARNING, "fastckpt"):
        found = restore(saved, state, unexpected="ignore")
    assert found.unexpected == ("extra", "step", "model/1.weight", "model/1.bias")
    assert all(bool((parameter == 1).all()) for parameter in state["model"].parameters())
    assert caplog.text == ""


def test_names_are_changed_by_patterns(restore: Restore) -> None:
    saved = {"student": {"encoder.w": torch.ones(BIG), "encoder.b": torch.ones(2)}, "step": 5}
    state = {"net": {"backbone": {"w": torch.zeros(BIG), "b": torch.zeros(2)}}, "step": 0}
    patterns = {r"^student/encoder\.": "net/backbone/"}
    found = restore(saved, state, rename=patterns)
    assert state["step"] == 5 and bool((state["net"]["backbone"]["w"] == 1).all())
    assert found.renamed == {
        "student/encoder.w": "net/backbone/w",
        "student/encoder.b": "net/backbone/b",
    }


def test_a_pattern_that_fits_no_name_is_told(
    restore: Restore, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that resumes from steps under old names, and then from its own, passes the same."""
    saved, patterns = {"model": {"w": torch.ones(3)}, "step": 5}, {"^modle/": "net/"}
    told = r"rename has '\^modle/', which matches no name \(similar names there: 'model/w'\)"
    state = {"model": {"w": torch.zeros(3)}, "step": 0}
    restore(saved, state, rename=patterns)
    assert bool((state["model"]["w"] == 1).all())  # type: ignore[index]
    (record,) = caplog.records
    assert record.levelname == "WARNING" and re.search(told, record.getMessage())
    for other in ({"net": {"w": torch.zeros(3)}}, {"model": {"w": torch.zeros(3), "b": 0}}):
        with pytest.raises(IncompatibleCheckpoint, match=told):
            restore(saved, other, rename=patterns)


def test_a_pattern_applies_to_what_those_before_it_made() -> None:
    names, told, _ = Fit(rename={"^a": "b", "b$": "c", "a$": "d"}).new_names(["a", "b"])
    assert names == ["c", "c"]
    there = "(names there: 'c', 'c')"
    assert told == [f"rename has 'a$', which matches no name {there}: correct it or leave it out"]
    patterns: dict[str, str | None] = {"^a": "b", "b1": None, "b": "c", "b2": "d"}
    names, told, left_out = Fit(rename=patterns).new_names(["a1", "a2"])
    assert (names, left_out) == ([None, "c2"], {"b1"}) and "'b2', which matches no name" in told[0]


def test_names_are_changed_by_a_function(restore: Restore) -> None:
    saved = {"model": backbone(1), "ema": backbone(2), "list": [1, 2]}
    state = {"model": backbone(0), "lists": [0]}

    def rename(name: str) -> str | None:
        if name.startswith("model/"):
            return None
        return {"list": "lists"}.get(name, name.replace("ema/", "model/"))

    found = restore(saved, state, rename=rename)
    assert bool((state["model"][0].weight == 2).all()) and state["lists"] == [1, 2]
    assert set(found.renamed) == {"list", *(f"ema/{name}" for name in saved["ema"].state_dict())}


def test_a_lone_module_from_a_part_of_a_step(restore: Restore) -> None:
    model = backbone(0)
    patterns = {"^model/": ""}
    saved = {"model": backbone(3), "step": 1}
    found = restore(saved, model, rename=patterns, unexpected="ignore")
    assert bool((model[0].weight == 3).all()) and found.unexpected == ("step",)


def test_optimizers_keep_their_numbers(restore: Restore) -> None:
    def trained(value: float) -> dict[str, Any]:
        model = filled(torch.nn.Linear(2, 2), value)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2) * value).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, state = trained(1), trained(2)
    found = restore({"old": saved}, state, rename={"^old/": ""})
    want, got = saved["optimizer"].state_dict(), state["optimizer"].state_dict()
    assert str(got) == str(want) and "old/optimizer/state/0/exp_avg" in found.renamed


def grown(layers: int, value: float, steps: int = 0) -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
    filled(model, value)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_an_optimizer_of_another_model_changes_nothing(restore: Restore) -> None:
    saved, state = grown(2, 1, steps=1), grown(3, 5)
    told = (
        r"'optimizer' is an optimizer with groups of \[6\] parameters, but the checkpoint has \[4\]"
    )
    with pytest.raises(IncompatibleCheckpoint, match=told):
        restore(saved, state, missing="keep")
    with pytest.raises(
        IncompatibleCheckpoint, match=rf"step-00000007-[0-9a-f]+' .*{told}.*with only="
    ):
        restore(saved, {"optimizer": state["optimizer"]})
    assert not state["optimizer"].state
    assert all(bool((parameter == 5).all()) for parameter in state["model"].parameters())
    found = restore(saved, state, missing="keep", only="model/*")
    assert found.missing == ("model/2.weight", "model/2.bias")
    assert torch.equal(state["model"][1].weight, saved["model"][1].weight)
    assert not state["optimizer"].state


@pytest.mark.parametrize("how", [{"unexpected": "ignore"}, {"unexpected": "raise"}, {"only": "*"}])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_goes_on(how: dict[str, Any], steps: int, restore: Restore) -> None:
    saved, state = grown(2, 1, steps=3), grown(2, 5, steps)
    assert not any(restore(saved, state, **how))
    for its in (saved, state):
        its["model"].zero_grad()
        its["model"](torch.ones(1, 2)).sum().backward()
        its["optimizer"].step()
    want, got = (its["optimizer"].state_dict()["state"] for its in (saved, state))
    assert got.keys() == want.keys() and want[0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    for number, items in want.items():
        assert all(torch.equal(got[number][name], item) for name, item in items.items())
    assert torch.equal(state["model"][0].weight, saved["model"][0].weight)


def test_a_part_of_an_optimizer_is_not_restored(restore: Restore) -> None:
    saved, state = grown(2, 1, steps=3), grown(2, 5, steps=1)
    before = str(state["optimizer"].state_dict())
    for part in ("optimizer/state/0/*", "*exp_avg", "*/param_groups/0/lr"):
        restore(saved, state, only=part)
        assert str(state["optimizer"].state_dict()) == before


def test_what_is_not_asked_for_need_not_fit(restore: Restore) -> None:
    saved = {"model": torch.ones(2), "items": [torch.ones(1), 2], "x": 5}
    state = {"model": torch.zeros(2), "items": [torch.zeros(1)], "x": {"a": torch.zeros(1)}}
    restore(saved, state, only="mod*")
    assert state["model"].sum() == 2 and not state["items"][0].any()


def test_numbers_become_numbers(restore: Restore) -> None:
    state = {"layers": {3: torch.zeros(2), 4: torch.zeros(2)}}
    saved = {"layers": {0: torch.ones(2), 1: torch.full((2,), 2.0)}}
    rename = {"layers/1$": "layers/4", "layers/0$": "layers/3"}
    restore(saved, state, rename=rename)
    assert [tensor[0].item() for tensor in state["layers"].values()] == [1, 2]


def test_a_nest_that_is_shared_is_not_renamed_for_ever() -> None:
    nest: dict[str, Any] = {"x": 1}
    for _ in range(30):
        nest = {"a": nest, "b": nest}
    with pytest.raises(IncompatibleCheckpoint, match="too many values to be renamed"):
        renamed(nest, Fit(rename={"a": "b"}), "run")


@pytest.mark.parametrize(
    ("rename", "told"),
    [
        ({"^b$": "a"}, "rename gives 'b' the name 'a', which another value already has"),
        ({"^b$": "a/c"}, "rename puts 'b' at 'a/c', inside another value"),
    ],
)
def test_names_that_are_taken(rename: Any, told: str, restore: Restore) -> None:
    with pytest.raises(IncompatibleCheckpoint, match=told):
        restore({"a": torch.ones(3), "b": torch.ones(3)}, {"a": torch.zeros(3)}, rename=rename)


def test_a_name_inside_of_an_array_is_taken() -> None:
    saved = {"array": numpy.zeros(3), "a": 1, "empty": {}}
    with pytest.raises(IncompatibleCheckpoint, match="puts 'a' at 'array/x', inside another value"):
        renamed(saved, Fit(rename={"^a$": "array/x"}), "p")
    assert renamed(saved, Fit(rename={"^a$": "empty/x"}), "p")[0]["empty"] == {"x": 1}


def test_only_what_is_asked_for(restore: Restore) -> None:
    class Loaded:
        """Counts its loads."""

        def __init__(self) -> None:
            self.loads = 0

        def state_dict(self) -> dict[str, Any]:
            return {"loads": self.loads}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loads += 1

    saved = {
        "model": backbone(1),
        "other": Loaded(),
        "x": torch.ones(3),
        "own": fastckpt.PerRank(1),
    }
    state = {
        "model": backbone(0),
        "other": Loaded(),
        "x": torch.zeros(4),
        "own": fastckpt.PerRank(2),
        "new": torch.zeros(3),
    }
    last = state["model"][1].weight.detach().clone()
    found = restore(saved, state, only="model/0.*")
    assert bool((state["model"][0].weight == 1).all())
    assert torch.equal(state["model"][1].weight, last)
    assert state["other"].loads == 0 and state["own"].value == 2 and not state["x"].any()
    assert (found.missing, found.unexpected) == ((), ())
    told = r"'new' is missing in the checkpoint \(pass missing=.keep. .*or rename="
    with pytest.raises(IncompatibleCheckpoint, match=told):
        restore(saved, state, only="ne*")


@pytest.mark.parametrize("typo", ["modle/*", "model.*", "*modle*", "*/0.weigth", "old", "*old*"])
@pytest.mark.parametrize("unexpected", [None, "ignore"])
def test_a_glob_that_names_nothing_is_told(typo: str, unexpected: Any, restore: Restore) -> None:
    """Names that only the checkpoint has are none of the state."""
    saved, state = grown(1, 1, steps=1) | {"old": 1}, grown(1, 2, steps=1)
    told = re.escape(f"no name in the state matches only={typo!r}")
    with pytest.raises(IncompatibleCheckpoint, match=told):
        restore(saved, state, only=typo, unexpected=unexpected)


def test_an_optimizer_that_was_not_saved_is_told(restore: Restore) -> None:
    saved, state = {"model": grown(1, 1)["model"]}, grown(1, 2)
    for only in ("optimizer", "optimizer/*"):
        told = r"'optimizer' is missing in the checkpoint"
        with pytest.raises(IncompatibleCheckpoint, match=told):
            restore(saved, state, only=only)
        assert restore(saved, state, only=only, missing="keep").missing == ("optimizer",)


@pytest.mark.parametrize("count", [30, BIG])
def test_tied_weights_get_one_value(count: int, restore: Restore, disk: Path) -> None:
    shared = torch.zeros(count)
    state = {"in": {"w": shared}, "out": [shared.detach()]}
    both = [torch.full((count,), 2.0) for _ in range(2)]
    assert not any(restore({"in": {"w": both[0]}, "out": both[1:]}, state))
    assert torch.equal(shared, both[0])
    both[1][-1] = 3
    words = r"'in/w' and 'out/0' are one tensor in the state"
    with pytest.raises(IncompatibleCheckpoint, match=words):
        restore({"in": {"w": both[0]}, "out": both[1:]}, state)
    assert shared.eq(2).all()
    assert not any(restore({"in": {"w": both[1]}, "out": [both[1]]}, state))
    assert torch.equal(shared, both[1])


@pytest.mark.parametrize("count", [30, BIG])
def test_a_negated_view_is_not_tied_to_what_it_views(count: int, restore: Restore) -> None:
    def viewed(numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": numbers.imag, "b": numbers.conj().imag}

    numbers = torch.randn(count, dtype=torch.complex64)
    into = torch.zeros(count, dtype=torch.complex64)
    assert not any(restore(viewed(numbers), viewed(into)))
    assert torch.equal(into.imag, numbers.imag)


def test_dtypes(restore: Restore) -> None:
    saved = {"w": torch.ones(BIG), "v": torch.ones(2), "same": torch.ones(2)}
    state = {"w": torch.zeros(BIG).half(), "v": torch.zeros(2).double(), "same": torch.zeros(2)}
    assert restore(saved, state).cast == ("w", "v") and state["w"][-1] == 1
    with pytest.raises(IncompatibleCheckpoint, match=r"'w' is torch.float16, but .*; 'v'"):
        restore(saved, state, dtype="raise")


KEYS = st.one_of(st.integers(0, 9), st.text("ab~/.0", min_size=1, max_size=3))
NESTS = st.recursive(
    st.integers(0, 99),
    lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3),
    max_leaves=9,
)


@settings(max_examples=Chance.examples(60), deadline=None)
@given(st.dictionaries(KEYS, NESTS, min_size=1, max_size=4))
def test_names_that_were_changed_and_changed_back_are_the_same(state: dict[Any, Any]) -> None:
    objects = flatten(state, 0, 1).objects
    there, *_names = renamed(objects, Fit(rename=lambda name: f"new/x/{name}"), "run")
    assert there == {"new": {"x": objects}}
    back, *_names = renamed(there, Fit(rename=lambda name: name.removeprefix("new/x/")), "run")
    assert back == objects
