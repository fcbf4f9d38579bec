"""torchtitan: what a checkpoint costs its training, by fastckpt's manager and by its DCP manager.

    make bench-torchtitan BENCH_ARGS="--dir DIRECTORY_ON_A_REAL_DISK"

Two ranks train the debug model on the CPU over gloo, with more state beside it; the ways take turns
in each round. Its manager with pinned memory needs a GPU, and that of torch_checkpointing (0.3.0)
saves nothing yet. DCP's files are not synced. Must not know how either way works.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torchtitan_cpu
from harness import Line, at_most, told
from torch.distributed.tensor import Shard, distribute_tensor

from fastckpt.cli.bench.benchmark import before_clock

STEPS = 8  # of training behind a save, over which it may cost time
NONE, OURS, DCP, DCP_ASYNC = "no save", "fastckpt", "DCP, disabled", "DCP, async"


class Way:
    """Checkpoints of one Trainer, by one manager; clocks are those of the slowest rank."""

    def __init__(self, trainer: Any, config: Any, ballast: Any) -> None:
        self.trainer, self.nbytes = trainer, ballast.to_local().nbytes
        self.checkpointer = (
            None
            if config is None
            else config.build(
                dataloader=trainer.dataloader,
                model_parts=trainer.model_parts,
                optimizers=trainer.optimizers,
                lr_schedulers=trainer.lr_schedulers,
                states={"train_state": trainer, "ballast": ballast},
                sd_adapter=None,
                base_folder=trainer.config.dump_folder,
            )
        )
        self.clocks: dict[str, list[float]] = {"stall": [], "committed": [], "total": []}

    def round(self, batches: Iterator[Any]) -> None:
        """Trains for STEPS steps, behind a save if there is a manager."""
        trainer, checkpointer, finished = self.trainer, self.checkpointer, list[float]()
        trainer.checkpointer = checkpointer or Nothing()
        before_clock(self.nbytes)
        dist.barrier()
        begun = time.perf_counter()
        if checkpointer is not None:
            checkpointer.save(trainer.step)
        stall = time.perf_counter() - begun
        future = getattr(checkpointer, "save_future", None)
        if future is not None:
            future.add_done_callback(lambda _future: finished.append(time.perf_counter()))
        for _ in range(STEPS):
            trainer.step += 1
            trainer.train_step(batches)
        total = time.perf_counter() - begun
        if future is not None:
            checkpointer.maybe_wait_for_saving()
        committed = finished[0] - begun if finished else stall
        for name, seconds in {"stall": stall, "committed": committed, "total": total}.items():
            self.clocks[name].append(slowest(seconds))

    def loaded(self) -> float:
        """Returns how long the load of the newest checkpoint takes."""
        before_clock(self.nbytes)
        dist.barrier()
        begun = time.perf_counter()
        assert self.checkpointer is not None and self.checkpointer.load()
        return slowest(time.perf_counter() - begun)

    def seconds(self, name: str) -> list[float]:
        """Returns a clock of all rounds but the first."""
        return self.clocks[name][1:]


class Nothing:
    """A manager that does nothing."""

    def maybe_wait_for_staging(self) -> None: ...


def slowest(seconds: float) -> float:
    """Of all ranks."""
    found = torch.tensor([seconds])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def shown(line: Line) -> str:
    """Returns a median and its extremes."""
    return f"{line.measured} ({line.spread})" if line.spread else line.measured


def compare(directory: Path, ballast_mib: int, rounds: int) -> tuple[list[Line], list[str]]:
    told_trainer = ["--steps=10000", "--every=1", f"--root={directory}"]
    args = torchtitan_cpu.options().parse_args(told_trainer)
    trainer = torchtitan_cpu.Logging(torchtitan_cpu.configured(args))
    trainer.checkpointer.close()
    mesh = trainer.parallel_dims.get_mesh("fsdp")
    ballast = distribute_tensor(torch.rand(ballast_mib, 1 << 18), mesh, [Shard(0)])
    theirs, same = torchtitan_cpu.CheckpointManager.Config, {"enable": True, "keep_latest_k": 2}
    ways = {
        NONE: Way(trainer, None, ballast),
        OURS: Way(
            trainer,
            torchtitan_cpu.FastckptCheckpointer.Config(interval=1, folder="ours", **same),
            ballast,
        ),
        DCP: Way(trainer, theirs(interval=1, folder="dcp", **same), ballast),
        DCP_ASYNC: Way(
            trainer, theirs(interval=1, folder="async", async_mode="async", **same), ballast
        ),
    }
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(rounds + 1):
        for way in ways.values():
            way.round(batches)
    quiet = ways.pop(NONE).seconds("total")
    for way in ways.values():
        totals = zip(way.seconds("total"), quiet, strict=True)
        way.clocks["lost"] = [0.0, *(total - alone for total, alone in totals)]
        way.clocks["load, cached"] = [0.0, *(way.loaded() for _ in range(3))]
    mine, *others = (
        statistics.median(ways[name].seconds("lost")) for name in (OURS, DCP, DCP_ASYNC)
    )
    what, theirs_lost = "lost, of DCP's better: medians", min(others)
    lines = [
        told(f"training alone, {STEPS} steps", quiet, ".3f", " s"),
        at_most(what, mine / theirs_lost, 0.5, ".2f", " x")
        if theirs_lost > 0
        else told(what, "its own is lost in the noise"),
    ]
    heads = ["stall", "lost", "committed", "load, cached"]
    cells = [
        [name, *(shown(told("", way.seconds(head), ".3f")) for head in heads)]
        for name, way in ways.items()
    ]
    tables = [harness.table(["manager", *(f"{head} s" for head in heads)], cells)]
    for way in ways.values():
        way.checkpointer.close()
    return lines, tables


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    parser = harness.options_of("Measures checkpoints of torchtitan.")
    parser.add_argument("--ballast", type=int, default=448, help="MiB beside the model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory, environment = options.dir / "torchtitan", harness.environment(options.dir)
    lines, tables = compare(directory, options.ballast, options.rounds)
    dist.barrier()
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    if not is_first:
        return 0
    shutil.rmtree(directory)
    title = f"torchtitan, {options.rounds} rounds"
    record = {"environment": environment, "lines": harness.recorded({title: lines})}
    return harness.concluded(record | {"tables": {title: tables}}, options.out, "torchtitan")


if __name__ == "__main__":
    sys.exit(main())
