"""Megatron-core: its checkpoints, in its own torch_dist format, saved and loaded by fastckpt.

Responsible for the versions supported and the public names. Stock Megatron loads what is saved here
without fastckpt, and the other way round.
"""

from fastckpt.integrations import require

require("megatron-core", "0.16.1", "0.17", "fastckpt.integrations.megatron")

from fastckpt.integrations.megatron.conversion import convert  # noqa: E402
from fastckpt.integrations.megatron.load import load_checkpoint  # noqa: E402
from fastckpt.integrations.megatron.save import (  # noqa: E402
    save_checkpoint,
    wait_for_checkpoints,
)
from fastckpt.integrations.megatron.strategies import LoadStrategy, SaveStrategy  # noqa: E402
from fastckpt.integrations.megatron.training import install  # noqa: E402

__all__ = [
    "LoadStrategy",
    "SaveStrategy",
    "convert",
    "install",
    "load_checkpoint",
    "save_checkpoint",
    "wait_for_checkpoints",
]
