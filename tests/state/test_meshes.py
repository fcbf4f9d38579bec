"""States on meshes of two dimensions, as fully_shard() and parallelize_module() of real ranks make
them. Responsible for what comes back being what DTensor itself puts together. Which part of a
tensor a rank holds is test_placements.py's business.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastckpt
from tests.kit.jobs import Job
from tests.kit.torches import needs_fsdp2


@pytest.mark.slow
@pytest.mark.multiprocess
@needs_fsdp2
def test_fsdp_over_tp_is_restored_as_dtensor_puts_it_together(tmp_path: Path) -> None:
    """By fully_shard() and parallelize_module() of sizes that the mesh does not divide evenly."""
    imports = "tests.crews.training_imports"
    job = Job("tests/crews/mesh_life.py", tmp_path, tmp_path, ranks=4, imports=imports)
    assert "28 tensors on 2 meshes" in job.finish()
    expected = torch.load(tmp_path / "whole.pt")
    with fastckpt.Checkpointer(tmp_path / "run") as checkpointer:  # a job of one rank
        state = checkpointer.load()
    found = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for parameter, moments in state["optimizer"]["state"].items():
        found |= {f"optimizer.{parameter}.{name}": tensor for name, tensor in moments.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
