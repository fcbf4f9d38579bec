"""The devices "stub" for torch (tests/stubs/accelerator.cc), two of them, whose copies are made by
the stub of the CUDA driver: tensors on them go the ways of tensors on a GPU.

Responsible for compiling it, for registering it with torch, once in a process, and for a pipeline
that knows it. Must not know what is tested.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fastckpt import _engine
from fastckpt.engine.devices import Devices
from fastckpt.engine.gds import Gds
from fastckpt.saving import pipeline
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage.file_system import Storage
from tests.kit import compiler
from tests.kit.cuda_stub import CudaStub
from tests.kit.paths import TESTS

SOURCE = TESTS / "stubs" / "accelerator.cc"
KIND = "stub"
DEVICES = 2


class Stream:
    """What torch.cuda.current_stream() gives back, as far as it is asked for."""

    def __init__(self, cuda_stream: int) -> None:
        self.cuda_stream = cuda_stream


class Runtime(types.ModuleType):
    """torch.stub: what torch.cuda is for GPUs.

    Attributes:
        kind: torch's name for this type of device.
        stream: the current one, as the stub of the driver counts; 0 is the default stream.
        stream_of: the current one of a device, where it is another.
        initialized: as torch.cuda.is_initialized() says.
        available: whether there is such a device for torch; other tests see none.
        driver: whose streams these are; torch's own copies wait for the current one.
    """

    kind = KIND

    def __init__(self) -> None:
        super().__init__(f"torch.{KIND}")
        self.driver: CudaStub | None = None
        self.available = False
        self.reset()

    def reset(self) -> None:
        """As it is when torch has just been imported, but for the driver."""
        self.stream = 0
        self.stream_of: dict[int, int] = {}
        self.initialized = True

    def wait(self, is_queued: int = 0) -> None:
        """What torch does before it copies by itself; for what a GPU would queue, the host does not
        wait until a stream that is held goes on.
        """
        if self.driver is not None and not (is_queued and self.driver.is_held):
            for stream in {self.stream, *self.stream_of.values()}:
                self.driver.synchronize(stream)

    def is_initialized(self) -> bool:
        return self.initialized

    def current_stream(self, ordinal: int = 0) -> Stream:
        return Stream(self.stream_of.get(ordinal, self.stream))

    def init(self) -> None:
        self.initialized = True

    # What torch asks of such a module.
    def is_available(self) -> bool:
        return self.available

    def device_count(self) -> int:
        return DEVICES

    def current_device(self) -> int:
        return 0

    def device(self, _device: Any) -> Any:
        return contextlib.nullcontext()

    def _is_in_bad_fork(self) -> bool:
        return False

    # It makes no random numbers.
    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, _device: Any = 0) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, _state: torch.Tensor, _device: Any = 0) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return []


def built(directory: Path) -> Path:
    """The library, in a directory."""
    root = Path(torch.__path__[0])
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = ["-std=c++20", "-O0", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    flags += ["-isystem", str(root / "include")]
    flags += [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    return compiler.library(directory, "libaccelerator-stub.so", SOURCE, *flags)


@cache
def registered(library: Path) -> Runtime:
    """torch.stub, after which torch has such a device."""
    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend(KIND)
    runtime = Runtime()
    runtime.before_copy = ctypes.CFUNCTYPE(None, ctypes.c_int)(
        runtime.wait
    )  # kept as long as it is called
    ctypes.CDLL(str(library)).stub_before_copy(runtime.before_copy)
    torch._register_device_module(KIND, runtime)
    torch.utils.generate_methods_for_privateuse1_backend()
    return runtime


def pieces_alive(library: Path) -> int:
    """How many pieces of memory tensors of the device hold."""
    function = ctypes.CDLL(str(library)).stub_pieces_alive
    function.restype = ctypes.c_int64
    return int(function())


@contextlib.contextmanager
def installed(
    runtime: Runtime,
    driver: str,
    storage: Storage | None = None,
    budget_bytes: int = 256 << 20,
    cufile: str = "libcufile-missing.so",
) -> Iterator[Pipeline]:
    """fastckpt's functions go through a pipeline whose devices are the stub's, and whose cuFile is
    the library of that name.
    """
    devices = Devices(runtime.kind, runtime, driver)
    gds = Gds(devices, cufile, lambda *args: _engine.CufileLibrary(*args, os.devnull))
    made = Pipeline(storage, budget_bytes, devices, gds)
    kept, pipeline._current = pipeline._current, made
    runtime.available = True
    try:
        yield pipeline._current
    finally:
        runtime.available = False
        pipeline._current.close()
        pipeline._current = kept


def here(where: Any = KIND) -> Any:
    """What names a device of the stub, for the devices that the pipeline knows: a GPU's, maybe."""
    if isinstance(where, dict):
        return {key: here(value) for key, value in where.items()}
    kind = pipeline.current().staging.devices._kind
    return where.replace(KIND, kind) if isinstance(where, str) else where


def main() -> None:
    """For a process of its own: python accelerator.py LIBRARY DRIVER SCRIPT ARGUMENTS..."""
    library, driver, script, *arguments = sys.argv[1:]
    runtime = registered(Path(library))
    runtime.driver = CudaStub(Path(driver))
    sys.argv = [script, *arguments]
    with installed(runtime, driver):
        code = compile(Path(script).read_text(), script, "exec")
        exec(code, {"__name__": "__main__", "runtime": runtime})


if __name__ == "__main__":
    main()
