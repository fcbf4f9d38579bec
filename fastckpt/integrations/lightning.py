"""Lightning's checkpoints through fastckpt: `Trainer(plugins=[FastckptCheckpointIO()])`.

Responsible for the class that the package `lightning` accepts; _lightning.py has its methods.
"""

from __future__ import annotations

from fastckpt.integrations import require
from fastckpt.integrations._lightning import BackgroundCheckpointIO, ShardedStrategy

require("lightning", "2.5", "3", __name__)

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402


class FastckptCheckpointIO(BackgroundCheckpointIO, TorchCheckpointIO):  # type: ignore[misc]
    """Saves the checkpoints of a Trainer or a Fabric in the background, atomically and durably.

    It serves strategies that save one file (one device, DDP) and FastckptModelParallelStrategy;
    sharded checkpoints of the FSDP strategy, and all of the DeepSpeed strategy, are still written
    by Lightning. The files are those that Lightning and torch.load read. A file that
    ModelCheckpoint removes stays until a newer one has committed; fit() returns when all saves have
    ended.

    Args:
        asynchronous: True: a save returns when everything is copied. False: when the file is
            committed; as saves always do for SLURM's requeueing, and in a directory where a
            symbolic link names a file beside it (ModelCheckpoint with save_last="link").
        options: what becomes of errors, and how files are written (see SaveOptions); without the
            step fence, and sharded checkpoints go through the host. Every failed save is logged;
            with on_error="raise" the next save, or the end of fit(), raises the error. In a
            directory with such links it is always raised, since Lightning would make a link to the
            missing file.

    Raises:
        ValueError, TypeError: options have the step fence, or are none.
    """

    _stock = TorchCheckpointIO


class FastckptModelParallelStrategy(ShardedStrategy, ModelParallelStrategy):  # type: ignore[misc]
    """A ModelParallelStrategy whose sharded checkpoints (FSDP2, tensor parallel) are saved by the
    FastckptCheckpointIO among the Trainer's plugins. Each rank writes its shards in the background;
    the directory is Lightning's, whole or not there.

    Args:
        args, kwargs: as ModelParallelStrategy's.
    """
