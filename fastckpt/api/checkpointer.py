"""Checkpointer: the steps of a training run under one directory, saved and restored by all ranks.

It puts saves and restores together of their parts.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from fastckpt.arguments.checks import (
    Codec,
    KeepBest,
    Mode,
    check_callable,
    check_deadline,
    check_flag,
    check_integer,
    optional,
)
from fastckpt.arguments.environment import Memory as Memory
from fastckpt.arguments.environment import launched_rank
from fastckpt.arguments.names import listed
from fastckpt.arguments.options import Pacing, SaveOptions, check_options
from fastckpt.arguments.quantities import shown_share, shown_transfer
from fastckpt.arguments.urls import StorageOptions, path_of, refuse_for_url
from fastckpt.errors import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    RootInUse,
    StorageError,
    as_url,
)
from fastckpt.ranks import per_group
from fastckpt.ranks.coordinator import Coordinator, check_alone, default_group, ranks_within
from fastckpt.ranks.round import Round
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle, SaveHandle
from fastckpt.saving.in_flight import InFlight
from fastckpt.saving.lease import Lease
from fastckpt.saving.save import Save, Veto
from fastckpt.state.fit import Differences, Dtypes, Fit, Missing, Rename, Unexpected
from fastckpt.state.template import Template
from fastckpt.state.tree import State
from fastckpt.steps import log as save_log
from fastckpt.steps import pins, retention
from fastckpt.steps.capture import captured
from fastckpt.steps.load import StepReader
from fastckpt.steps.newest_whole import first_whole
from fastckpt.steps.no_steps import is_step, it_is_a_step, real_path
from fastckpt.steps.options import Local, StepOptions, common_terms
from fastckpt.steps.plan import StepPlace, StepPlan
from fastckpt.steps.root import store_at
from fastckpt.steps.shared_reads import Spread
from fastckpt.tiers.local_tier import LocalTier
from fastckpt.tiers.place import NodePlace
from fastckpt.tiers.restore import first_whole_of_tiers

log = logging.getLogger("fastckpt")
T = TypeVar("T")

_NO_DIFFERENCES = Differences((), (), {}, ())
# The Checkpointers that save and are not closed, by process and root.
_savers: WeakValueDictionary[tuple[int, str], Checkpointer] = WeakValueDictionary()


class Checkpointer:
    """Saves and restores the steps of a training run, in the background and on any parallelism.

    Every rank of the group makes one with the same root and calls the same methods in the same
    order. Ranks whose root, codec, keep_last, keep_every, keep_best or kind of `local` differ hear
    so within seconds, by a PeerFailed that names both. Each writes its part of a step to files of
    its own; tensors that several ranks hold are divided among them. A step exists once its manifest
    does, the last file; every byte is verified when read. Saves commit in the order they were
    begun, with `local` where they are first.

    A state is a nest of dicts, lists and tuples of
    - tensors, which must be the same on all ranks (samples of them are compared);
    - DTensors, of which each rank holds a part, in any placement but Partial;
    - PerRank(value), for a value of which each rank has its own;
    - objects with state_dict and load_state_dict: modules, optimizers, schedulers, data loaders;
    - anything else that can be pickled, but no DTensor inside of it; taken from the first rank.
    Contents of tensors below 1 MiB (of 64 MiB in all) may differ; the first rank's are saved.
    restore() takes a state that is a dict, a list, a tensor, PerRank or has load_state_dict, or a
    tuple of these: what a tuple holds cannot be replaced. load() returns any other state, too.

    Args:
        root: the directory of the run, made by the first save(), or its URL (s3://, gs://, az://).
            While a job saves there, saves of others raise RootInUse, and so do those of a second
            Checkpointer of this process until the first one is closed. Or a single step, of any
            name, to restore from alone.
        options: the fence, what becomes of errors, and how files are written (see SaveOptions), for
            all saves. Restores use `staging` and `timeout_s`. On Lustre, large files are striped
            unless the root has a layout (`lfs setstripe`).
        storage_options: for a URL, what its client is to know, by obstore's names: "endpoint",
            "access_key_id" ... None: by its own conventions, as the environment
            (docs/guides/objects.md).
        group: a torch.distributed process group. Default: all ranks if torch.distributed is
            initialised, else this process alone; so make the Checkpointer after
            init_process_group(). For one rank of several pass a group of that rank alone,
            torch.distributed.new_subgroups(1)[0]. Ranks talk over the job's store alone.
        keep_last: how many of the steps committed last stay, at least 1, not counting those found
            damaged. An older one is removed in the background after a commit, never before it, so
            there has to be room for keep_last + 1 steps. None: all stay.
        keep_every: with keep_last, steps that are multiples of this stay, too.
        keep_best: with keep_last, the best steps stay, too: ("val_loss", "min", 3) for the three
            with the least val_loss among the metrics of save(), "max" for the greatest. Of equal
            ones the first stay. A metric that is missing, infinite or no number is none: that step
            takes nobody's place.
        local: a directory on storage of each node, such as NVMe, in which a step is committed
            first, so that a process that fails after handle.wait_local() loses nothing. The step is
            then drained to the root in the background; result() returns when it is committed there.
            Ranks that see the same directory are a node; the path may differ between nodes.
            Restores read the files that a node has from there. A tier that is full, lost or slower
            than the root is bypassed, with a warning. Two steps stay on each node, or n with
            local=(directory, n); none is removed before the root has had it. The node needs room
            for one more, and for each whose drain failed. As many may wait to be drained; the
            save() after that waits. Or a Memory: the same in memory of the nodes. Default: none.
        codec: None: shards are stored as they are. "planes": compressed without loss, split into
            bytes of equal significance, of which exponents compress and mantissas do not. "zstd":
            compressed as they are: this gains less, but `zstd -d` restores them.
        check_finite: whether a step is refused, on all ranks, if it has floating-point numbers that
            are infinite or not a number, as they were copied: result() raises CheckpointError on
            the rank that has them, naming the first in its shard, PeerFailed elsewhere. Looks at
            tensors of the state's dicts, lists, tuples and state_dicts, of dtypes from float64 to
            float8 (e4m3fn, e5m2), not inside of other objects or PerRank, nor at sparse or negated
            ones; small ones are then stored in the first rank's shard. Not with staging="gds".
        drain_rate: the most bytes per second that a node writes, as a number or a text such as
            "2GB/s"; its ranks share it in proportion to what each writes. None: no limit. Like
            max_writers it delays writing, never the copy that save() waits for (but see
            SaveOptions.staging_bytes); all ranks pass the same.
        max_writers: the most ranks that write at a time; None: all. timeout_s includes the wait.
        log: whether the first rank appends a line of JSON about each save, with the clocks of all
            ranks, to `saves.jsonl` in the root, for `fastckpt report`.
        before_commit: as fastckpt.save's.

    Attributes:
        restored_from: for each file that the last restore() or load() needed on this rank, by its
            name, the path that it was read from.
        differences: what was missing, unexpected, renamed and cast in the last restore() on this
            rank (see Differences).

    Raises:
        ValueError, TypeError: an argument is unknown or out of range, this process is not in the
            group, the root is a file, or `local` lies on the root's file system.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        options: SaveOptions = SaveOptions(),
        storage_options: StorageOptions | None = None,
        group: Any = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: KeepBest | None = None,
        local: Local | None = None,
        codec: Codec | None = None,
        check_finite: bool = False,
        drain_rate: float | str | None = None,
        max_writers: int | None = None,
        log: bool = False,
        before_commit: Veto | None = None,
    ) -> None:
        timeout_s = check_options(options).timeout_s
        self._root = real_path(path_of("root", root, storage_options, timeout_s), timeout_s)
        self.root = as_url(self._root)
        self.group = default_group() if group is None else group
        with ExitStack() as opened:  # if anything below fails, the other ranks hear why
            terms = common_terms(self.root, codec, keep_last, keep_every, keep_best, local)
            self._coordinator = Coordinator.of_group(self.group, "steps", terms)
            opened.push(self._coordinator.give_up)
            check_flag("log", log)
            optional(check_callable, "before_commit", before_commit)
            self._options = StepOptions.of(
                options,
                pacing=Pacing(drain_rate, max_writers),
                codec=codec,
                keep_last=keep_last,
                keep_every=keep_every,
                keep_best=keep_best,
                local=local,
                check_finite=check_finite,
            )
            refuse_for_url(local or self._root, staging=options.staging, backend=options.backend)
            storage = pipeline.current().storage
            self._lease = Lease(storage, self._root)
            self._steps = store_at(storage, self._root, self._lease)
            self._lease.release_with(self._steps)
            with suppress(StorageError):  # a save or restore will raise it again
                self._steps.is_step = is_step(self._root, timeout_s)
            self.restored_from, self.differences = dict[str, str](), _NO_DIFFERENCES
            self._reader: StepReader | None = None  # of the restore that is running
            self._logs, self._before_commit, self._saves = log, before_commit, InFlight()
            self._tier: LocalTier | None = None
            self._closed = self._ended = False
            self._memo = per_group.GroupMemo(self._coordinator)
            self._rank_of = ranks_within(self.group)
            if (tier := self._options.tier) is not None:
                self._tier = LocalTier(*tier, self._steps, self._coordinator, timeout_s)
                opened.callback(self._tier.close)
            self._opened = opened.pop_all()

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
    ) -> SaveHandle:
        """Begins to save a step. All ranks call it, with the same step.

        Args:
            step: 0 or more. If the step exists, the commit of this one replaces it.
            state: see the class.
            metrics: what is to be known of the step, by name: numbers, or texts. The first rank's
                count. Those that are None are left out.
            deadline_s: in how many seconds from now the job will end, as when StopSignals say that
                it is to stop; all ranks pass one, or none does. Then drain_rate and max_writers do
                not delay this save, and without `local` drain_rate no longer delays those in flight
                either, for whose commits it waits. With `local` it waits for no other step's drain,
                and goes to the nodes first; but straight to the root if, by the times of the last
                step that was drained, it is in the root in time only so, with a third of the time
                to spare. The error of an earlier save does not prevent it, and is raised by the
                next save without a deadline or by close(). Nothing is given up when the time is
                over, as below 0. Default: none.

        Returns:
            A SaveHandle, whose path is the step's directory. Its result() returns when the step is
                committed on all ranks. It raises PeerFailed if another rank failed, is missing or
                saves another step; RanksDisagree, which names the tensor and the ranks, if ranks do
                not hold the same (a tensor whose contents differ is saved from the first rank from
                the next save on, with a warning while they do); StorageError; StagingConflict.

        Raises:
            Exception: what torch.save raises for an object that cannot be pickled.
            CheckpointError: an earlier step failed, nobody asked for its error, there is no
                deadline_s, and on_error is "raise". This save was not begun.
            TypeError, ValueError: a DTensor has a placement or dtype that cannot be saved, or is
                inside of an object; a tensor's storage was resized to nothing; a key is no Unicode
                text; the state is nested too deeply; the step is below 0; deadline_s is no number;
                the root is a step; the Checkpointer is closed, or was made by several ranks before
                init_process_group().
        """
        started = time.perf_counter()
        step = check_integer("step", step)
        optional(check_deadline, "deadline_s", deadline_s)
        by = None if self._coordinator.rank else self._options.keep_best
        own_metrics = retention.checked_metrics(self._steps, step, metrics, by)
        current = self._changing()
        options, label = self._options, f"step {step} of {self.root!r}"
        if deadline_s is not None:
            options = replace(options, pacing=Pacing())
            label += " before the job ends"
        agreement = self._coordinator.begin(label, self._options.timeout_s)
        with ExitStack() as failing:
            failing.enter_context(agreement.failing())
            self._be_the_saver()
            draining = None
            if self._tier is not None:
                draining = self._tier.drainer.begin(step)
                failing.enter_context(draining.failing())
            path = self._steps.plain_path(step)
            handle = InnerHandle(path, started, kind=self._root, on_error=options.on_error)
            if deadline_s is None:
                current.raise_unreported(path, handle.kind, options.on_error)
            place: StepPlace | NodePlace = StepPlace(self._steps, agreement, step, options)
            if self._tier is not None and draining is not None:
                running = self._saves.running() if deadline_s is None else []
                place = NodePlace(
                    self._tier,
                    handle,
                    agreement,
                    draining,
                    running,
                    step,
                    options,
                    deadline_s,
                )
            content = captured(
                state,
                self._coordinator.rank,
                self._coordinator.world_size,
                self._rank_of,
                current.staging.devices,
                differing=self._memo.unequal(),
                watch=options.fence == "step",
                checks_numbers=options.check_finite,
            )
            plan = StepPlan(
                handle,
                agreement,
                step,
                content,
                own_metrics,
                place,
                options,
                current.storage,
                self._memo,
            )
            logs = self._logs and self._coordinator.rank == 0
            save = Save(
                handle,
                agreement,
                plan,
                place,
                options,
                self._before_commit,
                queue=self._root,
                note=save_log.noting(current.storage, self._root, step) if logs else None,
            )
        del content, plan
        # With a tier this step waits for none that has a rate, and would only share with them.
        current.rates.lift(self._root, deadline_s is not None and self._tier is None)
        handle = current.save(save)
        self._saves.add(handle)
        return handle

    def restore(
        self,
        state: State,
        step: int | None = None,
        *,
        weights_only: bool = True,
        required: bool = False,
        missing: Missing = "raise",
        unexpected: Unexpected | None = None,
        dtype: Dtypes = "cast",
        rename: Rename | None = None,
        only: str | None = None,
    ) -> int | None:
        """Restores a state in place, all of it or, by the last five arguments, a part. All ranks
        call it, with the same arguments.

        Tensors and DTensors get their values in place, whatever mesh or number of ranks saved them,
        and keep their dtype: values of another one are converted as Tensor.copy_ does. Objects with
        load_state_dict are given the state_dict that they saved. A PerRank gets the value that this
        very rank saved, or what its `merge` makes of those of all, if another number of ranks
        saved. A dict in the state that holds none of these becomes what was saved: it stays the
        same object, and gets other entries. Other values are replaced. The keys of the state, and
        of dicts with tensors, objects or PerRanks, say what is asked for: saved entries under other
        keys are skipped, with a warning. Tensors that share memory, such as tied weights, get one
        value; if different ones were saved for them, the step does not fit.

        Args:
            state: like the one that was saved.
            step: the step to restore. Default: the one committed last; if it is damaged, the one
                before it, with a warning, and so on. All ranks take the same.
            weights_only: as torch.load's, for what is asked for and is no tensor of the shards.
            required: raise if the root holds no committed step. Pass True in a job that must not
                begin anew because of a mistyped root.
            missing: what becomes of what the state asks for and was not saved: "raise", or "keep".
                Inside of an object, this is for tensors alone: the rest becomes what it saved. A
                tensor that a damaged newer step was read into cannot be kept: CorruptCheckpoint.
            unexpected: what becomes of what was saved and the state does not ask for. None: entries
                of dicts are skipped, with a warning; modules raise; other objects get theirs.
                "ignore": all are skipped. "raise". Inside of an object, this is for tensors alone.
            dtype: "cast", or "raise" for tensors whose saved dtype is another.
            rename: gives saved values other names before they are looked up: a function of the
                name, which returns None for what is left out; or a dict of regular expressions and
                replacements, each of which is applied to each name (re.sub), in order; one that
                fits none is warned of. A name is that of `fastckpt inspect`: the keys that lead to
                the value, joined by "/". Values in lists keep their place.
            only: restore what has names like this glob, such as "model/*" ("*" matches "/", too).
                An optimizer is restored as a whole or not at all, and has to have the parameters of
                the one that was saved: leave it out, if the model has changed.

        Returns:
            The step; or None if the root holds no committed step, `step` is None and `required` is
                False. A warning then says what the root holds instead. What differed between state
                and step is in `differences`.

        Raises:
            CorruptCheckpoint: no step is whole; or a step was damaged, and the one before it does
                not fit the state or does not have all that was read of the damaged one. The message
                says what is wrong. The state may have been partly overwritten.
            StorageError: the steps could not be listed, or the one to restore could not be read, in
                several attempts over seconds. As it may be whole, no older one is restored and this
                process does not remove it. The state may have been partly overwritten.
            IncompatibleCheckpoint: a newer fastckpt wrote the step, or the step does not fit the
                state, by the arguments above; shapes and dtypes that differ are all told. The state
                is unchanged.
            CheckpointError: there is no such step, or none at all though one is required.
            PeerFailed: another rank failed.
            TypeError: a tensor cannot be filled (meta, overlapping, another layout).
            ValueError: an argument is unknown; the Checkpointer is closed, or several ranks made it
                before init_process_group().
            pickle.UnpicklingError: an object that is asked for needs weights_only=False.
        """
        fit = Fit(missing, unexpected, dtype, rename, only)
        step = optional(check_integer, "step", step)
        check_flag("weights_only", weights_only)
        check_flag("required", required)
        self.differences = _NO_DIFFERENCES
        overwritten: dict[str, None] = {}  # names of tensors that steps were read into

        def read(reader: StepReader, spread: Spread) -> Template:
            rank = self._coordinator.rank
            own = reader.own_values(rank, self._coordinator.world_size, weights_only)
            saved = reader.objects(weights_only)
            template = Template(state, saved, own, reader.find, reader.path, fit, overwritten)
            template.tell(logging.DEBUG if rank else logging.WARNING)
            mine = spread.mine(template.targets, reader.find)
            template.check_tied(reader.read)
            overwritten.update(dict.fromkeys(template.names_of_targets))
            reader.read(mine, self._options.staging)
            return template

        started = time.perf_counter()
        with self._restoring() as agreement:
            spread = Spread(agreement, self.group, state, str(fit))
            try:
                result = self._first_whole(
                    agreement, step, lambda reader: read(reader, spread), required
                )
            except IncompatibleCheckpoint as error:
                if not overwritten:
                    raise
                names = listed(map(repr, overwritten))
                message = (
                    f"{error}; an earlier attempt to restore another step may have overwritten "
                    f"{names}"
                )
                raise CorruptCheckpoint(message) from None
        if result is None:
            return None
        number, template = result
        spread.pass_on()
        template.put()
        self._tell("restored", number, started)
        self.differences = template.differences()
        return number

    def load(self, step: int | None = None, *, weights_only: bool = True) -> Any:
        """Returns a saved state, with whole tensors on the CPU. All ranks call it.

        Args:
            step, weights_only: as restore()'s.

        Returns:
            The nest of dicts, lists and tuples that was saved, with a state_dict in place of each
                object that has one, the whole tensor in place of a DTensor, and a PerRank of this
                rank's value (`found` is False on a rank that the saving job did not have).

        Raises:
            As restore() with required=True.
        """
        step = optional(check_integer, "step", step)
        check_flag("weights_only", weights_only)

        def read(reader: StepReader) -> Any:
            return reader.values(self._coordinator.rank, weights_only)

        started = time.perf_counter()
        with self._restoring() as agreement:
            result = self._first_whole(agreement, step, read, required=True)
        assert result is not None
        self._tell("loaded", result[0], started)
        return result[1]

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending, as this rank sees the directory now. Raises
        StorageError: it or a manifest could not be read in several attempts.
        """
        infos, _faults = self._steps.survey()
        return sorted({item.manifest.step for item in infos})

    def latest(self) -> int | None:
        """Returns the step committed last, which need not have the highest number, as this rank
        sees the directory now; None if there is none. Raises StorageError as steps().
        """
        infos, _faults = self._steps.survey()
        return infos[0].manifest.step if infos else None

    def best(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """Returns the step with the best value of a metric, as this rank sees the directory when
        this process's saves to it have ended; of equal ones the first. None if no step has the
        metric: do not pass that on to restore(), which takes the newest then. It reads manifests
        alone, so a step whose other files are damaged counts until this process has read them.

        Args:
            metric: its name; None: keep_best's.
            mode: whether the least ("min") or greatest ("max") value is the best; None: keep_best's
                of its own metric, "min" of another.

        Raises:
            ValueError: there is neither a metric nor keep_best. StorageError: as steps().
        """
        by = retention.criterion(self._options.keep_best, metric, mode)
        pipeline.current().wait_for(self._root, ended=True)
        return retention.best(self._steps, by)

    def pin(self, step: int) -> None:
        """Keeps a committed step from being removed, by keep_last, delete() or another save of it,
        in this process and all others, until unpin(). It is enough that one rank calls it. Waits
        for this process's saves to the root.

        Raises:
            CheckpointError: the root holds no such step. StorageError: it cannot be pinned.
            ValueError: as save().
        """
        self._changing().wait_for(self._root, ended=True)
        pins.pin(self._steps, check_integer("step", step))

    def unpin(self, step: int) -> None:
        """Lets a step be removed again; one that is not pinned may be passed. As pin() else."""
        self._changing().wait_for(self._root, ended=True)
        pins.unpin(self._steps, check_integer("step", step))

    def delete(self, step: int) -> None:
        """Removes a step, on the first rank; on others it does nothing. Copies on other nodes go at
        the next restore, and are of no use before. Waits for this process's saves to the root.

        Raises:
            CheckpointError: there is no such step, it is pinned, or it is being read.
            StorageError: it cannot be removed. ValueError: as save().
        """
        self._changing().wait_for(self._root, ended=True)
        if self._coordinator.rank == 0:
            shelves = [self._steps, *([] if self._tier is None else [self._tier.steps])]
            pins.delete(shelves, check_integer("step", step))

    def close(self) -> None:
        """Waits for the saves in flight, and leaves the group. Idempotent. The first
        Ctrl-C logs what is awaited, a second gives it up; KeyboardInterrupt is raised in the end.

        Raises:
            CheckpointError: the first that failed and whose error nobody asked for.
        """
        if self._close(pressed=False):
            raise KeyboardInterrupt
        self._saves.raise_first()

    def _close(self, pressed: bool) -> bool:
        """Closes everything; returns whether Ctrl-C was pressed, before (`pressed`) or in here."""
        if self._ended:
            return False
        self._closed = True
        pressed = self._saves.close(pressed)
        pipeline.current().wait_for(self._root, ended=True)
        pipeline.current().rates.forget(self._root)
        self._opened.close()
        self._lease.release(self._options.timeout_s)
        if _savers.get(self._place) is self:
            del _savers[self._place]
        self._ended = True
        return pressed

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError(
            f"the Checkpointer of {self.root!r} belongs to this process and cannot be copied or "
            "pickled: leave it out of the object that is copied or pickled, or create another "
            "one there"
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if isinstance(error, KeyboardInterrupt):
                self._close(pressed=True)  # what failed is told by the next save, or at exit
            else:
                self.close()
        except Exception as failure:
            if error is None:
                raise
            log.warning("a save also failed: %s", failure)  # the body's own error is raised

    def _current(self) -> pipeline.Pipeline:
        if self._closed:
            raise ValueError(f"the Checkpointer of {self._root!r} is closed")
        if self.group is None:
            check_alone(f"the Checkpointer of {self._root!r}", launched_rank())
        return pipeline.current()

    def _changing(self) -> pipeline.Pipeline:
        """Returns the pipeline for a call that changes the root, which must be none of a step."""
        if self._steps.is_step:
            raise ValueError(f"root is {self._root!r}: {it_is_a_step(self._root)}")
        return self._current()

    def _be_the_saver(self) -> None:
        """Notes at the first save that this Checkpointer saves to the root, which it makes, unless
        there is a tier, so that the caller finds it. Raises RootInUse if another one saves there.
        """
        if _savers.get(self._place) is self:
            return
        if self._place in _savers:
            gc.collect()  # it may have been forgotten
        saver = _savers.setdefault(self._place, self)
        if saver is not self and saver._steps.storage is self._steps.storage:
            raise RootInUse(
                f"{self.root!r} is in use by another open Checkpointer of this process that "
                "saves there; nothing was committed: close() the other one before this one saves"
            )
        _savers[self._place] = self
        if self._tier is None:  # else a slow root holds up nobody
            self._steps.make_root_soon(self._options.timeout_s)

    @property
    def _place(self) -> tuple[int, str]:
        return os.getpid(), self._root  # what was open before a fork is another process's

    def _tell(self, what: str, step: int, started: float) -> None:
        """Logs one line, on the first rank: the bytes that it read itself, and how long it took."""
        seconds, ranks = time.perf_counter() - started, self._coordinator.world_size
        reader, self._reader = self._reader, None
        nbytes = 0 if reader is None else reader.nbytes_read
        level = logging.DEBUG if self._coordinator.rank else logging.INFO
        size_and_time = shown_transfer(nbytes, seconds, shown_share(ranks))
        log.log(level, "%s step %d of %r: %s", what, step, self._root, size_and_time)

    @contextmanager
    def _restoring(self) -> Iterator[Round]:
        """Begins a round of all ranks, once the saves of this process to the root have ended."""
        self.restored_from = {}
        self._current().wait_for(self._root, ended=True)
        agreement = self._coordinator.begin(
            "restore", self._options.timeout_s, "nothing was restored"
        )
        with agreement.failing():
            yield agreement
        agreement.close()

    def _first_whole(
        self, agreement: Round, step: int | None, read: Callable[[StepReader], T], required: bool
    ) -> tuple[int, T] | None:
        """Returns what `read` makes of the newest step for which no rank met damage."""

        def noting(reader: StepReader) -> T:
            self.restored_from, self._reader = reader.copies.sources, reader
            return read(reader)

        current, tier = self._current(), self._tier
        if tier is None:
            return first_whole(agreement, current, [self._steps], step, noting, required=required)
        options = self._options
        return first_whole_of_tiers(agreement, current, tier, options, step, noting, required)
