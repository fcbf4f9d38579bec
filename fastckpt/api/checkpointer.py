"""Checkpointer: the steps of a training run under one directory, saved and restored by all ranks.

It assembles saves and restores from the parts of the other packages.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from fastckpt.api.catalog import Catalog
from fastckpt.arguments.checks import (
    Codec,
    KeepBest,
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
from fastckpt.state.fit import Differences, Dtypes, Fit, Mismatched, Missing, Rename, Unexpected
from fastckpt.state.template import Template
from fastckpt.state.tree import State
from fastckpt.steps import log as save_log
from fastckpt.steps import retention
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


class Checkpointer(Catalog):
    """Saves and restores the steps of a training run, in the background and on any parallelism.

    Every rank of the group creates a Checkpointer with the same root and calls the same methods in
    the same order. If root, codec, keep_last, keep_every, keep_best, keep_parts or the kind of
    `local` differs between ranks, all raise PeerFailed within seconds; the message names both
    values. Each rank writes its part of a step to its own files; tensors that several ranks hold
    are divided among these ranks. A step is committed when its manifest, the last file, exists.
    Every byte is verified when it is read. Saves commit in the order of their calls; if `local` is
    set, this order applies in the tier.

    A state is a nest of dicts, lists and tuples of
    - tensors, which must be equal on all ranks (samples of their contents are compared);
    - DTensors, of which each rank holds a part, in any placement except Partial;
    - PerRank(value), for a value that differs between ranks;
    - objects with state_dict and load_state_dict: modules, optimizers, schedulers, data loaders
      (see ResumableLoader), random generators (see Generators);
    - any other object that can be pickled and has no DTensor inside; the first rank's is saved.
    The contents of tensors below 1 MiB (up to 64 MiB in all) may differ between ranks; the first
    rank's are saved. restore() needs a state that it can change in place: a dict, list, tensor,
    PerRank, an object with load_state_dict, or a tuple of these. load() returns a state of any
    type.

    Args:
        root: the directory of the run, which the first save() creates, or its URL (s3://, gs://,
            az://). While one job saves there, saves of other jobs raise RootInUse; so do saves of a
            second Checkpointer of this process until the first one is closed. The root may also be
            a single step, of any name; then it can only be restored from.
        options: the fence, the handling of errors and the way files are written, for all saves (see
            SaveOptions). Restores use `staging` and `timeout_s` only. On Lustre, large files are
            striped unless the root has a layout (`lfs setstripe`).
        storage_options: for a URL, the options of its client by obstore's names, such as "endpoint"
            or "access_key_id". None: the client's own conventions, such as environment variables
            (docs/guides/objects.md).
        group: a torch.distributed process group. Default: all ranks if torch.distributed is
            initialised, else this process alone; so create the Checkpointer after
            init_process_group(). For a Checkpointer of a single rank pass a group of that rank:
            torch.distributed.new_subgroups(1)[0]. Ranks communicate only over the job's store.
        keep_last: how many of the most recently committed steps are kept, at least 1; steps found
            damaged do not count. Older steps are removed in the background after a commit, never
            before it, so the storage needs room for keep_last + 1 steps. None: all are kept.
        keep_every: if keep_last is set, steps that are multiples of this number are also kept.
        keep_best: if keep_last is set, the best steps are also kept: ("val_loss", "min", 3) keeps
            the three steps with the lowest val_loss among the metrics of save(), "max" those with
            the highest. Of equal steps the first ones are kept. A step whose metric is missing,
            infinite or not a number does not count among the best.
        keep_parts: if keep_last is set, maps top-level keys of the state to numbers of steps, such
            as {"model": 10}. Of the steps that are not kept for another reason, the 10 newest are
            thinned: the values under "model" stay, and the files of all others are removed.
            Therefore each of these keys, of ASCII letters, digits, "_", "." and "-", has files of
            its own in every step; a tensor that also occurs under another key is stored twice.
            Steps without files of these keys are removed, also those that an earlier job has
            thinned to other keys. All values but floating-point tensors are in one file, which
            stays; those under other keys can no longer be read. Pinned steps are not thinned.
        local: a directory on storage of each node, such as NVMe, in which a step is committed
            first, so that a process that fails after handle.wait_local() loses nothing. The step is
            then drained to the root in the background; result() returns when it is committed there.
            Ranks that see the same directory are a node; the path may differ between nodes. A
            restore reads a file from the tier if its node has the file. If the tier is full, lost
            or slower than the root, it is bypassed with a warning. Each node keeps 2 steps, or n
            with local=(directory, n); a step is removed only after it was committed in the root.
            The node needs room for one more step, and for each step whose drain failed. The same
            number of steps may wait to be drained; then the next save() waits. Pass a Memory
            instead to use the nodes' memory. Default: no tier.
        codec: the lossless compression of shards. None: no compression. "planes": the bytes of all
            numbers are grouped by significance, since exponents compress well and mantissas do not.
            "zstd": the bytes are compressed in their order, which saves less space, but `zstd -d`
            restores the shards.
        check_finite: refuse a step, on all ranks, if its floating-point numbers are infinite or not
            a number at the time of the copy. Then result() raises CheckpointError on the rank that
            holds them and names the first such tensor in its shard; other ranks raise PeerFailed.
            Checks tensors in the state's dicts, lists, tuples and state_dicts, of dtypes from
            float64 to float8 (e4m3fn, e5m2); does not check tensors inside of other objects or
            PerRank, or sparse or negated ones. Small tensors are then stored in the first rank's
            shard. Cannot be combined with staging="gds".
        drain_rate: the most bytes per second that a node writes, as a number or a text such as
            "2GB/s"; the ranks of the node share the rate in proportion to the bytes that each
            writes. None: no limit. Like max_writers, it delays writes but not the copy that save()
            waits for (except if SaveOptions.staging_bytes is too small). All ranks must pass the
            same value.
        max_writers: the most ranks that write at the same time; None: all. The wait for a turn
            counts towards timeout_s.
        log: whether the first rank appends one line of JSON for each save, with the timings of all
            ranks, to `saves.jsonl` in the root; `fastckpt report` reads this file.
        before_commit: see fastckpt.save().
        on_commit: called as on_commit(step, handle) on every rank when a step is committed (with
            `local`, in the root), on the save's own thread, which has not yet removed older steps.
            An error that it raises is logged, and sys.exit() does not end the program.
        on_failure: called likewise as on_failure(step, error) when a save has failed or was
            cancelled; not if save() itself raises.

    Attributes:
        restored_from: maps the name of each file that the last restore() or load() needed on this
            rank to the path from which it was read.
        differences: the missing, unexpected, renamed, cast and mismatched values of the last
            restore() on this rank (see Differences).

    Raises:
        ValueError, TypeError: an argument is unknown or out of range, this process is not in the
            group, the root is a file, or `local` is on the root's file system.
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
        keep_parts: Mapping[str, int] | None = None,
        local: Local | None = None,
        codec: Codec | None = None,
        check_finite: bool = False,
        drain_rate: float | str | None = None,
        max_writers: int | None = None,
        log: bool = False,
        before_commit: Veto | None = None,
        on_commit: Callable[[int, SaveHandle], object] | None = None,
        on_failure: Callable[[int, BaseException], object] | None = None,
    ) -> None:
        timeout_s = check_options(options).timeout_s
        self._root = real_path(path_of("root", root, storage_options, timeout_s), timeout_s)
        self.root = as_url(self._root)
        self.group = default_group() if group is None else group
        with ExitStack() as opened:  # if anything below fails, the other ranks hear why
            terms = common_terms(
                self.root, codec, keep_last, keep_every, keep_best, keep_parts, local
            )
            self._coordinator = Coordinator.of_group(self.group, "steps", terms)
            opened.push(self._coordinator.give_up)
            check_flag("log", log)
            optional(check_callable, "before_commit", before_commit)
            optional(check_callable, "on_commit", on_commit)
            optional(check_callable, "on_failure", on_failure)
            self._on_commit, self._on_failure = on_commit, on_failure
            self._options = StepOptions.of(
                options,
                pacing=Pacing(drain_rate, max_writers),
                codec=codec,
                keep_last=keep_last,
                keep_every=keep_every,
                keep_best=keep_best,
                keep_parts=keep_parts,
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
        metadata: Any = None,
        deadline_s: float | None = None,
    ) -> SaveHandle:
        """Starts a save of a step in the background. All ranks must call it with the same step.

        Args:
            step: the step's number, 0 or more. If the step exists, the commit replaces it.
            state: see the class.
            metrics: numbers or texts to store with the step, by name. Only the first rank's metrics
                are stored. Metrics that are None are left out.
            metadata: a JSON value of at most 64 KiB to store with the step, such as the run's
                configuration; only the first rank's is stored. metadata(step) returns it.
            deadline_s: the number of seconds until the job ends, for example after StopSignals has
                reported a stop signal; all ranks or none must pass it. drain_rate and max_writers
                do not delay this save. Without `local`, drain_rate also no longer delays the saves
                in flight, because this save waits for their commits. With `local`, the save does
                not wait for the drains of other steps. It is committed in the tier first; it
                bypasses the tier only if, judged by the times of the last drained step, this is the
                only way to reach the root in time, with a third of the time to spare. The error of
                an earlier save does not prevent this save; the next save without a deadline, or
                close(), raises that error. After the deadline, and with a negative deadline_s, the
                save still continues. Default: none.

        Returns:
            A SaveHandle, whose path is the step's directory. Its result() returns when the step is
                committed on all ranks. result() raises PeerFailed if another rank failed, is
                missing or saves another step; RanksDisagree, which names the tensor and the ranks,
                if ranks do not hold the same state; StorageError; or StagingConflict. After a
                RanksDisagree about a tensor's contents, later saves store the first rank's tensor,
                with a warning while the contents differ.

        Raises:
            Exception: the error of torch.save for an object that cannot be pickled.
            CheckpointError: an earlier step failed and its error was not retrieved, deadline_s is
                None, and on_error is "raise". This save was not begun.
            TypeError, ValueError: a DTensor has a placement or dtype that cannot be saved, or is
                inside of an object; a tensor's storage was resized to 0; a key is not Unicode text;
                the state is nested too deeply; the step is below 0; deadline_s is not a number; the
                root is a step; the Checkpointer is closed, or was created by several ranks before
                init_process_group().
        """
        started = time.perf_counter()
        step = check_integer("step", step)
        optional(check_deadline, "deadline_s", deadline_s)
        current = self._changing()
        options, label = self._options, f"step {step} of {self.root!r}"
        if deadline_s is not None:
            options = replace(options, pacing=Pacing())
            label += " before the job ends"
        agreement = self._coordinator.begin(label, self._options.timeout_s)
        with ExitStack() as failing:
            failing.enter_context(agreement.failing())
            by = None if self._coordinator.rank else options.keep_best
            own_metrics = retention.checked_metrics(self._steps, step, metrics, by)
            metadata = retention.checked_metadata(metadata)
            self._be_the_saver()
            draining = None
            if self._tier is not None:
                draining = self._tier.drainer.begin(step)
                failing.enter_context(draining.failing())
            path = self._steps.plain_path(step)
            handle = InnerHandle(path, started, kind=self._root, on_error=options.on_error)
            handle.add_done_callback(partial(_call, step, self._on_commit, self._on_failure))
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
            options.check_parts(state)
            content = captured(
                self._saved_form(state),
                self._coordinator.rank,
                self._coordinator.world_size,
                self._rank_of,
                current.staging.devices,
                differing=self._memo.unequal(),
                watch=options.fence == "step",
                checks_numbers=options.check_finite
                or options.snapshot is not None
                or options.keep_parts is not None,
                parts=options.parts,
            )
            plan = StepPlan(
                handle,
                agreement,
                step,
                content,
                own_metrics,
                metadata,
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

    def _saved_form(self, state: Any) -> Any:
        """Returns what is saved of a state; an error of this rank fails the save on all ranks."""
        return state

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
        mismatched: Mismatched = "error",
    ) -> int | None:
        """Restores a state in place, completely or, as the last six arguments select, in part. All
        ranks must call it with the same arguments.

        Tensors and DTensors get the saved values in place, for any mesh or number of ranks of the
        saving job, and keep their dtype: values of another dtype are converted like in
        Tensor.copy_. An object with load_state_dict gets the state_dict that it saved. A PerRank
        gets the value that the same rank saved; if another number of ranks saved, it gets the
        result of its `merge` for the values of all ranks. A dict in the state that contains none of
        these remains the same object, and its entries are replaced by the saved ones. Other values
        are replaced. Saved entries are skipped, with a warning, if their key is missing in the
        state or in one of its dicts with tensors, objects or PerRanks. Tensors that share memory,
        such as tied weights, get one value; if different values were saved for them, the step does
        not fit.

        Args:
            state: a state with the structure of the saved one.
            step: the step to restore. Default: the step committed last; if this is damaged, the
                step committed before it, with a warning, and so on; thinned steps after all others.
                All ranks restore the same step.
            weights_only: like torch.load's, for requested values that are not stored as tensors.
            required: raise if the root holds no committed step. Pass True in a job that must not
                start from scratch because of a mistyped root.
            missing: "raise" an error for values of the state that were not saved, or "keep" the
                current values. Inside of an object this applies to tensors only; its other values
                become the saved ones. If a damaged newer step was already read into a tensor, its
                current value cannot be kept, so CorruptCheckpoint is raised.
            unexpected: the treatment of saved values that are not in the state. None: entries of
                dicts are skipped with a warning, modules raise, and other objects get their values.
                "ignore": all are skipped. "raise": an error. Inside of an object this applies to
                tensors only.
            dtype: "cast" tensors whose saved dtype differs, or "raise" an error for them.
            rename: changes the names of saved values before they are looked up. Either a function
                of the name, which returns None to leave the value out; or a dict of regular
                expressions and replacements, which are applied to every name in order (re.sub;
                None leaves values out), with a warning about a pattern that matches no name. Values
                of the state with names that are left out stay. Names are those of `fastckpt
                inspect`: the keys that lead to the value, joined by "/". Values in lists keep their
                index.
            only: restore only values whose names match this glob, such as "model/*" ("*" also
                matches "/"). An optimizer is restored completely or not at all, and must have the
                parameters of the saved one; leave it out if the model has changed.
            mismatched: see load_into(). The state of an optimizer for a tensor that stays also
                stays.

        Returns:
            The restored step; or None if the root holds no committed step, `step` is None and
                `required` is False. A warning then describes the contents of the root.
                `differences` lists the differences between the state and the step.

        Raises:
            CorruptCheckpoint: all steps are damaged; or a step was damaged, and the one before it
                does not fit the state or lacks a value that was read from the damaged step. The
                message describes the damage. The state may have been partly overwritten.
            StorageError: the steps could not be listed, or the step to restore could not be read,
                in several attempts over seconds. Since that step may be intact, no older step is
                restored, and this process does not remove it. The state may have been partly
                overwritten.
            IncompatibleCheckpoint: a newer fastckpt wrote the step, or the step does not fit the
                state under the arguments above; the message lists all shapes and dtypes that
                differ. The state is unchanged.
            CheckpointError: the step does not exist, or `required` is True and no step exists.
            PeerFailed: another rank failed.
            TypeError: a tensor cannot be filled (meta, overlapping, another layout).
            ValueError: an argument is unknown; the Checkpointer is closed, or several ranks created
                it before init_process_group().
            pickle.UnpicklingError: a requested object needs weights_only=False.
        """
        fit = Fit(missing, unexpected, dtype, rename, only, mismatched)
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
        """Returns a saved state, with complete tensors on the CPU. All ranks must call it.

        Args:
            step, weights_only: see restore().

        Returns:
            The nest of dicts, lists and tuples that was saved, with a state_dict in place of each
                object that has one, the complete tensor in place of a DTensor, and a PerRank with
                this rank's value (`found` is False on a rank that the saving job did not have).

        Raises:
            The errors of restore() with required=True.
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

    def wait(self) -> None:
        """Waits until all saves of this Checkpointer so far have ended (with `local`, in the root)
        and, on the first rank, the steps that they replace are removed. Further saves are possible.

        Raises:
            CheckpointError: see close().
        """
        self._saves.wait()
        self._current().wait_for(self._root, ended=True)
        self._saves.raise_first()

    def __repr__(self) -> str:
        running = len(self._saves.running())
        state = "closed" if self._closed else f"{running} save{'s' * (running != 1)} in flight"
        return f"<Checkpointer of {self.root!r}: {state}>"

    def close(self) -> None:
        """Waits for the saves in flight and leaves the group. Idempotent. The first Ctrl-C logs the
        saves that it waits for, the second one abandons them; in both cases KeyboardInterrupt is
        raised at the end.

        Raises:
            CheckpointError: the error of the first failed save whose error was not retrieved.
        """
        if self._close(pressed=False):
            raise KeyboardInterrupt
        self._saves.raise_first()

    def _close(self, pressed: bool) -> bool:
        """Closes everything; returns whether Ctrl-C was pressed, here or before (`pressed`)."""
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
        """Returns the pipeline for a call that changes the root, which must not be a step."""
        if self._steps.is_step:
            raise ValueError(f"root is {self._root!r}: {it_is_a_step(self._root)}")
        return self._current()

    def _be_the_saver(self) -> None:
        """Registers this Checkpointer at its first save as the one that saves to the root. Raises
        RootInUse if another Checkpointer is registered. Without a tier it also creates the root, so
        that the caller finds it.
        """
        if _savers.get(self._place) is self:
            return
        if self._place in _savers:
            gc.collect()  # it may have been forgotten
        saver = _savers.setdefault(self._place, self)
        if saver is not self and saver._steps.storage is self._steps.storage:
            raise RootInUse(
                f"{self.root!r} is in use by another open Checkpointer of this process that "
                "saves there; nothing was committed. Call close() of the other one before "
                "this one saves"
            )
        _savers[self._place] = self
        if self._tier is None:  # else a slow root holds up nobody
            self._steps.make_root_soon(self._options.timeout_s)

    @property
    def _place(self) -> tuple[int, str]:
        return os.getpid(), self._root  # what was open before a fork is another process's

    def _tell(self, what: str, step: int, started: float) -> None:
        """Logs one line on the first rank: the bytes that this rank read, and the time taken."""
        seconds, ranks = time.perf_counter() - started, self._coordinator.world_size
        reader, self._reader = self._reader, None
        nbytes = 0 if reader is None else reader.nbytes_read
        level = logging.DEBUG if self._coordinator.rank else logging.INFO
        size_and_time = shown_transfer(nbytes, seconds, shown_share(ranks))
        log.log(level, "%s step %d of %r: %s", what, step, self._root, size_and_time)

    @contextmanager
    def _restoring(self) -> Iterator[Round]:
        """Begins a round of all ranks after the saves of this process to the root have ended."""
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
        """Returns the newest step in which no rank found damage, and its result of `read`."""

        def noting(reader: StepReader) -> T:
            self.restored_from, self._reader = reader.copies.sources, reader
            return read(reader)

        current, tier = self._current(), self._tier
        if tier is None:
            return first_whole(agreement, current, [self._steps], step, noting, required=required)
        options = self._options
        return first_whole_of_tiers(agreement, current, tier, options, step, noting, required)


def _call(
    step: int,
    on_commit: Callable[[int, SaveHandle], object] | None,
    on_failure: Callable[[int, BaseException], object] | None,
    handle: InnerHandle,
) -> None:
    """Calls one of the caller's functions at the end of a save."""
    error = handle.failure()
    if error is None and on_commit is not None:
        on_commit(step, handle)
    if error is not None and on_failure is not None:
        on_failure(step, error)
