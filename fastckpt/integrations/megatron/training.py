"""Puts save_checkpoint and load_checkpoint where Megatron's training loop calls its own.

Responsible for the translation of Megatron's arguments.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine

from fastckpt.directories import iterations
from fastckpt.integrations import require
from fastckpt.integrations.megatron import flag_support
from fastckpt.integrations.megatron.load import LoadRequest, Restored, restore
from fastckpt.integrations.megatron.reports import Reports
from fastckpt.integrations.megatron.save import chunks, refuse_modelopt, save_checkpoint
from fastckpt.integrations.megatron.saves import Saves
from fastckpt.saving.handle import InnerHandle

log = logging.getLogger("fastckpt")

_CHECKPOINTING, _TRAINING = "megatron.training.checkpointing", "megatron.training.training"
_REPLACED = {
    _CHECKPOINTING: ("save_checkpoint", "load_checkpoint", "load_args_from_checkpoint"),
    _TRAINING: (
        "save_checkpoint",
        "load_checkpoint",
        "setup_model_and_optimizer",
        "maybe_finalize_async_save",
        "append_to_progress_log",
    ),
}
# Groups that Megatron 0.19 passes, and the functions that return the same ones.
_GROUPS: dict[str, Callable[[], Any]] = {
    "tp_group": parallel_state.get_tensor_model_parallel_group,
    "pp_group": parallel_state.get_pipeline_model_parallel_group,
    "dp_group": parallel_state.get_data_parallel_group,
    "dp_cp_group": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    "expt_dp_group": parallel_state.get_expert_data_parallel_group,
}
_RERUN = "rerun_state_machine"


def install(
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    on_error: str = "warn",
    fence: str = "call",
    timeout_s: float = 600.0,
) -> Saves:
    """Makes Megatron's pretrain() save and load by fastckpt. Call it before pretrain().

    Megatron's checkpoint flags are obeyed, or the program ends before training begins, with a
    NotImplementedError that names those which cannot be: docs/megatron.md lists them all.
    Saves are asynchronous, also without `--async-save`; pretrain() waits for them before it ends.

    Args:
        keep_last, keep_every, on_error, fence, timeout_s: as save_checkpoint's, the last
            for loads, too; but on_error is "warn" by default: a failed save does not end training.

    Returns:
        The Saves of the run. A training loop of your own calls its wait() at the end, or Megatron's
        maybe_finalize_async_save(blocking=True).

    Raises:
        ImportError: megatron.training cannot be imported or lacks a function that is replaced, or
            megatron-core is newer than this module knows. Nothing was replaced.
    """
    require("megatron-core", "0.16.1", "0.20", f"{__name__}.install()")
    modules = {name: _training_module(name) for name in _REPLACED}
    global_vars = _training_module("megatron.training.global_vars")
    for name, module in modules.items():
        missing = [each for each in _REPLACED[name] if not callable(getattr(module, each, None))]
        if missing:
            raise ImportError(f"{name} has no {' and no '.join(missing)} to replace")
    reports = Reports(
        modules[_CHECKPOINTING], modules[_TRAINING].append_to_progress_log, global_vars.get_args
    )
    saves = Saves(reports)
    options = {"on_error": on_error, "fence": fence, "timeout_s": timeout_s}
    options |= {"keep_last": keep_last, "keep_every": keep_every, "saves": saves}
    ours = _Functions(modules[_CHECKPOINTING], modules[_TRAINING], global_vars, options, reports)
    for name, module in modules.items():
        for each in _REPLACED[name]:
            setattr(module, each, getattr(ours, each))
    for name in ("megatron.training.initialize", "megatron.training.arguments"):
        importer: Any = sys.modules.get(name)
        if hasattr(importer, "load_args_from_checkpoint"):  # it was imported there by its name
            importer.load_args_from_checkpoint = ours.load_args_from_checkpoint
    log.info("%s save and load by fastckpt", " and ".join(modules))
    return saves


def _training_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"fastckpt.integrations.megatron.install() needs {name}: before 0.17 it is not in the "
            "megatron-core package but only in Megatron-LM's repository; put that on PYTHONPATH "
            f"({error})"
        ) from error


def _known_by_megatron() -> list[argparse.Action]:
    """Returns the checkpoint flags of the Megatron that is installed."""
    arguments = _training_module("megatron.training.arguments")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    arguments._add_checkpointing_args(parser)
    return parser._actions


def _check_others(others: dict[str, Any]) -> None:
    """Refuses arguments that later versions of Megatron pass, unless they ask for the usual."""
    for name, value in others.items():
        if value is None or value is False or value == "":
            continue
        usual = _GROUPS.get(name)
        ranks = dist.get_process_group_ranks
        if usual is None or ranks(value) != ranks(usual()):
            raise NotImplementedError(
                f"{name} is {value!r}: fastckpt saves and loads for Megatron's own groups only"
            )


def _holds_checkpoint(root: str | None) -> bool:
    """Whether there is anything to load in a directory, as the first rank finds it."""
    found = [root is not None and dist.get_rank() == 0 and bool(iterations.candidates(root))]
    dist.broadcast_object_list(found, src=0)
    return bool(found[0])


class _Functions:
    """Functions that take the place of Megatron's, under their names. The modules given are as they
    were before anything was replaced; the options are save_checkpoint's.
    """

    def __init__(
        self,
        checkpointing: Any,
        training: Any,
        global_vars: Any,
        options: dict[str, Any],
        reports: Reports,
    ) -> None:
        self._megatron, self._get_args = checkpointing, global_vars.get_args
        self._options, self._reports = options, reports
        self._saves: Saves = options["saves"]
        self._stock_setup = training.setup_model_and_optimizer
        self._stock_finalize = training.maybe_finalize_async_save
        self._stock_load_args = checkpointing.load_args_from_checkpoint
        self._checked: Any = None  # Megatron's arguments, once checked

    def setup_model_and_optimizer(self, *given: Any, **named: Any) -> Any:
        """Checks Megatron's arguments, calls its own function, then checks the model."""
        args = self._args()
        made = self._stock_setup(*given, **named)
        if args.save is not None:
            refuse_modelopt(chunks(made[0]))
        return made

    def append_to_progress_log(self, *given: Any, **named: Any) -> None:
        """Calls Megatron's own; for "Saved checkpoint", once that is so."""
        self._reports.append_to_progress_log(*given, **named)

    def maybe_finalize_async_save(self, blocking: bool = False, terminate: bool = False) -> None:
        """Waits for fastckpt's saves if `blocking`, then calls Megatron's own function."""
        if blocking:
            if not self._saves.is_idle:
                self._reports.say(
                    "Unfinalized async checkpoint saves. Finalizing them synchronously now."
                )
            self._saves.wait()
            self._reports.wait()
        self._reports.tell_committed()
        self._stock_finalize(blocking=blocking, terminate=terminate)

    def load_args_from_checkpoint(
        self, args: Any, load_arg: str = "load", checkpointing_context: Any = None
    ) -> Any:
        """Calls Megatron's own for the iteration that will be loaded, whatever the tracker says."""
        root, asked = getattr(args, load_arg), getattr(args, "ckpt_step", None)
        found = [] if root is None or "://" in root else iterations.candidates(root)
        if found and not asked and os.path.basename(found[0][1]) != iterations.RELEASE:
            args.ckpt_step = found[0][0]
        try:
            return self._stock_load_args(args, load_arg, checkpointing_context)
        finally:
            args.ckpt_step = asked

    def save_checkpoint(
        self,
        iteration: int,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        num_floating_point_operations_so_far: int,
        checkpointing_context: Any = None,
        non_persistent_ckpt: bool = False,
        train_data_iterator: Any = None,
        preprocess_common_state_dict_fn: Any = None,
        **others: Any,
    ) -> None:
        """Saves by fastckpt, as Megatron's arguments say."""
        _check_others(others)
        args = self._args()
        self._reports.tell_committed()
        directory, options = args.save, dict(self._options)
        options["save_retain_interval"] = getattr(args, "save_retain_interval", None)
        if non_persistent_ckpt:
            directory = _non_persistent(args, args.save)
            options |= {"keep_last": 1, "keep_every": None, "save_retain_interval": None}
        rerun = get_rerun_state_machine().state_dict(
            data_iterator=train_data_iterator, ckpt_format=args.ckpt_format
        )
        with self._reports.saving(iteration, directory) as begun:
            self._megatron.maybe_save_dataloader_state(
                train_data_iterator, iteration, getattr(args, "dataloader_save", None)
            )
            is_stub = getattr(optimizer, "is_stub_optimizer", False)
            resharding = getattr(args, "dist_ckpt_optim_fully_reshardable", False)
            handle = save_checkpoint(
                iteration,
                model,
                None if args.no_save_optim or is_stub else optimizer,
                None if args.no_save_optim else opt_param_scheduler,
                num_floating_point_operations_so_far,
                save=directory,
                preprocess_common_state_dict_fn=preprocess_common_state_dict_fn,
                args=args,
                extra={_RERUN: rerun} if rerun else None,
                save_rng=not args.no_save_rng,
                distrib_optim_sharding_type="fully_reshardable" if resharding else "dp_reshardable",
                distrib_optim_fully_reshardable_mem_efficient=getattr(
                    args, "distrib_optim_fully_reshardable_mem_efficient", False
                ),
                **options,
            )
            begun(cast(InnerHandle, handle))

    def load_checkpoint(
        self,
        ddp_model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        load_arg: str = "load",
        strict: bool = True,
        checkpointing_context: Any = None,
        skip_load_to_model_and_opt: bool = False,
        **others: Any,
    ) -> tuple[int, int]:
        """Loads by fastckpt, as Megatron's arguments say."""
        _check_others(others)
        args = self._args()
        if skip_load_to_model_and_opt:
            raise NotImplementedError("skip_load_to_model_and_opt is set: fastckpt cannot skip it")
        root = self._root(args, load_arg)
        found = Restored()
        with_optimizer = not (args.finetune or args.no_load_optim)
        if root is not None:
            request = self._request(args, root, strict)
            found = restore(
                ddp_model,
                optimizer if with_optimizer else None,
                opt_param_scheduler if with_optimizer else None,
                request,
            )
        if root is None or found.path is None:
            self._reports.missing(root)
            if args.exit_on_missing_checkpoint:
                self._reports.say(">> '--exit-on-missing-checkpoint' set ... exiting. <<")
                sys.exit(1)
            return 0, 0
        iteration = 0 if args.finetune or found.is_release else found.iteration
        self._take_over(args, found)
        if optimizer is not None and (not with_optimizer or found.is_release):
            optimizer.reload_model_params()
        self._reports.loaded(root, found.path, iteration)
        flops = found.common.get("num_floating_point_operations_so_far", 0)
        return iteration, int(flops)

    def _args(self) -> Any:
        """Returns Megatron's arguments, checked."""
        args = self._get_args()
        if self._checked is not args:
            without_effect = flag_support.check(args, _known_by_megatron())
            interval = getattr(args, "save_retain_interval", None)
            if interval is not None and self._options["keep_last"] is not None:
                raise NotImplementedError(
                    f"--save-retain-interval is {interval}, and install() was called with "
                    f"keep_last={self._options['keep_last']}: only one of them can say which "
                    "iterations stay"
                )
            if without_effect and dist.is_initialized() and dist.get_rank() == 0:
                log.info("under fastckpt these have no effect: %s", ", ".join(without_effect))
            self._checked = args
        return args

    def _root(self, args: Any, load_arg: str) -> str | None:
        """Returns the run's directory or, if that has no checkpoint, the pretrained one's."""
        root: str | None = getattr(args, load_arg)
        pretrained: str | None = getattr(args, "pretrained_checkpoint", None)
        if pretrained is None or _holds_checkpoint(root):
            return root
        self._reports.say(
            f"Checkpoint file not found in load directory {root} attempting to finetune with "
            f"checkpoint in {pretrained}"
        )
        if not _holds_checkpoint(pretrained):
            raise FileNotFoundError(
                "No checkpoint found in load directory or pretrained directory: "
                f"{root!r}, {pretrained!r}"
            )
        args.finetune = True
        return pretrained

    def _request(self, args: Any, root: str, strict: bool) -> LoadRequest:
        is_global = getattr(args, "non_persistent_ckpt_type", None) == "global"
        return LoadRequest(
            load=root,
            iteration=getattr(args, "ckpt_step", None) or None,
            non_persistent=_non_persistent(args, root) if is_global else None,
            strict=strict,
            strictness=getattr(args, "dist_ckpt_strictness", "assume_ok_unexpected"),
            validate=getattr(args, "ckpt_load_validate_sharding_integrity", True),
            load_rng=not (args.finetune or args.no_load_rng),
            timeout_s=self._options["timeout_s"],
            others=lambda common: _rerun_state(args, common),
            trying=lambda number, path: self._reports.trying(root, number, path),
        )

    def _take_over(self, args: Any, found: Restored) -> None:
        """Gives Megatron's own variables what the checkpoint has for them."""
        megatron, common = self._megatron, found.common
        if hasattr(megatron, "set_loaded_iteration"):
            megatron.set_loaded_iteration(found.iteration)
        megatron.set_checkpoint_version(common.get("checkpoint_version", 0))
        saved = common.get("args")
        if saved is not None and not args.finetune:
            megatron.check_checkpoint_args(saved)
            for name in ("consumed_train_samples", "skipped_train_samples"):
                setattr(args, name, getattr(saved, name, 0))
            args.consumed_valid_samples = getattr(saved, "consumed_valid_samples", 0)
            megatron.update_num_microbatches(
                consumed_samples=args.consumed_train_samples, verbose=True
            )
        else:
            self._reports.say("could not find arguments in the checkpoint ...")
        self._reports.say(f" checkpoint version {common.get('checkpoint_version', 0)}")
        if _RERUN in _rerun_state(args, common):
            get_rerun_state_machine().load_state_dict(common[_RERUN])


def _non_persistent(args: Any, root: str) -> str:
    given: str | None = getattr(args, "non_persistent_global_ckpt_dir", None)
    return given or os.path.join(root, iterations.NON_PERSISTENT)


def _rerun_state(args: Any, common: dict[str, Any]) -> dict[str, Any]:
    """Returns what to load of a step that is to be run again; nothing on another parallelism."""
    machine, saved = get_rerun_state_machine(), common.get("args")
    sizes = ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
    is_same = all(
        getattr(saved, name, None) == getattr(args, name, None)
        for name in (*sizes, "data_parallel_size")
    )
    if args.finetune or not is_same or not machine.validate_state_dict(common.get(_RERUN)):
        return {}
    return {_RERUN: machine.state_dict(data_iterator=None, ckpt_format="torch_dist", force=True)}
