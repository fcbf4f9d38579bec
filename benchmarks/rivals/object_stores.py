"""fastckpt to an object store and to a directory, and obstore alone with the same bytes.

fastckpt saves a step of a Checkpointer, the one before being removed. obstore, its client, is given
the bytes of the tensors as they lie, in parts of as many bytes; the caller may change the state
when all are there.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = []
# ///

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from saving import blank_like

from fastckpt.cli.bench.benchmark import before_clock
from fastckpt.cli.bench.saves import Save, State, flat_tensors, gpt_state, nbytes_of, nothing
from rivals.peer import Peer

SAVES, LOADS = 3, 2  # of a process; the last is measured
IDLE_S, IDLE_CPU_S, IDLE_WAITS = 0.05, 0.002, 100
PART_BYTES, CONCURRENCY = 8 << 20, 16


class FastckptSteps(Peer):
    """fastckpt's Checkpointer.

    Args:
        options: storage_options; None: the target is a directory.
        root: of the URL.
    """

    contract = "background; the state may change on return"
    background = keeps_fence = fills_template = True
    modules = ("fastckpt",)

    def __init__(self, name: str, options: dict[str, Any] | None, root: str) -> None:
        self.name, self._options, self._root = name, options, root
        self._step = 0

    def save(self, state: State, target: Path) -> Save:
        import fastckpt

        if not self._step:
            where = target.parent / "run" if self._options is None else self._root
            opened = fastckpt.Checkpointer(where, storage_options=self._options, keep_last=1)
            self._saver = self.held.enter_context(opened)
        self._step += 1
        handle = self._saver.save(self._step, state)
        return Save(nothing, handle.result)

    def load(self, target: Path, template: State) -> Any:
        self._saver.restore(template)
        return template


class Obstore(Peer):
    """obstore.put of the bytes of a state, without a copy, a checksum or a name that is atomic."""

    name = "obstore"
    contract = "sync; the bytes alone"
    modules = ("obstore",)

    def __init__(self, bucket: str, options: dict[str, Any], prefix: str) -> None:
        self._bucket, self._options, self._prefix = bucket, options, prefix

    def save(self, state: State, target: Path) -> Save:
        import obstore
        from obstore.store import S3Store

        def parts() -> Iterator[memoryview]:
            for tensor in flat_tensors(state).values():
                octets = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
                for begin in range(0, len(octets), PART_BYTES):
                    yield octets[begin : begin + PART_BYTES]

        store = S3Store(self._bucket, unsigned_payload=True, **self._options)
        key = f"{self._prefix}/{target.name}"
        obstore.put(store, key, parts(), chunk_size=PART_BYTES, max_concurrency=CONCURRENCY)
        return Save(nothing, nothing)

    def load(self, target: Path, template: State) -> Any:
        """Gets the bytes, several ranges at a time, and drops them."""
        import obstore
        from obstore.store import S3Store

        store = S3Store(self._bucket, **self._options)
        get = partial(obstore.get_range, store, f"{self._prefix}/{target.name}")
        nbytes = nbytes_of(template)
        with ThreadPoolExecutor(CONCURRENCY) as threads:
            begins = range(0, nbytes, PART_BYTES)
            parts = [threads.submit(get, start=at, length=PART_BYTES) for at in begins]
            assert sum(len(part.result()) for part in parts) == nbytes
        return template


def settle() -> None:
    """Waits until this process is idle: after its first save, fastckpt takes the pages that later
    saves stage in, which a process pays for once.
    """
    for _ in range(IDLE_WAITS):
        cpu_s = time.process_time()
        time.sleep(IDLE_S)
        if time.process_time() - cpu_s < IDLE_CPU_S:
            return


def one_turn(peer: Peer, nbytes: int, directory: Path, loads: bool) -> dict[str, float]:
    """Saves a state, and loads it if asked to; returns the clocks of the last save and load, and
    the CPU seconds that each took.
    """
    torch.set_num_threads(1)
    state, row = gpt_state(nbytes), dict[str, float]()
    with peer.opened():
        for turn in range(SAVES):
            settle()
            before_clock(nbytes)
            cpu_s, begun = time.process_time(), time.perf_counter()
            save = peer.save(state, directory / f"save-{turn}")
            save.wait_staged()
            stalled = time.perf_counter() - begun
            save.wait_durable()
            committed = time.perf_counter() - begun
            used = time.process_time() - cpu_s
            row = {"stall_s": stalled, "committed_s": committed, "cpu_s": used}
        template = blank_like(state) if loads else {}
        for _ in range(LOADS if loads else 0):
            settle()
            before_clock(nbytes)
            cpu_s, begun = time.process_time(), time.perf_counter()
            peer.load(directory / f"save-{SAVES - 1}", template)
            row["load_s"] = time.perf_counter() - begun
            row["load_cpu_s"] = time.process_time() - cpu_s
    return row
