"""The parts of every `fastckpt bench WHAT`, and the order in which contestants take turns."""

from __future__ import annotations

import argparse
import errno
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch

from fastckpt.arguments.quantities import shown_size
from fastckpt.cli.bench.machine import touch_memory
from fastckpt.saving import pipeline


@contextmanager
def own_directory(directory: str, prefix: str) -> Iterator[Path]:
    """Makes a directory in the given one; removes it when the body ends. SIGTERM and SIGHUP end the
    body as Ctrl-C does.
    """
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    earlier = {number: signal.signal(number, _interrupt) for number in signals}
    try:
        try:
            own = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
        except OSError as error:  # its own message names the temporary directory
            number = error.errno or errno.EIO
            why = f"{os.strerror(number)} [{errno.errorcode.get(number, number)}]"
            raise OSError(f"cannot write to {directory!r}: {why}") from None
        try:
            yield own
        except Exception:
            # C code that the signal arrives in may replace the interrupt by an error of its own.
            raise_if_interrupted()
            raise
        finally:
            try:
                # A save whose wait was interrupted goes on, and would make files behind us.
                pipeline.current().drain()
            finally:
                shutil.rmtree(own)
    finally:
        _interrupted.clear()
        for number, handler in earlier.items():
            signal.signal(number, handler)


_interrupted: list[int] = []  # the signals that have come to the body of own_directory()


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _interrupted.append(number)
    raise KeyboardInterrupt


def raise_if_interrupted() -> None:
    """Raises the interrupt again if there was one: what was measured may have caught it, or raised
    another error in its place, as torch.distributed.checkpoint does.
    """
    if _interrupted:
        raise KeyboardInterrupt from None


def check_room(directory: str, nbytes: int) -> None:
    """Raises OSError if the directory's file system has less free than nbytes."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise OSError(
            f"{directory} has {shown_size(free)} free, but the measurement needs "
            f"{shown_size(nbytes)}"
        )


T = TypeVar("T")
Result = dict[str, Any]


class Command(NamedTuple):
    """How one WHAT of `fastckpt bench` measures; parser.py has what it takes.

    Attributes:
        needed: returns how many bytes of the file system it takes at most.
        measured: measures in a directory of its own, and returns what goes into the JSON; "wrong"
            in it names what came back other than it was written.
        lines: returns the result as text.
    """

    needed: Callable[[argparse.Namespace], int]
    measured: Callable[[Path, argparse.Namespace], Result]
    lines: Callable[[Result], Iterator[str]]


def rotated(items: Sequence[T], by: int) -> list[T]:
    """Returns the items from another one on in each round, so that no place in line is fixed."""
    by %= max(len(items), 1)
    return [*items[by:], *items[:by]]


def before_clock(nbytes: int) -> None:
    """Comes before each part that is timed, whoever's: leaves no garbage and no work of a GPU, and
    touches the memory that saving or loading so many bytes takes, for tensors or copies of them and
    for the page cache.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    touch_memory(2 * nbytes)


def in_turn(
    names: Sequence[T], rounds: int, first: int = 0, nbytes: int = 0
) -> Iterator[tuple[int, T]]:
    """Yields (round, name), in each round as rotated() has them, for a turn that moves nbytes."""
    for number in range(first, rounds):
        for name in rotated(names, number):
            before_clock(nbytes)
            yield number, name


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each clock."""
    return {clock: median(row[clock] for row in rows) for clock in rows[0]}


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields lines of columns: the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        others = (text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *others]).rstrip()


def shown_rounds(result: Result) -> str:
    """Returns of how many rounds a result has the medians, in words."""
    rounds = result["rounds"]
    return "1 round" if rounds == 1 else f"medians of {rounds} rounds"
