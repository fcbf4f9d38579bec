"""The ranks of the other examples' jobs, and one step of training by them.

This file is responsible for joining the job that torchrun started, for dividing the same batch
among any number of ranks, and for telling what happened. It must not know how a model is sharded,
nor how it is saved. A job that goes on with another number of ranks has the same losses, but for
the rounding of sums in another order.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from train_gpt import PRESETS, Preset, make_batch

import fastckpt


@dataclass(frozen=True)
class Rank:
    """This process among those of the job."""

    number: int
    world_size: int
    device: torch.device

    def share(self, text: Tensor, preset: Preset, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of this rank: every world_size-th window of the batch."""
        mine = slice(self.number, None, self.world_size)
        inputs, targets = make_batch(text, preset, seed, step)
        return inputs[mine].to(self.device), targets[mine].to(self.device)

    def print(self, text: str) -> None:
        if self.number == 0:
            print(text, flush=True)


@contextmanager
def joined() -> Iterator[Rank]:
    """Joins the job that torchrun started, or makes one of this process alone: by NCCL with one GPU
    for each rank, or by gloo without GPUs. Kernels are deterministic, so that losses can be
    compared bit by bit.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", **alone)
    try:
        yield Rank(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def train_step(
    model: nn.Module,
    preset: Preset,
    inputs: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Computes the gradients, which it leaves in the model, and returns the loss of the batch.

    DDP and FSDP average gradients over the ranks that share the batch: those of the group, or all.
    Since shares may differ by a window, each rank's loss is its part of the batch's mean, times the
    number of ranks.
    """
    model.zero_grad()  # before the forward pass, in which FSDP puts other parameters in place
    logits = model(inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    loss = loss / (preset.batch * preset.context)
    (loss * dist.get_world_size(group)).backward()
    total = loss.detach()
    dist.all_reduce(total, group=group)
    return total.item()


@contextmanager
def loss_log(path: Path | None, rank: Rank) -> Iterator[TextIO]:
    """Opens the first rank's log of losses; other ranks write to /dev/null."""
    with open(path if path and rank.number == 0 else os.devnull, "a", buffering=1) as log:
        yield log


def report(log: TextIO, rank: Rank, step: int, loss: float, last: bool) -> None:
    """Logs a loss exactly, in hexadecimal, and prints every tenth."""
    log.write(json.dumps({"step": step, "loss": loss.hex()}) + "\n")
    if step % 10 == 0 or last:
        rank.print(f"step {step:5d}   loss {loss:.4f}")


def report_saves(saves: list[fastckpt.SaveHandle], rank: Rank, wait: bool = False) -> None:
    """Removes the saves that have ended from the list and prints them; raises if one failed."""
    while saves and (wait or saves[0].done()):
        handle = saves.pop(0)
        stats = handle.result()
        rank.print(
            f"saved {handle.path}: this rank wrote {stats.nbytes / 1e6:.1f} MB, "
            f"stalled {stats.stall_s * 1e3:.1f} ms, "
            f"committed after {stats.committed_s * 1e3:.0f} ms"
        )


@contextmanager
def tensorboard_log(
    path: Path | None, rank: Rank
) -> Iterator[Callable[[fastckpt.SaveHandle, int], None]]:
    """Opens the first rank's log for TensorBoard, and gives what is called when a save is over;
    that does nothing without a path, and on other ranks.
    """
    if path is None or rank.number:
        yield lambda handle, step: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(path)) as writer:

        def tell(handle: fastckpt.SaveHandle, step: int) -> None:
            for clock in ("stall_s", "staged_s", "written_s", "committed_s"):
                seconds = getattr(handle.stats, clock)
                if seconds is not None:  # else the save has failed before
                    writer.add_scalar(f"checkpoint/{clock}", seconds, step)

        yield tell


def arguments(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that these examples share."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="small", help="model size")
    add("--steps", type=int, default=100, help="train up to this step")
    add("--every", type=int, default=10, metavar="STEPS", help="between saves; 0: never save")
    add("--dropout", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--loss-log", type=Path, metavar="FILE", help="JSON lines: step, loss in hexadecimal")
    add("--ballast", type=int, default=0, metavar="MIB", help="unused weights: a bigger file")
    return parser


def preset_of(args: argparse.Namespace, rank: Rank) -> Preset:
    """Returns the size that was asked for; ends the job if a rank would have no window."""
    preset = replace(PRESETS[args.preset], dropout=args.dropout)
    if rank.world_size > preset.batch:
        raise SystemExit(f"a batch of {preset.batch} windows cannot feed {rank.world_size} ranks")
    return preset
