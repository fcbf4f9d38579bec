"""The objects of a torch zip of which torch.load(weights_only=True) refuses some: the others.

Responsible for a reader that has notes in the place of what torch refuses. It asks torch itself
which classes and functions are allowed, and makes objects by these alone, and NumPy's arrays by
`safe_numpy`; torch reads storages. The module must not know what the objects are for, nor which of
them somebody asks for.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from fastckpt.formats import safe_numpy
from fastckpt.formats.torch_pickle import collection_paused, is_shortage, torch_load, unpickled
from fastckpt.formats.value_names import below, items_in

_ZIP_MAGIC = b"PK\x03\x04"  # by which torch tells zips, too
_GLOBALS_MAX = 1000  # torch is asked about each
_MAKER_CHARACTERS_MAX = 200
_NOTES_MAX, _NAME_KEYS_MAX, _NAME_CHARACTERS_MAX = 1000, 200, 1000  # that are told
_KEY_DEPTH_MAX = 8  # of tuples in a key or in an item of a set: hash() recurses on the stack of C
_LOOKS_PER_BYTE = 64  # at parts of objects, for each byte of the pickle
_NESTS, _MAPPINGS = (dict, list, tuple), (dict, OrderedDict, Counter)
_GLOBAL = re.compile(rb"c([A-Za-z_][\w.]*)\n([A-Za-z_][\w.]*)\n")  # or text that looks like it
_NAMES_OF_2 = {"xrange": "range", "long": "int", "unicode": "str", "unichr": "chr"}
# Of dtypes that safe_numpy refuses, or text that looks like it.
_NUMPY_KIND = re.compile(rb"X[\x01-\x06]\0\0\0([OMmV]\d{1,5}|>)[qr]")
# Torch puts no items into these, whether they are allowed or not.
_NEVER_FILLED = {"collections.deque", "collections.defaultdict"}
_UNSEEN = (str, bytes, int, float, bool, type(None))  # of which equal ones may be one object
# Operations that picklers of protocols 2 and 3 write, but for those that _Unpickler redefines.
_OPCODES = """PROTO STOP MARK POP POP_MARK GLOBAL BINPERSID NONE NEWTRUE NEWFALSE BINFLOAT BININT
BININT1 BININT2 LONG1 LONG4 BINUNICODE SHORT_BINSTRING SHORT_BINBYTES BINBYTES TUPLE TUPLE1 TUPLE2
TUPLE3 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET"""


class Note:
    """Stands for an object that was left out. `maker` is the name of what it is made with, or of
    what a part of it is made with.
    """

    __slots__ = ("maker",)

    def __init__(self, maker: str) -> None:
        self.maker = maker[:_MAKER_CHARACTERS_MAX]


def left_out(value: object) -> str | None:
    """Returns what makes the object in whose place a note stands; None if the value is no note."""
    return value.maker if type(value) is Note else None


def loaded(source: Any, weights_only: bool, what: str) -> Any:
    """Returns what torch_pickle.unpickled() does; but with weights_only, a Note is in the place of
    each object that torch refuses, or that has such a part; of dicts, lists and tuples, in that of
    the item.

    Args:
        source: a seekable file with a torch zip.
        weights_only, what: as unpickled()'s.

    Raises:
        As unpickled(); pickle.UnpicklingError only for a pickle that no pickler of torch's wrote,
            or in which what is refused and what is not are parts of each other.
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
    """Yields the names of what was left out of a value, each with its maker; the first _NOTES_MAX
    of them, and of a name its beginning, since files can hold more than memory has room for. What
    stands there many times is told once.
    """
    ahead, seen, found = [(_Place(name), value)], set[int](), 0
    while ahead and found < _NOTES_MAX:
        place, value = ahead.pop()
        if type(value) not in (Note, *_NESTS) or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is Note:
            found += 1
            yield place.text(), value.maker
            continue
        inner = [each for each in items_in(value) if type(each[1]) in (Note, *_NESTS)]
        ahead += [(place.below(key), item) for key, item in reversed(inner)]


def newly_refused(
    pickled: bytes, before: set[tuple[str, str]], reads_numpy: bool
) -> list[tuple[str, str]]:
    """Returns the names of values in a pickle of torch.save that weights_only=True will refuse,
    each with its maker: of makers that are not among those met before, to which they are added.

    Args:
        pickled, before: the pickle, and the makers that were met before.
        reads_numpy: whether `safe_numpy` will make NumPy's values; torch itself refuses them.
    """
    met = {(m.decode(), n.decode()) for m, n in _GLOBAL.findall(pickled)} - before
    before.update(met)
    kinds = {("", kind.decode()) for kind in _NUMPY_KIND.findall(pickled)} - before
    before.update(kinds)
    numpy = safe_numpy.found if reads_numpy else _nothing
    refused = {left_out(_asked(*each)) for each in met if numpy(*each) is None} - {None}
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
    """Returns words, to follow what weights_only=False is needed for, about another way to load
    values that newly_refused() or notes_in() has found, if there is one.
    """
    makers = {maker for _name, maker in found}
    words = ""
    if makers - _NEVER_FILLED:
        words = (
            ", or before that a call of torch.serialization.add_safe_globals with what it is made "
            "with"
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
    """Returns the class or function that torch allows under a name; a Note if it refuses it. It is
    asked on another thread than one that is loading: torch keeps for each thread where it loads to.
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
    """Stands for `safe_numpy.found` where torch alone reads."""


def _code(name: str) -> int:
    code: bytes = getattr(pickle, name)
    return code[0]


_Python: Any = pickle._Unpickler  # the one in Python, not in C


class _Unpickler(_Python):  # type: ignore[misc]
    """Python's unpickler, which does no more than torch's for weights_only, and goes on with notes.

    What is made by an allowed class or function is a note if a part of it is one. If something has
    referred to it before that part came, everything is refused.
    """

    def __init__(self, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, **options)
        self.numpy: Callable[[str, str], Any] = safe_numpy.found
        self._looks = _LOOKS_PER_BYTE * len(file.getbuffer())
        self._names: dict[tuple[str, str], Any] = {}
        self._allowed: dict[int, Any] = {}  # by identity, as the following, which keeps them alive
        self._inside: dict[int, Any] = {}  # lists and dicts that objects have got as parts
        self._complete: dict[int, Any] = {}  # those and tuples, without a note, and so they stay
        self._numbers: dict[int, int] = {}  # in the memo
        self._used = set[int]()  # numbers of what was referred to by way of the memo

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            if len(self._names) == _GLOBALS_MAX:
                raise pickle.UnpicklingError("it names too many classes and functions")
            found = self.numpy(module, name)
            if found is None:
                with ThreadPoolExecutor(1, "fastckpt-allowed") as other:
                    found = other.submit(_asked, module, name).result()
            self._names[module, name] = found
        found = self._names[module, name]
        if type(found) is Note:
            return Note(found.maker)  # one for each object
        self._allowed[id(found)] = found
        return found

    def _part_left_out(self, *parts: Any) -> str | None:
        """Returns the maker of a note among the parts of an object; None if there is none."""
        ahead, seen = [*reversed(parts)], dict[int, Any]()
        while ahead:
            part = ahead.pop()
            if type(part) is Note:
                return part.maker
            if type(part) not in _NESTS or id(part) in seen or id(part) in self._complete:
                continue
            seen[id(part)] = part
            self._look_at(part)
            if type(part) is not tuple:
                self._inside[id(part)] = part
            ahead += [*part, *part.values()] if type(part) is dict else part
        self._complete.update(seen)
        return None

    def _look_at(self, *nests: Any) -> None:
        """Raises UnpicklingError if the items of these, too, are too many to look at, or copy."""
        self._looks -= sum(1 + len(nest) for nest in nests if type(nest) in _NESTS)
        if self._looks < 0:
            raise pickle.UnpicklingError("its values refer to each other over and over")

    def _check_keys(self, values: Iterable[Any], depth: int = _KEY_DEPTH_MAX) -> None:
        """Raises UnpicklingError if hashing and comparing these takes unbounded time or stack."""
        for value in values:
            if isinstance(value, (tuple, frozenset)):
                self._looks -= 1 + len(value)
                if depth == 0 or self._looks < 0:
                    raise pickle.UnpicklingError("a key is nested too deeply, or used too often")
                self._check_keys(value, depth - 1)

    def _make(self, how: Callable[..., Any]) -> None:
        arguments, named = self.stack.pop(), self.stack.pop()
        maker = left_out(named) or self._part_left_out(arguments)
        if maker is None and isinstance(arguments, tuple):
            self._look_at(*arguments)  # which are copied for each object, whatever else has them
            for argument in arguments:  # it may be what a set or a dict is made of
                self._check_keys(argument if type(argument) is list else [argument])
        # Those of torch's tensor classes are checked by torch's own reader, and never written.
        if maker is None and (id(named) not in self._allowed or named in torch._tensor_classes):
            maker = type(named).__qualname__
        try:
            self.append(how(named, *arguments) if maker is None else Note(maker))
        except safe_numpy.Refused as refused:
            self.append(Note(str(refused)))

    def _load_reduce(self) -> None:
        self._make(lambda function, *arguments: function(*arguments))

    def _load_newobj(self) -> None:
        self._make(lambda kind, *arguments: kind.__new__(kind, *arguments))

    def _load_build(self) -> None:
        made, state = self.stack[-2:]
        kind = type(made)
        is_allowed = kind not in (Note, torch.Tensor, torch.nn.Parameter)  # never written, either
        if safe_numpy.takes_state(made):
            maker = self._part_left_out(state)
            try:
                if maker is None:
                    safe_numpy.set_state(made, state)
                    self.stack.pop()
                    return
            except safe_numpy.Refused as refused:
                maker = str(refused)
        elif is_allowed and self.find_class(kind.__module__, kind.__qualname__) is kind:
            self._look_at(state, *(state if type(state) is tuple else ()))
            maker = self._part_left_out(state)
            if maker is None:
                super().load_build()
                return
        else:
            maker = f"{kind.__module__}.{kind.__qualname__}"
        self.stack.pop()
        self._leave_out(maker)

    def _leave_out(self, maker: str) -> None:
        """Puts a note in the place of the last object, which has got a part that was left out."""
        value = self.stack[-1]
        if type(value) is Note:
            return
        number = self._numbers.pop(id(value), -1)
        if number in self._used or id(value) in self._inside:
            raise pickle.UnpicklingError("a part of an object that was referred to is refused")
        self.stack[-1] = Note(maker)
        if number >= 0:
            self.memo[number] = self.stack[-1]

    def _add(self, kinds: tuple[type, ...], parts: list[Any], add: Callable[[Any], None]) -> None:
        """Adds parts, items of a list or keys and values, to the last object."""
        value, maker = self.stack[-1], None
        if type(value) not in kinds:
            maker = f"{type(value).__module__}.{type(value).__qualname__}"
        elif type(value) not in _NESTS or id(value) in self._inside:
            maker = self._part_left_out(*parts)
        elif type(value) is dict and not {type(key) for key in parts[::2]} <= {*_UNSEEN}:
            maker = self._part_left_out(*parts[::2])
        if maker is None:
            add(value)
        else:
            self._leave_out(maker)

    def _load_append(self) -> None:
        item = self.stack.pop()
        self._add((list,), [item], lambda value: value.append(item))

    def _load_appends(self) -> None:
        items = self.pop_mark()
        self._add((list,), items, lambda value: value.extend(items))

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        pairs = [*zip(items[::2], items[1::2], strict=True)]
        self._check_keys(items[::2])

        def put(value: Any) -> None:
            for key, item in pairs:
                value[key] = item

        self._add(_MAPPINGS, items, put)

    def _put(self, number: int) -> None:
        value = self.stack[-1]
        if not isinstance(value, _UNSEEN):
            if id(value) in self._numbers and not safe_numpy.is_shared(value):
                raise pickle.UnpicklingError("a value is in the memo twice")
            self._numbers[id(value)] = number
        if number in self.memo:
            raise pickle.UnpicklingError("a number is in the memo twice")
        self.memo[number] = value

    def _get(self, number: int) -> None:
        self._used.add(number)
        self.append(self.memo[number])

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code: _Python.dispatch[code] for code in map(_code, _OPCODES.split())},
        pickle.REDUCE[0]: _load_reduce,
        pickle.NEWOBJ[0]: _load_newobj,
        pickle.BUILD[0]: _load_build,
        pickle.APPEND[0]: _load_append,
        pickle.APPENDS[0]: _load_appends,
        pickle.SETITEM[0]: _load_setitem,
        pickle.SETITEMS[0]: _load_setitems,
        pickle.BINPUT[0]: lambda self: self._put(self.read(1)[0]),
        pickle.LONG_BINPUT[0]: lambda self: self._put(int.from_bytes(self.read(4), "little")),
        pickle.BINGET[0]: lambda self: self._get(self.read(1)[0]),
        pickle.LONG_BINGET[0]: lambda self: self._get(int.from_bytes(self.read(4), "little")),
    }
