"""Promise: a digest of an object differs between ranks only if the object surely does, whatever the
order of its sets and dicts, and whichever of its parts are one object.
"""

from __future__ import annotations

import collections
import copyreg
import datetime
import enum
import functools
import pickle
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from fastckpt.formats.object_digests import Pickled
from fastckpt.formats.torch_pickle import pickles
from fastckpt.state import tree


@dataclass
class Config:
    name: str
    sizes: Any = ()
    cache: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Frozen:
    seed: int


class Plain:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a


class Colour(enum.Enum):
    RED, BLUE = 1, 2


class Pair(NamedTuple):
    a: Any
    b: Any


class Comparing:
    """It says by itself what is equal."""

    def __init__(self, a: int) -> None:
        self.a = a

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Comparing)

    __hash__ = None  # type: ignore[assignment]


class Listing:
    """It pickles what is in no order as a list."""

    def __init__(self, *names: int) -> None:
        self.names = names

    def __getstate__(self) -> Any:
        return {"names": [*self.names]}


class Own(set[int]):
    pass


def filled(*items: int) -> set[int]:
    """A set whose order is that of the items, which fall together."""
    made = set[int]()
    for item in items:
        made.add(item)
    return made


def digest(value: Any) -> bytes:
    _found, content = pickles(value, lambda _tensor: False, 64 << 10)
    return Pickled(content).tobytes() if content else b""


SHARED = ["x" * 50]
EQUAL: list[tuple[Any, Any]] = [
    (filled(0, 8), filled(8, 0)),
    (frozenset([0, 8]), frozenset([8, 0])),
    ({"s": filled(0, 8, 16)}, {"s": filled(16, 8, 0)}),
    (Plain(a=1, b=2), Plain(b=2, a=1)),
    (Plain(a=SHARED, b=SHARED), Plain(a=[*SHARED], b=[*SHARED])),
    (Config("a", cache=1), Config("a", cache=2)),
    (Comparing(1), Comparing(2)),
    (Plain(a=Comparing(1)), Plain(a=Comparing(2))),
    (Listing(1, 2), Listing(2, 1)),
    (Own(filled(0, 8)), Own(filled(8, 0))),
    (collections.Counter("ab"), collections.Counter("ba")),
    (Plain(w=torch.ones(3)), Plain(w=torch.zeros(3))),  # compared in other ways, or not at all
    (Plain(n=numpy.ones(1 << 20)), Plain(n=numpy.zeros(1 << 20))),
]
DIFFERENT: list[tuple[Any, Any]] = [
    ({1, 2}, {1, 3}),
    ({"a"}, {"b"}),
    (Config("a"), Config("b")),
    (Config("a", [1, 2]), Config("a", [2, 1])),
    (Config("a", {"x": filled(0, 8)}), Config("a", {"x": filled(0, 9)})),
    (Frozen(1), Frozen(2)),
    (Plain(a=1), Plain(a=2)),
    (Plain(a=1), Config("a")),
    (Slotted(1), Slotted(2)),
    (Colour.RED, Colour.BLUE),
    (Pair(1, 2), Pair(2, 1)),
    (random.Random(1), random.Random(2)),
    (numpy.random.default_rng(1), numpy.random.default_rng(2)),
    (Plain(n=numpy.arange(3)), Plain(n=numpy.arange(3) + 1)),
    (collections.deque([1, 2]), collections.deque([2, 1])),
    (collections.defaultdict(list, a=[1]), collections.defaultdict(list, a=[2])),
    (Path("a/b"), Path("b/a")),
    (datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 2)),
    (functools.partial(print, 1), functools.partial(print, 2)),
    (SimpleNamespace(a=1), SimpleNamespace(a=2)),
    (Plain, Config),
]


@pytest.mark.parametrize("number", range(len(EQUAL)))
def test_equal_objects_have_one_digest(number: int) -> None:
    one, other = EQUAL[number]
    assert digest(one) == digest(other) != b""
    if type(one) is set:
        content = [pickle.dumps(its) for its in (one, other)]
        assert content[0] != content[1], "their pickles differ"
        by_old = [Pickled(pickle.dumps(its, 2)).tobytes() for its in (one, other)]
        assert by_old[0] == by_old[1] == digest(one)


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_other_objects_have_another(number: int) -> None:
    one, other = DIFFERENT[number]
    assert b"" != digest(one) != digest(other) != b""


def test_what_cannot_be_told_has_none() -> None:
    loop = Plain()
    loop.me = loop  # type: ignore[attr-defined]
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    wide: Any = [1]
    for _ in range(60):
        wide = [wide, wide]
    narrow: Any = [1]  # of which a digest of all its parts would cost more than its pickle
    for _ in range(12):
        narrow = [narrow, narrow]
    for value in (loop, Plain(a=deep), Plain(a=wide), Plain(a=narrow), Plain(a="x" * (64 << 10))):
        assert digest(value) == b""
    assert Pickled(b"no pickle").tobytes() == b""


def test_a_digest_changes_nothing_of_pickle() -> None:
    module, name, code = Frozen.__module__, Frozen.__qualname__, 77
    copyreg.add_extension(module, name, code)
    try:
        content = pickle.dumps(Frozen(5), 2)
        assert Pickled(content).tobytes() == digest(Frozen(5)) != b""
        assert pickle.loads(content) == Frozen(5)
    finally:
        copyreg.remove_extension(module, name, code)


def test_one_rank_keeps_no_pickle() -> None:
    state = {"a": Plain(a=1), "s": {1}, "t": torch.ones(3), "b": torch.ones(3).expand(9, 3)}
    assert tree.flatten(state, 0, 1).aside == {}
    aside = tree.flatten(state, 0, 2).aside
    assert {*aside} == {"", "a", "s", "t"}  # of a tensor that is not contiguous, no bytes are read
    many = {str(number): Plain(a="x" * 10_000) for number in range(10)}
    assert {*tree.flatten(many, 0, 2).aside} == {"", *"012345"}
