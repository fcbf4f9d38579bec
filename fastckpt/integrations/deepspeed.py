"""DeepSpeed's checkpoints, written in the background; `latest` moves when all files are durable.

Responsible for DeepSpeed's CheckpointEngine protocol, and for knowing where a checkpoint begins and
ends.
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

_NO_STEP_FENCE = "DeepSpeed also changes states outside of optimizer steps, unseen by torch"
# Older versions tell a checkpoint engine nothing but the tag; see _ByTagAlone.
_TELLS_DIRECTORY = hasattr(checkpoint_engine, "CheckpointCommitInfo")


class CheckpointCommitInfo(NamedTuple):
    """The facts of a checkpoint, as in DeepSpeed's own class of that name."""

    tag: str
    save_dir: str
    save_latest: bool


def install(
    engine: Any,
    *,
    options: SaveOptions = SaveOptions(),
) -> FastckptCheckpointEngine:
    """Makes a DeepSpeed engine save and load through fastckpt; all ranks call it.

    engine.save_checkpoint() returns when this rank's state is copied. The files are those that
    stock DeepSpeed writes and reads. In the background, once every rank's files are durable, they
    take their names and `latest` is moved; nobody has to call anything for that. The next
    save_checkpoint() and engine.load_checkpoint() wait until it is done.

    Args:
        engine: the engine that deepspeed.initialize() returned, of any ZeRO stage, configured with
            neither `checkpoint.writer` nor `datastates_ckpt`.
        options: what becomes of errors, and how files are written (see SaveOptions); without the
            step fence. A tag that cannot be saved is logged, and `latest` stays; with
            on_error="raise" the next save_checkpoint(), which then does not begin, or
            engine.destroy() raises the error on all ranks.

    Returns:
        The checkpoint engine; its wait() returns when the last tag is committed.

    Raises:
        ValueError, TypeError: options have the step fence, or are none; the engine does not save by
            torch.save, or saves by fastckpt already.
    """
    saves_by = getattr(engine, "checkpoint_engine", None)
    if type(saves_by) is not TorchCheckpointEngine:
        raise ValueError(
            f"engine saves with {type(saves_by).__name__}, not with DeepSpeed's default: call "
            "install() once, with neither checkpoint.writer nor datastates_ckpt in the "
            "configuration"
        )
    kind = FastckptCheckpointEngine if _TELLS_DIRECTORY else _ByTagAlone
    saving = kind(options)
    if isinstance(saving, _ByTagAlone):
        saving.wrap(engine)
    save, load = engine.save_checkpoint, engine.load_checkpoint
    copy = engine._copy_recovery_script

    # The protocol does not tell where a checkpoint ends, or that DeepSpeed failed in its midst.
    @functools.wraps(save)
    def save_checkpoint(*args: Any, **options: Any) -> Any:
        with saving.whole_tag():
            return save(*args, **options)

    # DeepSpeed first reads `latest` and files of other ranks, which may still be on their way.
    @functools.wraps(load)
    def load_checkpoint(*args: Any, **options: Any) -> Any:
        saving.drain()
        return load(*args, **options)

    # Rank 0 alone copies it: if it raised, of a full disk, the others would wait for ever.
    @functools.wraps(copy)
    def copy_recovery_script(*args: Any) -> None:
        with saving.keeping():
            copy(*args)

    engine.checkpoint_engine = saving
    engine._copy_recovery_script = copy_recovery_script
    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
    return saving


class FastckptCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's CheckpointEngine over fastckpt; install() plugs it in.

    There is no step fence: ZenFlow, SuperOffload and NVMe swapping change states outside of
    optimizer steps, and DeepSpeed writes through `.data`, which version counters do not see. A view
    is saved with its whole storage, as by torch.save, so DeepSpeed clones where it has to.

    Attributes:
        handle: the SaveHandle of the tag saved last, or None. result() returns its SaveStats when
            `latest` names the tag or, with save_latest=False, when all its files are there.
    """

    def __init__(self, options: SaveOptions = SaveOptions()) -> None:
        super().__init__()
        self._options = WriteOptions.of(check_options(options, fence=_NO_STEP_FENCE))
        self.name = "fastckpt"
        self._saves = InFlight()
        self._coordinator: Coordinator | None = None
        self._open: Tag | None = None
        self._root = ""  # the directory of the tag saved last
        self._unmade: StorageError | None = None  # of a directory whose tag is not created yet
        self._earlier: CheckpointError | None = None  # of the tag before, for which this one fails

    @property
    def handle(self) -> InnerHandle | None:
        return self._saves.last

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begins a tag, after waiting for the one before; DeepSpeed calls it on all ranks.

        Errors fail the tag when it is concluded: DeepSpeed's collectives come between, in which
        the other ranks would wait for one that raises here.
        """
        unmade, self._unmade = self._unmade, None
        self._seal(CheckpointError(f"abandoned: tag {info.tag!r} began before it ended"))
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
        """Makes a directory. A failure is not raised but fails the tag that is open or is created
        next: rank 0 calls this alone, and the others would wait at a barrier for ever.
        """
        storage, directory = pipeline.current().storage, os.path.realpath(path)
        if self._open is not None and self._open.handle.path == directory:
            directory = os.path.dirname(directory)  # the tag gives its directory the name
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
        """Adds a file to the open tag, which is copied when the tag is concluded; saves one that
        belongs elsewhere, and returns when that is durable and committed.
        """
        tag, path = self._open, os.path.realpath(path)
        if tag is not None and path.startswith(os.path.join(tag.handle.path, "")):
            tag.add(state_dict, os.path.relpath(path, tag.handle.path))
            return
        with self.keeping():
            fastckpt.save(state_dict, path, options=self._options).result()

    def load(self, path: str, map_location: Any = None) -> Any:
        """Loads a file that fastckpt or torch wrote; every byte that fastckpt wrote is checked.

        Like DeepSpeed's own loads, this unpickles whatever the file holds (weights_only=False),
        since its states hold objects: load only files that you trust.

        Raises:
            CorruptCheckpoint: the file is damaged. FileNotFoundError: there is none.
        """
        return fastckpt.load(path, map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Waits until the tag begun by create() is committed on all ranks.

        DeepSpeed calls it for save_16bit_model(), which is therefore synchronous, and never for a
        checkpoint, which is committed in the background.

        Returns:
            Whether it was committed. With on_error="raise" a failure is raised instead.
        """
        with self.whole_tag():
            pass  # it is complete
        self.drain()
        handle = self._saves.last
        if handle is not None and handle.may_be_told():
            handle.result()
        return handle is None or handle.failure() is None

    def is_decoupled(self) -> bool:
        """Returns True: save_checkpoint() is not to commit or to move `latest`."""
        return True

    def get_commit_info(self) -> None:
        """Returns None: nothing is left for engine.step() to commit."""
        return None

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the tag saved last is committed on all ranks.

        Args:
            timeout: in seconds; None: for ever.

        Raises:
            CheckpointError: the tag could not be saved; PeerFailed: because of another rank.
            TimeoutError: it was not committed within `timeout`.
        """
        if self.handle is not None:
            self.handle.result(timeout)

    def drain(self) -> None:
        """Waits until the last tag has been committed or has failed."""
        self._saves.wait()

    def cleanup(self) -> None:
        """Waits for the last tag and closes the connection to the store, which a later save opens
        again; engine.destroy() calls it. Idempotent.

        Raises:
            CheckpointError: with on_error="raise", the last tag failed, and nobody asked for why.
        """
        self._seal(CheckpointError("abandoned: the engine is being destroyed"))
        self._saves.wait(FREEING_S)  # the round is closed in the end
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.close()
        give_up(self._root)
        self._saves.raise_first()

    @contextmanager
    def whole_tag(self) -> Iterator[None]:
        """Concludes the tag that the body, one save_checkpoint(), has begun; fails it if the body
        raises.
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
        """Keeps an error of the body as the open tag's, if there is one."""
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
    """The checkpoint engine for an older DeepSpeed, which tells it the tag alone, commits a
    checkpoint and moves `latest` before save_checkpoint() returns, and never calls cleanup().
    """

    _save_dir = ""
    _save_latest = False
    _in_background = False  # while DeepSpeed's save_checkpoint() runs

    def wrap(self, engine: Any) -> None:
        """Has the engine's saves say where they save to, and its destroy() wait for the last."""
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
                given["save_latest"] = False  # `latest` is moved when all is durable
            try:
                return save(*call.args, **call.kwargs)
            finally:
                self._in_background = False

        return say_and_save

    def create(self, tag: Any) -> None:
        super().create(CheckpointCommitInfo(tag, self._save_dir, self._save_latest))

    def commit(self, tag: Any) -> bool:
        return self._in_background or super().commit(tag)
