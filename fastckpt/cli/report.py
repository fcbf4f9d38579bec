"""`fastckpt report`: shows how long the phases of saves took, from a root's log."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from fastckpt.arguments.quantities import shown_rate, shown_size, shown_time
from fastckpt.cli.shared_arguments import shown_name
from fastckpt.engine.save_stats import PHASES
from fastckpt.errors import CheckpointError
from fastckpt.saving import pipeline
from fastckpt.steps.log import entries

_FAILED_SHOWN = 10


def run(arguments: argparse.Namespace) -> int:
    path = os.path.realpath(arguments.log)
    saves = entries(pipeline.current().storage, path)
    if not saves:
        raise CheckpointError(f"the log {path!r} has no saves")
    limit = arguments.limit or max((entry["rate"] or 0 for entry in saves), default=0)
    if arguments.step is not None:
        saves = [entry for entry in saves if entry["step"] == arguments.step][-1:]
        if not saves:
            raise CheckpointError(f"{path!r} has no save of step {arguments.step}")
    if arguments.json:
        print(json.dumps({"log": path, "saves": saves}, indent=1))
    elif arguments.step is not None:
        _print_one(saves[0], limit)
    else:
        _print(saves, limit)
    return 0


def _print(found: list[dict[str, Any]], limit: float) -> None:
    failed = [entry for entry in found if entry["error"] is not None]
    if failed:
        print(f"{len(failed)} of {len(found)} saves failed:")
        for entry in failed[-_FAILED_SHOWN:]:
            print(f"  step {entry['step']}: {shown_name(entry['error'])}")
        if len(failed) > _FAILED_SHOWN:
            print(f"  and {len(failed) - _FAILED_SHOWN} before these")
    clocks = ("stall", "committed", "rate", "of limit", "slowest")
    rows = [("step", "began", "ranks", "size", "stored", *clocks)]
    for entry in found:
        rate, last = entry["rate"], _slowest(entry)
        rows.append(
            (
                str(entry["step"]),
                shown_name(entry["began"][:19]),
                str(entry["ranks"]),
                shown_size(entry["nbytes"]),
                _stored(entry),
                _time(entry["stall_s"]),
                _time(entry["committed_s"]),
                "" if rate is None else shown_rate(rate),
                "" if not rate else f"{rate / limit:.0%}",
                last if entry["error"] is None else "failed",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def _slowest(entry: dict[str, Any]) -> str:
    """Returns the slowest part of a save: a phase of the last rank, or the drain to the root."""
    slowest, drain_s = entry.get("slowest"), entry.get("drain_s")
    if drain_s is not None and (slowest is None or drain_s > slowest["seconds"]):
        return f"drain {shown_time(drain_s)}"
    if slowest is None:
        return ""
    phase = shown_name(slowest["phase"])
    return f"rank {slowest['rank']}, {phase} {shown_time(slowest['seconds'])}"


def _stored(entry: dict[str, Any]) -> str:
    nbytes = entry.get("stored_nbytes")
    return "" if nbytes is None else shown_size(nbytes)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else shown_time(seconds)


def _print_one(entry: dict[str, Any], limit: float) -> None:
    if entry["error"] is not None:
        print(f"step {entry['step']} failed: {shown_name(entry['error'])}")
    began = shown_name(entry["began"])
    stored = f", {_stored(entry)} in files" if _stored(entry) else ""
    print(f"step {entry['step']}, started {began}: {shown_size(entry['nbytes'])}{stored}")
    print(f"{'phase':10}{'median':>12}{'longest':>12}  on rank")
    for name, begin, end in PHASES:
        took = {rank: b - a for rank, (a, b) in _spans(entry, begin, end).items()}
        if took:
            order = sorted(took, key=lambda rank: took[rank])
            middle, last = order[len(order) // 2], order[-1]
            print(f"{name:10}{shown_time(took[middle]):>12}{shown_time(took[last]):>12}  {last}")
    _print_writes(entry)
    for name in ("commit", "drain"):
        if entry.get(f"{name}_s") is not None:
            print(f"{name:10}{shown_time(entry[f'{name}_s']):>12}")
    if entry["committed_s"] is not None:
        stall = _time(entry["stall_s"]) or "unknown"
        print(f"committed after {shown_time(entry['committed_s'])}; the caller was blocked {stall}")
        if entry["rate"]:
            print(f"{shown_rate(entry['rate'])}, {entry['rate'] / limit:.0%} of the limit")
    if _slowest(entry):
        print(f"slowest: {_slowest(entry)}")


def _print_writes(entry: dict[str, Any]) -> None:
    columns = entry["by_rank"]
    waited = [seconds for seconds in columns.get("memory_waited_s", ()) if seconds]
    if waited:
        print(f"copies waited for staging memory, at most {_most(waited)}")
    paced = [seconds for seconds in columns.get("paced_s", ()) if seconds]
    if paced and entry.get("drain_s") is None:  # otherwise the drain waited
        print(f"writes waited for drain_rate or max_writers, at most {_most(paced)}")
    totals = [sum(column) for column in zip(*columns.get("writes", ()), strict=True)]
    if sum(totals):
        ends = [f"up to {shown_size(size)}" for size in entry["write_sizes"][:-1]]
        names = [*ends, "larger"]
        counts = (f"{n} {name}" for n, name in zip(totals, names, strict=True) if n)
        print(f"{sum(totals)} writes: {', '.join(counts)}")


def _most(seconds: list[float]) -> str:
    return shown_time(max(seconds))


def _spans(entry: dict[str, Any], begin: str, end: str) -> dict[int, tuple[float, float]]:
    """Returns each rank's begin and end of a phase, in seconds since the call of save()."""
    columns = entry["by_rank"]
    ends = columns[end]
    begins = columns[begin] if begin else [0.0] * len(ends)
    return {
        rank: (a, max(a, b))
        for rank, (a, b) in enumerate(zip(begins, ends, strict=True))
        if a is not None and b is not None
    }
