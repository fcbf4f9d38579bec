"""Steps that are asked for while another process commits one after the other and keeps the last one
alone: there is always one, so nobody may ever be told that there is none, or that one is damaged.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from fastckpt import Checkpointer
from tests.kit.programs import program, told

SAVER = """
import itertools, sys
import torch
from fastckpt import Checkpointer, SaveOptions

with Checkpointer(sys.argv[1], keep_last=1, options=SaveOptions(durable=False)) as checkpointer:
    for step in itertools.count(1):
        checkpointer.save(step, {"w": torch.full((1000,), float(step))}).result()
        if step == 1:
            print("begun", flush=True)
"""
SHARE = 10  # of the time for torture, unless this test is the only one


@pytest.mark.torture
@pytest.mark.multiprocess
@pytest.mark.timeout(0)  # it takes the time that it is given
def test_there_is_always_a_step(disk: Path, request: pytest.FixtureRequest) -> None:
    limit_s = request.config.getoption("--torture") or 10.0
    limit_s /= 1 if len(request.session.items) == 1 else SHARE
    end, asked, last = time.monotonic() + limit_s, 0, 0
    with program(SAVER, disk / "run") as saver:
        assert told(saver) == "begun"
        while time.monotonic() < end:
            with Checkpointer(disk / "run") as checkpointer:
                for _ in range(100):
                    state = {"w": torch.zeros(1000)}
                    latest, steps = checkpointer.latest(), checkpointer.steps()
                    restored, loaded = checkpointer.restore(state), checkpointer.load()
                    assert latest is not None and steps and restored is not None
                    found = [latest, max(steps), restored, int(loaded["w"][0])]
                    assert last <= found[0] and found == sorted(found), f"call {asked}"
                    assert bool((state["w"] == restored).all())
                    asked, last = asked + 4, found[-1]
        assert saver.poll() is None, "it saves to the end"
    shutil.rmtree(disk / "run")  # it was killed in the middle of a save
    print(f"{asked} calls in {limit_s:.0f} s, beside {last} commits")
