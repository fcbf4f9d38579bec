"""The workload codec: what one core does of a compressed save.

It must not know how results are shown.
"""

from __future__ import annotations

import mmap
import time

import torch
from harness import Row

from fastckpt.cli.bench.benchmark import in_turn
from fastckpt.cli.bench.saves import byte_view
from fastckpt.engine.codec import FrameWriter, encoder_of
from fastckpt.plan.image import BLOCK_BYTES, ItemRun
from fastckpt.storage.file_system import Storage
from fastckpt.storage.input_files import PosixFile

CODECS = ("planes", "zstd")


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
