"""JSON that may come from a damaged or hostile file: decoding it, and checks that formats share.

Responsible for refusing, with a ValueError, what Python's reader lets pass and no format here
uses. It must not know any format.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from fastckpt import _engine
from fastckpt.plan.image import PAGE_BYTES

NUMBER_END = 1 << 63
BLOCK_BYTES_MAX = 64 << 20  # a reader holds whole blocks in memory, however little it needs of them
# Of shapes and such, which many tensors have in common, whoever looks at each but once remembers at
# most so many: tuples of numbers can be made that all have one hash.
KINDS_MAX = 256
_SHOWN_CHARS_MAX = 100


def decode(text: bytes, columns: Mapping[str, Iterable[str]] | None = None) -> object:
    """Decodes JSON, using at most a few tens of bytes of memory for each byte of it.

    Short lists of the same numbers may be one list, so callers must change none.

    Args:
        columns: members of the outermost object that may be lists of many objects, and the names of
            their members. If each of these has just those, in this order, the list is read as a
            tuple of columns, which is what columns_of() makes of it.

    Raises:
        ValueError: it is not UTF-8 or not JSON, an object has a name twice, or a number is NaN,
            infinite or too long.
        RecursionError: it is nested too deeply.
    """
    return _engine.read_json(text.decode(), {k: tuple(v) for k, v in (columns or {}).items()})


def encode(value: object) -> str:
    """Returns compact JSON in ASCII. Raises ValueError for NaN and infinities."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def check_members(value: Any, kinds: Mapping[str, type | tuple[type, ...]], what: str) -> None:
    """Raises ValueError unless this is an object of exactly these members, ints in [0, 2^63)."""
    if type(value) is not dict:
        raise ValueError(f"{what} is not an object")
    if value.keys() != kinds.keys():
        wrong = ", ".join(map(shown, sorted(value.keys() ^ kinds.keys())[:9]))
        raise ValueError(f"{what} lacks members, or has unknown ones: {wrong}")
    for name, kind in kinds.items():
        member = value[name]
        if type(member) not in (kind if isinstance(kind, tuple) else (kind,)):
            raise ValueError(f"{what} has the {name} {shown(member)}, which is of a wrong type")
        if type(member) is int and not 0 <= member < NUMBER_END:
            raise ValueError(f"{what} has the {name} {shown(member)}, which is not in [0, 2^63)")


def columns_of(
    values: Any, kinds: Mapping[str, type | tuple[type, ...]], what: str
) -> Sequence[list[Any]]:
    """Returns the members of many objects, a column for each; raises as check_members() of each.

    Args:
        values: the objects, or the columns that decode() has made of them.
    """
    columns = values if type(values) is tuple else _columns(values, kinds)
    if columns is not None and all(map(_fits, columns, kinds.values())):
        return columns
    objects = values
    if type(values) is tuple:
        objects = [dict(zip(kinds, row, strict=True)) for row in zip(*values, strict=True)]
    for value in objects:
        check_members(value, kinds, what)
    raise AssertionError(f"{what} fits, but not in its column")


def _columns(values: Sequence[Any], names: Collection[str]) -> Sequence[list[Any]] | None:
    """Returns a column for each name; None unless all values are objects of members so named."""
    if not ({*map(type, values)} <= {dict} and {*map(len, values)} <= {len(names)}):
        return None
    try:
        return [[*map(itemgetter(name), values)] for name in names]
    except KeyError:
        return None


def _fits(column: list[Any], kind: type | tuple[type, ...]) -> bool:
    found = {*map(type, column)}
    if not found <= {*(kind if isinstance(kind, tuple) else (kind,))}:
        return False
    if int not in found:
        return True
    return _in_range(column if len(found) == 1 else [m for m in column if type(m) is int])


def _in_range(numbers: list[int]) -> bool:
    return not numbers or (min(numbers) >= 0 and max(numbers) < NUMBER_END)


def is_numbers(value: Any) -> bool:
    """Tells whether this is a list of ints, without bools, from 0 to below 2^63."""
    if type(value) is not list:
        return False
    for number in value:  # noqa: SIM110 # a generator takes twice as long
        if type(number) is not int or not 0 <= number < NUMBER_END:
            return False
    return True


def without_numbers(lists: Sequence[Any]) -> int | None:
    """Returns the position of the first of these that is_numbers() denies; None if there is none.

    It looks at all of them together, and but once at one that is there many times: there may be one
    for each of 100,000 tensors.
    """
    distinct = dict(zip(map(id, lists), lists, strict=True)).values()
    if {*map(type, distinct)} <= {list}:
        numbers = [*chain.from_iterable(distinct)]
        if {*map(type, numbers)} <= {int} and _in_range(numbers):
            return None
    return next(at for at, numbers in enumerate(lists) if not is_numbers(numbers))


def check_block_bytes(block_bytes: int) -> None:
    """Raises ValueError unless files may be read in blocks of this size."""
    if not PAGE_BYTES <= block_bytes <= BLOCK_BYTES_MAX or block_bytes % PAGE_BYTES:
        raise ValueError(f"block_bytes is {block_bytes}, not a multiple of 4096 up to 64 MiB")


def check_texts(texts: Iterable[str]) -> None:
    """Raises ValueError unless check_text() passes all of these."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        for text in texts:
            check_text(text)


def check_text(text: str) -> None:
    """Raises ValueError unless this is Unicode text: JSON can escape half of a surrogate pair."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{shown(text)} is not Unicode text") from None


def shown(value: object) -> str:
    """Returns a value for a message, cut short if it is too long to read."""
    if isinstance(value, (list, dict)):
        return f"{'list' if isinstance(value, list) else 'object'} of {len(value)}"
    text = ascii(value[:_SHOWN_CHARS_MAX] if isinstance(value, str) else value)
    return text[: 2 * _SHOWN_CHARS_MAX]
