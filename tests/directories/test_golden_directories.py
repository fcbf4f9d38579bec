"""Promise: directories that this version wrote are read by every later one, and by the libraries
whose formats they have.

tests/data/make_directories.py wrote them. This file must not know how they are made.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file

import fastckpt
from fastckpt.cli import main
from fastckpt.integrations.dcp import Reader
from tests.kit.paths import ROOT
from tests.kit.torches import needs_dcp

GOLDEN = ROOT / "tests" / "data" / "golden"


@pytest.fixture(scope="module")
def made() -> Any:
    """What the directories hold: the module that wrote them."""
    spec = importlib.util.spec_from_file_location(
        "make_directories", GOLDEN.parent / "make_directories.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@needs_dcp
@pytest.mark.parametrize("reader", [Reader, stock.FileSystemReader])
def test_a_dcp_directory_loads(made: Any, reader: Any) -> None:
    expected = made.tensors()
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    stock.load(state, storage_reader=reader(GOLDEN / "dcp"))
    assert_equal(state["model"], expected)


def test_an_export_loads(made: Any) -> None:
    expected = made.tensors()
    assert_equal(load_file(GOLDEN / "export" / "model.safetensors"), expected)
    with fastckpt.open(GOLDEN / "export") as tensors:
        assert_equal({name: tensors[name][...] for name in tensors}, expected)


def test_a_step_of_planes_loads(made: Any) -> None:
    with fastckpt.Checkpointer(GOLDEN / "planes") as checkpointer:
        state = checkpointer.load(made.STEP)
    assert state["epoch"] == 3 and torch.equal(state["weights"], made.weights())


@pytest.mark.parametrize("name", ["dcp", "export", "planes"])
def test_its_checksums_are_right(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(GOLDEN / name)]) == 0, capsys.readouterr().out
