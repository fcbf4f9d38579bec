"""Torch's defaults while fastckpt is called, a device and a dtype, change nothing: tensors that the
library makes lie on the host and have the dtype they were saved with. Guards against an address on
the device "meta", where big models are built, which is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file

import fastckpt
from fastckpt.cli import main
from tests.kit.torches import dcp, needs_dcp

WAIT_S = 60.0
DEFAULTS = ["meta", "float64", "bfloat16"]


@contextmanager
def defaulting(to: str) -> Iterator[None]:
    """While the body runs, torch's default device is meta, or its default dtype is another."""
    if to == "meta":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(getattr(torch, to))
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def state_of(value: float) -> dict[str, Any]:
    large = torch.full((400_000,), value, dtype=torch.float32, device="cpu")
    small = torch.full((7,), value, dtype=torch.float16, device="cpu")
    return {"large": large, "small": small, "n": int(value)}


def assert_is_state_of(value: float, loaded: Any, dtype: torch.dtype | None = None) -> None:
    expected = state_of(value)
    assert loaded["n"] == expected["n"]
    for name in ("large", "small"):
        assert loaded[name].device.type == "cpu"
        assert loaded[name].dtype == (dtype or expected[name].dtype)
        assert torch.equal(loaded[name], expected[name].to(loaded[name].dtype))


@pytest.mark.parametrize("default", DEFAULTS)
def test_files(disk: Path, default: str) -> None:
    path, tensors = disk / "a.pt", disk / "a.safetensors"
    with defaulting(default):
        for fence in ("call", "step"):
            fastckpt.save(state_of(3), path, options=fastckpt.SaveOptions(fence=fence)).result(
                WAIT_S
            )
            assert_is_state_of(3, fastckpt.load(path))
        assert_is_state_of(3, fastckpt.load(path, mmap=True))
        assert fastckpt.load(path, map_location="meta")["large"].device.type == "meta"
        save_file({"large": state_of(3)["large"]}, tensors)
        assert torch.equal(fastckpt.load(tensors)["large"], state_of(3)["large"])


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("default", DEFAULTS)
def test_steps(disk: Path, default: str, codec: str | None) -> None:
    model = torch.nn.Linear(600, 500)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 600)).sum().backward()
    optimizer.step()
    with defaulting(default):
        checkpointer = fastckpt.Checkpointer(disk, codec=codec)
        saved = {"model": model, "optimizer": optimizer, "state": state_of(3)}
        checkpointer.save(1, saved).result(WAIT_S)
        loaded = checkpointer.load()
        assert_is_state_of(3, loaded["state"])
        assert torch.equal(loaded["model"]["weight"], model.weight)
        # Into another dtype, which goes through memory of our own.
        wide = {k: v.double() if k != "n" else 0 for k, v in state_of(0).items()}
        fresh = torch.nn.Linear(600, 500, device="cpu")
        others = torch.optim.AdamW(fresh.parameters())
        restored = {"model": fresh, "optimizer": others, "state": wide}
        assert checkpointer.restore(restored) == 1
        checkpointer.close()
    assert_is_state_of(3, wide, torch.float64)
    assert torch.equal(fresh.weight, model.weight.to(fresh.weight.dtype))
    momentum = others.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(momentum, optimizer.state_dict()["state"][0]["exp_avg"].to(momentum.dtype))


@needs_dcp
@pytest.mark.parametrize("default", DEFAULTS)
def test_directories_of_dcp(disk: Path, default: str) -> None:
    with defaulting(default):
        state = state_of(3)
        dcp.save(state, checkpoint_id=disk / "a")
        dcp.async_save(
            state, checkpoint_id=disk / "b", options=fastckpt.SaveOptions(fence="step")
        ).result(WAIT_S)
        for name, dtype in (("a", torch.float64), ("b", None)):
            read = {k: v if k == "n" else v.to(dtype or v.dtype) for k, v in state_of(0).items()}
            torch_dcp.load(read, storage_reader=dcp.Reader(disk / name))
            assert_is_state_of(3, read, dtype)


@pytest.mark.parametrize("default", DEFAULTS)
def test_the_command_line(disk: Path, default: str, capsys: pytest.CaptureFixture[str]) -> None:
    with defaulting(default):
        fastckpt.save(state_of(3), disk / "a.pt").result(WAIT_S)
        assert not main(["verify", str(disk / "a.pt")])
        assert not main(["doctor", str(disk)])
    assert "ok" in capsys.readouterr().out
