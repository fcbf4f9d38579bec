"""The command line, as a user calls it: `python -m fastckpt`, judged by what it prints, its exit
status and what it leaves behind.

This file is responsible for arguments and their units, for reports, and for what verify finds and
doctor tells. It must not know the formulas of the model, nor how anything is written.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import fastckpt
from fastckpt.arguments import quantities
from fastckpt.cli import main
from fastckpt.cli.advise import FAILURES_PER_GPU_HOUR, Job, advise
from fastckpt.directories.draft import Draft
from fastckpt.directories.save import save_directory
from fastckpt.formats.step_names import tier_name
from fastckpt.storage.file_system import Storage
from tests.kit import interpreters
from tests.kit.doubles import Operation, Recorder, process_on
from tests.kit.noise import flip
from tests.kit.paths import ROOT
from tests.kit.torches import NEEDS_DCP
from tests.kit.torches import dcp as fast_dcp

COMMANDS = (
    *("ls", "inspect", "diff", "convert", "verify", "repair", "report", "doctor", "advise"),
    "bench",
)
JOB = ("--params", "70e9", "--gpus", "512", "--nodes", "64")


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fastckpt", *map(str, arguments)]


AS_A_MODULE = 'import runpy; runpy.run_module("fastckpt", run_name="__main__", alter_sys=True)'


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return interpreters.run(AS_A_MODULE, *arguments, cwd=cwd, timeout=90)


def advised(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What advise --json says, in this process."""
    assert main(["advise", *arguments, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that cannot be understood says."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert not told.out
    return told.err


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (quantities.size, "4.3TiB", 4.3 * 2**40),
        (quantities.size, "24 GB", 24e9),
        (quantities.size, "512mib", 2.0**29),
        (quantities.size, "1e9", 1e9),
        (quantities.size, "7B", 7.0),
        (quantities.rate, "75GB/s", 75e9),
        (quantities.rate, "6 GiB/s", 6 * 2.0**30),
        (quantities.rate, "100MB", 100e6),
        (quantities.time, "3h", 10800.0),
        (quantities.time, "1.5min", 90.0),
        (quantities.time, "20ms", 0.02),
        (quantities.time, "2d", 172800.0),
        (quantities.time, "90", 90.0),
        (quantities.count, "340e9", 340e9),
        (quantities.count, "340B", 340e9),
        (quantities.count, "70m", 70e6),
    ],
)
def test_units(read: Any, text: str, value: float) -> None:
    assert read(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (quantities.size, "4.3TiB/s"),
        (quantities.size, "4,3TiB"),
        (quantities.size, "-1GB"),
        (quantities.size, "TiB"),
        (quantities.size, "inf"),
        (quantities.size, "1e400"),
        (quantities.rate, "75Gb/h"),
        (quantities.time, "3 weeks"),
        (quantities.time, "nan"),
        (quantities.count, "340GB"),
        (quantities.count, ""),
        (quantities.count, "٣"),
    ],
)
def test_what_is_no_quantity_is_refused_in_its_own_words(read: Any, text: str) -> None:
    with pytest.raises(quantities.NotAQuantity) as caught:
        read(text)
    assert str(caught.value).startswith(f"{text!r} must be a")


@pytest.mark.parametrize(
    ("shown", "value", "text"),
    [
        (quantities.shown_size, 4.3 * 2**40, "4.30 TiB"),
        (quantities.shown_size, 512.0, "512 B"),
        (quantities.shown_size, 2.0**80, "1073741824 PiB"),
        (quantities.shown_rate, 75e9, "75.0 GB/s"),
        (quantities.shown_time, 0.0, "0.00 ms"),
        (quantities.shown_time, 16.42, "16.4 s"),
        (quantities.shown_time, 119.0, "119 s"),
        (quantities.shown_time, 300.0, "5.00 min"),
        (quantities.shown_time, 11135.0, "3.09 h"),
        (quantities.shown_time, 1e6, "11.6 d"),
    ],
)
def test_quantities_are_shown_with_three_digits(shown: Any, value: float, text: str) -> None:
    assert shown(value) == text


def test_advise_prints_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *JOB, "--osts=100", "--step-time=20s", "--staging=500GiB"]) == 0
    told = capsys.readouterr()
    mtbf_s = 3600 / (512 * FAILURES_PER_GPU_HOUR)
    found = advise(Job(980e9, 512, 64, mtbf_s, osts=100, step_s=20, staging_bytes=2**39))
    for expected in (
        "size of a checkpoint 913 GiB",
        "100 (given, --osts)",
        "6.00 GB/s (assumed, --network)",
        f"committed on the storage after {quantities.shown_time(found.root_s)} ",
        f"bottleneck {found.bottleneck} ",
        f"{quantities.shown_time(found.interval_s)}, {found.interval_steps} steps",
        f"{100 * found.lost_share:.2f} %",
        "all stay, without keep_last grows by ",
    ):
        assert expected in " ".join(told.out.split())
    assert not told.err


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ((), ["all stay, without keep_last grows by 470 TiB a day"]),
        (("--keep-last=3",), ["3 newest, and the one being written 3.64 TiB"]),
        (
            ("--keep-last=3", "--keep-best=2", "--keep-every=1000"),
            [
                "3 newest, 2 best, and the one being written 5.46 TiB",
                "those of keep_every grows by 931 GiB every 1000 steps "
                "(give --step-time for a day)",
            ],
        ),
        (
            ("--keep-last=3", "--keep-every=1000", "--step-time=10s"),
            [
                "3 newest, and the one being written 3.64 TiB",
                "those of keep_every grows by at most 7.86 TiB a day",
            ],
        ),
    ],
)
def test_advise_tells_the_disk_space(
    given: tuple[str, ...], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    job = ("--size", "1TB", "--gpus", "8", "--mtbf", "1000s", *given)
    assert main(["advise", *job]) == 0
    section = capsys.readouterr().out.partition("Disk space of the checkpoints\n")[2]
    rows = section.partition("\n\n")[0].splitlines()
    assert [" ".join(row.split()) for row in rows] == lines


def test_advise_tells_json(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--size", "4.3TiB", "--gpus", "384", "--mtbf", "3h", "--network", "6GB/s")
    told = advised(
        capsys, *given, "--nvme", "20GB/s", "--torch-writers", "12", "--restart-time", "0"
    )
    job = Job(4.3 * 2**40, 384, 48, 10800.0, nvme_rate=20e9, torch_writers=12, restart_s=0.0)
    assert told == {"inputs": asdict(job), "advice": asdict(advise(job))}


def test_every_input_of_a_job_has_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ("--d2h", "--writer", "--network", "--ost", "--nvme", "--torch")
    times = ("--step-time", "--commit-time", "--restart-time", "--mtbf")
    counts = ("--osts", "--torch-writers", "--keep-last", "--keep-every", "--keep-best")
    given = [text for flag in rates for text in (flag, "3GB/s")]
    given += [text for flag in times for text in (flag, "7s")]
    given += [text for flag in counts for text in (flag, "5")]
    told = advised(capsys, *JOB, *given, "--staging", "1GiB", "--bytes-per-param", "16")
    expected = {
        **{name: 3e9 for name in told["inputs"] if name.endswith("_rate")},
        **dict.fromkeys(("step_s", "commit_s", "restart_s", "mtbf_s"), 7.0),
        **dict.fromkeys(("osts", "torch_writers", "keep_last", "keep_every", "keep_best"), 5),
        **{"nbytes": 16 * 70e9, "ranks": 512, "nodes": 64, "staging_bytes": 2.0**30},
    }
    assert told["inputs"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fly",), "invalid choice: 'fly'"),
        (("advise", "--gpus", "8"), "one of the arguments --params --size is required"),
        (("advise", "--params", "7B"), "the following arguments are required: --gpus"),
        (("advise", *JOB, "--size", "1GB"), "not allowed with argument --params"),
        (("advise", *JOB, "--speed", "1"), "unrecognized arguments: --speed 1"),
        (("advise", *JOB, "--network", "fast"), "'fast' must be a rate such as 75GB/s"),
        (("advise", *JOB, "--mtbf", "3 weeks"), "'3 weeks' must be a time"),
        (("advise", *JOB, "--osts", "many"), "argument --osts: invalid int value: 'many'"),
        (("advise", *JOB, "--osts", "0"), "osts is 0, must be finite and above 0"),
        (("advise", "--params", "7B", "--gpus", "0"), "gpus is 0, must be above 0"),
        (
            ("advise", "--params", "7B", "--gpus", "8", "--nodes", "9"),
            "must be at most the number of",
        ),
        (("advise", *JOB, "--mtbf", "0"), "mtbf_s is 0.0, must be finite and above 0"),
        (("advise", *JOB, "--bytes-per-param", "nan"), "nbytes is nan"),
        (("verify",), "the following arguments are required: PATH"),
        (("doctor", "--fix"), "unrecognized arguments: --fix"),
    ],
)
def test_wrong_arguments_are_told(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments)


def test_main_is_what_gets_installed() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert '[project.scripts]\nfastckpt = "fastckpt.cli:main"\n' in text
    done = subprocess.run(
        command("--version"), env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"fastckpt {fastckpt.__version__}\n")
    assert run("advise", "--nonsense").returncode == 2


@pytest.mark.parametrize("how", ["-m", "script"])
def test_help_needs_no_torch(how: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')")
    script = tmp_path / "bin" / "fastckpt"
    script.parent.mkdir()
    script.write_text("import sys\nfrom fastckpt.cli import main\nsys.exit(main())\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    begin = [str(script)] if how == "script" else ["-m", "fastckpt"]
    commands = [[name] for name in COMMANDS if how == "-m"]
    for arguments in ([], *commands, ["bench", "io"]):
        done = subprocess.run(
            [sys.executable, *begin, *arguments, "--help"],
            env=environment() | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"usage: {' '.join(['fastckpt', *arguments])} ")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_names_that_stdout_cannot_have_are_escaped(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = os.fsdecode(b"\xff.pt")  # no UTF-8 either
    torch.save({"gr\xf6\xdfe": torch.ones(3)}, tmp_path / "\xe4.pt")
    shutil.copy(tmp_path / "\xe4.pt", tmp_path / bad)
    fastckpt.save({"w": torch.ones(3)}, tmp_path / "\xf6.pt").result()
    for arguments, shown in (
        (["inspect", "\xe4.pt"], "gr\xf6\xdfe"),
        (["inspect", bad], "gr\xf6\xdfe"),
        (["diff", "\xe4.pt", "\xf6.pt"], "only in A: gr\xf6\xdfe"),
        (["verify", "\xf6.pt"], "/\xf6.pt: "),
        (["verify", bad], bad),
    ):
        monkeypatch.chdir(tmp_path)
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
        monkeypatch.setattr(sys, "stdout", out)
        assert main(arguments) in (0, 1, 4)
        assert shown.encode(encoding, "backslashreplace") in out.buffer.getvalue()  # type: ignore


def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    shell = f"{' '.join(command('advise', *JOB))} --json | head -c 1"
    done = subprocess.run(
        shell, shell=True, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("{", "")


def test_a_closed_stdout_is_no_fault(saved: Path) -> None:
    """What is printed is for nobody; the status counts, and no file becomes descriptor 1."""
    shell = f"{' '.join(command('verify', 'run'))} >&-"
    done = subprocess.run(
        shell, shell=True, cwd=saved, env=environment(), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
    shell = f"{' '.join(command('ls', 'gone', '--json'))} 2>&-"
    done = subprocess.run(
        shell, shell=True, cwd=saved, env=environment(), capture_output=True, timeout=60
    )
    assert done.returncode == 1 and [*json.loads(done.stdout)] == ["error"]
    closed = f"import os, sys; os.close(1); sys.stdout = None; {AS_A_MODULE}"
    for arguments, status in ((("ls", "run"), 0), (("verify", "gone"), 1)):
        ended = interpreters.run(closed, *arguments, cwd=saved)
        assert (ended.returncode, ended.stderr) == (status, ""), arguments


STEERING = "\x1b[31m\x1b]0;title\x07\x9b1m\u202e"


@pytest.mark.parametrize(
    "arguments",
    [
        *([name, f"d{STEERING}"] for name in ("verify", "ls", "inspect", "repair", "doctor")),
        ["verify", f"d{STEERING}/bad{STEERING}.pt"],
        ["verify", f"gone{STEERING}"],
        ["ls", f"gone{STEERING}"],
        ["inspect", f"d{STEERING}/bad{STEERING}.pt"],
        ["repair", f"d{STEERING}", "--takeover"],
        ["diff", f"d{STEERING}", f"d{STEERING}"],
        ["convert", f"d{STEERING}", f"o{STEERING}.pt", "--to", "pt"],
        ["verify", f"dcp{STEERING}"],
    ],
    ids=lambda it: it[0],
)
def test_nothing_that_is_printed_steers_a_terminal(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Names of files, tensors and metrics are anybody's."""
    monkeypatch.chdir(tmp_path)
    root = f"d{STEERING}"
    with fastckpt.Checkpointer(root) as checkpointer:
        metrics = {f"loss{STEERING}": 0.5}
        checkpointer.save(1, {f"w{STEERING}": torch.ones(3)}, metrics=metrics).result()
    Path(root, f"bad{STEERING}.pt").write_bytes(b"PK\x03\x04junk")
    if fast_dcp is not None:
        fast_dcp.save({f"w{STEERING}": torch.ones(3)}, checkpoint_id=f"dcp{STEERING}")
    main(arguments)
    said = capsys.readouterr()
    assert {*STEERING}.isdisjoint({*said.out, *said.err} - {*"[]31m0;title"}), said
    assert said.out + said.err


def state() -> dict[str, Any]:
    return {"weights": torch.arange(3_000_000.0), "bias": torch.ones(1000), "step": 7}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file, a root of two steps, a compressed one, and a directory of DCP."""
    if fast_dcp is None:
        pytest.skip(NEEDS_DCP)
    directory = tmp_path_factory.mktemp("pristine")
    fastckpt.save(state(), directory / "one.pt").result()
    for codec, name in ((None, "run"), ("zstd", "packed")):
        with fastckpt.Checkpointer(directory / name, codec=codec) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, state()).result()
    fast_dcp.save(state(), checkpoint_id=str(directory / "dcp"))
    return directory


@pytest.fixture
def saved(pristine: Path, tmp_path: Path) -> Path:
    """A copy of them to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "saved"))


def verified(capsys: pytest.CaptureFixture[str], *paths: Path | str) -> tuple[int, list[str]]:
    status = main(["verify", *map(str, paths)])
    told = capsys.readouterr()
    assert not told.err
    return status, told.out.splitlines()


def test_verify_finds_all_whole(saved: Path) -> None:
    done = run("verify", "one.pt", "run", "packed/step-00000001", "dcp", cwd=saved)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 6
    assert f"{saved}/dcp/.metadata" in lines.pop(4)
    for line, name in zip(
        lines,
        ("one.pt", "run/step-00000001", "run/step-00000002", "packed/step-00000001", "dcp/__0_"),
        strict=True,
    ):
        assert f"{saved}/{name}" in line and line.endswith(" MiB")


@pytest.mark.parametrize(
    ("file", "offset"),
    [
        ("one.pt", 4_000_000),
        ("one.pt", -30),
        ("run/step-00000002/rank-00000.safetensors", 100),
        ("run/step-00000002/rank-00000.safetensors", 11_000_000),
        ("run/step-00000002/rank-00000.json", 50),
        ("run/step-00000002/objects.pt", 600),
        ("run/step-00000002/manifest.json", 50),
        ("packed/step-00000002/rank-00000.safetensors.zst", 1000),
    ],
)
def test_verify_names_what_is_damaged(
    file: str, offset: int, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(saved / file, offset)
    status, lines = verified(capsys, saved / Path(file).parts[0])
    assert status == 1
    assert lines[-1].startswith("damaged  ") and f"{saved / file}'" in lines[-1]
    assert all(line.startswith("ok ") for line in lines[:-1])


def test_verify_looks_at_what_only_zstd_reads(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A load does not depend on it."""
    file = saved / "packed/step-00000002/rank-00000.safetensors.zst"
    flip(file, file.read_bytes().rindex(b"\x50\x2a\x4d\x18"))
    status, lines = verified(capsys, saved / "packed")
    assert status == 1 and re.match(r"damaged .*the padding of block \d+, before byte", lines[-1])
    with fastckpt.Checkpointer(saved / "packed") as checkpointer:
        assert torch.equal(checkpointer.load(2)["weights"], state()["weights"])


def test_verify_tells_a_program(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(saved / "one.pt", 5000)
    status, lines = verified(capsys, "--json", saved / "one.pt", saved / "run", saved / "nothing")
    parts = json.loads("\n".join(lines))["parts"]
    assert status == 1
    assert [part["kind"] for part in parts] == ["damaged", "ok", "ok", "FAILED"]
    assert parts[0]["path"] == str(saved / "one.pt") and parts[0]["nbytes"] is None
    assert parts[1]["nbytes"] > 1 << 20


def test_doctor_tells_a_program(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(disk)]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["directory"]["text"] == str(disk) and not rows["backend"]["is_wrong"]


def test_verify_names_a_damaged_file_of_dcp(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (saved / "dcp").glob("*.distcp")
    flip(file, 4_000_000)
    status, lines = verified(capsys, saved / "dcp")
    assert status == 1 and lines[0].startswith("ok ")
    assert re.match(rf"damaged +{file}: .*CRC-32 mismatch in bytes 0 to", lines[1])
    flip(saved / "dcp" / ".metadata", 100)
    assert re.match("damaged .*metadata' is damaged", verified(capsys, saved / "dcp")[1][0])


def test_verify_tells_left_over_files_of_dcp_from_damage(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A save that was killed has left them beside a checkpoint that is whole."""
    for name, content in (
        (f"__0_{'a' * 40}", b"PK\x03\x04cut"),
        (f"__1_{'b' * 40}", b""),
    ):
        (saved / "dcp" / f"{name}.distcp").write_bytes(content)
    status, lines = verified(capsys, saved / "dcp")
    assert status == 0 and sorted(line.split()[0] for line in lines) == ["left", "left", "ok", "ok"]
    assert all("no .metadata names it" in line for line in lines if line.startswith("left over "))


def test_verify_calls_removed_what_a_save_of_dcp_replaces_meanwhile(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (replaced,) = (saved / "dcp").glob("*.distcp")

    class Overtaken(Recorder):
        """Another save commits when the `.metadata` has been read, and removes the old file."""

        overtaken = False

        def perform(self, number: int, operation: Operation, real: Callable[[], Any]) -> Any:
            done = real()
            if operation.name == "read_at" and not self.overtaken:
                self.overtaken = True
                fast_dcp.save({"other": torch.ones(3)}, checkpoint_id=str(saved / "dcp"))
                replaced.unlink(missing_ok=True)  # the save may do so later
            return done

    with process_on(Overtaken()):
        status, lines = verified(capsys, saved / "dcp")
    assert status == 0 and lines[0].startswith("removed "), lines
    status, lines = verified(capsys, saved / "dcp")
    assert status == 0 and [line.split()[0] for line in lines] == ["ok", "ok"], lines


@pytest.mark.parametrize("command", ["verify", "repair", "inspect"])
def test_a_metadata_file_with_holes_is_no_fault(
    command: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file may have any size without its bytes."""
    os.truncate(saved / "dcp" / ".metadata", 1 << 42)
    assert main([command, str(saved / "dcp")]) == 1
    said = capsys.readouterr()
    assert "an impossible size for a .metadata file" in said.out + said.err


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_metadata_file_with_a_hole_at_its_end_is_not_read(
    command: str,
    saved: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would take as much memory as it seems to have."""
    lengths, read_at = [0], Storage.read_at

    def noted(self: Storage, fd: int, nbytes: int, offset: int) -> bytes:
        lengths.append(nbytes)
        assert nbytes < 1 << 30
        return read_at(self, fd, nbytes, offset)

    monkeypatch.setattr(Storage, "read_at", noted)
    os.truncate(saved / "dcp" / ".metadata", 16 << 30)
    assert main([command, str(saved / "dcp")]) == 1
    said = capsys.readouterr()
    assert "is truncated or damaged" in said.out + said.err
    assert max(lengths) < 1 << 20


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_output_that_cannot_be_written_is_one_line(
    options: tuple[str, ...], is_buffered: bool, saved: Path
) -> None:
    full = "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    if not is_buffered:
        full += "; sys.stdout.reconfigure(write_through=True)"
    ended = interpreters.run(f"{full}; {AS_A_MODULE}", "inspect", saved / "run", *options)
    assert ended.returncode == 5
    said = "fastckpt inspect: the output cannot be written: "
    assert ended.stderr.startswith(said) and ended.stderr.count("\n") == 1
    helped = interpreters.run(f"{full}; {AS_A_MODULE}", "inspect", "--help")
    assert (helped.returncode, helped.stderr) == (5, "")
    both = f"{full}; os.dup2(1, 2)"
    ended = interpreters.run(f"{both}; {AS_A_MODULE}", "inspect", saved / "run", *options)
    assert (ended.returncode, ended.stderr) == (5, "")


def test_verify_wants_all_files_of_dcp(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (saved / "dcp").glob("*.distcp")
    file.rename(saved / "kept")
    status, (line,) = verified(capsys, saved / "dcp")
    assert status == 1 and re.match(f"damaged .*'{file.name}'.* is missing", line)
    (saved / "kept").rename(file)
    (saved / "dcp" / ".metadata").unlink()
    status, lines = verified(capsys, saved / "dcp")
    assert status == 1 and "no checkpoint was committed" in lines[0] and lines[1].startswith("ok ")


def test_verify_reads_directories_by_their_list(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(draft: Draft) -> None:
        draft.add(state(), "one.pt")

    save_directory(str(saved / "trainer" / "checkpoint-1"), fill).result()
    save_directory(str(saved / "trainer" / "checkpoint-2"), fill).result()
    status, lines = verified(capsys, saved / "trainer")
    assert status == 0 and [line.split()[0] for line in lines] == ["ok", "ok"]
    flip(saved / "trainer" / "checkpoint-1" / "one.pt", 1000)
    status, (line,) = verified(capsys, saved / "trainer" / "checkpoint-1")
    assert status == 1 and re.match("damaged .*'one.pt' has", line)


def test_verify_reads_exports_that_are_named_as_steps(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a directory of their own, and beside the steps of another run."""
    for name in ("hf", "run"):
        for step in (7, 8):
            fastckpt.export(state(), saved / name / f"step-{step:08d}").result()
        steps = () if name == "hf" else (1, 2)
        expected = [f"ok        {saved / name}/step-{step:08d}:" for step in (*steps, 7, 8)]
        status, lines = verified(capsys, saved / name)
        assert status == 0 and [line[: line.index(": ") + 1] for line in lines] == expected
        flip(saved / name / "step-00000007" / "model.safetensors", 500)
        status, lines = verified(capsys, saved / name)
        damaged = [line for line in lines if not line.startswith("ok ")]
        assert status == 1 and len(damaged) == 1 and "'model.safetensors' has" in damaged[0]


def test_verify_names_every_damaged_file_of_a_step(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = saved / "run" / "step-00000001"
    flip(step / "rank-00000.safetensors", 5000)
    (step / "objects.pt").unlink()
    status, lines = verified(capsys, step, saved / "one.pt")
    assert status == 1 and len(lines) == 2
    assert "objects.pt' is missing" in lines[0] and "rank-00000.safetensors'" in lines[0]
    assert lines[1].startswith("ok ")


def test_verify_of_a_local_tier_misses_nothing_of_other_nodes(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part of a step is right as far as it goes, with all that belongs to a file of it."""
    step = saved / "run" / "step-00000001"
    (step / "objects.pt").unlink()
    tier = saved / "tier"  # as given to a Checkpointer: it has a directory for each run
    local = tier / tier_name(str(saved / "run")) / step.name
    shutil.copytree(step, local)
    shutil.copytree(step, tier / "other-0123456789ab" / step.name)
    flip(tier / "other-0123456789ab" / step.name / "rank-00000.safetensors", 5000)
    shutil.rmtree(step)
    for given in (tier, local.parent):
        status, lines = verified(capsys, saved / "run", "--local", given)
        assert status == 0 and [line.split()[0] for line in lines] == ["ok", "ok"]
        assert "run/step-00000002: " in lines[0] and f"{local}: " in lines[1]
    status, lines = verified(capsys, "--local", tier)
    assert status == 1 and lines[0].startswith("damaged ") and "other-0123456789ab" in lines[0]
    assert lines[1].startswith("ok ") and f"{local}: " in lines[1] and len(lines) == 2
    (local / "rank-00000.json").unlink()
    status, (line,) = verified(capsys, "--local", local.parent)
    assert status == 1 and "rank-00000.json' is missing" in line
    (local / "rank-00000.safetensors").unlink()
    status, (line,) = verified(capsys, "--local", local.parent)  # a node that had nothing to write
    assert status == 0 and line.endswith(": 0.00 B")


def test_verify_reads_files_beside_steps(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(saved / "one.pt", saved / "run" / "best.pt")
    shutil.copy(saved / "one.pt", saved / "run" / "last")
    save_directory(str(saved / "run" / "best"), lambda draft: draft.add(state(), "a")).result()
    (saved / "run" / "saves.jsonl").write_text("{}\n")
    os.symlink("best.pt", saved / "run" / "link.pt")
    status, lines = verified(capsys, saved / "run")
    assert status == 0 and all(line.startswith("ok ") for line in lines)
    names = ["step-00000001", "step-00000002", "best.pt", "last", "link.pt", "best"]
    shown = [Path(line.split()[1].rstrip(":")).name for line in lines]
    assert sorted(shown) == sorted(names)
    (saved / "run" / "link.pt").unlink()
    for name in ("best.pt", "last", "best/a"):
        flip(saved / "run" / name, 5000)
    status, lines = verified(capsys, saved / "run")
    damaged = [line for line in lines if line.startswith("damaged ")]
    assert status == 1 and len(damaged) == 3 and len(lines) == 5
    (saved / "run" / "best.pt").write_bytes(b"")
    status, lines = verified(capsys, saved / "run")
    assert status == 1 and any("best.pt' is empty" in line for line in lines)


def test_verify_calls_unchecked_what_has_no_checksums(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stock := saved / "stock").mkdir()
    torch.save(state(), stock / "a.pt")
    torch.save(state(), stock / "old.pt", _use_new_zipfile_serialization=False)
    tensors = {"w": torch.ones(1000)}
    safetensors.torch.save_file(tensors, stock / "b.safetensors")
    for path in (stock, stock / "a.pt", stock / "b.safetensors"):
        status, lines = verified(capsys, saved / "one.pt", path)
        assert status == 4 and lines.pop(0).startswith("ok ")
        assert len(lines) == (3 if path == stock else 1)
        assert all(re.match("unchecked .* has no checksums(, since |$)", line) for line in lines)
    for name in ("a.pt", "b.safetensors"):  # what its own format tells is damage
        os.truncate(stock / name, 1000)
        status, lines = verified(capsys, stock / name)
        assert status == 1 and lines[0].startswith("damaged ")


def test_verify_says_what_it_cannot_verify(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(state(), saved / "stock.pt")
    dcp.save(state(), checkpoint_id=str(saved / "stock"), no_dist=True)
    (saved / "empty").mkdir()
    os.truncate(saved / "one.pt", 1_000_000)
    paths = [saved / name for name in ("stock.pt", "stock", "empty", "gone", "one.pt")]
    status, lines = verified(capsys, *paths)
    assert status == 1
    for line, message in zip(
        lines,
        (
            "unchecked .*has no checksums, since fastckpt did not write it",
            "unchecked .*metadata' has no checksum, since fastckpt did not write it",
            "unchecked .*distcp' has no checksums, since fastckpt did not write it",
            "FAILED .*holds no committed step .*the directory is empty",
            "FAILED .*gone' does not exist",
            "damaged .*truncated or damaged",
        ),
        strict=True,
    ):
        assert re.match(message, line)


@pytest.mark.parametrize("name", ["one.pt", "run", "dcp", "trainer"])
def test_verify_tells_what_it_could_not_read_from_damage(
    name: str, saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that nobody has seen may be right; and what is damaged beside them counts for more."""
    monkeypatch.setattr("fastckpt.storage.file_system.REREAD_PAUSES_S", (0.0, 0.0))
    save_directory(str(saved / "trainer"), lambda draft: draft.add(state(), "a.pt")).result()

    class Broken(Recorder):
        def attempt(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def perform(self, number: int, operation: Operation, real: Callable[[], Any]) -> Any:
            if operation.name == "read_at":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real()

    with process_on(Broken()):
        status, lines = verified(capsys, saved / name)
        assert status == 3 and lines
        for line in lines:
            assert re.match("unread .*EIO", line), line
        status, lines = verified(capsys, saved / name, saved / "gone")
        assert status == 1 and lines[-1].startswith("FAILED ")


def no_file(kind: str, path: Path) -> None:
    """Puts what is no file in the place of a file."""
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path.symlink_to({"device": "/dev/zero", "circle": path.name, "nowhere": "gone"}[kind])


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket", "device", "circle", "nowhere"])
@pytest.mark.parametrize("file", ["hf/fastckpt.json", "run/step-00000002/manifest.json"])
def test_verify_calls_damaged_what_is_no_file(
    file: str,
    kind: str,
    saved: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No later attempt would find a file there."""

    def again(_seconds: float) -> None:
        raise AssertionError("it was tried again")

    monkeypatch.setattr("fastckpt.storage.file_system.time.sleep", again)
    fastckpt.export({"w": torch.ones(9)}, saved / "hf").result()
    monkeypatch.chdir(saved / Path(file).parent)  # the path of a socket is short
    no_file(kind, Path(Path(file).name))
    for parent in [*Path(file).parents][:-1]:  # the directory, or the step and its root
        status, lines = verified(capsys, saved / parent)
        assert status == 1 and f"{saved / file}' is not a regular file" in lines[-1]
        assert lines[-1].startswith("damaged ")


@pytest.mark.parametrize("kind", ["fifo", "socket", "circle", "directory"])
@pytest.mark.parametrize("name", ["model", "diffusion_pytorch_model.fp16"])
def test_verify_calls_damaged_an_index_of_tensors_that_is_no_file(
    kind: str,
    name: str,
    saved: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole, it has no checksum, and is not told."""
    index = saved / "hub" / f"{name}.safetensors.index.json"
    index.parent.mkdir()
    index.write_text("{}")
    assert "index" not in str(verified(capsys, saved)[1])
    monkeypatch.chdir(index.parent)  # the path of a socket is short
    no_file(kind, Path(index.name))
    for path in (saved, index.parent):
        status, lines = verified(capsys, path)
        assert status == 1 and f"damaged   {index}: '{index}' is not a regular file" in lines


def test_verify_of_a_root_that_cannot_be_listed(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Closed(Storage):
        def names(self, directory: str, *, directories: bool = False) -> list[str]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), directory)

    with process_on(Closed()):
        status, lines = verified(capsys, saved / "run")
    assert status == 3 and re.fullmatch("unread .*Permission denied.*", *lines)


def test_verify_tells_where_steps_are(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "jobs").mkdir()
    (saved / "run").rename(saved / "jobs" / "run")
    status, (line,) = verified(capsys, saved / "jobs")
    assert status == 1 and line.endswith("its subdirectories contain steps: 'run'")


def test_verify_passes_over_what_was_not_committed(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved / "run" / "step-00000002" / "manifest.json").unlink()
    status, lines = verified(capsys, saved / "run")
    assert status == 0 and len(lines) == 2
    (mention,) = [line for line in lines if "step-00000002" in line]
    assert mention.startswith("no step ") and "has no manifest.json" in mention
    status, (line,) = verified(capsys, saved / "run" / "step-00000002")
    assert status == 1 and "this step was never committed" in line
    status, (line,) = verified(capsys, saved / "run" / "step-00000002" / "rank-00000.safetensors")
    assert status == 1 and "belongs to a step that was never committed" in line


@pytest.mark.parametrize(
    "file", ["rank-00000.safetensors", "rank-00000.json", "objects.pt", "manifest.json"]
)
def test_verify_knows_a_lone_file_of_a_step(
    file: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved / "run" / "step-00000001" / file
    status, (line,) = verified(capsys, path)
    assert status == 0 and line.startswith(f"ok        {path}: ")
    flip(path, 20)
    status, (line,) = verified(capsys, path)
    assert status == 1 and line.startswith("damaged "), line


def test_paths_of_commands_are_of_file_systems(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("verify", "doctor"):
        assert "is 'hdfs://host/run', " in refused(capsys, command, "hdfs://host/run")
        assert "is '', must be a path" in refused(capsys, command, "")


@pytest.mark.parametrize("command", [("doctor",), ()])
def test_doctor_tells_what_would_be_done(command: tuple[str, ...], disk: Path) -> None:
    done = run(*command, cwd=disk)
    assert (done.returncode, done.stderr) == (0, "")
    told = dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines())
    handle = fastckpt.save({}, disk / "a.pt")
    stats = handle.result()
    assert told["directory"] == str(disk)
    way = f"{stats.backend}, {'O_DIRECT' if stats.direct else 'buffered'}: {stats.why}"
    assert told["backend"] == way
    assert told["file system"].split(":")[0] == stats.why.split(":")[0]
    assert {"kernel", "CRC-32", "staging memory", "io_uring", "GPU driver", "cuFile"} <= {*told}
    assert [path.name for path in disk.iterdir()] == ["a.pt"]


def test_doctor_tells_why_saves_are_impossible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tmp_path / "gone")]) == 1
    assert re.search(r"^saves +impossible: open of .*gone", capsys.readouterr().out, re.MULTILINE)


def test_doctor_leaves_the_gpu_alone_unless_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched() -> bool:
        raise AssertionError("the GPU was asked for")

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", touched)
        assert main(["doctor", str(tmp_path)]) == 0
    assert "GPU 0" not in capsys.readouterr().out
    assert main(["doctor", str(tmp_path), "--gpu"]) == int(not torch.cuda.is_available())
    expected = r"^GPU 0 " if torch.cuda.is_available() else r"^GPU +torch finds none$"
    assert re.search(expected, capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments",
    ["inspect {}", "ls {}", "repair {}", "report {}", "diff {} {}", "convert {} {}.pt --to pt"],
)
def test_json_is_one_object_of_a_failure_too(
    arguments: str, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(disk / "missing")
    assert main([*arguments.replace("{}", missing).split(), "--json"]) == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert missing in told["error"] and err == f"fastckpt {arguments.split()[0]}: {told['error']}\n"
