"""torch.distributed.checkpoint in one process: save, and async_save by a thread.

The documents call save(state, checkpoint_id=path), which syncs its files but not their directory,
and async_save(...), whose future says when that has happened. The caller may change the state when
the stager has copied it: on return by default, or at staging_completion where a stager is passed
that copies in a thread. What is saved is loaded into tensors of the caller.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = []
# ///

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from fastckpt.cli.bench.saves import Save, State, nothing
from rivals.peer import Peer, fsync_tree


class Dcp(Peer):
    """torch.distributed.checkpoint.save in one process."""

    name = "dcp"
    contract = "sync; fsyncs its files, harness adds the directory"
    fills_template = True
    modules = ("torch.distributed.checkpoint",)

    def save(self, state: State, target: Path) -> Save:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=target, no_dist=True)
        return Save(nothing, lambda: fsync_tree(target))

    def load(self, target: Path, template: State) -> Any:
        import torch.distributed.checkpoint as dcp

        dcp.load(template, checkpoint_id=target, no_dist=True)
        return template


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save with its default stager."""

    name = "dcp-async"
    contract = "background thread; a fresh copy of the state is made before the call returns"
    background = True

    def save(self, state: State, target: Path) -> Save:
        import torch.distributed.checkpoint as dcp

        future = dcp.async_save(state, checkpoint_id=target, no_dist=True)
        return Save(nothing, lambda: (future.result(), fsync_tree(target)))


class DcpAsyncStager(Dcp):
    """torch.distributed.checkpoint.async_save with a reused DefaultStager, staging in a thread."""

    name = "dcp-async-stager"
    contract = (
        "background threads; state may change after staging_completion; staging memory reused"
    )
    background = True
    modules = ("torch.distributed.checkpoint", "torch.distributed.checkpoint.staging")

    def open(self) -> None:
        super().open()
        self.stager = self.new_stager()
        self.held.callback(self.stager.close)
        self.stager_is_spent = self.is_spent_by_staging()
        if self.stager_is_spent:
            self.contract += "; this torch's stager serves one save, so none is reused"

    def options(self) -> dict[str, bool]:
        """Return the stager's; pinned memory and non-blocking copies need an accelerator."""
        return {
            "use_pinned_memory": False,
            "use_shared_memory": False,
            "use_async_staging": True,
            "use_non_blocking_copy": False,
        }

    def new_stager(self) -> Any:
        """Return a stager, to be closed."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(StagingOptions(**self.options()))

    def is_spent_by_staging(self) -> bool:
        """Say whether a stager serves one save: torch 2.11's closes itself when it has staged."""
        with contextlib.closing(self.new_stager()) as stager:
            try:
                for _ in range(2):
                    stager.stage({"step": torch.zeros(1)}).result()
            except Exception:  # of whichever kind: it cannot be used
                return True
        return False

    def save(self, state: State, target: Path) -> Save:
        import torch.distributed.checkpoint as dcp

        stager = self.new_stager() if self.stager_is_spent else self.stager
        response = dcp.async_save(state, checkpoint_id=target, async_stager=stager, no_dist=True)

        def wait_durable() -> None:
            try:
                response.upload_completion.result()
            finally:
                if stager is not self.stager:
                    stager.close()
            fsync_tree(target)

        return Save(response.staging_completion.result, wait_durable)
