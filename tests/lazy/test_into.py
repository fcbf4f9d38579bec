"""fastckpt.load_into(): tensors of any checkpoint go into a state that exists, on any ranks."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fastckpt
from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from tests.crews.group_crew import Crew, Member, Nursery, Outcome, attempt
from tests.kit.kinds import KINDS, by_safetensors, by_torch
from tests.kit.noise import flip

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def network(seed: int) -> torch.nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = torch.nn.Sequential(
            torch.nn.Linear(700, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 3)
        )
        made[2].bfloat16()
    return made


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_from_any_checkpoint(kind: str, disk: Path) -> None:
    saved, model = network(1), network(2)
    path = KINDS[kind][0](dict(saved.state_dict()), disk)
    versions = [parameter._version for parameter in model.parameters()]
    differences = fastckpt.load_into(model, path)
    assert equal(model, saved) and not any(differences)
    assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))


def test_a_nested_state_from_names_with_dots(disk: Path) -> None:
    saved, model = network(1), network(2)
    dcp.save({"net": saved.state_dict(), "n": 5}, checkpoint_id=disk / "dcp")
    ema = [torch.zeros(600, 700)]
    found = fastckpt.load_into({"net": model, "n": 3, "ema": ema}, disk / "dcp", missing="keep")
    assert equal(model, saved) and found.missing == ("ema/0",)
    found = fastckpt.load_into({"ema": ema}, disk / "dcp", rename={r"^net\.0\.weight": "ema/0"})
    assert torch.equal(ema[0], saved[0].weight) and found.renamed == {"net.0.weight": "ema/0"}


def test_other_dtypes_and_strides(disk: Path) -> None:
    values = {"a": torch.randn(300, 500), "b": torch.randn(300, 500), "c": torch.randn(5).double()}
    path = by_torch(values, disk)
    state = {
        "a": torch.zeros(300, 500, dtype=torch.bfloat16),
        "b": torch.zeros(500, 300).t(),
        "c": torch.zeros(5),
    }
    assert fastckpt.load_into(state, path).cast == ("a", "c")
    assert torch.equal(state["a"], values["a"].bfloat16()) and torch.equal(state["b"], values["b"])
    with pytest.raises(IncompatibleCheckpoint, match=r"'a' is torch.bfloat16, but .*; 'c' is"):
        fastckpt.load_into(state, path, dtype="raise")


LOSSY = {
    "clipped": (torch.tensor([1e30]), torch.float8_e4m3fn),
    "large": (torch.tensor([16777217], dtype=torch.int32), torch.float32),
    "wide": (torch.tensor([1, 300]), torch.int8),
    "flag": (torch.tensor([0, 5]), torch.bool),
    "half": (torch.tensor([1.0, 1e6]), torch.float16),
    "fraction": (torch.tensor([1.5]), torch.int64),
    "byte": (torch.tensor([1e6]), torch.float8_e5m2),
}
HELD = {
    "small": (torch.tensor([16777216], dtype=torch.int32), torch.float32),
    "narrow": (torch.tensor([-128, 127]), torch.int8),
    "whole": (torch.tensor([1.0]), torch.bool),
    "rounded": (torch.tensor([1.1, torch.inf, torch.nan]), torch.float16),
    "unsigned": (torch.tensor([65535], dtype=torch.uint16), torch.int32),
    "byte, too": (torch.tensor([1.1, 460.0]), torch.float8_e4m3fn),
}


@pytest.mark.parametrize("way", ["load_into", "restore"])
def test_a_dtype_that_cannot_hold_the_values_is_told(
    disk: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    values = {name: its for name, (its, _) in (LOSSY | HELD).items()}
    state = {n: torch.zeros(its.shape, dtype=to) for n, (its, to) in (LOSSY | HELD).items()}
    if way == "load_into":
        fastckpt.load_into(state, by_torch(values, disk))
    else:
        values["large"], state["large"] = values["large"].expand(1 << 18), torch.zeros(1 << 18)
        with fastckpt.Checkpointer(
            disk / "run", options=fastckpt.SaveOptions(durable=False)
        ) as checkpointer:
            checkpointer.save(1, values)
            checkpointer.restore(state)
    told = "".join(record.getMessage() for record in caplog.records)
    assert all(f"'{name}'" in told for name in [*LOSSY][:5])
    assert told.count("cannot hold") == (1 if way == "load_into" else 2)
    assert not any(f"'{name}'" in told for name in HELD)


def test_what_does_not_fit_changes_nothing(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = by_safetensors({"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(5)}, disk)
    state = {"a": torch.zeros(4), "b": torch.zeros(3, 1), "c": torch.zeros(5), "d": torch.zeros(1)}
    with pytest.raises(IncompatibleCheckpoint) as caught:
        fastckpt.load_into(state, path)
    for text in (
        "'a' has shape [4], but [3] in the checkpoint; 'b' has",
        "'d' is missing in the checkpoint",
    ):
        assert text in str(caught.value)
    assert str(caught.value).endswith("or rename= if they have other names there)")
    with pytest.raises(IncompatibleCheckpoint) as caught:
        fastckpt.load_into(state, path, missing="keep")
    assert "rename=" not in str(caught.value)
    assert not any(tensor.any() for tensor in state.values())
    with pytest.raises(IncompatibleCheckpoint, match="the checkpoint has 'a', 'b', but the state"):
        fastckpt.load_into({"c": state["c"]}, path, unexpected="raise")
    with caplog.at_level(logging.WARNING, "fastckpt"):
        assert fastckpt.load_into({"c": state["c"]}, path).unexpected == ("a", "b")
    assert "not in the state and were not loaded: 'a', 'b'" in caplog.text
    assert fastckpt.load_into(state, path, only="c").missing == ()
    with pytest.raises(TypeError, match="meta device"):
        fastckpt.load_into({"c": torch.empty(5, device="meta")}, path)
    for read in (fastckpt.open, partial(fastckpt.load_into, state)):
        for rename, told in (
            ({"b": "a"}, "rename gives 'b' the name 'a'"),
            ({"bb": "a"}, r"rename has 'bb', which matches no name \(similar names there: 'b'\)"),
        ):
            with pytest.raises(IncompatibleCheckpoint, match=told):
                read(path, rename=rename)


def test_a_misfit_names_what_the_checkpoint_has(disk: Path) -> None:
    path = by_safetensors({"head.w": torch.ones(3), "a": torch.ones(3)}, disk)
    state = {"head": {"w": torch.zeros(4)}, "b": torch.zeros(3, dtype=torch.float64)}
    told = (
        "'head/w' has shape [4], but [3] in the checkpoint, where it is 'head.w'; "
        "'b' is torch.float64, but torch.float32 in the checkpoint, where it is 'a'"
    )
    with pytest.raises(IncompatibleCheckpoint, match=re.escape(told)):
        fastckpt.load_into(state, path, rename={"^a$": "b"}, dtype="raise")


def test_a_misfit_by_names_tells_the_nearest(disk: Path) -> None:
    path = by_safetensors({f"module.{n}": t for n, t in network(1).state_dict().items()}, disk)
    with pytest.raises(IncompatibleCheckpoint, match=r"similar names there: 'module\.0\.w"):
        fastckpt.load_into(network(2), path)


def test_tied_weights_of_which_one_name_was_saved(disk: Path) -> None:
    saved, model = network(1), network(2)
    state = {"in": model[0].weight, "out": model[0].weight.detach()}
    path = by_safetensors({"in": saved[0].weight.detach()}, disk)
    assert fastckpt.load_into(state, path).missing == ()
    assert torch.equal(state["out"], saved[0].weight)
    with pytest.raises(IncompatibleCheckpoint, match="'out' is missing"):
        fastckpt.load_into({"in": model[0].weight, "out": torch.zeros(600, 700)}, path)


@pytest.mark.parametrize("save", [by_torch, by_safetensors])
def test_tied_weights_of_which_both_names_were_saved(
    save: Any, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastckpt.state.filling._PART_BYTES", 100_000)  # several parts
    weight, shared = torch.randn(600, 70), torch.zeros(600, 70)
    state = {"in": shared, "out": shared.detach(), "more": torch.nn.Parameter(shared)}
    equal = {"in": weight, "out": weight.clone(), "more": weight.clone()}
    assert not any(fastckpt.load_into(state, save(equal, disk)))
    assert torch.equal(shared, weight)
    shared.zero_()
    other = weight.clone()
    other[-1, -1] += 1
    with pytest.raises(
        IncompatibleCheckpoint, match="'in' and 'out' are one tensor in the state, but"
    ):
        fastckpt.load_into(state, save(equal | {"out": other}, disk))
    assert not shared.any()
    # What counts is what the memory would hold.
    half = {"in": shared.bfloat16()}
    half["out"] = half["in"].detach()
    rounded = {"in": weight, "out": weight.bfloat16()}
    assert fastckpt.load_into(half, save(rounded, disk)).cast == ("in",)
    assert torch.equal(half["out"], weight.bfloat16())


def test_views_that_read_one_memory_differently(disk: Path) -> None:
    numbers, into = (torch.randn(5, dtype=torch.complex64) for _ in range(2))
    path = by_torch({name: tensor.clone() for name, tensor in viewed(numbers).items()}, disk)
    assert not any(fastckpt.load_into(viewed(into), path))
    assert torch.equal(into, numbers)
    path = by_torch({"a": numbers.imag.clone()}, disk)
    with pytest.raises(IncompatibleCheckpoint, match="'b' is missing in"):
        fastckpt.load_into({"a": into.imag, "b": into.conj().imag}, path)


def viewed(numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    conjugate = numbers.conj()
    return {"a": numbers.imag, "b": conjugate.imag, "z": numbers, "conj": conjugate}


def test_keys_of_one_name(disk: Path) -> None:
    torch.save({0: torch.zeros(2), "0": torch.ones(2)}, disk / "a.pt")
    state: dict[Any, torch.Tensor] = {0: torch.full((2,), 5.0), "0": torch.full((2,), 5.0)}
    assert not any(fastckpt.load_into(state, disk / "a.pt"))
    assert [tensor[0].item() for tensor in state.values()] == [0, 1]


def test_damage_is_told(disk: Path) -> None:
    """With the names of the tensors that may have been overwritten; others are as they were."""
    saved = {"a": torch.ones(5 << 20), "b": torch.ones(3)}
    fastckpt.save(saved, disk / "a.pt").result(60)
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, saved).result(60)
    for path, file in (("a.pt", ""), ("run/step-00000001", "rank-00000.safetensors")):
        flip(disk / path / file, 0.5)
        with pytest.raises(CorruptCheckpoint, match="CRC-32 mismatch") as caught:
            fastckpt.load_into({"a": torch.zeros(5 << 20), "b": torch.zeros(3)}, disk / path)
        told = str(caught.value)
        assert told.endswith("; tensors of the state may have been overwritten: 'a', 'b'")
        assert "nothing was" not in told
        half = torch.zeros(5 << 20, dtype=torch.half)
        with pytest.raises(CorruptCheckpoint, match="CRC-32 mismatch") as caught:
            fastckpt.load_into({"a": half}, disk / path)
        assert "overwritten" not in str(caught.value) and not half.any()
    with pytest.raises(CorruptCheckpoint, match=r"CRC-32 mismatch.*; nothing was loaded: restore"):
        fastckpt.load(disk / "a.pt")


def read_sharded(member: Member, path: str) -> Outcome:
    def read() -> Any:
        mesh = init_device_mesh("cpu", (2,))
        state = {
            "rows": distribute_tensor(torch.zeros(600, 700), mesh, [Shard(0)]),
            "columns": distribute_tensor(torch.zeros(600, 700), mesh, [Shard(1)]),
            "whole": distribute_tensor(torch.zeros(600, 700), mesh, [Replicate()]),
        }
        fastckpt.load_into(state, path)
        saved = load_file(path)
        mine = {
            "rows": saved["rows"][300 * member.rank :][:300],
            "columns": saved["columns"][:, 350 * member.rank :][:, :350],
            "whole": saved["whole"],
        }
        return [
            name for name, part in mine.items() if not torch.equal(state[name].to_local(), part)
        ]

    return attempt(read)


def read_what_torch_saves(member: Member, path: str) -> Outcome:
    def read() -> Any:
        mesh = init_device_mesh("cpu", (2,))
        names = "ab"
        spread = {name: distribute_tensor(torch.ones(8), mesh, [Shard(0)]) for name in names}
        torch.save(spread, f"{path}{member.rank}")
        fastckpt.load_into({name: torch.ones(8) for name in names}, f"{path}{member.rank}")

    return attempt(read)


def read_tied(member: Member, path: str, rows: int) -> Outcome:
    def read() -> Any:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.zeros(rows, 700), mesh, [Shard(0)])
        state = {"in": weight, "out": weight.detach()}
        missing = fastckpt.load_into(state, path, missing="keep", unexpected="ignore").missing
        return missing, state["out"].to_local().sum().item()

    return attempt(read)


@pytest.mark.multiprocess
def test_tied_dtensors(nursery: Nursery, disk: Path) -> None:
    crew: Crew = nursery.lasting_crew(2)
    path = by_safetensors({"in": torch.ones(600, 700)}, disk)
    assert [its.value for its in crew(read_tied, str(path), 600)] == [((), 300.0 * 700)] * 2
    # Where a rank has nothing of it, none can tell, so that all ranks say the same.
    path = by_safetensors({"in": torch.ones(1, 700)}, disk)
    found = crew(read_tied, str(path), 1)
    assert [its.value for its in found] == [(("out",), 700.0), (("out",), 0.0)]
    path = by_safetensors({"in": torch.ones(600, 700), "out": torch.zeros(600, 700)}, disk)
    for outcome in crew(read_tied, str(path), 600):
        assert "'in' and 'out' are one tensor in the state" in str(outcome.error)


@pytest.mark.multiprocess
def test_each_rank_gets_its_part(nursery: Nursery, disk: Path) -> None:
    saved = {name: torch.randn(600, 700) for name in ("rows", "columns", "whole")}
    path = by_safetensors(saved, disk)
    crew: Crew = nursery.lasting_crew(2)
    for outcome in crew(read_sharded, str(path)):
        assert outcome.error is None and outcome.value == []
    for outcome in crew(read_what_torch_saves, str(disk / "a.pt")):
        assert "it has 2 DTensors instead, and torch.save writes" in str(outcome.error)


def test_what_holds_no_tensors_is_refused(disk: Path) -> None:
    torch.save({"w": torch.ones(3)}, disk / "a.pt")
    for wrong in (None, 5, "x", object(), torch.nn.Linear):
        with pytest.raises(TypeError, match="must be a dict, list, tuple or tensor, or"):
            fastckpt.load_into(wrong, disk / "a.pt")
    with pytest.raises(fastckpt.IncompatibleCheckpoint, match=r"no name .* matches only='v\*'"):
        fastckpt.load_into({"w": torch.ones(3)}, disk / "a.pt", only="v*")
