"""Loads to a GPU: storages and parameters are read straight to it, as right as by torch.

On the device of tests/kit/accelerator.py. Must not know the engine's insides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import errors
from tests.kit.accelerator import KIND, Runtime, here
from tests.kit.cuda_stub import ILLEGAL_ADDRESS, TO_DEVICE, CudaStub

MIB = 1 << 20


def to_device(gpu: CudaStub) -> int | None:
    """How many bytes were copied to it; None if that is not known."""
    return None if gpu.real else sum(op.nbytes for op in gpu.log() if op.kind == TO_DEVICE)


@pytest.mark.parametrize("where", [None, KIND, f"{KIND}:0", torch.device("cpu"), {"cpu": KIND}])
def test_load_reads_straight_to_the_device(
    gpu: CudaStub, disk: Path, assert_same: Callable[[Any, Any], None], where: Any
) -> None:
    """As torch.load has it, with map_location in all its forms; large storages by the queue."""
    where, kind = here(where), here()
    big = torch.randn(5 << 20)
    state = {
        "big": big,
        "view": big[3:1000:7],
        "device": torch.randn(3 << 20).to(kind),
        "small": torch.randn(100).to(kind),
        "half": torch.randn(1 << 20).half(),
    }
    fastckpt.save(state, disk / "a.pt").result(60)
    gpu.configure()
    loaded = fastckpt.load(disk / "a.pt", map_location=where)
    assert_same(loaded, torch.load(disk / "a.pt", map_location=where))
    on_device = [t for t in loaded.values() if t.device.type == kind and t.nbytes >= MIB]
    nbytes = to_device(gpu)
    assert nbytes is None or nbytes == sum(t.untyped_storage().nbytes() for t in on_device)


def test_code_as_map_location_sees_whole_storages(gpu: CudaStub, disk: Path) -> None:
    fastckpt.save({"w": torch.full((1 << 20,), 3.0)}, disk / "a.pt").result(60)
    seen: list[float] = []

    def look(storage: torch.UntypedStorage, _location: str) -> None:
        seen.append(torch.empty(0).set_(storage).sum().item())

    loaded = fastckpt.load(disk / "a.pt", map_location=look)["w"]
    assert seen == [3.0 * (1 << 20)] and loaded.eq(3).all()


def test_a_file_of_the_other_byte_order(
    gpu: CudaStub, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch swaps what it has read: then nothing is left to be read later."""
    tensor = torch.arange(1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr("sys.byteorder", "big")
        fastckpt.save({"w": tensor}, disk / "a.pt").result(60)
    expected = torch.load(disk / "a.pt")["w"]
    assert not torch.equal(expected, tensor)
    loaded = fastckpt.load(disk / "a.pt", map_location=KIND)["w"]
    assert loaded.device.type == KIND and torch.equal(loaded.cpu(), expected)


def test_damage_is_found_before_a_device_gets_it(gpu: CudaStub, disk: Path) -> None:
    fastckpt.save({"w": torch.randn(8 << 20)}, disk / "a.pt").result(60)
    content = bytearray((disk / "a.pt").read_bytes())
    content[20 * MIB] ^= 1
    (disk / "a.pt").write_bytes(content)
    with pytest.raises(errors.CorruptCheckpoint, match="data/0"):
        fastckpt.load(disk / "a.pt", map_location=here())


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventQuery"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_device_that_refuses_while_loading(
    gpu: CudaStub, disk: Path, call: str, after: int
) -> None:
    fastckpt.save({"w": torch.randn(16 << 20)}, disk / "a.pt").result(60)
    fastckpt.load(disk / "a.pt", map_location=KIND)
    gpu.fail(call, ILLEGAL_ADDRESS, after=after)
    with pytest.raises(errors.DeviceError, match="ILLEGAL_ADDRESS"):
        fastckpt.load(disk / "a.pt", map_location=KIND)


def test_loading_takes_few_blocks(gpu: CudaStub, disk: Path) -> None:
    """While no copy ends, no more is read than fits; and it goes on when they do."""
    tensor = torch.randn(20 << 20)
    fastckpt.save({"w": tensor}, disk / "a.pt").result(60)
    gpu.hold(True)
    loaded: list[Any] = []
    loading = threading.Thread(
        target=lambda: loaded.append(fastckpt.load(disk / "a.pt", map_location=KIND))
    )
    loading.start()
    loading.join(0.5)
    assert loading.is_alive()
    gpu.hold(False)
    loading.join(60)
    assert torch.equal(loaded[0]["w"].cpu(), tensor)


def test_restore_in_place(gpu: CudaStub, disk: Path) -> None:
    """Into parameters where they lie; memory, aliases and versions are torch's."""
    weights = {f"w{i}": torch.randn(700, 1024).to(here()) for i in range(4)}
    weights["host"] = torch.randn(700, 1024)
    weights["turned"] = torch.randn(700, 1024).to(here()).as_strided((1024, 700), (1, 1024))
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        stats = checkpointer.save(1, weights).result(60)
        assert stats.staging == "pinned"
        saved = {key: value.cpu() for key, value in weights.items()}
        addresses = {key: value.data_ptr() for key, value in weights.items()}
        versions = {key: value._version for key, value in weights.items()}
        for value in weights.values():
            value.zero_()
        gpu.configure()
        assert checkpointer.restore(weights) == 1
    for key, value in weights.items():
        assert value.data_ptr() == addresses[key] and value._version > versions[key]
        assert torch.equal(value.cpu(), saved[key]), key
    copied = to_device(gpu)
    assert copied is None or copied == sum(weights[f"w{i}"].nbytes for i in range(4))


class Summed:
    """Computes with its tensor as soon as it is unpickled."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __getstate__(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]
        self.total = float(self.weight.cpu().double().sum())


def test_what_is_unpickled_may_compute_at_once(gpu: CudaStub, disk: Path) -> None:
    """The caller's stream comes after the copies, storage by storage."""
    objects = [Summed(torch.ones(2 << 20, device=here())) for _ in range(3)]
    fastckpt.save(objects, disk / "a.pt").result(60)
    gpu.hold(True)
    letting = threading.Timer(0.3, lambda: gpu.hold(False))
    letting.start()
    loaded = fastckpt.load(disk / "a.pt", weights_only=False)
    letting.join()
    assert [each.total for each in loaded] == [float(2 << 20)] * 3


def test_a_process_that_uses_no_device_is_not_asked_for_one(
    gpu: CudaStub, runtime: Runtime, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.cuda.is_available() is felt by child processes, so torch.load does not call it."""
    fastckpt.save({"w": torch.ones(1 << 20)}, disk / "a.pt").result(60)
    runtime.initialized = False
    monkeypatch.setattr(runtime, "is_available", None)
    for where in (None, "cpu", {"cpu": "cpu"}, torch.device("cpu")):
        assert fastckpt.load(disk / "a.pt", map_location=where)["w"].eq(1).all()
