"""What `tensor[...]` selects: the rectangle to read, and how to index what was read.

It must not know files or memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastckpt.plan.boxes import Box


class Selection(NamedTuple):
    """The part of a tensor that an index selects.

    Attributes:
        box: the rectangle that holds it.
        rest: the index that turns the rectangle, once read, into what was selected.
    """

    box: Box
    rest: tuple[Any, ...]


def selected(index: Any, shape: Sequence[int]) -> Selection:
    """Returns what an index of integers, slices, None and "..." selects, as in torch.Tensor.

    Raises:
        IndexError: a number is out of range, or there are more than the tensor has dimensions.
        ValueError: a slice has a step below 1.
        TypeError: the index has something else, such as a list or a tensor.
    """
    given = index if isinstance(index, tuple) else (index,)
    used = sum(item is not None and item is not Ellipsis for item in given)
    if used > len(shape):
        raise IndexError(f"{used} indices for a tensor of {len(shape)} dimensions")
    dots = [number for number, item in enumerate(given) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError('an index has at most one "..."')
    at = dots[0] if dots else len(given)
    fill = (slice(None),) * (len(shape) - used)
    offsets: list[int] = []
    sizes: list[int] = []
    rest: list[Any] = []
    for item in (*given[:at], *fill, *given[at + 1 :]):
        if item is None:
            rest.append(None)
            continue
        size = shape[len(sizes)]
        begin, length, then = _along(item, size, len(sizes))
        offsets.append(begin)
        sizes.append(length)
        rest.append(then)
    return Selection(Box(tuple(offsets), tuple(sizes)), tuple(rest))


def _along(item: Any, size: int, dim: int) -> tuple[int, int, Any]:
    """Returns what an index selects of one dimension: first element, number of elements to read,
    and the index into these.
    """
    if isinstance(item, slice):
        begin, end, step = item.indices(size)
        if step < 1:
            raise ValueError(f"a slice of dimension {dim} has the step {step}, must be at least 1")
        length = max(0, end - begin)
        length -= (length - 1) % step if length else 0
        return begin, length, slice(None, None, step)
    # A tensor or array of one element has an index, too, but selects something else.
    kind = str(getattr(item, "dtype", ""))
    if isinstance(item, bool) or tuple(getattr(item, "shape", ())) or "bool" in kind:
        raise _other(item)
    try:
        number = operator.index(item)
    except TypeError:
        raise _other(item) from None
    if not -size <= number < size:
        raise IndexError(f"index {number} is out of range for dimension {dim} of size {size}")
    return number % size, 1, 0


def _other(item: Any) -> TypeError:
    return TypeError(
        f"an index of type {type(item).__name__}: a stored tensor is indexed by integers, slices, "
        'None and "..."; read a slice first, and index that'
    )
