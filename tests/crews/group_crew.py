"""Processes that are the ranks of one job, and call functions of a test module together.

The nursery is a process that has imported the test module and forks ranks whenever it is asked to,
since starting Python with torch takes longer than most tests. It never saves, so what it forks has
no engine yet. The process that tests hosts the job's store, as a launcher's
agent does: a rank that dies takes no store with it. Must not know what is tested.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.kit import interpreters

WAIT_S = 100.0
OTHERS_S = 5.0  # for ranks to tell of themselves when one has failed
RANKS_MAX = 8
GROUP_OF_MEMBERS = "members"  # its description, for who destroys all other groups


@dataclass
class Outcome:
    """What came of one call: a value or an error, and after how many seconds."""

    value: Any
    error: BaseException | None
    took_s: float


def attempt(action: Callable[[], Any]) -> Outcome:
    """Calls an action and notes what it returned or raised."""
    begun = time.monotonic()
    try:
        value, error = action(), None
    except Exception as raised:
        value, error = None, raised
    return Outcome(value, error, time.monotonic() - begun)


class Told(logging.Handler):
    """Keeps the warnings of fastckpt."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Member:
    """What a function that runs on a rank knows of its job.

    Attributes:
        rank: in the job.
        world_size: how many ranks were called, the first ones of the job unless the test knows.
        store: a connection to the job's store, for what a test has to say.
    """

    def __init__(self, rank: int, store: dist.Store, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = dist.PrefixStore("test", store)
        timeout = timedelta(seconds=WAIT_S)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        self._groups: dict[range, Any] = {}
        self.make_groups(*(range(count) for count in range(1, world_size + 1)))

    def make_groups(self, *runs: range) -> None:
        """Makes groups of other ranks than the first ones; all ranks of the job call it together.

        No more than are needed: each has a thread that looks for work a hundred times a second.
        """
        for run in runs:
            if run not in self._groups:
                self._groups[run] = dist.new_group([*run], group_desc=GROUP_OF_MEMBERS)

    @property
    def group(self) -> Any:
        """The group of the ranks that were called, the first ones of the job."""
        return self.group_of(0, self.world_size)

    def group_of(self, begin: int, end: int) -> Any:
        """The group of the ranks [begin, end) of the job, which was made before."""
        return self._groups[range(begin, end)]


class RankDied(Exception):
    """The process of a rank ended during a call."""


class Crew:
    """The ranks of one job: `crew(body, *args)` calls body(member, *args) on each of them.

    Args:
        connections, pids: a connection to each rank, and its process.
        store: the job's; kept alive here.

    Attributes:
        is_usable: no call was cut short.
    """

    def __init__(self, connections: list[Connection], pids: list[int], store: Any) -> None:
        self._connections = connections
        self._pids = pids
        self._pidfds = [os.pidfd_open(pid) for pid in pids]
        self._store = store
        self._called: list[int] = []
        self.is_usable = True

    def __call__(
        self, body: Callable[..., Any], *args: Any, ranks: int | range | None = None
    ) -> list[Any]:
        """What body returned on each of these ranks (the first so many; None: all).

        It must not raise.
        """
        self.begin(body, *args, ranks=ranks)
        return self.end()

    def begin(self, body: Callable[..., Any], *args: Any, ranks: int | range | None = None) -> None:
        """Sends the call; end() has to follow."""
        assert self.is_usable and not self._called
        self._called = [*(ranks if isinstance(ranks, range) else range(ranks or len(self._pids)))]
        for rank in self._called:
            self._connections[rank].send((body, args, len(self._called)))

    def await_one(self, rank: int) -> None:
        """Waits until a rank has died in the call, or has answered."""
        if not wait([self._connections[rank]], WAIT_S):
            self.is_usable = False
            self._abort(self._called)
            raise AssertionError(f"rank {rank} neither dies nor ends")

    def _abort(self, ranks: Iterable[int]) -> None:
        """Ends these ranks, which show where their threads stand."""
        for rank in ranks:
            os.kill(self._pids[rank], signal.SIGABRT)
            wait([self._pidfds[rank]], OTHERS_S)

    def end(self) -> list[Any]:
        """The results of begin(), a RankDied for each rank that did."""
        deadline = time.monotonic() + WAIT_S
        called, self._called = self._called, []
        results: dict[int, Any] = {}
        failures: list[str] = []
        pending = {self._connections[rank]: rank for rank in called}
        self.is_usable = False
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._abort(pending.values())
                failures.append(f"ranks {sorted(pending.values())} do not end")
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    failed, results[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    failed, results[rank] = False, RankDied(f"rank {rank}")
                if failed:  # what the others say may be the cause
                    failures.append(f"rank {rank}: {results[rank]}")
                    deadline = min(deadline, time.monotonic() + OTHERS_S)
        died = [rank for rank, result in results.items() if isinstance(result, RankDied)]
        assert not failures, "\n".join([*failures, f"ranks that died: {died}"])
        self.is_usable = True
        return [results[rank] for rank in called]

    def close(self, orderly: bool) -> None:
        """Waits until the processes have ended: by the way every program does, or at once."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a rank that died has closed its end
                connection.send(orderly)
        for pidfd, pid in zip(self._pidfds, self._pids, strict=True):
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            if not ended.poll(WAIT_S * 1000 if self.is_usable else 0):
                os.kill(pid, signal.SIGKILL)
            os.close(pidfd)
        for connection in self._connections:
            connection.close()


class Nursery:
    """The process that forks ranks.

    Args:
        module: a test module whose functions ranks will call; imported once.
    """

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._process = interpreters.Program(
            "from tests.crews.group_crew import serve_nursery\nserve_nursery(INHERITED[0])",
            variables={"GLOO_SOCKET_IFNAME": "lo"},
            imports=module,
            fds=(theirs.fileno(),),
            inherit_stderr=True,
        )
        theirs.close()
        self._socket.settimeout(WAIT_S)
        self._lasting = contextlib.ExitStack()
        self._crews: dict[tuple[int, str], Crew] = {}

    def lasting_crew(self, size: int, purpose: str = "") -> Crew:
        """A crew of this size, and for one purpose, for many tests; another if a test left it in
        the midst of a call.
        """
        kept = self._crews.get((size, purpose))
        if kept is None or not kept.is_usable:
            kept = self._lasting.enter_context(self.crew(size))
        self._crews[size, purpose] = kept
        return kept

    @contextlib.contextmanager
    def crew(self, size: int, orderly: bool = False) -> Iterator[Crew]:
        """A job of so many ranks, which end with the context (see Crew.close)."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pairs = [socket.socketpair() for _ in range(size)]
        order = f"{store.port} {size}".encode()
        socket.send_fds(self._socket, [order], [theirs.fileno() for _, theirs in pairs])
        pids = [int(pid) for pid in self._socket.recv(4096).split()]
        for _, theirs in pairs:
            theirs.close()
        crew = Crew([Connection(ours.detach()) for ours, _ in pairs], pids, store)
        try:
            yield crew
        finally:
            crew.close(orderly)

    def close(self) -> None:
        self._lasting.close()
        self._socket.close()
        with self._process:
            self._process.wait(WAIT_S)


def serve(connection: Connection, rank: int, size: int, port: int) -> None:
    """The life of a rank: calls functions until there is nobody to ask for more."""
    faulthandler.enable()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    member = Member(rank, store, size)
    while True:
        try:
            call = connection.recv()
        except (EOFError, ConnectionError):
            return
        if isinstance(call, bool):
            break
        body, args, member.world_size = call
        try:
            result = False, body(member, *args)
        except BaseException:
            result = True, traceback.format_exc()
        connection.send(result)
    if not call:
        for child in multiprocessing.active_children():  # of a framework, and nobody else's to end
            child.kill()
        os._exit(0)


def bury(*_: Any) -> None:
    """Who has died is gone, and no zombie; of what, if of a signal, is told."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            if os.WIFSIGNALED(child[1]):
                cause = signal.Signals(os.WTERMSIG(child[1])).name
                os.write(2, f"rank's process {child[0]} died of {cause}\n".encode())


def serve_nursery(fd: int) -> None:
    """The life of the process that forks ranks; returns in a rank's process only."""
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, bury)
    while True:
        order, fds, _flags, _address = socket.recv_fds(control, 4096, RANKS_MAX)
        if not order:
            os._exit(0)  # nothing is to be done, and Python with torch takes seconds to do it
        port, size = map(int, order.split())
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                for other in range(size):
                    if other != rank:
                        os.close(fds[other])
                serve(Connection(fds[rank]), rank, size, port)
                return
            pids.append(pid)
        for each in fds:
            os.close(each)
        control.send(" ".join(map(str, pids)).encode())
