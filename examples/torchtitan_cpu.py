"""Train torchtitan's debug model on CPUs, over gloo, with checkpoints of fastckpt or of torchtitan.

This file is responsible for a Trainer of torchtitan whose checkpoints one line gives to fastckpt,
and for the few calls of torchtitan that ask for a GPU. Model, FSDP, optimizers, schedules and
training loop are torchtitan's own. It must not be used where there is a GPU.

    torchrun --standalone --nproc-per-node 2 torchtitan_cpu.py --steps 100 --root run    # train
    torchrun --standalone --nproc-per-node 2 torchtitan_cpu.py --steps 200 --root run    # go on

It may be killed at any time, and prints the loss of each step: those that it makes again after the
kill are the same. `--manager dcp` takes torchtitan's own checkpoints.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from train_gpt import load_text

if find_spec("triton") is None:  # CPU builds of torch do not bring it, and no CPU needs its kernels
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()
torch._utils._get_available_device_type = lambda: "cpu"
for name, value in {
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=1 << 30),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
}.items():
    setattr(torch.cpu, name, lambda *_, value=value: value)

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.pipelining import schedules  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as torchtitan_distributed  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from fastckpt.integrations.torchtitan import FastckptCheckpointer  # noqa: E402


def attention(q: Any, k: Any, v: Any, *, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    """Stands for FlexAttention, which has no backward pass on CPUs."""
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return out, None


def step(
    self: Any,
    *,
    arg_mbs: Any,
    kwarg_mbs: Any,
    target_mbs: Any,
    losses: Any,
    loss_kwargs: Any,
    return_outputs: bool,
) -> None:
    """Runs a pipeline's schedule on microbatches, which torch 2.13 would make itself of a batch."""
    for stage in self._stages if hasattr(self, "_stages") else [self._stage]:
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
    self._step_microbatches(
        arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
    )


for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
    if "arg_mbs" not in inspect.signature(schedule.step).parameters:
        schedule.step = step
FlexAttention.compiled_flex_attn = staticmethod(attention)
torchtitan_distributed.set_pg_timeouts = lambda **_: None  # a barrier that names a GPU


class Bytes(BaseTokenizer):
    """A tokenizer without files: a token for each byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


class Windows(torch.utils.data.IterableDataset):
    """The windows of a text that one data-parallel rank reads, and goes on from where it was."""

    def __init__(self, nbytes: int, rank: int, ranks: int) -> None:
        self.text, self.nbytes = load_text().long(), nbytes
        self.at, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            begin = self.at * self.nbytes % (len(self.text) - self.nbytes)
            window = self.text[begin : begin + self.nbytes + 1]
            self.at += self.ranks
            yield {"input": window[:-1], "positions": torch.arange(self.nbytes)}, window[1:]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        seq_len: int,
        dp_rank: int,
        dp_world_size: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        windows = Windows(seq_len, dp_rank, dp_world_size)
        super().__init__(windows, dp_rank, dp_world_size, batch_size=local_batch_size)


class Logging(Trainer):
    """A Trainer that prints the losses, and logs them exactly, in hexadecimal."""

    losses: Path | None = None

    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        for part in self.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):  # gloo has sums alone
                    module.set_force_sum_reduction_for_comms(True)
        log = self.metrics_processor.log

        def logged(step: int, loss: float, *others: Any, **named: Any) -> None:
            log(step, loss, *others, **named)
            stages = self.parallel_dims.pp
            has_loss = stages == 1 or self.pp_has_last_stage
            if not has_loss or dist.get_rank() % (dist.get_world_size() // stages) != 0:
                return
            print(f"step {step:5d}   loss {loss:.4f}", flush=True)
            if self.losses is not None:
                with open(self.losses, "a") as file:
                    file.write(json.dumps({"step": step, "loss": loss.hex()}) + "\n")

        self.metrics_processor.log = logged


def configured(args: argparse.Namespace) -> Trainer.Config:
    """Returns torchtitan's config of its debug model, small enough for CPUs."""
    config = llama3_debugmodel()
    config.tokenizer, config.dataloader = Bytes.Config(), Loader.Config()
    config.training.local_batch_size, config.training.seq_len = 2, args.context
    config.training.steps = args.steps
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=2, total_steps=10_000)
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # torch 2.13 has no FSDP for the default
    config.parallelism.tensor_parallel_degree = args.tp
    config.parallelism.pipeline_parallel_degree = args.pp
    config.parallelism.pipeline_parallel_schedule = args.schedule
    config.validator.enable = False
    config.debug.seed = 1
    config.dump_folder = str(args.root)
    checkpoint: Any = FastckptCheckpointer if args.manager == "fastckpt" else CheckpointManager
    config.checkpoint = checkpoint.Config(  # the one line
        enable=True,
        interval=args.every,
        last_save_model_only=False,
        exclude_from_loading=args.exclude,
    )
    return config


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("run"), help="torchtitan's dump_folder")
    parser.add_argument("--steps", type=int, default=100, help="train up to this step")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--context", type=int, default=64, help="tokens of a window")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a tensor")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument(
        "--schedule", default="1F1B", help="of the pipeline, such as Interleaved1F1B"
    )
    parser.add_argument("--manager", choices=["fastckpt", "dcp"], default="fastckpt")
    parser.add_argument("--exclude", nargs="*", default=[], help="exclude_from_loading")
    parser.add_argument("--loss-log", type=Path, help="append losses to this file")
    return parser


def main() -> None:
    args = options().parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    Logging.losses = args.loss_log
    trainer = Logging(configured(args))
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
