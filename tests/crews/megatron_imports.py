"""What the nursery of Megatron's ranks imports before it forks them.

Responsible for their quick start: importing megatron-core takes seconds. It starts no thread, which
a fork would leave behind.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import megatron.core.dist_checkpointing.strategies.filesystem_async as stock_writer
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.optimizer

import tests.crews.megatron_bodies
import tests.crews.megatron_layouts
import tests.crews.megatron_training

__all__ = ["megatron", "tests"]


def results_queue() -> Any:
    """What Megatron's own writers tell of, from a process that is forked: Megatron starts an
    interpreter for that, which imports torch.
    """
    if stock_writer._results_queue is None:
        stock_writer._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    return stock_writer._results_queue


if hasattr(stock_writer, "_get_write_results_queue"):
    stock_writer._get_write_results_queue = results_queue
