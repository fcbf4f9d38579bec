"""How much a save slows the training beside it: the drag workload.

It owns a one-thread training loop and the windows it is watched in, in the process of the peer. It
must not know how a peer works; a peer's promise about mutation is honoured before every optimizer
step.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rivals.peer import Peer, Save
from rivals.process import in_process_of
from saving import WARM_UPS, attempted, rotated
from state import State, gpt_state, nbytes_of
from storage import remove

Row = dict[str, Any]
STEP_S = 0.3
QUIET_STEPS = 6
AFTER_STEPS = 2
WIDTH = 768


class Training:
    """Forward and backward of a small network, then a real optimizer step on the state's weights.

    The optimizer owns master weights that are part of the saved state: its step runs torch's
    hooks and mutates what a save may still be copying.
    """

    def __init__(self, state: State) -> None:
        self.net = torch.nn.Sequential(
            *(layer for _ in range(3) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()))
        )
        slots = list(state["optimizer"]["state"].values())
        self.weights = [slot["master"] for slot in slots if slot["master"].dim() == 2][-4:]
        for weight in self.weights:
            weight.grad = torch.full_like(weight, 1e-3)
        self.optimizer = torch.optim.SGD(self.weights, lr=1e-6)
        self.batch = torch.randn(512, WIDTH)
        self.passes = 1
        self.calibrate()

    def calibrate(self) -> None:
        """Choose how many passes make one step about STEP_S long."""
        self.step()
        one = min(self.step() for _ in range(5))
        self.passes = max(1, round(STEP_S / one))

    def step(self, before_update: Callable[[], object] | None = None) -> float:
        """Run one training step; returns its seconds."""
        started = time.perf_counter()
        for _ in range(self.passes):
            self.net.zero_grad()
            self.net(self.batch).square().mean().backward()
        if before_update is not None:
            before_update()
        self.optimizer.step()
        return time.perf_counter() - started


class Watch:
    """Waits for one save in a thread, so that the training loop only looks at a flag."""

    def __init__(self, save: Save) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, args=(save,), daemon=True)
        self.thread.start()

    def run(self, save: Save) -> None:
        try:
            save.wait_durable()
        except BaseException as error:  # carried to the training thread by finish()
            self.error = error

    def flushing(self) -> bool:
        return self.thread.is_alive()

    def finish(self) -> None:
        self.thread.join()
        if self.error is not None:
            raise self.error


def one_window(peer: Peer, state: State, training: Training, target: Path) -> Row:
    """Train quietly, save, train on until two steps after the save became durable."""
    quiet = [training.step() for _ in range(QUIET_STEPS)]
    target.mkdir()
    started = time.perf_counter()
    save = peer.save(state, target)
    if not peer.background:
        save.wait_durable()
    stall = time.perf_counter() - started
    # The step fence is torch's own hook; every other promise is kept by hand.
    guard = None if peer.name == "fastckpt-step" else save.wait_staged
    flushing: list[float] = []
    if peer.background:
        watch = Watch(save)
        while watch.flushing():
            flushing.append(training.step(guard))
        watch.finish()
    after = [training.step(guard) for _ in range(AFTER_STEPS)]
    elapsed = time.perf_counter() - started
    normal = statistics.median(quiet)
    return {
        "peer": peer.name,
        "lost_s": elapsed - (len(flushing) + len(after)) * normal,
        "stall_s": stall,
        "quiet_step_s": normal,
        "flushing_step_s": statistics.mean(flushing) if flushing else None,
        "steps_flushing": len(flushing),
    }


def describe(row: Row) -> str:
    """Return one window in one line."""
    if "error" in row:
        return f"{row['peer']}: failed"
    return (
        f"{row['peer']}: lost {row['lost_s']:.3f} s, stall {row['stall_s']:.3f} s, "
        f"{row['steps_flushing']} steps while flushing"
    )


def one_turn(peer: Peer, nbytes: int, directory: Path) -> Row:
    """Train on one thread of this process, and watch a save after saves that are not watched."""
    torch.set_num_threads(1)
    state = gpt_state(nbytes)
    training = Training(state)
    target = directory / "drag"
    with peer.opened():
        for _ in range(WARM_UPS + 1):
            row = one_window(peer, state, training, target)
            remove(target)
    return {**row, "passes": training.passes, "bytes": nbytes_of(state)}


def run_drag(
    peers: list[Peer],
    nbytes: int,
    directory: Path,
    rounds: int,
    progress: Callable[[str], None],
) -> Row:
    """Measure the training time each save costs, peers interleaved in every round."""
    rows: list[Row] = []
    for number in range(rounds):
        for peer in rotated(peers, number):
            turn = partial(in_process_of, peer, one_turn, nbytes, directory)
            row = {"round": number, **attempted(peer.name, progress, turn)}
            remove(directory / "drag")  # what a peer that failed has left
            rows.append(row)
            progress(f"drag {number + 1}/{rounds} {describe(row)}")
    sizes = [row["bytes"] for row in rows if "bytes" in row]
    return {"bytes": max(sizes, default=nbytes), "rows": rows}
