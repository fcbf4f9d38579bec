"""Promise: no number in the documents is typed. Their tables are those that the records give, and
the picture is of the same record as the table beside it. `make bench-all` goes on where it was.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import bench_all
import documents
import harness
from parts import PARTS, Part


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_records(document: Path) -> None:
    text = document.read_text()
    assert documents.MARKED.search(text)
    told = (
        f"{document.name} is not what the records give: python benchmarks/documents.py writes it; "
        "a record that is not to be shown does not belong into benchmarks/results"
    )
    assert documents.made(text) == text, told


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda path: path.name)
def test_a_changed_number_is_found_in_every_table(document: Path) -> None:
    text = document.read_text()
    for table in documents.MARKED.finditer(text):
        numbers = [*re.finditer(r"\d", table[0])]
        for number in (numbers[len(numbers) // 2], numbers[-1]):
            at, other = table.start() + number.start(), str((int(number[0]) + 1) % 10)
            assert documents.made(f"{text[:at]}{other}{text[at + 1 :]}") == text


def record(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / "all" / f"{name}.json").read_text())


def median(rows: Any, name: str, key: str) -> float:
    """Of a clock of one way, by other code than that of the documents."""
    of = [row.get(key) for row in rows if name in (row.get("peer"), row.get("name"))]
    return statistics.median(seconds for seconds in of if seconds is not None)


def cells(document: str, name: str) -> dict[str, list[str]]:
    """The rows of a table by their first cell."""
    text = (ROOT / document).read_text()
    (table,) = (match[0] for match in documents.MARKED.finditer(text) if match[2] == name)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


CLOCKS = {"state may change": "stall_s", "durable": "durable_s", "cold load": "load_s"}
# Of the table for users: what is measured, the record, the names of ours and of the rivals in it,
# and the clock.
DCP, LOAD, WEIGHTS = ["torch async"], ["torch loads torch's"], "1 GiB of weights, 3 % changed"
COMPARED = [
    ("DCP, two ranks: async_save returns", "dcp", "fastckpt async", DCP, "stall_s"),
    ("DCP, two ranks: async_save durable", "dcp", "fastckpt async", DCP, "committed_s"),
    ("DCP, two ranks: cold load", "dcp", "fastckpt loads its own", LOAD, "loaded_s"),
    ("Hugging Face export, four ranks: durable", "export", "export", ["torch"], "committed_s"),
    (f"{WEIGHTS}: durable", "weights", "publish", ["whole", "gaps"], "committed_s"),
    (f"{WEIGHTS}: read", "weights", "read publish", ["read whole", "read gaps"], "read_s"),
]


def test_medians_of_the_records_are_the_numbers_that_users_read() -> None:
    shown = cells("docs/project/measurements.md", "compare")
    for name, kind, what in (("saves", "saves", "1 GiB"), ("many", "many", "many small tensors")):
        rows = record(name)["results"][kind]["rows"]
        peers = {row["peer"] for row in rows if "error" not in row}
        rivals = {name for name in peers if not name.startswith(("fastckpt", "torch.save"))}
        for clock, key in CLOCKS.items():
            ours, base = (median(rows, name, key) for name in ("fastckpt", "torch.save"))
            timed = {row["peer"] for row in rows if row.get(key) is not None}
            best = min(median(rows, name, key) for name in rivals & timed)
            row = shown[f"{what}: {clock}"]
            assert [row[0], row[1], row[2][:5]] == [f"{ours:.3f}", f"{base:.3f}", f"{best:.3f}"]
    for what, name, ours, rivals, key in COMPARED:
        rows = record(name)["results"]
        best = min(median(rows, rival, key) for rival in rivals)
        mine = median(rows, ours, key)
        assert [shown[what][0], shown[what][2][:5]] == [f"{mine:.3f}", f"{best:.3f}"]


def test_the_table_of_the_readme_has_the_medians_of_the_record() -> None:
    rows, shown = record("saves")["results"]["saves"]["rows"], cells("README.md", "readme")
    ours, base = ([median(rows, it, key) for key in CLOCKS.values()] for it in WAYS)
    assert shown["**fastckpt**, 1 GiB, two CPU cores"] == [f"**{each:#.2g} s**" for each in ours]
    text = (ROOT / "README.md").read_text()
    times = [f"{theirs / mine:.2g} x" for mine, theirs in zip(ours, base, strict=True)]
    assert f"| torch.save, torch.load | {' | '.join(times)} |" in text


def test_the_bars_of_saves_have_the_medians_of_the_ratios_of_rounds() -> None:
    found, text = record("saves")["results"]["saves"], (ROOT / "docs/project/bars.md").read_text()
    for clock, act in (("durable_s", "write"), ("load_s", "read")):
        rounds: dict[str, list[float]] = {}
        for row in sorted(found["rows"], key=lambda row: row["round"]):
            rounds.setdefault(row["peer"], []).append(row.get(clock, float("inf")))
        limit = [found["bytes"] / each[act] for each in found["limits"]]
        others = {name: its for name, its in rounds.items() if not name.startswith("fastckpt")}
        best, theirs = min(others.items(), key=lambda item: statistics.median(item[1]))
        ours = rounds["fastckpt"]
        share = statistics.median(a / b for a, b in zip(limit, ours, strict=True))
        times = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        assert (
            f"| {share:.2f} (fio {act}, {statistics.median(limit):.3f} s) | {times:.2f} x" in text
        )
        assert f"| {times:.2f} x ({best}, {statistics.median(theirs):.3f} s) |" in text


WAYS = ("fastckpt", "torch.save")


@pytest.mark.parametrize(
    ("ours", "limit", "rival", "passed"),
    [(1.0, 0.9, 1.0, True), (1.0, 0.5, 2.0, True), (1.0, 0.89, 1.9, False)],
)
def test_a_goal_is_met_at_the_limit_or_at_half_the_time_of_the_best_rival(
    ours: float, limit: float, rival: float, passed: bool
) -> None:
    rounds = [{0: each, 1: 2 * each, 2: 3 * each} for each in (ours, limit, rival)]
    line = harness.goal("a save", rounds[0], ("fio", rounds[1]), ("torch", rounds[2] | {7: 1e9}))
    assert (line.passed, line.measured, line.spread) == (passed, "2.000 s", "1.000 s to 3.000 s")
    assert line.limit.startswith(f"{limit:.2f} (fio") and line.rival.startswith(
        f"{1 / rival:.2f} x"
    )
    assert harness.goal("a save", rounds[0]).passed is None


@pytest.mark.parametrize(
    "document", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda path: path.name
)
def test_no_document_quotes_a_record_beside_the_tables(document: Path) -> None:
    assert not re.findall(r"results/\S+\.json", documents.MARKED.sub("", document.read_text()))


def test_the_picture_is_of_the_record_of_saves() -> None:
    record = documents.record_of("saves")
    assert record is not None
    for suffix in (".svg", ".png"):
        told = documents.PICTURE.with_suffix(suffix).read_bytes()
        assert documents.origin(record).encode() in told


def test_measurements_are_short_and_every_part_is_shown() -> None:
    texts = [document.read_text() for document in documents.DOCUMENTS]
    assert len((ROOT / "docs" / "project" / "measurements.md").read_text().splitlines()) <= 320
    shown = {
        name
        for text in texts
        for match in documents.MARKED.finditer(text)
        for name in match[2].rpartition(":")[2].split(",")
    }
    assert {part.name for part in PARTS} <= shown


def test_a_part_with_a_record_of_this_code_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, file = Part("one", "one.py --gib 1", "--gib 0.1"), tmp_path / "one.json"
    now, command = "0" * 40, part.command("--rounds 3")
    monkeypatch.setattr(harness, "commit", lambda: now)
    assert command == "python benchmarks/one.py --gib 1 --rounds 3"
    assert not bench_all.is_done(command, file)
    file.write_text(json.dumps({"command": command, "environment": {"commit": now}}))
    assert bench_all.is_done(command, file)
    assert not bench_all.is_done(part.command(""), file)
    monkeypatch.setattr(harness, "commit", lambda: f"{now} with local changes")
    assert not bench_all.is_done(command, file)
    monkeypatch.setattr(harness, "commit", lambda: "1" * 40)
    assert not bench_all.is_done(command, file)


def test_results_and_documents_are_no_local_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*told: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *told], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)

    git("init", "-q")
    for name in ("benchmarks/results/all/saves.json", "docs/measurements.md", "code.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    git("add", ".")
    git("commit", "-qm", "all")
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    commit = harness.commit()
    (tmp_path / "benchmarks/results/all/saves.json").write_text("after")
    (tmp_path / "docs/measurements.md").write_text("after")
    assert harness.commit() == commit and len(commit) == 40
    (tmp_path / "code.py").write_text("after")
    assert harness.commit() == f"{commit} with local changes"
