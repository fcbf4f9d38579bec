"""What is told of the workloads of bench.py: medians, and a table for each.

It only reads the rows that the workloads returned. It must not measure anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from harness import Row, median_of, number, table
from rivals import BASELINE, PEERS


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


def saves_tables(result: Row, summary: Row) -> list[str]:
    """Return the table of stall, drain and load."""
    nbytes, limits, limit = result["bytes"], summary["limits"], result["limit"]
    contracts = {kind.name: kind.contract for kind in PEERS}
    rows = []
    for name, row in summary["peers"].items():
        speed = row["durable_s"] and nbytes / row["durable_s"] / 1e9
        cells = [number(row["returned_s"]), number(row["stall_s"])]
        cells += [number(row["stall_speedup"], ".2f"), number(row["durable_s"])]
        cells += [number(speed, ".2f"), number(row["durable_speedup"], ".2f")]
        cells += [number(row["write_of_limit"], ".0%"), number(row["load_s"])]
        cells += [number(row["load_speedup"], ".2f"), number(row["read_of_limit"], ".0%")]
        wrong = "" if row["all_bytes_right"] else " **WRONG BYTES LOADED**"
        rows.append([name, *cells, contracts[name] + wrong])
    for label, key in (("memmove, 1 thread", "memmove_s"), ("Tensor.copy_", "torch_copy_s")):
        rows.append([label, number(limits[key]), number(limits[key])] + ["-"] * 8 + ["a copy"])
    for key in ("write", "read"):
        if limits[key]:
            speed, seconds = number(limits[key] / 1e9, ".2f"), number(nbytes / limits[key])
            cells = [seconds, speed, "-", "-", "-"] if key == "write" else ["-"] * 4 + [seconds]
            notes = f"{speed} GB/s, the best cell"
            rows.append([f"{limit} {key}", "-", "-", "-", *cells, "-", "-", notes])
    heads = ["peer", "returns s", "may mutate s", "x torch.save", "durable s", "GB/s"]
    heads += ["x torch.save", "of the limit", "cold load s", "x torch.save", "of the limit"]
    first = result["warm_ups"] + 1
    note = f"Each is save and load number {first} of a process of its own, the first that is timed."
    return [note, table([*heads, "contract"], rows)]


def summarize_drag(result: Row) -> Row:
    """Return each peer's medians of the drag workload."""
    return {
        name: {key: median_of(rows, key) for key in ("lost_s", "stall_s", "quiet_step_s")}
        for name, rows in by_peer(result["rows"]).items()
    }


def drag_tables(_result: Row, summary: Row) -> list[str]:
    """Return the table of what a save costs the training beside it."""
    heads = ["peer", "lost s a save", "stall s", "quiet step s"]
    return [table(heads, [[name, *map(number, row.values())] for name, row in summary.items()])]


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


def small_tables(_result: Row, summary: Row) -> list[str]:
    """Return the table of small durable saves."""
    rows = [
        [name, number(row["median_s"] * 1e3, ".2f"), number(row["speedup"], ".2f")]
        for name, row in summary.items()
    ]
    return [table(["way", "median ms", "x first row"], rows)]


def summarize_crc(result: Row) -> Row:
    """Return the median speed of every kernel at every size."""
    return {
        size: {name: statistics.median(speeds) for name, speeds in kernels.items()}
        for size, kernels in result["bytes_per_s"].items()
    }


def crc_tables(_result: Row, summary: Row) -> list[str]:
    """Return the table of CRC-32 speeds."""
    names = next(iter(summary.values()))
    rows = [[name, *(number(its[name] / 1e9, ".2f") for its in summary.values())] for name in names]
    return [table(["kernel", *(f"GB/s, {size}" for size in summary)], rows)]


def codec_tables(result: Row, summary: Row) -> list[str]:
    """Return the table of encoders."""
    rows = [
        [f"{kind}, {codec}", number(result["shares"][f"{kind}, {codec}"]), number(bps / 1e9, ".2f")]
        for kind, its in summary.items()
        for codec, bps in its.items()
    ]
    return [table(["normal numbers", "stored, of all", "GB/s"], rows)]


def gib(result: Row) -> str:
    """Return the size of a result's state."""
    return f"{result['bytes'] / 2**30:.2f} GiB"


class Section(NamedTuple):
    """How a workload is told: its medians, and of them the title and tables."""

    summarize: Callable[[Row], Any]
    title: Callable[[Row], str]
    tables: Callable[[Row, Any], list[str]]


SECTIONS = {
    "saves": Section(
        summarize_saves, lambda it: f"Saves and cold loads of {gib(it)}, medians", saves_tables
    ),
    "drag": Section(
        summarize_drag, lambda it: f"Training time lost to a save of {gib(it)}", drag_tables
    ),
    "small": Section(
        summarize_small,
        lambda it: f"Durable saves of {it['bytes'] / 1e6:.2f} MB in {it['tensors']} tensors",
        small_tables,
    ),
    "crc": Section(summarize_crc, lambda _it: "CRC-32 on one core", crc_tables),
    "codec": Section(summarize_crc, lambda _it: "Encoders on one core", codec_tables),
}
