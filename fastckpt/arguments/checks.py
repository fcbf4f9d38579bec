"""Checks of callers' arguments: choices and their types, numbers, sizes and paths.

Each function takes an argument's name and value, and raises TypeError or ValueError with the name,
the value and the requirement.
"""

from __future__ import annotations

import inspect
import operator
import os
import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isfinite, isnan
from typing import Any, Literal, TypeVar, get_args

from fastckpt.arguments import quantities

T = TypeVar("T")

_SHOWN_CHARS = 80  # a value that a message quotes is cut to these: it may be a state of many GiB

Fence = Literal["call", "step"]
BackendName = Literal["auto", "io_uring", "threads"]
StagingWay = Literal["host", "gds"]
Codec = Literal["zstd", "planes"]
OnError = Literal["raise", "warn"]
Mode = Literal["min", "max"]
KeepBest = tuple[str, Mode, int]  # a metric, whether the least or the greatest is best, how many
Stripe = Literal["auto", "keep"] | tuple[int, int | str]
Striping = str | tuple[int, int]  # a Stripe that was checked: its size is in bytes

# Of lustre_user.h.
STRIPE_SIZE_UNIT = 1 << 16  # LOV_MIN_STRIPE_SIZE
STRIPE_COUNT_MAX = 2000  # LOV_MAX_STRIPE_COUNT
_STRIPE_SIZE_MAX = (1 << 32) - STRIPE_SIZE_UNIT  # of 32 bits

_FENCES: tuple[Fence, ...] = get_args(Fence)
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
STAGINGS: tuple[StagingWay, ...] = get_args(StagingWay)
CODECS: tuple[Codec | None, ...] = (None, *get_args(Codec))
MODES: tuple[Mode, ...] = get_args(Mode)
ON_ERROR: tuple[OnError, ...] = get_args(OnError)

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://|/(?:s3|gs|az):")  # or what stands for one (urls.py)
# pathlib makes one slash of two: Path("s3://bucket/a") is "s3:/bucket/a".
_COLLAPSED_URL = re.compile(
    r"(?:[a-z]+::)*(?:s3a?|gcs|gs|hf|https?|ftps?|sftp|ssh|abfss?|adl|az|hdfs|file|oci|dbfs):/",
    re.IGNORECASE,
)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {shown(value)}, must be one of {choices}")


def check_fence(value: object) -> None:
    """Raises ValueError unless the value is a fence that works in this interpreter."""
    check_choice("fence", value, _FENCES)
    if value == "step" and not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise ValueError(
            'fence is "step", which needs the GIL, but this interpreter runs without it '
            "(sys._is_gil_enabled() is False): a change that another thread makes to a tensor "
            'during the copy would go unnoticed. Pass fence="call", or run with PYTHON_GIL=1'
        )


def check_flag(name: str, value: object) -> bool:
    """Returns a bool; refuses any other value, even "no" and "0", which are true to Python."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {_told(value)}, must be True or False")
    return value


def check_callable(name: str, value: object) -> object:
    """Returns a function or another callable object. Raises TypeError for any other value, and for
    an async function, since a call would not run its body.
    """
    if not callable(value):
        raise TypeError(f"{name} is {_told(value)}, must be a function")
    calls = (value, value.__call__)  # the latter is what runs if it is an object of a class
    if any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in calls):
        raise TypeError(
            f"{name} is {shown(value)}, which is async and would never be awaited: pass a plain "
            "function"
        )
    return value


def check_text(name: str, value: object) -> str:
    """Returns a string; raises TypeError for any other value, such as bytes."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {_told(value)}, must be a string")
    return value


def check_integer(name: str, value: object) -> int:
    """Returns a 64-bit integer; the value may be an integer of numpy or torch."""
    try:
        if _is_of("bool", value):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type] # this call is the check
    except TypeError:
        raise TypeError(f"{name} is {_told(value)}, must be an integer") from None
    if number.bit_length() >= 64:
        raise ValueError(f"{name} is {shown(number)}, must be a 64-bit integer")
    return number


def check_count(name: str, value: object, otherwise: str = "") -> int:
    """Returns an integer of at least 1; `otherwise` names the alternative in the message."""
    number = check_integer(name, value)
    if number < 1:
        raise ValueError(f"{name} is {number}, must be at least 1{otherwise}")
    return number


def check_number(name: str, value: object, expected: str) -> float:
    """Returns a number; `expected` describes it in the message."""
    try:
        # float() takes True, and texts; of complex numbers of NumPy's it takes the real part.
        if isinstance(value, str | bytes) or _is_of("bool", value) or _is_of("complex", value):
            raise TypeError
        return float(value)  # type: ignore[arg-type] # this call is the check
    except OverflowError:
        raise ValueError(f"{name} is {shown(value)}, too large: must be {expected}") from None
    except (TypeError, ValueError, RuntimeError):  # torch raises any of them
        raise TypeError(f"{name} is {_told(value)}, must be {expected}") from None


def check_metrics(metrics: object) -> dict[str, float | str]:
    """Returns metrics in stored form: finite numbers, other numbers as texts, no None."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics are {_told(metrics)}, must be a dict")
    result = dict[str, float | str]()
    for name, value in metrics.items():
        check_text("a metric's name", name)
        if value is not None and not isinstance(value, str):
            number = check_number(f"metrics[{shown(name)}]", value, "a number, a string or None")
            value = number if isfinite(number) else str(number)
        if value is not None:
            result[name] = value
    return result


def check_keep_best(name: str, value: object) -> KeepBest:
    """Returns a metric, its mode and a count. Raises ValueError or TypeError for other values."""
    if not isinstance(value, tuple | list) or len(value) != 3 or not isinstance(value[0], str):
        raise ValueError(
            f'{name} is {shown(value)}, must be a metric, "min" or "max", and a count, such as '
            '("val_loss", "min", 3)'
        )
    check_choice(f"the mode of {name}", value[1], MODES)
    return value[0], value[1], check_count(f"the count of {name}", value[2])


def check_seconds(name: str, value: object) -> float:
    """Returns a number of seconds above 0, which may be infinite."""
    seconds = check_number(name, value, "a number of seconds")
    if not seconds > 0:
        raise ValueError(f"{name} is {shown(value)}, must be above 0")
    return seconds


def check_deadline(name: str, value: object) -> float:
    """Returns a number of seconds; it may be negative, since a deadline may have passed."""
    seconds = check_number(name, value, "a number of seconds")
    if isnan(seconds):
        raise ValueError(f"{name} is {shown(value)}, must be a number of seconds")
    return seconds


def check_size(name: str, value: object) -> int:
    """Returns a number of bytes, at least 1, from an integer or a text such as "1GiB"."""
    if isinstance(value, str):
        try:
            value = int(quantities.size(value))
        except quantities.NotAQuantity as error:
            raise ValueError(f"{name}: {error}") from None
    try:
        return check_count(name, value)
    except TypeError:
        expected = 'must be a number of bytes or a string such as "1GiB"'
        raise TypeError(f"{name} is {_told(value)}, {expected}") from None


def check_rate(name: str, value: object) -> float:
    """Returns bytes a second, above 0, from a number or a text such as "2GB/s"."""
    if isinstance(value, str):
        try:
            value = quantities.rate(value)
        except quantities.NotAQuantity as error:
            raise ValueError(f"{name}: {error}") from None
    rate = check_number(name, value, 'bytes a second or a string such as "2GB/s"')
    if not (isfinite(rate) and rate > 0):
        raise ValueError(f"{name} is {shown(value)}, must be bytes a second above 0")
    return rate


def check_stripe(stripe: object) -> Striping:
    """Returns the argument; a list becomes a tuple.

    Raises:
        ValueError, TypeError: it is not "auto", "keep" or a valid count and size.
    """
    if stripe in ("auto", "keep"):
        return str(stripe)
    if not isinstance(stripe, tuple | list) or len(stripe) != 2:
        raise ValueError(f'stripe is {stripe!r}, must be "auto", "keep" or (count, size)')
    count, size = stripe
    count = check_count("the stripe count", count)
    size = check_size("the stripe size", size)
    if count > STRIPE_COUNT_MAX:
        raise ValueError(f"the stripe count is {count}, must be at most {STRIPE_COUNT_MAX}")
    if size % STRIPE_SIZE_UNIT or size > _STRIPE_SIZE_MAX:
        raise ValueError(
            f"the stripe size is {size}, must be a positive multiple of {STRIPE_SIZE_UNIT} bytes, "
            f"the size of Lustre's pages, and at most {_STRIPE_SIZE_MAX}"
        )
    return count, size


def optional(check: Callable[[str, object], T], name: str, value: object) -> T | None:
    """Returns the result of `check` for a value, or None if the value is None."""
    return None if value is None else check(name, value)


def check_path(
    name: str,
    value: object,
    instead: str = "the path of a file or directory in a mounted file system",
) -> str:
    """Returns an absolute path as text, so that all messages show the same path. Expands "~" and
    "~/..." to the home directory; does not resolve links. The message that refuses a URL recommends
    `instead`.

    Raises:
        TypeError: the value is not a path.
        ValueError: it is empty, a URL, or contains a null character.
    """
    try:
        path = os.fsdecode(value)  # type: ignore[arg-type] # this call is the check
    except TypeError:
        raise TypeError(f"{name} is {_told(value)}, must be a path") from None
    if not path:  # realpath("") is the working directory, which nobody means by it
        raise ValueError(f'{name} is {path!r}, must be a path ("." for the working directory)')
    if _URL.match(path) or _COLLAPSED_URL.match(path):
        raise ValueError(
            f"{name} is {shown(path)}, must not be a URL: pass {instead}, and copy "
            "from or to the URL by other means"
        )
    if "\0" in path:
        raise ValueError(f"{name} is {shown(path)}, must be a path without null characters")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError(
            f"{name} is {shown(path)}, must be a path without characters that file names cannot "
            "contain"
        ) from None
    # "~name" is left alone: it may be the name of a file, which torch.save would write.
    path = os.path.expanduser(path) if path == "~" or path.startswith("~/") else path
    with suppress(FileNotFoundError):  # the working directory is gone; then what follows fails
        return os.path.join(os.getcwd(), path)
    return path


def _is_of(kind: str, value: object) -> bool:
    """Returns whether a value is of the type with this name of Python, NumPy or torch."""
    return type(value).__name__ == kind or kind in str(getattr(value, "dtype", ""))


class _Short(reprlib.Repr):
    """Describes values in a text of bounded length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _SHOWN_CHARS
        self.maxlevel = 3

    def repr_int(self, x: Any, level: int) -> str:
        """Describes a long integer by its length, since Python refuses to print it."""
        is_long = x.bit_length() > 1000
        return f"an integer of {x.bit_length()} bits" if is_long else super().repr_int(x, level)

    def repr_instance(self, x: Any, level: int) -> str:
        """Describes any subclass of dict, such as a state_dict, by its first items."""
        return self.repr_dict(x, level) if isinstance(x, dict) else super().repr_instance(x, level)


def shown(value: object) -> str:
    """Returns a value as messages quote it: its repr(), cut to at most 80 characters."""
    text = _Short().repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def _told(value: object) -> str:
    return f"{shown(value)} of type {type(value).__name__}"
