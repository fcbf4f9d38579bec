"""Steps of a bucket that keep_parts thins: whole or thinned, never less, whoever is killed, pins,
removes or reads at any moment, and whatever becomes of a request.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastckpt import Checkpointer, SaveOptions
from fastckpt.errors import CheckpointError, IncompatibleCheckpoint
from tests.kit.forgeries import small_shards
from tests.kit.interpreters import Program
from tests.kit.objects.proxy import Fault, Passage, Proxy, busy, lost
from tests.kit.objects.weed import BUCKET, Weed, environment, options
from tests.kit.parts import BOTH, KEEP, WHOLE, flat, found, left_over, state
from tests.kit.storm import Storm

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def shards_of_any_size() -> Iterator[None]:
    with small_shards():
        yield


def job(root: str, told: dict[str, Any], **others: Any) -> Checkpointer:
    given: dict[str, Any] = {"keep_last": 1, "keep_parts": KEEP, "storage_options": told}
    return Checkpointer(root, options=SaveOptions(timeout_s=WAIT_S), **given | others)


def saved(root: str, told: dict[str, Any], *steps: int, **others: Any) -> dict[int, str]:
    """Saves steps by a job of its own; returns what is there then, as found() does."""
    with job(root, told, **others) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step)).result(WAIT_S)
    return found(root, storage_options=told)


def thin(root: str, told: dict[str, Any], step: int, parts: Any = ("model",)) -> bool:
    """What retention does with one step."""
    with job(root, told) as checkpointer:
        steps = checkpointer._steps
        (item,) = (each for each in steps.committed()[0] if each.manifest.step == step)
        return steps.thin(item.name, item.manifest.nonce, parts)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {7: WHOLE, 6: BOTH, 5: "model", 4: "model"}),
        (
            {"keep_last": 2, "codec": "planes"},
            {7: WHOLE, 6: WHOLE, 5: BOTH, 4: "model", 3: "model"},
        ),
        ({"keep_every": 3}, {7: WHOLE, 6: WHOLE, 5: BOTH, 4: "model", 3: WHOLE, 2: "model"}),
        ({"keep_parts": {"step": 2}}, {7: WHOLE, 6: "step", 5: "step"}),
    ],
)
def test_the_newest_of_those_that_go_are_thinned(
    given: Any, expected: dict[int, str], weed: Weed, root: str
) -> None:
    told = options(weed.port)
    assert saved(root, told, *range(1, 8), **given) == expected
    assert not left_over(root, storage_options=told)
    with job(root, told) as checkpointer:
        with pytest.raises(IncompatibleCheckpoint, match="the newest whole step is step 7"):
            checkpointer.restore(state(0), min(expected))
        checkpointer.pin(min(expected))
    again = saved(root, told, 8, **given)
    assert again[min(expected)] == expected[min(expected)] and again[8] == WHOLE


def test_a_pin_is_first(weed: Weed, root: str) -> None:
    told = options(weed.port)
    saved(root, told, 1, 2, keep_last=9)
    with job(root, told) as checkpointer:
        checkpointer.pin(1)
    assert not thin(root, told, 1)
    assert saved(root, told, 3, 4) == {4: WHOLE, 3: BOTH, 2: "model", 1: WHOLE}


def between(proxy: Proxy, kind: str, other: Callable[[], object], **which: Any) -> list[str]:
    """Has something else done before the next request of a kind is passed on; says when it was."""
    met = list[str]()

    def fault(passage: Passage) -> None:
        met.append(passage.request.key)
        other()
        status, headers, body = passage.ask()
        passage.answer(status, body, headers)

    proxy.on(kind, fault, **which)
    return met


@pytest.mark.parametrize(("kind", "skip"), [("get", 0), ("list", 0), ("put", 0), ("list", 1)])
def test_a_pin_in_between(kind: str, skip: int, weed: Weed, proxy: Proxy, root: str) -> None:
    """Before the manifest is read, before it is replaced, or afterwards: the step is whole."""
    saved(root, options(weed.port), 1, 2, keep_last=9)
    other = job(root, options(weed.port))
    with job(root, options(proxy.port)) as checkpointer, other:
        steps = checkpointer._steps
        (item,) = (each for each in steps.committed()[0] if each.manifest.step == 1)
        met = between(proxy, kind, lambda: other.pin(1), key="", skip=skip)
        assert not steps.thin(item.name, item.manifest.nonce, {"model"})
        assert met, "nobody has pinned it"
        assert not steps.thin(item.name, item.manifest.nonce, {"model"})
    assert found(root, storage_options=options(weed.port)) == {2: WHOLE, 1: WHOLE}


@pytest.mark.parametrize(("kind", "skip"), [("get", 0), ("list", 0), ("put", 0), ("list", 1)])
def test_a_removal_in_between(
    kind: str, skip: int, weed: Weed, proxy: Proxy, root: str, bare: Any
) -> None:
    """No manifest comes back that has lost its files."""
    told = options(weed.port)
    saved(root, told, 1, 2, keep_last=9)
    other = job(root, told)
    with job(root, options(proxy.port)) as checkpointer, other:
        steps = checkpointer._steps
        (item,) = (each for each in steps.committed()[0] if each.manifest.step == 1)
        met = between(proxy, kind, lambda: other.delete(1), skip=skip)
        try:
            steps.thin(item.name, item.manifest.nonce, {"model"})
        except CheckpointError as error:
            assert item.name in str(error)
        assert met
    assert found(root, storage_options=told) == {2: WHOLE}
    key = root.partition(f"{BUCKET}/")[2]
    assert not [each for each in bare.list(f"{key}/{item.name}/").collect()]


def test_a_retention_that_is_late_brings_nothing_back(weed: Weed, root: str) -> None:
    """It has decided before that of the next save, which was faster."""
    told = options(weed.port)
    saved(root, told, 1, 2, keep_last=9)
    assert thin(root, told, 1) and not thin(root, told, 1, {"model", "ema"})
    assert not thin(root, told, 1, {"ema"})
    assert found(root, storage_options=told) == {2: WHOLE, 1: "model"}


def refused(passage: Passage) -> None:
    """412: the object is another one by now."""
    passage.answer(412)


@pytest.mark.parametrize("fault", [busy, lost, refused])
@pytest.mark.parametrize("kind", ["get", "put", "list", "delete"])
def test_requests_that_fail(kind: str, fault: Fault, weed: Weed, proxy: Proxy, root: str) -> None:
    """The step is whole or thinned; the next save does what is left to do."""
    told = options(proxy.port)
    saved(root, options(weed.port), 1, 2, keep_last=9)
    with job(root, told) as checkpointer:
        checkpointer.save(3, state(3)).result(WAIT_S)
        checkpointer.best("loss")  # waits for the end of the retention
        proxy.on(kind, fault, key="step-00000003", times=2)
        checkpointer.save(4, state(4)).result(WAIT_S)
        checkpointer.best("loss")
        proxy.heal()
        there = found(root, storage_options=options(weed.port))
        assert there.keys() >= {4, 3, 2, 1} and there[4] == WHOLE
        checkpointer.save(5, state(5)).result(WAIT_S)
    told = options(weed.port)
    assert found(root, storage_options=told) == {5: WHOLE, 4: BOTH, 3: "model", 2: "model"}
    assert not left_over(root, storage_options=told)


@pytest.mark.parametrize("kind", ["get", "head"])
def test_a_reader_whose_step_is_thinned_meanwhile(
    kind: str, weed: Weed, proxy: Proxy, root: str
) -> None:
    """It looks again, rather than take it for damage."""
    told = options(weed.port)
    saved(root, told, 1, keep_last=9)
    into = {"model": state(9)["model"], "optimizer": state(9)["optimizer"]}
    with Checkpointer(root, storage_options=options(proxy.port)) as reader:
        met = between(proxy, kind, lambda: thin(root, told, 1), key="rank-00000.")
        with pytest.raises(IncompatibleCheckpoint, match=r"'optimizer' is missing .*keep_parts"):
            reader.restore(into)
        assert met and reader.restore(into, only="model/*") == 1
    assert flat(into["model"]) == flat(state(1)["model"])
    assert found(root, storage_options=told) == {1: "model"}


# Restores, and saves step after step, without end.
LIFE = """
import sys
from fastckpt import Checkpointer
from tests.kit.forgeries import small_shards
from tests.kit.parts import KEEP, flat, of, state
with small_shards():
    saver = Checkpointer(sys.argv[1], keep_last=1, keep_parts=KEEP)
    into = state(0)
    found = saver.restore(into)
    assert found is None or flat(into) == of(found, "whole"), found
    print("has", -1 if found is None else found, flush=True)
    for step in range(0 if found is None else found + 1, 1 << 30):
        saver.save(step, state(step)).result()
        print("saved", step, flush=True)
"""


@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_a_process_that_is_killed(weed: Weed, storm: Storm, root: str) -> None:
    """At any moment: each step that was there is whole or thinned, as its place among them says."""
    last, kinds, told, above = -1, set(), options(weed.port), root
    for number, rng in enumerate(storm.rounds(2, 300)):
        if number % 20 == 0:  # who is killed again and again leaves ever more steps
            root, last = f"{above}/{number}", -1
        with Program(LIFE, root, variables={**environment(weed.port)}) as life:
            last = told_by(life, "has", last)
            for _ in range(rng.choice([0, 1, 1, 2])):
                last = told_by(life, "saved", last)
            time.sleep(rng.uniform(0.0, 0.2))  # the moment is what is left to chance
            life.kill()
            assert life.wait(WAIT_S) == -signal.SIGKILL
            for line in life.stdout.read().splitlines():
                last = int(line.split()[1])
        there = found(root, storage_options=told)
        if not there:
            continue
        numbers = sorted(there, reverse=True)
        assert numbers[0] in (last, last + 1) and there[numbers[0]] == WHOLE
        assert numbers == [*range(numbers[0], numbers[0] - len(numbers), -1)]
        assert len(numbers) >= min(numbers[0] + 1, 4)
        assert all(there[step] in (WHOLE, BOTH) for step in numbers[:2]), there
        kinds.add(tuple(there.values()))
    assert kinds
    there = saved(root, told, last + 2)
    assert [there[step] for step in sorted(there)] == ["model", "model", BOTH, WHOLE][-len(there) :]
    assert not left_over(root, storage_options=told)


def told_by(life: Program, word: str, last: int) -> int:
    line = life.stdout.readline()
    assert line.startswith(word), line + life.communicate()[1]
    number = int(line.split()[1])
    assert number in (last, last + 1), (line, last)
    return number
