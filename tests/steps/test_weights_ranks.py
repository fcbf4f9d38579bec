"""Promise: weights that several ranks publish are read whole by any number of ranks, in any parts;
whatever rank fails or is killed, and whenever a publisher is, a subscriber has one published
version's bytes, and the next version can be published.

What the ranks do stands in crews/weights_bodies.py.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt import WeightSubscriber
from tests.crews import weights_bodies as bodies
from tests.crews.group_crew import Crew, Nursery, RankDied
from tests.kit.programs import program, told
from tests.kit.storm import Storm
from tests.kit.tiers import local
from tests.kit.torches import needs_fsdp2
from tests.kit.weights import ROWS, assert_is, assert_same, looked, publishing, weights

__all__ = ["local"]
RANKS_IMPORT = "tests.crews.weights_imports"
pytestmark = pytest.mark.multiprocess
FULL, DIFFERS = "no step was saved before", ""


@needs_fsdp2
def test_what_two_ranks_publish_is_read_by_any_number(
    crew: Callable[[int], Crew], disk: Path
) -> None:
    root = str(disk / "run")
    for versions in ([1, 2], [3, 4]):
        assert crew(2)(bodies.publish, root, versions) == [[FULL, DIFFERS]] * 2
        with WeightSubscriber(root) as subscriber:
            assert_is(subscriber.next(), versions[-1])
        assert crew(3)(bodies.read_parts, root) == [[(versions[-1], True)]] * 3
        begin, end = ROWS // 2 - 30, ROWS // 2 + 20  # of both ranks' rows

        def part(name: str, shape: tuple[int, ...]) -> list[slice] | None:
            return [slice(begin, end), slice(None, -7)] if len(shape) == 2 else None  # noqa: B023

        with WeightSubscriber(root, part=part) as subscriber:
            expected = weights(versions[-1])
            expected["layer.weight"] = expected["layer.weight"][begin:end, :-7]
            assert_same(dict(subscriber.next() or ()), expected)


@needs_fsdp2
def test_after_a_version_that_failed_on_one_rank_the_next_is_full_on_all(
    crew: Callable[[int], Crew], disk: Path
) -> None:
    root = str(disk / "run")
    ends = crew(2)(bodies.fail_in_the_second, root)
    for errors in ends:
        assert [errors[0], errors[3]] == [FULL, DIFFERS]
        assert errors[1] in ("PeerFailed", "RanksDisagree")
        assert errors[2] == "the save before failed"
    with WeightSubscriber(root) as subscriber:
        assert_is(subscriber.next(), 4)


def test_what_one_rank_cannot_publish_fails_on_all_at_once(
    crew: Callable[[int], Crew], disk: Path
) -> None:
    (first, last) = crew(2)(bodies.fail_alone, str(disk / "run"))
    assert "rank 1 failed: TypeError" in first[0], "it has not waited for the time-out"
    assert "'layer.weight'" in last[0]
    assert first[1] == last[1] == "None"


@needs_fsdp2
@pytest.mark.slow
def test_a_rank_that_dies_as_it_publishes_leaves_no_half_version(
    nursery: Nursery, disk: Path, storm: Storm
) -> None:
    for number, rng in enumerate(storm.rounds(suite=2, torture=60)):
        root, dying = str(disk / str(number)), rng.randrange(2)
        with nursery.crew(2) as crew:
            ends = crew(bodies.die_publishing, root, dying, rng.randrange(12))
        assert isinstance(ends[dying], RankDied)
        with WeightSubscriber(root) as subscriber:
            update = subscriber.next()
            assert_is(update, 1 if ends[1 - dying] != [None] else 2)
        # The dead job's lease is of this host: another job takes over.
        with publishing(Path(root)) as publish:
            assert publish(3) == FULL
        with WeightSubscriber(root) as subscriber:
            assert_is(subscriber.next(), 3)


PUBLISHER = """
import sys
import itertools
import fastckpt
from fastckpt import Memory, WeightPublisher
from tests.kit.weights import weights

options = fastckpt.SaveOptions(durable=False)
begin, local = int(sys.argv[2]), None
if sys.argv[3]:
    local = Memory(directory=sys.argv[3], budget="64MiB")
with WeightPublisher(
    sys.argv[1], keep=2, full_every=4, local=local, options=options
) as publisher:
    for version in itertools.count(begin):
        publisher.publish(weights(version % 50), version).result()
        if version == begin:
            print("begun", flush=True)
"""


SUBSCRIBER = """
import sys
from pathlib import Path
from fastckpt import WeightSubscriber
from tests.kit.weights import looked

with WeightSubscriber(sys.argv[1], local=sys.argv[2] or None) as subscriber:
    looked(subscriber)
    print("begun", flush=True)
    while True:
        looked(subscriber)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_local", [False, True])
def test_a_subscriber_beside_publishers_and_others_that_are_killed(
    disk: Path, local: Path, storm: Storm, is_local: bool
) -> None:
    root, begin, memory = disk / "run", 1, local if is_local else None
    with WeightSubscriber(root, local=memory) as beside:
        for rng in storm.rounds(suite=3, torture=100):
            with (
                program(PUBLISHER, root, begin, memory or "") as publisher,
                program(SUBSCRIBER, root, memory or "") as subscriber,
            ):
                assert told(publisher) == told(subscriber) == "begun"
                for _ in range(rng.randrange(1, 30)):
                    begin = max(begin, looked(beside))
                for each in rng.sample([publisher, subscriber], 2):
                    each.send_signal(signal.SIGKILL)
                    each.wait(60.0)
            begin = max(begin, looked(beside))
            with WeightSubscriber(root, local=memory) as fresh:
                assert looked(fresh) == begin
            begin += 1
    shutil.rmtree(root)  # the last one was killed in the midst of a save
