"""The state of a training run beside the optimizer's: model chunks, random number generators.

Responsible for the names under which Megatron saves them. It must not know files or saves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.utils import unwrap_model

from fastckpt.integrations.megatron.optimizer import SHARDING

_MODELOPT = "_modelopt_state"  # an attribute of a model that ModelOpt has changed
RNG, OWN_RNG = "rng_state", "fastckpt.rng_state"


def content_metadata(sharding_type: str, mem_efficient: bool = False) -> dict[str, Any]:
    """Returns how Megatron is to shard what it saves; the checkpoint keeps this but the group."""
    of_type: dict[str, Any] = {}
    if sharding_type == "fully_reshardable":
        of_type["distrib_optim_fully_reshardable_mem_efficient"] = mem_efficient
    return of_type | {
        SHARDING: sharding_type,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def chunks(model: Any) -> list[Any]:
    return list(unwrap_model(model if isinstance(model, list) else [model]))


def is_by_modelopt(models: Sequence[Any]) -> bool:
    """Whether NVIDIA ModelOpt has changed a model, such as by quantizing it: it marks that."""
    return any(hasattr(part, _MODELOPT) for model in models for part in model.modules())


def refuse_modelopt(models: Sequence[Any]) -> None:
    """Raises NotImplementedError for models that have more state than what is saved of them."""
    if is_by_modelopt(models):
        raise NotImplementedError(
            "the model was changed by NVIDIA ModelOpt, whose state fastckpt does not save: without "
            "that the weights cannot be loaded as what they are; save by Megatron's own "
            "save_checkpoint, without install()"
        )


def named(models: Sequence[Any]) -> list[tuple[str, Any]]:
    if len(models) == 1:
        return [("model", models[0])]
    return [(f"model{number}", model) for number, model in enumerate(models)]


def model_state(models: Sequence[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: model.sharded_state_dict(metadata=metadata) for name, model in named(models)}


def rng_objects(states: list[Any] | None) -> list[ShardedObject]:
    """Returns Megatron's rng_state, of each model parallel rank, and fastckpt's, of each rank."""
    ps = parallel_state
    pp, tp = ps.get_pipeline_model_parallel_world_size(), ps.get_tensor_model_parallel_world_size()
    at = (ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank())
    dp_rank = ps.get_data_parallel_rank(with_context_parallel=True)
    dp = ps.get_data_parallel_world_size(with_context_parallel=True)
    return [
        ShardedObject(RNG, states, (pp, tp), at, replica_id=dp_rank),
        ShardedObject(OWN_RNG, states, (pp, tp, dp), (*at, dp_rank)),
    ]


def rng_state() -> dict[str, Any]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    if torch.cuda.is_available() and state["cuda_rng_state"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng_state"])
    if state["rng_tracker_states"]:
        tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
