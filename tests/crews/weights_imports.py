"""What the nursery of ranks imports before it forks those that publish weights."""

from __future__ import annotations

import torch
import torch.distributed.tensor

import tests.crews.weights_bodies

__all__ = ["tests", "torch"]
