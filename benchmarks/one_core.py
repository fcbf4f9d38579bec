"""The workloads crc and codec: what one core does of a save.

It must not know how results are shown.
"""

from __future__ import annotations

import mmap
import time
import zlib

import torch
from harness import Row

from fastckpt import _engine
from fastckpt.cli.bench.benchmark import in_turn
from fastckpt.cli.bench.saves import byte_view
from fastckpt.engine.codec import FrameWriter, encoder_of
from fastckpt.plan.image import BLOCK_BYTES, ItemRun
from fastckpt.storage.file_system import Storage
from fastckpt.storage.input_files import PosixFile

CODECS = ("planes", "zstd")
CRC_SIZES = {"256 KiB": 256 << 10, "64 MiB": 64 << 20}
CRC_SLICE_S = 0.1


def run_crc(rounds: int) -> Row:
    """Measure the CRC-32 kernels of one core beside zlib's, in turn; returns bytes a second."""
    kernels = {"zlib": zlib.crc32, "fastckpt crc32": _engine.crc32}
    kernels |= {f"fastckpt {name}": kernel for name, kernel in _engine.crc32_kernels().items()}
    data = torch.randint(0, 256, (max(CRC_SIZES.values()),), dtype=torch.uint8).numpy().data
    seen: dict[str, dict[str, list[float]]] = {}
    for label, size in CRC_SIZES.items():
        buffer, seen[label] = memoryview(data)[:size], {name: [] for name in kernels}
        for _, name in in_turn([*kernels], rounds):
            assert kernels[name](buffer) == zlib.crc32(buffer), name
            calls, started = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - started) < CRC_SLICE_S:
                kernels[name](buffer)
                calls += 1
            seen[label][name].append(calls * size / elapsed)
    return {"bytes_per_s": seen}


class Nowhere(Storage):
    """Writes nothing: what is left is the codec."""

    def write_at(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        return


def run_codecs(rounds: int) -> Row:
    """Measure the encoders by one thread, in turn, on normal numbers as weights are; returns bytes
    a second, and stored bytes as a share.
    """
    count = rounds + 2  # as in large shards: the first blocks touch memory, which is used again
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(BLOCK_BYTES // 2, generator=generator).mul_(0.02)
    seen, shares = {}, {}
    for kind, tensor in (("fp32", weights[: BLOCK_BYTES // 4]), ("bf16", weights.bfloat16())):
        content = memoryview(byte_view(tensor).numpy())
        writers = {}
        for codec in CODECS:
            encoder = encoder_of(codec, [ItemRun(0, tensor.element_size(), True)], BLOCK_BYTES)
            writers[codec] = FrameWriter(
                PosixFile(Nowhere(), -1, "nowhere"), count * BLOCK_BYTES, BLOCK_BYTES, encoder
            )
        block = mmap.mmap(-1, BLOCK_BYTES)
        seen[kind] = {codec: [] for codec in CODECS}
        for number, codec in in_turn(CODECS, count):
            block[:] = content
            started = time.thread_time()
            writers[codec].transfer("write", -1, memoryview(block), number * BLOCK_BYTES)
            seen[kind][codec].append(BLOCK_BYTES / (time.thread_time() - started))
        for codec, writer in writers.items():
            del seen[kind][codec][:2]
            shares[f"{kind}, {codec}"] = sum(writer.frames()) / (count * BLOCK_BYTES)
    return {"bytes_per_s": seen, "shares": shares}
