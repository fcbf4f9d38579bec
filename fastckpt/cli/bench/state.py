"""The state that is saved and loaded: tensors of a small GPT and its optimizer, of random numbers.

The module must not know who saves it.
"""

from __future__ import annotations

from math import sqrt

import torch

State = dict[str, torch.Tensor]

_LAYERS = 12
_BYTES_PER_PARAMETER = 14  # a bf16 weight; its fp32 copy and two moments
_SHARE_OF_LAYERS = 0.8  # the rest is the embedding, whose rows make up for rounding


def gpt_state(nbytes: int, device: str = "cpu") -> State:
    """Returns about `nbytes` of named tensors, the same ones at each call."""
    parameters = nbytes // _BYTES_PER_PARAMETER
    width = max(8, int(sqrt(parameters * _SHARE_OF_LAYERS / (12 * _LAYERS)) / 8) * 8)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(_LAYERS):
        shapes |= {
            f"{layer}.attention.in.weight": (3 * width, width),
            f"{layer}.attention.out.weight": (width, width),
            f"{layer}.mlp.in.weight": (4 * width, width),
            f"{layer}.mlp.out.weight": (width, 4 * width),
            f"{layer}.norm.weight": (width,),
            f"{layer}.norm.bias": (width,),
        }
    rows = parameters // width - _LAYERS * (12 * width + 2)
    shapes["embedding.weight"] = (max(1, rows), width)
    generator = torch.Generator(device).manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        for part in ("master", "exp_avg", "exp_avg_sq"):
            state[f"{part}.{name}"] = torch.rand(shape, generator=generator, device=device)
        state[f"model.{name}"] = state[f"master.{name}"].to(torch.bfloat16)
    return state


def nbytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def differing(loaded: State, state: State) -> list[str]:
    """Returns the names whose type, shape or bytes differ."""
    if loaded.keys() != state.keys():
        return sorted(loaded.keys() ^ state.keys())
    return [name for name, tensor in state.items() if not _same(loaded[name], tensor)]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    rows = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(rows[0].to(rows[1].device), rows[1])


def touch(state: State) -> None:
    """Reads a byte of each page of memory, since a file may have been mapped and not read yet; for
    a GPU, waits until everything has arrived.
    """
    for tensor in state.values():
        if tensor.is_cuda:
            torch.cuda.synchronize()
            return
        tensor.reshape(-1).view(torch.uint8)[::4096].sum()
