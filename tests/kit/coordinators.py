"""Coordinators of ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastckpt.ranks.coordinator import Coordinator, MemoryStore
from fastckpt.ranks.round import Round

PREFIX = "agreement"
LONG_S = 600.0  # a wait that should end for another reason: the test's own timeout is shorter


class Died(Exception):
    """What a rank fails with here."""


def tcp_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class CountedStore(MemoryStore):
    """A store that says how many keys it has, as torch's do."""

    def num_keys(self) -> int:
        return len(self._values)


STORES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda _: CountedStore(),
    "hash": lambda _: dist.HashStore(),
    "tcp": lambda _: tcp_store(),
    "file": lambda path: dist.FileStore(str(path / "store"), 3),
    "prefix": lambda _: dist.PrefixStore("outer", dist.PrefixStore("inner", tcp_store())),
}


def opened(store: dist.Store, world_size: int) -> list[Coordinator]:
    return [Coordinator(store, rank, world_size, PREFIX) for rank in range(world_size)]


def together(*bodies: Callable[[], Any]) -> list[Any]:
    """Runs each on a thread of its own; returns what each returned or raised."""

    def outcome(body: Callable[[], Any]) -> Any:
        try:
            return body()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(outcome, bodies))


def on_each(
    coordinators: list[Coordinator],
    body: Callable[[Round], Any],
    label: str = "step 100",
    timeout_s: float = LONG_S,
) -> list[Any]:
    """One round of all ranks; returns what body returned or raised on each."""

    def take_part(coordinator: Coordinator) -> Any:
        begun = coordinator.begin(label, timeout_s)
        try:
            return body(begun)
        except Died as error:
            begun.fail(error)
            raise
        finally:
            begun.close()

    return together(*[lambda c=c: take_part(c) for c in coordinators])
