"""Writes the checkpoints of transformers' Trainer in the background, with an atomic commit.

    from fastckpt.integrations.transformers import AsyncTrainer
    trainer = AsyncTrainer(model=..., args=..., train_dataset=...)  # as Trainer
    trainer.train(resume_from_checkpoint=True)

Responsible for redirecting a Trainer's own save, which decides a checkpoint's contents, into a
draft, and for verifying before training resumes. The stock Trainer can resume from the directories.
It must not know how a directory is written or committed.
"""

from __future__ import annotations

import copy
import logging
import os
import re
from functools import partial
from typing import Any

import safetensors.torch

from fastckpt.arguments.options import SaveOptions, check_options
from fastckpt.directories.draft import Draft
from fastckpt.directories.save import FROM_THE_HOST, save_directory, wait_for_directories
from fastckpt.directories.shelf import committed_first, numbered, retain
from fastckpt.directories.verify import newest_whole
from fastckpt.errors import CheckpointError
from fastckpt.integrations import _fsdp, require
from fastckpt.integrations._fsdp import replaced
from fastckpt.ranks.per_group import group_of_job
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.in_flight import InFlight
from fastckpt.saving.lease import give_up
from fastckpt.saving.pipeline import FREEING_S

require("transformers", "4.52", "6", __name__)

from transformers import Trainer, TrainerCallback, modeling_utils  # noqa: E402
from transformers.trainer import (  # noqa: E402
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy  # noqa: E402
from transformers.utils import is_sagemaker_mp_enabled, is_torch_xla_available  # noqa: E402

log = logging.getLogger("fastckpt")

_NAME = re.compile(rf"{re.escape(PREFIX_CHECKPOINT_DIR)}-(\d+)\Z")


class AsyncTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose checkpoints are written in the background.

    To extend another subclass of Trainer: `class Mine(AsyncTrainer, SFTTrainer): pass`.

    A checkpoint has the same files and formats as the stock Trainer's. It is a hidden directory
    until every rank's files are durable, and is then renamed to `checkpoint-N`. After that,
    `save_total_limit` removes older checkpoints. Before training resumes, the files are verified
    against their list, `fastckpt.json`. resume_from_checkpoint=True skips a damaged checkpoint,
    with a warning, and resumes from the previous one; a damaged checkpoint that is named explicitly
    is refused.

    train() returns when all checkpoints are committed. After `checkpoint-N` is committed,
    callbacks' `on_save` is called at the next step, save or end of training (with several ranks, at
    the next save or end), with the Trainer's state of that save. It is not called for a failed
    save. If a callback has an `on_save`, each save waits for the previous one.

    Args:
        args, kwargs: Trainer's arguments.
        options: the fence, how errors are handled, and how files are written (see SaveOptions);
            staging="gds" is not supported. With on_error="raise", a failed save's error ends
            training at the next save or at the end. Loads use `timeout_s`.
        verify: whether a checkpoint is read completely and verified before training resumes from
            it, and before the best checkpoint is loaded at the end.

    Raises:
        ValueError: an option is not supported; or training uses DeepSpeed, FSDP without
            SHARDED_STATE_DICT, XLA, SageMaker, a model that transformers has sharded, pushing of
            checkpoints to the Hub, enable_jit_checkpoint, or save_on_each_node with several ranks.
    """

    control: Any  # Trainer's

    def __init__(
        self,
        *args: Any,
        options: SaveOptions = SaveOptions(),
        verify: bool = True,
        **kwargs: Any,
    ) -> None:
        self._options = check_options(options, staging=FROM_THE_HOST)
        self._draft: Draft | None = None
        self._saves = InFlight()
        self._begun: InnerHandle | None = None  # a save before its on_save call
        self._best: InnerHandle | None = None  # the save of the best checkpoint
        # The save to call on_save for when it is committed, and the state to pass.
        self._announced: tuple[InnerHandle, Any] | None = None
        self._verify = verify
        self._leased = ""  # the directory that no other job may save to
        super().__init__(*args, **kwargs)
        self._refuse_others()
        # Trainer calls the handler right after _save_checkpoint(); no method can be overridden for
        # it.
        self.callback_handler.on_save = self._on_save

    def _refuse_others(self) -> None:
        args = self.args
        refused = {
            "DeepSpeed": self.is_deepspeed_enabled,
            # Older versions of transformers have neither this nor a checkpoint at a SIGTERM.
            "a model that transformers has sharded": getattr(
                self, "is_distributed_loading_by_transformers", False
            ),
            "XLA": is_torch_xla_available(),
            "SageMaker model parallelism": is_sagemaker_mp_enabled(),
            "push_to_hub with a hub_strategy other than 'end'": args.push_to_hub
            and args.hub_strategy != HubStrategy.END,
            "enable_jit_checkpoint": getattr(args, "enable_jit_checkpoint", False),
            "save_on_each_node": args.save_on_each_node and args.world_size > 1,
        }
        for what, is_so in refused.items():
            if is_so:
                raise ValueError(f"{type(self).__name__} cannot save checkpoints with {what}")
        if self.is_fsdp_enabled and (why := _fsdp.gathers(self.accelerator.state.fsdp_plugin)):
            raise ValueError(
                f"{type(self).__name__} cannot save checkpoints with {why}, with "
                f"fsdp_config={{'state_dict_type': {_fsdp.SHARDED!r}}}"
            )

    def wait_for_checkpoints(self) -> None:
        """Waits until every save has ended and the checkpoints that it replaces are removed.

        Raises:
            CheckpointError: with on_error="raise", the first failure that was not raised before.
        """
        self._saves.wait(FREEING_S)
        self._call_on_save(wait=True)
        best, self._best = self._best, None
        if best is not None and best.failure() is not None:
            path = self.state.best_model_checkpoint
            if path is not None and os.path.realpath(path) == best.path:
                log.warning(
                    "%r, the best checkpoint, could not be saved, so no best checkpoint exists now",
                    path,
                )
                self.state.best_model_checkpoint = None
        self._saves.raise_first()

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Trains like Trainer.train(), and returns when all checkpoints are committed.

        Raises:
            CorruptCheckpoint: every checkpoint to resume from is damaged.
            CheckpointError: with on_error="raise", a checkpoint could not be saved.
        """
        self.wait_for_checkpoints()  # training may resume from one of them,
        for parent in self._parents(resume_from_checkpoint):  # or from one of another Trainer
            wait_for_directories(parent)
        if resume_from_checkpoint and self._verify:
            resume_from_checkpoint = self._whole(resume_from_checkpoint)
        output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        self.wait_for_checkpoints()
        give_up(self._leased)
        return output

    def _parents(self, resume_from: str | bool | None) -> list[str]:
        """Returns the directories whose checkpoints training may resume from."""
        directories = [os.path.dirname(resume_from)] if isinstance(resume_from, str) else []
        return [str(self.args.output_dir), *filter(None, directories)]

    def _whole(self, resume_from: str | bool) -> str | bool:
        """Returns the verified checkpoint to resume from; if there is none, returns the
        argument.
        """

        def listed() -> list[str]:
            if resume_from is True:
                return [path for _, path in numbered(self.args.output_dir, _NAME)]
            return [str(resume_from)] if os.path.isdir(resume_from) else []

        return newest_whole(listed, group_of_job(), self._options.timeout_s) or resume_from

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()  # a collective; the code below may fail on one rank alone
        run_dir = super()._get_output_dir(trial)
        path = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        state = self.state
        best: str | None = state.best_model_checkpoint

        def fill(draft: Draft) -> None:
            nonlocal best
            best_step = state.best_global_step
            # Otherwise Trainer would run a barrier of all ranks to look for the best step's
            # directory.
            self._draft, state.best_global_step = draft, None
            try:
                super(AsyncTrainer, self)._save_checkpoint(model, trial)
            except (OSError, RuntimeError) as error:  # the latter is torch.save's
                why = f"{type(error).__name__}: {error}"
                text = f"a file of {path!r} that the Trainer writes itself failed with {why}"
                failed = CheckpointError(text)
                failed.__cause__ = error
                draft.fail(failed)
            finally:
                self._draft, state.best_global_step = None, best_step
                if best_step == state.global_step:  # undone by wait_for_checkpoints() if it fails
                    best = state.best_model_checkpoint = path
            if best_step is not None and self.args.should_save:
                state.save_to_json(os.path.join(draft.directory, TRAINER_STATE_NAME))

        def rotate() -> None:
            _rotate(path, self.args.save_total_limit, best)

        self._call_on_save(wait=True)  # rotate() may remove the checkpoint before this one
        self._leased = os.path.realpath(run_dir)
        handle = save_directory(
            path,
            fill,
            group=group_of_job(),
            options=self._options,
            retain=rotate,
            lease=run_dir,
        )
        self._saves.add(handle)
        self._begun = handle
        if state.best_global_step == state.global_step:
            self._best = handle

    def _on_save(self, args: Any, state: Any, control: Any) -> Any:
        """Replaces the callback handler's on_save(): defers the call until the checkpoint that was
        just begun is committed.
        """
        control.should_save = False
        begun, self._begun = self._begun, None
        if begun is None:  # a subclass saves without AsyncTrainer
            return self.callback_handler.call_event("on_save", args, state, control)
        stock = TrainerCallback.on_save
        if any(type(each).on_save is not stock for each in self.callback_handler.callbacks):
            announced = copy.copy(state)
            announced.log_history = list(state.log_history)
            self._announced = begun, announced
        return control

    def _call_on_save(self, wait: bool = False) -> None:
        """Calls on_save for a committed checkpoint; with `wait`, first waits for the commit."""
        if self._announced is None:
            return
        handle, state = self._announced
        if not (wait or handle.done()):
            return
        handle.wait_done()
        self._announced = None
        if handle.failure() is None:
            handler = self.callback_handler
            self.control = handler.call_event("on_save", self.args, state, self.control)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.args.world_size == 1:  # several ranks may see a commit in different steps
            self._call_on_save()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        # While fill() runs, Trainer calls this for the directory to save to.
        directory: str = super()._get_output_dir(trial)
        return directory if self._draft is None else self._draft.root

    def store_flos(self) -> None:
        if self._draft is None:  # in a draft it has been done
            super().store_flos()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._draft is None:
            super()._save(output_dir, state_dict)
            return
        write = partial(_into, self._draft)
        with (
            replaced(modeling_utils, "safe_save_file", write),  # by save_pretrained()
            replaced(safetensors.torch, "save_file", write),  # of a model without that
        ):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._draft is None:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.is_fsdp_enabled:  # the model, too
            with _fsdp.sharded_states(self._draft):
                super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            self._draft.add(self.optimizer.state_dict(), OPTIMIZER_NAME)
            self._draft.add(self.lr_scheduler.state_dict(), SCHEDULER_NAME)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.wait_for_checkpoints()  # Trainer now loads the best one and removes others
        return super()._finalize_training(*args, **kwargs)

    def _sorted_checkpoints(self, *args: Any, **kwargs: Any) -> Any:
        if self._draft is None:  # Trainer 4, which does not finalize, now removes others
            self.wait_for_checkpoints()
        return super()._sorted_checkpoints(*args, **kwargs)

    def _load_best_model(self) -> None:
        self.wait_for_checkpoints()
        best = self.state.best_model_checkpoint
        if best is None:  # it could not be saved
            return
        if self._verify:

            def listed() -> list[str]:
                return [best] if os.path.lexists(best) else []

            if newest_whole(listed, group_of_job(), self._options.timeout_s) is None:
                raise CheckpointError(f"{best!r} is the best checkpoint, but it does not exist")
        super()._load_best_model()


def _into(draft: Draft, by_itself: Any, tensors: Any, filename: Any, metadata: Any = None) -> None:
    """Replaces safetensors' save_file(): a file in the draft's directory is added to the draft."""
    name = os.path.relpath(filename, draft.directory)
    if name.startswith(os.pardir) or not draft.add_tensors(tensors, name, metadata or {}):
        by_itself(tensors, filename, metadata=metadata)


def _rotate(committed: str, limit: int | None, best: str | None) -> None:
    """Removes the checkpoints that Trainer would remove after a save, each atomically. Never
    removes the checkpoint that was just saved, unlike Trainer, which may order checkpoints by their
    steps.
    """
    if limit is None or limit <= 0:
        return
    run_dir = os.path.realpath(os.path.dirname(committed))
    directories = [path for _number, path in numbered(run_dir, _NAME)]
    times = {path: os.path.getmtime(path) for path in directories}
    if times and max(times.values()) - min(times.values()) >= 1:  # clocks may be coarse
        directories.sort(key=times.__getitem__, reverse=True)
    best_path = None if best is None else os.path.realpath(best)
    retain(committed_first(os.path.realpath(committed), directories), limit, best=best_path)
