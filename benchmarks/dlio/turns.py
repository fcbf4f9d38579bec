"""One DLIO run in which torch.save and fastckpt take turns, checkpoint by checkpoint.

It has clocks of its own, since DLIO's would count what lies between turns: older files are removed,
what is read is dropped from the page cache, and memory is touched, since a virtual machine may
have given it back to its host. Must not know what the clocks are held against.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing

import fastckpt
from dlio.mechanisms import Fastckpt, FastckptBehind
from fastckpt.cli.bench.benchmark import rotated
from fastckpt.cli.bench.machine import make_cold, removed, touch_memory
from fastckpt.cli.bench.saves import differing, nbytes_of

OWN, OURS = "torch.save", "fastckpt"
WAYS = (OWN, OURS)


class Turns(Fastckpt):
    """A mechanism that is DLIO's own, synced, and fastckpt's in turns; each loads its own files."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[dict[str, Any]] = []
        self._way, self._round = "", 0
        self._files: dict[str, dict[str, Any]] = {way: {} for way in WAYS}  # with their states
        self._step = dict.fromkeys(WAYS, 0)
        self._nbytes = nbytes_of([self.layer_state or {}, self.optimization_state or {}])

    def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:
        """Write or begin one file."""
        self._files[self._way][self.get_name(suffix)] = state
        if self._way == OWN:
            PyTorchCheckpointing.save_state(self, suffix, state, True)
        else:
            super().save_state(suffix, state, fsync)

    def load_state(self, suffix: str, state: Any) -> None:
        """Read one file."""
        of = PyTorchCheckpointing if self._way == OWN else FastckptBehind
        of.load_state(self, suffix, state)

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        """Write a checkpoint and take its clocks."""
        self._turn(step_number)
        for file in self._files[self._way]:
            removed(Path(file))
        self._files[self._way], self._step[self._way] = {}, step_number
        self._rest(1)
        begun = time.perf_counter()
        FastckptBehind.save_checkpoint(self, epoch, step_number)
        blocked_s = time.perf_counter() - begun
        self.wait()
        self._row("write", blocked_s=blocked_s, seconds=time.perf_counter() - begun)

    def load_checkpoint(self, epoch: int, step_number: int) -> None:
        """Read the newest checkpoint of a way and take the clock."""
        self._turn(step_number)
        for file in self._files[self._way]:
            make_cold(Path(file))
        self._rest(2)
        begun = time.perf_counter()
        super().load_checkpoint(epoch, self._step[self._way])
        self._row("read", seconds=time.perf_counter() - begun)

    def finalize(self) -> None:
        """Compare the bytes of all files by both loaders, and write what was found."""
        wrong = {
            f"{Path(file).name} of {way} by {load.__module__}.{load.__name__}": names[:3]
            for way in WAYS
            for file, state in self._files[way].items()
            for load in (torch.load, fastckpt.load)
            if (names := differing(load(file), state))
        }
        found = {"rows": self._rows, "nbytes": self._nbytes, "wrong": wrong}
        found["files"] = len(self._files[OURS])
        out = Path(self.args.output_folder) / f"turns-{self.comm.rank}.json"
        out.write_text(json.dumps(found))
        super().finalize()

    def _turn(self, step_number: int) -> None:
        self._round, place = divmod(step_number - 1, len(WAYS))
        self._way = rotated(WAYS, self._round)[place]

    def _rest(self, copies: int) -> None:
        """Come to rest on all ranks, with memory for so many copies of the state: page cache, and
        what is loaded. It is touched last, as a host takes it back in seconds.
        """
        self.comm.barrier()
        if self.comm.rank == 0:
            os.sync()
        self.comm.barrier()
        touch_memory(copies * self._nbytes)
        self.comm.barrier()

    def _row(self, what: str, **clocks: float) -> None:
        row = {"what": what, "way": self._way, "round": self._round, **clocks}
        self._rows.append(row | {"load": os.getloadavg()[0]})
