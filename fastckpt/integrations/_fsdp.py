"""Adds the sharded FSDP states that Accelerate saves, as torch.distributed.checkpoint directories.

Responsible for redirecting Accelerate's own save of these states, which decides their contents,
into a draft. Each rank writes its shards, and nothing is gathered.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed.checkpoint as torch_dcp

from fastckpt.directories.draft import Draft

# ---- Replacement of a framework's functions that write files, for the calls of one thread. The
# replacement ends with its block, and other threads never see it.

_lock = threading.RLock()  # two overlapping blocks would restore each other's replacement


@contextmanager
def replaced(module: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Replaces module.name for the calls of this thread while the body runs.

    The frameworks have no other hook to redirect a file.

    Args:
        module, name: the function to replace.
        by: the replacement; called with the replaced function, then the arguments of the call.
    """
    caller = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != caller:
            return original(*args, **kwargs)
        return by(original, *args, **kwargs)

    with _lock:
        original = getattr(module, name)
        setattr(module, name, call)
        try:
            yield
        finally:
            setattr(module, name, original)


SHARDED = "SHARDED_STATE_DICT"


def gathers(plugin: Any) -> str:
    """Returns why states under this Accelerate FSDP plugin cannot be saved; "" if they can."""
    kind = plugin.state_dict_type.name
    if kind == SHARDED:
        return ""
    return f"FSDP and state_dict_type {kind}, which gathers the ranks' shards: choose {SHARDED}"


@contextmanager
def sharded_states(draft: Draft) -> Iterator[None]:
    """Adds the sharded states that Accelerate saves in the body to the draft. They are added when
    the body ends, because this may wait for other ranks, which may be in a collective of
    Accelerate's during the body.
    """
    from fastckpt.integrations import dcp  # not needed by every caller

    states: list[Callable[[], None]] = []

    def save(by_itself: Any, state_dict: Any, **given: Any) -> Any:
        path = getattr(given.get("storage_writer"), "path", os.curdir)
        name = os.path.relpath(path, draft.directory)
        if name.startswith(os.pardir):
            return by_itself(state_dict, **given)
        planner = given.get("planner")
        states.append(partial(dcp.add_to, draft, name, state_dict, planner))
        return None

    with replaced(torch_dcp, "save", save):
        yield
    for add in states:
        add()
