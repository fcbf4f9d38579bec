"""What saves cost a training loop on a GPU: a small GPT, a save every few steps, all peers in turn.

It owns the loop and the windows it is watched in. A peer's promise about mutation is honoured
before every optimizer step. It must not know how a peer works or what becomes of the lines.
"""

from __future__ import annotations

import gc
import math
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_device import Cuda
from gpu_setting import Here, Measured, load_to_host
from harness import Line, Row, at_most, holds, median_of, middle, number, progress, table, told
from report import failures, measured
from rivals.peer import Peer
from saving import attempted
from storage import remove
from train_gpt import GPT, Preset

from fastckpt import SaveStats
from fastckpt.cli.bench.benchmark import rotated
from fastckpt.cli.bench.saves import Save, State, differing, flat_tensors, nbytes_of

BYTES_PER_PARAMETER = 12  # fp32 weight and two moments
HEAD_WIDTH = 64
BATCH, BATCHES = 4, 8
CALIBRATION_STEPS = 3
AFTER_STEPS = 2
LOST_BAR_PERCENT = 2
STEP_FENCE = "fastckpt-step"


def preset_for(device: Cuda, nbytes: int, batch: int) -> Preset:
    """Return the model whose weights and Adam moments are about `nbytes` bytes."""
    layers, context, head = (24, 1024, HEAD_WIDTH) if device.judged else (2, 32, 8)
    width = math.sqrt(nbytes / BYTES_PER_PARAMETER / (12 * layers))
    heads = max(1, round(width / head))
    return Preset(heads * head, layers, heads, context, batch, dropout=0.0)


class Loop:
    """The training loop: bf16 autocast, fp32 weights, AdamW, as many passes a step as asked for.

    Args:
        nbytes: of its state, about.
        step_s: how long a step is made, at least, by accumulating gradients.
        batch: windows of text in one pass.

    Attributes:
        clocks: seconds of the host in the last step: to queue it, in the optimizer's call of that,
            and until the device had come to the end of the step before.
    """

    def __init__(self, device: Cuda, nbytes: int, step_s: float, batch: int = BATCH) -> None:
        self.device = device
        self.preset = preset_for(device, nbytes, batch)
        self.clocks = (0.0, 0.0, 0.0)
        torch.manual_seed(0)
        with device.device:
            self.model = GPT(self.preset)
            shape = (BATCHES, self.preset.batch, self.preset.context + 1)
            self.batches = torch.randint(256, shape)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, **device.optimizer_options
        )
        self.steps = 0
        self.passes = 1
        self.previous: Any = None
        self.step()
        begin = device.mark()
        ends = [self.step() for _ in range(CALIBRATION_STEPS)]
        one = device.seconds(begin, ends[-1]) / CALIBRATION_STEPS
        self.passes = max(1, math.ceil(step_s / one))

    def step(self, before_update: Callable[[], object] | None = None) -> Any:
        """Queue one step; returns the event of its end. The host stays one step ahead."""
        started = time.perf_counter()
        for number_of_pass in range(self.passes):
            batch = self.batches[(self.steps + number_of_pass) % BATCHES]
            with torch.autocast(self.device.device.type, torch.bfloat16):
                logits = self.model(batch[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
            (loss / self.passes).backward()
        if before_update is not None:
            before_update()
        updating = time.perf_counter()
        self.optimizer.step()
        updated = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        end, before = self.device.mark(), self.previous
        queued = time.perf_counter()
        if before is not None:
            self.device.wait_for(before)
        waited_s = time.perf_counter() - queued
        self.clocks = (queued - started, updated - updating, waited_s)
        self.previous = end
        return end

    def state(self) -> State:
        """Return what a run needs to go on; copies no tensor."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.steps,
        }

    def describe(self) -> str:
        """Return in words what is trained."""
        tokens = self.preset.batch * self.preset.context * self.passes
        size = nbytes_of(self.state())
        return (
            f"GPT of {self.preset.layers} layers, width {self.preset.width}; its state "
            f"{size / 1e9:.2f} GB; {tokens} tokens a step, in {self.passes} passes"
        )


class Watch:
    """Waits for one save in a thread, so that the loop only looks at a flag, and notes when it was
    durable.
    """

    ended = math.nan

    def __init__(self, save: Save) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, args=(save,), daemon=True)
        self.thread.start()

    def run(self, save: Save) -> None:
        try:
            save.wait_durable()
        except BaseException as error:  # carried to the training thread by finish()
            self.error = error
        self.ended = time.perf_counter()

    def flushing(self) -> bool:
        return self.thread.is_alive()

    def finish(self) -> None:
        self.thread.join()
        if self.error is not None:
            raise self.error


def quiet_steps(loop: Loop, steps: int) -> tuple[float, float]:
    """Train without a save; returns the seconds of a step by the device and by the wall."""
    loop.device.synchronize()
    begin, started = loop.device.mark(), time.perf_counter()
    ends = [loop.step() for _ in range(steps)]
    device_s = loop.device.seconds(begin, ends[-1])
    loop.device.synchronize()
    return device_s / steps, (time.perf_counter() - started) / steps


def one_window(peer: Peer, loop: Loop, target: Path, every: int) -> Row:
    """Train quietly; then save, and train until so many steps are over and the save is durable."""
    device = loop.device
    gc.collect()
    quiet_s, quiet_wall_s = quiet_steps(loop, every)
    target.mkdir()
    begin, started = device.mark(), time.perf_counter()
    save = peer.save(loop.state(), target)
    returned_s = time.perf_counter() - started
    watch = Watch(save)
    if not peer.background:
        watch.finish()
    guard = None if peer.keeps_fence else save.wait_staged
    ends: list[Any] = []
    flushing = 0
    while len(ends) < every or watch.flushing():
        ends.append(loop.step(guard))
        flushing += watch.flushing()
    watch.finish()
    device_s = device.seconds(begin, ends[-1])
    device.synchronize()
    wall_s = time.perf_counter() - started
    # The first step has the stall in it.
    beside = [device.seconds(a, b) for a, b in pairwise(ends[:flushing])]
    facts = save.facts()
    return {
        "peer": peer.name,
        "quiet_step_s": quiet_s,
        "returned_s": returned_s,
        "stall_s": device.seconds(begin, ends[0]) - quiet_s,
        "lost_s": device_s - len(ends) * quiet_s,
        "lost_percent": (device_s / quiet_s - len(ends)) / every * 100,
        "lost_wall_percent": (wall_s / quiet_wall_s - len(ends)) / every * 100,
        "steps": len(ends),
        "steps_flushing": flushing,
        "drag": statistics.mean(beside) / quiet_s if beside else None,
        "durable_s": watch.ended - started,
        "d2h_s": device.copied(SaveStats(**facts))[0] if facts else None,
        "gpu_stall_s": facts.get("gpu_stall_s"),
    }


def torn(peer: Peer, loop: Loop, target: Path) -> Row:
    """Save behind a step that is still queued, train on, load; names tensors that differ.

    What is compared with is copied on the device, in the order of the stream: a save that does not
    wait for the step before it, or that the step after does not wait for, is found.
    """
    target.mkdir()
    loop.step()
    state = loop.state()
    want = {name: tensor.clone() for name, tensor in flat_tensors(state).items()}
    save = peer.save(state, target)
    guard = None if peer.keeps_fence else save.wait_staged
    for _ in range(AFTER_STEPS):
        loop.step(guard)
    save.wait_durable()
    return {"wrong_tensors": differing(load_to_host(peer, target, state), want)}


def run_train(here: Here) -> Measured:
    """Train, and save with every peer in turn."""
    here.release()
    loop = Loop(here.device, here.nbytes, here.step_s)
    progress(loop.describe())
    target = here.directory / "train"
    rows: list[Row] = []
    # The first round only lets every peer allocate what it reuses.
    for count in range(-1, here.rounds):
        for peer in rotated(here.peers, count):
            window = partial(one_window, peer, loop, target, here.every)
            row = {"round": count, **attempted(peer.name, window)}
            remove(target)
            if count >= 0 or "error" in row:
                rows.append(row)
            if count >= 0 and "error" not in row:
                progress(
                    f"train {count + 1}/{here.rounds} {peer.name}: "
                    f"lost {row['lost_percent']:.2f}%, durable {row['durable_s']:.3f} s"
                )
    checks = []
    for peer in here.peers:
        check = attempted(peer.name, partial(torn, peer, loop, target))
        checks.append({"peer": peer.name, **check})
        remove(target)
    here.failures += failures({"train": {"rows": rows + checks}})
    lines, cells = train_lines(here, rows, checks, nbytes_of(loop.state()))
    heads = ["peer", "returns s", "stall s", "lost s a save", "lost, events", "lost, wall"]
    heads += ["step while flushing", "durable s", "GB/s", "same bytes"]
    text = f"{loop.describe()}; a save every {here.every} steps"
    results = {"training": text, "rows": rows, "checks": checks}
    return Measured(results, lines, [f"{text}.\n\n{table(heads, cells)}"])


def train_lines(
    here: Here, rows: list[Row], checks: list[Row], nbytes: int
) -> tuple[list[Line], list[list[str]]]:
    """Make lines and the cells of a table of what run_train measured."""
    lines: list[Line] = []
    cells = []
    right = {row["peer"]: row.get("wrong_tensors") == [] for row in checks}
    for peer in here.peers:
        mine = [row for row in measured(rows) if row["peer"] == peer.name]
        if not mine:
            continue
        if peer.name == STEP_FENCE:
            for key, clock in (("lost_percent", "events"), ("lost_wall_percent", "wall time")):
                what = f"fence step, lost a save, of {here.every} steps, by {clock}"
                lines.append(at_most(what, middle(mine, key), LOST_BAR_PERCENT, unit="%"))
        elif peer.name.startswith("fastckpt"):
            ratio = statistics.median(row["stall_s"] / row["d2h_s"] for row in mine)
            lines.append(told("fence call in the loop, stall, of the D2H", f"{ratio:.3g} x"))
        if peer.name.startswith("fastckpt"):
            what = f"{peer.name}: comes back bit by bit, trained on meanwhile"
            lines.append(holds(what, right[peer.name]))
        seconds = [number(middle(mine, key)) for key in ("returned_s", "stall_s", "lost_s")]
        shares = [
            number(middle(mine, key), ".2f", "%") for key in ("lost_percent", "lost_wall_percent")
        ]
        drag, durable = number(median_of(mine, "drag"), ".3f", " x"), middle(mine, "durable_s")
        speed = [number(durable), number(nbytes / durable / 1e9, ".2f")]
        same = "yes" if right[peer.name] else "NO"
        cells.append([peer.name, *seconds, *shares, drag, *speed, same])
    quiet = median_of(measured(rows), "quiet_step_s")
    lines.append(told("a training step without a save", f"{number(quiet)} s"))
    return lines, cells
