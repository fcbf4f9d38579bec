"""Processes that are the ranks of one job and do together what they are told, one thing at a time.

It owns the processes and the job's store. What they can do stands in rank_worker.py; this must not
know it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

WORKER = Path(__file__).resolve().parent / "rank_worker.py"
CALL_S = 600.0
END_S = 15.0


class RankFailed(Exception):
    """A rank raised an error, died, or did not answer in time."""


class Crew:
    """The ranks of one job: `crew("name", ...)` calls that function of rank_worker.py on each."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []

    def __call__(self, name: str, /, *, ranks: range | None = None, **arguments: Any) -> list[Any]:
        """Return what the function returned on each rank; on these alone, if `ranks` says so."""
        called = {self.pipes[rank]: rank for rank in ranks or range(len(self.pipes))}
        for pipe in called:
            pipe.send((name, arguments))
        answers, end = dict[int, Any](), time.monotonic() + CALL_S
        while len(answers) < len(called):
            waiting = [pipe for pipe, rank in called.items() if rank not in answers]
            ready = wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                raise RankFailed(f"{name}: no answer within {CALL_S:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    error, answers[called[pipe]] = pipe.recv()
                except (EOFError, ConnectionError):
                    error = "its process ended"
                if error is not None:
                    where = f"rank {called[pipe]} of {len(self.pipes)}"
                    raise RankFailed(f"{name} on {where}: {error}")
        return [answers[rank] for rank in called.values()]

    def start(self, command: list[str]) -> None:
        """Start a rank, whose end of a pipe is named last on its command line."""
        ours, theirs = Pipe()
        self.pipes.append(ours)
        with theirs:
            self.processes.append(
                subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                    pass_fds=[theirs.fileno()],
                    stdout=sys.stderr,  # which is for the result alone
                    start_new_session=True,  # Ctrl-C is for the one who started them
                )
            )

    def end(self, at_once: bool) -> None:
        """End the processes: by asking them to, and then by force."""
        deadline = time.monotonic() + (0.0 if at_once else END_S)
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def crew(size: int, given: Callable[[int], list[str]] = lambda _rank: []) -> Iterator[Crew]:
    """Start a job of so many ranks; the command line of each begins with what it is given."""
    # Hosted here, as a launcher's agent would, so that no rank does it beside its own work.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members, at_once = Crew(), True
    try:
        for rank in range(size):
            command = [sys.executable, str(WORKER), str(store.port), str(rank), str(size)]
            members.start([*given(rank), *command])
        members("ready")
        yield members
        at_once = False
    finally:
        members.end(at_once)
        del store
