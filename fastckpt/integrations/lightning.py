"""Saves Lightning's checkpoints with fastckpt: `Trainer(plugins=[FastckptCheckpointIO()])`.

Responsible for the classes that the package `lightning` accepts; _lightning.py has their methods.
"""

from __future__ import annotations

from fastckpt.integrations import require
from fastckpt.integrations._lightning import BackgroundCheckpointIO, ShardedStrategy

require("lightning", "2.5", "3", __name__)

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402


class FastckptCheckpointIO(BackgroundCheckpointIO, TorchCheckpointIO):  # type: ignore[misc]
    """Saves the checkpoints of a Trainer or a Fabric in the background, atomically and durably.

    It supports strategies that save one file (one device, DDP) and FastckptModelParallelStrategy.
    Lightning itself still writes the FSDP strategy's sharded checkpoints and all of the DeepSpeed
    strategy's checkpoints. Lightning and torch.load can read the files. A file that ModelCheckpoint
    removes stays until a newer file is committed. fit() returns when all saves have ended.

    Args:
        asynchronous: True: a save returns when everything is copied. False: a save returns when the
            file is committed. Saves for SLURM's requeueing, and saves to a directory with a
            symbolic link to another file in it (ModelCheckpoint with save_last="link"), always wait
            for the commit.
        options: how errors are handled and files are written (see SaveOptions). The step fence is
            not supported, and sharded checkpoints are staged in host memory. Every failed save is
            logged; with on_error="raise" the next save, or the end of fit(), raises the error. In a
            directory with such links the error is always raised, because Lightning would otherwise
            make a link to the missing file.

    Raises:
        ValueError, TypeError: `options` has the step fence or is not a SaveOptions.
    """

    _stock = TorchCheckpointIO


class FastckptModelParallelStrategy(ShardedStrategy, ModelParallelStrategy):  # type: ignore[misc]
    """A ModelParallelStrategy whose sharded checkpoints (FSDP2, tensor parallel) are saved by the
    FastckptCheckpointIO in the Trainer's plugins. Each rank writes its shards in the background.
    The directory has Lightning's layout and is committed atomically.

    Args:
        args, kwargs: ModelParallelStrategy's arguments.
    """
