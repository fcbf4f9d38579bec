"""Safetensors files of others are read in every dtype of the format, as their own library reads
them, and a tensor that torch has no dtype for stands in nobody's way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fastckpt
from fastckpt.cli import main
from fastckpt.errors import IncompatibleCheckpoint
from tests.kit.noise import flip

NEW = ("float4_e2m1fn_x2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "complex64")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def of_today() -> dict[str, torch.Tensor]:
    state = {"plain": torch.randn(5, 3)}
    for name in NEW:
        dtype = getattr(torch, name, None)
        if dtype is not None:
            state[name] = torch.arange(240, dtype=torch.uint8).view(dtype).view(5, -1)
            state[f"empty {name}"] = torch.empty(3, 0, 2, dtype=dtype)
    return state


def by_hand(path: Path, **tensors: tuple[str, list[int], int]) -> Path:
    """A file whose tensors have these dtypes, shapes and sizes."""
    header, end = dict[str, Any](), 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(end)))
    return path


def unreadable(disk: Path) -> Path:
    return by_hand(
        disk / "hand.safetensors",
        six=("F6_E2M3", [4, 4], 12),
        other=("F6_E3M2", [0, 3], 0),
        odd=("F4", [2, 3], 3),
        plain=("U8", [3], 3),
        even=("F4", [2, 2], 2),
    )


def test_each_dtype_is_read_as_the_library_reads_it(disk: Path) -> None:
    state = of_today()
    safetensors.torch.save_file(state, disk / "a.safetensors")
    theirs = safetensors.torch.load_file(disk / "a.safetensors")
    with fastckpt.open(disk / "a.safetensors") as tensors:
        assert {*tensors} == {*theirs} == {*state}
        for name, expected in theirs.items():
            found = tensors[name][...]
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
            assert torch.equal(bits(found), bits(expected))
            assert tensors[name].nbytes == expected.numel() * expected.itemsize
            for index in ((slice(1, 3),), (..., slice(None, None, 2)), (2, slice(1, 3))):
                if "empty" not in name:
                    assert torch.equal(bits(tensors[name][index]), bits(expected[index])), name
    targets = {name: torch.empty(its.shape, dtype=its.dtype) for name, its in state.items()}
    fastckpt.load_into(targets, disk / "a.safetensors")
    assert all(torch.equal(bits(targets[name]), bits(state[name])) for name in state)


@pytest.mark.parametrize("kind", ["file", "step"])
def test_our_own_files_hold_each_dtype(kind: str, disk: Path) -> None:
    state = of_today()
    if kind == "file":
        fastckpt.save(state, disk / "a").result(60)
    else:
        with fastckpt.Checkpointer(disk / "a") as checkpointer:
            checkpointer.save(1, state).result(60)
    with fastckpt.open(disk / "a") as tensors:
        for name, expected in state.items():
            assert tensors[name].dtype == expected.dtype
            assert torch.equal(bits(tensors[name][...]), bits(expected))


def test_a_tensor_without_a_dtype_is_refused_when_it_is_asked_for(disk: Path) -> None:
    with fastckpt.open(unreadable(disk)) as tensors:
        assert [*tensors] == ["six", "other", "odd", "plain", "even"]
        assert tensors["plain"][...].tolist() == [15, 16, 17]
        refused = {"six": "F6_E2M3", "other": "F6_E3M2", "odd": "F4 with an odd"}
        for name, dtype in refused.items():
            for ask in (tensors.__getitem__, lambda n: tensors.prefetch([n])):
                with pytest.raises(IncompatibleCheckpoint, match=rf"'{name}' is of dtype {dtype}"):
                    ask(name)
            with pytest.raises(IncompatibleCheckpoint, match="leave this tensor out, or read it"):
                tensors.read([("plain", ...), (name, ...)])
        if hasattr(torch, "float4_e2m1fn_x2"):
            assert tensors["even"].shape == (2, 1)
            assert bits(tensors["even"][...]).tolist() == [18, 19]


def test_a_load_refuses_only_what_the_state_has(disk: Path) -> None:
    path, state = unreadable(disk), {"plain": torch.zeros(3, dtype=torch.uint8)}
    fastckpt.load_into(state, path, unexpected="ignore")
    assert state["plain"].tolist() == [15, 16, 17]
    state = {"plain": torch.zeros(3, dtype=torch.uint8), "six": torch.zeros(4, 4)}
    with pytest.raises(IncompatibleCheckpoint, match="'six' is of dtype F6_E2M3, which torch"):
        fastckpt.load_into(state, path, unexpected="ignore")
    assert state["plain"].tolist() == [0, 0, 0]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no F4")
def test_packed_numbers_are_not_cast(disk: Path) -> None:
    state = {"plain": torch.zeros(3, dtype=torch.uint8), "even": torch.ones(2, 1)}
    with pytest.raises(IncompatibleCheckpoint, match=r"'even' is of .*not cast .* torch.float32:"):
        fastckpt.load_into(state, unreadable(disk), unexpected="ignore")
    assert state["plain"].tolist() == [0, 0, 0] and state["even"].tolist() == [[1], [1]]


def test_inspect_tells_of_each_tensor(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(unreadable(disk)), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["content"]
    assert [(row["dtype"], row["shape"], row["nbytes"]) for row in rows[:4]] == [
        ("F6_E2M3", [4, 4], 12),
        ("F6_E3M2", [0, 3], 0),
        ("F4 with an odd last dimension", [2, 3], 3),
        ("uint8", [3], 3),
    ]


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_convert_copies_each_dtype(to: str, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = of_today()
    safetensors.torch.save_file(state, disk / "a.safetensors")
    arguments = [str(disk / "b"), "--to", to, "--dtype", "bf16"]
    assert main(["convert", str(disk / "a.safetensors"), *arguments]) == 0
    file = disk / "b" / "model.safetensors" if to == "hf" else disk / "b"
    found = safetensors.torch.load_file(file)
    assert found.pop("plain").dtype == torch.bfloat16
    assert all(torch.equal(bits(found[name]), bits(state[name])) for name in found)
    assert {name: (its.dtype, its.shape) for name, its in found.items()} == {
        name: (its.dtype, its.shape) for name, its in state.items() if name != "plain"
    }
    path, chosen = str(unreadable(disk)), str(disk / "c")
    assert main(["convert", path, str(disk / "all"), "--to", to]) == 1
    assert "'six' is of dtype F6_E2M3" in capsys.readouterr().err
    assert main(["convert", path, chosen, "--to", to, "--glob", "plain"]) == 0
    assert not (disk / "all").exists()


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no F4")
def test_diff_compares_packed_numbers(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [disk / "a.safetensors", disk / "b.safetensors"]
    for path in paths:
        by_hand(path, w=("F4", [2, 8], 8))
    assert main(["diff", *map(str, paths)]) == 0
    flip(paths[1], -6)  # the byte 2 becomes 3: the first of its numbers, 1, becomes 1.5
    assert main(["diff", *map(str, paths)]) == 1
    assert "w: 12.5% of its elements differ, by up to 0.5" in capsys.readouterr().out
