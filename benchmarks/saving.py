"""The workloads that time whole saves and loads: stall, drain, load and small.

It owns the round-robin over peers and the order of the clocks. Every turn of a peer is a process of
its own. It must not know how a peer works or how results are shown.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ceiling import Fio, memory_copies
from rivals.peer import Peer
from rivals.process import in_process, in_process_of, reason_of
from state import State, blank_like, differences, erase, gpt_state, nbytes_of, small_state, touch
from storage import drop_page_cache, fsync_path, fsync_tree, remove, size_of

Row = dict[str, Any]
Progress = Callable[[str], None]
# The third save of a process is the first whose times those after it repeat.
WARM_UPS = 2
CLOCKS = {
    "returned": "returned_s",
    "staged": "stall_s",
    "durable": "durable_s",
    "cold load": "load_s",
}


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
    if peer.loads_only:
        target.mkdir()
        peer.save(state, target).wait_durable()
        row: Row = {"peer": peer.name}
    else:
        row = timed_save(peer, state, target)
    if template is not None:
        row.update(timed_load(peer, state, target, template))
    remove(target)
    return row


def one_turn(peer: Peer, nbytes: int, directory: Path, loading: bool) -> Row:
    """Make a state, and save (and load) it in this process as often as it takes to time it once.

    The first saves and loads of a process allocate what later ones reuse; the row has them apart.
    """
    state = gpt_state(nbytes)
    template = (blank_like(state) if peer.fills_template else {}) if loading else None
    with peer.opened():
        rows = [
            save_and_load(peer, state, directory / "save", template) for _ in range(WARM_UPS + 1)
        ]
    clocks = [{key: row[key] for key in CLOCKS.values() if key in row} for row in rows[:-1]]
    return {**rows[-1], "warm_ups": clocks}


def attempted(peer: str, progress: Progress, measure: Callable[[], Row]) -> Row:
    """Measure; a failure becomes a row that says so instead of the end of the run."""
    try:
        return measure()
    except Exception as error:  # whatever a peer raises is its result
        text = reason_of(error)
        progress(f"{peer} FAILED: {text}")
        return {"peer": peer, "error": text}


def describe(row: Row) -> str:
    """Return one measurement in one line."""
    if "error" in row:
        return f"{row['peer']}: failed"
    told = [f"{word} {row[key]:.3f} s" for word, key in CLOCKS.items() if key in row]
    return f"{row['peer']}: {', '.join(told)}"


def run_saves(
    peers: list[Peer],
    nbytes: int,
    directory: Path,
    rounds: int,
    loading: bool,
    fio: Fio | None,
    progress: Progress,
) -> Row:
    """Time every peer's save (and cold load) once a round, fio and plain copies in every round."""
    rows: list[Row] = []
    limits: list[Row] = []
    for number in range(rounds):
        limit: Row = {"round": number, **in_process(Path(sys.executable), memory_copies, nbytes)}
        if fio is not None:
            limit.update(fio.measure(reading=loading))
        limits.append(limit)
        for peer in rotated(peers, number):
            turn = partial(in_process_of, peer, one_turn, nbytes, directory, loading)
            row = {"round": number, **attempted(peer.name, progress, turn)}
            remove(directory / "save")  # what a peer that failed has left
            rows.append(row)
            progress(f"round {number + 1}/{rounds} {describe(row)}")
            if row.get("wrong_tensors"):
                progress(f"{peer.name} LOADED WRONG BYTES: {row['wrong_tensors'][:5]}")
    nbytes = limits[0]["copied_bytes"]
    return {"bytes": nbytes, "warm_ups": WARM_UPS, "rows": rows, "limits": limits}


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


def timed_small(peers: list[Peer], directory: Path, rounds: int) -> Row:
    """Time durable saves of 1 MB in 256 tensors, all ways interleaved in every round.

    They take milliseconds, in which disks and neighbours change: the peers share this process.
    """
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
    actions |= {peer.name: through(peer) for peer in peers}
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    with contextlib.ExitStack() as stack:
        for peer in peers:
            stack.enter_context(peer.opened())
        for action in actions.values():
            action()
        fsync_tree(folder)
        for number in range(rounds):
            for name in rotated(list(actions), number):
                started = time.perf_counter()
                actions[name]()
                seconds[name].append(time.perf_counter() - started)
    remove(folder)
    return {"bytes": nbytes_of(state), "tensors": len(state), "seconds": seconds}


def run_small(peers: list[Peer], directory: Path, rounds: int, progress: Progress) -> Row:
    """Time small durable saves by the peers that are fastckpt's, and by torch.save."""
    ours = [peer for peer in peers if peer.name.startswith("fastckpt")]
    result = in_process(Path(sys.executable), timed_small, ours, directory, rounds)
    for name, values in result["seconds"].items():
        progress(f"small {name}: median {statistics.median(values) * 1e3:.2f} ms")
    return result
