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
_OPERATORS = re.compile(r"[\\^$()?*+{}|\[\]]")  # of a regular expression
_SEPARATOR = re.compile(r"[./]")  # of the keys in a name
_COMPARED_MAX = 2000  # names: comparing more of them would take seconds
_SHOWN_MAX = 3
_LISTED_MAX = 5


def listed(names: Iterable[str], count: int | None = None) -> str:
    """Returns the first few of these names, and how many more there are: of `count`, if given."""
    told = [*names]
    left = (count or len(told)) - _LISTED_MAX
    more = f" and {left} more" if left > 0 else ""
    return ", ".join(told[:_LISTED_MAX]) + more


def instead_of(missing: Sequence[object], there: Iterable[object], *, renames: bool = False) -> str:
    """Returns words, to follow "the checkpoint has not", about names like the first missing one.

    Args:
        missing: the names that are not there, at least one.
        there: the names that are.
        renames: whether to name the rename= that makes these fit.

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
            return f": it has {found!r} instead ({why}){_renaming(found, name) * renames}"
    bare = _bare(name)
    inside = [n for n in names if n.endswith((f"/{name}", f".{name}")) or _is_in(bare, _bare(n))]
    if inside:
        advice = _renaming(inside[0], name) * renames
        return f": it has {listed(map(repr, inside))} instead{advice}"
    if len(names) > _COMPARED_MAX:
        last = _SEPARATOR.split(name)[-1]
        names = [n for n in names if _SEPARATOR.split(n)[-1] == last][:_COMPARED_MAX]
    near = difflib.get_close_matches(name, names, _SHOWN_MAX)
    return f": the nearest that it has are {', '.join(map(repr, near))}" if near else ""


def fits_none(pattern: str | tuple[str, ...], names: Sequence[str]) -> str:
    """Returns what is wrong with a pattern of rename= that is in no name, and names like it."""
    text = pattern if isinstance(pattern, str) else pattern[0]
    bare = difflib.SequenceMatcher(b=_OPERATORS.sub("", text), autojunk=False)

    def common(name: str) -> int:
        bare.set_seq1(name)
        return bare.find_longest_match().size

    near = sorted(names[:_COMPARED_MAX], key=common, reverse=True)[:_SHOWN_MAX]
    told = f" (the nearest are {', '.join(map(repr, near))})" if near else ""
    return f"rename has {pattern!r}, which fits no name{told}: correct it, or leave it out"


def without_wrappers(names: Sequence[str]) -> list[str]:
    """Returns the names that tensors have in the modules that torch has wrapped: without each
    '_orig_mod.' and, where all begin so, 'module.', which some modules have of their own.
    """
    bare = [_without(name, "_orig_mod.") for name in names]
    while bare and all(name.startswith("module.") for name in bare):
        bare = [name.removeprefix("module.") for name in bare]
    return bare


def _renaming(old: str, new: str) -> str:
    """Returns the argument that gives all names like the old one the place of the new one."""
    if new == _without(old, "_orig_mod."):
        return "; pass rename={'_orig_mod\\\\.': ''}"
    shorter = range(min(len(old), len(new)), 0, -1)
    ends = (n for n in shorter if old.endswith(new[-n:]) and _is_end(old, n) and _is_end(new, n))
    kept = next(ends, 0)
    begin = f"^{re.escape(old[: len(old) - kept])}"
    return f"; pass rename={{{begin!r}: {new[: len(new) - kept]!r}}}"


def _is_end(name: str, length: int) -> bool:
    """Returns whether so many last characters of a name are whole keys."""
    return len(name) == length or name[-length - 1] in "./"


def _is_in(name: str, other: str) -> bool:
    """Returns whether the name is the other one under further keys of a nest, or reversely."""
    return name.endswith(f"/{other}") or other.endswith(f"/{name}")


def _bare(name: str) -> str:
    for prefix in _WRAPPERS:
        name = _without(name, prefix)
    return name


def _without(name: str, prefix: str) -> str:
    return re.sub(rf"(?:^|(?<=[./])){re.escape(prefix)}", "", name)
