"""Calls that return after their thread was given up: it goes on as if its process had been killed,
but for what it has open.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt.latch import Latch
from fastckpt.storage import calls
from fastckpt.storage.atomic import temporary_path
from fastckpt.storage.file_system import Storage

WAIT_S = 60.0


class Late(Storage):
    """Does all at once, but says so late of what is named "late"."""

    def __init__(self) -> None:
        self.done, self.may_return = threading.Event(), threading.Event()

    def create(self, path: str, mode: int, purpose: object = None) -> int:
        return self._late(path, super().create(path, mode, purpose))

    def _late(self, path: str, fd: int) -> int:
        if path.endswith("late"):
            self.done.set()
            assert self.may_return.wait(WAIT_S)
        return fd


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_thread_that_was_given_up_only_closes(tmp_path: Path, is_taken: bool) -> None:
    """What it made, and nobody knows of, goes; but not another file that has the name by then."""
    double, late, other = Late(), tmp_path / "late", tmp_path / "other"
    kept = temporary_path(str(tmp_path / "a.pt"))
    raised: list[type[BaseException]] = []
    left: list[list[str]] = []

    def attempt(call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except BaseException as error:
            raised.append(type(error))

    def work() -> None:
        fd = double.create(kept, 0o600)
        attempt(double.create, str(late), 0o600)
        attempt(double.remove, kept)
        attempt(double.rename, kept, str(other))
        double.close(fd)
        attempt(os.fstat, fd)
        mine = os.dup2(0, fd)
        double.close(fd)  # the number is another file's by now
        os.close(mine)
        left.extend([calls.left_behind(), calls.left_behind()])
        double.remove(kept)

    thread = threading.Thread(target=work)
    thread.start()
    assert double.done.wait(WAIT_S)
    assert thread.ident is not None
    call = calls.of_thread(thread.ident)
    assert call is not None and call.give_up() and not call.give_up()
    if is_taken:
        other.write_text("another save's")
        other.rename(late)
    double.may_return.set()
    call.ended.set()
    thread.join(WAIT_S)
    assert raised == [calls.GivenUp] * 3 + [OSError]
    assert left == [[kept], []] and not os.path.exists(kept)
    assert os.listdir(tmp_path) == (["late"] if is_taken else [])


def test_a_call_stays_under_way_until_its_work_was_ended() -> None:
    """Else who looks again meanwhile would give up the one around it, too."""
    outer, inner, seen = calls.Call("retention", ""), calls.Call("remove", ""), []

    class Ended(Latch):
        def wait(self, timeout: float | None = None) -> bool:
            seen.append(calls.of_thread(threading.get_ident()))
            return super().wait(timeout)

    def work() -> None:
        with pytest.raises(calls.GivenUp), outer, inner:
            inner.give_up()
        seen.append(calls.of_thread(threading.get_ident()))

    inner.ended = Ended()
    inner.ended.set()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_S)
    assert seen == [inner, None]
