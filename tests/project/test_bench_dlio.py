"""Promise: as a checkpoint mechanism of DLIO, fastckpt begins all files before it waits for any,
has them durable when DLIO's clock stops, and DLIO's own mechanism is charged with an fsync.

DLIO needs an MPI and is in no package index as it is measured, so a stand-in has its place here:
it hands the files of a rank to save_state() one after the other, as DLIO's class does. The last
test runs the benchmark where DLIO is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fastckpt
from tests.kit.paths import ROOT

STATES = {"model_states": {"0": torch.rand(1000)}, "optim_states": {"1": torch.rand(3000)}}


class PyTorchCheckpointing:
    """The part of DLIO's class that mechanisms derive from, with two files for a rank."""

    folder: Path

    def __init__(self) -> None:
        self.synced: list[bool] = []

    def get_name(self, suffix: str) -> str:
        return str(self.folder / f"{suffix}.pt")

    def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:
        self.synced.append(fsync)

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        for name, state in STATES.items():
            self.save_state(f"{epoch}_{step_number}_{name}", state, fsync=False)

    def load_checkpoint(self, epoch: int, step_number: int) -> None:
        for name, state in STATES.items():
            self.load_state(f"{epoch}_{step_number}_{name}", state)

    def load_state(self, suffix: str, state: Any) -> None:
        raise NotImplementedError

    def finalize(self) -> None:
        pass


@pytest.fixture
def mechanisms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module of mechanisms, with the stand-in in DLIO's place."""
    stand_in = ModuleType("pytorch_checkpointing")
    stand_in.PyTorchCheckpointing = PyTorchCheckpointing  # type: ignore[attr-defined]
    for name in ("dlio_benchmark", "dlio_benchmark.checkpointing"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    name = "dlio_benchmark.checkpointing.pytorch_checkpointing"
    monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(PyTorchCheckpointing, "folder", tmp_path, raising=False)
    file = ROOT / "benchmarks" / "dlio" / "mechanisms.py"
    spec = importlib.util.spec_from_file_location("mechanisms_of_a_test", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def order(mechanisms: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with the saves, which are real: begun, and waited for."""
    done: list[str] = []

    def save(state: Any, path: str) -> Any:
        handle = fastckpt.save(state, path)
        exception = handle.exception

        def waited() -> Any:
            done.append("wait")
            return exception()

        monkeypatch.setattr(handle, "exception", waited)
        done.append("begin")
        return handle

    spied = ModuleType("fastckpt")
    spied.save, spied.load = save, fastckpt.load  # type: ignore[attr-defined]
    monkeypatch.setattr(mechanisms, "fastckpt", spied)
    return done


def test_a_checkpoint_is_durable_when_the_clock_stops(
    mechanisms: Any, order: list[str], tmp_path: Path
) -> None:
    mechanism = mechanisms.Fastckpt.get_instance()
    assert mechanisms.Fastckpt.get_instance() is mechanism
    mechanism.save_checkpoint(1, 2)
    assert order == ["begin", "begin", "wait", "wait"]
    for name, state in STATES.items():
        (key,) = state
        loaded = torch.load(tmp_path / f"1_2_{name}.pt", weights_only=True)
        assert torch.equal(loaded[key], state[key])
    mechanism.load_checkpoint(1, 2)
    mechanism.finalize()
    assert order.count("wait") == 2


def test_a_save_behind_is_waited_for_before_whatever_comes_next(
    mechanisms: Any, order: list[str]
) -> None:
    mechanism = mechanisms.FastckptBehind.get_instance()
    mechanism.save_checkpoint(1, 1)
    assert order == ["begin", "begin"]
    mechanism.save_checkpoint(1, 2)
    assert order[2:] == ["wait", "wait", "begin", "begin"]
    mechanism.load_checkpoint(1, 2)
    assert order[6:] == ["wait", "wait"]
    mechanism.save_checkpoint(1, 3)
    mechanism.finalize()
    assert order.count("wait") == order.count("begin") == 6


def test_a_failed_save_is_raised_and_damage_is_not_loaded(
    mechanisms: Any, order: list[str], tmp_path: Path
) -> None:
    mechanism = mechanisms.Fastckpt.get_instance()
    mechanism.save_checkpoint(1, 1)
    file = tmp_path / "1_1_optim_states.pt"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(fastckpt.CorruptCheckpoint):
        mechanism.load_checkpoint(1, 1)
    (tmp_path / "1_2_model_states.pt").mkdir()
    with pytest.raises((fastckpt.CheckpointError, OSError)):
        mechanism.save_checkpoint(1, 2)
    assert order.count("wait") >= order.count("begin")  # nothing is in flight


def test_dlio_s_own_mechanism_syncs_whatever_its_configuration_says(mechanisms: Any) -> None:
    mechanism = mechanisms.TorchSaveSynced.get_instance()
    mechanism.save_checkpoint(1, 1)
    assert mechanism.synced == [True, True]


@pytest.mark.torture
@pytest.mark.multiprocess
def test_the_benchmark_runs_dlio(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("dlio_benchmark")
    if spec is None or spec.origin is None:
        pytest.skip("dlio_benchmark is not installed: put a checkout of it on PYTHONPATH")
    command = [sys.executable, str(ROOT / "benchmarks" / "dlio_saves.py"), "--ranks", "2"]
    command += ["--dlio", str(Path(spec.origin).parents[1]), "--rounds", "1", "--hidden", "128"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path), "--out", str(tmp_path / "results")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stderr
    (file,) = (tmp_path / "results").glob("dlio-*.json")
    sections = json.loads(file.read_text())["lines"]
    assert [title.partition(":")[0] for title in sections] == ["8B, 2 ranks", "405B, 2 ranks"]
    assert all(lines[-1]["measured"] == "yes" for lines in sections.values())
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
