"""What tests need of torch that only newer ones have, or the mark that skips a test without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

dcp: Any
try:
    from fastckpt.integrations import dcp
except ImportError:
    dcp = None

NEEDS_DCP = "fastckpt.integrations.dcp needs torch 2.6"
needs_dcp = pytest.mark.skipif(dcp is None, reason=NEEDS_DCP)
needs_fsdp2 = pytest.mark.skipif(
    torch.__version__ < (2, 7), reason="fully_shard() trains on the CPU from torch 2.7 on"
)
