"""Promise: a step in memory is copied once, into the pages of a step that is no longer there, and
nobody who reads a step sees another one.

What memory promises beside that is test_memory.py's business.
"""

from __future__ import annotations

import errno
import gc
import itertools
import mmap
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt import Checkpointer, SaveOptions
from fastckpt.engine.transfer import ImageTransfer
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.formats.step_names import SPARES
from fastckpt.plan.image import BLOCK_BYTES, Image
from fastckpt.saving import pipeline
from fastckpt.saving.ring import Ring
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import FailAt, Recorder, dead_pid, process_on
from tests.kit.mounts import mounted
from tests.kit.saves import wait_until
from tests.kit.steps import assert_holds, state
from tests.kit.tiers import SHARD, await_spares, has_landed, local, memory, shard, spares

__all__ = ["local"]
MIB = 1 << 20
ELEMENTS = 5_000_000  # three blocks


def save(checkpointer: Checkpointer, local: Path, step: int, elements: int = ELEMENTS) -> str:
    """Saves a step, waits until retention has left spares if it does, and returns stats.why."""
    handle = checkpointer.save(step, state(step, elements))
    stats = handle.result()
    assert stats.local_committed_s is not None, stats.local_why
    await_spares(local, step > 2)
    return stats.why


@pytest.mark.parametrize("fence", ["call", "step"])
def test_a_step_is_copied_once(disk: Path, local: Path, fence: Any) -> None:
    """Nothing of its shard is written, none of it takes staging memory, and no page is new."""
    storage, inodes = Recorder(), list[int]()
    with (
        process_on(storage),
        Checkpointer(
            disk / "run", local=memory(local), options=SaveOptions(fence=fence)
        ) as checkpointer,
    ):
        for step in range(1, 8):
            storage.log.clear()
            handle = checkpointer.save(step, state(step, ELEMENTS))
            stats = handle.result()
            its = [op for op in storage.log if SHARD in op.path]
            written = sum(op.args[1] for op in its if op.name == "write")
            if step > 3:
                assert has_landed(stats.why) and written == 0
                assert stats.staged_bytes_max <= 2 * BLOCK_BYTES, "the objects, and their end"
                assert "allocate" not in {op.name for op in its}
            else:
                assert written == shard(local, step).stat().st_size
            inodes.append(shard(local, step).stat().st_ino)
            await_spares(local, step > 2)
        assert inodes[3:6] == inodes[:3] and inodes[6] == inodes[0]
        found = state(999, ELEMENTS)
        for step in (7, 6):
            assert checkpointer.restore(found, step) == step
            assert_holds(found, step, ELEMENTS)
    assert spares(local) == 0, "a job that ends leaves steps alone"


def opened(path: Path, files: ExitStack) -> Callable[[], bytes]:
    file = files.enter_context(path.open("rb"))
    return lambda: os.pread(file.fileno(), 1 << 30, 0)


def mapped(path: Path, files: ExitStack) -> Callable[[], bytes]:
    with path.open("rb") as file:
        memory = files.enter_context(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    return lambda: bytes(memory)


def linked(path: Path, files: ExitStack) -> Callable[[], bytes]:
    other = path.parent.parent.parent / "other"
    os.link(path, other)
    files.callback(other.unlink)
    return other.read_bytes


@pytest.mark.parametrize("way", [opened, mapped, linked])
def test_who_has_a_file_of_a_step_open_keeps_it(
    disk: Path, local: Path, way: Callable[[Path, ExitStack], Callable[[], bytes]]
) -> None:
    """Also without the lock by which this library's readers keep a step from being removed."""
    with ExitStack() as files, Checkpointer(disk / "run", local=memory(local)) as checkpointer:
        why = [save(checkpointer, local, step) for step in (1, 2)]
        before, read = shard(local, 1).read_bytes(), way(shard(local, 1), files)
        for step in range(3, 7):
            handle = checkpointer.save(step, state(step, ELEMENTS))
            why.append(handle.result().why)
            wait_until(lambda: len([*local.glob("*/step-*")]) == 2)
            assert read() == before
        assert not has_landed(why[3])
        files.close()
        assert has_landed([save(checkpointer, local, step) for step in (7, 8, 9)][-1])


@pytest.mark.filesystem
def test_no_more_memory_than_the_budget(disk: Path) -> None:
    """The file system has no more: removed files that are still mapped would take it, too."""
    budget = 110 * MIB
    with mounted("tmpfs", disk, budget) as local:
        options = memory(local, budget=budget)
        with Checkpointer(disk / "run", local=options) as checkpointer:
            landed = 0
            for step, elements in enumerate([5_000_000] * 5 + [7_000_000] * 5 + [4_000_000] * 5, 1):
                landed += has_landed(save(checkpointer, local, step, elements))
            assert landed >= 5
            found = state(999, 4_000_000)
            assert checkpointer.restore(found) == 15
            assert_holds(found, 15, 4_000_000)


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.torture)])
def test_any_operation_of_a_save_in_recycled_pages_may_be_the_last(
    disk: Path, local: Path, stride: int
) -> None:
    """A process that was killed there leaves the step before, or this one, and never a mixture."""
    owner, steps, landed = dead_pid(), set[int | None](), 0
    for number in itertools.count(0, stride):
        root, here = disk / f"{number}" / "run", local / f"{number}"
        here.mkdir()
        storage = FailAt(1 << 30, errno.EIO, lasting=True)
        with process_on(storage):
            checkpointer = Checkpointer(root, local=memory(here, keep=1))
            for step in (1, 2, 3):
                checkpointer.save(step, state(step)).result()
                await_spares(here, step > 1)
            pipeline.current().drain()  # so that retention's operations are not counted
            begun, storage._number = len(storage.log), len(storage.log) + number
            handle = checkpointer.save(4, state(4))
            handle.exception()
            landed += has_landed(handle.stats.why)
            is_local = handle.stats.local_committed_s is not None
            if len(storage.log) <= begun + number:
                checkpointer.close()
                break
            with suppress(CheckpointError):  # the save's
                checkpointer.close()
        for path in here.rglob("*.tmp"):
            path.rename(path.with_name(path.name.replace(f"-{os.getpid()}-", f"-{owner}-")))
        found = state(999)
        with Checkpointer(root, local=memory(here, keep=1)) as checkpointer:
            last = checkpointer.restore(found)
        assert last == 4 if is_local else last in (3, 4), storage.log[begun + number]
        assert_holds(found, last or 0)
        steps.add(last)
        shutil.rmtree(here)
    assert 3 in steps and landed > 2  # whether one comes after the commit is its threads' chance


def test_a_memory_that_cannot_be_listed_any_more_is_left_as_it_is(
    disk: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what makes room after a save, on whose thread nobody is left to be told."""

    def used(_ring: Ring) -> int:
        raise StorageError("list", str(local), errno.EIO)

    with Checkpointer(disk / "run", local=memory(local)) as checkpointer:
        save(checkpointer, local, 1)
        tier = checkpointer._tier
        assert tier is not None
        with monkeypatch.context() as patched:
            patched.setattr(Ring, "used", used)
            tier.evict(0)
        save(checkpointer, local, 2)
        assert checkpointer.restore(state(999, ELEMENTS)) == 2


def test_a_save_lets_go_of_what_it_staged_in_at_its_end(
    disk: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when garbage is collected: else a file that was removed might still take memory."""
    made, real = list[weakref.ref[ImageTransfer]](), ImageTransfer.__init__

    def init(transfer: ImageTransfer, *args: Any, **options: Any) -> None:
        made.append(weakref.ref(transfer))
        real(transfer, *args, **options)

    monkeypatch.setattr(ImageTransfer, "__init__", init)
    gc.disable()
    try:
        with Checkpointer(disk / "run", local=memory(local)) as checkpointer:
            for step in (1, 2, 3, 4):
                save(checkpointer, local, step)
            pipeline.current().drain()
            assert len(made) >= 4 and not any(each() for each in made)
    finally:
        gc.enable()


def test_a_step_that_goes_past_the_memory_is_written_from_there(disk: Path, local: Path) -> None:
    """It was copied into pages in memory before that turned out."""
    with Checkpointer(disk / "run", local=memory(local)) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, local, step)
        tier = checkpointer._tier
        assert tier is not None
        tier.refuse("is not to be used")
        handle = checkpointer.save(4, state(4, ELEMENTS))
        assert handle.result().local_committed_s is None
        assert handle.result().staged_bytes_max <= 2 * BLOCK_BYTES
        found = state(999, ELEMENTS)
        assert checkpointer.restore(found, 4) == 4
        assert_holds(found, 4, ELEMENTS)


def test_spares_make_room_for_what_neighbours_send(disk: Path, local: Path) -> None:
    with Checkpointer(disk / "run", local=memory(local, budget=100 * MIB)) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, local, step)
        tier = checkpointer._tier
        assert tier is not None
        assert tier.has_room(20 * MIB) and spares(local) == 1
        assert tier.has_room(60 * MIB) and spares(local) == 0
        assert not tier.has_room(70 * MIB)


def test_a_ring_has_a_budget_of_what_is_there_and_what_is_reserved(local: Path) -> None:
    own, step = Ring(Storage(), str(local), SPARES), local / "step"
    own.nbytes = 3 * MIB
    assert own.used() == 0 and own.reserve("step", 4 * MIB) == 0, "it is too little, and empty"
    assert own.reserve("step", 3 * MIB) is None and not own.is_reserved("another")
    step.mkdir()
    (step / SHARD).write_bytes(bytes(MIB))
    assert own.used() == 3 * MIB and own.reserve("another", MIB) == 3 * MIB
    own.settle("step")
    assert own.used() == MIB
    assert not own.keep(str(step), [SHARD]) and own.used() == MIB
    slot = own.take(SHARD, MIB)
    assert slot is not None and own.take(SHARD, MIB) is None
    assert own.reserve("another", 3 * MIB, recycled=MIB) is None
    assert not own.make_room(MIB // 2) and own.used() == MIB, "it is in use"
    slot.release()
    assert own.make_room(MIB // 2) and own.used() == 0
    own.close()


def test_who_looks_for_spares_keeps_none_from_being_removed(local: Path) -> None:
    directory, over = local / "step", threading.Event()
    own = Ring(Storage(), str(local), SPARES)
    directory.mkdir()

    def look() -> None:
        while not over.is_set():
            own.has(SHARD, MIB)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(100):
            (directory / SHARD).write_bytes(bytes(MIB))
            assert not own.keep(str(directory), [SHARD])
            own.clear()
            assert not os.listdir(local / SPARES)
    finally:
        over.set()
        looking.join()


def test_a_file_that_was_taken_in_vain_is_given_back(disk: Path, local: Path) -> None:
    with Checkpointer(disk / "run", local=memory(local)) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, local, step)
        assert checkpointer._tier is not None and checkpointer._tier.ring is not None
        own, nbytes = checkpointer._tier.ring, shard(local, 3).stat().st_size
        taken, staging = own.take(SHARD, nbytes), pipeline.current().staging
        refused = Image.of_bytes(bytearray(8))
        refused.slots.append(1)  # half of one
        with pytest.raises(ValueError):
            ImageTransfer(staging, refused, "x", staging.allowance(None), 1, slot=taken)
        assert own.take(SHARD, nbytes) is taken


def test_two_checkpointers_of_one_process_do_not_share_a_file(disk: Path, local: Path) -> None:
    """Each has mapped it, and so does not take it while the other one has."""
    model = {"w": torch.zeros(ELEMENTS)}
    options = memory(local, keep=1)
    with Checkpointer(disk / "run", local=options) as one:
        for step in (1, 2, 3):
            one.save(step, model).result()
            await_spares(local, step > 1)
        own, other = one._tier, Checkpointer(disk / "other", local=options)
        with other:
            assert own is not None and own.ring is not None and other._tier is not None
            its = Ring(own._storage, own.ring._directory, SPARES)
            its.prepare(SHARD)
            nbytes = shard(local, 3).stat().st_size
            assert own.ring.take(SHARD, nbytes) is None and its.take(SHARD, nbytes) is None
            its.close()
            taken = own.ring.take(SHARD, nbytes)
            assert taken is not None and own.ring.take(SHARD, nbytes) is None
            own.ring.clear()
            assert spares(local) == 1, "it is in use"
            taken.release()
            own.ring.clear()
            assert spares(local) == 0
