"""The benchmark beside the rivals: what it measures can be had again, and a turn ends as it should.

Responsible for the versions in the rivals' files, their environments and processes, and one small
run from end to end. Must not judge times, nor ask a package index for anything.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import staging

from tests.kit.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import ceiling
import harness
from rivals import PEERS, dcp, environment, process, torchft_transport
from saving import attempted, blank_like

from fastckpt.cli.bench.saves import differing

FILES = sorted({environment.file_of(kind) for kind in PEERS} | {Path(torchft_transport.__file__)})


def rival(directory: Path, *wanted: str) -> Path:
    """A file that requires this."""
    file = directory / "rival.py"
    file.write_text(f'"""A rival."""\n\n# /// script\n# dependencies = {list(wanted)}\n# ///\n')
    return file


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_versions_are_exact_and_torch_is_the_projects(file: Path) -> None:
    for wanted in environment.requirements(file):
        assert re.fullmatch(r"(?!torch==)[a-z0-9-]+==[0-9.]+", wanted)


def test_names_are_unique() -> None:
    assert len({kind.name for kind in PEERS}) == len(PEERS)


@pytest.mark.multiprocess
def test_environment_is_made_once_on_top_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ENVIRONMENTS", tmp_path / "environments")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert environment.interpreter(rival(tmp_path)) == Path(sys.executable)
    file = rival(tmp_path, "pytest")  # ours has it, so pip finds nothing to do
    python = environment.interpreter(file)
    shown = [python, "-c", "import pytest, sys; print(pytest.__file__, sys.prefix)"]
    found, prefix = subprocess.check_output(shown, text=True).split()
    assert (found, Path(prefix)) == (pytest.__file__, tmp_path / "environments" / "rival")
    monkeypatch.setattr(environment, "make", None)
    assert environment.interpreter(file) == python


@pytest.mark.multiprocess
def test_what_pip_refuses_is_the_reason_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ENVIRONMENTS", tmp_path / "environments")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    file = rival(tmp_path, "pytest==0.0.1")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"pytest==0\.0\.1"):
            environment.interpreter(file)


def held_open(fifo: str) -> Any:
    """Fails to answer, in a process that is kept by a thread of its own."""
    threading.Thread(target=open, args=(fifo,)).start()  # until somebody opens the other end
    return threading.Lock()  # which cannot be pickled


@pytest.mark.multiprocess
def test_a_process_that_does_not_end_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "END_S", 0.1)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(process.Failed, match=r"it did not end within 0\.1 s, no answer"):
        process.in_process(Path(sys.executable), held_open, str(tmp_path / "fifo"))


@pytest.mark.parametrize("closes_itself", [False, True])
def test_a_stager_that_closes_itself_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes_itself: bool
) -> None:
    """torch 2.11's does when it has staged, others serve all saves."""
    made = []

    class Stager(staging.DefaultStager):
        def __init__(self, options: staging.StagingOptions) -> None:
            super().__init__(options)
            made.append(self)

        def _stage(self, state: Any, **options: Any) -> Any:
            staged = super()._stage(state, **options)
            if closes_itself:
                self._state_dict_stager.close()
            return staged

    monkeypatch.setattr(staging, "DefaultStager", Stager)
    peer, state = dcp.DcpAsyncStager(), {"a": torch.zeros(9), "nested": {"b": torch.ones(3)}}
    with peer.opened():
        before = len(made)
        for number in range(3):
            state["a"].fill_(number)
            peer.save(state, tmp_path / str(number)).wait_durable()
            loaded = peer.load(tmp_path / str(number), blank_like(state))
            assert differing(loaded, state) == []
        assert len(made) == before + 3 * peer.stager_is_spent
    assert peer.stager_is_spent is closes_itself


@pytest.mark.multiprocess
@pytest.mark.torture
def test_without_fio_the_engine_sets_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastckpt.cli.bench.fio.version", lambda: "")
    limit = ceiling.Ceiling(tmp_path, 16 << 20, quick=True)
    assert set(limit.measure(reading=True)) == {"write", "read"}
    assert limit.name == "fastckpt bench io" and "fio is not on PATH" in limit.missing
    assert not list(tmp_path.iterdir())


@pytest.mark.multiprocess
def test_the_limit_of_a_link_is_of_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ceiling.socket_s(1 << 20) > 0
    sender = ceiling.SENDER.replace("left -= link", "left -= 2 * link")
    monkeypatch.setattr(ceiling, "SENDER", sender)
    with pytest.raises(ConnectionError):
        ceiling.socket_s(20 << 20)


@pytest.mark.multiprocess
@pytest.mark.torture
def test_process_answers_or_says_why_not() -> None:
    python = Path(sys.executable)
    assert process.in_process(python, os.getpid) != os.getpid()
    with pytest.raises(process.Failed, match=r"^ValueError: invalid literal"):
        process.in_process(python, int, "x")
    with pytest.raises(process.Failed, match="it ended with status 3, no answer"):
        process.in_process(python, os._exit, 3)


@pytest.mark.multiprocess
@pytest.mark.torture
def test_it_measures_and_finds_every_load_right(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), "--gib", "0.005"]
    command += ["--rounds", "1", "--peers", "torch.save,dcp,fastckpt", "--json"]
    command += ["--workloads", "stall,drain,load,drag,small,again,thinned"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path), "--out", str(tmp_path / "results")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": str(tmp_path)},  # which has no fio
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (list(record["missing"]), record["failures"]) == (["fio"], [])
    peers = {
        name: [row.get("peer") for row in result.get("rows", ())]
        for name, result in record["results"].items()
    }
    assert peers["saves"] == ["torch.save", "dcp", "fastckpt"]
    assert peers["drag"] == ["torch.save", "fastckpt"]
    assert [len(calls) for calls in record["results"]["again"]["seconds"].values()] == [12, 12]
    (step,) = record["results"]["thinned"]["rows"]
    assert 0 < step["thinned_bytes"] < step["removed_bytes"]
    assert all(row["wrong_tensors"] == [] for row in record["results"]["saves"]["rows"])
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_a_signal_ends_the_run_although_a_rival_makes_another_error_of_it(disk: Path) -> None:
    def rival() -> dict[str, Any]:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:  # as torch.distributed.checkpoint does
            raise RuntimeError("checkpoint failed") from error
        return {}

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(KeyboardInterrupt), harness.place("test", disk):
        attempted("rival", rival)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
    assert [*disk.iterdir()] == []
