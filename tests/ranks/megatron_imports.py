"""What the nursery of Megatron's ranks imports before it forks them.

Responsible for their quick start: importing megatron-core takes seconds. It starts no thread, which
a fork would leave behind.
"""

from __future__ import annotations

import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.optimizer

import ranks.megatron_bodies
import ranks.megatron_fsdp
import ranks.megatron_layouts

__all__ = ["megatron", "ranks"]
