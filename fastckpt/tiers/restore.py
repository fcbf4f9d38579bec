"""Restores with a local tier: finds the newest step in both tiers, and reads its files from the
nearer tier.

The module first begins to drain the steps that are missing in the root.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastckpt.errors import as_url
from fastckpt.formats.step_names import step_name
from fastckpt.ranks.round import Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.pipeline import Pipeline
from fastckpt.steps.load import StepReader
from fastckpt.steps.newest_whole import first_whole
from fastckpt.steps.options import StepOptions
from fastckpt.tiers.drain import DRAIN_BLOCKS_MIN, StepInfo
from fastckpt.tiers.local_tier import LocalTier
from fastckpt.tiers.survey import Survey

log = logging.getLogger("fastckpt")

T = TypeVar("T")


def first_whole_of_tiers(
    agreement: Round,
    current: Pipeline,
    tier: LocalTier,
    options: StepOptions,
    step: int | None,
    read: Callable[[StepReader], T],
    required: bool,
) -> tuple[int, T] | None:
    """Reads the newest step that is intact in either tier; all ranks call this together.

    Steps that only the local tier has are drained in the background. Ranks can read such a step
    before it is in the root if all ranks see one local directory, or nodes send each other files.
    Otherwise, or if a file cannot be fetched, the drain must end first. An undamaged copy of a file
    on this node is preferred in any case.

    For other arguments, the result and errors see first_whole(), for the root of the tier.
    `options` apply to drained steps.
    """
    survey = Survey(tier, agreement)
    undrained = survey.look(current.staging.allowance(None).blocks >= DRAIN_BLOCKS_MIN)
    survey.coming = _resumed(current, tier, options, undrained)
    sources: dict[str, str] = {}

    def noting(reader: StepReader) -> T:
        result = read(reader)
        sources.update(reader.copies.sources)
        return result

    result = first_whole(
        agreement, current, survey.shelves, step, noting, tier.near, required, survey
    )
    if result is not None:
        own, far = (os.path.join(as_url(each.root), "") for each in (tier.steps, tier.root))
        local, rest = (sum(path.startswith(at) for path in sources.values()) for at in (own, far))
        text = f"{local} files read from {own}, {rest} from the root"
        text += f", {len(sources) - local - rest} from other nodes" if tier.peers else ""
        log.info("step %d: %s", result[0], text)
    return result


def _resumed(
    current: Pipeline, tier: LocalTier, options: StepOptions, undrained: Sequence[StepInfo]
) -> dict[str, InnerHandle]:
    """Begins to drain the steps that are missing in the root, newest first; returns handles by
    nonce.
    """
    handles = dict[str, InnerHandle]()
    for info in undrained:
        handle = InnerHandle(tier.root.path(step_name(info.step)), time.perf_counter())
        handle.note_reported()  # the drain logs its failure, and no later save raises it
        handle.mark_staged()
        handle.mark_local()
        handle.stats.local_committed_s = None  # that was in another job
        drain = tier.drain(handle, tier.drainer.begin(info.step), options, info, is_resumed=True)
        handles[info.nonce] = current.save(drain)
    return handles
