"""What all measurements on a GPU share: the device, the sizes, the disk and its limits, the peers.

What is costly is made when it is first asked for. It must not know what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ceiling import Cell, EngineIo, Fio
from gpu_device import Device
from gpu_peers import open_peers
from rank_bars import Line
from report import median_of
from rivals.peer import Peer
from state import State, gpt_state
from storage import drop_page_cache

Row = dict[str, Any]
ONE_CELL: Cell = {"block_mib": 1, "depth": 1, "engine": "psync", "direct": True}


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
        progress: told what was just done.
        missing: what was not measured, and why.
        failures: what went wrong.
    """

    device: Device
    nbytes: int
    rounds: int
    every: int
    step_s: float
    directory: Path
    progress: Callable[[str], None]
    missing: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @cached_property
    def state(self) -> State:
        """The state that is saved where nothing is trained."""
        return gpt_state(self.nbytes, device=self.device.device)

    @cached_property
    def peers(self) -> list[Peer]:
        """The peers that run here."""
        peers, missing = open_peers(self.device, self.progress)
        self.missing |= missing
        return peers

    @cached_property
    def ceiling(self) -> Fio | EngineIo:
        """fio's best cells here, scanned once; without fio those of the bare engine."""
        reason = Fio.reason_missing()
        if reason is not None:
            self.missing["fio"] = f"{reason}: {EngineIo.name} sets the limit"
            engine = EngineIo(self.directory, self.nbytes, self.progress)
            engine.scan()
            return engine
        fio = Fio(self.directory, self.nbytes, self.progress)
        if self.device.judged:
            fio.scan()
        else:  # one cell is enough to see that all is called
            fio.write_cells = fio.timed("write", self.nbytes, [ONE_CELL])
            fio.read_cells = fio.timed("read", self.nbytes, [ONE_CELL])
        return fio

    def disk(self, *, reading: bool) -> Row:
        """Return the bytes a second that the disk can do just now: write_bps, and read_bps if asked
        for, where they could be measured.
        """
        found = self.ceiling.measure(reading)
        write = found.pop("write")
        speeds = {"write_bps": write, "read_bps": max(found.values(), default=0.0)}
        return {key: speed for key, speed in speeds.items() if speed}

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


def middle(rows: list[Row], key: str) -> float:
    """Return the median of a column that every row has."""
    value = median_of(rows, key)
    assert value is not None, key
    return value
