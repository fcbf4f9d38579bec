"""SaveStats: the times and sizes of one save, on this rank and on the others."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any, NamedTuple

from fastckpt.arguments.quantities import shown_share, shown_size, shown_time, shown_transfer

# Writes are counted by their size: of at most so many bytes, and more than the size before; the
# last also counts larger ones. All are powers of 2.
WRITE_SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 8 << 20)
# The phases of a rank that delay the commit, with the clocks of their begin and end: "" is the call
# of save(). Copies and writes overlap.
PHASES = (
    ("capture", "", "captured_s"),
    ("copy", "captured_s", "staged_s"),
    ("write", "opened_s", "written_s"),
    ("sync", "written_s", "synced_s"),
)
_NO_WRITES = (0,) * len(WRITE_SIZES)


class RankClocks(NamedTuple):
    """The bytes and the clocks of one rank of a save. Clocks are seconds since the rank called
    save(), or NaN if the rank did not reach that point.

    The attributes are those of SaveStats, for that rank. At synced_s the rank begins to wait for
    the others and the commit.
    """

    nbytes: int
    captured_s: float
    staged_s: float
    opened_s: float
    written_s: float
    synced_s: float
    paced_s: float
    memory_waited_s: float
    writes: tuple[int, ...]

    @classmethod
    def of(cls, stats: SaveStats) -> RankClocks:
        """Returns the current bytes and clocks of this rank."""
        clocks = (getattr(stats, name) for name in cls._fields[1:-1])
        values = (nan if clock is None else clock for clock in clocks)
        return cls._make([stats.nbytes, *values, stats.writes])

    def to_bytes(self) -> bytes:
        """Encodes bytes and clocks in CLOCKS_BYTES bytes, to send them to the first rank."""
        return _CLOCKS.pack(*self[:-1], *self.writes)

    @classmethod
    def from_bytes(cls, content: bytes) -> RankClocks:
        """Decodes the result of to_bytes()."""
        values = _CLOCKS.unpack(content)
        return cls._make([*values[: -len(WRITE_SIZES)], values[-len(WRITE_SIZES) :]])

    def phases(self) -> dict[str, float]:
        """Returns the duration of each phase in seconds."""
        clocks = {**self._asdict(), "": 0.0}
        return {name: clocks[end] - clocks[begin] for name, begin, end in PHASES}


_CLOCKS = struct.Struct(f"<Q7f{len(WRITE_SIZES)}Q")
CLOCKS_BYTES = _CLOCKS.size


@dataclass
class SaveStats:
    """The statistics of one save. Times are seconds since the call of save(), or None until then.

    Attributes:
        stall_s: how long save() blocked the caller. With the step fence it includes the wait in the
            optimizer's step.
        captured_s: when all tensors had been found and all objects pickled.
        staged_s: when everything had been copied, so that the object could be changed.
        opened_s: when this process's files had been opened.
        written_s: when the last byte had been transferred.
        synced_s: when this process's files were durable, or complete if durable=False.
        committed_s: when the checkpoint was visible under its name, and durable unless
            durable=False; with a local tier, in the root.
        local_committed_s: when the step was committed in the local tier on every node; None also if
            there is no tier or the step bypassed it.
        replicated_s: when every rank's files had been copied to the memory of its neighbours; None
            also if there are no peers.
        replicas_why: the reason, with ranks and addresses, why some of these copies are missing;
            else "".
        local_why: the reason why the step bypassed the local tier; else "".
        nbytes: the bytes that this process writes, before compression: the file, its part of the
            file, or its files of a step. 0 if torch.save wrote to an object without a position,
            such as a socket.
        ranks: how many ranks save together.
        total_nbytes: the bytes that all ranks write; known on the first rank after all have
            finished.
        stored_nbytes: the size of all files of a step, after compression; known like total_nbytes.
        by_rank: the clocks of all ranks; known on the first rank after all have finished.
        staged_bytes_max: the peak of the staging memory that the save held, in bytes.
        backend: "io_uring" or "threads"; "stock" if torch.save itself wrote to the target.
        direct, why: whether O_DIRECT was used, and the reason for this and for the backend.
        pacing: the requested limits on the rate and this rank's share, as a text; or "".
        paced_s: how long writes waited because of these limits.
        memory_waited_s: how long copies waited for staging memory, because writes were slower than
            copies; summed over the files.
        writes: how many writes this process made in each size class: up to 4 KiB, 64 KiB, 1 MiB, 4
            MiB, and above. Indexes and the commit record are not counted. With a codec and in an
            export, blocks are counted instead of the resulting writes.
        staging: "host" if no tensor was on a GPU, else the kind of memory that received the copies,
            "pinned" or "pageable".
        staging_why: the reason for the value of staging.
        d2h_s, d2h_gbps: how long the slowest GPU copied; the rate of all GPUs together in that
            time, in 10^9 bytes a second.
        gpu_stall_s: how long the caller's streams waited for copies, by the GPU's clock; None also
            if they still waited at the commit.
    """

    stall_s: float | None = None
    captured_s: float | None = None
    staged_s: float | None = None
    opened_s: float | None = None
    written_s: float | None = None
    synced_s: float | None = None
    committed_s: float | None = None
    local_committed_s: float | None = None
    local_why: str = ""
    replicated_s: float | None = None
    replicas_why: str = ""
    nbytes: int = 0
    ranks: int = 1
    total_nbytes: int | None = None
    stored_nbytes: int | None = None
    by_rank: tuple[RankClocks, ...] = ()
    staged_bytes_max: int = 0
    backend: str = ""
    direct: bool = False
    why: str = ""
    pacing: str = ""
    paced_s: float = 0.0
    memory_waited_s: float = 0.0
    writes: tuple[int, ...] = _NO_WRITES
    staging: str = ""
    staging_why: str = ""
    d2h_s: float | None = None
    d2h_gbps: float | None = None
    gpu_stall_s: float | None = None

    def spans(self) -> list[tuple[str, float, float]]:
        """Returns the finished phases of the save, each with the seconds of its begin and end:
        those of PHASES, "commit" and, with a local tier, "drain".
        """
        clocks = {**vars(self), "": 0.0, "first_s": self.local_committed_s or self.committed_s}
        ends = [*PHASES, ("commit", "synced_s", "first_s")]
        ends += [("drain", "local_committed_s", "committed_s")]
        spans = [(name, clocks[begin], clocks[end]) for name, begin, end in ends]
        return [span for span in spans if None not in span]

    def __repr__(self) -> str:
        return f"<SaveStats: {self}>"

    def __str__(self) -> str:
        """Returns one line: bytes, time, rate, how long the caller was blocked, and the backend."""
        nbytes, whose = self.nbytes, shown_share(self.ranks)
        if self.total_nbytes is not None:
            nbytes, whose = self.total_nbytes, f" by {self.ranks} ranks" if self.ranks > 1 else ""
        if self.backend == "stock" and not nbytes and self.committed_s is not None:
            words = [f"bytes not counted, in {shown_time(self.committed_s)}"]
        elif self.committed_s is None:
            words = [f"{shown_size(nbytes)}{whose}, not committed"]
        else:
            words = [shown_transfer(nbytes, self.committed_s, whose)]
        if self.local_committed_s is not None:
            words.append(f"on the node after {shown_time(self.local_committed_s)}")
        if self.replicated_s is not None:
            words.append(f"at its neighbours after {shown_time(self.replicated_s)}")
        if self.stall_s is not None:
            words.append(f"the caller was blocked for {shown_time(self.stall_s)}")
        if self.backend:
            words.append(f"{self.backend}, O_DIRECT" if self.direct else self.backend)
        return "; ".join(words)


class Progress(NamedTuple):
    """How many bytes of its part a process has written so far, and their total."""

    written: int
    total: int


def profile_of(stats: SaveStats) -> dict[str, Any]:
    """Returns the times of a save's phases; see SaveHandle.profile()."""
    ranks = stats.by_rank or (RankClocks.of(stats),)
    total = stats.total_nbytes if stats.total_nbytes is not None else stats.nbytes
    committed_s = stats.committed_s
    profile: dict[str, Any] = {
        "ranks": stats.ranks,
        "nbytes": stats.nbytes,
        "total_nbytes": stats.total_nbytes,
        "stored_nbytes": stats.stored_nbytes,
        "stall_s": stats.stall_s,
        "local_committed_s": stats.local_committed_s,
        "committed_s": committed_s,
        "rate": total / committed_s if committed_s else None,
        "backend": stats.backend,
        "direct": stats.direct,
        "staging": stats.staging,
        "write_sizes": [*WRITE_SIZES],
        "by_rank": {
            name: [_plain(value) for value in column]
            for name, column in zip(RankClocks._fields, zip(*ranks, strict=True), strict=True)
        },
    }
    slowest = slowest_of(ranks)
    if slowest is not None:
        rank, phase, seconds = slowest
        profile["slowest"] = {"rank": rank, "phase": phase, "seconds": max(0.0, seconds)}
        agreed_s = committed_s if stats.local_committed_s is None else stats.local_committed_s
        if agreed_s is not None:
            profile["commit_s"] = max(0.0, agreed_s - ranks[rank].synced_s)
    if committed_s is not None and stats.local_committed_s is not None:
        profile["drain_s"] = max(0.0, committed_s - stats.local_committed_s)
    return profile


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [*value]
    return None if isnan(value) else round(value, 6)


def slowest_of(ranks: Sequence[RankClocks]) -> tuple[int, str, float] | None:
    """Returns the rank whose files were durable last, a phase of that rank and the phase's
    duration. It is the phase that exceeds the median of all ranks most; if there is only one rank,
    its longest phase.
    """
    numbers = [number for number, its in enumerate(ranks) if not isnan(its.synced_s)]
    if not numbers:
        return None
    rank = max(numbers, key=lambda number: ranks[number].synced_s)
    own = {name: took for name, took in ranks[rank].phases().items() if not isnan(took)}
    phases = [ranks[number].phases() for number in numbers]
    usual = {
        name: sorted(each[name] for each in phases)[len(phases) // 2] if phases[1:] else 0.0
        for name in own
    }
    phase = max(own, key=lambda name: own[name] - usual[name], default="")
    return rank, phase, own.get(phase, 0.0)
