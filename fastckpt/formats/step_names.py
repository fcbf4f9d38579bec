"""Names below the root of a Checkpointer: directories of steps, and what lies in one.

Pure: it must not touch a file system.
"""

from __future__ import annotations

import re

STEP_MAX = 10**15
NAME = re.compile(r"step-(\d{8,15})(?:-(\d{1,6}))?\Z", re.ASCII)
# What a save puts into a step's directory, and so what a removal may take out of it.
OURS = re.compile(
    r"rank-\d{5,}\.(json|safetensors(\.zst)?)|objects\.pt|\.?manifest\.json(\..+\.tmp)?|drained",
    re.ASCII,
)


def step_name(step: int, attempt: int = 0) -> str:
    """The directory of a step; of a later attempt at it, if there is one that cannot be replaced.

    Raises:
        ValueError: step is not between 0 and STEP_MAX.
    """
    if not 0 <= step < STEP_MAX:
        raise ValueError(f"step is {step}, must be at least 0 and below {STEP_MAX}")
    return f"step-{step:08d}" + (f"-{attempt}" if attempt else "")
