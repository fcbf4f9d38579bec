"""What the first save and the first load of a process take, as at the start and after a failure.

    python benchmarks/fresh_process.py --dir /mnt/nvme --gib 2 --rounds 7

Saves: a process trains, and saves its state four times to a Checkpointer; with
`fastckpt.prepare` before the training, and without. It prints how long each save held up the
caller, and a training step while memory is prepared beside one that is not disturbed. Loads: a
process loads, from a disk whose pages are cold, what torch.save or fastckpt.save has written. All
take turns. It must not know how anything is saved or loaded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # an installed fastckpt comes first

import torch  # noqa: E402
from dragging import Training  # noqa: E402
from state import gpt_state, nbytes_of  # noqa: E402
from storage import drop_page_cache  # noqa: E402

import fastckpt  # noqa: E402

SAVES = 4
STEPS = 24  # so many that memory is prepared when they end
Row = dict[str, Any]


def saves(nbytes: int, directory: Path, fence: str, prepared: bool) -> Row:
    """Trains, then saves in this process, which has saved nothing before."""
    torch.set_num_threads(1)
    state = gpt_state(nbytes)
    training = Training(state)
    quiet = statistics.median(training.step() for _ in range(STEPS))
    if prepared:
        fastckpt.prepare(nbytes_of(state))
    beside = statistics.median(training.step() for _ in range(STEPS))
    stalls = []
    with fastckpt.Checkpointer(directory / "steps", keep_last=1, fence=fence) as checkpointer:
        for step in range(SAVES):
            stalls.append(checkpointer.save(step, state).result().stall_s)
            training.step()
    return {"stalls": stalls, "step_ratio": beside / quiet}


def load(path: Path, name: str) -> Row:
    """Loads in this process, which has loaded nothing before."""
    begun = time.perf_counter()
    if name == "torch.load":
        torch.load(path)
    else:
        fastckpt.load(path)
    return {"seconds": time.perf_counter() - begun}


def in_fresh_process(*arguments: object) -> Row:
    """Runs one measurement in a process of its own, and returns what it found."""
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row: Row = json.loads(found)
    return row


def measure(kind: str, *arguments: str) -> None:
    """Is the measured process."""
    if kind == "load":
        row = load(Path(arguments[0]), arguments[1])
    else:
        nbytes, directory, fence, prepared = arguments
        row = saves(int(nbytes), Path(directory), fence, prepared == "True")
    print(json.dumps(row))


def told_saves(nbytes: int, directory: Path, rounds: int) -> None:
    """Prints the medians of stalls, of the ratios of first to third, and of training steps."""
    print("| fence | prepared | save 1, ms | save 2 | save 3 | save 4 | 1 of 3 | step beside |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for fence in ("call", "step"):
        rows: dict[bool, list[Row]] = {True: [], False: []}
        for number in range(rounds):
            for prepared in (True, False) if number % 2 else (False, True):
                rows[prepared].append(in_fresh_process("save", nbytes, directory, fence, prepared))
                shutil.rmtree(directory / "steps")
        for prepared, of in rows.items():
            stalls = [statistics.median(row["stalls"][i] for row in of) for i in range(SAVES)]
            first = statistics.median(row["stalls"][0] / row["stalls"][2] for row in of)
            beside = statistics.median(row["step_ratio"] for row in of)
            cells = " | ".join(f"{1e3 * stall:.1f}" for stall in stalls)
            print(f"| {fence} | {prepared} | {cells} | {first:.2f} | {beside:.3f} |", flush=True)


def told_loads(nbytes: int, directory: Path, rounds: int) -> None:
    """Prints the medians of cold loads, and of their ratios to torch's."""
    state = gpt_state(nbytes)
    files = {name: directory / f"{name}.pt" for name in ("torch.load", "fastckpt.load")}
    torch.save(state, files["torch.load"])
    fastckpt.save(state, files["fastckpt.load"]).result()
    del state
    seconds: dict[str, list[float]] = {name: [] for name in files}
    for number in range(rounds):
        for name, path in files.items() if number % 2 else reversed(files.items()):
            how = drop_page_cache(path)
            seconds[name].append(in_fresh_process("load", path, name)["seconds"])
    print(f"\n| cold load ({how}) | s, median | x torch.load |\n|---|---:|---:|")
    for name, of in seconds.items():
        ratio = statistics.median(b / a for a, b in zip(seconds["torch.load"], of, strict=True))
        print(f"| {name} | {statistics.median(of):.3f} | {ratio:.2f} |", flush=True)


def main() -> int:
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--gib", type=float, default=2, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="fresh-", dir=options.dir))
    try:
        told_saves(int(options.gib * 2**30), directory, options.rounds)
        told_loads(int(options.gib * 2**30), directory, options.rounds)
    finally:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
