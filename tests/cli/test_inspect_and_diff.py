"""`fastckpt inspect` and `diff` tell what is in a checkpoint, and run nothing of it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fastckpt
from fastckpt.cli import main
from fastckpt.storage.file_system import Storage
from tests.kit.noise import flip


def saved(disk: Path, name: str, **tensors: torch.Tensor) -> str:
    torch.save(tensors, disk / name)
    return str(disk / name)


def told(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    assert main([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_inspect_lists_a_root(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"model": {"w": torch.ones(600, 600), "b": torch.ones(3, dtype=torch.bfloat16)}}
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(7, state).result(60)
    root = str(disk / "run")
    found = told(capsys, "inspect", root)
    assert found["kind"] == "a step of fastckpt" and found["verified"]
    assert (found["step"], found["ranks"], found["tensors"]) == (7, 1, 2)
    assert {
        row["name"]: (row["dtype"], row["shape"], row["nbytes"]) for row in found["content"]
    } == {
        "model/w": ("float32", [600, 600], 1_440_000),
        "model/b": ("bfloat16", [3], 6),
    }
    assert main(["inspect", root, "--glob", "*/w"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 7" in lines[0] and lines[1].startswith("1 tensors")
    assert lines[2].split() == [
        "model/w",
        "float32",
        "[600,",
        "600]",
        "1.37",
        "MiB",
        lines[2].split()[-1],
    ]


def test_inspect_reads_no_tensor(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fastckpt.save({"w": torch.ones(6 << 20)}, disk / "a.pt").result(60)
    flip(disk / "a.pt", 20 << 20)  # would be damage, if it were read
    assert told(capsys, "inspect", str(disk / "a.pt"))["tensors"] == 1


def test_inspect_of_safetensors_reads_the_header_alone(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = disk / "a.safetensors"
    state = {f"w{n}": torch.ones(n % 7, 3).to((torch.int8, torch.half)[n % 2]) for n in range(3000)}
    safetensors.torch.save_file(state, path)
    header_end = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    read_at, ends = Storage.read_at, []

    def recorded(self: Storage, fd: int, nbytes: int, offset: int) -> bytes:
        ends.append(offset + nbytes)
        return read_at(self, fd, nbytes, offset)

    monkeypatch.setattr(Storage, "read_at", recorded)
    found = told(capsys, "inspect", str(path))["content"]
    assert max(ends) == header_end
    assert {row["name"]: (row["dtype"], row["shape"], row["nbytes"]) for row in found} == {
        name: (str(tensor.dtype)[6:], [*tensor.shape], tensor.nbytes)
        for name, tensor in state.items()
    }


class Exploding:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


def text_file(disk: Path) -> None:
    (disk / "x").write_text("text")


def cut_file(disk: Path) -> None:
    fastckpt.save(torch.ones(1000), disk / "x").result(60)
    os.truncate(disk / "x", 2000)


def empty_directory(disk: Path) -> None:
    (disk / "x").mkdir()


def metadata_that_is_no_file(disk: Path) -> None:
    (disk / "x").mkdir()
    os.mkfifo(disk / "x" / ".metadata")


def exploding(disk: Path) -> None:
    torch.save(Exploding(), disk / "x")


MAKERS = [None, text_file, cut_file, empty_directory, metadata_that_is_no_file]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_what_cannot_be_opened_is_one_line(
    command: str, make: Any, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if make is not None:
        make(disk)
    path = str(disk / "x")
    assert main([command, *[path] * (1 + (command == "diff"))]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"fastckpt {command}: ") and err.count("\n") == 1
    assert path in err
    assert make is not metadata_that_is_no_file or f"{path}/.metadata' is not a regular" in err


def test_nothing_of_a_checkpoint_is_run(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(disk)
    exploding(disk)
    assert told(capsys, "inspect", "x")["tensors"] == 0
    assert main(["inspect", "x"]) == 0
    assert "objects not read: 1 x posix.system" in capsys.readouterr().out
    assert main(["diff", "x", "x"]) == 0
    assert "in B, objects not read: 1 x posix.system" in capsys.readouterr().out
    assert not (disk / "exploded").exists()


def test_diff_of_equal_checkpoints_in_two_formats(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {
        "w": torch.randn(300, 300),
        "n": torch.tensor([math.nan, -0.0]),
        "s": torch.tensor(1),
    }
    a = saved(disk, "a.pt", **tensors)
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, tensors).result(60)
    assert told(capsys, "diff", a, str(disk / "run"))["equal"] == 3


def test_diff_of_names_that_would_be_one_with_points(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then they are compared as they are."""
    a = disk / "a.pt"
    torch.save({"x": {"y": torch.ones(2)}, "x.y": torch.zeros(2)}, a)
    safetensors.torch.save_file({"x.y": torch.zeros(2)}, disk / "b.safetensors")
    found = told(capsys, "diff", str(a), str(disk / "b.safetensors"), status=1)
    assert (found["only_a"], found["only_b"], found["equal"]) == (["x/y"], [], 1)


def test_diff_tells_what_differs(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = torch.zeros(100, 10)
    other = w.clone()
    other[3, :5] = -2.5
    a = saved(disk, "a.pt", w=w, here=w, t=w, u=w, zero=torch.zeros(2), same=w)
    minus = -torch.zeros(2)
    b = saved(disk, "b.pt", w=other, there=w, t=w.int(), u=w[1:], zero=minus, same=w)
    found = told(capsys, "diff", a, b, status=1)
    assert (found["only_a"], found["only_b"], found["equal"]) == (["here"], ["there"], 1)
    different = {each["name"]: each for each in found["different"]}
    assert different["w"]["changed"] == pytest.approx(5 / 1000) and different["w"]["max_abs"] == 2.5
    assert (different["t"]["what"], different["u"]["what"]) == ("dtype", "shape")
    assert (different["zero"]["changed"], different["zero"]["max_abs"]) == (1.0, 0.0), (
        "-0.0 is not 0.0"
    )
    assert main(["diff", a, b, "--glob", "w"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "w: 0.5% of its elements differ, by up to 2.5",
        "0 of 1 tensors are equal",
    ]


def test_diff_compares_in_parts(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastckpt.cli.diff._PART_BYTES", 1000)
    w = torch.randn(1000, 7)
    other = w.clone()
    other[999, 6] += 1
    a, b = saved(disk, "a.pt", w=w), saved(disk, "b.pt", w=other)
    (found,) = told(capsys, "diff", a, b, status=1)["different"]
    assert found["changed"] == pytest.approx(1 / 7000)


def unsigned(*numbers: int) -> torch.Tensor:
    content = b"".join(number.to_bytes(8, "little") for number in numbers)
    return torch.frombuffer(bytearray(content), dtype=torch.uint64)


@pytest.mark.parametrize(
    ("a", "b", "largest"),
    [
        (torch.tensor([1, 2**53]), torch.tensor([1, 2**53 + 1]), 1),
        (torch.tensor([-(2**63), 0]), torch.tensor([2**63 - 1, 1]), 2**64 - 1),
        (unsigned(2**53, 5), unsigned(2**53 + 1, 5), 1),
        (unsigned(0, 2**63), unsigned(2**64 - 1, 2**63 - 1), 2**64 - 1),
        (unsigned(2**63 - 3), unsigned(2**63 + 4), 7),
        (torch.tensor([3], dtype=torch.uint8), torch.tensor([250], dtype=torch.uint8), 247),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1),
        (torch.tensor([1 + 1j]), torch.tensor([4 + 5j]), 5),
        (torch.tensor([1.0, math.nan]), torch.tensor([math.nan, math.nan]), None),
        (torch.tensor([math.inf, 1.0]), torch.tensor([1.0, 1.0]), None),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 3.0]), 2),
    ],
)
def test_the_largest_difference(
    a: torch.Tensor, b: torch.Tensor, largest: Any, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = saved(disk, "a.pt", w=a), saved(disk, "b.pt", w=b)
    assert main(["diff", *paths, "--json"]) == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)["different"]
    assert [each["max_abs"] for each in found] == [largest]
    assert main(["diff", *paths]) == 1
    by = "infinities and NaN among them" if largest is None else f"by up to {largest}\n"
    assert by in capsys.readouterr().out


def test_an_empty_name_is_shown(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(torch.ones(3), disk / "a.pt")
    torch.save(torch.ones(4), disk / "b.pt")
    assert main(["diff", str(disk / "a.pt"), str(disk / "b.pt")]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "'': shape [3] in A, [4] in B"


def test_names_cannot_steer_the_terminal(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(disk, "a.pt", **{"\x1b[2Jw\n": torch.ones(1), "gewöhnlich": torch.ones(1)})
    assert main(["inspect", path]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and r"\x1b[2Jw\n" in out and "gewöhnlich" in out


def test_file_names_cannot_steer_the_terminal(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = disk / "\x1b]0;evil\x07"
    directory.mkdir()
    torch.save({"w": torch.ones(3)}, directory / "a\x1b.pt")
    assert main(["inspect", str(directory / "a\x1b.pt")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and r"a\x1b.pt" in out
