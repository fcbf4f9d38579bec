"""The example train_dataloader.py, every rank of which kills itself in mid-epoch.

Responsible for a death at a known step, after the saves before it: `killed_feed.py STEP` and the
example's own arguments. Must not know what the example reads.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Any

from fastckpt.saving import pipeline
from tests.kit.paths import ROOT

sys.path[0] = str(ROOT / "examples")
train_dataloader = import_module("train_dataloader")
killed_at = int(sys.argv.pop(1))
report = train_dataloader.report


def report_or_die(log: Any, rank: Any, step: int, loss: float, last: bool) -> None:
    if step == killed_at:
        pipeline.current().drain()
        os.kill(os.getpid(), signal.SIGKILL)
    report(log, rank, step, loss, last)


train_dataloader.report = report_or_die
if __name__ == "__main__":
    sys.exit(train_dataloader.main())
