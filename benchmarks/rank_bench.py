"""One rank of a benchmark that torchrun starts: the model, the rounds, and what took how long.

Every rank runs the same; the first one prints a table of bars and verdicts. All ways take turns in
each round, so that ratios are those of one round. It must not know what is measured.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import Line, Row, at_most, told
from storage import remove
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fastckpt.cli.bench.benchmark import before_clock

MATRIX = 2048  # rows and columns of every matrix


class RankBench(ABC):
    """One rank of a benchmark.

    Args:
        nbytes: of the model, of fp32 matrices under FSDP2, on all ranks together.
        directory: on the file system to measure.
    """

    def __init__(self, nbytes: int, directory: Path) -> None:
        self.directory = directory
        self.own_bytes = nbytes // dist.get_world_size()
        self.rank = dist.get_rank()
        self.model = sharded_model(nbytes)
        generator = torch.Generator().manual_seed(self.rank)
        for parameter in self.model.parameters():
            parameter.detach().to_local().uniform_(generator=generator)
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
        """Returns when all ranks are here, ready for what is timed."""
        before_clock(self.own_bytes)
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


def sharded_model(nbytes: int, mesh: DeviceMesh | None = None) -> nn.Module:
    """Return matrices under FSDP2 of so many bytes in all, which are not filled yet."""
    count = max(1, nbytes // (4 * MATRIX * MATRIX))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(MATRIX, MATRIX, bias=False) for _ in range(count)))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh)
    return model.to_empty(device="cpu")


def against(
    rows: list[Row], what: str, name: str, base: str, key: str, bar: float | None = None
) -> Line:
    """Hold a way against another one: the median of the rounds' ratios."""
    mine, theirs = ([row[key] for row in rows if row["name"] == way] for way in (name, base))
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    seconds = f" x ({median(mine):.3f} s; {median(theirs):.3f} s)"
    if bar is None:
        return told(what, ratios, ".2f", seconds)
    return at_most(what, ratios, bar, ".2f", " x", note=seconds.removeprefix(" x"))


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
    parser = harness.options_of(what)
    parser.add_argument("--size", type=float, default=nbytes_gib, help="GiB of all ranks together")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first, chosen = dist.get_rank() == 0, [None]
    if is_first:
        chosen = [Path(tempfile.mkdtemp(prefix=f"bench-{kind}-", dir=options.dir)).resolve()]
    dist.broadcast_object_list(chosen)
    directory: Any = chosen[0]
    try:
        here = bench(int(options.size * 2**30), directory)
        right = here.run(options.rounds)
        environment = harness.environment(directory)
    finally:
        dist.barrier()
        if is_first:
            shutil.rmtree(directory, ignore_errors=True)
    dist.destroy_process_group()
    if not is_first:
        return 0
    lines = harness.recorded({what: lines_of(here.rows, right)})
    record = {"environment": environment, "lines": lines, "results": here.rows}
    return harness.concluded(record, options.out, kind)
