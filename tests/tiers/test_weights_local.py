"""Promise: a version in the nodes' memory is read there, whole and before it is in the root; what
memory lacks is read from the root; and no version in the root lacks its base, whatever becomes of
memory.
"""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastckpt import Memory, WeightPublisher, WeightSubscriber
from fastckpt.errors import StorageError
from tests.crews import weights_bodies as bodies
from tests.crews.group_crew import Crew
from tests.kit.doubles import Recorder, process_on
from tests.kit.saves import wait_until
from tests.kit.tiers import doors, local
from tests.kit.weights import (
    FAST,
    FIRST,
    WAIT_S,
    assert_is,
    assert_same,
    base_of,
    publishing,
    step,
    weights,
)

__all__ = ["local"]


def memory(local: Path, **options: Any) -> Memory:
    return Memory(directory=local, budget="64MiB", **options)


def test_a_version_is_read_before_it_is_in_the_root(disk: Path, local: Path) -> None:
    root = disk / "run"
    root.mkdir()
    with (
        doors() as opened,
        WeightPublisher(root, local=memory(local), options=FAST) as publisher,
        WeightSubscriber(root, local=local) as beside,
        WeightSubscriber(root) as far,
    ):
        for version in (1, 2, 3, 4):
            opened.closed.append(root)
            handle = publisher.publish(weights(version), version)
            assert handle.wait_local(WAIT_S)
            assert_is(beside.wait_for(version), version)
            assert far.next() is None
            opened.open_doors()
            handle.result(WAIT_S)
            assert_is(far.wait_for(version), version)
    assert [base_of(root, version) is None for version in (1, 2, 3, 4)] == [
        True,
        False,
        False,
        False,
    ]


def test_nothing_of_the_versions_is_read_from_the_root(disk: Path, local: Path) -> None:
    root, storage = disk / "run", Recorder(by_engine=True)
    with (
        process_on(storage),
        publishing(root, local=memory(local)) as publish,
        WeightSubscriber(root, local=local) as beside,
    ):
        for version in (1, 2, 3):
            publish(version)
            storage.log.clear()
            assert_is(beside.next(), version)
            opened = {Path(op.path) for op in storage.log if op.name == "open regular"}
            files = [path for path in opened if path.name != "manifest.json"]
            assert len(files) == 3, "the objects, a shard and its index"
            assert all(path.is_relative_to(local) for path in files)


def test_what_memory_no_longer_has_is_read_from_the_root(disk: Path, local: Path) -> None:
    root = disk / "run"
    with publishing(root, local=memory(local, keep=1)) as publish:
        assert [publish(version) for version in (1, 2, 3, 4, 5)] == [FIRST, "", "", "", ""]
        wait_until(lambda: len([*local.glob("*/step-*")]) == 1)
        with WeightSubscriber(root, local=local) as fresh:
            assert_is(fresh.next(), 5)  # its bases are in the root alone
        for name in ("rank-00000.json", "rank-00000.safetensors*"):
            (part,) = local.glob(f"*/step-00000005/{name}")
            part.unlink()
            with WeightSubscriber(root, local=local) as fresh:
                assert_is(fresh.next(), 5)
        shutil.rmtree(next(local.glob("*/step-00000005")))
        with WeightSubscriber(root, local=local) as fresh:
            assert_is(fresh.next(), 5)
    with WeightSubscriber(root, local=local / "nothing") as fresh:
        assert_is(fresh.next(), 5)


def test_a_version_that_is_in_memory_in_part_is_waited_for(disk: Path, local: Path) -> None:
    root = disk / "run"
    root.mkdir()
    with (
        doors() as opened,
        WeightPublisher(root, local=memory(local), options=FAST) as publisher,
        WeightSubscriber(root, local=local) as beside,
    ):
        publisher.publish(weights(1), 1).result(WAIT_S)
        assert_is(beside.next(), 1)
        opened.closed.append(root)
        handle = publisher.publish(weights(2), 2)
        assert handle.wait_local(WAIT_S)
        (shard,) = local.glob("*/step-00000002/rank-00000.safetensors*")
        away = shard.rename(local / "away")
        assert beside.next() is None
        assert_is(beside.wait_for(1), 1)  # it is held as before
        away.rename(shard)
        assert_is(beside.wait_for(2), 2)
        opened.open_doors()
        handle.result(WAIT_S)


def test_a_version_that_does_not_reach_the_root_is_no_base(disk: Path, local: Path) -> None:
    root = disk / "run"
    root.mkdir()
    with (
        doors() as opened,
        WeightPublisher(root, local=memory(local), options=FAST) as publisher,
        WeightSubscriber(root, local=local) as beside,
    ):
        publisher.publish(weights(1), 1).result(WAIT_S)
        opened.faults["create", root] = errno.ENOSPC
        handle = publisher.publish(weights(2), 2)
        with pytest.raises(StorageError):
            handle.result(WAIT_S)
        assert_is(beside.wait_for(2), 2)
        opened.faults.clear()
        publisher.publish(weights(3), 3).result(WAIT_S)
        assert base_of(root, 3) is None
        assert_is(beside.wait_for(3), 3)
        shutil.rmtree(local)
        local.mkdir()
        with WeightSubscriber(root, local=local) as fresh:
            assert_is(fresh.next(), 3)


def test_a_version_that_memory_has_no_room_for_goes_to_the_root(disk: Path, local: Path) -> None:
    root = disk / "run"
    small = Memory(directory=local, budget="17MiB")
    with publishing(root, local=small) as publish, WeightSubscriber(root, local=local) as beside:
        for version in (1, 2):
            publish(version, weights(version, rows=1000))
            update = beside.next()
            assert_same(dict(update or ()), weights(version, rows=1000))
        assert not [*local.glob("*/step-*")]
    assert base_of(root, 2) is not None


def test_memory_that_was_full_of_versions_that_failed_is_used_again(
    disk: Path, local: Path
) -> None:
    root = disk / "run"
    root.mkdir()
    small = Memory(directory=local, budget="24MiB")
    with doors() as opened, WeightPublisher(root, local=small, options=FAST) as publisher:

        def published(version: int) -> bool:
            handle = publisher.publish(weights(version), version)
            failed = handle.exception(WAIT_S)
            assert (failed is not None) == bool(opened.faults)
            return handle.stats.local_committed_s is not None

        opened.faults["create", root] = errno.ENOSPC
        numbers = itertools.count(1)
        while published(next(numbers)):
            pass
        opened.faults.clear()
        published(next(numbers))  # past the memory
        assert published(next(numbers)), "its older versions are of no use any more"


def test_a_publisher_that_comes_back_goes_on(disk: Path, local: Path) -> None:
    root = disk / "run"
    with WeightSubscriber(root, local=local) as beside:
        for version in (1, 3, 2):
            with publishing(root, local=memory(local)) as publish:
                assert publish(version) == FIRST
                assert_is(beside.next(), version)
                assert publish(version + 10) == ""
                assert_is(beside.next(), version + 10)


@pytest.mark.multiprocess
def test_each_of_two_nodes_has_all_of_a_version(
    crew: Callable[[int], Crew], disk: Path, local: Path
) -> None:
    root, nodes = str(disk / "run"), [str(local / name) for name in ("a", "b")]
    for node in nodes:
        Path(node).mkdir()
    for found in crew(2)(bodies.publish_on_nodes, root, nodes, [1, 2, 3]):
        assert found == [(1, []), (2, []), (3, [])]  # and no shard was opened in the root
    assert step(Path(root), 3).exists()


def test_steps_that_do_not_come_to_the_root_are_refused(disk: Path, local: Path) -> None:
    with pytest.raises(ValueError, match=r"root_every=2, must be 1"):
        WeightPublisher(disk / "run", local=memory(local, root_every=2))
