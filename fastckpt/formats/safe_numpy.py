"""NumPy's arrays and scalars in pickles, made without what could run code or trust a size.

NumPy's own functions for pickles take the layout of memory from the pickle, and so are not safe
with files of others. These make arrays of numbers, booleans and text, and refuse all else: objects,
structures, dates, and numbers of another byte order. The module must not know who reads the pickle.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from typing import Any

_KIND = re.compile(r"(b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU]\d{1,9})")
_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMBER_END = 1 << 63


class Refused(Exception):
    """A pickle asks for something that is none of these; the text names what would make it."""


def found(module: str, name: str) -> Any:
    """Returns what stands for a class or function of NumPy's; None for all that is none of these,
    or if there is no NumPy.
    """
    if name == "bytes" and module in ("builtins", "__builtin__"):
        return _no_bytes  # of an empty array
    if module.partition(".")[0] != "numpy":
        return None
    if find_spec("numpy") is None:
        return None
    if module == "numpy":
        return {"ndarray": _ndarray, "dtype": _dtype}.get(name)
    return _CALLED.get(name) if module in _MODULES else None


def takes_state(value: object) -> bool:
    """Returns whether set_state() is for this value."""
    return _is(value, "dtype") or _is(value, "ndarray")


def set_state(value: Any, state: Any) -> None:
    """Gives an empty array its contents, as pickled; of a dtype only looks whether that is plain.

    Raises Refused for what NumPy's pickles of such arrays do not have.
    """
    if _is(value, "dtype"):
        # Version, byte order, and five values of which plain dtypes have none of their own.
        plain = type(state) is tuple and len(state) == 8 and state[0] == 3
        if not plain or state[1] not in ("<", "|") or state[2:5] != (None, None, None):
            raise Refused("numpy.dtype")
        return
    if type(state) is not tuple or len(state) != 5 or value.size:
        raise Refused("numpy.ndarray")
    version, shape, dtype, is_fortran, content = state
    sizes_fit = type(shape) is tuple and all(
        type(size) is int and 0 <= size < _NUMBER_END for size in shape
    )
    if version != 1 or not sizes_fit or not _is(dtype, "dtype") or type(content) is not bytes:
        raise Refused("numpy.ndarray")
    if prod(shape) * dtype.itemsize != len(content):
        raise Refused("numpy.ndarray")
    value.__setstate__((1, shape, dtype, is_fortran is True, content))


def _is(value: object, name: str) -> bool:
    """Returns whether a value is of a class of NumPy's, which may not be there."""
    return any(its.__module__ == "numpy" and its.__name__ == name for its in type(value).__mro__)


def _dtype(kind: Any, *_how: Any) -> Any:
    import numpy

    if type(kind) is not str or not _KIND.fullmatch(kind):
        raise Refused("numpy.dtype")
    return numpy.dtype(f"<{kind}")


def _ndarray(*_arguments: Any) -> Any:
    """Stands for the class, which is named alone: called, it takes memory and its layout from the
    pickle.
    """
    raise Refused("numpy.ndarray")


def _array(kind: Any, _shape: Any, _code: Any) -> Any:
    import numpy

    if kind is not _ndarray:
        raise Refused("numpy.ndarray")
    return numpy.ndarray((0,), "b")


def _scalar(dtype: Any, content: Any) -> Any:
    import numpy

    if not _is(dtype, "dtype") or type(content) is not bytes:
        raise Refused("numpy.generic")
    if len(content) != dtype.itemsize or not content:
        raise Refused("numpy.generic")
    return numpy.frombuffer(content, dtype)[0]


def _no_bytes(*arguments: Any) -> bytes:
    if arguments:
        raise Refused("builtins.bytes")
    return b""


_CALLED: dict[str, Callable[..., Any]] = {"_reconstruct": _array, "scalar": _scalar}
