"""The benchmark of `reuse`: a state like one of LoRA, saved step after step on XFS or btrfs.

    python benchmarks/reuse.py --dir /mnt/xfs --layers 32 --rounds 20

Two Checkpointers, with `reuse` and without, save in turns. In "lora" steps the adapters and their
Adam state change; in "all" steps everything does, and hashing is for nothing. The bytes written are
those that the disk has counted, its file system's own among them. It must not know how anything is
saved.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import Line, Row, at_most, middle, progress, told
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from fastckpt import Checkpointer
from fastckpt.cli.bench.benchmark import before_clock
from fastckpt.saving import pipeline
from fastckpt.storage import policies

WAYS: dict[str, dict[str, Any]] = {"written": {}, "reused": {"codec": "reuse"}}
CLOCKS = ("stall_s", "committed_s")
RANK, SECTOR_BYTES = 8, 512
WARM_UPS = 2  # saves of each way


class Lora:
    """Frozen square matrices, two adapters beside each, and the adapters' Adam state.

    Args:
        layers: how many matrices.
        width: of a matrix.
        dtype: of the matrices; adapters and Adam state are fp32.
        sharded: whether tensors are DTensors, which lie in the shards however small they are.
    """

    def __init__(self, layers: int, width: int, dtype: torch.dtype, sharded: bool) -> None:
        mesh = init_device_mesh("cpu", (1,))
        self.frozen: list[torch.Tensor] = []
        self.trained: list[torch.Tensor] = []
        model: dict[str, Any] = {}
        moments: dict[str, Any] = {}

        def held(tensor: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(tensor, mesh, [Replicate()]) if sharded else tensor

        for layer in range(layers):
            self.frozen.append(torch.randn(width, width).to(dtype))
            model[f"{layer}.weight"] = held(self.frozen[-1])
            for name, shape in (("a", (RANK, width)), ("b", (width, RANK))):
                of_one = [torch.randn(shape) for _ in range(3)]
                self.trained += of_one
                model[f"{layer}.lora_{name}"] = held(of_one[0])
                keys = ("exp_avg", "exp_avg_sq")
                moments[f"{layer}.lora_{name}"] = dict(
                    zip(keys, map(held, of_one[1:]), strict=True)
                )
        self.state = {"model": model, "optimizer": moments}

    def change(self, *, everything: bool) -> int:
        """Takes a training step, and returns how many bytes it has changed."""
        changed = [*self.trained, *(self.frozen if everything else ())]
        for tensor in changed:
            tensor.add_(0.01)
        return sum(tensor.nbytes for tensor in changed)


def sectors(directory: Path) -> int:
    """The sectors that were written to the disk of a directory, as the kernel counts them."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        mount = policies.mount_of(fd)
    finally:
        os.close(fd)
    assert mount is not None
    os.sync()
    return int(Path("/sys/class/block", Path(mount.source).name, "stat").read_text().split()[6])


def rounds(root: Path, lora: Lora, saves: int, everything: bool) -> list[Row]:
    """A row for each save of each way, the first ones left out."""
    ways = {name: Checkpointer(root / name, keep_last=1, **how) for name, how in WAYS.items()}
    rows = []
    for number in range(saves + WARM_UPS):
        changed = lora.change(everything=everything)
        for name in [*ways] if number % 2 else [*reversed(ways)]:
            before_clock(sum(tensor.nbytes for tensor in [*lora.frozen, *lora.trained]))
            before = sectors(root)
            stats = ways[name].save(number, lora.state).result()
            row = {clock: getattr(stats, clock) for clock in CLOCKS}
            nbytes = SECTOR_BYTES * (sectors(root) - before)
            pipeline.current().drain()  # the step before has been removed
            if number >= WARM_UPS:
                row |= {"way": name, "changed": changed, "nbytes": stats.nbytes}
                rows.append(row | {"reused": stats.reused_nbytes, "disk": nbytes})
    for checkpointer in ways.values():
        checkpointer.close()
    return rows


def lines_of(rows: list[Row], everything: bool) -> list[Line]:
    """Medians, and those of the ratios of pairs."""
    written, reused = ([row for row in rows if row["way"] == name] for name in WAYS)
    for name, its in zip(WAYS, (written, reused), strict=True):
        keys = ("disk", "nbytes", "changed", "reused")
        progress(f"{name}: {', '.join(f'{key} {middle(its, key) / 1e6:.2f} MB' for key in keys)}")
    lines = []
    for clock in CLOCKS:
        pairs = zip(reused, written, strict=True)
        ratios = [one[clock] / other[clock] for one, other in pairs]
        note = f" ({1e3 * middle(reused, clock):.1f} ms; {1e3 * middle(written, clock):.1f} ms)"
        what = f"{clock}, of a save without reuse"
        if everything or clock == "committed_s":
            lines.append(at_most(what, ratios, 1.05 if everything else 0.1, ".3f", " x", note))
        else:
            lines.append(told(what, ratios, ".3f", f" x{note}"))
    if not everything:
        share = middle(reused, "disk") / middle(reused, "changed")
        lines.append(at_most("written to the disk, of what has changed", share, 1.02, ".4f", " x"))
    return lines


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    parser = harness.options_of("Benchmark of reuse; --dir is on XFS or btrfs.", rounds=20)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048, help="of a layer's square matrix")
    parser.add_argument("--dtype", default="float32", help="of the frozen weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    environment, sections, results = harness.environment(options.dir), {}, {}
    for sharded in (False, True):
        dtype = getattr(torch, options.dtype)
        lora = Lora(options.layers, options.width, dtype, sharded)
        for everything in (False, True):
            what = f"{'all' if everything else 'lora'}{', sharded' if sharded else ''}"
            with harness.place("reuse", options.dir) as root:
                results[what] = rounds(root, lora, options.rounds, everything)
            sections[what] = lines_of(results[what], everything)
    dist.destroy_process_group()
    record = {"environment": environment, "lines": harness.recorded(sections), "results": results}
    return harness.concluded(record, options.out, "reuse")


if __name__ == "__main__":
    sys.exit(main())
