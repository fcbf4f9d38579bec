"""How much training time a save costs: the drag workload, `fastckpt bench train` with every peer.

Each turn is a process of the peer, which trains on one thread. It must not know how a peer works;
a peer's promise about mutation is honoured before every optimizer step.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Row, progress
from rivals.peer import Peer
from rivals.process import in_process_of
from saving import WARM_UPS, attempted
from storage import remove

from fastckpt.cli.bench.benchmark import before_clock, in_turn
from fastckpt.cli.bench.saves import Save, nbytes_of, nothing
from fastckpt.cli.bench.train import Training, no_save

STEPS, WARM_UP_STEPS = 10, 2  # from one save to the next


def one_turn(peer: Peer, nbytes: int, directory: Path) -> Row:
    """Train with a save and without, after saves that are not watched."""
    torch.set_num_threads(1)
    training, target = Training(nbytes, "cpu"), directory / "drag"
    stalls: list[float] = []

    def save(state: Any, path: Path) -> Save:
        path.mkdir()
        begun = time.perf_counter()
        waits = peer.save(state, path)
        if not peer.background:
            waits.wait_durable()
        stalls.append(time.perf_counter() - begun)
        return waits._replace(wait_staged=nothing) if peer.keeps_fence else waits

    with peer.opened():
        for number in range(WARM_UPS + 1):
            before_clock(nbytes)
            steps = STEPS if number == WARM_UPS else WARM_UP_STEPS
            quiet_s = training.window(1, steps, no_save, target)
            before_clock(nbytes)
            with_save_s = training.window(1, steps, save, target)
            remove(target)
    return {
        "peer": peer.name,
        "lost_s": with_save_s - quiet_s,
        "stall_s": stalls[-1],
        "quiet_step_s": quiet_s / STEPS,
        "bytes": nbytes_of(training.state()),
    }


def run_drag(peers: list[Peer], nbytes: int, directory: Path, rounds: int) -> Row:
    """Measure the training time each save costs, peers interleaved in every round."""
    rows: list[Row] = []
    for number, peer in in_turn(peers, rounds):
        turn = partial(in_process_of, peer, one_turn, nbytes, directory)
        row = {"round": number, **attempted(peer.name, turn)}
        remove(directory / "drag")  # what a peer that failed has left
        rows.append(row)
        if "error" not in row:
            clocks = f"lost {row['lost_s']:.3f} s, stall {row['stall_s']:.3f} s"
            progress(f"drag {number + 1}/{rounds} {peer.name}: {clocks}")
    return {"bytes": max((row.get("bytes", 0) for row in rows), default=nbytes), "rows": rows}
