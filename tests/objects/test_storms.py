"""Processes and servers that are killed while steps are saved to a bucket: what a reader finds is
the old step or the new one, all of which is there, and the next save works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

import fastckpt
from fastckpt.errors import CheckpointError
from fastckpt.formats.step_names import step_of as step_in
from tests.kit.interpreters import Program
from tests.kit.objects.proxy import Proxy, expired
from tests.kit.objects.states import LARGE, blank, state_of, step_of
from tests.kit.objects.weed import BUCKET, Weed, environment, options
from tests.kit.storm import Storm

pytestmark = pytest.mark.multiprocess
ALWAYS = 1 << 30
MOMENT = timedelta(milliseconds=50)

# Restores, and saves step after step, without end.
LIFE = """
import sys
import fastckpt
from tests.kit.objects.states import LARGE, blank, state_of, step_of
into = blank(LARGE)
with fastckpt.Checkpointer(sys.argv[1], keep_last=2) as saver:
    found = saver.restore(into)
    assert found is None or step_of(into) == found
    print("has", -1 if found is None else found, flush=True)
    for step in range(0 if found is None else found + 1, 1 << 30):
        saver.save(step, state_of(step, LARGE)).result()
        print("saved", step, flush=True)
"""


def number(line: str, word: str, program: Program) -> int:
    assert line.startswith(word), line + program.communicate()[1]
    return int(line.split()[1])


@pytest.mark.timeout(900)
def test_a_process_that_is_killed(weed: Weed, storm: Storm, root: str, bare: Any) -> None:
    """At any moment; the next one finds what was committed last, or what was about to be, and
    removes what the dead one has left.
    """
    last = -1
    for rng in storm.rounds(1, 300):
        with Program(LIFE, root, variables={**environment(weed.port)}) as life:
            has = number(life.stdout.readline(), "has", life)
            assert has in (last, last + 1), (has, last)
            last = has
            for _ in range(rng.choice([0, 0, 1])):
                last = number(life.stdout.readline(), "saved", life)
            time.sleep(rng.uniform(0.0, 0.3))  # the moment is what is left to chance
            life.kill()
            for line in life.stdout.read().splitlines():
                last = number(line, "saved", life)
    into, told = blank(LARGE), options(weed.port)
    with fastckpt.Checkpointer(root, storage_options=told, keep_last=2) as saver:
        found = saver.restore(into)
        assert (found if found is not None else -1) in (last, last + 1)
        assert found is None or step_of(into) == found
        for step in (last + 2, last + 3):
            saver.save(step, state_of(step, LARGE)).result()
    with fastckpt.Checkpointer(root, storage_options=told) as reader:
        assert reader.steps() == [last + 2, last + 3]
    key = root.partition(f"{BUCKET}/")[2]
    paths = [each["path"].removeprefix(f"{key}/") for each in bare.list(key).collect()]
    steps = [path for path in paths if path.startswith("step-")]
    # What was killed has left the mark alone that it is over.
    directories = {path.partition("/")[0] for path in steps if not path.endswith("/manifest.json")}
    assert sorted(map(step_in, directories)) == [last + 2, last + 3]


@contextmanager
def saving(root: str, told: dict[str, Any]) -> Iterator[tuple[list[int], list[Exception]]]:
    """Saves step after step in a thread; gives those that were committed, and the errors."""
    committed, errors, is_over = list[int](), list[Exception](), threading.Event()

    def save() -> None:
        with fastckpt.Checkpointer(root, keep_last=2, storage_options=told) as saver:
            step = 0
            while not is_over.is_set():
                try:
                    saver.save(step, state_of(step, LARGE)).result()
                    committed.append(step)
                except CheckpointError as error:
                    errors.append(error)
                step += 1

    thread = threading.Thread(target=save)
    thread.start()
    try:
        yield committed, errors
    finally:
        is_over.set()
        thread.join()


def after(committed: list[int], step: int) -> int:
    """Waits for a later step to be committed."""
    deadline = time.monotonic() + 120
    while not committed or committed[-1] <= step:
        assert time.monotonic() < deadline, f"nothing was committed after step {step}"
        time.sleep(0.01)  # it is told by another thread
    return committed[-1]


def look(root: str, told: dict[str, Any], committed: list[int]) -> None:
    """A reader finds a step that is whole, and none before the last one."""
    into, least = blank(LARGE), committed[-1]
    with fastckpt.Checkpointer(root, storage_options=told) as reader:
        found = reader.restore(into)
    assert found is not None and found >= least and step_of(into) == found


def test_a_server_that_is_killed(weed: Weed, storm: Storm, root: str) -> None:
    """And started again, with what it had; the next save works."""
    backoff = {"init_backoff": MOMENT, "max_backoff": MOMENT, "base": 2}
    retries = {"max_retries": 2000, "retry_timeout": timedelta(seconds=60), "backoff": backoff}
    told = options(weed.port, retry_config=retries)
    with saving(root, told) as (committed, _errors):
        for rng in storm.rounds(1, 50):
            after(committed, committed[-1] if committed else -1)
            time.sleep(rng.uniform(0.0, 0.3))  # the moment is what is left to chance
            weed.kill(*rng.sample(["s3", "filer", "volume"], rng.choice([1, 3])))
            weed.start()
            look(root, told, committed)
            after(committed, committed[-1])
    look(root, told, committed)


def test_credentials_that_expire_at_any_moment(
    weed: Weed, proxy: Proxy, storm: Storm, root: str
) -> None:
    told = options(proxy.port)
    with saving(root, told) as (committed, errors):
        for rng in storm.rounds(1, 100):
            last = after(committed, committed[-1] if committed else -1)
            known = len(errors)
            proxy.on("", expired, skip=rng.randrange(30), times=ALWAYS)
            while len(errors) == known:
                time.sleep(0.005)  # it is told by another thread
            look(root, options(weed.port), committed)
            proxy.heal()
            after(committed, last)
        assert errors and all("ExpiredToken" in str(e) or "403" in str(e) for e in errors)
    look(root, options(weed.port), committed)
