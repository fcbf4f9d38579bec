"""fastsafetensors: loads of the file that safetensors writes, by threads and without mmap.

The documents register files with a SafeTensorsFileLoader, copy them to the device and take tensors
out of the buffers, which hold their memory until they are closed. Without a GPU that is `nogds`.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["fastsafetensors==0.5.0"]
# ///

from __future__ import annotations

from pathlib import Path
from typing import Any

from state import State

from rivals.safetensors_file import FILE, SafetensorsFile


class FastSafetensors(SafetensorsFile):
    """SafeTensorsFileLoader into host memory."""

    name = "fastsafetensors"
    contract = "loads only, the file of safetensors; no checksum"
    loads_only = True
    modules = ("safetensors.torch", "fastsafetensors")

    def load(self, target: Path, template: State) -> Any:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        self.held.close()  # the tensors of the load before
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        self.held.callback(loader.close)
        loader.add_filenames({0: [str(target / FILE)]})
        buffers = loader.copy_files_to_device()
        self.held.callback(buffers.close)
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}
