"""One rank of `fastckpt bench ranks`, in a process of its own that ends when its parent does.

The module must not know how the other ranks fare.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import fastckpt
from fastckpt.cli.bench.machine import removed
from fastckpt.cli.bench.saves import stock_load
from fastckpt.cli.bench.state import differing, gpt_state, nbytes_of

c10d: Any = dist  # stores, of which torch's type hints say too little
DONE = "rounds done"  # a key of the store


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # sys.stdin.read() would hold a lock that exit needs
    os._exit(1)


def _rounds(rank: int, size: int, rounds: int, timeout_s: float, path: Path, store: Any) -> Any:
    state, rows, wrong = gpt_state(size), [], set()
    for number in range(-1, rounds):  # the first takes memory that later ones use again
        for together in (True, False) if number % 2 else (False, True):
            row: dict[str, Any] = {"together": together, "blocked_s": 0.0, "durable_s": 0.0}
            gc.collect()
            dist.barrier()
            if together or rank == 0:
                group = dist.group.WORLD if together else None
                begun = time.perf_counter()
                handle = fastckpt.save(state, path, group=group, timeout_s=timeout_s)
                row["blocked_s"] = time.perf_counter() - begun
                handle.result()
                row["durable_s"] = time.perf_counter() - begun
            dist.barrier()
            if rank == 0:
                wrong |= {*differing(stock_load(path, "cpu"), state)}
                removed(path)
                store.add(DONE, 1)
            if number >= 0:
                rows.append(row)
    return {"nbytes": nbytes_of(state), "rows": rows, "wrong": sorted(wrong)}


def main() -> None:
    """Reads from sys.argv its number, how many ranks there are, the port of their store, the size,
    the rounds, the bound in seconds, and the path; prints as JSON what it measured.
    """
    rank, ranks, port, size, rounds = map(int, sys.argv[1:6])
    timeout_s, path = float(sys.argv[6]), Path(sys.argv[7])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    timeout = timedelta(seconds=timeout_s)
    store = c10d.TCPStore("127.0.0.1", port, ranks, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    found = _rounds(rank, size, rounds, timeout_s, path, store)
    dist.barrier()  # the store's clients of the others are at rest
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)
