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
from fastckpt.arguments.urls import path_of
from fastckpt.cli.directory_files import fault, is_of_trainer, sizes_in
from fastckpt.cli.local_tiers import opened
from fastckpt.cli.shared_arguments import is_directory, is_there, shown_name, shown_others
from fastckpt.directories.verify import list_of
from fastckpt.errors import CheckpointError, CorruptCheckpoint
from fastckpt.formats import file_list
from fastckpt.formats.torch_pickle import collection_paused
from fastckpt.saving import pipeline

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
    names, kinds, facts = list[str](), list[_Kind](), dict[str, Any]()
    path = os.path.realpath(arguments.path)
    try:
        with opened(arguments.path, arguments.local) as tensors:
            names, kinds = _listed(tensors, arguments.glob)
            facts = {"path": tensors.path, "kind": tensors.kind, "verified": tensors.is_verified}
            facts |= {**tensors.facts, "others": tensors.others}
            inner = path_of("path", tensors.path)
        path = inner if is_directory(inner) else path
    except CheckpointError as error:  # its subclasses tell of damage
        if type(error) is not CheckpointError or not is_of_trainer(path):
            raise
        kind = "a checkpoint of Trainer without tensors that fastckpt reads"
        facts = {"path": path, "kind": kind, "verified": False, "others": {}}
    nbytes = sum(kind.row["nbytes"] for kind in kinds)
    summary = {**facts, "tensors": len(names), "nbytes": nbytes}
    if is_directory(path):
        storage = pipeline.current().storage
        is_deep = is_of_trainer(path) or is_there(os.path.join(path, file_list.NAME))
        sizes = sizes_in(storage, path, is_deep=is_deep)
        try:
            wrong = fault(list_of(path, storage), sizes)
        except CorruptCheckpoint as error:
            wrong = str(error)
        if wrong and not names:
            raise CorruptCheckpoint(f"{path!r} is damaged: {wrong}")
        summary |= {"file_sizes": sizes, "fault": wrong}
    if arguments.json:
        content = [{"name": n, **kind.row} for n, kind in zip(names, kinds, strict=True)]
        print(json.dumps({**summary, "content": content}, indent=1))
    else:
        _print(summary, names, kinds)
        if arguments.glob == "*":
            _print_files(summary.get("file_sizes", {}))
    return 0


def _print_files(sizes: dict[str, int]) -> None:
    if sizes:
        print(f"{len(sizes)} files in the directory, {shown_size(sum(sizes.values()))}")
    shown = {shown_name(name): shown_size(nbytes) for name, nbytes in sizes.items()}
    width = max(map(len, shown), default=0)
    for name, size in shown.items():
        print(f"{name:{width}}  {size}")


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
    shown_facts = ("step", "saved", "ranks", "files", "thinned to")
    facts = [f"{name} {shown_name(str(told[name]))}" for name in shown_facts if name in told]
    checked = "verified when read" if told["verified"] else "without block checksums"
    end = f"; {', '.join(facts)}" if facts else ""
    print(f"{shown_name(told['path'])}: {told['kind']}, {checked}{end}")
    print(f"{told['tensors']} tensors, {shown_size(told['nbytes'])}")
    if told.get("fault"):
        print(f"not as {file_list.NAME} says: {shown_name(told['fault'])}")
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
