"""A peer: one way to save a state below a directory and to load it back.

It says what its call promises on return, and which modules it needs. It must not know what is being
timed: it only saves, waits and loads.
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from storage import fsync_tree as fsync_tree  # for those whose library does not sync

from fastckpt.cli.bench.saves import Save, State


class Peer(ABC):
    """One way to save a state below a directory and to load it back.

    Attributes:
        name: in the results, where it must stay what it was.
        contract: what its call promises on return, in a few words.
        background: its call returns before the bytes are durable.
        keeps_fence: nothing has to be called before the state changes; what needs a call else is
            what Save.wait_staged does.
        fills_template: it loads into tensors that are given to it.
        loads_only: what it loads is saved by another one, whose times are none of its own.
        modules: that it imports.
    """

    name: str
    contract: str
    background = False
    keeps_fence = False
    fills_template = False
    loads_only = False
    modules: tuple[str, ...] = ()

    def load_modules(self) -> None:
        """Import what this peer needs."""
        for module in self.modules:
            importlib.import_module(module)

    def open(self) -> None:
        """Prepare whatever outlives one save. Called once, before the first."""
        self.held = contextlib.ExitStack()

    @abstractmethod
    def save(self, state: State, target: Path) -> Save:
        """Save `state` below the empty directory `target`; returns when the peer's call does."""

    @abstractmethod
    def load(self, target: Path, template: State) -> Any:
        """Load what `save` wrote. `template` has the state's structure, for loads in place."""

    def close(self) -> None:
        """Release what `open` prepared."""
        self.held.close()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Import and open the peer, and close it at the end."""
        self.load_modules()
        self.open()
        try:
            yield
        finally:
            self.close()


def try_out(peer: Peer) -> None:
    """Open a peer and close it again; raises what keeps it from running here."""
    with peer.opened():
        pass
