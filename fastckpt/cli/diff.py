"""`fastckpt diff`: compares the tensors of two checkpoints, in parts of bounded size.

The module must not know formats.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import fastckpt
from fastckpt.cli.paths import path_argument

_PART_BYTES = 64 << 20  # of a tensor that are compared at a time


def add_arguments(commands: Any) -> None:
    parser = commands.add_parser(
        "diff",
        help="compare the tensors of two checkpoints",
        description="Compares two checkpoints of any kind: names, dtypes, shapes and contents of "
        "their tensors. Nothing of them is run. The exit status is 0 if they are equal, and 1 if "
        "they differ, or one is missing, damaged or no checkpoint.",
    )
    for name in ("a", "b"):
        parser.add_argument(
            name, type=path_argument, metavar=name.upper(), help="as inspect's PATH"
        )
    parser.add_argument("--glob", default="*", help='only names like this, such as "*.weight"')
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


class Difference(NamedTuple):
    """How a tensor of both checkpoints differs.

    Attributes:
        name: the tensor's.
        what: "dtype", "shape" or "content".
        text: the difference in words.
        changed: for "content", the share of elements that differ in a bit, above 0 and up to 1.
        max_abs: for "content", the largest absolute difference; None for elements that have none.
    """

    name: str
    what: str
    text: str
    changed: float = 0.0
    max_abs: float | None = None


def run(arguments: argparse.Namespace) -> int:
    with fastckpt.open(arguments.a) as a, fastckpt.open(arguments.b) as b:
        names = [name for name in {**a, **b} if fnmatch.fnmatchcase(name, arguments.glob)]
        only_a = [name for name in names if name not in b]
        only_b = [name for name in names if name not in a]
        both = [name for name in names if name in a and name in b]
        found = [difference for name in both if (difference := compare(a[name], b[name]))]
    if arguments.json:
        told = {
            "only_a": only_a,
            "only_b": only_b,
            "different": [difference._asdict() for difference in found],
            "equal": len(both) - len(found),
        }
        print(json.dumps(told, indent=1))
    else:
        for where, its in (("A", only_a), ("B", only_b)):
            for name in its:
                print(f"only in {where}: {name}")
        for difference in found:
            print(f"{difference.name}: {difference.text}")
        print(f"{len(both) - len(found)} of {len(names)} tensors are equal")
    return 1 if found or only_a or only_b else 0


def compare(a: fastckpt.LazyTensor, b: fastckpt.LazyTensor) -> Difference | None:
    """Returns how two tensors differ; None if they have the same bits."""
    if a.shape != b.shape:
        return Difference(a.name, "shape", f"shape {[*a.shape]} in A, {[*b.shape]} in B")
    if a.dtype != b.dtype:
        return Difference(a.name, "dtype", f"dtype {a.dtype} in A, {b.dtype} in B")
    changed, max_abs = 0, 0.0
    for part in _parts(a):
        ours, theirs = a[part], b[part]
        differ = _bits(ours).ne(_bits(theirs)).any(-1)
        count = int(differ.sum())
        if count:
            changed += count
            max_abs = max(max_abs, _largest(ours, theirs))
    if not changed:
        return None
    share = changed / a.numel()
    text = f"{share:.2%} of its elements differ, by up to {max_abs:.6g}"
    return Difference(a.name, "content", text, share, max_abs)


def _parts(tensor: fastckpt.LazyTensor) -> Iterator[Any]:
    """Yields indexes of parts, along the first dimension, that make up the tensor."""
    if not tensor.ndim or not tensor.numel():
        yield ...
        return
    rows = max(1, _PART_BYTES // max(1, tensor.nbytes // len(tensor)))
    for begin in range(0, len(tensor), rows):
        yield slice(begin, begin + rows)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of each element."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size())


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the largest absolute difference; NaN if one has a NaN where the other has none."""
    kind = torch.complex128 if a.is_complex() else torch.float64
    differences = (a.to(kind) - b.to(kind)).abs()
    same = a.to(kind).eq(b.to(kind)) | (a.to(kind).isnan() & b.to(kind).isnan())
    return float(torch.where(same, torch.zeros_like(differences), differences).max())
