"""Saves and loads by NVIDIA's own libcufile: byte for byte.

Run by test_gpu_real.py, on a GPU or over the stub of the CUDA driver. Must not know how blocks are
moved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastckpt
from fastckpt import _engine
from fastckpt.engine.gds import LIBRARY, GdsDevice
from tests.gpu.test_gds_save import test_the_file_is_the_same_either_way  # noqa: F401
from tests.kit import accelerator
from tests.kit.accelerator import Runtime, here
from tests.kit.cuda_stub import CudaStub
from tests.kit.devices import Kernels, fill, octets, paint

MIB = 1 << 20
WAIT_S = 60.0


class Moved:
    """What cuFile has moved.

    Attributes:
        nbytes: in all.
        refused: why something went through the host, file by file.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.refused: list[str] = []


@pytest.fixture
def cufile(
    driver: CudaStub, runtime: Runtime, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Moved]:
    """fastckpt's pipeline knows the device, and NVIDIA's cuFile; nothing goes through the host that
    cuFile was asked for.
    """
    device = disk.stat().st_dev
    known = Path(f"/run/udev/data/b{os.major(device)}:{os.minor(device)}")
    if not known.exists():
        pytest.skip(f"cuFile refuses files of disks that udev does not know, as here: no {known}")
    moved, end_file = Moved(), GdsDevice.end_file

    def counted(self: GdsDevice, sink: _engine.GdsSink) -> tuple[int, int, str]:
        nbytes, by_host, why = end_file(self, sink)
        moved.nbytes += nbytes
        moved.refused += [why] * (by_host > 0)
        return nbytes, by_host, why

    monkeypatch.setattr(GdsDevice, "end_file", counted)
    runtime.driver = driver
    with accelerator.installed(
        runtime, driver.path, cufile=os.environ.get("FASTCKPT_TEST_CUFILE", LIBRARY)
    ):
        yield moved
        driver.configure()
        runtime.reset()
    assert moved.nbytes > 0 and not moved.refused


@pytest.mark.parametrize("fence", ["call", "step"])
def test_every_save_has_what_the_state_was(
    cufile: Moved, driver: CudaStub, runtime: Runtime, disk: Path, fence: str
) -> None:
    """Also when the state is painted over as soon as the fence allows."""
    state = {"big": octets(17 * MIB + 12345), "small": octets(40_003)}
    optimizer = Kernels(list(state.values()), driver, runtime)
    for number in range(2):
        painted = paint(state, number, driver, 0)
        path = disk / f"{number}.pt"
        handle = fastckpt.save(
            state, path, options=fastckpt.SaveOptions(fence=fence, staging="gds", durable=False)
        )
        if fence == "step":
            optimizer.step()
        else:
            for tensor in state.values():
                fill(tensor, 0xEE, driver)
        stats = handle.result(WAIT_S)
        assert stats.staging == "gds", stats.staging_why
        loaded = torch.load(path, map_location="cpu")
        assert {name: loaded[name].numpy().tobytes() for name in state} == painted
    assert cufile.nbytes >= 2 * 8 * MIB


def test_a_load(cufile: Moved, disk: Path) -> None:
    state = {"w": torch.randn(6 * MIB), "v": torch.arange(3 * MIB), "small": torch.ones(9)}
    fastckpt.save(state, disk / "a.pt", options=fastckpt.SaveOptions(durable=False)).result(WAIT_S)
    loaded = fastckpt.load(disk / "a.pt", map_location=here(), staging="gds")
    assert {t.device.type for t in loaded.values()} == {here()}
    assert all(torch.equal(loaded[key].cpu(), value) for key, value in state.items())
    assert cufile.nbytes >= 32 * MIB


def test_steps(cufile: Moved, disk: Path) -> None:
    state = {f"w{i}": torch.randn(5 * MIB + i).to(here()) for i in range(2)}
    wanted = {key: value.cpu() for key, value in state.items()}
    with fastckpt.Checkpointer(
        disk / "run", options=fastckpt.SaveOptions(staging="gds", fence="step")
    ) as checkpointer:
        for step in range(2):
            stats = checkpointer.save(step, state).result(WAIT_S)
            assert stats.staging == "gds", stats.staging_why
        saved = cufile.nbytes
        for value in state.values():
            value.zero_()
        assert checkpointer.restore(state) == 1
    assert all(torch.equal(state[key].cpu(), value) for key, value in wanted.items())
    assert saved >= 64 * MIB and cufile.nbytes - saved >= 32 * MIB
