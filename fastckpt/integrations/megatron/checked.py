"""Whether megatron-core really saves and loads through the strategies that it is given.

Responsible for noticing what versions of it do without a word: replacing a strategy by their own,
or calling it in another way. Must not know what strategies do.
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
    """megatron.core.dist_checkpointing.save by fastckpt, which is checked to be by fastckpt.

    From 0.17 on megatron-core replaces a strategy that it does not take by its own, without a word.

    Args:
        sharded_state_dict, checkpoint_dir: as dist_checkpointing.save's.
        sharded_strategy: a SaveStrategy, or Megatron's FullyParallelSaveStrategyWrapper around one;
            default: a new SaveStrategy. What its first save has left in the directory is looked at
            too, when that is committed.
        options: the other arguments of dist_checkpointing.save.

    Returns:
        An AsyncRequest with async_sharded_save=True, else None.

    Raises:
        IncompatibleCheckpoint: Megatron has saved by a strategy of its own.
        CheckpointError: of the save.
    """
    strategy = SaveStrategy() if sharded_strategy is None else sharded_strategy
    ours = getattr(strategy, "base_strategy", strategy)
    if not isinstance(ours, SaveStrategy):
        raise TypeError(f"sharded_strategy is a {type(ours).__name__}, must be a SaveStrategy")
    begun = ours.begun
    request = dist_checkpointing.save(sharded_state_dict, checkpoint_dir, strategy, **options)
    if ours.begun == begun:
        raise IncompatibleCheckpoint(
            "megatron-core has put its own strategy in the place of fastckpt's: what is in "
            f"{checkpoint_dir!r} was not saved by fastckpt"
        )
    if begun == 0 and request is None:
        _look(checkpoint_dir)
    elif begun == 0:
        request.add_finalize_fn(lambda: _look(checkpoint_dir))
    return request


def _look(directory: str) -> None:
    """Whether the files of a committed checkpoint are fastckpt's; the first rank looks."""
    if dist.get_rank() == 0:
        stored = stored_metadata(directory).storage_data or {}
        others = {info.relative_path for info in stored.values()}
        others = {name for name in others if not OURS.fullmatch(name)}
        if others:
            raise IncompatibleCheckpoint(f"{directory!r} holds {min(others)!r}, not by fastckpt")


def check_calls() -> None:
    """Refuses a megatron-core that calls strategies in another way than they are made for.

    Raises:
        ImportError: naming the arguments in question.
    """
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
                    raise ImportError(f"{theirs.__name__}.{name} has {sorted(given - known)}")
