"""torch.distributed.checkpoint (DCP) on fastckpt's engine: save and async_save, and a Writer and a
Reader for torch's own save, async_save and load.

Responsible for DCP's signatures and contracts, and for planning a save with DCP's planners. It must
not know the bytes of the files, how a block moves, or how ranks communicate.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from typing import Any

from fastckpt.integrations import require

require("torch", "2.6", "3", __name__)  # before the imports that need it

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter

from fastckpt.arguments.environment import launched_rank
from fastckpt.arguments.options import SaveOptions
from fastckpt.directories import dcp_metadata
from fastckpt.directories.draft import Draft
from fastckpt.directories.items_plan import Places
from fastckpt.directories.place import Write
from fastckpt.errors import CheckpointError
from fastckpt.integrations.dcp import plan_exchange as dcp_plans
from fastckpt.integrations.dcp.reader import Reader
from fastckpt.integrations.dcp.writer import Writer, results_of
from fastckpt.latch import SignalSafeFuture
from fastckpt.ranks.coordinator import Coordinator, warn_of_unknown_ranks
from fastckpt.ranks.per_group import PerGroup
from fastckpt.ranks.same_state import Apart, Records
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle, SaveHandle
from fastckpt.storage.lustre_layout import Purpose

__all__ = ["Reader", "Saving", "Writer", "async_save", "save"]


class Saving(SaveHandle):
    """A fastckpt.SaveHandle that is also a Future of the Metadata, like the result of torch's
    async_save.

    Its callbacks run on a fastckpt thread as soon as the checkpoint is committed or has failed.
    """

    _metadata: Metadata | None = None
    _file = ""

    def result(self, timeout: float | None = None) -> Metadata:  # type: ignore[override]
        """Waits at most `timeout` seconds for the commit, and returns the Metadata.

        On all ranks but the first, its members are read from the checkpoint when one of them is
        first used. This raises CheckpointError if the checkpoint cannot be read, or was removed or
        replaced after the save, and a Reader's error if a Reader refuses the contents.

        Raises:
            CheckpointError: the save failed. TimeoutError: it was not committed within `timeout`.
        """
        super().result(timeout)
        if self._metadata is None:
            self._metadata = _UnreadMetadata(self.path, self._file)
        return self._metadata


class _UnreadMetadata(Metadata):
    """The Metadata of a checkpoint that another rank committed, read when it is first used.

    Few callers read the result of a save, and for thousands of ranks it is a file of many
    megabytes. The file is read when a member is first used; then this object becomes a plain
    Metadata.

    Args:
        path: the checkpoint's directory.
        own_file: the name of this rank's file in the directory; "": it has no file.
    """

    def __init__(self, path: str, own_file: str) -> None:
        self._source = (path, own_file)

    def __getattribute__(self, name: str) -> Any:
        if name in _MEMBERS:
            own = object.__getattribute__(self, "__dict__")
            source = own.get("_source")
            if source is not None:  # otherwise another thread has just read it
                own.update(vars(_metadata_of(*source)))
                own.pop("_source", None)
                self.__class__ = Metadata  # type: ignore[assignment]
        return object.__getattribute__(self, name)

    def __eq__(self, other: object) -> bool:
        _ = self.storage_data  # becomes a plain Metadata
        return self == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (_metadata_of(*self._source),)


_MEMBERS = frozenset(field.name for field in fields(Metadata))


def _metadata_of(path: str, own_file: str) -> Metadata:
    storage = pipeline.current().storage
    try:
        metadata = dcp_metadata.read(storage, os.path.join(path, dcp_metadata.NAME), True)
    except FileNotFoundError as error:
        raise CheckpointError(f"the checkpoint {path!r} was removed after its save") from error
    if own_file and own_file not in {its.relative_path for its in metadata.storage_data.values()}:
        raise CheckpointError(f"the checkpoint {path!r} was replaced by another one after its save")
    return metadata


class _Saving(Saving, InnerHandle):
    """The implementation of Saving."""


class _Staged(SignalSafeFuture[None]):
    """A future that is done when the state may change; for AsyncSaveResponse.staging_completion."""

    def __init__(self, handle: InnerHandle) -> None:
        super().__init__()
        self._handle = handle
        handle.add_done_callback(lambda _: self.set_result(None))

    def done(self) -> bool:
        return self._handle.is_staged()

    def result(self, timeout: float | None = None) -> None:
        self._handle.wait_staged(timeout)


class _Shared:
    """The objects that a process keeps between saves of a group of ranks."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.plans = dcp_plans.PlanExchange()


_shared = PerGroup("dcp", _Shared)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    async_checkpointer_type: Any = None,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    options: SaveOptions | None = None,
) -> Any:
    """Saves a state like torch.distributed.checkpoint.async_save, with fastckpt's staging, in one
    pass from the tensors to the file.

    Ranks agree over the job's store, and no collective runs on any process group. Plans are
    exchanged only if a plan has changed. A rank whose own plan has changed waits for this exchange
    in the call; the other ranks return without waiting and agree in the background. When every rank
    has written its file, the first rank commits in the background, without another call.

    Args:
        state_dict, checkpoint_id, planner, process_group, no_dist, use_collectives: torch's
            arguments.
        storage_writer: a Writer; default: Writer(checkpoint_id).
        async_checkpointer_type: not used: fastckpt's threads need neither a process nor the GIL.
        async_stager: not used. If it stages asynchronously, the result is an AsyncSaveResponse,
            like torch's since torch 2.9.
        options: how this save is made (see SaveOptions); None: the Writer's options. With
            on_error="warn", a CheckpointError in this call is raised by result() instead.

    Returns:
        A Saving: a Future whose result is the Metadata.

    Raises:
        CheckpointError: an earlier save failed; or this rank's plan has changed, and another rank
            failed to plan (PeerFailed).
        Exception: any error that the planner raises in the call. If create_global_plan raises in
            the background, result() raises the error.
        TypeError, ValueError: storage_writer is not a Writer, or storage_writer and checkpoint_id
            are both missing; or another argument is invalid.
    """
    started = time.perf_counter()
    writer = _writer(storage_writer, checkpoint_id, options)
    on_error, timeout_s = writer.options.on_error, writer.options.timeout_s
    group, rank = _group(process_group, no_dist)
    if group is None and not no_dist:
        warn_of_unknown_ranks(f"the save to {writer.path!r}", launched_rank())
    shared = _shared.of(group if use_collectives else None)
    handle = _Saving(writer.path, started, kind="dcp", on_error=on_error)
    handled = sys.exc_info()[1]
    state = _stated(state_dict)  # may gather, so it precedes all that may fail on one rank
    try:
        agreement = shared.coordinator.begin(f"dcp save to {writer.path!r}", timeout_s)
        with agreement.failing():
            pipeline.current().raise_unreported(writer.path, handle.kind, on_error)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=use_collectives)
            planner = DefaultSavePlanner() if planner is None else planner
            planning = _planned(shared.plans, agreement, writer, planner, state)
            place = writer.place(agreement)
            conclusion = _Conclusion(writer, planning, place.publish, handle)
            job = writer.save(handle, agreement, place, planning.staged, planner, conclusion)
        pipeline.current().save(job)
    except CheckpointError as error:
        if on_error == "raise":
            raise
        if not handle.done():
            pipeline.current().refuse(handle, error, handled)
    response: Any = getattr(state_dict_saver, "AsyncSaveResponse", None)
    is_blocking = async_stager is None or isinstance(async_stager, BlockingAsyncStager)
    if response is None or is_blocking:
        return handle
    return response(staging_completion=_Staged(handle), upload_completion=handle)


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    options: SaveOptions | None = None,
) -> Metadata:
    """Saves like torch.distributed.checkpoint.save. It is the same as async_save(...).result(), so
    the fence of `options` has no effect.
    """
    saving = async_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
        options=options,
    )
    metadata: Metadata = saving.result()
    return metadata


def _writer(storage_writer: Any, checkpoint_id: Any, options: SaveOptions | None) -> Writer:
    if storage_writer is None:
        if not checkpoint_id:
            raise ValueError("checkpoint_id must be given if storage_writer is None")
        return Writer(checkpoint_id, options=SaveOptions() if options is None else options)
    if not isinstance(storage_writer, Writer):
        raise TypeError(
            f"storage_writer is a {type(storage_writer).__name__}, must be a {__name__}.Writer: "
            "pass other writers to torch.distributed.checkpoint.async_save"
        )
    if checkpoint_id is None:
        checkpoint_id = storage_writer.path
    # A copy, because the caller may use the writer again while this save runs.
    writer = storage_writer.with_options(storage_writer.options if options is None else options)
    writer.reset(checkpoint_id)
    storage_writer.path, storage_writer.save_id = writer.path, writer.save_id
    return writer


def _group(process_group: Any, no_dist: bool) -> tuple[Any, int]:
    """Returns the process group that saves (None: this process alone) and this process's rank in
    it.
    """
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return None, 0
    group = dist.group.WORLD if process_group is None else process_group
    return group, dist.get_rank(group)


def add_to(
    draft: Draft,
    name: str,
    state_dict: dict[str, Any],
    planner: SavePlanner | None = None,
) -> None:
    """Adds a DCP checkpoint to the draft of a directory that all ranks of the job save. It is
    planned and captured now, as in async_save(), and committed with that directory.

    Args:
        name: the name of the checkpoint's subdirectory. All ranks must add the same names in the
            same order.
        state_dict, planner: like async_save's.
    """
    group, rank = _group(None, draft.agreement.world_size == 1)
    agreement = Apart(draft.agreement, name)
    writer = Writer(os.path.join(draft.path, name), options=draft.options)
    writer.set_up_storage_writer(rank == 0, rank=rank)
    planner = DefaultSavePlanner() if planner is None else planner
    state = _stated(state_dict)

    def agree_before() -> None:
        for items in draft.items:
            items.agree_on_items()

    plans = _shared.of(group).plans
    planning = _planned(plans, agreement, writer, planner, state, agree_before)
    directory = os.path.join(draft.directory, name)

    def made(file: str, purpose: Purpose) -> AbstractContextManager[tuple[int, str]]:
        return draft.made(os.path.normpath(os.path.join(name, file)), purpose)

    conclusion = _Conclusion(writer, planning, lambda write: write(directory))
    draft.add_items(writer.items(planning.staged, planner, conclusion, directory, made))


def _stated(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict in which each Stateful object is replaced by its state_dict()."""
    return {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()}


def _planned(
    plans: dcp_plans.PlanExchange,
    agreement: Records,
    writer: Writer,
    planner: SavePlanner,
    state: dict[str, Any],
    agree_before: Callable[[], None] = lambda: None,
) -> _Planning:
    """Returns the planning of a save, when this rank's list of items to copy is known.

    Args:
        agree_before: called before this waits for other ranks. It agrees with them on all earlier
            items, because another rank may be waiting for that.
    """
    writer.by_torch = False
    settings = dcp_plans.settings_of(planner)
    dcp_plans.set_up(planner, state, writer.storage_meta(), agreement.rank == 0)
    local = writer.prepare_local_plan(planner.create_local_plan())
    offer = plans.offer(settings, local)
    if offer.guess is None:
        agree_before()
    return _Planning(plans, agreement, writer, planner, offer)


class _Planning:
    """The planning of one save with the other ranks. If this rank's plan has changed, ranks plan
    before anything is copied; otherwise agree() plans during or after the copy.

    Attributes:
        staged: the plan of the items that this rank copies.
        final: the part of `staged` that this rank adds to the checkpoint, once ranks have agreed.
        metadata: the checkpoint's metadata, on the first rank.
    """

    def __init__(
        self,
        plans: dcp_plans.PlanExchange,
        agreement: Records,
        writer: Writer,
        planner: SavePlanner,
        offer: dcp_plans.Offer,
    ) -> None:
        self._plans, self._agreement, self._offer = plans, agreement, offer
        self._writer, self._planner = writer, planner
        self.final: SavePlan | None = None
        self.metadata: Metadata | None = None
        if offer.guess is not None:
            offer.staged = planner.finish_plan(offer.guess)
        self.staged: SavePlan = offer.staged or self.agree()

    def agree(self) -> SavePlan:
        """Waits for the other ranks' plans in the first call; returns `final`."""
        if self.final is None:
            offer = self._offer
            central, self.metadata = self._plans.central(self._agreement, offer, self._plan_all)
            if offer.staged is not None and central is offer.guess:
                self.final = offer.staged
            else:
                self.final = self._planner.finish_plan(central)
                self._check(self.final)
            del self._planner  # it holds the state
        return self.final

    def _plan_all(self, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        central, metadata = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(central), metadata

    def _check(self, final: SavePlan) -> None:
        staged = self._offer.staged
        for item in dcp_plans.unstaged(final, staged) if staged is not None else ():
            raise CheckpointError(
                f"{self._agreement.label}: {type(self._planner).__name__}.finish_plan() added "
                f"{item.index.fqn!r} to the plan, but it was not copied before async_save "
                "returned"
            )


class _Conclusion:
    """The commit by async_save(): the first rank receives all ranks' results in their records.
    `publish` is DirectoryPlace's; `handle`, if given, receives the metadata.
    """

    def __init__(
        self,
        writer: Writer,
        planning: _Planning,
        publish: Callable[[Write], object],
        handle: _Saving | None = None,
    ) -> None:
        self._handle, self._writer, self._planning = handle, writer, planning
        self._publish = publish

    def agree(self) -> None:
        self._planning.agree()

    def record(self, name: str, places: Places) -> bytes:
        staged, final = self._planning.staged, self._planning.agree()
        if self._handle is not None:
            self._handle._file = name if final.items else ""
        indices = [item.index for item in staged.items]
        at = dict(zip(indices, places, strict=True))
        results = results_of(final, name, [at[item.index] for item in final.items])
        return dcp_plans.packed(results)

    def publish(self, records: list[bytes]) -> None:
        metadata = copy.copy(self._planning.metadata)  # later saves may use the original
        assert metadata is not None
        results = [dcp_plans.unpacked(record) for record in records]
        storage = pipeline.current().storage
        self._publish(partial(self._writer.commit, storage, metadata, results))
        if self._handle is not None:
            self._handle._metadata = metadata
        self._writer.committed()
