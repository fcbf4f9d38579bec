"""Names in messages: a few of many, and what a checkpoint has instead of a missing one.

It compares texts, and must not know what they name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_WRAPPERS = {
    "_orig_mod.": "torch.compile() puts '_orig_mod.' into names: the plain module is its attribute "
    "_orig_mod",
    "module.": "DataParallel and DistributedDataParallel put 'module.' before names: the plain "
    "module is their attribute module",
}
_SEPARATOR = re.compile(r"[./]")  # of the keys in a name
_COMPARED_MAX = 2000  # names: comparing more of them would take seconds
_SHOWN_MAX = 3
_LISTED_MAX = 5


def listed(names: Iterable[str]) -> str:
    """Returns the first few of these names, and how many more there are."""
    told = [*names]
    more = f" and {len(told) - _LISTED_MAX} more" if len(told) > _LISTED_MAX else ""
    return ", ".join(told[:_LISTED_MAX]) + more


def instead_of(missing: Sequence[object], there: Iterable[object]) -> str:
    """Returns words, to follow "the checkpoint has not", about names like the first missing one.

    Args:
        missing: the names that are not there, at least one.
        there: the names that are.

    Returns:
        Words that begin with ": ", or "" if no name is near.
    """
    name, names = missing[0], [key for key in there if isinstance(key, str)]
    if not isinstance(name, str):
        return ""
    for prefix, why in _WRAPPERS.items():
        bare = _without(name, prefix)
        found = next((n for n in names if n != name and _without(n, prefix) == bare), None)
        if found is not None:
            return f": it has {found!r} instead ({why})"
    if inside := [n for n in names if n.endswith((f"/{name}", f".{name}"))]:
        return f": it has {listed(map(repr, inside))} instead"
    if len(names) > _COMPARED_MAX:
        last = _SEPARATOR.split(name)[-1]
        names = [n for n in names if _SEPARATOR.split(n)[-1] == last][:_COMPARED_MAX]
    near = difflib.get_close_matches(name, names, _SHOWN_MAX)
    return f": the nearest that it has are {', '.join(map(repr, near))}" if near else ""


def _without(name: str, prefix: str) -> str:
    return re.sub(rf"(?:^|(?<=[./])){re.escape(prefix)}", "", name)
