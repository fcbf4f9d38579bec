"""The targets of a restore: which parts of stored tensors a rank wants, and in which memory.

It must not know files, nor who reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastckpt.plan.boxes import Box


class Target(NamedTuple):
    """A part of a stored tensor that is wanted, and the memory for it.

    Attributes:
        key, shape: the stored tensor's key, and its shape as a whole.
        tensor: the memory, which has the part's sizes and any dtype, strides and device.
        box: the part.
    """

    key: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box


Place = tuple[str, tuple[int, ...], Box]  # key, shape of the whole tensor, part of it
