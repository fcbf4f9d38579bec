"""What a save costs a training loop on a GPU with either fence, apart from the machine's noise.

Blocks of steps that begin with a save, and blocks that begin with none, stand in turn between quiet
blocks. Each is measured by the quiet blocks on both sides of it, and each save by the block of the
same round that had none. The host stays one step ahead all the time and nothing waits for the
device, so a call costs here what it costs in training. It must not know how a save works.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from gpu_setting import Here, Measured
from gpu_training import Loop, Watch
from harness import STARTED, Line, Row, progress, spread_of, table, told
from rivals.fastckpt_save import Fastckpt, FastckptStep
from rivals.peer import Peer
from storage import remove

from fastckpt.cli.bench.benchmark import rotated
from fastckpt.cli.bench.saves import Save

QUIET, NOTHING = "quiet", "nothing"
PEERS: dict[str, type[Peer]] = {"step": FastckptStep, "call": Fastckpt}
BATCH = 16  # a step that keeps the GPU busy for longer than the host takes to queue it
STEPS_SHOWN = 10
LOST_BAR_PERCENT = 3.0
CONFIDENCE = 0.95
STEP = ("device_s", "queued_s", "update_s", "waited_s")  # what is known of each step
FACTS = ("staged_s", "d2h_s", "gpu_stall_s")
CLOCKS = {"events": "lost_percent", "wall time": "lost_wall_percent"}


class Removal(Watch):
    """Waits for a save, and removes what it wrote before its block ends."""

    def __init__(self, save: Save, target: Path) -> None:
        self.target = target
        super().__init__(save)

    def run(self, save: Save) -> None:
        super().run(save)
        remove(self.target)


class Blocks:
    """The blocks of a loop, one behind the other. Events are read when all blocks are over.

    Attributes:
        found: the blocks so far, in their order.
    """

    def __init__(self, here: Here, loop: Loop) -> None:
        self.device, self.loop, self.least = here.device, loop, here.every
        self.target = here.directory / "fence"
        self.found: list[Row] = []
        self.last = loop.step()

    def run(self, kind: str, steps: int, peer: Peer | None = None) -> Row:
        """Train for so many steps; with a peer save first, and train until its file is gone."""
        marks, started, cpu_s = [self.last], time.perf_counter(), time.process_time()
        clocks: list[tuple[float, ...]] = []
        row: Row = {"kind": kind, "marks": marks, "steps": clocks}
        watch: Watch | None = None
        if peer is not None:
            self.target.mkdir()
            save = peer.save(self.loop.state(), self.target)
            row["returned_s"] = time.perf_counter() - started
            watch = Removal(save, self.target)
        while len(clocks) < steps or (watch is not None and watch.flushing()):
            self.last = self.loop.step()
            marks.append(self.last)
            clocks.append(self.loop.clocks)
            if watch is not None and "copied" not in row:  # by now all copies are queued
                row["copied"] = self.device.mark_of_copies()
        row["wall_s"] = time.perf_counter() - started
        row["cpu_s"] = time.process_time() - cpu_s
        if watch is not None:
            watch.finish()
            facts = save.facts()
            row |= {key: facts[key] for key in FACTS} | {"durable_s": watch.ended - started}
        self.found.append(row)
        return row

    def resolved(self) -> list[Row]:
        """Return the blocks with seconds of the device in the place of its events."""
        seconds = self.device.seconds
        for row in self.found:
            marks = row.pop("marks")
            device_s = [seconds(begin, end) for begin, end in pairwise(marks)]
            row["steps"] = [[one, *its] for one, its in zip(device_s, row["steps"], strict=True)]
            if "copied" in row:
                row["copied_s"] = seconds(marks[0], row.pop("copied"))
        return self.found


def run_fence(here: Here) -> Measured:
    """Train, and save with each fence and not at all, in turn."""
    here.release()
    loop = Loop(here.device, here.nbytes, 0.0, *((BATCH,) if here.device.judged else ()))
    text = f"{loop.describe()}; blocks of {here.every} steps"
    progress(text)
    blocks, peers = Blocks(here, loop), {kind: of() for kind, of in PEERS.items()}
    longest = here.every
    for kind, peer in peers.items():  # the first save of each allocates what others use again
        peer.load_modules()
        peer.open()
        longest = max(longest, len(blocks.run(kind, here.every, peer)["steps"]))
    gc.collect()
    blocks.run(QUIET, here.every)
    blocks.found.clear()
    blocks.run(QUIET, here.every)
    took_s = 0.0  # for a round, at most
    for count in range(here.rounds):
        begun = time.monotonic()
        if begun - STARTED + took_s > here.seconds:
            break
        for kind in rotated([*peers, NOTHING], count):
            peer = peers.get(kind)
            row = blocks.run(kind, here.every if peer else longest, peer)
            longest = len(row["steps"])  # the noise is that of as many steps
            row["round"] = count
            blocks.run(QUIET, here.every)
        took_s = max(took_s, time.monotonic() - begun)
        progress(f"fence {count + 1}/{here.rounds}")
    here.device.synchronize()
    rows = blocks.resolved()
    lines, tables = fence_lines(losses(rows, here.every), rows)
    return Measured({"training": text, "step": STEP, "blocks": rows}, lines, [text, *tables])


def losses(blocks: Sequence[Row], every: int) -> list[Row]:
    """Return what each block that is not quiet took more than its quiet neighbours, in percent of
    so many steps: by the device's clock and by the wall, and step by step in seconds.
    """
    found = []
    for before, row, after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        if row["kind"] == QUIET:
            continue
        around = before["steps"] + after["steps"]
        quiet_s = statistics.mean(step[0] for step in around)
        wall_s = (before["wall_s"] + after["wall_s"]) / len(around)
        cpu_s = (before["cpu_s"] + after["cpu_s"]) / len(around)
        count = len(row["steps"])
        lost_s = sum(step[0] for step in row["steps"]) - count * quiet_s
        found.append(
            {
                "kind": row["kind"],
                "round": row["round"],
                "quiet_step_s": quiet_s,
                "lost_s": lost_s,
                "lost_percent": lost_s / quiet_s / every * 100,
                "lost_wall_percent": (row["wall_s"] / wall_s - count) / every * 100,
                "cpu_s": row["cpu_s"] - count * cpu_s,
                "excess_s": [step[0] - quiet_s for step in row["steps"]],
            }
        )
    return found


def paired(lost: Sequence[Row], kind: str, key: str) -> list[float]:
    """Return what saves of a kind lost more than the block of their round without a save."""
    noise = {row["round"]: row[key] for row in lost if row["kind"] == NOTHING}
    return [
        row[key] - noise[row["round"]]
        for row in lost
        if row["kind"] == kind and row["round"] in noise
    ]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that has the median of what values are drawn from in at least 95 of 100
    cases, whatever its distribution is; infinite if there are too few values for any.
    """
    ordered, count = sorted(values), len(values)
    below, left_out = 0.0, 0
    while left_out < count / 2:
        below += math.comb(count, left_out) / 2**count
        if 2 * below > 1 - CONFIDENCE:
            break
        left_out += 1
    if left_out == 0:
        return -math.inf, math.inf
    return ordered[left_out - 1], ordered[-left_out]


def answer(what: str, values: Sequence[float], bar: float) -> Line:
    """Hold differences against a bar, by an interval of their median: where the bar lies inside of
    it, the machine was too noisy for an answer.
    """
    low, high = interval(values)
    spread = f"{low:.2f} to {high:.2f}%"
    if not values or math.isinf(high):
        return Line(what, f"<= {bar:g}%", f"too few saves ({len(values)})")
    estimate = f"{statistics.median(values):.2f}%"
    if low <= bar < high:
        return Line(what, f"<= {bar:g}%", f"too noisy: {estimate}", None, spread)
    return Line(what, f"<= {bar:g}%", f"answered: {estimate}", high <= bar, spread)


def fence_lines(lost: Sequence[Row], blocks: Sequence[Row]) -> tuple[list[Line], list[str]]:
    """Make lines and tables of what run_fence measured."""
    of = {kind: [row for row in lost if row["kind"] == kind] for kind in (*PEERS, NOTHING)}
    if not lost:
        return [], ["No round was finished in time."]
    lines: list[Line] = []
    for kind in PEERS:
        for clock, key in CLOCKS.items():
            what = f"fence {kind}, lost a save, less the noise, by {clock}"
            lines.append(answer(what, paired(lost, kind, key), LOST_BAR_PERCENT))
    steps = [step for row in blocks if row["kind"] == QUIET for step in row["steps"]]
    quiet = [step[0] * 1e3 for step in steps]
    # While the host waits for the device, what else it does costs nothing.
    waited = statistics.median(step[3] * 1e3 for step in steps) / statistics.median(quiet)
    lines.append(told("a step without a save", quiet, ".1f", " ms"))
    lines.append(told("share of it that the host waits for the device", waited, ".0%"))
    for kind in PEERS:
        mine = [row for row in blocks if row["kind"] == kind]
        shown = {"save() returns": "returned_s", "copied": "copied_s", "durable": "durable_s"}
        values = {what: [row[key] * 1e3 for row in mine] for what, key in shown.items()}
        values["the optimizer's call after it"] = [row["steps"][0][2] * 1e3 for row in mine]
        values["CPU"] = [row["cpu_s"] * 1e3 for row in of[kind]]
        lines += [told(f"fence {kind}, {what}", its, ".1f", " ms") for what, its in values.items()]
    cells = [
        [
            kind,
            str(len(mine)),
            spread_of(mine, "lost_s", ".1f", 1e3),
            *(spread_of(mine, key, ".2f") for key in CLOCKS.values()),
        ]
        for kind, mine in of.items()
    ]
    heads = ["saved with fence", "blocks", "lost ms", *(f"lost %, {clock}" for clock in CLOCKS)]
    return lines, [table(heads, cells), excess_table(of)]


def excess_table(of: dict[str, list[Row]]) -> str:
    """Return how much longer than a quiet one each step behind a save took, in milliseconds."""
    rows = []
    for step in range(STEPS_SHOWN):
        cells = [
            spread_of([{"ms": row["excess_s"][step] * 1e3} for row in mine], "ms", ".1f")
            for mine in ([row for row in its if step < len(row["excess_s"])] for its in of.values())
        ]
        rows.append([str(step + 1), *cells])
    return table(["step after the save, ms longer", *of], rows)
