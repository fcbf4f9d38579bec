"""What each rank does in the tests of Megatron-FSDP: models in it, saved as Megatron saves them.

Responsible for models and optimizers in Megatron-FSDP on the CPU, for a save as megatron.training
makes it in the format fsdp_dtensor, and for telling what came of a load. Must not know what should
come of it.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_gpt
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    preprocess_state_dict_for_uneven_dtensor,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.fsdp_dtensor_checkpoint import (
    handle_fp8_extra_state_case,
    handle_swiglu_in_state_dict,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from fastckpt.integrations import dcp, megatron
from fastckpt.integrations.megatron.state import rng_state
from tests.crews import megatron_bodies as bodies
from tests.crews.group_crew import Member, Outcome, attempt


class _NoLinear:
    """Nothing is one."""


def build(tp: int, *, layers: int = 2, hidden: int = 32, bf16: bool = True, seed: int = 1) -> Any:
    """Model, optimizer and schedule; without 16 bits there is no SwiGLU, which stock Megatron then
    cannot save.
    """
    bodies.regroup(tp, 1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tp, 1, create_gloo_process_groups=False)
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        params_dtype=dtype,
        bf16=bf16,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gated_linear_unit=bf16,
        activation_func=torch.nn.functional.silu if bf16 else torch.nn.functional.gelu,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
    )
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        megatron_gpt.VOCABULARY,
        megatron_gpt.CONTEXT,
        share_embeddings_and_output_weights=False,
    )
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_reduce_div_fusion=False,  # gloo cannot divide in a reduction
    )
    model = Float16Module(config, model) if bf16 else model
    # Megatron asks whether modules are Transformer Engine's, which is not here.
    with mock.patch.object(mcore_fsdp_adapter, "TELinear", _NoLinear):
        parallel = mcore_fsdp_adapter.FullyShardedDataParallel(config, ddp, model)
    return parallel, *megatron_gpt.optimizer_of(parallel, dtype)


def give_state_to_empty_shards(optimizer: Any) -> None:
    """As Transformer Engine's FusedAdam does, which Megatron takes on GPUs.

    torch's Adam gives them none, so that ranks have different numbers of DTensors; Megatron, which
    runs a collective for each, then hangs in its save.
    """
    states = optimizer.optimizer.state
    held = next(iter(states.values()))
    for group in optimizer.optimizer.param_groups:
        for param in group["params"]:
            if param not in states:
                zeros = {kind: torch.zeros_like(param.detach()) for kind in held if kind != "step"}
                states[param] = {"step": held["step"].clone(), **zeros}
    order = [param for group in optimizer.optimizer.param_groups for param in group["params"]]
    kept = {param: states[param] for param in order}
    states.clear()
    states.update(kept)


def save_as_megatron(root: str, iteration: int, parts: Any, by: Any = torch_dcp.save) -> None:
    """What megatron.training does with --ckpt-format fsdp_dtensor, where `by` is torch's save."""
    parallel, optimizer, scheduler = parts
    give_state_to_empty_shards(optimizer)
    model = unwrap_model(parallel)
    state: dict[str, Any] = {
        "args": argparse.Namespace(ckpt_format="fsdp_dtensor", params_dtype=torch.bfloat16),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "model": model.state_dict_for_save_checkpoint(),
        "optimizer": optimizer.sharded_state_dict(
            {}, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"}
        ),
        "opt_param_scheduler": scheduler.state_dict(),
        "rng_state": {f"(0, {parallel_state.get_tensor_model_parallel_rank()})": [rng_state()]},
        "num_floating_point_operations_so_far": 77,
    }
    handle_fp8_extra_state_case(state["model"])
    if model.config.gated_linear_unit:
        state["model"], state["optimizer"] = handle_swiglu_in_state_dict(
            model, state["model"], state["optimizer"]
        )
    preprocess_state_dict_for_uneven_dtensor(state)
    directory = Path(root, f"iter_{iteration:07d}")
    by(state, checkpoint_id=directory)
    if dist.get_rank() == 0:
        Path(root, "latest_checkpointed_iteration.txt").write_text(str(iteration))


def numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


# What tests call.


@bodies.on_the_cpu
def train_and_save(_member: Member, root: str, tp: int, options: Any) -> Any:
    """What comes after a save of the third iteration: random numbers and losses."""
    parts = build(tp, **options)
    bodies.train(parts, 1, 3)
    random.seed(tp)  # torch's save takes these from any rank, whole or in parts
    np.random.seed(tp)
    save_as_megatron(root, 3, parts)
    return numbers(), bodies.train(parts, 4, 3)


@bodies.on_the_cpu
def load_and_save(_member: Member, root: str, again: str, tp: int, options: Any) -> Any:
    """What a load finds, which fastckpt.integrations.dcp saves again, and what comes after."""
    parts = build(tp, seed=9, **options)
    bodies.train(parts, 1, 1)  # it goes back to what it loads
    found = megatron.load_checkpoint(*parts, load=root)
    save_as_megatron(again, 3, parts, dcp.save)
    return found, numbers(), bodies.train(parts, 4, 3)


@bodies.on_the_cpu
def save_iterations(_member: Member, root: str, iterations: list[int]) -> None:
    parts = build(1)
    for iteration in iterations:
        bodies.train(parts, iteration, 1)
        save_as_megatron(root, iteration, parts)


@bodies.on_the_cpu
def load_any(_member: Member, root: str, options: Any, with_optimizer: bool = True) -> Outcome:
    parallel, optimizer, scheduler = build(1, seed=3, **options)
    given = (optimizer, scheduler) if with_optimizer else ()
    return attempt(lambda: megatron.load_checkpoint(parallel, *given, load=root))
