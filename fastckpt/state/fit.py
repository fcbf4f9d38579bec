"""The rules for a restore when a state and a checkpoint differ, and the differences found.

The module also renames saved values.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pickle import UnpicklingError
from typing import Any, Literal, NamedTuple, TypeAlias, get_args
from uuid import uuid4

from fastckpt.arguments.checks import check_choice
from fastckpt.arguments.names import fits_none, listed
from fastckpt.errors import IncompatibleCheckpoint
from fastckpt.formats.partial_objects import how_to_allow, left_out, newly_refused
from fastckpt.formats.value_names import joined, keys_of
from fastckpt.state.tree import DEPTH_MAX, ESCAPED, PER_RANK, TENSOR, unescaped

Missing = Literal["raise", "keep"]
Unexpected = Literal["ignore", "raise"]
Dtypes = Literal["cast", "raise"]
Mismatched = Literal["error", "keep"]
Rename: TypeAlias = Callable[[str], str | None] | Mapping[str, str | None]

_MISFITS_TOLD_MAX = 50
_ADVICE = (
    ' (pass missing="keep" to keep values that are missing in the checkpoint as they are, or '
    "rename= if they have other names there)"
)
SHAPE_ADVICE = (
    ' (pass mismatched="keep" to keep tensors that have other shapes in the checkpoint as they are)'
)
_WILD = re.compile(r"[*?\[]")
# A dict that stands in a file many times has leaves without end; each takes its depth.
_STEPS_MAX = 1 << 21


@dataclass(frozen=True)
class Fit:
    """How a state may differ from the checkpoint: the arguments of Checkpointer.restore.

    Raises:
        ValueError, TypeError: an argument is unknown or has a wrong type.
    """

    missing: Missing = "raise"
    unexpected: Unexpected | None = None
    dtype: Dtypes = "cast"
    rename: Rename | None = None
    only: str | None = None
    mismatched: Mismatched = "error"

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, get_args(Missing))
        check_choice("unexpected", self.unexpected, (None, *get_args(Unexpected)))
        check_choice("dtype", self.dtype, get_args(Dtypes))
        check_choice("mismatched", self.mismatched, get_args(Mismatched))
        only: object = self.only
        if not isinstance(only, str | None):
            raise TypeError(f"only is {type(only).__name__}, must be a glob such as 'model/*'")
        rename: object = self.rename
        if isinstance(rename, Mapping):
            for pattern, replacement in rename.items():
                _check_replacement(pattern, replacement)
        elif rename is not None and not callable(rename):
            kind = type(rename).__name__
            raise TypeError(f"rename is {kind}, must be a function or a dict of patterns")

    def __str__(self) -> str:
        """Returns a text of the arguments, for comparison between ranks."""
        # Functions cannot be compared, and so are like no other.
        rename = uuid4().hex if callable(self.rename) else self.rename
        rest = self.missing, self.unexpected, self.dtype, self.only, self.mismatched
        return repr((rename, *rest))

    def without_only(self) -> Fit:
        """Returns the same rules without `only`."""
        return self if self.only is None else replace(self, only=None)

    def asks_for(self, name: str) -> bool:
        """Returns whether a value with this name must be restored."""
        return self.only is None or fnmatchcase(name, self.only)

    def asks_within(self, name: str) -> bool:
        """Returns whether a value with this name, or a value inside it, may have to be restored."""
        if self.only is None or not name or self.asks_for(name):
            return True
        begin, inside = _WILD.split(self.only, maxsplit=1)[0], f"{name}/"
        return inside.startswith(begin) or begin.startswith(inside)

    def new_names(self, names: Sequence[str]) -> NewNames:
        """Returns the new names of saved values."""
        new: list[str | None] = [*names]
        useless, left_out = list[str](), set[str]()
        if callable(self.rename):
            new = [_called(self.rename, name) for name in names]
            left_out = {name for name, new_name in zip(names, new, strict=True) if new_name is None}
            return NewNames(new, useless, left_out)
        for pattern, replacement in (self.rename or {}).items():
            present = [name for name in new if name is not None]
            fitting = {name for name in present if re.search(pattern, name)}
            if present and not fitting:
                useless.append(fits_none(pattern, present))
            if replacement is None:
                new = [None if name in fitting else name for name in new]
                left_out |= fitting
            else:
                new = [None if name is None else re.sub(pattern, replacement, name) for name in new]
        return NewNames(new, useless, left_out)


class NewNames(NamedTuple):
    """The names that `rename` gives to saved values.

    Attributes:
        names: the new names; None for values to leave out.
        useless: messages about patterns that match no name, because they may be mistyped.
        left_out: the names that made `rename` leave values out. Values of a state with these names
            stay as they are.
    """

    names: list[str | None]
    useless: list[str]
    left_out: set[str]


def _check_replacement(pattern: Any, replacement: object) -> None:
    """Raises TypeError or ValueError if `rename` cannot contain this pattern and replacement."""
    if not isinstance(replacement, str | None):
        kind = type(replacement).__name__
        raise TypeError(f"rename has {kind} for {pattern!r}, must be a string or None")
    what = f"{pattern!r}, which is not a regular expression"
    try:
        re.compile(pattern)
        what = f"{replacement!r} for {pattern!r}, which is not a replacement for it"
        re.sub(pattern, replacement or "", "")
    except (re.error, IndexError, TypeError) as error:  # IndexError: there is no such group
        raise ValueError(f"rename has {what}: {error}") from None


def _called(rename: Callable[[str], object], name: str) -> str | None:
    new = rename(name)
    if not isinstance(new, str | None):
        raise TypeError(f"rename({name!r}) returned {type(new).__name__}, must be str or None")
    return new


class Differences(NamedTuple):
    """The differences between a state and the checkpoint that was restored into it.

    Names are those that `fastckpt inspect` prints: the keys that lead to a value, joined by "/". An
    unexpected dict of values without any counterpart has a single name.

    Attributes:
        missing: the values of the state that were kept, because the checkpoint lacks them or
            `rename` leaves them out.
        unexpected: the saved values that were left out, because the state lacks them.
        renamed: maps names in the checkpoint to the new names that `rename` gave them.
        cast: the tensors whose saved values were converted to another dtype.
        mismatched: the tensors of the state that were kept, because they have other shapes in the
            checkpoint; also the state of an optimizer for such a tensor, which was kept, too.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    renamed: Mapping[str, str]
    cast: tuple[str, ...]
    mismatched: tuple[str, ...] = ()


def nothing_chosen(only: str) -> str:
    """Returns the message for a glob that matches no name in the state."""
    return f"no name in the state matches only={only!r} (keys are joined by '/')"


def unexpected(told: str) -> str:
    """Returns the message for values in the checkpoint that the state lacks."""
    return f"the checkpoint has {told}, but the state does not (unexpected='ignore' skips them)"


def refusal(
    where: str, misfits: Sequence[str], *, is_missing: bool = False, is_mismatched: bool = False
) -> IncompatibleCheckpoint:
    """Returns the error that lists all misfits. `is_missing` means that the checkpoint lacks some
    values of the state, `is_mismatched` that some have other shapes.
    """
    more = len(misfits) - _MISFITS_TOLD_MAX
    texts = [*misfits[:_MISFITS_TOLD_MAX], *([f"and {more} more"] if more > 0 else [])]
    advice = (SHAPE_ADVICE if is_mismatched else "") + (_ADVICE if is_missing else "")
    return IncompatibleCheckpoint(f"{where!r} does not fit: {'; '.join(texts)}{advice}")


def refused(
    where: str, found: Sequence[tuple[str, str]], *, is_restore: bool = True
) -> UnpicklingError:
    """Returns the error about values that were left out (see partial_objects) although they are
    needed. `found` has the name and maker of each. `is_restore` is false if all values of a step
    were requested, not those of a state.
    """
    restore = "Restore the rest," if is_restore else "Get the rest with restore(),"
    values = listed(f"{name!r} (made with {maker!r})" for name, maker in found)
    return UnpicklingError(
        f"{where!r}: weights_only=True refuses {values}. {restore} with a state that leaves them "
        "out or with only= (fastckpt.load_into reads only tensors). If you trust whoever wrote "
        "the checkpoint, pass weights_only=False, which runs code that the file "
        f"names{how_to_allow(found)}"
    )


def refused_later(
    where: str, pickles: Iterable[bytes], before: set[tuple[str, str]], *, reads_numpy: bool
) -> str:
    """Returns a warning about the values in pickles of torch.save that weights_only=True will
    refuse, with another way to load them; "" if all of their makers are in `before`.
    """
    refusals = [each for pickled in pickles for each in newly_refused(pickled, before, reads_numpy)]
    if not refusals:
        return ""
    values = listed(f"{name!r} (made with {maker})" for name, maker in refusals)
    return f"{where!r}: loading {values} needs weights_only=False{how_to_allow(refusals)}"


def renamed(nest: Any, fit: Fit, where: str) -> tuple[Any, dict[str, str], NewNames]:
    """Renames the values of a saved nest by `fit.rename`. Returns the new nest, a map of old to new
    names, and all new names. Lists and tuples are moved as a whole.

    Args:
        nest: a step's objects.
        fit: the arguments of the restore.
        where: the path of the step, for messages.

    Raises:
        IncompatibleCheckpoint: two values get the same name, or a value would be inside another
            one.
    """
    if not _is_inner(nest):
        return nest, {}, NewNames([], [], set())
    moved, names = list[_Moved](), list[str]()
    _left_in_place(nest, names.append, [])
    new_names = fit.new_names(names)
    result = _left_in_place(nest, dict(zip(names, new_names.names, strict=True)).__getitem__, moved)
    for keys, old, new, value in moved:
        *ahead, last = _keys_of(new, keys)
        inside = result
        for key in ahead:
            inside = unescaped(inside.setdefault(key, {}))
            if not (_is_inner(inside) or (isinstance(inside, dict) and not inside)):
                raise IncompatibleCheckpoint(
                    f"{where!r} does not fit: rename puts {old!r} at {new!r}, inside another value"
                )
        if last in inside:
            raise name_taken(where, old, new)
        inside[last] = value
    return result, {old: new for _keys, old, new, _value in moved}, new_names


def name_taken(where: str, old: str, new: str) -> IncompatibleCheckpoint:
    """Returns the error for two values of a checkpoint to which `rename` gives the same name."""
    reason = f"rename gives {old!r} the name {new!r}, which another value already has"
    return IncompatibleCheckpoint(f"{where!r} does not fit: {reason}")


class _Moved(NamedTuple):
    """A value that gets another name, and the keys that lead to its old place."""

    keys: tuple[Any, ...]
    old: str
    new: str
    value: Any


def _left_in_place(nest: Any, new_name: Callable[[str], str | None], moved: list[_Moved]) -> Any:
    """Returns a copy of the nest without the values that get another name or None. Those with
    another name are added to `moved`.
    """
    steps = 0

    def visit(value: Any, keys: tuple[Any, ...]) -> Iterator[Any]:
        """Yields the copy of a value, or nothing."""
        nonlocal steps
        steps += 1 + len(keys)
        if steps > _STEPS_MAX:
            raise IncompatibleCheckpoint("the checkpoint has too many values to be renamed")
        if _is_inner(value) and len(keys) < DEPTH_MAX:
            inner, kept = unescaped(value), {}
            for key, item in inner.items():
                for copy in visit(item, (*keys, key)):
                    kept[key] = copy
            if kept or not keys:
                yield {ESCAPED: kept} if inner is not value else kept
            return
        old = joined([*map(str, keys)])
        new = new_name(old)
        if new == old:
            yield value
        elif new is not None:
            moved.append(_Moved(keys, old, new, value))

    return next(visit(nest, ()), {})


def _is_inner(value: Any) -> bool:
    """Returns whether a value is a dict of values, and not a placeholder."""
    return (
        type(value) in (dict, OrderedDict)
        and bool(value)
        and TENSOR not in value
        and left_out(value) is None
        and not isinstance(value.get(PER_RANK), str)
    )


def _keys_of(name: str, old: Sequence[Any]) -> list[Any]:
    """Returns the keys that a new name consists of. From the end, each is compared with the value's
    old key at the same position. If the texts are equal, it becomes the old key itself, for example
    0 and not "0". If the old key is an integer and the text is decimal, it becomes an integer.
    """
    keys: list[Any] = [*keys_of(name)]
    for at in range(-min(len(keys), len(old)), 0):
        if keys[at] == str(old[at]):
            keys[at] = old[at]
        elif type(old[at]) is int and keys[at].isdecimal():
            keys[at] = int(keys[at])
    return keys
