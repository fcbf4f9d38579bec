"""An error that nobody foresaw, at any call that a thread of a save makes: the save ends and says
truly whether it has committed, whoever waits goes on, and no slot is lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

import fastckpt
from fastckpt import StorageError
from fastckpt.errors import is_visible
from fastckpt.ranks.round import Round
from fastckpt.saving import pipeline
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import save_through
from tests.kit.saves import temporaries, wait_until

WAIT_S = 60.0
PACKAGE = os.path.dirname(fastckpt.__file__)
OF_SAVES = tuple(os.path.join(PACKAGE, name) for name in ("saving/", "latch.py", "ranks/round.py"))
# What begins a thread's work, and what wakes those who wait: nobody could do that in their place.
SPARED = ("_run", "_work", "set")


class Fault:
    """Raises at the n-th call of a function of the library on such a thread of a save.

    Attributes:
        calls: how many there were.
    """

    def __init__(self, at: int, kind: type[BaseException], is_life: bool) -> None:
        self._at, self._kind, self._is_life = at, kind, is_life
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        name, caller = threading.current_thread().name, frame.f_back
        if event != "call" or not name.startswith("fastckpt-save-"):
            return
        if name.endswith("-life") != self._is_life or frame.f_code.co_name in SPARED:
            return
        called = caller is not None and caller.f_code.co_filename.startswith(OF_SAVES)
        if called and frame.f_code.co_filename.startswith(OF_SAVES):
            self.calls += 1
            if self.calls == self._at:
                raise self._kind("injected")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread tells of the error that ends it."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    yield
    threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("thread", "fence", "kind"),
    [
        ("life", "step", SystemExit),
        ("life", "call", MemoryError),
        ("worker", "step", MemoryError),
        ("worker", "call", SystemExit),
        pytest.param("life", "step", MemoryError, marks=pytest.mark.torture),
        pytest.param("life", "call", SystemExit, marks=pytest.mark.torture),
        pytest.param("worker", "step", SystemExit, marks=pytest.mark.torture),
        pytest.param("worker", "call", MemoryError, marks=pytest.mark.torture),
    ],
)
def test_an_error_at_any_call(
    memory: Path, quiet: None, thread: str, fence: str, kind: type[BaseException]
) -> None:
    path, current = memory / "a.pt", pipeline.current()
    options = fastckpt.SaveOptions(fence=fence, durable=False)
    at, calls = 0, 1
    while at <= calls:
        fault = Fault(at, kind, thread == "life")
        threading.setprofile(fault)  # of threads that begin from now on
        handle = fastckpt.save({"w": torch.ones(30_000), "n": at}, path, options=options)
        error = handle.exception(WAIT_S)
        assert not current.drain(WAIT_S), f"call {at}"
        assert current._slots.qsize() == pipeline.IN_FLIGHT_MAX, f"a slot was lost at call {at}"
        assert not current.unreported(), "its error was asked for"
        found = fastckpt.load(path)["n"]
        assert is_visible(error) or (error is None) == (found == at), f"call {at}: {error!r}"
        wait_until(lambda: not temporaries(memory), "its file is removed")
        calls = max(calls, fault.calls)
        at += 1 if thread == "life" or not at else 3
    assert calls > 20


def test_an_error_as_a_save_that_hangs_is_ended(
    memory: Path, quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = Slow()
    current = Pipeline(storage=double, budget_bytes=64 << 20)
    monkeypatch.setattr(Round, "fail", unforeseen)
    handle = save_through(current, {"w": torch.ones(9)}, memory / "a.pt", timeout_s=0.4)
    error = handle.exception(WAIT_S)
    assert isinstance(error, StorageError) and error.op == "sync"
    assert not current.drain(WAIT_S)
    double.released.set()
    wait_until(current.staging.hung.sweep, "the call has returned")
    wait_until(lambda: not os.listdir(memory), "its file is removed")
    current.close()


class Slow(Storage):
    """Its syncs do not return before they are released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def sync(self, fd: int) -> None:
        assert self.released.wait(WAIT_S)
        super().sync(fd)


def unforeseen(*_: object) -> None:
    raise MemoryError("injected")
