"""`fastckpt diff`: compares the tensors of two checkpoints, in parts of bounded size."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from math import inf
from typing import Any, NamedTuple

import torch

import fastckpt
from fastckpt.arguments.names import listed
from fastckpt.cli.local_tiers import opened
from fastckpt.cli.progress import progress
from fastckpt.cli.shared_arguments import is_directory, parts, shown_name
from fastckpt.formats import file_list
from fastckpt.formats.hugging_face import INDEX_SUFFIX
from fastckpt.formats.value_names import dotted
from fastckpt.lazy.value_digests import digest
from fastckpt.saving import pipeline

_PART_BYTES = 64 << 20  # compared at a time
_SMALL_BYTES = 1 << 20  # of a tensor that is read together with others
_LISTED = ("different", "only_a", "only_b", "not_compared")  # of the objects


class Difference(NamedTuple):
    """The difference between two checkpoints in a tensor.

    Attributes:
        name: the tensor's name.
        what: "dtype", "shape" or "content".
        text: the difference in words.
        changed: the share of elements that differ in any bit or, between dtypes, in value.
        max_abs: the largest absolute difference, which is exact for integers; None if it is not
            finite, or if the shapes differ.
    """

    name: str
    what: str
    text: str
    changed: float = 0.0
    max_abs: int | float | None = None

    @property
    def size(self) -> tuple[bool, bool, float, float]:
        """A key by which differences are sorted: other shapes, then infinities, are the largest."""
        is_infinite = self.max_abs is None
        return self.what == "shape", is_infinite, self.max_abs or 0, self.changed


def run(arguments: argparse.Namespace) -> int:
    local, rules = arguments.local, dict(arguments.rename)
    with opened(arguments.a, local, rules or None) as a, opened(arguments.b, local) as b:
        in_a, in_b = _by_name(a, a, b), _by_name(b, b, a)
        # The names that inspect lists.
        shown_names = {**in_a, **in_b, **(in_a if a.has_paths else {})}
        names = [
            name for name in shown_names if fnmatch.fnmatchcase(shown_names[name], arguments.glob)
        ]
        only_a = [name for name in names if name not in in_b]
        only_b = [name for name in names if name not in in_a]
        both = [name for name in names if name in in_a and name in in_b]
        differences = []
        with progress(sum(a[in_a[name]].nbytes for name in both), "compared") as done:
            for name in _in_file_order(both, a, in_a, b, in_b):
                difference = compare(a[in_a[name]], b[in_b[name]], done)
                differences += [difference._replace(name=shown_names[name])] if difference else []
        differences.sort(key=lambda each: each.size, reverse=True)
        objects = _objects(_digests(a, b, arguments.a), _digests(b, a, arguments.b), arguments.glob)
        others = {"A": a.others, "B": b.others}
    equal = len(both) - len(differences)
    if arguments.json:
        summary = {
            "only_a": [shown_names[name] for name in only_a],
            "only_b": [shown_names[name] for name in only_b],
            "different": [difference._asdict() for difference in differences],
            "equal": equal,
            "objects": objects,
            "others": others,
        }
        print(json.dumps(summary, indent=1))
    else:
        _print_only(map(shown_names.__getitem__, only_a), map(shown_names.__getitem__, only_b))
        for difference in differences:
            print(f"{shown_name(difference.name)}: {difference.text}")
        _print_objects(objects)
        print(f"tensors: {_counted([equal, len(differences), len(only_a), len(only_b)])}", end="; ")
        counts = [objects["equal"], *(len(objects[what]) for what in _LISTED)]
        print(f"objects: {_counted(counts) if any(counts) else 'none'}")
    return 1 if differences or only_a or only_b else 0


def _counted(counts: list[int]) -> str:
    equal, differ, only_a, only_b, *others = counts
    words = f"{equal} equal, {differ} differ, {only_a} only in A, {only_b} only in B"
    return f"{words}, {others[0]} not compared" if any(others) else words


def _print_only(only_a: Iterable[str], only_b: Iterable[str], what: str = "") -> None:
    for where, its in (("A", only_a), ("B", only_b)):
        for name in its:
            print(f"only in {where}: {what}{shown_name(name)}")


def _print_objects(objects: dict[str, Any]) -> None:
    if objects["equal"] or objects["different"] or objects["not_compared"]:
        _print_only(objects["only_a"], objects["only_b"], "object ")
    for name, digests in objects["different"].items():
        in_a, in_b = map(shown_name, digests)
        print(f"object {shown_name(name)}: {in_a} in A, {in_b} in B")
    if objects["not_compared"]:
        names = listed(map(shown_name, objects["not_compared"]))
        why = "with tensors, with values of single ranks, or not readable as plain values"
        print(f"objects not compared ({why}): {names}")


def _by_name(
    names: Collection[str], tensors: fastckpt.LazyTensors, others: fastckpt.LazyTensors
) -> dict[str, str]:
    """Returns some names of a checkpoint, by the names used for comparison. These have "." between
    keys if only `tensors` has paths of keys, as after a conversion.
    """
    if tensors.has_paths and not others.has_paths:
        by_name = {dotted(name): name for name in names}
        if len(by_name) == len(names):
            return by_name
    return {name: name for name in names}


def _digests(
    tensors: fastckpt.LazyTensors, others: fastckpt.LazyTensors, path: str
) -> dict[str, str | None]:
    """Returns the digests of values that are not tensors, by the names used for comparison, and
    those of the JSON files in the directory of another program, by their names.
    """
    digests, storage = tensors.digests(), pipeline.current().storage
    result = {name: digests[own] for name, own in _by_name(digests, tensors, others).items()}
    if tensors.has_paths or not is_directory(path):
        return result
    for name in sorted(storage.names(path)):
        if name.endswith(".json") and not name.endswith((INDEX_SUFFIX, file_list.NAME)):
            try:
                content = storage.read_file(os.path.join(path, name), file_list.NBYTES_MAX)
                result[name] = digest(json.loads(content))
            except (OSError, ValueError, RecursionError):  # it is told that it was not compared
                result[name] = None
    return result


def _objects(in_a: dict[str, str | None], in_b: dict[str, str | None], glob: str) -> dict[str, Any]:
    """Returns the names of objects by the result of their comparison."""
    names = [name for name in {**in_a, **in_b} if fnmatch.fnmatchcase(name, glob)]
    both = {name: (in_a[name], in_b[name]) for name in names if name in in_a and name in in_b}
    comparable = {name: pair for name, pair in both.items() if None not in pair}
    different = {name: pair for name, pair in comparable.items() if pair[0] != pair[1]}
    return {
        "equal": len(comparable) - len(different),
        "different": different,
        "only_a": [name for name in names if name not in in_b],
        "only_b": [name for name in names if name not in in_a],
        "not_compared": [name for name in both if name not in comparable],
    }


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
    is_cast = a.dtype != b.dtype
    dtypes = f"dtype {_shown_dtype(a)} in A, {_shown_dtype(b)} in B; " if is_cast else ""
    changed = 0
    largest: int | float = 0
    # Differences are computed with several copies, in numbers of at least 8 bytes.
    for part in parts(a.shape, max(a.dtype.itemsize, 8), _PART_BYTES):
        ours, theirs = a[part], b[part]
        told(ours.numel() * ours.itemsize)
        if is_cast:
            ours, theirs = _in_one_dtype(ours, theirs)
            count = int(ours.ne(theirs).logical_and_(~(ours.isnan() & theirs.isnan())).sum())
        else:
            count = int(_bits(ours).ne(_bits(theirs)).any(-1).sum())
        if count:
            changed += count
            largest = max(largest, _largest(ours, theirs), key=lambda each: (each != each, each))
    if not changed:
        return Difference(a.name, "dtype", f"{dtypes}equal values", 0.0, 0) if is_cast else None
    share, is_finite = changed / a.numel(), largest < inf
    shown = f"{largest:.6g}" if isinstance(largest, float) else str(largest)
    by = f"by up to {shown}" if is_finite else "infinities and NaN among them"
    text = f"{dtypes}{100 * share:.3g}% of its elements differ, {by}"
    what = "dtype" if is_cast else "content"
    return Difference(a.name, what, text, share, largest if is_finite else None)


def _shown_dtype(tensor: fastckpt.LazyTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _in_one_dtype(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tensors of two dtypes in one that is at least as wide as both."""
    if {a.dtype, b.dtype} <= _INTEGERS - {torch.uint64} | {torch.bool}:
        return a.to(torch.int64), b.to(torch.int64)
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    # Each item of float4 is two numbers, which no other dtype holds: its bytes are compared.
    a, b = (each.view(torch.uint8) if each.dtype == _FLOAT4 else each for each in (a, b))
    return a.to(kind), b.to(kind)


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
    if a.dtype == _FLOAT4:
        a, b = (_E2M1[_bits(each).long().bitwise_right_shift(_NIBBLES) & 15] for each in (a, b))
    kind = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(kind), b.to(kind)
    same = a.eq(b) | (a.isnan() & b.isnan())
    differences = (a - b).abs()
    return float(torch.where(same, torch.zeros_like(differences), differences).max())


_INT64_MIN = -(1 << 63)
_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
_NIBBLES = torch.tensor([0, 4], device="cpu")
_MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
_E2M1 = torch.tensor([sign * n for sign in (1, -1) for n in _MAGNITUDES], device="cpu")
_INTEGERS = frozenset(
    {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint32, torch.uint16, torch.uint8}
)
