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

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # an installed fastckpt comes first

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from storage import drop_page_cache, fsync_path, fsync_tree  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate, distribute_tensor  # noqa: E402

import fastckpt  # noqa: E402
from fastckpt import cli  # noqa: E402

State = dict[str, torch.Tensor]
FEW, SOME = (16, 4), (16, 20)  # shapes: 100,000 of SOME are more than a step keeps out of shards
SIDE = 4096  # of the large tensors


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


def inspect(directory: Path, count: int, rounds: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for number, (shape, save) in enumerate(KINDS.values()):
        save(many(count, shape), directory / str(number))
    dist.destroy_process_group()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for number, kind in enumerate(KINDS):
            seconds[kind].append(command("inspect", directory / str(number))[0])
    print(f"| inspect of {count:,} tensors | s, least | s, median |\n| --- | ---: | ---: |")
    for kind, its in seconds.items():
        print(f"| {kind} | {min(its):.3f} | {median(its):.3f} |")


def fio_s(path: Path) -> float:
    """Returns the seconds in which fio reads the file."""
    told = ("--output-format=json", "--readonly", "--name=read", f"--filename={path}")
    how = ("--rw=read", "--bs=8M", "--iodepth=8", "--ioengine=io_uring", "--direct=1")
    found = subprocess.run(["fio", *told, *how], check=True, capture_output=True).stdout
    return float(json.loads(found)["jobs"][0]["read"]["runtime"]) / 1000


def cp_s(path: Path, target: Path) -> float:
    def copy() -> None:
        subprocess.run(["cp", path, target], check=True)
        fsync_path(target)

    seconds = timed(copy)
    target.unlink()
    return seconds


def compared(
    what: str, path: Path, rounds: int, ours: Callable[[], float], other: Callable[[], float]
) -> None:
    """Prints the median of the ratios to the other, which is measured before and after."""
    ratios, seconds, others = [], [], []
    for _ in range(rounds):
        found = []
        for way in (other, ours, other):
            drop_page_cache(path)
            found.append(way())
        ratios.append(2 * found[1] / (found[0] + found[2]))
        seconds.append(found[1])
        others += [found[0], found[2]]
    print(f"| {what} | {median(ratios):.2f} x ({median(seconds):.2f} s; {median(others):.2f} s) |")


def large(directory: Path, gib: float, rounds: int) -> None:
    path, target = directory / "large.pt", directory / "hf"
    count = round(gib * (1 << 30) / (4 * SIDE * SIDE))
    fastckpt.save({f"layers.{n}": torch.randn(SIDE, SIDE) for n in range(count)}, path).result()
    megabytes = []

    def convert() -> float:
        seconds, its = command("convert", path, target, "--to", "hf")
        megabytes.append(its)
        fsync_tree(target)
        shutil.rmtree(target)
        return seconds

    print(f"\n| of {count * 4 * SIDE * SIDE / (1 << 30):g} GiB | measured |\n| --- | ---: |")
    if shutil.which("fio"):
        compared(
            "verify, of fio", path, rounds, lambda: command("verify", path)[0], lambda: fio_s(path)
        )
    compared(
        "convert, of cp and fsync", path, rounds, convert, lambda: cp_s(path, directory / "copy")
    )
    print(f"| convert, memory beyond the imports | {max(megabytes):.0f} MB |")
    with fastckpt.open(path) as tensors:
        _first, *others = (timed(lambda t=tensors[name]: t[7]) for name in tensors)
    print(f"| a row of a tensor | {1e3 * median(others):.2f} ms |")


def main() -> None:
    if sys.argv[1:2] == ["--command"]:
        return run_command(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", help="a directory for the files; a temporary one by default")
    parser.add_argument("--tensors", type=int, default=100_000, help="small ones to inspect")
    parser.add_argument("--gib", type=float, default=4, help="of the large file")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        inspect(Path(directory), options.tensors, options.rounds)
        large(Path(directory), options.gib, options.rounds)


if __name__ == "__main__":
    main()
