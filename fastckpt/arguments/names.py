"""Names in messages: short lists, and suggestions for a missing name.

Suggestions are found by a comparison of texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_SEPARATOR = re.compile(r"[./]")  # of the keys in a name
_COMPARED_MAX = 2000  # names: comparing more of them would take seconds
_LISTED_MAX = 5


def listed(names: Iterable[str], count: int | None = None) -> str:
    """Returns the first few of these names and the number of the others (of `count`, if given)."""
    items = [*names]
    rest = (count or len(items)) - _LISTED_MAX
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(items[:_LISTED_MAX]) + more


def nearest(name: object, there: Iterable[object]) -> str:
    """Returns the names most similar to a missing one, in parentheses, as the end of a message; ""
    if no name is similar.
    """
    names = [key for key in there if isinstance(key, str)]
    if not isinstance(name, str):
        return ""
    if len(names) > _COMPARED_MAX:
        last = _SEPARATOR.split(name)[-1]
        names = [n for n in names if _SEPARATOR.split(n)[-1] == last][:_COMPARED_MAX]
    near = get_close_matches(name, names)
    return f" (similar names there: {', '.join(map(repr, near))})" if near else ""


def missing_from_checkpoint(names: Iterable[str], hint: str = "") -> str:
    """Returns the message about names of the state that a checkpoint lacks, with a hint."""
    missing = [*map(repr, names)]
    verb = "is" if len(missing) == 1 else "are"
    return f"{listed(missing)} {verb} missing in the checkpoint{hint}"


def fits_none(pattern: str | tuple[str, ...], names: Sequence[str]) -> str:
    """Returns the message about a pattern of rename= that matches no name, with similar names or
    the first names.
    """
    text = pattern if isinstance(pattern, str) else pattern[0]
    near = get_close_matches(text, names[:_COMPARED_MAX])
    hint = f" ({'similar ' if near else ''}names there: {listed(map(repr, near or names))})"
    return f"rename has {pattern!r}, which matches no name{hint}: correct it or leave it out"


def without_wrappers(names: Sequence[str]) -> list[str]:
    """Returns names of tensors without the prefixes of torch's wrappers: without each '_orig_mod.',
    and without 'module.' if all names begin with it, since a module may itself have that name.
    """
    bare = [re.sub(r"(?:^|(?<=[./]))_orig_mod\.", "", name) for name in names]
    while bare and all(name.startswith("module.") for name in bare):
        bare = [name.removeprefix("module.") for name in bare]
    return bare
