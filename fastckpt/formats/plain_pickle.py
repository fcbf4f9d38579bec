"""An interpreter for pickles of plain values, which runs no code that a pickle names.

Responsible for the opcodes of protocol 2 and later, and for a bound on memory: for any bytes, the
value takes at most a few hundred times their size. (In Python's own reader, a few dozen bytes may
cost gigabytes or hours, because it allocates the memory that a length or a memo's index claims, and
can be made to copy, join or hash one value again and again.) Time is also bounded, except that keys
that are tuples with colliding hashes take quadratic time.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, TypeAlias

_PROTOCOL_MAX = 5
_NAME_CHARACTERS_MAX = 1000  # of a global: whoever is told of one keeps a copy
_KEY_DEPTH_MAX = 8  # of tuples in a key that is a tuple: hash() recurses on the stack of C
_KEY_BITS_MAX = 64  # of a key that is an int, which is hashed anew each time
_HASHES_PER_BYTE = 64
_PARTS_MAX = 1000  # of an object that is called
NUMBER_END = 1 << 63  # of numbers of elements, and of bytes
_U32 = struct.Struct("<I").unpack_from

# The errors that the interpreter raises for bytes that no pickler wrote.
DAMAGE = (ValueError, TypeError, AttributeError, LookupError, struct.error)


class Refused(pickle.UnpicklingError):
    """A pickle needs something that is not permitted; it need not be damaged."""


@dataclass(frozen=True, slots=True)
class Callee:
    """Stands for a global that a pickle may call; the arguments are passed to `make`.

    `make` must use memory in proportion to the length of its arguments, since the bound on memory
    relies on this. It raises ValueError or TypeError for arguments that no pickler would write.
    """

    make: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Instance:
    """Stands for a class whose instances are made without arguments and then get attributes.

    `take` sets the attributes if the pickled state is not the `__dict__`.
    """

    kind: type
    take: Callable[[Any, Any], None] | None = None


@dataclass(eq=False, slots=True)
class Ignored:
    """Stands for a class or function that is ignored, and for each object made with it; changes of
    the object are also ignored. `name` is that of the global, with its module.
    """

    name: str

    def made(self, _how: str, _arguments: Any) -> Ignored:
        """Returns the stand-in for an object that is made with arguments."""
        return Ignored(self.name)

    def got(self, _how: str, _parts: Any) -> None:
        """Receives the parts that are added to the object."""


@dataclass(eq=False, slots=True)
class Kept(Ignored):
    """An Ignored that records how the object is made.

    Attributes:
        value: a value that find() sets for the class or function; None if it needs none.
        parts: the operations that make the object, with their values: "reduce" or "newobj" with
            arguments, then "build" with a state, "append" or "add" with items, "set" with pairs.
            None for a class or function itself.
    """

    value: Any = None
    parts: list[tuple[str, Any]] = field(default_factory=list)

    def made(self, how: str, arguments: Any) -> Kept:
        if len(self.parts) > _PARTS_MAX:  # all of them are copied at each call
            raise ValueError(f"the results of {self.name} are called too often")
        return Kept(self.name, self.value, [*self.parts, (how, arguments)])

    def got(self, how: str, parts: Any) -> None:
        self.parts.append((how, parts))


def loads(
    content: bytes,
    find: Callable[[str, str], Any],
    named: Callable[[Any], Any] | None = None,
    stateful: Sequence[Instance] = (),
) -> tuple[Any, int]:
    """Reads the pickle at the beginning of `content`; returns its value and its size in bytes.

    Args:
        find: a function that is called with the module and name of each global. It returns a
            Callee, an Instance, an Ignored, a Kept or a harmless value, and raises Refused for
            other globals.
        named: a function that returns the object for a persistent id, and raises ValueError for an
            id that no pickler would write. None: persistent ids are refused.
        stateful: classes whose instances, made by a Callee, may get attributes.

    Raises:
        Refused: the pickle needs something that is not permitted.
        DAMAGE: one of these errors, if no pickler can have written the bytes.
    """
    return _Machine(content, find, named, stateful).run()


def are_numbers(values: Iterable[Any]) -> bool:
    """Returns whether all values are ints, not bools, from 0 to below 2^63."""
    for value in values:  # noqa: SIM110 # a generator takes twice as long
        if type(value) is not int or not 0 <= value < NUMBER_END:
            return False
    return True


class _Machine:
    """The state of one read. There is one method per opcode; it gets the offset of the opcode's
    argument in the pickle and returns the argument's end.
    """

    def __init__(
        self,
        content: bytes,
        find: Callable[[str, str], Any],
        named: Callable[[Any], Any] | None,
        stateful: Sequence[Instance],
    ) -> None:
        self.content, self._find, self._named = content, find, named
        self.stack: list[Any] = []  # the values above the last mark
        self._below: list[list[Any]] = []  # those below each mark
        self.memo: dict[int, Any] = {}
        self._records = {each.kind: each for each in stateful}  # of the classes named so far
        # A pickler writes each element once, in at least a byte, before it is copied: whoever needs
        # more copies than there are bytes copies the same values over and over.
        self._copies, self._hashes = len(content), _HASHES_PER_BYTE * len(content)

    def run(self) -> tuple[Any, int]:
        content, memo, at = self.content, self.memo, 0
        while True:
            op, stack = content[at], self.stack
            at += 1
            # First those that stand for each of very many tensors.
            if op == 0x68:  # BINGET
                stack.append(memo[content[at]])
                at += 1
            elif op == 0x72:  # LONG_BINPUT
                memo[_U32(content, at)[0]] = stack[-1]
                at += 4
            elif op == 0x4B:  # BININT1
                stack.append(content[at])
                at += 1
            elif op == 0x28:  # MARK
                self._below.append(stack)
                self.stack = []
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[_U32(content, at)[0]])
                at += 4
            elif op == 0x74:  # TUPLE
                self.stack = self._below.pop()
                self.stack.append(tuple(stack))
            elif op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x71:  # BINPUT
                memo[content[at]] = stack[-1]
                at += 1
            elif op == 0x2E:  # STOP
                return stack.pop(), at
            else:
                at = _OPCODES[op](self, at)

    def _marked(self) -> list[Any]:
        """Pops the last mark and the values above it from the stack; returns these values."""
        values, self.stack = self.stack, self._below.pop()
        return values

    def _last(self, count: int) -> list[Any]:
        """Pops `count` values from the stack and returns them."""
        values = self.stack[-count:]
        if len(values) < count:
            raise IndexError("pop from empty list")
        del self.stack[-count:]
        return values

    def op_proto(self, at: int) -> int:
        if self.content[at] > _PROTOCOL_MAX:
            raise ValueError(f"protocol {self.content[at]} is not supported")
        return at + 1

    def op_frame(self, at: int) -> int:
        if int.from_bytes(self.content[at : at + 8], "little") > len(self.content) - at - 8:
            raise ValueError("a frame exceeds the bytes that follow")
        return at + 8

    def op_pop(self, at: int) -> int:
        if self.stack:
            self.stack.pop()
        else:
            self._marked()
        return at

    def op_pop_mark(self, at: int) -> int:
        self._marked()
        return at

    def op_dup(self, at: int) -> int:
        self.stack.append(self.stack[-1])
        return at

    def op_list(self, at: int) -> int:
        values = self._marked()
        self.stack.append(values)
        return at

    def op_dict(self, at: int) -> int:
        values, result = self._marked(), dict[Any, Any]()
        self._put_items(result, values)
        self.stack.append(result)
        return at

    def op_frozenset(self, at: int) -> int:
        values = self._marked()
        self._check_keys(values)
        self.stack.append(frozenset(values))
        return at

    def op_append(self, at: int) -> int:
        return self._extend(self._last(1), at)

    def op_appends(self, at: int) -> int:
        return self._extend(self._marked(), at)

    def _extend(self, values: list[Any], at: int) -> int:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(values)
        elif isinstance(target, Ignored):
            target.got("append", values)
        else:
            raise ValueError("it appends to a value that must be a list")
        return at

    def op_setitem(self, at: int) -> int:
        values = self._last(2)
        return self._put_items(self.stack[-1], values, at)

    def op_setitems(self, at: int) -> int:
        values = self._marked()
        return self._put_items(self.stack[-1], values, at)

    def _put_items(self, target: Any, values: list[Any], at: int = 0) -> int:
        if type(target) is dict or type(target) is OrderedDict:
            keys = values[::2]
            if not {*map(type, keys)} <= {str}:
                self._check_keys(keys)
            target.update(zip(keys, values[1::2], strict=True))
        elif isinstance(target, Ignored):
            if type(target) is Kept:
                self._check_keys(values[::2], has_others=True)
            target.got("set", [*zip(values[::2], values[1::2], strict=True)])
        else:
            raise ValueError("it puts items into a value that must be a dict")
        return at

    def op_additems(self, at: int) -> int:
        values = self._marked()
        target = self.stack[-1]
        if type(target) is set:
            self._check_keys(values)
            target.update(values)
        elif isinstance(target, Ignored):
            target.got("add", values)
        else:
            raise ValueError("it adds items to a value that must be a set")
        return at

    def op_reduce(self, at: int) -> int:
        stack = self.stack
        arguments, called = stack.pop(), stack[-1]
        if type(called) is Ignored:
            stack[-1] = Ignored(called.name)
        elif type(called) not in (Callee, Kept):
            raise Refused("a call of an object that may not be called")
        elif type(arguments) is not tuple:
            raise ValueError("the arguments of a call must be a tuple")
        elif type(called) is Kept:
            self._check_parts(arguments)
            stack[-1] = called.made("reduce", arguments)
        else:
            count = len(arguments)
            for argument in arguments:
                if type(argument) is int:
                    continue
                if hasattr(argument, "__len__"):
                    count += len(argument)
                if type(argument) is list:  # it may become a set
                    self._check_keys(argument)
            self._copy(count)
            stack[-1] = called.make(*arguments)
        return at

    def _check_parts(self, parts: Sequence[Any]) -> None:
        """Raises ValueError if the later construction of an object from these parts could take too
        long, because it copies them, and may put lists into a set.
        """
        nests = [part for part in parts if type(part) in (list, tuple, dict, set, frozenset)]
        self._hashes -= len(parts) + sum(map(len, nests))
        if self._hashes < 0:
            raise ValueError("it copies the same values over and over")
        for nest in nests:
            if type(nest) is list:
                self._check_keys(nest, has_others=True)

    def op_binpersid(self, at: int) -> int:
        if self._named is None:
            raise Refused("the opcode BINPERSID")
        self.stack[-1] = self._named(self.stack[-1])
        return at

    def op_next_buffer(self, at: int) -> int:
        """Replaces an out-of-band array by the object for the persistent id None."""
        self.stack.append(None)
        return self.op_binpersid(at)

    def op_newobj(self, at: int) -> int:
        named, arguments = self._last(2)
        if isinstance(named, Ignored):
            if type(named) is Kept and type(arguments) is tuple:
                self._check_parts(arguments)
            result: Any = named.made("newobj", arguments)
        elif type(named) is not Instance:
            raise Refused("an instance of a class that may not have instances")
        elif arguments != ():
            raise ValueError(f"a {named.kind.__name__} is made with arguments")
        else:
            result = object.__new__(named.kind)
        self.stack.append(result)
        return at

    def op_newobj_ex(self, at: int) -> int:
        named, arguments, names = self._last(3)
        if not isinstance(named, Ignored):
            raise Refused("an instance that is made with named arguments")
        self.stack.append(named.made("newobj_ex", (arguments, names)))
        return at

    def op_build(self, at: int) -> int:
        state = self.stack.pop()
        target = self.stack[-1]
        kind = type(target)
        if isinstance(target, Ignored):
            if kind is Kept:
                self._check_parts(state if type(state) is tuple else (state,))
            target.got("build", state)
            return at
        record = self._records.get(kind)
        if record is None:
            what = "class" if kind is Instance else kind.__name__
            raise Refused(f"a change of a {what}")
        if record.take is not None:
            record.take(target, state)
            return at
        if type(state) is not dict:
            raise ValueError(f"the attributes of a {kind.__name__} must be a dict")
        self._copy(len(state))
        if not {*map(type, state)} <= {str}:
            raise ValueError(f"an attribute's name in a {kind.__name__} must be text")
        target.__dict__.update(state)
        return at

    def op_global(self, at: int) -> int:
        between = self.content.index(b"\n", at)
        end = self.content.index(b"\n", between + 1)
        self._name(self.content[at:between].decode(), self.content[between + 1 : end].decode())
        return end + 1

    def op_stack_global(self, at: int) -> int:
        module, name = self._last(2)
        if type(module) is not str or type(name) is not str:
            raise ValueError("the name of a global must be text")
        self._name(module, name)
        return at

    def _name(self, module: str, name: str) -> None:
        characters = max(len(module), len(name))
        if characters > _NAME_CHARACTERS_MAX:
            raise ValueError(f"the name of a global has {characters} characters")
        maker = self._find(module, name)
        if type(maker) is Instance:
            self._records[maker.kind] = maker
        self.stack.append(maker)

    def _copy(self, count: int) -> None:
        self._copies -= count
        if self._copies < 0:
            raise ValueError("it copies the same values over and over")

    def _check_keys(
        self, values: Sequence[Any], depth: int = _KEY_DEPTH_MAX, has_others: bool = False
    ) -> None:
        """Raises ValueError if hashing and comparing these values could take unbounded time; or if
        they cannot be hashed, unless `has_others` is set because they need not be keys.
        """
        for value in values:
            kind = type(value)
            if kind in self._records:
                parts = [*vars(value).values()]
            elif isinstance(value, (tuple, frozenset)):
                parts = [*value]
            elif has_others:
                continue
            elif kind.__hash__ is None:
                raise ValueError("a key must not be a list, a dict or a set")
            elif kind is int and value.bit_length() > _KEY_BITS_MAX:
                raise ValueError(f"a key is a number of {value.bit_length()} bits")
            else:
                continue
            texts = [part for part in parts if type(part) in (str, bytes)]
            self._hashes -= len(parts) + sum(map(len, texts))  # of a key in a message or a name
            if depth == 0 or self._hashes < 0:
                raise ValueError("a key is nested too deeply, or used too often")
            parts = [part for part in parts if type(part) is not str]
            self._check_keys(parts, depth - 1, has_others)


_Opcode: TypeAlias = Callable[[_Machine, int], int]


def _constant(value: Any) -> _Opcode:
    def push(machine: _Machine, at: int) -> int:
        machine.stack.append(value)
        return at

    return push


def _empty(kind: Callable[[], Any]) -> _Opcode:
    def push(machine: _Machine, at: int) -> int:
        machine.stack.append(kind())
        return at

    return push


def _number(form: str) -> _Opcode:
    unpack_from, size = struct.Struct(form).unpack_from, struct.calcsize(form)

    def push(machine: _Machine, at: int) -> int:
        machine.stack += unpack_from(machine.content, at)
        return at + size

    return push


def _tuple_of(count: int) -> _Opcode:
    def push(machine: _Machine, at: int) -> int:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError("pop from empty list")
        stack[-count:] = [tuple(stack[-count:])]
        return at

    return push


def _counted(size: int, make: Callable[[bytes], Any]) -> _Opcode:
    """Returns an opcode's method that makes a value of bytes after their count of `size` bytes."""

    def push(machine: _Machine, at: int) -> int:
        content, begin = machine.content, at + size
        end = begin + int.from_bytes(content[at:begin], "little")
        if end > len(content):
            raise ValueError(f"it claims {end - begin} bytes from byte {begin} on, but ends before")
        machine.stack.append(make(content[begin:end]))
        return end

    return push


def _integer(content: bytes) -> int:
    return int.from_bytes(content, "little", signed=True)


_text: Callable[[bytes], str] = methodcaller("decode", "utf-8", "surrogatepass")
_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}
_MADE: dict[str, _Opcode] = {
    "BINUNICODE": _counted(4, _text),
    "SHORT_BINUNICODE": _counted(1, _text),
    "BINUNICODE8": _counted(8, _text),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": _empty(list),
    "EMPTY_DICT": _empty(dict),
    "EMPTY_SET": _empty(set),
    "BININT": _number("<i"),
    "BININT2": _number("<H"),
    "BINFLOAT": _number(">d"),
    "LONG1": _counted(1, _integer),
    "LONG4": _counted(4, _integer),
    "SHORT_BINBYTES": _counted(1, bytes),
    "BINBYTES": _counted(4, bytes),
    "BINBYTES8": _counted(8, bytes),
    "BYTEARRAY8": _counted(8, bytearray),
}


def _opcode(code: int) -> _Opcode:
    name = _NAMES.get(code)

    def refuse(_machine: _Machine, at: int) -> int:
        if name is None:
            raise ValueError(f"byte {at - 1} must be an opcode")
        raise Refused(f"the opcode {name}")

    opcode: _Opcode | None = getattr(_Machine, f"op_{name.lower()}", None) if name else None
    return opcode or _MADE.get(name or "", refuse)


_OPCODES = [*map(_opcode, range(256))]
