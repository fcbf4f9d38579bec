"""The directory of a DCP checkpoint, and the methods that StorageReader and StorageWriter share.

Responsible for which directory it is. It must not know what lies in it.
"""

from __future__ import annotations

import os

from torch.distributed.checkpoint.filesystem import FileSystem

from fastckpt.arguments.checks import check_path


class StorageBase:
    """A reader or writer of the checkpoint in one directory, which each reset() may change."""

    path: str  # absolute

    @property
    def checkpoint_id(self) -> str:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(FileSystem.validate_checkpoint_id(checkpoint_id))

    def _go_to(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Takes another directory, if one is named."""
        if checkpoint_id:
            self.path = os.path.abspath(check_path("path", checkpoint_id))
