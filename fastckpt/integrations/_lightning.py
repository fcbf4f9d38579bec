"""The CheckpointIO and strategy methods of both Lightning packages, for files and sharded
directories.

Responsible for saving in the background, for removing a checkpoint only when a newer one is
committed, and for reporting errors. It must import neither package, nor know how a file is written.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import fastckpt
from fastckpt import CheckpointError
from fastckpt.arguments.options import SaveOptions, check_options
from fastckpt.directories.draft import Draft
from fastckpt.directories.save import save_directory, wait_for_directories
from fastckpt.directories.verify import newest_whole
from fastckpt.latch import Latch
from fastckpt.ranks.per_group import group_of_job
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle, SaveHandle, log_failure
from fastckpt.saving.in_flight import InFlight
from fastckpt.storage.atomic import make_directory, temporary_path
from fastckpt.storage.file_system import reported

log = logging.getLogger("fastckpt")

_NO_STEP_FENCE = "callbacks may change the state between two optimizer steps"


class BackgroundCheckpointIO:
    """A mixin for CheckpointIO classes, listed before the stock CheckpointIO, with background
    saves.

    The stock CheckpointIO, `_stock`, loads and removes checkpoints at URLs.
    """

    _stock: ClassVar[Any]

    def __init__(
        self,
        *,
        asynchronous: bool = True,
        options: SaveOptions = SaveOptions(),
    ) -> None:
        super().__init__()
        self._options = check_options(options, fence=_NO_STEP_FENCE)
        self._asynchronous = asynchronous
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._saves = InFlight(newest=2)
        self._removals: dict[str, _Removal] = {}
        self._kept: list[str] = []  # to be removed when a newer one is committed
        self.is_saving = False

    def __getstate__(self) -> dict[str, Any]:
        """Returns only the settings: saves in flight stay with this object, which waits for them
        and reports their errors.
        """
        return {name: value for name, value in vars(self).items() if name not in _OF_SAVES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_anew()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves to a file; returns when everything is copied or, where required, committed.

        Raises:
            CheckpointError: with on_error="raise": an earlier save failed, so this save was not
                begun; or the directory of this save cannot be made; or this save was waited for and
                failed.
            TypeError: storage_options is not None. ValueError: path is not on a file system.
            Exception: any error that torch.save raises for an object that cannot be pickled.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} does not take storage_options: pass None")
        local = _on_file_system(path)
        if self.is_saving:  # called by a signal handler: the interrupted save holds locks
            self._stock.save_checkpoint(self, checkpoint, path)
            return

        def begin() -> tuple[SaveHandle, bool]:
            directory, storage = os.path.dirname(local), pipeline.current().storage
            with reported("make directory", directory):
                if storage.status(directory) is None:
                    make_directory(storage, directory, self._options.durable)
                storage.make_directory(directory, parents=True)  # raises if it is a file
            has_links = _has_links(directory)
            _unlink_softly(local)
            return fastckpt.save(checkpoint, local, options=self._options), has_links

        self._save(local, begin)

    def save_shards(
        self, shards: dict[str, Any], others: dict[str, Any], path: str | os.PathLike[str]
    ) -> None:
        """Saves a directory to which each rank adds its shards. All ranks must call it. It returns
        and raises like save_checkpoint().

        Args:
            shards: a state dict with DTensors.
            others: the rest of the checkpoint; only the first rank's is saved.
            path: the directory's path; an existing directory is replaced completely.
        """
        local = _on_file_system(path)
        from fastckpt.integrations import dcp  # files do not need this

        options = replace(self._options, staging="host")

        def begin() -> tuple[SaveHandle, bool]:
            problem: OSError | None = None
            try:
                _unlink_softly(local)
            except OSError as error:
                problem = error
            has_links = list[bool]()

            def fill(draft: Draft) -> None:
                if problem is not None:  # raised here, so that all ranks receive it
                    raise problem
                agreement = draft.agreement
                if agreement.rank == 0:  # which makes the links
                    draft.add(others, _OTHERS)
                    there = _has_links(os.path.dirname(local))
                    # Called before this rank waits for other ranks' plans, because they wait for it
                    # in their calls.
                    agreement.put("links", b"there are some" if there else b"")
                dcp.add_to(draft, os.curdir, shards)
                has_links.append(bool(agreement.get("links")))

            handle = save_directory(local, fill, group=group_of_job(), options=options)
            return handle, any(has_links)

        self._save(local, begin)

    def _save(self, path: str, begin: Callable[[], tuple[SaveHandle, bool]]) -> None:
        """Begins a save, and waits for it where required. `begin` also returns whether the
        directory has links to files in it.
        """
        self.is_saving = True
        try:
            self._save_after_others(path, begin)
        finally:
            self.is_saving = False

    def _save_after_others(self, path: str, begin: Callable[[], tuple[SaveHandle, bool]]) -> None:
        removal = self._removals.pop(path, None)
        if removal is not None and not removal.cancel():
            removal.ended.wait()
        links = False
        try:
            handle, links = begin()
        except CheckpointError as error:
            if self._options.on_error == "raise":
                raise
            handle = InnerHandle(os.path.realpath(path), time.perf_counter(), on_error="warn")
            pipeline.current().refuse(handle, error, None)
        handle = cast(InnerHandle, handle)
        if self._options.on_error == "raise":
            handle.add_done_callback(log_failure)
        self._saves.add(handle)
        for _ in range(len(self._kept)):  # of the same list, to which another thread may add now
            other = self._kept.pop(0)
            if other != path:
                self.remove_checkpoint(other)
        if links:
            handle.result()
        elif not self._asynchronous or os.path.basename(path).startswith("hpc_ckpt_"):
            handle.wait_done()
            if self._options.on_error == "raise":
                handle.result()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> Any:
        """Loads a checkpoint of fastckpt, Lightning or torch, after waiting for this process's save
        to path.

        Args:
            path: a file's path, or a URL, which Lightning itself loads.
            map_location, weights_only: torch.load's arguments.

        Raises:
            CorruptCheckpoint: the file is damaged. FileNotFoundError: it does not exist.
        """
        local = _local(path)
        if local is None:
            return self._stock.load_checkpoint(self, path, map_location, **_given(weights_only))
        return fastckpt.load(local, map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint when the newest save to another path, or a later save, is
        committed.
        """
        local = _local(path)
        if local is None:
            self._stock.remove_checkpoint(self, path)
            return
        real = os.path.realpath(local)
        own = next((h for h in reversed(self._saves) if h.path == real), None)
        newest = next((h for h in reversed(self._saves) if h.path != real), None)
        removal = _Removal()
        self._removals = {p: r for p, r in self._removals.items() if not r.ended.is_set()}
        self._removals[local] = removal

        def remove(_own: Any = None) -> None:
            if not removal.claim():
                return
            try:
                if newest is not None and newest.failure() is not None:
                    self._kept.append(local)  # before `ended`: the next save may then begin at once
                    return
                self._stock.remove_checkpoint(self, local)
            except Exception as error:
                log.warning("%r could not be removed: %s", local, error)
            finally:
                removal.ended.set()

        def remove_after_own(_newest: Any = None) -> None:
            if own is None:
                remove()
            else:
                own.add_done_callback(remove)

        if newest is None:
            remove_after_own()
        else:
            newest.add_done_callback(remove_after_own)

    def teardown(self) -> None:
        """Waits for all saves and removals; Lightning calls it at the end of a fit.

        Raises:
            CheckpointError: with on_error="raise", the first failure that was not raised before.
        """
        self._saves.wait()
        for removal in self._removals.values():
            removal.ended.wait()
        self._removals.clear()
        self._saves.raise_first()


class ShardedStrategy:
    """A mixin for Lightning's strategies, listed before the stock strategy, which saves sharded
    checkpoints with the BackgroundCheckpointIO.
    """

    checkpoint_io: Any
    model: Any
    _save_distributed_checkpoint: bool

    def _saves_shards(self) -> bool:
        """Whether the CheckpointIO saves shards; it then copies them from the device itself."""
        is_ours = isinstance(self.checkpoint_io, BackgroundCheckpointIO)
        return is_ours and self._save_distributed_checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the model's state itself; the stock method would copy it to the host."""
        if not self._saves_shards():
            stock: dict[str, Any] = cast(Any, super()).lightning_module_state_dict()
            return stock
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns an optimizer's state itself; the stock method would copy it to the host."""
        if not self._saves_shards():
            stock: dict[str, Any] = cast(Any, super()).optimizer_state(optimizer)
            return stock
        return dict(
            get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))
        )

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Saves with the CheckpointIO. All ranks must call it.

        Raises:
            ValueError: the Trainer has no FastckptCheckpointIO in its plugins.
        """
        stock: Any = super()
        if not isinstance(self.checkpoint_io, BackgroundCheckpointIO):
            raise ValueError(
                f"the CheckpointIO is a {type(self.checkpoint_io).__name__}, but a "
                f"{type(self).__name__} needs Trainer(plugins=[FastckptCheckpointIO()])"
            )
        by_stock = self.checkpoint_io.is_saving or storage_options is not None
        if by_stock or not self._save_distributed_checkpoint:
            stock.save_checkpoint(checkpoint, filepath, storage_options)
            return
        optimizers = enumerate(checkpoint.pop("optimizer_states", []))
        shards = {"state_dict": checkpoint.pop("state_dict")}
        shards |= {f"optimizer_{number}": state for number, state in optimizers}
        path = cast(Any, self).broadcast(filepath)
        self.checkpoint_io.save_shards(shards, checkpoint, path)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> Any:
        """Waits for this process's save to the path, verifies a sharded checkpoint, and loads it.

        Raises:
            CorruptCheckpoint: a file is damaged or missing.
        """
        path = _local(checkpoint_path)
        if path is not None:
            wait_for_directories(os.path.dirname(os.path.realpath(path)))
            newest_whole(lambda: [path] if os.path.isdir(path) else [], group_of_job())
        return cast(Any, super()).load_checkpoint(checkpoint_path, **_given(weights_only))

    def teardown(self) -> None:
        """Waits for all saves, while the ranks can still communicate."""
        try:
            self.checkpoint_io.teardown()
        finally:
            cast(Any, super()).teardown()


_OTHERS = "meta.pt"  # in a sharded checkpoint of Lightning
_OF_SAVES = ("_saves", "_removals", "_kept", "is_saving")


class _Removal:
    """A file to be removed. The first thread that claims it removes or keeps it.

    Attributes:
        ended: set when the file is removed or kept.
    """

    def __init__(self) -> None:
        self.ended = Latch()
        self._claims = [None]

    def claim(self) -> bool:
        """Returns whether the caller is the first to claim the file."""
        try:  # pop() is atomic and takes no lock, which an interrupted thread might hold
            self._claims.pop()
        except IndexError:
            return False
        return True

    def cancel(self) -> bool:
        """Keeps the file, unless it is already claimed."""
        claimed = self.claim()
        if claimed:
            self.ended.set()
        return claimed


def _given(weights_only: bool | None) -> dict[str, bool]:
    """Returns the keyword argument for a stock method. None omits it, for Lightning 2.5 lacks
    it.
    """
    return {} if weights_only is None else {"weights_only": weights_only}


def _local(path: str | os.PathLike[str]) -> str | None:
    """Returns the absolute path in a file system; None for a URL of other storage."""
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if separator and scheme not in ("file", "local"):
        return None
    return os.path.abspath(os.path.expanduser(rest if separator else text))


def _on_file_system(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path; raises ValueError for a URL of other storage."""
    local = _local(path)
    if local is None:
        raise ValueError(f"path is {path!r}, must be on a mounted file system")
    return local


def _has_links(directory: str) -> bool:
    """Whether a symbolic link in the directory names a file in it.
    ModelCheckpoint(save_last="link") makes such a link right after the save, and the saved file
    must exist then.
    """
    if not os.path.isdir(directory):  # the save makes it
        return False
    with reported("list", directory), os.scandir(directory) as entries:
        links = [entry.path for entry in entries if entry.is_symlink()]
    return any(os.path.dirname(os.readlink(link)) in ("", os.curdir) for link in links)


def _unlink_softly(path: str) -> None:
    """Replaces a symbolic link by a hard link, because a save through it would replace its
    target.
    """
    if os.path.islink(path):
        storage = pipeline.current().storage
        spare = temporary_path(path)  # the next save removes it if this process ends here
        try:
            storage.link(os.path.realpath(path), spare)
            storage.rename(spare, path)
        except OSError:
            with suppress(FileNotFoundError):
                storage.remove(path)  # its target is missing, or cannot have a second name
