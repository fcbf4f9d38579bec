"""Tensors on a GPU or its stub: how they are filled, read and changed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import SaveHandle
from tests.crews.group_crew import Member, Outcome, attempt
from tests.kit import accelerator
from tests.kit.accelerator import KIND, Runtime, here
from tests.kit.cuda_stub import CudaStub
from tests.kit.options import gathered

State = dict[str, torch.Tensor]


class Files:
    """fastckpt.save, each to a file of its own."""

    def __init__(self, directory: Path, fence: str = "call", **options: Any) -> None:
        self.directory = directory
        self._save = partial(fastckpt.save, **gathered(fence=fence, **options))

    def save(self, number: int, state: Any) -> SaveHandle:
        return self._save(state, self.directory / f"{number}.pt")

    def load(self, number: int) -> Any:
        return fastckpt.load(self.directory / f"{number}.pt", map_location="cpu")

    def close(self) -> None:
        """Nothing to do."""


class Steps:
    """fastckpt.Checkpointer.save, of one run."""

    def __init__(self, directory: Path, fence: str = "call", **options: Any) -> None:
        self.directory = directory / "run"
        self._kept = fastckpt.Checkpointer(self.directory, **gathered(fence=fence, **options))
        self.save, self.load, self.close = self._kept.save, self._kept.load, self._kept.close


Way = Files | Steps


@pytest.fixture(params=[Files, Steps])
def way(request: pytest.FixtureRequest, gpu: CudaStub, disk: Path) -> Iterator[Callable[..., Way]]:
    """`way(fence, ...)`: something that saves, on either way."""
    with contextlib.ExitStack() as stack:

        def make(*args: Any, **options: Any) -> Way:
            return stack.enter_context(contextlib.closing(request.param(disk, *args, **options)))

        yield make
        gpu.hold(False)


def fill(
    tensor: torch.Tensor, value: int, gpu: CudaStub, took_us: float = 0, stream: int = 0
) -> None:
    """A kernel that fills a tensor's memory."""
    nbytes = tensor.untyped_storage().nbytes()
    gpu.kernel_at(tensor.data_ptr(), nbytes, value, took_us, stream)


def octets(nbytes: int, value: int = 0, device: str = KIND) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, device=here(device))


def paint(state: State, seed: int, gpu: CudaStub, stream: int) -> dict[str, bytes]:
    """Kernels that give each tensor other bytes; returns what each will have."""
    random = Random(seed)
    painted = {}
    for name, tensor in state.items():
        nbytes, address, values = tensor.nbytes, tensor.data_ptr(), random.randbytes(2)
        cut = random.randrange(nbytes)
        gpu.kernel_at(address, cut, values[0], 0, stream)
        gpu.kernel_at(address + cut, nbytes - cut, values[1], 0, stream)
        painted[name] = values[:1] * cut + values[1:] * (nbytes - cut)
    return painted


class Kernels(torch.optim.Optimizer):
    """An optimizer whose step is kernels that fill what it optimizes, on the current stream."""

    def __init__(self, tensors: list[torch.Tensor], gpu: CudaStub, runtime: Runtime) -> None:
        super().__init__(tensors, {})
        self.gpu, self.runtime = gpu, runtime
        self.value, self.took_us = 0xEE, 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for tensor in self.param_groups[0]["params"]:
            fill(tensor, self.value, self.gpu, self.took_us, self.runtime.stream)


def on_device(
    member: Member, library: Path, driver: str, body: Callable[..., Any], *args: Any
) -> Outcome:
    """Calls body(member, *args) on a rank that has the device."""
    runtime = accelerator.registered(library)
    runtime.driver = CudaStub(Path(driver))
    with accelerator.installed(runtime, driver):
        return attempt(lambda: body(member, *args))


def places(pattern: str) -> list[Path]:
    """Files of packages that torch for CUDA brings, or of a toolkit."""
    packages = [found for place in sys.path for found in Path(place).glob(f"nvidia/*/{pattern}")]
    return [*packages, *Path("/usr/local").glob(f"cuda*/{pattern}")]
