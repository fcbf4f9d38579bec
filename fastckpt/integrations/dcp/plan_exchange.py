"""PlanExchange of torch.distributed.checkpoint, made by several ranks over the job's store.

Responsible for exchanging local plans for central ones, unless nothing has changed since an earlier
save. It must not know what is planned for, nor how it is written.
"""

from __future__ import annotations

import inspect
import json
import pickle
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from fastckpt.ranks.round import Round

_KNOWN_MAX = 4  # kinds of state that are saved in turn
_ASK = b"?"  # rank 0 needs every plan


def put(agreement: Round, key: str, value: object) -> bytes:
    """Leaves a value for other ranks but for its beginning, as Round.put_rest() does."""
    return agreement.put_rest(key, zlib.compress(pickle.dumps(value), 1))


def get(agreement: Round, key: str, rank: int, beginning: bytes) -> Any:
    """Returns the value that a rank of this job has put under key, given its beginning."""
    return pickle.loads(zlib.decompress(agreement.get_rest(key, rank, beginning)))


@dataclass
class _Known:
    """The outcome of one planning."""

    identity: str  # the same on every rank
    settings: object  # of the planner
    local: SavePlan
    central: SavePlan
    metadata: Metadata | None  # on rank 0


class PlanExchange:
    """The plans that the ranks of one group have made so far."""

    def __init__(self) -> None:
        self._known: list[_Known] = []  # newest last
        self.exchanges = 0  # of plans, so far

    def central(
        self,
        agreement: Round,
        settings: object,
        local: SavePlan,
        plan_all: Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]],
    ) -> tuple[SavePlan, Metadata | None]:
        """Returns this rank's part of the central plan, and on rank 0 the metadata. All ranks call
        it: an earlier planning that fits the local plans of all is used again.

        Args:
            settings: of the planner: plans made with other settings are not used again.
            local: this rank's plan.
            plan_all: called on rank 0, with the plans of all ranks, if any of them has changed.

        Raises:
            PeerFailed: another rank failed or is missing. Whatever plan_all raises.
        """
        same = [known for known in self._known if _equal(known, settings, local)]
        identities = [known.identity for known in same]
        if not same:
            agreement.put("plan", b"+" + put(agreement, "plan", local))
        else:
            agreement.put("plan", b"=" + json.dumps(identities).encode())
        if agreement.rank == 0:
            chosen = self._decide(agreement, settings, local, identities, plan_all)
        else:
            told = agreement.get("central")
            if told == _ASK:
                if same:
                    agreement.put("plan again", put(agreement, "plan again", local))
                told = agreement.get("central again")
            chosen = told[1:].decode()
            if told.startswith(b"+"):
                key = f"central plan {agreement.rank}"
                central = get(agreement, key, 0, agreement.get(key))
                self._keep(_Known(chosen, settings, local, central, None))
        known = next(known for known in self._known if known.identity == chosen)
        self._known.remove(known)
        self._known.append(known)
        return known.central, known.metadata

    def _decide(
        self,
        agreement: Round,
        settings: object,
        local: SavePlan,
        identities: list[str],
        plan_all: Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]],
    ) -> str:
        """On rank 0: chooses a plan, tells the others, and returns its identity."""
        records = agreement.gather("plan")
        offers = [json.loads(record[1:]) for record in records if record.startswith(b"=")]
        if len(offers) == len(records):
            common = [name for name in identities if all(name in offer for offer in offers)]
            if common:
                agreement.put("central", b"=" + common[-1].encode())
                return common[-1]
        key = "central"
        if any(record.startswith(b"=") for record in records[1:]):
            agreement.put("central", _ASK)
            key = "central again"
        plans = [local]
        for rank, record in enumerate(records[1:], 1):
            if record.startswith(b"+"):
                plans.append(get(agreement, "plan", rank, record[1:]))
            else:
                again = agreement.get("plan again", rank)
                plans.append(get(agreement, "plan again", rank, again))
        central, metadata = plan_all(plans)
        self.exchanges += 1
        known = _Known(secrets.token_hex(8), settings, local, central[0], metadata)
        for rank in range(1, agreement.world_size):
            name = f"central plan {rank}"
            agreement.put(name, put(agreement, name, central[rank]))
        agreement.put(key, b"+" + known.identity.encode())
        self._keep(known)
        return known.identity

    def _keep(self, known: _Known) -> None:
        self._known = [*self._known[1 - _KNOWN_MAX :], known]


def _equal(known: _Known, settings: object, local: SavePlan) -> bool:
    try:
        return bool(known.settings == settings and known.local == local)
    except Exception:  # plans hold whatever a planner puts there
        return False


def settings_of(planner: SavePlanner) -> object:
    """Returns the class and plain members of a planner that is not set up yet."""
    plain = (bool, int, float, str, bytes, type(None))
    members = getattr(planner, "__dict__", {}).items()
    return type(planner), {name: value for name, value in members if isinstance(value, plain)}


def set_up(planner: SavePlanner, state: Any, storage_meta: Any, is_coordinator: bool) -> None:
    """Calls set_up_planner, which in planners older than torch 2.3 takes no storage_meta."""
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        planner.set_up_planner(
            state_dict=state, storage_meta=storage_meta, is_coordinator=is_coordinator
        )
    else:
        planner.set_up_planner(state, is_coordinator)  # type: ignore[arg-type]
