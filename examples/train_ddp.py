"""Train the GPT of train_gpt.py with DistributedDataParallel, all ranks saving to one file.

This file is responsible for a complete training script whose ranks all hold the whole model: each
writes its part of one torch zip, and reads its part of it back.

    torchrun --standalone --nproc-per-node 2 train_ddp.py --steps 100 --path ckpt.pt    # train
    torchrun --standalone --nproc-per-node 3 train_ddp.py --steps 200 --path ckpt.pt    # go on

The job may be killed at any time. With --max-restarts 3 torchrun starts it again by itself; then
set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or the new ranks look for the dead ones' addresses.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import Rank, arguments, joined, loss_log, preset_of, report, report_saves, train_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from train_gpt import load_text, make_model

import fastckpt

# The new name of broadcast_buffers needs torch 2.13.
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")


def capture(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LinearLR, step: int
) -> dict[str, object]:
    """Returns all that the run needs to go on after `step` steps; copies no tensor."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": step,
    }


def restore(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LinearLR,
    device: torch.device,
) -> int:
    """Loads the checkpoint, if there is one; returns the number of steps that it had made."""
    if not path.exists():
        return 0
    # With a group, each rank reads a share of the file, and the ranks exchange the shares.
    state = fastckpt.load(path, map_location=device, group=dist.group.WORLD)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return state["step"]


def seed_rank(seed: int, step: int, rank: Rank) -> None:
    """Seeds this rank's random numbers in this step.

    One file holds one state, the same for all ranks, so no rank's generator is in it: the seed
    follows from the step instead. (With a Checkpointer, PerRank holds it: see train_fsdp2.py.)
    """
    torch.manual_seed((seed * 1_000_003 + step) * 1_009 + rank.number)


def main() -> int:
    parser = arguments("Train a small GPT with DDP and fastckpt checkpoints.")
    parser.add_argument("--path", type=Path, default=Path("ckpt.pt"), help="the checkpoint")
    args = parser.parse_args()
    with joined() as rank:
        preset, text = preset_of(args, rank), load_text()
        model, _ = make_model(preset, args.seed, args.ballast)
        model.to(rank.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=20)
        first = restore(args.path, model, optimizer, scheduler, rank.device)
        if first:
            rank.print(f"restored step {first} on {rank.world_size} ranks")
        # The ballast, a buffer, never changes, so no forward pass has to broadcast it.
        parallel = DistributedDataParallel(model, broadcast_buffers=False)
        saves: list[fastckpt.SaveHandle] = []
        with loss_log(args.loss_log, rank) as log:
            for step in range(first, args.steps):
                seed_rank(args.seed, step, rank)
                batch = rank.share(text, preset, args.seed, step)
                loss = train_step(parallel, preset, *batch)
                optimizer.step()
                scheduler.step()
                report(log, rank, step, loss, last=step == args.steps - 1)
                if args.every and (step + 1) % args.every == 0:
                    state = capture(model, optimizer, scheduler, step + 1)
                    saves.append(fastckpt.save(state, args.path, group=dist.group.WORLD))
                report_saves(saves, rank)
            report_saves(saves, rank, wait=True)
        # DDP holds the group. If it were freed after the group's end, torch would wait for gloo's
        # threads with the GIL held, and these may be waiting for the GIL.
        del parallel
    return 0


if __name__ == "__main__":
    sys.exit(main())
