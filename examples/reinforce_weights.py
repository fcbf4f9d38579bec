"""Train the GPT of train_gpt.py by REINFORCE: two ranks train, and two other processes sample text
with the weights that the trainers publish.

    torchrun --standalone --nproc-per-node 4 reinforce_weights.py --versions 30 --root run

This file is responsible for the loop around fastckpt.WeightPublisher and WeightSubscriber: a
version of the weights, samples of exactly that version, a step of training, and the next version.
The reward is toy: the share of bytes below 128 in a sample, 0.5 for random weights. Trainers shard
the model by FSDP2, and no rank ever holds all of it; each reader has a whole model. Samples go back
as files, each by one fastckpt.save.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from train_gpt import PRESETS, make_model

import fastckpt

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
TRAINERS = 2
LENGTH, SAMPLES = 16, 64  # bytes of a sample, and samples of a reader for each version
TIMEOUT_S = 120.0


def sampled(model: nn.Module) -> Tensor:
    """Returns samples of the model, a row for each, after a first byte 0."""
    text = torch.zeros(SAMPLES, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(LENGTH):
            chances = model(text)[:, -1].softmax(-1)
            text = torch.cat([text, torch.multinomial(chances, 1)], 1)
    return text


def step(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor) -> float:
    """Makes one step of REINFORCE, and returns the mean reward of the samples."""
    actions = text[:, 1:]
    rewards = (actions < 128).float()
    logits = model(text[:, :-1])
    chosen = F.cross_entropy(logits.flatten(0, 1), actions.flatten(), reduction="none")
    loss = (chosen * (rewards - rewards.mean()).flatten()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return rewards.mean().item()


def file_of(root: Path, reader: int, version: int) -> Path:
    return root / "samples" / f"{reader}-{version}.pt"


def wait_for(path: Path) -> Tensor:
    """Returns what a reader has saved. A file that is there is whole."""
    until = time.monotonic() + TIMEOUT_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no reader has saved {path} within {TIMEOUT_S:g} s")
        time.sleep(0.02)
    return fastckpt.load(path)


def train(args: argparse.Namespace, model: nn.Module, rank: int, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with fastckpt.WeightPublisher(
        args.root / "policy", keep=2, dtype=torch.bfloat16, group=mesh.get_group()
    ) as publisher:
        for version in range(args.versions):
            handle = publisher.publish(model, version)
            text = wait_for(file_of(args.root, rank, version))
            reward = step(model, optimizer, text)  # of what this version has sampled
            if rank == 0:
                stats = handle.result()
                print(
                    f"version {version}: reward {reward:.3f}; {stats.stored_nbytes} bytes, "
                    f"committed after {stats.committed_s * 1e3:.0f} ms",
                    flush=True,
                )


def read(args: argparse.Namespace, model: nn.Module, reader: int) -> None:
    with fastckpt.WeightSubscriber(args.root / "policy") as subscriber:
        for version in range(args.versions):
            update = subscriber.wait_for(version, timeout_s=TIMEOUT_S)
            update.apply(model)  # in place, after all of it was verified
            fastckpt.save(sampled(model), file_of(args.root, reader, version)).result()


def main() -> int:
    parser = argparse.ArgumentParser(description="REINFORCE with published weights.")
    parser.add_argument("--versions", type=int, default=30)
    parser.add_argument("--root", type=Path, default=Path("run"))
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", 1)) <= TRAINERS:
        raise SystemExit("start this by torchrun --standalone --nproc-per-node 4")
    samples = args.root / "samples"
    samples.mkdir(parents=True, exist_ok=True)
    if any(samples.iterdir()):  # before the ranks meet, so none is of this run
        raise SystemExit(f"{samples} has samples of another run: pass another --root")
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        mesh = DeviceMesh("cpu", torch.arange(TRAINERS))  # a call of all ranks
        model, _ = make_model(replace(PRESETS["tiny"], dropout=0.0), seed=0, ballast_mib=0)
        torch.manual_seed(rank)
        if rank < TRAINERS:
            train(args, model, rank, mesh)
        else:
            read(args, model, rank - TRAINERS)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
