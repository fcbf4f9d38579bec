"""Spans and metrics of saves, as OpenTelemetry's own SDK exports them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import Checkpointer

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from fastckpt.integrations.opentelemetry import Telemetry
from tests.kit.tiers import WAIT_S, local

__all__ = ["local"]  # a fixture

STATE = {"w": torch.arange(100_000)}


class Exports:
    """A Telemetry, and what it has exported."""

    def __init__(self) -> None:
        self._reader, self._spans = InMemoryMetricReader(), InMemorySpanExporter()
        tracing = TracerProvider()
        tracing.add_span_processor(SimpleSpanProcessor(self._spans))
        self._telemetry = Telemetry(MeterProvider([self._reader]), tracing)

    def of(self, handle: fastckpt.SaveHandle) -> fastckpt.SaveHandle:
        """Returns the handle when the save has ended, and its callbacks have run."""
        ended = threading.Event()
        handle.add_done_callback(self._telemetry)
        handle.add_done_callback(lambda _: ended.set())
        assert ended.wait(WAIT_S)
        return handle

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._spans.get_finished_spans()}

    def points(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        assert data is not None
        (resource,) = data.resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: [*metric.data.data_points] for metric in scope.metrics}


@pytest.fixture
def exports() -> Exports:
    return Exports()


def test_a_save_is_a_span_with_its_phases(exports: Exports, tmp_path: Path) -> None:
    stats = exports.of(fastckpt.save(STATE, tmp_path / "a.pt")).result()
    spans = exports.spans()
    assert set(spans) == {
        f"fastckpt.{n}" for n in ("capture", "copy", "write", "sync", "commit")
    } | {"fastckpt.save"}
    whole = spans["fastckpt.save"]
    assert whole.status.status_code is StatusCode.UNSET and whole.attributes is not None
    assert whole.attributes["fastckpt.path"] == str(tmp_path / "a.pt")
    assert whole.attributes["fastckpt.size"] == stats.nbytes > 800_000
    assert whole.start_time is not None and whole.end_time is not None
    assert (whole.end_time - whole.start_time) / 1e9 == pytest.approx(stats.committed_s)
    for name, span in spans.items():
        assert span.start_time is not None and span.end_time is not None
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time, name
        if span is not whole:
            assert span.parent == whole.get_span_context()


def refuse(*_: object) -> None:
    raise ValueError("loss is not finite")


def test_saves_are_counted_by_their_outcome(exports: Exports, tmp_path: Path) -> None:
    paths = [tmp_path / f"{step}.pt" for step in (1, 2)]
    sizes = [exports.of(fastckpt.save(STATE, path)).result().nbytes for path in paths]
    failing = exports.of(fastckpt.save(STATE, tmp_path / "3.pt", before_commit=refuse))
    with pytest.raises(fastckpt.CheckpointError, match="loss is not finite"):
        failing.result()
    cancelled = fastckpt.save(STATE, tmp_path / "4.pt", drain_rate="1kB/s")
    cancelled.cancel()
    with pytest.raises(fastckpt.SaveCancelled):
        exports.of(cancelled).result()
    points = exports.points()
    outcomes = {point.attributes["outcome"]: point.value for point in points["fastckpt.saves"]}
    assert outcomes == {"committed": 2, "failed": 1, "cancelled": 1}
    assert [point.value for point in points["fastckpt.save.size"]] == [sum(sizes)]
    assert [point.count for point in points["fastckpt.save.durable"]] == [2]
    assert [point.count for point in points["fastckpt.save.stall"]] == [4]
    assert "fastckpt.save.drain" not in points


def test_a_failed_save_has_its_error(exports: Exports, tmp_path: Path) -> None:
    exports.of(fastckpt.save(STATE, tmp_path / "a.pt", before_commit=refuse))
    whole = exports.spans()["fastckpt.save"]
    assert whole.status.status_code is StatusCode.ERROR
    assert "loss is not finite" in str(whole.status.description)
    assert [event.name for event in whole.events] == ["exception"]
    with pytest.raises(fastckpt.CheckpointError, match="an earlier save"):
        fastckpt.save(STATE, tmp_path / "b.pt")  # that it was reported is no answer to it


def test_a_step_that_drains_tells_how_far_the_root_lags(
    exports: Exports,
    disk: Path,
    local: Path,
) -> None:
    with Checkpointer(disk / "run", local=local) as checkpointer:
        stats = exports.of(checkpointer.save(1, STATE)).result()
    (drain,) = exports.points()["fastckpt.save.drain"]
    assert stats.committed_s is not None and stats.local_committed_s is not None
    assert drain.sum == pytest.approx(stats.committed_s - stats.local_committed_s)
    assert "fastckpt.drain" in exports.spans()
