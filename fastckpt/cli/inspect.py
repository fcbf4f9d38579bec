"""`fastckpt inspect`: lists the tensors of a checkpoint, and reads none of them.

The module must not know formats.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

import fastckpt
from fastckpt.arguments.quantities import shown_size
from fastckpt.cli.shared_arguments import add_json, path_argument, shown_name, shown_others

_KINDS_MAX = 256


def add_arguments(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="list the tensors of a checkpoint",
        description="Lists the tensors of a checkpoint by name, with dtype, shape, size and files, "
        "and reads none of them. Nothing of the checkpoint is run. The exit status is 0, or 1 if "
        "PATH is missing, damaged or no checkpoint.",
    )
    parser.add_argument(
        "path",
        type=path_argument,
        metavar="PATH",
        help="a file of fastckpt.save, torch.save or safetensors, a step or a Checkpointer's root, "
        "or a directory of DCP, Megatron or Hugging Face",
    )
    parser.add_argument("--glob", default="*", help='only names like this, such as "*.weight"')
    add_json(parser)
    parser.set_defaults(run=run)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keeps Python from looking for garbage in cycles: among the descriptions of 100,000 tensors
    that takes longer than making them, and this process ends when they are printed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Kind(NamedTuple):
    """A kind of tensors, of which there are few, and how it is told.

    Attributes:
        row: the members of the JSON object of each.
        cells: what is printed behind the name.
    """

    row: dict[str, Any]
    cells: tuple[str, ...]


def run(arguments: argparse.Namespace) -> int:
    with _without_collector():
        return _inspect(arguments)


def _inspect(arguments: argparse.Namespace) -> int:
    with fastckpt.open(arguments.path) as tensors:
        rows = _rows(tensors, arguments.glob)
        told = {
            "path": tensors.path,
            "kind": tensors.kind,
            "verified": tensors.is_verified,
            **tensors.facts,
            "tensors": len(rows),
            "nbytes": sum(kind.row["nbytes"] for _name, kind in rows),
            "others": tensors.others,
        }
    if arguments.json:
        content = [{"name": name, **kind.row} for name, kind in rows]
        print(json.dumps({**told, "content": content}, indent=1))
    else:
        _print(told, rows)
    return 0


def _rows(tensors: fastckpt.LazyTensors, glob: str) -> list[tuple[str, _Kind]]:
    """Returns the names that the pattern fits, with what is told of each."""
    kinds: dict[int, tuple[Any, _Kind]] = {}  # by the identity of what many tensors share

    def kind_of(stored: Any) -> _Kind:
        found = _kind(stored.dtype, stored.shape, stored.shards)
        if len(kinds) < _KINDS_MAX:
            kinds[id(stored)] = stored, found
        return found

    rows = [
        (name, known[1] if (known := kinds.get(id(stored))) else kind_of(stored))
        for name, stored in tensors.listed()
    ]
    if glob == "*":
        return rows
    names = {*fnmatch.filter((name for name, _kind in rows), glob)}
    return [row for row in rows if row[0] in names]


@lru_cache(_KINDS_MAX)
def _kind(dtype: torch.dtype, shape: tuple[int, ...], shards: tuple[Any, ...]) -> _Kind:
    told, nbytes = str(dtype).removeprefix("torch."), prod(shape) * dtype.itemsize
    files = [os.path.basename(shard.path) for shard in shards]
    distinct = [*dict.fromkeys(files)]
    file = shown_name(distinct[0]) if len(distinct) == 1 else f"{len(distinct)} files"
    row = {"dtype": told, "shape": [*shape], "nbytes": nbytes, "files": files}
    return _Kind(row, (told, str([*shape]), shown_size(nbytes), file))


def _print(told: dict[str, Any], rows: list[tuple[str, _Kind]]) -> None:
    facts = [f"{name} {told[name]}" for name in ("step", "saved", "ranks", "files") if name in told]
    checked = "verified when read" if told["verified"] else "without checksums of blocks"
    print(f"{shown_name(told['path'])}: {told['kind']}, {checked}; {', '.join(facts)}")
    print(f"{told['tensors']} tensors, {shown_size(told['nbytes'])}")
    if told["others"]:
        print(shown_others(told["others"]))
    names = [name for name, _kind in rows]
    if not ("".join(names).isprintable() and all(names)):
        names = [*map(shown_name, names)]
    kinds = {id(kind): kind.cells for _name, kind in rows}
    widths = [max(map(len, column)) for column in zip(*kinds.values(), strict=True)]
    ends = {
        number: f"  {'  '.join(map(str.ljust, cells, widths)).rstrip()}\n"
        for number, cells in kinds.items()
    }
    width = max(map(len, names), default=0)
    sys.stdout.write(
        "".join(
            [
                name.ljust(width) + ends[id(kind)]
                for name, (_name, kind) in zip(names, rows, strict=True)
            ]
        )
    )
