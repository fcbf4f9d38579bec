"""Promise: what keep_parts keeps of a step is kept of every rank's part of it, and of every rank's
own values; over the root, over node-local tiers and in the nodes' memory. What one process does is
test_thinned.py's business.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastckpt import Checkpointer, Memory
from fastckpt.cli import main
from fastckpt.errors import IncompatibleCheckpoint
from tests.crews import parts_bodies as bodies
from tests.crews.group_crew import Crew
from tests.kit.forgeries import small_shards
from tests.kit.parts import BOTH, KEEP, WHOLE, found, left_over, state
from tests.kit.tiers import local, local_steps

__all__ = ["local"]
RANKS_IMPORT = "tests.crews.steps_imports"
WAIT_S = 60.0


@pytest.mark.multiprocess
@pytest.mark.parametrize("codec", [None, "planes"])
def test_every_rank_keeps_its_part(
    codec: str | None, crew: Callable[[int], Crew], disk: Path
) -> None:
    """Also another number of ranks finds it, and own values for the ranks that there were."""
    root = disk / "run"
    options = {"keep_last": 1, "keep_parts": {"model": 3, "own": 1}, "codec": codec}
    crew(2)(bodies.save_parts, str(root), [1, 2, 3, 4, 5], options)
    assert main(["verify", str(root)]) == 0
    names = {path.name for path in root.glob("step-00000003/rank-*.safetensors*")}
    end = ".safetensors" + (f".{codec}" if codec else "")
    assert names == {f"rank-0000{rank}-model{end}" for rank in (0, 1)}
    assert not left_over(root) and not [*root.glob("step-00000001*")]
    for ranks in (2, 1, 3):
        for step, kept in ((5, None), (4, ["model", "own"]), (3, ["model"]), (2, ["model"])):
            for outcome in crew(ranks)(bodies.restore_parts, str(root), step, kept, 2):
                if outcome.error is not None:
                    raise outcome.error
        for outcome in crew(ranks)(bodies.restore_parts, str(root), 3, None, 2):
            assert type(outcome.error) is IncompatibleCheckpoint, outcome
            assert "the newest whole step is step 5" in str(outcome.error)


@pytest.mark.multiprocess
def test_ranks_without_the_key_are_told(crew: Callable[[int], Crew], disk: Path) -> None:
    own, other = crew(2)(bodies.save_without_a_key, str(disk / "run"))
    assert type(own.error) is ValueError and "keep_parts names 'model'" in str(own.error)
    assert type(other.error).__name__ == "PeerFailed" and "names 'model'" in str(other.error)
    assert not [*disk.rglob("manifest.json")]


@pytest.mark.multiprocess
def test_ranks_hear_of_wrong_metadata(crew: Callable[[int], Crew], disk: Path) -> None:
    own, other = crew(2)(bodies.save_other_metadata, str(disk / "run"))
    assert type(own.error) is ValueError and "the metadata is not a JSON" in str(own.error)
    assert type(other.error).__name__ == "PeerFailed" and "metadata" in str(other.error)


@pytest.mark.multiprocess
def test_neighbours_have_every_part(crew: Callable[[int], Crew], disk: Path, local: Path) -> None:
    """The memory of one node is lost."""
    root, locals_ = disk / "run", [str(local / name) for name in "ab"]
    for path in locals_:
        os.mkdir(path)
    assert crew(2)(bodies.save_in_memory, str(root), locals_, [1, 2]) == [[True, True]] * 2
    assert not [*root.glob("step-*")]
    shutil.rmtree(locals_[0])
    os.mkdir(locals_[0])
    for outcome in crew(2)(bodies.restore_parts, str(root), 2, None, 2, locals_):
        if outcome.error is not None:
            raise outcome.error


@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_steps_of_a_tier_are_thinned_in_the_root(kind: str, disk: Path, local: Path) -> None:
    """The tier has whole steps alone."""
    root, tier = disk / "run", Memory(directory=local) if kind == "memory" else local
    options: dict[str, Any] = {"keep_last": 1, "keep_parts": KEEP, "local": tier}
    with small_shards():
        with Checkpointer(root, **options) as checkpointer:
            for step in range(1, 7):
                checkpointer.save(step, state(step)).result(WAIT_S)
        expected = {6: WHOLE, 5: BOTH, 4: "model", 3: "model"}
        assert found(root) == expected and not left_over(root)
        assert local_steps(local) == ["step-00000005", "step-00000006"]
        assert found(root, local=tier) == expected, (
            "of a step that was thinned, the tier is no copy"
        )
        assert main(["verify", str(root), "--local", str(local)]) == 0
        with Checkpointer(root, **options) as checkpointer:
            into = state(0)
            assert checkpointer.restore(into) == 6 and into["step"] == 6
            with pytest.raises(IncompatibleCheckpoint, match="newest whole step is step 6"):
                checkpointer.restore(into, 5)
            assert checkpointer.restore(into, 5, only="model/*") == 5
            assert into["model"]["n"] == 5
            checkpointer.save(7, state(7)).result(WAIT_S)
        assert found(root) == {7: WHOLE, 6: BOTH, 5: "model", 4: "model"}


def test_steps_that_are_drained_late_are_thinned(disk: Path, local: Path) -> None:
    """By the next job, which finds them in the tier alone."""
    root = disk / "run"
    options: dict[str, Any] = {"keep_last": 1, "keep_parts": KEEP}
    memory = Memory(directory=local, root_every=1000)
    with small_shards():
        with Checkpointer(root, local=memory, **options) as checkpointer:
            for step in range(1, 4):
                checkpointer.save(step, state(step)).result(WAIT_S)
        assert local_steps(local) == ["step-00000002", "step-00000003"]
        with Checkpointer(root, local=memory, **options) as checkpointer:
            assert checkpointer.restore(state(0)) == 3
        assert found(root)[3] == WHOLE
        with Checkpointer(root, **options) as checkpointer:
            checkpointer.save(4, state(4)).result(WAIT_S)
        assert found(root) == {4: WHOLE, 3: BOTH} and not left_over(root)
