"""One rank of a job that saves FSDP over tensor parallelism and restores it on other meshes.

    torchrun --nproc-per-node 4 mesh_life.py ROOT

Tensors have sizes that no mesh divides evenly. What DTensor itself makes of all parts, by
full_tensor(), is what has to be restored on each mesh, and is left in ROOT/whole.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fastckpt

PLAN = {
    "token": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
SAVED, OTHERS = (2, 2), ((4, 1), (2, 2))  # of 14 rows a pair holds 7, a rank 4 or 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(23, 10)
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10)
        self.head = nn.Linear(10, 22)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.down(self.up(self.token(text)).relu()))
        return out


def made(sizes: tuple[int, int], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model on a mesh, and an optimizer that has made a step."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Model(), mesh["tp"], PLAN)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(22).reshape(2, 11)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a state, put together by DTensor."""
    moments = state["optimizer"]["state"]
    named = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for parameter, of_it in moments.items():
        named |= {f"optimizer.{parameter}.{name}": tensor for name, tensor in of_it.items()}
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in named.items()
    }


def main() -> None:
    root = Path(sys.argv[1])
    dist.init_process_group("gloo")
    model, optimizer = made(SAVED, 1)
    state = state_of(model, optimizer)
    placements = {str(tensor.placements) for tensor in state["model"].values()}
    assert any("_StridedShard" in each for each in placements), placements
    expected = whole(state)
    if dist.get_rank() == 0:
        torch.save(expected, root / "whole.pt")
    with fastckpt.Checkpointer(root / "run") as checkpointer:
        checkpointer.save(1, state).result()
    for number, sizes in enumerate(OTHERS):
        model, optimizer = made(sizes, 2 + number)
        state = state_of(model, optimizer)
        before = whole(state)
        assert not torch.equal(before["model.up.weight"], expected["model.up.weight"])
        with fastckpt.Checkpointer(root / "run") as checkpointer:
            assert checkpointer.restore(state) == 1
        after = whole(state)
        assert after.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(after[name], tensor), f"{name} on a mesh {sizes}"
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{len(expected)} tensors on {len(OTHERS)} meshes")
    dist.destroy_process_group()


main()
