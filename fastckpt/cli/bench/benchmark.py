"""The common parts of every `fastckpt bench WHAT`, and the order of the contestants' turns."""

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
    """Makes a directory in `directory`, and removes it when the body ends. SIGTERM and SIGHUP end
    the body like Ctrl-C, by a KeyboardInterrupt with the signal's number.
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
            # C code that is interrupted by the signal may raise its own error instead.
            raise_if_interrupted()
            raise
        finally:
            try:
                # A save whose wait was interrupted continues, and would create files after the
                # removal.
                pipeline.current().drain()
            finally:
                shutil.rmtree(own)
    finally:
        _interrupted.clear()
        for number, handler in earlier.items():
            signal.signal(number, handler)


_interrupted: list[int] = []  # the signals that arrived in the body of own_directory()


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _interrupted.append(number)
    raise KeyboardInterrupt(number)


def raise_if_interrupted() -> None:
    """Raises the interrupt again if there was one, because the measured code may have caught it or
    raised another error instead, like torch.distributed.checkpoint.
    """
    if _interrupted:
        raise KeyboardInterrupt(_interrupted[0]) from None


def check_room(directory: str, nbytes: int) -> None:
    """Raises OSError if the directory's file system has less than nbytes free."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise OSError(
            f"{directory} has {shown_size(free)} free, but the measurement needs "
            f"{shown_size(nbytes)}"
        )


T = TypeVar("T")
Result = dict[str, Any]


class Command(NamedTuple):
    """The measurement of one `fastckpt bench WHAT`; parser.py has its arguments.

    Attributes:
        needed: returns the space that it needs at most on the file system, in bytes.
        measured: measures in its own directory, and returns the JSON object; "wrong" in it names
            the tensors whose bytes differ from those written.
        lines: yields the lines of text for a result.
    """

    needed: Callable[[argparse.Namespace], int]
    measured: Callable[[Path, argparse.Namespace], Result]
    lines: Callable[[Result], Iterator[str]]


def rotated(items: Sequence[T], by: int) -> list[T]:
    """Returns the items rotated by `by`, so that their order differs in each round."""
    by %= max(len(items), 1)
    return [*items[by:], *items[:by]]


def before_clock(nbytes: int) -> None:
    """Prepares each timed part of any contestant: collects garbage, waits for the GPU, and touches
    the memory that saving or loading `nbytes` bytes needs, for tensors or copies and for the page
    cache.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    touch_memory(2 * nbytes)


def in_turn(
    names: Sequence[T], rounds: int, first: int = 0, nbytes: int = 0
) -> Iterator[tuple[int, T]]:
    """Yields (round, name) for each turn, which moves nbytes; rotated() orders the names of a
    round.
    """
    for number in range(first, rounds):
        for name in rotated(names, number):
            before_clock(nbytes)
            yield number, name


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each clock over the rows."""
    return {clock: median(row[clock] for row in rows) for clock in rows[0]}


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table: the first column is flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        others = (text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *others]).rstrip()


def shown_rounds(result: Result) -> str:
    """Returns the number of rounds of a result, in words."""
    rounds = result["rounds"]
    return "1 round" if rounds == 1 else f"medians of {rounds} rounds"
