"""`fastckpt convert` copies tensors bit by bit, and leaves all of them or nothing."""

from __future__ import annotations

import argparse
import errno
import gc
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import fastckpt
from fastckpt.cli import convert, main
from fastckpt.directories.save import wait_for_directories
from fastckpt.integrations.dcp import Writer
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage
from tests.kit.interpreters import Program, let_go
from tests.kit.kinds import by_safetensors, by_torch, dcp_by_torch, flat, same, steps
from tests.kit.noise import flip

SOURCES: dict[str, Callable[[dict[str, torch.Tensor], Path], Path]] = {
    "torch": by_torch,
    "safetensors": by_safetensors,
    "step": steps,
    "dcp": dcp_by_torch,
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def by_hugging_face(path: Path) -> dict[str, torch.Tensor]:
    index = path / "model.safetensors.index.json"
    files = {path / "model.safetensors"}
    if index.exists():
        files = {path / name for name in json.loads(index.read_text())["weight_map"].values()}
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= safetensors.torch.load_file(file)
    return found


def by_dcp(path: Path) -> dict[str, torch.Tensor]:
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(its.size, dtype=its.properties.dtype) for name, its in metadata.items()
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    return state


def by_checkpointer(path: Path) -> dict[str, torch.Tensor]:
    with fastckpt.Checkpointer(path) as checkpointer:
        found: dict[str, torch.Tensor] = checkpointer.load()
    return found


READERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "pt": torch.load,
    "safetensors": safetensors.torch.load_file,
    "hf": by_hugging_face,
    "dcp": by_dcp,
    "step": by_checkpointer,
}


@pytest.mark.parametrize("to", READERS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_tensor_arrives(source: str, to: str, disk: Path) -> None:
    state = flat()
    path, target = SOURCES[source](state, disk), disk / "out"
    options = ["--shard-size", "1MB"] if to == "hf" else []
    assert main(["convert", str(path), str(target), "--to", to, *options]) == 0
    found = READERS[to](target)
    assert found.keys() == state.keys()
    for name, expected in state.items():
        same(found[name], expected)
    assert main(["diff", str(path), str(target)]) == 0


def test_numbers_that_a_dtype_cannot_hold_are_told(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {
        "big": torch.tensor([1.0, 1e30]),
        "fits": torch.ones(3),
        "inf": torch.tensor([torch.inf]),
    }
    fastckpt.save(state, disk / "a.pt").result(60)
    options = ["--to", "hf", "--dtype", "fp16"]
    assert main(["convert", str(disk / "a.pt"), str(disk / "hf"), *options]) == 0
    (told,) = caplog.messages
    assert "numbers of 'big' are too large for the files' dtype" in told


def test_nests_names_and_dtypes(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"layers.0.w": torch.randn(30, 20), "_orig_mod.norm": torch.arange(7)}
    state = {"model": model, "optimizer": {"state": {0: {"m": torch.randn(30, 20)}}}, "step": 3}
    fastckpt.save(state, disk / "a.pt").result(60)
    a = str(disk / "a.pt")
    options = ["--prefix", "model/", "--dtype", "bf16"]
    assert main(["convert", a, str(disk / "hf"), "--to", "hf", *options]) == 0
    assert "2 tensors" in capsys.readouterr().out
    found = by_hugging_face(disk / "hf")
    assert {*found} == {"layers.0.w", "norm"}
    assert torch.equal(found["layers.0.w"], model["layers.0.w"].bfloat16())
    assert torch.equal(found["norm"], model["_orig_mod.norm"])
    options = ["--to", "pt", "--glob", "optimizer/*", "--json"]
    assert main(["convert", a, str(disk / "b.pt"), *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "path": str(disk / "b.pt"),
        "tensors": 1,
        "nbytes": 2400,
        "others": {},
        "left_out": 1,
    }
    assert torch.equal(
        torch.load(disk / "b.pt")["optimizer"]["state"]["0"]["m"],
        state["optimizer"]["state"][0]["m"],  # type: ignore[index]
    )
    with safetensors.safe_open(disk / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("to", READERS)
def test_values_that_are_no_tensors_are_told(
    to: str, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"w": torch.ones(3), "step": 3, "args": {"lr": [0.1, 0.2], "a/b": None}, "none": {}}
    torch.save(state | {"name": argparse.Namespace()}, disk / "file.pt")
    fastckpt.Checkpointer(disk / "root").save(3, state | {"own": fastckpt.PerRank(5)}).result(60)
    dcp.save({"w": state["w"], "step": 3, "lr": 0.1}, checkpoint_id=disk / "dcp", no_dist=True)
    for source, left in (
        ("file.pt", "4 values that are not tensors (step, args/a~1b, args/lr, name)"),
        ("root", "4 values that are not tensors (step, args/a~1b, args/lr, own)"),
        ("dcp", "2 values that are not tensors (step, lr)"),
    ):
        options = [str(disk / source), str(disk / f"of {source}"), "--to", to]
        assert main(["convert", *options]) == 0
        assert f": 1 tensors, 12.0 B; left out: {left}" in capsys.readouterr().out
    objects = {f"value {number}": number for number in range(30)}
    torch.save(state | objects, disk / "file.pt")
    assert main(["convert", str(disk / "file.pt"), str(disk / "many"), "--to", to]) == 0
    left = "33 values that are not tensors (step, value 0, value 1, value 2, value 3 and 28 more)"
    assert f"; left out: {left}" in capsys.readouterr().out


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_tensors_get_other_names(to: str, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"h": {"attn": torch.ones(3)}, "wte": torch.zeros(2)}
    torch.save({"net": state, "optimizer": {"lr": torch.ones(2)}}, disk / "a.pt")
    rules = r'{"^net/": "model/", r"/h/(\w+)": r"/\1/h", "lr": None}'
    options = [str(disk / "a.pt"), str(disk / to), "--to", to, "--rename", rules]
    assert main(["convert", *options, "--prefix", "model."]) == 1
    assert "its names are model/attn/h, model/wte" in capsys.readouterr().err
    assert main(["convert", *options, "--prefix", "model/"]) == 0
    found = READERS[to](disk / to)
    assert found.keys() == {"attn.h", "wte"}
    same(found["attn.h"], torch.ones(3))


def test_values_are_counted_wherever_they_are(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"net": {"w": torch.ones(3)}, "step": 3}, disk / "a.pt")
    for number, choice in enumerate((["--prefix", "net/"], ["--glob", "net/*"])):
        to = ["--to", "pt", *choice]
        assert main(["convert", str(disk / "a.pt"), str(disk / f"{number}.pt"), *to]) == 0
        said = "; left out: 1 values of the whole checkpoint that are not tensors (step)"
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("to", ["hf", "safetensors", "dcp", "step", "pt"])
def test_a_nest_with_an_empty_tensor_is_verified_and_equal(
    to: str, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """zlib.crc32() of no memory is 0, whatever it is to go on from; and names differ between
    formats.
    """
    state = {"a": {"w": torch.rand(300), "none": torch.empty(0, 5)}, "z": torch.rand(3)}
    torch.save(state, disk / "a.pt")
    a, target = str(disk / "a.pt"), str(disk / "out")
    assert main(["convert", a, target, "--to", to]) == 0
    if to in ("hf", "step"):  # the others have no checksums
        assert main(["verify", target]) == 0
    for pair in ([a, target], [target, a]):
        capsys.readouterr()
        assert main(["diff", *pair]) == 0
        assert "tensors: 3 equal, 0 differ, 0 only in A, 0 only in B; " in capsys.readouterr().out


def test_the_empty_key_inside_of_others(disk: Path) -> None:
    torch.save({"a": {"": torch.ones(2)}, "": {"b": torch.zeros(3)}}, disk / "a.pt")
    assert main(["convert", str(disk / "a.pt"), str(disk / "b.pt"), "--to", "pt"]) == 0
    found = torch.load(disk / "b.pt")
    assert torch.equal(found["a"][""], torch.ones(2))
    assert torch.equal(found[""]["b"], torch.zeros(3))


def test_large_tensors_go_in_parts(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastckpt.cli.convert._PART_BYTES", 10_000)
    state = {"w": torch.randn(70, 11, 13), "t": torch.randn(200, 300).t(), "s": torch.ones(3)}
    fastckpt.save(state, disk / "a.pt").result(60)
    for to in ("hf", "pt"):
        options = ["--dtype", "fp16"] if to == "pt" else []
        assert main(["convert", str(disk / "a.pt"), str(disk / to), "--to", to, *options]) == 0
        for name, found in READERS[to](disk / to).items():
            assert torch.equal(found, state[name].half() if to == "pt" else state[name])


def test_a_converted_step_has_its_number(disk: Path) -> None:
    path = steps({"w": torch.ones(3)}, disk)
    assert main(["convert", str(path), str(disk / "new"), "--to", "step"]) == 0
    assert main(["convert", str(path), str(disk / "new"), "--to", "step", "--step", "9"]) == 0
    with fastckpt.Checkpointer(disk / "new") as checkpointer:
        assert checkpointer.steps() == [2, 9]
    assert main(["convert", str(path), str(disk / "new"), "--to", "step"]) == 1


@pytest.mark.parametrize(
    ("state", "options", "words"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, ["--to", "hf"], "'a.b'"),
        ({"a": torch.ones(1)}, ["--to", "hf", "--glob", "x"], "holds no tensor that matches"),
        ({"a": torch.ones(1, dtype=torch.cdouble)}, ["--to", "safetensors"], "no dtype for a: ch"),
        ({"a": torch.ones(1)}, ["--to", "hf", "--shard-size", "much"], "shard-size"),
        (torch.ones(1), ["--to", "safetensors"], "has no name, because it is not in a"),
        (
            {"q": torch.ones(1)},
            ["--to", "hf", "--rename", "{'p': 'q'}"],
            "has 'p', which matches no",
        ),
        (
            {"q": torch.ones(1)},
            ["--to", "hf", "--rename", "{1: 'q'}"],
            "rename has 1, which is not a regular",
        ),
        ({"": torch.ones(1)}, ["--to", "pt"], "give it a name in a dict, or"),
    ],
)
def test_what_cannot_be_converted_is_told(
    state: Any, options: list[str], words: str, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(state, disk / "a.pt")
    assert main(["convert", str(disk / "a.pt"), str(disk / "b"), *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err
    assert os.listdir(disk) == ["a.pt"]


@pytest.mark.parametrize("rules", ["q", "{'q': open('x')}", "['q']"])
def test_rules_that_are_no_dict_are_wrong_arguments(
    rules: str, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(disk / "a.pt"), str(disk / "b"), "--to", "hf", "--rename", rules])
    assert ended.value.code == 2
    assert "must be a dict for load_into(rename=)" in capsys.readouterr().err


def test_a_root_of_something_else_is_refused(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = by_torch({"w": torch.ones(3)}, disk)
    (disk / "out").mkdir()
    assert main(["convert", str(path), str(disk / "out"), "--to", "step"]) == 0
    (disk / "out" / "mine").touch()
    assert main(["convert", str(path), str(disk / "out"), "--to", "step", "--step", "2"]) == 1
    assert "it is not a root of steps" in capsys.readouterr().err


@pytest.mark.parametrize("to", READERS)
@pytest.mark.parametrize(
    ("state", "target", "words"),
    [
        ({"w": torch.ones(3)}, "missing/x", "missing"),
        ({"w": torch.ones(1).expand(1 << 61)}, "x", ""),
    ],
)
def test_what_does_not_fit_is_one_line(
    state: Any, target: str, words: str, to: str, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(state, disk / "a.pt")
    assert main(["convert", str(disk / "a.pt"), str(disk / target), "--to", to]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err
    assert os.listdir(disk) == ["a.pt"]


@pytest.mark.parametrize("to", READERS)
def test_what_fails_leaves_nothing(
    to: str, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = by_torch({"w": torch.ones(3)}, disk)
    with monkeypatch.context() as failing:
        failing.setattr(Storage, "sync", full)
        assert main(["convert", str(path), str(disk / "x"), "--to", to]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert os.listdir(disk) == [path.name]
    gc.collect()  # the frames of the error hold the tensors, which are mapped


def test_an_interrupt_is_no_failure_of_dcp(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.distributed.checkpoint turns every error of a writer into its own."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    path = by_torch({"w": torch.ones(3)}, disk)
    monkeypatch.setattr(Writer, "write_data", interrupted)
    assert main(["convert", str(path), str(disk / "x"), "--to", "dcp"]) == 130
    assert capsys.readouterr().err == ""
    assert os.listdir(disk) == [path.name]
    gc.collect()  # as above


def test_names_that_dcp_refuses(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": {"x": torch.ones(1)}, "a.x": torch.ones(1)}, disk / "a.pt")
    assert main(["convert", str(disk / "a.pt"), str(disk / "b"), "--to", "dcp"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "torch.distributed.checkpoint failed" in err
    assert os.listdir(disk) == ["a.pt"]


@pytest.mark.parametrize("to", READERS)
def test_damage_leaves_nothing(to: str, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (disk / "in").mkdir()
    fastckpt.save({"w": torch.randn(4 << 20)}, disk / "in" / "a.pt").result(60)
    flip(disk / "in" / "a.pt", 10 << 20)
    assert main(["convert", str(disk / "in" / "a.pt"), str(disk / "out"), "--to", to]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert os.listdir(disk) == ["in"]


@pytest.mark.parametrize("to", READERS)
def test_nothing_is_replaced(to: str, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = by_torch({"w": torch.ones(3)}, disk)
    (disk / "out").write_text("mine")
    assert main(["convert", str(path), str(disk / "out"), "--to", to]) == 1
    assert "never replaces" in capsys.readouterr().err
    assert (disk / "out").read_text() == "mine"


@pytest.mark.parametrize("to", READERS)
def test_what_was_made_meanwhile_is_not_replaced(
    to: str, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, out = (str(disk / name) for name in ("1.pt", "2.pt", "out"))
    torch.save({"w": torch.ones(3)}, first)
    torch.save({"w": torch.zeros(3)}, second)
    batches = convert._batches

    def overtaken(copies: Any) -> Any:
        monkeypatch.setattr(convert, "_batches", batches)
        assert main(["convert", second, out, "--to", to]) == 0
        return batches(copies)

    monkeypatch.setattr(convert, "_batches", overtaken)
    assert main(["convert", first, out, "--to", to]) == 1
    said = "out' has step 0" if to == "step" else "out' exists, but convert never replaces"
    assert said in capsys.readouterr().err
    assert not READERS[to](disk / "out")["w"].any()
    assert sorted(os.listdir(disk)) == ["1.pt", "2.pt", "out"]


@pytest.mark.parametrize("to", ["pt", "safetensors", "hf", "dcp"])
def test_what_was_made_at_the_last_moment_is_not_replaced(
    to: str, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target, other = by_torch({"w": torch.ones(3)}, disk), disk / "out", disk / "other"
    assert main(["convert", str(path), str(other), "--to", to]) == 0
    number = other.stat().st_ino
    late(target, lambda: other.rename(target), monkeypatch)
    assert main(["convert", str(path), str(target), "--to", to]) == 1
    assert "out' exists, but convert never replaces" in capsys.readouterr().err
    assert target.stat().st_ino == number and {*READERS[to](target)} == {"w"}
    wait_for_directories(str(disk))
    assert sorted(os.listdir(disk)) == sorted([path.name, "out"])


@pytest.mark.parametrize("to", ["pt", "safetensors"])
def test_where_no_file_has_two_names(
    to: str, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_names: str) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Storage, "link", refuse)
    path, target = by_torch({"w": torch.ones(3)}, disk), disk / "late"
    assert main(["convert", str(path), str(disk / "out"), "--to", to]) == 0
    assert READERS[to](disk / "out")["w"].sum() == 3
    late(target, lambda: target.write_text("mine"), monkeypatch)
    assert main(["convert", str(path), str(target), "--to", to]) == 1
    assert "late' exists" in capsys.readouterr().err and target.read_text() == "mine"


def late(target: Path, make: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has something made when the target is about to get its name."""
    naming_in = atomic.naming_in

    def overtaken(storage: Storage, directories: Any, path: str) -> Any:
        if path == str(target):
            make()
        return naming_in(storage, directories, path)

    monkeypatch.setattr(atomic, "naming_in", overtaken)


KILLED = """
import os, signal, sys
from fastckpt.cli import convert, main
from fastckpt.directories import export
from fastckpt.engine.transfer import ImageTransfer
from fastckpt.storage.file_system import Storage
left = int(sys.argv[4])
def counted(write):
    def counting(*arguments):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*arguments)
    return counting
Storage.write_at = counted(Storage.write_at)
ImageTransfer.write_to = counted(ImageTransfer.write_to)
convert._PART_BYTES = export.PORTION_BYTES = 1 << 20
main(["convert", sys.argv[1], sys.argv[2], "--to", sys.argv[3]])
"""


@pytest.mark.parametrize("write", [1, 3])
@pytest.mark.parametrize("to", READERS)
def test_a_kill_leaves_no_half_result(to: str, write: int, disk: Path) -> None:
    (disk / "in").mkdir()
    path = by_safetensors({"w": torch.randn(2 << 20)}, disk / "in")
    (disk / "out").mkdir()
    program = Program(KILLED, path, disk / "out" / "x", to, write)
    assert program.wait(60) == -signal.SIGKILL
    let_go(disk / "out")
    assert [name for name in os.listdir(disk / "out") if not name.startswith(".")] == []
    assert main(["repair", str(disk / "out"), "--yes"]) == 0
    assert os.listdir(disk / "out") == []
    assert main(["convert", str(path), str(disk / "out" / "x"), "--to", to]) == 0


def test_names_that_are_no_paths_stay(disk: Path) -> None:
    state = {
        "enc/block/kernel": torch.ones(2),
        "x~1y": torch.zeros(2),
        "enc.block.kernel": torch.ones(1),
    }
    safetensors.torch.save_file(state, disk / "a.safetensors")
    for to, name in (("safetensors", "b.safetensors"), ("pt", "b.pt"), ("dcp", "b")):
        assert main(["convert", str(disk / "a.safetensors"), str(disk / name), "--to", to]) == 0
    assert {*safetensors.torch.load_file(disk / "b.safetensors")} == {*state}
    assert {*torch.load(disk / "b.pt")} == {*state}
    with fastckpt.open(disk / "b") as tensors:
        assert {*tensors} == {*state}
    kinds = sorted(path.suffix or path.name for path in (disk / "b").iterdir())
    assert kinds == [".distcp", ".json", ".metadata"]


@pytest.mark.parametrize("to", ["pt", "dcp"])
def test_names_that_only_safetensors_files_cannot_have(to: str, disk: Path) -> None:
    state = {"__metadata__": torch.ones(2), "": torch.zeros(3), "w": torch.ones(1)}
    dcp.save(state, checkpoint_id=disk / "a", no_dist=True)
    assert main(["convert", str(disk / "a"), str(disk / "b"), "--to", to]) == 0
    found = READERS[to](disk / "b")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        same(found[name], tensor)
    for other in ("hf", "safetensors"):
        assert main(["convert", str(disk / "a"), str(disk / "c"), "--to", other]) == 1


def test_what_would_fail_late_fails_at_once(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": torch.ones(2), "b": {"c": torch.ones(2)}}, disk / "a.pt")
    a, b = str(disk / "a.pt"), str(disk / "b")
    assert main(["convert", a, b, "--to", "step", "--step", "-1"]) == 1
    assert "--step is -1, must be 0 or more" in capsys.readouterr().err
    huge = torch.ones(()).expand(1 << 50)
    torch.save({"huge": huge}, disk / "huge.pt")
    assert main(["convert", str(disk / "huge.pt"), b, "--to", "hf"]) == 1
    assert "free, but the tensors need 4.00 PiB" in capsys.readouterr().err
    assert sorted(path.name for path in disk.iterdir()) == ["a.pt", "huge.pt"]


def test_globs_of_names_have_dtypes(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"model": {"router.bias": torch.randn(9), "w": torch.randn(4, 5), "ids": torch.ones(1)}}
    fastckpt.save(state, disk / "a.pt").result(60)
    for to, bias in (("hf", "*.router.bias"), ("pt", "model/router.bias")):
        rules = json.dumps({bias: "fp32", "*ids": "fp16", "*": "bf16"})
        path = str(disk / to)
        assert main(["convert", str(disk / "a.pt"), path, "--to", to, "--dtype", rules]) == 0
        with fastckpt.open(path) as tensors:
            assert [str(tensor.dtype)[6:] for tensor in tensors.values()] == [
                *("float32", "bfloat16", "float16")
            ]
    capsys.readouterr()
    rules = '{"*.routed.bias": "fp32", "*": "bf16"}'
    arguments = ["convert", str(disk / "a.pt"), str(disk / "b"), "--to", "hf", "--dtype"]
    assert main([*arguments, rules]) == 1
    assert "glob '*.routed.bias', which matches no name" in capsys.readouterr().err
    for wrong in ("fp8", "{", '{"*": "fp8"}', "{1: 'bf16'}", "[]", '{"*": []}', "{'*'}"):
        with pytest.raises(SystemExit, match="2"):
            main([*arguments, wrong])
        assert "must be one of fp32, bf16, fp16, or a dict" in capsys.readouterr().err


def model_directory(directory: Path) -> Path:
    """A model as the hub has it: names are links to blobs."""
    (directory / "blobs").mkdir(parents=True)
    (directory / "model").mkdir()
    state = {"w": torch.randn(30, 20), "b": torch.randn(20)}
    safetensors.torch.save_file(state, directory / "blobs" / "0", metadata={"format": "pt"})
    contents = {
        "config.json": '{"model_type": "llama", "torch_dtype": "float32", "vocab_size": 7}',
        "tokenizer.json": '{"version": "1.0"}',
        "tokenizer.model": "binary",
        "chat_template.jinja": "{{ messages }}",
        "merges.txt": "#version: 0.2",
        "modeling.py": "raise RuntimeError",
        "other.index.json": "{}",
        ".hidden.json": "{}",
        "optimizer.bin": "much",
    }
    for number, (name, content) in enumerate(contents.items(), 1):
        (directory / "blobs" / str(number)).write_text(content)
        (directory / "model" / name).symlink_to(directory / "blobs" / str(number))
    (directory / "model" / "model.safetensors").symlink_to(directory / "blobs" / "0")
    return directory / "model"


COPIED = {
    *("chat_template.jinja", "config.json", "merges.txt", "modeling.py"),
    *("tokenizer.json", "tokenizer.model"),
}


def test_a_model_keeps_its_config_and_tokenizer(disk: Path) -> None:
    model = model_directory(disk / "hub")
    options = ["--to", "hf", "--dtype", "bf16"]
    assert main(["convert", str(model), str(disk / "b"), *options]) == 0
    made = {"model.safetensors", "fastckpt.json"}
    assert {*os.listdir(disk / "b")} == COPIED | made
    config = json.loads((disk / "b" / "config.json").read_bytes())
    assert config == {"model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 7}
    assert (disk / "b" / "merges.txt").read_text() == "#version: 0.2"
    assert main(["verify", str(disk / "b")]) == 0
    # Again from what convert wrote: the list of its files is not copied.
    assert main(["convert", str(disk / "b"), str(disk / "c"), "--to", "hf"]) == 0
    assert {*os.listdir(disk / "c")} == COPIED | made
    assert main(["convert", str(model), str(disk / "d.pt"), "--to", "pt"]) == 0


def test_files_of_another_directory_are_brought(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_directory(disk / "hub")
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"w": torch.randn(3)}).result(60)
    run, made = str(disk / "run"), {"model.safetensors", "fastckpt.json"}
    assert main(["convert", run, str(disk / "b"), "--to", "hf", "--files", str(model)]) == 0
    assert {*os.listdir(disk / "b")} == COPIED | made
    assert main(["convert", run, str(disk / "c"), "--to", "hf"]) == 0
    assert {*os.listdir(disk / "c")} == made
    capsys.readouterr()
    for files, to, told in (
        (str(disk / "none"), "hf", "No such file"),
        (str(disk / "hub"), "hf", "holds no config or tokenizer files"),
        (str(model), "pt", "--files is for --to hf"),
    ):
        assert main(["convert", run, str(disk / "d"), "--to", to, "--files", files]) == 1
        assert told in capsys.readouterr().err
        assert not (disk / "d").exists()
