"""Train a small GPT-2 with transformers' Trainer, whose checkpoints fastckpt writes.

This file is responsible for a complete script that a user of Trainer would write, with AsyncTrainer
in the place of Trainer. It may be killed at any time.

    python transformers_trainer.py --steps 60                              # train
    python transformers_trainer.py --steps 90                              # go on
    python transformers_trainer.py --steps 120 --stock                     # without fastckpt
    torchrun --standalone --nproc-per-node 2 transformers_trainer.py       # two ranks

"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from train_gpt import load_text
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from fastckpt import SaveOptions
from fastckpt.integrations.transformers import AsyncTrainer

CONTEXT = 64


class Windows(Dataset[dict[str, Tensor]]):
    """The text in consecutive windows; each byte is a token."""

    def __init__(self, text: Tensor) -> None:
        self.text = text.long()

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        window = self.text[number * CONTEXT : (number + 1) * CONTEXT]
        return {"input_ids": window, "labels": window}


class LossLog(TrainerCallback):
    """Logs each loss exactly, in hexadecimal, on the first rank."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            with open(self.path, "a") as file:
                line = {"step": state.global_step, "loss": float(logs["loss"]).hex()}
                file.write(json.dumps(line) + "\n")


def make_model(seed: int, ballast_mib: int) -> GPT2LMHeadModel:
    """Returns a model of 140 thousand weights, with a buffer of `ballast_mib` MiB besides."""
    set_seed(seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.register_buffer("ballast", torch.zeros(ballast_mib << 18))
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with fastckpt checkpoints.")
    add = parser.add_argument
    add("--steps", type=int, default=60, help="train up to this step")
    add("--every", type=int, default=10, metavar="STEPS", help="between saves")
    add("--keep", type=int, default=3, help="how many checkpoints stay")
    add("--output-dir", type=Path, default=Path("run"), help="directory of the run")
    add("--fence", choices=("call", "step"), default="call", help="when training goes on")
    add("--on-error", choices=("raise", "warn"), default="raise", help="what a failed save does")
    add("--seed", type=int, default=0)
    add("--stock", action="store_true", help="save and load without fastckpt")
    add("--loss-log", type=Path, metavar="FILE", help="JSON lines: step, loss in hexadecimal")
    add("--ballast", type=int, default=0, metavar="MIB", help="unused weights: a bigger file")
    options = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=str(options.output_dir),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",  # the same, whatever the number of steps
        warmup_steps=10,
        save_steps=options.every,
        save_total_limit=options.keep,
        logging_steps=1,
        seed=options.seed,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    given: dict[str, Any] = {
        "model": make_model(options.seed, options.ballast),
        "args": arguments,
        "train_dataset": Windows(load_text()),
        "callbacks": [LossLog(options.loss_log)] if options.loss_log else [],
    }
    if options.stock:
        trainer = Trainer(**given)
    else:
        trainer = AsyncTrainer(
            **given, options=SaveOptions(fence=options.fence, on_error=options.on_error)
        )
    there = options.output_dir.exists() and get_last_checkpoint(options.output_dir)
    trainer.train(resume_from_checkpoint=bool(there))
    if trainer.is_world_process_zero():
        print(f"step {trainer.state.global_step} is in {get_last_checkpoint(options.output_dir)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
