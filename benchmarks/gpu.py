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
import sys
import traceback
import warnings
from dataclasses import replace

import harness
import torch
from gpu_device import Cuda, StandIn
from gpu_fence import run_fence
from gpu_parts import run_call, run_commit, run_copy, run_load, run_memory
from gpu_setting import Here, Measured
from gpu_training import run_train
from harness import Line, Row, recorded

from fastckpt.cli.bench.benchmark import raise_if_interrupted

# The first save of the process is the first part's: it is the one that allocates.
PARTS = {
    "memory": ("GPU memory", run_memory),
    "copy": ("Copies from the GPU", run_copy),
    "call": ("The call", run_call),
    "commit": ("Saves, nothing beside them", run_commit),
    "load": ("Loads to the GPU", run_load),
    "train": ("Saves beside training", run_train),
    "fence": ("What a save costs training", run_fence),
}
NO_GPU = "No GPU: torch.cuda.is_available() is False here, so nothing was measured or written."
NO_NUMBERS = (
    "Stand-in on the CPU: the steps ran, no bar is judged; numbers of a GPU's parts mean nothing, "
    "those of the part fence tell what saves cost training here, if the state is large."
)
GIB = {"cuda": 10.0, "cpu": 1 / 64}
STEP_S = {"cuda": 0.5, "cpu": 0.0}
DISK_SHARE = 4.5  # three files to load, fio's, and room to spare


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = harness.options_of("Benchmark fastckpt on a GPU beside its peers.")
    add = parser.add_argument
    add("--gib", type=float, help="GiB of the state; default 10, on the CPU 1/64")
    add("--every", type=harness.positive, default=10, help="steps from one save to the next")
    add("--step-s", type=float, help="least seconds of a training step; default 0.5, on the CPU 0")
    help_of_seconds = "since the start, by which the last round of the part fence is to end"
    add("--seconds", type=float, default=130.0, help=help_of_seconds)
    harness.choice(parser, "--parts", [*PARTS])
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only test the steps")
    parser.set_defaults(out=None)  # on the CPU none
    options = parser.parse_args()
    if options.gib is None:
        options.gib = GIB[options.device]
    if options.step_s is None:
        options.step_s = STEP_S[options.device]
    if options.out is None and options.device == "cuda":
        options.out = harness.ROOT / "benchmarks" / "results"
    if options.gib <= 0 or options.step_s < 0:
        parser.error("--gib must be positive, --step-s not negative")
    return options


def unjudged(lines: list[Line]) -> list[Line]:
    """Return the lines without bars on numbers; what has to hold has to hold everywhere."""
    return [line if line.bar == "yes" else replace(line, bar="", passed=None) for line in lines]


def run(options: argparse.Namespace, here: Here, record: Row) -> None:
    """Run the chosen parts and put what they found into the record, part by part.

    The record is written after each: hours on a GPU end when they end.
    """
    for name in (name for name in PARTS if name in options.parts):
        try:
            found: Measured = PARTS[name][1](here)
        except Exception as error:  # the other parts may still say something
            raise_if_interrupted()
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            here.failures.append(f"{name}: {text}")
            continue
        lines = found.lines if here.device.judged else unjudged(found.lines)
        record["lines"] |= recorded({name: lines})
        record["tables"][name] = found.tables
        record["results"][name] = found.rows
        if options.out is not None:
            harness.write(record, options.out, "gpu")


def main() -> int:
    """Run the benchmark the command line asks for; returns 1 when a bar was missed or fastckpt
    failed. Ended by SIGTERM or SIGHUP, it shows the parts that are finished.
    """
    options = arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        return 0
    needed = options.gib * DISK_SHARE
    if shutil.disk_usage(options.dir).free < needed * 2**30:
        sys.exit(f"--dir has no {needed:.3g} GiB free: choose another, or a lower --gib")
    device = Cuda() if options.device == "cuda" else StandIn()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes started from here
    record: Row = {"judged": device.judged, "notes": [] if device.judged else [NO_NUMBERS]}
    record |= {"lines": {}, "tables": {}, "results": {}}
    sizes = (int(options.gib * 2**30), options.rounds, options.every, options.step_s)
    ended = 0
    with (
        harness.place("gpu", options.dir) as directory,
        contextlib.closing(Here(device, *sizes, options.seconds, directory)) as here,
    ):
        record |= {"missing": here.missing, "failures": here.failures}
        # Some rivals log to stdout; that is for the result alone.
        with contextlib.redirect_stdout(sys.stderr):
            record["environment"] = harness.environment(directory)
            record["gpu"] = gpu = device.facts()
            record["notes"].append(f"{gpu['name']}; driver {gpu['driver']}; {gpu['pcie']}")
            record["titles"] = {name: title for name, (title, _run) in PARTS.items()}
            try:
                run(options, here, record)
            except KeyboardInterrupt as interrupt:  # what was measured until then is shown
                (number,) = interrupt.args
                ended = 128 + number
                record["failures"].append(f"ended by signal {number} before all was measured")
        # At once: a peer may take longer to end than whoever sent the signal waits.
        missed = harness.concluded(record, options.out, "gpu")
    names = ("fastckpt", *PARTS)
    failed = any(line.startswith(names) for line in record["failures"])
    return ended or missed or int(failed)


if __name__ == "__main__":
    sys.exit(main())
