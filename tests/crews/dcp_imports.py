"""What the nursery of ranks imports before it forks them, for torch.distributed.checkpoint.

Responsible for their quick start. It starts no thread, which a fork would leave behind.
"""

from __future__ import annotations

import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp

import tests.crews.dcp_bodies

__all__ = ["tests", "torch"]

torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
