"""Saves of one process to a directory, of each kind that replaces a checkpoint as a whole.

Responsible for calling each framework as its users do, with a state that a number tells apart.
It must not know what becomes of the directory. Each framework is imported by its kind alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fastckpt
from fastckpt.saving import pipeline

WAIT_S = 60.0
Save = Callable[[int], Any]  # of a number; raises what the save's result() raises


def state(number: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((5000,), float(number))}


def dcp(root: str) -> Save:
    from fastckpt.integrations import dcp

    path = os.path.join(root, "items")
    return lambda number: dcp.save(state(number), checkpoint_id=path, no_dist=True)


def writer(root: str) -> Save:
    """torch's own save(), with our Writer."""
    from torch.distributed import checkpoint as torch_dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from fastckpt.integrations.dcp import Writer

    def save(number: int) -> None:
        path = os.path.join(root, "items")
        try:
            torch_dcp.save(state(number), storage_writer=Writer(path), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None

    return save


def megatron(root: str) -> Save:
    from megatron.core.dist_checkpointing import ShardedTensor

    from fastckpt.directories.iterations import Retention
    from fastckpt.integrations.megatron import SaveStrategy
    from fastckpt.integrations.megatron.saves import Saves

    strategy, path, saves = SaveStrategy(), os.path.join(root, "iter_0000007"), Saves()

    def save(number: int) -> None:
        weight = ShardedTensor.from_rank_offsets("weight", state(number)["weight"])
        saves.begin(
            root,
            7,
            Retention(),
            lambda after: strategy.begin({"weight": weight}, path, b"common", after),
        ).result(WAIT_S)

    return save


def trainer(root: str) -> Save:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from fastckpt.integrations.transformers import AsyncTrainer

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    arguments = TrainingArguments(root, report_to=[], use_cpu=True, disable_tqdm=True)
    training = AsyncTrainer(model=model, args=arguments)
    training.create_optimizer_and_scheduler(10)

    def save(number: int) -> None:
        with torch.no_grad():
            model.lm_head.weight.fill_(float(number))
        training.state.global_step = 7
        training._save_checkpoint(model, None)
        training.wait_for_checkpoints()

    return save


def accelerate(root: str) -> Save:
    from accelerate import Accelerator

    from fastckpt.integrations.accelerate import save_state

    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(8, 8)
    prepared = accelerator.prepare(model)

    def save(number: int) -> None:
        with torch.no_grad():
            prepared.weight.fill_(float(number))
        save_state(accelerator, os.path.join(root, "state")).result(WAIT_S)

    return save


def lightning(root: str) -> Save:
    from fastckpt.integrations.lightning import FastckptCheckpointIO

    saving = FastckptCheckpointIO()

    def save(number: int) -> None:
        saving.save_shards(state(number), {"epoch": number}, os.path.join(root, "shards"))
        saving._saves.last.result(WAIT_S)

    return save


def deepspeed(root: str) -> Save:
    from fastckpt.integrations.deepspeed import CheckpointCommitInfo, FastckptCheckpointEngine

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = FastckptCheckpointEngine(fastckpt.SaveOptions(timeout_s=WAIT_S))

    def save(number: int) -> None:
        with engine.whole_tag():
            engine.create(CheckpointCommitInfo("tag", root, True))
            engine.makedirs(os.path.join(root, "tag"), exist_ok=True)
            engine.save(state(number), os.path.join(root, "tag", "rank_0.pt"))
        engine.wait(WAIT_S)

    return save


def export(root: str) -> Save:
    return lambda number: fastckpt.export(state(number), os.path.join(root, "export")).result()


def serve(kind: str, root: str) -> None:
    """Saves the numbers that stdin has, one a line; says of each what came of it."""
    save = globals()[kind](root)
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        try:
            save(int(line))
            pipeline.current().drain()  # what was replaced is removed after that
            print("saved", flush=True)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
