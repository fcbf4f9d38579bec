"""Survey: determines which steps the nodes of a job hold together, and which of them the root
lacks.

All ranks make the survey together at the beginning of a restore. The module decides which steps
were drained, must be drained, or are lost. Each node's tier receives the results for its own steps.
"""

from __future__ import annotations

import errno
import json
import logging
import time
from typing import Any

from fastckpt.arguments.quantities import shown_size
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.formats.step_names import DRAINED, REPLICATED
from fastckpt.ranks.round import Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.steps.newest_whole import Apart, readable, survey_of_copy
from fastckpt.steps.pins import deleted
from fastckpt.steps.store import Committed, StepStore
from fastckpt.tiers.drain import StepInfo
from fastckpt.tiers.local_tier import Copy, LocalTier, last_of
from fastckpt.tiers.nodes import NodesSteps, named_parts, parts_of
from fastckpt.tiers.peers import Peers

log = logging.getLogger("fastckpt")

# The pauses before the steps of the nodes are listed again, while another job changes them.
_LOOK_PAUSES_S = (0.05, 0.1, 0.2, 0.4)
_DRAIN_POLL_S = 0.5


class Survey:
    """The survey of one restore. It gives first_whole() the steps of the nodes (see Elsewhere).

    Args:
        tier: the tier of this node, which receives the results.
        agreement: the restore's round.

    Attributes:
        shelves: the root, and the nodes' steps whose files every rank can get. There are none if
            there are several nodes and they do not send each other files.
        apart: with several nodes, all steps that they hold together.
        coming: the drains that this job has begun, by the nonces of their steps.
    """

    def __init__(self, tier: LocalTier, agreement: Round) -> None:
        self._tier, self._agreement, self._timeout_s = tier, agreement, agreement.timeout_s
        self._rank, self._looks = agreement.rank, 0
        self.shelves: list[StepStore] = [tier.root]
        self.apart: list[Apart] = []
        self.coming: dict[str, InnerHandle] = {}
        # The numbers and the sequence numbers of the steps in tier.copies_of.
        self._order_of: dict[str, tuple[int, int]] = {}
        self._why_undrained = ""  # why this job does not copy them to the root now, in words
        self._drained_beside: set[str] = set()  # nonces of steps that another job is to copy there
        self._newest = -1  # the highest sequence number in the root when the steps were listed
        self._is_beside = False  # whether another job saved here when the steps were listed

    def look(self, is_able: bool) -> list[StepInfo]:
        """Lists the steps of all nodes. Returns the steps that the root lacks, newest first; none
        if a rank is not able to drain them, or if the job that saved them is alive.
        """
        nodes = self._tier.nodes()
        self._looks += 1
        for look, pause_s in enumerate((*_LOOK_PAUSES_S, None)):
            results = self._looked(f"{self._looks} {look}", is_able, is_last=pause_s is None)
            if not results["again"]:
                break
            time.sleep(pause_s or 0.0)
        self._order_of = {nonce: (step, at) for nonce, step, at, _copies in results["held"]}
        copies_of = self._tier.copies_of = {
            nonce: [Copy(*each) for each in copies] for nonce, _step, _at, copies in results["held"]
        }
        beside, infos = nodes.beside(self._rank), []
        names_of = {
            nonce: {copy.first: copy.name for copy in copies} for nonce, copies in copies_of.items()
        }
        self._gather(names_of)
        for nonce in results["undrained"]:
            names, holders = names_of[nonce], [*reversed(copies_of[nonce])]
            holder = {part: copy.first for copy in holders for part in copy.parts}
            here = [part for part, first in sorted(holder.items()) if first == beside[0]]
            mine = here[beside.index(self._rank) :: len(beside)]
            sender = None if nodes.first(0) in names else min(names)
            step, name = self._order_of[nonce][0], names.get(beside[0], "")
            infos.append(StepInfo(step, nonce, name, sender, mine))
        return infos

    def look_again(self) -> None:
        self.look(is_able=True)

    def _looked(self, key: str, is_able: bool, is_last: bool) -> dict[str, Any]:
        """Lists the steps of each node, and sorts them on the first rank; passes the results for
        this node's steps to the tier.
        """
        tier, agreement, lease = self._tier, self._agreement, self._tier.steps.lease
        is_first = tier.is_first()
        self._is_beside = is_first and lease is not None and lease.is_of_another()
        why = "" if is_able else "a rank has too little staging memory for copies"
        if self._is_beside:
            why = f"another job saves to {tier.steps.root!r}"
        committed = survey_of_copy(tier.steps) if is_first else []
        there = {item.manifest.nonce: item for item in committed}
        listed = [*map(self._listed, there.values())]
        agreement.put(f"local {key}", json.dumps([why, self._is_beside, listed]).encode())
        if self._rank == 0:
            records = [json.loads(record) for record in agreement.gather(f"local {key}")]
            merged = self._merged([listing for *_, listing in records])
            # The other job may have removed a step on one node after it was listed on another.
            is_beside = any(beside for _why, beside, _listing in records)
            merged["again"] = is_beside and not is_last and bool(merged["lost"])
            why = next((why for why, *_ in records if why), "")
            steps = {nonce: step for nonce, step, *_ in merged["held"]}
            undrained = merged["undrained"]
            if not merged["again"]:
                self._log(merged["lost"], [steps[nonce] for nonce in undrained], why)
            due = [nonce for nonce in undrained if tier.is_due(steps[nonce])]
            merged["drained beside"] = due if is_beside else []
            merged["undrained"], merged["why"] = [] if why else undrained, why
            agreement.put(f"survey {key}", json.dumps(merged).encode())
        results: dict[str, Any] = json.loads(agreement.get(f"survey {key}"))
        if not self._is_beside:  # otherwise the job that saves here marks its own steps
            notes = (DRAINED, results["drained"]), (REPLICATED, results["replicated"])
            for what, nonces in notes:
                for nonce in there.keys() & {*nonces}:
                    tier.note(there[nonce].name, what)
        tier.useless = there.keys() & {*results["useless"]}
        tier.incomplete = there.keys() & {*results["incomplete"]}
        for nonce in there.keys() & {*results["deleted"]}:
            tier.remove(there[nonce].name, nonce)
        self._why_undrained, self._drained_beside = results["why"], {*results["drained beside"]}
        return results

    def _listed(self, item: Committed) -> dict[str, Any]:
        """Returns a node's report to the other nodes about its copy of a step."""
        manifest, has = item.manifest, self._tier.has
        of = parts_of(manifest)
        parts = [part for part in of if all(has(item.name, *file) for file in of[part].items())]
        return {
            "name": item.name,
            "step": manifest.step,
            "nonce": manifest.nonce,
            "sequence": manifest.sequence,
            "parts": parts,
            "of": [*of],
            "drained": has(item.name, DRAINED),
            "replicated": has(item.name, REPLICATED),
        }

    def _merged(self, listings: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """On the first rank, sorts the steps in the nodes' listings by the action that they
        need.
        """
        tier = self._tier
        committed, _faults = tier.root.survey()
        in_root = {item.manifest.nonce for item in committed}
        newest, last = committed[0].manifest.sequence if committed else -1, last_of(committed)
        self._newest = newest
        removed = deleted(tier.root)
        of: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for rank, listing in enumerate(listings):
            for each in listing:
                tier.highest = max(tier.highest, each["sequence"])
                if each["nonce"] not in removed:
                    of.setdefault(each["nonce"], []).append((rank, each))
        kinds = "held", "drained", "useless", "undrained", "incomplete", "lost", "replicated"
        results: dict[str, Any] = {"deleted": sorted(removed), **{kind: [] for kind in kinds}}
        has_newest = False  # whether a step that is newer than all in the root is here, whole
        for nonce, copies in sorted(of.items(), key=lambda pair: -pair[1][0][1]["sequence"]):
            one = copies[0][1]
            holders = {part for _rank, each in copies for part in each["parts"]}
            was_drained = any(each["drained"] for _rank, each in copies)
            step, sequence, is_newer = one["step"], one["sequence"], one["sequence"] > newest
            missing = [part for part in one["of"] if part not in holders]
            if any(each["replicated"] for _rank, each in copies):  # all ranks agreed on that
                results["replicated"].append(nonce)
            if not missing:
                on_nodes = [(rank, each["name"], each["parts"]) for rank, each in copies]
                results["held"].append((nonce, step, sequence, on_nodes))
            # If the root lacks a drained step, retention has removed it there. But if the step is
            # newer than all in the root, the root has lost it, and it is drained again.
            if sequence < last.get(step, -1) and nonce not in in_root:
                results["useless"].append(nonce)
            elif (
                nonce in in_root
                or (was_drained and not is_newer)
                or (sequence < newest and not tier.is_due(step))
            ):
                results["drained"].append(nonce)
            elif missing:
                results["incomplete"].append(nonce)
                if is_newer and not has_newest:
                    results["lost"].append((step, named_parts(missing)))
            elif tier.is_due(step) or not has_newest:
                results["undrained"].append(nonce)
            has_newest = has_newest or (is_newer and not missing)
        return results

    def _log(self, lost: list[tuple[int, str]], undrained: list[int], why: str) -> None:
        """On the first rank, logs which steps are only on the nodes, and which steps are lost."""
        if why and undrained:
            steps = ", ".join(map(str, undrained))
            log.warning(
                "not yet copied to %s: steps %s, because %s", self._tier.root.root, steps, why
            )
        for step, missing in lost:
            log.warning(
                "skipping step %d of %s: no node of this job has %s, so the step was never "
                "committed, or was lost with the nodes that had these files",
                *(step, self._tier.steps.root, missing),
            )

    # ---- steps that this job or another one copies to the root

    def is_coming(self, nonce: str) -> bool:
        return nonce in self.coming or nonce in self._drained_beside

    def await_coming(self, nonce: str) -> None:
        handle = self.coming.pop(nonce, None)
        if handle is None:
            self.await_drain_beside(nonce)
            return
        handle.wait_done()
        failure = handle.failure()
        if failure is not None:
            raise failure

    def await_drain_beside(self, nonce: str) -> None:
        """On the first rank, waits once until another job has copied a step, or a newer step, to
        the root. A newer step is enough, because the copy of this step may fail or be removed soon.
        Waits for at most half of timeout_s, because the other ranks wait for this rank. Raises
        StorageError.
        """
        self._drained_beside.discard(nonce)
        (number, sequence), root = self._order_of[nonce], self._tier.root
        beyond = max(sequence, self._newest)
        until = time.monotonic() + self._timeout_s / 2
        while self._rank == 0:
            there = [item.manifest for item in readable(root)]
            if any(each.nonce == nonce or each.sequence > beyond for each in there):
                return
            if time.monotonic() > until:
                detail = f"another job has not copied step {number} to it within "
                detail += f"{self._timeout_s / 2:.0f} s, half of timeout_s"
                raise StorageError("read", root.root, errno.ETIMEDOUT, detail=detail)
            time.sleep(_DRAIN_POLL_S)

    # ---- steps that nodes send each other

    def _gather(self, names_of: dict[str, dict[int, str]]) -> None:
        """Makes every node adopt the steps that only some nodes hold, where its budget permits.
        Adds the steps' names on each node to `names_of`, and sets `shelves` and `apart`.
        """
        tier, agreement, key = self._tier, self._agreement, f"{self._looks}"
        firsts, own = tier.nodes().firsts, tier.nodes().first(self._rank)
        if len(firsts) == 1:
            self.shelves[1:] = [tier.steps]
            return
        if tier.peers is None:
            why = "ranks need files of other nodes, but nodes do not send files to each other"
            self.apart = [self._apart(nonce, why) for nonce in tier.copies_of]
            self.shelves[1:] = []
            return
        if tier.is_first():
            agreement.put(f"names {key}", json.dumps(self._adopted(tier.peers)).encode())
        if self._rank == 0:
            answers = {first: json.loads(agreement.get(f"names {key}", first)) for first in firsts}
            agreement.put(f"gathered {key}", json.dumps(answers).encode())
        answers = json.loads(agreement.get(f"gathered {key}"))
        names = {int(at): names_here for at, (names_here, _whys) in answers.items()}
        whys = {nonce: why for _names, each in answers.values() for nonce, why in each.items()}
        for nonce, names_here in names_of.items():
            names_here.update({at: name[nonce] for at, name in names.items() if nonce in name})
        common = set(names[0]).intersection(*names.values())
        own_names = {names[0][nonce]: names[own][nonce] for nonce in common}
        unlisted = "its manifest is damaged on the first node, or was removed there"
        self.apart = [self._apart(nonce, whys.get(nonce, unlisted)) for nonce in tier.copies_of]
        self.shelves[1:] = [NodesSteps(tier.steps, own_names, common)]

    def _apart(self, nonce: str, why: str) -> Apart:
        if self._why_undrained:
            why += f"; it is not copied to the root, because {self._why_undrained}"
        return Apart(*self._order_of[nonce], nonce, why)

    def _adopted(self, peers: Peers) -> tuple[dict[str, str], dict[str, str]]:
        """Returns two maps by nonce: this node's names of the steps that the nodes hold together
        and whose files all fit into its budget; and, for the other steps, why this node cannot hold
        them.
        """
        tier, names, whys = self._tier, dict[str, str](), dict[str, str]()
        for nonce, copies in tier.copies_of.items():
            own = next((copy for copy in copies if copy.first == self._rank), None)
            name, parts = ("", []) if own is None else (own.name, own.parts)
            try:
                if not name and self._is_beside:
                    raise CheckpointError("another job saves there and has not copied the step yet")
                if not name:
                    firsts = [copy.first for copy in copies]
                    name = peers.adopt(self._order_of[nonce][0], nonce, firsts)
                of = parts_of(tier.steps.read(name))
                needed = sum(sum(of[part].values()) for part in of.keys() - {*parts})
                if not tier.has_room(needed):
                    raise CheckpointError(
                        f"the budget has no room for {shown_size(needed)} of missing files"
                    )
                names[nonce] = name
            except CheckpointError as error:
                whys[nonce] = f"{tier.steps.root!r} cannot hold it: {error}"
        return names, whys
