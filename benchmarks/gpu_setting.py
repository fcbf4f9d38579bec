"""What all measurements on a GPU share: the device, the sizes, the disk and its limits, the peers.

What is costly is made when it is first asked for. It must not know what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ceiling import Ceiling
from gpu_device import Cuda
from gpu_peers import open_peers
from harness import Line, Row
from rivals.peer import Peer, State
from storage import drop_page_cache

from fastckpt.cli.bench.state import gpt_state


@dataclass
class Measured:
    """What one part found: rows as they were measured, lines of bars, tables side by side."""

    rows: Any
    lines: list[Line]
    tables: list[str] = field(default_factory=list)


@dataclass
class Here:
    """Where and how much is measured.

    Attributes:
        device: that holds the state.
        nbytes: of the state, and about of the one that is trained.
        rounds: how often.
        every: training steps from one save to the next.
        step_s: how long a training step is made, at least.
        directory: on the file system to measure.
        missing: what was not measured, and why.
        failures: what went wrong.
    """

    device: Cuda
    nbytes: int
    rounds: int
    every: int
    step_s: float
    directory: Path
    missing: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @cached_property
    def state(self) -> State:
        """The state that is saved where nothing is trained."""
        return gpt_state(self.nbytes, device=self.device.device)

    @cached_property
    def peers(self) -> list[Peer]:
        """The peers that run here."""
        peers, missing = open_peers(self.device)
        self.missing |= missing
        return peers

    @cached_property
    def ceiling(self) -> Ceiling:
        """What the disk can do, scanned once; without a GPU one cell is enough."""
        found = Ceiling(self.directory, self.nbytes, quick=not self.device.judged)
        if found.missing:
            self.missing["fio"] = found.missing
        return found

    def disk(self, *, reading: bool) -> Row:
        """Return the bytes a second that the disk can do now: write_bps, and read_bps if asked."""
        return {f"{key}_bps": rate for key, rate in self.ceiling.measure(reading).items()}

    def cool(self, path: Path) -> str:
        """Empty the page cache before a load; returns how."""
        if not self.device.judged:  # a test does not slow down the machine it runs on
            return "not emptied"
        return drop_page_cache(path)

    def release(self) -> None:
        """Free the state; another is made when it is asked for."""
        self.__dict__.pop("state", None)

    def close(self) -> None:
        """Free the state and what the peers hold."""
        self.release()
        for peer in self.__dict__.pop("peers", []):
            peer.close()
