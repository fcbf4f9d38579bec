"""Names of step directories and their files in a root, and names of roots in a local tier."""

from __future__ import annotations

import hashlib
import os
import re

STEP_MAX = 10**15
PINNED = "pinned"  # a file in a step's directory: it is not to be removed
# Files in a step's directory on a node: the root has had it, or need not have it; and: every rank's
# neighbours have its files.
DRAINED, REPLICATED = "drained", "replicated"
# The file in a root which says that a step was deleted, by its nonce: nodes do not bring it back.
DELETED = "deleted-"
SPARES = ".spares"  # the directory in a tier in memory of files whose pages are used again
NAME = re.compile(r"step-(\d{8,15})(?:-([0-9a-f]{1,32}))?\Z", re.ASCII)
ATTEMPT_BYTES = 6  # of the random number, in hexadecimal digits, that a name may end with
# The files that a save puts into a step's directory: a removal takes no others out of it.
OURS = re.compile(
    r"\.?(rank-\d{5,}(-[\w.-]+)?\.(json|safetensors(\.(zst|planes))?)|objects\.pt|manifest\.json)"
    r"(\..+\.tmp)?|"
    r"drained|replicated|pinned",
    re.ASCII,
)


def step_name(step: int, attempt: str = "") -> str:
    """Returns the name of a step's directory.

    Args:
        attempt: the attempt's unique random number in hexadecimal digits; "" for the plain name.

    Raises:
        ValueError: step is below 0, or not below STEP_MAX.
    """
    if not 0 <= step < STEP_MAX:
        raise ValueError(f"step is {step}, must be at least 0 and below {STEP_MAX}")
    return f"step-{step:08d}" + (f"-{attempt}" if attempt else "")


def is_unique(name: str) -> bool:
    """Returns whether a name, which must match NAME, belongs to only one attempt for ever."""
    return len(name.split("-")) > 2


def step_of(name: str) -> int:
    """Returns the number of the step in the name of a directory, which must match NAME."""
    return int(name.split("-")[1])


def tier_name(root: str) -> str:
    """Returns the name of the directory of a root's steps in a local tier. Since several roots may
    share a tier, the name has a digest of the root's real path.
    """
    root = re.sub(r"^(/[a-z0-9]+:[0-9a-f]*)-\d+/", r"\1/", root)  # of a URL: other keys (urls.py)
    known_as = hashlib.sha256(os.fsencode(root)).hexdigest()[:12]
    return f"{os.path.basename(root) or 'root'}-{known_as}"
