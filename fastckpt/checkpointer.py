"""Checkpointer: the steps of a training run under one directory, saved and restored by all ranks.

Responsible for its signature, for what of a state is captured before save() returns, and for the
decision which step is restored. It must not know how a step is written or read.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch

from fastckpt.arguments.checks import (
    FENCES,
    BackendName,
    Codec,
    Fence,
    StagingWay,
    Stripe,
    check_choice,
    check_flag,
    check_integer,
    check_path,
    check_seconds,
    optional,
)
from fastckpt.arguments.quantities import shown_share, shown_transfer
from fastckpt.errors import CheckpointError
from fastckpt.formats.step_names import step_name
from fastckpt.handle import SaveHandle
from fastckpt.options import Pacing
from fastckpt.ranks.coordinator import Coordinator, check_alone, default_group, ranks_within
from fastckpt.ranks.round import TIMEOUT_S, Round
from fastckpt.saving import pipeline
from fastckpt.saving.save import Save
from fastckpt.state.targets import Target
from fastckpt.state.template import Template, whole
from fastckpt.state.tree import PerRank, State, Stored, fill
from fastckpt.steps.capture import captured
from fastckpt.steps.choice import first_whole
from fastckpt.steps.load import StepReader
from fastckpt.steps.no_steps import is_step, it_is_a_step
from fastckpt.steps.options import StepOptions
from fastckpt.steps.place import StepPlace
from fastckpt.steps.plan import StepPlan
from fastckpt.steps.root import Steps
from fastckpt.steps.shared_reads import Spread
from fastckpt.steps.shared_shard import Pool
from fastckpt.tiers.local_tier import local_tier
from fastckpt.tiers.place import NodePlace
from fastckpt.tiers.restore import first_whole_of_tiers

log = logging.getLogger("fastckpt")

T = TypeVar("T")

_IGNORED = "%r holds %s, which the state to be restored does not ask for"


class Checkpointer:
    """Saves and restores the steps of a training run, in the background and on any parallelism.

    Every rank of the group makes one with the same root and calls the same methods in the same
    order. Each writes its part of a step to files of its own; tensors that several ranks hold are
    divided among them. A step exists when its manifest does, which is written last; what it holds
    is verified when it is read. Saves of one Checkpointer commit in the order they were begun.

    A state is a nest of dicts, lists and tuples of
    - tensors, which are the same on all ranks (that is checked, by samples);
    - DTensors, of which each rank holds a part, in any placement but Partial;
    - PerRank(value), for what each rank has its own of;
    - objects with state_dict and load_state_dict: modules, optimizers, schedulers, data loaders;
    - anything else that can be pickled, taken from the first rank, as are the values of tensors
      below 1 MiB, whose dtypes and shapes must be the same on all ranks. No DTensor may be inside.
    restore() takes a state that is a dict, a list or has load_state_dict: what else was saved, such
    as a tuple or a lone tensor, load() alone gives back.

    Args:
        root: directory of the run; made at the first save. One job at a time may save to it.
        group: a torch.distributed process group; default: all ranks where torch.distributed is
            initialised, else this process alone. That is decided here, once and for all: make it
            after init_process_group(). For one rank of several pass a group of that rank alone,
            torch.distributed.new_subgroups(1)[0]. Ranks talk over the job's store; no collective
            is run.
        keep_last: after each commit remove, in the background, older steps but for so many, at
            least 1, not counting those found damaged; None: keep all.
        keep_every: with keep_last, steps that are multiples of this are kept too.
        fence: "call": save() returns when everything was copied, so the state may change at once.
            "step": save() returns at once, and the next step() of any torch optimizer waits.
        staging_bytes: the most staging memory a save may hold in this process; default: the
            process's budget (see fastckpt.save).
        local: a directory on storage of each node, such as NVMe, that a step is committed to first:
            a process that fails loses nothing after that (handle.wait_local()). From there it is
            drained to the root in the background; when it is committed there, result() returns.
            Ranks that see the same directory are a node; nodes need not have the same path.
            Restores take what a node has from there. A tier that is full, lost or slower than the
            root is gone past, with a warning. default: none.
        keep_local: so many steps stay on each node, at least 1, and none goes that the root has not
            had; there has to be room for one more. So many may also wait to be drained: a save()
            beyond waits. default: 2.
        codec: None, or "zstd": the shards are compressed, and `zstd -d` gives them back.
        staging, stripe, backend, durable: as fastckpt.save's.
        drain_rate: the most bytes/s that a node writes: its ranks share it, in proportion to what
            each writes. None: no limit. This and what follows spare storage that others use too;
            they delay writing, never the copy that save() waits for (but see staging_bytes), and
            must be the same on all ranks.
        start_jitter_s: each rank begins to write at a random moment within so many seconds.
        max_writers: the most ranks of the job that write at a time; None: all. timeout_s covers the
            wait for a turn, too.
        writers_per_node: shards below 256 MiB go into so many files for each node instead of one
            for each rank; not with codec, nor with local.
        timeout_s: the longest that ranks wait for each other, in one save or restore.

    Attributes:
        restored_from: of the last restore() or load() on this rank, the path that each file it
            needed was read from, by the file's name.

    Raises:
        ValueError, TypeError: an argument is unknown or out of range, this process is not in the
            group, the root is a file, or `local` lies on the root's file system.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        group: Any = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        local: str | os.PathLike[str] | None = None,
        keep_local: int | None = None,
        fence: Fence = "call",
        staging_bytes: int | str | None = None,
        codec: Codec | None = None,
        staging: StagingWay = "host",
        stripe: Stripe = "auto",
        backend: BackendName = "auto",
        durable: bool = True,
        drain_rate: float | str | None = None,
        start_jitter_s: float = 0.0,
        max_writers: int | None = None,
        writers_per_node: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        check_choice("fence", fence, FENCES)
        check_seconds("timeout_s", timeout_s)
        pacing = Pacing(drain_rate, start_jitter_s, max_writers, writers_per_node, timeout_s)
        how = (backend, durable, staging_bytes, staging, stripe, pacing)
        self._options = StepOptions(*how, codec, keep_last, keep_every)
        self._pool = Pool()
        self.root = os.path.realpath(check_path("root", root))
        self.group = default_group() if group is None else group
        self._coordinator = Coordinator.of_group(self.group, f"steps of {self.root}")
        self._rank_of = ranks_within(self.group)
        self._fence = fence
        self._timeout_s = timeout_s
        self._steps = Steps(pipeline.current().storage, self.root)
        self._is_step = is_step(self.root)
        self._tier = local_tier(
            self._steps.storage, local, keep_local, self._steps, self._coordinator, pacing
        )
        self.restored_from: dict[str, str] = {}
        self._reader: StepReader | None = None  # of the restore that goes on
        self._handles: list[SaveHandle] = []
        self._differing: frozenset[str] = frozenset()
        self._closed = self._ended = False

    def save(self, step: int, state: Any) -> SaveHandle:
        """Begins to save a step. All ranks call it, with the same step.

        Args:
            step: 0 or more. A step that exists is replaced by the commit of this one.
            state: see the class.

        Returns:
            A SaveHandle, whose path is the step's directory. result() returns when the step is
                committed on all ranks. It raises PeerFailed if another rank failed, is missing, or
                saves another step; RanksDisagree if ranks do not hold the same, naming tensor and
                ranks (a tensor whose contents differ is saved whole from the first rank from the
                next save on); StorageError; StagingConflict.

        Raises:
            Exception: what torch.save raises for an object that cannot be pickled.
            CheckpointError: of an earlier save whose failure nobody asked for. This save was not
                begun.
            TypeError, ValueError: a DTensor whose placement or dtype cannot be saved, or that is
                inside of an object; a key that is no Unicode text; a state nested too deeply; a
                step below 0; the root is a step itself; this was made before init_process_group(),
                by several ranks.
        """
        started = time.perf_counter()
        step = check_integer("step", step)
        current = self._current()
        if self._is_step:
            raise ValueError(f"root is {self.root!r}: {it_is_a_step(self.root)}")
        agreement = self._coordinator.begin(f"step {step}", self._timeout_s)
        self._handles = [earlier for earlier in self._handles if not earlier.done()]
        options = self._options
        with ExitStack() as failing:
            failing.enter_context(agreement.failing())
            draining = None
            if self._tier is not None:
                draining = self._tier.begin_drain(step)
                failing.enter_context(draining.failing())
            handle = SaveHandle(os.path.join(self.root, step_name(step)), started)
            current.raise_unreported(handle.path)
            place: StepPlace | NodePlace = StepPlace(self._steps, agreement, step, options)
            if self._tier is not None and draining is not None:
                by_way_of = (self._tier, handle, agreement, draining)
                place = NodePlace(*by_way_of, self._handles, step, options)
            content = captured(
                state,
                self._coordinator.rank,
                self._coordinator.world_size,
                self._rank_of,
                current.staging.devices,
                differing=self._differing,
                watch=self._fence == "step",
            )
            lent = (current.storage, self._pool, self._note_differing)
            plan = StepPlan(handle, agreement, step, content, place, options, *lent)
            save = Save(handle, agreement, plan, place, options, fence=self._fence, lane=self.root)
        del content, plan
        handle = current.save(save)
        self._handles = [*self._handles, handle]
        return handle

    def restore(
        self,
        state: State,
        step: int | None = None,
        *,
        weights_only: bool = True,
        required: bool = False,
    ) -> int | None:
        """Restores a state in place. All ranks call it.

        Tensors and DTensors get their values in place, whatever mesh or number of ranks saved
        them; objects with load_state_dict are given theirs; a PerRank gets what this very rank
        saved, or is left as it is (`found` tells) on a rank that the saving job did not have; other
        entries of dicts and lists are replaced. What was saved and is not in the state is left out,
        with a warning.

        Args:
            state: like the one that was saved.
            step: which; default: the one committed last. If that is damaged, the one before it,
                with a warning, and so on; all ranks take the same.
            weights_only: as torch.load's, for what is no tensor of the shards.
            required: a root without any committed step is an error: for a job that goes on, which a
                mistyped root would have begin anew.

        Returns:
            The step, or None if the root holds no committed step, `step` is None and it is not
                required; a warning says what the root holds instead.

        Raises:
            CorruptCheckpoint: no step is whole; the message says what is wrong. The state may have
                been partly overwritten.
            StorageError: the steps cannot be listed, or the one to restore cannot be read: that
                was tried several times, over seconds. It may be whole, so no older one is taken in
                its place, and this process removes neither. The state may have been partly
                overwritten.
            IncompatibleCheckpoint: the step has not what the state asks for, or a module does not
                know what the step has; the state is as it was, unless a newer step was damaged (the
                message says so then). Or a newer fastckpt wrote it.
            CheckpointError: there is no such step, or none at all and it is required. PeerFailed:
                another rank failed.
            TypeError: a tensor that nothing can be put into (meta, overlapping, another layout).
            ValueError: this was made before init_process_group(), by several ranks.
            pickle.UnpicklingError: objects need weights_only=False.
        """

        step = optional(check_integer, "step", step)
        check_flag("weights_only", weights_only)
        check_flag("required", required)

        def read(reader: StepReader, spread: Spread) -> Callable[[], None]:
            rank = self._coordinator.rank
            own = reader.per_rank(rank, weights_only)
            saved = reader.objects(weights_only)
            template = Template(state, saved, own, reader.find, reader.path)
            if template.ignored:
                level = logging.DEBUG if rank else logging.WARNING
                log.log(level, _IGNORED, reader.path, template.ignored)
            mine = spread.mine(template.targets, reader.find)
            reader.read(mine, self._options.staging)
            return template.put

        started = time.perf_counter()
        with self._restoring() as agreement:
            spread = Spread(agreement, self.group, state)
            found = self._first_whole(
                agreement, step, lambda reader: read(reader, spread), required
            )
        if found is None:
            return None
        number, put = found
        spread.pass_on()
        put()
        self._tell("restored", number, started)
        return number

    def load(self, step: int | None = None, *, weights_only: bool = True) -> Any:
        """Builds a state without having one: whole tensors on the CPU. All ranks call it.

        Args:
            step, weights_only: as restore()'s.

        Returns:
            The nest that was saved, of dicts, lists and tuples; in place of an object with
                state_dict its state_dict, of a DTensor the whole tensor, of a PerRank one with this
                rank's value, or with `found` False on a rank that the saving job did not have.

        Raises:
            As restore() does; CheckpointError also if there is no step at all.
        """

        step = optional(check_integer, "step", step)
        check_flag("weights_only", weights_only)

        def read(reader: StepReader) -> Any:
            own = reader.per_rank(self._coordinator.rank, weights_only)
            objects = reader.objects(weights_only)
            found: dict[str, Stored] = {}
            fill(objects, lambda stored: found.setdefault(stored.key, stored), lambda _name: None)
            reader.find([(key, shape, whole(shape)) for key, _dtype, shape in found.values()])
            tensors = {
                key: torch.empty(shape, dtype=dtype, device="cpu")
                for key, dtype, shape in found.values()
            }
            reader.read(
                [
                    Target(key, tensor, tuple(tensor.shape), whole(tuple(tensor.shape)))
                    for key, tensor in tensors.items()
                ]
            )
            return fill(objects, lambda stored: tensors[stored.key], lambda name: _own(own, name))

        started = time.perf_counter()
        with self._restoring() as agreement:
            found = self._first_whole(agreement, step, read, required=True)
        assert found is not None
        self._tell("loaded", found[0], started)
        return found[1]

    def steps(self) -> list[int]:
        """Committed steps, ascending, as this rank sees the directory now.

        Raises:
            StorageError: the directory, or what says whether a step is committed, cannot be read,
                however often that is tried.
        """
        found, _faults = self._steps.survey()
        return sorted({item.manifest.step for item in found})

    def latest(self) -> int | None:
        """The step committed last, as this rank sees the directory now; None if there is none. It
        need not have the highest number.

        Raises:
            StorageError: as steps().
        """
        found, _faults = self._steps.survey()
        return found[0].manifest.step if found else None

    def close(self) -> None:
        """Waits for the saves in flight; raises the first failure that nobody asked for."""
        if self._ended:
            return
        self._closed = True
        for handle in self._handles:
            handle.wait_done()
        pipeline.current().wait_for(self.root, ended=True)
        if self._tier is not None:
            self._tier.close()
        self._coordinator.close()
        self._pool.close()
        self._ended = True
        failed = [h for h in self._handles if h.failure() is not None and not h.reported]
        self._handles = []
        for handle in failed[:1]:
            pipeline.raise_earlier(handle)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            log.warning("a save failed too: %s", failure)  # the body's error is the one that counts

    def _current(self) -> pipeline.Pipeline:
        if self._closed:
            raise ValueError(f"the Checkpointer of {self.root!r} is closed")
        if self.group is None:
            check_alone(f"the Checkpointer of {self.root!r}")
        return pipeline.current()

    def _note_differing(self, keys: set[str]) -> None:
        self._differing |= keys
        for key in sorted(keys):
            log.warning("%r differs between ranks: from now on it is saved from rank 0", key)

    def _tell(self, what: str, step: int, started: float) -> None:
        """One line, on the first rank: what it has read itself, and how long all of it took."""
        seconds, ranks = time.perf_counter() - started, self._coordinator.world_size
        reader, self._reader = self._reader, None
        nbytes = 0 if reader is None else reader.nbytes_read
        level = logging.DEBUG if self._coordinator.rank else logging.INFO
        size_and_time = shown_transfer(nbytes, seconds, shown_share(ranks))
        log.log(level, "%s step %d of %r: %s", what, step, self.root, size_and_time)

    @contextmanager
    def _restoring(self) -> Iterator[Round]:
        """A round of all ranks, when what they have saved so far is there."""
        self._current().wait_for(self.root, ended=True)
        agreement = self._coordinator.begin("restore", self._timeout_s, "nothing was restored")
        try:
            yield agreement
        except BaseException as error:
            agreement.fail(error)
            raise
        finally:
            agreement.close()

    def _first_whole(
        self, agreement: Round, step: int | None, read: Callable[[StepReader], T], required: bool
    ) -> tuple[int, T] | None:
        """Returns what `read` makes of the newest step for which no rank met damage."""

        def noting(reader: StepReader) -> T:
            self.restored_from, self._reader = reader.copies.taken, reader
            return read(reader)

        current, tier = self._current(), self._tier
        if tier is None:
            return first_whole(agreement, current, [self._steps], step, noting, required=required)
        options = self._options
        return first_whole_of_tiers(agreement, current, tier, options, step, noting, required)


def _own(values: dict[str, Any] | None, name: str) -> PerRank:
    own = PerRank()
    own.found = values is not None and name in values
    if values is not None and own.found:
        own.value = values[name]
    return own
