"""`fastckpt bench io`: measures how fast the engine alone and fio write and read a file, by
backend, block size and queue depth.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fastckpt.arguments.quantities import shown_rate, shown_size
from fastckpt.cli.bench import fio
from fastckpt.cli.bench.benchmark import Command, Result, in_turn, shown_rounds, table
from fastckpt.cli.bench.machine import make_cold, removed
from fastckpt.cli.progress import progress
from fastckpt.engine.timed_engine import Cell, TimedEngine
from fastckpt.errors import BackendUnavailable, CheckpointError
from fastckpt.saving import pipeline

_MIB = 1 << 20
BLOCKS = [count * _MIB for count in (1, 2, 4, 8, 16)]
DEPTHS = [1, 4, 8, 16, 32]
QUICK_BLOCKS, QUICK_DEPTHS = [2 * _MIB, 8 * _MIB], [4, 16]
OPERATIONS = ("write", "read")
FIO = "fio"
Rates = dict[str, float]  # bytes per second by operation


class Grid:
    """The cells that are measured in a directory, and fastckpt's default cell.

    Attributes:
        points: lists of cells with the same block size and queue depth, which take turns.
        defaults: the default cell of each operation.
        notes: the reasons why something could not be measured.
    """

    def __init__(self, own: Path, blocks: list[int], depths: list[int]) -> None:
        self.notes: list[str] = []
        self.defaults: dict[str, Cell] = {}
        self._backends = ["io_uring", "threads", FIO]
        self._probe(str(own / "probe"))
        if refusal := self._refusal_of_fio(own / "probe"):
            self._backends.remove(FIO)
            self.notes.append(refusal)
        self.points = [
            [Cell(backend, block, depth, self._direct) for backend in self._backends]
            for block in blocks
            for depth in depths
        ]
        there = {cell for point in self.points for cell in point}
        self.points += [[cell] for cell in {*self.defaults.values()} - there]

    def _probe(self, path: str) -> None:
        """Finds the backends that work, whether O_DIRECT works, and the defaults of saves and
        loads.
        """
        current = pipeline.current()
        route, fd = current.staging.route, current.storage.create(path, 0o600)
        try:
            current.storage.allocate(fd, _MIB)
            try:
                route(fd, path, "io_uring", writing=True)
            except BackendUnavailable as error:
                self._backends.remove("io_uring")
                self.notes.append(str(error))
            for operation in OPERATIONS:
                own = route(fd, path, "auto", writing=operation == "write")
                self.defaults[operation] = Cell.of(own)
            refusal = current.storage.set_direct(fd, writing=True)
            if refusal is not None:
                self.notes.append(f"{refusal}, so all measurements use buffered I/O")
            self._direct = refusal is None
        finally:
            current.storage.close(fd)
            os.unlink(path)

    def _refusal_of_fio(self, path: Path) -> str:
        if not fio.version():
            return "fio is not on PATH, so there is nothing to compare with"
        try:
            fio.rate("write", path, _MIB, Cell(FIO, _MIB, 1, self._direct))
        except OSError as error:
            return str(error)
        finally:
            path.unlink(missing_ok=True)
        return ""


class Transfers:
    """The file that is written and read, with its source and target memory."""

    def __init__(self, own: Path, nbytes: int) -> None:
        self._path, self._nbytes = own / "file", nbytes

    @cached_property
    def _source(self) -> torch.Tensor:
        return torch.empty(self._nbytes // 8, dtype=torch.int64, device="cpu").random_()

    @cached_property
    def _target(self) -> torch.Tensor:
        return torch.zeros_like(self._source)

    def rates(self, cell: Cell) -> Rates:
        """Writes and reads the file with a cell; returns the rates."""
        try:
            return self._by_fio(cell) if cell.backend == FIO else self._by_engine(cell)
        finally:
            if self._path.exists():
                removed(self._path)

    def _by_fio(self, cell: Cell) -> Rates:
        written = fio.rate("write", self._path, self._nbytes, cell)
        make_cold(self._path)
        return {"write": written, "read": fio.rate("read", self._path, self._nbytes, cell)}

    def _by_engine(self, cell: Cell) -> Rates:
        storage, name = pipeline.current().storage, str(self._path)
        source, target = self._source, self._target  # allocated before a clock runs
        with TimedEngine(cell, name, self._nbytes) as trial:
            fd = storage.create(name, 0o600)
            try:
                storage.allocate(fd, self._nbytes)  # before the clock, like fio
                if cell.direct:
                    storage.set_direct(fd, writing=True)
                start = time.perf_counter()
                crcs = trial.write(fd, source.data_ptr())
                os.fsync(fd)
                write_s = time.perf_counter() - start
            finally:
                storage.close(fd)
            make_cold(self._path)
            target.zero_()
            fd = storage.open(name)
            try:
                if cell.direct:
                    storage.set_direct(fd, writing=False)
                start = time.perf_counter()
                trial.read(fd, crcs, target.data_ptr())
                read_s = time.perf_counter() - start
            finally:
                storage.close(fd)
        if not torch.equal(source, target):
            raise CheckpointError(f"{cell}: the bytes read differ from those written")
        return {"write": self._nbytes / write_s, "read": self._nbytes / read_s}


def _measured(own: Path, arguments: argparse.Namespace) -> Result:
    blocks = arguments.blocks or (QUICK_BLOCKS if arguments.quick else BLOCKS)
    depths = arguments.depths or (QUICK_DEPTHS if arguments.quick else DEPTHS)
    nbytes = max(arguments.size, *blocks) // _MIB * _MIB
    grid, transfers = Grid(own, blocks, depths), Transfers(own, nbytes)
    rates: dict[Cell, list[Rates]] = {}
    cells = sum(map(len, grid.points))
    with progress(2 * nbytes * cells * arguments.rounds, "written, read") as moved:
        for number in range(arguments.rounds):
            for point in grid.points:
                for _, cell in in_turn(point, number + 1, first=number):
                    rates.setdefault(cell, []).append(transfers.rates(cell))
                    moved(2 * nbytes)
    result = {
        "nbytes": nbytes,
        "rounds": arguments.rounds,
        "fio": fio.version() or None,
        "notes": grid.notes,
        "wrong": [],
    }
    for operation in OPERATIONS:
        result[operation] = _ranking(operation, rates, grid.defaults[operation])
    return result


def _ranking(operation: str, found: dict[Cell, list[Rates]], default: Cell) -> Result:
    """Returns all cells of an operation, the best ones, and their ratios."""
    cells: list[dict[str, Any]] = []
    for cell, rounds in found.items():
        rates = [rates[operation] for rates in rounds]
        cells.append({**cell._asdict(), "rates": rates, "rate": median(rates)})
    ours = [cell for cell in cells if cell["backend"] != FIO]
    best = max(ours, key=lambda cell: cell["rate"])
    own = next(its for its in ours if Cell(*(its[name] for name in Cell._fields)) == default)
    theirs = [cell for cell in cells if cell["backend"] == FIO]
    fastest = max(theirs, key=lambda cell: cell["rate"], default=None)
    return {
        "cells": cells,
        "best": best,
        "best_of_fio": fastest,
        "share_of_fio": best["rate"] / fastest["rate"] if fastest else None,
        "default": own,
        "default_share_of_best": own["rate"] / best["rate"],
    }


def _text(cell: dict[str, Any]) -> str:
    way = "O_DIRECT" if cell["direct"] else "buffered"
    size, rate = shown_size(cell["block_bytes"]), shown_rate(cell["rate"])
    return f"{cell['backend']}, {way}, {size} x {cell['depth']}: {rate}"


def _backends(cells: list[dict[str, Any]]) -> list[str]:
    return [*dict.fromkeys(cell["backend"] for cell in cells)]


def _lines(result: Result) -> Iterator[str]:
    yield (
        f"{shown_size(result['nbytes'])}, random; {shown_rounds(result)} in turn; "
        f"fsync counted; fio: {result['fio'] or 'none'}"
    )
    yield from (f"note: {note}" for note in result["notes"])
    for operation in OPERATIONS:
        found = result[operation]
        backends = _backends(found["cells"])
        rows: dict[str, dict[str, str]] = {}
        for cell in found["cells"]:
            way = "" if cell["direct"] else ", buffered"
            point = f"{shown_size(cell['block_bytes'])} x {cell['depth']}{way}"
            rows.setdefault(point, {})[cell["backend"]] = shown_rate(cell["rate"])
        yield ""
        told = [[operation, *backends]]
        told += [[point, *(its.get(name, "") for name in backends)] for point, its in rows.items()]
        yield from table(told)
        yield f"best: {_text(found['best'])}"
        if found["best_of_fio"] is not None:
            yield f"{found['share_of_fio']:.2f} of fio's best: {_text(found['best_of_fio'])}"
        share = found["default_share_of_best"]
        yield f"default, {share:.2f} of the best: {_text(found['default'])}"


COMMAND = Command(
    needed=lambda arguments: int(1.1 * max(arguments.size, *(arguments.blocks or BLOCKS))),
    measured=_measured,
    lines=_lines,
)
