"""The state that is saved and loaded: what the training of a small GPT holds, of random numbers.

The module must not know who saves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch

State = dict[str, Any]

_LAYERS, _VOCABULARY, _POSITIONS = 12, 50257, 1024
_BYTES_PER_PARAMETER = 14  # a bf16 weight; its fp32 copy and two moments


def _shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Returns the weights of a GPT of 12 layers whose training state is close to nbytes."""
    parameters = nbytes / _BYTES_PER_PARAMETER
    square, linear = 12 * _LAYERS, _VOCABULARY + _POSITIONS + 13 * _LAYERS + 2
    root = (sqrt(linear * linear + 4 * square * parameters) - linear) / (2 * square)
    width = max(8, round(root / 8) * 8)
    # The vocabulary takes up what rounding the width left over.
    rest = square * width * width + (13 * _LAYERS + 2 + _POSITIONS) * width
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (max(64, round((parameters - rest) / width)), width),
        "wpe.weight": (_POSITIONS, width),
    }
    for layer in range(_LAYERS):
        for name in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{name}.weight"] = shapes[f"h.{layer}.{name}.bias"] = (width,)
        for name, rows, columns in (
            ("attn.c_attn", 3 * width, width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", 4 * width, width),
            ("mlp.c_proj", width, 4 * width),
        ):
            shapes[f"h.{layer}.{name}.weight"] = (rows, columns)
            shapes[f"h.{layer}.{name}.bias"] = (rows,)
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (width,)
    return shapes


def gpt_state(nbytes: int, device: torch.device | str = "cpu") -> State:
    """Returns a training state of about `nbytes`, the same at each call: bf16 weights, and for each
    an fp32 copy, two Adam moments and a step, which is on the CPU as with torch's optimizers.
    """
    generator = torch.Generator(device).manual_seed(0)
    model: dict[str, torch.Tensor] = {}
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for index, (name, shape) in enumerate(_shapes(nbytes).items()):
        master = torch.randn(shape, generator=generator, device=device)
        model[name] = master.to(torch.bfloat16)
        slots[index] = {
            "step": torch.tensor(1000.0 + index, device="cpu"),
            "master": master,
            "exp_avg": torch.randn(shape, generator=generator, device=device).mul_(1e-3),
            "exp_avg_sq": torch.rand(shape, generator=generator, device=device).mul_(1e-6),
        }
    groups = [{"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "params": list(slots)}]
    return {"model": model, "optimizer": {"state": slots, "param_groups": groups}, "step": 1000}


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each leaf of nested dicts, lists and tuples with its dotted name."""
    if isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def flat_tensors(tree: Any) -> dict[str, torch.Tensor]:
    return {name: leaf for name, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)}


def nbytes_of(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in flat_tensors(tree).values())


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous tensor as one row of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def differing(loaded: Any, state: Any) -> list[str]:
    """Returns the names of tensors whose type, shape or bytes differ; they are compared where those
    of `state` lie, one at a time.
    """
    got, want = flat_tensors(loaded), flat_tensors(state)
    both = [name for name in want if name in got]
    differ = [name for name in both if not same(got[name], want[name])]
    return sorted(got.keys() ^ want.keys()) + differ


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Returns whether type, shape and bytes are equal, wherever both lie."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return torch.equal(byte_view(got).to(want.device), byte_view(want))


def touch(tree: Any) -> None:
    """Reads a byte of each page of memory, since a file may have been mapped and not read yet; for
    a GPU, waits until everything has arrived.
    """
    for tensor in flat_tensors(tree).values():
        if tensor.is_cuda:
            torch.cuda.synchronize()
        else:
            byte_view(tensor)[::4096].sum()
