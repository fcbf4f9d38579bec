"""What the nursery of Megatron's ranks imports before it forks them.

Responsible for their quick start: importing megatron-core takes seconds. It starts no thread, which
a fork would leave behind.
"""

from __future__ import annotations

import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.optimizer

import tests.crews.megatron_bodies
import tests.crews.megatron_layouts
import tests.crews.megatron_training

__all__ = ["megatron", "tests"]
