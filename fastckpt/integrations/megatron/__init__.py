"""Saves and loads Megatron-core's checkpoints in Megatron's own torch_dist format.

Responsible for the supported versions and the public names. Stock Megatron loads checkpoints that
fastckpt saved, and fastckpt loads those of stock Megatron.
"""

import logging

from torch.torch_version import TorchVersion

from fastckpt.integrations import require

# The newest version tried. A newer one is refused if it lacks functions that are used here.
TRIED = "0.19.2"

_version = require("megatron-core", "0.16.1", "1", __name__)
if TorchVersion(_version) > TRIED:
    logging.getLogger("fastckpt").warning(
        "%s was tested with megatron-core 0.16.1 to %s, not with %s", __name__, TRIED, _version
    )

try:
    from fastckpt.integrations.megatron.load import load_checkpoint
    from fastckpt.integrations.megatron.save import save_checkpoint
    from fastckpt.integrations.megatron.saves import Saves
    from fastckpt.integrations.megatron.strategies import LoadStrategy, SaveStrategy
    from fastckpt.integrations.megatron.training import install
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"{__name__} does not support megatron-core {_version} (tested: 0.16.1 to {TRIED}): {error}"
    ) from error

__all__ = [
    "LoadStrategy",
    "SaveStrategy",
    "Saves",
    "install",
    "load_checkpoint",
    "save_checkpoint",
]
