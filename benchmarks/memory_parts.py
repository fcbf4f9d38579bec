"""What the benchmark of memory has processes do: save steps there, train beside that, and restore.

It takes the times, and must not know what they are held against.
"""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from ceiling import copy_s, socket_s
from harness import Row
from storage import drop_page_cache

from fastckpt import Checkpointer, Memory, SaveOptions
from fastckpt.cli.bench.machine import touch_memory

MIB = 1 << 20
SETTLE_S = 0.05  # from a commit to the end of what retention does after it
WARM_UPS = 7  # saves: three into new memory, and the first ones into that of each of them
SAVES = 5
STEPS = 8  # of training, in a window


def spent() -> float:
    """Return the CPU seconds of this process, its threads included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def state_of(nbytes: int, tensors: int = 8) -> dict[str, torch.Tensor]:
    """Return tensors of so many bytes together, all of which have their pages."""
    return {f"w{at}": torch.full((max(1, nbytes // 4 // tensors),), 1.0) for at in range(tensors)}


def taken_in(directory: Path) -> int:
    """Return the memory that files of a directory on a tmpfs take."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            pass  # removed meanwhile
    return total


@contextmanager
def watched(directory: Path) -> Iterator[list[int]]:
    """Yield a list of one number, the most memory that files in a directory take meanwhile."""
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            most[0] = max(most[0], taken_in(directory))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def memory(directory: Path, budget: int, **options: Any) -> Memory:
    """Return a memory whose steps stay there, unless the options say otherwise."""
    return Memory(directory=directory, **{"budget": budget, "root_every": 10**6, **options})


def steps(nbytes: int, local: Path | None, root: Path, fence: str) -> Row:
    """Save steps to memory, or without a directory there to the root; medians of the last ones."""
    state, budget, rows = state_of(nbytes), 4 * nbytes + 64 * MIB, []
    most = [0]
    if local is not None:
        local.mkdir()
    tier = {} if local is None else {"local": memory(local, budget)}
    with Checkpointer(root, keep_last=2, options=SaveOptions(fence=fence), **tier) as saving:
        for step in range(WARM_UPS + SAVES):
            touch_memory(2 * nbytes if local is None or step < WARM_UPS else MIB)
            for tensor in state.values():
                tensor.add_(1.0)
            begun_cpu, begun = spent(), time.perf_counter()
            handle = saving.save(step, state)
            handle.wait_staged()
            staged_s = time.perf_counter() - begun
            stats = handle.result()
            rows.append(
                {
                    "committed_s": time.perf_counter() - begun,
                    "cpu_s": spent() - begun_cpu,
                    "staged_s": staged_s,
                    "stall_s": stats.stall_s,
                    "is_one_copy": stats.why.endswith("copied straight into the file"),
                }
            )
            time.sleep(SETTLE_S)
            if local is not None:
                most[0] = max(most[0], taken_in(local))
    last = rows[WARM_UPS:]
    found: Row = {key: median(row[key] for row in last) for key in last[0]}
    found["of_budget"] = most[0] / budget
    return found | {"is_one_copy": all(row["is_one_copy"] for row in last)}


class Workload:
    """Training of a given length on one thread, whose optimizer changes a state of `nbytes`."""

    def __init__(self, nbytes: int, step_s: float) -> None:
        torch.set_num_threads(1)
        self.state = state_of(nbytes)
        for tensor in self.state.values():
            tensor.requires_grad_(True)
            tensor.grad = torch.ones(1).expand_as(tensor)
        self._optimizer = torch.optim.SGD([*self.state.values()], lr=1e-3)
        self._matrix, self._products = torch.randn(512, 512), 1
        self.step()
        begun = time.perf_counter()
        for _ in range(20):
            torch.mm(self._matrix, self._matrix)
        product_s = (time.perf_counter() - begun) / 20
        begun = time.perf_counter()
        self._optimizer.step()
        left_s = step_s - (time.perf_counter() - begun)
        self._products = max(1, round(left_s / product_s))

    def step(self) -> None:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)
        self._optimizer.step()


def training(nbytes: int, step_s: float, local: Path, root: Path, rounds: int) -> Row:
    """Train with a save of each step and without, in turns; what is lost is of each turn."""
    work, lost, quiet, step = Workload(nbytes, step_s), [], [], 0
    cpu, copied = [], []
    local.mkdir()
    with Checkpointer(
        root, local=memory(local, 4 * nbytes + 64 * MIB), options=SaveOptions(fence="step")
    ) as saving:
        for number in range(rounds + 1):  # the first takes memory
            touch_memory(2 * nbytes)
            begun, begun_cpu = time.perf_counter(), spent()
            for _ in range(STEPS):
                work.step()
            without_s = (time.perf_counter() - begun) / STEPS
            own_cpu_s = spent() - begun_cpu
            touch_memory(2 * nbytes)
            begun, begun_cpu = time.perf_counter(), spent()
            for _ in range(STEPS):
                handle = saving.save(step, work.state)
                step += 1
                work.step()
            with_s = (time.perf_counter() - begun) / STEPS
            stats = handle.result()
            copied.append(stats.why.endswith("copied straight into the file"))
            if number:
                lost.append(with_s / without_s - 1.0)
                quiet.append(without_s)
                cpu.append((spent() - begun_cpu - own_cpu_s) / STEPS)
            time.sleep(SETTLE_S)
    return {
        "lost": lost,
        "step_s": median(quiet),
        "cpu_s": median(cpu),
        "is_one_copy": all(copied[1:]),
    }


def restores(nbytes: int, local: Path, root: Path, rounds: int) -> list[Row]:
    """Restore a step from memory and, with nothing of it in the page cache, from the root."""
    state = state_of(nbytes)
    local.mkdir()
    tier = memory(local, 2 * nbytes + 64 * MIB, keep=1, root_every=1)
    with Checkpointer(root, local=tier) as saving:
        saving.save(1, state).result()
    rows = []
    for number in range(rounds):
        row: Row = {"round": number, "copy": copy_s(nbytes)}
        for way in ("own memory", "root"):
            touch_memory(2 * nbytes)
            if way == "root":
                drop_page_cache(root)
            with Checkpointer(root, local=tier if way == "own memory" else None) as restoring:
                begun_cpu, begun = spent(), time.perf_counter()
                assert restoring.restore(state) == 1
                row |= {way: time.perf_counter() - begun, f"{way}, CPU": spent() - begun_cpu}
                taken = {
                    os.path.commonpath([path, local]) for path in restoring.restored_from.values()
                }
            assert (taken == {str(local)}) is (way == "own memory")
        rows.append(row)
    return rows


# ---- on each of several ranks, whose nodes are directories


def peer_copies(locals_: list[Path], root: Path, nbytes: int) -> Row:
    """Save steps; returns the CPU seconds here from each commit on until the neighbour has it."""
    state, local = state_of(nbytes), locals_[dist.get_rank()]
    local.mkdir(exist_ok=True)
    rows = []
    with Checkpointer(root, local=memory(local, 4 * nbytes + 64 * MIB, keep=1)) as saving:
        for step in range(WARM_UPS):
            handle = saving.save(step, state)
            handle.wait_local()
            dist.barrier()
            begun_cpu, begun = spent(), time.perf_counter()
            assert handle.wait_memory(300)
            handle.result()
            dist.barrier()
            rows.append({"cpu_s": spent() - begun_cpu, "s": time.perf_counter() - begun})
            time.sleep(SETTLE_S)
    shutil.rmtree(local)
    last = rows[WARM_UPS // 2 :]
    return {key: median(row[key] for row in last) for key in last[0]}


def peer_restores(locals_: list[Path], root: Path, nbytes: int, rounds: int) -> list[Row]:
    """Restore after the second node was lost, and, with nothing in the page cache, from the root;
    the seconds are those of the slowest rank.
    """
    rank, state = dist.get_rank(), state_of(nbytes)
    local = locals_[rank]
    local.mkdir(exist_ok=True)
    tier = memory(local, 2 * nbytes + 64 * MIB, keep=1, root_every=1)
    with Checkpointer(root, local=tier) as saving:
        saving.save(1, state).result()
    rows = []
    for number in range(rounds):
        row: Row = {"round": number, "socket": socket_s(nbytes) if rank == 0 else 0.0}
        for way in ("peer", "root"):
            touch_memory(nbytes)
            if rank == 1:
                for path in local.iterdir():
                    shutil.rmtree(path)
            if way == "root" and rank == 0:
                drop_page_cache(root)
            with Checkpointer(root, local=tier if way == "peer" else None) as restoring:
                dist.barrier()
                begun = time.perf_counter()
                assert restoring.restore(state) == 1
                took = torch.tensor([time.perf_counter() - begun])
                taken = [*restoring.restored_from.values()]
            assert any(path.startswith(str(root)) for path in taken) is (way == "root"), taken
            dist.all_reduce(took, dist.ReduceOp.MAX)
            row[way] = float(took)
        rows.append(row)
    shutil.rmtree(local)
    return rows
