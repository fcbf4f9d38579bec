"""The CRC-32 kernel alone on a GPU, against zlib.

    python benchmarks/gpu_crc.py fastckpt/_engine.cpython-312-x86_64-linux-gnu.so

It imports no torch, so that compute-sanitizer gets through it in seconds. Of the CUDA driver it
calls what it needs by itself; it must not know what the kernel is used for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import random
import sys
import zlib

MIB = 1 << 20
NBYTES = 9 * MIB
DRIVER = "libcuda.so.1"


def calling(cuda: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call a function of the CUDA driver, which has to succeed."""
    result = getattr(cuda, name)(*arguments)
    if result != 0:
        raise RuntimeError(f"{name} returned {result}")


def main(path: str, driver: str = DRIVER) -> None:
    """Compare the CRC-32 of ranges of all lengths and alignments."""
    spec = importlib.util.spec_from_file_location("_engine", path)
    assert spec is not None and spec.loader is not None, path
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    queue, cuda = engine.DeviceQueue(engine.CudaDriver(driver), 0), ctypes.CDLL(driver)
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    calling(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    calling(cuda, "cuCtxPushCurrent_v2", context)
    calling(cuda, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(NBYTES))
    data, chance = random.Random(1).randbytes(NBYTES), random.Random(2)
    copied = (address, data, ctypes.c_size_t(NBYTES), None)
    calling(cuda, "cuMemcpyHtoDAsync_v2", *copied)
    calling(cuda, "cuStreamSynchronize", None)
    cuts = [sorted((chance.randrange(NBYTES), chance.randrange(NBYTES))) for _ in range(40)]
    cuts += [[begin, begin + n] for begin in range(18) for n in (1, 15, 16, 17, 4096, 65536)]
    ranges = [(address.value + begin, end - begin) for begin, end in cuts]
    found = engine.Crc32Gpu(queue).crcs(queue, ranges)
    calling(cuda, "cuMemFree_v2", address)
    wrong = [cut for cut, crc in zip(cuts, found, strict=True) if crc != crc_of(data, cut)]
    if wrong:
        sys.exit(f"FAIL {len(wrong)} of {len(cuts)} ranges have another CRC-32: {wrong[:9]}")
    print(f"PASS {len(cuts)} ranges have zlib's CRC-32, on bus {queue.bus_id}")


def crc_of(data: bytes, cut: list[int]) -> int:
    """Return zlib's CRC-32 of a part."""
    return zlib.crc32(memoryview(data)[cut[0] : cut[1]])


if __name__ == "__main__":
    main(*sys.argv[1:])
