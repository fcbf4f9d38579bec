"""Conversion of numbers to another dtype, with a check whether this dtype can hold them."""

from __future__ import annotations

from typing import Any

import torch

_ROUNDED_TO_MAX = 464.0  # the last number that is rounded to the largest of float8_e4m3fn


def put_converted(target: torch.Tensor, values: torch.Tensor) -> bool:
    """Converts values into a tensor like copy_(). Returns whether the tensor cannot hold some of
    them: in a conversion from or to integers, a number changed; or a finite number became infinite
    or NaN, or was clipped. Rounding of floating-point numbers does not count. If both tensors are
    of one class that consists of inner tensors, such as a quantized one, the inner tensors are
    copied unchanged, since the class might round again.
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
    """Returns the inner tensors of two tensors of one class, in pairs; None if these differ in
    names, shapes or dtypes, or if the tensors differ in other attributes.
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
    """Returns values in a dtype that torch can compare, since it cannot compare all dtypes."""
    return values if _is_rounded(values.dtype) else values.to(torch.int64)
