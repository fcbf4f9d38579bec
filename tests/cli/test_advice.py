"""The model behind `fastckpt advise`: that it gives what others published, and what it must obey.

This file is responsible for the numbers of docs/project/scale.md, each of which is computed here
and looked up there, for properties that any such model has, and for inputs that are refused. It
must not know how advice is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastckpt import Checkpointer
from fastckpt.cli.advise import (
    BYTES_PER_PARAMETER,
    CALL_S,
    FAILURES_PER_GPU_HOUR,
    Advice,
    Job,
    advise,
    best_interval_s,
    lost_share,
)
from tests.kit.paths import ROOT

GIB, TIB = 1 << 30, 1 << 40
LLAMA_MTBF = 54 * 24 * 3600 / 419
BAR = 0.2


def job(**changed: Any) -> Job:
    """A 70B model on 64 nodes with 8 GPUs each."""
    inputs: dict[str, Any] = {"nbytes": 980e9, "ranks": 512, "nodes": 64, "mtbf_s": 356_000.0}
    return Job(**inputs | changed)


def lug(**changed: Any) -> Advice:
    inputs: dict[str, Any] = {
        "nbytes": 4.3 * TIB,
        "ranks": 384,
        "nodes": 48,
        "mtbf_s": LLAMA_MTBF,
        "network_rate": 6e9,
        "torch_rate": 6e9,
        "torch_writers": 12,
    }
    return advise(Job(**inputs | changed))


def uneven_lug() -> float:
    """The same by few writers, where all take as long as the fullest: the first of 12 stages of
    Nemotron-4 340B (arXiv 2406.11704), which has one of two embeddings beside its layers.
    """
    embedding = 256_000 * 18432 / 340e9
    fullest = (1 - 2 * embedding) / 12 + embedding
    return lug(nbytes=12 * fullest * 4.3 * TIB).torch_s


def aistore(nodes: int, clients: int, ranks: int, gib: float) -> float:
    """MLPerf Storage v3.0 on NVIDIA's AIStore: a save to nodes with one 100-gigabit port each."""
    rates = {"network_rate": 12.5e9, "ost_rate": 12.5e9}
    return advise(Job(gib * GIB, ranks, clients, LLAMA_MTBF, osts=nodes, **rates)).root_s


class Case(NamedTuple):
    """Something published, and what the model says; `text` is how the document shows that."""

    name: str
    predict: Callable[[], float]
    published: float
    text: str
    beyond: bool = False  # misses the bar, and docs/project/scale.md says why


CASES = [
    Case("340B size, TiB", lambda: 340e9 * BYTES_PER_PARAMETER / TIB, 4.3, "4.33 TiB"),
    Case("340B all writers, s", lambda: lug().root_s - 0.5, 16.0, "16.4 s"),
    Case("340B all writers, GB/s", lambda: lug().root_rate / 1e9, 275.0, "288 GB/s"),
    Case("340B few writers, GB/s", lambda: 4.3 * TIB / lug().torch_s / 1e9, 75.0, "72 GB/s"),
    Case("340B few writers, s", lambda: lug().torch_s, 90.0, "65.7 s", beyond=True),
    Case("340B few writers, uneven, s", uneven_lug, 90.0, "74.8 s"),
    Case("8B size, GiB", lambda: 8.03e9 * BYTES_PER_PARAMETER / GIB, 105.0, "104.7 GiB"),
    Case("70B size, GiB", lambda: 70.6e9 * BYTES_PER_PARAMETER / GIB, 912.0, "920.5 GiB"),
    Case("405B size, GiB", lambda: 405.8e9 * BYTES_PER_PARAMETER / GIB, 5292.2, "5291.0 GiB"),
    Case("1T, AIStore, 3 nodes, s", lambda: aistore(3, 8, 1024, 15426.6), 459.8, "442.2 s"),
    Case("1T, AIStore, 12 nodes, s", lambda: aistore(12, 16, 1024, 15426.6), 116.4, "110.9 s"),
    Case("405B, AIStore, 12 nodes, s", lambda: aistore(12, 16, 512, 5292.2), 46.5, "38.4 s"),
    Case("Llama 3 MTBF, h", lambda: 1 / FAILURES_PER_GPU_HOUR / 16384, 3.09, "3.09 h"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_published_cases_are_reproduced(case: Case) -> None:
    deviation = case.predict() / case.published - 1
    assert (abs(deviation) > BAR) == case.beyond
    number, unit = case.text.split(" ")
    decimals = len(number.partition(".")[2])
    assert f"{case.predict():.{decimals}f}" == number
    row = next(
        line
        for line in (ROOT / "docs" / "project" / "scale.md").read_text("utf-8").splitlines()
        if line.startswith("|") and case.text in line and f"{deviation:+.1%}" in line
    )
    assert row.count("|") == 7, unit


def test_bottlenecks() -> None:
    assert lug().bottleneck == "network of the nodes"
    assert lug(osts=20).bottleneck == "storage targets"
    assert lug(d2h_rate=1e8).bottleneck == "GPU-to-host copies"
    assert lug(writer_rate=1e8).bottleneck == "writing processes"
    assert lug(nvme_rate=1e9).bottleneck == "local NVMe"


def test_staging_memory_that_is_too_small_shows_as_stall() -> None:
    ample = advise(job(staging_bytes=job().node_bytes))
    assert ample == advise(job())
    half = advise(job(staging_bytes=job().node_bytes / 2))
    drain_s = max(half.stages.values())
    assert half.staged_s == pytest.approx(drain_s / 2)
    assert half.root_s == pytest.approx(ample.root_s)  # who waits for whom, the bytes do not care
    none = advise(job(staging_bytes=0))
    assert none.staged_s == pytest.approx(drain_s)


def test_local_disks_commit_early_and_the_storage_late() -> None:
    without, local = advise(job()), advise(job(nvme_rate=20e9))
    assert without.local_s is None and local.local_s is not None
    assert local.local_s < without.root_s < local.root_s
    assert local.root_s == pytest.approx(local.local_s + without.root_s)


def test_step_fence_hides_copies_behind_a_step() -> None:
    unknown, known = advise(job()), advise(job(step_s=5.0))
    assert unknown.interval_steps is None
    assert unknown.stall_step_s == unknown.stall_call_s
    assert known.stall_step_s == CALL_S
    assert known.interval_steps is not None
    assert known.interval_steps * 5 >= known.interval_s > (known.interval_steps - 1) * 5
    assert known.lost_share < unknown.lost_share


def test_disk_space_that_retention_needs() -> None:
    without = advise(job())
    assert without.disk_bytes is None
    assert without.growth_bytes_per_day == pytest.approx(980e9 * 86400 / without.interval_s)
    kept = advise(job(keep_last=3, keep_best=2))
    assert (kept.disk_bytes, kept.growth_bytes_per_day) == (6 * 980e9, 0)
    assert advise(job(keep_last=3, keep_every=500)).growth_bytes_per_day is None
    every = advise(job(keep_last=3, keep_every=500, step_s=10.0))
    assert every.growth_bytes_per_day == pytest.approx(980e9 * 86400 / 5000)
    often = advise(job(keep_last=3, keep_every=1, step_s=1.0))
    assert often.growth_bytes_per_day == pytest.approx(980e9 * 86400 / often.interval_s), (
        "no more stay than are saved"
    )


def test_one_rank() -> None:
    found = advise(Job(nbytes=1e9, ranks=1, nodes=1, mtbf_s=1e6, writer_rate=1e9, torch_rate=1e9))
    assert found.root_s == pytest.approx(1.5)
    assert found.torch_s == pytest.approx(1.0)


def test_the_drain_ends_with_the_interval(tmp_path: Path) -> None:
    found = advise(job(step_s=5.0))
    writing_s = job().node_bytes / found.drain_rate
    assert writing_s + 0.5 == pytest.approx(found.interval_s)
    with Checkpointer(tmp_path, drain_rate=found.drain_rate):
        pass


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nbytes": 0}, "nbytes is 0, must be finite and above 0"),
        ({"nbytes": nan}, "nbytes is nan"),
        ({"ranks": 0}, "ranks is 0"),
        ({"nodes": 513}, "nodes is 513, must be at most the number of ranks (512)"),
        ({"mtbf_s": inf}, "mtbf_s is inf"),
        ({"osts": 0}, "osts is 0"),
        ({"staging_bytes": -1}, "staging_bytes is -1, must be finite and 0 or more"),
        ({"torch_writers": 513}, "torch_writers is 513"),
        ({"step_s": inf}, "step_s is inf"),
        ({"keep_last": 0}, "keep_last is 0, must be finite and above 0"),
        ({"keep_best": 1}, "keep_every and keep_best need keep_last"),
    ],
)
def test_wrong_inputs_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        job(**changed)
    assert message in str(caught.value)


rates = st.floats(1e7, 1e12)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    nodes = draw(st.integers(1, 3000))
    ranks = draw(st.integers(nodes, nodes * 16))
    return Job(
        nbytes=draw(st.floats(1e6, 1e15)),
        ranks=ranks,
        nodes=nodes,
        mtbf_s=draw(st.floats(60, 1e8)),
        d2h_rate=draw(rates),
        writer_rate=draw(rates),
        network_rate=draw(rates),
        osts=draw(st.none() | st.integers(1, 2000)),
        ost_rate=draw(rates),
        nvme_rate=draw(st.none() | rates),
        staging_bytes=draw(st.none() | st.floats(0, 1e13)),
        step_s=draw(st.just(0.0) | st.floats(1e-3, 100)),
        commit_s=draw(st.floats(0, 10)),
        restart_s=draw(st.floats(0, 3600)),
        torch_writers=draw(st.integers(1, ranks)),
    )


SLACK = 1 + 1e-6


@given(jobs())
def test_what_always_holds(given_job: Job) -> None:
    found = advise(given_job)
    assert found.interval_s >= found.root_s  # saves follow each other
    assert found.root_s * SLACK >= found.staged_s >= given_job.rank_bytes / given_job.d2h_rate
    assert found.local_s is None or found.staged_s <= found.local_s <= found.root_s
    assert found.stall_step_s <= found.stall_call_s <= found.staged_s + CALL_S
    assert found.root_s * SLACK >= max(found.stages.values()) == found.stages[found.bottleneck]
    assert 0 < found.lost_share <= 1
    assert found.drain_rate <= given_job.node_bytes / (given_job.nbytes / found.root_rate) * SLACK
    alone = advise(replace(given_job, torch_writers=1))
    assert found.torch_s <= alone.torch_s * SLACK


@given(jobs(), st.sampled_from([1, 2, 10]), st.floats(1, 100))
def test_more_of_anything_is_never_slower(given_job: Job, times: int, factor: float) -> None:
    before = advise(given_job)
    changes: list[dict[str, Any]] = [
        {name: getattr(given_job, name) * factor}
        for name in ("d2h_rate", "writer_rate", "network_rate", "ost_rate")
    ]
    if given_job.osts is not None:
        changes += [{"osts": given_job.osts * times}, {"osts": None}]
    if given_job.nvme_rate is not None:
        changes.append({"nvme_rate": given_job.nvme_rate * factor})
    if given_job.staging_bytes is not None:
        changes += [{"staging_bytes": given_job.staging_bytes * factor}, {"staging_bytes": None}]
    for changed in changes:
        after = advise(replace(given_job, **changed))
        for name in ("root_s", "staged_s", "stall_call_s", "stall_step_s", "torch_s"):
            assert getattr(after, name) <= getattr(before, name) * SLACK, (changed, name)


@given(jobs(), st.floats(0.01, 100))
def test_the_interval_is_the_best(given_job: Job, factor: float) -> None:
    found = advise(given_job)
    least_s = max(found.root_s, found.stall_step_s)  # saves follow each other
    other_s = max(least_s, found.interval_s * factor)
    times = (found.stall_step_s, found.root_s)
    assert found.interval_s == best_interval_s(*times, given_job.mtbf_s)
    assert found.lost_share <= lost_share(given_job, *times, other_s) * SLACK
