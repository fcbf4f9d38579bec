"""A model that has changed since the checkpoint: tensors of another shape raise an error or stay as
they are, with the state that an optimizer has for them, unless the module's own code takes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import fastckpt
from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from tests.crews.group_crew import Crew, Member, Nursery, Outcome, attempt
from tests.kit.kinds import by_safetensors, by_torch
from tests.kit.noise import flip
from tests.kit.torches import needs_fsdp2

Filled = Callable[..., fastckpt.Differences]


def by_step(state: dict[str, Any], disk: Path) -> Path:
    with fastckpt.Checkpointer(
        disk / "run", options=fastckpt.SaveOptions(durable=False)
    ) as checkpointer:
        checkpointer.save(7, state).result(60)
    return disk / "run"


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: its.state_dict() if hasattr(its, "state_dict") else its for key, its in state.items()
    }


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Returns names as Hugging Face and DCP have them."""
    return {
        f"{key}.{name}": tensor.detach()
        for key, its in plain(state).items()
        for name, tensor in its.items()
        if isinstance(tensor, torch.Tensor)
    }


def restored(state: Any, path: Path, **how: Any) -> fastckpt.Differences:
    with fastckpt.Checkpointer(path) as checkpointer:
        assert checkpointer.restore(state, **how) == 7
        return checkpointer.differences


WAYS: dict[str, tuple[Callable[[dict[str, Any], Path], Path], Filled]] = {
    "restore": (by_step, restored),
    "a step": (by_step, fastckpt.load_into),
    "torch.save": (lambda state, disk: by_torch(plain(state), disk), fastckpt.load_into),
    "safetensors": (lambda state, disk: by_safetensors(flat(state), disk), fastckpt.load_into),
}
every_way = pytest.mark.parametrize("way", WAYS)
with_objects = pytest.mark.parametrize("way", [*WAYS][:3])  # safetensors have no optimizers


def network(words: int, value: float, width: int = 600) -> torch.nn.Sequential:
    """Returns a network of a large tensor, which shards hold, and small ones, which they do not."""
    made = torch.nn.Sequential(torch.nn.Embedding(words, width), torch.nn.Linear(width, 2))
    for parameter in made.parameters():
        torch.nn.init.constant_(parameter, value)
    return made


def trained(words: int, value: float, steps: int) -> dict[str, Any]:
    model = network(words, value)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps)
    return {"model": model, "optimizer": optimizer}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([0, 1])).sum().backward()
        optimizer.step()


@every_way
def test_a_tensor_of_another_shape_stays_and_is_named(
    way: str, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save, fill = WAYS[way]
    path = save({"model": network(900, 1)}, disk)
    model = network(950, 2)
    with pytest.raises(IncompatibleCheckpoint) as caught:
        fill({"model": model}, path)
    told = str(caught.value)
    assert "'model/0.weight' has shape [950, 600], but [900, 600] in the checkpoint" in told
    assert 'pass mismatched="keep"' in told
    assert all(bool((parameter == 2).all()) for parameter in model.parameters())
    with caplog.at_level(logging.WARNING, "fastckpt"):
        found = fill({"model": model}, path, mismatched="keep")
    assert found.mismatched == ("model/0.weight",) and not any(found[:4])
    (record,) = caplog.records
    assert record.getMessage().endswith("stay as they were: 'model/0.weight'")
    values = [float(parameter.detach().mean()) for parameter in model.parameters()]
    assert values == [2, 1, 1]
    with pytest.raises(ValueError, match="mismatched is 'ignore'"):
        fill({"model": model}, path, mismatched="ignore")


@every_way
def test_tensors_that_fit_are_filled_with_keep_too(way: str, disk: Path) -> None:
    save, fill = WAYS[way]
    model = network(900, 2)
    assert not any(
        fill({"model": model}, save({"model": network(900, 1)}, disk), mismatched="keep")
    )
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())


@every_way
@pytest.mark.parametrize("rename", [{"0.weight": None}, lambda n: None if "0.w" in n else n])
def test_what_rename_leaves_out_stays(way: str, rename: Any, disk: Path) -> None:
    save, fill = WAYS[way]
    model = network(950, 2)
    found = fill(
        {"model": model}, save({"model": network(900, 1)}, disk), rename=rename, unexpected="raise"
    )
    assert found == (("model/0.weight",), (), {}, (), ())
    assert [float(parameter.detach().mean()) for parameter in model.parameters()] == [2, 1, 1]
    # What is missing for another reason is an error, as before.
    more = torch.nn.ModuleDict({"x": torch.nn.Linear(1, 1)})
    with pytest.raises(IncompatibleCheckpoint, match=r"'more.* missing in the checkpoint"):
        fill({"model": model, "more": more}, disk / path_in(disk), rename=rename)


def test_numbers_that_rename_leaves_out_stay(disk: Path) -> None:
    path = by_step({"config": {"words": 900, "width": 2}, "only": {"words": 900}, "step": 5}, disk)
    state = {"config": {"words": 950, "width": 0}, "only": {"words": 950}, "step": 0}
    found = restored(state, path, rename={"/words$": None})
    assert state == {"config": {"words": 950, "width": 2}, "only": {"words": 950}, "step": 5}
    assert {*found.missing} == {"config/words", "only"}


def path_in(disk: Path) -> str:
    (path,) = disk.iterdir()
    return path.name


def test_a_wrong_replacement_is_told(disk: Path) -> None:
    for wrong, told in (({"a": 5}, "must be a string or None"), ({"a(": None}, "not a regular")):
        with pytest.raises((TypeError, ValueError), match=told):
            fastckpt.load_into({}, disk, rename=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("way", "how"),
    [
        *((way, {"mismatched": "keep"}) for way in [*WAYS][:3]),
        ("restore", {"rename": {r"0\.weight": None}}),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("steps", [0, 2])
def test_the_optimizers_state_for_a_tensor_that_stays_stays(
    way: str, how: Any, order: int, steps: int, disk: Path
) -> None:
    """Whether the optimizer has a state or not, and whether it comes before the model or after."""
    save, fill = WAYS[way]
    saved, state = trained(900, 1, steps=5), trained(950, 2, steps)
    before = str(state["optimizer"].state_dict()["state"].get(0))
    found = fill(dict([*state.items()][::order]), save(saved, disk), **how)
    names = [name for name in (*found.mismatched, *found.missing) if name.startswith("opt")]
    numbers = state["optimizer"].state_dict()["state"]
    if way == "restore" or steps:
        assert names == ["optimizer/state/0"]
        assert str(numbers.get(0)) == before and numbers[1]["step"] == 5
        assert torch.equal(
            numbers[1]["exp_avg"], saved["optimizer"].state_dict()["state"][1]["exp_avg"]
        )
    train(**state, steps=1)
    assert state["optimizer"].state_dict()["state"][0]["step"] == steps + 1


def test_the_dict_of_an_optimizers_state_is_kept_by_parameters(disk: Path) -> None:
    """Also where names take the place of numbers, or are joined by dots to one key."""

    def dicts(size: int, value: float) -> dict[str, Any]:
        def state() -> dict[str, Any]:
            return {"exp_avg": torch.full((size,), value), "step": torch.tensor(value)}

        other = {"exp_avg": torch.full((3,), value), "step": torch.tensor(value)}
        joined = {f"state.w.{name}": its for name, its in state().items()}
        joined |= {f"state.v.{name}": its.clone() for name, its in other.items()}
        groups: Any = [{"params": ["w", "v"], "lr": value}]
        return {
            "nested": {"state": {"w": state(), "v": other}, "param_groups": groups},
            "joined": joined | {"param_groups.w.lr": value},
        }

    path, state = by_step(dicts(900, 1), disk), dicts(950, 2)
    for fill in (restored, fastckpt.load_into):
        found = fill(state, path, mismatched="keep")
        assert {*found.mismatched} >= {"nested/state/w"}
        steps = [
            state["nested"]["state"]["w"]["step"],
            state["nested"]["state"]["v"]["step"],
            state["joined"]["state.w.step"],
            state["joined"]["state.v.step"],
        ]
        assert [float(step) for step in steps] == [2, 1, 2, 1]


class Padded(torch.nn.Module):
    """A table that takes one of another size: it crops it, or leaves its own last rows."""

    def __init__(self, rows: int, width: int, value: float) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.full((rows, width), float(value)))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        own = self.table.detach().clone()
        saved = state_dict[f"{prefix}table"]
        if saved.shape[1:] == own.shape[1:]:
            rows = min(len(own), len(saved))
            own[:rows] = saved[:rows]
            state_dict[f"{prefix}table"] = own
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Hooked(torch.nn.Module):
    """A table that takes another size by a hook of the module around it."""

    def __init__(self, rows: int, width: int, value: float) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.table = torch.nn.Parameter(torch.full((rows, width), float(value)))
        self.register_load_state_dict_pre_hook(self.crop)

    def crop(self, _module: Any, state_dict: Any, prefix: str, *_rest: Any) -> None:
        name, own = f"{prefix}inner.table", self.inner.table
        state_dict[name] = torch.cat([state_dict[name], own])[: len(own)]


@every_way
@pytest.mark.parametrize("kind", [Padded, Hooked])
@pytest.mark.parametrize("rows", [3, 900])
@pytest.mark.parametrize("mismatched", ["error", "keep"])
def test_a_modules_own_code_takes_another_shape(
    way: str, kind: Any, rows: int, mismatched: str, disk: Path
) -> None:
    save, fill = WAYS[way]
    model = torch.nn.Sequential(kind(500, 600, 2.0), torch.nn.Linear(2, 2))
    saved = torch.nn.Sequential(kind(rows, 600, 1.0), torch.nn.Linear(2, 2))
    found = fill({"model": model}, save({"model": saved}, disk), mismatched=mismatched)
    assert not any(found)
    (table, *rest), (_theirs, *others) = model.parameters(), saved.parameters()
    assert bool((table[:rows] == 1).all() and (table[rows:] == 2).all()) and len(table) == 500
    assert all(map(torch.equal, rest, others))


@every_way
def test_what_a_modules_own_code_refuses_stays_or_is_told(
    way: str, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save, fill = WAYS[way]
    path = save({"model": torch.nn.Sequential(Padded(3, 500, 1), torch.nn.Linear(2, 2))}, disk)
    model = torch.nn.Sequential(Padded(3, 600, 2), torch.nn.Linear(2, 2))
    with pytest.raises(
        RuntimeError, match=r"(?s)'model', Sequential, rejected.* for 0\.table.*=.keep."
    ):
        fill({"model": model}, path)
    with caplog.at_level(logging.WARNING, "fastckpt"):
        found = fill({"model": model}, path, mismatched="keep")
    assert [its.getMessage().endswith(": 'model/0.table'") for its in caplog.records] == [True]
    assert found.mismatched == ("model/0.table",) and bool((model[0].table == 2).all())


@every_way
@pytest.mark.parametrize("width", [2, 900])
def test_lazy_modules_get_the_saved_shape(way: str, width: int, disk: Path) -> None:
    save, fill = WAYS[way]
    saved = torch.nn.Sequential(torch.nn.Linear(width, 600), torch.nn.BatchNorm1d(600))
    model = torch.nn.Sequential(torch.nn.LazyLinear(600), torch.nn.LazyBatchNorm1d())
    assert not any(fill({"model": model}, save({"model": saved}, disk)))
    assert model(torch.ones(4, width)).shape == (4, 600) and type(model[0]) is torch.nn.Linear
    saved(torch.ones(4, width))
    got = model.state_dict()
    assert all(torch.equal(got[name], its) for name, its in saved.state_dict().items())


def test_what_a_damaged_step_has_overwritten_cannot_stay(disk: Path) -> None:
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(5)}).result(60)
        checkpointer.save(2, {"w": torch.ones(1 << 20)}).result(60)
        flip(disk / "run/step-00000002/rank-00000.safetensors", 0.9)
        state = {"w": torch.zeros(1 << 20)}
        with pytest.raises(CorruptCheckpoint, match=r"'w' cannot be kept, and .* overwritten"):
            checkpointer.restore(state, mismatched="keep")
        state = {"w": torch.zeros(1 << 20)}
        assert checkpointer.restore(state, 1, mismatched="keep") == 1 and not state["w"].any()


@pytest.mark.parametrize("way", WAYS)
def test_tied_weights_of_which_one_fits_are_refused(way: str, disk: Path) -> None:
    """It could not be said whether the tensor stays or is filled."""
    save, fill = WAYS[way]
    path = save({"m": {"a": torch.ones(3, 4), "b": torch.ones(5, 4)}}, disk)
    tied = torch.zeros(3, 4)
    with pytest.raises(IncompatibleCheckpoint, match="are one tensor, but only one of them has"):
        fill({"m": {"a": tied, "b": tied}}, path, mismatched="keep")
    assert not tied.any()


def test_tied_weights_that_stay_are_not_missing(disk: Path) -> None:
    """Of tied weights, a file of safetensors has one name."""
    path = by_safetensors({"in.weight": torch.ones(900, 2)}, disk)
    model = torch.nn.ModuleDict({"in": torch.nn.Embedding(950, 2), "out": torch.nn.Linear(2, 950)})
    model["out"].weight, model["out"].bias = model["in"].weight, None  # type: ignore[assignment]
    before = model["in"].weight.detach().clone()
    found = fastckpt.load_into(model, path, mismatched="keep")
    assert found.mismatched == ("in.weight",) and not found.missing
    found = fastckpt.load_into(model, path, rename={r"in\.": None})
    assert found.missing == ("in.weight", "out.weight") and torch.equal(model["in"].weight, before)


@with_objects
def test_lazy_modules_that_were_not_saved_stay_lazy(way: str, disk: Path) -> None:
    save, fill = WAYS[way]
    path = save({"model": torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3)})}, disk)
    model = torch.nn.ModuleDict({"a": torch.nn.LazyLinear(3), "b": torch.nn.LazyLinear(3)})
    found = fill({"model": model}, path, missing="keep")
    assert found.missing == ("model/b.weight", "model/b.bias")
    assert model["a"].weight.shape == (3, 2)
    assert torch.nn.parameter.is_lazy(model["b"].weight)


def test_an_optimizer_cannot_take_the_state_of_an_adapted_tensor(disk: Path) -> None:
    def state(rows: int, value: float) -> dict[str, Any]:
        model = Padded(rows, 600, value)
        return {"optimizer": torch.optim.Adam(model.parameters()), "model": model}

    saved, mine = state(500, 1), state(900, 2)
    saved["model"].table.sum().backward()
    saved["optimizer"].step()
    path = by_step(saved, disk)
    told = r"'optimizer/state/0' is the state of .* another shape.*mismatched=.keep."
    with pytest.raises(IncompatibleCheckpoint, match=told):
        restored(mine, path)
    assert bool((mine["model"].table == 2).all())
    assert restored(mine, path, mismatched="keep").mismatched == ("optimizer/state/0",)
    assert torch.equal(mine["model"].table[:500], saved["model"].table)
    assert not mine["optimizer"].state
    mine["model"].table.sum().backward()
    mine["optimizer"].step()


def test_an_optimizer_of_lazy_modules_gets_its_state(disk: Path) -> None:
    def state(layer: torch.nn.Module) -> dict[str, Any]:
        return {"model": layer, "optimizer": torch.optim.Adam(layer.parameters())}

    saved, mine = state(torch.nn.Linear(3, 2)), state(torch.nn.LazyLinear(2))
    saved["model"](torch.ones(1, 3)).sum().backward()
    saved["optimizer"].step()
    assert not any(restored(mine, by_step(saved, disk), mismatched="keep"))
    got, want = (its["optimizer"].state_dict()["state"] for its in (mine, saved))
    assert str(got) == str(want)


class Sharded(torch.nn.Module):
    """A table that takes another number of rows from a DTensor."""

    def __init__(self, rows: int, value: float) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.full((rows, 600), float(value)))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        saved, own = state_dict[f"{prefix}table"].full_tensor(), self.table.full_tensor()
        whole = torch.cat([saved, own.detach()[len(saved) :]])[: len(own)]
        mesh, placements = self.table.device_mesh, self.table.placements
        state_dict[f"{prefix}table"] = distribute_tensor(whole, mesh, placements)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def spread(words: int, few: int, rows: int, value: float, steps: int) -> dict[str, Any]:
    """Returns a model under FSDP2, whose tensor of few rows has no part on some rank."""
    model: Any = torch.nn.Module()
    model.words = torch.nn.Embedding(words, 600)
    model.few, model.table = torch.nn.Embedding(few, 3), Sharded(rows, value)
    model.rest = torch.nn.Linear(600, 2)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        step_once(model, optimizer)
    return {"optimizer": optimizer, "model": model}


def step_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def save_spread(member: Member, root: str) -> Outcome:
    def save() -> None:
        with fastckpt.Checkpointer(root) as checkpointer:
            checkpointer.save(7, spread(900, 5, 300, 1, steps=5)).result(60)

    return attempt(save)


def restore_spread(member: Member, root: str, way: str, steps: int) -> Outcome:
    def restore() -> Any:
        state = spread(951, 1, 301, 2, steps)
        fill = {"restore": restored, "load_into": fastckpt.load_into}[way]
        error = None
        try:
            fill(state, Path(root))
        except IncompatibleCheckpoint as raised:
            error = str(raised)
        found = fill(state, Path(root), mismatched="keep")
        model, optimizer = state["model"], state["optimizer"]
        means = [float(its.detach().full_tensor().mean()) for its in model.parameters()]
        numbers = optimizer.state_dict()["state"]
        counts = {key: float(items["step"]) for key, items in numbers.items()}
        step_once(model, optimizer)
        return error, found.mismatched, means, counts

    return attempt(restore)


@needs_fsdp2
@pytest.mark.multiprocess
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("way", ["restore", "load_into"])
def test_all_ranks_keep_the_same(way: str, steps: int, nursery: Nursery, disk: Path) -> None:
    crew: Crew = nursery.lasting_crew(2)
    for outcome in crew(save_spread, str(disk / "run")):
        assert outcome.error is None
    outcomes = crew(restore_spread, str(disk / "run"), way, steps)
    assert [outcome.error for outcome in outcomes] == [None] * 2
    (told, mismatched, means, counts), other = (outcome.value for outcome in outcomes)
    assert other == (told, mismatched, means, counts), "both ranks say the same"
    assert "'model/words.weight' has shape [951, 600], but [900, 600] in the checkpoint" in told
    optimizers = [f"optimizer/state/{number}" for number in range(3)]
    is_created = way == "restore" or steps > 0  # load_into creates no state
    names = ["model/words.weight", "model/few.weight", *(optimizers if is_created else [])]
    assert {*mismatched} == {*names}
    saved, mine = 1 - 5 * 0.001, 2 - steps * 0.001  # Adam with equal gradients
    rows = (300 * saved + mine) / 301
    assert means == pytest.approx([mine, mine, rows, saved, saved], abs=1e-4)
    kept = {number: steps for number in range(3)} if steps else {}
    assert counts == kept | ({3: 5, 4: 5} if is_created else {})
