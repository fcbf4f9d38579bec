"""How many operations a save asks of the job's store: counted on the real save, by many ranks.

All ranks are threads of this process; each runs a fastckpt step save with a connection of its own
to one TCPStore. It must not know what the counts are held against.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastckpt.engine.devices import DeviceSources
from fastckpt.formats import torch_pickle
from fastckpt.handle import InnerHandle
from fastckpt.plan.boxes import Box
from fastckpt.ranks import round as agreement
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.ranks.same_state import Description
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.save import Save
from fastckpt.state.tree import Leaf
from fastckpt.steps.capture import Content
from fastckpt.steps.options import StepOptions
from fastckpt.steps.place import StepPlace
from fastckpt.steps.plan import StepPlan
from fastckpt.steps.root import Steps

TIMEOUT_S = 120.0
BUDGET_BYTES = 1 << 30
ROW_ELEMENTS = 16384
# Ranks that wait for longer than this look who is missing. So many on so few cores always would.
LOOK_S = 60.0


class Counting(Coordinator):
    """A Coordinator that counts by itself which operations only found that something is not there.

    How often a rank asks again depends on how long it waits, and not on the protocol.
    """

    repeated = 0

    def call(self, operation: str, key: str | list[str], *values: Any) -> Any:
        result = super().call(operation, key, *values)
        if operation == "check":
            self.repeated += not result
        elif operation == "get" and str(key).endswith("/left"):
            self.repeated += int(result) < self.world_size
        return result


def one_save(ranks: int, directory: Path) -> list[dict[str, int]]:
    """Save one small step by so many ranks; returns for each its operations, without those
    repeated while it waited, and these.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    weight = torch.zeros(ranks, ROW_ELEMENTS)
    everybody = tuple(range(ranks))
    pipeline = Pipeline(budget_bytes=BUDGET_BYTES)
    speakers = [Counting(store, rank, ranks, "operations") for rank in range(ranks)]
    failures: list[BaseException] = []

    def save(rank: int) -> Save:
        leaf = Leaf("weight", weight, tuple(weight.shape), Box((0, 0), (*weight.shape,)),
                    everybody, "replicated")  # fmt: skip
        protocol = torch.serialization.DEFAULT_PROTOCOL
        objects = torch_pickle.capture({}, pickle, protocol, False, False) if rank == 0 else None
        content = Content(
            [leaf], objects, b"", Description([("weight", "float32")]), DeviceSources(), []
        )
        handle, options = InnerHandle(str(directory), 0.0), StepOptions(durable=False)
        round_ = speakers[rank].begin("step 0", TIMEOUT_S)
        steps = Steps(pipeline.storage, str(directory))
        place = StepPlace(steps, round_, 0, options)
        lent = (pipeline.storage, lambda _keys: None)
        plan = StepPlan(handle, round_, 0, content, place, options, *lent)
        return Save(handle, round_, plan, place, options, fence="call", lane=steps.root)

    def run(job: Save) -> None:
        error = job.run(pipeline)
        if error is not None:
            failures.append(error)
        job.end(pipeline)

    jobs = [save(rank) for rank in range(ranks)]
    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    looking, agreement._LOOK_S = agreement._LOOK_S, LOOK_S
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        agreement._LOOK_S = looking
    for speaker in speakers:
        speaker.close()
    pipeline.close()
    if failures:
        raise failures[0]
    return [
        {"needed": job.agreement.operations - speaker.repeated, "repeated": speaker.repeated}
        for job, speaker in zip(jobs, speakers, strict=True)
    ]


def summary(counts: list[dict[str, int]]) -> dict[str, Any]:
    """Return the counts of the first rank, and how often the others have which count."""
    others = Counter(count["needed"] for count in counts[1:])
    return {
        "ranks": len(counts),
        "rank_0": counts[0]["needed"],
        "others": {str(needed): times for needed, times in sorted(others.items())},
        "others_max": max(others),
        "repeated_mean": sum(count["repeated"] for count in counts) / len(counts),
    }
