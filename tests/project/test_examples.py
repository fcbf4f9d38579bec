"""The examples, run as a user runs them: in processes of their own, judged by what they leave.

This file is responsible for the promises that the examples make: a resumed run goes on bit by bit
where the saved one stopped, on another number of ranks with the same losses but for rounding, even
if it was killed while a checkpoint was being flushed; and the demonstration proves all of its
claims. It must not know how the examples or the library work inside.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.kit.jobs import Job, logged
from tests.kit.paths import ROOT
from tests.kit.tiers import local
from tests.kit.torches import needs_dcp, needs_fsdp2

STEPS, EVERY = 8, 2  # of the runs by several ranks
SAVING = ("--every", EVERY, "--ballast", 64)  # MiB, so that a flush is long enough to be caught
PASSIVE: dict[str, str | None] = {"OMP_WAIT_POLICY": "passive"}
IMPORTS = "tests.crews.training_imports"
ATTEMPTS = 5  # jobs that may end before one is killed in mid-flush
__all__ = ["local"]
pytestmark = pytest.mark.multiprocess


def train_gpt(*options: object, cwd: Path) -> str:
    """Runs the example in `cwd`; returns what it says."""
    script = ("examples/train_gpt.py", cwd, "--preset", "tiny")
    job = Job(*script, *options, imports=IMPORTS, variables=PASSIVE)
    said = job.finish()
    (cwd / "output").unlink()
    return said


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Twelve steps without a save."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    train_gpt("--steps", 12, "--save-every", 0, "--loss-log", "losses", cwd=directory)
    assert [path.name for path in directory.iterdir()] == ["losses"]
    return logged(directory)


@pytest.mark.parametrize("fence", ["call", "step"])
def test_resumed_losses_are_bitwise_equal(
    fence: str, uninterrupted: list[tuple[int, str]], tmp_path: Path
) -> None:
    options = ("--save-every", 3, "--path", "ckpt.pt", "--fence", fence)
    train_gpt("--steps", 8, *options, "--loss-log", "before", cwd=tmp_path)
    assert logged(tmp_path, "before") == uninterrupted[:8]
    train_gpt("--steps", 12, *options, "--loss-log", "after", "--resume", cwd=tmp_path)
    # The last save was that of step 6: steps 6 and 7 are made again.
    assert logged(tmp_path, "after") == uninterrupted[6:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before", "ckpt.pt"]


def test_another_seed_gives_other_losses(
    uninterrupted: list[tuple[int, str]], tmp_path: Path
) -> None:
    options = ("--save-every", 0, "--loss-log", "losses")
    train_gpt("--steps", 2, "--seed", 1, *options, cwd=tmp_path)
    other = logged(tmp_path)
    assert len(other) == 2
    assert not set(other) & set(uninterrupted)


def training(script: str, ranks: int, cwd: Path, *options: object) -> Job:
    """A training script on several ranks, or on one."""
    steps = ("--preset", "tiny", "--steps", STEPS, "--loss-log", "losses", *options)
    script = f"examples/{script}"
    return Job(script, cwd, *steps, ranks=ranks, imports=IMPORTS, variables=PASSIVE)


def flushing_step(cwd: Path) -> Path | None:
    """The directory of a step that is being written while an earlier one is committed."""
    if not committed_steps(cwd):
        return None
    shards = (cwd / "run").glob("step-*/rank-*.safetensors")
    with suppress(FileNotFoundError):  # glob() lists a directory that has just been removed
        return next((path.parent for path in shards if is_debris(path.parent)), None)
    return None


def flushing_file(cwd: Path) -> Path | None:
    """The temporary of a checkpoint that is being written over a committed one."""
    return next(cwd.glob(".ckpt.pt*.tmp"), None) if (cwd / "ckpt.pt").exists() else None


def is_debris(path: Path) -> bool:
    """Whether a temporary, or a step's directory, is there and was not committed."""
    return path.exists() and not (path / "manifest.json").exists()


def committed_steps(cwd: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in cwd.glob("run/step-*/manifest.json"))


def interrupted(
    script: str,
    here: Path,
    flushing: Callable[[Path], Path | None],
    killed: tuple[int, ...],
    *options: object,
) -> None:
    """Leaves what is there of a job on two ranks of which some, or all, were killed during a flush
    that did not commit.
    """
    for _ in range(ATTEMPTS):
        with training(script, 2, here, *SAVING, *options) as begun:
            while begun.poll() is None:
                debris = flushing(here)
                if debris is None:
                    time.sleep(0.001)
                    continue
                begun.kill(*killed)
                if is_debris(debris):
                    return
                break  # it was committed all the same
            else:
                assert begun.poll() == 0, begun.output
        shutil.rmtree(here)
    pytest.fail(f"no flush was caught in {ATTEMPTS} jobs")


def run_of(script: str, ranks: int, cwd: Path, *options: object) -> list[tuple[int, str]]:
    """What a training that comes to its end has logged."""
    training(script, ranks, cwd, *options).finish()
    return logged(cwd)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Losses of one rank without a save nor dropout: but for rounding, those of all the others."""
    cwd = tmp_path_factory.mktemp("expected")
    found = run_of("train_ddp.py", 1, cwd, "--every", 0)
    assert [step for step, _loss in found] == list(range(STEPS))
    return dict(found)


def assert_near(found: list[tuple[int, str]], expected: dict[int, str], first: int) -> None:
    """That the losses from step `first` on were logged, equal but for rounding."""
    assert [step for step, _loss in found] == list(range(first, STEPS))
    for step, loss in found:
        assert float.fromhex(loss) == pytest.approx(float.fromhex(expected[step]), rel=1e-5), step


def assert_repeated(
    found: list[tuple[int, str]], expected: list[tuple[int, str]], first: int
) -> None:
    """That a job which had got further went on from step `first`, and all losses bit by bit."""
    again = max(number for number, (step, _loss) in enumerate(found) if step == first)
    assert first < again
    assert found == expected[:again] + expected[first:]


@pytest.mark.torture
@needs_fsdp2
def test_fsdp2_goes_on_by_itself(disk: Path) -> None:
    options = ("--dropout", 0.1)  # with dropout each rank's generator matters
    uninterrupted = run_of("train_fsdp2.py", 2, disk / "whole", *options, "--every", 0)
    assert [step for step, _loss in uninterrupted] == list(range(STEPS))
    here = disk / "interrupted"
    interrupted("train_fsdp2.py", here, flushing_step, (1,), *options)
    first = committed_steps(here)[-1]
    job = training("train_fsdp2.py", 2, here, *SAVING, *options)
    assert f"restored step {first} on 2 ranks" in job.finish()
    assert_repeated(logged(here), uninterrupted, first)
    assert committed_steps(here) == [STEPS - 2 * EVERY, STEPS - EVERY, STEPS]
    assert len(list((here / "run").iterdir())) == 3, "the interrupted step was not removed"


@pytest.mark.torture
@needs_fsdp2
def test_fsdp2_goes_on_from_memory(disk: Path, local: Path) -> None:
    """Each rank plays a node: one of them is lost, and gets its files from the other."""
    options = ("--every", 2, "--memory", f"{local}/{{rank}}", "--root-every", 1000)
    with training("train_fsdp2.py", 2, disk, *options, "--steps", 10_000) as begun:
        while len([*local.glob("1/*/*/replicated")]) < 2:
            assert begun.poll() is None, begun.output
            time.sleep(0.01)
        begun.kill(0, 1)
    (disk / "losses").unlink()
    shutil.rmtree(local / "1")
    steps = max(int(path.parent.name[5:]) for path in local.glob("0/*/*/replicated")) + 4
    said = training("train_fsdp2.py", 2, disk, *options, "--steps", steps).finish()
    assert "rank 0: 3 files from memory, 0 from another node's, 0 from the root" in said
    assert "rank 1: 0 files from memory, 3 from another node's, 0 from the root" in said
    assert committed_steps(disk)[-1] == steps, "the last step goes to the root"


@needs_fsdp2
def test_fsdp2_goes_on_with_other_ranks(disk: Path, expected: dict[int, str]) -> None:
    begun = disk / "interrupted"
    interrupted("train_fsdp2.py", begun, flushing_step, ())
    first = committed_steps(begun)[-1]
    (begun / "losses").unlink()
    job = training("train_fsdp2.py", 3, begun, *SAVING)
    assert f"restored step {first} on 3 ranks" in job.finish()
    assert_near(logged(begun), expected, first)
    assert committed_steps(begun)[-1] == STEPS
    assert not [step for step in (begun / "run").iterdir() if is_debris(step)]


@pytest.mark.torture
def test_fsdp2_with_tensor_parallelism_goes_on_with_other_meshes(
    disk: Path, expected: dict[int, str]
) -> None:
    options = ("--every", EVERY)
    saved = run_of("train_fsdp2.py", 4, disk / "saved", *options, "--tp", 2)
    assert_near(saved, expected, 0)
    first = STEPS - EVERY
    shutil.rmtree(disk / "saved" / "run" / f"step-{STEPS:08}")
    for ranks, tp in ((4, 2), (1, 1)):  # (4, 1): tests/state/test_meshes.py
        here = disk / f"{ranks}-{tp}"
        shutil.copytree(disk / "saved" / "run", here / "run")
        job = training("train_fsdp2.py", ranks, here, *options, "--tp", tp)
        assert f"restored step {first} on {ranks} ranks" in job.finish()
        assert_near(logged(here), expected, first)
        if ranks == 4:
            assert logged(here) == saved[first:]


@needs_fsdp2
def test_saves_are_told_to_tensorboard(disk: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    training("train_fsdp2.py", 1, disk, "--every", EVERY, "--tensorboard", "told").finish()
    told = EventAccumulator(str(disk / "told")).Reload()
    assert [its.step for its in told.Scalars("checkpoint/committed_s")] == [2, 4, 6, 8]
    assert all(its.value > 0 for its in told.Scalars("checkpoint/stall_s"))


def test_ddp_goes_on(disk: Path, expected: dict[int, str]) -> None:
    uninterrupted = run_of("train_ddp.py", 2, disk / "whole", "--every", 0)
    assert_near(uninterrupted, expected, 0)
    here = disk / "interrupted"
    interrupted("train_ddp.py", here, flushing_file, (1,))
    first = torch.load(here / "ckpt.pt", mmap=True)["step"]
    job = training("train_ddp.py", 2, here, *SAVING)
    assert f"restored step {first} on 2 ranks" in job.finish()
    assert_repeated(logged(here), uninterrupted, first)
    assert torch.load(here / "ckpt.pt", mmap=True)["step"] == STEPS


@needs_dcp
def test_dcp_fsdp2_goes_on_after_a_kill(tmp_path: Path) -> None:
    """With torch.distributed.checkpoint on fastckpt's engine, bit by bit on as many ranks."""
    expected = run_of("dcp_fsdp2.py", 2, tmp_path / "whole", "--every", EVERY)
    killed = tmp_path / "killed"
    with training("dcp_fsdp2.py", 2, killed, "--every", EVERY) as job:
        while job.poll() is None and not [*killed.glob("run/step-*/.metadata")]:
            time.sleep(0.005)
        job.kill()
    (killed / "losses").unlink()
    begins = max(int(p.parent.name[5:]) for p in killed.glob("run/step-*/.metadata"))
    said = training("dcp_fsdp2.py", 2, killed, "--every", EVERY).finish()
    if begins < STEPS:  # else it had come to its end before it was killed
        assert logged(killed) == expected[begins:]
    assert f"restored step {begins} on 2 ranks" in said
    training("dcp_fsdp2.py", 1, killed, "--steps", STEPS + 2).finish()


@pytest.mark.torture
def test_torchrun_starts_the_ranks_again(disk: Path) -> None:
    """A real launcher that restarts what was killed: the job goes on by itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += ["--nproc-per-node=2", str(ROOT / "examples" / "train_fsdp2.py")]
    command += ["--preset", "tiny", "--steps", str(STEPS), *map(str, SAVING)]
    # Restarted ranks need a store of their own: in the agent's they would find the addresses of
    # the dead.
    variables = {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(disk / "output", "w") as output:
        job = subprocess.Popen(
            command, cwd=disk, env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT
        )
    while flushing_step(disk) is None:
        assert job.poll() is None, (disk / "output").read_text()
        time.sleep(0.001)
    found = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True)
    os.kill(int(found.stdout.split()[-1]), signal.SIGKILL)
    assert job.wait(200) == 0, (disk / "output").read_text()
    assert "restored step" in (disk / "output").read_text()
    assert committed_steps(disk)[-1] == STEPS


@pytest.mark.torture
@pytest.mark.timeout(900)
def test_demo_proves_its_claims(tmp_path: Path) -> None:
    variables = {"TMPDIR": str(tmp_path), **PASSIVE}  # else it would start its command anew
    output = Job("examples/train_gpt.py", tmp_path, "--demo", variables=variables).finish(850)
    assert "FAIL" not in output
    assert "Every claim held." in output
    assert "3 ranks went on from step" in output
    kinds = ("torch.save", "torch.save + fsync", "fastckpt, call fence", "fastckpt, step fence")
    for kind in kinds:
        assert any(line.startswith(f"  {kind}  ") for line in output.splitlines()), output
    assert not list(tmp_path.glob("fastckpt*")), "the demonstration left files behind"


@needs_fsdp2
def test_readers_sample_with_the_weights_that_trainers_publish(disk: Path) -> None:
    versions = 8
    options = ("--versions", versions, "--root", "run")
    job = Job(
        "examples/reinforce_weights.py", disk, *options, ranks=4, imports=IMPORTS, variables=PASSIVE
    )
    rewards = re.findall(r"^version (\d+): reward ([\d.]+);", job.finish(), re.MULTILINE)
    assert [int(version) for version, _reward in rewards] == [*range(versions)]
    assert float(rewards[-1][1]) > float(rewards[0][1])
    assert len([*(disk / "run" / "samples").iterdir()]) == 2 * versions


def test_streamed_inference_gives_the_same_tokens(disk: Path) -> None:
    last = set()
    for way, budget in (("fastckpt", 0), ("fastckpt", 9), ("fastckpt", 99), ("mmap", 0)):
        options = ("--layers", 6, "--width", 256, "--budget", budget, "--tokens", 4)
        script = ("examples/streamed_inference.py", disk, disk / "model.pt")
        said = Job(*script, *options, "--way", way, variables=PASSIVE).finish()
        assert "tokens/s" in said
        last.add(said.splitlines()[-1].partition("the last: ")[2])
        (disk / "output").unlink()
    assert len(last) == 1
