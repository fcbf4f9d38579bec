"""Staging memory that is taken ahead is there when it is needed."""

from __future__ import annotations

import time
from pathlib import Path

import torch

import fastckpt
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import through
from tests.kit.saves import let_others_end

WAIT_S = 200.0  # the memory is taken by a thread that yields to all others


def resident_bytes() -> int:
    """Of private memory that is no file's, as staging memory is; a module's code does not count."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def wait_for_growth(before: int, nbytes: float) -> None:
    until = time.monotonic() + WAIT_S
    while resident_bytes() - before < nbytes:
        assert time.monotonic() < until, "the memory was not taken"
        time.sleep(0.01)


def test_memory_is_taken_ahead_once(disk: Path) -> None:
    nbytes = 8 * BLOCK_BYTES
    with through(Storage(), 16 * BLOCK_BYTES):
        let_others_end()
        before = resident_bytes()
        fastckpt.prepare(nbytes)
        fastckpt.prepare(f"{nbytes}")
        wait_for_growth(before, 0.9 * nbytes)
        fastckpt.save({"w": torch.zeros(1 << 20)}, disk / "a.pt").result(WAIT_S)
        assert resident_bytes() - before < 1.6 * nbytes


def test_no_more_than_the_budget_is_taken() -> None:
    with through(Storage(), 2 * BLOCK_BYTES):
        let_others_end()
        before = resident_bytes()
        fastckpt.prepare("100GB")
        wait_for_growth(before, 1.8 * BLOCK_BYTES)
    assert resident_bytes() - before < 4 * BLOCK_BYTES
