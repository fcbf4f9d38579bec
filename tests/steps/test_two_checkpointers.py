"""Two Checkpointers of one process on one root: only one of them saves there until it is closed or
forgotten, others may read meanwhile, and both sides see what was committed.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt import Checkpointer, RootInUse
from fastckpt.saving import pipeline
from tests.kit.steps import WAIT_S


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((300_000,), value), "step": value}


def test_the_second_one_that_saves_is_refused(disk: Path) -> None:
    with Checkpointer(disk / "run", keep_last=2) as first:
        first.save(1, state(1)).result(WAIT_S)
        with Checkpointer(disk / "run") as reader, Checkpointer(disk / "other") as other:
            assert reader.load()["step"] == 1
            other.save(1, state(1)).result(WAIT_S)
            first.save(2, state(2)).result(WAIT_S)
            with pytest.raises(RootInUse, match="another open Checkpointer of this process"):
                reader.save(3, state(3))
            assert reader.load()["step"] == 2
        first.save(3, state(3)).result(WAIT_S)  # a reader that is closed takes nothing away
        pipeline.current().drain()
        assert first.steps() == [2, 3]


def test_the_second_one_saves_when_the_first_one_is_closed(disk: Path) -> None:
    with Checkpointer(disk / "run") as second:
        with Checkpointer(disk / "run") as first:
            first.save(1, state(1))
            with pytest.raises(RootInUse):
                second.save(2, state(2))
        second.save(2, state(2)).result(WAIT_S)
        assert second.steps() == [1, 2]


def test_one_after_the_other(disk: Path) -> None:
    closed = Checkpointer(disk / "run")
    closed.save(1, state(1))
    closed.close()
    forgotten = Checkpointer(disk / "run")
    forgotten.save(2, state(2)).result(WAIT_S)
    forgotten.itself = forgotten  # type: ignore[attr-defined] # so the collector alone forgets it
    del forgotten
    with Checkpointer(disk / "run") as last:
        last.save(3, state(3)).result(WAIT_S)
        assert last.steps() == [1, 2, 3]


def test_a_forgotten_one_whose_save_is_in_flight_commits_it(disk: Path) -> None:
    for step in range(1, 6):
        Checkpointer(disk / "run", keep_last=3).save(step, state(step))
    gc.collect()
    pipeline.current().drain()
    with Checkpointer(disk / "run") as last:
        assert last.steps() == [3, 4, 5] and last.load()["step"] == 5
