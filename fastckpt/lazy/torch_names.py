"""The tensors that the pickle of a torch zip names, found without running anything that it names.

Responsible for what torch's pickler writes for a tensor. Other classes are passed over, so that a
file with a user's objects can be opened, too: their tensors are found, they are not made. It must
not know files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats import plain_pickle
from fastckpt.formats.plain_pickle import Callee, Ignored, Instance
from fastckpt.state.tree import joined

_DEPTH_MAX = 400
_NUMBER_END = 1 << 63
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
_DTYPES = {str(v)[6:]: v for v in vars(torch).values() if isinstance(v, torch.dtype)}


class StoredView(NamedTuple):
    """A tensor as a pickle describes it: a view of a storage.

    Attributes:
        record: the name of the storage's record.
        dtype, shape, strides: the tensor's; strides in elements.
        offset: of its first element in the storage, in elements.
    """

    record: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class _Storage(NamedTuple):
    """A storage that the pickle refers to; `dtype` is None if it has only bytes."""

    key: str
    dtype: torch.dtype | None
    nbytes: int


def named_views(content: bytes) -> dict[str, StoredView]:
    """Returns the tensors in the nest of dicts, lists and tuples that a pickle describes, by name.

    A name is the path of keys to the tensor, joined by "/", as a Checkpointer names tensors.

    Raises:
        CorruptCheckpoint: no pickler of torch's wrote it.
    """
    try:
        nest, _end = plain_pickle.loads(content, _find, _storage, _STATEFUL)
    except plain_pickle.Refused as error:
        raise CorruptCheckpoint(
            f"its pickle holds {error}, which torch.save does not write"
        ) from None
    except plain_pickle.DAMAGE as error:
        raise CorruptCheckpoint(f"its pickle is malformed: {str(error)[:100]}") from None
    found: dict[str, StoredView] = {}
    for path, view in _views(nest, (), 0):
        name = base = joined(path)
        number = 1
        while name in found:  # 0 and "0" are two keys of a dict
            number += 1
            name = f"{base}#{number}"
        found[name] = view
    return found


def _views(
    value: Any, path: tuple[str, ...], depth: int
) -> Iterator[tuple[tuple[str, ...], StoredView]]:
    if isinstance(value, StoredView):
        yield path, value
    elif depth > _DEPTH_MAX:
        raise CorruptCheckpoint(f"it is nested more than {_DEPTH_MAX} deep")
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, (StoredView, dict, list, tuple)):
                yield from _views(item, (*path, str(key)), depth + 1)
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            if isinstance(item, (StoredView, dict, list, tuple)):
                yield from _views(item, (*path, str(number)), depth + 1)


def _storage(name: Any) -> _Storage:
    """Returns the storage of a persistent id, which is ("storage", class, key, location, size)."""
    if type(name) is not tuple or len(name) != 5 or name[0] != "storage":
        raise ValueError("a persistent id is not that of a storage")
    _word, kind, key, _location, size = name
    if type(key) is not str or type(size) is not int or not 0 <= size < _NUMBER_END:
        raise ValueError("a storage has no name or size")
    dtype = kind if isinstance(kind, torch.dtype) else None
    return _Storage(key, dtype, size * (1 if dtype is None else dtype.itemsize))


def _rebuilt(storage: Any, offset: Any, shape: Any, strides: Any, *_rest: Any) -> Any:
    """Returns the tensor of torch._utils._rebuild_tensor_v2 and _rebuild_tensor_v3."""
    if not isinstance(storage, _Storage):
        return Ignored()
    dtype = storage.dtype
    if len(_rest) > 2 and isinstance(_rest[2], torch.dtype):
        dtype = _rest[2]
    numbers = (offset, *_tuple(shape), *_tuple(strides))
    if dtype is None or any(type(n) is not int or not 0 <= n < _NUMBER_END for n in numbers):
        raise ValueError("a tensor has no dtype, or its place is not a number")
    shape, strides = _tuple(shape), _tuple(strides)
    if len(shape) != len(strides):
        raise ValueError("a tensor has not as many strides as dimensions")
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > storage.nbytes:
        raise ValueError("a tensor reaches beyond its storage")
    return StoredView(f"data/{storage.key}", dtype, shape, strides, offset)


def _tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list):
        raise ValueError("sizes are not a tuple")
    return tuple(value)


def _parameter(data: Any, *_rest: Any) -> Any:
    return data


def _of_type(make: Any, _kind: Any, arguments: Any, *_rest: Any) -> Any:
    """Returns the tensor of torch._tensor._rebuild_from_type_v2, which has attributes or a class of
    its own.
    """
    known = type(make) is Callee and type(arguments) is tuple
    return make.make(*arguments) if known else Ignored()


def _without_state(_target: Any, _state: Any) -> None:
    """Passes attributes over, such as a state_dict's _metadata."""


_STATEFUL = (Instance(OrderedDict, _without_state),)
_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): Callee(_rebuilt),
    ("torch._utils", "_rebuild_tensor_v3"): Callee(_rebuilt),
    ("torch._utils", "_rebuild_parameter"): Callee(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Callee(_parameter),
    ("collections", "OrderedDict"): Callee(OrderedDict),
    ("torch", "Size"): Callee(tuple),
    ("torch._tensor", "_rebuild_from_type_v2"): Callee(_of_type),
    ("torch.storage", "UntypedStorage"): None,
}
_KNOWN |= {("torch", name): dtype for name, dtype in _STORAGES.items()}
_KNOWN |= {("torch", name): dtype for name, dtype in _DTYPES.items()}


def _find(module: str, name: str) -> Any:
    return _KNOWN.get((module, name), Ignored())
