"""What strict_json.decode() reads is what Python's reader reads, and it refuses what it has to.

Random values, as json.dumps writes them, and random changes of that text.
"""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

import pytest

from fastckpt.formats.strict_json import decode
from tests.storm import Storm

_CHARACTERS = 'ab"\\/\n\t\x7f\x01é€😀\ud800\udc00 :,{}[]0u'
_FRAGMENTS = (
    *('"', "\\", "\\u", "\\ud83d", "\\ude00", "\\u00E9", "{", "}", "[", "]", ",", ":", '"a":1'),
    *("1", "00", "-", "0", ".", "e", "E", "+", "1e999", "9" * 20, "9" * 40, "true", "nul", "NaN"),
    *("-Infinity", " ", "\r", "\x00", "\x0b", "é", "\ufeff"),
)


def value(rng: Random, depth: int = 0) -> Any:
    kind = rng.randrange(12 if depth < 4 else 9)
    if kind == 0:
        return rng.choice((True, False, None))
    if kind < 3:
        return rng.randrange(-(10**30), 10**30) >> rng.randrange(100)
    if kind < 5:
        return rng.uniform(-1, 1) * 10 ** rng.randrange(-320, 308)
    if kind < 9:
        return "".join(rng.choices(_CHARACTERS, k=rng.randrange(40)))
    if kind == 9:
        return [value(rng, depth + 1) for _ in range(rng.randrange(5))]
    names = ("a", "b", "é", '"', "\ud801", "a name of more than thirty-two characters")
    return {
        f"{rng.choice(names)}{rng.randrange(9)}": value(rng, depth + 1)
        for _ in range(rng.randrange(5))
    }


def changed(text: str, rng: Random) -> str:
    for _ in range(rng.choice((1, 1, 2, 6))):
        begin = rng.randrange(len(text) + 1)
        end = begin + rng.choice((0, 0, 1, 1, 3))
        text = text[:begin] + rng.choice((*_FRAGMENTS, "", "", "")) + text[end:]
    return text


def expected(text: str) -> Any:
    """Python's reader with the additional rules; raises ValueError."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError("twice")
        return dict(pairs)

    def real(digits: str) -> float:
        if len(digits) > 32 or not math.isfinite(float(digits)):
            raise ValueError("too large or too long")
        return float(digits)

    def integer(digits: str) -> int:
        if len(digits) > 32:
            raise ValueError("too long")
        return int(digits)

    return json.loads(
        text,
        object_pairs_hook=members,
        parse_float=real,
        parse_int=integer,
        parse_constant=lambda _name: real("inf"),
    )


def test_it_agrees_with_pythons_reader(storm: Storm) -> None:
    refused = 0
    for rng in storm.rounds(3000, 200_000):
        text = json.dumps(value(rng), ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))
        text = text.encode(errors="replace").decode()  # halves of pairs that are not escaped
        assert repr(decode(text.encode())) == repr(expected(text))
        text = changed(text, rng)
        try:
            wanted = expected(text)
        except ValueError:
            refused += 1
            with pytest.raises(ValueError):
                decode(text.encode())
        else:
            assert repr(decode(text.encode())) == repr(wanted), text
    assert refused


def outcome(text: str, columns: dict[str, tuple[str, ...]] | None = None) -> Any:
    """What decode() returns, or the error that it raises; objects for columns."""
    try:
        found: Any = decode(text.encode(), columns)
    except ValueError as error:
        return str(error)
    if columns is not None and type(found) is dict:
        for name in columns.keys() & found.keys():
            if type(found[name]) is tuple:
                rows = zip(*found[name], strict=True)
                found[name] = [dict(zip(columns[name], row, strict=True)) for row in rows]
    return found


def test_columns_hold_what_the_objects_do(storm: Storm) -> None:
    columns = {"rows": ("key", "at"), "others": ("a",)}
    assert decode(b'{"rows": [{"key": "k", "at": [1]}, {"key": 2, "at": 3}]}', columns) == {
        "rows": (["k", 2], [[1], 3])
    }
    assert decode(b'{"rows": [], "others": []}', columns) == {"rows": ([], []), "others": ([],)}
    refused = 0
    for rng in storm.rounds(3000, 200_000):
        rows = [{"key": value(rng, 3), "at": value(rng, 3)} for _ in range(rng.randrange(5))]
        nest = {"a": value(rng, 2), "rows": rows, "others": [{"a": 1}, {"b": 2}]}
        if rng.random() < 0.2:
            rows.insert(rng.randrange(len(rows) + 1), value(rng, 2))
        if rng.random() < 0.2:
            nest["others"] = {"rows": rows}  # which are not members of the outermost object
        text = json.dumps(nest).replace(
            *rng.choice((("", ""), ('"key"', '"at"'), ('"at"', '"a"'), ("}, {", '}, {"key": 1, ')))
        )
        if rng.random() < 0.7:
            text = changed(text, rng)
        wanted = outcome(text)
        refused += type(wanted) is str
        assert repr(outcome(text, columns)) == repr(wanted), text
    assert refused


def test_lists_are_read_as_they_are_written_each_time() -> None:
    numbers = ["[]", "[1]", "[ 1]", "[1,2]", "[12]", "[1,2,3]", "[-1]", "[1.0]", f"[{'7,' * 40}7]"]
    wanted = [json.loads(text) for text in numbers] * 300
    Random(1).shuffle(wanted)
    text = json.dumps(wanted, separators=(",", ":"))
    found = decode(text.encode())
    assert repr(found) == repr(wanted)  # 1.0 == 1 and True
    before, _, behind = text.rpartition("[1,2]")
    for wrong in ("[1,2", "[,1]", "[1,]", "[1,,2]", "[01]"):
        with pytest.raises(ValueError):
            decode(f"{before}{wrong}{behind}".encode())


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_what_is_nested_too_deeply_is_refused(opening: str) -> None:
    with pytest.raises(RecursionError):
        decode(opening.encode() * 1_000_000)
    assert decode(b"[" * 200 + b"]" * 200)
    assert decode(b"[" + b"[{}]," * 1000 + b"0]")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "Expecting value at byte 0, found ''"),
        (b'{"a" 1}', "Expecting ':' at byte 5, found '1}'"),
        (b'{"a": 1 "b": 2}', "Expecting ',' at byte 8"),
        (b'{"a": 1, "b": 2, "a": 3}', "an object has a name twice"),
        (b'"\\x"', "Expecting an escape at byte 2"),
        (b'"\\u12g4"', "Expecting a hex digit at byte 5"),
        (b'"abc', "Expecting the end of a text at byte 4"),
        (b"[1, 02]", "Expecting no digit behind a zero"),
        (b"[1] 2", "Extra data at byte 4, found '2'"),
        (b"[NaN]", "Expecting value at byte 1, found 'NaN]'"),
    ],
)
def test_errors_say_what_is_wrong_and_where(text: bytes, told: str) -> None:
    with pytest.raises(ValueError) as raised:
        decode(text)
    assert told in str(raised.value)
