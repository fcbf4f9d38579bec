"""`fastckpt diff`: compares the tensors of two checkpoints, in parts of bounded size."""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Callable, Iterator
from math import inf
from typing import NamedTuple

import torch

import fastckpt
from fastckpt.cli.local_tiers import opened
from fastckpt.cli.progress import progress
from fastckpt.cli.shared_arguments import parts, shown_name, shown_others
from fastckpt.formats.value_names import dotted

_PART_BYTES = 64 << 20  # compared at a time
_SMALL_BYTES = 1 << 20  # of a tensor that is read together with others


class Difference(NamedTuple):
    """The difference between two checkpoints in a tensor.

    Attributes:
        name: the tensor's name.
        what: "dtype", "shape" or "content".
        text: the difference in words.
        changed: for "content", the share of elements that differ in any bit, above 0 and up to 1.
        max_abs: for "content", the largest absolute difference, which is exact for integers; None
            if it is not finite.
    """

    name: str
    what: str
    text: str
    changed: float = 0.0
    max_abs: int | float | None = None


def run(arguments: argparse.Namespace) -> int:
    local = arguments.local
    with opened(arguments.a, local) as a, opened(arguments.b, local) as b:
        in_a, in_b = _by_name(a, b), _by_name(b, a)
        names = [name for name in {**in_a, **in_b} if fnmatch.fnmatchcase(name, arguments.glob)]
        only_a = [name for name in names if name not in in_b]
        only_b = [name for name in names if name not in in_a]
        both = [name for name in names if name in in_a and name in in_b]
        differences = []
        with progress(sum(a[in_a[name]].nbytes for name in both), "compared") as done:
            for name in _in_file_order(both, a, in_a, b, in_b):
                difference = compare(a[in_a[name]], b[in_b[name]], done)
                differences += [difference._replace(name=name)] if difference else []
        others = {"A": a.others, "B": b.others}
    if arguments.json:
        summary = {
            "only_a": only_a,
            "only_b": only_b,
            "different": [difference._asdict() for difference in differences],
            "equal": len(both) - len(differences),
            "others": others,
        }
        print(json.dumps(summary, indent=1))
    else:
        for where, its in (("A", only_a), ("B", only_b)):
            for name in its:
                print(f"only in {where}: {shown_name(name)}")
        for difference in differences:
            print(f"{shown_name(difference.name)}: {difference.text}")
        for where, kinds in others.items():
            if kinds:
                print(f"in {where}, {shown_others(kinds)}")
        print(f"{len(both) - len(differences)} of {len(names)} tensors are equal")
    return 1 if differences or only_a or only_b else 0


def _by_name(tensors: fastckpt.LazyTensors, others: fastckpt.LazyTensors) -> dict[str, str]:
    """Returns the names of tensors, by the names used for comparison. These have "." between keys
    if only `tensors` has paths of keys, as after a conversion.
    """
    if tensors.has_paths and not others.has_paths:
        names = {dotted(name): name for name in tensors}
        if len(names) == len(tensors):
            return names
    return {name: name for name in tensors}


def _in_file_order(
    names: list[str],
    a: fastckpt.LazyTensors,
    in_a: dict[str, str],
    b: fastckpt.LazyTensors,
    in_b: dict[str, str],
) -> Iterator[str]:
    """Yields names in the order of the first checkpoint's files. Small tensors are requested in
    groups of bounded size before their names are yielded, so that they are read together.
    """
    ours, room = {in_a[name]: name for name in names}, _PART_BYTES
    group, small = list[str](), list[str]()
    for number, own in enumerate(a.in_file_order(ours), 1):
        name, tensor, other = ours[own], a[own], b[in_b[ours[own]]]
        group.append(name)
        is_read = (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
        if is_read and tensor.nbytes < _SMALL_BYTES:
            small.append(name)
            room -= tensor.nbytes
        if room <= 0 or number == len(ours):
            a.prefetch([in_a[name] for name in small])
            b.prefetch([in_b[name] for name in small])
            yield from group
            group, small, room = [], [], _PART_BYTES


def compare(
    a: fastckpt.LazyTensor, b: fastckpt.LazyTensor, told: Callable[[int], object]
) -> Difference | None:
    """Returns the difference between two tensors; None if they have the same bits. `told` is called
    with the number of bytes of each that were compared since its last call.
    """
    if a.shape != b.shape:
        return Difference(a.name, "shape", f"shape {[*a.shape]} in A, {[*b.shape]} in B")
    if a.dtype != b.dtype:
        return Difference(a.name, "dtype", f"dtype {a.dtype} in A, {b.dtype} in B")
    changed = 0
    largest: int | float = 0
    # Differences are computed with several copies, in numbers of at least 8 bytes.
    for part in parts(a.shape, max(a.dtype.itemsize, 8), _PART_BYTES):
        ours, theirs = a[part], b[part]
        told(ours.numel() * ours.itemsize)
        count = int(_bits(ours).ne(_bits(theirs)).any(-1).sum())
        if count:
            changed += count
            largest = max(largest, _largest(ours, theirs), key=lambda each: (each != each, each))
    if not changed:
        return None
    share, is_finite = changed / a.numel(), largest < inf
    shown = f"{largest:.6g}" if isinstance(largest, float) else str(largest)
    by = f"by up to {shown}" if is_finite else "infinities and NaN among them"
    text = f"{100 * share:.3g}% of its elements differ, {by}"
    return Difference(a.name, "content", text, share, largest if is_finite else None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of each element."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size())


def _largest(a: torch.Tensor, b: torch.Tensor) -> int | float:
    """Returns the largest absolute difference, as an int for integers; NaN if only one of the
    tensors has a NaN at some element.
    """
    if a.dtype is torch.uint64:  # torch has few uint64 operations; this keeps the order
        a, b = (each.contiguous().view(torch.int64) ^ _INT64_MIN for each in (a, b))
    if a.dtype in _INTEGERS:
        a, b = a.to(torch.int64), b.to(torch.int64)
        differences = torch.where(a > b, a - b, b - a)  # modulo 2^64: negative means large
        large = differences[differences < 0]
        return int(large.max()) + (1 << 64) if len(large) else int(differences.max())
    if a.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        a, b = (_E2M1[_bits(each).long().bitwise_right_shift(_NIBBLES) & 15] for each in (a, b))
    kind = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(kind), b.to(kind)
    same = a.eq(b) | (a.isnan() & b.isnan())
    differences = (a - b).abs()
    return float(torch.where(same, torch.zeros_like(differences), differences).max())


_INT64_MIN = -(1 << 63)
_NIBBLES = torch.tensor([0, 4], device="cpu")
_MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
_E2M1 = torch.tensor([sign * n for sign in (1, -1) for n in _MAGNITUDES], device="cpu")
_INTEGERS = frozenset(
    {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint32, torch.uint16, torch.uint8}
)
