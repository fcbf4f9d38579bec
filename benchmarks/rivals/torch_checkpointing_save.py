"""torch_checkpointing: an asynchronous saver that stages in shared memory for a writer process.

The documents call save(path, state) and take lock() around the optimizer step, which waits until
the state has been copied. The future says when the bytes are written; nothing has been synced.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch-checkpointing==0.1.1"]
# ///

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fastckpt.cli.bench.saves import Save, State
from rivals.peer import Peer, fsync_tree


class TorchCheckpointing(Peer):
    """CheckpointManager as it is configured by default, but through the page cache."""

    name = "torch_checkpointing"
    contract = "background process; state may change under its lock(); page cache, harness fsyncs"
    background = True
    fills_template = True
    modules = ("torch_checkpointing",)

    def open(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().open()
        logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)
        # Its O_DIRECT default hands unaligned buffers to write(), which ext4 and XFS refuse.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.checkpoints = CheckpointManager(CheckpointManager.Config(storage_config=storage))
        self.held.callback(self.checkpoints.close)

    def save(self, state: State, target: Path) -> Save:
        future = self.checkpoints.save(str(target / "step"), state)
        if future is None:
            raise RuntimeError("torch_checkpointing saved synchronously although asked not to")

        def wait_staged() -> None:
            with self.checkpoints.lock():
                pass

        return Save(wait_staged, lambda: (future.result(), fsync_tree(target)))

    def load(self, target: Path, template: State) -> Any:
        return self.checkpoints.load(str(target / "step"), into=template)
