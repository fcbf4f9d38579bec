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
from typing import Any

import harness
import torch
import torch.distributed as dist
from ceiling import LIMIT, LIMITS, Ceiling, copy_s
from harness import LIMIT_SHARE, RIVAL_TIME, Line, Row, by_round, goal
from storage import remove
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fastckpt.cli.bench.benchmark import before_clock

MATRIX = 2048  # rows and columns of every matrix


def limits(ceiling: Ceiling | None, own_bytes: int, nbytes: int) -> Row:
    """What the machine can do at best, measured by all ranks at once: the copy of a rank's bytes,
    and on the first rank, which has a ceiling, writing and reading those of all.
    """
    before_clock(own_bytes)
    dist.barrier()
    row: Row = {"copied_s": copy_s(own_bytes), "written_s": 0.0, "read_s": 0.0}
    if ceiling is not None:
        rates = ceiling.measure(reading=True)
        row |= {"written_s": nbytes / rates["write"], "read_s": nbytes / rates["read"]}
    return row


class RankBench(ABC):
    """One rank of a benchmark.

    Args:
        nbytes: of the model, of fp32 matrices under FSDP2, on all ranks together.
        directory: on the file system to measure.

    Attributes:
        share: of the model's bytes that are saved.
    """

    share = 1.0

    def __init__(self, nbytes: int, directory: Path) -> None:
        self.directory = directory
        self.own_bytes = nbytes // dist.get_world_size()
        self.rank = dist.get_rank()
        self.saved_bytes = int(nbytes * self.share)
        self.ceiling = Ceiling(directory, self.saved_bytes, quick=True) if not self.rank else None
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
            own_bytes = int(self.own_bytes * self.share)
            self.note(LIMIT, number, **limits(self.ceiling, own_bytes, self.saved_bytes))
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
    rows: list[Row],
    what: str,
    name: str,
    base: str,
    key: str,
    limit: str = "",
    share: float | None = LIMIT_SHARE,
    times: float | None = RIVAL_TIME,
) -> Line:
    """Hold a way against another one and against a clock of the limit; see goal()."""

    def of(way: str, key: str) -> harness.Rounds:
        return by_round([row for row in rows if row["name"] == way], key)

    held = (LIMITS.get(limit, limit), of(LIMIT, limit))
    return goal(what, of(name, key), held, (base, of(base, key)), share, times)


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
    missing = {"fio": here.ceiling.missing} if here.ceiling and here.ceiling.missing else {}
    record = {"environment": environment, "lines": lines, "results": here.rows}
    record["missing"] = missing
    return harness.concluded(record, options.out, kind)
