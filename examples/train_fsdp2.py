"""Train the GPT of train_gpt.py with FSDP2 and a fastckpt.Checkpointer, on any number of ranks.

This file is responsible for a complete training script whose model is sharded: each rank saves its
own part, and the job goes on from the last committed step, on as many ranks as it is started with.
It must not know how a step reaches the disk, nor who kills it.

    torchrun --standalone --nproc-per-node 2 train_fsdp2.py --steps 100 --root run    # train
    torchrun --standalone --nproc-per-node 3 train_fsdp2.py --steps 200 --root run    # go on
    python train_fsdp2.py --steps 300 --root run                                      # alone

It may be killed at any time. With --max-restarts 3 torchrun starts it again by itself; set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 then, or the new ranks look for the dead ones' addresses.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from ranks import Rank, arguments, joined, loss_log, preset_of, report, report_saves, train_step
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LinearLR
from train_gpt import Preset, load_text, make_model

import fastckpt

# The logits are a view of what the last layer made; nothing here changes them in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class OwnState:
    """What each rank has of its own: how far it has read its share of the text, and its generators.

    The values mean nothing to a job of another number of ranks, which divides the text in another
    way: there, they stay as they are, and `start_at` sets them.
    """

    def __init__(self, rank: Rank, text: Tensor, preset: Preset, seed: int) -> None:
        self.rank, self.text, self.preset, self.seed = rank, text, preset, seed
        self.start_at(0)

    def start_at(self, batches: int) -> None:
        """As if so many batches had been read; with random numbers that no other rank has."""
        self.batches = batches
        torch.manual_seed((self.seed * 1_000_003 + batches) * 1_009 + self.rank.number)

    def next_share(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the next step."""
        self.batches += 1
        return self.rank.share(self.text, self.preset, self.seed, self.batches - 1)

    def state_dict(self) -> dict[str, Any]:
        state = {"world_size": self.rank.world_size, "batches": self.batches}
        state["rng"] = torch.get_rng_state()
        if self.rank.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.rank.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["world_size"] != self.rank.world_size:
            return
        self.batches = state["batches"]
        torch.set_rng_state(state["rng"])
        if self.rank.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.rank.device)


def make_sharded(
    preset: Preset, seed: int, ballast_mib: int, rank: Rank
) -> tuple[nn.Module, torch.optim.Optimizer, LinearLR]:
    """The model, of which each rank keeps a part, its optimizer and the warm-up of its rate."""
    model, _ = make_model(preset, seed, ballast_mib)  # the same on all ranks
    model.to(rank.device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, LinearLR(optimizer, start_factor=0.1, total_iters=20)


def main() -> int:
    parser = arguments("Train a small GPT with FSDP2 and fastckpt checkpoints.")
    parser.add_argument("--root", type=Path, default=Path("run"), help="where the steps are kept")
    args = parser.parse_args()
    with joined() as rank:
        preset = preset_of(args, rank)
        model, optimizer, scheduler = make_sharded(preset, args.seed, args.ballast, rank)
        own = OwnState(rank, load_text(), preset, args.seed)
        state = {
            "model": model,  # DTensors: each rank saves its part
            "optimizer": optimizer,
            "scheduler": scheduler,  # the same on all ranks: taken from the first
            "own": fastckpt.PerRank(own),
        }
        saves: list[fastckpt.SaveHandle] = []
        with (
            fastckpt.Checkpointer(args.root, keep_last=3, fence="step") as checkpointer,
            loss_log(args.loss_log, rank) as log,
        ):
            first = checkpointer.restore(state) or 0
            if own.batches != first:  # the step was saved by another number of ranks
                own.start_at(first)
            if first:
                rank.print(f"restored step {first} on {rank.world_size} ranks")
            for step in range(first, args.steps):
                loss = train_step(model, preset, *own.next_share())
                optimizer.step()  # waits here until the save before has copied everything
                scheduler.step()
                report(log, rank, step, loss, last=step == args.steps - 1)
                if args.every and (step + 1) % args.every == 0:
                    saves.append(checkpointer.save(step + 1, state))
                report_saves(saves, rank)
            report_saves(saves, rank, wait=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
