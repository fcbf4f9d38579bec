"""Puts save_checkpoint and load_checkpoint where Megatron's training loop calls its own.

Responsible for the translation of Megatron's arguments. Must not know how a checkpoint is saved or
loaded.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from fastckpt.integrations import require
from fastckpt.integrations.megatron.load import restore
from fastckpt.integrations.megatron.save import save_checkpoint
from fastckpt.integrations.megatron.saves import Saves

log = logging.getLogger("fastckpt")

_MODULES = ("megatron.training.checkpointing", "megatron.training.training")
_NAMES = ("save_checkpoint", "load_checkpoint")
# What Megatron 0.19 passes, and where the same is to be had.
_GROUPS: dict[str, Callable[[], Any]] = {
    "tp_group": parallel_state.get_tensor_model_parallel_group,
    "pp_group": parallel_state.get_pipeline_model_parallel_group,
    "dp_group": parallel_state.get_data_parallel_group,
    "dp_cp_group": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    "expt_dp_group": parallel_state.get_expert_data_parallel_group,
}
# What of Megatron's arguments asks for something that is not here.
_REFUSED = {
    "ckpt_format": ("torch_dist", "fastckpt saves the torch_dist format"),
    "non_persistent_ckpt_type": ("global", "fastckpt saves non-persistent checkpoints globally"),
}


def install(
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    on_error: str = "warn",
    fence: str = "call",
    timeout_s: float = 600.0,
) -> Saves:
    """Makes Megatron's pretrain() save and load by fastckpt. Call it before pretrain(), and wait()
    of what it returns after that.

    `--save`, `--load`, `--ckpt-step`, `--finetune`, `--no-save-optim`, `--no-save-rng`,
    `--no-load-optim`, `--no-load-rng`, `--dist-ckpt-optim-fully-reshardable` and
    `--non-persistent-ckpt-type global` are obeyed. Saves are asynchronous without `--async-save`.

    Args:
        keep_last, keep_every, on_error, fence, timeout_s: as save_checkpoint's. A failed save does
            not end training unless on_error is "raise".

    Returns:
        The Saves of the run.

    Raises:
        ImportError: megatron.training is not importable, lacks the functions that are replaced, or
            megatron-core is newer than those whose calls are known. Nothing was replaced.
    """
    require("megatron-core", "0.16.1", "0.20", f"{__name__}.install()")
    modules = [_training_module(name) for name in _MODULES]
    global_vars = _training_module("megatron.training.global_vars")
    for module in modules:
        missing = [name for name in _NAMES if not callable(getattr(module, name, None))]
        if missing:
            raise ImportError(f"{module.__name__} has no {' and no '.join(missing)} to replace")
    options = {"on_error": on_error, "fence": fence, "timeout_s": timeout_s}
    saves = Saves()
    options |= {"keep_last": keep_last, "keep_every": keep_every, "saves": saves}
    save, load = _save(global_vars, options), _load(global_vars, modules[0])
    for module in modules:
        module.save_checkpoint, module.load_checkpoint = save, load  # type: ignore[attr-defined]
    log.info("%s: %s are fastckpt's", ", ".join(_MODULES), " and ".join(_NAMES))
    return saves


def _training_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"fastckpt.integrations.megatron.install() needs {name}: before 0.17 it is not in the "
            "megatron-core package but only in Megatron-LM's repository, which is to be put on "
            f"PYTHONPATH ({error})"
        ) from error


def _check_others(others: dict[str, Any]) -> None:
    """Refuses what later versions of Megatron pass, unless it says what goes without saying."""
    for name, value in others.items():
        if value is None or value is False or value == "":
            continue
        usual = _GROUPS.get(name)
        ranks = dist.get_process_group_ranks
        if usual is None or ranks(value) != ranks(usual()):
            raise NotImplementedError(
                f"{name}={value!r}: fastckpt knows only Megatron's own groups"
            )


def _save(global_vars: Any, options: dict[str, Any]) -> Any:
    def save(
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
        """Megatron's save_checkpoint, by fastckpt."""
        _check_others(others)
        args = global_vars.get_args()
        for name, (wanted, why) in _REFUSED.items():
            has = getattr(args, name, None) or wanted
            if has != wanted and (name != "non_persistent_ckpt_type" or non_persistent_ckpt):
                raise NotImplementedError(f"{name} is {has!r}: {why}")
        resharding = getattr(args, "dist_ckpt_optim_fully_reshardable", False)
        save_checkpoint(
            iteration,
            model,
            None if args.no_save_optim else optimizer,
            None if args.no_save_optim else opt_param_scheduler,
            num_floating_point_operations_so_far,
            save=args.save,
            non_persistent_ckpt=non_persistent_ckpt,
            args=args,
            save_rng=not args.no_save_rng,
            distrib_optim_sharding_type="fully_reshardable" if resharding else "dp_reshardable",
            **options,
        )

    return save


def _load(global_vars: Any, checkpointing: Any) -> Any:
    def load(
        ddp_model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        load_arg: str = "load",
        strict: bool = True,
        checkpointing_context: Any = None,
        skip_load_to_model_and_opt: bool = False,
        **others: Any,
    ) -> tuple[int, int]:
        """Megatron's load_checkpoint, by fastckpt."""
        _check_others(others)
        args = global_vars.get_args()
        if skip_load_to_model_and_opt:
            raise NotImplementedError("skip_load_to_model_and_opt: fastckpt loads what it reads")
        root, pretrained = getattr(args, load_arg), getattr(args, "pretrained_checkpoint", None)
        if pretrained is not None and not checkpointing.checkpoint_exists(root):
            root, args.finetune = pretrained, True
        fresh = args.finetune
        with_optimizer = not (fresh or args.no_load_optim)
        iteration, common = restore(
            ddp_model,
            optimizer if with_optimizer else None,
            opt_param_scheduler if with_optimizer else None,
            load=root,
            iteration=getattr(args, "ckpt_step", None) or None,
            strict=strict,
            load_rng=not (fresh or args.no_load_rng),
            weights_only=True,
        )
        if hasattr(checkpointing, "set_loaded_iteration"):
            checkpointing.set_loaded_iteration(iteration if common else -1)
        if optimizer is not None and not with_optimizer and common:
            optimizer.reload_model_params()
        if "checkpoint_version" in common:
            checkpointing.set_checkpoint_version(common["checkpoint_version"])
        saved = common.get("args")
        if saved is not None and not fresh:
            checkpointing.check_checkpoint_args(saved)
            for name in ("consumed_train_samples", "consumed_valid_samples"):
                setattr(args, name, getattr(saved, name, 0))
            checkpointing.update_num_microbatches(
                consumed_samples=args.consumed_train_samples, verbose=True
            )
        if fresh:
            return 0, 0
        return iteration, int(common.get("num_floating_point_operations_so_far", 0))

    return load
