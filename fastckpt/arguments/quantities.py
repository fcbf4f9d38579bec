"""Conversion of sizes, rates and times from and to text such as "4.3TiB", "75GB/s" and "3h"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite

_DIGITS = "[0-9]+(?:_[0-9]+)*"
_NUMBER = re.compile(
    rf"\s*({_DIGITS}\.?(?:{_DIGITS})?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*\Z", re.ASCII
)
_PREFIXES = ("k", "M", "G", "T", "P")
_BYTES = {
    "": 1.0,
    "b": 1.0,
    **{f"{p.lower()}b": 1000.0**n for n, p in enumerate(_PREFIXES, 1)},
    **{f"{p.lower()}ib": 1024.0**n for n, p in enumerate(_PREFIXES, 1)},
}
_SECONDS = {
    "": 1.0,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    **dict.fromkeys(("m", "min"), 60.0),
    "h": 3600.0,
    "d": 86400.0,
}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


class NotAQuantity(ValueError):
    """A text is not a size, rate, time or number; the message quotes it and has an example."""


def size(text: str) -> float:
    """Returns bytes from texts such as "4.3TiB" (powers of 1024), "24 GB" (of 1000) or "1e9"."""
    return _read(text, _BYTES, "a size", "4.3TiB or 24GB")


def rate(text: str) -> float:
    """Returns bytes per second from texts such as "75GB/s" or "6 GiB/s"; "/s" is optional."""
    stem = text.strip()
    stem = stem[:-2] if stem.endswith("/s") else stem
    return _read(stem, _BYTES, "a rate", "75GB/s", told=text)


def time(text: str) -> float:
    """Returns seconds from texts such as "3h", "5min", "1.5s", "20ms", "2d" or "90" (seconds)."""
    return _read(text, _SECONDS, "a time", "3h, 5min, 1.5s or 20ms")


def count(text: str) -> float:
    """Returns a number from texts such as "340e9", "340B" (billions) or "70M"."""
    return _read(text, _COUNTS, "a number", "340e9 or 340B")


def _read(
    text: str, units: Mapping[str, float], what: str, example: str, told: str | None = None
) -> float:
    match = _NUMBER.match(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None or not isfinite(float(match[1]) * factor):
        shown = text if told is None else told
        raise NotAQuantity(f"{shown!r} must be {what} such as {example}")
    return float(match[1]) * factor


def shown_size(nbytes: float) -> str:
    """Returns a size as text, such as "4.30 TiB"."""
    return _shown(nbytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def shown_rate(rate: float) -> str:
    """Returns a rate as text, such as "75.0 GB/s"."""
    return _shown(rate, 1000.0, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def shown_time(seconds: float) -> str:
    """Returns a time as text, such as "16.4 s" or "3.1 h"."""
    for unit, factor in (("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        limit = {"ms": 1.0, "s": 120.0, "min": 7200.0, "h": 172800.0}[unit]
        if seconds < limit:
            return f"{_three(seconds / factor)} {unit}"
    return f"{_three(seconds / 86400)} d"


def shown_transfer(nbytes: float, seconds: float, whose: str = "") -> str:
    """Returns a text such as "2.00 GiB in 570 ms (3.77 GB/s)", with `whose` after the size."""
    size, rate = shown_size(nbytes), shown_rate(nbytes / max(seconds, 1e-9))
    return f"{size}{whose} in {shown_time(seconds)} ({rate})"


def shown_share(ranks: int) -> str:
    """Returns text such as " by this rank of 8" to put after a size; "" if there is one rank."""
    return f" by this rank of {ranks}" if ranks > 1 else ""


def _shown(value: float, base: float, units: tuple[str, ...]) -> str:
    power = 0
    while value >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{_three(value)} {units[power]}"


def _three(value: float) -> str:
    """Returns a number with about three digits and without an exponent."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
