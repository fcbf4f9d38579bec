"""Megatron's checkpoint flags, and what becomes of each under install().

Responsible for the one list of them: training is checked against it before it begins, and the
documentation and the tests are made from it.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

log = logging.getLogger("fastckpt")

Kind = Literal["obeyed", "left to Megatron", "no effect", "refused"]
Refusal = Callable[[Any, Any], bool]  # of a flag's value and all arguments


def _set(value: Any, _args: Any) -> bool:
    return value not in (None, False, "")


def _url(value: Any, _args: Any) -> bool:
    return "://" in str(value)


def _one_of(*values: Any) -> Refusal:
    return lambda value, _args: value in values


def _no_type(value: Any, args: Any) -> bool:
    return bool(value) and getattr(args, "non_persistent_ckpt_type", None) is None


@dataclass(frozen=True)
class FlagSupport:
    """A flag that says something about checkpoints.

    Attributes:
        dest: its name in Megatron's arguments.
        kind: what becomes of it, unless its value is refused.
        text: the same in words, with the values that are refused.
        refuses: whether a value ends the program before training begins; None: no value does.
        default: the value that asks for nothing.
        option: as it is given on the command line; None: it is spelled as `dest`.
    """

    dest: str
    kind: Kind
    text: str
    refuses: Refusal | None = None
    default: Any = None
    option: str | None = None

    @property
    def name(self) -> str:
        return self.option or "--" + self.dest.replace("_", "-")


_LOCAL = "Of local checkpoints, which are refused."
_WRITER = "Of Megatron's own writer, which does not run."
_READER = "Each rank reads the ranges that it needs, and no collective runs."
_SAMPLES = "Written by Megatron itself."
_LEGACY = "Refused: it is of the format `torch`, which fastckpt does not load."
_NAMED = "Deprecated; Megatron passes over it too."
_CONVERT = "Refused: convert without `install()`."
_FROM_ARGS = "Megatron reads the arguments, of the iteration that is then loaded: the last commit."
_FT = "The sections `checkpointing` of saves, and what was loaded, are told to the package."

FLAGS = (
    # Saving.
    FlagSupport("save", "obeyed", "The run's directory. A URL is refused.", _url),
    FlagSupport("save_interval", "left to Megatron", "Megatron's loop calls for the saves."),
    FlagSupport(
        "save_retain_interval",
        "obeyed",
        "The iteration that the tracker named before is removed when the next one has committed, "
        "unless it is a multiple or a link. Refused with `install(keep_last=...)`.",
    ),
    FlagSupport("no_save_optim", "obeyed", "Neither optimizer nor schedule is saved."),
    FlagSupport("no_save_rng", "obeyed", "Random number generators are not saved."),
    FlagSupport(
        "async_save", "obeyed", "Saves are asynchronous with and without it.", default=False
    ),
    FlagSupport("use_persistent_ckpt_worker", "no effect", _WRITER, default=False),
    FlagSupport("async_strategy", "no effect", _WRITER, default="nvrx"),
    FlagSupport("async_ckpt_cpu_priority", "no effect", _WRITER, default=10),
    FlagSupport("async_ckpt_io_priority", "no effect", _WRITER, default=3),
    FlagSupport("async_ckpt_use_cpu_shm", "no effect", _WRITER, default=False),
    FlagSupport("dist_ckpt_workers", "no effect", _WRITER, default=1),
    FlagSupport(
        "ckpt_fully_parallel_save",
        "no effect",
        "Data parallel ranks always share the work; files are one for each rank.",
        default=True,
        option="--no-ckpt-fully-parallel-save",
    ),
    FlagSupport(
        "ckpt_fully_parallel_save_process_group",
        "no effect",
        "All ranks that hold the same share the work.",
        default="dp",
    ),
    FlagSupport(
        "ckpt_assume_constant_structure",
        "no effect",
        "Ranks always exchange their plans only when these have changed.",
        default=False,
    ),
    FlagSupport(
        "dist_ckpt_optim_fully_reshardable",
        "obeyed",
        "The optimizer's state is gathered, for stock Megatron to load on other parallelisms.",
        default=False,
    ),
    FlagSupport(
        "distrib_optim_fully_reshardable_mem_efficient",
        "obeyed",
        "It is gathered over gloo, on one rank.",
        default=False,
    ),
    FlagSupport(
        "dist_ckpt_save_pre_mcore_014",
        "refused",
        "Refused: fastckpt saves as Megatron has done since 0.14.",
        _set,
        default=False,
    ),
    FlagSupport(
        "verify_integrity", "no effect", "Every block is verified in any case.", default=False
    ),
    FlagSupport("save_wgrads_interval", "left to Megatron", _SAMPLES),
    FlagSupport("save_dgrads_interval", "left to Megatron", _SAMPLES),
    FlagSupport("save_params_interval", "left to Megatron", _SAMPLES),
    FlagSupport("save_activations_interval", "left to Megatron", _SAMPLES),
    FlagSupport("save_tokens_per_expert_interval", "left to Megatron", _SAMPLES),
    FlagSupport(
        "dataloader_save", "obeyed", "Megatron's own function saves the data loader's state."
    ),
    FlagSupport(
        "rerun_mode",
        "obeyed",
        "The state of a step that is to be run again is saved, and loaded on the same parallelism.",
        default="validate_results",
    ),
    # Non-persistent checkpoints.
    FlagSupport(
        "non_persistent_save_interval",
        "left to Megatron",
        "Megatron's loop calls for the saves. Refused without `--non-persistent-ckpt-type`.",
        _no_type,
    ),
    FlagSupport(
        "non_persistent_ckpt_type",
        "obeyed",
        "`global`: the last one is kept, and is loaded if it was saved last. `local` and "
        "`in_memory` are refused.",
        _one_of("local", "in_memory"),
    ),
    FlagSupport(
        "non_persistent_global_ckpt_dir",
        "obeyed",
        "The directory of non-persistent ones; else `non_persistent` in the run's. A URL is "
        "refused.",
        _url,
    ),
    FlagSupport("non_persistent_local_ckpt_dir", "no effect", _LOCAL),
    FlagSupport("non_persistent_local_ckpt_algo", "no effect", _LOCAL, default="fully_parallel"),
    FlagSupport(
        "replication", "refused", "Refused, as local checkpoints are.", _set, default=False
    ),
    FlagSupport("replication_jump", "no effect", _LOCAL),
    FlagSupport("replication_factor", "no effect", _LOCAL, default=2),
    # Loading.
    FlagSupport("load", "obeyed", "The run's directory. A URL is refused.", _url),
    FlagSupport(
        "ckpt_step",
        "obeyed",
        "This iteration and no other; without it the last commit that is whole, with the reason "
        "where the tracker names another.",
    ),
    FlagSupport(
        "exit_on_missing_checkpoint",
        "obeyed",
        "Where there is no checkpoint, Megatron's line is printed and the program ends, with "
        "status 1 (Megatron's with 0).",
        default=False,
    ),
    FlagSupport(
        "finetune", "obeyed", "Weights alone are loaded; the iteration is 0.", default=False
    ),
    FlagSupport(
        "pretrained_checkpoint",
        "obeyed",
        "Where `--load` holds none, this one is loaded to be finetuned. A URL is refused.",
        _url,
    ),
    FlagSupport("no_load_optim", "obeyed", "Neither optimizer nor schedule is loaded."),
    FlagSupport("no_load_rng", "obeyed", "Random number generators stay as they are."),
    FlagSupport(
        "load_main_params_from_ckpt",
        "refused",
        "Refused: main parameters are loaded with the optimizer, or copied from the model's.",
        _set,
        default=False,
    ),
    FlagSupport(
        "override_ckpt_iteration",
        "refused",
        "Refused: the iteration is that which was saved.",
        lambda value, _args: value is not None,
    ),
    FlagSupport(
        "dist_ckpt_strictness",
        "obeyed",
        "Keys are handled as asked for. `return_unexpected` and `return_all` are refused: "
        "Megatron's loop does not take what they return.",
        _one_of("return_unexpected", "return_all"),
        default="assume_ok_unexpected",
    ),
    FlagSupport(
        "ckpt_load_validate_sharding_integrity",
        "obeyed",
        "Whether Megatron looks whether the ranks' shards fit together.",
        default=True,
        option="--no-ckpt-load-validate-sharding-integrity",
    ),
    FlagSupport("use_checkpoint_args", "obeyed", _FROM_ARGS, default=False),
    FlagSupport("use_mp_args_from_checkpoint_args", "obeyed", _FROM_ARGS, default=False),
    FlagSupport(
        "use_tokenizer_model_from_checkpoint_args",
        "left to Megatron",
        "Of the arguments that `--use-checkpoint-args` reads.",
        default=True,
        option="--no-use-tokenizer-model-from-checkpoint-args",
    ),
    FlagSupport(
        "override_opt_param_scheduler",
        "left to Megatron",
        "Megatron's schedule obeys it, from what fastckpt loads.",
        default=False,
    ),
    FlagSupport(
        "use_checkpoint_opt_param_scheduler",
        "left to Megatron",
        "Megatron's schedule obeys it, from what fastckpt loads.",
        default=False,
    ),
    FlagSupport(
        "data_parallel_random_init",
        "obeyed",
        "Each rank's generators are saved, and found in what Megatron has saved.",
        default=False,
    ),
    FlagSupport("ckpt_fully_parallel_load", "no effect", _READER, default=False),
    FlagSupport(
        "ckpt_fully_parallel_load_exchange_algo", "no effect", _READER, default="broadcast"
    ),
    FlagSupport("ckpt_fully_parallel_load_process_group", "no effect", _READER, default="dp"),
    FlagSupport(
        "stream_ckpt_dequant", "no effect", _READER, default=True, option="--no-stream-ckpt-dequant"
    ),
    # Formats.
    FlagSupport(
        "ckpt_format",
        "obeyed",
        "`torch_dist`. `torch`, `torch_dcp` and `fsdp_dtensor` are refused.",
        _one_of("torch", "torch_dcp", "fsdp_dtensor"),
        default="torch_dist",
    ),
    FlagSupport(
        "auto_detect_ckpt_format",
        "no effect",
        "The format is seen in the directory in any case; `torch_dist` alone is loaded.",
        default=False,
    ),
    FlagSupport(
        "strict_fsdp_dtensor_load",
        "refused",
        "Refused: it is of the format `fsdp_dtensor`, which fastckpt does not load.",
        _one_of(False),
        default=True,
        option="--no-strict-fsdp-dtensor-load",
    ),
    FlagSupport("ckpt_convert_format", "refused", _CONVERT, _set),
    FlagSupport("ckpt_convert_save", "refused", _CONVERT, _set),
    FlagSupport(
        "ckpt_convert_update_legacy_dist_opt_format", "refused", _LEGACY, _set, default=False
    ),
    FlagSupport(
        "use_dist_ckpt_deprecated", "no effect", _NAMED, default=False, option="--use-dist-ckpt"
    ),
    FlagSupport("dist_ckpt_format_deprecated", "no effect", _NAMED, option="--dist-ckpt-format"),
    FlagSupport(
        "ckpt_fully_parallel_save_deprecated",
        "no effect",
        _NAMED,
        default=False,
        option="--ckpt-fully-parallel-save",
    ),
    # What is told of checkpoints, and what else of a run touches them.
    FlagSupport(
        "log_progress",
        "obeyed",
        "`progress.txt` says `Saved checkpoint`, or with `--async-save` `Saved async checkpoint`, "
        "when it is committed.",
        default=False,
    ),
    FlagSupport(
        "wandb_project",
        "obeyed",
        "The artifact is logged by Megatron's hooks: when the iteration is committed, and when it "
        "was loaded.",
    ),
    FlagSupport("enable_ft_package", "obeyed", _FT, default=False),
    FlagSupport("calc_ft_timeouts", "obeyed", _FT, default=False),
    FlagSupport(
        "exit_signal_handler",
        "obeyed",
        "The program ends when the saves in flight have committed.",
        default=False,
    ),
    FlagSupport(
        "moe_use_upcycling",
        "refused",
        "Refused: convert the model without `install()`.",
        _set,
        default=False,
    ),
    FlagSupport("use_torch_fsdp2", "refused", "Refused: not tried.", _set, default=False),
    FlagSupport(
        "inprocess_restart",
        "refused",
        "Refused: saves in flight do not outlive their process group.",
        _set,
        default=False,
    ),
)


def check(args: Any, known_by_megatron: Iterable[argparse.Action] = ()) -> list[str]:
    """Refuses flags that cannot be obeyed; returns the names of given ones that have no effect.

    Args:
        args: Megatron's arguments.
        known_by_megatron: the checkpoint flags of the Megatron that is installed.

    Raises:
        NotImplementedError: naming each flag that is refused, its value, and why.
    """
    refused, without_effect = [], []
    for flag in FLAGS:
        value = getattr(args, flag.dest, flag.default)
        if flag.refuses is not None and flag.refuses(value, args):
            refused.append(f"{flag.name} ({flag.dest} is {value!r}): {flag.text}")
        elif flag.kind == "no effect" and value not in (flag.default, None):
            without_effect.append(flag.name)
    ours = {flag.dest for flag in FLAGS}
    for action in known_by_megatron:
        value = getattr(args, action.dest, action.default)
        if action.dest not in ours and value not in (action.default, None):
            refused.append(
                f"{'/'.join(action.option_strings)} ({action.dest} is {value!r}): Refused: this "
                "version of fastckpt does not know it."
            )
    if refused:
        raise NotImplementedError(
            "fastckpt saves and loads for Megatron, and does not do as these flags ask. Leave them "
            "out, or do not call install():\n" + "\n".join(refused)
        )
    return without_effect
