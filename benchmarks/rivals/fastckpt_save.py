"""fastckpt itself: save under either fence.

The call fence has copied everything when save() returns; under the step fence the next step of an
optimizer waits for the copies. result() returns when the checkpoint is durable under its name.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = []
# ///

from __future__ import annotations

import importlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rivals.peer import Peer, Save, State


class Fastckpt(Peer):
    """fastckpt.save: everything is copied when the call returns."""

    name = "fastckpt"
    contract = "background engine; everything is copied when the call returns; durable at result()"
    background = True
    keeps_fence = True  # both; that of the step by torch's own hook
    modules = ("fastckpt",)
    fence = "call"

    def open(self) -> None:
        super().open()
        self.library = importlib.import_module("fastckpt")
        if not hasattr(self.library, "save"):
            raise ImportError("this fastckpt has no save()")

    def save(self, state: State, target: Path) -> Save:
        handle = self.library.save(state, target / "state.pt", fence=self.fence)
        return Save(handle.wait_staged, handle.result, lambda: asdict(handle.stats))

    def load(self, target: Path, template: State) -> Any:
        return self.library.load(target / "state.pt", map_location="cpu")


class FastckptStep(Fastckpt):
    """fastckpt.save under the step fence."""

    name = "fastckpt-step"
    contract = "background engine; copies behind, the next optimizer step waits for it"
    fence = "step"
