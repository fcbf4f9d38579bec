"""fastckpt itself: save under either fence.

The call fence has copied everything when save() returns; under the step fence the next step of an
optimizer waits for the copies. result() returns when the checkpoint is durable under its name.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = []
# ///

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from fastckpt.cli.bench.saves import Save, State, by_fastckpt, load_by_fastckpt
from rivals.peer import Peer


class Fastckpt(Peer):
    """fastckpt.save: everything is copied when the call returns."""

    name = "fastckpt"
    contract = "background engine; everything is copied when the call returns; durable at result()"
    background = True
    keeps_fence = True  # both; that of the step by torch's own hook
    modules = ("fastckpt",)
    fence: Literal["call", "step"] = "call"

    def save(self, state: State, target: Path) -> Save:
        return by_fastckpt(state, target / "state.pt", self.fence)

    def load(self, target: Path, template: State) -> Any:
        return load_by_fastckpt(target / "state.pt", "cpu")


class FastckptStep(Fastckpt):
    """fastckpt.save under the step fence."""

    name = "fastckpt-step"
    contract = "background engine; copies behind, the next optimizer step waits for it"
    fence = "step"
