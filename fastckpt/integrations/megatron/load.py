"""load_checkpoint, shaped like Megatron's own.

Responsible for which iteration is loaded, the same on all ranks, and for giving everybody what it
holds. Must not know how bytes are read.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from fastckpt import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.integrations.megatron import fsdp, iterations
from fastckpt.integrations.megatron import optimizer as optimizers
from fastckpt.integrations.megatron.optimizer import SHARDING
from fastckpt.integrations.megatron.state import (
    OWN_RNG,
    RNG,
    chunks,
    content_metadata,
    model_state,
    named,
    rng_objects,
    set_rng_state,
)
from fastckpt.integrations.megatron.strategies import LoadStrategy, stored_common, stored_metadata

log = logging.getLogger("fastckpt")

_DAMAGE = (CorruptCheckpoint, OSError, EOFError, pickle.UnpicklingError)


def load_checkpoint(
    model: Any,
    optimizer: Any = None,
    opt_param_scheduler: Any = None,
    *,
    load: str,
    iteration: int | None = None,
    strict: bool = True,
    load_rng: bool = True,
    weights_only: bool = True,
) -> tuple[int, int]:
    """Loads the newest complete iteration, in place. All ranks call it.

    It may have been saved by stock Megatron, and on other tensor, pipeline and data parallel sizes.
    Into a model in Megatron-FSDP the format fsdp_dtensor is loaded, into others torch_dist.
    Where the newest is damaged or incomplete, or the tracker is, the next older one is taken, with
    a warning; all ranks take the same. A newer non-persistent checkpoint is preferred.

    Args:
        model, optimizer, opt_param_scheduler: as save_checkpoint's; what is None is not loaded.
        load: the run's directory.
        iteration: load this one, and no other.
        strict: whether the model must know all that was saved of it; not used with Megatron-FSDP.
        load_rng: whether random number generators go on where they were; on another parallelism
            they are left alone.
        weights_only: False runs code from the files; as torch.load's.

    Returns:
        (iteration, num_floating_point_operations_so_far); (0, 0) if there is no checkpoint.

    Raises:
        CorruptCheckpoint: there are checkpoints, and none is whole. The model may have been partly
            overwritten.
        IncompatibleCheckpoint, CheckpointingException: it has not what is asked for.
        CheckpointError: there is no such iteration; or another rank failed.
    """
    iteration, common = restore(
        model,
        optimizer,
        opt_param_scheduler,
        load=load,
        iteration=iteration,
        strict=strict,
        load_rng=load_rng,
        weights_only=weights_only,
    )
    return iteration, int(common.get("num_floating_point_operations_so_far", 0))


@torch.no_grad()
def restore(
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    *,
    load: str,
    iteration: int | None,
    strict: bool,
    load_rng: bool,
    weights_only: bool,
) -> tuple[int, dict[str, Any]]:
    """As load_checkpoint, but returns the iteration and all of the common state."""
    found: list[Any] = [_choices(os.path.realpath(load), iteration)]
    dist.broadcast_object_list(found, src=0)
    if iteration is not None and not found[0]:
        raise CheckpointError(f"{load!r} holds no iteration {iteration}")
    failures: list[str] = []
    for number, path in found[0]:
        loading = _Loading(path, model, optimizer, opt_param_scheduler, weights_only)
        failure = _together(loading.look) or _together(loading.read)
        if failure is None:
            loading.put(strict, load_rng)
            return number, loading.common
        failures.append(f"{path}: {failure}")
        log.warning("%s is damaged, an older one is tried: %s", path, failure)
    if failures:
        raise CorruptCheckpoint("no checkpoint is whole: " + "; ".join(failures))
    return 0, {}


def _choices(root: str, iteration: int | None) -> list[tuple[int, str]]:
    other = os.path.join(root, iterations.NON_PERSISTENT)
    found = iterations.candidates(root)
    if not found or found[0][1] != os.path.join(root, "release"):
        found = sorted(found + iterations.candidates(other), key=lambda choice: -choice[0])
    return [choice for choice in found if iteration in (None, choice[0])]


def _together(act: Callable[[], None]) -> str | None:
    """Does something on all ranks. Returns the damage that any of them met; raises what else."""
    error: BaseException | None = None
    try:
        act()
    except Exception as caught:
        error = caught
    told = (
        None if error is None else (isinstance(error, _DAMAGE), f"{type(error).__name__}: {error}")
    )
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, told)
    failed = [(rank, told) for rank, told in enumerate(outcomes) if told is not None]
    if not failed:
        return None
    if error is not None and not isinstance(error, _DAMAGE):
        raise error
    rank, (is_damage, text) = next((each for each in failed if not each[1][0]), failed[0])
    if not is_damage:
        raise CheckpointError(f"rank {rank}: {text}")
    return f"rank {rank}: {text}"


class _Loading:
    """One attempt to load one directory."""

    def __init__(
        self, path: str, model: Any, optimizer: Any, scheduler: Any, weights_only: bool
    ) -> None:
        self.common: dict[str, Any] = {}
        self._path, self._weights_only = path, weights_only
        self._models, self._optimizer, self._scheduler = chunks(model), optimizer, scheduler
        self._state: Any = None
        self._by_megatron = False  # whether Megatron itself puts the optimizer's state
        self._fsdp: fsdp.Restore | None = None

    def look(self) -> None:
        """Whether what tells the rest is there; without a collective."""
        self._metadata = stored_metadata(self._path)
        if not os.path.isfile(os.path.join(self._path, iterations.CONFIG)):
            if any(key.startswith("model.") for key in self._metadata.state_dict_metadata):
                self._look_at_fsdp()
                return
            raise CorruptCheckpoint(f"{iterations.CONFIG!r} is missing")
        if fsdp.is_wrapped(self._models):
            raise IncompatibleCheckpoint(
                f"{self._path!r} is in the format torch_dist, the model in Megatron-FSDP"
            )
        self.common = stored_common(self._path, self._metadata, self._weights_only)

    def _look_at_fsdp(self) -> None:
        if not fsdp.is_wrapped(self._models):
            raise IncompatibleCheckpoint(
                f"{self._path!r} is in the format fsdp_dtensor or torch_dcp: the former is loaded "
                "into a model in Megatron-FSDP, the latter is not loaded here: give a "
                "fastckpt.integrations.dcp.Reader to torch.distributed.checkpoint.load"
            )
        self.common = fsdp.stored_common(self._path, self._metadata, self._weights_only)
        self._fsdp = fsdp.Restore(
            self._path, self._metadata, self._models, self._optimizer, self._weights_only
        )

    def read(self) -> None:
        if self._fsdp is not None:
            self._fsdp.read()
            self._state = {**self.common, RNG: fsdp.own_rng(self.common)}
            return
        keys = self._metadata.state_dict_metadata
        content = dict(self.common.get("content_metadata") or {})
        content = {**content_metadata(content.get(SHARDING, "")), **content}
        state = model_state(self._models, content)
        buckets: Any = None
        if self._optimizer is not None:
            optimizers.allocate(self._optimizer)
            if content[SHARDING] == "dp_reshardable" and optimizers.has_maps(self._metadata):
                buckets = dict(state)
                state = model_state(self._models, content)
            else:
                self._by_megatron = True
                state["optimizer"] = self._optimizer.sharded_state_dict(
                    dict(state), is_loading=True, metadata=content
                )
        for mine in rng_objects(None):
            if mine.unique_key in keys:
                state[mine.key] = mine
        self._state = dist_checkpointing.load(
            state, self._path, sharded_strategy=LoadStrategy(weights_only=self._weights_only)
        )
        if buckets is not None:
            optimizers.load_buckets(
                self._optimizer, buckets, self._path, self._metadata, self._weights_only
            )

    def put(self, strict: bool, load_rng: bool) -> None:
        """Gives everybody what was read."""
        if self._fsdp is not None:
            self._fsdp.put()
        else:
            self._put_shards(strict)
        if self._scheduler is not None and "opt_param_scheduler" in self._state:
            if hasattr(self._scheduler, "num_steps"):
                self._scheduler.num_steps = 0  # Megatron's goes on by as many as were saved
            self._scheduler.load_state_dict(self._state["opt_param_scheduler"])
        states = self._state.get(OWN_RNG) or self._state.get(RNG)
        if load_rng and states:
            set_rng_state(states[0])
        elif load_rng:
            log.warning("random number generators go on by themselves: parallelism has changed")

    def _put_shards(self, strict: bool) -> None:
        for name, model in named(self._models):
            model.load_state_dict(self._state[name], strict=strict)
        if self._by_megatron:
            with optimizers.steps_known(self._optimizer):
                self._optimizer.load_state_dict(self._state["optimizer"])
        if self._optimizer is not None:
            optimizers.part_steps(self._optimizer)
