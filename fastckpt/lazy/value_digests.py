"""Digests of the values in a checkpoint that are not tensors, for comparison without running code.

Responsible for the same digest of equal values, however their pickles were written.
"""

from __future__ import annotations

import hashlib
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import torch

from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats import plain_pickle, zip_records
from fastckpt.formats.plain_pickle import Kept
from fastckpt.formats.torch_pickle import collection_paused
from fastckpt.formats.value_names import below, items_in
from fastckpt.lazy.torch_names import (
    NAMES_MIN,
    NAMES_PER_BYTE,
    StoredView,
    find_kept,
    value_of,
)
from fastckpt.state.tree import PER_RANK, stored_of, unescaped

_SHOWN_CHARACTERS, _SHOWN_BITS, _HASH_CHARACTERS = 40, 128, 32
_ATOMS = frozenset({int, float, bool, str, bytes, bytearray, complex, type(None), torch.dtype})
_NODES = frozenset({dict, OrderedDict, list, tuple, StoredView})
_UNREADABLE = (plain_pickle.Refused, *plain_pickle.DAMAGE)
_ITEMS = ("append", "set", "add")  # of objects: picklers divide them into batches


class _Values:
    """The values that are hashed together, each once, however often they occur.

    `done` has each value by its identity with its hash, or None while that is computed.
    """

    def __init__(self) -> None:
        self.done: dict[int, tuple[Any, bytes | None]] = {}

    def digest(self, value: Any) -> str | None:
        """See digest()."""
        kind = type(value)
        is_long = isinstance(value, (str, bytes, bytearray)) and len(value) > _SHOWN_CHARACTERS
        is_long = is_long or (kind is int and value.bit_length() > _SHOWN_BITS)
        if kind in _ATOMS and not is_long:
            return repr(value)
        name = _name(value.name) if kind is Kept else kind.__name__
        try:
            return f"{name} with hash {self._hash(value).hex()[:_HASH_CHARACTERS]}"
        except (TypeError, RecursionError):
            return None

    def _hash(self, value: Any) -> bytes:
        """Raises TypeError for a value that contains tensors or itself."""
        earlier = self.done.get(id(value))
        if earlier is None:
            self.done[id(value)] = value, None
            sha = hashlib.sha256()
            for part in self._parts(value):
                sha.update(len(part).to_bytes(8, "little") + part)
            earlier = self.done[id(value)] = value, sha.digest()
        if earlier[1] is None:
            raise TypeError("it contains itself")
        return earlier[1]

    def _parts(self, value: Any) -> list[bytes]:
        kind = type(value)
        name = kind.__name__.encode()
        if kind in (bytes, bytearray):
            return [name, bytes(value)]
        if kind in _ATOMS:
            text = hex(value) if kind is int else value if kind is str else repr(value)
            return [name, text.encode("utf-8", "surrogatepass")]
        if isinstance(value, dict):
            return [b"dict", *sorted(self._hash(k) + self._hash(v) for k, v in value.items())]
        if kind in (list, tuple, set, frozenset):
            hashes = map(self._hash, value)
            return [name, *(hashes if kind in (list, tuple) else sorted(hashes))]
        if kind is not Kept:
            raise TypeError("it contains a tensor")
        result = [b"object", _name(value.name).encode("utf-8", "surrogatepass")]
        for how, changes in groupby(value.parts, itemgetter(0)):
            members: Iterable[Any] = [part for _how, part in changes]
            hashes = map(self._hash, chain.from_iterable(members) if how in _ITEMS else members)
            result += [how.encode(), *(sorted(hashes) if how in ("set", "add") else hashes)]
        return result


def digest(value: Any) -> str | None:
    """Returns a text that is equal for equal values: a short plain value itself, else its type and
    a hash. None: the value contains tensors or itself, or is nested too deeply.
    """
    return _Values().digest(value)


@collection_paused()
def digests_of(content: bytes, *, is_of_step: bool) -> dict[str, str | None]:
    """Returns the digest() of each value in a pickle that is not a tensor, by its name in
    names_of(), which must have accepted the pickle. If the pickle cannot be read with all parts of
    its objects, or its names are too long together, there is None for all values.
    """
    digests: dict[str, str | None] = {}
    characters, values = NAMES_PER_BYTE * len(content) + NAMES_MIN, _Values()
    try:
        nest = value_of(content, find_kept)
    except _UNREADABLE:
        return {"": None}
    ahead: list[tuple[str | None, Any, Any]] = [(None, None, nest)]
    while ahead:
        above, key, value = ahead.pop()
        name = above
        if value is not nest:
            text = _key(key, values)
            characters -= len(above or "") + len(text)
            if characters < 0:
                return {"": None}
            name = below(above, text)
        if is_of_step and type(value) is dict and stored_of(value) is not None:
            continue
        value = unescaped(value) if is_of_step else value
        is_of_rank = is_of_step and type(value) is dict and isinstance(value.get(PER_RANK), str)
        is_list = type(value) in (list, tuple) and any(type(item) in _NODES for item in value)
        if value and not is_of_rank and (is_list or isinstance(value, dict)):
            ahead += reversed([(name, key, item) for key, item in items_in(value)])
        elif type(value) is not StoredView:
            name = name or ""
            while name in digests:
                name += "#2"  # keys of two types that are equal as text
            digests[name] = None if is_of_rank else values.digest(value)
    return digests


def digest_of_file(content: bytes) -> str | None:
    """Returns the digest() of the whole value in a file of torch.save; None if it is not one."""
    try:
        directory = zip_records.directory_of(lambda n, at: content[at : at + n], len(content))
        (number,) = (n for n, name in enumerate(directory.names) if name.endswith("/data.pkl"))
        begin = directory.offsets[number]
        header = content[begin : begin + zip_records.LOCAL_BYTES]
        at = zip_records.data_offset(header, begin) or len(content)
        return digest(value_of(content[at : at + directory.sizes[number]], find_kept))
    except (*_UNREADABLE, CorruptCheckpoint):  # torch did not write it, or another version of it
        return None


def _key(key: Any, values: _Values) -> str:
    """Returns a key as text; of a key that is an object, its digest."""
    parts = key if type(key) is tuple else (key,)
    is_plain = all(type(part) in _ATOMS for part in parts)
    return str(key) if is_plain else values.digest(key) or type(key).__name__


def _name(name: str) -> str:
    """Returns the name of a class or function as Python 3 and NumPy 1 have it."""
    module, _dot, last = name.rpartition(".")
    module, last = NAME_MAPPING.get((module, last), (IMPORT_MAPPING.get(module, module), last))
    return f"{module}.{last}".replace("numpy._core.", "numpy.core.")
