"""Pickles of plain values, read by an interpreter that runs nothing which they name.

Responsible for the opcodes that picklers of protocol 2 and later write, and for a bound: the value
takes at most some hundred times the memory of its bytes, whatever they claim. (For Python's own
reader, a few dozen bytes may cost gigabytes or hours: it allocates what a length or a memo's index
claims, and copies, joins or hashes one value again and again.) Time is bounded, too, but for keys
that are tuples made to collide, which take the square of their number. The interpreter itself is in
C++, in bindings_pickle_reader.cc: here is what its callers and it speak of. It must not know which
classes a file may hold: the caller tells.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastckpt import _engine

# The errors that the interpreter raises for bytes that no pickler wrote.
DAMAGE = (ValueError, TypeError, AttributeError, LookupError, struct.error)


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
    records = {each.kind: each for each in stateful}
    found: tuple[Any, int] = _engine.read_pickle(content, find, named, records, _WORDS)
    return found


# The interpreter takes these names from here.
_WORDS: dict[str, Any] = {
    "callee": Callee,
    "instance": Instance,
    "ignored": Ignored,
    "refused": Refused,
    "ordered_dict": OrderedDict,
    "struct_error": struct.error,
    "vars": vars,
    "bare": object.__new__,
    "opcodes": {ord(op.code): op.name for op in pickletools.opcodes},
}
