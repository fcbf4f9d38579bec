"""Digests of the values in a checkpoint that are not tensors, for comparison without running code.

Responsible for the same digest of equal values, however their pickles were written.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import torch

from fastckpt.formats import plain_pickle
from fastckpt.formats.plain_pickle import Kept
from fastckpt.formats.torch_pickle import collection_paused
from fastckpt.formats.value_names import below, items_in
from fastckpt.lazy.torch_names import StoredView, find_kept, value_of
from fastckpt.state.tree import PER_RANK, stored_of, unescaped

_SHOWN_CHARACTERS, _SHOWN_BITS, _HASH_CHARACTERS = 40, 128, 32
_ATOMS = frozenset({int, float, bool, str, bytes, bytearray, complex, type(None), torch.dtype})
_NODES = frozenset({dict, OrderedDict, list, tuple, StoredView})
_UNREADABLE = (plain_pickle.Refused, *plain_pickle.DAMAGE)
_MERGED: dict[str, Any] = {"set": dict, "add": frozenset, "append": list}  # items, in batches


@collection_paused()
def digests_of(content: bytes, *, is_of_step: bool) -> dict[str, str | None]:
    """Returns the digest() of each value in a pickle that is not a tensor, by its name in
    names_of(), which must have accepted the pickle. Returns none if the pickle cannot be read with
    all parts of its objects.
    """
    found: dict[str, str | None] = {}
    try:
        ahead: list[tuple[str | None, Any]] = [(None, value_of(content, find_kept))]
    except _UNREADABLE:  # these values are then not compared
        return found
    while ahead:
        name, value = ahead.pop()
        if is_of_step and type(value) is dict and stored_of(value) is not None:
            continue
        value = unescaped(value) if is_of_step else value
        is_of_rank = is_of_step and type(value) is dict and isinstance(value.get(PER_RANK), str)
        is_list = type(value) in (list, tuple) and any(type(item) in _NODES for item in value)
        if value and not is_of_rank and (is_list or isinstance(value, dict)):
            inner = [(below(name, _key(key)), item) for key, item in items_in(value)]
            ahead += reversed(inner)
        elif type(value) is not StoredView:
            name = name or ""
            while name in found:
                name += "#2"  # keys of two types that are equal as text
            found[name] = None if is_of_rank else digest(value)
    return found


def digest_of_file(content: bytes) -> str | None:
    """Returns the digest() of the whole value in a file of torch.save; None if it is not one."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            (name,) = (each for each in archive.namelist() if each.endswith("/data.pkl"))
            is_stored = archive.getinfo(name).file_size <= len(content)
            return digest(value_of(archive.read(name), find_kept)) if is_stored else None
    except (*_UNREADABLE, zipfile.BadZipFile, EOFError):  # of another version of torch
        return None


def digest(value: Any) -> str | None:
    """Returns a text that is equal for equal values: a short plain value itself, else its type and
    a hash. None: the value contains tensors or itself, or is nested too deeply.
    """
    kind = type(value)
    is_short = kind in _ATOMS and not (kind is int and value.bit_length() > _SHOWN_BITS)
    if is_short and len(text := repr(value)) <= _SHOWN_CHARACTERS:
        return text
    name = _name(value.name) if kind is Kept else kind.__name__
    try:
        return f"{name} with hash {_hash(value, {}).hex()[:_HASH_CHARACTERS]}"
    except (TypeError, RecursionError):
        return None


def _hash(value: Any, done: dict[int, tuple[Any, bytes | None]]) -> bytes:
    """Computes a hash once for each part; `done` has them by identity, None while one is computed.
    Raises TypeError for a value that contains tensors or itself.
    """
    kind, known = type(value), done.get(id(value))
    if kind not in _ATOMS and known is not None:
        if known[1] is None:
            raise TypeError("it contains itself")
        return known[1]
    done[id(value)] = value, None
    name, parts = kind.__name__, list[bytes]()
    if kind in _ATOMS:
        text = hex(value) if kind is int else value if kind is str else repr(value)
        parts = [bytes(value) if kind is bytes else text.encode("utf-8", "surrogatepass")]
    elif isinstance(value, dict):  # in any order
        name, parts = "dict", sorted(_hash(k, done) + _hash(v, done) for k, v in value.items())
    elif kind in (set, frozenset):
        parts = sorted(_hash(part, done) for part in value)
    elif kind in (list, tuple):
        parts = [_hash(part, done) for part in value]
    elif kind is Kept:
        name = f"object {_name(value.name)}"
        for how, changes in groupby(value.parts, itemgetter(0)):
            its = [part for _how, part in changes]
            merged = _MERGED[how](chain.from_iterable(its)) if how in _MERGED else its
            parts += [how.encode(), _hash(merged, done)]
    else:
        raise TypeError("it contains a tensor")
    sha = hashlib.sha256(name.encode("utf-8", "surrogatepass"))
    for part in parts:
        sha.update(len(part).to_bytes(8, "little") + part)
    done[id(value)] = value, sha.digest()
    return sha.digest()


def _key(key: Any) -> str:
    parts = key if type(key) is tuple else (key,)
    return str(key) if all(type(part) in _ATOMS for part in parts) else type(key).__name__


def _name(name: str) -> str:
    """Returns the name of a class or function as Python 3 and NumPy 1 have it."""
    module, _dot, last = name.rpartition(".")
    module, last = NAME_MAPPING.get((module, last), (IMPORT_MAPPING.get(module, module), last))
    return f"{module}.{last}".replace("numpy._core.", "numpy.core.")
