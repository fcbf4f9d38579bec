"""Saves what Accelerate's save_state() saves, in the background and with an atomic commit.

    from fastckpt.integrations.accelerate import load_state, save_state
    handle = save_state(accelerator, "run/step-100")  # as accelerator.save_state("run/step-100")
    load_state(accelerator, "run/step-100")  # accelerator.load_state(), after verifying it

Responsible for redirecting an Accelerator's own save, which decides a checkpoint's contents, into a
draft, and for verifying before its own load. Stock accelerator.load_state() reads the directories.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from typing import Any

from fastckpt.arguments.checks import check_path
from fastckpt.arguments.options import SaveOptions
from fastckpt.directories.draft import Draft
from fastckpt.directories.save import save_directory, wait_for_directories
from fastckpt.directories.shelf import committed_first, numbered, retain
from fastckpt.directories.verify import newest_whole
from fastckpt.integrations import _fsdp, require
from fastckpt.integrations._fsdp import replaced
from fastckpt.ranks.per_group import group_of_job
from fastckpt.ranks.round import TIMEOUT_S
from fastckpt.saving.handle import SaveHandle

require("accelerate", "1.7", "2", __name__)

from accelerate import Accelerator, checkpointing  # noqa: E402
from accelerate.utils import clean_state_dict_for_safetensors  # noqa: E402

# Distributed types whose files Accelerate does not write itself, and the libraries that do.
_WRITTEN_BY_OTHERS = {
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron",
    "XLA": "torch_xla",
}
_NAME = re.compile(r"checkpoint_(\d+)\Z")


def save_state(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str] | None = None,
    *,
    safe_serialization: bool = True,
    options: SaveOptions = SaveOptions(),
) -> SaveHandle:
    """Saves the state that accelerator.save_state() saves, in the background. Every process must
    call it.

    Models, optimizers, schedulers, samplers and objects registered for checkpointing are captured
    now and written later. Generators, stateful dataloaders, the scaler and files of
    save_state_pre_hooks are small and written at once. With FSDP, each rank writes its shards of
    models and optimizers. Ranks exchange plans over the job's store, and this call waits for the
    exchange only if a plan has changed. The directory is committed when every rank's files are
    durable; until then an existing directory stays intact.

    Args:
        accelerator: an Accelerator without DeepSpeed, Megatron-LM and XLA; with FSDP its
            state_dict_type must be SHARDED_STATE_DICT.
        output_dir: the directory. None with automatic_checkpoint_naming: `checkpoints/checkpoint_N`
            in the project's directory, of which the last total_limit are kept.
        safe_serialization: True: models are saved as safetensors files (Accelerate then keeps one
            name of each shared tensor). False: as torch.save files.
        options: the fence, how errors are handled, and how files are written (see SaveOptions);
            staging="gds" is not supported. A failed save leaves the directory unchanged.

    Returns:
        A SaveHandle; its result() returns the SaveStats when the directory is committed.

    Raises:
        ValueError: the accelerator is not supported, gathers FSDP's states, or saves on each node
            with several processes; output_dir is missing, or the automatic directory exists; or an
            option is not supported.
        CheckpointError: with on_error="raise", an earlier save failed and its error was not raised
            yet.
    """
    _refuse_others(accelerator)
    plugin = _fsdp_plugin(accelerator)
    if plugin is not None and (why := _fsdp.gathers(plugin)):
        raise ValueError(f"{__name__} cannot save with {why}")
    project = accelerator.project_configuration
    path, beside = _place(accelerator, output_dir)

    def fill(draft: Draft) -> None:
        # The first rank decides, because other ranks may see new directories late and removed ones
        # longer.
        if beside is not None and draft.agreement.rank == 0 and os.path.exists(path):
            raise ValueError(
                f"{path!r} already exists: set project_configuration.iteration to the next free "
                "number"
            )
        automatic, project.automatic_checkpoint_naming = project.automatic_checkpoint_naming, False
        try:
            with (
                replaced(checkpointing, "save", partial(_into, draft, accelerator)),
                nullcontext() if plugin is None else _fsdp.sharded_states(draft),
            ):
                accelerator.save_state(draft.directory, safe_serialization=safe_serialization)
        finally:
            project.automatic_checkpoint_naming = automatic

    def rotate() -> None:
        if beside is not None and project.total_limit is not None:
            directories = [each for _, each in numbered(os.path.dirname(path), _NAME)]
            limit = max(1, project.total_limit)
            retain(committed_first(path, directories), limit, beside=beside)

    return save_directory(
        path,
        fill,
        group=group_of_job(),
        beside=beside,
        options=options,
        retain=rotate,
    )


def load_state(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    **arguments: Any,
) -> None:
    """Verifies the whole directory, then calls accelerator.load_state(). Every process must call
    it.

    It first waits for this process's saves to the directory. Accelerate unpickles objects
    registered for checkpointing, which may run code from the file.

    Args:
        accelerator: like save_state's.
        input_dir: the directory. None with automatic_checkpoint_naming: the newest undamaged
            directory; each damaged one that is newer is logged as a warning.
        timeout_s: the longest time that processes wait for each other, in seconds.
        arguments: further arguments of accelerator.load_state.

    Raises:
        CorruptCheckpoint: the directory is damaged, or all are. PeerFailed: another process cannot
            read it.
        ValueError, FileNotFoundError: there is no checkpoint.
    """
    _refuse_others(accelerator)
    given = None if input_dir is None else os.path.realpath(check_path("input_dir", input_dir))
    directory = _automatic(accelerator) if given is None else os.path.dirname(given)
    wait_for_directories(directory)

    def listed() -> list[str]:
        if given is None:
            return [path for _, path in numbered(directory, _NAME)]
        return [given] if os.path.isdir(given) else []

    newest = newest_whole(listed, group_of_job(), timeout_s) or input_dir
    if newest is None:
        raise FileNotFoundError(f"{_automatic(accelerator)!r} holds no checkpoint")
    accelerator.load_state(os.fspath(newest), **arguments)


def _refuse_others(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type.value
    if kind in _WRITTEN_BY_OTHERS:
        raise ValueError(
            f"with {kind} a state is written by {_WRITTEN_BY_OTHERS[kind]}, so "
            f"{__name__} can neither save nor load it"
        )
    if accelerator.project_configuration.save_on_each_node and accelerator.num_processes > 1:
        raise ValueError(
            f"{__name__} cannot save with save_on_each_node, because all ranks share one directory"
        )


def _fsdp_plugin(accelerator: Accelerator) -> Any:
    return accelerator.state.fsdp_plugin if accelerator.distributed_type.value == "FSDP" else None


def _place(
    accelerator: Accelerator, output_dir: str | os.PathLike[str] | None
) -> tuple[str, str | None]:
    """Returns the path of the directory to save, and its draft's directory; None: next to it."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise ValueError(
                "output_dir is None, and the project has no automatic naming: pass a directory"
            )
        return check_path("output_dir", output_dir), None
    directory = _automatic(accelerator)
    path = os.path.join(directory, f"checkpoint_{project.iteration}")
    return path, os.path.dirname(directory)  # Accelerate does not look there


def _automatic(accelerator: Accelerator) -> str:
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            "input_dir is None, and the project has no automatic naming: pass a directory"
        )
    return os.path.realpath(os.path.join(accelerator.project_dir, "checkpoints"))


def _into(
    draft: Draft,
    accelerator: Accelerator,
    by_itself: Any,
    obj: Any,
    f: Any,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Replaces accelerate.utils.save(): a file in the draft's directory is added to the draft."""
    name = os.path.relpath(f, draft.directory)
    if name.startswith(os.pardir):
        by_itself(obj, f, save_on_each_node, safe_serialization)
    elif not accelerator.is_main_process:
        pass  # like by_itself(), which writes the same file
    elif not safe_serialization:
        draft.add(obj, name)
    else:
        if isinstance(obj, OrderedDict):
            obj = clean_state_dict_for_safetensors(obj)
        if not draft.add_tensors(obj, name, {"format": "pt"}):
            by_itself(obj, f, save_on_each_node, safe_serialization)
