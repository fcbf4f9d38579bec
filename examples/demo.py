"""The demonstration of `train_gpt.py --demo`: kills runs in mid-save, resumes them, times saves.

This file is responsible for running train_gpt.py and train_fsdp2.py in subprocesses, for killing
them while a checkpoint is being flushed, and for checking and printing what is left. It must not
know how fastckpt works: it sees the public functions and the directories in which files appear.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import train_gpt

import fastckpt

PROGRESS_S = 5.0  # time between lines about the progress of a long stage
ATTEMPTS = 20  # runs that may end before one of them is killed in mid-flush
RANKS, OTHER_RANKS = 2, 3  # of the job that is killed, and of the one that goes on
RANKS_STEPS, RANKS_SAVE_EVERY = 12, 3
ROUNDING = 1e-5  # relative: other shares of a batch are summed in another order


@dataclass(frozen=True)
class Plan:
    """Numbers of steps, bytes and saves in one demonstration."""

    steps: int  # of the runs that are compared
    save_every: int  # steps
    ballast_mib: int  # constant fp32 values that make the file as big as a bigger model's
    rounds: int  # timed saves of each kind
    gap: int  # steps trained after each timed save
    ranks_preset: str  # of the jobs of several ranks


PLANS = {
    "tiny": Plan(steps=120, save_every=10, ballast_mib=384, rounds=3, gap=20, ranks_preset="tiny"),
    "small": Plan(steps=60, save_every=10, ballast_mib=192, rounds=5, gap=10, ranks_preset="small"),
    "demo": Plan(steps=40, save_every=8, ballast_mib=256, rounds=5, gap=4, ranks_preset="small"),
}


@dataclass
class Demo:
    """One demonstration, in `directory`; `failed` counts the claims that did not hold."""

    preset: str
    seed: int
    directory: Path
    failed: int = 0
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.plan = PLANS[self.preset]
        self.checkpoint = self.directory / "ckpt.pt"

    def stage(self, text: str) -> None:
        print(f"\n[{time.perf_counter() - self.began:5.1f} s]  {text}", flush=True)

    def note(self, text: str) -> None:
        print(f"           {text}", flush=True)

    def claim(self, holds: bool, text: str) -> None:
        self.failed += not holds
        print(f"  {'  ok' if holds else 'FAIL'}     {text}", flush=True)

    @contextmanager
    def training(self, log: Path, *options: object) -> Iterator[subprocess.Popen[bytes]]:
        """Starts a training run in its own process, which is killed at the end of the block."""
        command = [sys.executable, train_gpt.__file__, "--preset", self.preset]
        command += ["--seed", self.seed, "--ballast", self.plan.ballast_mib]
        command += ["--steps", self.plan.steps, "--path", self.checkpoint, "--loss-log", log]
        with started([*command, *options]) as process:
            yield process

    def watch(
        self, process: subprocess.Popen[bytes], log: Path, poll_s: float = 0.1
    ) -> Iterator[None]:
        """Yields every `poll_s` seconds until the run ends, and prints its progress."""
        said = time.perf_counter()
        while process.poll() is None:
            yield
            time.sleep(poll_s)
            if time.perf_counter() - said > PROGRESS_S:
                said += PROGRESS_S
                self.note(f"step {len(losses(log))} of {self.plan.steps}")

    def train(self, log: Path, *options: object) -> dict[int, str]:
        """Trains to the end and returns the losses that were logged."""
        with self.training(log, *options) as process:
            for _ in self.watch(process, log):
                pass
        return losses(log)


@contextmanager
def started(command: list[object], **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process, which is killed at the end of the block; exits if it has failed."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
        if process.returncode not in (0, -signal.SIGKILL):
            output.seek(0)
            print(output.read().decode(), file=sys.stderr)
            sys.exit(f"the training run ended with exit code {process.returncode}")


def losses(log: Path) -> dict[int, str]:
    """Returns the loss of each step, in hexadecimal, so that equal text means equal bits."""
    if not log.exists():
        return {}
    lines = log.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["loss"] for record in records}


def saves_in_flight(checkpoint: Path) -> list[Path]:
    """Returns the temporary files of saves of `checkpoint` that are not committed."""
    return sorted(checkpoint.parent.glob(f".{checkpoint.name}*.tmp"))


def bytes_written(path: Path) -> int:
    """Returns how many bytes of a file were written, without space that is only reserved."""
    written = 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        hole = 0
        while True:
            data = os.lseek(descriptor, hole, os.SEEK_DATA)
            hole = os.lseek(descriptor, data, os.SEEK_HOLE)
            written += hole - data
    except OSError:  # ENXIO: no data after the last hole
        return written
    finally:
        os.close(descriptor)


def caught_in_flush(checkpoint: Path) -> Path | None:
    """Returns the temporary file of a save that is under way and less than half written."""
    if not checkpoint.exists():
        return None
    full = checkpoint.stat().st_size
    for path in saves_in_flight(checkpoint):
        try:
            if full // 16 < bytes_written(path) < full // 2:
                return path
        except FileNotFoundError:  # committed since it was listed
            continue
    return None


def same(a: object, b: object) -> bool:
    """Whether two checkpoints have the same structure, types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(*(x.flatten().view(torch.uint8) for x in (a, b)))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def crash(demo: Demo, reference: dict[int, str]) -> Path | None:
    """Trains with saves and kills the run in mid-flush; returns the file that it left behind."""
    plan, checkpoint = demo.plan, demo.checkpoint
    log = demo.directory / "killed.jsonl"
    for _ in range(ATTEMPTS):
        debris = None
        for path in (checkpoint, *saves_in_flight(checkpoint)):
            path.unlink(missing_ok=True)
        with demo.training(log, "--save-every", plan.save_every, "--fence", "step") as process:
            for _ in demo.watch(process, log, poll_s=0.001):
                if debris := caught_in_flush(checkpoint):
                    process.kill()
                    break
        # The kernel still writes what it took over before the kill, which can be the whole file.
        if debris and debris.exists() and bytes_written(debris) < checkpoint.stat().st_size:
            break
    else:
        demo.claim(False, f"a flush was caught in flight in one of {ATTEMPTS} runs")
        return None
    made, full = losses(log), checkpoint.stat().st_size
    written, saved = bytes_written(debris), fastckpt.load(checkpoint)["step"]
    demo.note(f"{debris.name} left behind, {written / 1e6:.1f} of {full / 1e6:.1f} MB written")
    demo.claim(process.returncode == -signal.SIGKILL, f"killed by SIGKILL after step {max(made)}")
    demo.claim(0 < written < full, f"a flush was in flight: {written / full:.0%} was on disk")
    in_flight = saved + plan.save_every
    demo.claim(
        saved > 0 and len(made) >= in_flight,
        f"the save of step {in_flight} is lost, the one of step {saved} before it loads",
    )
    demo.claim(same(made, {step: reference[step] for step in made}), "saving changed no loss")
    return debris


def resume(demo: Demo, reference: dict[int, str], debris: Path) -> None:
    """Resumes from the last committed checkpoint and compares with the uninterrupted run."""
    first = fastckpt.load(demo.checkpoint)["step"]
    options = ("--save-every", demo.plan.save_every, "--fence", "step", "--resume")
    resumed = demo.train(demo.directory / "resumed.jsonl", *options)
    expected = {step: reference[step] for step in range(first, demo.plan.steps)}
    demo.note(f"{'step':>6}   {'loss, uninterrupted':<22}   loss, resumed")
    shown = sorted(expected)
    for step in [*shown[:2], *shown[-2:]]:
        demo.note(f"{step:6d}   {expected[step]:<22}   {resumed.get(step, 'none')}")
    equal = sum(resumed.get(step) == expected[step] for step in expected)
    demo.claim(
        resumed == expected,
        f"{equal} of {len(expected)} losses, steps {first} to {max(expected)}, "
        "are those of the uninterrupted run bit by bit",
    )
    demo.claim(not debris.exists(), f"{debris.name} was removed by the next save")
    demo.claim(not saves_in_flight(demo.checkpoint), "no other temporary file is left")


def interoperate(demo: Demo) -> None:
    """Opens the checkpoint with stock PyTorch."""
    stock = torch.load(demo.checkpoint, weights_only=True, mmap=True)
    demo.claim(stock["step"] == demo.plan.steps, f"torch.load opens it, step {stock['step']}")
    demo.claim(same(stock, fastckpt.load(demo.checkpoint)), "fastckpt.load gives the same values")


@contextmanager
def job(
    demo: Demo, ranks: int, log: Path, *options: object
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts train_fsdp2.py on several ranks, which are given the variables of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, Path(__file__).with_name("train_fsdp2.py")]
    command += ["--preset", demo.plan.ranks_preset, "--ballast", demo.plan.ballast_mib]
    command += ["--seed", demo.seed, "--steps", RANKS_STEPS, "--loss-log", log, *options]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    variables["WORLD_SIZE"] = str(ranks)
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(command, **variables, RANK=str(rank), LOCAL_RANK=str(rank)))
            for rank in range(ranks)
        ]


def run_job(demo: Demo, ranks: int, log: Path, *options: object) -> dict[int, str]:
    """Runs a job to its end, or until one rank fails, and returns the losses that were logged."""
    with job(demo, ranks, log, *options) as processes:
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                break
            time.sleep(0.05)
    return losses(log)


def committed_steps(root: Path) -> list[Path]:
    """Returns the directories of committed steps, in ascending order."""
    return sorted(manifest.parent for manifest in root.glob("step-*/manifest.json"))


def shards_written(step: Path) -> int:
    """Returns how many bytes of a step's shards were written."""
    return sum(bytes_written(path) for path in step.glob("rank-*.safetensors"))


def caught_step(root: Path) -> Path | None:
    """Returns the directory of a step that is under way and less than half written."""
    committed = committed_steps(root)
    if not committed:
        return None
    full = sum(path.stat().st_size for path in committed[-1].glob("rank-*.safetensors"))
    for step in sorted(set(root.glob("step-*")) - set(committed)):
        try:
            if full // 16 < shards_written(step) < full // 2:
                return step
        except FileNotFoundError:  # renamed or removed since it was listed
            continue
    return None


def crash_job(demo: Demo, root: Path) -> Path | None:
    """Kills all ranks of a job in mid-flush; returns the step's directory that is left behind."""
    for number in range(ATTEMPTS):
        shutil.rmtree(root, ignore_errors=True)
        log = demo.directory / f"killed-ranks-{number}.jsonl"
        options = ("--every", RANKS_SAVE_EVERY, "--root", root)
        debris = None
        with job(demo, RANKS, log, *options) as processes:
            while all(process.poll() is None for process in processes):
                if debris := caught_step(root):
                    # All are stopped first, so that none sees another one die.
                    for number_sent in (signal.SIGSTOP, signal.SIGKILL):
                        for process in processes:
                            process.send_signal(number_sent)
                    break
                time.sleep(0.001)
        if debris and debris not in committed_steps(root):
            break
    else:
        demo.claim(False, f"a flush was caught in flight in one of {ATTEMPTS} jobs")
        return None
    killed = all(process.returncode == -signal.SIGKILL for process in processes)
    demo.claim(killed, f"{RANKS} ranks killed by SIGKILL after step {max(losses(log))}")
    lost, kept = step_of(debris), step_of(committed_steps(root)[-1])
    demo.claim(lost > kept > 0, f"step {lost} was being flushed and is lost, step {kept} is there")
    return debris


def step_of(directory: Path) -> int:
    return int(directory.name.split("-")[1])


def change_ranks(demo: Demo) -> None:
    """Kills a job whose model is sharded over its ranks, and goes on with more of them."""
    root = demo.directory / "run"
    reference = run_job(demo, 1, demo.directory / "one-rank.jsonl", "--every", 0, "--root", root)
    demo.note(f"{len(reference)} losses of one rank alone, as a reference")
    debris = crash_job(demo, root)
    if debris is None:
        return
    first = step_of(committed_steps(root)[-1])
    log = demo.directory / "more-ranks.jsonl"
    options = ("--every", RANKS_SAVE_EVERY, "--root", root)
    resumed = run_job(demo, OTHER_RANKS, log, *options)
    expected = {step: reference[step] for step in range(first, RANKS_STEPS)}
    near = [
        step
        for step in expected.keys() & resumed.keys()
        if math.isclose(*(float.fromhex(x[step]) for x in (expected, resumed)), rel_tol=ROUNDING)
    ]
    last = float.fromhex(resumed.get(max(expected), "nan"))
    demo.claim(
        resumed.keys() == expected.keys() and len(near) == len(expected),
        f"{OTHER_RANKS} ranks went on from step {first}: {len(near)} of {len(expected)} losses, "
        f"the last {last:.4f}, as without the kill but for rounding",
    )
    left = [step for step in root.iterdir() if step not in committed_steps(root)]
    demo.claim(not left, f"what was left of step {step_of(debris)} was removed")


def fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def torch_save(state: object, path: Path) -> None:
    torch.save(state, path)


def torch_save_fsync(state: object, path: Path) -> None:
    torch.save(state, path)
    fsync(path)


def fastckpt_call(state: object, path: Path) -> fastckpt.SaveHandle:
    return fastckpt.save(state, path, options=fastckpt.SaveOptions(fence="call"))


def fastckpt_step(state: object, path: Path) -> fastckpt.SaveHandle:
    return fastckpt.save(state, path, options=fastckpt.SaveOptions(fence="step"))


Save = Callable[[object, Path], "fastckpt.SaveHandle | None"]
KINDS: dict[str, Save | None] = {
    "no save": None,
    "torch.save": torch_save,
    "torch.save + fsync": torch_save_fsync,
    "fastckpt, call fence": fastckpt_call,
    "fastckpt, step fence": fastckpt_step,
}


@dataclass(frozen=True)
class Timing:
    """One save and the training steps after it, in seconds."""

    loop_s: float  # the save and the steps
    blocked_s: float  # the part in which the loop waited for the save
    durable_s: float | None  # from the call of save until a power cut cannot lose the file
    stats: fastckpt.SaveStats | None


class Loop:
    """A real training loop, one save at a time."""

    def __init__(self, demo: Demo) -> None:
        self.preset, self.plan = train_gpt.PRESETS[demo.preset], demo.plan
        self.text, self.seed, self.step = train_gpt.load_text(), demo.seed, 0
        self.model, self.optimizer = train_gpt.make_model(
            self.preset, demo.seed, self.plan.ballast_mib
        )

    def run(self, save: Save | None, path: Path) -> Timing:
        """Saves, trains `plan.gap` steps, and waits for the save outside of the clock."""
        state = train_gpt.capture(self.model, self.optimizer, self.step)
        began = time.perf_counter()
        handle = save(state, path) if save else None
        blocked = time.perf_counter() - began
        durable, stats = blocked if save is torch_save_fsync else None, None
        for number in range(self.plan.gap):
            batch = train_gpt.make_batch(self.text, self.preset, self.seed, self.step)
            train_gpt.train_step(self.model, *batch)
            if handle and number == 0:
                # The optimizer would wait by itself: this times the wait.
                reached = time.perf_counter()
                handle.wait_staged()
                blocked += time.perf_counter() - reached
            self.optimizer.step()
            self.step += 1
        loop = time.perf_counter() - began
        if handle:
            stats = handle.result()
            durable = stats.committed_s
        elif save:  # so that its pages are not written back during the next measurement
            fsync(path)
        return Timing(loop, blocked, durable, stats)


def measure(demo: Demo) -> None:
    """Times every kind of save in turn, so that a busy machine harms all kinds alike."""
    loop, timings = Loop(demo), {kind: [] for kind in KINDS}
    paths = {kind: demo.directory / f"timed-{n}.pt" for n, kind in enumerate(KINDS)}
    for number in range(demo.plan.rounds + 1):
        for kind, save in KINDS.items():
            timing = loop.run(save, paths[kind])
            if number > 0:  # the first round warms up: files, caches, the staging arena
                timings[kind].append(timing)
        demo.note(f"round {number} of {demo.plan.rounds}" + (", warm-up" if number == 0 else ""))

    size = paths["torch.save"].stat().st_size
    print(f"\n  Medians of {demo.plan.rounds} saves of {size / 1e6:.0f} MB in a training loop:\n")
    loop_title = f"save + {demo.plan.gap} steps"
    print(f"  {'':<22}{'loop blocked':>16}{'durable after':>18}{loop_title:>20}")
    for kind, samples in timings.items():
        blocked = durable = "-"
        if KINDS[kind]:
            blocked = f"{statistics.median(timing.blocked_s for timing in samples):.3f} s"
        if None not in (waits := [timing.durable_s for timing in samples]):
            durable = f"{statistics.median(waits):.3f} s"
        total = statistics.median(timing.loop_s for timing in samples)
        print(f"  {kind:<22}{blocked:>16}{durable:>18}{total:>18.3f} s")
    stats = timings["fastckpt, call fence"][-1].stats
    how = "O_DIRECT" if stats.direct else "the page cache"
    print(f"\n  fastckpt used {stats.backend} through {how}: {stats.why}")


def run(preset: str, seed: int) -> int:
    """Runs the demonstration; returns 0 if every claim held, else 1."""
    if "OMP_WAIT_POLICY" not in os.environ:
        # Compute threads that spin while they wait are slow when anything else, as the flush, needs
        # a core. libgomp reads its policy once, before main(), so this program starts anew.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "OMP_WAIT_POLICY": "passive"})
    torch.use_deterministic_algorithms(True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves no directory
    with tempfile.TemporaryDirectory(prefix="fastckpt-demo-") as directory:
        demo = Demo(preset, seed, Path(directory))
        plan = demo.plan
        print(f"Everything below happens in {directory}, which is removed at the end.", flush=True)
        print(f"The model is padded with {plan.ballast_mib} MiB of constant fp32 values, so that")
        print("its checkpoint is as big as that of a model which would not train in seconds.")
        demo.stage(f"1. Train {plan.steps} steps without a save.")
        reference = demo.train(demo.directory / "reference.jsonl", "--save-every", 0)
        demo.claim(sorted(reference) == list(range(plan.steps)), f"{len(reference)} losses logged")
        demo.stage(f"2. Train again, save every {plan.save_every} steps, SIGKILL in mid-flush.")
        debris = crash(demo, reference)
        if debris:
            demo.stage("3. Resume from the last committed checkpoint.")
            resume(demo, reference, debris)
            demo.stage("4. Open the checkpoint with stock PyTorch.")
            interoperate(demo)
        demo.stage(f"5. Kill {RANKS} ranks that share one model (FSDP2), resume on {OTHER_RANKS}.")
        change_ranks(demo)
        demo.stage("6. Time the saves, with a warm staging arena.")
        measure(demo)
        demo.stage(f"{demo.failed} of the claims FAILED." if demo.failed else "Every claim held.")
    return 1 if demo.failed else 0
