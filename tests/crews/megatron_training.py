"""What each rank does in the tests of install(): it trains by a double of megatron.training.

That package is not in megatron-core 0.16.1. The double has the names of it that install() replaces
or calls, and each of them does what the real one of core_v0.16.1 does with its arguments, as far as
it can be seen from outside; models, optimizers and checkpoints are the real megatron-core's. Must
not know what should come of it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import megatron.core.dist_checkpointing as mdc
import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine

from fastckpt.integrations import megatron
from fastckpt.integrations.megatron import load, save, strategies
from fastckpt.integrations.megatron.save import rng_objects, rng_state
from tests.crews import megatron_bodies as bodies
from tests.crews.group_crew import Member
from tests.kit.doubles import file_size_limit
from tests.kit.saves import wait_until

NOT_RUNNING = RerunState.NOT_RUNNING_YET
TRACKER = "latest_checkpointed_iteration.txt"
SWITCHES = """load-main-params-from-ckpt finetune use-checkpoint-args
    use-mp-args-from-checkpoint-args exit-on-missing-checkpoint auto-detect-ckpt-format
    ckpt-convert-update-legacy-dist-opt-format async-save use-persistent-ckpt-worker
    ckpt-fully-parallel-load ckpt-assume-constant-structure dist-ckpt-save-pre-mcore-014
    dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient replication"""
NEGATED = """use-tokenizer-model-from-checkpoint-args ckpt-fully-parallel-save
    strict-fsdp-dtensor-load"""
NUMBERS = """save-wgrads-interval save-dgrads-interval save-retain-interval
    non-persistent-save-interval ckpt-step replication-jump"""
TEXTS = """save load non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir
    pretrained-checkpoint ckpt-convert-save"""
STRICTNESS = """assume_ok_unexpected log_unexpected log_all raise_unexpected raise_all
    return_unexpected return_all ignore_all"""
# Arguments that are not of the group of checkpoint flags, with their defaults.
OTHERS: dict[str, Any] = {
    "log_progress": False,
    "use_distributed_optimizer": True,
    "data_parallel_random_init": False,
    "use_torch_fsdp2": False,
    "num_layers": 2,
    "hidden_size": 32,
    "seq_length": 16,
    "world_size": 2,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "data_parallel_size": 1,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "skipped_train_samples": 0,
    "iteration": 0,
}


def add_checkpointing_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """_add_checkpointing_args of megatron/training/arguments.py."""
    add = parser.add_argument
    for name in SWITCHES.split():
        add(f"--{name}", action="store_true")
    for name in NEGATED.split():
        add(f"--no-{name}", f"--disable-{name}", action="store_false", dest=name.replace("-", "_"))
    for name in NUMBERS.split():
        add(f"--{name}", type=int)
    for name in TEXTS.split():
        add(f"--{name}")
    for name in ("no-save-optim", "no-save-rng", "no-load-optim", "no-load-rng"):
        add(f"--{name}", action="store_true", default=None)
    add("--save-interval", "--persistent-save-interval", type=int)
    add("--replication-factor", type=int, default=2)
    add("--non-persistent-ckpt-type", choices=["global", "local", "in_memory"])
    algorithms = ["fully_parallel", "atomic"]
    add("--non-persistent-local-ckpt-algo", choices=algorithms, default=algorithms[0])
    formats = ["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"]
    add("--ckpt-format", choices=formats, default="torch_dist")
    add("--ckpt-convert-format", choices=formats[:2])
    add("--dist-ckpt-strictness", choices=STRICTNESS.split(), default="assume_ok_unexpected")
    add("--use-dist-ckpt", action="store_true", dest="use_dist_ckpt_deprecated")
    add("--dist-ckpt-format", dest="dist_ckpt_format_deprecated")
    dest = "ckpt_fully_parallel_save_deprecated"
    add("--ckpt-fully-parallel-save", action="store_true", dest=dest)
    return parser


def default_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    return argparse.Namespace(**vars(add_checkpointing_args(parser).parse_args([])), **OTHERS)


class Double:
    """A tree of modules in the place of megatron.training.

    Attributes:
        args: Megatron's arguments, as they were parsed and validated.
        said: the lines of this rank.
        hooked: calls of the hooks into wandb, one_logger and the fault tolerance package.
    """

    def __init__(self) -> None:
        self.args = default_args()
        self.said: list[str] = []
        self.hooked: list[tuple[Any, ...]] = []
        self._is_section_open = False
        self._version: Any = None
        names = ("checkpointing", "training", "global_vars", "arguments", "initialize")
        self.modules = {name: types.ModuleType(f"megatron.training.{name}") for name in names}
        self.checkpointing, self.training = self.modules["checkpointing"], self.modules["training"]
        self._fill()

    def _fill(self) -> None:
        self.modules["global_vars"].get_args = lambda: self.args
        self.modules["arguments"]._add_checkpointing_args = add_checkpointing_args
        note = self._note
        hooks = {
            "wandb_utils": argparse.Namespace(
                on_save_checkpoint_success=self._wandb_saved,
                on_load_checkpoint_success=lambda path, load_dir: note("wandb loaded", path),
            ),
            "ft_integration": argparse.Namespace(
                on_checkpointing_start=self._section_start,
                on_checkpointing_end=self._section_end,
                on_checkpoint_loaded=lambda is_local_chkpt: note("ft loaded", is_local_chkpt),
            ),
            "on_save_checkpoint_start": lambda async_save: {"async": async_save},
            "on_save_checkpoint_success": lambda metrics, async_save: note("one_logger", metrics),
            "maybe_save_dataloader_state": lambda it, iteration, path: (
                path and note("loader saved", iteration, path)
            ),
            "set_loaded_iteration": lambda value: note("loaded iteration", value),
            "update_num_microbatches": lambda consumed_samples, verbose: note(
                "microbatches", consumed_samples
            ),
            "set_checkpoint_version": self._set_version,
            "check_checkpoint_args": self._check_args,
            "print_rank_0": self._print_rank_0,
            "is_last_rank": lambda: dist.get_rank() == dist.get_world_size() - 1,
            "load_args_from_checkpoint": self._load_args,
            "save_checkpoint": self._stock,
            "load_checkpoint": self._stock,
        }
        vars(self.checkpointing).update(hooks)
        self.modules["initialize"].load_args_from_checkpoint = self._load_args
        vars(self.training).update(
            save_checkpoint=self._stock,
            load_checkpoint=self._stock,
            setup_model_and_optimizer=self._setup,
            maybe_finalize_async_save=self._finalize,
            append_to_progress_log=self._append_to_progress_log,
        )

    def _note(self, *what: Any) -> None:
        self.hooked.append(what)

    def _stock(self, *_: Any, **__: Any) -> None:
        raise AssertionError("Megatron's own was called")

    def _print_rank_0(self, message: str) -> None:
        if dist.get_rank() == 0:
            self.said.append(message)

    def _set_version(self, value: Any) -> None:
        assert self._version in (None, value), "checkpoint versions do not match"
        self._version = value

    def _check_args(self, saved: Any) -> None:
        for name in ("num_layers", "hidden_size"):
            assert getattr(saved, name) == getattr(self.args, name)

    def _wandb_saved(self, path: str, tracker: str, save_dir: str, iteration: int) -> None:
        assert os.path.isfile(tracker), "artifact.add_file needs the file"
        assert (Path(path) / ".metadata").is_file()
        self._note("wandb saved", os.path.relpath(path, save_dir), iteration)
        assert threading.current_thread() is threading.main_thread()

    def _section_start(self) -> None:
        assert not self._is_section_open, "a section is begun once"
        self._is_section_open = True

    def _section_end(self, is_async_finalization: bool) -> None:
        assert self._is_section_open
        self._is_section_open = False
        if not is_async_finalization:
            self._note("ft saved")

    def _append_to_progress_log(self, string: str, barrier: bool = True) -> None:
        if self.args.save is None:
            return
        if barrier:
            dist.barrier()
        if dist.get_rank() == 0:
            now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
            with open(os.path.join(self.args.save, "progress.txt"), "a") as file:
                file.write(f"{now}\tJob ID: \t# GPUs: {self.args.world_size}\t{string}\n")

    def _load_args(
        self, args: Any, load_arg: str = "load", checkpointing_context: Any = None
    ) -> Any:
        """As far as _load_base_checkpoint(rank0=True) chooses the iteration."""
        load_dir = getattr(args, load_arg)
        if load_dir is None:
            self._print_rank_0("No load directory specified, using provided arguments.")
            return args
        iteration, tracker = -1, os.path.join(load_dir, TRACKER)
        if os.path.isfile(tracker):
            iteration = int(Path(tracker).read_text())
        if getattr(args, "ckpt_step", None):
            iteration = args.ckpt_step
        if iteration == -1:
            return args
        state = mdc.load_common_state_dict(os.path.join(load_dir, f"iter_{iteration:07d}"))
        args.iteration = state["iteration"]
        return args, state["args"]

    def _finalize(self, blocking: bool = False, terminate: bool = False) -> None:
        self._note("stock finalized", blocking, terminate)

    # What pretrain() calls, by the names in its module.

    def _setup(self, *parts: Any, checkpointing_context: Any = None) -> Any:
        self.args.iteration, self.flops = 0, 0
        if self.args.load is not None or self.args.pretrained_checkpoint is not None:
            self.args.iteration, self.flops = self.training.load_checkpoint(
                *parts,
                checkpointing_context=checkpointing_context,
                skip_load_to_model_and_opt=self.args.use_torch_fsdp2
                and self.args.ckpt_format == "torch_dist",
            )
        return parts

    def save_checkpoint_and_time(
        self, parts: Any, iteration: int, non_persistent_ckpt: bool = False
    ) -> None:
        self.args.consumed_train_samples = 8 * iteration
        self.training.save_checkpoint(
            iteration,
            *parts,
            10 * iteration,
            {},
            non_persistent_ckpt=non_persistent_ckpt,
            train_data_iterator=None,
            preprocess_common_state_dict_fn=self._preprocess_common,
        )
        if self.args.log_progress and not non_persistent_ckpt:
            if self.args.async_save and dist.get_rank() == 0:  # a small save may be this fast
                told = f"successfully saved checkpoint from iteration {iteration:7d} "
                wait_until(lambda: any(told in line for line in self.said), told)
            prefix = "Saving async checkpoint" if self.args.async_save else "Saved checkpoint"
            self.training.append_to_progress_log(
                f"{prefix}\tIteration: {iteration}\tJob throughput: 0.0 TFLOP/s/GPU\tCumulative "
                f"throughput: 0.0 TFLOP/s/GPU\tFloating-point operations: {10 * iteration:.2e}\t"
                "Tokens (in billions): 0.00"
            )

    def _preprocess_common(self, common: Any) -> Any:
        self._note("common state compared")
        return common

    def finalize(self, blocking: bool, terminate: bool = False) -> None:
        """As pretrain() and train() do."""
        ft = self.checkpointing.ft_integration
        ft.on_checkpointing_start()
        self.training.maybe_finalize_async_save(blocking=blocking, terminate=terminate)
        ft.on_checkpointing_end(is_async_finalization=True)


@contextlib.contextmanager
def installed(**options: Any) -> Iterator[tuple[Double, Any]]:
    """A double in which install() was called, and what that returned."""
    double = Double()
    tree = {f"megatron.training.{name}": module for name, module in double.modules.items()}
    with mock.patch.dict(sys.modules, {"megatron.training": types.ModuleType("t"), **tree}):
        yield double, megatron.install(**options)


@functools.cache
def parts() -> tuple[Any, Any, Any]:
    """The model chunks, the optimizer and the schedule of this rank."""
    model, optimizer, scheduler = bodies.ready(2, 1)
    for _, one in megatron.optimizer.distributed(optimizer):  # as Megatron does by default
        one.data_parallel_group_gloo = one.data_parallel_group
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
    seeds = {float(seed): torch.Generator().manual_seed(seed) for seed in range(40)}
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
        script: ("save", iteration, is non-persistent), ("setup",), ("load_args",), ("poll",),
            ("end",), ("mark", value), ("do", function of the double).
        options: install()'s.
    """
    results: list[Any] = []
    with installed(**options) as (double, _saves):
        vars(double.args).update(given)
        for act, *more in script:
            try:
                results.append(_act(double, act, *more))
            except (Exception, SystemExit) as error:
                results.append(error)
        dist.barrier()
    return {"results": results, "said": double.said, "hooked": double.hooked}


def _act(double: Double, act: str, *more: Any) -> Any:
    if act == "save":
        double.save_checkpoint_and_time(parts(), *more)
        return None
    if act == "setup":
        double.training.setup_model_and_optimizer(*parts())
        return (double.args.iteration, double.flops), marks()
    if act == "load_args":
        double.modules["initialize"].load_args_from_checkpoint(double.args)
        return double.args.iteration
    if act == "mark":
        mark(*more)
        return None
    if act == "args":
        vars(double.args).update(*more)
        return None
    if act == "do":
        return more[0](double, *more[1:])
    double.finalize(blocking=act == "end", terminate=act == "end")
    dist.barrier()
    return None


def progress(double: Double) -> list[str]:
    """What progress.txt says, without times and throughputs."""
    path = Path(double.args.save, "progress.txt")
    lines = path.read_text().splitlines() if path.exists() else []
    return [" ".join(line.split("\t")[3:5]) for line in lines]


def save_held(double: Double, iteration: int) -> tuple[list[str], list[str]]:
    """The lines and the progress while a save has begun and has not committed."""
    go = threading.Event()
    commit = strategies.Writer.commit

    def held(self: Any, *given: Any) -> Any:
        assert go.wait(60)
        return commit(self, *given)

    with mock.patch.object(strategies.Writer, "commit", held):
        double.save_checkpoint_and_time(parts(), iteration)
        double.finalize(blocking=False)
        seen = list(double.said), progress(double)
        dist.barrier()
        go.set()
        double.finalize(blocking=True)
    dist.barrier()
    return seen


def save_on_full_disk(double: Double, iteration: int) -> None:
    """A save that fails on the last rank."""
    full: Callable[[], Any] = contextlib.nullcontext
    if dist.get_rank() == dist.get_world_size() - 1:
        full = functools.partial(file_size_limit, 4096)
    with full():
        double.save_checkpoint_and_time(parts(), iteration)
        double.finalize(blocking=True)
    dist.barrier()


def rerun_requested(_double: Double, value: bool | None) -> bool:
    """Puts Megatron's machine for steps that are run again into a state, or asks for it."""
    machine = get_rerun_state_machine()
    machine.mode = RerunMode.VALIDATE_RESULTS
    if value is not None:
        machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT if value else NOT_RUNNING
        machine.rerun_requested = value
    return bool(machine.rerun_requested)


def load_asking_for_more(double: Double) -> Any:
    """Loads into a model that asks for a tensor which no checkpoint has."""
    model_state = load.model_state

    def more(*given: Any) -> Any:
        state = model_state(*given)
        state["model"]["more"] = mdc.ShardedTensor.from_rank_offsets(
            "more", torch.zeros(2), replica_id=(0, 0, dist.get_rank())
        )
        return state

    with mock.patch.object(load, "model_state", more):
        return double.training.load_checkpoint(*parts())


def save_more(double: Double, iteration: int) -> None:
    """Saves a model that has a tensor more."""
    model_state = save.model_state

    def more(*given: Any) -> Any:
        state = model_state(*given)
        state["model"]["more"] = mdc.ShardedTensor.from_rank_offsets(
            "surplus", torch.zeros(2), replica_id=(0, 0, dist.get_rank())
        )
        return state

    with mock.patch.object(save, "model_state", more):
        double.save_checkpoint_and_time(parts(), iteration)


def validation(double: Double) -> Any:
    """Whether Megatron was asked to look whether the ranks' shards fit together."""
    with mock.patch.object(mdc, "load", side_effect=mdc.load) as loading:
        double.training.load_checkpoint(*parts())
    return loading.call_args.kwargs["validate_access_integrity"]


def load_as_second_replica(double: Double, iteration: int) -> dict[str, float]:
    """Loads random numbers which Megatron has saved of two data parallel ranks."""
    states = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        states.append(rng_state())

    def megatrons(_states: Any) -> Any:
        return rng_objects(states)[:1]

    with mock.patch.object(save, "rng_objects", megatrons):
        double.save_checkpoint_and_time(parts(), iteration)
    double.finalize(blocking=True)
    dist.barrier()

    def second(with_context_parallel: bool = False) -> int:
        return int(not with_context_parallel)

    with mock.patch.object(load.parallel_state, "get_data_parallel_rank", second):
        double.training.load_checkpoint(*parts())
    return {"random": marks()["random"]}


def load_and_listen(double: Double) -> tuple[Any, list[str]]:
    """What is loaded, and what is warned of."""
    with mock.patch.object(logging.getLogger("fastckpt"), "warning") as warned:
        found = double.training.load_checkpoint(*parts())
    return found, [call.args[0] % call.args[1:] for call in warned.call_args_list]
