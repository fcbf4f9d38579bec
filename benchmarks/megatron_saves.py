"""Megatron-core: what a checkpoint costs its training, against Megatron's own synchronous save.

    make bench-megatron BENCH_ARGS="--dir DIRECTORY_ON_A_REAL_DISK"

Two ranks on the CPU over gloo; medians of the rounds, which take turns. Must not know how either
way works.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import harness
import megatron_gpt
import torch
import torch.distributed as dist
from ceiling import LIMITS, Ceiling
from harness import Line, Rounds, goal, told
from megatron_cpu import on_cpu
from rank_bench import limits

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
    stock, blocked, committed, best = [], [], [], []
    saves, ours = Saves(), str(directory / "ours")
    held = 8 * sum(parameter.nbytes for parameter in parallel.parameters())
    directory.mkdir(exist_ok=True)
    ceiling = None if dist.get_rank() else Ceiling(directory, held, quick=True)
    for number in range(1, rounds + 2):
        best.append(limits(ceiling, held // 2, held))
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

    def goal_of(what: str, values: list[float], key: str) -> Line:
        rounds_of: list[Rounds] = [
            {number: its for number, its in enumerate(each) if number}  # the first warms up
            for each in (values, stock, [row[key] * nbytes / held for row in best])
        ]
        ours, theirs, limit = rounds_of
        return goal(what, ours, (LIMITS[key], limit), ("its own", theirs))

    dist.barrier()
    return [
        told("checkpoint", f"{nbytes / 1e6:.0f} MB"),
        goal_of("fastckpt, blocked", blocked, "copied_s"),
        goal_of("fastckpt, committed", committed, "written_s"),
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
