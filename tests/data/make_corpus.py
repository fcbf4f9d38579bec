"""Writes the seeds of tests/torture/mutants.py of formats that the golden files do not have.

    python tests/data/make_corpus.py DIRECTORY

Responsible for one small whole file of each. Inputs that have once found something lie beside them,
and stay.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from fastckpt.directories import dcp_metadata
from fastckpt.engine.codec import PlanesEncoder
from fastckpt.plan.image import ItemRun

BLOCK_BYTES = 8 << 10


def main() -> None:
    folder = Path(sys.argv[1])
    state = {
        "model": {"w": torch.arange(60.0).reshape(6, 10), "tied": torch.ones(3, dtype=torch.int8)},
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "nest": [1, 2.5, "text", None, (b"bytes", {"k": {1, 2}})],
    }
    torch.save(state, folder / "torch.pt")
    with zipfile.ZipFile(folder / "torch.pt") as opened:
        (name,) = [each for each in opened.namelist() if each.endswith("data.pkl")]
        (folder / "torch.pickle").write_bytes(opened.read(name))
    save_file({"w": torch.arange(60.0), "b": torch.ones(3, 1)}, folder / "stock.safetensors")
    dcp.save(state["model"], checkpoint_id=folder / "dcp")
    metadata = (folder / "dcp" / ".metadata").read_bytes()
    (folder / "stock.metadata").write_bytes(metadata)
    value = dcp.FileSystemReader(folder / "dcp").read_metadata()
    (folder / "ours.metadata").write_bytes(dcp_metadata.encode(value))
    for path in (folder / "dcp").iterdir():
        path.unlink()
    (folder / "dcp").rmdir()
    weights = torch.randn(BLOCK_BYTES // 2, generator=torch.Generator().manual_seed(0))
    block = memoryview((weights * 0.02).bfloat16().view(torch.uint8).numpy()).cast("B")
    encoder = PlanesEncoder([ItemRun(0, 2, True)], BLOCK_BYTES)
    target = memoryview(bytearray(2 * BLOCK_BYTES))
    (folder / "bf16.planes").write_bytes(target[: encoder.encode(block, 0, target)])


if __name__ == "__main__":
    main()
