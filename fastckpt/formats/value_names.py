"""The names of a checkpoint's values, which consist of the keys that lead to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any


def items_in(nest: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the keys and values of a dict, or the numbers and values of a list, tuple or set."""
    return nest.items() if isinstance(nest, dict) else enumerate(nest)


def joined(path: Sequence[str]) -> str:
    """Returns the name of a value: the keys that lead to it, joined by "/"."""
    return "/".join(map(escaped, path))


def below(name: str | None, key: str) -> str:
    """Returns the name of the value under a key of a named value; None stands for the state."""
    key = escaped(key)
    return key if name is None else f"{name}/{key}"


def escaped(key: str) -> str:
    """Returns a key in the escaped form that names contain."""
    if "~" not in key and "/" not in key:
        return key
    return key.replace("~", "~0").replace("/", "~1")


def keys_of(name: str) -> list[str]:
    """Returns the keys of a name that joined() has made."""
    return [part.replace("~1", "/").replace("~0", "~") for part in name.split("/")]


def key_among(keys: Collection[str], name: str) -> str | None:
    """Returns the one of these keys of the state that a named value is under; None if it is under
    another.
    """
    key = keys_of(name)[0] if keys else ""
    return key if key in keys else None


def dotted(name: str) -> str:
    """Returns a name with its keys joined by ".", like in Hugging Face."""
    return ".".join(keys_of(name))
