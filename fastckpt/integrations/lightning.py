"""Lightning's checkpoints through fastckpt: `Trainer(plugins=[FastckptCheckpointIO()])`.

Responsible for the class that the package `lightning` accepts. It must not know what that does with
files.
"""

from __future__ import annotations

from fastckpt.integrations import require
from fastckpt.integrations._lightning import BackgroundFiles

require("lightning", "2.6", "3", __name__)

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO  # noqa: E402


class FastckptCheckpointIO(BackgroundFiles, TorchCheckpointIO):  # type: ignore[misc]
    """Saves the checkpoints of a Trainer or a Fabric in the background, atomically and durably.

    It concerns strategies that save one file (one device, DDP): sharded checkpoints of Lightning's
    FSDP and ModelParallel strategies, and all of its DeepSpeed strategy, go past it. The files are
    what Lightning and torch.load read. A file that ModelCheckpoint removes stays until a newer one
    has committed; fit() ends when all are there.

    Args:
        asynchronous: a save returns when everything was copied. False: when the file is durable and
            committed. Saves to a directory in which a symbolic link names a file beside it
            (ModelCheckpoint with save_last="link") and those of SLURM's requeueing always do that.
        on_error: every failed save is logged. "raise": the next save, or the end of fit(), raises
            the error. "warn": training goes on. In a directory with links a failure is raised in
            any case, since Lightning would put a link to the file that is missing.
        backend, durable, staging, staging_bytes: as fastckpt.save's.

    Raises:
        ValueError, TypeError: an unknown on_error; an option that fastckpt.save refuses.
    """

    _stock = TorchCheckpointIO
