"""A pickle without some of its objects: a note in the place of each, all other bytes as before.

Responsible for where among the bytes an object begins and ends, by the operations of protocols 2
and 3, and for what others need of an object that is cut out. Nothing is made of the bytes here, and
no name in them is looked up: whatever is mistaken here, the reader of the result decides alone what
may run. It must not know which objects are to go: the caller tells, by what makes them.
"""

from __future__ import annotations

import os
import pickletools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

_KEY = f"fastckpt.left_out:{os.urandom(16).hex()}"  # of a note: no file can have it
_MAKER_CHARACTERS_MAX = 200
_SCANS_PER_BYTE = 64  # of uses of the memo, for each byte of the pickle
_SINCE_MARK = -1
# How many values an operation takes to make another one, or to change the one before them.
_NESTS = {"TUPLE": _SINCE_MARK, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NESTS |= {"EMPTY_DICT": 0, "EMPTY_LIST": 0, "EMPTY_TUPLE": 0}
_MAKES = {**_NESTS, "GLOBAL": 0, "EMPTY_SET": 0, "REDUCE": 2, "NEWOBJ": 2, "BINPERSID": 1}
_CHANGES = {"APPEND": 1, "APPENDS": _SINCE_MARK, "SETITEM": 2, "SETITEMS": _SINCE_MARK, "BUILD": 1}
_POPS = {"POP": 1, "POP_MARK": _SINCE_MARK}  # for objects whose parts refer to them
_ATOMS = frozenset(["NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"])
_ATOMS |= {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "SHORT_BINBYTES", "BINBYTES"}


@dataclass(eq=False, slots=True)
class _Value:
    """A value that a pickle makes by its bytes from begin to end.

    Attributes:
        is_whole: whether it is no dict, list or tuple, so that nothing inside of it can be cut out.
        maker: the name for which it has to go, or holds what has to go; "" otherwise.
        parent: the value that it was put into; is_key: as the key of an item.
        number: its number in the memo.
        uses: the values that are this one again, by way of the memo; is_use: whether it is such.
    """

    begin: int
    end: int
    is_whole: bool
    maker: str = ""
    parent: _Value | None = None
    is_key: bool = False
    number: int | None = None
    uses: list[_Value] | None = None
    is_use: bool = False


# A number or a text is told by where it begins alone: it neither has to go nor holds what has to.
_Item: TypeAlias = _Value | int


def left_out(value: object) -> str | None:
    """Returns what makes the object in whose place a note stands; None if the value is no note."""
    return value.get(_KEY) if type(value) is dict else None


def cut(content: bytes, is_refused: Callable[[bytes], bool]) -> bytes:
    """Returns a pickle without the objects that something refused has a part in: each as a whole,
    but of dicts, lists and tuples only the items.

    Args:
        content: the pickle.
        is_refused: tells whether the class or function that an operation names is refused.

    Raises:
        ValueError, LookupError: no pickler has written it with protocol 2 or 3.
    """
    reading = _Reading(content, is_refused)
    reading.run()
    return reading.without_tainted()


class _Reading:
    """The values of a pickle."""

    def __init__(self, content: bytes, is_refused: Callable[[bytes], bool]) -> None:
        self._content, self._is_refused = content, is_refused
        self._stack: list[_Item] = []
        self._marked: list[tuple[list[_Item], int]] = []  # the stacks below, and where marks are
        self._memo: dict[int, _Value] = {}
        self._atoms = set[int]()  # their numbers in the memo
        self._used_at, self._used = array("Q"), array("Q")  # where, and which number in the memo
        self._tainted: list[_Value] = []
        self._scans = _SCANS_PER_BYTE * len(content)

    def run(self) -> None:
        """Reads the pickle."""
        for name, argument, begin, end in _operations(self._content):
            if name in _ATOMS:
                self._stack.append(begin)
            elif name in ("BINPUT", "LONG_BINPUT"):
                self._number(argument, end)
            elif name in ("BINGET", "LONG_BINGET"):
                self._use(argument, begin, end)
            elif name == "MARK":
                self._marked.append((self._stack, begin))
                self._stack = []
            elif name in _MAKES:
                self._make(name, begin, end)
            elif name in _CHANGES:
                self._change(name, end)
            elif name in _POPS:
                self._take(_POPS[name], begin)
            elif name not in ("PROTO", "STOP"):
                raise ValueError(f"a pickle of protocol 2 or 3 has no {name}")

    def _take(self, count: int, begin: int) -> tuple[list[_Item], int]:
        """Takes values off the stack; returns them, and where they or their mark begin: at `begin`
        if there are none.
        """
        if count == _SINCE_MARK:
            taken = self._stack
            self._stack, begin = self._marked.pop()
            return taken, begin
        if len(self._stack) < count:
            raise ValueError("an operation takes more values than there are")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        for first in taken[:1]:
            begin = first if isinstance(first, int) else first.begin
        return taken, begin

    def _make(self, name: str, begin: int, end: int) -> None:
        parts, first = self._take(_MAKES[name], begin)
        value = _Value(first, end, name not in _NESTS)
        if name == "GLOBAL" and self._is_refused(self._content[begin:end]):
            module, text = self._content[begin + 1 : end].decode().split("\n")[:2]
            module = "builtins" if module == "__builtin__" else module  # as protocol 2 writes it
            value.maker = f"{module}.{text}"[:_MAKER_CHARACTERS_MAX]
        elif parts and isinstance(parts[0], _Value):  # what is called, if anything is
            value.maker = parts[0].maker
        if value.maker:
            self._tainted.append(value)
        _put_into(value, parts)
        self._stack.append(value)

    def _change(self, name: str, end: int) -> None:
        parts, _begin = self._take(_CHANGES[name], end)
        value = self._stack[-1]
        if isinstance(value, int) or value.is_use:
            raise ValueError(f"{name} changes what is no new object")
        _put_into(value, parts)
        for key in parts[::2] if name.startswith("SETITEM") else ():
            if isinstance(key, _Value):
                key.is_key = True
        value.is_whole |= name == "BUILD"
        value.end = end

    def _number(self, number: int, end: int) -> None:
        """Gives the last value a number in the memo."""
        value = self._stack[-1]
        if isinstance(value, int):
            value = _Value(value, end, is_whole=True)
            self._atoms.add(number)
        if value.is_use or value.number is not None or number in self._memo:
            raise ValueError("a value or a number is in the memo twice")
        value.number, value.end = number, end
        self._memo[number] = value

    def _use(self, number: int, begin: int, end: int) -> None:
        value = self._memo[number]
        self._used_at.append(begin)
        self._used.append(number)
        if number in self._atoms:
            self._stack.append(begin)
            return
        use = _Value(begin, end, is_whole=False, maker=value.maker, is_use=True)
        if use.maker:
            self._tainted.append(use)
        value.uses = [] if value.uses is None else value.uses
        value.uses.append(use)
        self._stack.append(use)

    def _spread(self) -> None:
        """Taints whatever holds something that is tainted."""
        ahead = self._tainted.copy()
        while ahead:
            value = ahead.pop()
            if value.is_key and value.parent is not None:
                value.parent.is_whole = True
            for user in (value.parent, *(value.uses or ())):
                if user is not None and not user.maker:
                    user.maker = value.maker
                    self._tainted.append(user)
                    ahead.append(user)

    def without_tainted(self) -> bytes:
        """Returns the pickle with notes."""
        self._spread()
        cuts = _outermost(value for value in self._tainted if value.is_whole)
        begins = [value.begin for value in cuts]
        # The memo may get values for the rest within the part that is cut out.
        needed: list[set[_Value]] = [set() for _ in cuts]
        for at, number in zip(self._used_at, self._used, strict=True):
            value = self._memo[number]
            place = bisect_right(begins, value.begin) - 1
            if place >= 0 and value.end <= cuts[place].end <= at and value is not cuts[place]:
                needed[place].add(value)
        parts, end = list[bytes](), 0
        for value, others in zip(cuts, needed, strict=True):
            parts += [self._content[end : value.begin], self._note(value, self._all(others, value))]
            end = value.end
        return b"".join([*parts, self._content[end:]])

    def _all(self, needed: set[_Value], within: _Value) -> set[_Value]:
        """Returns these values inside of another, and all those there that they need themselves."""
        ahead = [*needed]
        while ahead:
            value = ahead.pop()
            first = bisect_left(self._used_at, value.begin)
            last = first if value.maker else bisect_left(self._used_at, value.end)
            self._scans -= last - first
            if self._scans < 0:
                raise ValueError("its values refer to each other over and over")
            for number in self._used[first:last]:
                other = self._memo[number]
                is_inside = within.begin <= other.begin < within.end and other is not within
                if is_inside and other not in needed:
                    needed.add(other)
                    ahead.append(other)
        return needed

    def _note(self, value: _Value, needed: Iterable[_Value] = ()) -> bytes:
        """Returns the bytes that make a note and what else the memo needs."""
        number = b"" if value.number is None else b"r" + value.number.to_bytes(4, "little")
        begin = [b"}", number, b"(", _text(_KEY), _text(value.maker)]
        made, end = list[bytes](), 0
        for other in sorted(needed, key=_place):
            if other.maker:
                made.append(self._note(other))
            elif other.begin >= end:  # it is not inside of the one before
                made.append(self._content[other.begin : other.end])
                end = other.end
        return b"".join([*begin, *([_text(""), b"(", *made, b"t"] if made else []), b"u"])


def _put_into(value: _Value, parts: Iterable[_Item]) -> None:
    for part in parts:
        if isinstance(part, _Value):
            part.parent = value


def _place(value: _Value) -> tuple[int, int]:
    return value.begin, -value.end


def _outermost(values: Iterable[_Value]) -> list[_Value]:
    """Returns values in the order of their bytes, without those that are inside of another."""
    found: list[_Value] = []
    for value in sorted(values, key=_place):
        if not found or value.begin >= found[-1].end:
            found.append(value)
    return found


def _text(text: str) -> bytes:
    content = text.encode()
    return b"X" + len(content).to_bytes(4, "little") + content


def _operations(content: bytes) -> Iterator[tuple[str, Any, int, int]]:
    """Yields the name, the argument, the begin and the end of each operation."""
    name, argument, begin = "", None, 0
    for opcode, following, end in pickletools.genops(content):
        assert end is not None  # as it is for bytes
        if name:
            yield name, argument, begin, end
        name, argument, begin = opcode.name, following, end
    yield name, argument, begin, begin + 1
