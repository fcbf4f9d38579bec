"""Calls that return after the permit of their thread was revoked: it goes on as if its process had
been killed, but for what it has open.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt.storage import calls
from fastckpt.storage.atomic import temporary_path
from fastckpt.storage.bound import Bound
from fastckpt.storage.file_system import Storage
from tests.kit.saves import wait_until

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
def test_a_thread_whose_permit_is_revoked_only_closes(tmp_path: Path, is_taken: bool) -> None:
    """What it made, and nobody knows of, goes; but not another file that has the name by then."""
    double, late, other = Late(), tmp_path / "late", tmp_path / "other"
    kept = temporary_path(str(tmp_path / "a.pt"))
    raised: list[type[BaseException]] = []

    def attempt(call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except BaseException as error:
            raised.append(type(error))

    def work() -> None:
        with permit:
            work_permitted()
        double.remove(kept)

    def work_permitted() -> None:
        fd = double.create(kept, 0o600)
        attempt(double.create, str(late), 0o600)
        attempt(double.remove, kept)
        attempt(double.rename, kept, str(other))
        double.close(fd)
        attempt(os.fstat, fd)
        mine = os.dup2(0, fd)
        double.close(fd)  # the number is another file's by now
        os.close(mine)

    permit = calls.Permit()
    thread = threading.Thread(target=work)
    thread.start()
    assert double.done.wait(WAIT_S)
    error = permit.revoke(Bound(0.0))
    assert error is not None and (error.op, error.path) == ("create", str(late))
    assert permit.revoke(Bound(0.0)) is None, "it is revoked"
    if is_taken:
        other.write_text("another save's")
        other.rename(late)
    double.may_return.set()
    permit.ended.set()
    thread.join(WAIT_S)
    assert raised == [calls.Revoked] * 3 + [OSError]
    assert permit.left == [kept]
    assert os.listdir(tmp_path) == (["late"] if is_taken else [])


def test_a_call_returns_when_its_save_has_been_ended() -> None:
    """And the one around it is not revoked, too: what it does next is."""
    permit, returned = calls.Permit(), list[str]()
    entered, hung, may_return = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with permit, pytest.raises(calls.Revoked), calls.Call("retention", ""):
            entered.set()
            assert hung.wait(WAIT_S)
            with calls.Call("remove", "x"):
                assert may_return.wait(WAIT_S)
        returned.append("")

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(WAIT_S)
    hung.set()
    wait_until(lambda: len(permit.under_way) == 2, "it calls")
    error = permit.revoke(Bound(0.0))
    assert error is not None and error.op == "remove"
    may_return.set()
    wait_until(lambda: len(permit.under_way) == 1, "the call has returned")
    assert thread.is_alive() and not returned
    permit.ended.set()
    thread.join(WAIT_S)
    assert returned == [""] and not permit.under_way
