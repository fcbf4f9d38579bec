"""Generates tokens with a transformer whose weights are larger than the memory they may take.

The layers that fit stay in memory; the others are read from the checkpoint for each token, one
layer ahead of the computation, as ZeRO-Inference does (https://arxiv.org/abs/2207.00032). The more
sequences are generated at a time, the less the reading costs for each.

    python streamed_inference.py /tmp/model.pt --layers 24 --width 1024 --budget 300

makes the checkpoint if it is missing. --way mmap and --way safetensors do the same by torch's
mapped files and by safetensors (of the same weights, beside the checkpoint), for comparison. Drop
the caches of the file system, or limit the memory of the process (by a control group), to see what
a model costs that does not fit into the machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

import fastckpt

VOCABULARY, HEAD_WIDTH = 512, 64
Weights = dict[str, torch.Tensor]


def make(path: str, layers: int, width: int) -> None:
    """Saves a model of random weights."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    state = {"embedding": matrix(VOCABULARY, width)}
    for layer in range(layers):
        state |= {
            f"layers.{layer}.qkv": matrix(3 * width, width),
            f"layers.{layer}.out": matrix(width, width),
            f"layers.{layer}.up": matrix(4 * width, width),
            f"layers.{layer}.down": matrix(width, 4 * width),
        }
    fastckpt.save(state, path).result()
    safetensors.torch.save_file(state, f"{path}.safetensors")


def block(x: torch.Tensor, weights: Weights, cache: list[torch.Tensor]) -> torch.Tensor:
    """Returns a layer's output for the next token of each sequence.

    Args:
        x: of shape (sequences, width).
        weights: the layer's, by their last name.
        cache: keys and values of the tokens before, of shape (sequences, heads, tokens, 64), or
            nothing; those of this token are added.
    """
    count, width = x.shape
    heads = (count, 3, width // HEAD_WIDTH, 1, HEAD_WIDTH)
    qkv = layer_norm(x, (width,)) @ weights["qkv"].T
    query, *new = qkv.view(heads).unbind(1)
    if cache:
        new = [torch.cat([old, its], 2) for old, its in zip(cache, new, strict=True)]
    cache[:] = new
    seen = scaled_dot_product_attention(query, *cache)
    x = x + seen.reshape(count, width) @ weights["out"].T
    return x + gelu(layer_norm(x, (width,)) @ weights["up"].T) @ weights["down"].T


def streamed(tensors: fastckpt.LazyTensors, layers: int, budget: int) -> Iterator[Weights]:
    """Yields the weights of layer after layer, for ever. Those that fit into the budget, in bytes,
    are kept.
    """
    names = [[name for name in tensors if name.startswith(f"layers.{n}.")] for n in range(layers)]
    layer_nbytes = sum(tensors[name].nbytes for name in names[0])
    kept_count = max(0, min(layers, budget // layer_nbytes - 2))  # one is used, and one read
    if kept_count + 2 >= layers:
        kept_count = layers
    kept = [_weights(tensors, its) for its in names[:kept_count]]
    ahead = names[kept_count:]
    while True:
        if ahead:
            tensors.prefetch(ahead[0])  # while the layers that were kept are computed
        yield from kept
        for number, its in enumerate(ahead):
            weights = _weights(tensors, its)
            if number + 1 < len(ahead):
                tensors.prefetch(ahead[number + 1])
            yield weights


def _weights(tensors: Any, names: list[str]) -> Weights:
    return {name.rpartition(".")[2]: tensors[name][...] for name in names}


def mapped(state: Weights, layers: int) -> Iterator[Weights]:
    """Yields the weights of layer after layer, for ever, from a file that torch has mapped."""
    names = ("qkv", "out", "up", "down")
    while True:
        for layer in range(layers):
            yield {name: state[f"layers.{layer}.{name}"] for name in names}


def read_anew(file: Any, layers: int) -> Iterator[Weights]:
    """Yields the weights of layer after layer, for ever, each time copied by safetensors."""
    names = ("qkv", "out", "up", "down")
    while True:
        for layer in range(layers):
            yield {name: file.get_tensor(f"layers.{layer}.{name}") for name in names}


@torch.inference_mode()
def generate(
    weights: Iterator[Weights],
    embedding: torch.Tensor,
    layers: int,
    count: int,
    tokens: int,
    told: Callable[[int, float], None] = lambda token, seconds: None,
) -> torch.Tensor:
    """Returns the tokens of `count` sequences, each of which begins with another token.

    Args:
        weights: gives those of each layer, in turn.
        told: is called with the number of each token, and the seconds that it took.
    """
    cache: list[list[torch.Tensor]] = [[] for _ in range(layers)]
    found = [torch.arange(count) % VOCABULARY]
    for token in range(tokens):
        began = time.perf_counter()
        x = embedding[found[-1]]
        for layer in range(layers):
            x = block(x, next(weights), cache[layer])
        found.append((layer_norm(x, x.shape[-1:]) @ embedding.T).argmax(-1))
        told(token, time.perf_counter() - began)
    return torch.stack(found, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", help="the checkpoint, made if it is missing")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--budget", type=int, default=300, help="MB of weights in memory")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--way", choices=("fastckpt", "mmap", "safetensors"), default="fastckpt")
    options = parser.parse_args()
    if not os.path.exists(options.path):
        make(options.path, options.layers, options.width)
    seconds: list[float] = []

    def told(token: int, took: float) -> None:
        seconds.append(took)
        print(f"token {token}: {took:.3f} s", flush=True)

    how = (options.layers, options.sequences, options.tokens, told)
    if options.way == "fastckpt":
        with fastckpt.open(options.path) as tensors:
            weights = streamed(tensors, options.layers, options.budget * 1_000_000)
            found = generate(weights, tensors["embedding"][...], *how)
    elif options.way == "mmap":
        state = torch.load(options.path, mmap=True)
        found = generate(mapped(state, options.layers), state["embedding"], *how)
    else:
        with safetensors.safe_open(f"{options.path}.safetensors", "pt") as file:
            weights = read_anew(file, options.layers)
            found = generate(weights, file.get_tensor("embedding"), *how)
    rate = options.sequences * (len(seconds) - 1) / sum(seconds[1:]) if seconds[1:] else 0.0
    print(f"{options.way}: {rate:.2f} tokens/s after the first; the last: {found[:, -1].tolist()}")


if __name__ == "__main__":
    main()
