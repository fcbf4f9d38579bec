"""fastsafetensors: files of safetensors, read by threads of its own or by GPUDirect Storage.

Its documents open files by fastsafe_open and ask for tensors, which share the buffer of the file.
It only loads: the file is safetensors'. Without a GPU it copies by pread, with `nogds`.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["fastsafetensors==0.5.0", "safetensors==0.8.0"]
# ///

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastckpt.cli.bench.saves import State
from rivals.safetensors_file import FILE, SafetensorsFile


class FastSafetensors(SafetensorsFile):
    """fastsafetensors.fastsafe_open on what safetensors has saved."""

    name = "fastsafetensors"
    contract = "loads alone, tensors of a safetensors file; no checksum"
    loads_only = True
    modules = ("safetensors.torch", "fastsafetensors")

    def load(self, target: Path, template: State) -> Any:
        from fastsafetensors import fastsafe_open

        with fastsafe_open([str(target / FILE)], device="cpu", nogds=True) as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}
