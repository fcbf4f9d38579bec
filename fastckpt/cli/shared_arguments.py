"""Parsing that commands share, for paths and quantities, and escaping of names for terminals."""

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
    """Yields the indexes of parts that make up a tensor, in the order of its elements.

    Each part is a contiguous run of at most `nbytes_max` bytes in a contiguous tensor, or a single
    element if an element is larger.
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
    """Checks a path for argparse, which ends the process with status 2 if the path is invalid."""
    try:
        return check("it", text)
    except (ValueError, ImportError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def status_of(path: str, *, link: bool = False) -> os.stat_result | None:
    """Returns the status of a path; None if it is missing or unknown. `link` is like
    Storage.status()'s.
    """

    from fastckpt.saving import pipeline  # imports torch

    return known_status(pipeline.current().storage, path, link=link)


def is_there(path: str, *, link: bool = False) -> bool:
    """Whether a path exists; with `link`, a broken symbolic link also exists."""
    return status_of(path, link=link) is not None


def is_directory(path: str) -> bool:
    """Whether a path is a directory, or a link to one."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def real_root(text: str) -> str:
    """Returns the real path of a root, which may be missing. Raises CheckpointError if it is not a
    directory.
    """
    path = os.path.realpath(text)
    if is_there(path) and not is_directory(path):
        raise CheckpointError(
            f"{path!r} is not a directory, must be the directory of a root: for files, use "
            "`fastckpt inspect` or `fastckpt verify`"
        )
    return path


def quantity_argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a type for argparse that raises the error of `read`, a function of
    arguments/quantities.py.
    """

    def argument(text: str) -> Any:
        try:
            return read(text)
        except NotAQuantity as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    argument.__name__ = read.__name__  # argparse's message about an invalid integer has this name
    return argument


def shown_name(name: str) -> str:
    """Returns a name from a file for a terminal, with control characters escaped; an empty name is
    shown as ''.
    """
    if not name:
        return repr(name)
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def shown_text(text: str) -> str:
    """Returns a text of one or more lines for a terminal, escaped like in shown_name()."""
    return "\n".join(line and shown_name(line) for line in text.split("\n"))


def shown_others(others: Mapping[str, int]) -> str:
    """Returns a description of a checkpoint's contents other than tensors; "" if there are none."""
    if not others:
        return ""
    kinds = (f"{count} x {shown_name(name)}" for name, count in others.items())
    return f"objects not read: {listed(kinds)}"
