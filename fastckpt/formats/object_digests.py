"""Digests of containers and pickled objects, which are equal where these are.

Pickles of equal objects may differ: by the order of sets and dicts, and by which equal parts are
one object. So a pickle is read into parts that stand for its objects, which are digested in an
order of their own. It runs nothing that the pickle names. The module must not know what the objects
are for.
"""

from __future__ import annotations

import copyreg
import dataclasses
import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

_ITEMS_MAX = 1 << 17  # of a container; _STEP of them are made a text at a time
_STEP, _TEXT_MAX = 1000, 16 << 20
_DEPTH_MAX = 100  # of the objects inside of each other
# Looks at parts of an object, for each byte of its pickle: one part may stand in it many times.
_LOOKS_MAX = 4
_LOOKS_LEAST = 256
_KEPT_MAX = 128  # digests, since most objects are the same from one save to the next
# Of what is made by these, the pickle tells what there is in an order that is the object's.
_KNOWN = (sys.stdlib_module_names | {"__builtin__", "numpy"}) - {"weakref", "_weakrefset"}
_SETS = {"builtins.set", "builtins.frozenset", "__builtin__.set", "__builtin__.frozenset"}
_OWN_WAYS = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs_ex__", "__getnewargs__")


class Container(NamedTuple):
    """The skeleton of a dict, list or tuple, for a comparison with another process's.

    Attributes:
        kind: its type's name.
        length: the number of its items.
        plain: the keys of a dict, whose order counts for nothing; of others the plain items.
    """

    kind: str
    length: int
    plain: tuple[Any, ...]

    def tobytes(self) -> bytes:
        """Returns bytes that differ only if the skeletons do: of very long ones the beginning."""
        plain = self.plain[:_ITEMS_MAX]
        if self.kind == "dict":  # the beginning of a long one depends on the order
            plain = tuple(sorted(map(_key_text, plain))) if self.length <= _ITEMS_MAX else ()
        found, nbytes = hashlib.blake2b(f"{self.kind} {self.length}".encode()), 0
        for begin in range(0, len(plain), _STEP):
            if nbytes < _TEXT_MAX:
                text = repr(plain[begin : begin + _STEP]).encode(errors="replace")
                nbytes += len(text)
                found.update(text)
        return found.digest()


def _key_text(key: object) -> str:
    """Returns a text of a dict's key: of one whose own may differ between processes its type."""
    parts = key if type(key) is tuple else (key,)
    is_plain = all(type(each) in (str, bytes, int, float, bool, type(None)) for each in parts)
    return repr(key) if is_plain else type(key).__name__


class Pickled:
    """The pickle of an object, for a comparison with another process's."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def tobytes(self) -> bytes:
        """Returns bytes that differ only if the objects surely do; none if nobody can tell."""
        return _digest(self._content)


@lru_cache(_KEPT_MAX)
def _digest(content: bytes) -> bytes:
    try:
        looks_max = _LOOKS_LEAST + _LOOKS_MAX * len(content)
        return _Digests(looks_max).of(_Reader(io.BytesIO(content)).load(), _DEPTH_MAX)
    except Exception:
        return b""  # it contains itself, or is none of what a pickler of this process writes


class _Name:
    """A class or function that a pickle names."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name
        self.text = f"{module}.{name}"

    def __call__(self, *arguments: Any) -> Any:
        if self.text in _SETS:
            return frozenset(*arguments)
        return _Made(self, arguments)


class _Made:
    """An object that is made by what a pickle names, and what it has got since."""

    def __init__(self, kind: object, arguments: object) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: object = None
        self.items, self.pairs = list[Any](), list[tuple[Any, Any]]()

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))


_Python: Any = pickle._Unpickler  # the one in Python, not in C


class _Reader(_Python):  # type: ignore[misc]
    """Reads a pickle into what its objects are made of."""

    def find_class(self, module: str, name: str) -> Any:
        return _Name(module, name)

    def persistent_load(self, _name: object) -> Any:
        return None  # a tensor or a storage, whose contents are compared elsewhere

    def get_extension(self, code: int) -> None:
        # Python's own keeps what it finds for all readers of the process.
        self.append(_Name(*copyreg._inverted_registry[code]))  # type: ignore[attr-defined]

    def _load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        self.append(_Made(kind, arguments))

    def _load_newobj_ex(self) -> None:
        named, arguments, kind = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.append(_Made(kind, (arguments, named)))

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **_Python.dispatch,
        pickle.NEWOBJ[0]: _load_newobj,
        pickle.NEWOBJ_EX[0]: _load_newobj_ex,
        pickle.NEXT_BUFFER[0]: lambda self: self.append(b""),  # of an array, whose size is told
    }


class _Digests:
    """The working state of one _digest()."""

    def __init__(self, looks_max: int) -> None:
        self._looks = looks_max

    def of(self, value: Any, depth: int) -> bytes:
        """Returns the digest of a part; raises ValueError if there is none."""
        self._looks -= 1
        if depth == 0 or self._looks < 0:
            raise ValueError("it is nested too deeply")
        kind = type(value)
        if kind in (list, tuple):
            return _hashed(kind.__name__, self._all(value, depth))
        if kind in (set, frozenset):
            return _hashed("set", sorted(self._all(value, depth)))
        if kind is dict:
            return _hashed("dict", self._pairs(value.items(), depth))
        if kind is _Name:
            return _hashed("name", [value.text.encode(errors="replace")])
        if kind is _Made:
            return self._of_made(value, depth)
        return _hashed(kind.__name__, [repr(value).encode(errors="replace")])

    def _of_made(self, made: _Made, depth: int) -> bytes:
        if type(made.kind) is not _Name or not _is_known(made.kind.module, made.kind.name):
            text = made.kind.text if type(made.kind) is _Name else ""
            return _hashed("unknown", [text.encode(errors="replace")])
        state, left_out = made.state, _uncompared(made.kind.module, made.kind.name)
        if left_out and type(state) is dict:
            state = {name: value for name, value in state.items() if name not in left_out}
        parts = [made.kind, made.arguments, state, made.items]
        return _hashed("made", [*self._all(parts, depth), *self._pairs(made.pairs, depth)])

    def _all(self, values: Iterable[Any], depth: int) -> list[bytes]:
        return [self.of(value, depth - 1) for value in values]

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> list[bytes]:
        return sorted(self.of(key, depth - 1) + self.of(value, depth - 1) for key, value in pairs)


def _hashed(kind: str, parts: Iterable[bytes]) -> bytes:
    return hashlib.blake2b(b" ".join((kind.encode(), *parts)), digest_size=16).digest()


@lru_cache(1024)
def _is_known(module: str, name: str) -> bool:
    """Returns whether objects made by this are alike only if all parts in their pickles are: not
    if their class pickles or compares them in a way of its own, and so may leave out some, or have
    a list of what is in no order.
    """
    kind = _found(module, name)
    if not isinstance(kind, type):
        return kind is not None and _is_of_known(module)
    made_otherwise = kind in (list, tuple, dict)  # if a pickler writes them
    if made_otherwise or issubclass(kind, (set, frozenset)) or kind in copyreg.dispatch_table:
        return False
    ways = {way: next((k for k in kind.__mro__ if way in vars(k)), object) for way in _OWN_WAYS}
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):  # namedtuple() has made its way
        del ways["__getnewargs__"]
    equal = next(k for k in kind.__mro__ if "__eq__" in vars(k))
    is_made = dataclasses.is_dataclass(equal) and _is_generated(vars(equal)["__eq__"])
    return (is_made or _is_of_known(equal.__module__)) and all(
        _is_of_known(each.__module__) for each in ways.values()
    )


def _is_generated(function: Any) -> bool:
    """Returns whether a function was made of a text, as dataclasses does."""
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return code is not None and code.co_filename == "<string>"


def _is_of_known(module: str) -> bool:
    return module.split(".")[0] in _KNOWN


@lru_cache(1024)
def _uncompared(module: str, name: str) -> frozenset[str]:
    """Returns the fields of a dataclass that count for nothing when two are compared."""
    kind = _found(module, name)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return frozenset()
    return frozenset(field.name for field in dataclasses.fields(kind) if not field.compare)


def _found(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for each in name.split("."):
        found = getattr(found, each, None)
    return found
