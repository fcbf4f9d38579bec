"""Loads that ranks share on GPUs: blocks are broadcast among devices, and stay there.

On the devices of kit/accelerator.py; gloo, which knows no such devices, broadcasts what they hold
in their place. Must not know how a file is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastckpt
from fastckpt.engine import broadcast_read_stream as exchange
from fastckpt.errors import CorruptCheckpoint
from tests.crews.group_crew import Crew, Member, Nursery, Outcome
from tests.kit.accelerator import KIND
from tests.kit.cuda_stub import CudaStub
from tests.kit.devices import on_device

pytestmark = pytest.mark.multiprocess
RANKS = 3
MIB = 1 << 20


class Bounced:
    """A broadcast of what lies on a device, by way of the host."""

    def __init__(self, buffer: torch.Tensor, *args: Any, **options: Any) -> None:
        self._buffer = buffer
        self._host = buffer.cpu()
        self._work = broadcast(self._host, *args, **options)

    def wait(self) -> None:
        self._work.wait()
        self._buffer.copy_(self._host)


broadcast = dist.broadcast


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    big = torch.randn(7 << 20, generator=generator)
    return {
        "big": big,
        "view": big[5:100:3],
        "more": [torch.randn(1 << 20, generator=generator).half() for _ in range(5)],
        "small": torch.arange(10),
        "step": 3,
    }


def load(member: Member, path: Path, where: Any, *_: Any) -> list[str]:
    """What differs from torch.load after a load by all ranks."""
    exchange._device_of = lambda _group: torch.device(KIND, 0)
    exchange.dist.broadcast = Bounced
    try:
        loaded = fastckpt.load(path, map_location=where, group=member.group)
    finally:
        exchange.dist.broadcast = broadcast
    expected = torch.load(path, map_location="cpu")
    wrong = [key for key in ("big", "view", "small") if not same(loaded[key], expected[key])]
    wrong += [f"more {i}" for i, t in enumerate(loaded["more"]) if not same(t, expected["more"][i])]
    kinds = {loaded["big"].device.type, loaded["small"].device.type}
    if kinds != {torch.device(where or "cpu").type}:
        wrong.append(f"lies on {kinds}")
    return wrong


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu(), other)


@pytest.fixture
def crew(nursery: Nursery) -> Crew:
    return nursery.lasting_crew(RANKS)


@pytest.fixture
def together(
    crew: Crew, driver: CudaStub, accelerator_library: Path
) -> Callable[..., list[Outcome]]:
    def call(path: Path, where: Any) -> list[Outcome]:
        return crew(on_device, accelerator_library, driver.path, load, path, where)

    return call


@pytest.mark.parametrize("where", [KIND, f"{KIND}:1", "cpu", None])
def test_every_rank_has_all_of_it(
    together: Callable[..., list[Outcome]], disk: Path, where: Any
) -> None:
    fastckpt.save(state(), disk / "a.pt").result(60)
    for outcome in together(disk / "a.pt", where):
        assert outcome.error is None and outcome.value == []


def test_damage_is_told_on_every_rank(together: Callable[..., list[Outcome]], disk: Path) -> None:
    fastckpt.save(state(), disk / "a.pt").result(60)
    content = bytearray((disk / "a.pt").read_bytes())
    content[20 * MIB] ^= 1
    (disk / "a.pt").write_bytes(content)
    outcomes = together(disk / "a.pt", KIND)
    assert {type(outcome.error) for outcome in outcomes} == {CorruptCheckpoint}
