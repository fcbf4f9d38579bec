"""Saves of tensors on a GPU: what is copied when, and what comes of refusals.

On a device of torch over host memory, whose copies a stub of the CUDA driver makes, with streams
that are threads: order is real and times are exact. What only a real GPU can show is in
test_gpu_real.py. Must not know the engine's insides.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import KIND
from cuda_stub import CudaStub

import fastckpt

# A PCIe 5 link of 16 lanes, as it is measured: 8 microseconds to begin, then 55 GB/s.
LATENCY_US, BYTES_PER_US = 8.0, 55_000.0
MIB = 1 << 20


def fill(tensor: torch.Tensor, value: int, gpu: CudaStub, took_us: float = 0) -> None:
    """A kernel on the default stream that fills a tensor's memory."""
    gpu.kernel_at(tensor.data_ptr(), tensor.untyped_storage().nbytes(), value, took_us)


def test_a_state_comes_back_where_it_was(
    gpu: CudaStub, disk: Path, assert_same: Callable[[Any, Any], None]
) -> None:
    """Aliasing, views, optimizers, mixed devices, as torch.save has it."""
    module = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.BatchNorm1d(700)).to(KIND)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weight = module[0].weight.detach()
    state = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "view": weight[10:20, ::3],
        "again": weight,
        "host": torch.randn(1000, 1000),
        "empty": torch.empty(0, device=KIND),
        "step": 7,
    }
    stats = fastckpt.save(state, disk / "a.pt").result(60)
    assert stats.staging == "pinned" and gpu.calls("cuMemcpyDtoHAsync_v2") > 0
    assert_same(fastckpt.load(disk / "a.pt"), state)
    assert_same(torch.load(disk / "a.pt"), state)
    torch.save(state, disk / "b.pt")
    on_host = torch.load(disk / "b.pt", map_location="cpu")
    assert_same(torch.load(disk / "a.pt", map_location="cpu"), on_host)
    assert_same(fastckpt.load(disk / "a.pt", map_location="cpu"), on_host)


def test_call_fence_orders_streams_and_does_not_wait(gpu: CudaStub, disk: Path) -> None:
    gpu.configure(LATENCY_US, BYTES_PER_US)
    nbytes = 20 * MIB
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=KIND)
    gpu.hold(True)
    fill(tensor, 1, gpu, took_us=500)
    handle = fastckpt.save({"w": tensor}, disk / "a.pt")
    fill(tensor, 2, gpu, took_us=100)
    assert not handle.is_staged(), "no copy has begun, and the caller is here"
    gpu.hold(False)
    stats = handle.result(60)
    copied_us = 500 + 3 * LATENCY_US + nbytes / BYTES_PER_US
    assert gpu.synchronize() == pytest.approx(copied_us + 100)
    assert fastckpt.load(disk / "a.pt", map_location="cpu")["w"].eq(1).all()
    assert tensor.cpu().eq(2).all()
    assert stats.d2h_s == pytest.approx((copied_us - 500) / 1e6, rel=1e-3)
    assert stats.d2h_gbps == pytest.approx(nbytes / 1e3 / (copied_us - 500), rel=1e-2)
    assert stats.gpu_stall_s == pytest.approx((copied_us - 500) / 1e6, rel=1e-3)
