"""States that tell their step at every place, so that a mix of two steps is seen."""

from __future__ import annotations

from typing import Any

import torch

LARGE = 9 << 18  # elements of float32: two parts
SMALL = 1000


def state_of(step: int, elements: int = SMALL) -> dict[str, Any]:
    weights = torch.arange(step, step + elements, dtype=torch.float32)
    return {"weights": weights, "odd": torch.full((7,), step), "step": step}


def blank(elements: int = SMALL) -> dict[str, Any]:
    return {"weights": torch.zeros(elements), "odd": torch.zeros(7, dtype=torch.int64), "step": -1}


def step_of(state: dict[str, Any]) -> int:
    """The step of a state, all of which is of it."""
    step: int = state["step"]
    whole = state_of(step, len(state["weights"]))
    assert torch.equal(state["weights"], whole["weights"]), f"weights are not of step {step}"
    assert torch.equal(state["odd"], whole["odd"]), f"the rest is not of step {step}"
    return step
