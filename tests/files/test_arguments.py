"""Promise: what a caller writes wrongly is told in the call, by the argument's name and with what
was expected; texts that people write for sizes, rates and home directories are understood.
"""

from __future__ import annotations

import errno
import os
import pathlib
import pickle
import re
import stat
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, replace
from decimal import Decimal
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import fastckpt
from fastckpt import Memory
from fastckpt.arguments import checks as arguments
from fastckpt.arguments import environment
from fastckpt.directories.save import save_directory
from fastckpt.engine.staging import default_budget_bytes
from fastckpt.files import plan as file_place
from fastckpt.saving.handle import InnerHandle
from fastckpt.storage import atomic
from tests.kit.options import gathered
from tests.kit.torches import dcp, needs_dcp

MIB = 1 << 20
URLS = ["hdfs://host/a.pt", "s3a://b/a", "hf://me/model", "https://host/a.pt", "file:///tmp/a"]
TAKES_A_PATH: dict[str, Callable[[Any], object]] = {
    "save": lambda path: fastckpt.save({"a": 1}, path),
    "load": fastckpt.load,
    "root": fastckpt.Checkpointer,
    "local": lambda path: fastckpt.Checkpointer("run", local=path),
}


def test_the_step_fence_is_refused_without_a_gil(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tells of changes is read under the GIL (see docs/project/design.md)."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    calls: list[Callable[[], object]] = [
        lambda: fastckpt.save(
            torch.ones(9), disk / "a.pt", options=fastckpt.SaveOptions(fence="step")
        ),
        lambda: fastckpt.Checkpointer(disk / "run", options=fastckpt.SaveOptions(fence="step")),
        lambda: fastckpt.export(
            {"a": torch.ones(9)}, disk / "hf", options=fastckpt.SaveOptions(fence="step")
        ),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r'fence is "step", which needs the GIL, .*"call"'):
            call()
    fastckpt.save(torch.ones(9), disk / "a.pt", options=fastckpt.SaveOptions(fence="call")).result()


@pytest.mark.parametrize("url", [*URLS, pathlib.Path("hdfs://host/a.pt"), "simplecache::s3://b/a"])
@pytest.mark.parametrize("call", TAKES_A_PATH)
def test_urls_are_refused(call: str, url: Any, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(disk)
    taken = "the path of a" if call == "local" else "a path, or a URL such as s3://bucket/run"
    with pytest.raises(ValueError, match=f"must not be a URL: pass {taken}"):
        TAKES_A_PATH[call](url)
    assert [*disk.iterdir()] == []


def test_messages_name_the_absolute_path(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(disk)
    fastckpt.save({"w": torch.ones(3)}, "a.pt").result()
    (disk / "cut.pt").write_bytes((disk / "a.pt").read_bytes()[:-50])
    calls: dict[str, Callable[[], object]] = {
        "gone/b.pt": lambda: fastckpt.save({}, "gone/b.pt"),
        "b.pt": lambda: fastckpt.load("b.pt"),
        "c.pt": lambda: fastckpt.open("c.pt"),
        "d.pt": lambda: fastckpt.load_into({}, "d.pt"),
        "cut.pt": lambda: fastckpt.load("cut.pt"),
        "a.pt": lambda: fastckpt.Checkpointer("a.pt"),
        "run": lambda: fastckpt.Checkpointer("run").load(),
        "tier": lambda: fastckpt.Checkpointer("run", local="tier"),
        "more.json": lambda: fastckpt.export({"w": torch.ones(3)}, "hf", files=["more.json"]),
    }
    for path, call in calls.items():
        with pytest.raises((OSError, ValueError, fastckpt.CheckpointError)) as failed:
            call()
        assert f"'{disk / path}'" in str(failed.value) and f"'{path}'" not in str(failed.value)


def test_a_home_directory_is_expanded(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(disk))
    handle = fastckpt.save({"a": 1}, "~/a.pt")
    handle.result(60)
    assert handle.path == str(disk / "a.pt") and fastckpt.load("~/a.pt") == {"a": 1}
    assert fastckpt.load(Path("~/a.pt")) == {"a": 1}
    with fastckpt.Checkpointer("~/run") as checkpointer:
        assert checkpointer.root == str(disk / "run")


def test_names_that_look_like_others_are_names(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(disk)
    (disk / "lr:").mkdir()
    for name in ("~a.pt", "~root", "lr:/a.pt", "a:b.pt"):
        fastckpt.save({"name": name}, name).result(60)
        assert torch.load(disk / name) == {"name": name}


SAVES, BOTH = "SaveOptions", "save Checkpointer"
# The calls that refuse these arguments, and how.
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (SAVES, {"fence": "later"}, ValueError, "fence is 'later', must be one of ('call', 'step')"),
    (SAVES, {"on_error": "ignore"}, ValueError, "on_error is 'ignore', must be one of"),
    (SAVES, {"backend": 3}, ValueError, "backend is 3, must be one of"),
    (SAVES, {"backend": "aio"}, ValueError, "backend is 'aio', must be one of"),
    (SAVES, {"staging": ["gds"]}, ValueError, "staging is ['gds'], must be one of"),
    (f"{SAVES} load", {"staging": "nvme"}, ValueError, "staging is 'nvme', must be one of"),
    (SAVES, {"timeout_s": 0}, ValueError, "timeout_s is 0, must be above 0"),
    (SAVES, {"timeout_s": nan}, ValueError, "timeout_s is nan, must be above 0"),
    (SAVES, {"timeout_s": "long"}, TypeError, "timeout_s is 'long' of type str, must be a number"),
    (SAVES, {"timeout_s": None}, TypeError, "timeout_s is None of type NoneType, must be a number"),
    (SAVES, {"timeout_s": True}, TypeError, "timeout_s is True of type bool, must be a number of"),
    (SAVES, {"timeout_s": Decimal("sNaN")}, TypeError, "timeout_s is Decimal('sNaN') of type Deci"),
    (SAVES, {"timeout_s": torch.ones(2)}, TypeError, "timeout_s is tensor([1., 1.]) of type Tens"),
    (SAVES, {"timeout_s": numpy.True_}, TypeError, "must be a number of seconds"),
    (SAVES, {"timeout_s": numpy.complex64(1)}, TypeError, "must be a number of seconds"),
    (SAVES, {"staging_bytes": 0}, ValueError, "staging_bytes is 0, must be at least 1"),
    (SAVES, {"staging_bytes": "0.2B"}, ValueError, "staging_bytes is 0, must be at least 1"),
    (SAVES, {"staging_bytes": "much"}, ValueError, "staging_bytes: 'much' must be a size such as"),
    (
        SAVES,
        {"staging_bytes": "1_GiB"},
        ValueError,
        "staging_bytes: '1_GiB' must be a size such as",
    ),
    (SAVES, {"staging_bytes": "1 GB/s"}, ValueError, "staging_bytes: '1 GB/s' must be a size such"),
    (SAVES, {"staging_bytes": -(10**5000)}, ValueError, "an integer of 16610 bits, must be a 64"),
    (SAVES, {"staging_bytes": 1.0}, TypeError, "staging_bytes is 1.0 of type float, must be a num"),
    (SAVES, {"staging_bytes": True}, TypeError, "staging_bytes is True of type bool, must be a nu"),
    (SAVES, {"staging_bytes": torch.tensor(True)}, TypeError, "staging_bytes is tensor(True) of t"),
    (BOTH, {"drain_rate": 0}, ValueError, "drain_rate is 0, must be bytes a second above 0"),
    (BOTH, {"drain_rate": -5e6}, ValueError, "drain_rate is -5000000.0, must be bytes a second"),
    (BOTH, {"drain_rate": nan}, ValueError, "drain_rate is nan, must be bytes a second above 0"),
    (BOTH, {"drain_rate": inf}, ValueError, "drain_rate is inf, must be bytes a second above 0"),
    (BOTH, {"drain_rate": "fast"}, ValueError, "drain_rate: 'fast' must be a rate such as 75GB/s"),
    (BOTH, {"drain_rate": "2GB/min"}, ValueError, "drain_rate: '2GB/min' must be a rate such as"),
    (BOTH, {"drain_rate": 10**400}, ValueError, "drain_rate is an integer of 1329 bits, too lar"),
    (BOTH, {"drain_rate": True}, TypeError, "drain_rate is True of type bool, must be bytes a se"),
    (BOTH, {"drain_rate": [5e6]}, TypeError, "drain_rate is [5000000.0] of type list, must be by"),
    (BOTH, {"drain_rate": object}, TypeError, "drain_rate is <class 'object'> of type type, must"),
    (SAVES, {"durable": "yes"}, TypeError, "durable is 'yes' of type str, must be True or False"),
    (SAVES, {"durable": None}, TypeError, "durable is None of type NoneType, must be True or Fals"),
    ("save", {"before_commit": 5}, TypeError, "before_commit is 5 of type int, must be"),
    ("save", {"no_such_option": 1}, TypeError, "no_such_option"),
    ("save", {"stripe": "wide"}, ValueError, "auto"),
    ("save", {"stripe": 8}, ValueError, "count, size"),
    ("save", {"stripe": (8,)}, ValueError, "count, size"),
    ("save", {"stripe": (0, MIB)}, ValueError, "at least 1"),
    ("save", {"stripe": (-1, MIB)}, ValueError, "at least 1"),
    ("save", {"stripe": (2001, MIB)}, ValueError, "at most 2000"),
    ("save", {"stripe": (4, 0)}, ValueError, "size is 0, must be at least 1"),
    ("save", {"stripe": (4, -65536)}, ValueError, "size is -65536, must be at least 1"),
    ("save", {"stripe": (4, 100_000)}, ValueError, "multiple of 65536"),
    ("save", {"stripe": (4, "1M")}, ValueError, "'1M' must be a size such as"),
    ("save", {"stripe": (4, 1 << 32)}, ValueError, "at most"),
    ("save", {"stripe": (1.0, MIB)}, TypeError, "count is 1.0 of type float, must be an integer"),
    ("save", {"stripe": (True, MIB)}, TypeError, "count is True of type bool, must be an integer"),
    ("save", {"stripe": (4, 65536.0)}, TypeError, "size is 65536.0 of type float, must be a numbe"),
    ("Checkpointer", {"root": None}, TypeError, "root is None of type NoneType, must be a path"),
    ("Checkpointer", {"before_commit": "no"}, TypeError, "before_commit is 'no' of type str"),
    ("Checkpointer", {"check_finite": 1}, TypeError, "check_finite is 1 of type int"),
    (
        "Checkpointer",
        {"check_finite": True, "staging": "gds"},
        ValueError,
        'check_finite cannot be combined with staging="gds"',
    ),
    ("Checkpointer", {"codec": "gzip"}, ValueError, "codec is 'gzip', must be one of"),
    ("Checkpointer", {"group": 7}, ValueError, "not initialised"),
    (
        "Checkpointer",
        {"keep_last": 0},
        ValueError,
        "keep_last is 0, must be at least 1, or None to",
    ),
    ("Checkpointer", {"keep_last": 1.5}, TypeError, "float"),
    ("Checkpointer", {"keep_last": 2, "keep_every": 0}, ValueError, "keep_every is 0"),
    ("Checkpointer", {"keep_every": 10}, ValueError, "keep_every has no effect without"),
    ("Checkpointer", {"local": Memory}, TypeError, "must be one Memory(...), with keep="),
    (
        "Checkpointer",
        {"local": (Memory(), 3)},
        TypeError,
        "must be one Memory(...), with keep= as",
    ),
    ("Checkpointer", {"max_writers": 0}, ValueError, "max_writers is 0, must be at least 1"),
    ("Checkpointer", {"max_writers": 1.5}, TypeError, "max_writers"),
    ("step", {"step": "7"}, TypeError, "step is '7' of type str, must be an integer"),
    ("step", {"deadline_s": "5"}, TypeError, "deadline_s is '5' of type str"),
    ("step", {"deadline_s": True}, TypeError, "deadline_s is True of type bool"),
    ("step", {"deadline_s": nan}, ValueError, "deadline_s is nan"),
    ("step", {"metrics": {"a": True}}, TypeError, "metric"),
    ("step", {"metrics": {"a": [1.0]}}, TypeError, "metric"),
    ("step", {"metrics": {1: 1.0}}, TypeError, "metric"),
    ("step", {"metrics": [("a", 1.0)]}, TypeError, "metric"),
    ("step", {"metrics": {"a": 1j}}, TypeError, "metric"),
    ("step", {"metrics": {"a" * 257: 1.0}}, ValueError, "metric"),
    ("step", {"metrics": {"a": 10**400}}, ValueError, "metric"),
    (
        "restore load_step",
        {"step": "90"},
        TypeError,
        "step is '90' of type str, must be an integer",
    ),
    (
        "restore load_step",
        {"weights_only": None},
        TypeError,
        "weights_only is None of type NoneTyp",
    ),
    ("restore", {"missing": "ignore"}, ValueError, "missing"),
    ("restore", {"unexpected": True}, ValueError, "unexpected"),
    ("restore", {"dtype": "keep"}, ValueError, "dtype"),
    ("restore", {"rename": {"(": "a"}}, ValueError, "rename"),
    ("restore", {"rename": {"a": r"\9"}}, ValueError, "rename"),
    ("restore", {"rename": {"a": r"\g<b>"}}, ValueError, "rename"),
    ("restore", {"rename": {"a": 5}}, TypeError, "rename"),
    ("restore", {"rename": {("a", "b"): "c"}}, ValueError, "rename"),
    ("restore", {"rename": 5}, TypeError, "rename"),
    ("restore", {"only": 5}, TypeError, "only"),
    ("Memory", {"groups": 0}, TypeError, "groups is 0 of type int, must be a string"),
    ("Memory", {"groups": b"10.0.0.1"}, TypeError, "groups is b'10.0.0.1' of type bytes, must be"),
    ("Memory", {"groups": ["10.0.0.1"]}, TypeError, "groups is ['10.0.0.1'] of type list, must be"),
    ("Memory", {"address": 0}, TypeError, "address is 0 of type int, must be a string"),
    ("Memory", {"address": b"10.0.0.1"}, TypeError, "address is b'10.0.0.1' of type bytes, must"),
    ("Memory", {"address": ["10.0.0.1"]}, TypeError, "address is ['10.0.0.1'] of type list, must"),
    (
        "Memory",
        {"directory": "/dev/shm/\ud800"},
        ValueError,
        r"is '/dev/shm/\ud800', must be a path",
    ),
    ("prepare", {"nbytes": 0}, ValueError, "nbytes"),
    ("prepare", {"nbytes": -1}, ValueError, "nbytes"),
    ("prepare", {"nbytes": "much"}, ValueError, "nbytes"),
    ("prepare", {"nbytes": 1.5}, TypeError, "nbytes"),
    ("prepare", {"nbytes": None}, TypeError, "nbytes"),
    ("prepare", {"nbytes": True}, TypeError, "nbytes"),
]


@pytest.mark.parametrize(
    ("call", "options", "error", "text"),
    [(call, *row) for calls, *row in REFUSED for call in calls.split()],
)
def test_wrong_arguments_are_refused_by_name(
    call: str, options: dict[str, Any], error: type[Exception], text: str, disk: Path
) -> None:
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        calls: dict[str, Callable[..., object]] = {
            "SaveOptions": fastckpt.SaveOptions,
            "save": lambda **it: fastckpt.save({"a": 1}, disk / "a.pt", **it),
            "export": lambda **it: fastckpt.export({"a": torch.ones(2)}, disk / "hf", **it),
            "load": lambda **it: fastckpt.load(disk / "a.pt", **it),
            "prepare": fastckpt.prepare,
            "Memory": Memory,
            "Checkpointer": lambda **it: fastckpt.Checkpointer(
                **{"root": disk / "run", **gathered(**it)}
            ),
            "step": lambda **it: checkpointer.save(**{"step": 1, "state": {"a": 1}, **it}),
            "restore": lambda **it: checkpointer.restore({}, **it),
            "load_step": checkpointer.load,
        }
        with pytest.raises(error) as refused:
            calls[call](**options)
    assert text in str(refused.value)
    assert [*disk.iterdir()] == []


@pytest.mark.parametrize("call", TAKES_A_PATH)
def test_an_empty_path_is_refused(call: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(disk)
    theirs = {"save": RuntimeError, "load": FileNotFoundError}  # what torch raises
    with pytest.raises(theirs.get(call, ValueError), match="is '', must be a path"):
        TAKES_A_PATH[call]("")
    assert [*disk.iterdir()] == []


def test_a_value_in_a_message_is_cut_short(disk: Path) -> None:
    state = {f"layer {number}": torch.ones(1000) for number in range(1000)}
    for value in (state, OrderedDict(state), [*state.values()], "a" * 10**6, 10**3000):
        assert len(arguments.shown(value)) <= 80
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        with pytest.raises(TypeError, match=r"step is .* of type dict, must be an int") as refused:
            checkpointer.save(state, 100)  # type: ignore[arg-type]
        assert len(str(refused.value)) < 150


def test_a_directory_given_as_a_file_is_told_how_to_load(disk: Path) -> None:
    root, step, export = disk / "run", disk / "run" / "step-00000002", disk / "hugging face"
    fastckpt.export({"a": torch.ones(3)}, export).result(60)
    with fastckpt.Checkpointer(root) as checkpointer:
        checkpointer.save(2, {"a": 1}).result(60)
    for path, hint in {
        export: f"load it with fastckpt.load_into(state, {str(export)!r}), or read single tensors",
        root: f"it is a root: load it with fastckpt.Checkpointer({str(root)!r}).load() or",
        step: f"it is a step: load it with fastckpt.Checkpointer({str(step)!r}).load() or",
    }.items():
        with pytest.raises(IsADirectoryError) as refused:
            fastckpt.load(path)
        assert hint in str(refused.value) and refused.value.errno == errno.EISDIR
    (disk / "dcp").mkdir()
    with pytest.raises(IsADirectoryError, match=r"Is a directory: '.*dcp'"):
        fastckpt.load(disk / "dcp")
    (disk / "dcp" / ".metadata").touch()
    with pytest.raises(IsADirectoryError, match=r"of torch\.distributed\.checkpoint: load it with"):
        fastckpt.load(disk / "dcp")


def test_a_root_is_a_directory_and_no_step(disk: Path) -> None:
    (disk / "a file").touch()
    with pytest.raises(ValueError, match=r"root is '.*a file', must be a directory: this path"):
        fastckpt.Checkpointer(disk / "a file")
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        step = checkpointer.save(2, {"a": 1}).result(60) and disk / "run" / "step-00000002"
    inside = sorted(step.iterdir())
    with (
        fastckpt.Checkpointer(step) as checkpointer,
        pytest.raises(ValueError, match=r"root is .*it is itself a step: pass '.*run'"),
    ):
        checkpointer.save(3, {"a": 1})
    assert sorted(step.iterdir()) == inside
    (disk / "app").mkdir()
    (disk / "app" / "manifest.json").write_text('{"format": "of others"}')
    with fastckpt.Checkpointer(disk / "app") as checkpointer:
        checkpointer.save(4, {"a": 1}).result(60)
        assert checkpointer.steps() == [4]


def test_messages_name_the_checkpoint(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = str(disk / "step-00000001")
    with fastckpt.Checkpointer(disk) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3), "b": 1}).result(60)
        with pytest.raises(fastckpt.IncompatibleCheckpoint, match=f"'{step}' does not fit: 'w'"):
            checkpointer.restore({"w": torch.ones(4)})
        assert checkpointer.restore({"w": torch.ones(3)}) == 1
    assert f"'{step}' holds values that are not in the state and were not" in caplog.text


def test_a_wait_that_ends_names_the_save() -> None:
    handle = InnerHandle("/a.pt", 0.0)
    for wait in (handle.result, handle.exception):
        with pytest.raises(TimeoutError, match=r"^save to '/a\.pt' did not end within 1e-05 s$"):
            wait(1e-5)


def test_what_only_load_gives_back(disk: Path) -> None:
    with fastckpt.Checkpointer(disk) as checkpointer:
        for step, state in enumerate([(torch.ones(3), 7), ({}, (7,)), 7]):
            checkpointer.save(step, state).result(60)
            assert str(checkpointer.load(step)) == str(state)
            with pytest.raises(
                TypeError, match=r"^('1(/0)?'|the state) is int, must be a .*load\(\) returns"
            ):
                checkpointer.restore(state, step)  # type: ignore[arg-type]


def test_sizes_and_rates_may_be_texts(disk: Path) -> None:
    stats = fastckpt.save(
        {"w": torch.ones(1000)},
        disk / "a.pt",
        options=fastckpt.SaveOptions(staging_bytes="1GiB"),
        drain_rate="2 GB/s",
    ).result(60)
    assert "drain_rate 2000 MB/s" in stats.pacing
    assert arguments.check_size("size", "1.5MiB") == 3 << 19
    with fastckpt.Checkpointer(
        disk / "run", options=fastckpt.SaveOptions(staging_bytes="64MiB"), drain_rate="1GB/s"
    ) as steps:
        steps.save(1, {"w": torch.ones(10)}).result(60)


def test_every_error_is_exported() -> None:
    named = vars(fastckpt.errors).values()
    errors = [e for e in named if isinstance(e, type) and issubclass(e, fastckpt.CheckpointError)]
    assert fastckpt.DeviceError in errors
    inner = {"Vanished"}  # whoever lists a directory catches it, and lists it again
    assert {error.__name__ for error in errors} - inner <= {*fastckpt.__all__}


def test_errors_are_of_public_classes() -> None:
    """What a traceback shows can be looked up, but for what commands handle themselves."""
    errors = {name for name in fastckpt.__all__ if isinstance(getattr(fastckpt, name), type)}
    package = Path(fastckpt.__file__).parent
    private = [
        name
        for path in package.rglob("*.py")
        for name, bases in re.findall(r"^class (_\w+)\((.*)\):", path.read_text(), re.MULTILINE)
        if path.parent != package / "cli" and errors & {*bases.split(", ")}
    ]
    assert "CheckpointError" in errors and private == []


def test_errors_that_torch_raises_too_have_a_public_name(disk: Path) -> None:
    (disk / "empty.pt").touch()
    for path, name in (("", "NoPath"), (disk / "empty.pt", "TruncatedFile")):
        with pytest.raises(getattr(fastckpt, name)) as caught:
            fastckpt.load(path)
        assert f"{caught.type.__module__}.{caught.type.__qualname__}" == f"fastckpt.errors.{name}"
        assert type(pickle.loads(pickle.dumps(caught.value))) is caught.type


@contextmanager
def another_user(place: Path) -> Iterator[None]:
    """Somebody who may search the directories above a place."""
    modes = [(above, stat.S_IMODE(above.stat().st_mode)) for above in place.parents]
    for above, mode in modes[:-1]:
        above.chmod(mode | 0o011)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for above, mode in modes[:-1]:
            above.chmod(mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_what_refuses_access_is_named(disk: Path) -> None:
    root, shut = disk / "run", disk / "shut"
    with fastckpt.Checkpointer(root, options=fastckpt.SaveOptions(durable=False)) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1 << 20)}).result(60)
        (shut / "inner").mkdir(parents=True)
        (shut / "inner" / "a.pt").touch()
        shard = root / "step-00000001" / "rank-00000.safetensors"
        shard.chmod(0)
        shut.chmod(0o700)
        root.chmod(0o755)
        (root / "step-00000001").chmod(0o755)
        disk.chmod(0o755)
        with another_user(disk):
            with pytest.raises(fastckpt.StorageError, match="permissions of this file") as caught:
                checkpointer.restore({"w": torch.ones(1 << 20)})
            assert caught.value.path == str(shard)
            with pytest.raises(fastckpt.StorageError, match=f"of the directory '{shut}'"):
                fastckpt.open(shut / "inner" / "a.pt")
            error = fastckpt.save({"a": 1}, root / "a.pt").exception(60)
    assert isinstance(error, fastckpt.StorageError) and error.errno == errno.EACCES
    assert f"of the directory '{root}'" in str(error)


@pytest.mark.parametrize(("rank", "warnings"), [("0", 0), ("1", 1), ("", 0)])
def test_ranks_that_save_to_one_path_alone_are_warned_once(
    rank: str,
    warnings: int,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = disk / "a.pt"
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(file_place, "_has_warned", False)
    with monkeypatch.context() as patched:  # what the other rank, a living process, has made
        patched.setattr(os, "getpid", os.getppid)
        other = Path(atomic.temporary_path(str(path)))
    other.touch()
    for _ in range(2):
        fastckpt.save(1, path).result(60)
    fastckpt.save(1, disk / "b.pt").result(60)
    other.unlink()
    assert caplog.text.count("saves alone to") == warnings
    assert warnings == 0 or f"process {os.getppid()} at the same time" in caplog.text


def test_the_budget_of_the_environment_may_be_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.STAGING_VARIABLE, "1GiB")
    assert default_budget_bytes() == 1 << 30
    monkeypatch.setenv(environment.STAGING_VARIABLE, "1MiB")
    with pytest.raises(
        ValueError, match="='1MiB' must be a size of at least 8388608 bytes: a number"
    ):
        default_budget_bytes()


@pytest.mark.parametrize(
    "module",
    [
        pytest.param("Writer", marks=needs_dcp),
        pytest.param("Reader", marks=needs_dcp),
        "save_directory",
    ],
)
def test_integrations_refuse_urls_and_empty_paths_too(module: str) -> None:
    calls: dict[str, Callable[[str], object]] = {
        "Writer": lambda path: dcp.Writer(path),
        "Reader": lambda path: dcp.Reader(path),
        "save_directory": lambda path: save_directory(path, lambda _draft: None),
    }
    for url in URLS:
        with pytest.raises(ValueError, match="must not be a URL"):
            calls[module](url)
    with pytest.raises(ValueError, match="path is '', must be a path"):
        calls[module]("")


@needs_dcp
@pytest.mark.parametrize("wrong", [None, {"durable": False}, fastckpt.SaveOptions], ids=str)
def test_options_are_save_options(disk: Path, wrong: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: fastckpt.save({"a": 1}, disk / "a.pt", options=wrong),
        lambda: fastckpt.Checkpointer(disk / "run", options=wrong),
        lambda: fastckpt.export({"a": torch.ones(2)}, disk / "hf", options=wrong),
        lambda: save_directory(str(disk / "a"), lambda _draft: None, options=wrong),
        lambda: dcp.Writer(disk / "a", options=wrong),
    ]
    if wrong is not None:  # which is the Writer's there
        calls += [
            lambda: dcp.save({}, checkpoint_id=disk / "a", options=wrong),
            lambda: dcp.save({}, storage_writer=dcp.Writer(disk / "a"), options=wrong),
        ]
    for call in calls:
        with pytest.raises(TypeError, match=r"^options is .*, must be a fastckpt\.SaveOptions$"):
            call()
    assert [*disk.iterdir()] == []


def test_options_are_the_same_for_ever_and_compare_by_value() -> None:
    options = fastckpt.SaveOptions(fence="step")
    with pytest.raises(FrozenInstanceError):
        options.fence = "call"  # type: ignore[misc]
    assert replace(options, fence="call") == fastckpt.SaveOptions()
    with pytest.raises(ValueError, match="timeout_s is -1"):
        replace(options, timeout_s=-1)
    with pytest.raises(TypeError):
        fastckpt.SaveOptions("step")  # type: ignore[misc]


def test_what_cannot_be_done_for_a_directory_is_refused_with_a_reason(disk: Path) -> None:
    options = fastckpt.SaveOptions(staging="gds")
    with pytest.raises(
        ValueError, match=r"staging is 'gds', must be 'host' here: .*in host memory"
    ):
        fastckpt.export({"a": torch.ones(2)}, disk / "hf", options=options)
    assert [*disk.iterdir()] == []
