"""One rank of a benchmark that torchrun starts: the model, the rounds, and what took how long.

Every rank runs the same; the first one prints a table of bars and verdicts. All ways take turns in
each round, so that ratios are those of one round. It must not know what is measured.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import sys
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from rank_bars import Line, as_json, markdown, surroundings, write
from storage import remove
from torch import nn
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).resolve().parents[1]
MATRIX = 2048  # rows and columns of every matrix
Row = dict[str, Any]


class RankBench(ABC):
    """One rank of a benchmark.

    Args:
        nbytes: of the model, of fp32 matrices under FSDP2, on all ranks together.
        directory: on the file system to measure.
    """

    def __init__(self, nbytes: int, directory: Path) -> None:
        self.directory = directory
        self.rank = dist.get_rank()
        self.model = _model(nbytes)
        self.rows: list[Row] = []

    @abstractmethod
    def round(self, number: int) -> bool:
        """Measures each way once; returns whether all that was looked at is right."""

    def run(self, rounds: int) -> bool:
        """All rounds, the first of which only warms up; returns whether all was right."""
        right = True
        for number in range(rounds + 1):
            right = self.round(number) and right
            if number == 0:
                self.rows.clear()
        told_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told_all, right)
        return all(told_all)

    def meet(self) -> None:
        """Returns when all ranks are here, with nothing left to collect."""
        gc.collect()
        dist.barrier()

    def note(self, name: str, number: int, **seconds: float) -> None:
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
        """Has the first rank remove what was saved."""
        dist.barrier()
        if self.rank == 0:
            remove(path)
        dist.barrier()


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
    """The median of the rounds, in seconds."""
    return statistics.median(row[key] for row in rows if row["name"] == name)


def measure(
    kind: str,
    what: str,
    nbytes_gib: float,
    bench: Callable[[int, Path], RankBench],
    lines_of: Callable[[list[Row], bool], list[Line]],
) -> int:
    """Runs a benchmark as the command line says, on every rank.

    Args:
        kind: the first word of the name of the file of results.
        what: what the help says of the benchmark.
        nbytes_gib: the model's size, unless the command line names another.
        bench: makes the rank's benchmark, of a number of bytes and a directory.
        lines_of: holds rows against what they have to be.

    Returns:
        The exit status: 1 on the first rank when a bar was missed.
    """
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--size", type=float, default=nbytes_gib, help="GiB of all ranks together")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, after one to warm up")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="directory on the file system to measure"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chosen: list[Any] = [None]
    if dist.get_rank() == 0:
        chosen = [Path(tempfile.mkdtemp(prefix=f"bench-{kind}-", dir=options.dir)).resolve()]
    dist.broadcast_object_list(chosen)
    directory: Path = chosen[0]
    try:
        here = bench(int(options.size * 2**30), directory)
        right = here.run(options.rounds)
        environment = report.environment(directory, sys.argv[1:])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
    first = dist.get_rank() == 0
    lines = lines_of(here.rows, right)
    dist.destroy_process_group()
    if not first:
        return 0
    record = {"environment": environment, "lines": as_json(lines), "results": here.rows}
    file = write(record, options.out, kind)
    print(f"wrote {file.name}", file=sys.stderr)
    print(f"{surroundings(environment)}\n\n{markdown(lines)}")
    return int(any(line.passed is False for line in lines))
