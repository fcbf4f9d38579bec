"""The conversion of numbers to another dtype, and whether that can hold them."""

from __future__ import annotations

from typing import Any

import torch

_ROUNDED_TO_MAX = 464.0  # the last number that is rounded to the largest of float8_e4m3fn


def put_converted(target: torch.Tensor, values: torch.Tensor) -> bool:
    """Converts values into a tensor as copy_() does. Returns whether it cannot hold some of them: a
    number that is an integer here or there has become another one, or a finite one has not stayed
    finite, or was clipped. That numbers of floating point are rounded is no loss. Tensors of one
    class that consist of others, as quantized ones do, get the very same of these: their class
    might round anew.
    """
    with torch.no_grad():
        if (pairs := _parts_alike(target, values)) is not None:
            for mine, theirs in pairs:
                put_converted(mine, theirs)
            torch.autograd.graph.increment_version(target)
            return False
        target.copy_(values)
        if target.dtype == values.dtype or target.layout is not torch.strided:
            return False
        are_rounded = _is_rounded(target.dtype) and _is_rounded(values.dtype)
        if are_rounded and torch.finfo(target.dtype).max >= torch.finfo(values.dtype).max:
            return False
        if not are_rounded:
            result = target.to("cpu").to(values.dtype)
            return not torch.equal(_comparable(result), _comparable(values))
        if target.dtype == torch.float8_e4m3fn:  # torch makes its largest number of larger ones
            exact = values.double().abs()
            return bool(((exact > _ROUNDED_TO_MAX) & torch.isfinite(exact)).any())
        is_finite = torch.isfinite(target.float() if target.dtype.itemsize == 1 else target)
        lost = not bool(is_finite.all())
        return lost and bool((torch.isfinite(values) & ~is_finite.to("cpu")).any())


def _parts_alike(one: Any, other: Any) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Returns the tensors that two tensors of one class consist of, in pairs; None unless they
    consist of the same kinds, and have all else in common.
    """
    if type(one) is torch.Tensor or type(one) is not type(other):
        return None
    if not hasattr(type(one), "__tensor_flatten__"):
        return None
    (names, context), (others, context_of_other) = (
        each.__tensor_flatten__() for each in (one, other)
    )
    if names != others or context != context_of_other:
        return None
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    same = all(mine.shape == its.shape and mine.dtype == its.dtype for mine, its in pairs)
    return pairs if same else None


def _is_rounded(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _comparable(values: torch.Tensor) -> torch.Tensor:
    """Returns them in a dtype that torch compares: not all of its own are."""
    return values if _is_rounded(values.dtype) else values.to(torch.int64)
