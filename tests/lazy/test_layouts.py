"""Any checkpoint is read in another layout: fused tensors apart, and others in one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.errors import IncompatibleCheckpoint
from fastckpt.lazy import arranged
from tests import layouts
from tests.lazy.test_open import by_safetensors, by_torch, dcp_by_torch, same, steps


@pytest.mark.parametrize("name", layouts.MODELS)
@pytest.mark.parametrize("kind", [by_torch, by_safetensors, steps, dcp_by_torch])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_state_is_filled_from_the_other_layout(kind: Any, name: str, disk: Path) -> None:
    for number, (saved, wanted, text) in enumerate(layouts.directions(name)):
        (at := disk / str(number)).mkdir()
        path = kind(saved, at)
        state = {key: torch.zeros_like(its) for key, its in wanted.items()}
        told = fastckpt.load_into(state, path, rename=layouts.rules(text), unexpected="raise")
        for key, its in wanted.items():
            same(state[key], its)
        assert {*told.renamed} == {*saved} - {*wanted} and not told.missing


def test_parts_of_what_is_made_are_read(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arranged, "_APART_BYTES", 100)
    for saved, wanted, text in layouts.directions("gpt2") + layouts.directions("qwen_moe"):
        torch.save(saved, disk / "a.pt")
        with fastckpt.open(disk / "a.pt", rename=layouts.rules(text)) as tensors:
            assert {*tensors} == {*wanted}
            for name, its in wanted.items():
                same(tensors[name][...], its)
                same(tensors[name][1:5, 2::3], its[1:5, 2::3])
                assert sum(shard.box.numel for shard in tensors[name].shards) == its.numel()


def test_what_is_read_converted_or_expanded(disk: Path) -> None:
    """Into memory that is not contiguous, of another dtype; from rows that are stored once."""
    q, kv = torch.randn(4, 6), torch.randn(1, 6).expand(8, 6)
    torch.save({"m": {"q": q, "kv": kv}}, disk / "a.pt")
    rename = {("q$", "kv$"): fastckpt.join(0, "qkv"), r"m/qkv": fastckpt.split(1, ["a", "b"])}
    state = {"a": torch.zeros(12, 3, dtype=torch.float64), "b": torch.zeros(3, 12).t()}
    told = fastckpt.load_into(state, disk / "a.pt", rename=rename)
    for name, its in zip("ab", torch.cat([q, kv]).chunk(2, 1), strict=True):
        assert torch.equal(state[name], its.to(state[name].dtype))
    assert told.renamed == {"m/q": "a, b", "m/kv": "a, b"} and told.cast == ("a",)


def test_what_does_not_fit_is_named_with_its_path(disk: Path) -> None:
    torch.save({"qkv": torch.ones(6, 2)}, disk / "a.pt")
    for read in (fastckpt.open, partial(fastckpt.load_into, {"q": torch.zeros(6, 2)})):
        with pytest.raises(IncompatibleCheckpoint, match=r"a.pt' does not fit: rename has 'qvk', "):
            read(disk / "a.pt", rename={"qvk": "q"})
    for sizes, told in (((3, 4), "3 \\+ 4 = 7, which is not 6"), ((2, 4), "it is 'qkv', .4, 2")):
        rename = {"qkv": fastckpt.split(0, dict(zip(("q", "kv"), sizes, strict=True)))}
        state = {"q": torch.zeros(2, 2), "kv": torch.zeros(3, 2)}
        with pytest.raises(IncompatibleCheckpoint, match=rf"a.pt' does not fit: .*{told}"):
            fastckpt.load_into(state, disk / "a.pt", rename=rename)
        assert not state["q"].any()
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"qkv": torch.ones(6, 2)}).result(60)
        with pytest.raises(TypeError, match=r"for 'qkv', which restore.. does not do: load_into"):
            checkpointer.restore({"q": torch.zeros(2, 2)}, rename=rename)
