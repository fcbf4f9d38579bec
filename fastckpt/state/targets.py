"""The targets of a restore: which parts of stored tensors a rank wants, and in which memory.

It must not know files, nor who reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.autograd.graph import increment_version

from fastckpt.arguments.near_names import listed
from fastckpt.plan.boxes import Box
from fastckpt.state.kinds import PLAIN_TENSORS

log = logging.getLogger("fastckpt")


class Target(NamedTuple):
    """A part of a stored tensor that is wanted, and the memory for it.

    Attributes:
        key, dtype, shape: the stored tensor's, as a whole.
        box: the part.
        tensor: the memory, which has the part's sizes and any dtype, strides and device.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor

    @property
    def place(self) -> Place:
        return self.key, self.dtype, self.shape, self.box


# Key, dtype and shape of a stored tensor, and a part of it.
Place: TypeAlias = tuple[str, torch.dtype, tuple[int, ...], Box]


def put_converted(target: torch.Tensor, values: torch.Tensor) -> bool:
    """Converts values into a tensor as copy_() does. Returns whether it cannot hold some of them: a
    number that is an integer here or there has become another one, or a finite one has not stayed
    finite. That numbers of floating point are rounded is no loss.
    """
    with torch.no_grad():
        target.copy_(values)
        if target.dtype == values.dtype or target.layout is not torch.strided:
            return False
        are_rounded = _is_rounded(target.dtype) and _is_rounded(values.dtype)
        if are_rounded and torch.finfo(target.dtype).max >= torch.finfo(values.dtype).max:
            return False
        if not are_rounded:
            held = target.to("cpu").to(values.dtype)
            return not torch.equal(_comparable(held), _comparable(values))
        is_finite = torch.isfinite(target.float() if target.dtype.itemsize == 1 else target)
        lost = not bool(is_finite.all())
        return lost and bool((torch.isfinite(values) & ~is_finite.to("cpu")).any())


def tell_lossy(path: str, names: Sequence[str]) -> None:
    """Warns of tensors for which put_converted() has said that they lose something."""
    if names:
        log.warning(
            "%r: the tensors of the state have dtypes that cannot hold what was saved, so these "
            'have other values now: %s (dtype="raise" refuses other dtypes)',
            path,
            listed(map(repr, names)),
        )


def _is_rounded(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _comparable(values: torch.Tensor) -> torch.Tensor:
    """Returns them in a dtype that torch compares: not all of its own are."""
    return values if _is_rounded(values.dtype) else values.to(torch.int64)


def note_overwritten(tensors: Iterable[torch.Tensor]) -> None:
    """Increments the versions of tensors before the first byte is put into their memory past torch:
    autograd has to notice that, and so has a step-fence save that still copies.
    """
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def takes_bytes(tensor: torch.Tensor, kinds: Collection[str]) -> bool:
    """Returns whether bytes put into a tensor's memory become its elements as they are; `kinds` are
    the types of device that bytes can be moved to.
    """
    return (
        type(tensor) in PLAIN_TENSORS
        and tensor.layout is torch.strided
        and tensor.device.type in kinds
        and not tensor.is_neg()
        and not tensor.is_conj()
    )
