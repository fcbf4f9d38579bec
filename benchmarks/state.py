"""The object every benchmark saves: the training state of a small GPT under mixed precision.

It owns how large that state is, what it is made of and whether two of them hold the same bytes.
It must not know who saves it, where to, or how long that takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

LAYERS = 12
VOCABULARY = 50257
POSITIONS = 1024
# bf16 weight, fp32 master weight, fp32 first and second moment.
BYTES_PER_PARAMETER = 2 + 4 + 4 + 4

State = dict[str, Any]


def parameter_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Name the weights of a 12-layer GPT whose whole training state is close to `nbytes` bytes."""
    parameters = nbytes / BYTES_PER_PARAMETER
    quadratic, linear = 12 * LAYERS, VOCABULARY + POSITIONS + 13 * LAYERS + 2
    root = (math.sqrt(linear * linear + 4 * quadratic * parameters) - linear) / (2 * quadratic)
    hidden = max(8, round(root / 8) * 8)
    # The width is a multiple of 8; the vocabulary takes up what that rounding left over.
    rest = quadratic * hidden * hidden + (13 * LAYERS + 2 + POSITIONS) * hidden
    vocabulary = max(64, round((parameters - rest) / hidden))
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (vocabulary, hidden),
        "wpe.weight": (POSITIONS, hidden),
    }
    for layer in range(LAYERS):
        block = f"h.{layer}"
        shapes[f"{block}.ln_1.weight"] = (hidden,)
        shapes[f"{block}.ln_1.bias"] = (hidden,)
        shapes[f"{block}.attn.c_attn.weight"] = (3 * hidden, hidden)
        shapes[f"{block}.attn.c_attn.bias"] = (3 * hidden,)
        shapes[f"{block}.attn.c_proj.weight"] = (hidden, hidden)
        shapes[f"{block}.attn.c_proj.bias"] = (hidden,)
        shapes[f"{block}.ln_2.weight"] = (hidden,)
        shapes[f"{block}.ln_2.bias"] = (hidden,)
        shapes[f"{block}.mlp.c_fc.weight"] = (4 * hidden, hidden)
        shapes[f"{block}.mlp.c_fc.bias"] = (4 * hidden,)
        shapes[f"{block}.mlp.c_proj.weight"] = (hidden, 4 * hidden)
        shapes[f"{block}.mlp.c_proj.bias"] = (hidden,)
    shapes["ln_f.weight"] = (hidden,)
    shapes["ln_f.bias"] = (hidden,)
    return shapes


def gpt_state(nbytes: int, seed: int = 0, device: torch.device | str = "cpu") -> State:
    """Build a training state of about `nbytes` bytes of random, finite numbers.

    bf16 weights, and for every weight a 0-dim step, an fp32 master copy and two Adam moments. The
    step stays on the CPU, where torch's optimizers keep it.
    """
    generator = torch.Generator(device).manual_seed(seed)
    model: dict[str, torch.Tensor] = {}
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for index, (name, shape) in enumerate(parameter_shapes(nbytes).items()):
        master = torch.randn(shape, generator=generator, device=device)
        model[name] = master.to(torch.bfloat16)
        slots[index] = {
            "step": torch.tensor(1000.0 + index),
            "master": master,
            "exp_avg": torch.randn(shape, generator=generator, device=device).mul_(1e-3),
            "exp_avg_sq": torch.rand(shape, generator=generator, device=device).mul_(1e-6),
        }
    groups = [{"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "params": list(slots)}]
    return {"model": model, "optimizer": {"state": slots, "param_groups": groups}, "step": 1000}


def small_state(nbytes: int = 1 << 20, tensors: int = 256, seed: int = 0) -> State:
    """Build `tensors` equal fp32 tensors of random numbers, `nbytes` bytes in all."""
    generator = torch.Generator().manual_seed(seed)
    numel = nbytes // tensors // 4
    return {f"w{i:03d}": torch.randn(numel, generator=generator) for i in range(tensors)}


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(dotted name, leaf)` for every leaf of nested mappings and lists."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{prefix}.{index}" if prefix else str(index))
    else:
        yield prefix, tree


def flat_tensors(tree: Any) -> dict[str, torch.Tensor]:
    """Return the tensors among the leaves of `tree` by dotted name."""
    return {name: leaf for name, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)}


def nbytes_of(tree: Any) -> int:
    """Return the bytes of tensor data in `tree`."""
    return sum(tensor.nbytes for tensor in flat_tensors(tree).values())


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as one row of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def blank_like(tree: Any, device: torch.device | str | None = None) -> Any:
    """Return the same structure with every tensor replaced by zeros, already faulted in.

    They lie where the tensors do, or all on `device`.
    """
    if isinstance(tree, dict):
        return {key: blank_like(value, device) for key, value in tree.items()}
    if isinstance(tree, list):
        return [blank_like(value, device) for value in tree]
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree, device=device).fill_(0)
    return tree


def erase(tree: Any) -> None:
    """Zero every tensor of `tree` in place, so that stale contents cannot pass for a load."""
    for tensor in flat_tensors(tree).values():
        tensor.zero_()


def touch(tree: Any) -> int:
    """Read one byte of every 4 KiB page of every tensor, so that a lazy load is paid in full."""
    return sum(int(byte_view(tensor)[::4096].sum()) for tensor in flat_tensors(tree).values())


def differences(got: Any, want: Any) -> list[str]:
    """Name the tensors of `want` whose type, shape or bytes `got` does not hold."""
    mine = flat_tensors(got)
    return [name for name, tensor in flat_tensors(want).items() if not same(mine.get(name), tensor)]


def same(got: torch.Tensor | None, want: torch.Tensor) -> bool:
    """Say whether `got` has the type, the shape and the bytes of `want`."""
    if got is None or got.dtype != want.dtype or got.shape != want.shape:
        return False
    return torch.equal(byte_view(got), byte_view(want))
