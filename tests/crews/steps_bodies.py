"""What each rank does in the tests of steps; the module whose functions the ranks call.

Responsible for calling Checkpointer with whatever is wrong on one rank, and for telling what came
of it. Must not know what should come of it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

import fastckpt
from fastckpt import Checkpointer, IncompatibleCheckpoint, Memory, PerRank
from fastckpt.ranks import round as round_module
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.ranks.round import LINGER_S
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle
from fastckpt.state.targets import Target
from fastckpt.steps.load import StepReader
from fastckpt.storage.file_system import Storage
from tests.crews.group_crew import WAIT_S, Member, Outcome, Told, attempt
from tests.crews.steps_states import (
    Part,
    arranged,
    content,
    differing,
    numbers,
    restamp,
    spread,
    spread_by_group,
    stamped,
    step_of,
)
from tests.crews.steps_training import (
    restore_and_train,
    train_and_save,
    train_behind_the_step_fence,
)
from tests.kit.doubles import Operation, Recorder, T, process_on
from tests.kit.hosts import checked
from tests.kit.options import gathered
from tests.kit.saves import wait_until

__all__ = ["restore_and_train", "train_and_save", "train_behind_the_step_fence"]

CLONE_NEWNS, MS_REC, MS_PRIVATE, MNT_DETACH = 0x20000, 0x4000, 1 << 18, 2


def meet(member: Member) -> None:
    """Waits until every rank that was called is here."""
    dist.barrier(member.group)


def found_in(
    member: Member | Part, checkpointer: Checkpointer, step: int | None = None
) -> int | None:
    """The step that restore() finds, after looking whether all of the state is of it."""
    state = stamped(member, 0)
    found = checkpointer.restore(state, step)
    if found is not None:
        assert step_of(member, state) == found
    return found


def saved(member: Member | Part, checkpointer: Checkpointer, step: int) -> Any:
    return checkpointer.save(step, stamped(member, step)).result()


def save_steps(member: Member, root: str, steps: list[int], options: dict[str, Any]) -> None:
    """Saves stamped steps, one after another."""
    with Checkpointer(root, group=member.group, **gathered(**options)) as checkpointer:
        for step in steps:
            saved(member, checkpointer, step)


class Untimely(Recorder):
    """The first rank cannot create its shard; others create theirs when its directory is gone."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._is_first = rank == 0

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "create" and operation.path.endswith(".safetensors"):
            if self._is_first:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            wait_until(lambda: not os.path.exists(os.path.dirname(operation.path)))
        return real()


def save_in_a_directory_that_goes(member: Member, root: str) -> Outcome:
    with process_on(Untimely(member.rank)):
        checkpointer = Checkpointer(root, group=member.group)
        outcome = attempt(lambda: saved(member, checkpointer, 1))
        attempt(checkpointer.close)
        return outcome


def save_as_second_job(member: Member, root: str, taken_over: str) -> list[Outcome]:
    """Saves while another job has the root; and another root, which one takes over meanwhile."""
    with Checkpointer(root, group=member.group) as checkpointer:
        outcomes = [attempt(lambda: saved(member, checkpointer, 1))]
    with Checkpointer(taken_over, group=member.group) as checkpointer:
        saved(member, checkpointer, 1)
        if member.rank == 0:
            shutil.copy(os.path.join(root, "lease.json"), taken_over)
        meet(member)
        return [*outcomes, attempt(lambda: saved(member, checkpointer, 2))]


def restore(member: Member, root: str, step: int | None = None) -> Outcome:
    with Checkpointer(root, group=member.group) as checkpointer:
        return attempt(lambda: found_in(member, checkpointer, step))


# Placements


def save_arranged(member: Member, root: str, variations: list[int]) -> None:
    with Checkpointer(root) as checkpointer:
        for variation in variations:
            checkpointer.save(variation, arranged(member, variation)).result()


def restore_arranged(member: Member, root: str, pairs: list[tuple[int, int]]) -> list[str]:
    """Restores steps into other variations; returns what came back otherwise."""
    faults = []
    with Checkpointer(root) as checkpointer:
        for step, variation in pairs:
            state = arranged(member, variation, blank=True)
            assert checkpointer.restore(state, step) == step
            faults += [
                f"{step} -> {variation}: {key}" for key in differing(member, state, variation)
            ]
    return faults


def save_partial(member: Member, root: str, ranks: list[int]) -> tuple[Outcome, int | None]:
    """Some ranks have a tensor that is yet to be reduced; then all save a state without it."""
    part = torch.ones(300_000)
    mesh = spread(part, ((member.world_size,), (Replicate(),))).device_mesh
    placement = Partial() if member.rank in ranks else Replicate()
    tensor = DTensor.from_local(part, mesh, [placement], run_check=False)
    with Checkpointer(root, options=fastckpt.SaveOptions(timeout_s=20)) as checkpointer:
        failed = attempt(lambda: checkpointer.save(1, {"gradient": tensor}).result())
        saved(member, checkpointer, 2)
        return failed, found_in(member, checkpointer)


# What is written and read


def save_replicated(member: Member, root: str, sizes: list[int]) -> None:
    """Saves plain tensors of so many elements."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {str(n): numbers(n, size) for n, size in enumerate(sizes)}).result()


def save_rows(member: Member, root: str, repeats: int) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, rows(member, repeats)).result()


def restore_rows(member: Member, root: str, repeats: int) -> list[tuple[int, int]]:
    """Bytes needed and bytes read, of each call of the reader."""
    seen = []
    real = StepReader.read

    def read(reader: StepReader, targets: list[Target], staging: str) -> int:
        needed = real(reader, targets, staging)
        seen.append((needed, reader.nbytes_read))
        return needed

    StepReader.read = read
    try:
        with Checkpointer(root) as checkpointer:
            state = {k: torch.zeros_like(v) for k, v in rows(member, repeats).items()}
            checkpointer.restore(state)
    finally:
        StepReader.read = real
    for key, tensor in rows(member, repeats).items():
        assert torch.equal(state[key].to_local(), tensor.to_local()), key
    return seen


def save_more_rows(member: Member, root: str) -> None:
    """Saves a tensor, and then two."""
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, rows(member, step)).result()


def keep_rows(member: Member, root: str) -> Outcome:
    """Restores two tensors, and keeps what was not saved of them."""
    with Checkpointer(root) as checkpointer:
        state = {k: torch.zeros_like(v) for k, v in rows(member, 2).items()}
        return attempt(lambda: checkpointer.restore(state, missing="keep"))


def rows(member: Member, repeats: int) -> dict[str, Any]:
    """Tensors of which each rank holds some rows, 2 MB each."""
    whole = numbers(1, 512 * 1035).view(512, -1)  # blocks of rows are as even as the mesh
    return {str(n): spread_by_group(member, whole + n) for n in range(repeats)}


def save_own_values(member: Member, root: str) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, own_values(member.rank, big=300_000)).result()


def restore_own_values(member: Member, root: str) -> list[tuple[Any, Any]]:
    """What a rank got, whether anything was found, and what load() has of it."""
    with Checkpointer(root) as checkpointer:
        state = own_values(1000 + member.rank, big=1)
        checkpointer.restore(state)
        loaded = checkpointer.load()
    return [
        (own.found, _told(own.value), _told(other.value))
        for own, other in zip(state.values(), loaded.values(), strict=True)
    ]


@dataclass
class Seen:
    """An object of a user's, with what is compared in other ways, and not by its order."""

    tensor: torch.Tensor | None
    names: set[str]


def save_values_of_each_rank(member: Member, root: str) -> list[str]:
    """The warnings of two saves of values that are and are not in a PerRank."""
    told = Told()
    logging.getLogger("fastckpt").addHandler(told)
    rank, versions = member.rank, torch.zeros(3)
    state = {
        "seen": 1000 + rank,
        "rng": torch.Generator().manual_seed(rank).get_state(),
        "python": [3, tuple(range(rank, 9))],
        "numpy": numpy.arange(3) + rank,
        "alike": {"n": 5, "t": torch.ones(4), "numpy": numpy.arange(3), "x": float("nan")},
        "equal": [set([8, 0, 16][rank:] + [8, 0, 16][:rank]), Seen(torch.ones(3) * rank, {"a"})],
        "set": {"a", f"of {rank}"},
        "object": [Seen(None, {"a", "b"}), Seen(None, {f"{rank}"})],
        "objects": numpy.array([object()]),
        "own": PerRank(rank),
        "changes": versions,
        "w": torch.ones(300_000),
    }
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).result()
            state["late"] = float(rank)
    logging.getLogger("fastckpt").removeHandler(told)
    return told.lines


def save_containers_of_each_rank(member: Member, root: str) -> list[str]:
    """The warnings of a save of containers that are and are not alike, and of one of another key
    at the top.
    """
    told = Told()
    logging.getLogger("fastckpt").addHandler(told)
    rank, order = member.rank, (1 if member.rank else -1)
    state = {
        "other": {f"k{rank}": 1, "same": 2},
        "fewer": [{"a": 1, **({"b": 2} if rank else {})}],
        "more": {"in": {1: 1} if rank else {1: 1, 2: 2}},
        "none": None if rank else {"a": {"b": 1}},
        "empty": {} if rank else {"a": 1},
        "list": [] if rank else [3, 4],
        "dicts": [{"a": 1}] * (1 + rank),
        "number": {rank: "file"},
        "text": "x" * 100_000 + str(rank),
        "long": [*range(100_000), rank],
        "alike": {key: {key: [{}, (1, {"b": ()})]} for key in ["a", 1, None, (2, "b")][::order]},
    }
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state).result()
        checkpointer.save(2, {"alike": state["alike"], **({"only": 1} if rank else {})}).result()
    logging.getLogger("fastckpt").removeHandler(told)
    return told.lines


def save_counts(member: Member, root: str) -> None:
    with Checkpointer(root) as checkpointer:
        samples = PerRank({"samples": 100 + member.rank})
        checkpointer.save(1, {"own": samples, "merged": samples, "epoch": PerRank(7)}).result()


def restore_counts(member: Member, root: str) -> tuple[Any, ...]:
    """What a rank got of values that ranks had saved, beside those of all, and the warnings."""

    def shared(values: list[Any], rank: int, world_size: int) -> dict[str, int]:
        return {"samples": sum(its["samples"] for its in values) // world_size + rank}

    told = Told()
    logging.getLogger("fastckpt").addHandler(told)
    state = {"own": PerRank(), "merged": PerRank(merge=shared), "epoch": PerRank()}
    assert state["own"].saved == []
    with Checkpointer(root) as checkpointer:
        checkpointer.restore(state)
        loaded = checkpointer.load()
        if len(state["own"].saved) != member.world_size:
            failing = {**state, "merged": PerRank(merge=lambda values, rank, ranks: values[9])}
            with pytest.raises(IncompatibleCheckpoint, match=r"'merged'.*IndexError"):
                checkpointer.restore(failing)
    logging.getLogger("fastckpt").removeHandler(told)
    own, merged = state["own"], state["merged"]
    assert own.saved == merged.saved == loaded["own"].saved and set(state["epoch"].saved) == {7}
    return own.value, own.found, merged.value, merged.found, own.saved, told.lines


def own_values(number: int, big: int) -> dict[str, PerRank]:
    return {
        "number": PerRank({"rank": number}),
        "rng": PerRank(torch.Generator().manual_seed(number).get_state()),
        "tensor": PerRank(torch.full((big,), float(number))),
    }


def _told(value: Any) -> Any:
    return value.tolist()[:20] if isinstance(value, torch.Tensor) else value


# Saves that meet no fault


def save_overlapping(member: Member, root: str, count: int, options: dict[str, Any]) -> None:
    """Begins saves without waiting for one, changing the state in between; restores each."""
    state = stamped(member, 0)
    with Checkpointer(root, **gathered(**options)) as checkpointer:
        handles = []
        for step in range(count):
            restamp(member, state, step)
            handles.append(checkpointer.save(step, state))
        for handle in handles:
            handle.result()
        for step in range(count):
            found_in(member, checkpointer, step)


def save_with_budgets(member: Member, root: str, budgets: dict[int, int]) -> tuple[int, int | None]:
    """Saves with a staging budget of each rank's own; returns the most staging memory used."""
    options = {"staging_bytes": budgets.get(member.rank)}
    with Checkpointer(root, **gathered(**options)) as checkpointer:
        stats = checkpointer.save(1, rows(member, 40)).result()
        state = {k: torch.zeros_like(v) for k, v in rows(member, 40).items()}
        found = checkpointer.restore(state)
    for key, tensor in rows(member, 40).items():
        assert torch.equal(state[key].to_local(), tensor.to_local()), key
    return stats.staged_bytes_max, found


def mark_steps(member: Member, root: str) -> list[int | None]:
    """Every rank calls all that says which steps stay; returns the best and the steps."""
    options = {"group": member.group, "keep_last": 1, "keep_best": ("loss", "min", 1)}
    with Checkpointer(root, **gathered(**options)) as checkpointer:
        for step in range(1, 7):
            loss = abs(step - 3) if member.rank == 0 else -step  # the first rank's counts
            checkpointer.save(step, stamped(member, step), metrics={"loss": loss})
            if step == 2:
                checkpointer.pin(step)
        checkpointer.delete(6)
        meet(member)
        return [checkpointer.best(), *checkpointer.steps()]


def save_again_before_a_late_rank_wakes(member: Member, root: str) -> tuple[Any, ...]:
    """Rank 1's disk stalls in a save that the others give up; then all save that step again."""
    entered, go_on = threading.Event(), threading.Event()
    with Checkpointer(
        root, group=member.group, options=fastckpt.SaveOptions(timeout_s=6.0)
    ) as checkpointer:
        meet(member)
        with patched_sync(entered, go_on) if member.rank == 1 else nullcontext():
            first = checkpointer.save(5, stamped(member, 1))
            if member.rank == 1:
                assert entered.wait(WAIT_S)
            else:
                first.exception()
            meet(member)
        checkpointer._options = replace(checkpointer._options, timeout_s=30.0)
        second = attempt(lambda: checkpointer.save(5, stamped(member, 2)).result())
        meet(member)
        go_on.set()
        late = first.exception()
        meet(member)
        state = stamped(member, 0)
        step = checkpointer.restore(state)
        return second.error, late, step, step_of(member, state)


@contextmanager
def patched_sync(entered: threading.Event, go_on: threading.Event) -> Iterator[None]:
    """The first sync of this process waits for the second event."""
    real = Storage.sync

    def sync(self: Storage, fd: int) -> None:
        if not entered.is_set():
            entered.set()
            go_on.wait()
        real(self, fd)

    Storage.sync = sync  # type: ignore[method-assign]
    try:
        yield
    finally:
        Storage.sync = real  # type: ignore[method-assign]


def save_and_tell(member: Member, root: str) -> list[fastckpt.SaveStats]:
    """Of a step and of a file, each by all ranks."""
    with Checkpointer(f"{root}/run") as checkpointer:
        stats = [saved(member, checkpointer, 1)]
    state = {"w": torch.zeros(member.world_size << 20)}
    return [*stats, fastckpt.save(state, f"{root}/a.pt", group=member.group).result()]


def save_by_one_made_too_early(member: Member, root: str) -> tuple[list[Outcome], list[int]]:
    """What a Checkpointer does that was made before torch.distributed was initialised; and steps of
    this rank alone, in the same job.
    """
    with mock.patch.object(dist, "is_initialized", return_value=False):
        early = Checkpointer(root)
    state = {"w": torch.zeros(3)}
    actions = (lambda: early.save(1, state), lambda: early.restore(state), early.load)
    outcomes = [attempt(action) for action in actions]
    assert early.steps() == [] and early.latest() is None
    early.close()
    member.make_groups(*(range(rank, rank + 1) for rank in range(member.world_size)))
    alone = member.group_of(member.rank, member.rank + 1)
    with Checkpointer(f"{root}/{member.rank}", group=alone) as checkpointer:
        checkpointer.save(member.rank, state).result()
        return outcomes, checkpointer.steps()


def count_operations(member: Member, root: str, saves: int) -> dict[str, Any]:
    """Saves while every operation of every store, and every collective, is counted."""
    state = stamped(member, 1)
    by_training: list[str] = []
    by_others: list[str] = []
    with Checkpointer(root) as checkpointer:
        saved(member, checkpointer, 0)
        group = dist.distributed_c10d._get_default_group()
        collectives = group._get_sequence_number_for_group()
        with counted_operations(by_training, by_others):
            handles = [checkpointer.save(step, state) for step in range(1, saves + 1)]
            for handle in handles:
                handle.result()
        collectives = group._get_sequence_number_for_group() - collectives
    return {"training": by_training, "others": len(by_others), "collectives": collectives}


@contextmanager
def counted_operations(by_training: list[str], by_others: list[str]) -> Iterator[None]:
    """Notes by which thread each operation of a store is asked for."""
    training = threading.get_ident()
    replaced: list[tuple[type, str, Any]] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **options: Any) -> Any:
            (by_training if threading.get_ident() == training else by_others).append(name)
            return real(*args, **options)

        return operation

    for kind in (dist.Store, dist.TCPStore, dist.PrefixStore):
        for name, real in vars(kind).items():
            if callable(real) and not name.startswith("_"):
                replaced.append((kind, name, real))
    try:
        for kind, name, real in replaced:
            setattr(kind, name, noted(name, real))
        yield
    finally:
        for kind, name, real in replaced:
            setattr(kind, name, real)


# Saves that do


def save_wrongly(
    member: Member, root: str, wrongs: list[dict[int, str]], timeout_s: float
) -> list[tuple[Outcome, Outcome, int | None]]:
    """Again and again, some ranks do something else than save, and then all save a later step.

    Args:
        wrongs: for each time, what which ranks do.

    Returns:
        For each time what came of the save that met this, for which step 10, 20, ... was meant, and
        of the other, of 14, 24, ...; and which step is found then.
    """
    with Checkpointer(
        root, group=member.group, options=fastckpt.SaveOptions(timeout_s=timeout_s)
    ) as checkpointer:

        def once(step: int, wrong: dict[int, str]) -> tuple[Outcome, Outcome, int | None]:
            meet(member)
            did = wrong.get(member.rank)
            checkpointer._options = replace(checkpointer._options, timeout_s=timeout_s)
            first = attempt(lambda: _saved_wrongly(member, checkpointer, step, did))
            meet(member)
            state = stamped(member, step + 4)
            if "another content" in wrong.values():
                state["same"] += member.rank
            # Nobody is missed now.
            checkpointer._options = replace(checkpointer._options, timeout_s=60.0)
            second = attempt(lambda: checkpointer.save(step + 4, state).result())
            meet(member)
            return first, second, attempt(lambda: found_in(member, checkpointer)).value

        return [once(10 * number, wrong) for number, wrong in enumerate(wrongs, 1)]


def _saved_wrongly(member: Member, checkpointer: Checkpointer, step: int, wrong: str | None) -> Any:
    state = stamped(member, step)
    if wrong == "nothing":
        return None
    if wrong == "another step":
        step += 1
    elif wrong == "another key":
        state["other"] = state.pop("same")
    elif wrong == "another shape":
        state["same"] = state["same"][:-1].clone()
    elif wrong == "another type":
        state["same"] = state["same"].double()
    elif wrong == "another content":
        state["same"] += 1
    elif wrong == "another placement":
        state["sharded"] = spread(content("even"), ((member.world_size,), (Replicate(),)))
    elif wrong == "no step":
        step = -1
    elif wrong == "an error of before":
        path = os.path.join(checkpointer.root, "step")
        failed = InnerHandle(path, 0.0, kind=checkpointer.root)
        error = fastckpt.StorageError("open", failed.path, errno.ENAMETOOLONG)
        pipeline.current().refuse(failed, error, None)
    else:
        assert wrong is None
    return checkpointer.save(step, state).result()


def make_wrongly(member: Member, root: str) -> tuple[Outcome, Outcome]:
    """On the first rank the Checkpointer cannot be made, and the others save. Then it can."""

    def save_once(**how: Any) -> Any:
        with Checkpointer(root, group=member.group, **gathered(**how)) as checkpointer:
            return checkpointer.save(1, stamped(member, 1)).result()

    first = attempt(lambda: save_once(keep_last=0 if member.rank == 0 else 1))
    meet(member)
    return first, attempt(save_once)


def save_on_other_terms(
    member: Member, root: str, terms: list[dict[int, dict[str, Any]]]
) -> list[Outcome]:
    """Makes a Checkpointer that saves or restores, for each of `terms`: by rank, its arguments."""

    def once(number: int, given: dict[int, dict[str, Any]]) -> Outcome:
        how = {"root": f"{root}/{number}", **given.get(member.rank, given[-1])}
        how |= {"group": member.group, "timeout_s": 120.0}
        how |= {"local": Memory(keep=3)} if how.get("local") == "memory" else {}
        restores, state = how.pop("restores", False), {"w": torch.zeros(9)}

        def body() -> Any:
            with Checkpointer(**gathered(**how)) as checkpointer:
                if restores:
                    return checkpointer.restore(state)
                return checkpointer.save(1, state).result()

        meet(member)
        return attempt(body)

    # In the rounds of the rank whose arguments differ there is nobody who reads why they failed.
    linger_s = LINGER_S if member.rank != 1 else 0.1
    with (
        mock.patch.multiple(round_module, _LOOK_S=0.1, _GRACE_S=0.5),
        mock.patch.object(Coordinator.close, "__defaults__", (linger_s, "")),
    ):
        return [once(*each) for each in enumerate(terms)]


def save_onto_a_small_disk(
    member: Member, root: str, small: int, nbytes: int
) -> tuple[Outcome, list[str], Outcome, int | None]:
    """One rank's root is a file system of its own, and a small one, when step 2 is saved.

    Returns:
        What came of step 2, which directories are then committed, what came of step 3, and which
        step is found at the end.
    """
    isolated()  # before the engine has threads: this is a property of threads
    with Checkpointer(root, options=fastckpt.SaveOptions(timeout_s=20)) as checkpointer:
        saved(member, checkpointer, 1)
        meet(member)
        with mounted(root, nbytes if member.rank == small else 0):
            first = attempt(lambda: saved(member, checkpointer, 2))
            meet(member)
        names = committed(root)
        meet(member)
        second = attempt(lambda: saved(member, checkpointer, 3))
        return first, names, second, found_in(member, checkpointer)


def committed(root: str) -> list[str]:
    return sorted(path.parent.name for path in Path(root).glob("step-*/manifest.json"))


def isolated() -> None:
    """From here on this process mounts for itself alone; PermissionError if it may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    checked(libc.unshare(CLONE_NEWNS))
    checked(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))


@contextmanager
def mounted(path: str, nbytes: int) -> Iterator[None]:
    """A file system in memory, of this size, over a directory; none if the size is 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    if nbytes:
        options = f"size={nbytes}".encode()
        checked(libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, options))
    try:
        yield
    finally:
        if nbytes:
            checked(libc.umount2(os.fsencode(path), MNT_DETACH))
