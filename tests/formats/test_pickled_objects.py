"""Promise: what ranks compare of an object is equal for equal objects, whatever the order of its
sets and dicts, and whichever of its parts are one object; and another for other objects.
"""

from __future__ import annotations

import collections
import datetime
import enum
import functools
import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from fastckpt.formats.torch_pickle import Pickled, pickles
from fastckpt.state import tree


@dataclass
class Config:
    name: str
    sizes: Any = ()


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


class Own(set[int]):
    """It pickles what is in no order as a list."""


def filled(*items: int) -> set[int]:
    """A set whose order is that of the items, which fall together."""
    made = set[int]()
    for item in items:
        made.add(item)
    return made


def digest(value: Any) -> bytes:
    _found, content = pickles(value, lambda _tensor: False, 64 << 10)
    return Pickled(content).tobytes()


SHARED = ["x" * 50]
EQUAL: list[tuple[Any, Any]] = [
    (filled(0, 8), filled(8, 0)),
    (frozenset([0, 8]), frozenset([8, 0])),
    ({"s": filled(0, 8, 16)}, {"s": filled(16, 8, 0)}),
    (Plain(a=1, b=2), Plain(b=2, a=1)),
    (Plain(a=SHARED, b=SHARED), Plain(a=[*SHARED], b=["".join(SHARED)])),
    (Own(filled(0, 8)), Own(filled(8, 0))),
    (collections.Counter("ab"), collections.Counter("ba")),
    (Plain(w=torch.ones(3)), Plain(w=torch.zeros(3))),  # compared in other ways, or not at all
    (Plain(n=numpy.ones(1 << 20)), Plain(n=numpy.zeros(1 << 20))),
]
DIFFERENT: list[tuple[Any, Any]] = [
    ({1, 2}, {1, 3}),
    ({"a"}, {"b"}),
    (Config("a"), Config("b")),
    (Config("a", {"x": filled(0, 8)}), Config("a", {"x": filled(0, 9)})),
    (Plain(first=True, last=False), Plain(first=False, last=True)),
    (Plain(a=1), Config("a")),
    (Slotted(1), Slotted(2)),
    (Colour.RED, Colour.BLUE),
    (Pair(1, 2), Pair(2, 1)),
    (random.Random(1), random.Random(2)),
    (numpy.random.default_rng(1), numpy.random.default_rng(2)),
    (Plain(n=numpy.arange(3)), Plain(n=numpy.arange(3) + 1)),
    (collections.deque([1, 2]), collections.deque([2, 3])),
    (collections.defaultdict(list, a=[1]), collections.defaultdict(list, a=[2])),
    (Path("a/b"), Path("b/a/c")),
    (datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 2)),
    (functools.partial(print, 1), functools.partial(print, 2)),
    (SimpleNamespace(a=1), SimpleNamespace(a=2)),
    (Plain, Config),
]


@pytest.mark.parametrize("number", range(len(EQUAL)))
def test_equal_objects_are_alike(number: int) -> None:
    one, other = EQUAL[number]
    assert digest(one) == digest(other) != b""
    if type(one) is set:
        assert pickle.dumps(one) != pickle.dumps(other), "their pickles differ"


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_other_objects_are_not(number: int) -> None:
    one, other = DIFFERENT[number]
    assert b"" != digest(one) != digest(other) != b""


def test_what_cannot_be_compared_is_alike() -> None:
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    wide: Any = [1]
    for _ in range(60):
        wide = [wide, wide]
    loop = Plain(wide=wide)
    loop.me = loop  # type: ignore[attr-defined]
    assert digest(loop) != b"", "each part is looked at once"
    for value in (Plain(a=deep), Plain(a="x" * (64 << 10)), Plain(a=10**5000)):
        assert digest(value) == b""
    assert Pickled(b"no pickle").tobytes() == b""


def test_one_rank_keeps_no_pickle() -> None:
    state = {"a": Plain(a=1), "s": {1}, "t": torch.ones(3), "b": torch.ones(3).expand(9, 3)}
    assert tree.flatten(state, 0, 1).aside == {}
    aside = tree.flatten(state, 0, 2).aside
    assert {*aside} == {"", "a", "s", "t"}  # of a tensor that is not contiguous, no bytes are read
    many = {str(number): Plain(a="x" * 10_000) for number in range(10)}
    assert {*tree.flatten(many, 0, 2).aside} == {"", *"012345"}
