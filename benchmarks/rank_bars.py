"""What a measurement is held against: lines of bars and verdicts, as a Markdown table and as JSON.

It must not measure anything, nor know what was measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import table

Row = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One line of the table; `passed` is None where there is no bar."""

    what: str
    bar: str
    measured: str
    passed: bool | None = None


def at_most(what: str, value: float, bar: float, form: str = ".3g", unit: str = "") -> Line:
    """Hold a value against what it may not exceed; `unit` follows both numbers."""
    return Line(what, f"<= {bar:{form}}{unit}", f"{value:{form}}{unit}", value <= bar)


def at_least(what: str, value: float, bar: float, form: str = ".3g", unit: str = "") -> Line:
    """Hold a value against what it must reach; `unit` follows both numbers."""
    return Line(what, f">= {bar:{form}}{unit}", f"{value:{form}}{unit}", value >= bar)


def holds(what: str, passed: bool) -> Line:
    """Say whether something that has to be so is."""
    return Line(what, "yes", "yes" if passed else "NO", passed)


def told(what: str, measured: str) -> Line:
    """Show a measurement that nobody set a bar for."""
    return Line(what, "", measured)


def markdown(lines: list[Line]) -> str:
    """Return the lines as a Markdown table."""
    words = {True: "PASS", False: "**FAIL**", None: ""}
    heads = ["what", "bar", "measured", "verdict"]
    rows = [[line.what, line.bar, line.measured, words[line.passed]] for line in lines]
    return table(heads, rows)


def surroundings(environment: Row) -> str:
    """Return in one paragraph where a run took place."""
    env = environment
    return (
        f"{env['cpu']}, {env['cores']} cores, {env['memory_bytes'] / 2**30:.0f} GiB; "
        f"Linux {env['kernel']}, {env['filesystem']} ({env['mount_options']}); "
        f"Python {env['python']}, torch {env['torch']}; commit {env['commit']}; {env['date']}"
    )


def as_json(lines: list[Line]) -> list[Row]:
    """Return the lines as they go into a record."""
    return [asdict(line) for line in lines]


def write(record: Row, out: Path, kind: str) -> Path:
    """Write a run's record beside the earlier ones of its kind; returns the file."""
    out.mkdir(parents=True, exist_ok=True)
    stamp = record["environment"]["date"].replace("-", "").replace(":", "").split("+")[0]
    file = out / f"{kind}-{stamp}Z.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    return file
