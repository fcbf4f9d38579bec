"""load_checkpoint, shaped like Megatron's own.

Responsible for choosing the iteration, the same on all ranks, and for giving model, optimizer and
schedule what it holds.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

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

_DAMAGE = (CorruptCheckpoint, FileNotFoundError, EOFError, pickle.UnpicklingError)
_OF_MODELOPT = "modelopt_state"
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# Keys of the optimizer that load_buckets() reads.
_BUCKETS = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.")
# With these values Megatron loads without the keys that a checkpoint lacks.
_LENIENT = ("log_unexpected", "log_all", "ignore_all")


@dataclass(frozen=True)
class LoadRequest:
    """A request to load a checkpoint: which one, what of it, and how strictly.

    Attributes:
        load: the run's directory.
        iteration: load this one and no other; None: the last commit that is whole.
        non_persistent: the directory of non-persistent iterations, of which a later one is
            preferred; None: they are left alone.
        strict: as load_state_dict's.
        strictness: as Megatron's --dist-ckpt-strictness, but no value that returns keys.
        validate: whether Megatron checks that the ranks' shards fit together.
        load_rng: whether random number generators get their saved states.
        weights_only: as torch.load's.
        timeout_s: the longest that ranks wait for each other, in seconds.
        others: returns, given the common state, further sharded state to load, by its name.
        trying: called with each iteration and its directory, before it is read.
    """

    load: str
    iteration: int | None = None
    non_persistent: str | None = None
    strict: bool = True
    strictness: str = "assume_ok_unexpected"
    validate: bool = True
    load_rng: bool = True
    weights_only: bool = True
    timeout_s: float = TIMEOUT_S
    others: Callable[[dict[str, Any]], dict[str, Any]] = lambda common: {}
    trying: Callable[[int, str], None] = lambda number, path: None


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was loaded.

    Attributes:
        iteration: its number; 0 for a release, or if there is no checkpoint.
        path: its directory; None: there is no checkpoint.
        common: its common state, and what LoadRequest.others asked for.
    """

    iteration: int = 0
    path: str | None = None
    common: dict[str, Any] = field(default_factory=dict)

    @property
    def is_release(self) -> bool:
        return self.path is not None and os.path.basename(self.path) == iterations.RELEASE


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
    """Loads the iteration that was committed last, in place. All ranks call it.

    That is the one which the tracker names, unless a higher one was committed after the tracker had
    moved. Stock Megatron may have saved it, on other tensor, pipeline and data parallel sizes. If
    an iteration is damaged, all ranks take the one committed before it, with a warning. A later
    non-persistent checkpoint is preferred.

    Args:
        model, optimizer, opt_param_scheduler: as save_checkpoint's; what is None is not loaded.
        load: the run's directory.
        iteration: load this one, and no other.
        strict: whether the model must know all that was saved of it.
        load_rng: whether random number generators get their saved states; on another parallelism
            they are left alone.
        weights_only: as torch.load's; False runs code from the files.
        timeout_s: the longest that ranks wait for each other, in seconds.

    Returns:
        (iteration, num_floating_point_operations_so_far); (0, 0) if there is no checkpoint.

    Raises:
        CorruptCheckpoint: there are checkpoints, but none is whole. The model may have been partly
            overwritten.
        IncompatibleCheckpoint, CheckpointingException: the checkpoint lacks what is asked for.
        CheckpointError: there is no such iteration, or another rank failed.
    """
    request = LoadRequest(
        load=load,
        iteration=iteration,
        non_persistent=os.path.join(load, iterations.NON_PERSISTENT),
        strict=strict,
        load_rng=load_rng,
        weights_only=weights_only,
        timeout_s=timeout_s,
    )
    found = restore(model, optimizer, opt_param_scheduler, request)
    return found.iteration, int(found.common.get("num_floating_point_operations_so_far", 0))


@torch.no_grad()
def restore(model: Any, optimizer: Any, opt_param_scheduler: Any, request: LoadRequest) -> Restored:
    """Loads in place what a LoadRequest asks for; see load_checkpoint."""
    agreement = together(group_of_job()).coordinator.begin(
        "load of an iteration", request.timeout_s, "nothing was loaded"
    )

    def trial_of(choice: Candidate) -> Trial[_Loading]:
        request.trying(*choice)
        found, path = Restored(*choice), choice[1]
        steps, scheduler = (None, None) if found.is_release else (optimizer, opt_param_scheduler)
        loading = _Loading(found, path, model, steps, scheduler, request)

        def is_gone() -> bool:
            return not (found.is_release or iterations.is_complete(path))

        # The second one runs collectives, so no rank begins it unless all do.
        stages = [partial(_reading, act, loading) for act in (loading.look, loading.read)]
        return Trial(path, stages, is_gone)

    with agreement.failing():
        search = Search(agreement, lambda: _found(request, not search.damaged), trial_of)
        loading = listed_anew(search.look)
    agreement.close()
    if loading is None:
        if search.damaged:
            told = "; ".join(f"{path}: {what}" for (_, path), what in search.damaged.items())
            raise CorruptCheckpoint(f"no checkpoint in {request.load!r} is whole: {told}")
        return Restored()
    found = loading.found
    loading.put(request.load_rng and not found.is_release)
    if dist.get_rank() == 0:
        log.info("iteration %d was loaded from %s", found.iteration, found.path)
    return replace(found, common=loading.common)


def _reading(act: Callable[[], None], loading: _Loading) -> _Loading:
    """Calls a method of `loading`, which it returns; raises CorruptCheckpoint for all damage."""
    try:
        act()
    except Exception as error:
        if not _is_damage(error):
            raise
        raise CorruptCheckpoint(f"{type(error).__name__}: {error}") from error
    return loading


def _found(request: LoadRequest, warns: bool) -> list[Candidate]:
    """Returns the (iteration, directory) pairs that may be loaded, best first."""
    root = os.path.realpath(check_path("load", request.load))
    roots = [root]
    if request.non_persistent is not None:
        roots.append(os.path.realpath(request.non_persistent))
    for each in roots:  # this process may be saving there
        pipeline.current().wait_for(each)
    found, latest = iterations.candidates(*roots), iterations.tracked(root)
    if request.iteration is not None:
        found = [choice for choice in found if choice[0] == request.iteration]
        if not found:
            raise CheckpointError(f"{request.load!r} holds no iteration {request.iteration}")
    elif found and warns:
        number, path = found[0]
        why = iterations.disagreement(os.path.dirname(path), number)
        if why is not None:
            log.warning("%s: %s", os.path.dirname(path), why)
    elif not found and latest is not None:
        raise _nothing_complete(root, latest)
    return found


def _nothing_complete(root: str, latest: int | str) -> CheckpointError:
    """Returns the error for a tracker that names an iteration where none is complete."""
    name = latest if isinstance(latest, str) else iterations.directory_name(latest)
    path = os.path.join(root, name)
    if iterations.is_legacy(path):
        return IncompatibleCheckpoint(
            f"{path!r} is in Megatron's format torch, which is not loaded by fastckpt: convert it "
            "by Megatron's --ckpt-convert-format torch_dist, without fastckpt"
        )
    return CorruptCheckpoint(
        f"{iterations.TRACKER} of {root!r} names {name}, which is not complete, nor is any other "
        "iteration; to begin anew, give an empty directory"
    )


def _is_damage(error: BaseException) -> bool:
    """Whether an error shows that an iteration is not whole. One that could not be read may be
    whole: to load an older one instead would be a step back that nobody asked for.
    """
    return isinstance(error, _DAMAGE) or (isinstance(error, OSError) and error.errno in _MISSING)


def _is_by_fsdp(model: Any) -> bool:
    return bool(getattr(getattr(model, "ddp_config", None), "use_megatron_fsdp", False))


class _Loading:
    """One attempt to load one directory."""

    def __init__(
        self,
        found: Restored,
        path: str,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        request: LoadRequest,
    ) -> None:
        self.common: dict[str, Any] = {}
        self.found = found
        self._path, self._request = path, request
        self._weights_only = request.weights_only
        self._models, self._optimizer, self._scheduler = chunks(model), optimizer, scheduler
        self._state: Any = None
        self._by_megatron = False  # whether Megatron itself loads the optimizer

    def look(self) -> None:
        """Reads the metadata and the common state, without a collective."""
        self._metadata = stored_metadata(self._path)
        if os.path.isdir(os.path.join(self._path, _OF_MODELOPT)) and not is_by_modelopt(
            self._models
        ):
            raise IncompatibleCheckpoint(
                f"{self._path!r} has a directory {_OF_MODELOPT!r}, the state of NVIDIA ModelOpt, "
                "which fastckpt does not restore: load it by Megatron's own load_checkpoint, "
                "without install()"
            )
        if not os.path.isfile(os.path.join(self._path, iterations.CONFIG)):
            if any(key.startswith("model.") for key in self._metadata.state_dict_metadata):
                raise IncompatibleCheckpoint(
                    f"{self._path!r} is in the format fsdp_dtensor or torch_dcp, which is loaded "
                    "by torch.distributed.checkpoint.load with a fastckpt.integrations.dcp.Reader"
                )
            raise CorruptCheckpoint(f"{iterations.CONFIG!r} is missing")
        if any(_is_by_fsdp(model) for model in self._models):
            raise IncompatibleCheckpoint(
                f"{self._path!r} is in the format torch_dist, which a model in Megatron-FSDP does "
                "not load"
            )
        self.common = stored_common(self._path, self._metadata, self._weights_only)

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
        asked, others = set(state), self._request.others(self.common)

        def apart(key: str) -> bool:
            if key.endswith(f".{MAP}") or key == OWN_RNG:
                return key not in asked
            return buckets is not None and _BUCKETS.match(key) is not None

        self._state = dist_checkpointing.load(
            state | others,
            self._path,
            sharded_strategy=LoadStrategy(weights_only=self._weights_only, apart=apart),
            validate_access_integrity=self._request.validate,
            strict=self._request.strictness,
        )
        self.common |= {key: self._state[key] for key in others}
        if buckets is not None:
            optimizers.load_buckets(
                self._optimizer, buckets, self._path, self._metadata, self._weights_only
            )

    def put(self, load_rng: bool) -> None:
        """Gives model, optimizer, schedule and generators what was read."""
        strict = self._request.strict and self._request.strictness not in _LENIENT
        for name, model in named(self._models):
            model.load_state_dict(self._state[name], strict=strict)
        if self._by_megatron:
            with optimizers.steps_known(self._optimizer):
                self._optimizer.load_state_dict(self._state["optimizer"])
        if self._optimizer is not None:
            optimizers.part_steps(self._optimizer)
        if self._scheduler is not None and "opt_param_scheduler" in self._state:
            if hasattr(self._scheduler, "num_steps"):
                self._scheduler.num_steps = 0  # Megatron's adds the number saved to this
            self._scheduler.load_state_dict(self._state["opt_param_scheduler"])
        states = self._state.get(OWN_RNG) or self._state.get(RNG)
        if load_rng and states:
            # With --data-parallel-random-init Megatron saves the states of all data parallel ranks.
            own = parallel_state.get_data_parallel_rank()
            set_rng_state(states[own if own < len(states) else 0])
        elif load_rng:
            log.warning(
                "random number generators stay as they are: %r has no state for this rank, as it "
                "was saved without them or on another parallelism",
                self._path,
            )
