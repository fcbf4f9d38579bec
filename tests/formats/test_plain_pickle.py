"""A pickle of metadata takes memory in proportion to its size, runs nothing, and means the same.

Pickles by hand that make Python's own reader allocate gigabytes, stop for hours or crash, each of
some bytes; what picklers of every protocol write; and random changes of it. Knows the module alone.
"""

from __future__ import annotations

import collections
import pickle
import random
import signal
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from fastckpt.formats import plain_pickle
from fastckpt.formats.plain_pickle import DAMAGE, Refused
from tests.kit.readers import VALUES, Point, find
from tests.kit.storm import Storm


def loads(content: bytes) -> Any:
    value, end = plain_pickle.loads(content, find)
    assert end == len(content)
    return value


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Makes sure that no more memory was taken at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("pickler", [pickle.dumps, vars(pickle)["_dumps"]], ids=["C", "Python"])
def test_what_picklers_write_is_read_as_pickle_reads_it(pickler: Any, protocol: int) -> None:
    for value in VALUES:
        back = loads(pickler(value, protocol))
        assert back == value and repr(back) == repr(value)


def test_what_is_the_same_twice_is_so_again() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    (back, again), ring = loads(pickle.dumps(([shared, shared], (shared,))))
    assert back is again and back[1] is back and ring == (back,)


def _named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _put(number: int) -> bytes:
    return b"r" + struct.pack("<I", number)


POINT, SET = _named(Point.__module__, "Point"), _named("builtins", "set")
_many = b"(" + b"".join(b"M" + struct.pack("<H", number) for number in range(5000))
_state = b"}(" + b"".join(b"X\4\0\0\0%04dN" % number for number in range(4000)) + b"u"
_nested = b")" + b"\x85" * 30_000
_shared = b")" + b"q\0h\0\x86" * 60
_wide = b")" + b"".join(b"q\0(" + b"h\0" * 400 + b"t" for _ in range(6))
BOMBS = {
    "a bytearray of a length": _named("builtins", "bytearray") + b"J\0\0\0\x7f\x85R.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 31) + b"abc.",
    "bytes of four": b"\x80\x03B\xff\xff\xff\xffabc.",
    "more bytes than there can be": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
    "a bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 46) + b"abc.",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 31) + b"abc.",
    "a number": b"\x80\x04\x8b" + struct.pack("<I", (1 << 31) - 1) + b"abc.",
    "a frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "a list that doubles": b"(K\1lq\0"
    + _named("builtins", "slice")
    + b"K\0K\0\x86Rq\1"
    + b"0h\0h\1h\0s" * 40
    + b".",
    "one list in many sets": _many + b"lq\0" + (SET + b"q\1") + b"0h\1h\0\x85R" * 3000 + b".",
    "one state of many": POINT + b"q\1" + _state + b"q\0" + b"0h\1)\x81h\0b" * 3000 + b".",
    "a key of many levels": b"}" + _nested + b"Ns.",
    "a key that is shared": b"}" + _shared + b"Ns.",
    "a key of many parts": b"}" + _wide + b"Ns.",
    "a key within itself": POINT + b")\x81q\0}X\1\0\0\0xh\0sb}h\0Ns.",
    "a long number as a key": b"}\x80\x04\x8b"
    + struct.pack("<I", 30_000)
    + b"\1" * 30_000
    + b"Ns.",
    "a set of a set of keys": _nested + b"\x85l" + SET + b".",
    "marks": b"(" * 30_000 + b"1" * 30_001 + b".",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_few_bytes_neither_take_much_memory_nor_long(bomb: str) -> None:
    content = BOMBS[bomb]
    with at_most(400 * len(content) + (64 << 10)), pytest.raises((Refused, *DAMAGE)):
        loads(content)


def test_an_index_of_the_memo_costs_nothing() -> None:
    with at_most(64 << 10):
        assert loads(b"N" + _put(0x7FFFFFFF) + b"0j\xff\xff\xff\x7f.") is None


def test_deep_nesting_of_what_is_no_key_is_read_and_freed() -> None:
    for content in (b"]" * 30_000 + b"a" * 29_999 + b".", b")" + b"\x85" * 30_000 + b"."):
        assert len(loads(content)) <= 1
    content = POINT + b"q\0" + b")\x81}X\1\0\0\0xh\0" * 30_000 + b")\x81" + b"sb" * 30_000 + b"."
    assert type(loads(content)) is Point


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (_named("os", "system") + b"X\4\0\0\0true\x85R.", "os.system"),
        (b"\x80\x04\x8c\2os\x8c\6system\x93.", "os.system"),
        (POINT + b")R.", "a call"),
        (POINT + b"N}X\1\0\0\0xNs\x86b.", "a change of a class"),
        (SET + b"}X\1\0\0\0xNsb.", "a change of a Callee"),
        (b"]}X\1\0\0\0xNsb.", "a change of a list"),
        (SET + b")\x81.", "an instance"),
        (b"Pname\n.", "PERSID"),
        (b"NQ.", "BINPERSID"),
        (b"\x82\1.", "EXT1"),
        (b"(i__main__\nPoint\n.", "INST"),
        (b"I5\n.", "INT"),
    ],
)
def test_what_is_not_needed_is_refused_by_name(content: bytes, refusal: str) -> None:
    with pytest.raises(Refused, match=refusal):
        loads(content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"\x80",
        b"\x80\x63N.",
        b"N",
        b"\xff.",
        b"h\0.",
        b"0.",
        b"K",
        b"M\0.",
        b"\x8a\4a.",
        b"X\1\0\0\0\xff.",
        b"cos.",
        b"NN\x93.",
        b"}]Ns.",
        b"(Nd.",
        b"]Ns.",
        b"NNa.",
        b"N(Ne.",
        b"](N\x90.",
        POINT + b"N\x85\x81.",
        POINT + b")\x81]b.",
        POINT + b")\x81}NNsb.",
        SET + b"NR.",
        SET + b"K\1\x85R.",
        SET + b"K\1K\1\x86R.",
        b"}" + POINT + b")\x81}X\1\0\0\0x]sbNs.",
    ],
)
def test_what_no_pickler_wrote_is_told_apart(content: bytes) -> None:
    with pytest.raises(DAMAGE):
        loads(content)


def value_of(rng: random.Random, depth: int = 0) -> Any:
    """Any value that picklers write without a class, and a Point."""
    kind = rng.randrange(11 if depth < 4 else 6)
    if kind < 3:
        return rng.choice([None, True, 1.5, 255, 65536, -1, 1 << 31, -(1 << 63), 1 << 64, 1 << 300])
    if kind < 5:
        return rng.choice(["", "a", "b", "\u20ac" * 300, "\ud800", b"", b"b" * 300])
    if kind == 5:
        return bytearray(rng.randbytes(3))
    items = [value_of(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 3, 4, 20)))]
    if kind == 6:
        return items
    if kind == 7:
        return (*items, items)
    if kind == 8:
        return {
            rng.choice([number, str(number), (number, "a")]): v for number, v in enumerate(items)
        }
    if kind == 9:
        return collections.OrderedDict(enumerate(items))
    return Point({*range(len(items))}, frozenset(map(str, range(len(items)))))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_any_value_is_read_as_pickle_reads_it(protocol: int, storm: Storm) -> None:
    for rng in storm.rounds(suite=50, torture=5000):
        content = pickle.dumps(value_of(rng), protocol)
        back, expected = loads(content), pickle.loads(content)
        assert back == expected and repr(back) == repr(expected)


def test_a_read_can_be_interrupted_and_keeps_nothing() -> None:
    value = object()
    begun = []

    def find(_module: str, name: str) -> Any:
        begun.append(name)
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        return value

    def handle(_number: int, frame: FrameType | None) -> None:
        assert frame is not None
        if frame.f_code is find.__code__:  # too early, or too late
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        else:
            raise KeyboardInterrupt

    rest = b"2" * 200_000 + b"N0" * 10_000_000 + _named("the", "end") + b"."
    before, held = signal.signal(signal.SIGALRM, handle), sys.getrefcount(value)
    try:
        with pytest.raises(KeyboardInterrupt):
            plain_pickle.loads(_named("the", "beginning") + rest, find)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert begun == ["beginning"]
    assert sys.getrefcount(value) == held


def changed(content: bytes, rng: random.Random) -> bytes:
    """A pickle with some bytes replaced, left out, put in or repeated."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        end = min(len(changed), at + rng.choice((0, 1, 1, 4, 30)))
        other = rng.randrange(len(changed) + 1)
        filling = (
            rng.randbytes(end - at),
            b"",
            rng.randbytes(4),
            bytes(changed[other : other + 9]),
        )
        changed[at:end] = rng.choice(filling)
    return bytes(changed)


def check_changed(content: bytes) -> None:
    with at_most(400 * len(content) + (64 << 10)):
        try:
            plain_pickle.loads(content, find)
        except (Refused, *DAMAGE):
            pass  # the two ways in which a pickle may be none; all others fail the test


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_changed_pickles_are_refused_or_read(protocol: int, storm: Storm) -> None:
    whole = [pickle.dumps(value, protocol) for value in VALUES[:6]]
    for rng in storm.rounds(suite=70, torture=20_000):
        check_changed(changed(rng.choice(whole), rng))
