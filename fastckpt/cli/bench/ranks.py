"""`fastckpt bench ranks`: processes that save one state together, beside one that saves it alone.

What a rank does is in fastckpt/cli/bench/rank.py. The module must not know how ranks agree.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import fastckpt
from fastckpt.arguments.quantities import shown_rate, shown_size, shown_time
from fastckpt.cli.bench.benchmark import Command, Result, table
from fastckpt.cli.bench.rank import DONE, c10d
from fastckpt.cli.progress import progress
from fastckpt.errors import CheckpointError

_RANK = [sys.executable, "-c", "from fastckpt.cli.bench.rank import main; main()"]
_POLL_S = 0.05


class _Rank:
    """A process of its own, whose output goes to files, so that it never waits for a reader. It is
    killed when the context is left.
    """

    def __init__(self, number: int, arguments: Sequence[object]) -> None:
        self.number = number
        self._files = ExitStack()
        open_file = tempfile.TemporaryFile
        self._out, self._errors = (self._files.enter_context(open_file("w+")) for _ in range(2))
        self.process = subprocess.Popen(
            [*_RANK, str(number), *map(str, arguments)],
            cwd=Path(fastckpt.__file__).parents[1],
            stdin=subprocess.PIPE,  # a rank ends when its parent has
            stdout=self._out,
            stderr=self._errors,
        )

    def __enter__(self) -> _Rank:
        return self

    def __exit__(self, *_: object) -> None:
        with self._files:
            self.process.kill()
            self.process.communicate()

    def is_running(self) -> bool:
        """Returns whether it has not ended; raises CheckpointError if it has failed."""
        status = self.process.poll()
        if status:
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines()
            how = f"status {status}" if status > 0 else signal.Signals(-status).name
            said = f": {lines[-1]}" if lines else ""
            raise CheckpointError(f"rank {self.number} ended with {how}{said}")
        return status is None

    def found(self) -> Any:
        """Returns what the rank printed; it has ended well."""
        self._out.seek(0)
        return json.loads(self._out.read().splitlines()[-1])


def _wait(ranks: list[_Rank], timeout_s: float, look: Callable[[], object]) -> None:
    """Waits until all ranks have ended, and calls look() meanwhile.

    Raises:
        CheckpointError: a rank failed, or had not ended after timeout_s.
    """
    until = time.monotonic() + timeout_s
    while running := [str(rank.number) for rank in ranks if rank.is_running()]:
        if time.monotonic() > until:
            late = ", ".join(running)
            raise CheckpointError(f"late after {shown_time(timeout_s)} (--timeout): rank {late}")
        look()
        time.sleep(_POLL_S)


def _measured(own: Path, arguments: argparse.Namespace) -> Result:
    count, size, rounds = arguments.ranks, arguments.size, arguments.rounds
    timeout = timedelta(seconds=arguments.timeout)
    store = c10d.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
    shown = 0

    def look() -> None:
        nonlocal shown
        done = store.add(DONE, 0)
        moved((done - shown) * size)
        shown = done

    told = (count, store.port, size, rounds, arguments.timeout, own / "saved")
    with progress(2 * (rounds + 1) * size, "saved") as moved, ExitStack() as processes:
        ranks: list[_Rank] = []
        for number in range(count):
            ranks.append(processes.enter_context(_Rank(number, told)))
        _wait(ranks, arguments.timeout, look)
        found = [rank.found() for rank in ranks]
    nbytes, turns = found[0]["nbytes"], [*zip(*(its["rows"] for its in found), strict=True)]
    return {
        "nbytes": nbytes,
        "ranks": count,
        "rounds": rounds,
        "together": _summary(nbytes, [turn for turn in turns if turn[0]["together"]]),
        "alone": _summary(nbytes, [turn[:1] for turn in turns if not turn[0]["together"]]),
        "wrong": found[0]["wrong"],
    }


def _summary(nbytes: int, turns: list[Any]) -> Result:
    """Returns what saves took, each given by a row for each rank; the last rank counts."""
    durable_s = [max(row["durable_s"] for row in turn) for turn in turns]
    blocked_s = [[row["blocked_s"] for row in its] for its in zip(*turns, strict=True)]
    return {
        "durable_s_by_round": durable_s,
        "durable_s": median(durable_s),
        "rate": nbytes / median(durable_s),
        "blocked_s_by_rank": [median(its) for its in blocked_s],
    }


def _lines(result: Result) -> Iterator[str]:
    count = result["ranks"]
    yield (
        f"{shown_size(result['nbytes'])}, held by each of {count} ranks on this machine, in one "
        f"file; medians of {result['rounds']} rounds; all bytes compared"
    )
    rows = [("", "durable", "rate", "blocked, by rank")]
    for name, its in ((f"{count} ranks", result["together"]), ("rank 0 alone", result["alone"])):
        blocked = ", ".join(map(shown_time, its["blocked_s_by_rank"]))
        rows.append((name, shown_time(its["durable_s"]), shown_rate(its["rate"]), blocked))
    yield from table(rows)


COMMAND = Command(
    needed=lambda arguments: int(1.1 * arguments.size),
    measured=_measured,
    lines=_lines,
)
