"""`fastckpt inspect`: lists the tensors of a checkpoint without reading their data."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
from functools import lru_cache
from itertools import chain, compress, repeat
from typing import Any, NamedTuple

import fastckpt
from fastckpt.arguments.quantities import shown_size
from fastckpt.cli.local_tiers import opened
from fastckpt.cli.shared_arguments import shown_name, shown_others
from fastckpt.formats.torch_pickle import collection_paused

_KINDS_MAX = 256


class _Kind(NamedTuple):
    """The description that many tensors of a checkpoint share.

    Attributes:
        row: the members of each tensor's JSON object.
        cells: the columns that are printed after the name.
    """

    row: dict[str, Any]
    cells: tuple[str, ...]


@collection_paused()  # collection would take longer than making 100,000 descriptions
def run(arguments: argparse.Namespace) -> int:
    with opened(arguments.path, arguments.local) as tensors:
        names, kinds = _listed(tensors, arguments.glob)
        summary = {
            "path": tensors.path,
            "kind": tensors.kind,
            "verified": tensors.is_verified,
            **tensors.facts,
            "tensors": len(names),
            "nbytes": sum(kind.row["nbytes"] for kind in kinds),
            "others": tensors.others,
        }
    if arguments.json:
        content = [{"name": n, **kind.row} for n, kind in zip(names, kinds, strict=True)]
        print(json.dumps({**summary, "content": content}, indent=1))
    else:
        _print(summary, names, kinds)
    return 0


def _listed(tensors: fastckpt.LazyTensors, glob: str) -> tuple[list[str], list[_Kind]]:
    """Returns the names that match the pattern, and the description of each."""
    entries: dict[int, tuple[Any, _Kind]] = {}  # by the identity of the shared description

    def kind_of(stored: Any) -> _Kind:
        kind = _kind(*stored.shown, stored.shape, stored.shards)
        if len(entries) < _KINDS_MAX:
            entries[id(stored)] = stored, kind
        return kind

    names, kinds = [*tensors], list[_Kind]()
    for _name, stored in tensors.listed():
        entry = entries.get(id(stored))
        kinds.append(kind_of(stored) if entry is None else entry[1])
    if glob == "*":
        return names, kinds
    fits = {*fnmatch.filter(names, glob)}
    chosen = [name in fits for name in names]
    return [*compress(names, chosen)], [*compress(kinds, chosen)]


@lru_cache(_KINDS_MAX)
def _kind(text: str, nbytes: int, shape: tuple[int, ...], shards: tuple[Any, ...]) -> _Kind:
    files = [os.path.basename(shard.path) for shard in shards]
    distinct = [*dict.fromkeys(files)]
    file = shown_name(distinct[0]) if len(distinct) == 1 else f"{len(distinct)} files"
    row = {"dtype": text, "shape": [*shape], "nbytes": nbytes, "files": files}
    return _Kind(row, (text, str([*shape]), shown_size(nbytes), file))


def _print(told: dict[str, Any], names: list[str], kinds: list[_Kind]) -> None:
    facts = [f"{name} {told[name]}" for name in ("step", "saved", "ranks", "files") if name in told]
    checked = "verified when read" if told["verified"] else "without block checksums"
    print(f"{shown_name(told['path'])}: {told['kind']}, {checked}; {', '.join(facts)}")
    print(f"{told['tensors']} tensors, {shown_size(told['nbytes'])}")
    if told["others"]:
        print(shown_others(told["others"]))
    if not ("".join(names).isprintable() and all(names)):
        names = [*map(shown_name, names)]
    distinct = dict(zip(map(id, kinds), kinds, strict=True))
    widths = [
        max(map(len, column))
        for column in zip(*(kind.cells for kind in distinct.values()), strict=True)
    ]
    ends = {
        number: f"  {'  '.join(map(str.ljust, kind.cells, widths)).rstrip()}\n"
        for number, kind in distinct.items()
    }
    width = max(map(len, names), default=0)
    begins = map(str.ljust, names, repeat(width))
    lines = zip(begins, map(ends.__getitem__, map(id, kinds)), strict=True)
    sys.stdout.write("".join(chain.from_iterable(lines)))
