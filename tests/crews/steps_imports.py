"""What the nursery of ranks imports before it forks them: everything that they will need.

Responsible for their quick start: torch imports much of itself when an optimizer or a DTensor is
first used, and each rank would do so anew. It starts no thread, which a fork would leave behind.
"""

from __future__ import annotations

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import tests.crews.steps_bodies
import tests.crews.steps_lives

__all__ = ["tests", "torch"]

torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
