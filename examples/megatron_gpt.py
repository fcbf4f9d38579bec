"""Trains a small GPT of Megatron-core on the text of this repository, with checkpoints by fastckpt.

    torchrun --nproc-per-node 2 examples/megatron_gpt.py --save run --tp 2 --iterations 20
    torchrun --nproc-per-node 2 examples/megatron_gpt.py --save run --tp 1 --iterations 40

The second command goes on where the first one stopped or was killed: bit by bit on the same tensor
parallel size, within rounding on another one. Without GPUs it runs on the CPU over gloo.
`--compare` also saves once by Megatron itself, and prints the seconds that training loses to both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_cpu import on_cpu

VOCABULARY, CONTEXT, BATCH = 256, 64, 8  # in bytes; BATCH: sequences of all ranks in one iteration


def build(
    tp: int,
    pp: int = 1,
    *,
    layers: int = 2,
    hidden: int = 64,
    bf16: bool = False,
    buckets: int | None = None,
    seed: int = 1,
) -> tuple[Any, Any, Any]:
    """Returns this rank's model, distributed optimizer and learning rate schedule of Megatron's."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=bf16,
        use_cpu_initialization=True,  # the same weights on every parallelism
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        CONTEXT,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    model = model.cuda()
    if bf16:
        model = model.bfloat16()
    parallel = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=buckets),
        model,
    )
    return parallel, *optimizer_of(parallel, dtype)


def optimizer_of(parallel: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns a model's distributed optimizer and learning rate schedule."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=3e-3,
            min_lr=3e-4,
            weight_decay=0.1,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        ),
        [parallel],
        use_gloo_process_groups=False,
    )
    scheduler = OptimizerParamScheduler(
        optimizer, 3e-4, 3e-3, 3e-4, 4, 200, "cosine", 0.1, 0.1, 200, "constant"
    )
    return optimizer, scheduler


def batch(text: torch.Tensor, iteration: int) -> torch.Tensor:
    """Returns this rank's sequences of an iteration, whose batch is the same on any layout."""
    from megatron.core import parallel_state

    chooser = torch.Generator().manual_seed(iteration)
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=chooser).tolist()
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    rows = [text[at : at + CONTEXT + 1] for at in starts[rank::size]]
    return torch.stack(rows).cuda()


def train_step(parallel: Any, optimizer: Any, scheduler: Any, tokens: torch.Tensor) -> float:
    """Trains one iteration; returns the loss of all ranks' sequences."""
    from megatron.core import parallel_state

    parallel.zero_grad_buffer()
    optimizer.zero_grad()
    positions = torch.arange(CONTEXT).cuda().expand(len(tokens), -1)
    loss = parallel(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
    loss.backward()
    parallel.finish_grad_sync()
    optimizer.step()
    scheduler.step(1)
    total = loss.detach().clone()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total) / parallel_state.get_data_parallel_world_size()


def save_as_megatron(parallel: Any, optimizer: Any, directory: Path) -> float:
    """Saves by Megatron itself, synchronously, in the torch_dist format; returns the seconds."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    dist.barrier()
    begun = time.perf_counter()
    given = {**metadata, "dp_cp_group": group}
    state = {"model": parallel.module.sharded_state_dict(metadata=given)}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), metadata=given)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    dist_checkpointing.save(state, str(directory), strategy, content_metadata=metadata)
    return time.perf_counter() - begun


def train(options: argparse.Namespace) -> None:
    from fastckpt.integrations import megatron

    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    parallel, optimizer, scheduler = build(options.tp, hidden=options.hidden)
    start, _flops = megatron.load_checkpoint(parallel, optimizer, scheduler, load=options.save)
    say(
        f"starts at iteration {start} on TP {options.tp} x DP {dist.get_world_size() // options.tp}"
    )
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    saves, handles = megatron.Saves(), []
    for iteration in range(start + 1, options.iterations + 1):
        loss = train_step(parallel, optimizer, scheduler, batch(text, iteration))
        say(f"iteration {iteration} loss {loss.hex()} {loss:.4f}", flush=True)
        if iteration % options.every == 0:
            handles.append(
                megatron.save_checkpoint(
                    iteration,
                    parallel,
                    optimizer,
                    scheduler,
                    save=options.save,
                    saves=saves,
                    keep_last=2,
                )
            )
        if iteration == options.kill_at:
            for handle in handles[:1]:
                handle.result()  # so that there is a checkpoint to go on from
            os.kill(os.getpid(), signal.SIGKILL)
    saves.wait()
    blocked = [handle.stats.stall_s or 0.0 for handle in handles]
    say(f"fastckpt: {len(blocked)} saves, training lost {sum(blocked):.3f} s")
    if options.compare:
        seconds = save_as_megatron(parallel, optimizer, Path(options.save) / "by-megatron")
        say(f"Megatron's torch_dist, synchronous: 1 save, training lost {seconds:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT of Megatron-core.")
    parser.add_argument("--save", required=True, help="directory of the run")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="iterations between saves")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument(
        "--text", type=Path, default=Path(__file__).resolve().parents[1] / "README.md"
    )
    parser.add_argument("--kill-at", type=int, default=0, help="iteration to be killed after")
    parser.add_argument("--compare", action="store_true", help="also save by Megatron itself")
    options = parser.parse_args()
    with_gpus = torch.cuda.is_available()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if with_gpus else "gloo")
    if with_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with contextlib.nullcontext() if with_gpus else on_cpu():
        train(options)
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
