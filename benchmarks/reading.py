"""What it takes to look into a checkpoint, and to bring it to another format.

    python benchmarks/reading.py --dir /mnt/nvme --tensors 100000 --gib 4 --rounds 5

- inspect: `fastckpt inspect` of checkpoints of very many small tensors, each kind of file in turn,
  in a fresh process: seconds from after the imports to the end of its output.
- verify: `fastckpt verify` of one large file, between two runs of fio that read it (if there is
  fio). convert: `fastckpt convert --to hf` of that file, between two times cp and fsync; and how
  much memory it takes beyond the imports. Both in fresh processes, on cold pages.
- slice: from `tensor[row]` to the row, of a file that is open and whose pages are warm.

It must not know how anything is read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import harness
import torch
import torch.distributed as dist
from harness import Line, Row, at_most
from safetensors.torch import save_file
from storage import drop_page_cache, fsync_path, fsync_tree
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import fastckpt
from fastckpt import cli
from fastckpt.cli.bench import fio, io
from fastckpt.cli.bench.benchmark import in_turn
from fastckpt.engine.timed_engine import Cell

State = dict[str, torch.Tensor]
FEW, SOME = (16, 4), (16, 20)  # shapes: 100,000 of SOME are more than a step keeps out of shards
SIDE = 4096  # of the large tensors
INSPECT_S = 1.5


def many(count: int, shape: tuple[int, int]) -> State:
    names = (f"transformer.layers.{n // 10}.block.sub{n % 10}.weight" for n in range(count))
    return {name: torch.full(shape, float(number)) for number, name in enumerate(names)}


def save_step(state: State, path: Path) -> None:
    with fastckpt.Checkpointer(path) as checkpointer:
        checkpointer.save(1, {"model": state}).result()


def save_sharded(state: State, path: Path) -> None:
    """Saves DTensors, which all go to shards."""
    mesh = init_device_mesh("cpu", (1,))
    save_step({name: distribute_tensor(t, mesh, [Replicate()]) for name, t in state.items()}, path)


KINDS: dict[str, tuple[tuple[int, int], Callable[[State, Path], object]]] = {
    "safetensors": (FEW, save_file),
    "torch.save": (FEW, torch.save),
    "fastckpt.save": (FEW, lambda state, path: fastckpt.save(state, path).result()),
    "a step, in objects.pt": (FEW, save_step),
    "a step, half in shards": (SOME, save_step),
    "a step, in shards": (FEW, save_sharded),
}


def timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def command(*arguments: object) -> tuple[float, float]:
    """Runs a command of fastckpt in a fresh process; returns its seconds, and the MB that it took,
    after the imports.
    """
    run = [sys.executable, __file__, "--command", *map(str, arguments)]
    found = json.loads(subprocess.run(run, check=True, stderr=subprocess.PIPE).stderr)
    return found["seconds"], found["megabytes"]


def peak_kb() -> int:
    """Returns the most memory that this process has had; getrusage() counts its parent's, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def run_command(arguments: list[str]) -> None:
    """Is that process; its output goes nowhere."""
    assert callable(fastckpt.open)  # which is imported when it is first named
    before = peak_kb()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status: list[int] = []
    seconds = timed(lambda: status.append(cli.main(arguments)))
    if status != [0]:
        raise SystemExit(f"fastckpt {' '.join(arguments)} gave {status}")
    json.dump({"seconds": seconds, "megabytes": (peak_kb() - before) / 1000}, sys.stderr)


def inspect(directory: Path, count: int, rounds: int) -> tuple[Row, list[Line]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for number, (shape, save) in enumerate(KINDS.values()):
        save(many(count, shape), directory / str(number))
    dist.destroy_process_group()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _, (number, kind) in in_turn([*enumerate(KINDS)], rounds):
        seconds[kind].append(command("inspect", directory / str(number))[0])
    bar = {"bar": INSPECT_S, "form": ".2f", "unit": " s"}
    return seconds, [at_most(kind, median(its), **bar) for kind, its in seconds.items()]


def cp_s(path: Path, target: Path) -> float:
    def copy() -> None:
        subprocess.run(["cp", path, target], check=True)
        fsync_path(target)

    seconds = timed(copy)
    target.unlink()
    return seconds


def compared(
    what: str,
    bar: float,
    path: Path,
    rounds: int,
    ours: Callable[[], float],
    other: Callable[[], float],
) -> tuple[list[list[float]], Line]:
    """Hold the median of ratios to the other, measured before and after, against a bar."""
    rows = []
    for _ in range(rounds):
        rows.append([])
        for way in (other, ours, other):
            drop_page_cache(path)
            rows[-1].append(way())
    ratios = [2 * row[1] / (row[0] + row[2]) for row in rows]
    others = median(row[place] for row in rows for place in (0, 2))
    note = f" ({median(row[1] for row in rows):.2f} s; {others:.2f} s)"
    return rows, at_most(what, median(ratios), bar, ".2f", " x", note)


def large(directory: Path, gib: float, rounds: int) -> tuple[Row, list[Line]]:
    path, target = directory / "large.pt", directory / "hf"
    count = max(2, round(gib * (1 << 30) / (4 * SIDE * SIDE)))
    fastckpt.save({f"layers.{n}": torch.randn(SIDE, SIDE) for n in range(count)}, path).result()
    nbytes, megabytes = path.stat().st_size, []

    def convert() -> float:
        seconds, its = command("convert", path, target, "--to", "hf")
        megabytes.append(its)
        fsync_tree(target)
        shutil.rmtree(target)
        return seconds

    def fio_s() -> float:
        return nbytes / fio.rate("read", path, nbytes, Cell(io.FIO, 8 << 20, 8, True))

    found, lines = {}, []
    if fio.version():
        verify = lambda: command("verify", path)[0]  # noqa: E731
        found["verify"], line = compared("verify, of fio", 1.11, path, rounds, verify, fio_s)
        lines.append(line)
    copy = directory / "copy"
    found["convert"], line = compared(
        "convert, of cp and fsync", 1.3, path, rounds, convert, lambda: cp_s(path, copy)
    )
    lines.append(line)
    lines.append(at_most("convert, beyond the imports", max(megabytes), 300, ".0f", " MB"))
    with fastckpt.open(path) as tensors:
        _first, *others = (timed(lambda t=tensors[name]: t[7]) for name in tensors)
    lines.append(at_most("a row of a tensor", 1e3 * median(others), 5, ".2f", " ms"))
    return found, lines


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    if sys.argv[1:2] == ["--command"]:
        run_command(sys.argv[2:])
        return 0
    parser = harness.options_of("What it takes to look into a checkpoint.")
    parser.add_argument("--tensors", type=int, default=100_000, help="small ones to inspect")
    parser.add_argument("--gib", type=float, default=4, help="of the large file")
    options = parser.parse_args()
    with harness.place("reading", options.dir) as directory:
        rows, lines = inspect(directory, options.tensors, options.rounds)
        large_rows, large_lines = large(directory, options.gib, options.rounds)
        environment = harness.environment(directory)
    sections = {f"inspect of {options.tensors:,} tensors": lines}
    sections[f"Of {options.gib:g} GiB"] = large_lines
    record = {"environment": environment, "results": {"inspect": rows, **large_rows}}
    record["lines"] = harness.recorded(sections)
    return harness.concluded(record, options.out, "reading")


if __name__ == "__main__":
    sys.exit(main())
