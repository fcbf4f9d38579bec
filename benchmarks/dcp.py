"""The benchmark of torch.distributed.checkpoint: torch's own saver and reader against fastckpt's.

    torchrun --standalone --nproc-per-node 2 benchmarks/dcp.py --size 2 --rounds 5 --dir /mnt/nvme

Every save is durable: what torch does not sync is synced here and charged. Loads are cold. It must
not know how anything is saved.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Line, Row, holds
from rank_bench import RankBench, against, measure
from storage import drop_page_cache, fsync_tree
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fastckpt import SaveOptions
from fastckpt.integrations import dcp as ours

State = dict[str, Any]
Save = Callable[[State, Path], Any]

# What each saver and reader is called, and how it is; torch's come first.
ASYNC: dict[str, Save] = {
    "torch async": lambda state, path: dcp.async_save(state, checkpoint_id=path),
    "fastckpt async": lambda state, path: ours.async_save(state, checkpoint_id=path),
    "fastckpt step": lambda state, path: ours.async_save(
        state, checkpoint_id=path, options=SaveOptions(fence="step")
    ),
}
SYNC: dict[str, Save] = {
    "torch save": lambda state, path: dcp.save(state, checkpoint_id=path),
    "Writer": lambda state, path: dcp.save(state, storage_writer=ours.Writer(path)),
}
OWN, THEIRS = "fastckpt loads its own", "torch loads torch's"
DURABLE, READ = ("committed_s", "written_s"), ("loaded_s", "read_s")  # with their limits
READERS: dict[str, Any] = {"torch": dcp.FileSystemReader, "fastckpt": ours.Reader}


class Bench(RankBench):
    """One rank of the benchmark."""

    def state(self) -> State:
        """What is saved: the model, and some of what a training loop has besides."""
        extra = {"step": 1000, "lr": 3e-4, "betas": [0.9, 0.95], "name": "bench"}
        return {"model": get_model_state_dict(self.model), "train": extra}

    def save(self, name: str, number: int) -> Path:
        """Saves in one way, and notes what it took."""
        path = self.directory / f"{name.replace(' ', '-')}-{number}"
        state, save = self.state(), (ASYNC | SYNC)[name]
        self.meet()
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
        self.note(name, number, stall_s=stalled, committed_s=committed, cpu_s=cpu_s)
        return path

    def load(self, name: str, reader: str, path: Path, number: int) -> bool:
        """Loads what was saved, cold, and notes what it took; says whether it is what was saved."""
        state = self.state()
        expected = {key: value.to_local().clone() for key, value in state["model"].items()}
        for value in state["model"].values():
            value.to_local().zero_()
        if self.rank == 0:
            drop_page_cache(path)
        self.meet()
        begun = time.perf_counter()
        dcp.load(state, storage_reader=READERS[reader](path))
        self.note(name, number, loaded_s=time.perf_counter() - begun)
        same = True
        for key, value in state["model"].items():
            same = same and torch.equal(value.to_local(), expected[key])
            value.to_local().copy_(expected[key])
        return same

    def round(self, number: int) -> bool:
        """The order of the ways is turned around every other round."""
        names, paths = [*ASYNC, *SYNC], dict[str, Path]()
        for name in names if number % 2 else reversed(names):
            path = self.save(name, number)
            if name in ("torch async", "fastckpt async", "Writer"):
                paths[name] = path
            else:
                self.discard(path)
        loads = [
            (THEIRS, "torch", paths["torch async"]),
            (OWN, "fastckpt", paths["fastckpt async"]),
            ("fastckpt loads torch's", "fastckpt", paths["torch async"]),
            ("torch loads Writer's", "torch", paths["Writer"]),
        ]
        turned = loads if number % 2 else loads[::-1]
        right = [self.load(name, reader, path, number) for name, reader, path in turned]
        for path in paths.values():
            self.discard(path)
        return all(right)


def lines_of(rows: list[Row], right: bool) -> list[Line]:
    """What was measured against what it has to be."""
    bars = (
        ("async_save: stall", "fastckpt async", "torch async", "stall_s", "copied_s"),
        ("async_save: committed", "fastckpt async", "torch async", *DURABLE),
        ("async_save: CPU seconds of all ranks", "fastckpt async", "torch async", "cpu_s"),
        ("async_save, step fence: call", "fastckpt step", "torch async", "stall_s"),
        ("async_save, step fence: committed", "fastckpt step", "torch async", *DURABLE),
        ("dcp.save with Writer: committed", "Writer", "torch save", *DURABLE),
        ("dcp.load with Reader, its own: cold", OWN, THEIRS, *READ),
        ("dcp.load with Reader, torch's: cold", "fastckpt loads torch's", THEIRS, *READ),
    )
    every = "every load gave back what was saved, bit by bit; torch's of Writer's too"
    return [*(against(rows, *bar) for bar in bars), holds(every, right)]


if __name__ == "__main__":
    what = "Benchmark torch.distributed.checkpoint."
    sys.exit(measure("dcp", what, 2.0, Bench, lines_of))
