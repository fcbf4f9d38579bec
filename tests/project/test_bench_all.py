"""Promise: no number in the documents is typed. Their tables are those that the records give, and
the picture is of the same record as the table beside it. `make bench-all` goes on where it was.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

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
    assert len((ROOT / "docs" / "project" / "measurements.md").read_text().splitlines()) <= 300
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
