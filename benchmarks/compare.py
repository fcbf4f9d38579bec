"""Compare two sets of results of bench.py: what became slower, beyond the noise of the rounds.

This file is responsible for the comparison and its exit status: 1 if anything became slower.

    python benchmarks/compare.py before.json after.json
    python benchmarks/compare.py --before b1.json b2.json --after a1.json a2.json

Several files of a side are taken as rounds of one. Results of two machines cannot be compared;
those of one machine best come from runs in turn, since disks and neighbours change over the hours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# Of rounds of a normal distribution: the deviation from the median absolute deviation, and the
# standard error of a median from the deviation.
MAD_TO_DEVIATION, MEDIAN_ERROR = 1.4826, 1.2533
ERRORS = 2.0  # a difference of so many standard errors is no noise
SAVES = ("returned_s", "stall_s", "durable_s", "load_s")
DRAG = ("lost_s",)
Samples = dict[tuple[str, str], list[float]]


class Change(NamedTuple):
    """A clock of a peer before and after.

    Attributes:
        before, after: the medians in seconds.
        ratio: of the medians.
        noise: by how much of the median before the medians may differ by chance.
    """

    peer: str
    clock: str
    before: float
    after: float
    ratio: float
    noise: float

    def verdict(self, tolerance: float) -> str:
        """Return "slower", "faster" or ""; `tolerance` is a share of the time before."""
        beyond = max(tolerance, self.noise)
        if self.ratio > 1 + beyond:
            return "slower"
        return "faster" if self.ratio < 1 - beyond else ""


def samples(results: Sequence[dict[str, Any]]) -> Samples:
    """Return the rounds of all results, by peer and clock."""
    found: Samples = {}
    for result in results:
        for workload, clocks in (("saves", SAVES), ("drag", DRAG)):
            for row in result["results"].get(workload, {}).get("rows", ()):
                for clock in clocks:
                    if row.get(clock) is not None:
                        found.setdefault((row["peer"], clock), []).append(float(row[clock]))
        for peer, seconds in result["results"].get("small", {}).get("seconds", {}).items():
            found.setdefault((peer, "small_s"), []).extend(seconds)
    return found


def error_of_median(values: Sequence[float]) -> float:
    """Return the standard error of a median; infinite if too few rounds tell."""
    if len(values) < 3:
        return float("inf")
    middle = median(values)
    deviation = MAD_TO_DEVIATION * median(abs(value - middle) for value in values)
    return float(MEDIAN_ERROR * deviation / len(values) ** 0.5)


def changes(before: Samples, after: Samples) -> list[Change]:
    """Return how each clock changed that both sides have."""
    found = []
    for peer, clock in before:
        if (peer, clock) in after:
            a, b = before[peer, clock], after[peer, clock]
            old, new = median(a), median(b)
            error = (error_of_median(a) ** 2 + error_of_median(b) ** 2) ** 0.5
            if old > 0:
                found.append(Change(peer, clock, old, new, new / old, ERRORS * error / old))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return 1 if something became slower."""
    parser = argparse.ArgumentParser(description="Compare results of bench.py.")
    parser.add_argument("files", nargs="*", type=Path, help="one result before, one after")
    parser.add_argument("--before", nargs="+", type=Path, default=[])
    parser.add_argument("--after", nargs="+", type=Path, default=[])
    parser.add_argument("--tolerance", type=float, default=0.03, help="share; default: 0.03")
    options = parser.parse_args(arguments)
    if len(options.files) == 2 and not options.before and not options.after:
        options.before, options.after = options.files[:1], options.files[1:]
    elif options.files or not options.before or not options.after:
        parser.error("give two files, or --before and --after")
    sides = [
        samples([json.loads(path.read_text()) for path in paths])
        for paths in (options.before, options.after)
    ]
    found = changes(*sides)
    if not found:
        sys.exit("compare: the results have no clock in common")
    print(f"{'peer':22}{'clock':12}{'before':>10}{'after':>10}{'ratio':>8}{'noise':>8}")
    for change in found:
        verdict = change.verdict(options.tolerance)
        print(
            f"{change.peer:22}{change.clock:12}{change.before:>9.4f}s{change.after:>9.4f}s"
            f"{change.ratio:>8.3f}{change.noise:>8.3f}  {verdict}".rstrip()
        )
    return int(any(change.verdict(options.tolerance) == "slower" for change in found))


if __name__ == "__main__":
    sys.exit(main())
