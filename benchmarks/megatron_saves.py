"""Megatron-core: what a checkpoint costs its training, against Megatron's own synchronous save, and
what loading an optimizer on another parallelism reads.

    make bench-megatron BENCH_ARGS="--dir DIRECTORY_ON_A_REAL_DISK"

Two ranks on the CPU over gloo; medians of the rounds, which take turns. Must not know how either
way works.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import harness
import megatron_gpt
import torch
import torch.distributed as dist
from harness import Line, at_most, told
from megatron_cpu import on_cpu


def rebuilt(tp: int, pp: int, hidden: int) -> tuple[Any, Any, Any]:
    from megatron.core import parallel_state

    from fastckpt.integrations.megatron import optimizer as optimizers

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parts = megatron_gpt.build(tp, pp, hidden=hidden)
    optimizers.allocate(parts[1])
    return parts


def slowest(seconds: float) -> float:
    """Of all ranks."""
    found = torch.tensor([seconds])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def compare(directory: Path, hidden: int, rounds: int) -> list[Line]:
    from fastckpt.integrations.megatron import Saves, save_checkpoint

    parallel, optimizer, scheduler = rebuilt(2, 1, hidden)
    stock, blocked, committed = [], [], []
    saves, ours = Saves(), str(directory / "ours")
    for number in range(1, rounds + 2):
        dist.barrier()
        stock.append(
            slowest(megatron_gpt.save_as_megatron(parallel, optimizer, directory / "theirs"))
        )
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
    sync, stall, done = (statistics.median(each[1:]) for each in (stock, blocked, committed))
    dist.barrier()
    return [
        told("checkpoint", f"{nbytes / 1e6:.0f} MB"),
        told("Megatron, synchronous", f"{sync:.3f} s"),
        at_most("fastckpt, blocked", stall / sync, 0.15, ".2f", " x", f" ({stall:.3f} s)"),
        at_most("fastckpt, committed", done / sync, 0.5, ".2f", " x", f" ({done:.3f} s)"),
    ]


def reshard(directory: Path, hidden: int, save: tuple[int, int], load: tuple[int, int]) -> Line:
    from fastckpt.integrations.megatron import optimizer as optimizers
    from fastckpt.integrations.megatron import save_checkpoint
    from fastckpt.integrations.megatron.state import content_metadata
    from fastckpt.integrations.megatron.strategies import stored_metadata
    from fastckpt.saving import pipeline

    root = str(directory / "reshard")
    save_checkpoint(1, *rebuilt(*save, hidden), save=root).result()
    model, optimizer, _ = rebuilt(*load, hidden)
    streams: list[Any] = []
    staging = pipeline.current().staging
    reading = staging.read

    def noted(*args: Any) -> Any:
        streams.append(reading(*args))
        return streams[-1]

    staging.read = noted  # type: ignore[method-assign]
    path = os.path.join(root, "iter_0000001")
    state = {"model": model.module.sharded_state_dict(metadata=content_metadata(""))}
    begun = time.perf_counter()
    with torch.no_grad():
        needed = optimizers.load_buckets(optimizer, state, path, stored_metadata(path))
    seconds = slowest(time.perf_counter() - begun)
    took = sum(stream.nbytes_read() for stream in streams)
    del staging.read
    what = f"optimizer TP{save[0]} PP{save[1]} -> TP{load[0]} PP{load[1]}, read of needed"
    return at_most(what, took / needed, 1.2, ".2f", " x", f" ({seconds:.2f} s)")


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
        lines.append(reshard(directory, options.hidden, (2, 1), (1, 1)))
        lines.append(reshard(directory, options.hidden, (1, 2), (1, 1)))
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
