"""Reports of saves and loads to Megatron's users and their tools, in Megatron's own words.

Responsible for Megatron's lines, for progress.txt, and for its hooks into wandb, one_logger and the
fault tolerance package, none of which hears that a save is done before it has committed. It must
not know how a checkpoint is saved or loaded.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from fastckpt.directories import iterations
from fastckpt.latch import Latch
from fastckpt.saving.handle import InnerHandle

_NOTING_S = 60.0  # longest wait for a line, once its save has ended
log = logging.getLogger("fastckpt")


class Reports:
    """Reports of the saves and loads of a run; a Listener of its Saves. `checkpointing` is the
    module megatron.training.checkpointing, which has Megatron's hooks.
    """

    def __init__(
        self,
        checkpointing: Any,
        append_to_progress_log: Callable[..., None],
        get_args: Callable[[], Any],
    ) -> None:
        self._megatron = checkpointing
        self._append_to_progress_log, self._get_args = append_to_progress_log, get_args
        self._given: dict[str, str] = {}  # directories as the user named them, by real path
        self._begun: InnerHandle | None = None
        self._noting: list[Latch] = []  # for lines of progress.txt
        # Iterations whose "Saved async checkpoint" waits for the "Saving async checkpoint" of the
        # save that was begun last, since Megatron writes that when its call has returned.
        self._saved = deque[int]()
        self._is_announced = True  # whether that line has been written
        # Hooks for the training thread.
        self._due: list[tuple[InnerHandle, Callable[[], None]]] = []

    @contextlib.contextmanager
    def saving(self, iteration: int, root: str) -> Iterator[Callable[[InnerHandle], None]]:
        """Reports the beginning of a save in its body, which calls the result with the handle."""
        args = self._get_args()
        self._given[os.path.realpath(root)] = root
        self._is_announced = not (args.log_progress and args.async_save)
        metrics = self._megatron.on_save_checkpoint_start(args.async_save)
        self._megatron.ft_integration.on_checkpointing_start()
        self.say(
            f"[{_now()}] saving checkpoint at iteration {iteration:7d} to {root} in "
            f"{args.ckpt_format} format"
        )

        def begun(handle: InnerHandle) -> None:
            self._begun = handle
            if self._megatron.is_last_rank():
                self._due.append((handle, lambda: self._log(iteration, root, metrics)))
            if args.async_save:
                self.say(
                    f"  [{_now()}] scheduled an async checkpoint save at iteration "
                    f"{iteration:7d} to {root}"
                )

        try:
            yield begun
        finally:
            self._megatron.ft_integration.on_checkpointing_end(is_async_finalization=False)

    def committed(self, root: str, iteration: int) -> None:
        """See Listener."""
        args = self._get_args()
        self.say(
            f"  [{_now()}] successfully saved checkpoint from iteration {iteration:7d} to "
            f"{self._given.get(root, root)} {_place()}"
        )
        if args.log_progress and args.async_save:
            self._saved.append(iteration)
            if self._is_announced:
                self._note_saved()

    def removed(self, root: str, iteration: int) -> None:
        """See Listener."""
        self.say(
            f"  [{_now()}] successfully deleted checkpoint from iteration {iteration:7d} at "
            f"{self._given.get(root, root)}"
        )
        if self._get_args().log_progress:
            self._note_progress(f"Deleted checkpoint\tIteration: {iteration}")

    def append_to_progress_log(self, *given: Any, **named: Any) -> None:
        """Calls Megatron's function; for "Saved checkpoint", once the save has committed."""
        handle = self._begun
        if handle is None or not str(given[-1]).startswith("Saved checkpoint\t"):
            self._append_to_progress_log(*given, **named)
            if str(given[-1]).startswith("Saving async checkpoint\t"):
                self._is_announced = True  # before the next line: a commit may come in between
                self._note_saved()
        elif dist.get_rank() == 0:
            named["barrier"] = False  # other ranks know of it at another time
            noted = Latch()
            self._noting = [*(each for each in self._noting if not each.is_set()), noted]

            def note(_future: object) -> None:
                _when_committed(handle, lambda: self._append_to_progress_log(*given, **named))
                noted.set()

            handle.add_done_callback(note)

    def wait(self) -> None:
        """Waits, within reason, for the lines of progress.txt about saves that have ended."""
        noting, self._noting = self._noting, []
        for noted in noting:
            noted.wait(_NOTING_S)

    def tell_committed(self) -> None:
        """Calls the hooks for saves that have committed, in the training thread."""
        due, self._due = self._due, []
        for handle, tell in due:
            if handle.done():
                _when_committed(handle, tell)
            else:
                self._due.append((handle, tell))
        self._is_announced = True  # or never will be: Megatron's call is over
        self._note_saved()

    def trying(self, root: str, iteration: int, path: str) -> None:
        """Says which iteration will be loaded, and from where."""
        if os.path.basename(path) == iterations.RELEASE:
            self.say(f" loading release distributed checkpoint from {root}")
        elif os.path.dirname(path) == os.path.realpath(root):
            self.say(f" loading distributed checkpoint from {root} at iteration {iteration}")
        else:
            self.say(f"Loading from a non-persistent checkpoint (non-persistent iter {iteration})")

    def missing(self, root: str | None) -> None:
        """Says that there is no checkpoint."""
        tracker = "because load directory is not defined"
        if root is not None:
            tracker = os.path.join(root, iterations.TRACKER)
        self.say(f"WARNING: could not find the metadata file {tracker}")
        self.say("    will not load any checkpoints and will start from random")

    def loaded(self, root: str, path: str, iteration: int) -> None:
        """Says that a checkpoint was loaded, from which iteration training goes on."""
        self.say(
            f"  successfully loaded checkpoint from {root} {_place()} at iteration {iteration}"
        )
        if self._megatron.is_last_rank():
            self._megatron.wandb_utils.on_load_checkpoint_success(path, root)
        if iteration > 0:
            self._megatron.ft_integration.on_checkpoint_loaded(is_local_chkpt=False)

    def say(self, text: str) -> None:
        """Prints a line, on the first rank."""
        self._megatron.print_rank_0(text)

    def _log(self, iteration: int, root: str, metrics: Any) -> None:
        """Calls the hooks for a committed save, on the last rank, as Megatron does."""
        self._megatron.on_save_checkpoint_success(metrics, self._get_args().async_save)
        self._megatron.wandb_utils.on_save_checkpoint_success(
            os.path.join(root, iterations.directory_name(iteration)),
            os.path.join(root, iterations.TRACKER),
            root,
            iteration,
        )

    def _note_saved(self) -> None:
        """Writes the lines that were held back, each once, on whichever thread."""
        while self._saved:
            with contextlib.suppress(IndexError):  # the other thread has it
                iteration = self._saved.popleft()
                self._note_progress(f"Saved async checkpoint\tIteration: {iteration}")

    def _note_progress(self, text: str) -> None:
        parameters = inspect.signature(self._append_to_progress_log).parameters
        write = self._append_to_progress_log
        if "save_dir" in parameters:  # since 0.18
            write = partial(write, self._get_args().save)
        write(text, barrier=False)


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")


def _place() -> str:
    """Returns this rank's place in the parallelism, as Megatron writes it."""
    ps = parallel_state
    tp, pp = ps.get_tensor_model_parallel_rank() + 1, ps.get_pipeline_model_parallel_rank() + 1
    tps, pps = (
        ps.get_tensor_model_parallel_world_size(),
        ps.get_pipeline_model_parallel_world_size(),
    )
    return f"[ t {tp}/{tps}, p {pp}/{pps} ]"


def _when_committed(handle: InnerHandle, tell: Callable[[], None]) -> None:
    """Calls a hook, if the save has not failed; an error of the hook must not end training."""
    if handle.failure() is None:
        try:
            tell()
        except Exception as error:
            log.error("%r is committed, but a hook of Megatron's failed: %s", handle.path, error)
