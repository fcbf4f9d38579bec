"""What a Lightning Trainer imports at its first use, for scripts that train with one.

Responsible for their quick start, as crews/training_imports.py is.
"""

from __future__ import annotations

import lightning.pytorch
import lightning.pytorch.strategies

import fastckpt.integrations.lightning
import tests.crews.training_imports

__all__ = ["fastckpt", "lightning", "tests"]
