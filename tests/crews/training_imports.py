"""What torch imports at the first use of an optimizer, of FSDP2 and of DCP, for scripts that train.

Responsible for their quick start: an interpreter that has imported this is forked for each rank of
a job, and none of them imports the same once more. It starts no thread, which a fork would leave
behind.
"""

from __future__ import annotations

import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import fastckpt.integrations.dcp

__all__ = ["fastckpt", "torch"]

torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
