"""The tensors in the pickle of a torch zip, found without running any code that the pickle names.

Responsible for the output of torch's pickler for a tensor. Objects of other classes are skipped and
counted, so that files with objects of users can also be opened.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch

from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats import plain_pickle
from fastckpt.formats.plain_pickle import (
    NUMBER_END,
    Callee,
    Ignored,
    Instance,
    Kept,
    are_numbers,
)
from fastckpt.formats.strict_json import KINDS_MAX
from fastckpt.formats.value_names import escaped, items_in
from fastckpt.lazy.extents import Form
from fastckpt.lazy.source import NAMES_MAX, Rest
from fastckpt.state.tree import PER_RANK, Stored, stored_of, unescaped

_FILE = 0  # the number of a torch zip, which is one file
_DIMS_MAX = 64
_KEY_CHARACTERS_MAX = 100  # of a storage: each tensor gets a copy
# A dict that stands in a state many times gives its tensors many names, each of the length of its
# path. More characters of names than this for each byte of the pickle are no state's.
NAMES_PER_BYTE, NAMES_MIN = 64, 1 << 22
_NODE_CHARACTERS = 32  # what each of them counts beside its own
_STORAGES: dict[str, torch.dtype] = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_DTYPES = {
    name: dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and not (name := str(dtype)[6:]).startswith(("quint", "qint"))  # no plain tensors
}
_NEGATED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class StoredView(NamedTuple):
    """A tensor as a pickle describes it: a view of a storage.

    Attributes:
        form: the attributes that it has in common with other tensors.
        record: the name of the storage's record.
        begin: the offset of its first element in the storage, in bytes.
        nbytes: how many bytes of the storage it needs, from the first byte on.
    """

    form: Form
    record: str
    begin: int
    nbytes: int


class Names(NamedTuple):
    """The values that a pickle names.

    Attributes:
        tensors: the tensors by name; in a step's objects also the placeholders of tensors in
            shards.
        rest: the other values; makers of objects are named by their class or function.
    """

    tensors: dict[str, StoredView | Stored]
    rest: Rest


class _Storage(NamedTuple):
    """A storage that the pickle refers to; `dtype` is None if the storage is untyped."""

    record: str
    dtype: torch.dtype | None
    nbytes: int


def names_of(content: bytes, *, is_of_step: bool) -> Names:
    """Returns the tensors in the nest of dicts, lists and tuples that a pickle describes, by name.

    A name consists of the keys that lead to the tensor, joined by "/", like the names of a
    Checkpointer: in a key, "~" and "/" become "~0" and "~1". A second tensor of the same name gets
    the suffix "#2".

    Args:
        content: the pickle.
        is_of_step: whether the pickle is that of a step's objects, which has placeholders.

    Raises:
        CorruptCheckpoint: torch's pickler did not write it.
        IncompatibleCheckpoint: it has a protocol that is not supported.
    """
    try:
        nest = value_of(content, _find)
    except plain_pickle.Refused as error:
        raise IncompatibleCheckpoint(
            f"its pickle holds {error}: it was not written by torch.save with protocol 2 or later"
        ) from None
    except plain_pickle.DAMAGE as error:
        raise CorruptCheckpoint(f"its pickle is malformed: {str(error)[:100]}") from None
    return _Walk(NAMES_PER_BYTE * len(content) + NAMES_MIN, is_of_step).run(nest)


def value_of(content: bytes, find: Callable[[str, str], Any]) -> Any:
    """Returns the value that a pickle of torch.save describes, with a StoredView for each tensor.
    `find` is plain_pickle.loads()'s, and so are the errors.
    """
    return plain_pickle.loads(content, find, _storage, _STATEFUL)[0]


class _Walk:
    """The state of one walk through a nest."""

    def __init__(self, characters: int, is_of_step: bool) -> None:
        self._left, self._is_of_step = characters, is_of_step
        self._tensors: dict[str, StoredView | Stored] = {}
        self._others: dict[str, int] = {}
        self._count, self._first = 0, list[str]()  # of values that are no tensors
        self._number: dict[str, int] = {}  # of tensors by each name that more than one has

    def run(self, nest: Any) -> Names:
        # A stack of its own: a pickle may be nested more deeply than Python calls. Of each node the
        # items that are left, and what begins the names below it: "" only of the whole nest, since
        # the key "" is one as well.
        levels: list[tuple[Iterator[tuple[Any, Any]], str]] = [(iter([("", nest)]), "")]
        while levels:
            items, prefix = levels[-1]
            for key, value in items:
                if type(key) is StoredView:
                    self._tensors[self._unique(f"{prefix}key")] = key
                if type(value) in _NODES:
                    name = self._name(prefix, key)
                    below = f"{name}/" if len(levels) > 1 else ""
                    if (inner := self._leaf_or_items(name, below, value)) is not None:
                        levels.append((inner, below))
                        break
            else:
                levels.pop()
        return Names(self._tensors, Rest(self._others, self._count, tuple(self._first)))

    def _name(self, prefix: str, key: Any) -> str:
        if type(key) is not str:
            key = _key_name(key)
        name = prefix + (escaped(key) if "~" in key or "/" in key else key)
        self._left -= len(name) + _NODE_CHARACTERS
        if self._left < 0:
            raise IncompatibleCheckpoint(
                "its pickle repeats values too often, or nests them too deeply: its tensors have "
                "too many names"
            )
        return name

    def _leaf_or_items(self, name: str, below: str, value: Any) -> Iterator[tuple[Any, Any]] | None:
        """Records a tensor or a skipped object; returns the items of other values, whose names
        begin with `below`.
        """
        kind, tensors = type(value), self._tensors
        if kind is dict and self._is_of_step and (stored := stored_of(value)) is not None:
            value, kind = stored, Stored
        if kind in _TENSORS:
            tensors[self._unique(name) if name in tensors else name] = value
        elif kind in _OTHERS:
            what = value.name if kind is Ignored else "a storage"
            self._others[what] = self._others.get(what, 0) + 1
            self._pass_over([name])
        else:
            return self._items(name, below, value)
        return None

    def _items(self, name: str, below: str, value: Any) -> Iterator[tuple[Any, Any]]:
        """Returns the keys and values in a node; skips values without tensors."""
        if self._is_of_step and type(value) is dict:
            if isinstance(value.get(PER_RANK), str):
                self._pass_over([name])  # a value of each rank's own
                return iter(())
            value = unescaped(value)
        self._left -= len(value)
        if isinstance(value, dict):
            plain = [key for key, item in value.items() if type(item) not in _NODES]
            first = plain[: NAMES_MAX - len(self._first)]
            self._pass_over([self._name(below, key) for key in first], len(plain))
        elif any(type(item) not in _NODES for item in value):
            self._pass_over([name])
        return iter(items_in(value))

    def _pass_over(self, names: Sequence[str], count: int = 1) -> None:
        """Counts values that are not tensors, and records the first names."""
        self._count += count
        self._first += names[: NAMES_MAX - len(self._first)]

    def _unique(self, name: str) -> str:
        """Returns a unique name: this one, or this one with a number as suffix."""
        if name not in self._tensors:
            return name
        number, unique = self._number.get(name, 1), name
        while unique in self._tensors:
            number += 1
            unique = f"{name}#{number}"
        self._number[name] = number
        return unique


_OTHERS = frozenset({Ignored, _Storage})
_TENSORS = frozenset({StoredView, Stored})
_NODES = _OTHERS | {StoredView, dict, OrderedDict, list, tuple, set, frozenset}


def _key_name(key: Any) -> str:
    if type(key) in (Ignored, _Plain):
        return str(key.name)
    return "key" if type(key) is StoredView else str(key)


def _storage(named: Any) -> _Storage:
    """Returns the storage of a persistent id."""
    if type(named) is not tuple or len(named) != 5 or named[0] != "storage":
        raise ValueError("a persistent id must be that of a storage")
    _word, kind, key, _location, size = named
    if type(key) is not str or len(key) > _KEY_CHARACTERS_MAX or not are_numbers((size,)):
        raise ValueError("a storage must have a name and a size")
    if type(kind) is not torch.dtype:
        return _Storage(f"data/{key}", None, size)
    return _Storage(f"data/{key}", kind, size * kind.itemsize)


@lru_cache(KINDS_MAX)
def _form(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    is_conj: bool = False,
    is_neg: bool = False,
) -> tuple[Form, int]:
    """Returns a form, and the number of bytes from the first element to the last."""
    if prod(size or 1 for size in shape) >= NUMBER_END:
        raise ValueError("a tensor must have fewer than 2^63 elements")
    if is_neg and not dtype.is_complex and dtype not in _NEGATED:
        raise ValueError(f"a tensor of {dtype} has the attribute neg")
    span = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    nbytes = 0 if 0 in shape else span * dtype.itemsize
    return Form(_FILE, dtype, shape, strides, is_conj, is_neg), nbytes


def _rebuilt_v2(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _requires_grad: Any = False,
    _hooks: Any = None,
    bits: Any = None,
    *,
    dtype: Any = None,
) -> StoredView:
    """Returns the tensor of torch._utils._rebuild_tensor_v2, which may have attributes."""
    if type(storage) is not _Storage or type(dtype := dtype or storage.dtype) is not torch.dtype:
        raise ValueError("a tensor has no storage, or no dtype")
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
        raise ValueError("a tensor must have one stride for each dimension")
    if len(shape) > _DIMS_MAX:
        raise ValueError(f"a tensor has {len(shape)} dimensions, must be at most {_DIMS_MAX}")
    # Looked at before they are hashed, which takes the longer, the more digits a number has.
    if not are_numbers((offset, *shape, *strides)):
        raise ValueError("offset, shape and strides of a tensor must be numbers")
    bits = bits or {}
    # Of torch.Tensor.is_conj() and is_neg().
    if type(bits) is not dict or not bits.keys() <= {"conj", "neg"}:
        raise ValueError("a tensor has unknown attributes")
    form, span = _form(dtype, shape, strides, bool(bits.get("conj")), bool(bits.get("neg")))
    begin = offset * dtype.itemsize
    nbytes = begin + span if span else 0
    if nbytes > storage.nbytes or nbytes >= NUMBER_END:
        raise ValueError("a tensor must lie inside its storage")
    return StoredView(form, storage.record, begin, nbytes)


def _rebuilt_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _requires_grad: Any,
    _hooks: Any,
    dtype: Any,
    bits: Any = None,
) -> StoredView:
    """Returns the tensor of torch._utils._rebuild_tensor_v3."""
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no storage, or no dtype")
    return _rebuilt_v2(storage, offset, shape, strides, bits=bits, dtype=dtype)


def _parameter(data: Any, *_rest: Any) -> Any:
    return data


_REBUILT = {
    "_rebuild_tensor_v2": Callee(_rebuilt_v2),
    "_rebuild_tensor_v3": Callee(_rebuilt_v3),
    "_rebuild_parameter": Callee(_parameter),
    "_rebuild_parameter_with_state": Callee(_parameter),
}


def _of_type(make: Any, kind: Any, arguments: Any, *_rest: Any) -> Any:
    """Returns the tensor of torch._tensor._rebuild_from_type_v2, perhaps of a subclass."""
    if any(make is callee for callee in _REBUILT.values()) and type(arguments) is tuple:
        return make.make(*arguments)
    return Ignored(kind.name if type(kind) is Ignored else "torch.Tensor")


def _empty_dict(*_arguments: Any) -> dict[Any, Any]:
    return {}


def _ordered() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _size(sizes: Any) -> tuple[Any, ...]:
    if not isinstance(sizes, tuple | list):
        raise ValueError("sizes must be a tuple")
    return tuple(sizes)


def _items(items: Any = ()) -> tuple[Any, ...]:
    """Returns the elements of a set, which may be tensors."""
    if type(items) is not list:
        raise ValueError("a set must be made from a list")
    return tuple(items)


class _Plain:
    """Stands for an object without tensors. Each is unique, since it may be a tensor's key.

    `name` names the object's class or function.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:  # which is part of a tensor's name, in a key that is a tuple
        return self.name


def _encoded(text: Any, encoding: Any = "latin1") -> Any:
    """Returns bytes that protocol 2 stores as text."""
    if type(text) is not str or encoding != "latin1":
        raise ValueError(f"pickled bytes must be text in latin1, found {type(text).__name__}")
    return text.encode("latin1")


def _empty_bytes() -> bytes:
    """Returns b"", which protocol 2 stores as a call without arguments."""
    return b""


def _without_state(_target: Any, _state: Any) -> None:
    """Ignores attributes, such as a state_dict's _metadata."""


def _globals(module: str, names: Collection[str], stand_in: Any) -> dict[tuple[str, str], Any]:
    return {(module, name): stand_in for name in names}


def _plain(module: str, names: Collection[str]) -> dict[tuple[str, str], Any]:
    return {(module, name): Callee(partial(_plain_of, name)) for name in names}


def _plain_of(name: str, *_arguments: Any) -> _Plain:
    return _Plain(name)


_STATEFUL = (Instance(OrderedDict, _without_state),)
_SETS, _BUILTINS = ("set", "frozenset"), ("complex", "bytearray", "range")
_WITHOUT_TENSORS: dict[tuple[str, str], Any] = {
    **_plain("torch", ("device",)),
    **_plain("builtins", _BUILTINS),
    **_plain("__builtin__", _BUILTINS),
    **_plain("datetime", ("datetime", "date", "time", "timedelta", "timezone")),
    **_plain("pathlib", ("Path", "PosixPath", "PurePosixPath", "WindowsPath")),
}
_KNOWN: dict[tuple[str, str], Any] = {
    **_WITHOUT_TENSORS,
    ("collections", "OrderedDict"): Callee(_ordered),
    ("collections", "defaultdict"): Callee(_empty_dict),
    ("torch", "Size"): Callee(_size),
    ("_codecs", "encode"): Callee(_encoded),
    ("torch._tensor", "_rebuild_from_type_v2"): Callee(_of_type),
    ("torch.storage", "UntypedStorage"): None,
    **{("torch._utils", name): callee for name, callee in _REBUILT.items()},
    **{("torch", name): dtype for name, dtype in (*_STORAGES.items(), *_DTYPES.items())},
    ("builtins", "bytes"): Callee(_empty_bytes),
    ("__builtin__", "bytes"): Callee(_empty_bytes),
    **_globals("builtins", _SETS, Callee(_items)),
    **_globals("__builtin__", _SETS, Callee(_items)),
}


def _find(module: str, name: str) -> Any:
    entry = _KNOWN.get((module, name), _KNOWN)
    return Ignored(f"{module}.{name}") if entry is _KNOWN else entry


def find_kept(module: str, name: str) -> Any:
    """Returns what value_of() takes for a global, so that objects are Kept with all their parts."""
    key = module, name
    if name in _SETS and key in _KNOWN:
        return Callee(set if name == "set" else frozenset)
    is_kept = key not in _KNOWN or key in _WITHOUT_TENSORS
    return Kept(f"{module}.{name}") if is_kept else _KNOWN[key]
