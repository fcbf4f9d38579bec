"""A progress bar on a terminal, for what takes longer than a second."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], object]]:
    """Shows how many bytes are done, if stderr is a terminal and tqdm is installed.

    Args:
        total: how many bytes there are.
        what: the word before the bar.

    Yields:
        A function to be called with how many more are done.
    """
    try:
        bar = importlib.import_module("tqdm").tqdm
    except ImportError:  # it is no dependency
        yield lambda nbytes: None
        return
    size = {"total": total, "unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with bar(**size, desc=what, delay=1, leave=False, disable=None) as shown:
        yield shown.update
