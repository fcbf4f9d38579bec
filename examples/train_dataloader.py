"""Train the GPT of train_gpt.py from torchdata's StatefulDataLoader, on any number of ranks.

This file is responsible for a training script that reads each sample of an epoch exactly once,
however often the job is killed, and on however many ranks it goes on.

    torchrun --standalone --nproc-per-node 2 train_dataloader.py --steps 100 --root run    # kill it
    torchrun --standalone --nproc-per-node 3 train_dataloader.py --steps 200 --root run    # goes on
    python train_dataloader.py --steps 300 --root run                                      # alone
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import arguments, joined, loss_log, report, report_saves
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from train_gpt import PRESETS, load_text, make_model

import fastckpt

# The new name of broadcast_buffers needs torch 2.13; torchdata calls set_vital.
for deprecated in ("`broadcast_buffers` is deprecated", "'set_vital' is deprecated"):
    warnings.filterwarnings("ignore", message=deprecated)


class Feed:
    """The batches of one rank, epoch after epoch, without end.

    An epoch is a permutation of the data set. It is dealt to the ranks one by one, as
    DistributedSampler does, and what a job left of it is dealt to the ranks of the next job.
    """

    def __init__(self, dataset, batch, rank, ranks, *, drop_last=False, **options):
        if drop_last and len(dataset) < batch * ranks:
            raise ValueError(f"{len(dataset)} samples are not enough for one step")
        self.dataset, self.batch, self.options = dataset, batch, options
        self.rank, self.ranks, self.drop_last = rank, ranks, drop_last
        self.begin(0, [])

    def begin(self, epoch, before):
        """Deals what is left of an epoch.

        `before` has a list for each job that began it, with other ranks or batches: how many
        samples each rank of that job took.
        """
        left = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(epoch))
        for taken in before:
            turn = torch.arange(len(left))
            left = left[turn // len(taken) >= torch.tensor(taken)[turn % len(taken)]]
        self.steps, others = divmod(len(left), self.batch * self.ranks)
        if others and not self.drop_last:
            self.steps += 1
        left = left[: self.steps * self.batch * self.ranks]
        self.mine = left[self.rank :: self.ranks].tolist()
        self.loader = StatefulDataLoader(
            self.dataset, self.batch, sampler=self.mine, **self.options
        )
        self.epoch, self.before, self.step, self.batches = epoch, before, 0, None

    def __next__(self):
        """Returns the next batch; None if other ranks have all of an epoch's last step, which all
        ranks make.
        """
        if self.step == self.steps:
            self.begin(self.epoch + 1, [])
        if self.batches is None:
            self.batches = iter(self.loader)
        self.step += 1
        return next(self.batches, None)

    def state_dict(self):
        return {
            "epoch": self.epoch,
            "before": self.before,
            "step": self.step,
            "sizes": [self.batch, self.loader.num_workers],
            "taken": min(self.step * self.batch, len(self.mine)),
            "loader": self.loader.state_dict(),
        }

    def load_state_dict(self, saved):
        sizes = [self.batch, self.loader.num_workers]
        if saved.get("sizes", sizes) != sizes:
            raise ValueError(f"batch and workers were {saved['sizes']}, are {sizes}: use merged()")
        self.begin(saved["epoch"], saved["before"])
        self.step = saved["step"]
        self.loader.load_state_dict(saved["loader"])

    @staticmethod
    def merged(saved, rank, ranks):
        """Returns the state for a job with other ranks, batches or workers, made of the states that
        all ranks of the last one saved.
        """
        before = [*saved[0]["before"], [each["taken"] for each in saved]]
        return {"epoch": saved[0]["epoch"], "before": before, "step": 0, "loader": {}}


class Windows(Dataset):
    """The first windows of a text, which do not overlap."""

    def __init__(self, text: Tensor, windows: int, context: int) -> None:
        self.windows = text[: windows * (context + 1)].view(windows, context + 1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"number": number, "text": self.windows[number].long()}


def train_step(model: nn.Module, batch: dict[str, Tensor] | None, text: Tensor) -> float:
    """Computes the gradients, which it leaves in the model, and returns the mean loss of the step's
    samples. A rank without samples takes part, since gradients are averaged over all.
    """
    text = text[:0] if batch is None else batch["text"].to(text.device)
    total = torch.tensor(float(len(text)), device=text.device)
    dist.all_reduce(total)
    model.zero_grad()
    logits = model(text[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
    loss = loss / (total * (text.shape[1] - 1))
    (loss * dist.get_world_size()).backward()  # DDP averages over the ranks
    mean = loss.detach()
    dist.all_reduce(mean)
    return mean.item()


def main() -> int:
    parser = arguments("Train a small GPT from a StatefulDataLoader, with fastckpt checkpoints.")
    add = parser.add_argument
    add("--root", type=Path, default=Path("run"), help="where the steps are kept")
    add("--samples", type=int, default=1001, help="in an epoch")
    add("--batch", type=int, default=4, help="samples of each rank in a step")
    add("--drop-last", action="store_true", help="leave out an epoch's last, smaller step")
    add("--workers", type=int, default=2, help="processes that load the samples of a rank")
    add("--sample-log", metavar="FILE", help="JSON lines, in a FILE.RANK for each rank")
    args = parser.parse_args()
    with joined() as rank:
        preset = PRESETS[args.preset]
        model, optimizer = make_model(preset, args.seed, args.ballast)
        model.to(rank.device)
        windows = Windows(load_text(), args.samples, preset.context)
        feed = Feed(
            windows,
            args.batch,
            rank.number,
            rank.world_size,
            drop_last=args.drop_last,
            num_workers=args.workers,
        )
        state = {
            "model": model,
            "optimizer": optimizer,
            "feed": fastckpt.PerRank(feed, merge=Feed.merged),
        }
        parallel = DistributedDataParallel(model, broadcast_buffers=False)
        none = windows.windows[:0].long().to(rank.device)
        saves: list[fastckpt.SaveHandle] = []
        sample_log = Path(f"{args.sample_log}.{rank.number}") if args.sample_log else None
        with (
            fastckpt.Checkpointer(args.root, keep_last=3) as checkpointer,
            loss_log(args.loss_log, rank) as log,
            open(sample_log or os.devnull, "a", buffering=1) as samples,
        ):
            first = checkpointer.restore(state) or 0
            if first:
                rank.print(
                    f"restored step {first} on {rank.world_size} ranks, in epoch {feed.epoch}"
                )
            for step in range(first, args.steps):
                batch = next(feed)
                loss = train_step(parallel, batch, none)
                optimizer.step()
                report(log, rank, step, loss, last=step == args.steps - 1)
                numbers = [] if batch is None else batch["number"].tolist()
                samples.write(
                    json.dumps({"step": step, "epoch": feed.epoch, "samples": numbers}) + "\n"
                )
                if args.every and (step + 1) % args.every == 0:
                    saves.append(checkpointer.save(step + 1, state))
                report_saves(saves, rank)
            report_saves(saves, rank, wait=True)
        del parallel  # before the group: see train_ddp.py
    return 0


if __name__ == "__main__":
    sys.exit(main())
