"""Megatron-core with experts on several ranks, and with interleaved chunks of a pipeline.

Responsible for both coming back bit for bit, model and optimizer, on the same layout and on others.
What the ranks do stands in crews/megatron_layouts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.crews import megatron_layouts as layouts
from tests.crews.group_crew import Crew, Nursery

pytestmark = pytest.mark.multiprocess
RANKS_IMPORT = "tests.crews.megatron_imports"

DENSE = {"tp": 1, "pp": 1}
INTERLEAVED = {"tp": 1, "pp": 2, "vp": 2}
PIPELINE = {"tp": 1, "pp": 2}
EXPERTS = {"tp": 1, "pp": 1, "ep": 2, "experts": 4}
TENSOR_EXPERTS = {"tp": 2, "pp": 1, "ep": 2, "experts": 4}
REPLICATED_EXPERTS = {"tp": 1, "pp": 1, "ep": 1, "experts": 4}


@pytest.fixture
def crew(nursery: Nursery) -> Crew:
    return nursery.lasting_crew(2)


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (EXPERTS, EXPERTS),
        pytest.param(EXPERTS, REPLICATED_EXPERTS, marks=pytest.mark.torture),
        (REPLICATED_EXPERTS, EXPERTS),
        (TENSOR_EXPERTS, REPLICATED_EXPERTS),
    ],
    ids=["ep2-ep2", "ep2-ep1", "ep1-ep2", "tp2ep2-ep1"],
)
def test_experts(save: Any, load: Any, crew: Crew, disk: Path) -> None:
    chained = 1 if save is REPLICATED_EXPERTS else 2  # one for the parameters of experts
    assert crew(layouts.save, str(disk), save, {}) == [chained] * 2
    assert crew(layouts.load, str(disk), load) == [((1, 5), [])] * 2


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (INTERLEAVED, INTERLEAVED),
        pytest.param(INTERLEAVED, PIPELINE, marks=pytest.mark.torture),
        (INTERLEAVED, DENSE),
        (DENSE, INTERLEAVED),
    ],
    ids=["vp2-vp2", "vp2-pp2", "vp2-pp1", "pp1-vp2"],
)
def test_interleaved_chunks(save: Any, load: Any, crew: Crew, disk: Path) -> None:
    crew(layouts.save, str(disk), save, {})
    assert crew(layouts.load, str(disk), load) == [((1, 5), [])] * 2


@pytest.mark.parametrize("layout", [EXPERTS, INTERLEAVED], ids=["ep2", "vp2"])
def test_fully_reshardable(layout: Any, crew: Crew, disk: Path) -> None:
    how = {"distrib_optim_sharding_type": "fully_reshardable"}
    crew(layouts.save, str(disk), layout, how)
    assert crew(layouts.load, str(disk), layout) == [((1, 5), [])] * 2
