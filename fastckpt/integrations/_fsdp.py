"""Sharded states of FSDP as Accelerate saves them: directories of torch.distributed.checkpoint.

Responsible for leading Accelerate's own save of these, which decides what they hold, into a draft:
each rank writes its shards, and nothing is gathered.
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

# ---- Functions of a framework that write files, replaced for the calls of one thread. Responsible
# for a replacement that ends with a block and that other threads never see.

_lock = threading.RLock()  # two blocks that overlap would put back what the other had replaced


@contextmanager
def replaced(module: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Replaces module.name for the calls of this thread while the body runs.

    Frameworks have no other place to say who writes a file.

    Args:
        module, name: the function to replace.
        by: called with the function that it replaces, then the arguments of the call.
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
    """Returns why states under this FSDP plugin of Accelerate are not saved; "" if they are."""
    kind = plugin.state_dict_type.name
    if kind == SHARDED:
        return ""
    return (
        f"FSDP and state_dict_type {kind}, where ranks do not save their shards: choose {SHARDED}"
    )


@contextmanager
def sharded_states(draft: Draft) -> Iterator[None]:
    """Adds the sharded states to the draft that Accelerate saves in the body, after that: ranks may
    wait for each other's plans, and must not while others are in a collective of Accelerate's.
    """
    from fastckpt.integrations import dcp  # which not every caller needs

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
