"""Arguments that commands share, for paths, quantities and JSON, and names as a terminal may have
them.
"""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from fastckpt.arguments.names import listed
from fastckpt.arguments.quantities import NotAQuantity
from fastckpt.arguments.urls import path_of
from fastckpt.errors import CheckpointError
from fastckpt.storage.file_system import known_status


def parts(shape: Sequence[int], itemsize: int, nbytes_max: int) -> Iterator[tuple[Any, ...]]:
    """Yields indexes of parts that make up a tensor, in the order of its elements.

    Each part is one run of elements in a contiguous tensor, of at most `nbytes_max` bytes; or a
    single element, if that is larger.
    """
    nbytes = prod(shape) * itemsize
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    if nbytes <= nbytes_max or dim is None:
        yield (...,)
        return
    front, row_nbytes = (slice(None),) * dim, nbytes // shape[dim]
    if row_nbytes > nbytes_max:
        for number in range(shape[dim]):
            for rest in parts(shape[dim + 1 :], itemsize, nbytes_max):
                yield (*front, slice(number, number + 1), *rest)
        return
    rows = nbytes_max // row_nbytes
    for begin in range(0, shape[dim], rows):
        yield (*front, slice(begin, begin + rows), ...)


def path_argument(text: str, check: Callable[[str, str], str] = path_of) -> str:
    """Returns a checked path for argparse, which ends the process with status 2 if it is wrong."""
    try:
        return check("it", text)
    except (ValueError, ImportError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def status_of(path: str, *, link: bool = False) -> os.stat_result | None:
    """Returns what lies at a path, if that can be told; `link` is as Storage.status()'s."""

    from fastckpt.saving import pipeline  # which imports torch

    return known_status(pipeline.current().storage, path, link=link)


def is_there(path: str, *, link: bool = False) -> bool:
    """Whether something lies at a path, be it a link to nothing if `link`."""
    return status_of(path, link=link) is not None


def is_directory(path: str) -> bool:
    """Whether a path leads to a directory."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def real_root(text: str) -> str:
    """Returns the real path of a root, which may be missing. Raises CheckpointError if it is no
    directory.
    """
    path = os.path.realpath(text)
    if is_there(path) and not is_directory(path):
        raise CheckpointError(
            f"{path!r} is not a directory, but a root is one: `fastckpt inspect` and `fastckpt "
            "verify` accept files"
        )
    return path


def quantity_argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a type for argparse that refuses an argument in the words of `read`, which is one of
    those in arguments/quantities.py.
    """

    def argument(text: str) -> Any:
        try:
            return read(text)
        except NotAQuantity as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    argument.__name__ = read.__name__  # argparse names it in its message about a wrong integer
    return argument


def shown_name(name: str) -> str:
    """Returns a name from a file for a terminal: what could steer the terminal is escaped, and an
    empty one is shown as such.
    """
    if not name:
        return repr(name)
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def shown_text(text: str) -> str:
    """Returns a text of one or more lines for a terminal, escaped as shown_name() does."""
    return "\n".join(line and shown_name(line) for line in text.split("\n"))


def shown_others(others: Mapping[str, int]) -> str:
    """Returns what a checkpoint holds beside its tensors in words; "" if that is nothing."""
    if not others:
        return ""
    kinds = (f"{count} of {shown_name(name)}" for name, count in others.items())
    return f"contents not read: {listed(kinds)}"
