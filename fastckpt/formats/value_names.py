"""The names of a checkpoint's values: the keys that lead to them, as one text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def items_in(nest: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the keys and values of a dict; of a list, tuple or set, numbers and values."""
    return nest.items() if isinstance(nest, dict) else enumerate(nest)


def joined(path: Sequence[str]) -> str:
    """Returns the name of a value: the keys that lead to it, joined by "/"."""
    return "/".join(map(escaped, path))


def below(name: str | None, key: str) -> str:
    """Returns the name of a value that stands under a key of a named one; None is the state."""
    key = escaped(key)
    return key if name is None else f"{name}/{key}"


def escaped(key: str) -> str:
    """Returns a key as it stands in a name."""
    if "~" not in key and "/" not in key:
        return key
    return key.replace("~", "~0").replace("/", "~1")


def keys_of(name: str) -> list[str]:
    """Returns the keys of which joined() has made a name."""
    return [part.replace("~1", "/").replace("~0", "~") for part in name.split("/")]


def dotted(name: str) -> str:
    """Returns a name with its keys joined by ".", as Hugging Face has them."""
    return ".".join(keys_of(name))
