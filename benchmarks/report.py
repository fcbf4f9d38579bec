"""What is told of the workloads of bench.py: medians, and a table for each.

It only reads the rows that the workloads returned. It must not measure anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from harness import (
    Line,
    Rounds,
    Row,
    at_most,
    by_round,
    goal,
    median_of,
    number,
    spread_of,
    table,
    told,
)
from rivals import BASELINE, PEERS
from rivals.fastckpt_save import Fastckpt, FastckptStep

OURS = (Fastckpt.name, FastckptStep.name)
SMALL_BASE, SMALL_LIMIT = "torch.save+fsync+rename+dir", "write+fsync+rename+dir"
NAMES = {
    "torch.save": "torch.save",
    "torch.save-nocrc": "torch.save without its checksum",
    "safetensors": "safetensors",
    "fastsafetensors": "fastsafetensors",
    "runai-streamer": "Run:ai Model Streamer",
    "dcp": "DCP save",
    "dcp-async": "DCP async_save, default",
    "dcp-async-stager": "DCP async_save, stager",
    "dcp-async-pinned": "DCP async_save, pinned",
    "torchsnapshot": "torchsnapshot take",
    "torchsnapshot-async": "torchsnapshot async_take",
    "torch_checkpointing": "torch_checkpointing",
    "deepspeed": "DeepSpeed FastFileWriter",
    "fastckpt": "**fastckpt, call fence**",
    "fastckpt-step": "**fastckpt, step fence**",
}
CLOCKS = {"stall_s": "state may change", "durable_s": "durable", "load_s": "cold load"}


def measured(rows: list[Row]) -> list[Row]:
    """Return the rows of what did not fail."""
    return [row for row in rows if "error" not in row]


def failures(results: Row) -> list[str]:
    """Name everything that failed or loaded wrong bytes, with the reason."""
    found: dict[str, None] = {}
    for section, result in results.items():
        for row in result.get("rows", []):
            if "error" in row:
                found[f"{row['peer']} ({section}): {row['error']}"] = None
            elif row.get("wrong_tensors"):
                found[f"{row['peer']} ({section}): loaded wrong bytes"] = None
    return list(found)


def by_peer(rows: list[Row]) -> dict[str, list[Row]]:
    """Group rows by peer, in the order the peers are declared."""
    groups: dict[str, list[Row]] = {}
    for row in measured(rows):
        groups.setdefault(row["peer"], []).append(row)
    order = {kind.name: place for place, kind in enumerate(PEERS)}
    return dict(sorted(groups.items(), key=lambda item: order.get(item[0], len(order))))


def paired(rows: list[Row], key: str, reference: dict[int, float]) -> float | None:
    """Return the median over rounds of (the round's reference / this row's value)."""
    ratios = [
        reference[row["round"]] / row[key]
        for row in rows
        if row.get(key) and row["round"] in reference
    ]
    return statistics.median(ratios) if ratios else None


def of_best(
    rows: list[Row], ours: str, key: str, what: str, limit: tuple[str, Rounds] = ("", {})
) -> list[Line]:
    """Hold one of ours against the limit and the best of the others: the ratios of each round."""
    groups = by_peer(rows)
    medians = {name: median_of(its, key) for name, its in groups.items() if name not in OURS}
    known = {name: value for name, value in medians.items() if value is not None}
    if ours not in groups:
        return []
    best = min(known, key=lambda name: known[name], default="")
    mine, theirs = by_round(groups[ours], key), by_round(groups.get(best, []), key)
    if min(theirs.values(), default=1) <= 0:  # it cost less than how much such a time varies
        return [told(f"{what}, of {best}", "its own is lost in the noise")]
    return [goal(what, mine, limit, (best, theirs))] if mine else []


def limits_of(result: Row) -> dict[str, tuple[str, Rounds]]:
    """Return what the machine can do, by clock."""
    rows, name = result["limits"], result.get("limit", "fio")
    found = {"stall_s": ("Tensor.copy_", by_round(rows, "torch_copy_s"))}
    for key, kind in (("durable_s", "write"), ("load_s", "read")):
        rates = by_round(rows, kind)
        seconds = {number: result["bytes"] / rate for number, rate in rates.items()}
        found[key] = (f"{name} {kind}", seconds)
    return found


def saves_lines(result: Row) -> list[Line]:
    """Hold saves and loads of fastckpt against their limits and the best of the others."""
    rows, limits = result["rows"], limits_of(result)
    found = []
    for peer, fence in ((Fastckpt.name, "call"), (FastckptStep.name, "step")):
        # Under the step fence the state may change at the next step of an optimizer.
        for key in ("stall_s", "durable_s") if fence == "call" else ("durable_s",):
            found += of_best(rows, peer, key, f"{CLOCKS[key]}, {fence} fence", limits[key])
    return found + of_best(rows, Fastckpt.name, "load_s", "cold load", limits["load_s"])


def many_lines(result: Row) -> list[Line]:
    """Hold saves as others, and a cold load against that of torch.load."""
    groups, limit = by_peer(result["rows"]), limits_of(result)["load_s"]
    lines = [line for line in saves_lines(result) if not line.what.startswith("cold load")]
    ours, base = (by_round(groups.get(name, []), "load_s") for name in (Fastckpt.name, BASELINE))
    return [*lines, goal("cold load", ours, limit, (BASELINE, base), times=1.0)] if ours else lines


def saves_tables(result: Row) -> list[str]:
    """Return the table of saves and loads by peer, of those that follow others in a process."""
    groups, clocks = by_peer(result["rows"]), ("returned_s", *CLOCKS)
    rows = [[NAMES[name], *(spread_of(its, key) for key in clocks)] for name, its in groups.items()]
    copied = spread_of(result["limits"], "torch_copy_s")
    rows += [["*limit:* Tensor.copy_", copied, copied, "-", "-"]] if result["limits"] else []
    for key, place in (("write", 3), ("read", 4)):
        if speed := median_of(result["limits"], key):
            row = [f"*limit:* {result.get('limit', 'fio')}, {speed / 1e9:.2f} GB/s", *["-"] * 4]
            row[place] = number(result["bytes"] / speed)
            rows.append(row)
    heads = ["seconds", "call returns", *CLOCKS.values()]
    return [table(heads, rows)]


def drag_lines(result: Row) -> list[Line]:
    """Hold the lost time against the best peer's."""
    what = "training lost per save, step fence"
    return of_best(result["rows"], FastckptStep.name, "lost_s", what)


def drag_tables(result: Row) -> list[str]:
    """Return the table of what a save costs the training beside it."""
    heads, clocks = (
        ["peer", "lost s a save", "stall s", "quiet step s"],
        ("stall_s", "quiet_step_s"),
    )
    rows = [
        [name, lost(its), *(spread_of(its, key) for key in clocks)]
        for name, its in by_peer(result["rows"]).items()
    ]
    return [table(heads, rows)]


def lost(rows: list[Row]) -> str:
    """Return what a save cost training; that it is noise, where a round has gained by it."""
    least = min(row["lost_s"] for row in rows)
    return f"{spread_of(rows, 'lost_s')}{'; noise' if least < 0 else ''}"


def small_lines(result: Row) -> list[Line]:
    """Hold small saves against the write of as many bytes, and torch.save."""
    clocks = {name: dict(enumerate(its)) for name, its in result["seconds"].items()}
    limit, base = ((name, clocks.get(name, {})) for name in (SMALL_LIMIT, SMALL_BASE))
    ours = clocks.get(Fastckpt.name)
    return [goal("small durable save", ours, limit, base)] if ours else []


def small_tables(result: Row) -> list[str]:
    """Return the table of small durable saves."""
    seconds = result["seconds"]
    first, rows = next(iter(seconds.values())), []
    for name, its in seconds.items():
        faster = statistics.median(a / b for a, b in zip(first, its, strict=True))
        rows.append([name, quartiles(its, 1e3), number(faster, ".2f")])
    return [table(["way", "median ms (quartiles)", "faster than the first row"], rows)]


def quartiles(values: list[float], scale: float) -> str:
    """Return the median and in brackets the first and third quartile."""
    low, middle, high = (scale * value for value in statistics.quantiles(values, n=4))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def speeds(bytes_per_s: list[float]) -> str:
    """Return the median and the extremes in GB/s."""
    return spread_of([{"speed": value} for value in bytes_per_s], "speed", ".2f", 1e-9)


def codec_tables(result: Row) -> list[str]:
    """Return the table of encoders."""
    rows = [
        [f"{kind}, {codec}", number(result["shares"][f"{kind}, {codec}"]), speeds(its)]
        for kind, codecs in result["bytes_per_s"].items()
        for codec, its in codecs.items()
    ]
    return [table(["normal numbers", "stored, of all", "GB/s"], rows)]


AGAIN_MS = 3.0, 40.0  # for the 740 tensors of the training state, and for 10,000


def again_lines(result: Row) -> list[Line]:
    """Hold the call of a save whose structure was saved before, under the step fence."""
    return [
        at_most(f"{what}: the call", [1e3 * each for each in its], bar, ".2f", " ms")
        for (what, its), bar in zip(result["seconds"].items(), AGAIN_MS, strict=True)
    ]


def again_tables(result: Row) -> list[str]:
    """Return the table of these calls."""
    rows = [[what, quartiles(its, 1e3)] for what, its in result["seconds"].items()]
    return [table(["state", "the call, median ms (quartiles)"], rows)]


def thinned_lines(result: Row) -> list[Line]:
    """Tell how long a step takes to be thinned, beside its removal."""
    thinned, removed = (by_round(result["rows"], key) for key in ("thinned_s", "removed_s"))
    return [goal("thinning a step", thinned, rival=("removing it", removed), times=None)]


def thinned_tables(result: Row) -> list[str]:
    """Return the table of both, with the bytes that each frees."""
    rows = []
    for what, key in (("thinned to its model", "thinned"), ("removed", "removed")):
        freed = spread_of(result["rows"], f"{key}_bytes", ".3f", 2**-30)
        rows.append([what, spread_of(result["rows"], f"{key}_s", ".2f", 1e3), freed])
    return [table(["a step is", "ms", "GiB freed"], rows)]


def gib(result: Row) -> str:
    """Return the size of a result's state."""
    return f"{result['bytes'] / 2**30:.2f} GiB"


def nothing(_result: Row) -> list[Line]:
    """Return no line, for what has no bar."""
    return []


class Section(NamedTuple):
    """How the result of a workload is told: its title, its tables, and its bars."""

    title: Callable[[Row], str]
    tables: Callable[[Row], list[str]]
    lines: Callable[[Row], list[Line]] = nothing


SECTIONS = {
    "saves": Section(lambda it: f"Saves and cold loads of {gib(it)}", saves_tables, saves_lines),
    "drag": Section(
        lambda it: f"Training time lost to a save of {gib(it)}", drag_tables, drag_lines
    ),
    "many": Section(
        lambda it: f"Saves of {gib(it)} in tensors of 66 KiB", saves_tables, many_lines
    ),
    "small": Section(
        lambda it: f"Durable saves of {it['bytes'] / 1e6:.2f} MB in {it['tensors']} tensors",
        small_tables,
        small_lines,
    ),
    "again": Section(
        lambda _it: "Saves after the first of a structure, step fence", again_tables, again_lines
    ),
    "thinned": Section(
        lambda it: f"Old steps of {gib(it)} with keep_parts", thinned_tables, thinned_lines
    ),
    "codec": Section(lambda _it: "Encoders on one core", codec_tables),
}
