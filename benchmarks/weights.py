"""The benchmark of published weights: a version as a difference, beside a full export and beside
what trainers write by hand.

    torchrun --standalone --nproc-per-node 2 benchmarks/weights.py --size 2 --dir /mnt/nvme

A model in bf16, half of --size, lies under FSDP2; between two versions 3 % of its elements change
by one unit in the last place. By hand, all ranks gather each tensor, and the first one writes a
safetensors file: of the whole tensors, or of the gaps between changed elements and their values,
each through zstd level 1. Every way is durable. Then the first rank alone brings each file, of
which nothing is cached, into its own copy of the model. It must not know how fastckpt writes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import zstandard
from ceiling import LIMIT
from harness import RIVAL_TIME, Line, Row, at_most, holds, middle
from rank_bench import RankBench, against, measure
from storage import drop_page_cache, fsync_tree, size_of

import fastckpt
from fastckpt.engine.codec import PlanesEncoder
from fastckpt.plan.image import BLOCK_BYTES, ItemRun

DTYPE = torch.bfloat16
CHANGED = 0.03
FILE = "model.safetensors"
State = dict[str, Any]


class Bench(RankBench):
    """One rank of the benchmark."""

    share = DTYPE.itemsize / 4

    def __init__(self, nbytes: int, directory: Path) -> None:
        super().__init__(nbytes, directory)
        named = self.model.named_parameters()
        self.state: State = {name: each.detach().to(DTYPE) for name, each in named}
        del self.model
        self.generator = torch.Generator().manual_seed(self.rank)
        self.root = directory / "weights"
        by_step = fastckpt.SaveOptions(fence="step")
        self.publisher = fastckpt.WeightPublisher(
            self.root, keep=2, full_every=1000, group=dist.group.WORLD, options=by_step
        )
        self.subscriber = fastckpt.WeightSubscriber(self.root)
        self.old: State = {}  # the first rank's tensors of the last file of gaps
        self.copy: State = {}  # the first rank's model
        self.steps = fastckpt.Checkpointer(
            directory / "steps",
            keep_last=1,
            group=dist.group.WORLD,
            options=by_step,
        )

    def change(self) -> float:
        """Returns how long the codec alone takes for the difference of this rank's elements."""
        encoder, taken_s = PlanesEncoder([ItemRun(0, DTYPE.itemsize, True)], BLOCK_BYTES), 0.0
        target = memoryview(bytearray(2 * BLOCK_BYTES))
        for tensor in self.state.values():
            bits = tensor.to_local().view(torch.int16)
            old = bits.clone()
            bits += (torch.rand(bits.shape, generator=self.generator) < CHANGED).to(torch.int16)
            octets = memoryview((bits ^ old).view(torch.uint8).flatten().numpy())
            begun = time.perf_counter()
            for at in range(0, len(octets), BLOCK_BYTES):
                encoder.encode(octets[at : at + BLOCK_BYTES], at, target)
            taken_s += time.perf_counter() - begun
        return taken_s

    def gathered(self) -> State:
        """The whole tensors, one after the other, on the first rank."""
        found = {}
        for name, tensor in self.state.items():
            whole = tensor.full_tensor()
            if self.rank == 0:
                found[name] = whole
        return found

    def save(self, number: int) -> Path:
        handle = self.steps.save(number, self.state)
        self.stalled = time.perf_counter() - self.begun
        handle.result()
        return self.directory / "steps" / f"step-{number:08d}"

    def publish(self, number: int) -> Path:
        handle = self.publisher.publish(self.state, number)
        self.stalled = time.perf_counter() - self.begun
        handle.result()
        return self.root / f"step-{number:08d}"

    def export(self, number: int) -> Path:
        path = self.directory / f"export-{number}"
        handle = fastckpt.export(self.state, path, group=dist.group.WORLD)
        self.stalled = time.perf_counter() - self.begun
        handle.result()
        return path

    def whole(self, number: int) -> Path:
        return self.by_hand(f"whole-{number}", self.gathered())

    def gaps(self, number: int) -> Path:
        found, new = dict[str, torch.Tensor](), self.gathered()
        pack = zstandard.ZstdCompressor(level=1).compress
        for name, tensor in new.items() if number else ():
            bits, old = (each.view(torch.int16).flatten() for each in (tensor, self.old[name]))
            places = (bits != old).nonzero().flatten()
            steps = torch.diff(places, prepend=places.new_zeros(1)).to(torch.int32)
            for key, part in (("gaps", steps), ("values", bits[places])):
                packed = bytearray(pack(part.numpy().tobytes()))
                found[f"{name}.{key}"] = torch.frombuffer(packed, dtype=torch.uint8)
        self.old = new
        return self.by_hand(f"gaps-{number}", found)

    def by_hand(self, name: str, tensors: State) -> Path:
        path = self.directory / name
        if self.rank == 0:
            path.mkdir()
            safetensors.torch.save_file(tensors, path / FILE)
            fsync_tree(path)
        self.stalled = time.perf_counter() - self.begun  # the model must not change meanwhile
        return path

    def read(self, name: str, path: Path) -> None:
        """Brings what a way has written into the copy of the model."""
        if name == "publish":
            update = self.subscriber.next()
            assert update is not None
            update.apply(self.copy)
        elif name == "export":
            fastckpt.load_into(self.copy, path)
        elif name == "whole":
            for key, tensor in safetensors.torch.load_file(path / FILE).items():
                self.copy[key].copy_(tensor)
        elif name == "gaps":
            unpack = zstandard.ZstdDecompressor().decompress
            found = safetensors.torch.load_file(path / FILE)
            for key, tensor in self.copy.items():
                steps, values = (
                    torch.frombuffer(
                        bytearray(unpack(found[f"{key}.{what}"].numpy().tobytes())), dtype=dtype
                    )
                    for what, dtype in (("gaps", torch.int32), ("values", torch.int16))
                )
                tensor.view(torch.int16).view(-1)[steps.cumsum(0)] = values

    def round(self, number: int) -> bool:
        self.note(LIMIT, number, encoded_s=self.change())
        right, paths = True, dict[str, Path]()
        expected = self.gathered()
        ways: dict[str, Callable[[int], Path]] = {
            name: getattr(self, name) for name in ("save", "publish", "export", "whole", "gaps")
        }
        for name in ways if number % 2 else reversed(ways):
            self.meet()
            cpu_s, self.begun = time.process_time(), time.perf_counter()
            paths[name] = ways[name](number)
            dist.barrier()
            committed_s = time.perf_counter() - self.begun
            cpu_s = time.process_time() - cpu_s
            mib = size_of(paths[name]) / 2**20
            self.note(
                name, number, stall_s=self.stalled, committed_s=committed_s, cpu_s=cpu_s, mib=mib
            )
        for name in ("publish", "gaps", "export", "whole"):
            if self.rank == 0 and (number or name != "gaps"):
                # A difference is added to the version before, all others replace everything.
                if name != "gaps":
                    self.copy = {key: torch.zeros_like(each) for key, each in expected.items()}
                else:
                    self.copy = {key: each.clone() for key, each in self.before.items()}
                drop_page_cache(paths[name])
            self.meet()
            read_s = 0.0
            if self.rank == 0 and (number or name != "gaps"):
                begun = time.perf_counter()
                self.read(name, paths[name])
                read_s = time.perf_counter() - begun
                right = right and all(
                    torch.equal(self.copy[key], each) for key, each in expected.items()
                )
            self.note(f"read {name}", number, read_s=read_s)
        self.before = expected
        for name in ("export", "whole", "gaps"):
            self.discard(paths[name])
        return right


def lines_of(rows: list[Row], right: bool) -> list[Line]:
    """What was measured against what it has to be."""
    shares = [
        mine["mib"] / full["mib"]
        for mine, full in zip(
            *([row for row in rows if row["name"] == way] for way in ("publish", "export")),
            strict=True,
        )
    ]
    lines = [at_most("bytes written, of a full export", shares, 0.05, ".4f", " x")]
    stall = "stall, beside a step-fence save"
    lines.append(against(rows, stall, "publish", "save", "stall_s", "copied_s", None, 1.0))

    def best(prefix: str, key: str) -> str:
        ways = (f"{prefix}whole", f"{prefix}gaps")
        return min(ways, key=lambda way: middle([r for r in rows if r["name"] == way], key))

    for what, prefix, key, limit, times in (
        ("committed", "", "committed_s", "encoded_s", RIVAL_TIME),
        ("cold read into a model", "read ", "read_s", "", RIVAL_TIME),
        ("CPU seconds of all ranks", "", "cpu_s", "", None),
    ):
        ours = f"{prefix}publish"
        by_hand = best(prefix, key)
        lines.append(against(rows, what, ours, by_hand, key, limit, times=times))
        # Where the disk is as fast as the codec, all bytes are written as soon: no bar.
        whole = f"{what}, beside a full export"
        lines.append(against(rows, whole, ours, f"{prefix}export", key, times=None))
    return [*lines, holds("every copy is the model, bit by bit", right)]


if __name__ == "__main__":
    sys.exit(measure("weights", "Benchmark published weights.", 2.0, Bench, lines_of))
