"""What an Accelerator imports at its first use, for scripts that train with one.

Responsible for their quick start, as crews/training_imports.py is.
"""

from __future__ import annotations

from contextlib import suppress

import accelerate
import accelerate.checkpointing

import fastckpt.integrations.accelerate
import tests.crews.training_imports

__all__ = ["accelerate", "fastckpt", "tests"]

with suppress(ImportError):  # Accelerate looks whether a model is one of DeepSpeed's
    import deepspeed  # noqa: F401
with suppress(ImportError):  # and, on several ranks, whether data are of this package
    import datasets  # noqa: F401
