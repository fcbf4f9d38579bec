"""The exchange of torch.distributed.checkpoint plans between ranks, over the job's store.

Responsible for exchanging local plans for central plans, unless no plan has changed since an
earlier save.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from fastckpt.arguments.checks import check_path
from fastckpt.errors import CheckpointError
from fastckpt.ranks.same_state import Records


class StorageBase:
    """A reader or writer of a checkpoint directory; each reset() may change the directory."""

    path: str  # absolute

    @property
    def checkpoint_id(self) -> str:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(FileSystem.validate_checkpoint_id(checkpoint_id))

    def _go_to(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Changes the directory, if `checkpoint_id` is given."""
        if checkpoint_id:
            self.path = os.path.abspath(check_path("path", checkpoint_id))


_KNOWN_MAX = 4  # different states that are saved in turn
_ASK = b"?"  # rank 0 needs every plan


def packed(value: object) -> bytes:
    """Packs a value into a record for other ranks of this job."""
    return zlib.compress(pickle.dumps(value), 1)


def unpacked(record: bytes) -> Any:
    """Unpacks a value that another rank of this job has packed."""
    return pickle.loads(zlib.decompress(record))


@dataclass(eq=False)
class _Known:
    """The outcome of one planning."""

    identity: str  # the same on every rank
    settings: object  # of the planner
    local: SavePlan
    central: SavePlan
    metadata: Metadata | None  # on rank 0


@dataclass
class Offer:
    """The local plan of one rank, and the earlier plannings that it matches.

    Attributes:
        staged: the finished plan of `guess`, if its items are copied before the ranks agree.
    """

    settings: object
    local: SavePlan
    same: list[_Known]  # newest last
    staged: SavePlan | None = None

    @property
    def guess(self) -> SavePlan | None:
        """This rank's part of the latest matching central plan, which is valid unless another
        rank's plan has changed; None if no planning matches.
        """
        return self.same[-1].central if self.same else None


class PlanExchange:
    """The latest plans of the ranks of one group. Several threads may save with it; if one thread
    drops a planning, the next save plans again.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []  # newest last
        self.exchanges = 0  # number of exchanges so far

    def offer(self, settings: object, local: SavePlan) -> Offer:
        """Returns this rank's offer for central(). Waits for no other rank.

        Args:
            settings: the planner's settings; plans made with other settings are not used again.
            local: this rank's plan.
        """
        return Offer(settings, local, [it for it in self._known if _equal(it, settings, local)])

    def central(
        self,
        agreement: Records,
        offer: Offer,
        plan_all: Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]],
    ) -> tuple[SavePlan, Metadata | None]:
        """Returns this rank's part of the central plan, and on rank 0 the metadata. All ranks must
        call it. An earlier planning that matches all ranks' offers is used again. A rank that has
        staged its items is assigned only staged items.

        Args:
            plan_all: called on rank 0 with the plans of all ranks, if any plan has changed.

        Raises:
            PeerFailed: another rank failed or is missing. CheckpointError: a rank would have to
                write an item that it has not staged. Any error of plan_all.
        """
        try:
            agreed = self._agreed(agreement, offer, plan_all)
        except BaseException:  # after any error the next save of this plan must plan again
            self._known = [it for it in self._known if it not in offer.same]
            raise
        self._known = [*[it for it in self._known if it is not agreed][1 - _KNOWN_MAX :], agreed]
        return agreed.central, agreed.metadata

    def _agreed(
        self,
        agreement: Records,
        offer: Offer,
        plan_all: Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]],
    ) -> _Known:
        same = {it.identity: it for it in offer.same if not _unstaged(it.central, offer)}
        if not same:
            agreement.put("plan", b"+" + packed(offer.local))
        else:
            agreement.put("plan", b"=" + json.dumps([*same]).encode())
        if agreement.rank == 0:
            return self._decide(agreement, offer, same, plan_all)
        answer = agreement.get("central")
        if answer == _ASK:
            if same:
                again = offer.local, offer.staged
                agreement.put("plan again", packed(again))
            answer = agreement.get("central again")
        chosen = answer[1:].decode()
        if answer.startswith(b"="):
            return same[chosen]
        central = unpacked(agreement.get(f"central plan {agreement.rank}"))
        return _Known(chosen, offer.settings, offer.local, central, None)

    def _decide(
        self,
        agreement: Records,
        offer: Offer,
        same: dict[str, _Known],
        plan_all: Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]],
    ) -> _Known:
        """Chooses a plan on rank 0, and sends it to the other ranks."""
        records = agreement.gather("plan")
        offers = [json.loads(record[1:]) for record in records if record.startswith(b"=")]
        if len(offers) == len(records):
            common = [name for name in same if all(name in its for its in offers)]
            if common:
                agreement.put("central", b"=" + common[-1].encode())
                return same[common[-1]]
        key = "central"
        if any(record.startswith(b"=") for record in records[1:]):
            agreement.put("central", _ASK)
            key = "central again"
        plans = [offer.local]
        staged = [offer.staged]
        for rank, record in enumerate(records[1:], 1):
            if record.startswith(b"+"):
                plan, its = unpacked(record[1:]), None
            else:
                plan, its = unpacked(agreement.get("plan again", rank))
            plans.append(plan)
            staged.append(its)
        central, metadata = plan_all(plans)
        central = _moved(agreement.label, central, plans, staged)
        self.exchanges += 1
        identity = secrets.token_hex(8)
        for rank in range(1, agreement.world_size):
            agreement.put(f"central plan {rank}", packed(central[rank]))
        agreement.put(key, b"+" + identity.encode())
        return _Known(identity, offer.settings, offer.local, central[0], metadata)


def with_member(plan: SavePlan, name: str, value: object) -> SavePlan:
    """Returns a copy of a plan with one member replaced; members that a subclass added are kept."""
    plan = copy.copy(plan)
    object.__setattr__(plan, name, value)
    return plan


def unstaged(plan: SavePlan, staged: SavePlan) -> list[WriteItem]:
    """Returns the items of a plan that are not in `staged`, or differ there."""
    items = {item.index: item for item in staged.items}
    return [item for item in plan.items if items.get(item.index) != item]


def _unstaged(central: SavePlan, offer: Offer) -> list[WriteItem]:
    if offer.staged is None or central is offer.guess:  # finish_plan() may change items
        return []
    return unstaged(central, offer.staged)


def _moved(
    label: str, central: list[SavePlan], local: list[SavePlan], staged: list[SavePlan | None]
) -> list[SavePlan]:
    """Returns a central plan in which ranks that have staged write only staged items. Any other
    item is assigned to a rank that has staged the item, or to a rank that holds the item and has
    not staged yet.
    """
    if not any(staged):
        return central
    able: dict[MetadataIndex, list[tuple[int, WriteItem]]] = {}
    for rank, plans in enumerate(zip(local, staged, strict=True)):
        for item in (plans[1] or plans[0]).items:
            able.setdefault(item.index, []).append((rank, item))
    parts: list[list[WriteItem]] = [[] for _ in central]
    for rank, plan in enumerate(central):
        its = staged[rank]
        strange = set() if its is None else {item.index for item in unstaged(plan, its)}
        for item in plan.items:
            to = rank
            if item.index in strange:
                others = (at for at, held in able.get(item.index, ()) if held == item)
                to = next(others, -1)
            if to < 0:
                raise CheckpointError(
                    f"{label}: rank {rank} must write {item.index.fqn!r}, but had not copied it "
                    "when async_save returned, because the plans of only some ranks changed. "
                    "Nothing was committed; the next save makes a new plan"
                )
            parts[to].append(item)
    return [with_member(plan, "items", items) for plan, items in zip(central, parts, strict=True)]


def _equal(known: _Known, settings: object, local: SavePlan) -> bool:
    try:
        return bool(known.settings == settings and known.local == local)
    except Exception:  # a planner may put any object into a plan
        return False


def settings_of(planner: SavePlanner) -> object:
    """Returns the class and plain members of a planner before set_up()."""
    plain = (bool, int, float, str, bytes, type(None))
    members = getattr(planner, "__dict__", {}).items()
    return type(planner), {name: value for name, value in members if isinstance(value, plain)}


def set_up(planner: SavePlanner, state: Any, storage_meta: Any, is_coordinator: bool) -> None:
    """Calls set_up_planner, which lacks storage_meta in planners written before torch 2.3."""
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        planner.set_up_planner(
            state_dict=state, storage_meta=storage_meta, is_coordinator=is_coordinator
        )
    else:
        planner.set_up_planner(state, is_coordinator)  # type: ignore[arg-type]
