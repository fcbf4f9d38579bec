"""What is told of the workloads of bench.py: medians, and a table for each.

It only reads the rows that the workloads returned. It must not measure anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from harness import Line, Row, at_most, median_of, number, spread_of, table, told
from rivals import BASELINE, PEERS
from rivals.fastckpt_save import Fastckpt, FastckptStep

OURS = (Fastckpt.name, FastckptStep.name)
# Told of the first save and load of a process; the others are those that follow two.
FIRST = {"stall_s": "state may change", "durable_s": "durable", "load_s": "cold load"}


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


def summarize_saves(result: Row) -> Row:
    """Return each peer's medians and its paired ratios against torch.save and the limits."""
    groups, nbytes, limits = by_peer(result["rows"]), result["bytes"], result["limits"]

    def of_base(key: str) -> dict[int, float]:
        return {row["round"]: row[key] for row in groups.get(BASELINE, []) if key in row}

    def of_limit(key: str) -> dict[int, float]:
        return {row["round"]: nbytes / row[key] for row in limits if row.get(key)}

    peers = {}
    for name, rows in groups.items():
        clocks = ("returned_s", "stall_s", "durable_s", "load_s")
        peers[name] = {
            **{key: median_of(rows, key) for key in clocks},
            "stall_speedup": paired(rows, "stall_s", of_base("stall_s")),
            "durable_speedup": paired(rows, "durable_s", of_base("durable_s")),
            "load_speedup": paired(rows, "load_s", of_base("load_s")),
            "write_of_limit": paired(rows, "durable_s", of_limit("write")),
            "read_of_limit": paired(rows, "load_s", of_limit("read")),
            "all_bytes_right": not any(row.get("wrong_tensors") for row in rows),
        }
    keys = ("memmove_s", "torch_copy_s", "write", "read")
    return {"peers": peers, "limits": {key: median_of(limits, key) for key in keys}}


def of_best(rows: list[Row], ours: str, key: str, what: str, bar: float) -> list[Line]:
    """Hold one of ours against the best of the others: the ratios of each round."""
    groups = by_peer(rows)
    medians = {name: median_of(its, key) for name, its in groups.items() if name not in OURS}
    known = {name: value for name, value in medians.items() if value is not None}
    if not known or ours not in groups:
        return []
    best = min(known, key=lambda name: known[name])
    theirs = {row["round"]: row[key] for row in groups[best]}
    both = [row for row in groups[ours] if row["round"] in theirs]
    what += f", of the best peer ({best})"
    if min(theirs.values()) <= 0:  # what a save cost was less than how much such a time varies
        return [told(what, "its own is lost in the noise")]
    ratios = [row[key] / theirs[row["round"]] for row in both]
    return [at_most(what, ratios, bar, ".2f", " x")]


def saves_lines(result: Row) -> list[Line]:
    """Hold saves and loads of fastckpt against their bars."""
    rows = result["rows"]
    lines = of_best(rows, Fastckpt.name, "durable_s", "durable, call fence", 0.5)
    lines += of_best(rows, FastckptStep.name, "durable_s", "durable, step fence", 0.5)
    groups = by_peer(rows)
    base = {row["round"]: row["load_s"] for row in groups.get(BASELINE, []) if "load_s" in row}
    loads = [row for row in groups.get(Fastckpt.name, []) if row["round"] in base]
    if loads:
        ratios = [row["load_s"] / base[row["round"]] for row in loads if "load_s" in row]
        lines.append(at_most("cold load, of torch.load", ratios, 0.8, ".2f", " x"))
    return lines


def saves_tables(result: Row, summary: Row) -> list[str]:
    """Return the table of stall, drain and load, and of those that came first in a process."""
    nbytes, limits, limit = result["bytes"], summary["limits"], result.get("limit", "fio")
    contracts = {kind.name: kind.contract for kind in PEERS}
    groups, rows = by_peer(result["rows"]), []
    for name, row in summary["peers"].items():
        its = groups[name]
        speed = row["durable_s"] and nbytes / row["durable_s"] / 1e9
        cells = [spread_of(its, "returned_s"), spread_of(its, "stall_s")]
        cells += [spread_of(its, "durable_s"), number(speed, ".2f")]
        cells += [number(row["durable_speedup"], ".2f"), spread_of(its, "load_s")]
        cells += [number(row["load_speedup"], ".2f")]
        first = [its["warm_ups"][0] for its in groups[name] if its.get("warm_ups")]
        cells += [spread_of(first, key) for key in FIRST]
        wrong = "" if row["all_bytes_right"] else " **WRONG BYTES LOADED**"
        rows.append([name, *cells, contracts.get(name, "") + wrong])
    for label, key in (("memmove, 1 thread", "memmove_s"), ("Tensor.copy_", "torch_copy_s")):
        if limits[key]:
            seconds = spread_of(result["limits"], key)
            rows.append([label, seconds, seconds, *["-"] * (5 + len(FIRST)), "a copy"])
    for key, column in (("write", 2), ("read", 5)):
        if limits[key]:
            speed, cells = number(limits[key] / 1e9, ".2f"), ["-"] * (7 + len(FIRST))
            cells[column] = number(nbytes / limits[key])
            rows.append([f"{limit} {key}", *cells, f"{speed} GB/s, the best cell"])
    heads = [
        "peer",
        "returns s",
        "state may change s",
        "durable s",
        "GB/s",
        "faster than torch.save",
    ]
    heads += ["cold load s", "faster than torch.load"]
    heads += [f"{head} s, the first of a process" for head in FIRST.values()]
    return [table([*heads, "contract"], rows)]


def many_tables(result: Row, _summary: Row) -> list[str]:
    """Return the table of saves of many tensors."""
    clocks = ("returned_s", "stall_s", "durable_s", "load_s")
    rows = [
        [name, *(spread_of(its, key) for key in clocks)]
        for name, its in by_peer(result["rows"]).items()
    ]
    heads = ["peer", "returns s", "state may change s", "durable s", "cold load s"]
    return [table(heads, rows)]


def summarize_drag(result: Row) -> Row:
    """Return each peer's medians of the drag workload."""
    return {
        name: {key: median_of(rows, key) for key in ("lost_s", "stall_s", "quiet_step_s")}
        for name, rows in by_peer(result["rows"]).items()
    }


def drag_lines(result: Row) -> list[Line]:
    """Hold the lost time against the best peer's."""
    what = "training lost per save, step fence"
    return of_best(result["rows"], FastckptStep.name, "lost_s", what, 0.5)


def drag_tables(result: Row, _summary: Row) -> list[str]:
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


def summarize_small(result: Row) -> Row:
    """Return the medians of the small saves and their paired ratios to the first way."""
    first = next(iter(result["seconds"].values()))
    return {
        name: {
            "median_s": statistics.median(seconds),
            "speedup": statistics.median(a / b for a, b in zip(first, seconds, strict=True)),
        }
        for name, seconds in result["seconds"].items()
    }


def small_tables(result: Row, summary: Row) -> list[str]:
    """Return the table of small durable saves."""
    rows = [
        [name, quartiles(result["seconds"][name], 1e3), number(row["speedup"], ".2f")]
        for name, row in summary.items()
    ]
    return [table(["way", "median ms (quartiles)", "faster than the first row"], rows)]


def quartiles(values: list[float], scale: float) -> str:
    """Return the median and in brackets the first and third quartile."""
    low, middle, high = (scale * value for value in statistics.quantiles(values, n=4))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def summarize_crc(result: Row) -> Row:
    """Return the median speed of every kernel at every size."""
    return {
        size: {name: statistics.median(speeds) for name, speeds in kernels.items()}
        for size, kernels in result["bytes_per_s"].items()
    }


def crc_tables(result: Row, summary: Row) -> list[str]:
    """Return the table of CRC-32 speeds."""
    names, seen = next(iter(summary.values())), result["bytes_per_s"]
    rows = [[name, *(speeds(its[name]) for its in seen.values())] for name in names]
    return [table(["kernel", *(f"GB/s, {size}" for size in summary)], rows)]


def speeds(bytes_per_s: list[float]) -> str:
    """Return the median and the extremes in GB/s."""
    return spread_of([{"speed": value} for value in bytes_per_s], "speed", ".2f", 1e-9)


def codec_tables(result: Row, summary: Row) -> list[str]:
    """Return the table of encoders."""
    rows = [
        [
            f"{kind}, {codec}",
            number(result["shares"][f"{kind}, {codec}"]),
            speeds(result["bytes_per_s"][kind][codec]),
        ]
        for kind, its in summary.items()
        for codec in its
    ]
    return [table(["normal numbers", "stored, of all", "GB/s"], rows)]


def gib(result: Row) -> str:
    """Return the size of a result's state."""
    return f"{result['bytes'] / 2**30:.2f} GiB"


def nothing(_result: Row) -> list[Line]:
    """Return no line, for what has no bar."""
    return []


class Section(NamedTuple):
    """How a workload is told: its medians, and of them the title, the bars and the tables."""

    summarize: Callable[[Row], Any]
    title: Callable[[Row], str]
    tables: Callable[[Row, Any], list[str]]
    lines: Callable[[Row], list[Line]] = nothing


SECTIONS = {
    "saves": Section(
        summarize_saves, lambda it: f"Saves and cold loads of {gib(it)}", saves_tables, saves_lines
    ),
    "drag": Section(
        summarize_drag,
        lambda it: f"Training time lost to a save of {gib(it)}",
        drag_tables,
        drag_lines,
    ),
    "many": Section(
        summarize_saves,
        lambda it: f"Saves of {gib(it)} in tensors of 66 KiB",
        many_tables,
    ),
    "small": Section(
        summarize_small,
        lambda it: f"Durable saves of {it['bytes'] / 1e6:.2f} MB in {it['tensors']} tensors",
        small_tables,
    ),
    "crc": Section(summarize_crc, lambda _it: "CRC-32 on one core", crc_tables),
    "codec": Section(summarize_crc, lambda _it: "Encoders on one core", codec_tables),
}
