"""split() and join(), and what becomes of named tensors by a dict of patterns that has them.

Responsible for names, and for saying what does not fit. It must not know where elements lie.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fastckpt.arguments.near_names import fits_none, listed
from fastckpt.plan.layouts import Form, joined

_NUMBER = "{}"
_DIGITS = r"(?P<_number>\d{1,9})"
# Names of dtypes that are quantized, or have several numbers in an item.
_PACKED = re.compile(r"^torch\.(q|bits)|_x\d+$")


class Misfit(ValueError):
    """Tensors are not such that they can be split or joined as it is asked for."""


class Named(NamedTuple):
    """A tensor under its name, and what it is made of."""

    name: str
    dtype: torch.dtype
    form: Form


@dataclass(frozen=True)
class Split:
    """The rule that split() makes: the names of parts with their sizes, if these are told; or one
    name with {} in it.
    """

    dim: int
    into: tuple[tuple[str, int | None], ...] | str

    @property
    def names(self) -> list[str]:
        """The replacements that give parts their names."""
        return [self.into] if isinstance(self.into, str) else [name for name, _size in self.into]


@dataclass(frozen=True)
class Join:
    """The rule that join() makes."""

    dim: int
    into: str


def split(dim: int, into: Mapping[str, int] | Sequence[str] | str) -> Split:
    """Has rename= split each tensor with a name like a pattern into several.

        rename = {
            # as torch.split
            "qkv_proj": fastckpt.split(0, {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024}),
            # in equal parts, as torch.chunk
            "gate_up_proj": fastckpt.split(0, ["gate_proj", "up_proj"]),
            # each index by itself, without the dimension, as torch.unbind
            r"experts\\.down_proj": fastckpt.split(0, "experts.{}.down_proj.weight"),
        }

    Args:
        dim: the dimension; negative ones count from the last.
        into: what the pattern is replaced by in the name of each part (re.sub): with the parts'
            sizes, which have to add up; or alone, for equal parts; or one text for all, in which {}
            is the index.

    Raises:
        TypeError, ValueError: an argument is of another type, or names no part.
    """
    if isinstance(into, str):
        if _NUMBER not in into:
            raise ValueError(f"split: into is {into!r}, must have {{}} where the index goes")
        return Split(_checked_dim(dim), into)
    if not isinstance(into, Mapping | list | tuple) or not all(isinstance(n, str) for n in into):
        raise TypeError(f"split: into is {into!r}, must be a dict of names and sizes, or names")
    if not into:
        raise ValueError("split: into names no part")
    sizes = into.values() if isinstance(into, Mapping) else [None] * len(into)
    for size in sizes:
        if size is not None and (type(size) is not int or size < 0):
            raise ValueError(f"split: a size is {size!r}, must be an integer from 0 on")
    return Split(_checked_dim(dim), tuple(zip(into, sizes, strict=True)))


def join(dim: int, into: str) -> Join:
    """Has rename= join tensors with names like several patterns, or with numbers in them, into one.

        rename = {
            # as torch.cat, in the order of the patterns
            ("q_proj", "k_proj", "v_proj"): fastckpt.join(0, "qkv_proj"),
            # as torch.stack, in the order of the numbers, from 0 on, where the pattern has {}
            r"experts\\.{}\\.down_proj\\.weight": fastckpt.join(0, "experts.down_proj"),
        }

    Those are joined that get the same name. All of them have to be there.

    Args:
        dim: the dimension; negative ones count from the last of what is made.
        into: what the pattern is replaced by in their names (re.sub); {} counts as a group.

    Raises:
        TypeError: an argument is of another type.
    """
    if not isinstance(into, str):
        raise TypeError(f"join: into is {type(into).__name__}, must be a text")
    return Join(_checked_dim(dim), into)


def _checked_dim(dim: object) -> int:
    if type(dim) is not int:
        raise TypeError(f"dim is {dim!r}, must be an integer")
    return dim


def check_rule(pattern: object, rule: object) -> None:
    """Raises TypeError or ValueError unless this can stand in a dict of patterns."""
    patterns = pattern if isinstance(pattern, tuple) else (pattern,)
    if not isinstance(rule, str | Split | Join):
        kind = type(rule).__name__
        raise TypeError(f"rename has {kind} for {pattern!r}, must be a replacement")
    if isinstance(pattern, tuple) and not isinstance(rule, Join):
        raise ValueError(f"rename has several patterns, {pattern!r}, for what is no join()")
    if isinstance(rule, Join):
        if isinstance(pattern, tuple) == (_NUMBER in str(pattern)):
            raise ValueError(
                f"rename joins {pattern!r}, must be a tuple of patterns, in the order of the "
                "parts; or one pattern with {} where names have the numbers of the parts"
            )
        patterns, rule = tuple(map(_regular, patterns)), rule.into
    names = [rule] if isinstance(rule, str) else rule.names
    for each in patterns:
        what = f"{each!r}, no regular expression"
        try:
            re.compile(each)
            what = f"{rule!r} for {each!r}, no replacement of it"
            for name in names:
                re.sub(each, name, "")
        except (re.error, IndexError, TypeError) as error:  # IndexError: there is no such group
            raise ValueError(f"rename has {what}: {error}") from None


def _regular(pattern: object) -> str:
    return str(pattern).replace(_NUMBER, _DIGITS)


def check_fits(pattern: Any, rule: object, names: Sequence[str]) -> None:
    """Raises Misfit if there are names, and the pattern of a rule is in none of them: it may be
    mistyped, and nothing else would tell.
    """
    patterns = pattern if isinstance(pattern, tuple) else (pattern,)
    if isinstance(rule, Join):
        patterns = tuple(map(_regular, patterns))
    if names and not any(re.search(each, name) for each in patterns for name in names):
        raise Misfit(fits_none(pattern, names))


def arranged(tensors: Sequence[Named], rules: Mapping[Any, str | Split | Join]) -> list[Named]:
    """Returns tensors as a dict of patterns makes them, each rule of what those before it made.

    Raises:
        Misfit: tensors cannot be split or joined so, or a pattern fits none; the message names
            them.
    """
    found = [*tensors]
    for pattern, rule in rules.items():
        check_fits(pattern, rule, [each.name for each in found])
        if isinstance(rule, str):
            found = [each._replace(name=re.sub(pattern, rule, each.name)) for each in found]
        elif isinstance(rule, Split):
            found = [part for each in found for part in _parts(each, pattern, rule)]
        else:
            found = _joined(found, pattern, rule)
    return found


def _parts(tensor: Named, pattern: str, rule: Split) -> Iterator[Named]:
    """Yields what a rule makes of a tensor, which is the tensor itself if that has another name."""
    if not re.search(pattern, tensor.name):
        yield tensor
        return
    _check_items(tensor)
    shape, dim = tensor.form.shape, _dim(tensor, rule.dim, len(tensor.form.shape))
    if isinstance(rule.into, str):
        parts = [(rule.into.replace(_NUMBER, str(n)), 1) for n in range(shape[dim])]
    else:
        equal = shape[dim] // len(rule.into)
        parts = [(name, equal if size is None else size) for name, size in rule.into]
        if (total := sum(size for _name, size in parts)) != shape[dim]:
            sizes = " + ".join(str(size) for _name, size in parts)
            is_equal = rule.into[0][1] is None
            why = f"{len(parts)} equal parts" if is_equal else f"{sizes} = {total}"
            raise Misfit(
                f"rename splits {tensor.name!r}, of shape {[*shape]}, along dimension {dim} into "
                f"{why}, which is not {shape[dim]}"
            )
    begin = 0
    for name, size in parts:
        form = tensor.form.cut(dim, begin, size)
        form = form.without(dim) if isinstance(rule.into, str) else form
        yield Named(re.sub(pattern, name, tensor.name), tensor.dtype, form)
        begin += size


def _joined(tensors: Sequence[Named], patterns: str | tuple[str, ...], rule: Join) -> list[Named]:
    """Returns tensors, with each whole in the place of its first part."""
    found: list[Named | dict[int, Named]] = []
    members: dict[str, dict[int, Named]] = {}
    for tensor in tensors:
        name, place = _place(tensor.name, patterns, rule)
        if name is None:
            found.append(tensor)
            continue
        if name not in members:
            found.append(members.setdefault(name, {}))
        other = members[name].setdefault(place, tensor)
        if other is not tensor:
            both = f"{other.name!r} and {tensor.name!r}"
            raise Misfit(f"rename makes both {both} part {place} of {name!r}")
    wholes = {id(its): _whole(name, its, patterns, rule) for name, its in members.items()}
    return [wholes[id(each)] if isinstance(each, dict) else each for each in found]


def _place(name: str, patterns: str | tuple[str, ...], rule: Join) -> tuple[str | None, int]:
    """Returns the name of what a tensor is part of, None if of nothing; and which part it is."""
    for number, pattern in enumerate(patterns if isinstance(patterns, tuple) else [patterns]):
        regular = _regular(pattern)
        if match := re.search(regular, name):
            its = number if isinstance(patterns, tuple) else int(match["_number"])
            return re.sub(regular, rule.into, name), its
    return None, 0


def _whole(
    name: str, members: Mapping[int, Named], patterns: str | tuple[str, ...], rule: Join
) -> Named:
    count = len(patterns) if isinstance(patterns, tuple) else max(members) + 1
    names = listed(repr(each.name) for each in members.values())
    if len(members) < count:
        number = next(n for n in range(count) if n not in members)
        like = repr(patterns[number]) if isinstance(patterns, tuple) else f"the number {number}"
        raise Misfit(
            f"rename joins {names} into {name!r}, for which nothing has a name like {like}"
        )
    parts, is_new = [members[n] for n in range(count)], isinstance(patterns, str)
    first = parts[0]
    dim = _dim(first, rule.dim, len(first.form.shape) + is_new)
    for part in parts:
        _check_items(part)
        shapes = [[*its.form.shape] for its in (first, part)]
        if not is_new and len(shapes[0]) == len(shapes[1]):
            shapes[0][dim] = shapes[1][dim] = 0
        if shapes[0] != shapes[1] or part.dtype != first.dtype:
            told = " and ".join(
                f"{its.name!r} ({str(its.dtype)[6:]} {[*its.form.shape]})" for its in (first, part)
            )
            raise Misfit(f"rename joins {told} along dimension {dim} into {name!r}: they differ")
    forms = [part.form.within_new(dim) if is_new else part.form for part in parts]
    return Named(name, first.dtype, joined(forms, dim))


def _dim(tensor: Named, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise Misfit(f"{tensor.name!r}, of shape {[*tensor.form.shape]}, has no dimension {dim}")
    return dim % ndim


def _check_items(tensor: Named) -> None:
    """Raises Misfit for a dtype whose numbers cannot be told apart by dimensions."""
    if _PACKED.search(str(tensor.dtype)):
        raise Misfit(
            f"{tensor.name!r} is of {tensor.dtype}, which is quantized or packed: rename can "
            "neither split nor join it"
        )
