"""Leaves of every type, and state that no checkpoint may hold."""

from __future__ import annotations

import random
from typing import Any

import torch

from fastckpt.formats.safetensors import DTYPES
from fastckpt.state.tree import (
    TENSOR,
)

MALFORMED: list[dict[str, Any]] = [
    {TENSOR: 5, "dtype": "F32", "shape": [3]},
    {TENSOR: "w"},
    {TENSOR: "w", "dtype": "F33", "shape": [3]},
    {TENSOR: "w", "dtype": ["F32"], "shape": [3]},
    {TENSOR: "w", "dtype": None, "shape": [3]},
    {TENSOR: "w", "dtype": "F32", "shape": 3},
    {TENSOR: "w", "dtype": "F32", "shape": [-1]},
    {TENSOR: "w", "dtype": "F32", "shape": [1.0]},
    {TENSOR: "w", "dtype": "F32", "shape": [True]},
    {TENSOR: "w", "dtype": "F32", "shape": [1 << 61]},
    {TENSOR: "w", "dtype": "F32", "shape": [0, 1 << 62, 1 << 62]},
    {TENSOR: "w", "dtype": "F32", "shape": [float("nan")]},
]
EVERY_DTYPE = [*DTYPES.values(), torch.complex64, torch.complex128, torch.float8_e4m3fnuz]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def random_bits(dtype: torch.dtype, elements: int, seed: int) -> torch.Tensor:
    content = bytearray(random.Random(seed).randbytes(elements * dtype.itemsize))
    if dtype is torch.bool:
        content = bytearray(byte & 1 for byte in content)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype)
