"""A large GPT spread over ranks by tensor, pipeline and data parallelism: what each rank holds.

bf16 parameters and a distributed optimizer, as Megatron lays them out. Tensors have their true
shapes and no memory: all elements of one are the same four bytes. It must not know what is measured
on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from fastckpt.plan.boxes import Box, _rectangles, shard_box
from fastckpt.state.tree import Leaf

LAYERS = 96
HIDDEN = 17152
VOCABULARY = 51200
OPTIMIZER_STATES = ("master", "exp_avg", "exp_avg_sq")
DTYPES = (torch.bfloat16, torch.float32)


class Parameter(NamedTuple):
    """A parameter of the model; `dim` is what tensor parallelism cuts, None where it does not."""

    name: str
    shape: tuple[int, ...]
    dim: int | None


def layer(number: int) -> list[Parameter]:
    """Return the parameters of one transformer layer: 12 h^2 in matrices, 13 h beside them."""
    h, name = HIDDEN, f"layers.{number}"
    return [
        Parameter(f"{name}.input_layernorm.weight", (h,), None),
        Parameter(f"{name}.input_layernorm.bias", (h,), None),
        Parameter(f"{name}.self_attention.query_key_value.weight", (3 * h, h), 0),
        Parameter(f"{name}.self_attention.query_key_value.bias", (3 * h,), 0),
        Parameter(f"{name}.self_attention.dense.weight", (h, h), 1),
        Parameter(f"{name}.self_attention.dense.bias", (h,), None),
        Parameter(f"{name}.post_attention_layernorm.weight", (h,), None),
        Parameter(f"{name}.post_attention_layernorm.bias", (h,), None),
        Parameter(f"{name}.mlp.dense_h_to_4h.weight", (4 * h, h), 0),
        Parameter(f"{name}.mlp.dense_h_to_4h.bias", (4 * h,), 0),
        Parameter(f"{name}.mlp.dense_4h_to_h.weight", (h, 4 * h), 1),
        Parameter(f"{name}.mlp.dense_4h_to_h.bias", (h,), None),
    ]


def stage(number: int, stages: int) -> list[Parameter]:
    """Return the parameters of one pipeline stage; input and output embeddings are not tied."""
    each = LAYERS // stages
    parameters = [
        item for place in range(number * each, (number + 1) * each) for item in layer(place)
    ]
    if number == 0:
        parameters.insert(0, Parameter("word_embeddings.weight", (VOCABULARY, HIDDEN), 0))
    if number == stages - 1:
        parameters += [
            Parameter("final_layernorm.weight", (HIDDEN,), None),
            Parameter("final_layernorm.bias", (HIDDEN,), None),
            Parameter("output_layer.weight", (VOCABULARY, HIDDEN), 0),
        ]
    return parameters


def parameter_count() -> int:
    """Return the number of the model's parameters."""
    return sum(prod(item.shape) for item in stage(0, 1))


class Cell:
    """One tensor-parallel part of one pipeline stage, which all its data-parallel ranks hold.

    Attributes:
        parts: each parameter and the box of it in this cell.
        starts: where each begins in the optimizer's flat buffer, in elements, and where that ends.
    """

    def __init__(self, parameters: list[Parameter], ways: int, place: int) -> None:
        self.parts = [
            (item, shard_box(item.shape, (ways,), (place,), (item.dim,))) for item in parameters
        ]
        self.starts = [0]
        for _item, box in self.parts:
            self.starts.append(self.starts[-1] + box.numel)

    def flat(self, begin: int, end: int) -> Iterator[tuple[Parameter, Box]]:
        """Yield elements [begin, end) of the flat buffer as rectangles of parameters."""
        for (item, box), start in zip(self.parts, self.starts, strict=False):
            first, last = max(begin - start, 0), min(end - start, box.numel)
            if first < last:
                for rectangle, _offset in _rectangles(box, first, last):
                    yield item, rectangle


class Job:
    """The model on `tensor` x `stages` x `data` ranks.

    Ranks count up along tensor parallelism first, then data, then pipeline parallelism.
    """

    def __init__(self, tensor: int, stages: int, data: int) -> None:
        assert LAYERS % stages == HIDDEN % tensor == VOCABULARY % tensor == 0
        self.tensor, self.stages, self.data = tensor, stages, data
        self.ranks = tensor * stages * data
        # One of each kind is enough: the others' elements lie there too.
        self.elements = {dtype: torch.zeros((), dtype=dtype) for dtype in DTYPES}
        self.cell = lru_cache(2 * tensor)(self._cell)
        self.holders = lru_cache(2 * tensor)(self._holders)

    def __str__(self) -> str:
        return f"TP{self.tensor} x PP{self.stages} x DP{self.data}"

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return where a rank is along tensor, pipeline and data parallelism."""
        rest, tensor = divmod(rank, self.tensor)
        return tensor, *divmod(rest, self.data)

    def rank(self, tensor: int, stage: int, data: int) -> int:
        """Return the rank at a place."""
        return (stage * self.data + data) * self.tensor + tensor

    def _cell(self, tensor: int, number: int) -> Cell:
        return Cell(stage(number, self.stages), self.tensor, tensor)

    def _holders(self, tensor: int | None, number: int) -> tuple[int, ...]:
        """Return the ranks of a cell, of a whole stage for None."""
        if tensor is None:
            return tuple(range(self.rank(0, number, 0), self.rank(0, number + 1, 0)))
        return tuple(self.rank(tensor, number, data) for data in range(self.data))

    def leaves(self, rank: int) -> list[Leaf]:
        """Return what a rank holds, as Checkpointer would see it.

        Parameters are held by every data-parallel rank of the cell, those that tensor parallelism
        does not cut by every rank of the stage. Of the optimizer's flat buffer a data-parallel rank
        holds one range, in pieces that are rectangles of parameters: it alone, except for
        parameters that are not cut, of which the ranks at the same place in other cells of the
        stage hold the same.
        """
        tensor, number, data = self.place(rank)
        cell = self.cell(tensor, number)
        alone, together = (rank,), tuple(self.rank(t, number, data) for t in range(self.tensor))
        leaves = []
        for item, box in cell.parts:
            holders = self.holders(None if item.dim is None else tensor, number)
            leaves.append(self._leaf(f"model/{item.name}", torch.bfloat16, item, box, holders))
        share = -(-cell.starts[-1] // self.data)
        owned = [*cell.flat(data * share, min((data + 1) * share, cell.starts[-1]))]
        for state in OPTIMIZER_STATES:
            for item, box in owned:
                holders = together if item.dim is None else alone
                leaves.append(
                    self._leaf(f"optimizer/{state}/{item.name}", torch.float32, item, box, holders)
                )
        return leaves

    def _leaf(
        self, key: str, dtype: torch.dtype, item: Parameter, box: Box, holders: tuple[int, ...]
    ) -> Leaf:
        local = self.elements[dtype].expand(box.sizes)
        return Leaf(key, local, item.shape, box, holders, "")

    def sample(self, count: int) -> list[int]:
        """Return `count` ranks, evenly spread: the first and the last of all, and others at
        different places along tensor, data and pipeline parallelism.
        """
        count = min(count, self.ranks)
        last = self.ranks - 1
        return sorted({round(last * place / max(1, count - 1)) for place in range(count)})
