"""Writes the golden files of the formats, which every later version has to read.

    python tests/data/make_golden.py DIRECTORY

Responsible for what is in them, as values that do not depend on a random generator: the tests
compare what is loaded with values() and file_values(). It was run once for the files beside it, and
is run again by the tests to see that the same content still gives the same bytes where the format
leaves no choice. Must not know how anything is checked.
"""

from __future__ import annotations

import gzip
import multiprocessing
import sys
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastckpt
from fastckpt.formats.safetensors import DTYPES

RANKS = 2
PLAIN_STEP, ZSTD_STEP = 3, 7


def counted(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers that every dtype has, zero and one among them."""
    return (torch.arange(elements) % 3).to(dtype)


def values() -> dict[str, Any]:
    """The state of the step without codec: the tensors below "sharded" and "whole" are DTensors."""
    return {
        "sharded": {name: counted(30, dtype).reshape(6, 5) for name, dtype in DTYPES.items()},
        "columns": counted(77, torch.float32).reshape(7, 11),
        "whole": {
            "a/b": counted(8, torch.int64),
            "a~b": counted(5, torch.float16),
            "c@d": counted(3, torch.bfloat16),
        },
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "nest": [1, 2.5, "text", None, True, b"bytes", (1, [2, {"k": 3, 4: "five"}])],
        "ordered": OrderedDict(b=1, a=2),
        "like a placeholder": [
            {"fastckpt.tensor": "w"},
            {"fastckpt.escaped": {"fastckpt.per_rank": 1}},
        ],
        "own": 0,
    }


def large() -> torch.Tensor:
    """A tensor of two blocks that packs well."""
    return (torch.arange(2_500_000, dtype=torch.int32) // 9_000).reshape(2_500, 1_000)


def file_values() -> dict[str, Any]:
    """The object of the files: shared storages, views, a Parameter, and 1 MiB of one tensor."""
    base = counted(300_000, torch.float32)
    return {
        "base": base,
        "view": base[5:20],
        "turned": base[:12].view(3, 4).t(),
        "parameter": torch.nn.Parameter(counted(6, torch.float32)),
        "dtypes": {name: counted(7, dtype) for name, dtype in DTYPES.items()},
        "empty": torch.empty(0),
        "step": 12,
    }


def small_file_values() -> dict[str, Any]:
    """file_values() with a small base, for a file that is kept as it is."""
    found = file_values()
    base = found["base"][:500].clone()
    return found | {"base": base, "view": base[5:20], "turned": base[:12].view(3, 4).t()}


def join(directory: Path, rank: int, ranks: int) -> None:
    store = dist.FileStore(str(directory / f"store-{ranks}"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )


def save_as_rank(directory: Path, rank: int) -> None:
    """One rank's part of the step without codec."""
    join(directory, rank, RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))

    def spread(full: torch.Tensor, dim: int | None) -> DTensor:
        local = full if dim is None else full.chunk(RANKS, dim)[rank].contiguous()
        return DTensor.from_local(
            local,
            mesh,
            [Replicate() if dim is None else Shard(dim)],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )

    state = values()
    state["sharded"] = {name: spread(tensor, 0) for name, tensor in state["sharded"].items()}
    state["columns"] = spread(state["columns"], 1)
    state["whole"] = {name: spread(tensor, None) for name, tensor in state["whole"].items()}
    state["own"] = fastckpt.PerRank(("rank", rank))
    with fastckpt.Checkpointer(directory / "step") as checkpointer:
        checkpointer.save(PLAIN_STEP, state)
    dist.destroy_process_group()


def write(directory: Path) -> None:
    """All of it, into a directory that exists."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=save_as_rank, args=(directory, rank)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    fastckpt.save(small_file_values(), directory / "file-v1.pt").result()
    join(directory, 0, 1)
    path = directory / "group-v1.pt"
    fastckpt.save(file_values(), path, group=dist.group.WORLD).result()
    dist.destroy_process_group()
    (directory / "group-v1.pt.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()
    for process in ranks:
        process.join(120)
    if any(process.exitcode != 0 for process in ranks):
        raise SystemExit("a rank failed")
    with fastckpt.Checkpointer(directory / "step", codec="zstd") as checkpointer:
        checkpointer.save(ZSTD_STEP, {"large": large(), "own": fastckpt.PerRank([1, 2])})
    for store in directory.glob("store-*"):
        store.unlink()


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(Path(sys.argv[1]))
