"""What was acknowledged is there, whole, whichever request to a bucket a job is frozen at until its
lease has run out, and then goes on; and a root that was uploaded is as good as one that was saved.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.errors import IN_DOUBT, StorageError
from fastckpt.saving import pipeline
from fastckpt.saving.lease import LASTS_S
from tests.kit.frozen import (
    FIRST,
    KEEP,
    SECOND,
    WAIT_S,
    SecondJob,
    begin_life,
    check,
    first_is_frozen,
    second_is_frozen,
)
from tests.kit.hosts import needs_root
from tests.kit.objects import proxy as faults
from tests.kit.objects.proxy import Passage, Proxy
from tests.kit.objects.states import LARGE, SMALL, blank, state_of, step_of
from tests.kit.objects.stores import settle
from tests.kit.objects.weed import BUCKET, Weed, options

ALWAYS = 1 << 30
SOME = 5  # of so many requests one is tried in `make test`


class FrozenWay:
    """Requests wait until the test says so, and then pass."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, passage: Passage) -> None:
        self.reached.set()
        assert self.go_on.wait(120)
        status, headers, body = passage.ask()
        passage.answer(status, body, headers)


@pytest.fixture
def other(weed: Weed) -> Iterator[SecondJob]:
    with SecondJob(weed.port) as job:
        yield job


@needs_root
@pytest.mark.multiprocess
@pytest.mark.parametrize("step", [SOME, pytest.param(1, marks=pytest.mark.torture)])
def test_a_job_that_is_frozen_in_a_save(
    weed: Weed, proxy: Proxy, root: str, other: SecondJob, step: int
) -> None:
    told = {"storage_options": options(proxy.port)}
    for at in itertools.count(step // 2, step):
        way = FrozenWay()

        def freeze(way: FrozenWay = way, at: int = at) -> FrozenWay:
            settle()
            proxy.on("", way, skip=at, times=ALWAYS)
            return way

        is_frozen = first_is_frozen(f"{root}-{at}", other, freeze, **told)
        proxy.heal()
        if not is_frozen:
            break
    assert at > 7, "a save and a removal make more requests"


def second_frozen(weed: Weed, proxy: Proxy, root: str, at: int, kind: str, key: str) -> bool:
    """The other job, on a way of its own, is frozen at such a request; returns as the callee."""
    told = {"storage_options": options(proxy.port)}
    first_way, way = FrozenWay(), FrozenWay()
    with fastckpt.Checkpointer(f"{root}-clock", **told) as clock:
        clock.save(0, {}).result(WAIT_S)  # this tells how late the store's clock is

    def freeze() -> FrozenWay:
        proxy.on("", way, skip=at, times=ALWAYS)
        return way

    def thaw() -> None:
        theirs.heal()
        first_way.go_on.set()

    with Proxy(weed.port) as theirs, SecondJob(theirs.port) as other:
        other.ask(f"freeze {root}")
        theirs.on(kind, first_way, key=key, times=1)
        other.tell("-")
        assert first_way.reached.wait(WAIT_S), "the save makes no such request"
        theirs.on("", first_way, times=ALWAYS)  # and so is whatever comes after it
        _frozen, was_done = other.ask("-")
        return second_is_frozen(root, other, was_done, freeze, thaw, **told)


# Where a job is frozen that another one finds: as it uploads, before it looks at its lease, when
# only the commit is left, and after it.
WHERE = (("put", "objects.pt"), ("get", "lease.json"), ("create", "/manifest.json"), ("delete", ""))


@needs_root
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "key", "step"),
    [
        ("get", "lease.json", 4 * SOME),
        ("create", "/manifest.json", 4 * SOME),
        *(pytest.param(*each, 1, marks=pytest.mark.torture) for each in WHERE),
    ],
)
def test_a_job_that_is_frozen_as_it_takes_over(
    weed: Weed, proxy: Proxy, root: str, step: int, kind: str, key: str
) -> None:
    for at in itertools.count(step // 2, step):
        is_frozen = second_frozen(weed, proxy, f"{root}-{at}", at, kind, key)
        proxy.heal()
        if not is_frozen:
            break
    assert at > 12, "a restore, a save and a removal make more requests"


def names(bare: Any, root: str) -> list[str]:
    """Objects below a root, by their names without the root's."""
    prefix = root.partition(f"{BUCKET}/")[2] + "/"
    return sorted(each["path"].removeprefix(prefix) for each in bare.list(prefix).collect())


def of_steps(bare: Any, root: str) -> list[str]:
    return [each for each in names(bare, root) if each.startswith("step-")]


def test_a_commit_whose_attempt_was_taken_for_dead(proxy: Proxy, root: str, bare: Any) -> None:
    """It fails at once: what was removed does not come back, so the manifest is put only once."""
    way = FrozenWay()
    with fastckpt.Checkpointer(root, storage_options=options(proxy.port)) as saver:
        saver.save(1, state_of(1)).result(WAIT_S)
        settle()
        proxy.count()
        proxy.on("create", way, key="/manifest.json")
        handle = saver.save(2, state_of(2))
        assert way.reached.wait(WAIT_S)
        attempt = next(each.split("/")[0] for each in of_steps(bare, root) if "00002" in each)
        bare.put(f"{root.partition(f'{BUCKET}/')[2]}/{attempt}/manifest.json", b"")
        assert saver.steps() == [1], "an empty manifest is no step"
        way.go_on.set()
        error = handle.exception(WAIT_S)
        assert isinstance(error, StorageError) and error.errno == errno.EEXIST, error
        assert "another process considered this save dead" in str(error) and not error.visible
        assert saver.steps() == [1]
    made = [key for kind, key in proxy.asked if kind == "create" and key.endswith("/manifest.json")]
    assert len(made) == 1


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_commit_that_took_longer_than_a_lease_lasts(
    proxy: Proxy, root: str, bare: Any, is_removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is acknowledged if the objects are all there: others may have removed the attempt, and the
    mark that it is over, too.
    """
    clock = itertools.count(0.0, LASTS_S)
    told = {"storage_options": options(proxy.port)}
    with fastckpt.Checkpointer(root, **told) as saver:
        saver.save(1, state_of(1)).result(WAIT_S)

        def removed(passage: Passage) -> None:
            prefix = root.partition(f"{BUCKET}/")[2]
            going = [each for each in of_steps(bare, root) if "00002" in each]
            bare.delete([f"{prefix}/{each}" for each in going if is_removed])
            status, headers, body = passage.ask()
            passage.answer(status, body, headers)

        proxy.on("create", removed, key="/manifest.json")
        monkeypatch.setattr("fastckpt.steps.bucket._now_s", lambda: next(clock))
        error = saver.save(2, state_of(2)).exception(WAIT_S)
        assert isinstance(error, StorageError) == is_removed, error
        assert saver.steps() == ([1] if is_removed else [1, 2])
    assert is_removed != any("00002" in each for each in of_steps(bare, root))


@pytest.mark.parametrize(
    ("failing", "operation"), [("list", "list"), ("delete", "remove"), ("head", "read")]
)
def test_a_commit_that_can_be_neither_confirmed_nor_taken_back(
    proxy: Proxy,
    root: str,
    bare: Any,
    failing: str,
    operation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The manifest is there, so the error says that the step is in doubt: after a put that took too
    long, and after one whose answer was lost.
    """
    clock = itertools.count(0.0, LASTS_S)
    with fastckpt.Checkpointer(root, storage_options=options(proxy.port)) as saver:
        saver.save(1, state_of(1)).result(WAIT_S)
        settle()

        def late(passage: Passage) -> None:
            prefix = root.partition(f"{BUCKET}/")[2]
            if failing == "delete":  # another job has removed a part of the attempt
                part = next(each for each in of_steps(bare, root) if "00002" in each)
                bare.delete([f"{prefix}/{part}"])
            for kind in {failing, "delete"}:
                proxy.on(kind, faults.expired, times=ALWAYS)
            if failing == "head":
                faults.lost(passage)
                return
            status, headers, body = passage.ask()
            passage.answer(status, body, headers)

        proxy.on("create", late, key="/manifest.json")
        monkeypatch.setattr("fastckpt.steps.bucket._now_s", lambda: next(clock))
        error = saver.save(2, state_of(2)).exception(WAIT_S)
        proxy.heal()
        assert isinstance(error, StorageError) and error.op == operation, error
        assert error.visible and error.in_doubt and IN_DOUBT in str(error)
        assert saver.steps() == [1, 2]


def test_what_a_dead_job_has_left_is_removed_by_the_next_one(
    weed: Weed, root: str, bare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it ran, and what comes there afterwards by the one after that. The mark that the
    attempt is over stays for a day; what no save has made stays.
    """
    told = {"storage_options": options(weed.port)}
    prefix = root.partition(f"{BUCKET}/")[2]
    dead, others = "step-00000007-0123456789ab", "step-00000008-0123456789ab"
    for name in (f"{dead}/objects.pt", f"{dead}/rank-00000.json", f"{others}/notes.txt"):
        bare.put(f"{prefix}/{name}", b"x")

    def live(step: int) -> list[str]:
        with fastckpt.Checkpointer(root, **told) as saver:
            saver.save(step, state_of(step)).result(WAIT_S)
            pipeline.current().drain()
            assert saver.steps()[-1] == step
        left = of_steps(bare, root)
        return [name for name in left if name.startswith((dead, others))]

    over = [f"{dead}/manifest.json", f"{others}/notes.txt"]
    assert live(1) == over
    bare.put(f"{prefix}/{dead}/rank-00001.safetensors", b"late")
    assert live(2) == over
    monkeypatch.setattr("fastckpt.steps.bucket.DEAD_AFTER_S", -60.0)
    assert live(3) == over[1:]


@needs_root
@pytest.mark.multiprocess
def test_an_upload_that_ends_late(weed: Weed, proxy: Proxy, root: str, other: SecondJob) -> None:
    """Its shard is completed after another job has committed that step: the step stays as it is."""
    told, way = {"storage_options": options(proxy.port)}, FrozenWay()
    with fastckpt.Checkpointer(root, keep_last=KEEP, **told) as saver:
        begin_life(saver, FIRST)
        settle()
        proxy.on("complete", way, key=".safetensors", times=ALWAYS)
        handle = saver.save(KEEP, {"weights": torch.zeros(LARGE)})
        assert way.reached.wait(WAIT_S)
        _found, acknowledged = other.ask(f"live {root}")
        assert acknowledged == [[KEEP, SECOND]]
        way.go_on.set()
        assert isinstance(handle.exception(WAIT_S), fastckpt.CheckpointError)
        pipeline.current().drain()
        other.ask("-")
        check(root, [[KEEP - 1, FIRST], *acknowledged], **told)


def upload(bare: Any, directory: Path, prefix: str) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            bare.put(f"{prefix}/{path.relative_to(directory)}", path.read_bytes())


@pytest.mark.parametrize("fault", [None, faults.expired])
def test_a_step_of_an_uploaded_root_is_saved_again(
    weed: Weed, proxy: Proxy, root: str, bare: Any, disk: Path, fault: Any
) -> None:
    """As `aws s3 sync` copies it from a disk. If the save fails, the step that was there stays."""
    with fastckpt.Checkpointer(disk / "run") as saver:
        for step in (1, 2, 3):
            saver.save(step, state_of(step)).result()
    upload(bare, disk / "run", root.partition(f"{BUCKET}/")[2])
    with fastckpt.Checkpointer(root, storage_options=options(proxy.port)) as saver:
        assert saver.restore(blank(SMALL)) == 3
        if fault is not None:
            proxy.on("create", fault, key="/manifest.json", times=ALWAYS)
        error = saver.save(3, state_of(30)).exception()
        assert (error is None) == (fault is None), error
        pipeline.current().drain()
        proxy.heal()
    into = blank(SMALL)
    with fastckpt.Checkpointer(root, storage_options=options(weed.port)) as reader:
        assert reader.steps() == [1, 2, 3] and reader.restore(into) == 3
        assert step_of(into) == (30 if fault is None else 3)
        assert len(reader._steps.names()) == 3


def test_a_failed_save_leaves_no_object(proxy: Proxy, weed: Weed, root: str, bare: Any) -> None:
    """Nor what a rank has made that is not the first."""
    told = options(proxy.port)
    with fastckpt.Checkpointer(root, storage_options=told) as saver:
        saver.save(1, state_of(1, LARGE)).result()
        proxy.on("put", faults.expired, key="rank-00000.json", times=ALWAYS)
        assert isinstance(saver.save(2, state_of(2, LARGE)).exception(), StorageError)
        proxy.heal()
    settle()
    assert len({each.split("/")[0] for each in of_steps(bare, root)}) == 1


def test_a_renewal_whose_answer_is_lost(weed: Weed, proxy: Proxy, root: str) -> None:
    """The lease is this job's own, so that save succeeds, and so do the next ones."""
    told = options(proxy.port)
    told["retry_config"] = {"max_retries": 0}
    with fastckpt.Checkpointer(root, storage_options=told) as saver:
        saver.save(1, state_of(1)).result()
        proxy.on("put", faults.lost, key="lease.json")
        for step in (2, 3, 4):
            saver.save(step, state_of(step)).result()
        assert saver.steps() == [1, 2, 3, 4]
