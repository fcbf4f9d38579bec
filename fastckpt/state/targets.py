"""The targets of a restore: which parts of stored tensors a rank needs, and the memory for them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.autograd.graph import increment_version

from fastckpt.arguments.names import listed
from fastckpt.plan.boxes import Box
from fastckpt.state.kinds import PLAIN_TENSORS

log = logging.getLogger("fastckpt")


class Target(NamedTuple):
    """A part of a stored tensor that is needed, and the memory for it.

    Attributes:
        key, dtype, shape: those of the complete stored tensor.
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


def tell_lossy(path: str, names: Sequence[str]) -> None:
    """Warns of tensors for which put_converted() reported a loss of precision or range."""
    if names:
        log.warning(
            "%r: some tensors of the state have dtypes that cannot hold the saved values, so "
            'their values differ now: %s (dtype="raise" refuses other dtypes)',
            path,
            listed(map(repr, names)),
        )


def tell_kept(level: int, path: str, names: Sequence[str]) -> None:
    """Logs the tensors that stay as they are because of their shape."""
    if names:
        log.log(
            level,
            "%r has other shapes for tensors of the state, which stay as they were: %s",
            path,
            listed(map(repr, names)),
        )


def note_overwritten(tensors: Iterable[torch.Tensor]) -> None:
    """Increments the versions of tensors before bytes are written to their memory without torch, so
    that autograd and a step-fence save that is still copying detect the change.
    """
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def takes_bytes(tensor: torch.Tensor, kinds: Collection[str]) -> bool:
    """Returns whether bytes written to a tensor's memory become its elements unchanged. `kinds` are
    the types of device that bytes can be moved to.
    """
    return (
        type(tensor) in PLAIN_TENSORS
        and tensor.layout is torch.strided
        and tensor.device.type in kinds
        and not tensor.is_neg()
        and not tensor.is_conj()
    )
