"""What each rank does in the tests of published weights. Must not know what should come of it."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import torch

import fastckpt
from fastckpt import Memory, WeightPublisher, WeightSubscriber
from fastckpt.formats.manifest import MANIFEST
from tests.crews.group_crew import Member, Outcome, attempt
from tests.crews.steps_states import local, same_bits, spread_by_group
from tests.kit.doubles import Deadly, Recorder, process_on
from tests.kit.inference import VERL, importable
from tests.kit.weights import assert_is, weights

OPTIONS = fastckpt.SaveOptions(durable=False, timeout_s=3.0)


def sharded(member: Member, version: int) -> dict[str, torch.Tensor]:
    """The model of a version, its matrix by rows over all ranks."""
    state = weights(version)
    return state | {"layer.weight": spread_by_group(member, state["layer.weight"])}


def publisher(member: Member, root: str, **options: Any) -> WeightPublisher:
    return WeightPublisher(root, group=member.group, keep=99, options=OPTIONS, **options)


def publish(member: Member, root: str, versions: list[int]) -> list[str]:
    """Publishes versions; returns why each was stored in full on this rank."""
    whys = []
    with publisher(member, root) as publishing:
        for version in versions:
            publishing.publish(sharded(member, version), version).result()
            whys.append(publishing._versions._options.snapshot.why_full)  # type: ignore[union-attr]
    return whys


def read_parts(member: Member, root: str) -> list[tuple[int, bool]]:
    """Reads this rank's rows of the newest version, and applies them; its number, and whether all
    is of it.
    """
    model = {name: torch.zeros_like(its) for name, its in sharded(member, 1).items()}
    with WeightSubscriber(root, like=model) as subscriber:
        found = []
        while (update := subscriber.next()) is not None:
            update.apply(model)
            expected = sharded(member, update.version)
            is_same = all(same_bits(local(model[name]), local(expected[name])) for name in expected)
            found.append((update.version, is_same))
        return found


def fail_in_the_second(member: Member, root: str) -> list[Any]:
    """Publishes four versions, of which the second fails on the last rank alone: its state cannot
    be captured. Returns the kinds of errors, and why versions were stored in full.
    """
    ends: list[Any] = []
    with publisher(member, root) as publishing:
        for version in (1, 2, 3, 4):
            state = sharded(member, version)
            if version == 2 and member.rank == member.world_size - 1:
                state["layer.weight"] = torch.zeros(3)  # another kind of tensor than the others'

            def published(version: int = version, state: Any = state) -> Any:
                return publishing.publish(state, version).result()

            outcome: Outcome = attempt(published)
            why = publishing._versions._options.snapshot.why_full  # type: ignore[union-attr]
            ends.append(why if outcome.error is None else type(outcome.error).__name__)
    return ends


def fail_alone(member: Member, root: str) -> list[str]:
    """Publishes a version that the last rank cannot publish, and one that all can; the errors."""
    ends = []
    options = replace(OPTIONS, timeout_s=100.0)
    with WeightPublisher(root, group=member.group, options=options) as publishing:
        for version in (1, 2):
            state = weights(1)
            if version == 1 and member.rank == member.world_size - 1:
                state["layer.weight"] = state["layer.weight"].to_sparse()

            def published(version: int = version, state: Any = state) -> Any:
                return publishing.publish(state, version).result()

            ends.append(str(attempt(published).error))
    return ends


def die_publishing(member: Member, root: str, dying: int, count: int) -> list[Any]:
    """Publishes a version, and a second one, in which a rank dies at one of its operations."""
    storage = Deadly(lambda number, _operation: number >= due)
    due = 1 << 60
    with process_on(storage):
        publishing = publisher(member, root)
        publishing.publish(sharded(member, 1), 1).result()
        if member.rank == dying:
            due = len(storage.log) + count
        ended = attempt(lambda: publishing.publish(sharded(member, 2), 2).result())
        if member.rank == dying:  # the save had fewer operations
            os.kill(os.getpid(), signal.SIGKILL)
        attempt(publishing.close)
        return [None if ended.error is None else type(ended.error).__name__]


def send_by_verl(member: Member, root: str) -> dict[str, float]:
    """Sends a version as an actor rank of verl does; returns the metrics."""
    with importable(VERL, "verl"):
        from fastckpt.integrations import verl

        engine = verl.Engine(1 << 20, is_master=member.rank == 0, root=root, options=OPTIONS)
        metrics = asyncio.run(engine.send_weights(iter(weights(1).items()), global_steps=1))
        engine.close()
        return metrics


def publish_on_nodes(
    member: Member, root: str, nodes: list[str], versions: list[int]
) -> list[tuple[int, list[str]]]:
    """Publishes versions to the memory of a node for each rank, and reads each one there. Returns
    the numbers that were read, and which of their files, but for the manifest, were opened in the
    root.
    """
    storage, node, found = Recorder(by_engine=True), nodes[member.rank], []
    with (
        process_on(storage),
        publisher(member, root, local=Memory(directory=node, budget="64MiB")) as publishing,
        WeightSubscriber(root, local=node) as subscriber,
    ):
        for version in versions:
            handle = publishing.publish(sharded(member, version), version)
            assert handle.wait_memory(60)
            handle.result()
            storage.log.clear()
            update = subscriber.wait_for(version, timeout_s=60)
            assert_is(update, version)
            opened = [its.path for its in storage.log if its.name == "open regular"]
            found.append(
                (
                    version,
                    [
                        path
                        for path in opened
                        if path.startswith(f"{root}/step-") and not path.endswith(MANIFEST)
                    ],
                )
            )
    return found
