"""Megatron-FSDP: what Megatron saves in the format fsdp_dtensor is loaded, on as many ranks or not.

Responsible for all of it coming back bit for bit, for training that goes on as it would have, and
for what is refused. What the ranks do stands in crews/megatron_fsdp.py.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fastckpt import CorruptCheckpoint, IncompatibleCheckpoint
from tests.crews import megatron_bodies as bodies
from tests.crews import megatron_fsdp as fsdp
from tests.crews.group_crew import Crew, Nursery

pytestmark = pytest.mark.multiprocess
RANKS_IMPORT = "tests.crews.megatron_imports"

FLOAT32 = {"bf16": False}


@pytest.fixture
def crews(nursery: Nursery) -> dict[Any, Crew]:
    """By ranks and tensor parallel size: DTensor keeps meshes of groups that are no more."""
    return {(n, tp): nursery.lasting_crew(n, f"tp{tp}") for n, tp in ((1, 1), (2, 1), (2, 2))}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a DCP directory, whole."""
    stored = torch_dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in stored.items()
        if isinstance(value, TensorStorageMetadata) and not key.startswith("rng_state")
    }
    torch_dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


@pytest.mark.parametrize(
    ("save", "load", "options"),
    [
        ((2, 1), (2, 1), {}),
        pytest.param((2, 1), (2, 1), FLOAT32, marks=pytest.mark.torture),
        ((2, 1), (1, 1), {}),
        ((2, 1), (2, 2), {}),
        pytest.param((2, 2), (1, 1), {}, marks=pytest.mark.torture),
    ],
    ids=["same", "float32", "2to1", "2totp2", "tp2to1"],
)
def test_all_comes_back_bit_for_bit(
    save: Any, load: Any, options: Any, crews: dict[Any, Crew], disk: Path
) -> None:
    first, again = str(disk / "first"), str(disk / "again")
    saved = crews[save](fsdp.train_and_save, first, save[1], options)
    loaded = crews[load](fsdp.load_and_save, first, again, load[1], options)
    had, has = (tensors(Path(root, "iter_0000003")) for root in (first, again))
    assert had.keys() == has.keys()
    assert sum(".exp_avg_sq" in key for key in had) > 10
    assert [key for key in had if not torch.equal(had[key], has[key])] == []
    assert [found for found, _numbers, _losses in loaded] == [(3, 77)] * load[0]
    if save == load:  # rank 0's random numbers are all that Megatron saves
        assert [losses for _numbers, losses in saved] == [losses for *_, losses in loaded]
        assert {tuple(drawn) for _, drawn, _ in loaded} == {tuple(saved[0][0])}


def test_training_that_was_killed_in_a_save_goes_on_from_the_one_before(
    crews: dict[Any, Crew], disk: Path
) -> None:
    crew = crews[2, 1]
    crew(fsdp.save_iterations, str(disk), [1, 2])
    file = max(disk.glob("iter_0000002/*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    assert [outcome.value for outcome in crew(fsdp.load_any, str(disk), {})] == [(1, 77)] * 2
    (disk / "iter_0000001" / ".metadata").write_bytes(b"no metadata")
    for outcome in crew(fsdp.load_any, str(disk), {}):
        assert isinstance(outcome.error, CorruptCheckpoint)


def test_what_does_not_fit_is_refused_by_name(crews: dict[Any, Crew], disk: Path) -> None:
    crew = crews[2, 1]
    root, dist_root = str(disk / "fsdp"), str(disk / "dist")
    crew(fsdp.save_iterations, root, [1])
    crew(bodies.save_numbered, dist_root, 1, 1, {}, {})
    for given, why in (
        ((root, {"layers": 3}), "lacks .* keys .*'model.module.decoder.layers.2"),
        ((root, {"hidden": 64}, False), "was saved as .*32"),
        ((dist_root, {}), "format torch_dist"),
    ):
        for outcome in crew(fsdp.load_any, *given):
            assert isinstance(outcome.error, IncompatibleCheckpoint)
            assert re.search(why, str(outcome.error)), outcome.error
    for outcome in crew(fsdp.load_any, root, {}, False):  # the model alone
        assert outcome.value == (1, 77)
    for outcome in crew(bodies.refuse, root, 1, 1):
        assert "into a model in Megatron-FSDP" in str(outcome.error)
