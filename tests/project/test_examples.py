"""The examples, run as a user runs them: in processes of their own, judged by what they leave.

This file is responsible for the promises that the examples make: a resumed run goes on bit by bit
where the saved one stopped, on another number of ranks with the same losses but for rounding, even
if it was killed while a checkpoint was being flushed; and the demonstration proves all of its
claims. It must not know how the examples or the library work inside.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tests.paths import ROOT

STEPS, EVERY = 12, 3  # of the runs by several ranks
SAVING = ("--every", EVERY, "--ballast", 96)  # MiB, so that a flush is long enough to be caught
ATTEMPTS = 5  # jobs that may end before one is killed in mid-flush
pytestmark = pytest.mark.multiprocess


def environment(**variables: str) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_WAIT_POLICY": "passive",  # spinning threads crawl when the cores are shared
        **variables,
    }


def train_gpt(*options: object, cwd: Path, timeout_s: float = 60, **variables: str) -> str:
    """Runs the example in `cwd` with environment `variables`; returns its standard output."""
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--preset", "tiny"]
    done = subprocess.run(
        command + [str(option) for option in options],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(log: Path) -> list[tuple[int, str]]:
    """Steps and losses in the order in which they were logged; the losses as hexadecimal text."""
    records = map(json.loads, log.read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Twelve steps without a save."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    train_gpt("--steps", 12, "--save-every", 0, "--loss-log", "losses", cwd=directory)
    assert [path.name for path in directory.iterdir()] == ["losses"]
    return losses(directory / "losses")


@pytest.mark.parametrize("fence", ["call", "step"])
def test_resumed_losses_are_bitwise_equal(
    fence: str, uninterrupted: list[tuple[int, str]], tmp_path: Path
) -> None:
    options = ("--save-every", 3, "--path", "ckpt.pt", "--fence", fence)
    train_gpt("--steps", 8, *options, "--loss-log", "before", cwd=tmp_path)
    assert losses(tmp_path / "before") == uninterrupted[:8]
    train_gpt("--steps", 12, *options, "--loss-log", "after", "--resume", cwd=tmp_path)
    # The last save was that of step 6: steps 6 and 7 are made again.
    assert losses(tmp_path / "after") == uninterrupted[6:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before", "ckpt.pt"]


def test_another_seed_gives_other_losses(
    uninterrupted: list[tuple[int, str]], tmp_path: Path
) -> None:
    options = ("--save-every", 0, "--loss-log", "losses")
    train_gpt("--steps", 2, "--seed", 1, *options, cwd=tmp_path)
    other = losses(tmp_path / "losses")
    assert len(other) == 2
    assert not set(other) & set(uninterrupted)


def ranks_of(torchrun: int) -> dict[int, int]:
    """Process ids of the ranks that a torchrun has started, by rank."""
    found = {}
    for children in Path(f"/proc/{torchrun}/task").glob("*/children"):
        for pid in children.read_text().split():
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it ended meanwhile
            found |= {int(v[5:]): int(pid) for v in variables if v.startswith(b"RANK=")}
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Job:
    """A training script on several ranks under torchrun, or on one rank without it.

    Args:
        script: under examples/.
        ranks: number of processes.
        cwd: where it runs; made if need be.
        options: of the script, besides those that all jobs here have.
        restarts: how often torchrun starts the ranks again when one of them fails.
    """

    def __init__(
        self, script: str, ranks: int, cwd: Path, *options: object, restarts: int = 0
    ) -> None:
        cwd.mkdir(exist_ok=True)
        self.ranks, self.cwd = ranks, cwd
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--max-restarts={restarts}", f"--nproc-per-node={ranks}"]
        command += [str(ROOT / "examples" / script), "--preset", "tiny", "--steps", str(STEPS)]
        command += ["--loss-log", "losses", *map(str, options)]
        with open(cwd / "output", "w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                # Restarted ranks need a store of their own: in the agent's they would find the
                # addresses of the dead.
                env=environment(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_error: object) -> None:
        """Leaves no process behind."""
        there = ranks_of(self.process.pid)
        self.process.kill()
        self.process.wait()
        for pid in there.values():
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)

    def output(self) -> str:
        return (self.cwd / "output").read_text()

    def losses(self) -> list[tuple[int, str]]:
        """What was logged, when the job has come to its end."""
        assert self.process.wait(timeout=200) == 0, self.output()
        return losses(self.cwd / "losses")

    def kill(self, *ranks: int) -> None:
        """Kills these ranks, or the whole job if none are named; returns when no rank is left."""
        there = ranks_of(self.process.pid)
        if sorted(there) != list(range(self.ranks)):
            return  # it has come to its end
        killed = [there[rank] for rank in ranks] or [self.process.pid, *there.values()]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # at a stroke: none sees another one die
            for pid in killed:
                with suppress(ProcessLookupError):  # it ended by itself
                    os.kill(pid, number)
        deadline = time.monotonic() + 30
        while any(map(is_running, there.values())):
            assert time.monotonic() < deadline, "ranks go on without the one that was killed"
            time.sleep(0.01)


def flushing_step(cwd: Path) -> Path | None:
    """The directory of a step that is being written while an earlier one is committed."""
    if not committed_steps(cwd):
        return None
    shards = (cwd / "run").glob("step-*/rank-*.safetensors")
    return next((path.parent for path in shards if is_debris(path.parent)), None)


def flushing_file(cwd: Path) -> Path | None:
    """The temporary of a checkpoint that is being written over a committed one."""
    return next(cwd.glob(".ckpt.pt*.tmp"), None) if (cwd / "ckpt.pt").exists() else None


def is_debris(path: Path) -> bool:
    """Whether a temporary, or a step's directory, is there and was not committed."""
    return path.exists() and not (path / "manifest.json").exists()


def committed_steps(cwd: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in cwd.glob("run/step-*/manifest.json"))


@contextmanager
def interrupted(
    script: str,
    cwd: Path,
    flushing: Callable[[Path], Path | None],
    killed: tuple[int, ...],
    *options: object,
) -> Iterator[Job]:
    """A job on two ranks of which some, or all, were killed during a flush that did not commit."""
    here = cwd / "interrupted"
    for _ in range(ATTEMPTS):
        with Job(script, 2, here, *SAVING, *options, restarts=len(killed)) as begun:
            while begun.process.poll() is None:
                debris = flushing(here)
                if debris is None:
                    time.sleep(0.001)
                    continue
                begun.kill(*killed)
                if is_debris(debris):
                    yield begun
                    return
                break  # it was committed all the same
            else:
                assert begun.process.returncode == 0, begun.output()
        shutil.rmtree(here)
    pytest.fail(f"no flush was caught in {ATTEMPTS} jobs")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Losses of one rank without a save nor dropout: but for rounding, those of all the others."""
    with Job("train_ddp.py", 1, tmp_path_factory.mktemp("expected"), "--every", 0) as begun:
        logged = begun.losses()
    assert [step for step, _loss in logged] == list(range(STEPS))
    return dict(logged)


def assert_near(logged: list[tuple[int, str]], expected: dict[int, str], first: int) -> None:
    """That the losses from step `first` on were logged, equal but for rounding."""
    assert [step for step, _loss in logged] == list(range(first, STEPS))
    for step, loss in logged:
        assert float.fromhex(loss) == pytest.approx(float.fromhex(expected[step]), rel=1e-5), step


def assert_repeated(
    logged: list[tuple[int, str]], expected: list[tuple[int, str]], first: int
) -> None:
    """That a job which had got further went on from step `first`, and all losses bit by bit."""
    again = max(number for number, (step, _loss) in enumerate(logged) if step == first)
    assert first < again
    assert logged == expected[:again] + expected[first:]


def test_fsdp2_goes_on_by_itself(disk: Path) -> None:
    options = ("--dropout", 0.1)  # with dropout each rank's generator matters
    with Job("train_fsdp2.py", 2, disk / "whole", *options, "--every", 0) as whole:
        uninterrupted = whole.losses()
    assert [step for step, _loss in uninterrupted] == list(range(STEPS))
    with interrupted("train_fsdp2.py", disk, flushing_step, (1,), *options) as begun:
        first = committed_steps(begun.cwd)[-1]
        assert_repeated(begun.losses(), uninterrupted, first)
        assert f"restored step {first} on 2 ranks" in begun.output()
    assert committed_steps(begun.cwd) == [STEPS - 2 * EVERY, STEPS - EVERY, STEPS]
    assert len(list((begun.cwd / "run").iterdir())) == 3, "the interrupted step was not removed"


def test_fsdp2_goes_on_with_other_ranks(disk: Path, expected: dict[int, str]) -> None:
    with interrupted("train_fsdp2.py", disk, flushing_step, ()) as begun:
        first = committed_steps(begun.cwd)[-1]
    for ranks in (1, 3):
        here = disk / f"on-{ranks}"
        shutil.copytree(begun.cwd / "run", here / "run", copy_function=os.link)
        with Job("train_fsdp2.py", ranks, here, *SAVING) as resumed:
            assert_near(resumed.losses(), expected, first)
            assert f"restored step {first} on {ranks} ranks" in resumed.output()
        assert committed_steps(here)[-1] == STEPS
        assert not [step for step in (here / "run").iterdir() if is_debris(step)]
    shutil.rmtree(begun.cwd)  # nobody goes on here


@pytest.mark.slow
def test_fsdp2_with_tensor_parallelism_goes_on_with_other_meshes(
    disk: Path, expected: dict[int, str]
) -> None:
    options = ("--every", EVERY)
    with Job("train_fsdp2.py", 4, disk / "saved", *options, "--tp", 2) as saved:
        assert_near(saved.losses(), expected, 0)
    first = STEPS - EVERY
    shutil.rmtree(disk / "saved" / "run" / f"step-{STEPS:08}")
    for ranks, tp in ((4, 2), (2, 2), (1, 1)):  # (4, 1): tests/state/test_meshes.py
        here = disk / f"{ranks}-{tp}"
        shutil.copytree(disk / "saved" / "run", here / "run")
        with Job("train_fsdp2.py", ranks, here, *options, "--tp", tp) as resumed:
            logged = resumed.losses()
            assert_near(logged, expected, first)
            assert f"restored step {first} on {ranks} ranks" in resumed.output()
        if ranks == 4:
            assert logged == losses(disk / "saved" / "losses")[first:]


def test_ddp_goes_on(disk: Path, expected: dict[int, str]) -> None:
    with Job("train_ddp.py", 2, disk / "whole", "--every", 0) as whole:
        uninterrupted = whole.losses()
    assert_near(uninterrupted, expected, 0)
    with interrupted("train_ddp.py", disk, flushing_file, (1,)) as begun:
        left = disk / "ckpt.pt"
        os.link(begun.cwd / "ckpt.pt", left)  # before the job goes on and replaces it
        first = torch.load(left, mmap=True)["step"]
        assert_repeated(begun.losses(), uninterrupted, first)
        assert f"restored step {first} on 2 ranks" in begun.output()
    assert torch.load(begun.cwd / "ckpt.pt", mmap=True)["step"] == STEPS
    for ranks in (1, 3):
        here = disk / f"on-{ranks}"
        here.mkdir()
        os.link(left, here / "ckpt.pt")
        with Job("train_ddp.py", ranks, here, *SAVING) as resumed:
            assert_near(resumed.losses(), expected, first)
            assert f"restored step {first} on {ranks} ranks" in resumed.output()
        assert torch.load(here / "ckpt.pt", mmap=True)["step"] == STEPS


@pytest.mark.slow
def test_demo_proves_its_claims(tmp_path: Path) -> None:
    output = train_gpt("--demo", cwd=tmp_path, timeout_s=240, TMPDIR=str(tmp_path))
    assert "FAIL" not in output
    assert "Every claim held." in output
    assert "3 ranks went on from step" in output
    kinds = ("torch.save", "torch.save + fsync", "fastckpt, call fence", "fastckpt, step fence")
    for kind in kinds:
        assert any(line.startswith(f"  {kind}  ") for line in output.splitlines()), output
    assert not list(tmp_path.glob("fastckpt*")), "the demonstration left files behind"


def test_dcp_fsdp2_goes_on_after_a_kill(tmp_path: Path) -> None:
    """With torch.distributed.checkpoint on fastckpt's engine, bit by bit on as many ranks."""
    with Job("dcp_fsdp2.py", 2, tmp_path / "whole", "--every", 3) as job:
        expected = job.losses()
    killed = tmp_path / "killed"
    with Job("dcp_fsdp2.py", 2, killed, "--every", 3) as job:
        while job.process.poll() is None and not [*killed.glob("run/step-*/.metadata")]:
            time.sleep(0.005)
        job.kill()
    (killed / "losses").unlink()
    begins = max(int(p.parent.name[5:]) for p in killed.glob("run/step-*/.metadata"))
    with Job("dcp_fsdp2.py", 2, killed, "--every", 3) as job:
        assert job.process.wait(timeout=200) == 0, job.output()
    if begins < STEPS:  # else it had come to its end before it was killed
        assert losses(killed / "losses") == expected[begins:]
    assert f"restored step {begins} on 2 ranks" in (killed / "output").read_text()
    with Job("dcp_fsdp2.py", 1, killed, "--steps", STEPS + 2) as job:
        assert job.process.wait(timeout=200) == 0, job.output()
        assert f"restored step {STEPS} on 1 ranks" in job.output()
