"""save_checkpoint, with the interface of Megatron's own function.

Responsible for the contents of a checkpoint.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.utils import unwrap_model

from fastckpt.arguments.checks import check_path
from fastckpt.arguments.options import SaveOptions
from fastckpt.directories import iterations
from fastckpt.directories.iterations import Retention
from fastckpt.integrations.megatron.optimizer import CONTENT, SHARDING, saved_maps
from fastckpt.integrations.megatron.saves import Saves
from fastckpt.integrations.megatron.strategies import Afterwards, SaveStrategy, serialized
from fastckpt.saving.handle import InnerHandle, SaveHandle

# ---- The state of a training run except the optimizer's: model chunks, random number generators.
# Responsible for the names that Megatron saves them under.

_MODELOPT = "_modelopt_state"  # an attribute of models that ModelOpt has changed
RNG, OWN_RNG = "rng_state", "fastckpt.rng_state"


def content_metadata(sharding_type: str, mem_efficient: bool = False) -> dict[str, Any]:
    """Returns Megatron's sharding settings for a save; the checkpoint stores them without the
    group.
    """
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
    """Whether NVIDIA ModelOpt has changed a model, such as by quantizing it; ModelOpt marks the
    model.
    """
    return any(hasattr(part, _MODELOPT) for model in models for part in model.modules())


def refuse_modelopt(models: Sequence[Any]) -> None:
    """Raises NotImplementedError for models that ModelOpt has changed, whose extra state is not
    saved.
    """
    if is_by_modelopt(models):
        raise NotImplementedError(
            "NVIDIA ModelOpt changed the model, but this save_checkpoint does not save "
            "ModelOpt's state, and the weights cannot be loaded correctly without it: use "
            "Megatron's save_checkpoint, which also works after install()"
        )


def named(models: Sequence[Any]) -> list[tuple[str, Any]]:
    if len(models) == 1:
        return [("model", models[0])]
    return [(f"model{number}", model) for number, model in enumerate(models)]


def model_state(models: Sequence[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: model.sharded_state_dict(metadata=metadata) for name, model in named(models)}


def rng_objects(states: list[Any] | None) -> list[ShardedObject]:
    """Returns Megatron's rng_state for each model parallel rank, and fastckpt's for each rank."""
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


def _rng_states(args: Any) -> list[Any]:
    """Returns the states that stock Megatron expects: those of all data parallel ranks, if these
    were initialized with different random numbers; otherwise this rank's.
    """
    states: list[Any] = [rng_state()]
    ranks = parallel_state.get_data_parallel_world_size()
    if getattr(args, "data_parallel_random_init", False) and ranks > 1:
        own, states = states[0], [None] * ranks
        dist.all_gather_object(states, own, group=parallel_state.get_data_parallel_group())
    return states


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    if torch.cuda.is_available() and state["cuda_rng_state"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng_state"])
    if state["rng_tracker_states"]:
        tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


LAYOUTS = ("dp_reshardable", "fully_reshardable")


def save_checkpoint(
    iteration: int,
    model: Any,
    optimizer: Any = None,
    opt_param_scheduler: Any = None,
    num_floating_point_operations_so_far: int = 0,
    *,
    save: str,
    saves: Saves | None = None,
    non_persistent_ckpt: bool = False,
    preprocess_common_state_dict_fn: Callable[[Any], Any] | None = None,
    args: Any = None,
    save_rng: bool = True,
    distrib_optim_sharding_type: str = "dp_reshardable",
    distrib_optim_fully_reshardable_mem_efficient: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
    options: SaveOptions = SaveOptions(),
) -> SaveHandle:
    """Begins to save an iteration, and returns when the model may change. All ranks must call it.

    The checkpoint is `<save>/iter_0001000` in Megatron's torch_dist format, which stock Megatron
    loads. It is written and committed in the background; then the tracker
    `latest_checkpointed_iteration.txt` is updated, and old iterations are removed.

    Ranks communicate over the job's store. Collectives run only in the first save of `saves` to a
    directory, where Megatron checks that the ranks' shards fit together, and in "fully_reshardable"
    saves, which gather state.

    Args:
        iteration: the iteration's number, 0 or more.
        model: a model such as GPTModel, wrapped or not, or the list of a stage's model chunks.
        optimizer, opt_param_scheduler: Megatron's; None: not saved.
        num_floating_point_operations_so_far: a number that load_checkpoint will return.
        save: the run's directory, the same on all ranks; created if it is missing.
        saves: the run's Saves; pass the same object each time. With None, Megatron checks the
            shards in each save, and you must wait for result() before the next save.
        non_persistent_ckpt: save to `<save>/non_persistent` instead, where only the last iteration
            is kept.
        preprocess_common_state_dict_fn: like Megatron's: transforms the common state before the
            first save compares it between ranks.
        args: Megatron's arguments, which stock Megatron's load requires; None: not saved. If
            args.data_parallel_random_init is set, the ranks' random states are gathered, as in
            Megatron.
        save_rng: whether the states of random number generators are saved: Python's, numpy's,
            torch's and the GPU's.
        distrib_optim_sharding_type: "dp_reshardable" saves the distributed optimizer's buckets
            without communication, and a map of them. With the map, load_checkpoint (but not stock
            Megatron) can load them onto other tensor and pipeline parallel sizes.
            "fully_reshardable" gathers the state first, so that stock Megatron can also load it
            onto other sizes.
        distrib_optim_fully_reshardable_mem_efficient: like Megatron's flag: gather with gloo, on
            one rank only.
        keep_last: the number of iterations to keep, at least 1 (one more needs space during a
            save); None: all.
        keep_every: with keep_last, iterations that are multiples of this number are also kept.
        options: the fence, how errors are handled, and how files are written (see SaveOptions). An
            earlier save's failure is raised on all ranks.

    Returns:
        A SaveHandle; its result() returns when the iteration is committed and the tracker updated.

    Raises:
        ValueError: an argument is unknown or out of range.
        NotImplementedError: NVIDIA ModelOpt has changed the model, and ModelOpt's state would be
            lost.
        CheckpointError: with on_error="raise", an earlier save failed.
        megatron's CheckpointingException: in the first save, the ranks' shards do not fit together.
    """
    if distrib_optim_sharding_type not in LAYOUTS:
        raise ValueError(
            f"distrib_optim_sharding_type is {distrib_optim_sharding_type!r}, must be one of "
            f"{LAYOUTS}"
        )
    if iteration < 0 or (keep_last is not None and keep_last < 1):
        raise ValueError(
            f"iteration is {iteration}, must be 0 or more; keep_last is {keep_last}, must be 1 or "
            "more, or None"
        )
    models = chunks(model)
    refuse_modelopt(models)
    root, retention = os.path.realpath(check_path("save", save)), Retention(keep_last, keep_every)
    if non_persistent_ckpt:
        root, retention = os.path.join(root, iterations.NON_PERSISTENT), Retention(1)
    saves = Saves() if saves is None else saves
    metadata = content_metadata(
        distrib_optim_sharding_type, distrib_optim_fully_reshardable_mem_efficient
    )
    state = _state(models, optimizer, opt_param_scheduler, metadata)
    for mine in rng_objects(_rng_states(args)) if save_rng else []:
        state[mine.key] = mine
    state |= {"iteration": iteration, "checkpoint_version": 3.0}
    state["num_floating_point_operations_so_far"] = num_floating_point_operations_so_far
    state |= {} if args is None else {"args": args}
    strategy = SaveStrategy(options=options)
    is_first = saves.is_first(root)

    def begin(afterwards: Afterwards) -> InnerHandle:
        sharded, common = save_preprocess(state, is_first, preprocess_common_state_dict_fn)
        return strategy.begin(
            sharded,
            os.path.join(root, iterations.directory_name(iteration)),
            serialized(common).getvalue() if dist.get_rank() == 0 else None,
            afterwards,
        )

    return saves.begin(root, iteration, retention, begin)


def _state(
    models: list[Any], optimizer: Any, scheduler: Any, metadata: dict[str, Any]
) -> dict[str, Any]:
    state = model_state(models, metadata)
    if optimizer is not None:
        maps = saved_maps(optimizer, state) if metadata[SHARDING] == "dp_reshardable" else []
        result = optimizer.sharded_state_dict(dict(state), metadata=metadata)
        state |= {"optimizer": result, "fastckpt_optimizer_maps": maps}
    if scheduler is not None:
        state["opt_param_scheduler"] = scheduler.state_dict()
    result = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    return state | {CONTENT: result}
