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
from pathlib import Path
from typing import Any

import torch

from fastckpt.cli.bench.state import flat_tensors, gpt_state
from rivals.peer import Peer, Save, State, already

SAVES = 3  # of a process; the last is measured
PART_BYTES, CONCURRENCY = 8 << 20, 16


class FastckptSteps(Peer):
    """fastckpt's Checkpointer.

    Args:
        options: storage_options; None: the target is a directory.
        root: of the URL.
    """

    contract = "background; may mutate on return"
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
        return Save(already, handle.result)

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
        return Save(already, already)

    def load(self, target: Path, template: State) -> Any:
        raise NotImplementedError


def one_turn(peer: Peer, nbytes: int, directory: Path) -> dict[str, float]:
    """Saves a state; returns the clocks of the last save, and the CPU seconds that it took."""
    torch.set_num_threads(1)
    state, row = gpt_state(nbytes), dict[str, float]()
    with peer.opened():
        for turn in range(SAVES):
            cpu_s, begun = time.process_time(), time.perf_counter()
            save = peer.save(state, directory / f"save-{turn}")
            save.wait_staged()
            stalled = time.perf_counter() - begun
            save.wait_durable()
            committed = time.perf_counter() - begun
            used = time.process_time() - cpu_s
            row = {"stall_s": stalled, "committed_s": committed, "cpu_s": used}
    return row
