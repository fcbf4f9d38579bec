"""Training in all layouts: a small model under FSDP2, HSDP, FSDP over TP, TP, DDP, or as it is.

Responsible for what ranks do from the first step to a save, and from a restore to the last one.
Must not know what the values should be: that is for the test to compare.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fastckpt import Checkpointer, PerRank, SaveOptions
from tests.crews.group_crew import Member
from tests.crews.steps_states import mesh, same_bits

WORDS, WIDTH, HIDDEN = 9000, 30, 68  # the embedding has more than 1 MiB, WIDTH is uneven over 4
SAVED_AT, LAST = 2, 4
SAVES = 4  # behind a fence


class Net(nn.Module):
    """Embedding and MLP.

    Args:
        scaled: with a parameter of five elements, of which the last of four ranks gets none. Tensor
            parallelism would leave it on meshes that lack half of the ranks.
    """

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, 5)) if scaled else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        hidden = hidden + self.down(nn.functional.gelu(self.up(hidden)))
        if self.scales is not None:
            hidden = hidden.unflatten(-1, (5, -1)) * self.scales.unsqueeze(-1)
        return hidden.square().mean()


class Run:
    """One model in training.

    Args:
        layout: "fsdp", "hsdp", "fsdp over tp", "tp", "ddp" or "plain".
        scaled: as Net's.
        seed: of the first weights.
    """

    def __init__(self, member: Member, layout: str, scaled: bool, seed: int) -> None:
        torch.manual_seed(seed)
        net = Net(scaled)
        replica = member.rank
        if layout == "fsdp":
            for part in (net.words, net.up, net.down):
                fully_shard(part, mesh=mesh(member.world_size))
            fully_shard(net, mesh=mesh(member.world_size))
        elif layout == "hsdp":
            fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))
        elif layout == "fsdp over tp":
            both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            _parallelize(net, both["tp"])
            fully_shard(net, mesh=both["dp"])
            replica = both["dp"].get_local_rank()
        elif layout == "tp":
            _parallelize(net, mesh(member.world_size))
            replica = 0
        self.net: Any = nn.parallel.DistributedDataParallel(net) if layout == "ddp" else net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.rng = torch.Generator().manual_seed(1000 + replica)
        self.step = 0

    def train(self, last: int) -> list[str]:
        """Losses of this rank up to a step, bit by bit."""
        losses = []
        while self.step < last:
            tokens = torch.randint(0, WORDS, (4, 16), generator=self.rng)
            loss = self.net(tokens)
            if isinstance(loss, DTensor):
                loss = loss.full_tensor()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
            losses.append(loss.item().hex())
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "model": self.net,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "step": self.step,
            "rng": PerRank(self.rng.get_state()),
        }

    def restored(self, root: str) -> int | None:
        """Restores the newest step and goes on from it."""
        with Checkpointer(root) as checkpointer:
            state = self.state()
            found = checkpointer.restore(state)
        self.step = state["step"]
        self.rng.set_state(state["rng"].value)
        return found

    def whole(self) -> dict[str, torch.Tensor]:
        """Every tensor of parameters and optimizer, put together by torch; all ranks call it."""
        tensors = {}
        for name, parameter in self.net.named_parameters():
            name = name.removeprefix("module.")
            tensors[name] = parameter
            tensors |= {f"{name}.{k}": v for k, v in self.optimizer.state[parameter].items()}
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in tensors.items()
        }


def _parallelize(net: Net, tp: Any) -> None:
    plan = {
        "words": ColwiseParallel(output_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    parallelize_module(net, tp, plan)


def train_and_save(member: Member, root: str, layout: str, scaled: bool) -> list[str]:
    """Saves in the midst of training; returns the losses after it."""
    run = Run(member, layout, scaled, seed=1)
    run.train(SAVED_AT)
    whole = run.whole()
    with Checkpointer(root) as checkpointer:
        handle = checkpointer.save(SAVED_AT, run.state())
        losses = run.train(LAST)
        handle.result()
    if member.rank == 0:
        torch.save(whole, Path(root, "whole.pt"))
    return losses


def restore_and_train(
    member: Member, root: str, layout: str, scaled: bool
) -> tuple[int | None, list[str], list[str]]:
    """Restores into a model and an optimizer just made; returns step, differences, losses."""
    run = Run(member, layout, scaled, seed=2)
    step = run.restored(root)
    here, there = run.whole(), torch.load(Path(root, "whole.pt"))
    faults = [name for name in here.keys() | there.keys() if name not in here or name not in there]
    faults += [
        name for name in here.keys() & there.keys() if not same_bits(here[name], there[name])
    ]
    return step, faults, run.train(LAST)


def train_behind_the_step_fence(member: Member, root: str, fence: str) -> list[str]:
    """Saves after every step while the next one runs; returns what a restore finds wrong."""
    run = Run(member, "fsdp", True, seed=1)
    wanted = {}
    with Checkpointer(root, options=SaveOptions(fence=fence)) as checkpointer:
        handles = []
        while run.step < SAVES:
            run.train(run.step + 1)
            wanted[run.step] = run.whole()
            handles.append(checkpointer.save(run.step, run.state()))
        for handle in handles:
            handle.result()
        faults = []
        for step, whole in wanted.items():
            other = Run(member, "fsdp", True, seed=2)
            checkpointer.restore(other.state(), step)
            found = other.whole()
            faults += [
                f"{step}: {name}" for name in whole if not same_bits(whole[name], found[name])
            ]
    return faults
