"""The workloads that say what a process is left with: crc, memory and saves200.

Memory and leaks are measured in a fresh process each, so that no peer inherits another's. It must
not know how results are shown.
"""

from __future__ import annotations

import importlib
import os
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rivals.fastckpt_save import Fastckpt
from rivals.peer import Peer
from rivals.process import in_process_of
from saving import attempted
from state import gpt_state, nbytes_of
from storage import remove

Row = dict[str, Any]
Progress = Callable[[str], None]
SHM = "/dev/shm"
WARM_UP_SAVES = 10
SAVES = 200
SAVES_STATE_BYTES = 64 << 20
CRC_SIZES = {"256 KiB": 256 << 10, "64 MiB": 64 << 20}
CRC_SLICE_S = 0.1


def status_bytes(field: str) -> int:
    """Return one size field of this process's /proc status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def growth_of_one_save(peer: Peer, nbytes: int, directory: Path) -> Row:
    """Save once in this process; returns how far its peak resident set rose above the state."""
    peer.load_modules()  # before the state: they are not what the save needs
    state = gpt_state(nbytes)
    target = Path(tempfile.mkdtemp(dir=directory))
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    with peer.opened():
        save = peer.save(state, target)
        save.wait_staged()
        save.wait_durable()
        peak = status_bytes("VmHWM")
    remove(target)
    return {"state_bytes": nbytes_of(state), "before_bytes": before, "growth_bytes": peak - before}


def run_memory(peers: list[Peer], nbytes: int, directory: Path, progress: Progress) -> Row:
    """Measure the peak memory of one save by each peer, and by fastckpt with a quarter arena."""
    cases = {peer.name: peer for peer in peers}
    if Fastckpt.name in cases:
        cases[f"{Fastckpt.name}, staging_bytes = 1/4"] = Fastckpt(nbytes // 4)
    rows = []
    for label, peer in cases.items():
        staging_bytes = peer.staging_bytes if isinstance(peer, Fastckpt) else None
        fresh = partial(in_process_of, peer, growth_of_one_save, nbytes, directory)
        row = {**attempted(label, progress, fresh), "peer": label, "staging_bytes": staging_bytes}
        rows.append(row)
        if "error" in row:
            continue
        if isinstance(peer, Fastckpt):
            arena = staging_bytes or row["state_bytes"]
            row["bar_bytes"] = arena + 200_000_000
            row["within_bar"] = row["growth_bytes"] <= row["bar_bytes"]
        progress(f"memory {label}: peak grew by {row['growth_bytes'] / 1e6:.0f} MB")
    return {"bytes": nbytes, "rows": rows}


def process_holdings() -> dict[str, int]:
    """Count what this process and its shared memory hold."""
    filesystem = os.statvfs(SHM)
    return {
        "rss_bytes": status_bytes("VmRSS"),
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shm_bytes": (filesystem.f_blocks - filesystem.f_bfree) * filesystem.f_frsize,
        "shm_files": len(os.listdir(SHM)),
    }


def holdings_over_saves(peer: Peer, directory: Path) -> Row:
    """Save many times in this process; returns what it held after ten saves and after them all."""
    state = gpt_state(SAVES_STATE_BYTES)
    folder = Path(tempfile.mkdtemp(dir=directory))
    seconds = []
    before: dict[str, int] = {}
    with peer.opened():
        for number in range(WARM_UP_SAVES + SAVES):
            if number == WARM_UP_SAVES:
                before = process_holdings()
            target = folder / str(number)
            target.mkdir()
            started = time.perf_counter()
            save = peer.save(state, target)
            save.wait_staged()
            save.wait_durable()
            seconds.append(time.perf_counter() - started)
            shutil.rmtree(target)
        after = process_holdings()
    remove(folder)
    median = statistics.median(seconds[WARM_UP_SAVES:])
    return {"before": before, "after": after, "median_s": median, "state_bytes": nbytes_of(state)}


def run_saves200(peers: list[Peer], directory: Path, progress: Progress) -> Row:
    """Look for what 200 saves leave behind: memory, descriptors, threads, shared memory."""
    rows = []
    for peer in peers:
        fresh = partial(in_process_of, peer, holdings_over_saves, directory)
        row = {**attempted(peer.name, progress, fresh), "peer": peer.name}
        rows.append(row)
        if "error" in row:
            continue
        grown = {key: row["after"][key] - row["before"][key] for key in row["after"]}
        progress(f"saves200 {peer.name}: {grown}, median {row['median_s'] * 1e3:.1f} ms a save")
    return {"saves": SAVES, "rows": rows}


def speed(function: Callable[[Any], object], buffer: memoryview) -> float:
    """Return bytes a second of one call after another for a slice of time."""
    calls, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < CRC_SLICE_S:
        function(buffer)
        calls += 1
    return calls * len(buffer) / elapsed


def run_crc(rounds: int, progress: Progress) -> Row:
    """Measure the CRC-32 kernels of one core beside zlib's, all interleaved in every round."""
    kernels: dict[str, Callable[[Any], int]] = {"zlib": zlib.crc32}
    missing = None
    try:
        engine = importlib.import_module("fastckpt._engine")
    except ImportError as error:
        missing = f"fastckpt: {error}"
    else:
        if hasattr(engine, "crc32"):
            kernels["fastckpt crc32"] = engine.crc32
        named = getattr(engine, "crc32_kernels", dict)()
        kernels |= {f"fastckpt {name}": kernel for name, kernel in named.items()}
    data = torch.randint(0, 256, (max(CRC_SIZES.values()),), dtype=torch.uint8).numpy().data
    seen: dict[str, dict[str, list[float]]] = {}
    for label, size in CRC_SIZES.items():
        buffer = memoryview(data)[:size]
        seen[label] = {name: [] for name in kernels}
        for name, kernel in kernels.items():
            if kernel(buffer) != zlib.crc32(buffer):
                raise RuntimeError(f"{name} disagrees with zlib")
        for _ in range(rounds):
            for name, kernel in kernels.items():
                seen[label][name].append(speed(kernel, buffer))
        for name, speeds in seen[label].items():
            progress(f"crc {name}, {label}: {statistics.median(speeds) / 1e9:.2f} GB/s")
    return {"bytes_per_s": seen, "missing": missing}
