"""The benchmark of bursts: what it makes of its measurements, and one short run where it can.

Responsible for its coming to an end, for what it says, and for devices that are gone afterwards.
Must not judge times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from tests.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import burst
from burst_plot import PANELS, svg
from rank_devices import reason_missing


def rows() -> list[dict[str, object]]:
    times = {"stall_s": 0.1, "committed_s": 2.0, "drained_s": 2.5, "p50_s": 0.001}
    return [
        times | {"way": way, "round": number, "p99_s": p99 * (1 + number), "idle_p99_s": 0.004}
        for number in range(3)
        for way, p99 in (("sync", 0.1), ("async", 0.2), ("async, paced", 0.0025))
    ]


def test_medians_and_the_bar() -> None:
    found = burst.summary(rows())
    assert found["async"]["p99_s"] == pytest.approx(0.4)
    assert found["async, paced"]["p99_ratio"] == pytest.approx(1.25)
    *_, bar = burst.lines(found)
    assert bar.passed and bar.bar == "<= 1.5"


def test_the_plot_is_an_image_of_all_ways() -> None:
    root = xml.fromstring(svg(burst.summary(rows())))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert all(texts.count(way) == len(PANELS) for way in ("sync", "async", "async, paced"))


def test_tiers_are_compared_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tiered:
        def __init__(self, root: str, *, local: str | None = None) -> None: ...

    monkeypatch.setattr(burst.fastckpt, "Checkpointer", Tiered)
    found = burst.ways(100e6, 2, "/nvme")
    assert [*found][-2:] == ["tiered", "tiered, paced"]
    assert found["tiered, paced"] == {"local": "/nvme", "drain_rate": 100e6}


@pytest.mark.multiprocess
@pytest.mark.torture
def test_a_short_run(tmp_path: Path) -> None:
    missing = reason_missing()
    if missing is not None:
        pytest.skip(missing)
    command = [sys.executable, str(ROOT / "benchmarks" / "burst.py"), "--size", "8"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--out", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "| async, paced |" in done.stdout, done.stdout + done.stderr
    (file,) = tmp_path.glob("burst-*.json")
    assert len(json.loads(file.read_text())["rows"]) >= 3 and file.with_suffix(".svg").exists()
    attached = subprocess.run(["losetup", "-a"], capture_output=True, text=True).stdout
    assert "burst-" not in attached
