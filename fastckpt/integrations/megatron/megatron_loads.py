"""Additions to Megatron's own loads by install(): damaged iterations are skipped, and optimizers'
buckets are loaded when parallel sizes have changed.

Responsible for choosing the same iteration on all ranks. Megatron's functions read it, print
messages, and load the state into the model and optimizer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from fastckpt import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.directories import iterations
from fastckpt.integrations.megatron import optimizer as optimizers
from fastckpt.integrations.megatron.load import nothing_complete, telling_damage, whole
from fastckpt.integrations.megatron.optimizer import CONTENT, SHARDING
from fastckpt.integrations.megatron.save import content_metadata, model_state
from fastckpt.integrations.megatron.stored_buckets import MAP
from fastckpt.integrations.megatron.strategies import BACKEND, LoadStrategy
from fastckpt.ranks.per_group import group_of_job, together
from fastckpt.ranks.search import Candidate, Search, Trial
from fastckpt.saving import pipeline
from fastckpt.storage.vanishing import listed_anew

log = logging.getLogger("fastckpt")

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_SAME = (*_SIZES, "world_size", "data_parallel_size", "no_save_optim", "no_save_rng")


class _Look(NamedTuple):
    """The parts of an iteration that are read before any state is loaded."""

    path: str
    metadata: Metadata
    common: dict[str, Any]


def agreed(label: str, act: Callable[[], Any], timeout_s: float) -> Any:
    """Calls a function on all ranks; if it finds damage on one rank, all ranks raise the error.

    Raises:
        CorruptCheckpoint: a rank found damage. PeerFailed: another rank failed, but not because of
            damage.
    """
    agreement = together(group_of_job()).coordinator.begin(label, timeout_s, "nothing was loaded")
    with agreement.failing():
        result, problem = None, ""
        try:
            result = telling_damage(act)
        except CorruptCheckpoint as error:
            problem = str(error)
        agreement.put("read", problem.encode(errors="replace"))
        if agreement.rank == 0:
            problems = [each.decode() for each in agreement.gather("read")]
            bad = [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each]
            agreement.put("verdict", bad[0].encode() if bad else b"")
        verdict = agreement.get("verdict").decode()
    agreement.close()
    if verdict:
        raise CorruptCheckpoint(verdict)
    return result


class AgreeingLoadStrategy(LoadStrategy):
    """A LoadStrategy for all ranks: if one rank finds damage, all ranks raise the error before any
    of them begins the next collective.
    """

    def __init__(self, *, weights_only: bool = True, timeout_s: float = 600.0) -> None:
        super().__init__(weights_only=weights_only, apart=_is_map)
        self._timeout_s = timeout_s

    def load(
        self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore"
    ) -> Any:
        def load() -> Any:
            return LoadStrategy.load(self, sharded_state_dict, checkpoint_dir, async_strategy)

        return agreed(f"load of {os.fspath(checkpoint_dir)!r}", load, self._timeout_s)


def _is_map(key: str) -> bool:
    return key.endswith(f".{MAP}")


class MegatronLoads:
    """Replacements for Megatron's `_load_base_checkpoint`, which reads an iteration, and
    `generate_state_dict`, which returns the state to save or load. Both call Megatron's function.

    Args:
        checkpointing: the module megatron.training.checkpointing, before anything is replaced.
        weights_only, timeout_s: like install()'s.
    """

    def __init__(self, checkpointing: Any, weights_only: bool, timeout_s: float) -> None:
        self._megatron = checkpointing
        self._stock_load = checkpointing._load_base_checkpoint
        self._stock_state = checkpointing.generate_state_dict
        self._stock_read = checkpointing._load_global_dist_base_checkpoint
        self._weights_only, self._timeout_s = weights_only, timeout_s
        self._damaged: dict[Candidate, str] = {}
        self._look: _Look | None = None  # the iteration that the first call has read
        self._is_other = False  # whether Megatron would read another one
        self._is_resharded = False
        self._resharded: tuple[Any, list[Any]] | None = None  # the optimizer to load, the model
        self._has_warned = False

    # ---- The choice of an iteration.

    def load_base_checkpoint(
        self,
        load_dir: Any,
        args: Any,
        rank0: bool = False,
        sharded_state_dict: Any = None,
        checkpointing_context: Any = None,
        **others: Any,
    ) -> Any:
        """Reads the iteration that the tracker names, or if it is damaged the one committed before
        it. Megatron calls this twice: with `rank0` for the common state, then for the complete
        state.
        """
        state = sharded_state_dict
        named = {"checkpointing_context": checkpointing_context, **others}
        if rank0:
            self._damaged, self._resharded, self._is_resharded = {}, None, False
            self._look = self._chosen(load_dir, args)
            return self._presented(self._read(load_dir, args, rank0, state, **named), args)
        first = look = self._look
        if first is None or look is None or sharded_state_dict is None:
            return self._stock_load(load_dir, args, rank0, state, **named)
        while True:
            path = look.path
            try:
                return self._with_buckets(self._read(load_dir, args, rank0, state, **named))
            except CorruptCheckpoint as error:
                number = int(os.path.basename(path).rpartition("_")[2])
                self._damaged[number, path] = str(error)
                log.warning("skipping %s: %s", path, error)
                chosen = self._chosen(load_dir, args)
                if chosen is None:
                    raise
                _check_alike(first, chosen)
                self._look = look = chosen

    def _read(self, load_dir: Any, args: Any, rank0: bool, state: Any, **named: Any) -> Any:
        """Calls Megatron's own function for the chosen iteration."""
        if self._look is None or not self._is_other:
            return self._stock_load(load_dir, args, rank0, state, **named)
        root, name = os.path.split(self._look.path)
        number = int(name.rpartition("_")[2])
        if hasattr(self._megatron, "set_loaded_iteration"):
            self._megatron.set_loaded_iteration(number)
        named = {key: value for key, value in named.items() if value is not None}
        return self._stock_read(root, args, rank0, state, number, False, **named)

    def _chosen(self, load_dir: Any, args: Any) -> _Look | None:
        """Returns the preferred iteration that appears undamaged; None if Megatron alone must
        load.
        """
        self._is_other = False
        kind = getattr(args, "non_persistent_ckpt_type", None)
        if load_dir is None or "://" in str(load_dir) or kind not in (None, "global"):
            return None
        roots = [os.path.realpath(load_dir)]
        if kind == "global":
            given = getattr(args, "non_persistent_global_ckpt_dir", None)
            at = given or os.path.join(load_dir, iterations.NON_PERSISTENT)
            roots.append(os.path.realpath(at))
        asked, named = getattr(args, "ckpt_step", None) or None, ""
        agreement = together(group_of_job()).coordinator.begin(
            "choice of an iteration", self._timeout_s, "nothing was loaded"
        )

        def listed() -> list[Candidate]:
            nonlocal named
            for root in roots:  # this process may be saving there
                pipeline.current().wait_for(root)
            named = _named(roots, asked)
            if _is_left_to_megatron(named):
                return []
            found = iterations.in_order(roots, named)
            if asked is not None:
                found = [each for each in found if each[1] == named]
            left = [each for each in found if each not in self._damaged]
            if not left and not self._damaged and named and asked is None:
                raise nothing_complete(*os.path.split(named))
            if asked is None and left and left[0][1] != named:
                bad = [path for _, path in self._damaged]
                root = os.path.dirname(left[0][1])
                log.warning("%s: %s", root, iterations.disagreement(root, left[0][0], bad))
            return left

        def trial_of(choice: Candidate) -> Trial[_Look]:
            def look() -> _Look:
                return telling_damage(read)

            def read() -> _Look:
                metadata, common = whole(choice[1], self._weights_only)
                return _Look(choice[1], metadata, common)

            return Trial(choice[1], [look], lambda: not iterations.is_complete(choice[1]))

        with agreement.failing():
            search = Search(agreement, listed, trial_of)
            found = listed_anew(search.look)
            # Ranks may read the tracker at different times, so the first rank's value is used.
            if agreement.rank == 0:
                agreement.put("named", os.fsencode(named))
            named = os.fsdecode(agreement.get("named"))
        agreement.close()
        damaged = self._damaged | search.damaged
        if found is None and damaged:
            told = "; ".join(f"{path}: {what}" for (_, path), what in damaged.items())
            raise CorruptCheckpoint(f"all checkpoints in {load_dir!r} are damaged: {told}")
        self._is_other = found is not None and found.path != named
        return found

    # ---- The optimizer's buckets.

    def generate_state_dict(
        self, args: Any, model: Any, optimizer: Any, *given: Any, **named: Any
    ) -> Any:
        """Adds the map of the optimizer's buckets to a state that is saved. Omits the optimizer
        from a state that is loaded, if the map is used to load the optimizer.
        """
        how = named.get("optim_sd_kwargs") or {}
        is_dist = optimizer is not None and not getattr(optimizer, "is_stub_optimizer", False)
        if how.get("is_loading"):
            if self._is_resharded and is_dist:
                self._resharded, optimizer = (optimizer, list(model)), None
            elif is_dist:
                optimizers.prepare_load(optimizer)
            return self._stock_state(args, model, optimizer, *given, **named)
        state = self._stock_state(args, model, optimizer, *given, **named)
        sharding = (how.get("metadata") or {}).get(SHARDING)
        if "optimizer" in state and args.ckpt_format == BACKEND and sharding == "dp_reshardable":
            models = {key: value for key, value in state.items() if key.startswith("model")}
            try:
                state["fastckpt_optimizer_maps"] = optimizers.saved_maps(optimizer, models)
            except IncompatibleCheckpoint as error:
                if not self._has_warned:
                    log.warning(
                        "this checkpoint will load only with the same parallel sizes: %s", error
                    )
                self._has_warned = True
        return state

    def _presented(self, found: Any, args: Any) -> Any:
        """Returns the common state for Megatron. If the parallel sizes have changed and the buckets
        have a map, the state declares the optimizer "fully_reshardable", so that Megatron accepts
        it.
        """
        if self._look is None or not found[0]:
            return found
        state, saved = dict(found[0]), found[0].get("args")
        content = state.get(CONTENT) or {}
        self._is_resharded = (
            content.get(SHARDING) == "dp_reshardable"
            and optimizers.has_maps(self._look.metadata)
            and any(getattr(saved, n, None) != getattr(args, n, None) for n in _SIZES)
        )
        if self._is_resharded:
            state[CONTENT] = {**content, SHARDING: "fully_reshardable"}
        return (state, *found[1:])

    def _with_buckets(self, found: Any) -> Any:
        """Loads the optimizer with the map if Megatron has not read it, and keeps Megatron from
        loading it again.
        """
        if self._resharded is None or self._look is None:
            return found
        optimizer, model = self._resharded
        path, metadata, common = self._look

        @torch.no_grad()
        def load() -> None:
            state = model_state(model, content_metadata("") | (common.get(CONTENT) or {}))
            optimizers.allocate(optimizer)
            optimizers.load_buckets(optimizer, state, path, metadata, self._weights_only)
            optimizers.part_steps(optimizer)

        agreed(f"load of the optimizer from {path!r}", load, self._timeout_s)

        def load_state_dict(_state: Any) -> None:
            del optimizer.load_state_dict

        optimizer.load_state_dict = load_state_dict
        return ({**found[0], "optimizer": {}}, *found[1:])


def _named(roots: Sequence[str], asked: int | None) -> str:
    """Returns the directory that Megatron would read; "" if the trackers name none."""
    root, *others = roots
    number = iterations.tracked(root) if asked is None else asked
    for other in others:
        newer = iterations.tracked(other)
        if isinstance(newer, int) and (not isinstance(number, int) or newer >= number):
            return os.path.join(other, iterations.directory_name(newer))
    if isinstance(number, int):
        number = iterations.directory_name(number)
    return os.path.join(root, number) if number is not None else ""


def _is_left_to_megatron(path: str) -> bool:
    """Whether a directory holds a release, or a checkpoint in a format other than torch_dist."""
    if os.path.basename(path) == iterations.RELEASE or iterations.is_legacy(path):
        return True
    is_config = os.path.isfile(os.path.join(path, iterations.CONFIG))
    return iterations.is_complete(path) and not is_config


def _check_alike(first: _Look, then: _Look) -> None:
    """Raises CorruptCheckpoint if Megatron, which has read one iteration's common state, cannot
    continue with another iteration.
    """
    saved = [look.common.get("args") for look in (first, then)]
    settings = [[getattr(each, name, None) for name in _SAME] for each in saved]
    kinds = [(sorted(map(str, look.common)), look.common.get(CONTENT)) for look in (first, then)]
    if settings[0] != settings[1] or kinds[0] != kinds[1]:
        number = int(os.path.basename(then.path).rpartition("_")[2])
        raise CorruptCheckpoint(
            f"{first.path!r} is damaged, and {then.path!r} was saved with other parallel sizes "
            f"or flags: to load the latter, restart with --ckpt-step {number}"
        )
