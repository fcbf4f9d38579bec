"""`fastckpt inspect` and `diff` tell what is in a checkpoint, and run nothing of it."""

from __future__ import annotations

import collections
import datetime
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import fastckpt
from fastckpt.cli import main
from fastckpt.storage.file_system import Storage
from tests.kit.noise import flip
from tests.kit.torches import NEEDS_DCP
from tests.kit.torches import dcp as fast_dcp


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
    assert "objects: 1 equal, 0 differ" in capsys.readouterr().out
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
        "tensors: 0 equal, 1 differ, 0 only in A, 0 only in B; objects: none",
    ]
    assert main(["diff", a, b]) == 1
    lines = capsys.readouterr().out.splitlines()
    names = [line.partition(":")[0] for line in lines[2:-1]]
    assert names == ["u", "w", "zero", "t"], "another shape is the largest, equal values the least"
    assert lines[-1].startswith("tensors: 1 equal, 4 differ, 1 only in A, 1 only in B; ")


@pytest.mark.parametrize(
    ("a", "b", "changed", "largest"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]).bfloat16(), 0.0, 0),
        (torch.tensor([1.0, 1.001]), torch.tensor([1.0, 1.0]).half(), 0.5, 0.001),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]).bfloat16(), 0.0, 0),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 1.0]).bfloat16(), 0.5, None),
        (torch.tensor([2.0]).half(), torch.tensor([2.5]).bfloat16(), 1.0, 0.5),
        (torch.tensor([7, -1]), torch.tensor([7, -2], dtype=torch.int8), 0.5, 1),
        (torch.tensor([2**53 + 1]), torch.tensor([1], dtype=torch.int16), 1.0, 2**53),
        (torch.tensor([True]), torch.tensor([3]), 1.0, 2),
        (torch.tensor([1.0]), torch.tensor([1 + 1j]), 1.0, 1.0),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([1.5]), 1.0, 0.5),
    ],
)
def test_values_are_compared_across_dtypes(
    a: torch.Tensor,
    b: torch.Tensor,
    changed: float,
    largest: Any,
    disk: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = saved(disk, "a.pt", w=a), saved(disk, "b.pt", w=b)
    (found,) = told(capsys, "diff", *paths, status=1)["different"]
    assert (found["what"], found["changed"]) == ("dtype", changed)
    assert found["max_abs"] == (None if largest is None else pytest.approx(largest, rel=1e-3))
    kinds = [str(each.dtype).removeprefix("torch.") for each in (a, b)]
    assert found["text"].startswith(f"dtype {kinds[0]} in A, {kinds[1]} in B; ")
    assert found["text"].endswith("equal values") == (not changed)


def test_names_of_the_first_checkpoint_are_renamed(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2), "n": 3}}, disk / "a.pt")
    b = str(disk / "b.pt")
    torch.save({"net": {"w": torch.ones(2)}, "avg": {"w": torch.zeros(2), "n": 3}}, b)
    rules = ["--rename", "^model/=net/", "--rename", "^(?=ema)ema=avg"]
    found = told(capsys, "diff", str(disk / "a.pt"), b, *rules)
    assert (found["equal"], found["objects"]["equal"]) == (2, 1)
    assert main(["diff", str(disk / "a.pt"), b, "--rename", "^mdel/=net/"]) == 1
    assert "rename has '^mdel/', which matches no name" in capsys.readouterr().err
    for wrong in ("net", "=net"):
        with pytest.raises(SystemExit) as ended:
            main(["diff", b, b, "--rename", wrong])
        assert ended.value.code == 2 and "must be OLD=NEW" in capsys.readouterr().err


class Settings:
    def __init__(self, rate: float) -> None:
        self.rate, self.names = rate, {"a", "b", "c"}


def objects(**changed: Any) -> dict[str, Any]:
    return {
        "step": 3,
        "text": "long " * 20,
        "mixed": [1, {"deep": (2.5, None)}],
        "settings": Settings(0.1),
        "counts": collections.Counter("aabbb"),
        "ordered": collections.OrderedDict(x=1, y=2),
        "array": numpy.arange(4),
        "when": datetime.datetime(2026, 1, 2),
        "bytes": b"\xff" * 100,
        "set": {"x", "y", "z"},
        "w": torch.ones(2),
        **changed,
    }


def test_equal_objects_are_equal_however_they_were_pickled(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(objects(), disk / "a.pt")
    other = objects(counts=collections.Counter("bbbaa"), ordered={"y": 2, "x": 1})
    other["settings"].__dict__ = dict(reversed(other["settings"].__dict__.items()))
    torch.save(dict(reversed(other.items())), disk / "b.pt", pickle_protocol=4)
    fastckpt.save(other, disk / "c.pt").result(60)
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, other).result(60)
    for name in ("a.pt", "b.pt", "c.pt", "run"):
        found = told(capsys, "diff", str(disk / "a.pt"), str(disk / name))["objects"]
        nothing: dict[str, Any] = {"different": {}, "only_a": [], "only_b": [], "not_compared": []}
        assert found == {"equal": 12, **nothing}, name


@pytest.mark.parametrize(
    "changed",
    [
        {"step": 4},
        {"step": 3.0},
        {"text": "long " * 21},
        {"settings": Settings(0.2)},
        {"counts": collections.Counter("aabb")},
        {"array": numpy.arange(5)},
        {"array": numpy.arange(4).astype("int32")},
        {"when": datetime.datetime(2026, 1, 3)},
        {"bytes": b"\xff" * 101},
        {"set": {"x", "y"}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_objects_that_differ_are_named(
    changed: dict[str, Any], disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(objects(), disk / "a.pt")
    torch.save(objects(**changed), disk / "b.pt")
    paths = str(disk / "a.pt"), str(disk / "b.pt")
    found = told(capsys, "diff", *paths)["objects"]  # the exit status is that of the tensors
    assert [*found["different"]] == [*changed] and found["equal"] == 11
    assert main(["diff", *paths]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"object {next(iter(changed))}: ") and len(lines) == 2
    assert lines[1].endswith("objects: 11 equal, 1 differ, 0 only in A, 0 only in B")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({Path("a"): 1}, {Path("b"): 1}),
        ({torch.device("cpu"): 1}, {torch.device("cuda:1"): 1}),
        ({(0, Path("a")): 1.0}, {(5, Path("a")): 1.0}),
        ({Path("a"): 1, Path("b"): 2}, {Path("a"): 2, Path("b"): 1}),
    ],
)
def test_keys_that_are_objects_are_compared(
    ours: dict[Any, Any], theirs: dict[Any, Any], disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(1), "of": ours}, disk / "a.pt")
    torch.save({"w": torch.ones(1), "of": theirs}, disk / "b.pt")
    found = told(capsys, "diff", str(disk / "a.pt"), str(disk / "b.pt"))["objects"]
    assert found["different"] or (found["only_a"] and found["only_b"]), found
    same = told(capsys, "diff", str(disk / "a.pt"), str(disk / "a.pt"))["objects"]
    assert not same["different"] and not same["only_a"] and same["equal"] == len(ours)


def test_objects_that_cannot_be_compared_are_named(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state: dict[str, Any] = {"n": 1, "own": fastckpt.PerRank(5), "loop": (loop := Settings(1.0))}
    loop.names.clear()
    vars(loop)["itself"] = loop
    sparse = torch.ones(3).to_sparse()
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {**state, "sparse": sparse}).result(60)
    root = str(disk / "run")
    assert {*told(capsys, "diff", root, root)["objects"]["not_compared"]} == {
        *("own", "loop", "sparse")
    }
    assert main(["diff", root, root]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("objects not compared (") and "own" in lines[0]
    assert lines[1].endswith("objects: 1 equal, 0 differ, 0 only in A, 0 only in B, 3 not compared")


def test_parts_that_occur_often_are_read_once(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nest = collections.deque([1])
    for _ in range(100):
        nest = collections.deque([nest, nest])  # with 2^100 ways to its end
    torch.save({"nest": nest, "w": torch.ones(1)}, disk / "a.pt")
    assert told(capsys, "diff", *[str(disk / "a.pt")] * 2)["objects"]["equal"] == 1


@pytest.mark.skipif(fast_dcp is None, reason=NEEDS_DCP)
def test_objects_of_dcp_are_compared(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, saves in (("a", dcp.save), ("b", fast_dcp.save)):
        saves({"w": torch.ones(2), "settings": {"x": 1, "y": "t" * 50}}, checkpoint_id=disk / name)
    dcp.save({"w": torch.ones(2), "settings": {"x": 2, "y": "t" * 50}}, checkpoint_id=disk / "c")
    assert told(capsys, "diff", str(disk / "a"), str(disk / "b"))["objects"]["equal"] == 2
    found = told(capsys, "diff", str(disk / "a"), str(disk / "c"))["objects"]
    assert (found["equal"], found["different"]) == (1, {"settings.x": ["1", "2"]})


def test_json_files_of_a_directory_are_compared(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ('{"a": 1, "b": [2]}', '{"b": [2], "a": 1}'), ("[1]", "[2]"), ("{", "{")
    for number, name in enumerate(("x", "y")):
        (disk / name).mkdir()
        safetensors.torch.save_file({"w": torch.ones(2)}, disk / name / "model.safetensors")
        for file, pair in zip(("config", "state", "broken"), texts, strict=True):
            (disk / name / f"{file}.json").write_text(pair[number])
    found = told(capsys, "diff", str(disk / "x"), str(disk / "y"))["objects"]
    assert (found["equal"], [*found["different"]]) == (1, ["state.json"])
    assert found["not_compared"] == ["broken.json"]


def test_inspect_names_every_file_with_its_size(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(7, {"w": torch.ones(600, 600)}).result(60)
    step = disk / "run" / "step-00000007"
    sizes = {file.name: file.stat().st_size for file in step.iterdir()}
    assert told(capsys, "inspect", str(disk / "run"))["file_sizes"] == sizes
    assert main(["inspect", str(step)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith(f"{len(sizes)} files in the directory, 1.3")
    assert [line.split()[0] for line in lines[4:]] == sorted(sizes)
    assert lines[-1].split()[0] == "rank-00000.safetensors" and lines[-1].endswith("1.38 MiB")


def test_a_trainers_checkpoint_without_readable_tensors_is_inspected(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = disk / "checkpoint-5"
    (directory / "pytorch_model_fsdp_0").mkdir(parents=True)
    (directory / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(bytes(100))
    (directory / "trainer_state.json").write_text("{}")
    found = told(capsys, "inspect", str(directory))
    sizes = {"pytorch_model_fsdp_0/__0_0.distcp": 100, "trainer_state.json": 2}
    assert (found["tensors"], found["file_sizes"]) == (0, sizes)
    directory.rename(disk / "other")
    assert main(["inspect", str(disk / "other")]) == 1


def test_files_that_are_not_as_listed_are_told(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (disk / "config.json").write_text("{}")
    path = disk / "checkpoint-6"
    fastckpt.export({"w": torch.ones(9)}, path, files=[disk / "config.json"]).result(60)
    assert told(capsys, "inspect", str(path))["fault"] == ""
    (path / "config.json").write_text('{"edited": true}')
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "not as fastckpt.json says: config.json has 16 bytes, must have 2\n" in out
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").unlink()
    assert main(["inspect", str(path)]) == 1
    assert "checkpoint-6' is damaged: model.safetensors is missing" in capsys.readouterr().err


def test_diff_tells_names_as_inspect_does(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With "/" between keys, also where the other checkpoint has "." there."""
    model = {"0.w": torch.zeros(3), "0.b": torch.zeros(3)}
    a, b = saved(disk, "a.pt", model=model, x=torch.zeros(2)), str(disk / "b.safetensors")
    safetensors.torch.save_file({"model.0.w": torch.ones(3), "model.0.b": torch.zeros(3)}, b)
    for pair in ((a, b), (b, a)):
        found = told(capsys, "diff", *pair, "--glob", "model/*", status=1)
        assert [each["name"] for each in found["different"]] == ["model/0.w"]
        assert (found["equal"], found["only_a"], found["only_b"]) == (1, [], [])
    assert main(["diff", a, b]) == 1
    assert capsys.readouterr().out.splitlines()[:2] == [
        "only in A: x",
        "model/0.w: 100% of its elements differ, by up to 1",
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
