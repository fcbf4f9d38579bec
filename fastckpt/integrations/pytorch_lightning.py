"""The CheckpointIO of fastckpt.integrations.lightning, for the package `pytorch_lightning`.

Responsible for the class that this package accepts: its base class is another than `lightning`'s.
"""

from __future__ import annotations

from fastckpt.integrations import require
from fastckpt.integrations._lightning import BackgroundCheckpointIO, ShardedStrategy

require("pytorch-lightning", "2.5", "3", __name__)

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO  # noqa: E402
from pytorch_lightning.strategies import ModelParallelStrategy  # noqa: E402


class FastckptCheckpointIO(BackgroundCheckpointIO, TorchCheckpointIO):  # type: ignore[misc]
    """Saves for pytorch_lightning.Trainer(plugins=[...]), as fastckpt.integrations.lightning's."""

    _stock = TorchCheckpointIO


class FastckptModelParallelStrategy(ShardedStrategy, ModelParallelStrategy):
    """As fastckpt.integrations.lightning's, for the Trainer of pytorch_lightning."""
