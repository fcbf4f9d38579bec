"""OpenTelemetry's SDK is told what each commit took, in its own names and units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from fastckpt.integrations.opentelemetry import metrics


def points(reader: InMemoryMetricReader) -> dict[str, tuple[str, Any]]:
    """Returns the unit and the only data point of each instrument, by its name."""
    data = reader.get_metrics_data()
    assert data is not None
    (resource,) = data.resource_metrics
    (scope,) = resource.scope_metrics
    return {metric.name: (metric.unit, *metric.data.data_points) for metric in scope.metrics}


def test_each_commit_is_told(disk: Path) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    state = {"w": torch.ones(1 << 20)}
    with fastckpt.Checkpointer(
        disk, on_commit=metrics(provider.get_meter("fastckpt"))
    ) as checkpointer:
        stats = [checkpointer.save(step, state).result(60) for step in (3, 4)]
    found = points(reader)
    assert found["fastckpt.save.count"][1].value == 2
    assert found["fastckpt.save.size"][0] == "By"
    assert found["fastckpt.save.size"][1].value == sum(its.nbytes for its in stats)
    assert found["fastckpt.save.step"][1].value == 4
    unit, committed = found["fastckpt.save.committed"]
    assert unit == "s" and committed.count == 2
    assert committed.sum == pytest.approx(sum(its.committed_s or 0 for its in stats))
    assert found["fastckpt.save.stall"][1].sum > 0
    provider.shutdown()


def test_without_an_sdk_nothing_is_sent(disk: Path) -> None:
    with fastckpt.Checkpointer(disk, on_commit=metrics()) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(60)
