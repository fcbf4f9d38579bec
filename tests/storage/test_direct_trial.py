"""Where the kind of file system does not say whether O_DIRECT is faster, saves find it out by their
own time, and later ones go the faster way.
"""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

import fastckpt
from fastckpt.engine.staging import Staging
from fastckpt.storage import direct_trial, policies
from fastckpt.storage.direct_trial import SAMPLES, TIMED_BYTES, VALID_S, DirectTrial
from fastckpt.storage.file_system import Storage
from fastckpt.storage.policies import POLICIES

WAIT_S = 60.0
DEVICE = 7


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Trial:
    """Files written one after the other, each way at its rate."""

    def __init__(self, usual: bool, direct_rate: float, buffered_rate: float) -> None:
        self.clock = Clock()
        self.choice = DirectTrial(self.clock)
        self.usual = usual
        self.rates = {True: direct_rate, False: buffered_rate}

    def write(self, nbytes: int = TIMED_BYTES) -> bool:
        direct, _why = self.choice.pick(DEVICE, self.usual, nbytes)
        self.choice.begin(3, DEVICE, direct, self.usual, nbytes)
        self.clock.now_s += nbytes / self.rates[direct]
        self.choice.synced(3, nbytes)
        self.choice.closed(3)
        return direct


@pytest.mark.parametrize("usual", [False, True])
@pytest.mark.parametrize("faster", [False, True])
def test_both_ways_are_tried_and_the_faster_one_is_kept(usual: bool, faster: bool) -> None:
    trial = Trial(usual, 2e8 if faster else 1e8, 1e8 if faster else 2e8)
    other = not usual
    assert [trial.write() for _ in range(2 * SAMPLES)] == [usual, other, other, usual]
    assert [trial.write() for _ in range(5)] == [faster] * 5
    direct, why = trial.choice.pick(DEVICE, usual, None)
    assert direct is faster, "what cannot be timed follows"
    assert why == f"measured: direct {200 if faster else 100} MB/s, buffered " + (
        "100 MB/s" if faster else "200 MB/s"
    )
    assert trial.choice.pick(DEVICE + 1, usual, None)[0] is usual, "another file system"


def test_a_save_that_others_slowed_down_does_not_decide() -> None:
    trial = Trial(False, 2e8, 1e8)
    trial.write()
    trial.rates[True] = 1e6
    assert trial.write()
    trial.rates[True] = 2e8
    assert trial.write() and not trial.write()
    assert trial.write()


def test_what_was_found_expires() -> None:
    trial = Trial(False, 2e8, 1e8)
    for _ in range(2 * SAMPLES):
        trial.write()
    trial.clock.now_s += VALID_S
    trial.rates = {True: 1e8, False: 2e8}
    assert [trial.write() for _ in range(6)] == [False, True, True, False, False, False]


def test_short_files_are_not_timed() -> None:
    trial = Trial(False, 2e8, 1e8)
    assert not any(trial.write(TIMED_BYTES - 1) for _ in range(9))
    assert not trial.write() and trial.write()


def test_a_file_that_is_not_synced_tells_nothing() -> None:
    trial = Trial(False, 2e8, 1e8)
    for _ in range(9):
        direct, _why = trial.choice.pick(DEVICE, False, TIMED_BYTES)
        assert not direct
        trial.choice.begin(3, DEVICE, direct, False, TIMED_BYTES)
        trial.choice.flushed(3)
        trial.choice.closed(3)


@pytest.mark.parametrize("how", ["refused", "given up"])
def test_a_way_that_fails_is_left(how: str) -> None:
    trial = Trial(False, 2e8, 1e8)
    trial.write()
    assert trial.choice.pick(DEVICE, False, TIMED_BYTES)[0]
    if how == "refused":
        trial.choice.refused(DEVICE)
    else:
        trial.choice.begin(3, DEVICE, True, False, TIMED_BYTES)
        trial.choice.closed(3)
    assert not any(trial.write() for _ in range(9))
    trial.clock.now_s += VALID_S
    assert [trial.write() for _ in range(2)] == [False, True]


# Saves.


@pytest.fixture
def on_fuse(monkeypatch: pytest.MonkeyPatch) -> DirectTrial:
    """Takes files for those of a FUSE daemon, and times short ones."""
    choice = DirectTrial()
    monkeypatch.setattr(policies, "policy_of", lambda _fd: ("fuse", POLICIES["fuse"]))
    monkeypatch.setattr(direct_trial, "TIMED_BYTES", 1 << 20)
    monkeypatch.setattr(Storage, "direct_trial", choice)
    return choice


def saved(path: Path, **options: object) -> fastckpt.SaveStats:
    state = {"w": torch.ones(1 << 20)}
    if path.suffix:
        return fastckpt.save(state, path, **options).result(WAIT_S)  # type: ignore[arg-type]
    with fastckpt.Checkpointer(path) as checkpointer:
        step = len(checkpointer.steps())
        return checkpointer.save(step, state).result(WAIT_S)


@pytest.mark.parametrize("name", ["a.pt", "run"])
def test_saves_try_both_ways_and_tell(on_fuse: DirectTrial, disk: Path, name: str) -> None:
    stats = [saved(disk / name) for _ in range(5)]
    assert [each.direct for each in stats[:4]] == [False, True, True, False]
    assert "being measured: buffered" in stats[1].why
    assert "measured: direct" in stats[4].why and "MB/s, buffered" in stats[4].why
    if name == "a.pt":
        assert bool((fastckpt.load(disk / name)["w"] == 1).all())


@pytest.mark.parametrize("writing, count", [(False, 16), (True, 4)])
def test_a_daemon_is_read_by_more_threads(
    on_fuse: DirectTrial, disk: Path, writing: bool, count: int
) -> None:
    staging = Staging(Storage(), 1 << 20)
    with closing(staging), open(disk / "a", "w+b") as file:
        before = len(os.listdir("/proc/self/task"))
        staging.route(file.fileno(), "a", "auto", writing=writing)
        assert len(os.listdir("/proc/self/task")) - before == count


def test_saves_that_cannot_be_timed_are_not(on_fuse: DirectTrial, disk: Path) -> None:
    for options in ({"durable": False}, {"drain_rate": 1e9}):
        assert not any(saved(disk / "a.pt", **options).direct for _ in range(3))
    assert not saved(disk / "a.pt").direct and saved(disk / "a.pt").direct


def test_a_probe_that_is_refused_ends_the_trial(
    on_fuse: DirectTrial, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = os.pwritev, []

    def pwritev(*args: object) -> int:
        asked.append(args)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pwritev", pwritev)
    stats = [saved(disk / "a.pt") for _ in range(5)]
    monkeypatch.setattr(os, "pwritev", real)
    assert not any(each.direct for each in stats) and len(asked) == 1
    assert "direct writes failed here" in stats[4].why
