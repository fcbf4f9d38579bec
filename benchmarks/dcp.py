"""The benchmark of torch.distributed.checkpoint: torch's own saver and reader against fastckpt's.

    torchrun --standalone --nproc-per-node 2 benchmarks/dcp.py --size 2 --rounds 5 --dir /mnt/nvme

Every rank runs this file; the first one prints a table of bars and verdicts. All ways take turns in
each round and are held against torch's of the same round. Every save is durable: what torch does
not sync is synced here and charged. Loads are cold. It must not know how anything is saved.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from rank_bars import Line, as_json, at_most, holds, markdown, surroundings, told, write
from storage import drop_page_cache, fsync_tree, remove

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # an installed fastckpt comes first

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_model_state_dict  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from fastckpt.integrations import dcp as ours  # noqa: E402

MATRIX = 2048  # rows and columns of every matrix
Row = dict[str, Any]
State = dict[str, Any]
Save = Callable[[State, Path], Any]

# What each saver and reader is called, and how it is; torch's come first.
ASYNC: dict[str, Save] = {
    "torch async": lambda state, path: dcp.async_save(state, checkpoint_id=path),
    "fastckpt async": lambda state, path: ours.async_save(state, checkpoint_id=path),
    "fastckpt step": lambda state, path: ours.async_save(state, checkpoint_id=path, fence="step"),
}
SYNC: dict[str, Save] = {
    "torch save": lambda state, path: dcp.save(state, checkpoint_id=path),
    "Writer": lambda state, path: dcp.save(state, storage_writer=ours.Writer(path)),
}
READERS: dict[str, Any] = {"torch": dcp.FileSystemReader, "fastckpt": ours.Reader}


class Bench:
    """One rank of the benchmark."""

    def __init__(self, nbytes: int, directory: Path) -> None:
        self.directory = directory
        self.rank = dist.get_rank()
        self.model = _model(nbytes)
        self.rows: list[Row] = []

    def state(self) -> State:
        """What is saved: the model, and some of what a training loop has besides."""
        extra = {"step": 1000, "lr": 3e-4, "betas": [0.9, 0.95], "name": "bench"}
        return {"model": get_model_state_dict(self.model), "train": extra}

    def save(self, name: str, number: int) -> Path:
        """Saves in one way, and notes what it took."""
        path = self.directory / f"{name.replace(' ', '-')}-{number}"
        state, save = self.state(), (ASYNC | SYNC)[name]
        self._meet()
        cpu_s, begun = time.process_time(), time.perf_counter()
        future = save(state, path)
        stalled = time.perf_counter() - begun
        if name in ASYNC:
            future.result()
        if name.startswith("torch"):  # which syncs its files, and not their names
            dist.barrier()
            if self.rank == 0:
                fsync_tree(path)
        committed = time.perf_counter() - begun
        cpu_s = time.process_time() - cpu_s
        self._note(name, number, stall_s=stalled, committed_s=committed, cpu_s=cpu_s)
        return path

    def load(self, name: str, reader: str, path: Path, number: int) -> bool:
        """Loads what was saved, cold, and notes what it took; says whether it is what was saved."""
        state = self.state()
        expected = {key: value.to_local().clone() for key, value in state["model"].items()}
        for value in state["model"].values():
            value.to_local().zero_()
        if self.rank == 0:
            drop_page_cache(path)
        self._meet()
        cpu_s, begun = time.process_time(), time.perf_counter()
        dcp.load(state, storage_reader=READERS[reader](path))
        loaded, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_s
        self._note(name, number, loaded_s=loaded, load_cpu_s=cpu_s)
        same = True
        for key, value in state["model"].items():
            same = same and torch.equal(value.to_local(), expected[key])
            value.to_local().copy_(expected[key])
        return same

    def _meet(self) -> None:
        gc.collect()
        dist.barrier()

    def _note(self, name: str, number: int, **seconds: float) -> None:
        """Keeps the slowest rank's times, and the sum of what all ranks computed."""
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, seconds)
        row: Row = {"name": name, "round": number}
        for key in seconds:
            values = [its[key] for its in everybody]
            row[key] = sum(values) if "cpu" in key else max(values)
        self.rows.append(row)
        if self.rank == 0:
            said = ", ".join(f"{key} {row[key]:.3f}" for key in seconds)
            print(f"round {number}: {name}: {said}", file=sys.stderr, flush=True)

    def discard(self, path: Path) -> None:
        dist.barrier()
        if self.rank == 0:
            remove(path)
        dist.barrier()

    def run(self, rounds: int) -> bool:
        """All rounds, the first of which only warms up; says whether all that came back was right.

        The order of the ways is turned around every other round.
        """
        right = True
        for number in range(rounds + 1):
            names = [*ASYNC, *SYNC]
            paths: dict[str, Path] = {}
            for name in names if number % 2 else reversed(names):
                path = self.save(name, number)
                if name in ("torch async", "fastckpt async", "Writer"):
                    paths[name] = path
                else:
                    self.discard(path)
            loads = [
                ("torch loads torch's", "torch", paths["torch async"]),
                ("fastckpt loads its own", "fastckpt", paths["fastckpt async"]),
                ("fastckpt loads torch's", "fastckpt", paths["torch async"]),
                ("torch loads Writer's", "torch", paths["Writer"]),
            ]
            for name, reader, path in loads if number % 2 else reversed(loads):
                right = self.load(name, reader, path, number) and right
            for path in paths.values():
                self.discard(path)
            if number == 0:
                self.rows.clear()
        told_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told_all, right)
        return all(told_all)


def _model(nbytes: int) -> nn.Module:
    """Matrices of random numbers under FSDP2."""
    count = max(1, nbytes // (4 * MATRIX * MATRIX))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(MATRIX, MATRIX, bias=False) for _ in range(count)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            local: Any = parameter
            local.to_local().uniform_(generator=generator)
    return model


def ratio(rows: list[Row], name: str, base: str, key: str) -> float:
    """The median of the rounds' ratios."""
    of = {(row["name"], row["round"]): row.get(key) for row in rows}
    rounds = sorted({row["round"] for row in rows})
    return statistics.median(of[name, number] / of[base, number] for number in rounds)


def median(rows: list[Row], name: str, key: str) -> float:
    return statistics.median(row[key] for row in rows if row["name"] == name)


def lines_of(rows: list[Row], right: bool) -> list[Line]:
    """What was measured against what it has to be."""

    def against(what: str, name: str, base: str, key: str, bar: float | None) -> Line:
        value = ratio(rows, name, base, key)
        seconds = f" ({median(rows, name, key):.3f} s; {median(rows, base, key):.3f} s)"
        if bar is None:
            return told(what, f"{value:.2f} x{seconds}")
        line = at_most(what, value, bar, ".2f", " x")
        return Line(what, line.bar, line.measured + seconds, line.passed)

    torch_async, torch_save, own = "torch async", "torch save", "fastckpt async"
    load = "torch loads torch's"
    return [
        against("async_save: stall", own, torch_async, "stall_s", 0.35),
        against("async_save: committed", own, torch_async, "committed_s", 0.4),
        against("async_save: CPU seconds of all ranks", own, torch_async, "cpu_s", 0.5),
        against("async_save, step fence: stall", "fastckpt step", torch_async, "stall_s", None),
        against(
            "async_save, step fence: committed", "fastckpt step", torch_async, "committed_s", None
        ),
        against("dcp.save with Writer: committed", "Writer", torch_save, "committed_s", 0.4),
        against("dcp.save with Writer: CPU seconds", "Writer", torch_save, "cpu_s", None),
        against(
            "dcp.load with Reader, its own: cold", "fastckpt loads its own", load, "loaded_s", 0.5
        ),
        against(
            "dcp.load with Reader, its own: CPU", "fastckpt loads its own", load, "load_cpu_s", None
        ),
        against(
            "dcp.load with Reader, torch's: cold", "fastckpt loads torch's", load, "loaded_s", None
        ),
        holds("every load gave back what was saved, bit by bit; torch's of Writer's too", right),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark torch.distributed.checkpoint.")
    parser.add_argument("--size", type=float, default=2.0, help="GiB of the state of all ranks")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, after one to warm up")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="directory on the file system to measure"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def main() -> int:
    """Runs on every rank; the first one's exit status is 1 when a bar was missed."""
    options = arguments()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chosen: list[Any] = [None]
    if dist.get_rank() == 0:
        chosen = [Path(tempfile.mkdtemp(prefix="bench-dcp-", dir=options.dir)).resolve()]
    dist.broadcast_object_list(chosen)
    directory: Path = chosen[0]
    try:
        bench = Bench(int(options.size * 2**30), directory)
        right = bench.run(options.rounds)
        environment = report.environment(directory, sys.argv[1:])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
    first = dist.get_rank() == 0
    lines = lines_of(bench.rows, right)
    dist.destroy_process_group()
    if not first:
        return 0
    record = {"environment": environment, "lines": as_json(lines), "results": bench.rows}
    file = write(record, options.out, "dcp")
    print(f"wrote {file.name}", file=sys.stderr)
    print(f"{surroundings(environment)}\n\n{markdown(lines)}")
    return int(any(line.passed is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
