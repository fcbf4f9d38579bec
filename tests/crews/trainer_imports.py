"""What a transformers.Trainer imports at its first use, for scripts that train with one.

Responsible for their quick start, as crews/training_imports.py is.
"""

from __future__ import annotations

import transformers
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

import fastckpt.integrations.transformers
import tests.crews.accelerate_imports

__all__ = ["GPT2LMHeadModel", "Trainer", "TrainingArguments", "fastckpt", "tests", "transformers"]
