"""The benchmark of exports: fastckpt.export against a save of as many bytes, and against torch's
HuggingFaceStorageWriter.

    torchrun --standalone --nproc-per-node 4 benchmarks/export.py --size 8 --dir /mnt/nvme

The masters are fp32, the files bf16, so half of --size is written. Every way is durable: what torch
does not sync is synced here and charged; so is the conversion, which torch leaves to its caller.
It must not know how anything is written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Line, Row, holds
from rank_bench import RankBench, against, measure
from storage import fsync_tree
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import fastckpt

FILE_BYTES = 1_000_000_000
DTYPE = torch.bfloat16
State = dict[str, Any]


def converted(state: State) -> State:
    """A state of as many bytes as are exported."""
    return {name: tensor.to(DTYPE) for name, tensor in state.items()}


def save(state: State, path: Path) -> float:
    """A save of the bytes that the others write, which were converted before."""
    with fastckpt.Checkpointer(path, group=dist.group.WORLD) as checkpointer:
        return wait(lambda: checkpointer.save(1, state))


def export(state: State, path: Path) -> float:
    return wait(
        lambda: fastckpt.export(
            state, path, dtype=DTYPE, shard_bytes=FILE_BYTES, group=dist.group.WORLD
        )
    )


def wait(begin: Callable[[], fastckpt.SaveHandle]) -> float:
    """Returns how long the caller was stalled, when what it began is committed."""
    begun = time.perf_counter()
    handle = begin()
    stalled = time.perf_counter() - begun
    handle.result()
    return stalled


def consolidate(state: State, path: Path) -> float:
    """All ranks write files of their own, from which the first one then puts the final ones
    together. The caller waits for all of it.
    """
    begun, files, nbytes = time.perf_counter(), dict[str, int](), 0
    for name, tensor in state.items():
        files[name] = 1 + nbytes // FILE_BYTES
        nbytes += tensor.numel() * DTYPE.itemsize
    writer = dcp.HuggingFaceStorageWriter(
        str(path),
        fqn_to_index_mapping=files,
        save_distributed=True,
        enable_consolidation=True,
        thread_count_consolidation=4,
    )
    dcp.save(converted(state), storage_writer=writer)
    return time.perf_counter() - begun


WAYS: dict[str, Callable[[State, Path], float]] = {
    "save": save,
    "export": export,
    "torch": consolidate,
}


class Bench(RankBench):
    """One rank of the benchmark."""

    share = DTYPE.itemsize / 4

    def round(self, number: int) -> bool:
        """The order of the ways is turned around every other round."""
        right = True
        for name in WAYS if number % 2 else reversed(WAYS):
            path = self.directory / f"{name}-{number}"
            state = get_model_state_dict(self.model)
            if name == "save":
                state = converted(state)
            self.meet()
            cpu_s, begun = time.process_time(), time.perf_counter()
            stalled = WAYS[name](state, path)
            dist.barrier()
            if name == "torch" and self.rank == 0:
                fsync_tree(path)
            committed = time.perf_counter() - begun
            cpu_s = time.process_time() - cpu_s
            self.note(name, number, stall_s=stalled, committed_s=committed, cpu_s=cpu_s)
            if name != "save":
                right = self.holds_own(state, path) and right
            self.discard(path)
        return right

    def holds_own(self, state: State, directory: Path) -> bool:
        """Whether the files hold what this rank does, bit by bit."""
        right, found = True, 0
        for path in directory.glob("*.safetensors"):
            with safetensors.safe_open(str(path), "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    tensor, found = state[name], found + 1
                    local = tensor.to_local().to(DTYPE)
                    begin = -(-tensor.shape[0] // dist.get_world_size()) * self.rank
                    part = file.get_slice(name)[begin : begin + len(local)]
                    right = right and torch.equal(part.view(torch.int16), local.view(torch.int16))
        return right and found == len(state)


def lines_of(rows: list[Row], right: bool) -> list[Line]:
    """What was measured against what it has to be."""
    lines = [
        against(rows, "committed", "export", "torch", "committed_s", "written_s"),
        against(rows, "the call", "export", "torch", "stall_s"),
        against(rows, "CPU seconds of all ranks", "export", "torch", "cpu_s"),
        # It reads, converts and checks twice the bytes, so no bar.
        against(rows, "committed, beside a save", "export", "save", "committed_s", times=None),
    ]
    every = "the files hold the masters, rounded, bit by bit; torch's, too"
    return [*lines, holds(every, right)]


if __name__ == "__main__":
    sys.exit(measure("export", "Benchmark exports to Hugging Face.", 8.0, Bench, lines_of))
