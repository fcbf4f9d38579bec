"""torch.save to one file, and the same without a checksum.

The documents call torch.save(state, path). On return the bytes lie in the page cache; nothing has
been synced.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = []
# ///

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fastckpt.cli.bench.saves import Save, State, by_torch, load_by_torch, nothing
from rivals.peer import Peer, fsync_tree


class TorchSave(Peer):
    """torch.save to one file."""

    name = "torch.save"
    contract = "sync; page cache on return, harness fsyncs"

    def save(self, state: State, target: Path) -> Save:
        by_torch(state, target / "state.pt")
        return Save(nothing, lambda: fsync_tree(target))

    def load(self, target: Path, template: State) -> Any:
        return load_by_torch(target / "state.pt", "cpu")


class TorchSaveNoCrc(TorchSave):
    """torch.save with the zip's CRC-32 switched off."""

    name = "torch.save-nocrc"
    contract = "sync; no checksum; page cache on return, harness fsyncs"

    def save(self, state: State, target: Path) -> Save:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            return super().save(state, target)
        finally:
            torch.serialization.set_crc32_options(before)
