"""`fastckpt bench` measures what it says, compares the bytes, ends with one line where it cannot
measure, and leaves no files. No rate or time is asserted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastckpt.cli import main
from fastckpt.cli.bench import COMMANDS, benchmark, fio, machine, saves, train
from fastckpt.cli.bench.benchmark import in_turn, shown_rounds
from fastckpt.cli.bench.saves import differing, gpt_state, nbytes_of
from fastckpt.engine.timed_engine import Cell, TimedEngine
from fastckpt.errors import CheckpointError

MIB = 1 << 20
AS_A_MODULE = 'import runpy; runpy.run_module("fastckpt", run_name="__main__", alter_sys=True)'
Bench = Callable[..., Any]


@pytest.fixture
def bench(disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Measures a little in an empty directory, which must be empty after it; returns the JSON."""
    # What stays in the page cache must not cost other tests theirs.
    monkeypatch.setattr(machine, "_DROP_CACHES", disk / "nowhere" / "drop_caches")
    monkeypatch.setattr(saves, "_LAYERS", 2)  # hundreds of tiny tensors take long to load

    def run(what: str, *arguments: object, status: int = 0) -> Any:
        sizes = ("--size", "2MiB", "--rounds", "2")
        assert main(["bench", what, str(disk), "--json", *sizes, *map(str, arguments)]) == status
        assert list(disk.iterdir()) == []
        return json.loads(capsys.readouterr().out)

    return run


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line about a measurement that failed."""
    assert main(["bench", *map(str, arguments)]) == 1
    said = capsys.readouterr()
    assert not said.out
    (line,) = said.err.splitlines()
    return line


def test_every_cell_is_measured_and_the_best_is_named(bench: Bench) -> None:
    found = bench("io", "--blocks", "4MiB", "--depths", "4", "--size", "8MiB")
    assert found["what"] == "io" and found["nbytes"] == 8 * MIB and found["rounds"] == 2
    assert {"cpu", "cpus", "kernel", "file_system", "torch", "fastckpt"} <= {*found["environment"]}
    backends = {"threads"}
    backends |= {"fio"} if not any("fio" in note for note in found["notes"]) else set()
    backends |= {"io_uring"} if not any("io_uring" in note for note in found["notes"]) else set()
    for operation in ("write", "read"):
        its = found[operation]
        rows = {(c["backend"], c["block_bytes"], c["depth"]) for c in its["cells"]}
        asked = {(name, 4 * MIB, 4) for name in backends}
        defaults = [found[each]["default"] for each in ("write", "read")]
        own = {(c["backend"], c["block_bytes"], c["depth"]) for c in defaults}
        assert rows == asked | own
        for cell in its["cells"]:
            assert len(cell["rates"]) == 2 and min(cell["rates"]) > 0
            assert cell["rate"] == pytest.approx(sum(cell["rates"]) / 2)  # the median of two
        ours = [cell for cell in its["cells"] if cell["backend"] != "fio"]
        assert its["best"] == max(ours, key=lambda cell: cell["rate"])
        assert its["default"] in ours and its["default"]["block_bytes"] == 8 * MIB
        share = its["default"]["rate"] / its["best"]["rate"]
        assert its["default_share_of_best"] == pytest.approx(share)
        if "fio" in backends:
            share = its["best"]["rate"] / its["best_of_fio"]["rate"]
            assert its["share_of_fio"] == pytest.approx(share)


def test_without_fio_the_engine_is_measured_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio.shutil, "which", lambda name: None)
    found = bench("io", "--blocks", "1MiB", "--depths", "2")
    assert found["fio"] is None and "fio is not on PATH" in " ".join(found["notes"])
    assert found["write"]["share_of_fio"] is None
    assert "fio" not in {cell["backend"] for cell in found["read"]["cells"]}
    # What fastckpt does by itself is measured even where it is none of the cells asked for.
    assert found["write"]["default"]["block_bytes"] == 8 * MIB


def test_the_rate_of_a_disk_quicker_than_fios_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"error": 0, "read": {"io_bytes": 5_000, "runtime": 0}}
    said = "fio: a note\n" + json.dumps({"jobs": [found]})
    done = SimpleNamespace(stdout=said, returncode=0)
    monkeypatch.setattr(fio.subprocess, "run", lambda *_, **__: done)
    assert fio.rate("read", tmp_path / "file", 5_000, Cell("fio", MIB, 1, True)) == 5e6


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_takes_a_path_with_a_colon(disk: Path) -> None:
    (disk / "a:b").mkdir()
    file = disk / "a:b" / "file"
    try:
        fio.rate("write", file, MIB, Cell("fio", MIB, 1, False))
    except OSError as error:
        pytest.skip(f"fio does not run here: {error}")
    assert file.stat().st_size == MIB


def test_a_trial_tells_damage(disk: Path) -> None:
    source, target = torch.arange(MIB // 8), torch.zeros(MIB // 8, dtype=torch.int64)
    path = disk / "file"
    cell = Cell("threads", MIB // 4, 2, False)
    with TimedEngine(cell, str(path), MIB) as trial, open(path, "w+b") as file:
        crcs = trial.write(file.fileno(), source.data_ptr())
        assert path.read_bytes() == source.numpy().tobytes() and len(crcs) == 4
        trial.read(file.fileno(), crcs, target.data_ptr())
        assert torch.equal(source, target)
        os.pwrite(file.fileno(), b"\xff", MIB // 2 + 7)
        with pytest.raises(CheckpointError, match="block 2 differs from the block"):
            trial.read(file.fileno(), crcs, target.data_ptr())


def test_a_trial_without_memory_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Engine:
        def __init__(self, *_: object) -> None:
            pass

        def prefault(self, *_: object) -> None:
            raise MemoryError

        def close(self) -> None:
            closed.append("engine")

    backend = SimpleNamespace(close=lambda: closed.append("backend"))
    fake = SimpleNamespace(threads_backend=lambda _: backend, Engine=Engine)
    monkeypatch.setattr("fastckpt.engine.timed_engine._engine", fake)
    with pytest.raises(CheckpointError, match="no memory or threads for Cell"):
        TimedEngine(Cell("threads", MIB, 1, False), "file", MIB)
    assert closed == ["engine", "backend"]


def test_an_interrupted_trial_cancels_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Job:
        """A write that is interrupted at the second look, and ends when it is cancelled."""

        def write_to(self, *_: object) -> None:
            said.append("write_to")

        def wait_written(self, _seconds: float) -> bool:
            said.append("wait")
            if said.count("wait") == 2:
                raise KeyboardInterrupt
            return said.count("wait") > 3

        def cancel(self) -> None:
            said.append("cancel")

    with TimedEngine(Cell("threads", MIB, 1, False), "file", MIB) as trial:
        engine = SimpleNamespace(arena_blocks=1, stage=lambda *_: Job(), close=trial._engine.close)
        monkeypatch.setattr(trial, "_engine", engine)
        with pytest.raises(KeyboardInterrupt):
            trial.write(0, 0)
    assert said == ["write_to", "wait", "wait", "cancel", "wait", "wait"]


def test_saves_have_two_clocks_and_a_base(bench: Bench) -> None:
    found = bench("save")
    assert found["wrong"] == [] and 1.5 * MIB < found["nbytes"] < 2.5 * MIB
    assert {*found["peers"]} == {
        "fastckpt, call fence",
        "fastckpt, step fence",
        "torch.save + fsync",
        "safetensors + fsync",
    }
    for name, its in found["peers"].items():
        assert len(its["rounds"]) == 2 and {*its["median"]} == {"blocked_s", "durable_s"}
        for row in its["rounds"]:
            is_ours = name.startswith("fastckpt")
            assert 0 < row["blocked_s"] <= row["durable_s"]
            assert is_ours or row["blocked_s"] == row["durable_s"]
    base = found["peers"]["torch.save + fsync"]
    assert base["times_as_fast"] == {"blocked_s": 1.0, "durable_s": 1.0}
    ours = found["peers"]["fastckpt, call fence"]
    ratio = base["median"]["durable_s"] / ours["median"]["durable_s"]
    assert ours["times_as_fast"]["durable_s"] == pytest.approx(ratio)


@pytest.mark.parametrize(("rounds", "said"), [(1, "1 round"), (3, "medians of 3 rounds")])
def test_one_round_has_no_medians(rounds: int, said: str) -> None:
    assert shown_rounds({"rounds": rounds}) == said


def test_loads_are_cold_and_warm_if_asked_for(bench: Bench) -> None:
    found = bench("load", "--warm")
    assert found["wrong"] == [] and all("posix_fadvise" in way for way in found["cold_by"])
    for its in found["peers"].values():
        assert all(
            {*row} == {"cold_s", "warm_s"} and min(row.values()) > 0 for row in its["rounds"]
        )


def test_other_bytes_are_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(path: Path, device: str) -> Any:
        state = saves.load_by_torch(path, device)
        state["model"]["wte.weight"].view(torch.uint8)[-1, -1] ^= 1
        return state

    peer = saves._LOADS["fastckpt.load"]._replace(load=load)
    monkeypatch.setitem(saves._LOADS, "fastckpt.load", peer)
    found = bench("load", status=1)
    assert found["wrong"] == ["fastckpt.load: model.wte.weight"]


def test_states_are_of_the_size_asked_for_and_compared() -> None:
    for nbytes in (MIB, 10 * MIB):
        assert 0.7 < nbytes_of(gpt_state(nbytes)) / nbytes < 1.3
    state, other = gpt_state(MIB), gpt_state(MIB)
    assert differing(other, state) == []
    other["model"]["ln_f.bias"] = other["model"]["ln_f.bias"].double()
    assert differing(other, state) == ["model.ln_f.bias"]
    del other["model"]["ln_f.bias"]
    assert differing(other, state) == ["model.ln_f.bias"]


def test_training_counts_what_a_save_costs(bench: Bench) -> None:
    found = bench("train", "--every", 2, "--saves", 2)
    assert found["wrong"] == [] and (found["every"], found["saves"]) == (2, 2)
    ours = {"fastckpt, call fence", "fastckpt, step fence"}
    assert {*found["lost_s"]} == {"torch.save + fsync", *ours}
    assert {*found["window_s_by_round"]} == {"no saves", "torch.save + fsync", *ours}
    assert all(len(its) == 2 for its in found["window_s_by_round"].values())
    assert found["step_s"] > 0 and 0 < found["nbytes"] < 3 * MIB


def test_a_place_that_cannot_be_measured_is_told(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = disk / "gone"
    line = told(capsys, "save", gone)
    assert line == (
        f"fastckpt bench: cannot write to {str(gone)!r}: No such file or directory [ENOENT]"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=MIB))
    for what in COMMANDS:
        line = told(capsys, what, disk)
        assert f"{disk} has 1.00 MiB free, but the measurement needs " in line
    assert list(disk.iterdir()) == []


def test_a_disk_that_is_full_is_told(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(state: Any, path: Path) -> Any:
        raise RuntimeError("[enforce fail at a.cc] file write failed\nframe #0: ...")

    monkeypatch.setitem(saves._SAVES, saves.TORCH, saves._STOCK._replace(save=full))
    line = told(capsys, "save", disk, "--size", "1MiB")
    says = "torch.save + fsync failed: [enforce fail at a.cc] file write failed"
    assert line == f"fastckpt bench: {says}"
    assert list(disk.iterdir()) == []


def test_too_little_memory_is_told(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nframe #0: ...")

    monkeypatch.setattr(saves, "gpt_state", refused)
    line = told(capsys, "load", disk, "--size", "1MiB")
    says = "the measurement failed: DefaultCPUAllocator: can't allocate memory"
    assert line == f"fastckpt bench: {says}"
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: WHAT"),
        (("speed",), "invalid choice: 'speed'"),
        (("save", "--size", "1kB"), "'1kB' must be at least 1MiB"),
        (("save", "--size", "much"), "'much' must be a size"),
        (("load", "--rounds", "0"), "0 must be at least 1"),
        (("io", "--device", "cpu"), "unrecognized arguments"),
        (("save", "s3://bucket/run"), "a URL"),
    ],
)
def test_wrong_arguments_are_told(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_contestants_take_turns() -> None:
    assert [*in_turn("abc", 2)] == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]
    assert [name for _, name in in_turn("ab", 0, first=-1)] == ["b", "a"]


def test_training_ends_after_the_round_in_which_its_time_is_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_MEASURED_S", 0.0)
    found = bench("train", "--every", "1", "--saves", "1")
    assert found["rounds"] == 1 and {len(its) for its in found["window_s_by_round"].values()} == {1}


@pytest.mark.parametrize(
    ("windows", "lost_s", "row"),
    [
        ([(10.0, 12.0), (10.2, 13.0), (10.1, 12.4)], 1.15, "1.15 s  1.00 s to 1.40 s  22.8%"),
        (
            [(10.0, 10.1), (10.6, 10.8), (10.1, 10.3)],
            None,
            "less than noise  at most 300 ms  < 5.9%",
        ),
        (
            [(10.0, 9.0), (10.0, 12.0), (10.0, 12.0)],
            None,
            "less than noise  at most 1.00 s  < 20.0%",
        ),
        ([(10.0, 9.0)], None, "none measured"),
        ([(10.0, 12.0)], 1.0, "1.00 s  1.00 s to 1.00 s  20.0%"),
    ],
)
def test_a_cost_below_the_noise_is_no_number(
    windows: list[tuple[float, float]],
    lost_s: float | None,
    row: str,
    disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The windows of each round, without and with saves, have these times, by a double."""
    ahead = {kind: [pair[kind] for pair in windows] for kind in (0, 1)}
    taken: dict[Any, list[float]] = {}

    def window(_self: Any, _saves: int, _every: int, save: Any, _path: Path) -> float:
        its = taken.setdefault(save, [*ahead[save is not train.no_save]])
        return its.pop(0)

    monkeypatch.setattr(train.Training, "window", window)
    sizes = ("--size", "1MiB", "--rounds", str(len(windows)), "--saves", "2", "--every", "1")
    assert main(["bench", "train", str(disk), *sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(its == (lost_s and pytest.approx(lost_s)) for its in found["lost_s"].values())
    taken.clear()
    assert main(["bench", "train", str(disk), *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ("torch.save + fsync", "fastckpt, call fence", "fastckpt, step fence")
    for name, line in zip(names, lines[3:6], strict=True):
        assert line.split() == [*name.split(), *row.split()] and "-" not in line
    assert lines[6].startswith("noise: ") and ("unknown" in lines[6]) == (len(windows) == 1)


def test_memory_is_touched_before_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    monkeypatch.setattr(benchmark, "touch_memory", touched.append)
    assert len([*in_turn("ab", 1, 0, MIB)]) == len(touched) == 2
    monkeypatch.setattr(machine, "memory_left_bytes", lambda: 3 * MIB)
    machine.touch_memory(1 << 40)  # no more than there is
