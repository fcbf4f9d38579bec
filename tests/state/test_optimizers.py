"""Every optimizer goes on from a restore as if nothing had happened, bit by bit, or the restore is
refused with what to do: as an object, inside of one, as a state_dict; made now or used; by one
process, and under FSDP2 on as many ranks and on others.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.crews import optimizer_bodies as bodies
from tests.crews.group_crew import Crew
from tests.crews.optimizer_bodies import GOES_ON, OPTIMIZERS
from tests.kit.storm import Storm
from tests.kit.torches import needs_fsdp2

RANKS_IMPORT = "tests.crews.optimizer_bodies"
SAVING, RESTORING = 2, (2, 1, 3)
QUANTIZED = ("Coded", "AdamW8bit", "AdamW4bit", "AdamWFp8")
# A sample for each kind of state: of the parameter's shape, of others, in nests, of subclasses.
SAMPLE = ("AdamW", "Coded", "AdamW8bit", "ScheduleFreeWrapper", "Factored", "MuonLike")
# Its lists grow from step to step, so that a used one has others.
GROWS = {"LBFGS": ("wrapper, used", "state_dict, used")}
# These cannot step with DTensors, which is torch's business.
NOT_UNDER_FSDP2 = ("Adafactor", "Rprop", "SparseAdam")


def cases() -> list[Any]:
    """The names of all optimizers; those outside of the sample are for `make torture`."""
    marks = {name: [] if name in SAMPLE else [pytest.mark.torture] for name in OPTIMIZERS}
    for name in OPTIMIZERS:
        package = bodies.PACKAGES.get(name, "torch")
        if not importlib.util.find_spec(package):
            marks[name].append(pytest.mark.skip(reason=f"{package} is not installed"))
    return [pytest.param(name, marks=marks[name]) for name in OPTIMIZERS]


def check(outcomes: dict[str, str], may_refuse: tuple[str, ...] = ()) -> None:
    for case, outcome in outcomes.items():
        is_refused = case in may_refuse and outcome.startswith("refused: ")
        assert outcome == GOES_ON or is_refused, f"{case}: {outcome}"


@pytest.mark.parametrize("name", cases())
def test_by_one_process(name: str, disk: Path) -> None:
    assert bodies.train_and_save(None, str(disk), name) == GOES_ON
    check(bodies.restored(None, str(disk), name, True), GROWS.get(name, ()))


@needs_fsdp2
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", cases())
def test_under_fsdp2(name: str, crew: Callable[[int], Crew], disk: Path, storm: Storm) -> None:
    saved = crew(SAVING)(bodies.train_and_save, str(disk), name)
    if name in NOT_UNDER_FSDP2:
        assert all(outcome.startswith("does not step") for outcome in saved), saved
        return
    assert saved == [GOES_ON] * SAVING
    for ranks in storm.some(RESTORING, 2):
        is_same = ranks == SAVING
        for outcomes in crew(ranks)(bodies.restored, str(disk), name, is_same):
            if name in QUANTIZED and not is_same:
                told = "cannot be divided differently: restore it on the same number of ranks"
                assert all(told in outcome for outcome in outcomes.values()), outcomes
            else:
                check(outcomes, GROWS.get(name, ()))
