"""Pickles of plain values, read by an interpreter that runs nothing which they name.

Responsible for the opcodes that picklers of protocol 2 and later write, and for a bound: the value
takes at most some hundred times the memory of its bytes, whatever they claim. (For Python's own
reader, a few dozen bytes may cost gigabytes or hours: it allocates what a length or a memo's index
claims, and copies, joins or hashes one value again and again.) Time is bounded, too, but for keys
that are tuples made to collide, which take the square of their number. This takes several times as
long as that reader, which is in C. It must not know which classes a file may hold: the caller
tells.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

_KEY_DEPTH_MAX = 8  # of tuples in a key that is a tuple: hash() recurses on the stack of C
_KEY_BITS_MAX = 64  # of a key that is an int, which is hashed anew each time
_HASHES_PER_BYTE = 64
_NAME_CHARACTERS_MAX = 1000  # of a module or a global: whoever is told of it keeps a copy
_WITHOUT_LENGTH = frozenset({int, bool, type(None)})  # what arguments of calls often are
_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}

# The errors that the interpreter raises for bytes that no pickler wrote.
DAMAGE = (ValueError, TypeError, AttributeError, LookupError, struct.error)

_u16 = struct.Struct("<H").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_f64 = struct.Struct(">d").unpack_from


class Refused(pickle.UnpicklingError):
    """A pickle, which need not be damaged, asks for something that it is not given."""


@dataclass(frozen=True, slots=True)
class Callee:
    """Stands for a global that a pickle calls with arguments, which are passed to `make`.

    `make` takes memory in proportion to the length of its arguments, which is accounted for, and
    raises ValueError or TypeError for arguments that no pickler would have written.
    """

    make: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Instance:
    """Stands for a class whose instances are made without arguments and then get attributes.

    `take` sets these if the pickled state is not the `__dict__`.
    """

    kind: type
    take: Callable[[Any, Any], None] | None = None


@dataclass(eq=False, slots=True)
class Ignored:
    """Stands for a class or function that is of no interest, and for each object that is made with
    it, whatever is done to that. `name` is that of the global, with its module.
    """

    name: str


def loads(
    content: bytes,
    find: Callable[[str, str], Any],
    named: Callable[[Any], Any] | None = None,
    stateful: Sequence[Instance] = (),
) -> tuple[Any, int]:
    """Returns the value of the pickle that content begins with, and the pickle's size in bytes.

    Args:
        find: is called with module and name of each global. It returns a Callee, an Instance,
            an Ignored, or a value that can do no harm, and raises Refused for all others.
        named: returns the object that a persistent id stands for, and raises ValueError for one
            that no pickler would have written; None: none is allowed.
        stateful: classes of which a Callee makes instances that may get attributes.

    Raises:
        Refused: the pickle needs something that it is not given.
        DAMAGE: one of these errors, because no pickler wrote the bytes.
    """
    machine = _Machine(content, find, named)
    machine.records.update({each.kind: each for each in stateful})
    return machine.run()


class _Machine:
    """The state of one loads(). A method for each opcode takes the offset behind it, where its
    argument begins, and returns where that ends.
    """

    def __init__(
        self,
        content: bytes,
        find: Callable[[str, str], Any],
        named: Callable[[Any], Any] | None,
    ) -> None:
        self._content, self._find, self._named = content, find, named
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks under the marks
        self._memo: dict[int, Any] = {}
        self.records: dict[type, Instance] = {}  # classes named so far
        # A pickler writes each element once, in at least a byte, before it is copied: whoever
        # needs more copies than there are bytes copies the same values over and over.
        self._copies_left = len(content)
        self._hashes_left = _HASHES_PER_BYTE * len(content)  # of elements of keys

    def run(self) -> tuple[Any, int]:
        content, table, memo, stack, at = self._content, _TABLE, self._memo, self._stack, 0
        below = self._below
        while True:
            op = content[at]
            # The most frequent opcodes, in this order in each half, do without a call.
            if op >= 0x60:
                if op == 0x72:  # LONG_BINPUT
                    memo[_u32(content, at + 1)[0]] = stack[-1]
                    at += 5
                    continue
                if op == 0x68:  # BINGET
                    stack.append(memo[content[at + 1]])
                    at += 2
                    continue
                if op == 0x74:  # TUPLE
                    items = tuple(stack)
                    stack = self._stack = below.pop()
                    stack.append(items)
                    at += 1
                    continue
                if op == 0x86:  # TUPLE2
                    last = stack.pop()
                    stack[-1] = (stack[-1], last)
                    at += 1
                    continue
                if op == 0x94:  # MEMOIZE
                    memo[len(memo)] = stack[-1]
                    at += 1
                    continue
                if op == 0x6A:  # LONG_BINGET
                    stack.append(memo[_u32(content, at + 1)[0]])
                    at += 5
                    continue
            elif op == 0x4B:  # BININT1
                stack.append(content[at + 1])
                at += 2
                continue
            elif op == 0x28:  # MARK
                below.append(stack)
                stack = self._stack = []
                at += 1
                continue
            elif op == 0x58:  # BINUNICODE
                begin, nbytes = at + 5, _u32(content, at + 1)[0]
                stack.append(self._span(begin, nbytes).decode("utf-8", "surrogatepass"))
                at = begin + nbytes
                continue
            elif op == 0x2E:  # STOP
                return stack.pop(), at + 1
            if op in table:
                at = table[op](self, at + 1)
                stack = self._stack
            elif op in _NAMES:
                raise Refused(f"the opcode {_NAMES[op]}")
            else:
                raise ValueError(f"byte {at} is no opcode")

    def _span(self, begin: int, nbytes: int) -> bytes:
        part = self._content[begin : begin + nbytes]
        if len(part) != nbytes:
            raise ValueError(f"it claims {nbytes} bytes from {begin} on, which is more than it has")
        return part

    def _copies(self, count: int) -> None:
        self._copies_left -= count
        if self._copies_left < 0:
            raise ValueError("it copies the same values over and over")

    def _marked(self) -> list[Any]:
        """Returns what was pushed since the last mark."""
        items, self._stack = self._stack, self._below.pop()
        return items

    # Values

    def _none(self, at: int) -> int:
        self._stack.append(None)
        return at

    def _true(self, at: int) -> int:
        self._stack.append(True)
        return at

    def _false(self, at: int) -> int:
        self._stack.append(False)
        return at

    def _int2(self, at: int) -> int:
        self._stack.append(_u16(self._content, at)[0])
        return at + 2

    def _int4(self, at: int) -> int:
        self._stack.append(_i32(self._content, at)[0])
        return at + 4

    def _float(self, at: int) -> int:
        self._stack.append(_f64(self._content, at)[0])
        return at + 8

    def _long1(self, at: int) -> int:
        return self._long(at + 1, self._content[at])

    def _long4(self, at: int) -> int:
        return self._long(at + 4, _u32(self._content, at)[0])

    def _long(self, at: int, nbytes: int) -> int:
        self._stack.append(int.from_bytes(self._span(at, nbytes), "little", signed=True))
        return at + nbytes

    def _text1(self, at: int) -> int:
        return self._text(at + 1, self._content[at])

    def _text8(self, at: int) -> int:
        return self._text(at + 8, _u64(self._content, at)[0])

    def _text(self, at: int, nbytes: int) -> int:
        self._stack.append(self._span(at, nbytes).decode("utf-8", "surrogatepass"))
        return at + nbytes

    def _bytes1(self, at: int) -> int:
        return self._bytes(at + 1, self._content[at])

    def _bytes4(self, at: int) -> int:
        return self._bytes(at + 4, _u32(self._content, at)[0])

    def _bytes8(self, at: int) -> int:
        return self._bytes(at + 8, _u64(self._content, at)[0])

    def _bytes(self, at: int, nbytes: int) -> int:
        self._stack.append(self._span(at, nbytes))
        return at + nbytes

    def _bytearray(self, at: int) -> int:
        at = self._bytes8(at)
        self._stack[-1] = bytearray(self._stack[-1])
        return at

    # Containers

    def _empty_tuple(self, at: int) -> int:
        self._stack.append(())
        return at

    def _tuple1(self, at: int) -> int:
        self._stack[-1] = (self._stack[-1],)
        return at

    def _tuple3(self, at: int) -> int:
        last, middle = self._stack.pop(), self._stack.pop()
        self._stack[-1] = (self._stack[-1], middle, last)
        return at

    def _empty_list(self, at: int) -> int:
        self._stack.append([])
        return at

    def _empty_dict(self, at: int) -> int:
        self._stack.append({})
        return at

    def _empty_set(self, at: int) -> int:
        self._stack.append(set())
        return at

    def _list(self, at: int) -> int:
        items = self._marked()
        self._stack.append(items)
        return at

    def _dict(self, at: int) -> int:
        items = self._marked()
        self._stack.append({})
        return self._put_items(items, at)

    def _frozenset(self, at: int) -> int:
        items = self._marked()
        self._stack.append(frozenset(map(self.key, items)))
        return at

    def _append(self, at: int) -> int:
        return self._extend([self._stack.pop()], at)

    def _appends(self, at: int) -> int:
        return self._extend(self._marked(), at)

    def _extend(self, items: list[Any], at: int) -> int:
        target = self._stack[-1]
        if type(target) is Ignored:
            return at
        if type(target) is not list:
            raise ValueError("it appends to a value that is not a list")
        target.extend(items)
        return at

    def _set_item(self, at: int) -> int:
        value = self._stack.pop()
        return self._put_items([self._stack.pop(), value], at)

    def _set_items(self, at: int) -> int:
        return self._put_items(self._marked(), at)

    def _put_items(self, items: list[Any], at: int) -> int:
        target, pairs = self._stack[-1], iter(items)
        if type(target) is Ignored:
            return at
        if type(target) is not dict and type(target) is not OrderedDict:
            raise ValueError("it puts items into a value that is not a dict")
        for name, value in zip(pairs, pairs, strict=True):
            target[name if type(name) is str else self.key(name)] = value
        return at

    def _add_items(self, at: int) -> int:
        items = self._marked()
        target = self._stack[-1]
        if type(target) is Ignored:
            return at
        if type(target) is not set:
            raise ValueError("it adds items to a value that is not a set")
        target.update(map(self.key, items))
        return at

    def key(self, value: Any, depth: int = _KEY_DEPTH_MAX) -> Any:
        """Returns the value; raises ValueError if hashing and comparing it takes unbounded time."""
        kind = type(value)
        if kind in self.records:
            parts: Collection[Any] = vars(value).values()
        elif isinstance(value, tuple | frozenset):
            parts = value
        elif kind.__hash__ is None:
            raise ValueError("a key is a list, a dict or a set")
        elif kind is int and value.bit_length() > _KEY_BITS_MAX:
            raise ValueError(f"a key is a number of {value.bit_length()} bits")
        else:
            return value
        self._hashes_left -= len(parts)
        if depth == 0 or self._hashes_left < 0:
            raise ValueError("a key is nested too deeply, or used too often")
        for part in parts:
            if type(part) is str or type(part) is bytes:
                self._hashes_left -= len(part)  # of a key in a message or a name
            else:
                self.key(part, depth - 1)
        return value

    # Objects

    def _global(self, at: int) -> int:
        middle = self._content.index(b"\n", at)
        end = self._content.index(b"\n", middle + 1)
        module, name = self._content[at:middle], self._content[middle + 1 : end]
        return self._push_found(module.decode(), name.decode(), end + 1)

    def _stack_global(self, at: int) -> int:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("the name of a global is not text")
        return self._push_found(module, name, at)

    def _push_found(self, module: str, name: str, at: int) -> int:
        if max(len(module), len(name)) > _NAME_CHARACTERS_MAX:
            raise ValueError(f"the name of a global has {max(len(module), len(name))} characters")
        found = self._find(module, name)
        if isinstance(found, Instance):
            self.records[found.kind] = found
        self._stack.append(found)
        return at

    def _reduce(self, at: int) -> int:
        arguments, called = self._stack.pop(), self._stack.pop()
        if type(called) is Ignored:
            self._stack.append(Ignored(called.name))
            return at
        if type(called) is not Callee:
            raise Refused("a call of something that may not be called")
        if type(arguments) is not tuple:
            raise ValueError("the arguments of a call are not a tuple")
        copies = len(arguments)
        for argument in arguments:
            if type(argument) not in _WITHOUT_LENGTH and hasattr(argument, "__len__"):
                copies += len(argument)
        self._copies(copies)
        for argument in arguments:
            if type(argument) is list:  # which may become a set
                for part in argument:
                    self.key(part)
        self._stack.append(called.make(*arguments))
        return at

    def _persistent_id(self, at: int) -> int:
        if self._named is None:
            raise Refused("the opcode BINPERSID")
        self._stack[-1] = self._named(self._stack[-1])
        return at

    def _new(self, at: int) -> int:
        arguments, named = self._stack.pop(), self._stack.pop()
        if type(named) is Ignored:
            self._stack.append(Ignored(named.name))
            return at
        if type(named) is not Instance:
            raise Refused("an instance of something that may have no instances")
        if arguments != ():
            raise ValueError(f"a {named.kind.__name__} is made with arguments")
        self._stack.append(object.__new__(named.kind))
        return at

    def _new_with_names(self, at: int) -> int:
        _names, _arguments, kind = self._stack.pop(), self._stack.pop(), self._stack.pop()
        if type(kind) is not Ignored:
            raise Refused("an instance that is made with named arguments")
        self._stack.append(Ignored(kind.name))
        return at

    def _build(self, at: int) -> int:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is Ignored:
            return at
        record = self.records.get(type(target))
        if record is None:
            what = "class" if type(target) is Instance else type(target).__name__
            raise Refused(f"a change of a {what}")
        if record.take is not None:
            record.take(target, state)
            return at
        if type(state) is not dict:
            raise ValueError(f"the attributes of a {type(target).__name__} are not a dict")
        self._copies(len(state))
        for name in state:
            if type(name) is not str:
                raise ValueError(f"an attribute's name in a {type(target).__name__} is not text")
        target.__dict__.update(state)
        return at

    # The stack, the memo, and what surrounds the pickle

    def _pop(self, at: int) -> int:
        if self._stack:
            self._stack.pop()
        else:
            self._marked()
        return at

    def _pop_mark(self, at: int) -> int:
        self._marked()
        return at

    def _duplicate(self, at: int) -> int:
        self._stack.append(self._stack[-1])
        return at

    def _put1(self, at: int) -> int:
        self._memo[self._content[at]] = self._stack[-1]
        return at + 1

    def _protocol(self, at: int) -> int:
        if self._content[at] > pickle.HIGHEST_PROTOCOL:
            raise ValueError(f"protocol {self._content[at]} is not known")
        return at + 1

    def _frame(self, at: int) -> int:
        if _u64(self._content, at)[0] > len(self._content) - at - 8:
            raise ValueError("a frame is longer than the bytes that follow")
        return at + 8


_STEPS: dict[str, Callable[[_Machine, int], int]] = {
    "NONE": _Machine._none,
    "NEWTRUE": _Machine._true,
    "NEWFALSE": _Machine._false,
    "BININT2": _Machine._int2,
    "BININT": _Machine._int4,
    "BINFLOAT": _Machine._float,
    "LONG1": _Machine._long1,
    "LONG4": _Machine._long4,
    "SHORT_BINUNICODE": _Machine._text1,
    "BINUNICODE8": _Machine._text8,
    "SHORT_BINBYTES": _Machine._bytes1,
    "BINBYTES": _Machine._bytes4,
    "BINBYTES8": _Machine._bytes8,
    "BYTEARRAY8": _Machine._bytearray,
    "EMPTY_TUPLE": _Machine._empty_tuple,
    "TUPLE1": _Machine._tuple1,
    "TUPLE3": _Machine._tuple3,
    "EMPTY_LIST": _Machine._empty_list,
    "EMPTY_DICT": _Machine._empty_dict,
    "EMPTY_SET": _Machine._empty_set,
    "LIST": _Machine._list,
    "DICT": _Machine._dict,
    "FROZENSET": _Machine._frozenset,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "SETITEM": _Machine._set_item,
    "SETITEMS": _Machine._set_items,
    "ADDITEMS": _Machine._add_items,
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._reduce,
    "BINPERSID": _Machine._persistent_id,
    "NEWOBJ": _Machine._new,
    "NEWOBJ_EX": _Machine._new_with_names,
    "BUILD": _Machine._build,
    "POP": _Machine._pop,
    "POP_MARK": _Machine._pop_mark,
    "DUP": _Machine._duplicate,
    "BINPUT": _Machine._put1,
    "PROTO": _Machine._protocol,
    "FRAME": _Machine._frame,
}
_TABLE = {code: _STEPS[name] for code, name in _NAMES.items() if name in _STEPS}
