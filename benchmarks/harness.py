"""What all benchmarks share: the options of a run, its place, bars and verdicts, and the record.

Progress goes to stderr, the result to stdout, the record to a file of JSON. It must not measure
anything, nor know what was measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "examples")]  # an installed fastckpt comes first

import torch  # noqa: E402

from fastckpt.cli.bench import machine  # noqa: E402
from fastckpt.cli.bench.benchmark import own_directory  # noqa: E402

HIDDEN_OPTIONS = ("--dir", "--out", "--dlio")
# What results and the documents made of them say does not change what is measured.
CODE = (".", ":!benchmarks/results", ":!docs", ":!*.md")
STARTED = time.monotonic()
Row = dict[str, Any]


def progress(line: str) -> None:
    """Say on stderr what was just measured."""
    print(f"[{time.monotonic() - STARTED:7.1f} s] {line}", file=sys.stderr, flush=True)


def words(text: str) -> list[str]:
    """Split a comma-separated option."""
    return [word.strip() for word in text.split(",") if word.strip()]


def options_of(what: str, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=what, formatter_class=shown)
    parser.add_argument("--rounds", type=positive, default=rounds, help="over all compared")
    help_of_dir = "directory on the file system to measure"
    parser.add_argument("--dir", type=Path, default=Path(), help=help_of_dir)
    where = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=where, help="directory for the record")
    return parser


def positive(text: str) -> int:
    """Return a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def choice(parser: argparse.ArgumentParser, flag: str, known: Sequence[str]) -> None:
    """Add an option that picks some of what is known, all by default."""

    def chosen(text: str) -> list[str]:
        if unknown := set(words(text)) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return words(text)

    # A default that is text is parsed, too, and shown as a user would write it.
    parser.add_argument(flag, type=chosen, default=",".join(known), help="some of these")


def place(kind: str, parent: Path) -> AbstractContextManager[Path]:
    """A new directory, which is removed at the end, by signals too."""
    return own_directory(str(parent.resolve()), f"bench-{kind}-")


def environment(directory: Path) -> Row:
    """Return what a reader needs to judge or repeat the run."""
    found = machine.environment(str(directory.resolve()))
    del found["directory"]
    return {
        "filesystem": found.pop("file_system"),
        **found,
        "torch_threads": torch.get_num_threads(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "argv": arguments_without_paths(sys.argv[1:]),
    }


def commit() -> str:
    """Return the commit this file stands in, marked when the tree differs from it."""
    try:
        name, dirty = (
            subprocess.run(
                ["git", *told], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
            for told in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno", "--", *CODE])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + (" with local changes" if dirty else "")


def arguments_without_paths(argv: list[str]) -> list[str]:
    """Return the command line with the values of path options left out."""
    shown, hide = [], False
    for word in argv:
        name, _, value = word.partition("=")
        shown.append("..." if hide else f"{name}=..." if value and name in HIDDEN_OPTIONS else word)
        hide = word in HIDDEN_OPTIONS
    return shown


@dataclass(frozen=True)
class Line:
    """A measurement and what it is held against; `passed` is None where there is no bar, `spread`
    is empty where there is one value, and `limit` and `rival` where goal() had none.
    """

    what: str
    bar: str
    measured: str
    passed: bool | None = None
    spread: str = ""
    limit: str = ""
    rival: str = ""


Values = float | Sequence[float]  # one, or those of all rounds, of which the median counts


def told_values(value: Values, form: str) -> tuple[float, str]:
    """Return the median of values, and the smallest and largest in words if there are several."""
    values = [value] if isinstance(value, (int, float)) else sorted(value)
    spread = f"{values[0]:{form}} to {values[-1]:{form}}" if len(values) > 1 else ""
    return statistics.median(values), spread


def at_most(
    what: str, value: Values, bar: float, form: str = ".3g", unit: str = "", note: str = ""
) -> Line:
    """Hold a value against what it may not exceed; `unit` follows both numbers."""
    middle, spread = told_values(value, form)
    shown = f"{middle:{form}}{unit}{note}"
    return Line(what, f"<= {bar:{form}}{unit}", shown, middle <= bar, spread)


def at_least(what: str, value: Values, bar: float, form: str = ".3g", unit: str = "") -> Line:
    """Hold a value against what it must reach; `unit` follows both numbers."""
    middle, spread = told_values(value, form)
    return Line(what, f">= {bar:{form}}{unit}", f"{middle:{form}}{unit}", middle >= bar, spread)


LIMIT_SHARE, RIVAL_TIME = 0.9, 0.5
Rounds = Mapping[int, float]  # seconds by the number of the round


def goal(
    what: str,
    ours: Rounds,
    limit: tuple[str, Rounds] = ("", {}),
    rival: tuple[str, Rounds] = ("", {}),
    share: float | None = LIMIT_SHARE,
    times: float | None = RIVAL_TIME,
) -> Line:
    """Hold seconds against the limit of the machine and against the best rival, which have names
    and seconds of the same rounds. Either is enough: `share` of the limit's speed, or `times` the
    rival's time. None sets no bar.
    """
    of_limit = sorted(limit[1][each] / ours[each] for each in ours.keys() & limit[1].keys())
    of_rival = sorted(ours[each] / rival[1][each] for each in ours.keys() & rival[1].keys())
    bars, met, shown = [], [], {"limit": "", "rival": ""}
    if of_limit:
        middle, _ = told_values(of_limit, ".2f")
        shown["limit"] = f"{middle:.2f} ({limit[0]}, {seconds(limit[1])})"
        if share is not None:
            bars.append(f">= {share:.2f}")
            met.append(middle >= share)
    if of_rival:
        middle, _ = told_values(of_rival, ".2f")
        shown["rival"] = f"{middle:.2f} x ({rival[0]}, {seconds(rival[1])})"
        if times is not None:
            bars.append(f"<= {times:.2f} x")
            met.append(middle <= times)
    values = sorted(ours.values())
    spread = f"{clock(values[0])} to {clock(values[-1])}" if len(values) > 1 else ""
    passed = any(met) if met else None
    return Line(what, " or ".join(bars), seconds(ours), passed, spread, **shown)


def seconds(values: Rounds) -> str:
    """Return the median in words."""
    return clock(statistics.median(values.values()))


def clock(value: float) -> str:
    """Return seconds in words, short ones in milliseconds."""
    return f"{value:.3f} s" if abs(value) >= 0.1 else f"{1e3 * value:.2f} ms"


def by_round(rows: Sequence[Row], key: str) -> Rounds:
    """Return a column by the number of the round, of the rows that have it."""
    return {row["round"]: row[key] for row in rows if row.get(key) is not None}


def holds(what: str, passed: bool) -> Line:
    """Say whether something that has to be so is."""
    return Line(what, "yes", "yes" if passed else "NO", passed)


def told(what: str, measured: str | Values, form: str = ".3g", unit: str = "") -> Line:
    """Show a measurement that nobody set a bar for, as text or as a value or values."""
    if isinstance(measured, str):
        return Line(what, "", measured)
    middle, spread = told_values(measured, form)
    return Line(what, "", f"{middle:{form}}{unit}", None, spread)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, the first column to the left and the others to the right."""
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(lines: Sequence[Line]) -> str:
    """Return lines as a Markdown table."""
    words = {True: "PASS", False: "**FAIL**", None: ""}
    rows = []
    for line in lines:
        held = [each or ("-" if line.measured else "") for each in (line.limit, line.rival)]
        rows.append([line.what, line.bar, line.measured, line.spread, *held, words[line.passed]])
    heads = ["what", "bar", "median", "min to max", "of the limit", "of the best rival", "verdict"]
    return table(heads, rows)


def median_of(rows: Sequence[Row], key: str) -> float | None:
    """Return the median of one column, None where no row has it."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.median(values) if values else None


def middle(rows: Sequence[Row], key: str) -> float:
    """Return the median of a column that every row has."""
    return statistics.median(row[key] for row in rows)


def spread_of(rows: Sequence[Row], key: str, form: str = ".3f", scale: float = 1.0) -> str:
    """Return the median of one column and in brackets its extremes, a dash where it has none."""
    values = [scale * row[key] for row in rows if row.get(key) is not None]
    if not values:
        return "-"
    middle, spread = told_values(values, form)
    return f"{middle:{form}}{f' ({spread})' if spread else ''}"


def number(value: float | None, form: str = ".3f", suffix: str = "") -> str:
    """Return a number for a table, a dash where there is none."""
    return "-" if value is None else f"{value:{form}}{suffix}"


def recorded(lines: dict[str, list[Line]]) -> dict[str, list[Row]]:
    """Return sections of lines as they go into a record."""
    return {title: [asdict(line) for line in found] for title, found in lines.items()}


def write(record: Row, out: Path, kind: str) -> Path:
    """Write a run's record beside the earlier ones of its kind; returns the file."""
    out.mkdir(parents=True, exist_ok=True)
    stamp = record["environment"]["date"].replace("-", "").replace(":", "").split("+")[0]
    file = out / f"{kind}-{stamp}Z.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    progress(f"wrote {file.name}")
    return file


def text(record: Row) -> str:
    """Return a run as Markdown: where it took place, and what its record has of "lines" and
    "tables", by section, and of what is "missing" or has failed.
    """
    env, parts = record["environment"], [*record.get("notes", ())]
    parts.append(
        f"{env['cpu']}, {env['cpus']} cores, {env['memory_bytes'] / 2**30:.0f} GiB; "
        f"{env['kernel']}, {env['filesystem']}; Python {env['python']}, torch {env['torch']}; "
        f"commit {env['commit']}; {env['date']}"
    )
    for title, lines in record.get("lines", {}).items():
        parts.append(f"### {record.get('titles', {}).get(title, title)}")
        parts += [markdown([Line(**line) for line in lines])] if lines else []
        parts += record.get("tables", {}).get(title, [])
    if record.get("missing"):
        reasons = [f"- {name}: {reason}" for name, reason in record["missing"].items()]
        parts.append("### Not measured\n\n" + "\n".join(reasons))
    if record.get("failures"):
        parts.append("### Failed\n\n" + "\n".join(f"- {line}" for line in record["failures"]))
    return "\n\n".join(parts)


def concluded(record: Row, out: Path | None, kind: str) -> int:
    """Write and print a run; returns the exit status, 1 where a bar was missed."""
    if out is not None:
        write(record, out, kind)
    print(text(record), flush=True)
    lines = (line for found in record["lines"].values() for line in found)
    return int(any(line["passed"] is False for line in lines))
