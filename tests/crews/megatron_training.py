"""What each rank does in the tests of install(): it trains by a double of megatron.training.

That package is not in megatron-core 0.16.1. The double has the names of it that install() puts in
place, and functions around them that do what those of core_v0.16.1 do, as far as checkpoints are
concerned; models, optimizers, strategies and the queue are the real megatron-core's. Must not know
what should come of it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import megatron.core.dist_checkpointing as mdc
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import async_utils as core_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from fastckpt.integrations import megatron
from fastckpt.integrations.megatron.calls_queue import Awaited, Queue
from fastckpt.integrations.megatron.save import chunks, content_metadata, rng_objects, rng_state
from fastckpt.integrations.megatron.save import set_rng_state as set_rng
from fastckpt.saving.handle import InnerHandle
from tests.crews import megatron_bodies as bodies
from tests.crews.group_crew import Member
from tests.kit.doubles import file_size_limit
from tests.kit.options import gathered
from tests.kit.saves import wait_until

TRACKER = "latest_checkpointed_iteration.txt"
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def default_args(tp: int) -> argparse.Namespace:
    return argparse.Namespace(
        save=None,
        load=None,
        ckpt_step=None,
        ckpt_format="torch_dist",
        async_save=False,
        has_modelopt=False,  # of the double: whether the model has state of NVIDIA ModelOpt's
        ckpt_assume_constant_structure=False,
        ckpt_fully_parallel_save=True,
        ckpt_fully_parallel_load=False,
        dist_ckpt_strictness="assume_ok_unexpected",
        non_persistent_ckpt_type=None,
        non_persistent_global_ckpt_dir=None,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1,
        world_size=2,
        data_parallel_size=2 // tp,
    )


class Double:
    """Modules in the place of megatron.training.checkpointing and .queues.

    Attributes:
        args: Megatron's arguments, as they were parsed.
        said: lines that this rank would print.
        loaded_iteration: as set_loaded_iteration() was told.
    """

    def __init__(self, tp: int = 2) -> None:
        self.args, self.said, self.context = default_args(tp), list[str](), dict[str, Any]()
        self.loaded_iteration: int | None = None
        self.checkpointing: Any = types.ModuleType("megatron.training.checkpointing")
        self.queues: Any = types.ModuleType("megatron.training.async_utils")
        vars(self.checkpointing).update(
            get_default_save_sharded_strategy=serialization.get_default_save_sharded_strategy,
            get_default_load_sharded_strategy=serialization.get_default_load_sharded_strategy,
            generate_state_dict=self._generate_state_dict,
            _load_base_checkpoint=self._load_base_checkpoint,
            _load_global_dist_base_checkpoint=self._load_global_dist_base_checkpoint,
            set_loaded_iteration=lambda value: setattr(self, "loaded_iteration", value),
        )
        vars(self.queues).update(
            AsyncCallsQueue=core_async.AsyncCallsQueue,
            _async_calls_queue=core_async.AsyncCallsQueue(),
        )

    @property
    def queue(self) -> Any:
        return self.queues._async_calls_queue

    def finalize(self, blocking: bool = False) -> list[int]:
        return list(self.queue.maybe_finalize_async_calls(blocking, no_dist=False))

    # megatron/training/checkpointing.py

    def save(self, parts: Any, iteration: int, non_persistent: bool = False) -> None:
        """save_checkpoint()."""
        args, (model, optimizer, scheduler) = self.args, parts
        root = os.path.join(args.save, "non_persistent") if non_persistent else args.save
        path = os.path.join(root, f"iter_{iteration:07d}")
        if dist.get_rank() == 0:
            os.makedirs(path, exist_ok=True)
        dist.barrier()
        metadata = content_metadata("dp_reshardable")
        sharded = {"metadata": metadata}
        state = self.checkpointing.generate_state_dict(
            args,
            chunks(model),
            optimizer,
            scheduler,
            rng_objects([rng_state()])[0],
            iteration=iteration,
            optim_sd_kwargs=sharded,
            model_sd_kwargs=sharded,
        )
        state["num_floating_point_operations_so_far"] = 10 * iteration
        strategy = self.context.get("save_strategy")
        if strategy is None:
            strategy = self.checkpointing.get_default_save_sharded_strategy(args.ckpt_format)
            if args.ckpt_fully_parallel_save:
                group = parallel_state.get_data_parallel_group(with_context_parallel=True)
                constant = args.ckpt_assume_constant_structure
                strategy = FullyParallelSaveStrategyWrapper(strategy, group, constant)
        self.context["save_strategy"] = strategy
        request = mdc.save(
            state,
            path,
            strategy,
            async_sharded_save=args.async_save,
            content_metadata={k: v for k, v in metadata.items() if k != "dp_cp_group"},
        )

        if args.has_modelopt and dist.get_rank() == 0:  # save_sharded_modelopt_state()
            os.makedirs(os.path.join(path, "modelopt_state"))
            Path(path, "modelopt_state", "common.pt").write_bytes(b"its state")

        def move_tracker() -> None:
            Path(root, TRACKER).write_text(str(iteration))
            self.said.append(f"successfully saved {iteration}")

        if args.async_save:
            if dist.get_rank() == 0:
                request.add_finalize_fn(move_tracker)
            self.queue.schedule_async_request(request)
        elif dist.get_rank() == 0:
            move_tracker()
        dist.barrier()

    def _generate_state_dict(
        self,
        args: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        rng: Any,
        iteration: int | None = None,
        optim_sd_kwargs: Any = None,
        model_sd_kwargs: Any = None,
        rerun_state: Any = None,
    ) -> dict[str, Any]:
        state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0}
        if iteration is not None:
            state["iteration"] = iteration
        state["model"] = model[0].sharded_state_dict(**model_sd_kwargs)
        if optimizer is not None:
            state["optimizer"] = optimizer.sharded_state_dict(state, **optim_sd_kwargs)
        if opt_param_scheduler is not None:
            state["opt_param_scheduler"] = opt_param_scheduler.state_dict()
        if rng is not None:
            state["rng_state"] = rng
        return state

    def _load_base_checkpoint(
        self,
        load_dir: str,
        args: Any,
        rank0: bool = False,
        sharded_state_dict: Any = None,
        checkpointing_context: Any = None,
    ) -> Any:
        def tracked(root: str) -> int:
            if not Path(root, TRACKER).is_file():
                return -1
            text = Path(root, TRACKER).read_text().strip()
            if not text.isdecimal():
                raise SystemExit
            return int(text)

        not_persistent = os.path.join(load_dir, "non_persistent")
        newer = tracked(not_persistent) if args.non_persistent_ckpt_type == "global" else -1
        iteration = tracked(load_dir)
        if args.ckpt_step:
            iteration = args.ckpt_step
        self.checkpointing.set_loaded_iteration(iteration)
        if newer != -1 and newer >= iteration:
            load_dir, iteration = not_persistent, newer
        elif iteration == -1:
            return None, "", False, None
        path = os.path.join(load_dir, f"iter_{iteration:07d}")
        os.listdir(path)
        assert mdc.check_is_distributed_checkpoint(path), f"unknown checkpoint format in {path}"
        if not rank0:
            self.said.append(f"loading {iteration}")
        return self.checkpointing._load_global_dist_base_checkpoint(
            load_dir,
            args,
            rank0,
            sharded_state_dict,
            iteration,
            False,
            checkpointing_context=checkpointing_context,
        )

    def _load_global_dist_base_checkpoint(
        self,
        load_dir: str,
        args: Any,
        rank0: bool,
        sharded_state_dict: Any,
        iteration: int,
        release: bool,
        checkpointing_context: Any = None,
    ) -> Any:
        path = os.path.join(load_dir, f"iter_{iteration:07d}")
        if rank0:
            return mdc.load_common_state_dict(path), path, release, "GLOBAL"
        strategy = self.checkpointing.get_default_load_sharded_strategy(path)
        if args.ckpt_fully_parallel_load:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelLoadStrategyWrapper(
                strategy, group, exchange_algo="gather_object"
            )
        checkpointing_context["load_strategy"] = strategy
        state = mdc.load(sharded_state_dict, path, strategy, strict=args.dist_ckpt_strictness)
        return state, path, release, "GLOBAL"

    @torch.no_grad()
    def load(self, parts: Any) -> tuple[int, int]:
        """load_checkpoint()."""
        args, (model, optimizer, scheduler) = self.args, parts
        how = {"checkpointing_context": self.context}
        state, *_ = self.checkpointing._load_base_checkpoint(args.load, args, rank0=True, **how)
        given: dict[str, Any] = {}
        is_alike = False
        if state is not None:
            content = mdc.load_content_metadata(preloaded_state_dict=state)
            sizes = [[getattr(each, name) for name in SIZES] for each in (state["args"], args)]
            is_alike = sizes[0] == sizes[1]
            resharded = DistributedOptimizer.checkpoint_fully_reshardable_formats
            if not is_alike and content["distrib_optim_sharding_type"] not in resharded:
                raise RuntimeError("(TP, PP) mismatch after resume: not supported")
            content["dp_cp_group"] = parallel_state.get_data_parallel_group(
                with_context_parallel=True
            )
            given["sharded_state_dict"] = self.checkpointing.generate_state_dict(
                args,
                chunks(model),
                optimizer,
                scheduler,
                rng_objects([rng_state()])[0] if is_alike else None,
                optim_sd_kwargs={"metadata": content, "is_loading": True},
                model_sd_kwargs={"metadata": content},
                rerun_state=None,
            )
        state, *_ = self.checkpointing._load_base_checkpoint(
            args.load, args, rank0=False, **how, **given
        )
        if state is None:
            return 0, 0
        chunks(model)[0].load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.num_steps = 0
        scheduler.load_state_dict(state["opt_param_scheduler"])
        if is_alike:
            set_rng(state["rng_state"][0])
        dist.barrier()
        return state["iteration"], state["num_floating_point_operations_so_far"]


@contextlib.contextmanager
def in_place(double: Double) -> Iterator[None]:
    """Lets megatron.training be the double in the body."""
    tree = {
        "megatron.training": types.ModuleType("megatron.training"),
        "megatron.training.checkpointing": double.checkpointing,
        "megatron.training.async_utils": double.queues,
    }
    with mock.patch.dict(sys.modules, tree):
        yield


@functools.cache
def parts() -> tuple[Any, Any, Any]:
    """The model chunks, the optimizer and the schedule of this rank."""
    model, optimizer, scheduler = bodies.ready(2, 1)
    return [model], optimizer, scheduler


def weight() -> torch.Tensor:
    return next(iter(parts()[0][0].parameters())).detach()


def state_of(optimizer: Any) -> torch.Tensor:
    ((_, one),) = megatron.optimizer.distributed(optimizer)
    return next(iter(one.optimizer.state.values()))["exp_avg"]  # type: ignore[no-any-return]


def mark(value: float) -> None:
    """Gives weight, optimizer, schedule and random numbers a value that a load will change."""
    weight().fill_(value)
    state_of(parts()[1]).fill_(value)
    parts()[2].num_steps = int(value)
    torch.manual_seed(int(value))


def marks() -> dict[str, float]:
    """The value that each has."""
    seeds = {float(seed): torch.Generator().manual_seed(seed) for seed in range(60)}
    state = torch.get_rng_state()
    seed = [value for value, made in seeds.items() if torch.equal(made.get_state(), state)]
    return {
        "weight": float(weight().flatten()[0]),
        "optimizer": float(state_of(parts()[1]).flatten()[0]),
        "schedule": float(parts()[2].num_steps),
        "random": seed[0] if seed else -1.0,
    }


@bodies.on_the_cpu
def play(
    _member: Member, given: dict[str, Any], script: list[tuple[Any, ...]], options: Any
) -> dict[str, Any]:
    """Plays a script of what pretrain() does, and tells what came of each part of it.

    Args:
        given: Megatron's arguments that differ from their defaults.
        script: ("save", iteration, is non-persistent), ("load",), ("poll",), ("end",),
            ("mark", value), ("args", values), ("do", function of the double).
        options: install()'s; None: Megatron's own code alone.
    """
    bodies.regroup(2, 1)
    parts()
    results: list[Any] = []
    double = Double()
    with in_place(double), mock.patch.object(logging.getLogger("fastckpt"), "warning") as warned:
        if options is not None:
            megatron.install(**gathered(**options))
        vars(double.args).update(given)
        for act, *more in script:
            try:
                results.append(_act(double, act, *more))
            except (Exception, SystemExit) as error:
                results.append(error)
        double.queue.close()
        dist.barrier()
    warnings = [call.args[0] % call.args[1:] for call in warned.call_args_list]
    return {"results": results, "said": double.said, "warned": warnings}


def _act(double: Double, act: str, *more: Any) -> Any:
    if act == "save":
        return double.save(parts(), *more)
    if act == "load":
        found = double.load(parts())
        assert double.loaded_iteration is not None
        return found, marks()
    if act == "mark":
        return mark(*more)
    if act == "args":
        return vars(double.args).update(*more)
    if act == "do":
        return more[0](double, *more[1:])
    return double.finalize(blocking=act == "end")


def save_on_full_disk(double: Double, iteration: int) -> list[int]:
    """A save that fails on the last rank."""
    full: Callable[[], Any] = contextlib.nullcontext
    if dist.get_rank() == dist.get_world_size() - 1:
        full = functools.partial(file_size_limit, 4096)
    with full():
        double.save(parts(), iteration)
        return double.finalize(blocking=True)


def save_without_finalizing(double: Double, iteration: int) -> None:
    """A save whose job is killed when it has committed, before the tracker moves."""
    double.save(parts(), iteration)
    for call in double.queue._calls:
        call.handle.result(60)
        call.functions[:] = []
    double.queue._calls.clear()
    dist.barrier()


@bodies.on_the_cpu
def save_then_load_elsewhere(_member: Member, root: str) -> tuple[Any, list[str]]:
    """TP 2 saves numbered state by Megatron's own loop, TP 1 loads it so."""
    model = bodies.build(2, 1)
    bodies.make_numbered(*model[:2])
    double = Double()
    with in_place(double):
        megatron.install()
        double.args.save = root
        double.save(([model[0]], *model[1:]), 5)
    parts.cache_clear()
    model = bodies.build(1, 1, seed=3)
    double = Double(1)
    with in_place(double):
        megatron.install()
        double.args.load = root
        found = double.load(([model[0]], *model[1:]))
    assert "load_state_dict" not in vars(model[1])
    return found, bodies.wrong_keys(*model[:2])


@bodies.on_the_cpu
def calls_of_saves(
    member: Member, ends: list[list[int]], failing: int | None, options: Any
) -> tuple[list[tuple[int, int]], list[str]]:
    """In which calls saves are finalized, as (save, call), without a collective in any of them.

    Args:
        ends: for each save, after how many calls it ends on each rank.
        failing: the rank on which the first save fails.
    """
    queue = Queue(lambda: None, **gathered(timeout_s=60, **options))
    handles = [InnerHandle(f"save {n}", 0.0, on_error="warn") for n in range(len(ends))]
    seen: list[tuple[int, int]] = []
    errors: list[str] = []
    made = 0

    def finalized(number: int) -> Callable[[], None]:
        return lambda: seen.append((number, made))

    for number, handle in enumerate(handles):
        functions = [Awaited(handle), finalized(number)]
        queue.schedule_async_request(core_async.AsyncRequest(None, (), functions, {}))
    refused = mock.Mock(side_effect=AssertionError("a collective"))
    with contextlib.ExitStack() as stack:
        for name in ("barrier", "all_reduce", "all_gather_object", "broadcast_object_list"):
            stack.enter_context(mock.patch.object(dist, name, refused))
        while queue.get_num_unfinalized_calls() and made < 50:
            for number, handle in enumerate(handles):
                if ends[number][member.rank] == made and not handle.done():
                    if failing == member.rank and number == 0:
                        handle.set_exception(OSError(28, "no space"))
                    else:
                        handle.set_result(handle.stats)
                    call = next(each for each in queue._calls if each.number == number)
                    wait_until(lambda c=call: c.made is not None, "the end is noted")
            made += 1
            try:
                queue.maybe_finalize_async_calls()
            except Exception as error:
                errors.append(f"{made}: {type(error).__name__}: {error}")
    queue.close()
    return seen, errors
