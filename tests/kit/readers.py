"""Readers of formats, and contents that they read."""

from __future__ import annotations

import collections
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastckpt.formats import distcp, file_list, safetensors, torch_zip
from fastckpt.formats.manifest import Manifest, Writer
from fastckpt.formats.plain_pickle import Callee, Instance, Refused
from fastckpt.formats.shard_index import ShardIndex
from fastckpt.plan.image import PAGE_BYTES


@dataclass(frozen=True)
class Point:
    """What a file may hold."""

    x: Any = None
    y: Any = None


def _made(kind: type) -> Callee:
    return Callee(kind)


def _bytes(*values: Any) -> bytes:
    """How protocol 2 has bytes."""
    return values[0].encode("latin-1") if values else b""


def _bytearray(value: Any) -> bytearray:
    if type(value) is not bytes:
        raise ValueError("no bytes")
    return bytearray(value)


GLOBALS = {
    (__name__, "Point"): Instance(Point),
    ("_codecs", "encode"): Callee(_bytes),
    ("builtins", "bytes"): Callee(_bytes),
    ("builtins", "bytearray"): Callee(_bytearray),
    ("builtins", "set"): _made(set),
    ("builtins", "frozenset"): _made(frozenset),
    ("builtins", "complex"): _made(complex),
    ("builtins", "slice"): _made(slice),
    ("collections", "OrderedDict"): _made(collections.OrderedDict),
}


def find(module: str, name: str) -> Any:
    try:
        return GLOBALS[module.replace("__builtin__", "builtins"), name]
    except KeyError:
        raise Refused(f"{module}.{name}") from None


VALUES: list[Any] = [
    [None, True, False, 0, 255, 256, 65536, -1, 1 << 40, -(1 << 70), 1 << 3000, 1.5, float("inf")],
    ["", "text", "\u20ac" * 300, "\ud800", b"", b"bytes", bytes(300), bytearray(b"more")],
    [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [[]], {}, {1: {2: [3]}}, {(1, "a"): 2}],
    [set(), {1, 2}, frozenset(), frozenset({(1, 2), frozenset({3})}), 1 + 2j, slice(1, None, 2)],
    {Point("a", (1, 2)): Point([Point()], {"b": Point("c")})},
    collections.OrderedDict([("b", 1), ("a", collections.OrderedDict())]),
    [Point(number, str(number)) for number in range(1500)],
]


def closed(tail: bytes, kind: str, body_nbytes: int) -> bytes:
    """With the comment that a tail ends in, and the right checksum."""
    tail += f"{kind} 01 {body_nbytes:016x} ".encode()
    return tail + f"{zlib.crc32(tail):08x}".encode()


def signed(text: bytes) -> bytes:
    """As a manifest ends, with the right digest."""
    text += b"\n]"
    return text + b',"sha256":"%s"}\n' % hashlib.sha256(text).hexdigest().encode()


def measured(text: bytes) -> bytes:
    """A file of safetensors with this header."""
    return len(text).to_bytes(8, "little") + text


READERS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], Any]]] = {
    "torch zip": (
        lambda text: closed(text + b"}", "fastckpt", PAGE_BYTES),
        lambda content: torch_zip.parse(content, PAGE_BYTES),
    ),
    "distcp": (
        lambda text: closed(text, "fastckpt distcp", PAGE_BYTES),
        lambda content: distcp.parse(content, PAGE_BYTES),
    ),
    "safetensors": (measured, lambda content: safetensors.parse(content, len(content))),
    "manifest": (signed, Manifest.from_bytes),
    "writer": (lambda text: text[:1000], Writer.from_bytes),
    "index": (bytes, ShardIndex.from_bytes),
    "file list": (bytes, file_list.from_bytes),
}
