"""A bucket as torchtitan's checkpoint folder, and as the beginning of another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is missing, which needs Python 3.11")

from tests.kit.objects.weed import Weed, environment
from tests.kit.torchtitan import Run

pytestmark = pytest.mark.usefixtures("drained")


def test_a_run_goes_on_from_a_bucket_and_another_one_begins_there(
    weed: Weed,
    root: str,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    assert_same: Callable[[Any, Any], None],
) -> None:
    for name, value in environment(weed.port).items():
        monkeypatch.setenv(name, value)
    before = Run(disk, folder=root)
    before.train(2)
    expected, last = before.state(), before.checkpointer.save_future
    assert last is not None
    assert before.steps() == [1, 2]
    before.checkpointer.close()
    for settings in (
        {"folder": root},
        {"initial_load_path": root, "initial_load_model_only": False},
        {"initial_load_path": last.path, "initial_load_model_only": False},
    ):
        after = Run(disk, **settings)
        assert after.checkpointer.load()
        assert_same(after.state(), expected)
        after.checkpointer.close()
    (anew := Run(disk, folder=f"{root}-empty")).checkpointer.close()
    assert not Run(disk, folder=f"{root}-empty").checkpointer.load() and anew.trainer.step == 0
