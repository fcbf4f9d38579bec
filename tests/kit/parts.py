"""Steps with files for parts of their state, and what is left of them when they are thinned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from os import PathLike
from typing import Any

import torch

from fastckpt import Checkpointer, PerRank

KEEP = {"model": 3, "ema": 1}  # keep_parts of the tests
BOTH, WHOLE = "ema model", "whole"  # what is left of a step, beside "model"


def state(step: int) -> dict[str, Any]:
    """A state whose every value tells its step."""
    moments = torch.arange(3000.0) + step
    return {
        "model": {"w": torch.arange(5000.0) + step, "b": torch.full((3,), step), "n": step},
        "ema": {"w": torch.arange(4000.0) - step, "rng": PerRank(torch.tensor([step, 2]))},
        "optimizer": {"m": moments, "same": [moments], "count": step},
        "rng": PerRank(torch.tensor([step, 1])),
        "step": step,
    }


def flat(nest: Any, name: str = "") -> dict[str, Any]:
    """The values of a nest by their names, as what can be compared bit by bit."""
    if isinstance(nest, dict | list):
        items = nest.items() if isinstance(nest, dict) else enumerate(nest)
        return {k: v for key, its in items for k, v in flat(its, f"{name}/{key}").items()}
    if isinstance(nest, PerRank):
        return flat(nest.value, f"{name}*")
    return {name: (nest.dtype, nest.tolist()) if isinstance(nest, torch.Tensor) else nest}


def of(step: int, keys: str) -> dict[str, Any]:
    """What a step that was thinned to these keys still has."""
    whole = state(step)
    return flat({key: whole[key] for key in whole if keys == WHOLE or key in keys.split()})


def found(
    root: str | PathLike[str], content: Callable[[int], int] = int, **options: Any
) -> dict[int, str]:
    """Each committed step, and what of it is there: the keys of its parts, or WHOLE; having
    compared every value, and looked for every file.

    Args:
        content: of which step a step's values are.
        options: of the Checkpointer that looks.
    """
    there = dict[int, str]()
    with closing(Checkpointer(root, **options)) as checkpointer:
        steps = checkpointer._steps
        for name, manifest in steps.committed()[0]:
            if manifest.step not in there:
                kept = manifest.kept
                there[manifest.step] = WHOLE if kept is None else " ".join(kept)
                values = flat(checkpointer.load(manifest.step))
                assert values == of(content(manifest.step), there[manifest.step]), (name, kept)
            assert {*manifest.sizes, "manifest.json"} <= {*steps.storage.names(steps.path(name))}
    return there


def left_over(root: str | PathLike[str], **options: Any) -> list[str]:
    """Files in committed steps that their manifests do not name."""
    files = list[str]()
    with closing(Checkpointer(root, **options)) as checkpointer:
        steps = checkpointer._steps
        for name, manifest in steps.committed()[0]:
            named = {*manifest.sizes, "manifest.json", "pinned"}
            files += [
                f"{name}/{each}"
                for each in steps.storage.names(steps.path(name))
                if each not in named
            ]
    return files
