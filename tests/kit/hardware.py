"""A GPU with the interface of the stub of the CUDA driver, so that a test may run on either.

Responsible for the functions of libcuda.so.1 that hold a stream, fill memory and wait, and for a
runtime, torch.cuda, whose current stream is set as the stub's. What no GPU does on demand, such as
failing, is missing here. Must not know what is tested.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import torch

LIBRARY = "libcuda.so.1"
NON_BLOCKING, MAPPED, AT_LEAST = 1, 2, 0
HOLD_MAX_S = 30.0
# As NVIDIA's cuda.h names types, and as ctypes does.
TYPES = {
    "CUcontext": ctypes.c_void_p,
    "CUcontext*": ctypes.c_void_p,
    "CUdevice": ctypes.c_int,
    "CUdeviceptr": ctypes.c_uint64,
    "CUdeviceptr*": ctypes.c_void_p,
    "CUstream": ctypes.c_void_p,
    "CUstream*": ctypes.c_void_p,
    "size_t": ctypes.c_size_t,
    "unsigned": ctypes.c_uint,
    "unsigned char": ctypes.c_ubyte,
    "void*": ctypes.c_void_p,
    "void**": ctypes.c_void_p,
}
FUNCTIONS = {
    "cuInit": ("unsigned",),
    "cuDevicePrimaryCtxRetain": ("CUcontext*", "CUdevice"),
    "cuDevicePrimaryCtxRelease_v2": ("CUdevice",),
    "cuCtxPushCurrent_v2": ("CUcontext",),
    "cuCtxPopCurrent_v2": ("CUcontext*",),
    "cuMemHostAlloc": ("void**", "size_t", "unsigned"),
    "cuMemHostGetDevicePointer_v2": ("CUdeviceptr*", "void*", "unsigned"),
    "cuMemFreeHost": ("void*",),
    "cuMemsetD8Async": ("CUdeviceptr", "unsigned char", "size_t", "CUstream"),
    "cuStreamCreate": ("CUstream*", "unsigned"),
    "cuStreamDestroy_v2": ("CUstream",),
    "cuStreamSynchronize": ("CUstream",),
    "cuStreamWaitValue32_v2": ("CUstream", "CUdeviceptr", "unsigned", "unsigned"),
}


class TorchCuda:
    """torch.cuda, whose current stream is an attribute: its handle, 0 for the default one."""

    kind = "cuda"

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    @stream.setter
    def stream(self, handle: int) -> None:
        made = torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream()
        torch.cuda.set_stream(made)

    def reset(self) -> None:
        self.stream = 0

    def warm_up(self) -> None:
        """Launches kernels of torch's that tests launch while a stream is held: the first launch
        loads a kernel, and may wait for all streams.
        """
        octets = torch.ones(9, dtype=torch.uint8, device=self.kind)
        assert octets.add_(1).eq(2).all()
        torch._foreach_copy_([octets], [octets.clone().zero_()])
        torch.cuda.synchronize()


class Hardware:
    """The first GPU, or another driver with these functions. close() gives back what it took.

    Args:
        runtime: whose current stream is held.
        path: of the driver.

    Attributes:
        is_held: whether what the current stream is given waits.
    """

    real = True
    is_held = False

    def __init__(self, runtime: Any, path: str = LIBRARY) -> None:
        self.path, self._runtime = path, runtime
        library = ctypes.CDLL(path)
        self._functions = {name: getattr(library, name) for name in FUNCTIONS}
        for name, types in FUNCTIONS.items():
            self._functions[name].argtypes = [TYPES[each] for each in types]
        self._context = ctypes.c_void_p()
        self._checked("cuInit", 0)
        self._checked("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self._memory, self._address = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuMemHostAlloc", ctypes.byref(self._memory), 4096, MAPPED)
        pointer = ctypes.byref(self._address)
        self._call("cuMemHostGetDevicePointer_v2", pointer, self._memory, 0)
        assert self._memory.value is not None
        self._word = ctypes.c_uint32.from_address(self._memory.value)
        self._word.value = self._holds = 0
        self._limit: threading.Timer | None = None

    def _checked(self, name: str, *arguments: Any) -> None:
        result = self._functions[name](*arguments)
        assert result == 0, f"{name}: {result}"

    def _call(self, name: str, *arguments: Any) -> None:
        self._checked("cuCtxPushCurrent_v2", self._context)
        try:
            self._checked(name, *arguments)
        finally:
            self._checked("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def configure(self) -> None:
        self.hold(False)

    def hold(self, held: bool) -> None:
        """While held, nothing begins that the current stream is given from now on, and no copy that
        comes after that. Whoever waits for it on the host is let go in the end, and told.
        """
        self.is_held = held
        if held:
            stream = self._runtime.stream
            if self.path != LIBRARY:  # what torch then computes on the double is not queued
                self.synchronize(stream)
            self._holds += 1
            self._limit = threading.Timer(HOLD_MAX_S, self._go_on)
            self._limit.start()
            number = self._holds
            self._call("cuStreamWaitValue32_v2", stream, self._address, number, AT_LEAST)
            return
        was_held = self._word.value == self._holds
        if self._limit is not None:
            self._limit.cancel()
            assert not was_held, f"the host waited for the stream that was held, {HOLD_MAX_S} s"
            self._limit = None
        self._go_on()

    def _go_on(self) -> None:
        self._word.value = self._holds

    def kernel_at(
        self, address: int, nbytes: int, value: int, _took_us: float, stream: int = 0
    ) -> None:
        """Queues a kernel that fills memory, and takes what it takes."""
        if nbytes:
            self._call("cuMemsetD8Async", address, value, nbytes, stream)

    def synchronize(self, stream: int = 0) -> None:
        self._call("cuStreamSynchronize", stream)

    @contextlib.contextmanager
    def streams(self, count: int) -> Iterator[list[int]]:
        """So many streams beside the default one."""
        made = [ctypes.c_void_p() for _ in range(count)]
        for each in made:
            self._call("cuStreamCreate", ctypes.byref(each), NON_BLOCKING)
        try:
            yield [each.value or 0 for each in made]
        finally:
            self._runtime.stream = 0
            for each in made:
                self._call("cuStreamSynchronize", each)
                self._call("cuStreamDestroy_v2", each)

    def close(self) -> None:
        self.hold(False)
        self._call("cuMemFreeHost", self._memory)
        self._checked("cuDevicePrimaryCtxRelease_v2", 0)
