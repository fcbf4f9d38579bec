"""The measurements of saves and loads of a state on a GPU, without training beside them.

One function each: what is run, in which order, how often, and the lines made of it. It must not
know how a peer works or what becomes of the lines.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_device import Cuda
from gpu_setting import Here, Measured, load_to_host
from harness import (
    Line,
    Row,
    at_least,
    at_most,
    holds,
    median_of,
    middle,
    number,
    progress,
    table,
    told,
)
from report import failures, measured, paired
from rivals.peer import Peer
from safetensors.torch import load_file, save_file
from saving import attempted, timed_save
from storage import fsync_tree, remove

import fastckpt
from fastckpt.cli.bench.benchmark import rotated
from fastckpt.cli.bench.saves import byte_view, differing, flat_tensors, nbytes_of
from fastckpt.engine.gds import BLOCKS
from fastckpt.plan.image import BLOCK_BYTES

MIB = 1 << 20
RING_BYTES = 1 << 30
RING_ALIGNMENT = 512
BUSY_S = 0.2
RETURN_BAR_MS = 20
MEMORY_BAR_MIB = 64
FENCES = ("call", "step")


class PlainCopies:
    """The bytes of a state through page-locked memory, by as many plain copies as it has tensors.

    That memory is smaller than the state and used again from its beginning, as the order of copies
    allows: how much of it there is does not change how fast they are.
    """

    def __init__(self, device: Cuda, state: Any) -> None:
        self.device = device
        views = [byte_view(tensor) for tensor in flat_tensors(state).values()]
        there = [view for view in views if view.device == device.device and len(view)]
        self.nbytes = sum(len(view) for view in there)
        self.ring = device.pinned(min(RING_BYTES, self.nbytes))
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        at = 0
        for view in there:
            for piece in view.split(len(self.ring)):
                if at + len(piece) > len(self.ring):
                    at = 0
                self.pairs.append((self.ring[at : at + len(piece)], piece))
                at = -(-(at + len(piece)) // RING_ALIGNMENT) * RING_ALIGNMENT

    def to_host_bps(self) -> float:
        """Return bytes a second from the device."""
        begin = self.device.mark()
        for host, there in self.pairs:
            host.copy_(there, non_blocking=True)
        return self.nbytes / self.device.seconds(begin, self.device.mark())

    def to_device_bps(self) -> float:
        """Return bytes a second to the device; the state stays as it is."""
        scratch = torch.empty_like(self.ring, device=self.device.device, pin_memory=False)
        begin = self.device.mark()
        for host, _there in self.pairs:
            scratch[: len(host)].copy_(host, non_blocking=True)
        return self.nbytes / self.device.seconds(begin, self.device.mark())


# Where cuFile refuses, this takes the way of the other; a warning says so.
BY_GDS = "fastckpt.load, gds"


def fastckpt_saved(here: Here, **how: Any) -> fastckpt.SaveStats:
    """Save the state once and remove what was written."""
    path = here.directory / "state.pt"
    stats = fastckpt.save(here.state, path, options=fastckpt.SaveOptions(**how)).result()
    remove(path)
    return stats


def run_memory(here: Here) -> Measured:
    """GPU memory that saves add: the first of the process, and later ones."""
    _ = here.state  # before anything is counted
    rows, lines = [], []
    for fence in FENCES:
        for count in range(2):
            row = here.device.memory_added(partial(fastckpt_saved, here, fence=fence))
            rows.append({"fence": fence, "save": count, **row})
            progress(f"memory, fence {fence}: {row}")
        mine = [row for row in rows if row["fence"] == fence]
        peak = max(max(row["allocated_bytes"], row["device_bytes"]) for row in mine)
        what = f"GPU memory added at most, host path, fence {fence}"
        lines.append(at_most(what, peak / MIB, MEMORY_BAR_MIB, unit=" MiB"))
    return Measured(rows, lines + gds_memory(here, rows))


def gds_memory(here: Here, rows: list[Row]) -> list[Line]:
    """The same for blocks that pass the host by, where cuFile works."""
    found: list[fastckpt.SaveStats] = []
    try:
        row = here.device.memory_added(
            lambda: found.append(fastckpt_saved(here, staging="gds"))  # the same disk and state
        )
    except Exception as error:  # whatever it says, GDS does not work here
        here.missing["GDS"] = f"{type(error).__name__}: {error}".splitlines()[0]
        return []
    stats = found[0]
    if stats.staging != "gds":
        here.missing["GDS"] = f"staged as {stats.staging!r}: {stats.staging_why}"
        return []
    rows.append({"staging": "gds", "why": stats.staging_why, **row})
    peak = max(row["allocated_bytes"], row["device_bytes"]) / MIB
    what = "GPU memory added at most, GDS (bar: its blocks)"
    return [at_most(what, peak, BLOCKS * BLOCK_BYTES / MIB, unit=" MiB")]


def run_copy(here: Here) -> Measured:
    """Copies into the arena beside plain pinned copies of the same bytes."""
    plain = PlainCopies(here.device, here.state)
    plain.to_host_bps()
    for _ in range(2):  # the arena's pages are taken and pinned
        fastckpt_saved(here)
    rows: list[Row] = []
    for count in range(here.rounds):
        before = plain.to_host_bps()
        stats = fastckpt_saved(here)
        # On both sides of the save, so that a drift of the machine favours neither.
        speed = (before + plain.to_host_bps()) / 2e9
        seconds, gbps = here.device.copied(stats)
        row = {"round": count, "d2h_s": seconds, "d2h_gbps": gbps, "plain_gbps": speed}
        rows.append({**row, "ratio": gbps / speed, "staging": stats.staging})
        progress(f"copy {count + 1}/{here.rounds}: {gbps:.2f} GB/s, plain {speed:.2f}")
    last = rows[-1]
    what = "D2H into the arena, of a plain pinned copy"
    lines = [
        at_least(what, middle(rows, "ratio"), 0.95, unit=" x"),
        told("D2H into the arena", f"{middle(rows, 'd2h_gbps'):.1f} GB/s, {last['staging']}"),
        told("plain pinned copies", f"{middle(rows, 'plain_gbps'):.1f} GB/s"),
    ]
    return Measured(rows, lines)


def one_call(here: Here, fence: str, busy: bool) -> Row:
    """Save once, with kernels queued before it or none; returns its clocks."""
    device, path = here.device, here.directory / "state.pt"
    gc.collect()
    device.synchronize()
    if busy:
        device.occupy(BUSY_S)
    begin = device.mark()
    started = time.perf_counter()
    handle = fastckpt.save(here.state, path, options=fastckpt.SaveOptions(fence=fence))
    returned = time.perf_counter()
    end = device.mark()
    was_idle = device.is_idle()
    device.wait_for_stream()
    let_on = time.perf_counter()
    stats = handle.result()
    remove(path)
    return {
        "fence": fence,
        "busy": busy,
        "returned_ms": (returned - started) * 1e3,
        "event_s": device.seconds(begin, end),
        "wall_s": let_on - started,
        "d2h_s": device.copied(stats)[0],
        "gpu_stall_s": stats.gpu_stall_s,
        "idle_at_return": was_idle,
    }


def run_call(here: Here) -> Measured:
    """How long save() keeps the caller, and for how long it keeps the GPU from computing."""
    cases = [(fence, busy) for fence in FENCES for busy in (False, True)]
    rows: list[Row] = []
    for count in range(-1, here.rounds):
        for fence, busy in rotated(cases, count):
            row = {"round": count, **one_call(here, fence, busy)}
            if count >= 0:
                rows.append(row)
                clocks = f"{row['returned_ms']:.1f} ms, stream {row['event_s']:.3f} s"
                progress(f"call {count + 1}/{here.rounds}, {fence}, busy {busy}: {clocks}")
    lines = []
    for fence, busy in cases:
        mine = [row for row in rows if (row["fence"], row["busy"]) == (fence, busy)]
        what = f"fence {fence}, save() returns, {'kernels queued' if busy else 'GPU idle'}"
        lines.append(at_most(what, middle(mine, "returned_ms"), RETURN_BAR_MS, unit=" ms"))
    idle = [row for row in rows if row["fence"] == "call" and not row["busy"]]
    for key, clock in (("event_s", "CUDA events"), ("wall_s", "wall time")):
        ratio = statistics.median(row[key] / row["d2h_s"] for row in idle)
        lines.append(at_most(f"fence call, stall by {clock}, of the D2H", ratio, 1.1, unit=" x"))
    return Measured(rows, lines)


def run_commit(here: Here) -> Measured:
    """Saves by all peers in turn, nothing beside them, with the disk's limit in every round."""
    rows: list[Row] = []
    disk: list[Row] = []
    target = here.directory / "save"
    for count in range(-1, here.rounds):
        if count >= 0:
            disk.append({"round": count, **here.disk(reading=False)})
        for peer in rotated(here.peers, count):
            here.device.synchronize()
            save = partial(timed_save, peer, here.state, target)
            row = {"round": count, **attempted(peer.name, save)}
            if count >= 0 and "error" not in row:
                progress(f"commit {count + 1}/{here.rounds} {peer.name}: {row['durable_s']:.3f} s")
            last = count == here.rounds - 1 and "error" not in row
            if last:
                check = partial(checked, peer, target, here.state)
                row.update(attempted(peer.name, check))
            remove(target)
            if count >= 0 or "error" in row:
                rows.append(row)
    here.failures += failures({"commit": {"rows": rows}})
    return commit_lines(here, rows, disk)


def checked(peer: Peer, target: Path, state: Any) -> Row:
    """Load what a peer saved and compare it with the state, bit by bit."""
    return {"wrong_tensors": differing(load_to_host(peer, target, state), state)}


def commit_lines(here: Here, rows: list[Row], disk: list[Row]) -> Measured:
    """Make lines and a table of what run_commit measured."""
    nbytes, limit = nbytes_of(here.state), here.ceiling.name
    limits = {row["round"]: nbytes / row["write_bps"] for row in disk if "write_bps" in row}
    lines, cells = [], []
    for peer in here.peers:
        mine = [row for row in measured(rows) if row["peer"] == peer.name]
        if not mine:
            continue
        of_limit = paired(mine, "durable_s", limits)
        ours = peer.name.startswith("fastckpt")
        if ours and of_limit is not None:
            what = f"{peer.name}: committed, of {limit}'s write"
            lines.append(at_least(what, of_limit, 0.9, unit=" x"))
        right = mine[-1].get("wrong_tensors") == []
        if ours:
            lines.append(holds(f"{peer.name}: comes back bit by bit", right))
        durable = middle(mine, "durable_s")
        clocks = [number(median_of(mine, key)) for key in ("returned_s", "stall_s", "durable_s")]
        speed = [number(nbytes / durable / 1e9, ".2f"), number(of_limit, ".2f")]
        cells.append([peer.name, *clocks, *speed, "yes" if right else "NO", peer.contract])
    if limits:
        best = nbytes / statistics.median(limits.values()) / 1e9
        lines.append(told(f"{limit}, sequential write, end fsync", f"{best:.2f} GB/s"))
    heads = ["peer", "returns s", "copied s", "durable s", "GB/s", f"of {limit}", "same bytes"]
    return Measured({"rows": rows, "disk": disk}, lines, [table([*heads, "contract"], cells)])


def run_load(here: Here) -> Measured:
    """Loads to the GPU from a cold page cache, in every round with the disk's limit and copies'."""
    device, folder = here.device, here.directory / "load"
    folder.mkdir()
    files = {name: folder / name for name in ("ours.pt", "stock.pt", "flat.safetensors")}
    ours, stock, flat = files.values()
    fastckpt.save(here.state, ours).result()
    torch.save(here.state, stock)
    save_file(flat_tensors(here.state), flat)
    fsync_tree(folder)
    where = str(device.device)
    loads: dict[str, tuple[Path, Callable[[], Any]]] = {
        "fastckpt.load": (ours, lambda: fastckpt.load(ours, map_location=where)),
        BY_GDS: (ours, lambda: fastckpt.load(ours, map_location=where, staging="gds")),
        "torch.load": (stock, lambda: torch.load(stock, map_location=where, weights_only=True)),
        "safetensors": (flat, lambda: load_file(flat, device=where)),
    }
    plain = PlainCopies(device, here.state)
    rows: list[Row] = []
    limits: list[Row] = []
    for count in range(here.rounds):
        limits.append({"round": count, **here.disk(reading=True), "h2d_bps": plain.to_device_bps()})
        for name in rotated(list(loads), count):
            load = partial(one_load, here, *loads[name])
            row = {"round": count, "peer": name, **attempted(name, load)}
            rows.append(row)
            progress(f"load {count + 1}/{here.rounds} {name}: {row.get('load_s', 'failed')}")
    remove(folder)
    here.failures += failures({"load": {"rows": rows}})
    return load_lines(here, rows, limits, list(loads))


def one_load(here: Here, file: Path, load: Callable[[], Any]) -> Row:
    """Load once from a cold page cache, and compare."""
    cold = here.cool(file)
    gc.collect()
    here.device.synchronize()
    started = time.perf_counter()
    loaded = load()
    here.device.synchronize()
    seconds = time.perf_counter() - started
    wrong = differing(loaded, here.state)
    return {"load_s": seconds, "cold_by": cold, "wrong_tensors": wrong}


def load_lines(here: Here, rows: list[Row], limits: list[Row], names: list[str]) -> Measured:
    """Make lines and a table of what run_load measured."""
    nbytes, limit = nbytes_of(here.state), here.ceiling.name
    bounds = {
        row["round"]: nbytes / min(row["read_bps"], row["h2d_bps"])
        for row in limits
        if "read_bps" in row
    }
    of = {name: [row for row in measured(rows) if row["peer"] == name] for name in names}
    mine, lines, cells = of[names[0]], [], []
    if mine and bounds:
        what = f"load to the GPU, cold, of min({limit} read, pinned H2D)"
        lines.append(at_least(what, paired(mine, "load_s", bounds) or 0.0, 0.9, unit=" x"))
    for other in (name for name in names[1:] if name != BY_GDS):
        theirs = {row["round"]: row["load_s"] for row in of[other]}
        speedup = paired(mine, "load_s", theirs)
        if speedup is not None:
            lines.append(at_most(f"load to the GPU, cold, of {other}", 1 / speedup, 1, unit=" x"))
    if mine:
        right = not any(row["wrong_tensors"] for row in mine)
        lines.append(holds("fastckpt.load: comes back bit by bit", right))
    shown = {"read_bps": f"{limit}, sequential read", "h2d_bps": "plain pinned H2D copies"}
    for key, what in shown.items():
        if (best := median_of(limits, key)) is not None:
            lines.append(told(what, f"{best / 1e9:.2f} GB/s"))
    for name, found in of.items():
        if found:
            seconds = middle(found, "load_s")
            wrong = any(row["wrong_tensors"] for row in found)
            speed = [number(seconds), number(nbytes / seconds / 1e9, ".2f")]
            cells.append([name, *speed, "NO" if wrong else "yes", found[0]["cold_by"]])
    heads = ["load", "s", "GB/s", "same bytes", "page cache emptied by"]
    return Measured({"rows": rows, "limits": limits}, lines, [table(heads, cells)])
