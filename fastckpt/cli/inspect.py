"""`fastckpt inspect`: lists the tensors of a checkpoint, and reads none of them.

The module must not know formats.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fastckpt
from fastckpt.arguments.quantities import shown_size
from fastckpt.cli.paths import add_json, path_argument, shown_name, shown_others


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


def run(arguments: argparse.Namespace) -> int:
    with _without_collector(), fastckpt.open(arguments.path) as tensors:
        names = [name for name in tensors if fnmatch.fnmatchcase(name, arguments.glob)]
        rows = [_row(tensors[name]) for name in names]
        told = {
            "path": tensors.path,
            "kind": tensors.kind,
            "verified": tensors.is_verified,
            **tensors.facts,
            "tensors": len(rows),
            "nbytes": sum(row["nbytes"] for row in rows),
            "others": tensors.others,
        }
    if arguments.json:
        print(json.dumps({**told, "content": rows}, indent=1))
    else:
        _print(told, rows)
    return 0


def _row(tensor: fastckpt.LazyTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": [*tensor.shape],
        "nbytes": tensor.nbytes,
        "files": [os.path.basename(shard.path) for shard in tensor.shards],
    }


def _print(told: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    facts = [f"{name} {told[name]}" for name in ("step", "saved", "ranks", "files") if name in told]
    checked = "verified when read" if told["verified"] else "without checksums of blocks"
    print(f"{shown_name(told['path'])}: {told['kind']}, {checked}; {', '.join(facts)}")
    print(f"{told['tensors']} tensors, {shown_size(told['nbytes'])}")
    if told["others"]:
        print(shown_others(told["others"]))
    cells = [
        (
            shown_name(row["name"]),
            row["dtype"],
            str(row["shape"]),
            shown_size(row["nbytes"]),
            _files(row),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for cell in cells:
        print(
            "  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True)).rstrip()
        )


def _files(row: dict[str, Any]) -> str:
    distinct = [*dict.fromkeys(row["files"])]
    return shown_name(distinct[0]) if len(distinct) == 1 else f"{len(distinct)} files"
