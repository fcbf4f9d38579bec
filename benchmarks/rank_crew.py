"""Processes that are the ranks of one job and do together what they are told, one thing at a time.

It owns the processes and the job's store. What they can do stands in rank_worker.py; this must not
know it.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

WORKER = Path(__file__).resolve().parent / "rank_worker.py"
CALL_S = 600.0
END_S = 15.0


class RankFailed(Exception):
    """A rank raised an error, died, or did not answer in time."""


class Crew:
    """The ranks of one job: `crew("name", ...)` calls that function of rank_worker.py on each.

    Args:
        processes: of the ranks.
    """

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self.size = len(processes)

    def __call__(self, name: str, /, *, ranks: range | None = None, **arguments: Any) -> list[Any]:
        """Return what the function returned on each rank; on these alone, if `ranks` says so."""
        called = [*(ranks or range(self.size))]
        for rank in called:
            pipe = self._processes[rank].stdin
            assert pipe is not None
            pipe.write(json.dumps([name, arguments]).encode() + b"\n")
            pipe.flush()
        answers = self._answers(called)
        for rank, answer in answers.items():
            if "error" in answer:
                raise RankFailed(f"{name} on rank {rank} of {self.size}: {answer['error']}")
        return [answers[rank]["value"] for rank in called]

    def _answers(self, called: list[int]) -> dict[int, Any]:
        """One line from each rank; the others are not waited for once one has failed."""
        answers: dict[int, Any] = {}
        texts = dict.fromkeys(called, b"")
        end = time.monotonic() + CALL_S
        with selectors.DefaultSelector() as selector:
            for rank in called:
                pipe = self._processes[rank].stdout
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, rank)
            while len(answers) < len(called):
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
                    raise RankFailed(f"no answer within {CALL_S:g} s")
                for key, _events in ready:
                    rank = key.data
                    part = os.read(key.fd, 1 << 20)
                    texts[rank] += part
                    if not part:
                        answers[rank] = {"error": "its process ended"}
                        selector.unregister(key.fileobj)
                    elif texts[rank].endswith(b"\n"):
                        answers[rank] = json.loads(texts[rank])
                if any("error" in answer for answer in answers.values()):
                    break
        return answers

    def end(self, at_once: bool) -> None:
        """End the processes: by asking them to, and then by force."""
        deadline = time.monotonic() + (0.0 if at_once else END_S)
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except BrokenPipeError:
                pass  # it has ended already
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def crew(size: int, given: Callable[[int], list[str]] | None = None) -> Iterator[Crew]:
    """Start a job of so many ranks.

    Args:
        size: how many.
        given: what the command line of a rank begins with.
    """
    # Hosted here, as a launcher's agent would, so that no rank does it beside its own work.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes: list[subprocess.Popen[bytes]] = []
    at_once = True
    members = Crew(processes)
    try:
        for rank in range(size):
            command = [sys.executable, str(WORKER), str(store.port), str(rank), str(size)]
            processes.append(
                subprocess.Popen(
                    [*(given(rank) if given else []), *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=variables,
                    start_new_session=True,  # Ctrl-C is for the one who started them
                )
            )
        members.size = size
        members("ready")
        yield members
        at_once = False
    finally:
        members.end(at_once)
        del store
