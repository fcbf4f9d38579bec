"""load_checkpoint, with the interface of Megatron's own function.

Responsible for choosing the same iteration on all ranks, and for loading it into the model, the
optimizer and the schedule.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from torch.distributed.checkpoint.metadata import Metadata

from fastckpt import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.arguments.checks import check_path
from fastckpt.directories import iterations
from fastckpt.integrations.megatron import optimizer as optimizers
from fastckpt.integrations.megatron.optimizer import SHARDING
from fastckpt.integrations.megatron.save import (
    OWN_RNG,
    RNG,
    chunks,
    content_metadata,
    is_by_modelopt,
    model_state,
    named,
    rng_objects,
    set_rng_state,
)
from fastckpt.integrations.megatron.stored_buckets import MAP
from fastckpt.integrations.megatron.strategies import LoadStrategy, stored_common, stored_metadata
from fastckpt.ranks.per_group import group_of_job, together
from fastckpt.ranks.round import TIMEOUT_S
from fastckpt.ranks.search import Candidate, Search, Trial
from fastckpt.saving import pipeline
from fastckpt.storage.vanishing import listed_anew

log = logging.getLogger("fastckpt")

T = TypeVar("T")

_DAMAGE = (CorruptCheckpoint, FileNotFoundError, EOFError, pickle.UnpicklingError)
_OF_MODELOPT = "modelopt_state"
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# The optimizer's keys that load_buckets() reads.
_BUCKETS = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.")


def telling_damage(act: Callable[[], T]) -> T:
    """Calls a function and returns its result; raises CorruptCheckpoint for any error that shows
    damage.
    """
    try:
        return act()
    except Exception as error:
        if isinstance(error, CorruptCheckpoint) or not _is_damage(error):
            raise
        raise CorruptCheckpoint(f"{type(error).__name__}: {error}") from error


def whole(path: str, weights_only: bool) -> tuple[Metadata, dict[str, Any]]:
    """Returns the metadata and common state of an iteration that appears undamaged, without a
    collective.

    Raises:
        CorruptCheckpoint: it is damaged. Other errors may also mean damage: see telling_damage().
        IncompatibleCheckpoint: it is in another format, or needs weights_only=False.
    """
    metadata = stored_metadata(path)
    if not os.path.isfile(os.path.join(path, iterations.CONFIG)):
        if any(key.startswith("model.") for key in metadata.state_dict_metadata):
            raise IncompatibleCheckpoint(
                f"{path!r} is in the format fsdp_dtensor or torch_dcp: load it with "
                "torch.distributed.checkpoint.load and a fastckpt.integrations.dcp.Reader"
            )
        raise CorruptCheckpoint(f"{iterations.CONFIG!r} is missing")
    return metadata, stored_common(path, metadata, weights_only)


@torch.no_grad()
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
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, int]:
    """Loads the iteration that was committed last, in place. All ranks must call it.

    This is the iteration that the tracker names, or a later non-persistent iteration. Stock
    Megatron may have saved it, and the tensor, pipeline and data parallel sizes may have changed
    since. If an iteration is damaged, all ranks load the one committed before it, with a warning.

    Args:
        model, optimizer, opt_param_scheduler: like save_checkpoint's; None: not loaded.
        load: the run's directory.
        iteration: load only this iteration.
        strict: whether every key that was saved for the model must be in the model.
        load_rng: whether the states of random number generators are restored; they stay unchanged
            if the parallel sizes have changed.
        weights_only: like torch.load's; False runs code from the files.
        timeout_s: the longest time that ranks wait for each other, in seconds.

    Returns:
        (iteration, num_floating_point_operations_so_far); (0, 0) if there is no checkpoint.

    Raises:
        CorruptCheckpoint: all checkpoints are damaged. The model may have been partly overwritten.
        IncompatibleCheckpoint, CheckpointingException: the checkpoint lacks requested state.
        CheckpointError: `iteration` does not exist, or another rank failed.
    """
    how = _How(strict, load_rng, weights_only)

    def trial_of(choice: Candidate) -> Trial[_Loading]:
        number, path = choice
        is_release = os.path.basename(path) == iterations.RELEASE
        steps, schedule = (None, None) if is_release else (optimizer, opt_param_scheduler)
        loading = _Loading(number, path, model, steps, schedule, how)

        def is_gone() -> bool:
            return not (is_release or iterations.is_complete(path))

        # read() runs collectives, so it begins only when all ranks can begin it.
        return Trial(
            path, [partial(_acted, loading, act) for act in (loading.look, loading.read)], is_gone
        )

    agreement = together(group_of_job()).coordinator.begin(
        "load of an iteration", timeout_s, "nothing was loaded"
    )
    with agreement.failing():
        search = Search(agreement, lambda: _found(load, iteration, not search.damaged), trial_of)
        loading = listed_anew(search.look)
    agreement.close()
    if loading is None:
        if search.damaged:
            damage = "; ".join(f"{path}: {what}" for (_, path), what in search.damaged.items())
            raise CorruptCheckpoint(f"all checkpoints in {load!r} are damaged: {damage}")
        return 0, 0
    loading.put()
    if dist.get_rank() == 0:
        log.info("iteration %d was loaded from %s", loading.iteration, loading.path)
    return loading.iteration, int(loading.common.get("num_floating_point_operations_so_far", 0))


def _acted(loading: _Loading, act: Callable[[], None]) -> _Loading:
    """Calls a method of `loading`, and returns `loading`; raises CorruptCheckpoint for all
    damage.
    """
    telling_damage(act)
    return loading


def _found(load: str, iteration: int | None, warns: bool) -> list[Candidate]:
    """Returns the (iteration, directory) pairs that can be loaded, the preferred one first."""
    root = os.path.realpath(check_path("load", load))
    roots = [root, os.path.realpath(os.path.join(load, iterations.NON_PERSISTENT))]
    for each in roots:  # this process may be saving there
        pipeline.current().wait_for(each)
    found, latest = iterations.candidates(*roots), iterations.tracked(root)
    if iteration is not None:
        found = [choice for choice in found if choice[0] == iteration]
        if not found:
            raise CheckpointError(f"{load!r} holds no iteration {iteration}")
    elif found and warns:
        number, path = found[0]
        why = iterations.disagreement(os.path.dirname(path), number)
        if why is not None:
            log.warning("%s: %s", os.path.dirname(path), why)
    elif not found and latest is not None:
        raise nothing_complete(root, latest)
    return found


def nothing_complete(root: str, latest: int | str) -> CheckpointError:
    """Returns the error for a tracker that names an iteration when no iteration is complete."""
    name = latest if isinstance(latest, str) else iterations.directory_name(latest)
    path = os.path.join(root, name)
    if iterations.is_legacy(path):
        return IncompatibleCheckpoint(
            f"{path!r} is in Megatron's format torch, which fastckpt does not load: convert it "
            "with Megatron's --ckpt-convert-format torch_dist, without fastckpt"
        )
    return CorruptCheckpoint(
        f"{iterations.TRACKER} in {root!r} names {name}, but neither this iteration nor any "
        "other is complete. To start from the beginning, pass an empty directory"
    )


def _is_damage(error: BaseException) -> bool:
    """Whether an error shows that an iteration is damaged. A read error does not show damage: the
    iteration may be intact, and loading an older one would lose training steps without need.
    """
    return isinstance(error, _DAMAGE) or (isinstance(error, OSError) and error.errno in _MISSING)


def _is_by_fsdp(model: Any) -> bool:
    return bool(getattr(getattr(model, "ddp_config", None), "use_megatron_fsdp", False))


class _How(NamedTuple):
    """Some of load_checkpoint's arguments."""

    strict: bool
    load_rng: bool
    weights_only: bool


class _Loading:
    """An attempt to load a directory."""

    def __init__(
        self, iteration: int, path: str, model: Any, optimizer: Any, scheduler: Any, how: _How
    ) -> None:
        self.common: dict[str, Any] = {}
        self.iteration, self.path = iteration, path
        self._how, self._weights_only = how, how.weights_only
        self._models, self._optimizer, self._scheduler = chunks(model), optimizer, scheduler
        self._state: Any = None
        self._by_megatron = False  # whether Megatron itself loads the optimizer

    def look(self) -> None:
        """Reads the metadata and the common state, without a collective."""
        has_state = os.path.isdir(os.path.join(self.path, _OF_MODELOPT))
        if has_state and not is_by_modelopt(self._models):
            raise IncompatibleCheckpoint(
                f"{self.path!r} has a directory {_OF_MODELOPT!r} with NVIDIA ModelOpt's state: "
                "load it with Megatron's load_checkpoint, which also works after install()"
            )
        self._metadata, self.common = whole(self.path, self._weights_only)
        if any(_is_by_fsdp(model) for model in self._models):
            raise IncompatibleCheckpoint(
                f"{self.path!r} is in the format torch_dist, which a model in Megatron-FSDP cannot "
                "load"
            )

    def read(self) -> None:
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
        names = set(state)

        def apart(key: str) -> bool:
            if key.endswith(f".{MAP}") or key == OWN_RNG:
                return key not in names
            return buckets is not None and _BUCKETS.match(key) is not None

        self._state = dist_checkpointing.load(
            state,
            self.path,
            sharded_strategy=LoadStrategy(weights_only=self._weights_only, apart=apart),
        )
        if buckets is not None:
            optimizers.load_buckets(
                self._optimizer, buckets, self.path, self._metadata, self._weights_only
            )

    def put(self) -> None:
        """Loads the data that was read into the model, optimizer, schedule and generators."""
        for name, model in named(self._models):
            model.load_state_dict(self._state[name], strict=self._how.strict)
        if self._by_megatron:
            with optimizers.steps_known(self._optimizer):
                self._optimizer.load_state_dict(self._state["optimizer"])
        if self._optimizer is not None:
            optimizers.part_steps(self._optimizer)
        if self._scheduler is not None and "opt_param_scheduler" in self._state:
            if hasattr(self._scheduler, "num_steps"):
                self._scheduler.num_steps = 0  # Megatron's method adds the saved number to this
            self._scheduler.load_state_dict(self._state["opt_param_scheduler"])
        states = self._state.get(OWN_RNG) or self._state.get(RNG)
        load_rng = self._how.load_rng and os.path.basename(self.path) != iterations.RELEASE
        if load_rng and states:
            # With --data-parallel-random-init Megatron saves the states of all data parallel ranks.
            own = parallel_state.get_data_parallel_rank()
            set_rng_state(states[own if own < len(states) else 0])
        elif load_rng:
            log.warning(
                "random number generators are unchanged, because %r has no random state for this "
                "rank: it was saved without random state or with other parallel sizes",
                self.path,
            )
