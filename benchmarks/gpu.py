"""The benchmark on a GPU: picks parts, runs them, prints a table of bars and verdicts.

    python benchmarks/gpu.py --dir /mnt/nvme --gib 10 --rounds 5 --parts memory,copy,call

Without a GPU it says so and ends; with `--device cpu` the same steps run at a tiny size, to be
tested. It must not know how anything is measured. Progress goes to stderr, the result to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

import report
import torch

ROOT = Path(__file__).resolve().parents[1]
# An installed fastckpt comes first; the model that is trained is that of the example.
sys.path += [str(ROOT), str(ROOT / "examples")]

from gpu_device import Cuda, Device, StandIn  # noqa: E402
from gpu_parts import run_call, run_commit, run_copy, run_load, run_memory  # noqa: E402
from gpu_setting import Here, Measured  # noqa: E402
from gpu_training import run_train  # noqa: E402
from rank_bars import Line, as_json, markdown, surroundings, write  # noqa: E402

# The first save of the process is the first part's: it is the one that allocates.
PARTS = {
    "memory": ("GPU memory", run_memory),
    "copy": ("Copies from the GPU", run_copy),
    "call": ("The call", run_call),
    "commit": ("Saves, nothing beside them", run_commit),
    "load": ("Loads to the GPU", run_load),
    "train": ("Saves beside training", run_train),
}
NO_GPU = "No GPU: torch.cuda.is_available() is False here, so nothing was measured or written."
NO_NUMBERS = "Stand-in on the CPU: the steps ran; the numbers mean nothing, no bar is judged."
GIB = {"cuda": 10.0, "cpu": 1 / 64}
STEP_S = {"cuda": 0.5, "cpu": 0.0}
DISK_SHARE = 4.5  # three files to load, fio's, and room to spare
STARTED = time.monotonic()


def progress(line: str) -> None:
    """Say on stderr what was just measured."""
    print(f"[{time.monotonic() - STARTED:7.1f} s] {line}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Benchmark fastckpt on a GPU beside its peers.")
    add = parser.add_argument
    add("--gib", type=float, help="GiB of the state; default 10, on the CPU 1/64")
    add("--rounds", type=int, default=5, help="rounds over all that is compared")
    add("--every", type=int, default=10, help="training steps from one save to the next")
    add("--step-s", type=float, help="least seconds of a training step; default 0.5, on the CPU 0")
    add("--dir", type=Path, default=Path(), help="directory on the file system to measure")
    add(
        "--parts",
        type=lambda text: [word.strip() for word in text.split(",") if word.strip()],
        default=list(PARTS),
        help=f"of {','.join(PARTS)}",
    )
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only test the steps")
    add("--out", type=Path, help="directory of the JSON; on the CPU default none")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}")
    if options.gib is None:
        options.gib = GIB[options.device]
    if options.step_s is None:
        options.step_s = STEP_S[options.device]
    if options.out is None and options.device == "cuda":
        options.out = ROOT / "benchmarks" / "results"
    if options.rounds < 1 or options.every < 1 or options.gib <= 0 or options.step_s < 0:
        parser.error("--rounds, --every and --gib must be positive, --step-s not negative")
    return options


def unjudged(lines: list[Line]) -> list[Line]:
    """Return the lines without bars on numbers; what has to hold has to hold everywhere."""
    return [line if line.bar == "yes" else replace(line, bar="", passed=None) for line in lines]


def run(options: argparse.Namespace, device: Device, directory: Path, record: report.Row) -> None:
    """Run the chosen parts and put what they found into the record, part by part.

    The record is written after each: hours on a GPU end when they end.
    """
    nbytes = int(options.gib * 2**30)
    sizes = nbytes, options.rounds, options.every, options.step_s
    here = Here(device, *sizes, directory, progress)
    record |= {"missing": here.missing, "failures": here.failures}
    record |= {"lines": {}, "tables": {}, "results": {}}
    try:
        for name in (name for name in PARTS if name in options.parts):
            try:
                found: Measured = PARTS[name][1](here)
            except Exception as error:  # the other parts may still say something
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                here.failures.append(f"{name}: {text}")
                continue
            lines = found.lines if device.judged else unjudged(found.lines)
            record["lines"][name] = as_json(lines)
            record["tables"][name] = found.tables
            record["results"][name] = found.rows
            if options.out is not None:
                progress(f"wrote {write(record, options.out, 'gpu').name}")
    finally:
        here.close()


def text(record: report.Row) -> str:
    """Return the whole run as Markdown."""
    parts = [] if record["judged"] else [NO_NUMBERS]
    gpu = record["gpu"]
    where = f"{gpu['name']}; driver {gpu['driver']}; {gpu['pcie']}"
    parts.append(f"{where}; {surroundings(record['environment'])}")
    for name, lines in record["lines"].items():
        parts.append(f"### {PARTS[name][0]}\n\n{markdown([Line(**line) for line in lines])}")
        parts += record["tables"][name]
    if record["missing"]:
        reasons = [f"- {name}: {reason}" for name, reason in record["missing"].items()]
        parts.append("### Not measured\n\n" + "\n".join(reasons))
    if record["failures"]:
        parts.append("### Failed\n\n" + "\n".join(f"- {line}" for line in record["failures"]))
    return "\n\n".join(parts)


def main() -> None:
    """Run what the command line asks for; exits with 1 when a bar was missed or fastckpt failed.

    Ended by SIGTERM or SIGHUP, it shows the parts that are finished.
    """
    options = arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        return
    needed = options.gib * DISK_SHARE
    if shutil.disk_usage(options.dir).free < needed * 2**30:
        sys.exit(f"--dir has no {needed:.3g} GiB free: choose another, or a lower --gib")
    device = Cuda() if options.device == "cuda" else StandIn()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(128 + signal.SIGHUP))
    warnings.filterwarnings("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes started from here
    directory = Path(tempfile.mkdtemp(prefix="bench-gpu-", dir=options.dir)).resolve()
    record: report.Row = {"judged": device.judged}
    ended: int | None = None
    try:
        # Some rivals log to stdout; that is for the result alone.
        with contextlib.redirect_stdout(sys.stderr):
            record["environment"] = report.environment(directory, sys.argv[1:])
            record["gpu"] = device.facts()
            try:
                run(options, device, directory, record)
            except SystemExit as signalled:  # what was measured until then is shown
                ended = int(str(signalled.code))
                record["failures"].append(f"ended by signal {ended - 128} before all was measured")
    finally:
        shutil.rmtree(directory)
    if options.out is not None:
        write(record, options.out, "gpu")
    print(text(record), flush=True)
    if ended is not None:
        sys.exit(ended)
    missed = [line for lines in record["lines"].values() for line in lines if not_passed(line)]
    names = ("fastckpt", *PARTS)
    if missed or any(line.startswith(names) for line in record["failures"]):
        sys.exit(1)


def not_passed(line: report.Row) -> bool:
    """Say whether a line of the record has a bar and missed it."""
    return line["passed"] is False


if __name__ == "__main__":
    main()
