"""A progress bar on a terminal, for operations that take longer than a second."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], object]]:
    """Shows the number of bytes done if stderr is a terminal, with tqdm if installed, else as a
    percentage.

    Args:
        total: the total number of bytes.
        what: the word before the bar.

    Yields:
        A function to call with the number of bytes done since its last call.
    """
    try:
        bar = importlib.import_module("tqdm").tqdm
    except ImportError:  # it is not a dependency
        with _percentage(total, what) as report:
            yield report
        return
    size = {"total": total, "unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with bar(**size, desc=what, delay=1, leave=False, disable=None) as shown:
        yield shown.update


@contextmanager
def _percentage(total: int, what: str) -> Iterator[Callable[[int], None]]:
    done, shown = 0, -1

    def moved(nbytes: int) -> None:
        nonlocal done, shown
        done += nbytes
        share = 100 * done // max(total, 1)
        if share != shown and sys.stderr.isatty():
            shown = share
            print(f"\r{what} {share}%", end="", file=sys.stderr, flush=True)

    moved(0)
    try:
        yield moved
    finally:
        if shown >= 0:
            print(file=sys.stderr)
