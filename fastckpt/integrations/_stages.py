"""Pipeline stages: groups of ranks that hold different parts of a model, under different names.

Responsible for building the same state, with the names of all stages, on every rank, as a
Checkpointer requires. The stages exchange their names over the job's store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fastckpt.errors import CheckpointError
from fastckpt.integrations.dcp.plan_exchange import packed, unpacked
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.ranks.per_group import group_of_job, together
from fastckpt.state.dtensors import Parts
from fastckpt.state.tree import OfSomeRanks, TensorFacts, facts_of


class Stages:
    """The stages of a job's model.

    Attributes:
        ranks: the ascending ranks of each stage; stages are ordered by their first ranks.
    """

    def __init__(self, coordinator: Coordinator, ranks: list[list[int]], timeout_s: float) -> None:
        self.ranks = [tuple(each) for each in ranks]
        self._coordinator, self._timeout_s = coordinator, timeout_s
        self._mine = next(each for each in self.ranks if coordinator.rank in each)
        self._known: dict[str, list[tuple[str, TensorFacts | None]]] = {}  # by digest

    @classmethod
    def found(cls, names: Iterable[str], timeout_s: float) -> Stages | None:
        """Returns the stages, given the names in this rank's part of the model; None if all ranks
        have the same names. All ranks must call it, and wait for each other.
        """
        coordinator = together(group_of_job()).coordinator
        agreement = coordinator.begin("pipeline stages", timeout_s, "nothing was saved or loaded")
        with agreement.failing():
            agreement.put("names", _digest([*names]).encode())
            if agreement.rank == 0:
                of_digest: dict[bytes, list[int]] = {}
                for rank, digest in enumerate(agreement.gather("names")):
                    of_digest.setdefault(digest, []).append(rank)
                agreement.put("stages", json.dumps([*of_digest.values()]).encode())
            ranks = json.loads(agreement.get("stages"))
        agreement.close()
        return cls(coordinator, ranks, timeout_s) if len(ranks) > 1 else None

    def union(self, what: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the merged state of all stages, given this rank's state. All ranks must call it,
        and wait for the first rank of each stage.

        Args:
            what: the state's name for messages, such as "optimizer".
            own: this rank's tensors and picklable values, by names that no other stage has.

        Raises:
            CheckpointError: two stages have the same name. PeerFailed: another rank failed.
        """
        agreement = self._coordinator.begin(f"{what} of all stages", self._timeout_s)
        with agreement.failing():
            parts = Parts(agreement.world_size, None)
            mine = {
                name: OfSomeRanks(self._mine, value) if isinstance(value, torch.Tensor) else value
                for name, value in own.items()
            }
            if agreement.rank == self._mine[0]:
                facts = [
                    (name, facts_of(parts, name, its) if type(its) is OfSomeRanks else None)
                    for name, its in mine.items()
                ]
                values = [its for its in mine.values() if type(its) is not OfSomeRanks]
                agreement.put("values", packed((_digest(facts), values)))
                agreement.put("facts", packed(facts))
            if (
                agreement.rank == 0
            ):  # passes them on, because a rank's records are gone when it leaves
                for key in ("values", "facts"):
                    records = [agreement.get(key, ranks[0]) for ranks in self.ranks]
                    agreement.put(f"all {key}", packed(records))
            values_of_stages = [unpacked(each) for each in unpacked(agreement.get("all values"))]
            if not self._known.keys() >= {digest for digest, _values in values_of_stages}:
                all_facts = unpacked(agreement.get("all facts"))
                self._known = {
                    digest: unpacked(facts)
                    for (digest, _values), facts in zip(values_of_stages, all_facts, strict=True)
                }
            union: dict[str, Any] = {}
            for ranks, (digest, values) in zip(self.ranks, values_of_stages, strict=True):
                part, left = mine, iter(values)
                if ranks != self._mine:
                    part = {
                        name: next(left) if facts is None else OfSomeRanks(ranks, None, facts)
                        for name, facts in self._known[digest]
                    }
                if shared := union.keys() & part.keys():
                    raise CheckpointError(
                        f"two pipeline stages have {min(shared)!r} in their {what}, so it is "
                        "ambiguous which one to save"
                    )
                union |= part
        agreement.close(0.0)
        return union


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
