"""What a transformers.Trainer imports at its first use, for scripts that train with one.

Responsible for their quick start, as crews/training_imports.py is.
"""

from __future__ import annotations

from contextlib import suppress

import transformers
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

import fastckpt.integrations.transformers
import tests.crews.accelerate_imports

__all__ = ["GPT2LMHeadModel", "Trainer", "TrainingArguments", "fastckpt", "tests", "transformers"]

with suppress(ImportError):  # a table of a thousand patterns, which the first save of a model makes
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("gpt2")
