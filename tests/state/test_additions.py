"""Tensors that a state lacks are made as they were saved, DTensors on the state's own mesh, or the
restore is refused; never whole on each rank where a DTensor was saved. Each rank of a job is played
in turn, over a process group that sends nothing; what optimizers make of it is test_optimizers.py's
business.
"""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fastckpt
from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.plan.boxes import Box
from fastckpt.state.dtensors import SPREAD, spread_of
from fastckpt.state.template import Template
from fastckpt.state.tree import TENSOR, OwnValues, flatten
from tests.crews.optimizer_bodies import Codes, Wrapped
from tests.kit.placements import described, difference, held, on_ranks, rank_of

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None]] = {
    "one": ((1,), None),
    "two": ((2,), None),
    "three": ((3,), None),
    "pairs": ((2, 2), ("dp", "tp")),
    "four": ((4, 1), ("dp", "tp")),
    "others": ((2, 2), ("pp", "ep")),
}
ROWS = [Shard(0)]
OVER_TP = [_StridedShard(0, split_factor=2), Shard(0)]


def size_of(name: str) -> int:
    return torch.Size(MESHES[name][0]).numel()


def mesh_of(name: str) -> Any:
    sizes, names = MESHES[name]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def on_mesh(name: str, placements: Any, shape: tuple[int, ...] = (12, 4)) -> Any:
    if placements is OVER_TP:
        return held(torch.zeros(shape[0] // 4, *shape[1:]), mesh_of(name), placements, shape)
    return torch.distributed.tensor.zeros(shape, device_mesh=mesh_of(name), placements=placements)


def saved_on(name: str, placements: Any, shape: tuple[int, ...] = (12, 4)) -> Any:
    """What a job saves that has a weight and, of another shape and placement, a moment."""
    with rank_of(size_of(name), 0):
        weight = on_mesh(name, [Shard(0)] * len(MESHES[name][0]))
        state = {"weight": weight, "moment": on_mesh(name, placements, shape)}
        return flatten(state, 0, size_of(name)).objects


def restore(state: Any, nest: Any, own: OwnValues | None = None) -> list[Box]:
    """Restores into a state, but for the reading; returns the parts that would be read."""
    template = Template(state, copy.deepcopy(nest), own, lambda _places: None, "run")
    template.put()
    return [target.box for target in template.targets]


@pytest.mark.parametrize(
    ("there", "placements", "here"),
    [
        ("two", ROWS, "two"),
        ("two", ROWS, "three"),
        ("two", [Shard(1)], "three"),
        ("two", [Replicate()], "three"),
        ("two", ROWS, "one"),
        ("pairs", [Shard(0), Replicate()], "four"),
        ("pairs", [Shard(1), Shard(0)], "others"),
        ("pairs", OVER_TP, "pairs"),
    ],
)
def test_a_dtensor_is_made_on_the_mesh_of_the_state(there: str, placements: Any, here: str) -> None:
    nest = saved_on(there, placements)

    def work(rank: int) -> None:
        weight = on_mesh(here, [Shard(0)] * len(MESHES[here][0]))
        state = {"moment": None, "weight": weight}
        moment, _weight = boxes = restore(state, nest)
        made: Any = state["moment"]
        assert type(made) is DTensor and made.device_mesh == weight.device_mesh and len(boxes) == 2
        assert [*made.placements] == placements and tuple(made.shape) == (12, 4)
        assert tuple(made.to_local().shape) == moment.sizes
        if placements is not OVER_TP:
            assert made.to_local().shape == on_mesh(here, placements).to_local().shape

    on_ranks(size_of(here), work)


def test_a_part_without_elements_is_made() -> None:
    nest = saved_on("two", ROWS, (2, 5))

    def work(rank: int) -> tuple[int, ...]:
        state: dict[str, Any] = {"moment": None, "weight": on_mesh("three", ROWS)}
        restore(state, nest)
        return tuple(state["moment"].to_local().shape)

    assert on_ranks(3, work) == [(1, 5), (1, 5), (0, 5)]


@pytest.mark.parametrize("here", ["three", "pairs"])
def test_a_mesh_that_the_state_does_not_tell_is_asked_for(here: str) -> None:
    nest = saved_on("two", ROWS)
    with rank_of(size_of(here), 0):
        state: dict[str, Any] = {"moment": None, "weight": torch.zeros(12, 4)}
        if here == "three":
            del state["weight"]
            why = "no tensor of the state is on a mesh of this job. Add an object on that mesh"
        else:
            state["weight"] = on_mesh(here, [Shard(0), Shard(0)])
            why = r"the state must have exactly one matching mesh, and has \(2, 2\)"
        told = rf"'moment' was saved as a DTensor, \(S\(0\)\) on a mesh \(2,\), but {why}"
        with pytest.raises(IncompatibleCheckpoint, match=told):
            restore(state, nest)
        assert state["moment"] is None


def test_of_several_meshes_the_one_with_the_saved_names_is_taken() -> None:
    nest = saved_on("pairs", [Shard(0), Shard(0)])
    with rank_of(4, 0):
        both = [Shard(0), Shard(0)]
        state: dict[str, Any] = {
            "other": on_mesh("others", both),
            "moment": None,
            "weight": on_mesh("four", both),
        }
        restore({**state, "other": torch.zeros(())} | {"other": None}, nest | {"other": 5})
        template = {"moment": None, "deep": {"weight": on_mesh("four", both)}}
        deep = {"weight": nest["weight"], "other": nest["weight"]}
        template["deep"]["other"] = on_mesh("others", both)
        restore(template, nest | {"deep": deep})
        made: Any = template["moment"]
        assert made.device_mesh.mesh_dim_names == ("dp", "tp")


def test_a_job_of_plain_tensors_gets_plain_ones() -> None:
    nest = saved_on("two", ROWS)
    state: dict[str, Any] = {"moment": None, "weight": torch.zeros(12, 4)}
    with rank_of(3, 1):
        assert restore(state, nest) == [Box((0, 0), (12, 4))] * 2
    assert type(state["moment"]) is torch.Tensor
    alone: dict[str, Any] = {"moment": None}
    restore(alone, nest)  # no process group: there can be no mesh
    assert type(alone["moment"]) is torch.Tensor


def factored(parameter: Any) -> Any:
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["row"] = parameter.detach().mean(1, keepdim=True)
    return optimizer


def test_state_that_nothing_says_how_to_spread_is_refused() -> None:
    optimizer = factored(torch.nn.Parameter(torch.zeros(12, 4)))
    nest = flatten({"o": optimizer, "w": Wrapped(optimizer)}, 0, 1).objects
    with rank_of(2, 0):
        fresh = torch.optim.SGD([torch.nn.Parameter(on_mesh("two", ROWS))], lr=0.2)
        for state in ({"o": fresh}, {"w": Wrapped(fresh), "o": fresh}):
            with pytest.raises(
                IncompatibleCheckpoint, match=r"by a job without DTensors.*in a step"
            ):
                restore(state, nest)
        assert fresh.param_groups[0]["lr"] == 0.2 and not fresh.state
        used = factored(torch.nn.Parameter(on_mesh("two", ROWS)))
        (_row,) = restore({"o": used}, {"o": nest["o"]}) or [None]
        assert type(next(iter(used.state.values()))["row"]) is DTensor


def of_codes(name: str, rows: int) -> Any:
    mesh = mesh_of(name)
    local = Codes(torch.full((rows, 4), 3, dtype=torch.int8), torch.ones(()))
    return DTensor.from_local(local, mesh, ROWS, run_check=False, shape=(12, 4), stride=(4, 1))


def test_parts_of_a_subclass_go_back_to_their_places() -> None:
    def saved(rank: int) -> Any:
        flat = flatten({"m": of_codes("two", 6), "again": of_codes("two", 6)}, rank, 2)
        assert not flat.leaves
        return flat.objects, {name: own.value for name, own in flat.per_rank.items()}

    (nest, first), (_nest, second) = on_ranks(2, saved)
    values = [first, second]
    assert [each["m"]["offsets"] for each in values] == [[0, 0], [6, 0]]

    def own(rank: int, ranks: int) -> OwnValues:
        mine = values[rank] if rank < 2 else None
        return OwnValues(mine, rank, ranks, 2, lambda name: [each[name] for each in values])

    def same(rank: int) -> None:
        state: dict[str, Any] = {"m": of_codes("two", 6), "again": None}
        state["m"].to_local().codes.zero_()
        restore(state, nest, own(rank, 2))
        for each in state.values():
            assert type(each) is DTensor and type(each.to_local()) is Codes
            assert bool((each.to_local().codes == 3).all()) and each.placements == (Shard(0),)

    def other(rank: int) -> None:
        for state in ({"m": of_codes("three", 4)}, {"m": None, "again": of_codes("three", 4)}):
            with pytest.raises(IncompatibleCheckpoint, match="parts are Codes and cannot"):
                restore(state, nest, own(rank, 3))

    on_ranks(2, same)
    on_ranks(3, other)
    with pytest.raises(IncompatibleCheckpoint, match=r"is a Tensor of shape.*whose parts .* Codes"):
        restore({"m": torch.zeros(12, 4)}, nest, own(0, 1))


def test_ranks_of_which_one_has_a_subclass_disagree_by_name() -> None:
    def work(rank: int) -> Any:
        plain = held(torch.zeros(6, 4), mesh_of("two"), ROWS, (12, 4))
        return described(flatten({"m": plain if rank else of_codes("two", 6)}, rank, 2), 2)

    text, _unequal = difference(*on_ranks(2, work))
    assert "m is float32 [12, 4]" in text and "but a PerRank value on rank 0" in text


class Sealed(Codes):
    """A part that cannot be pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("it is sealed")


def test_a_subclass_that_cannot_be_saved_is_named(disk: Path) -> None:
    with rank_of(1, 0):
        local = Sealed(torch.zeros(12, 4, dtype=torch.int8), torch.ones(()))
        tensor = DTensor.from_local(local, mesh_of("one"), ROWS, run_check=False)
        state = {"a": {"m": tensor}}
        told = "value at 'a/m.* cannot be pickled: it is sealed .*class Sealed.*in a PerRank"
        checkpointer = fastckpt.Checkpointer(disk / "run")
        with checkpointer, pytest.raises(RuntimeError, match=told):
            checkpointer.save(1, state).result()


SPREADS: list[Any] = ["", "[", "[]", "{}", '"S(0)"', "[" * 4000, 5, ["[]"]]
SPREADS += [
    f"[[{row}]]"
    for row in ("2,null,0", "0,null,0,false", "2,5,0,false", "2,null,1,false", "2,null,-1,false")
]
SPREADS += ["[[2,null,0,0]]", "[[2,null,0,false]]" + " " * 5000]


@pytest.mark.parametrize("spread", SPREADS, ids=lambda value: str(value)[:20])
def test_a_malformed_spread_is_damage(spread: Any) -> None:
    placeholder = {TENSOR: "m", "dtype": "F32", "shape": [3], SPREAD: spread}
    with pytest.raises(CorruptCheckpoint, match="malformed mesh or placements"):
        spread_of(placeholder)
    assert spread_of({TENSOR: "m", "dtype": "F32", "shape": [3]}) is None


# ---- dicts of optimizers ----


def trained(lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
def test_a_dict_of_an_optimizer_is_filled_and_warned_of(
    disk: Path, caplog: pytest.LogCaptureFixture, is_used: bool
) -> None:
    _model, optimizer = trained(0.0005)
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"a": optimizer, "b": [optimizer]}).result()
        other = trained(0.001)[1]
        if not is_used:
            other.state.clear()
        state: dict[str, Any] = {"a": other.state_dict(), "b": [other]}
        with caplog.at_level(logging.WARNING, "fastckpt"):
            checkpointer.restore({"b": [other]})
            assert not [each for each in caplog.records if "dicts" in each.message]
            caplog.clear()
            other.param_groups[0]["lr"] = 0.001
            checkpointer.restore({"a": state["a"]})
    (told,) = (each.getMessage() for each in caplog.records if "dicts" in each.getMessage())
    assert re.search("'a'.*load_state_dict.*or put the optimizer itself", told)
    assert state["a"]["param_groups"][0]["lr"] == 0.0005 and other.param_groups[0]["lr"] == 0.001
    other.load_state_dict(state["a"])
    assert other.param_groups[0]["lr"] == 0.0005
    mine, theirs = (next(iter(each.state.values())) for each in (other, optimizer))
    assert torch.equal(mine["exp_avg"], theirs["exp_avg"]) and mine["step"] == 1


@pytest.mark.parametrize("kind", ["wrapped", "joined"])
def test_only_dicts_of_the_callers_are_warned_of(
    disk: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    optimizer = trained(0.1)[1]
    state = {
        "wrapped": Wrapped(optimizer),
        "joined": {"state.w.step": 1, "param_groups.w.lr": 0.1},
    }[kind]
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"o": state}).result()
        with caplog.at_level(logging.WARNING, "fastckpt"):
            checkpointer.restore({"o": state})
    assert ("dicts" in caplog.text) == (kind == "joined")
