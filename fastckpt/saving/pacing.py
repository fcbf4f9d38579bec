"""Pacing limits the load of saves on shared storage: their rate, and the number of ranks that write
at the same time.

Responsible for this rank's share of the rate, and for the wait until it may write. Pacing delays
writes, never staging.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from fastckpt.arguments.options import Pacing
from fastckpt.engine.save_stats import Progress, SaveStats
from fastckpt.engine.staging import Route
from fastckpt.engine.token_buckets import TokenBuckets
from fastckpt.engine.transfer import ImageTransfer
from fastckpt.errors import CheckpointError
from fastckpt.ranks.round import CANCEL_LOOK_S, Round
from fastckpt.storage.machine import this_machine

_LOOK_S = 2.0  # how often a paced write checks whether another rank has failed


class Pace:
    """The pacing of one save on one rank. Without limits, no method waits.

    Args:
        pacing: the requested pacing.
        agreement: the save's round.
        rates: the process's token buckets.
        owner: saves with the same owner share a bucket.
        stats: the save's statistics, to which those of the pacing are added.
        whole: whether each block is written at once, because its writer cannot write parts.
        raise_if_ended: raises the error that ends the save while it waits for a write. Default: the
            agreement's method.

    Attributes:
        timeout_s: how long ranks wait for each other, and for writes without progress.
    """

    def __init__(
        self,
        pacing: Pacing,
        agreement: Round,
        rates: TokenBuckets,
        owner: str,
        stats: SaveStats,
        *,
        whole: bool = False,
        raise_if_ended: Callable[[], None] | None = None,
    ) -> None:
        self._pacing = pacing
        self._raise_if_ended = (
            agreement.raise_if_ended if raise_if_ended is None else raise_if_ended
        )
        self._agreement, self.timeout_s = agreement, agreement.timeout_s
        self._rates = rates
        self._owner = owner
        self._stats = stats
        self._whole = whole
        self._rate: float | None = None  # this rank's, in bytes a second
        self._writers: dict[int, int] = {}  # the bytes of each rank of this node that writes
        self._held_s = 0.0
        self._written_nbytes = 0
        self._tokens_s: dict[ImageTransfer, float] = {}
        stats.pacing = pacing.text()

    def limit_by(self, pacing: Pacing) -> None:
        """Uses another pacing from now on. Call this before the first write."""
        self._pacing = pacing
        self._stats.pacing = pacing.text()

    @property
    def meets(self) -> bool:
        """True if the ranks of a node share a rate, so that they must call meet() in each save."""
        return self._pacing.rate is not None and self._agreement.world_size > 1

    def meet(self, nbytes: int) -> None:
        """Exchanges how many bytes each rank of this node will write. All ranks call it.

        Raises:
            PeerFailed: another rank failed or is missing.
        """
        # A launcher's variables give the number of ranks on the node, but not their bytes. Shares
        # of the rate are proportional to the bytes, so that all ranks end together.
        neighbours = _neighbours(self._agreement, nbytes)
        self._writers = {rank: nbytes for rank, nbytes in neighbours.items() if nbytes}

    def share(self, nbytes: int) -> None:
        """Sets this rank's share of its node's rate, in order to write `nbytes`.

        Raises:
            CheckpointError: at this rate the write would take longer than other ranks wait.
        """
        pacing, size = self._pacing, self._agreement.world_size
        if pacing.rate is None or not nbytes:
            return
        part, writers = 1.0, self._writers
        if writers and pacing.max_writers is not None:
            part = 1 / len({chain_of(rank, size, pacing.max_writers) for rank in writers})
        elif writers:
            part = min(1.0, nbytes / sum(writers.values()))
        self._rate = pacing.rate * part
        seconds = nbytes / self._rate
        if size > 1 and seconds > self.timeout_s:
            raise CheckpointError(
                f"drain_rate is {pacing.rate:g} bytes/s, and the share of this rank is "
                f"{self._rate:g} bytes/s: its {nbytes} bytes would take {seconds:.0f} s, but ranks "
                f"wait for each other at most timeout_s ({self.timeout_s:g} s): raise drain_rate "
                "or timeout_s"
            )
        self._stats.pacing += f"; {self._rate / 1e6:g} MB/s on this rank"

    def route(self, route: Route) -> Route:
        """Returns a route with this rank's token bucket, if it has a rate."""
        if self._rate is None:
            return route
        bucket = self._rates.bucket(self._owner, self._rate, whole=self._whole)
        return route._replace(bucket=bucket)

    def begin(self, nbytes: int) -> None:
        """Sets this rank's share of the rate, and waits until the rank may write `nbytes`. A rank
        without bytes to write also waits for its turn, since it must pass the turn on.

        Raises:
            CheckpointError: see share().
            PeerFailed: another rank failed or took too long.
        """
        if not self._pacing:
            return
        self.share(nbytes)
        began = time.monotonic()
        most = self._pacing.max_writers
        if most is not None:
            # In order, so that all ranks blame the rank that is late, not one that waits for it.
            for rank in turns_before(self._agreement.rank, self._agreement.world_size, most):
                self._agreement.get("wrote", rank)
                self._stats.paced_s = time.monotonic() - began  # progress: see Pipeline.drain()
        self._held_s = self._stats.paced_s = time.monotonic() - began

    def end(self, *transfers: ImageTransfer) -> None:
        """If ranks take turns, waits for these transfers, and lets the next rank write."""
        if self._pacing.max_writers is not None:
            for transfer in transfers:
                self.wait_written(transfer)
            self._agreement.put("wrote", b"")

    def wait_written(self, transfer: ImageTransfer) -> None:
        """Waits for a transfer, which pacing may delay; ends early if another rank fails."""
        self._watch(transfer)
        self._tokens_s[transfer] = transfer.tokens_waited_s()
        self._stats.paced_s = self._held_s + max(self._tokens_s.values())

    def wait_one(self, transfer: ImageTransfer) -> None:
        """Like wait_written(), for one of many transfers that are written one after another."""
        self._watch(transfer)
        self._stats.paced_s += transfer.tokens_waited_s()
        self._written_nbytes += transfer.nbytes_written()

    def progress(self, nbytes: int) -> Progress:
        """Returns how many of `nbytes` the transfers of wait_one() have written."""
        return Progress(self._written_nbytes, nbytes)

    def _watch(self, transfer: ImageTransfer) -> None:
        looked = time.monotonic()
        while not transfer.written(CANCEL_LOOK_S):
            self._raise_if_ended()
            # Without a rate the write is short, and ranks send no requests to the store.
            if self._rate is not None and time.monotonic() - looked >= _LOOK_S:
                looked = time.monotonic()
                self._agreement.check()
        transfer.wait_written()


def chain_of(rank: int, world_size: int, chains: int) -> int:
    """Returns the number of a rank's chain, which is a range of consecutive ranks."""
    return rank * min(chains, world_size) // world_size


def turns_before(rank: int, world_size: int, writers: int) -> range:
    """Returns the ranks that write before a rank, so that at most `writers` write at the same time.

    The ranks of a chain write one after the other. Since ranks of a node usually have consecutive
    numbers, the ranks that write at the same time are on different nodes.
    """
    chain, chains = chain_of(rank, world_size, writers), min(writers, world_size)
    return range(-(-chain * world_size // chains), rank)


def _neighbours(agreement: Round, nbytes: int) -> dict[int, int]:
    """Returns the bytes that each rank of this machine has to write, including this rank. All ranks
    call it with their own number of bytes, and wait for each other. Raises PeerFailed if a rank
    failed or is missing.
    """
    agreement.put("machine", json.dumps([this_machine(), nbytes]).encode())
    if agreement.rank == 0:  # answers once for each machine
        members: dict[str, list[tuple[int, int]]] = {}
        for rank, record in enumerate(agreement.gather("machine")):
            machine, its_nbytes = json.loads(record)
            members.setdefault(machine, []).append((rank, its_nbytes))
        for machine, ranks in members.items():
            agreement.put(f"machine {machine}", json.dumps(ranks).encode())
    return dict(json.loads(agreement.get(f"machine {this_machine()}")))
