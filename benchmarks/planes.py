"""What codec="planes" gains beside "zstd", on the state of a model that was trained, not drawn.

    python benchmarks/planes.py --steps 300 --rounds 5

Trains the GPT of examples/train_gpt.py on the documents and sources of this repository, byte by
byte, and stores its weights and the two moments of Adam. Speeds are those of the median block, in
bytes of the state for each second of CPU time of one thread. It must not know how a codec works.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # an installed fastckpt comes first
sys.path.append(str(ROOT / "examples"))

import report  # noqa: E402
import torch  # noqa: E402
from rank_bars import Row, surroundings, write  # noqa: E402
from state import byte_view  # noqa: E402
from train_gpt import Preset, make_batch, make_model, train_step  # noqa: E402

from fastckpt.engine.codec import Encoder, FrameReader, FrameWriter, encoder_of  # noqa: E402
from fastckpt.plan.image import BLOCK_BYTES, ItemRun  # noqa: E402
from fastckpt.storage.file_system import Storage  # noqa: E402

CODECS = ("planes", "zstd")
# The most that each kind may take with planes.
BARS = {"fp32 weights": 0.86, "bf16 weights": 0.70, "exp_avg": 0.88, "exp_avg_sq": 0.80}
ENCODE_BPS = 0.8e9


class Frames(Storage):
    """A file in memory."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write_at(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        self.content += bytes(max(0, offset + len(data) - len(self.content)))
        self.content[offset : offset + len(data)] = data

    def read_at(self, fd: int, nbytes: int, offset: int) -> bytes:
        return bytes(memoryview(self.content)[offset : offset + nbytes])


class Nowhere(Storage):
    """Writes nothing: what is left is the codec."""

    def write_at(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        return


def own_text() -> torch.Tensor:
    """Return the documents and the sources of this repository, one after the other."""
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "fastckpt").rglob("*.py")]
    text = bytearray().join(file.read_bytes() for file in sorted(files))
    return torch.frombuffer(text, dtype=torch.uint8)


def trained(preset: Preset, steps: int, progress: Callable[[str], None]) -> dict[str, torch.Tensor]:
    """Train; returns the bytes of each kind of tensor, joined, by the names of BARS."""
    text = own_text()
    model, optimizer = make_model(preset, seed=0, ballast_mib=0)
    for step in range(steps):
        loss = train_step(model, *make_batch(text, preset, 0, step))
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            progress(f"step {step}: loss {loss:.3f}")
    weights = [tensor.detach() for tensor in model.parameters()]
    moments = [optimizer.state[tensor] for tensor in model.parameters()]
    return {
        "fp32 weights": joined(weights),
        "bf16 weights": joined([tensor.bfloat16() for tensor in weights]),
        "exp_avg": joined([slot["exp_avg"] for slot in moments]),
        "exp_avg_sq": joined([slot["exp_avg_sq"] for slot in moments]),
    }


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the elements of tensors as one row."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, which are its memory."""
    return memoryview(byte_view(tensor).numpy())


def measured(codec: str, tensor: torch.Tensor, rounds: int) -> tuple[float, float, float]:
    """Return the stored size as a share of the tensor's, and the bytes a second of both ways."""
    runs = [ItemRun(0, tensor.element_size(), tensor.is_floating_point())]
    content, encoder = bytes_of(tensor), encoder_of(codec, runs, BLOCK_BYTES)
    share, decode_bps = stored(codec, content, encoder, rounds)
    # One long file, as large shards are: memory is touched first only once.
    repeated = bytes(content[: max(1, len(content) // BLOCK_BYTES) * BLOCK_BYTES]) * rounds
    return share, encoded_bps(repeated, encoder), decode_bps


def stored(
    codec: str, content: memoryview, encoder: Callable[[], Encoder], rounds: int
) -> tuple[float, float]:
    """Return the stored size as a share of the content's, and the bytes decoded in a second."""
    kept, nbytes = Frames(), len(content)
    writer = FrameWriter(kept, -1, "memory", nbytes, BLOCK_BYTES, encoder)
    moved_s(writer.transfer, "write", content)
    frames = writer.frames()
    reader = FrameReader(kept, -1, "memory", nbytes, BLOCK_BYTES, frames, codec)
    decode_s = []
    for _ in range(rounds):  # blocks that are whole, or the only one
        decode_s += moved_s(reader.transfer, "read", content)[: max(1, nbytes // BLOCK_BYTES)]
    return sum(frames) / nbytes, min(BLOCK_BYTES, nbytes) / statistics.median(decode_s)


def encoded_bps(content: bytes, encoder: Callable[[], Encoder]) -> float:
    """Return the bytes encoded in a second, of the median block."""
    writer = FrameWriter(Nowhere(), -1, "memory", len(content), BLOCK_BYTES, encoder)
    encode_s = moved_s(writer.transfer, "write", memoryview(content))
    return min(BLOCK_BYTES, len(content)) / statistics.median(encode_s)


def moved_s(move: Callable[..., int], kind: str, content: memoryview) -> list[float]:
    """Return the CPU seconds of moving each block by this thread; what is read has to be right."""
    block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    spent = []
    for begin in range(0, len(content), BLOCK_BYTES):
        wanted = content[begin : begin + BLOCK_BYTES]
        taken = block[: len(wanted)]
        taken[:] = wanted if kind == "write" else bytes(len(wanted))
        started = time.thread_time()
        move(kind, -1, taken, begin)
        spent.append(time.thread_time() - started)
        assert taken == wanted, "other bytes came back"
    return spent


def main() -> None:
    """Run what the command line asks for; exits with 1 when a size or a speed misses its bar."""
    parser = argparse.ArgumentParser(description="Measure codecs on a state that was trained.")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--width", type=int, default=320, help="of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="windows of 128 bytes in a step")
    parser.add_argument("--rounds", type=int, default=5, help="over the blocks of a kind")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    environment = report.environment(ROOT, sys.argv[1:])
    preset = Preset(options.width, options.layers, options.width // 64, 128, options.batch, 0.0)
    kinds = trained(preset, options.steps, progress)
    torch.set_num_threads(1)
    rows, results, missed = [], list[Row](), False
    for kind, bar in BARS.items():
        nbytes = kinds[kind].nbytes
        cells = [kind, f"{nbytes / 1e6:.1f} MB", f"<= {bar:.2f}"]
        for codec in CODECS:
            share, encode_bps, decode_bps = measured(codec, kinds[kind], options.rounds)
            cells += [f"{share:.3f}", f"{encode_bps / 1e9:.2f}", f"{decode_bps / 1e9:.2f}"]
            row = {"kind": kind, "codec": codec, "nbytes": nbytes, "share": share, "bar": bar}
            results.append(row | {"encode_bps": encode_bps, "decode_bps": decode_bps})
            if codec == "planes":
                missed |= share > bar or encode_bps < ENCODE_BPS
        rows.append(cells)
    heads = ["kind", "size", "bar"]
    heads += [
        f"{codec}{what}" for codec in CODECS for what in ("", ", encode GB/s", ", decode GB/s")
    ]
    print(f"{surroundings(environment)}; {options.steps} steps\n\n{report.table(heads, rows)}")
    print(f"\n{write({'environment': environment, 'results': results}, options.out, 'planes')}")
    sys.exit(missed)


if __name__ == "__main__":
    main()
