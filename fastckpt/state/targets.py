"""Targets say where stored values are to go in a state that exists.

Responsible for saying which part of which tensor a rank wants, and into which memory. It must not
know files, nor who reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastckpt.plan.boxes import Box


class Target(NamedTuple):
    """A target: where a part of a stored tensor is wanted.

    Attributes:
        key: of the tensor.
        tensor: memory of the part: of its sizes, of any dtype, strides and device.
        shape: of the whole tensor.
        box: the part.
    """

    key: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box


Place = tuple[str, tuple[int, ...], Box]  # key, shape of the whole tensor, part of it
