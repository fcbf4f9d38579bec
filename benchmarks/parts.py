"""The parts of `make bench-all`: each is one benchmark with what it is told there.

To add one, add a line here and its markers to docs/project/bars.md. The module must not know how
anything is measured or shown.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import NamedTuple

BENCHMARKS = Path(__file__).resolve().parent
RESULTS = BENCHMARKS / "results" / "all"
# Those that are compared where all would take too long.
TMPFS = "torch.save,torch.save-nocrc,safetensors,dcp-async-stager,fastckpt,fastckpt-step"
MANY = "torch.save,safetensors,dcp-async-stager,torch_checkpointing,fastckpt,fastckpt-step"
BESIDE = f"{MANY},torchsnapshot-async"

TINY_MEMORY = "--gib 0.02 --step-gib 0.02 --peer-gib 0.02 --rounds 1"


class Part(NamedTuple):
    """One benchmark.

    Attributes:
        name: of its record in results/all and of its markers in the documents.
        told: the script and its options.
        tiny: options that follow where only the scripts are tried.
        ranks: processes that torchrun starts; 0: the script starts what it needs itself.
        usual: it is run unless --parts names others.
    """

    name: str
    told: str
    tiny: str
    ranks: int = 0
    usual: bool = True

    @property
    def script(self) -> str:
        """The name of the file."""
        return self.told.split()[0]

    def command(self, more: str) -> str:
        """Return the command without its directories, as the documents name it, with more options
        at its end.
        """
        start = f"torchrun --standalone --nproc-per-node {self.ranks}" if self.ranks else "python"
        return " ".join(f"{start} benchmarks/{self.told} {more}".split())

    def arguments(self, more: str, directory: Path, out: Path) -> list[str]:
        """Return the command as it is run."""
        script, *options = shlex.split(f"{self.told} {more}")
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        start = [sys.executable, *(run if self.ranks else [])]
        where = ["--dir", str(directory), "--out", str(out)]  # what is told may name another --dir
        return [*start, str(BENCHMARKS / script), *where, *options]


PARTS = (
    Part(
        "saves",
        "bench.py --workloads stall,drain,load --gib 1 --rounds 4",
        "--gib 0.01 --rounds 1 --peers torch.save,fastckpt,fastckpt-step",
    ),
    Part(
        "tmpfs",
        f"bench.py --workloads stall,drain --gib 0.5 --rounds 3 --dir /dev/shm --peers {TMPFS}",
        "--gib 0.01 --rounds 1 --peers torch.save,fastckpt,fastckpt-step",
    ),
    Part(
        "training",
        "bench.py --workloads drag,small,again,thinned,codec --gib 0.5 --rounds 3 "
        f"--peers {BESIDE}",
        "--gib 0.01 --rounds 1 --peers torch.save,fastckpt,fastckpt-step",
    ),
    Part(
        "many",
        f"bench.py --workloads many --gib 0.63 --rounds 3 --peers {MANY}",
        "--gib 0.01 --rounds 1 --peers torch.save,fastckpt",
    ),
    Part("ranks", "ranks.py --size 1 --rounds 5", "--size 0.02 --rounds 1"),
    Part("dcp", "dcp.py --size 1 --rounds 5", "--size 0.03 --rounds 1", ranks=2),
    Part(
        "dcp-tmpfs",
        "dcp.py --size 0.5 --rounds 3 --dir /dev/shm",
        "--size 0.03 --rounds 1",
        ranks=2,
    ),
    Part("export", "export.py --size 2 --rounds 4", "--size 0.03 --rounds 1", ranks=4),
    Part("weights", "weights.py --size 2 --rounds 4", "--size 0.05 --rounds 1", ranks=2),
    Part("megatron", "megatron_saves.py --rounds 5", "--hidden 64 --rounds 1", ranks=2),
    Part("torchtitan", "torchtitan_saves.py --rounds 5", "--ballast 8 --rounds 1", ranks=2),
    Part("objects", "objects.py --gib 0.5 --rounds 3", "--gib 0.02 --rounds 1 --servers drain"),
    Part("memory", "memory.py --gib 0.5 --rounds 3", TINY_MEMORY),
    Part("healing", "healing.py --gib 1 --rounds 3", "--gib 0.02 --rounds 1"),
    Part("burst", "burst.py --rounds 3", "--size 8 --rounds 1", usual=False),
    Part("scale", "scale.py", "--data 2 --sample 4 --targets 2", usual=False),
)
