"""The workloads that time whole saves and loads: stall, drain, load and small.

It owns the round-robin over peers and the order of the clocks. It must not know how a peer works
or how results are shown.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ceiling import Fio, MemoryCopy
from peers import Peer
from state import State, blank_like, differences, erase, nbytes_of, small_state, touch
from storage import drop_page_cache, fsync_path, fsync_tree, remove, size_of

Row = dict[str, Any]
Progress = Callable[[str], None]


def rotated(items: Sequence[Any], by: int) -> list[Any]:
    """Return the items starting from another one each round, so that no place in line is fixed."""
    by %= max(len(items), 1)
    return [*items[by:], *items[:by]]


def timed_save(peer: Peer, state: State, target: Path) -> Row:
    """Save once into the new directory `target`; returns seconds since the call for each clock."""
    target.mkdir()
    fsync_path(target.parent)
    gc.collect()
    started = time.perf_counter()
    save = peer.save(state, target)
    returned = time.perf_counter()
    save.wait_staged()
    staged = time.perf_counter()
    save.wait_durable()
    durable = time.perf_counter()
    return {
        "peer": peer.name,
        "returned_s": returned - started,
        "stall_s": staged - started,
        "durable_s": durable - started,
        "file_bytes": size_of(target),
        "facts": save.facts(),
    }


def timed_load(peer: Peer, state: State, target: Path, template: State) -> Row:
    """Load cold; returns the seconds, and the names of tensors that came back different."""
    if peer.fills_template:
        erase(template)
    cold = drop_page_cache(target)
    started = time.perf_counter()
    loaded = peer.load(target, template)
    touch(loaded)
    elapsed = time.perf_counter() - started
    return {"load_s": elapsed, "cold_by": cold, "wrong_tensors": differences(loaded, state)}


def save_and_load(peer: Peer, state: State, target: Path, template: State | None) -> Row:
    """Save, and with a template load back as well; returns both timings in one row."""
    row = timed_save(peer, state, target)
    if template is not None:
        row.update(timed_load(peer, state, target, template))
    return row


def attempted(peer: str, progress: Progress, measure: Callable[[], Row]) -> Row:
    """Measure; a failure becomes a row that says so instead of the end of the run."""
    try:
        return measure()
    except Exception as error:  # whatever a peer raises is its result
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        progress(f"{peer} FAILED: {text}")
        return {"peer": peer, "error": text}


def warm_up(peers: list[Peer], state: State, directory: Path, progress: Progress) -> list[Row]:
    """Save once with each peer: first saves allocate what later ones reuse."""
    rows = []
    for peer in peers:
        target = directory / "warm"
        row = attempted(peer.name, progress, partial(timed_save, peer, state, target))
        remove(target)
        rows.append(row)
        progress(f"first save {describe(row)}")
    return rows


def describe(row: Row) -> str:
    """Return one measurement in one line."""
    if "error" in row:
        return f"{row['peer']}: failed"
    text = (
        f"{row['peer']}: returned {row['returned_s']:.3f} s, staged {row['stall_s']:.3f} s, "
        f"durable {row['durable_s']:.3f} s"
    )
    return text + (f", cold load {row['load_s']:.3f} s" if "load_s" in row else "")


def run_saves(
    peers: list[Peer],
    state: State,
    directory: Path,
    rounds: int,
    loading: bool,
    fio: Fio | None,
    progress: Progress,
) -> Row:
    """Time every peer's save (and cold load) once a round, fio and plain copies in every round."""
    template = blank_like(state) if loading else None
    copies = MemoryCopy(state)
    first = warm_up(peers, state, directory, progress)
    rows: list[Row] = []
    limits: list[Row] = []
    for number in range(rounds):
        limit: Row = {
            "round": number,
            "memmove_s": copies.memmove_s(),
            "torch_copy_s": copies.torch_copy_s(),
        }
        if fio is not None:
            limit.update(fio.measure(reading=loading))
        limits.append(limit)
        for peer in rotated(peers, number):
            target = directory / "save"
            both = partial(save_and_load, peer, state, target, template)
            row = {"round": number, **attempted(peer.name, progress, both)}
            remove(target)
            rows.append(row)
            progress(f"round {number + 1}/{rounds} {describe(row)}")
            if row.get("wrong_tensors"):
                progress(f"{peer.name} LOADED WRONG BYTES: {row['wrong_tensors'][:5]}")
    return {"bytes": nbytes_of(state), "rows": rows, "first": first, "limits": limits}


def torch_save_small(state: State, path: Path, whole: bool) -> None:
    """torch.save, fsync and rename; with `whole`, the directory's fsync as well."""
    scratch = path.with_suffix(".tmp")
    with open(scratch, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(scratch, path)
    if whole:
        fsync_path(path.parent)


def run_small(peers: list[Peer], directory: Path, rounds: int, progress: Progress) -> Row:
    """Time durable saves of 1 MB in 256 tensors, all ways interleaved in every round."""
    state = small_state()
    folder = directory / "small"
    folder.mkdir()
    actions: dict[str, Callable[[], object]] = {
        "torch.save+fsync+rename": lambda: torch_save_small(state, folder / "a.pt", False),
        "torch.save+fsync+rename+dir": lambda: torch_save_small(state, folder / "b.pt", True),
    }

    def through(peer: Peer) -> Callable[[], object]:
        place = folder / peer.name
        place.mkdir()
        return lambda: peer.save(state, place).wait_durable()

    # Every save after the first replaces a file, as the saves of a training run do.
    actions |= {peer.name: through(peer) for peer in peers if peer.name.startswith("fastckpt")}
    for action in actions.values():
        action()
    fsync_tree(folder)
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds):
        for name in rotated(list(actions), number):
            started = time.perf_counter()
            actions[name]()
            seconds[name].append(time.perf_counter() - started)
    remove(folder)
    for name, values in seconds.items():
        progress(f"small {name}: median {sorted(values)[len(values) // 2] * 1e3:.2f} ms")
    return {"bytes": nbytes_of(state), "tensors": len(state), "seconds": seconds}
