"""Megatron-core: what a checkpoint costs its training, against Megatron's own synchronous save.

    make bench-megatron BENCH_ARGS="--dir DIRECTORY_ON_A_REAL_DISK"

Two ranks on the CPU over gloo; medians of the rounds, which take turns. Must not know how either
way works.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from pathlib import Path

import harness
import megatron_gpt
import torch
import torch.distributed as dist
from harness import Line, at_most, told
from megatron_cpu import on_cpu

from fastckpt.cli.bench.benchmark import before_clock


def slowest(seconds: float) -> float:
    """Of all ranks."""
    found = torch.tensor([seconds])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def compare(directory: Path, hidden: int, rounds: int) -> list[Line]:
    from fastckpt.integrations.megatron import Saves, save_checkpoint
    from fastckpt.integrations.megatron import optimizer as optimizers

    parallel, optimizer, scheduler = megatron_gpt.build(2, 1, hidden=hidden)
    optimizers.allocate(optimizer)
    stock, blocked, committed = [], [], []
    saves, ours = Saves(), str(directory / "ours")
    held = 8 * sum(parameter.nbytes for parameter in parallel.parameters())
    for number in range(1, rounds + 2):
        before_clock(held)
        dist.barrier()
        stock.append(
            slowest(megatron_gpt.save_as_megatron(parallel, optimizer, directory / "theirs"))
        )
        before_clock(held)
        dist.barrier()
        begun = time.perf_counter()
        handle = save_checkpoint(
            number, parallel, optimizer, scheduler, save=ours, saves=saves, keep_last=1
        )
        blocked.append(slowest(time.perf_counter() - begun))
        handle.result()
        committed.append(slowest(handle.stats.committed_s or 0.0))
    stored = directory / "ours" / f"iter_{rounds + 1:07d}"
    nbytes = sum(path.stat().st_size for path in stored.iterdir())
    stock, blocked, committed = (each[1:] for each in (stock, blocked, committed))

    def of_stock(what: str, seconds: list[float], bar: float) -> Line:
        ratios = [mine / theirs for mine, theirs in zip(seconds, stock, strict=True)]
        return at_most(what, ratios, bar, ".2f", " x", f" ({statistics.median(seconds):.3f} s)")

    dist.barrier()
    return [
        told("checkpoint", f"{nbytes / 1e6:.0f} MB"),
        told("Megatron, synchronous", stock, ".3f", " s"),
        of_stock("fastckpt, blocked", blocked, 0.15),
        of_stock("fastckpt, committed", committed, 0.5),
    ]


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    parser = harness.options_of("Measures checkpoints of Megatron-core.")
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    directory, environment = options.dir / "megatron", harness.environment(options.dir)
    with on_cpu():
        lines = compare(directory, options.hidden, options.rounds)
    dist.barrier()
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    if not is_first:
        return 0
    shutil.rmtree(directory)
    sections = harness.recorded({f"Megatron-core, {options.rounds} rounds": lines})
    return harness.concluded(
        {"environment": environment, "lines": sections}, options.out, "megatron"
    )


if __name__ == "__main__":
    sys.exit(main())
