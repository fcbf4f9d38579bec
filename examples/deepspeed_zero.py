"""Train the GPT of train_gpt.py with DeepSpeed's ZeRO, its checkpoints written by fastckpt.

This file is responsible for a complete DeepSpeed script in which one line, install(), makes
save_checkpoint() asynchronous.

    torchrun --standalone --nproc-per-node 2 deepspeed_zero.py --steps 100 --root run    # train
    torchrun --standalone --nproc-per-node 2 deepspeed_zero.py --steps 200 --root run    # go on

It may be killed at any time, and goes on from the tag that `run/latest` names. It also runs without
install(), on the same files.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Rank, arguments, loss_log, preset_of, report
from train_gpt import load_text, make_model

from fastckpt.integrations.deepspeed import install


def make_engine(model: torch.nn.Module, stage: int, batch: int) -> deepspeed.DeepSpeedEngine:
    """Returns a ZeRO engine, in bfloat16 where there are GPUs."""
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": torch.cuda.is_available()},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def main() -> int:
    parser = arguments("Train a small GPT with DeepSpeed and fastckpt checkpoints.")
    parser.add_argument("--root", type=Path, default=Path("run"), help="directory of checkpoints")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=2, help="stage of ZeRO")
    args = parser.parse_args()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    if not torch.cuda.is_available():  # else compiling a kernel takes a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device(deepspeed.get_accelerator().current_device_name())
    rank = Rank(dist.get_rank(), dist.get_world_size(), device)

    preset, text = preset_of(args, rank), load_text()
    model, _ = make_model(preset, args.seed, args.ballast)
    engine = make_engine(model, args.stage, preset.batch // rank.world_size)
    install(engine)  # the one line
    engine.load_checkpoint(str(args.root))
    first = engine.global_steps
    if first:
        rank.print(f"restored step {first}")
    with loss_log(args.loss_log, rank) as log:
        for step in range(first, args.steps):
            inputs, targets = rank.share(text, preset, args.seed, step)
            loss = F.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten())
            engine.backward(loss)
            engine.step()
            report(log, rank, step, loss.item(), last=step == args.steps - 1)
            if args.every and (step + 1) % args.every == 0:
                engine.save_checkpoint(str(args.root))  # returns when the state is copied
    engine.destroy()  # waits for the last checkpoint
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
