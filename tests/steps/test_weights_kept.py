"""Promise: whatever is removed, held, damaged, exchanged, stale or killed, a reader of published
weights gets exactly one published version's bytes, or none; never others.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import Checkpointer, WeightPublisher, WeightSubscriber
from fastckpt.cli import main
from fastckpt.engine.codec import FrameReader
from fastckpt.errors import CheckpointError, IncompatibleCheckpoint, RootInUse
from fastckpt.formats.manifest import Manifest
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.steps.posix import PosixSteps
from fastckpt.steps.store import StepStore
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import Crash, PowerCut, dead_pid, plant, process_on
from tests.kit.forgeries import sealed_bytes
from tests.kit.noise import flip
from tests.kit.saves import wait_until
from tests.kit.steps import directories
from tests.kit.storm import SUITE_SEED, Storm
from tests.kit.weights import (
    WAIT_S,
    assert_is,
    assert_same,
    base_of,
    chain,
    nonce_of,
    publishing,
    root,
    shard,
    step,
    weights,
)

__all__ = ["chain", "root"]


def versions(root: Path) -> list[int]:
    return [int(name[5:13]) for name in directories(root) if name.startswith("step-")]


def assert_each_is_whole(root: Path) -> None:
    for version in versions(root):
        with fastckpt.open(step(root, version)) as tensors:
            assert_same({name: tensors[name][...] for name in tensors}, weights(version))


# ---- retention ----


def test_what_a_version_needs_stays_and_nothing_else(root: Path) -> None:
    with WeightPublisher(root, keep=1, full_every=3) as publisher:
        for version, left in enumerate([[1], [1, 2], [1, 2, 3], [4], [4, 5], [4, 5, 6], [7]], 1):
            publisher.publish(weights(version), version).result(WAIT_S)
            fastckpt.saving.pipeline.current().drain()
            assert versions(root) == left
            assert_each_is_whole(root)


def test_a_version_stays_until_it_is_old_enough(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("fastckpt.steps.retention._age_s", lambda item: now)
    with publishing(root, keep=1, full_every=1, keep_s=60.0) as publish:
        for version in (1, 2, 3):
            publish(version)
        fastckpt.saving.pipeline.current().drain()
        assert versions(root) == [1, 2, 3]
        now = 61.0
        publish(4)
        fastckpt.saving.pipeline.current().drain()
        assert versions(root) == [4]


@pytest.mark.parametrize("held", [1, 2, 3])
def test_a_version_that_is_read_stays_with_all_that_it_needs(root: Path, held: int) -> None:
    """One that was opened and not yet read, too."""
    with publishing(root, keep=1, full_every=3) as publish:
        for version in (1, 2, 3):
            publish(version)
        with fastckpt.open(step(root, held)) as tensors:
            for version in (4, 5):
                publish(version)
            fastckpt.saving.pipeline.current().drain()
            assert versions(root) == [*range(1, held + 1), 4, 5]
            assert_same({name: tensors[name][...] for name in tensors}, weights(held))
        publish(6)
        fastckpt.saving.pipeline.current().drain()
    assert versions(root) == [4, 5, 6]


def test_a_publisher_that_is_killed_as_it_removes_leaves_no_difference_without_its_base(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = PosixSteps.remove
    for killed_after in range(4):
        shutil.rmtree(root, ignore_errors=True)
        left = killed_after

        def removed(steps: PosixSteps, name: str, nonce: str) -> bool:
            nonlocal left
            left -= 1
            return remove(steps, name, nonce) if left >= 0 else False

        with publishing(root, keep=1, full_every=3) as publish:
            for version in (1, 2, 3):
                publish(version)
            fastckpt.saving.pipeline.current().drain()
            with monkeypatch.context() as patch:
                patch.setattr(PosixSteps, "remove", removed)
                publish(4)
                fastckpt.saving.pipeline.current().drain()
        assert versions(root) == [*range(1, 4 - killed_after), 4]
        assert_each_is_whole(root)


def test_a_base_is_not_deleted(chain: Path) -> None:
    with Checkpointer(chain) as checkpointer:
        with pytest.raises(CheckpointError, match=r"difference from .*: delete step 3 first"):
            checkpointer.delete(2)
        assert_each_is_whole(chain)
        for version in (4, 3, 2, 1):
            checkpointer.delete(version)
    assert versions(chain) == []


def test_a_checkpointer_keeps_bases_and_a_pinned_version_its_own(chain: Path) -> None:
    with Checkpointer(chain, keep_last=1) as checkpointer:
        checkpointer.pin(2)
        checkpointer.restore({name: its for name, its in weights(1).items()})
        checkpointer.save(9, weights(9)).result(WAIT_S)
    assert versions(chain) == [1, 2, 9]
    assert_each_is_whole(chain)


# ---- damage ----


def spoiled(path: Path, how: str) -> None:
    if how == "flip":
        flip(path, 0.6)
    elif how == "truncate":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "empty":
        os.truncate(path, 0)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "remove"])
@pytest.mark.parametrize("name", ["shard", "rank-00000.json", "objects.pt", "manifest.json"])
def test_a_damaged_version_is_passed_over(
    chain: Path, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    """By who holds the version before, and by who holds none; the next good one is prepared."""
    with publishing(chain, full_every=2) as publish, WeightSubscriber(chain) as beside:
        assert_is(beside.next(), 4)
        publish(5)
        publish(6)
        spoiled(shard(chain, 6) if name == "shard" else step(chain, 6) / name, how)
        with WeightSubscriber(chain) as fresh:
            assert_is(beside.next(), 5)
            assert_is(fresh.next(), 5)
            assert beside.next() is None and fresh.next() is None
            is_unseen = (name, how) == ("manifest.json", "remove")  # it was never committed
            who = "'step-00000006'" if name == "manifest.json" else "version 6"
            told = [each for each in caplog.messages if f"{who} is passed over" in each]
            assert len(told) == (0 if is_unseen else 2)  # by each of the two, once
            publish(7)
            assert_is(beside.next(), 7)
            assert_is(fresh.next(), 7)


@pytest.mark.parametrize("name", ["shard", "rank-00000.json", "objects.pt", "manifest.json"])
def test_a_version_that_is_held_stays_when_the_next_one_is_damaged(root: Path, name: str) -> None:
    with publishing(root) as publish, WeightSubscriber(root) as beside:
        for version in (1, 2):
            publish(version)
            held = beside.next()
        publish(3)
        spoiled(shard(root, 3) if name == "shard" else step(root, 3) / name, "flip")
        assert beside.next() is None
        assert_is(held, 2)
        assert beside.wait_for(2).nonce == nonce_of(root, 2)
        with pytest.raises(CheckpointError, match="must be version 3; found version 2"):
            beside.wait_for(3)
        assert_is(beside.wait_for(), 2)


def test_a_step_is_verified_with_all_that_it_builds_on(
    chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(step(chain, 4))]) == 0
    flip(shard(chain, 2), 0.5)
    capsys.readouterr()
    assert main(["verify", str(step(chain, 4))]) != 0
    assert "step-00000002" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "remove the step"])
@pytest.mark.parametrize("name", ["shard", "rank-00000.json"])
def test_a_damaged_base_gives_no_wrong_bytes(
    chain: Path, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    """Who holds the base in memory does not need it; others go back to what is before it."""
    with publishing(chain, full_every=2) as publish, WeightSubscriber(chain) as beside:
        publish(5)
        assert_is(beside.next(), 5)
        publish(6)
        if how == "remove the step":
            shutil.rmtree(step(chain, 5))
        else:
            spoiled(shard(chain, 5) if name == "shard" else step(chain, 5) / name, how)
        for path in (step(chain, 6), step(chain, 5)):
            with pytest.raises(CheckpointError), fastckpt.open(path) as tensors:
                [tensors[each][...] for each in tensors]
        with WeightSubscriber(chain) as fresh:
            assert_is(fresh.next(), 4)
            assert fresh.next() is None
        assert "version 6 is passed over" in caplog.text
        with Checkpointer(chain) as checkpointer:
            model = {each: torch.zeros_like(its) for each, its in weights(1).items()}
            assert checkpointer.restore(model) == 4
            assert_same(model, weights(4))
            for version in (5, 6):
                with pytest.raises(CheckpointError):
                    checkpointer.load(version)
        assert_is(beside.next(), 6)
        publish(7)
        with WeightSubscriber(chain) as fresh:
            assert_is(fresh.next(), 7)


@pytest.mark.parametrize("with_manifest", [False, True])
@pytest.mark.parametrize("other", [1, 3, 9])
def test_another_versions_files_in_place_of_the_base_are_noticed(
    chain: Path, memory: Path, with_manifest: bool, other: int
) -> None:
    """Even with the base's own nonce and names of files in them."""
    with publishing(memory / "others") as publish:
        publish(9)
    source = step(chain if other < 9 else memory / "others", other)
    nonces = nonce_of(source.parent, other), nonce_of(chain, 2)
    stands_for = shutil.copytree(source, memory / "stands for")
    shutil.rmtree(step(chain, 2)) if with_manifest else None
    if with_manifest:
        shutil.copytree(stands_for, step(chain, 2))
        forge(step(chain, 2), nonces)
    else:
        shutil.copyfile(shard(source.parent, other), shard(chain, 2))
    for version in (2, 3, 4):
        try:
            with fastckpt.open(step(chain, version)) as tensors:
                found = {name: tensors[name][...] for name in tensors}
        except CheckpointError:
            continue
        # The files of a full version that say that they are version 2 are such a version.
        assert with_manifest and version == 2
        assert_same(found, weights(other))
    with WeightSubscriber(chain) as fresh:
        update = fresh.next()
        if update is not None and update.version == 2:
            assert_same(dict(update), weights(other))
        else:
            assert_is(update, 1)


def forge(directory: Path, nonces: tuple[str, str]) -> None:
    """Gives a step the nonce and the number of version 2, all checksums in order."""
    index = directory / "rank-00000.json"
    index.write_bytes(index.read_bytes().replace(nonces[0].encode(), nonces[1].encode()))
    path = directory / "manifest.json"
    manifest = Manifest.from_bytes(path.read_bytes())
    digest = hashlib.sha256(index.read_bytes()).hexdigest()
    writer = replace(manifest.writers[0], index_sha256=digest)
    changes = {"step": 2, "nonce": nonces[1], "writers": (writer,)}
    path.write_bytes(replace(manifest, **changes).to_bytes())


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("block", "times"), [(1, 1), (2, 1), (2, 2)])
def test_a_read_that_fails_adds_no_difference_twice(
    root: Path, block: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of three blocks has been added when another one cannot be read."""
    transfer, left = FrameReader.transfer, times
    state = {"w": torch.arange(1, 5_000_001, dtype=torch.int32)}

    def interrupted(reader: FrameReader, *args: Any) -> int:
        nonlocal left
        if args[-1] == block * BLOCK_BYTES and left:
            left -= 1
            wait_until(lambda: bool(held[0] == state["w"][0]), "the first block is added")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return transfer(reader, *args)

    with publishing(root) as publish, WeightSubscriber(root) as subscriber:
        publish(1, state)
        update = subscriber.next()
        assert update is not None
        held = update.tensors["w"]
        state["w"][::7] += 1
        publish(2, state)
        assert base_of(root, 2) is not None
        with monkeypatch.context() as patch:
            patch.setattr(FrameReader, "transfer", interrupted)
            assert_same(dict(subscriber.next() or ()), state)
        assert not left
        state["w"][::7] += 1
        publish(3, state)
        assert_same(dict(subscriber.next() or ()), state)


def test_a_long_chain_is_followed(root: Path) -> None:
    """Longer than the calls that Python nests."""
    state = {"v": torch.zeros(20_000)}
    with publishing(root, full_every=1000) as publish:
        for version in range(80):
            state["v"][version] = version + 1
            publish(version, state)
    assert all(base_of(root, version) is not None for version in range(1, 80))
    with WeightSubscriber(root) as fresh, bounded_stack():
        assert_same(dict(fresh.next() or ()), state)


@contextmanager
def bounded_stack() -> Iterator[None]:
    """Calls nest 250 deep here, and no deeper."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 250)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


# ---- who publishes, and what is listed ----


def test_a_second_publisher_is_refused(root: Path) -> None:
    with publishing(root) as publish:
        publish(1)
        with WeightPublisher(root) as second, pytest.raises(RootInUse):
            second.publish(weights(2), 2).result(WAIT_S)
        publish(3)
    with WeightSubscriber(root) as subscriber:
        assert_is(subscriber.next(), 3)


def test_an_older_listing_gives_nothing(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = PosixSteps(Storage(), str(chain)).committed()
    with publishing(chain) as publish, WeightSubscriber(chain) as subscriber:
        publish(5)
        assert_is(subscriber.next(), 5)
        with monkeypatch.context() as patch:
            patch.setattr(StepStore, "committed", lambda _steps: stale)
            assert subscriber.next() is None
        publish(6)
        assert_is(subscriber.next(), 6)


def test_a_trainer_that_went_back_is_followed(chain: Path) -> None:
    """What it publishes now is the newest, whatever its number, and replaces what had that."""
    with WeightSubscriber(chain) as subscriber:
        assert_is(subscriber.next(), 4)
        with publishing(chain, keep=2) as publish:
            for version, state in ((2, 12), (3, 13)):
                publish(version, weights(state))
                update = subscriber.next()
                assert update is not None and update.version == version
                assert_same(dict(update), weights(state))
        with WeightSubscriber(chain) as fresh:
            assert_same(dict(fresh.next() or ()), weights(13))
        with Checkpointer(chain) as checkpointer:
            assert_same(checkpointer.load(2), weights(12))


def test_a_root_that_is_made_anew_is_followed(chain: Path) -> None:
    with WeightSubscriber(chain) as subscriber:
        assert_is(subscriber.next(), 4)
        shutil.rmtree(chain)
        assert subscriber.next() is None
        with publishing(chain) as publish:
            publish(1)
        assert_is(subscriber.next(), 1)


def test_a_root_of_other_steps_is_refused(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"model": weights(1), "step": 1}).result(WAIT_S)
    with (
        WeightSubscriber(root) as subscriber,
        pytest.raises(IncompatibleCheckpoint, match="not written by a WeightPublisher"),
    ):
        subscriber.next()


def test_a_newer_fastckpts_version_is_refused_by_name(chain: Path) -> None:
    path = step(chain, 4) / "manifest.json"
    content, _, _digest = path.read_bytes().rpartition(b',"sha256"')
    path.write_bytes(sealed_bytes(content.replace(b'"version":3', b'"version":5')))
    with (
        WeightSubscriber(chain) as subscriber,
        pytest.raises(IncompatibleCheckpoint, match="has version 5"),
    ):
        subscriber.next()


def test_a_step_that_says_it_is_its_own_base_is_damaged(root: Path) -> None:
    """Its difference is zero, so that its checksums fit to it."""
    with publishing(root) as publish:
        publish(1)
        publish(2, weights(1))
    own, base = nonce_of(root, 2), nonce_of(root, 1)
    index = step(root, 2) / "rank-00000.json"
    index.write_bytes(index.read_bytes().replace(base.encode(), own.encode()))
    path = step(root, 2) / "manifest.json"
    manifest = Manifest.from_bytes(path.read_bytes())
    digest = hashlib.sha256(index.read_bytes()).hexdigest()
    writer = replace(manifest.writers[0], index_sha256=digest, base=own)
    path.write_bytes(replace(manifest, writers=(writer,)).to_bytes())
    with WeightSubscriber(root) as subscriber:
        assert_is(subscriber.next(), 1)


def test_the_commands_know_differences(
    chain: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(chain)]) == main(["verify", str(step(chain, 4))]) == 0
    assert main(["ls", str(chain)]) == main(["inspect", str(step(chain, 3))]) == 0
    with Checkpointer(memory / "plain") as checkpointer:
        checkpointer.save(4, weights(4)).result(WAIT_S)
    assert main(["diff", str(step(chain, 4)), str(memory / "plain")]) == 0
    assert main(["convert", str(step(chain, 3)), str(memory / "a.pt"), "--to", "pt"]) == 0
    assert_same(fastckpt.load(memory / "a.pt"), weights(3))
    capsys.readouterr()
    flip(shard(chain, 2), 0.5)
    assert main(["verify", str(chain)]) != 0
    shutil.rmtree(step(chain, 2))
    capsys.readouterr()
    assert main(["ls", str(chain)]) != 0
    told = capsys.readouterr().out.splitlines()
    assert ["damaged: a step from which it is built is missing" in line for line in told] == [
        True,
        True,
        False,
    ]


# ---- the power is cut ----


def test_a_power_cut_leaves_the_versions_before_or_the_new_one(memory: Path, storm: Storm) -> None:
    """At any operation of a difference's save, and of the removals after a full one's."""
    live, after = memory / "live", memory / "after"
    operations = dict[tuple[int, int], int]()
    for versions in ((3, 4), (4, 5)):
        operations[versions] = len(cut(live, versions, 1 << 60).log)
        shutil.rmtree(live)
    for rng in storm.rounds(suite=8, torture=300):
        versions = rng.choice([*operations])
        count = rng.randint(0, operations[versions])
        storage = cut(live, versions, count)
        for label, image in storage.images(SUITE_SEED + count, 1):
            plant(image, after, dead_pid())
            if (after / "run").exists():
                assert_whole_or_none(after / "run", versions, f"{label} after {count}")
            shutil.rmtree(after, ignore_errors=True)
        shutil.rmtree(live)


def cut(live: Path, versions: tuple[int, int], count: int) -> Crash:
    """Publishes versions up to the last of these on a machine whose power is cut after so many
    operations of the last one.
    """
    live.mkdir()
    storage = Crash(live, 1 << 60)
    options = {"keep": 1, "full_every": 4, "options": fastckpt.SaveOptions(durable=True)}
    with process_on(storage) as pipeline:
        publisher = WeightPublisher(live / "run", **options)
        with suppress(PowerCut, CheckpointError):  # what it is for
            for version in range(1, versions[1] + 1):
                if version == versions[1]:
                    pipeline.drain()
                    storage._count = len(storage.log) + count
                publisher.publish(weights(version), version).result(WAIT_S)
            pipeline.drain()
        with suppress(PowerCut, CheckpointError):  # the same
            publisher.close()
    return storage


def assert_whole_or_none(root: Path, expected: tuple[int, int], label: str) -> None:
    with WeightSubscriber(root) as subscriber:
        update = subscriber.next()
        assert update is not None and update.version in expected, label
        assert_is(update, update.version)
    for item in PosixSteps(Storage(), str(root)).committed()[0]:
        with fastckpt.open(root / item.name) as tensors:
            found = {name: tensors[name][...] for name in tensors}
        assert_same(found, weights(item.manifest.step))


def test_a_difference_from_a_removed_version_is_not_committed(disk: Path) -> None:
    with publishing(disk) as publish, WeightSubscriber(disk) as subscriber:
        publish(1)
        with Checkpointer(disk) as other:
            other.delete(1)
        with pytest.raises(CheckpointError, match="was removed; nothing was committed"):
            publish(2)
        assert publish(3) == "the save before failed"
        assert_is(subscriber.next(), 3)


def test_a_version_that_was_published_twice_is_deleted_as_a_whole(disk: Path) -> None:
    """The second attempt differs from the first, and goes first: none is left unreadable."""
    with publishing(disk) as publish:
        publish(5)
        assert publish(5) == ""
        with (
            WeightSubscriber(disk) as subscriber,
            Checkpointer(disk) as other,
        ):
            assert_is(subscriber.next(), 5)
            other.delete(5)
    with WeightSubscriber(disk) as fresh:
        assert fresh.next() is None
