"""Writes the golden directories, which every later version has to read.

    python tests/data/make_directories.py DIRECTORY

Responsible for what is in them, as values that do not depend on a random generator: a checkpoint of
DCP, an export with its list of files, and a step whose shards are byte planes. It was run once, for
the directories in golden/ beside it. Must not know how anything is checked.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import fastckpt
from fastckpt.integrations import dcp

STEP = 9


def tensors() -> dict[str, torch.Tensor]:
    """What the directories of DCP and of Hugging Face hold."""
    whole = torch.arange(600, dtype=torch.float32).reshape(20, 30) / 8
    return {"whole": whole, "half": whole[:5].to(torch.bfloat16), "counts": torch.arange(7)}


def weights() -> torch.Tensor:
    """A tensor that is kept in a shard, and whose planes pack well."""
    return (torch.arange(400_000) // 1_000).to(torch.float32).reshape(400, 1_000)


def write(directory: Path) -> None:
    """All of it, into a directory that exists."""
    dcp.save({"model": tensors()}, checkpoint_id=directory / "dcp")
    fastckpt.export(tensors(), directory / "export").result()
    with fastckpt.Checkpointer(directory / "planes", codec="planes") as checkpointer:
        checkpointer.save(STEP, {"weights": weights(), "epoch": 3}).result()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
