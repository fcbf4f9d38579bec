"""verl's contract of a checkpoint engine: what the actor sends arrives whole at each rollout
worker, as the version that was asked for.

On verl's own base class where it is installed, else on a double of it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fastckpt import CheckpointError
from tests.crews import weights_bodies as bodies
from tests.crews.group_crew import Crew
from tests.kit.inference import VERL, importable
from tests.kit.saves import wait_until
from tests.kit.weights import FAST, Weights, assert_same, publishing, shard, weights

BUCKET = 1 << 20


@pytest.fixture(scope="module")
def verl() -> Iterator[ModuleType]:
    """fastckpt's adapter."""
    with importable(VERL, "verl"):
        from fastckpt.integrations import verl

        yield verl
    del sys.modules[verl.__name__]


@pytest.fixture
def make(verl: ModuleType, memory: Path) -> Iterator[Callable[..., Any]]:
    """Makes an engine as verl does."""
    made: list[Any] = []

    def engine(**options: Any) -> Any:
        options = {"root": str(memory / "run"), "timeout_s": 0.0, **options}
        made.append(verl.CheckpointEngineRegistry.new("fastckpt", bucket_size=BUCKET, **options))
        return made[-1]

    yield engine
    for each in made:
        each.close()


async def received(engine: Any, version: int | None = None) -> Weights:
    return {name: tensor async for name, tensor in engine.receive_weights(global_steps=version)}


def test_what_the_actor_sends_arrives(make: Callable[..., Any], memory: Path) -> None:
    actor, other = make(is_master=True, keep=1, full_every=1, options=FAST), make()
    rollouts = [make(timeout_s=60.0), make(timeout_s=60.0)]
    for each in (actor, other, *rollouts):
        assert each.prepare() == {}
        each.init_process_group()
    assert type(actor).build_topology(2, 2, [{}] * 4) == ({}, {})
    assert actor.wire_format == "named_tensors"

    async def sync(version: int) -> list[Any]:
        return await asyncio.gather(
            *(received(rollout, version) for rollout in rollouts),
            actor.send_weights(iter(weights(version).items()), global_steps=version),
            other.send_weights(iter(weights(version).items()), global_steps=version),
        )

    for version in (3, 4, 5):
        *arrived, metrics, of_other = asyncio.run(sync(version))
        for found in arrived:
            assert_same(found, weights(version))
        assert 0 < metrics["checkpoint_engine/payload_mbytes"] < 2 and of_other == {}
        for each in (actor, other, *rollouts):
            each.finalize()
    wait_until(lambda: [path.name for path in (memory / "run").glob("step-*")] == ["step-00000005"])


def test_what_an_earlier_run_published_with_the_number_is_not_taken(
    make: Callable[..., Any], memory: Path
) -> None:
    with publishing(memory / "run") as publish:
        publish(3)
    actor, rollout = make(is_master=True, options=FAST), make(timeout_s=60.0)

    async def sync(sent: Weights, version: int | None) -> Weights:
        for each in (actor, rollout):
            each.prepare()
        receiving = asyncio.create_task(received(rollout, version))
        await asyncio.sleep(0)  # it looks before the actor publishes
        await actor.send_weights(iter(sent.items()), global_steps=version)
        return await receiving

    for sent, version in ((4, 3), (5, 3), (6, None), (7, None)):
        assert_same(asyncio.run(sync(weights(sent), version)), weights(sent))


def test_without_steps_the_next_version_is_sent_and_the_newest_received(
    make: Callable[..., Any],
) -> None:
    actor, rollout = make(is_master=True, options=FAST), make()
    for version in (1, 2):
        asyncio.run(actor.send_weights(iter(weights(version).items())))
        assert_same(asyncio.run(received(rollout)), weights(version))

    async def cached() -> Weights:
        return {name: tensor async for name, tensor in rollout.get_weights()}

    assert_same(asyncio.run(cached()), weights(2))


def test_another_version_or_a_damaged_one_is_an_error(
    make: Callable[..., Any], memory: Path
) -> None:
    rollout = make()
    with pytest.raises(CheckpointError, match="must be version 1; found no version"):
        asyncio.run(received(rollout, 1))
    with publishing(memory / "run") as publish:
        publish(1)
        with pytest.raises(CheckpointError, match="must be version 2; found version 1"):
            asyncio.run(received(rollout, 2))
        assert_same(asyncio.run(received(rollout, 1)), weights(1))
        publish(2)
    path = shard(memory / "run", 2)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="must be version 2"):
        asyncio.run(received(rollout, 2))


@pytest.mark.multiprocess
def test_the_first_actor_of_a_job_publishes_alone(
    crew: Callable[[int], Crew], memory: Path
) -> None:
    root = str(memory / "run")
    (first, second) = crew(2)(bodies.send_by_verl, root)
    assert first["checkpoint_engine/payload_mbytes"] > 0 and second == {}
    with publishing(memory / "run") as publish:
        publish(9)  # the root is free: the engine was closed


def test_a_tensor_that_cannot_be_published_is_named(make: Callable[..., Any]) -> None:
    actor = make(is_master=True, options=FAST)
    with pytest.raises(TypeError, match=r"'layer.weight'"):
        sparse = torch.ones(3, 3).to_sparse()
        asyncio.run(actor.send_weights(iter([("layer.weight", sparse)]), global_steps=1))
