"""safetensors: one file of flat tensors.

The documents call save_file(tensors, path) and load_file(path). The few things in the state that
are no tensors are left out. On return the bytes lie in the page cache; nothing has been synced.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["safetensors==0.8.0"]
# ///

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastckpt.cli.bench.saves import Save, State, by_safetensors, load_by_safetensors, nothing
from rivals.peer import Peer, fsync_tree

FILE = "state.safetensors"


class SafetensorsFile(Peer):
    """safetensors.torch.save_file of the flattened tensors."""

    name = "safetensors"
    contract = "sync; tensors only, no checksum; page cache on return, harness fsyncs"
    modules = ("safetensors.torch",)

    def save(self, state: State, target: Path) -> Save:
        by_safetensors(state, target / FILE)
        return Save(nothing, lambda: fsync_tree(target))

    def load(self, target: Path, template: State) -> Any:
        return load_by_safetensors(target / FILE, "cpu")
