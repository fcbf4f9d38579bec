"""One rank of a job under Accelerate's FSDP2, which saves its state and goes on with it.

Responsible for telling the losses that follow, what a save did on the training thread, and how
large the tensors were. Must not know what should come of it.

accelerate_fsdp.py save|load DIRECTORY
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType, fsdp_utils, set_seed
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastckpt import SaveOptions
from fastckpt.integrations.accelerate import load_state, save_state
from tests.crews.save_or_load import main

WIDTH = 64
# Older versions ask a checkpoint for other names than they have given to the optimizer's shards.
LOADS = "get_optimizer_state_dict" in inspect.getsource(fsdp_utils.load_fsdp_optimizer)


class Watch(TorchDispatchMode):
    """Notes the collectives of this thread, and the size of the largest tensor of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations on what this rank holds come here, too
        if func.namespace in ("c10d", "_c10d_functional"):
            self.collectives.append(str(func))
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, list | tuple) else [result]
        sizes = [
            each.numel()
            for each in made
            if isinstance(each, torch.Tensor) and each.is_floating_point()
        ]
        self.largest = max([self.largest, *sizes])
        return result


class Run:
    """A small model in FSDP2, with its optimizer and schedule."""

    def __init__(self) -> None:
        set_seed(3)
        # torch has FSDP2 for the CPU; Accelerate offers it on other devices alone.
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="SIZE_BASED_WRAP",
            min_num_params=100,
        )
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        layers = [nn.Linear(7, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, optimizer, schedule
        )

    def train(self, begin: int, end: int) -> list[str]:
        """The losses of these steps."""
        losses = []
        for step in range(begin, end):
            data = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
            loss = self.model(data).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item().hex())
        return losses


def save(directory: str) -> dict[str, Any]:
    run, told = Run(), {}
    run.train(0, 3)
    run.accelerator.save_state(f"{directory}/stock")
    for name, fence in (("ours", "call"), ("again", "step")):
        with Watch() as watch:
            handle = save_state(
                run.accelerator, f"{directory}/{name}", options=SaveOptions(fence=fence)
            )
        if fence == "call":
            told["losses"] = run.train(3, 5)
        handle.result()
        told[name] = {"collectives": watch.collectives, "largest": watch.largest}
    return told | {"loaded": load(directory, run) if LOADS else None}


def load(directory: str, run: Run | None = None) -> dict[str, Any]:
    run, told = run or Run(), {}
    for name, take in (
        ("stock", Accelerator.load_state),
        ("ours by stock", Accelerator.load_state),
        ("ours", load_state),
    ):
        with Watch() as watch:
            take(run.accelerator, f"{directory}/{name.split()[0]}")
        told[name] = run.train(3, 5)
        told["largest"] = watch.largest
    return told


main(save, load)
