"""Train the GPT of train_gpt.py with Lightning, its checkpoints written by fastckpt.

This file is responsible for a complete Lightning script in which one plugin makes the saves of
ModelCheckpoint asynchronous, atomic and durable.

    python lightning_fit.py --steps 100 --root run                 # train
    python lightning_fit.py --steps 200 --root run                 # go on
    torchrun --nproc-per-node 2 lightning_fit.py --devices 2 ...   # the same with DDP

It may be killed at any time, and goes on from run/last.ckpt. It also runs without the plugin, on
the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from train_gpt import PRESETS, Preset, load_text, make_batch, make_model

from fastckpt.integrations.lightning import FastckptCheckpointIO

warnings.filterwarnings("ignore", message=".*does not have many workers.*")


class LitGPT(LightningModule):
    """The model; each batch follows from the step, so that a resumed run can be compared."""

    def __init__(self, preset: Preset, seed: int, ballast_mib: int, log: Path | None) -> None:
        super().__init__()
        self.preset, self.seed, self.text, self.loss_log = preset, seed, load_text(), log
        self.gpt, _ = make_model(preset, seed, ballast_mib)

    def training_step(self, _batch: Tensor, _number: int) -> Tensor:
        inputs, targets = make_batch(self.text, self.preset, self.seed, self.global_step)
        mine = slice(self.global_rank, None, self.trainer.world_size)
        logits = self.gpt(inputs[mine].to(self.device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets[mine].flatten().to(self.device))
        if self.loss_log is not None and self.global_rank == 0:
            with open(self.loss_log, "a") as log:
                log.write(json.dumps({"step": self.global_step, "loss": loss.item().hex()}) + "\n")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small GPT with Lightning and fastckpt.")
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="small", help="model size")
    add("--steps", type=int, default=100, help="train up to this step")
    add("--every", type=int, default=10, metavar="STEPS", help="between saves")
    add("--root", type=Path, default=Path("run"), help="directory of checkpoints")
    add("--devices", type=int, default=1, help="number of processes; several train by DDP")
    add("--seed", type=int, default=0)
    add("--loss-log", type=Path, metavar="FILE", help="JSON lines: step, loss in hexadecimal")
    add("--ballast", type=int, default=0, metavar="MIB", help="unused weights: a bigger file")
    args = parser.parse_args()

    checkpoints = ModelCheckpoint(
        dirpath=args.root,
        filename="{step}",
        monitor="step",
        mode="max",
        save_top_k=2,
        save_last=True,
        every_n_train_steps=args.every,
    )
    trainer = Trainer(
        plugins=[FastckptCheckpointIO()],  # the one line
        callbacks=[checkpoints],
        max_steps=args.steps,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    preset = replace(PRESETS[args.preset], dropout=0.0)  # a resumed run has other random numbers
    model = LitGPT(preset, args.seed, args.ballast, args.loss_log)
    last = args.root / "last.ckpt"
    data = DataLoader(range(1_000_000))  # numbers: the batch is made in training_step
    trainer.fit(model, data, ckpt_path=last if os.path.exists(last) else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
