"""Partial loads of a torch zip in which torch.load(weights_only=True) refuses some objects.

Responsible for a reader that puts a Note in the place of each refused object. Torch decides which
classes and functions are allowed; only these make objects. NumPy arrays are made by functions of
this module. Torch reads the storages.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from math import prod
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from fastckpt.formats import plain_pickle
from fastckpt.formats.plain_pickle import Kept
from fastckpt.formats.torch_pickle import collection_paused, is_shortage, torch_load, unpickled
from fastckpt.formats.value_names import below, items_in

# ---- NumPy's arrays and scalars in pickles, made without what could run code or trust a size.
# NumPy's own functions for pickles take the layout of memory from the pickle, and so are not safe
# with files of others. These make arrays of numbers, booleans and text, and refuse all else:
# objects, structures, dates, and numbers of another byte order.

_KIND = re.compile(r"(b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU]\d{1,9})")
_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMBER_END = 1 << 63


class NumpyRefused(Exception):
    """A pickle needs an unsupported value of NumPy; the text names its class or function."""


def numpy_maker(module: str, name: str) -> Any:
    """Returns the replacement for a class or function of NumPy; None if there is none."""
    if name == "bytes" and module in ("builtins", "__builtin__"):
        return _no_bytes  # of an empty array
    if module.partition(".")[0] != "numpy":
        return None
    if find_spec("numpy") is None:
        return None
    if module == "numpy":
        return {"ndarray": _ndarray, "dtype": _dtype}.get(name)
    return _CALLED.get(name) if module in _MODULES else None


def takes_numpy_state(value: object) -> bool:
    """Returns whether set_numpy_state() supports this value."""
    return _is(value, "dtype") or _is(value, "ndarray")


def set_numpy_state(value: Any, state: Any) -> None:
    """Sets the pickled contents of an empty array; only checks that a dtype's state is plain.

    Raises NumpyRefused for a state that NumPy's pickles of such arrays do not have.
    """
    if _is(value, "dtype"):
        # Version, byte order, and five values of which plain dtypes have none of their own.
        plain = type(state) is tuple and len(state) == 8 and state[0] == 3
        if not plain or state[1] not in ("<", "|") or state[2:5] != (None, None, None):
            raise NumpyRefused("numpy.dtype")
        return
    if type(state) is not tuple or len(state) != 5 or value.size:
        raise NumpyRefused("numpy.ndarray")
    version, shape, dtype, is_fortran, content = state
    sizes_fit = type(shape) is tuple and all(
        type(size) is int and 0 <= size < _NUMBER_END for size in shape
    )
    if version != 1 or not sizes_fit or not _is(dtype, "dtype") or type(content) is not bytes:
        raise NumpyRefused("numpy.ndarray")
    if prod(shape) * dtype.itemsize != len(content):
        raise NumpyRefused("numpy.ndarray")
    value.__setstate__((1, shape, dtype, is_fortran is True, content))


def _is(value: object, name: str) -> bool:
    """Returns whether a value is of this class of NumPy, which may not be installed."""
    return any(its.__module__ == "numpy" and its.__name__ == name for its in type(value).__mro__)


def _dtype(kind: Any, *_how: Any) -> Any:
    import numpy

    if type(kind) is not str or not _KIND.fullmatch(kind):
        raise NumpyRefused("numpy.dtype")
    return numpy.dtype(f"<{kind}")


def _ndarray(*_arguments: Any) -> Any:
    """Stands for numpy.ndarray, which a pickle may only name: a call would take memory and its
    layout from the pickle.
    """
    raise NumpyRefused("numpy.ndarray")


def _array(kind: Any, _shape: Any, _code: Any) -> Any:
    import numpy

    if kind is not _ndarray:
        raise NumpyRefused("numpy.ndarray")
    return numpy.ndarray((0,), "b")


def _scalar(dtype: Any, content: Any) -> Any:
    import numpy

    if not _is(dtype, "dtype") or type(content) is not bytes:
        raise NumpyRefused("numpy.generic")
    if len(content) != dtype.itemsize or not content:
        raise NumpyRefused("numpy.generic")
    return numpy.frombuffer(content, dtype)[0]


def _no_bytes(*arguments: Any) -> bytes:
    if arguments:
        raise NumpyRefused("builtins.bytes")
    return b""


_CALLED: dict[str, Callable[..., Any]] = {"_reconstruct": _array, "scalar": _scalar}


_ZIP_MAGIC = b"PK\x03\x04"  # by which torch tells zips, too
_GLOBALS_MAX = 1000  # torch is asked about each
_MAKER_CHARACTERS_MAX = 200
_NOTES_MAX, _NAME_KEYS_MAX, _NAME_CHARACTERS_MAX = 1000, 200, 1000  # that are told
_NESTS, _MAPPINGS = (dict, list, tuple), (dict, OrderedDict, Counter)
_GLOBAL = re.compile(rb"c([A-Za-z_][\w.]*)\n([A-Za-z_][\w.]*)\n")  # or text that looks like it
_NAMES_OF_2 = {"xrange": "range", "long": "int", "unicode": "str", "unichr": "chr"}
# Of dtypes that are refused, or text that looks like it.
_NUMPY_KIND = re.compile(rb"X[\x01-\x06]\0\0\0([OMmV]\d{1,5}|>)[qr]")
# Torch puts no items into these, whether they are allowed or not.
_NEVER_FILLED = {"collections.deque", "collections.defaultdict"}
_READ = (Kept, dict, list, tuple, set, frozenset)  # of what plain_pickle reads, what has parts
_NOTHING = object()
# What makes a value of what was read: asks for the values of parts, and gets each with the name of
# what makes a part that was left out of it, if one was; returns the same of its own.
_Making: TypeAlias = Generator[Any, Any, tuple[Any, str | None]]


class Note:
    """Stands for an object that was left out. `maker` is the name of the class or function that
    makes the object, or the refused part of it.
    """

    __slots__ = ("maker",)

    def __init__(self, maker: str) -> None:
        self.maker = maker[:_MAKER_CHARACTERS_MAX]


def left_out(value: object) -> str | None:
    """Returns the maker of the object that a Note replaces; None if the value is not a Note."""
    return value.maker if type(value) is Note else None


def loaded(source: Any, weights_only: bool, what: str) -> Any:
    """Returns the result of torch_pickle.unpickled(). If weights_only is set, a Note replaces each
    object that torch refuses or that has a refused part; in dicts, lists and tuples, only the item
    is replaced.

    Args:
        source: a seekable file with a torch zip.
        weights_only, what: see unpickled().

    Raises:
        The errors of unpickled(). It raises pickle.UnpicklingError only for a pickle that torch's
            pickler did not write, or in which a refused and an allowed object contain each other.
    """
    try:
        return unpickled(source, weights_only, what)
    except pickle.UnpicklingError:
        source.seek(0)
        if not weights_only or source.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
            raise
        # Both readings are of the same bytes in memory. A file may be changed between two of them,
        # and without weights_only torch would run a program of TorchScript.
        source.seek(0)
        content = io.BytesIO(source.read())
        try:
            return unpickled(content, weights_only, what)
        except pickle.UnpicklingError:
            content.seek(0)
        try:
            with collection_paused():
                module: Any = SimpleNamespace(__name__=__name__, Unpickler=_Unpickler)
                return torch_load(content, "cpu", module, weights_only=False)
        except Exception as error:
            if is_shortage(error):
                raise
        raise  # torch's own refusal


def notes_in(value: Any, name: str | None) -> Iterator[tuple[str, str]]:
    """Yields the names of the parts that were left out of a value, each with its maker. Since a
    file could name more than fits in memory, yields at most _NOTES_MAX names, long ones shortened.
    An object that is referred to many times is named once.
    """
    ahead, visited, count = [(_Place(name), value)], set[int](), 0
    while ahead and count < _NOTES_MAX:
        place, value = ahead.pop()
        if type(value) not in (Note, *_NESTS) or id(value) in visited:
            continue
        visited.add(id(value))
        if type(value) is Note:
            count += 1
            yield place.text(), value.maker
            continue
        inner = [each for each in items_in(value) if type(each[1]) in (Note, *_NESTS)]
        ahead += [(place.below(key), item) for key, item in reversed(inner)]


def newly_refused(
    pickled: bytes, before: set[tuple[str, str]], reads_numpy: bool
) -> list[tuple[str, str]]:
    """Returns the names of values in a pickle of torch.save that weights_only=True will refuse,
    each with its maker. Makers that are already in `before` are left out; new ones are added to it.

    Args:
        pickled, before: the pickle, and the known makers.
        reads_numpy: whether numpy_maker() will make NumPy's values, which torch itself refuses.
    """
    names = {(m.decode(), n.decode()) for m, n in _GLOBAL.findall(pickled)} - before
    before.update(names)
    kinds = {("", kind.decode()) for kind in _NUMPY_KIND.findall(pickled)} - before
    before.update(kinds)
    numpy = numpy_maker if reads_numpy else _nothing
    refused = {left_out(_asked(*each)) for each in names if numpy(*each) is None} - {None}
    refused |= {"numpy.dtype"} if kinds and reads_numpy else set()
    if not refused:
        return []
    with suppress(Exception):  # then a restore says it
        unpickler = _Unpickler(io.BytesIO(pickled))
        unpickler.numpy = numpy
        unpickler.persistent_load = lambda _storage: Note("")
        return [each for each in notes_in(unpickler.load(), None) if each[1] in refused]
    return []


def how_to_allow(found: Iterable[tuple[str, str]]) -> str:
    """Returns text about an alternative to weights_only=False for values that newly_refused() or
    notes_in() has found, to put after their names; "" if there is none.
    """
    makers = {maker for _name, maker in found}
    words = ""
    if makers - _NEVER_FILLED:
        words = (
            "; or first call torch.serialization.add_safe_globals with the classes or functions "
            "that make them"
        )
    if makers & _NEVER_FILLED:
        words += " (which cannot allow a deque or a defaultdict: save a list or a dict instead)"
        words = words if makers - _NEVER_FILLED else words.replace("which", "add_safe_globals")
    return words


class _Place:
    """The position of a value: below another position, under a key."""

    __slots__ = ("_above", "_depth", "_key")

    def __init__(self, key: Any, above: _Place | None = None) -> None:
        self._key, self._above = key, above
        self._depth: int = 0 if above is None else above._depth + 1

    def below(self, key: Any) -> _Place:
        return self if self._depth == _NAME_KEYS_MAX else _Place(key, self)

    def text(self) -> str:
        keys, place = [], self
        while place._above is not None:
            keys.append(place._key)
            place = place._above
        name = place._key
        for key in reversed(keys):
            name = below(name, str(key)[:_NAME_CHARACTERS_MAX])[:_NAME_CHARACTERS_MAX]
        return name or ""


def _asked(module: str, name: str) -> Any:
    """Returns the class or function that torch allows under a name; a Note if torch refuses the
    name. Call this on a thread that is not loading, because torch stores the target device per
    thread.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02c" + f"{module}\n{name}\n.".encode())
        archive.writestr("archive/version", b"3\n")
    buffer.seek(0)
    try:
        return torch_load(buffer, weights_only=True)
    except pickle.UnpicklingError:
        if module == "__builtin__":  # as protocol 2 writes it
            module, name = "builtins", _NAMES_OF_2.get(name, name)
        return Note(f"{module}.{name}")


def _nothing(_module: str, _name: str) -> Any:
    """Replaces numpy_maker() where only torch reads."""


class _Unpickler:
    """An unpickler for torch.load that executes no more than torch's for weights_only, and
    continues with a Note where that one would raise. An object of an allowed class or function also
    becomes a Note if a part of it is one.

    plain_pickle reads the complete pickle before any object is made.
    """

    def __init__(self, file: io.BytesIO, **_options: Any) -> None:
        self.numpy: Callable[[str, str], Any] = numpy_maker
        self.persistent_load: Callable[[Any], Any]
        self._content = file.read()
        self._names: dict[tuple[str, str], Any] = {}
        # By identity of what was read: it, what is made of it, and what made a part that is left
        # out; None: no part is.
        self._done: dict[int, tuple[Any, Any, str | None]] = {}
        self._open = set[int]()  # what is being made
        self._used = set[int]()  # what others of these have got meanwhile

    def find_class(self, module: str, name: str) -> Any:
        return Kept(f"{module}.{name}", self._allowed(module, name))

    def _allowed(self, module: str, name: str) -> Any:
        """Returns the class or function that is allowed under a name; a Note if it is refused."""
        if (module, name) not in self._names:
            if len(self._names) == _GLOBALS_MAX:
                raise pickle.UnpicklingError("it names too many classes and functions")
            maker = self.numpy(module, name)
            if maker is None:
                with ThreadPoolExecutor(1, "fastckpt-allowed") as other:
                    maker = other.submit(_asked, module, name).result()
            self._names[module, name] = maker
        return self._names[module, name]

    def load(self) -> Any:
        wanted, _end = plain_pickle.loads(self._content, self.find_class, self._storage)
        # A stack of generators: a pickle may be nested more deeply than Python calls.
        makings, answer = list[_Making](), None
        while True:
            if type(wanted) not in _READ:
                answer = wanted, left_out(wanted)
            elif id(wanted) in self._done:
                self._used.update({id(wanted)} & self._open)
                answer = self._done[id(wanted)][1:]
            elif id(wanted) in self._open:
                raise pickle.UnpicklingError("an object contains itself")
            else:
                self._open.add(id(wanted))
                makings.append(self._made(wanted) if type(wanted) is Kept else self._filled(wanted))
                answer = None
            wanted = _NOTHING
            while wanted is _NOTHING:
                if not makings:
                    return answer[0]  # type: ignore[index]
                try:
                    wanted = makings[-1].send(answer)
                except StopIteration as ended:
                    makings.pop()
                    answer = ended.value

    def _storage(self, named: Any) -> Any:
        if type(named) is tuple:
            named = tuple(each.value if type(each) is Kept else each for each in named)
        return self.persistent_load(named)

    def _filled(self, nest: Any) -> _Making:
        """Makes the parts of a dict, list, tuple or set, and returns the container with them."""
        self._done[id(nest)] = nest, nest, None
        parts, makers = list[Any](), list[str]()
        for part in [*nest, *nest.values()] if type(nest) is dict else [*nest]:
            made, maker = yield part
            parts.append(made)
            makers += [] if maker is None else [maker]
            if maker is not None and type(nest) is dict and len(parts) <= len(nest):
                return self._ended(nest, Note(maker), maker)  # it has a key that is left out
        made, maker = nest, makers[0] if makers else None
        if type(nest) is list:
            nest[:] = parts
        elif type(nest) is dict:
            keys, values = parts[: len(nest)], parts[len(nest) :]
            nest.clear()
            nest.update(zip(keys, values, strict=True))
        elif type(nest) is not tuple and maker is not None:
            made = Note(maker)
        elif any(part is not old for part, old in zip(parts, nest, strict=True)):
            made = type(nest)(parts)
        return self._ended(nest, made, maker)

    def _made(self, kept: Kept) -> _Making:
        """Makes an object, or a Note in its place."""
        named = kept.value
        if not kept.parts:
            named = Note(named.maker) if type(named) is Note else named  # one for each object
            return self._ended(kept, named, left_out(named))
        (how, arguments), *changes = kept.parts
        arguments, maker = yield arguments
        maker = named.maker if type(named) is Note else maker
        # Those of torch's tensor classes are checked by torch's own reader, and never written.
        if maker is None and (how not in ("reduce", "newobj") or named in torch._tensor_classes):
            maker = type(named).__qualname__
        made: Any = None
        try:
            if maker is None and how == "reduce":
                made = named(*arguments)
            elif maker is None:
                made = named.__new__(named, *arguments)
        except NumpyRefused as refused:
            maker = str(refused)
        made = made if maker is None else Note(maker)
        self._done[id(kept)] = kept, made, maker  # its own parts may refer to it
        for how, parts in changes:
            parts, left = yield parts
            if maker is None:
                maker = self._changed(made, how, parts) if left is None else left
                made = made if maker is None else Note(maker)
        return self._ended(kept, made, maker)

    def _ended(self, read: Any, made: Any, maker: str | None) -> tuple[Any, str | None]:
        """Records the object made from a read value, and the maker of a part that was left out."""
        _read, seen, told = self._done.get(id(read), (read, made, maker))
        if id(read) in self._used and (seen is not made or told is not maker):
            raise pickle.UnpicklingError("a refused object and an allowed one contain each other")
        self._open.discard(id(read))
        self._done[id(read)] = read, made, maker
        return made, maker

    def _changed(self, made: Any, how: str, parts: Any) -> str | None:
        """Sets an object's state or items; returns the name of its class if this is refused."""
        kind = type(made)
        if how == "append" and kind is list:
            made.extend(parts)
        elif how == "set" and kind in _MAPPINGS:
            for key, value in parts:
                made[key] = value
        elif how == "build" and takes_numpy_state(made):
            try:
                set_numpy_state(made, parts)
            except NumpyRefused as refused:
                return str(refused)
        elif (
            how == "build"
            and kind not in (torch.Tensor, torch.nn.Parameter)  # never written, either
            and self._allowed(kind.__module__, kind.__qualname__) is kind
        ):
            _set_state(made, parts)
        else:
            return f"{kind.__module__}.{kind.__qualname__}"
        return None


def _set_state(made: Any, state: Any) -> None:
    """Sets an object's state like pickle."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    state, of_slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    made.__dict__.update(state or {})
    for name, value in (of_slots or {}).items():
        setattr(made, name, value)
