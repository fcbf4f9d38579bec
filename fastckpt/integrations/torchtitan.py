"""Saves and loads torchtitan's checkpoints with a fastckpt.Checkpointer.

    from fastckpt.integrations.torchtitan import FastckptCheckpointer
    config.checkpoint = FastckptCheckpointer.Config(enable=True, interval=500)  # of a Trainer

Responsible for torchtitan's checkpoint manager interface and for its config's policies: when to
save, what to save, and where to load from.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from fastckpt import Checkpointer, IncompatibleCheckpoint, PerRank, SaveOptions, export, load_into
from fastckpt.arguments.checks import CODECS, Codec, check_choice
from fastckpt.arguments.options import check_options
from fastckpt.formats.distcp import METADATA
from fastckpt.formats.step_names import step_name
from fastckpt.integrations import require
from fastckpt.integrations._stages import Stages
from fastckpt.integrations.dcp import Reader
from fastckpt.ranks.per_group import group_of_job, together
from fastckpt.saving.handle import InnerHandle

require("torchtitan", "0.3", "0.4", __name__)

from torchtitan.components.checkpointer.base import (  # noqa: E402
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP  # noqa: E402
from torchtitan.tools import filesystem  # noqa: E402
from torchtitan.tools.logging import logger  # noqa: E402

EXPORTS = "hf"  # the directory in the checkpoint folder that has the models for Hugging Face
# Files that from_pretrained needs besides the weights, which torchtitan's hf_assets_path may have.
_ASSETS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


# The checkpoint to load: its kind, path, step number and whether to load only the model.
_Choice = tuple[str, str, int | None, bool]
_NOTHING, _STEP, _FOLDER, _DCP, _HUGGING_FACE = "nothing", "step", "folder", "DCP", "Hugging Face"


class FastckptCheckpointer(BaseCheckpointManager):  # type: ignore[misc]
    """A checkpoint manager for torchtitan that saves its steps with a fastckpt.Checkpointer.

    The checkpoint folder is the Checkpointer's root, with directories such as step-00000500. All
    ranks must call all methods. A Trainer's state is saved as {"model", "optimizer",
    "lr_scheduler", "dataloader", "train_state"}. The dataloader's state is saved separately for
    each rank.

    Args:
        config: the user's Config, whose build() makes the manager.
        dataloader, model_parts, optimizers, lr_schedulers, states, sd_adapter, base_folder: the
            arguments that torchtitan's Trainer passes to each manager.

    Attributes:
        save_future: the SaveHandle of the last save, until it has been waited for.

    Raises:
        ValueError: last_save_in_hf is set, but the model has no sd_adapter or has pipeline stages.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's checkpoint config, with fastckpt's options."""

        options: SaveOptions = SaveOptions()
        """The fence, how errors are handled, and how files are written (see SaveOptions). Exports
        are staged in host memory.
        """

        codec: Codec | None = None
        """How shards are compressed: "planes" or "zstd", like fastckpt.Checkpointer's `codec`."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            check_options(self.options)
            check_choice("checkpoint.codec", self.codec, CODECS)
            if self.create_seed_checkpoint and self.load_only:
                raise ValueError("create_seed_checkpoint cannot save with load_only")
            if self.create_seed_checkpoint and self.last_save_in_hf:
                raise ValueError(
                    "create_seed_checkpoint with last_save_in_hf would save no step to start "
                    "from: remove last_save_in_hf from the job that creates the seed"
                )

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        self._config, self._adapter = config, sd_adapter
        self.save_future: InnerHandle | None = None
        self.folder = filesystem.join(base_folder, config.folder)
        self.interval, self.keep_latest_k = config.interval, config.keep_latest_k
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError(
                "checkpoint.last_save_in_hf is True, but sd_adapter is not provided: this model "
                "has no mapping to Hugging Face's names"
            )
        self.states = states
        self.states.update(
            {
                MODEL: ModelWrapper(model_parts),
                OPTIMIZER: optimizers,
                DATALOADER: dataloader,
                LR_SCHEDULER: lr_schedulers,
            }
        )
        self._stages = Stages.found(self.states[MODEL].cached_state_dict, config.options.timeout_s)
        if self._stages is not None and config.last_save_in_hf:
            raise ValueError(
                "checkpoint.last_save_in_hf is True, but with pipeline parallelism no rank has "
                "the whole model: remove it, and write the model in a job without pipeline "
                "stages that starts from the last step"
            )
        self._own_data = None if dataloader is None else _OwnData(dataloader).per_rank
        self._checkpointer = Checkpointer(
            self.folder,
            keep_last=self.keep_latest_k or None,
            options=config.options,
            codec=config.codec,
        )
        logger.info("Checkpoints are loaded from and saved to %s by fastckpt.", self.folder)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Begins to save a step if the config requires it, and waits for the last step's save."""
        config = self._config
        is_due = last_step or curr_step % config.interval == 0
        is_due = is_due or (curr_step == 1 and config.enable_first_step_checkpoint)
        if config.load_only or not is_due:
            return False
        self._maybe_wait_for_staging()  # state_dict() changes tensors that the model's hooks made
        state = self._state()
        if last_step and config.last_save_model_only:
            model = self.states[MODEL].state_dict()
            if config.last_save_in_hf:
                self._export(curr_step, model)
                return True
            dtype = TORCH_DTYPE_MAP[config.export_dtype]
            state = {MODEL: {name: _cast(value, dtype) for name, value in model.items()}}
        if self._stages is not None:
            parts = state.keys() & {MODEL, OPTIMIZER}
            state |= {key: self._stages.union(key, state[key]) for key in sorted(parts)}
        self.save_future = cast(InnerHandle, self._checkpointer.save(curr_step, state))
        if last_step:
            self._wait_for_saving()
        return True

    def _export(self, step: int, model: dict[str, Any]) -> None:
        """Exports the model to a directory for from_pretrained, and waits for the commit."""
        assets = getattr(self._adapter, "hf_assets_path", None) or ""
        paths = [os.path.join(assets, name) for name in _ASSETS] if assets else []
        export(
            self._adapter.to_hf(model),
            os.path.join(self.folder, EXPORTS, step_name(step)),
            dtype=TORCH_DTYPE_MAP[self._config.export_dtype],
            files=[path for path in paths if os.path.isfile(path)],
            group=group_of_job(),
            options=replace(self._config.options, staging="host"),
        ).result()

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Restores a step of the folder, or the config's initial checkpoint."""
        kind, path, number, model_only = _told_by_first(
            lambda: self._choice(step), self._config.options.timeout_s
        )
        if kind == _STEP:
            self._restore(self._checkpointer, number, model_only=model_only)
        elif kind == _HUGGING_FACE:
            self._load_hugging_face(path)
        elif kind == _DCP:
            self._load_dcp(path, model_only)
        elif kind == _FOLDER:
            with Checkpointer(path, options=self._config.options) as source:
                self._restore(source, None, model_only=model_only)
        else:
            logger.info("No checkpoint was provided, this is a fresh start.")
        return kind != _NOTHING

    def _choice(self, step: int) -> _Choice:
        """Returns the checkpoint to load. Only the first rank calls it, because others may see it
        later.
        """
        steps = self._checkpointer.steps()
        if step == -1 and not steps:
            return self._initial_choice()
        if step != -1 and step not in steps:
            raise FileNotFoundError(
                f"--checkpoint.load_step={step} not found: checkpoint.folder {self.folder!r} has "
                f"{f'the steps {steps}' if steps else 'no steps'}"
            )
        if step == -1 and steps == [0]:
            step = 0  # a seed checkpoint, which holds only the model
        return _STEP, self.folder, None if step == -1 else step, step == 0

    def _initial_choice(self) -> _Choice:
        config = self._config
        path, found = config.initial_load_path, _steps_of_dcp(self.folder)
        if found:
            newest = os.path.join(self.folder, f"step-{found[-1]}")
            raise ValueError(
                f"checkpoint.folder {self.folder!r} has checkpoints of torchtitan's DCP manager, "
                "which this manager cannot continue: to start from them, set another folder, "
                f"initial_load_path={newest!r} and initial_load_model_only=False"
            )
        what = "checkpoint.initial_load_path"
        if path is None and config.initial_load_in_hf:
            what, path = "hf_assets_path", getattr(self._adapter, "hf_assets_path", None)
        elif path is None:
            return _NOTHING, "", None, False
        if not path or not (filesystem.is_remote(path) or os.path.isdir(path)):
            raise ValueError(f"{what} is {path!r}, must be the directory of a checkpoint")
        logger.info("Loading the initial checkpoint from %s.", path)
        kind = _DCP if os.path.isfile(os.path.join(path, METADATA)) else _FOLDER
        kind = _HUGGING_FACE if config.initial_load_in_hf else kind
        return kind, path, None, config.initial_load_model_only

    def _restore(self, source: Checkpointer, step: int | None, *, model_only: bool) -> None:
        state = self._state()
        state = {MODEL: state[MODEL]} if model_only else self._not_excluded(state)
        only = f"{MODEL}/*" if model_only else None
        source.restore(
            state,
            step,
            required=True,
            only=only,
            unexpected=None if self._stages is None else "ignore",  # the other stages' names
        )
        for key in state.keys() & {MODEL, OPTIMIZER}:
            self.states[key].load_state_dict(state[key])

    def _load_dcp(self, path: str, model_only: bool) -> None:
        """Loads a checkpoint of torchtitan's DCP manager, where the model's names have no
        prefix.
        """
        others = {} if model_only else self._not_excluded(self.states)
        others.pop(MODEL, None)
        flat = {**others, **self.states[MODEL].state_dict()}
        load_dcp(flat, storage_reader=Reader(path))
        self.states[MODEL].load_state_dict(flat)

    def _load_hugging_face(self, path: str) -> None:
        if self._adapter is None:
            raise ValueError(
                "checkpoint.initial_load_in_hf is True, but sd_adapter is not provided: this "
                "model has no mapping to Hugging Face's names"
            )
        tensors = self._adapter.to_hf(self.states[MODEL].state_dict())
        if self._config.initial_load_in_hf_quantized:  # torchtitan's own reader dequantizes
            load_dcp(tensors, storage_reader=self._adapter.get_hf_storage_reader(path, True))
        else:
            load_into(tensors, path)
        self.states[MODEL].load_state_dict(self._adapter.from_hf(tensors))

    def _state(self) -> dict[str, Any]:
        """Returns the state to save or restore. The model and optimizers are state dicts, whose
        names differ between pipeline stages.
        """
        dicts = {key: self.states[key].state_dict() for key in (MODEL, OPTIMIZER)}
        return {**self.states, **dicts, DATALOADER: self._own_data}

    def _not_excluded(self, states: dict[str, Any]) -> dict[str, Any]:
        excluded = self._config.exclude_from_loading
        for key in excluded:
            if key not in states:
                raise ValueError(
                    f"checkpoint.exclude_from_loading has {key!r}, which is not found in the "
                    f"state, whose keys are {sorted(states)}"
                )
        return {key: value for key, value in states.items() if key not in excluded}

    def _maybe_wait_for_staging(self) -> None:
        """Waits until the state may change. If possible, the GPU's stream waits instead of this
        thread.
        """
        if self.save_future is not None:
            self.save_future.pass_fence()

    def _wait_for_saving(self) -> None:
        """Waits until the last save is committed."""
        if self.save_future is not None:
            saving, self.save_future = self.save_future, None
            saving.result()

    def _close(self) -> None:
        """Waits for all saves. Raises the first error that was not raised yet."""
        self._checkpointer.close()


_ADVICE = (
    "it was saved with another number of data-parallel ranks. Pass "
    f'exclude_from_loading=["{DATALOADER}"] to start the data from the beginning'
)


class _OwnData:
    """The state of this rank's dataloader. It refuses another data-parallel rank's state, with
    which torchtitan's dataloaders would silently start from the beginning.

    Attributes:
        per_rank: this object as a PerRank, to be saved in a state.
    """

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self.per_rank = PerRank(self, merge=_of_all)

    def state_dict(self) -> Any:
        return self._dataloader.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        own = self._dataloader.state_dict()
        if saved and own.keys() - saved.keys():  # the order of ranks may have changed
            saved = _of_all(self.per_rank.saved)
        if saved and (lacking := sorted(own.keys() - saved.keys())):
            raise IncompatibleCheckpoint(f"the saved state has no {lacking}: {_ADVICE}")
        try:
            self._dataloader.load_state_dict(saved)
        except AssertionError as error:  # from torchtitan, if the number of ranks differs
            raise IncompatibleCheckpoint(f"{str(error).rstrip('.')}: {_ADVICE}") from error


def _of_all(values: list[Any], _rank: int = 0, _ranks: int = 1) -> dict[str, Any]:
    """Returns the merged states of all dataloaders, whose keys name the data-parallel rank."""
    result: dict[str, Any] = {}
    for key, value in chain.from_iterable(each.items() for each in values):
        if pickle.dumps(result.setdefault(key, value)) != pickle.dumps(value):
            raise IncompatibleCheckpoint(f"ranks saved different dataloaders as {key!r}: {_ADVICE}")
    return result


def _told_by_first(choose: Callable[[], _Choice], timeout_s: float) -> _Choice:
    """Returns the first rank's `choose()` on all ranks. If it raises, all ranks fail."""
    agreement = together(group_of_job()).coordinator.begin(
        "choice of a checkpoint", timeout_s, "nothing was loaded"
    )
    with agreement.failing():
        if agreement.rank == 0:
            agreement.put("choice", json.dumps(choose()).encode())
        kind, path, number, model_only = json.loads(agreement.get("choice"))
    agreement.close()
    return kind, path, number, model_only


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_cast = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_cast else value


def _steps_of_dcp(folder: str) -> list[int]:
    """Returns the numbers of the steps that torchtitan's DCP manager saved to a folder,
    ascending.
    """
    if not os.path.isdir(folder):
        return []
    names = [name for name in os.listdir(folder) if name.startswith("step-")]
    directories = [name for name in names if os.path.isfile(os.path.join(folder, name, METADATA))]
    return sorted(int(name[5:]) for name in directories if name[5:].isdecimal())
