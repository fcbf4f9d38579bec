"""The workloads that time whole saves and loads: stall, drain, load, many, small, again, thinned.

It owns the order of the clocks. Every turn of a peer is a process of its own. It must not know how
a peer works or how results are shown.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ceiling import Ceiling, memory_copies
from harness import Row, progress
from rivals.peer import Peer
from rivals.process import in_process, in_process_of, reason_of
from storage import drop_page_cache, fsync_path, fsync_tree, remove, size_of

import fastckpt
from fastckpt.cli.bench.benchmark import before_clock, in_turn, raise_if_interrupted, rotated
from fastckpt.cli.bench.saves import State, differing, flat_tensors, gpt_state, nbytes_of, touch

# The third save of a process is the first whose times those after it repeat.
WARM_UPS = 2
SMALL_BYTES = 66 << 10
CLOCKS = {
    "returned": "returned_s",
    "staged": "stall_s",
    "durable": "durable_s",
    "cold load": "load_s",
}


def blank_like(tree: Any, device: torch.device | str | None = None) -> Any:
    """Return the same structure with every tensor replaced by zeros, already faulted in.

    They lie where the tensors do, or all on `device`.
    """
    if isinstance(tree, dict):
        return {key: blank_like(value, device) for key, value in tree.items()}
    if isinstance(tree, list):
        return [blank_like(value, device) for value in tree]
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree, device=device).fill_(0)
    return tree


def timed_save(peer: Peer, state: State, target: Path) -> Row:
    """Save once into the new directory `target`; returns seconds since the call for each clock."""
    target.mkdir()
    fsync_path(target.parent)
    before_clock(nbytes_of(state))
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
    if peer.fills_template:  # stale contents cannot pass for a load
        for tensor in flat_tensors(template).values():
            tensor.zero_()
    cold = drop_page_cache(target)
    before_clock(nbytes_of(state))
    started = time.perf_counter()
    loaded = peer.load(target, template)
    touch(loaded)
    elapsed = time.perf_counter() - started
    return {"load_s": elapsed, "cold_by": cold, "wrong_tensors": differing(loaded, state)}


def save_and_load(peer: Peer, state: State, target: Path, template: State | None) -> Row:
    """Save, and with a template load back as well; returns both timings in one row."""
    row = timed_save(peer, state, target)
    if peer.loads_only:
        row = {key: row[key] for key in ("peer", "file_bytes")}
    if template is not None:
        row.update(timed_load(peer, state, target, template))
    remove(target)
    return row


def many_state(nbytes: int) -> State:
    """Return tensors of a little more bytes than a save copies at the call, named as those of a
    transformer.
    """
    names = (f"transformer.h.{i // 12}.part.{i % 12}.weight" for i in range(nbytes // SMALL_BYTES))
    return {"model": {name: torch.randn(SMALL_BYTES // 4) for name in names}}


STATES: dict[str, Callable[[int], State]] = {"saves": gpt_state, "many": many_state}


def one_turn(peer: Peer, kind: str, nbytes: int, directory: Path, loading: bool) -> Row:
    """Make a state, and save (and load) it in this process as often as it takes to time it once.

    The first saves and loads of a process allocate what later ones reuse; the row has them apart.
    """
    state = STATES[kind](nbytes)
    template = (blank_like(state) if peer.fills_template else {}) if loading else None
    with peer.opened():
        rows = [
            # The first and the last save are loaded, too.
            save_and_load(
                peer, state, directory / "save", template if number in (0, WARM_UPS) else None
            )
            for number in range(WARM_UPS + 1)
        ]
    clocks = [{key: row[key] for key in CLOCKS.values() if key in row} for row in rows[:-1]]
    wrong = sorted({name for row in rows for name in row.get("wrong_tensors", ())})
    return {**rows[-1], "warm_ups": clocks, "wrong_tensors": wrong}


def attempted(peer: str, measure: Callable[[], Row]) -> Row:
    """Measure; a failure becomes a row that says so instead of the end of the run."""
    raise_if_interrupted()
    try:
        return measure()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a peer's result; torch's CheckpointException is no Exception
        raise_if_interrupted()
        text = reason_of(error)
        progress(f"{peer} FAILED: {text}")
        return {"peer": peer, "error": text}


def run_saves(
    kind: str,
    peers: list[Peer],
    nbytes: int,
    directory: Path,
    rounds: int,
    loading: bool,
    ceiling: Ceiling | None,
) -> Row:
    """Time every peer's save (and cold load) once a round, the limits in every round, too."""
    rows: list[Row] = []
    limits: list[Row] = []
    for number in range(rounds):
        if ceiling is not None:
            copies = in_process(Path(sys.executable), memory_copies, nbytes)
            limits.append({"round": number, **copies, **ceiling.measure(reading=loading)})
        for peer in rotated(peers, number):
            turn = partial(in_process_of, peer, one_turn, kind, nbytes, directory, loading)
            row = {"round": number, **attempted(peer.name, turn)}
            remove(directory / "save")  # what a peer that failed has left
            rows.append(row)
            told = [f"{word} {row[key]:.3f} s" for word, key in CLOCKS.items() if key in row]
            progress(f"round {number + 1}/{rounds} {peer.name}: {', '.join(told) or 'failed'}")
            if row.get("wrong_tensors"):
                progress(f"{peer.name} LOADED WRONG BYTES: {row['wrong_tensors'][:5]}")
    if limits:
        nbytes = limits[0]["copied_bytes"]
    return {"bytes": nbytes, "warm_ups": WARM_UPS, "rows": rows, "limits": limits}


def write_small(content: memoryview, path: Path) -> None:
    """The least that a durable save does: write, fsync, rename, and the directory's fsync."""
    scratch = path.with_suffix(".tmp")
    with open(scratch, "wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
    os.rename(scratch, path)
    fsync_path(path.parent)


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
    generator = torch.Generator().manual_seed(0)
    state: State = {f"w{i:03d}": torch.randn(1024, generator=generator) for i in range(256)}
    folder = directory / "small"
    folder.mkdir()
    content = memoryview(torch.cat([*state.values()]).numpy()).cast("B")
    actions: dict[str, Callable[[], object]] = {
        "torch.save+fsync+rename": lambda: torch_save_small(state, folder / "a.pt", False),
        "torch.save+fsync+rename+dir": lambda: torch_save_small(state, folder / "b.pt", True),
        "write+fsync+rename+dir": lambda: write_small(content, folder / "c"),
    }

    def through(peer: Peer) -> Callable[[], object]:
        place = folder / peer.name
        place.mkdir()
        return lambda: peer.save(state, place).wait_durable()

    # Every save after the first replaces a file, as the saves of a training run do.
    actions |= {peer.name: through(peer) for peer in peers}
    rows: list[dict[str, float]] = [{} for _ in range(rounds)]
    with contextlib.ExitStack() as stack:
        for peer in peers:
            stack.enter_context(peer.opened())
        for action in actions.values():
            action()
        fsync_tree(folder)
        for number, name in in_turn([*actions], rounds):
            started = time.perf_counter()
            actions[name]()
            rows[number][name] = time.perf_counter() - started
    remove(folder)
    seconds = {name: [row[name] for row in rows] for name in actions}
    return {"bytes": nbytes_of(state), "tensors": len(state), "seconds": seconds}


def run_small(peers: list[Peer], directory: Path, rounds: int) -> Row:
    """Time small durable saves by the peers that are fastckpt's, and by torch.save."""
    ours = [peer for peer in peers if peer.name.startswith("fastckpt")]
    return in_process(Path(sys.executable), timed_small, ours, directory, rounds)


def timed_again(nbytes: int, directory: Path, rounds: int) -> Row:
    """Time the calls of saves under the step fence whose structure was saved before."""
    thousands: State = {f"layers.{at // 10}.{at % 10}": torch.randn(256) for at in range(10_000)}
    seconds: dict[str, list[float]] = {}
    for state in (gpt_state(nbytes), thousands):
        calls = seconds[f"{len(flat_tensors(state)):,} tensors"] = []
        step_fence = fastckpt.SaveOptions(fence="step")
        root = directory / "again"
        with fastckpt.Checkpointer(root, keep_last=1, options=step_fence) as checkpointer:
            for number in range(rounds + 1):
                before_clock(nbytes_of(state) if number < WARM_UPS else 0)
                started = time.perf_counter()
                handle = checkpointer.save(number, state)
                calls.append(time.perf_counter() - started)
                handle.result()
        del calls[0]
        remove(root)
    return {"seconds": seconds}


def run_again(nbytes: int, directory: Path, rounds: int) -> Row:
    """Time the second and later saves of a training state, and of 10,000 tensors of 1 KB."""
    return in_process(Path(sys.executable), timed_again, nbytes, directory, rounds)


def run_thinned(nbytes: int, directory: Path, rounds: int) -> Row:
    """Time how long an old step takes to be thinned to its model, and another one to be removed."""
    root, rows, state = directory / "thinned", list[Row](), gpt_state(nbytes)
    options: Any = {"keep_last": 2 * rounds, "keep_parts": {"model": 1}}
    with fastckpt.Checkpointer(root, **options) as checkpointer:
        for step in range(2 * rounds):
            checkpointer.save(step, state).result()
        steps = checkpointer._steps
        olds, _faults = steps.committed()
        for number in range(rounds):
            row: Row = {"round": number}
            for act in rotated(("thinned", "removed"), number):
                name, manifest = olds.pop()
                before, started = size_of(root), time.perf_counter()
                if act == "thinned":
                    done = steps.thin(name, manifest.nonce, {"model"})
                else:
                    done = steps.remove(name, manifest.nonce)
                assert done, f"{name} was not {act}"
                row[f"{act}_s"] = time.perf_counter() - started
                row[f"{act}_bytes"] = before - size_of(root)
            rows.append(row)
    remove(root)
    return {"bytes": nbytes_of(state), "rows": rows}
