"""A Lightning CheckpointIO's work with files, and with directories of shards for a strategy, for
both packages that Lightning comes in.

Responsible for saving in the background, for removing a checkpoint only once a newer one has
committed, and for telling errors. It must import neither package, nor know how a file is written.
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
    """The methods of a CheckpointIO, put before the stock one among the bases of a class.

    The stock one, `_stock`, loads and removes what lies on no file system (a URL).
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
        self._kept: list[str] = []  # to be removed when there is something newer
        self.is_saving = False

    def __getstate__(self) -> dict[str, Any]:
        """Returns the settings alone: saves in flight stay with this object, which waits for them
        and tells their errors.
        """
        return {name: value for name, value in vars(self).items() if name not in _OF_SAVES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_anew()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves to a file; returns when everything is copied or, where it has to, committed.

        Raises:
            CheckpointError: with on_error="raise": an earlier save failed, and this one is not
                begun; or this one's directory cannot be made, or it failed and was waited for.
            TypeError: there are storage_options. ValueError: path is not on a file system.
            Exception: whatever torch.save raises for an object that cannot be pickled.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} does not take storage_options: pass None")
        local = _on_file_system(path)
        if self.is_saving:  # a signal handler calls this: the save it interrupts holds locks
            self._stock.save_checkpoint(self, checkpoint, path)
            return

        def begin() -> tuple[SaveHandle, bool]:
            directory, storage = os.path.dirname(local), pipeline.current().storage
            with reported("make directory", directory):
                if storage.status(directory) is None:
                    make_directory(storage, directory, self._options.durable)
                storage.make_directory(directory, parents=True)  # which says so if it is a file
            has_links = _has_links(directory)
            _unlink_softly(local)
            return fastckpt.save(checkpoint, local, options=self._options), has_links

        self._save(local, begin)

    def save_shards(
        self, shards: dict[str, Any], others: dict[str, Any], path: str | os.PathLike[str]
    ) -> None:
        """Saves a directory, to which each rank adds its shards; all ranks call it. It returns, and
        raises, as save_checkpoint() does.

        Args:
            shards: a state dict with DTensors.
            others: what else belongs to the checkpoint; that of the first rank counts.
            path: of the directory; what is there is replaced as a whole.
        """
        local = _on_file_system(path)
        from fastckpt.integrations import dcp  # which files do not need

        options = replace(self._options, staging="host")

        def begin() -> tuple[SaveHandle, bool]:
            problem: OSError | None = None
            try:
                _unlink_softly(local)
            except OSError as error:
                problem = error
            has_links = list[bool]()

            def fill(draft: Draft) -> None:
                if problem is not None:  # it is raised here, so that all ranks hear of it
                    raise problem
                agreement = draft.agreement
                if agreement.rank == 0:  # which makes the links
                    draft.add(others, _OTHERS)
                    there = _has_links(os.path.dirname(local))
                    # Before it may wait for other ranks' plans: they wait for this in their calls.
                    agreement.put("links", b"there are some" if there else b"")
                dcp.add_to(draft, os.curdir, shards)
                has_links.append(bool(agreement.get("links")))

            handle = save_directory(local, fill, group=group_of_job(), options=options)
            return handle, any(has_links)

        self._save(local, begin)

    def _save(self, path: str, begin: Callable[[], tuple[SaveHandle, bool]]) -> None:
        """Begins a save, and waits for it where it has to: `begin` also returns whether there are
        links to files beside this one.
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
        """Loads what fastckpt, Lightning or torch saved; waits for a save to path in this process.

        Args:
            path: of a file, or a URL, from which Lightning itself loads.
            map_location, weights_only: as torch.load's.

        Raises:
            CorruptCheckpoint: the file is damaged. FileNotFoundError: there is none.
        """
        local = _local(path)
        if local is None:
            return self._stock.load_checkpoint(self, path, map_location, **_given(weights_only))
        return fastckpt.load(local, map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint once the newest save to another path, or a later one, commits."""
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
                    self._kept.append(local)  # before `ended`: the next save may then come at once
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
    """The methods of a strategy, put before the stock one among the bases of a class, that save
    sharded checkpoints by its BackgroundCheckpointIO.
    """

    checkpoint_io: Any
    model: Any
    _save_distributed_checkpoint: bool

    def _saves_shards(self) -> bool:
        """Whether the CheckpointIO saves shards, and so copies them from where they are."""
        is_ours = isinstance(self.checkpoint_io, BackgroundCheckpointIO)
        return is_ours and self._save_distributed_checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the model's state, of which the stock method would make a copy on the host."""
        if not self._saves_shards():
            stock: dict[str, Any] = cast(Any, super()).lightning_module_state_dict()
            return stock
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns an optimizer's state, of which the stock method would make a copy on the host."""
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
        """Saves as the CheckpointIO does; all ranks call it.

        Raises:
            ValueError: the Trainer has no FastckptCheckpointIO among its plugins.
        """
        stock: Any = super()
        if not isinstance(self.checkpoint_io, BackgroundCheckpointIO):
            raise ValueError(
                f"the CheckpointIO is a {type(self.checkpoint_io).__name__}: a "
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
        """Waits for a save to the path in this process, verifies a sharded checkpoint, and loads.

        Raises:
            CorruptCheckpoint: a file is damaged or missing.
        """
        path = _local(checkpoint_path)
        if path is not None:
            wait_for_directories(os.path.dirname(os.path.realpath(path)))
            newest_whole(lambda: [path] if os.path.isdir(path) else [], group_of_job())
        return cast(Any, super()).load_checkpoint(checkpoint_path, **_given(weights_only))

    def teardown(self) -> None:
        """Waits for all saves, while the ranks can still hear each other."""
        try:
            self.checkpoint_io.teardown()
        finally:
            cast(Any, super()).teardown()


_OTHERS = "meta.pt"  # in a sharded checkpoint of Lightning
_OF_SAVES = ("_saves", "_removals", "_kept", "is_saving")


class _Removal:
    """A file to be removed: whoever claims it first removes it, or keeps it.

    Attributes:
        ended: set when that is done.
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
        """Keeps the file, unless somebody has claimed it."""
        claimed = self.claim()
        if claimed:
            self.ended.set()
        return claimed


def _given(weights_only: bool | None) -> dict[str, bool]:
    """Returns the argument for a stock method, which Lightning 2.5 has not: None leaves it out."""
    return {} if weights_only is None else {"weights_only": weights_only}


def _local(path: str | os.PathLike[str]) -> str | None:
    """Returns the absolute path in a file system; None: it is a URL of something else."""
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if separator and scheme not in ("file", "local"):
        return None
    return os.path.abspath(os.path.expanduser(rest if separator else text))


def _on_file_system(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path; raises ValueError for a URL of something else."""
    local = _local(path)
    if local is None:
        raise ValueError(f"{path!r} is not on a file system: give the path of a mounted one")
    return local


def _has_links(directory: str) -> bool:
    """Whether a symbolic link names a file beside it: ModelCheckpoint(save_last="link") makes one
    right after the save, whose file has to exist by then.
    """
    if not os.path.isdir(directory):  # the save makes it
        return False
    with reported("list", directory), os.scandir(directory) as entries:
        links = [entry.path for entry in entries if entry.is_symlink()]
    return any(os.path.dirname(os.readlink(link)) in ("", os.curdir) for link in links)


def _unlink_softly(path: str) -> None:
    """Replaces a symbolic link by a hard one: a save through it would replace what it names."""
    if os.path.islink(path):
        storage = pipeline.current().storage
        spare = temporary_path(path)  # which the next save removes, should this process end here
        try:
            storage.link(os.path.realpath(path), spare)
            storage.rename(spare, path)
        except OSError:
            with suppress(FileNotFoundError):
                storage.remove(path)  # it names nothing, or a file that can have one name only
