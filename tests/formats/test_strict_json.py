"""strict_json.decode() refuses what Python's reader of JSON lets pass and no format here uses."""

from __future__ import annotations

import json

import pytest

from fastckpt.formats.strict_json import decode


def test_values_are_read_as_they_were_written() -> None:
    value = {"a": [1, -2.5, 1 << 90, True, None, "\u20ac\ud800", {"b": {}}], "c": []}
    assert repr(decode(json.dumps(value).encode())) == repr(value)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_what_is_nested_too_deeply_is_refused(opening: str) -> None:
    with pytest.raises(RecursionError):
        decode(opening.encode() * 1_000_000)
    assert decode(b"[" * 200 + b"]" * 200)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "Expecting value"),
        (b"[1] 2", "Extra data"),
        (b"\xff", "can't decode byte"),
        (b"\xef\xbb\xbf1", "Expecting value"),
        (b'{"a": 1, "b": 2, "a": 3}', "an object has a duplicate name"),
        (b"[" + b"9" * 33 + b"]", "the number 9{9}... is too long: it has 33 digits"),
        (b"[NaN]", "the number NaN must be finite"),
        (b"[-Infinity]", "the number -Infinity must be finite"),
        (b"[1e999]", "the number 1e999 must be finite"),
    ],
)
def test_errors_say_what_is_wrong(text: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        decode(text)
