"""The benchmark of gathered shards: ranks that write a file each against one that writes for all.

    torchrun --standalone --nproc-per-node 4 benchmarks/gathering.py --mib 16 --saves 40 --dir /mnt

Every rank runs this file; both ways save in turns, and the first rank prints the median of the
pairs' ratios and where the time of both went. It must not know how anything is saved.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # an installed fastckpt comes first

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

from fastckpt import Checkpointer  # noqa: E402

WAYS: dict[str, dict[str, Any]] = {"a file each": {}, "gathered": {"writers_per_node": 1}}
TENSORS, COLUMNS = 8, 1024
CLOCKS = ("stall_s", "staged_s", "written_s", "committed_s")


def rounds(root: Path, mib: int, saves: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The clocks of the slowest rank, for each save of each way, the first of which warms up; and
    how many files of tensors the last one of each way has.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        f"layers.{number}.weight": DTensor.from_local(
            torch.randn((mib << 18) // TENSORS // COLUMNS, COLUMNS), mesh, [Shard(0)]
        )
        for number in range(TENSORS)
    }
    roots = {name: root / name.replace(" ", "-") for name in WAYS}
    ways = {name: Checkpointer(roots[name], keep_last=1, **WAYS[name]) for name in WAYS}
    rows = []
    for number in range(saves + 1):
        for name in [*ways] if number % 2 else [*reversed(ways)]:
            dist.barrier()
            stats = ways[name].save(number, state).result()
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, {clock: getattr(stats, clock) for clock in CLOCKS})
            row = {clock: max(its[clock] or 0.0 for its in told) for clock in CLOCKS}
            if number:
                rows.append({"way": name, "number": number, **row})
    for checkpointer in ways.values():
        checkpointer.close()
    return rows, {
        name: len([*path.glob(f"step-{saves:08d}/rank-*.safetensors")])
        for name, path in roots.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="on the file system in question")
    parser.add_argument("--mib", type=int, default=16, help="of each rank")
    parser.add_argument("--saves", type=int, default=40, help="of each way")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    made = [tempfile.mkdtemp(prefix="gathering-", dir=arguments.dir)] if not dist.get_rank() else []
    place: list[Any] = made or [None]
    dist.broadcast_object_list(place)
    try:
        rows, files = rounds(Path(place[0]), arguments.mib, arguments.saves)
        dist.barrier()
    finally:
        for path in made:
            shutil.rmtree(path)
    if dist.get_rank() == 0:
        for name in WAYS:
            mine = [row for row in rows if row["way"] == name]
            clocks = ", ".join(
                f"{clock} {1e3 * statistics.median(row[clock] for row in mine):.1f} ms"
                for clock in CLOCKS
            )
            print(f"{name}: {files[name]} files, {clocks}")
        pairs = [
            after["committed_s"] / before["committed_s"]
            for before, after in zip(
                [row for row in rows if row["way"] == "a file each"],
                [row for row in rows if row["way"] == "gathered"],
                strict=True,
            )
        ]
        print(f"committed, gathered: {statistics.median(pairs):.2f} x (bar: 1.0 x)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
