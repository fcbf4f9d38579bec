"""Decoding of JSON from files that may be damaged or hostile, and checks that formats share.

Responsible for refusing, with a ValueError, JSON that Python's reader accepts but no format uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from math import isfinite
from operator import itemgetter
from typing import Any

from fastckpt.errors import IncompatibleCheckpoint
from fastckpt.plan.image import PAGE_BYTES

NUMBER_END = 1 << 63
BLOCK_BYTES_MAX = 64 << 20  # a reader holds whole blocks in memory, however little it needs of them
# Of shapes and such, which many tensors have in common, whoever looks at each but once remembers at
# most so many: tuples of numbers can be made that all have one hash.
KINDS_MAX = 256
_DIGITS_MAX = 32  # no number here has more; int() takes the square of their number
_SHOWN_CHARS_MAX = 100


def decode(text: bytes) -> Any:
    """Decodes JSON, using at most a few tens of bytes of memory for each byte of it.

    Raises:
        ValueError: it is not UTF-8 or not JSON, an object has a duplicate name, or a number is NaN,
            infinite or too long.
        RecursionError: it is nested too deeply.
    """
    return _DECODER.decode(text.decode())


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has a duplicate name")
    return members


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS_MAX:
        raise ValueError(f"the number {digits[:9]}... is too long: it has {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float:
    real = float(digits)
    if not isfinite(real):
        raise ValueError(f"the number {digits[:_DIGITS_MAX]} must be finite")
    return real


_DECODER = json.JSONDecoder(
    object_pairs_hook=_members, parse_int=_integer, parse_float=_real, parse_constant=_real
)


def encode(value: object) -> str:
    """Returns compact JSON in ASCII. Raises ValueError for NaN and infinities."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def refuse_other_version(what: str, version: object, *known: int) -> None:
    """Raises IncompatibleCheckpoint if this is a version, other than the supported ones."""
    if type(version) is int and version not in known and 0 < version < NUMBER_END:
        update = ": update it" if version > max(known) else ""
        *first, last = map(str, known)
        numbers = f"versions {', '.join(first)} and {last}" if first else f"version {last}"
        raise IncompatibleCheckpoint(
            f"{what} has version {version}, this fastckpt reads {numbers} only{update}"
        )


def check_members(value: Any, kinds: Mapping[str, type | tuple[type, ...]], what: str) -> None:
    """Raises ValueError unless this is an object of these members, with ints in [0, 2^63)."""
    if type(value) is not dict:
        raise ValueError(f"{what} must be an object")
    if value.keys() != kinds.keys():
        wrong = ", ".join(map(shown, sorted(value.keys() ^ kinds.keys())[:9]))
        raise ValueError(f"{what} lacks members, or has unknown ones: {wrong}")
    for name, kind in kinds.items():
        member = value[name]
        if type(member) not in (kind if isinstance(kind, tuple) else (kind,)):
            raise ValueError(f"{what} has the {name} {shown(member)}, which is of the wrong type")
        if type(member) is int and not 0 <= member < NUMBER_END:
            raise ValueError(f"{what} has the {name} {shown(member)}, must be in [0, 2^63)")


def columns_of(
    values: Sequence[Any], kinds: Mapping[str, type | tuple[type, ...]], what: str
) -> Sequence[list[Any]]:
    """Returns the members of many objects by column; checks each object like check_members()."""
    if {*map(type, values)} <= {dict} and {*map(len, values)} <= {len(kinds)}:
        with suppress(KeyError):  # of an object with another member, which is told below
            columns = [[*map(itemgetter(name), values)] for name in kinds]
            if all(map(_fits, columns, kinds.values())):
                return columns
    for value in values:
        check_members(value, kinds, what)
    raise AssertionError(f"{what} is valid, but its column is not")


def _fits(column: list[Any], kind: type | tuple[type, ...]) -> bool:
    types = {*map(type, column)}
    if not types <= {*(kind if isinstance(kind, tuple) else (kind,))}:
        return False
    if int not in types:
        return True
    return _in_range(column if len(types) == 1 else [m for m in column if type(m) is int])


def _in_range(numbers: list[int]) -> bool:
    return not numbers or (min(numbers) >= 0 and max(numbers) < NUMBER_END)


def is_numbers(value: Any) -> bool:
    """Returns whether this is a list of ints, without bools, from 0 to below 2^63."""
    if type(value) is not list:
        return False
    for number in value:  # noqa: SIM110 # a generator takes twice as long
        if type(number) is not int or not 0 <= number < NUMBER_END:
            return False
    return True


def without_numbers(lists: Sequence[Any]) -> int | None:
    """Returns the position of the first list that is_numbers() rejects; None if there is none.

    It checks all lists together, since there may be one for each of 100,000 tensors.
    """
    if {*map(type, lists)} <= {list}:
        numbers = [*chain.from_iterable(lists)]
        if {*map(type, numbers)} <= {int} and _in_range(numbers):
            return None
    return next(at for at, numbers in enumerate(lists) if not is_numbers(numbers))


def check_block_bytes(block_bytes: int) -> None:
    """Raises ValueError unless this is a permitted size of blocks."""
    if not PAGE_BYTES <= block_bytes <= BLOCK_BYTES_MAX or block_bytes % PAGE_BYTES:
        raise ValueError(f"block_bytes is {block_bytes}, must be a multiple of 4096 up to 64 MiB")


def check_texts(texts: Iterable[str]) -> None:
    """Raises ValueError unless check_text() accepts all of these texts."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        for text in texts:
            check_text(text)


def check_text(text: str) -> None:
    """Raises ValueError unless this is Unicode text: JSON can escape unpaired surrogates."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{shown(text)} must be Unicode text") from None


def shown(value: object) -> str:
    """Returns a value as text for a message, shortened if it is too long."""
    if isinstance(value, (list, dict)):
        return f"{'list' if isinstance(value, list) else 'object'} of {len(value)}"
    text = ascii(value[:_SHOWN_CHARS_MAX] if isinstance(value, str) else value)
    return text[: 2 * _SHOWN_CHARS_MAX]
