"""Two Checkpointers of one process that have one root open: neither harms a step of the other, and
the one that saves second says that it had better not.
"""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt import Checkpointer
from fastckpt.saving import pipeline
from tests.doubles import Delay, process_on
from tests.saving.test_handle import wait_until
from tests.steps.test_checkpointer import WAIT_S

WARNING = "two open Checkpointers of this process save to"


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((300_000,), value), "step": value}


def test_a_step_is_not_made_where_the_other_one_removes(disk: Path) -> None:
    """The first Checkpointer is about to remove a file of step 1, of which it has removed the
    manifest, when the second one saves that step under the same name.
    """
    at_once, go_on = threading.Event(), threading.Event()
    at_once.set()
    storage = Delay("remove", at_once, go_on)
    with (
        process_on(storage),
        Checkpointer(disk / "run", keep_last=1) as first,
        Checkpointer(disk / "run", keep_last=2) as second,
    ):
        first.save(1, state(1))
        first.save(2, state(2)).result(WAIT_S)
        wait_until(lambda: len(storage._gates) == 0, "a file of step 1 is removed")
        with ThreadPoolExecutor(1) as executor:
            saved = executor.submit(lambda: second.save(1, state(3)).result(WAIT_S))
            wait_until(lambda: saved.done() or is_waiting_to_begin(), "step 1 is begun again")
            go_on.set()
            saved.result(WAIT_S)
        assert second.load(1)["step"] == 3
        assert second.steps() == first.steps() == [1, 2]


def is_waiting_to_begin() -> bool:
    """Returns whether a thread waits for who removes."""
    tops = [frame.f_code for frame in sys._current_frames().values()]
    return any(code.co_name == "__enter__" and "calls.py" in code.co_filename for code in tops)


def test_the_second_one_that_saves_warns_once(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(disk / "run") as first:
        first.save(1, state(1)).result(WAIT_S)
        with Checkpointer(disk / "run") as reader, Checkpointer(disk / "other") as other:
            assert reader.load()["step"] == 1
            other.save(1, state(1)).result(WAIT_S)
            first.save(2, state(2)).result(WAIT_S)
            assert WARNING not in caplog.text, "others save elsewhere, or only read"
            reader.save(3, state(3)).result(WAIT_S)
            reader.save(4, state(4)).result(WAIT_S)
        told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(told) == 1 and f"{WARNING} {str(disk / 'run')!r}" in told[0]


def test_one_after_the_other_does_not_warn(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    closed = Checkpointer(disk / "run")
    closed.save(1, state(1))
    closed.close()
    forgotten = Checkpointer(disk / "run")
    forgotten.save(2, state(2)).result(WAIT_S)
    pipeline.current().drain()  # its thread may have it for a moment longer
    del forgotten
    gc.collect()
    with Checkpointer(disk / "run") as last:
        last.save(3, state(3)).result(WAIT_S)
        assert last.steps() == [1, 2, 3]
    assert WARNING not in caplog.text
