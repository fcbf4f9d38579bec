"""Published weights: the model of each version, a publisher that says why a version is full, and
where its files are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import WeightPublisher, WeightSubscriber, WeightUpdate
from tests.kit.trees import bits

WAIT_S = 60.0
FIRST = "no step was saved before"  # why the first version of a publisher is full
ROWS = 600
FAST = fastckpt.SaveOptions(durable=False)
Weights = dict[str, torch.Tensor]


def weights(version: int, rows: int = ROWS) -> Weights:
    """The model as trained so far: each version changes some elements of the one before."""
    generator = torch.Generator().manual_seed(1)
    layer = torch.randn(rows, 512, generator=generator)
    for number in range(1, version + 1):
        layer[number % 7 :: 7] += torch.randn(512, generator=generator) * 1e-3
    return {
        "layer.weight": layer,
        "layer.bias": (layer[:, 0] * version).to(torch.bfloat16),
        "seen": torch.tensor(version),
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(bits(one.contiguous()), bits(other.contiguous()))
    )


def assert_is(update: WeightUpdate | None, version: int) -> None:
    assert update is not None and update.version == version
    assert_same(dict(update), weights(version))


def assert_same(found: Any, expected: Weights) -> None:
    assert list(found) == list(expected)
    assert [name for name in expected if not same(found[name], expected[name])] == []


@contextmanager
def publishing(root: Path, **options: Any) -> Iterator[Callable[..., Any]]:
    """`publish(version, state)`: publishes a version and waits for the commit; returns why it was
    stored in full, "" if it was not.
    """
    with WeightPublisher(root, **{"keep": 99, "options": FAST, **options}) as publisher:

        def publish(version: int, state: Any = None) -> str:
            publisher.publish(weights(version) if state is None else state, version).result(WAIT_S)
            return publisher._versions._options.snapshot.why_full  # type: ignore[union-attr]

        yield publish


def looked(subscriber: WeightSubscriber) -> int:
    """Looks for a new version, and whether it has one version's bytes; returns its number or 0."""
    update = subscriber.next()
    if update is None:
        return 0
    assert_same(dict(update), weights(update.version % 50))
    return update.version


def step(root: Path, version: int) -> Path:
    return root / f"step-{version:08d}"


def base_of(root: Path, version: int) -> str | None:
    (writer,) = json.loads((step(root, version) / "manifest.json").read_bytes())["writers"]
    return writer.get("base")


def nonce_of(root: Path, version: int) -> str:
    return json.loads((step(root, version) / "manifest.json").read_bytes())["nonce"]


def shard(root: Path, version: int) -> Path:
    (found,) = step(root, version).glob("rank-*.safetensors*")
    return found


@pytest.fixture
def root(memory: Path) -> Path:
    return memory / "run"


@pytest.fixture
def chain(root: Path) -> Path:
    """Four versions: a full one, and three differences."""
    with publishing(root) as publish:
        assert [publish(version) for version in (1, 2, 3, 4)] == [FIRST, "", "", ""]
    return root
