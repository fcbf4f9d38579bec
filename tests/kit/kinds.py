"""The kinds of checkpoint that fastckpt.open reads, and how their own readers read them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import fastckpt

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.bool),
)


def flat() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    made = {
        f"w.{str(dtype)[6:]}": torch.randint(0, 2, (9, 5), generator=generator).to(dtype)
        for dtype in DTYPES
    }
    made["large"] = torch.randn(300, 1100, generator=generator)
    made["scalar"] = torch.tensor(3.5)
    made["empty"] = torch.zeros(0, 4)
    return made


def by_fastckpt(state: dict[str, torch.Tensor], disk: Path) -> Path:
    fastckpt.save(state, disk / "a.pt").result(60)
    return disk / "a.pt"


def by_torch(state: dict[str, torch.Tensor], disk: Path) -> Path:
    torch.save(state, disk / "b.pt")
    return disk / "b.pt"


def by_safetensors(state: dict[str, torch.Tensor], disk: Path) -> Path:
    safetensors.torch.save_file(state, disk / "c.safetensors")
    return disk / "c.safetensors"


def hugging_face(state: dict[str, torch.Tensor], disk: Path) -> Path:
    files = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    weight_map = {}
    for number, (name, tensor) in enumerate(state.items()):
        file = [*files][number % 2]
        files[file][name] = tensor
        weight_map[name] = file
    for file, content in files.items():
        safetensors.torch.save_file(content, disk / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (disk / "model.safetensors.index.json").write_text(json.dumps(index))
    return disk


def steps(state: dict[str, torch.Tensor], disk: Path) -> Path:
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(3)})
        checkpointer.save(2, state).result(60)
    return disk / "run"


def compressed(state: dict[str, torch.Tensor], disk: Path) -> Path:
    with fastckpt.Checkpointer(disk / "run", codec="zstd") as checkpointer:
        checkpointer.save(2, state).result(60)
    return disk / "run" / "step-00000002"


def dcp_by_torch(state: dict[str, torch.Tensor], disk: Path) -> Path:
    dcp.save(dict(state), checkpoint_id=disk / "dcp")
    return disk / "dcp"


def dcp_by_fastckpt(state: dict[str, torch.Tensor], disk: Path) -> Path:
    from fastckpt.integrations.dcp import Writer

    dcp.save(dict(state), storage_writer=Writer(disk / "dcp"))
    return disk / "dcp"


def iterations(state: dict[str, torch.Tensor], disk: Path) -> Path:
    """As if the job was killed between the commit and the move of Megatron's tracker."""
    os.renames(dcp_by_torch(state, disk), disk / "run" / "iter_0000012")
    (disk / "run" / "iter_0000013").mkdir()
    (disk / "run" / "latest_checkpointed_iteration.txt").write_text("11")
    return disk / "run"


KINDS = {
    "fastckpt": (by_fastckpt, True),
    "torch": (by_torch, False),
    "safetensors": (by_safetensors, False),
    "hugging face": (hugging_face, False),
    "root": (steps, True),
    "compressed step": (compressed, True),
    "dcp of torch": (dcp_by_torch, False),
    "dcp of fastckpt": (dcp_by_fastckpt, True),
    "megatron": (iterations, False),
}


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert (
        torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        if found.ndim and found.numel()
        else found.tolist() == expected.tolist()
    )
