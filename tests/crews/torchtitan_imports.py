"""What a Trainer of torchtitan imports, for scripts that train with one on CPUs.

Responsible for their quick start, as crews/training_imports.py is.
"""

from __future__ import annotations

import datasets
import torchdata.stateful_dataloader

import tests.crews.training_imports

__all__ = ["datasets", "tests", "torchdata"]
