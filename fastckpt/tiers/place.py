"""NodePlace: makes a step visible in the local tier on each node first, and then in the root.

Each node has a directory of its own, and all nodes publish the same manifest. Before any byte is
written, all ranks choose the place together. If one of them cannot have all the room that it needs
in the tier, the step bypasses the tier and is saved to a RootPlace.
"""

from __future__ import annotations

import errno
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import closing

from fastckpt.arguments.options import Pacing
from fastckpt.errors import CheckpointError, PeerFailed, RootInUse, StorageError
from fastckpt.formats.manifest import Manifest
from fastckpt.ranks.round import Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Job, Pipeline
from fastckpt.saving.plan import Output, Place
from fastckpt.saving.ring import Ring, Slot
from fastckpt.steps.options import StepOptions
from fastckpt.steps.plan import StepPlace
from fastckpt.tiers.drain import DRAIN_BLOCKS_MIN, Drain, StepInfo
from fastckpt.tiers.local_tier import LocalTier
from fastckpt.tiers.nodes import OBJECTS_PART, parts_of

log = logging.getLogger("fastckpt")

_WHY_CHARS = 2000
SLOW_S = 10.0  # a tier is slow if it took longer than this for a save, and longer than the root


class NodePlace(StepPlace):
    """The place of a save in the local tier, as one rank sees it.

    Args:
        draining: the round in which ranks agree on the commit to the root.
        earlier: the handles of the earlier saves that are not done.
        number: the number of the step.
        deadline_s: how many seconds after the call of save() the job ends; None: no end is known.
    """

    def __init__(
        self,
        tier: LocalTier,
        handle: InnerHandle,
        agreement: Round,
        draining: Round,
        earlier: Sequence[InnerHandle],
        number: int,
        options: StepOptions,
        deadline_s: float | None = None,
    ) -> None:
        super().__init__(tier.steps, agreement, number, options)
        self._tier = tier
        self._handle = handle
        self._draining = draining
        # The save that has to be in the root before this one is written, so that the tier never
        # holds more than `keep` undrained steps beside it.
        self._save_before = earlier[-tier.keep - 1] if len(earlier) > tier.keep else None
        self._deadline_s = deadline_s
        self._trouble = self._nonce = self._slot_label = ""
        self._opened_s = 0.0
        self._wrote_shard = False
        self._is_committed = False
        self._drain: Drain | None = None
        self._is_due = tier.is_due(number) or deadline_s is not None

    def awaited(self, previous: Sequence[InnerHandle], pipeline: Pipeline) -> Sequence[InnerHandle]:
        # Before anything is staged: the drain that this waits for also needs staging memory.
        if pipeline.staging.allowance(None).blocks < DRAIN_BLOCKS_MIN:
            self._tier.refuse("cannot be drained: staging memory has only one block")
        handle, self._save_before = self._save_before, None
        if self._options.snapshot is not None:  # only a step that is in the root is a base
            return super().awaited(previous, pipeline)
        return () if handle is None else (handle,)

    def slot(self, output: Output) -> Slot | None:
        ring, self._slot_label = self._tier.ring, output.slot_label
        if ring is None or not output.slot_label:
            return None
        return ring.take(output.slot_label, output.image.nbytes)

    # ---- the choice: the directories on the nodes, or the root

    def pacing(self, asked: Pacing) -> Pacing:
        """Returns no limits, because the caller's limits are meant for the root (see
        _bypassed()).
        """
        return Pacing()

    def begin(self) -> None:
        """On the first rank of a node, creates the directory on that node."""
        if self._tier.is_first():
            self._trouble = self._tier.refusal()
            if not self._trouble:
                try:
                    self.step.begin(self._number)
                except StorageError as error:
                    self._trouble = f"failed: {error}"

    def chosen(self, outputs: Sequence[Output], pace: Pace) -> Place:
        """Returns this place if every rank has opened its files here and has all the room that it
        needs; else the root. This happens before any write, because memory is freed as it is
        written.
        """
        self._join()
        self._trouble = self._trouble or self._tier.refusal() or self._too_late()
        if self._tier.ring is not None:
            no_room = self._no_room(outputs, self._tier.ring)
            self._trouble = self._trouble or no_room
        try:
            if self.step.name and not self._trouble:
                super().open(outputs, pace)
                shards = [output for output in outputs if not output.is_small]
                is_coded = self._options.codec is not None
                coded = sum(output.nbytes for output in shards) if is_coded else 0
                beside = self._tier.nodes().beside(self._agreement.rank)
                self._tier.check_room(coded * len(beside))
        except StorageError as error:
            self._trouble = f"failed: {error}"
        why = self._why_not()
        if not why:
            self._opened_s = self._handle.elapsed_s()
            self._wrote_shard = any(output.file.is_open for output in shards)
            return self
        for output in outputs:
            output.file.close()
        return self._bypassed(why, pace)

    def _join(self) -> None:
        """Sends the directory's name to the ranks of this node, and rank 0's nonce to all ranks."""
        agreement = self._agreement
        first = self._tier.nodes().first(agreement.rank)
        if first == agreement.rank:
            own = {"name": self.step.name, "nonce": secrets.token_hex(16)}
            agreement.put("local place", json.dumps(own).encode())
        self.step.join(json.loads(agreement.get("local place", first))["name"])
        self._nonce = json.loads(agreement.get("local place"))["nonce"]

    def agree(self, meets: bool) -> tuple[str, bool]:
        """Returns the nonce that ranks agreed on in chosen(), and False, because ranks do not wait
        for each other.
        """
        return self._nonce, False

    def open(self, outputs: Sequence[Output], pace: Pace) -> None:
        """Does nothing, because chosen() has opened the files."""

    def _no_room(self, outputs: Sequence[Output], ring: Ring) -> str:
        """Returns why this node has no room for its ranks' outputs; "" if it has room. The first
        rank of the node decides for all.
        """
        agreement, nodes = self._agreement, self._tier.nodes()
        first = nodes.first(agreement.rank)
        nbytes = sum(output.image.nbytes for output in outputs)
        slots = {out.slot_label: out.image.nbytes for out in outputs if out.file.slot is not None}
        agreement.put("bytes", json.dumps([nbytes, slots]).encode())
        if first == agreement.rank:
            near, far, peers = nodes.beside(first), list[int](), self._tier.peers
            if peers is not None:
                far = peers.sources(first)
            outputs_of = {rank: json.loads(agreement.get("bytes", rank)) for rank in (*near, *far)}
            needed = sum(all_of_it for all_of_it, _slots in outputs_of.values())
            there = sum(size for rank in near for size in outputs_of[rank][1].values())
            # Files from neighbours also use recycled files, if the sizes match.
            sizes = [pair for rank in far for pair in outputs_of[rank][1].items()]
            there += sum(size for file, size in sizes if ring.has(file, size))
            why = self._trouble or self._tier.no_room_on_node(self.step.name, needed, there)
            agreement.put("room", why.encode(errors="replace"))
        why = agreement.get("room", first).decode()
        ring.sweep()  # frees the memory of removed files before any rank takes more
        agreement.put("swept", b"")
        for rank in nodes.beside(first):
            agreement.get("swept", rank)
        return why

    def _too_late(self) -> str:
        """Returns why the job ends too soon for the local tier; "" if there is enough time. The
        first rank decides for all.
        """
        if self._deadline_s is None or self._agreement.rank:
            return ""
        return self._tier.drainer.too_late(self._deadline_s - self._handle.elapsed_s())

    def _why_not(self) -> str:
        """Returns why a rank cannot write to the local tier; "" if all ranks can."""
        agreement = self._agreement
        agreement.put("local", self._trouble.encode(errors="replace"))
        if agreement.rank == 0:
            troubles = enumerate(agreement.gather("local"))
            why = next((f"of rank {r} {text.decode()}" for r, text in troubles if text), "")
            agreement.put("tier", why.encode())
        return agreement.get("tier").decode()

    def _bypassed(self, why: str, pace: Pace) -> RootPlace:
        """Removes the attempt in the local tier, and begins the step in the root."""
        if self._agreement.rank == 0 or self._trouble:
            self._tier.warn(self._number, why)
        self.abandon()
        self.close()
        self._handle.stats.local_why = f"the local tier {why}"
        pace.limit_by(self._options.pacing)
        root = RootPlace(self._tier, self._agreement, self._draining, self._number, self._options)
        try:
            root.begin()
        except BaseException:
            root.abandon()
            root.close()
            raise
        return root

    # ---- the commit in the local tier

    def wait_turn(self, previous: Sequence[InnerHandle]) -> None:
        _wait_first(previous)

    def publish(self, manifest: Callable[[int], Manifest]) -> None:
        """Publishes the manifest on rank 0's node, and waits until the other nodes have published
        it. If one node fails, the step counts as not committed on any node.
        """
        agreement = self._agreement
        others = [rank for rank in self._tier.nodes().firsts if rank]
        try:
            content = manifest(self._tier.next_sequence(self.step.steps))
        except BaseException:
            if others:
                agreement.put("manifest", b"")
            raise
        if others:
            agreement.put("manifest", content.to_bytes())
        self._publish_here(content)
        for rank in others:
            kind, failure = json.loads(agreement.get("published", rank))
            if kind == RootInUse.__name__:
                raise RootInUse(failure, (rank,))
            if kind:
                raise PeerFailed(f"rank {rank}: {kind}: {failure}", (rank,))

    def _publish_here(self, manifest: Manifest) -> None:
        try:
            self.step.commit(manifest, self._options.durable)
        except StorageError as error:
            # The tier promises only a visible step, which survives the process. If it may not be
            # durable, it is drained as usual, and the tier is not used again.
            if not error.visible:
                raise
            self._tier.refuse(f"failed: {error}")

    def follow(self, previous: Sequence[InnerHandle]) -> None:
        """Publishes rank 0's manifest on another node, if this rank is the node's first."""
        if not self.step.is_begun:
            return
        content = self._agreement.get("manifest")
        if not content:
            return
        outcome = "", ""
        try:
            self._publish_here(Manifest.from_bytes(content))
        except (CheckpointError, OSError) as error:
            self._refuse_after(error)  # rank 0 raises the failure on all ranks
            outcome = type(error).__name__, str(error)
        self._agreement.put("published", json.dumps(outcome).encode())

    # ---- the copies in the memory of the neighbours

    def _replicate(self, parts: Sequence[int]) -> None:
        """Sends this rank's files to its neighbours, and waits until all ranks have sent theirs."""
        tier, stats, name = self._tier, self._handle.stats, self.step.name
        try:
            if tier.memory is None or tier.memory.peers == 0:
                pass
            elif self._deadline_s is not None:
                stats.replicas_why = "steps with a deadline are not sent to neighbours"
            elif tier.peers is None:
                stats.replicas_why = "no rank on another node is listening"
            else:
                manifest = tier.steps.read(name)
                of = parts_of(manifest)
                files = {file: size for part in parts for file, size in of[part].items()}
                why = tier.peers.send(name, manifest, files)
                stats.replicas_why = why = self._agreed(why)
                stats.replicated_s = None if why else self._handle.elapsed_s()
        except BaseException as error:  # wait_memory() has to return False
            stats.replicas_why = f"failed: {error}"[:_WHY_CHARS]
            raise
        finally:
            if tier.is_first():
                tier.settle(name, stats.replicated_s is not None)
        self._handle.mark_memory()

    def _agreed(self, why: str) -> str:
        """Returns why files of some rank did not reach its neighbours; "" if all files did."""
        draining = self._draining
        draining.put("sent", why.encode(errors="replace"))
        if draining.rank == 0:
            texts = enumerate(draining.gather("sent"))
            why = "; ".join(f"rank {r}: {text.decode()}" for r, text in texts if text)[:_WHY_CHARS]
            draining.put("replicas", why.encode())
            if why:
                what = "step %d is not in the memory of all neighbours: %s"
                log.warning(what, self._number, why)
        return draining.get("replicas").decode()

    # ---- the commit in the root

    def after_commit(self, save: Job, pipeline: Pipeline) -> None:
        self._is_committed = True
        self.step.share()
        self._handle.mark_local()
        # The handle reports the step's fate in the root. Ranks agree on it in `_draining`.
        save.agreement.may_be_visible = False
        # The save's staging memory is free now: later saves stage and commit locally meanwhile.
        save.life.forget_copies()
        save.release()
        stats, rank = self._handle.stats, self._agreement.rank
        wrote = [rank] if self._wrote_shard else []
        parts = [*wrote, OBJECTS_PART] if rank == 0 else wrote
        self._replicate(parts)
        if not self._is_due:
            self._handle.path = self.step.path()
            return
        local_s = (stats.written_s or 0.0) - self._opened_s
        info = StepInfo(self._number, self._nonce, self.step.name, None, parts)
        drain = self._tier.drain(self._handle, self._draining, self._options, info)
        # If the job ends soon, only the newest step has to be in the root.
        if self._deadline_s is None:
            drain.previous = save.previous
        self._drain = drain
        drain.commit(pipeline)
        by_node_s = (stats.local_committed_s or 0.0) - self._opened_s
        # A save directly to the root would also have to compress; a drain only copies.
        takes_s = [drain.took_s] if self._options.codec is None else [drain.took_s, by_node_s]
        self._tier.drainer.note_times(by_node_s, max(takes_s))
        # With a codec, compression takes the time, with or without a tier.
        if self._options.codec is None and local_s > max(SLOW_S, drain.copied_s):
            self._tier.refuse(
                f"is slow: it took {local_s:.1f} s to write, but {self._tier.root.root} took only "
                f"{drain.copied_s:.1f} s"
            )

    def abandon(self) -> None:
        super().abandon()
        self._tier.settle(self.step.name, is_replicated=False)

    def fail(self, error: BaseException) -> None:
        self._draining.fail(error)
        if not self._is_committed:
            self._refuse_after(error)

    def _refuse_after(self, error: BaseException) -> None:
        """Stops using the tier after a failure other than a lack of room."""
        if not isinstance(error, StorageError):
            return
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if error.path.startswith(self._tier.steps.root) and not is_full:
            self._tier.refuse(f"failed: {error}")

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        with closing(self._draining):
            if failure is None and not self._is_due and self._tier.is_first():
                self._tier.evict()
            drain, self._drain = self._drain, None
            if drain is not None:
                drain.end(pipeline)
            if self._tier.ring is not None and self._slot_label:
                self._tier.ring.prepare(self._slot_label)


class RootPlace(StepPlace):
    """The place of a save that bypasses the local tier: the root, as one rank sees it.

    Args:
        draining: the round of the commit to the root, which is no longer needed.
    """

    def __init__(
        self,
        tier: LocalTier,
        agreement: Round,
        draining: Round,
        number: int,
        options: StepOptions,
    ) -> None:
        super().__init__(tier.root, agreement, number, options)
        self._tier, self._draining = tier, draining

    def wait_turn(self, previous: Sequence[InnerHandle]) -> None:
        _wait_first(previous)

    def follow(self, previous: Sequence[InnerHandle]) -> None:
        _wait_first(previous)

    def _next_sequence(self) -> int:
        return self._tier.next_sequence(self._tier.root)

    def fail(self, error: BaseException) -> None:
        self._draining.fail(error)

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        with closing(self._draining):
            if failure is None and self._tier.is_first():
                self._tier.drop_replaced(self._number)
            super().end(pipeline, failure)


def _wait_first(previous: Sequence[InnerHandle]) -> None:
    """Waits until earlier saves are committed in the tier or the root. Their steps then have the
    sequence numbers that order commits, even while they are being drained.
    """
    for handle in previous:
        handle.wait_first()
