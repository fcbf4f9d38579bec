"""Restores with a local tier: the newest step of both tiers, and its files from the nearer one.

The module first drains steps that some ranks could not read otherwise.
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
from fastckpt.steps.newest_whole import Apart, first_whole
from fastckpt.steps.options import StepOptions
from fastckpt.steps.store import StepStore
from fastckpt.tiers.drain import DRAIN_BLOCKS_MIN, Drain, StepInfo
from fastckpt.tiers.local_tier import LocalTier, Undrained

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
    """Reads the newest step that is whole in either tier; all ranks call this together.

    Steps of the local tier that the root lacks are now drained in the background. If all ranks see
    one local directory, or nodes send each other files, they can read such a step from there
    meanwhile. Else, or if a file does not arrive, it has to be in the root first. A file of which
    this node has an undamaged copy is read from there in any case.

    Arguments, result and errors are those of first_whole(), for the root of the tier;
    `options` say how drained steps are written.
    """
    nodes = _Nodes(agreement, current, tier, options)
    taken: dict[str, str] = {}

    def noting(reader: StepReader) -> T:
        found = read(reader)
        taken.update(reader.copies.taken)
        return found

    found = first_whole(agreement, current, nodes.shelves, step, noting, tier.near, required, nodes)
    if found is not None:
        own, far = (os.path.join(as_url(each.root), "") for each in (tier.steps, tier.root))
        local, rest = (sum(path.startswith(at) for path in taken.values()) for at in (own, far))
        told = f"{local} files read from {own}, {rest} from the root"
        told += f", {len(taken) - local - rest} from other nodes" if tier.replicas else ""
        log.info("step %d: %s", found[0], told)
    return found


class _Nodes:
    """The steps of the nodes during one restore, as first_whole() asks for them (see Elsewhere).

    Attributes:
        shelves: the root, and the steps of the nodes that every rank can read.
        apart: with several nodes, all steps that they hold together.
    """

    def __init__(
        self, agreement: Round, current: Pipeline, tier: LocalTier, options: StepOptions
    ) -> None:
        self._agreement, self._tier, self._looks = agreement, tier, 0
        is_able = current.staging.allowance(None).blocks >= DRAIN_BLOCKS_MIN
        self.shelves: list[StepStore] = [tier.root]
        self.apart: list[Apart] = []
        begun = _resumed(agreement.rank, current, tier, options, self._look(is_able))
        self._coming = {each.nonce: handle for each, handle in begun}

    def _look(self, is_able: bool) -> list[Undrained]:
        tier, agreement, number = self._tier, self._agreement, self._looks
        self._looks += 1
        undrained = tier.survey(agreement, is_able, number)
        self.shelves[1:], self.apart = tier.gathered(agreement, undrained, number)
        return undrained

    def look_again(self) -> None:
        self._look(is_able=True)

    def is_coming(self, nonce: str) -> bool:
        return nonce in self._coming or self._tier.is_drained_beside(nonce)

    def await_coming(self, nonce: str) -> None:
        handle = self._coming.pop(nonce, None)
        if handle is None:
            self._tier.await_drain_beside(nonce)
            return
        handle.wait_done()
        failure = handle.failure()
        if failure is not None:
            raise failure


def _resumed(
    rank: int,
    current: Pipeline,
    tier: LocalTier,
    options: StepOptions,
    undrained: Sequence[Undrained],
) -> list[tuple[Undrained, InnerHandle]]:
    """Begins to drain the steps that the root lacks, newest first; returns each with its handle."""
    nodes, drainer, begun = tier.nodes(), tier.drainer, []
    beside = nodes.beside(rank)
    for each in undrained:
        handle = InnerHandle(tier.root.path(step_name(each.step)), time.perf_counter())
        handle.note_reported()  # the drain logs its failure, and no later save raises it
        handle.mark_staged()
        handle.mark_local()
        handle.stats.local_committed_s = None  # that was in another job
        mine = each.parts.get(beside[0], [])[beside.index(rank) :: len(beside)]
        sender = None if nodes.first(0) in each.names else min(each.names)
        info = StepInfo(each.names.get(beside[0], ""), sender, mine)
        agreement = drainer.begin(each.step)
        drain = Drain(
            handle,
            agreement,
            drainer,
            options,
            info,
            tier.fetching,
            tier.note_drained,
            is_resumed=True,
        )
        begun.append((each, current.save(drain)))
    return begun
