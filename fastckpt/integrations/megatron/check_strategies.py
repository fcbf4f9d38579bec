"""Checks that megatron-core really saves and loads through the strategies that it is given.

Responsible for noticing that a version of it silently replaces a strategy by its own, or calls one
in another way. It must not know what strategies do.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import torch as stock

from fastckpt import IncompatibleCheckpoint
from fastckpt.directories.items_load import OURS
from fastckpt.integrations.megatron.strategies import LoadStrategy, SaveStrategy, stored_metadata


def save_checked(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    **options: Any,
) -> Any:
    """Calls megatron.core.dist_checkpointing.save, and checks that it has saved by fastckpt.

    From 0.17 on megatron-core silently replaces strategies that it does not accept by its own.

    Args:
        sharded_state_dict, checkpoint_dir: as dist_checkpointing.save's.
        sharded_strategy: a SaveStrategy, or Megatron's FullyParallelSaveStrategyWrapper around one;
            default: a new SaveStrategy. After its first commit, the files are checked, too.
        options: the other arguments of dist_checkpointing.save.

    Returns:
        An AsyncRequest with async_sharded_save=True, else None.

    Raises:
        IncompatibleCheckpoint: Megatron has saved by a strategy of its own.
        TypeError: sharded_strategy is of another kind. CheckpointError: the save failed.
    """
    strategy = SaveStrategy() if sharded_strategy is None else sharded_strategy
    ours = getattr(strategy, "base_strategy", strategy)
    if not isinstance(ours, SaveStrategy):
        raise TypeError(f"sharded_strategy is a {type(ours).__name__}, must be a SaveStrategy")
    begun = ours.begun
    request = dist_checkpointing.save(sharded_state_dict, checkpoint_dir, strategy, **options)
    if ours.begun == begun:
        raise IncompatibleCheckpoint(
            "megatron-core has put its own strategy in the place of fastckpt's: "
            f"{checkpoint_dir!r} was not saved by fastckpt"
        )
    if begun == 0 and request is None:
        _look(checkpoint_dir)
    elif begun == 0:
        request.add_finalize_fn(lambda: _look(checkpoint_dir))
    return request


def _look(directory: str) -> None:
    """Checks on the first rank that the files of a committed checkpoint are fastckpt's."""
    if dist.get_rank() == 0:
        stored = stored_metadata(directory).storage_data or {}
        others = {info.relative_path for info in stored.values()}
        others = {name for name in others if not OURS.fullmatch(name)}
        if others:
            raise IncompatibleCheckpoint(
                f"{directory!r} holds {min(others)!r}, which is not by fastckpt: others saved it"
            )


def check_calls() -> None:
    """Raises ImportError if megatron-core passes arguments that the strategies do not know."""
    for ours, theirs in (
        (SaveStrategy, stock.TorchDistSaveShardedStrategy),
        (LoadStrategy, stock.TorchDistLoadShardedStrategy),
    ):
        for name in (
            "save",
            "async_save",
            "load",
            "load_tensors_metadata",
            "load_sharded_metadata",
        ):
            if hasattr(theirs, name):
                given, known = (
                    set(inspect.signature(getattr(kind, name)).parameters)
                    for kind in (theirs, ours)
                )
                if given - known:
                    raise ImportError(
                        f"{theirs.__name__}.{name} has arguments unknown here: "
                        f"{sorted(given - known)}"
                    )
