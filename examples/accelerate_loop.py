"""Train the GPT of train_gpt.py in a loop with Accelerate, whose state fastckpt saves.

This file is responsible for a complete script that a user of Accelerate would write, in which only
save_state() and load_state() are fastckpt's. It may be killed at any time.

    python accelerate_loop.py --steps 60                              # train
    python accelerate_loop.py --steps 90                              # go on
    torchrun --standalone --nproc-per-node 2 accelerate_loop.py       # two ranks

"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset
from train_gpt import PRESETS, load_text, make_model

from fastckpt.integrations.accelerate import load_state, save_state

PRESET = PRESETS["tiny"]
BATCH = 8


class Windows(Dataset[torch.Tensor]):
    """The text in consecutive windows; each byte is a token."""

    def __init__(self) -> None:
        self.text = load_text(1 << 18).long()

    def __len__(self) -> int:
        return len(self.text) // PRESET.context - 1

    def __getitem__(self, number: int) -> torch.Tensor:
        begin = number * PRESET.context
        return self.text[begin : begin + PRESET.context + 1]


class Progress:
    """The number of steps made, registered for checkpointing."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small GPT with Accelerate and fastckpt.")
    add = parser.add_argument
    add("--steps", type=int, default=60, help="train up to this step")
    add("--every", type=int, default=10, metavar="STEPS", help="between saves")
    add("--keep", type=int, default=3, help="how many checkpoints stay")
    add("--project", type=Path, default=Path("run"), help="directory of the run")
    add("--stock", action="store_true", help="save and load without fastckpt")
    add("--loss-log", type=Path, metavar="FILE", help="JSON lines: step, loss in hexadecimal")
    add("--ballast", type=int, default=0, metavar="MIB", help="unused weights: a bigger file")
    options = parser.parse_args()

    set_seed(0)
    project = ProjectConfiguration(
        str(options.project), automatic_checkpoint_naming=True, total_limit=options.keep
    )
    accelerator = Accelerator(
        project_config=project,
        # A resumed run shuffles as the interrupted one did, from the epoch's number alone.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        cpu=not torch.cuda.is_available(),
    )
    model, _ = make_model(PRESET, 0, options.ballast)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The loader has its own generator, from which it takes a random number when it begins to read.
    loader = DataLoader(Windows(), BATCH, shuffle=True, generator=torch.Generator())
    scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=20)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    if any((options.project / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state() if options.stock else load_state(accelerator)
        project.iteration = progress.step // options.every
    accelerator.print(f"beginning at step {progress.step}")
    handle = None
    while progress.step < options.steps:
        epoch, done = divmod(progress.step, len(loader))
        loader.set_epoch(epoch)
        for windows in accelerator.skip_first_batches(loader, done):
            logits = model(windows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if options.loss_log and accelerator.is_main_process:
                with open(options.loss_log, "a") as file:
                    line = {"step": progress.step, "loss": loss.item().hex()}
                    file.write(json.dumps(line) + "\n")
            progress.step += 1
            if progress.step % options.every == 0:
                if options.stock:
                    accelerator.save_state()
                else:
                    handle = save_state(accelerator)
            if progress.step == options.steps:
                break
    if handle is not None:
        stats = handle.result()
        accelerator.print(f"saved {handle.path}, durable after {stats.committed_s * 1e3:.0f} ms")
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
