"""Writes DeepSpeed's checkpoints in the background, and updates `latest` when all files are
durable.

Responsible for DeepSpeed's CheckpointEngine protocol, and for detecting where a checkpoint begins
and ends.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist

import fastckpt
from fastckpt import CheckpointError, StorageError
from fastckpt.arguments.checks import check_path
from fastckpt.arguments.options import SaveOptions, WriteOptions, check_options
from fastckpt.integrations import require
from fastckpt.integrations._tag import Tag
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.in_flight import InFlight
from fastckpt.saving.lease import give_up
from fastckpt.saving.pipeline import FREEING_S
from fastckpt.storage.atomic import make_directory
from fastckpt.storage.file_system import reported

require("deepspeed", "0.16", "0.20", __name__)

from deepspeed.runtime.checkpoint_engine import checkpoint_engine  # noqa: E402
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine  # noqa: E402
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import (  # noqa: E402
    TorchCheckpointEngine,
)

_NO_STEP_FENCE = (
    "DeepSpeed also changes states outside of optimizer steps, where torch does not notice it"
)
# Older versions pass a checkpoint engine only the tag's name; see _ByTagAlone.
_TELLS_DIRECTORY = hasattr(checkpoint_engine, "CheckpointCommitInfo")


class CheckpointCommitInfo(NamedTuple):
    """A checkpoint's tag and directory, like DeepSpeed's own class of that name."""

    tag: str
    save_dir: str
    save_latest: bool


def install(
    engine: Any,
    *,
    options: SaveOptions = SaveOptions(),
) -> FastckptCheckpointEngine:
    """Makes a DeepSpeed engine save and load through fastckpt. All ranks must call it.

    engine.save_checkpoint() returns when this rank's state is copied. The files have stock
    DeepSpeed's names and formats. Once every rank's files are durable, they are committed and
    `latest` is updated in the background, without another call. The next save_checkpoint() or
    engine.load_checkpoint() waits for this.

    Args:
        engine: the engine that deepspeed.initialize() returned, of any ZeRO stage, configured with
            neither `checkpoint.writer` nor `datastates_ckpt`.
        options: how errors are handled and files are written (see SaveOptions); the step fence is
            not supported. If a tag cannot be saved, the error is logged and `latest` does not
            change. With on_error="raise", the next save_checkpoint() or engine.destroy() raises the
            error on all ranks, and that save does not begin.

    Returns:
        The checkpoint engine. Its wait() returns when the last tag is committed.

    Raises:
        ValueError, TypeError: `options` has the step fence or is not a SaveOptions; or the engine
            does not save with torch.save, or already saves with fastckpt.
    """
    saves_by = getattr(engine, "checkpoint_engine", None)
    if type(saves_by) is not TorchCheckpointEngine:
        raise ValueError(
            f"engine saves with {type(saves_by).__name__}, must save with DeepSpeed's default: "
            "call install() once, with neither checkpoint.writer nor datastates_ckpt in the "
            "configuration"
        )
    kind = FastckptCheckpointEngine if _TELLS_DIRECTORY else _ByTagAlone
    saving = kind(options)
    if isinstance(saving, _ByTagAlone):
        saving.wrap(engine)
    save, load = engine.save_checkpoint, engine.load_checkpoint
    copy = engine._copy_recovery_script

    # The protocol does not report the end of a checkpoint, or a failure of DeepSpeed before it.
    @functools.wraps(save)
    def save_checkpoint(*args: Any, **options: Any) -> Any:
        with saving.whole_tag():
            return save(*args, **options)

    # DeepSpeed first reads `latest` and other ranks' files, which may still be being written.
    @functools.wraps(load)
    def load_checkpoint(*args: Any, **options: Any) -> Any:
        saving.drain()
        return load(*args, **options)

    # Only rank 0 copies it. If rank 0 raised, as on a full disk, the other ranks would wait
    # forever.
    @functools.wraps(copy)
    def copy_recovery_script(*args: Any) -> None:
        with saving.keeping():
            copy(*args)

    engine.checkpoint_engine = saving
    engine._copy_recovery_script = copy_recovery_script
    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
    return saving


class FastckptCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """A DeepSpeed CheckpointEngine that saves and loads with fastckpt. Use install() to set it up.

    The step fence is not supported, because ZenFlow, SuperOffload and NVMe swapping change states
    outside of optimizer steps, and because DeepSpeed writes through `.data`, which does not
    increment version counters. A view is saved with its whole storage, like torch.save does;
    DeepSpeed clones views where this matters.

    Attributes:
        handle: the SaveHandle of the last tag, or None. Its result() returns the SaveStats when
            `latest` names the tag or, with save_latest=False, when all the tag's files are
            committed.
    """

    def __init__(self, options: SaveOptions = SaveOptions()) -> None:
        super().__init__()
        self._options = WriteOptions.of(check_options(options, fence=_NO_STEP_FENCE))
        self.name = "fastckpt"
        self._saves = InFlight()
        self._coordinator: Coordinator | None = None
        self._open: Tag | None = None
        self._root = ""  # the directory that holds the last tag
        self._unmade: StorageError | None = None  # from makedirs() before create()
        self._earlier: CheckpointError | None = (
            None  # the previous tag's error, which fails this tag
        )

    @property
    def handle(self) -> InnerHandle | None:
        return self._saves.last

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begins a tag after waiting for the previous one. DeepSpeed calls it on all ranks.

        An error is not raised here but fails the tag when it is concluded. If it were raised, the
        other ranks would wait for this rank in the collectives that DeepSpeed runs in between.
        """
        unmade, self._unmade = self._unmade, None
        self._seal(CheckpointError(f"abandoned, because tag {info.tag!r} began before it ended"))
        self.drain()
        directory = os.path.realpath(check_path("save_dir", info.save_dir))
        path = os.path.realpath(os.path.join(directory, info.tag))
        latest = os.path.join(directory, "latest") if info.save_latest else ""
        self._root = directory
        self._open = Tag(path, latest, info.tag, self._options, directory)
        with self._open.keeping():
            try:
                self._saves.raise_first(not_begun=path)
            except CheckpointError as error:
                self._earlier = error
                raise
            if unmade is not None:
                raise unmade

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a directory. A failure is not raised but fails the open tag or the next one,
        because only rank 0 calls this and the others would wait at a barrier forever.
        """
        storage, directory = pipeline.current().storage, os.path.realpath(path)
        if self._open is not None and self._open.handle.path == directory:
            directory = os.path.dirname(directory)  # the commit creates the tag's directory
        try:
            with reported("make directory", path):
                if storage.status(directory) is None:
                    make_directory(storage, directory, self._options.durable)
                super().makedirs(path, exist_ok)
        except StorageError as error:
            if self._open is None:
                self._unmade = error
                return
            with self._open.keeping():
                raise

    def save(self, state_dict: Any, path: str) -> None:
        """Adds a file to the open tag; its data is copied when the tag is concluded. A file outside
        the tag's directory is saved at once, and save() returns when it is durable and committed.
        """
        tag, path = self._open, os.path.realpath(path)
        if tag is not None and path.startswith(os.path.join(tag.handle.path, "")):
            tag.add(state_dict, os.path.relpath(path, tag.handle.path))
            return
        with self.keeping():
            fastckpt.save(state_dict, path, options=self._options).result()

    def load(self, path: str, map_location: Any = None) -> Any:
        """Loads a file that fastckpt or torch wrote, and verifies every byte that fastckpt wrote.

        Like DeepSpeed's own loads, this unpickles any object (weights_only=False), because
        DeepSpeed's states contain objects. Load only files that you trust.

        Raises:
            CorruptCheckpoint: the file is damaged. FileNotFoundError: it does not exist.
        """
        return fastckpt.load(path, map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Waits until the tag begun by create() is committed on all ranks.

        DeepSpeed calls it only for save_16bit_model(), which is therefore synchronous. Checkpoints
        are committed in the background.

        Returns:
            Whether the tag was committed. With on_error="raise" a failure is raised instead.
        """
        with self.whole_tag():
            pass  # it is complete
        self.drain()
        handle = self._saves.last
        if handle is not None and handle.may_be_told():
            handle.result()
        return handle is None or handle.failure() is None

    def is_decoupled(self) -> bool:
        """Returns True, so that save_checkpoint() neither commits nor updates `latest`."""
        return True

    def get_commit_info(self) -> None:
        """Returns None, because engine.step() has nothing to commit."""
        return None

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the last tag is committed on all ranks.

        Args:
            timeout: the longest wait in seconds; None: no limit.

        Raises:
            CheckpointError: the tag could not be saved; PeerFailed: another rank failed.
            TimeoutError: it was not committed within `timeout`.
        """
        if self.handle is not None:
            self.handle.result(timeout)

    def drain(self) -> None:
        """Waits until the last tag has been committed or has failed."""
        self._saves.wait()

    def cleanup(self) -> None:
        """Waits for the last tag and closes the connection to the store. engine.destroy() calls it.
        A later save opens the connection again. Idempotent.

        Raises:
            CheckpointError: with on_error="raise", the last tag failed and its error was not raised
                yet.
        """
        self._seal(CheckpointError("abandoned, because the engine is being destroyed"))
        self._saves.wait(FREEING_S)  # the round is closed at the end
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.close()
        give_up(self._root)
        self._saves.raise_first()

    @contextmanager
    def whole_tag(self) -> Iterator[None]:
        """Concludes the tag that the body (one save_checkpoint() call) began, or fails the tag if
        the body raises.
        """
        try:
            yield
            earlier, self._earlier = self._earlier, None
            if earlier is not None:
                raise earlier
            if self._open is not None:
                self._open.raise_mistake()
        except BaseException as error:
            if self._open is not None:
                self._open.handle.note_reported()
            self._seal(error)
            raise
        self._seal()

    def keeping(self) -> AbstractContextManager[object]:
        """Stores an error of the body as the open tag's error, if a tag is open."""
        return nullcontext() if self._open is None else self._open.keeping()

    def _seal(self, error: BaseException | None = None) -> None:
        tag, self._open = self._open, None
        if tag is not None:
            self._saves.add(tag.handle)
            if self._coordinator is None:
                self._coordinator = Coordinator.of_group(dist.group.WORLD, "deepspeed")
            label = f"save of tag {tag.content!r}"
            tag.conclude(self._coordinator.begin(label, self._options.timeout_s), error)


class _ByTagAlone(FastckptCheckpointEngine):
    """The checkpoint engine for older DeepSpeed versions, which pass only the tag's name to
    create(), commit and update `latest` before save_checkpoint() returns, and never call cleanup().
    """

    _save_dir = ""
    _save_latest = False
    _in_background = False  # while DeepSpeed's save_checkpoint() runs

    def wrap(self, engine: Any) -> None:
        """Wraps the engine's saves to record their directories, and its destroy() to wait for the
        last save.
        """
        engine.save_checkpoint = self._saying(engine.save_checkpoint)
        engine.save_16bit_model = self._saying(engine.save_16bit_model)
        destroy = engine.destroy

        @functools.wraps(destroy)
        def destroy_and_wait() -> None:
            destroy()
            self.cleanup()

        engine.destroy = destroy_and_wait

    def _saying(self, save: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(save)

        @functools.wraps(save)
        def say_and_save(*args: Any, **options: Any) -> Any:
            call = signature.bind(*args, **options)
            call.apply_defaults()
            given = call.arguments
            self._save_dir = given["save_dir"]
            self._in_background = "save_latest" in given
            self._save_latest = self._in_background and given["save_latest"]
            if self._in_background:
                given["save_latest"] = False  # `latest` is updated when all files are durable
            try:
                return save(*call.args, **call.kwargs)
            finally:
                self._in_background = False

        return say_and_save

    def create(self, tag: Any) -> None:
        super().create(CheckpointCommitInfo(tag, self._save_dir, self._save_latest))

    def commit(self, tag: Any) -> bool:
        return self._in_background or super().commit(tag)
