"""The lease of a root in a bucket: nobody replaces or removes what became another job's meanwhile,
whoever was taken over hears of it, and a job that has ended is not waited for. What leases are for
is steps/test_lease.py's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from fastckpt import Checkpointer
from fastckpt.arguments.urls import path_of
from fastckpt.errors import RootInUse
from fastckpt.saving import lease as lease_module
from fastckpt.saving import pipeline
from fastckpt.saving.lease import LASTS_S, Lease
from fastckpt.saving.lease_records import LeaseRecord
from fastckpt.steps.root import store_at
from tests.kit.doubles import dead_pid
from tests.kit.objects import proxy as faults
from tests.kit.objects.proxy import Passage, Proxy
from tests.kit.objects.states import state_of
from tests.kit.objects.weed import BUCKET, Weed, options
from tests.kit.steps import record

WAIT_S = 60.0


@pytest.fixture
def lease(proxy: Proxy, root: str) -> Iterator[Lease]:
    found = Lease(pipeline.current().storage, path_of("root", root, options(proxy.port)))
    yield found
    found.release()


def key_of(root: str) -> str:
    return root.partition(f"{BUCKET}/")[2] + "/lease.json"


def there(bare: Any, root: str) -> LeaseRecord:
    found = LeaseRecord.from_bytes(bytes(bare.get(key_of(root)).bytes()))
    assert found is not None
    return found


@contextmanager
def first(proxy: Proxy, kind: str, act: Any) -> Iterator[None]:
    """Something happens right before the next request of a kind about the lease."""
    met = threading.Event()

    def passing(passage: Passage) -> None:
        act()
        met.set()
        status, headers, body = passage.ask()
        passage.answer(status, body, headers)

    proxy.on(kind, passing, key="lease.json")
    yield
    assert met.is_set()


OTHER = record(space="of another machine", pid=7)


@pytest.mark.parametrize("dead", [record(pid=dead_pid()), OTHER._replace(is_over=True)])
def test_of_two_jobs_that_find_a_dead_one_s_lease_one_has_it(
    lease: Lease, proxy: Proxy, root: str, bare: Any, dead: LeaseRecord
) -> None:
    bare.put(key_of(root), dead.to_bytes())
    with (
        first(proxy, "put", lambda: bare.put(key_of(root), OTHER.to_bytes())),
        pytest.raises(RootInUse, match="process 7 on host 'elsewhere'"),
    ):
        lease.take()
    assert there(bare, root) == OTHER and not lease.is_held
    bare.put(key_of(root), dead.to_bytes())
    lease.take()
    assert lease.is_held and there(bare, root).nonce != OTHER.nonce


@pytest.mark.parametrize("is_over", [False, True])
def test_a_job_that_was_taken_over_hears_of_it(
    lease: Lease, root: str, bare: Any, is_over: bool
) -> None:
    """Also if the one that took it over has given it up, after which it may be taken again."""
    lease.take()
    lease.renew()
    assert lease.tenure == 1
    bare.put(key_of(root), OTHER._replace(is_over=is_over).to_bytes())
    assert lease.is_lost()
    with pytest.raises(RootInUse, match="is free again" if is_over else "has held its lease"):
        lease.renew()
    assert not lease.is_held and lease.tenure == 0
    if is_over:
        lease.take()
        assert lease.tenure == 2
    else:
        lease.release()
        assert there(bare, root) == OTHER


def test_who_gives_it_up_says_so_and_nobody_waits(lease: Lease, root: str, bare: Any) -> None:
    lease.take()
    assert not there(bare, root).is_over
    lease.release()
    assert there(bare, root).is_over and not lease.is_left() and not lease.is_of_another()
    lease.take()
    assert lease.is_held


def test_two_of_one_process(lease: Lease, root: str, bare: Any) -> None:
    """What one has renewed is the other's own, too, and stays until the last gives it up."""
    second = Lease(pipeline.current().storage, lease.path.rpartition("/")[0])
    lease.take()
    second.take()
    for each in (lease, second, lease):
        each.renew()
    lease.release()
    assert not there(bare, root).is_over and second.is_held
    second.renew()
    second.release()
    assert there(bare, root).is_over


def test_what_is_removed_by_hand_is_made_again(lease: Lease, root: str, bare: Any) -> None:
    lease.take()
    bare.delete(key_of(root))
    lease.renew()
    assert lease.is_held and not there(bare, root).is_over


@pytest.mark.parametrize("is_carried_out", [False, True])
def test_a_renewal_without_an_answer(
    lease: Lease, proxy: Proxy, root: str, bare: Any, is_carried_out: bool
) -> None:
    """The lease is found to be the own one, whichever of its records lies there."""
    lease.take()
    proxy.on("put", faults.lost if is_carried_out else faults.expired, key="lease.json", times=9)
    lease.renew()
    proxy.heal()
    lease.renew()
    assert lease.is_held and lease.tenure == 1


def test_a_quiet_job_renews_it(
    lease: Lease, root: str, bare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a save; but not once it is another job's."""
    monkeypatch.setattr(lease_module, "BEAT_S", 0.01)
    lease.take()
    tags = set[str]()
    deadline = threading.Event()
    while len(tags) < 2 and not deadline.wait(0.005):  # a beat tells nobody of itself
        tags.add(bare.head(key_of(root))["e_tag"] + str(bare.head(key_of(root))["last_modified"]))
    bare.put(key_of(root), OTHER.to_bytes())
    with pytest.raises(RootInUse):
        lease.renew()
    assert there(bare, root) == OTHER


def test_what_a_dead_job_has_left_is_given_up_by_repair(
    lease: Lease, proxy: Proxy, root: str, bare: Any
) -> None:
    """Unless somebody was faster, whose lease stays."""
    dead = record(pid=dead_pid())
    bare.put(key_of(root), dead.to_bytes())
    assert lease.is_left()
    with first(proxy, "put", lambda: bare.put(key_of(root), OTHER.to_bytes())):
        assert not lease.remove_left()
    assert there(bare, root) == OTHER and OTHER.lasts_s >= LASTS_S and lease.is_of_another()
    bare.put(key_of(root), dead.to_bytes())
    assert lease.remove_left() and there(bare, root).is_over


def test_what_another_job_commits_once_a_lease_was_removed_by_hand_comes_before(
    lease: Lease, weed: Weed, root: str, bare: Any
) -> None:
    """The number of the commit under way was counted before the other job's."""
    steps = store_at(pipeline.current().storage, lease.path.rpartition("/")[0], lease)
    lease.take()
    number = steps.next_sequence()
    bare.delete(key_of(root))
    with Checkpointer(root, storage_options=options(weed.port)) as saver:
        saver.save(7, state_of(7)).result()
    ((_name, manifest),) = steps.committed()[0]
    assert manifest.sequence > number
    assert steps.renewed(replace(manifest, sequence=number)).sequence > manifest.sequence
    assert steps.renewed(manifest) is manifest and lease.is_held
