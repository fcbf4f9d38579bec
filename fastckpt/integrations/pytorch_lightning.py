"""The CheckpointIO of fastckpt.integrations.lightning, for the package `pytorch_lightning`.

Responsible for the classes that this package accepts, because its base classes are not
`lightning`'s.
"""

from __future__ import annotations

from fastckpt.integrations import require
from fastckpt.integrations._lightning import BackgroundCheckpointIO, ShardedStrategy

require("pytorch-lightning", "2.5", "3", __name__)

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO  # noqa: E402
from pytorch_lightning.strategies import ModelParallelStrategy  # noqa: E402


class FastckptCheckpointIO(BackgroundCheckpointIO, TorchCheckpointIO):  # type: ignore[misc]
    """The CheckpointIO for pytorch_lightning.Trainer(plugins=[...]); see
    fastckpt.integrations.lightning.
    """

    _stock = TorchCheckpointIO


class FastckptModelParallelStrategy(ShardedStrategy, ModelParallelStrategy):
    """The strategy for pytorch_lightning's Trainer; see fastckpt.integrations.lightning."""
