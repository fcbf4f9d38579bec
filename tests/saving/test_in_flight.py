"""What an owner of saves may rely on: how many handles it keeps, that a wait which is broken off
loses none, and that the first error is raised once.
"""

from __future__ import annotations

import errno
import logging
import time

import pytest

from fastckpt.errors import CheckpointError, StorageError
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.in_flight import InFlight


def begun(name: str, on_error: str = "raise") -> InnerHandle:
    return InnerHandle(f"/run/{name}", time.perf_counter(), kind="test", on_error=on_error)


def failed(name: str, on_error: str = "raise") -> InnerHandle:
    """Returns the handle of a save that has failed, as the pipeline knows it."""
    handle = begun(name, on_error)
    pipeline.current().refuse(handle, StorageError("write", handle.path, errno.ENOSPC), None)
    return handle


def committed(name: str) -> InnerHandle:
    handle = begun(name)
    handle.set_result(handle.stats)
    return handle


@pytest.fixture(autouse=True)
def nothing_is_left_to_report() -> object:
    yield None
    for handle in pipeline.current().unreported():
        handle.note_reported()


@pytest.mark.parametrize("newest", [1, 2])
def test_ended_saves_are_dropped_but_for_the_newest(newest: int) -> None:
    saves, handles = InFlight(newest), [committed(str(number)) for number in range(5)]
    for handle in handles:
        saves.add(handle)
        assert saves.last is handle
    assert list(saves) == handles[-newest:]
    assert list(reversed(saves)) == handles[::-1][:newest]


def test_saves_under_way_and_one_failure_stay() -> None:
    saves = InFlight()
    first, running, second = failed("first"), begun("running"), failed("second")
    warned, newest = failed("warned", "warn"), committed("newest")
    for handle in (first, running, second, warned, newest):
        saves.add(handle)
    assert list(saves) == [first, running, newest]
    assert saves.running() == [running]
    assert second in pipeline.current().unreported(), "the pipeline reports it"


def test_the_first_error_is_raised_once_and_others_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saves = InFlight(newest=3)
    for handle in (committed("a"), failed("b"), failed("c")):
        saves.add(handle)
    with (
        caplog.at_level(logging.WARNING, "fastckpt"),
        pytest.raises(CheckpointError, match=r"'/run/b', failed: .*; this save, to '/run/d', was"),
    ):
        saves.raise_first(not_begun="/run/d")
    assert caplog.text.count("another save also failed") == 1 and "/run/c" in caplog.text
    saves.raise_first()
    assert not pipeline.current().unreported()


def test_an_error_that_somebody_asked_for_is_not_raised() -> None:
    saves, handle = InFlight(), failed("a")
    saves.add(handle)
    assert handle.exception() is not None
    saves.raise_first()
    saves.add(failed("b", "warn"))
    saves.raise_first()


def test_a_save_under_way_raises_nothing_yet() -> None:
    saves, handle = InFlight(), begun("a")
    saves.add(handle)
    saves.raise_first()
    pipeline.current().refuse(handle, StorageError("write", handle.path, errno.EIO), None)
    with pytest.raises(StorageError):
        saves.raise_first()


def test_a_wait_that_is_broken_off_loses_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C: the next wait, and the error after it, are of the same saves."""
    saves, handles = InFlight(), [begun("a"), begun("b")]
    for handle in handles:
        saves.add(handle)

    def press(*_given: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(InnerHandle, "wait_done", press)
        with pytest.raises(KeyboardInterrupt):
            saves.wait()
    assert list(saves) == handles
    handles[0].set_result(handles[0].stats)
    pipeline.current().refuse(handles[1], StorageError("write", "/run/b", errno.EIO), None)
    saves.wait()
    with pytest.raises(StorageError, match="'/run/b'"):
        saves.raise_first()


def test_a_save_whose_removals_go_on_is_waited_for() -> None:
    """A newer save does not drop it, although it has committed."""
    saves, first = InFlight(), committed("a")
    current = pipeline.current()
    gone: list[tuple[InnerHandle, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(current, "in_flight", lambda: [first])
        saves.add(first)
        saves.add(committed("b"))
        assert next(iter(saves)) is first
        patch.setattr(current, "drain", lambda _still_s, handles: gone.append(handles))
        saves.wait()
        assert not gone
        saves.wait(removal_s=60.0)
    assert gone == [tuple(saves)]
