"""Jobs: an example, or another script, as one rank or several, in interpreters that are forked.

The ranks find what a launcher tells them in their environment. The first one ends as every
interpreter does; the others free nothing, since that takes long. What a launcher does beyond that
(restarts, its own store) needs the real one. Must not know what the scripts do.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.kit import interpreters
from tests.kit.interpreters import LEAVE
from tests.kit.paths import ROOT

WAIT_S = 200.0
SCRIPT = """
import pathlib, runpy, sys
sys.path[0] = str(pathlib.Path(sys.argv[1]).parent)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Job:
    """A script at work in a directory that is made for it.

    Args:
        script: its path below the project's root.
        cwd: where it runs; what its ranks say goes to a file "output" there.
        options: its arguments.
        ranks: how many processes.
        imports: see interpreters.Program.
        variables: for the environment of each.

    Attributes:
        ranks: the processes.
    """

    def __init__(
        self,
        script: str,
        cwd: Path,
        *options: object,
        ranks: int = 1,
        imports: str = "",
        variables: dict[str, str | None] | None = None,
    ) -> None:
        cwd.mkdir(exist_ok=True)
        self._cwd = cwd
        job: dict[str, str | None] = {}
        if ranks > 1:
            job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
            self._port = held_port()
            port = self._port.getsockname()[1]
            job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            job |= {"GLOO_SOCKET_IFNAME": "lo"}
        self.ranks = [
            interpreters.Program(
                SCRIPT + LEAVE if rank else SCRIPT,
                ROOT / script,
                *options,
                cwd=cwd,
                imports=imports,
                output=cwd / "output",
                variables=(variables or {})
                | job
                | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if job else {}),
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            if len(self.ranks) > 1:
                stack.push(self._port)
            for rank in self.ranks:
                stack.push(rank)

    @property
    def output(self) -> str:
        """What all ranks have said so far."""
        return (self._cwd / "output").read_text()

    def poll(self) -> int | None:
        """The first failure; else None while ranks run, and 0 when all have ended well."""
        codes = [rank.poll() for rank in self.ranks]
        failures = [code for code in codes if code]
        return failures[0] if failures else None if None in codes else 0

    def wait(self, timeout: float = WAIT_S) -> int:
        """The exit status of the job: when one rank fails, the others are killed."""
        deadline = time.monotonic() + timeout
        for rank in self.ranks:
            while rank.poll() is None and not self.poll():
                try:
                    rank.wait(min(0.1, max(0.0, deadline - time.monotonic())))
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline:
                        self.kill()
                        raise
        code = self.poll()
        assert code is not None
        if code:
            self.kill()
        return code

    def kill(self, *ranks: int) -> None:
        """Kills these ranks, all if none are named, and then what is left of the job."""
        killed = [self.ranks[rank] for rank in ranks] or self.ranks
        for number in (signal.SIGSTOP, signal.SIGKILL):  # at a stroke: none sees another one die
            for rank in killed:
                rank.send_signal(number)
        for rank in killed:
            rank.wait()
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def finish(self, timeout: float = WAIT_S) -> str:
        """Waits for a job that ends well; returns its output."""
        with self:
            code = self.wait(timeout)
            ends = [rank.returncode for rank in self.ranks]  # -9: killed when another had failed
            assert code == 0, f"the ranks ended with {ends}, and said:\n{self.output}"
        return self.output


def start(example: str, cwd: Path, *options: object, ranks: int = 1, imports: str = "") -> Job:
    """The example of this name, which logs its losses."""
    script = f"examples/{example}.py"
    return Job(script, cwd, "--loss-log", "losses", *options, ranks=ranks, imports=imports)


def told(script: str, cwd: Path, what: str, ranks: int, *, imports: str) -> list[dict[str, Any]]:
    """What each rank of a job, that may be the only one, has told: `SCRIPT WHAT CWD`, in a
    directory below cwd, leaves JSON in "told RANK".
    """
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    alone: dict[str, str | None] = {**one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    variables, below = alone if ranks == 1 else {}, cwd / f"{what} {ranks}"
    Job(script, below, what, cwd, ranks=ranks, imports=imports, variables=variables).finish()
    return [json.loads((below / f"told {rank}").read_text()) for rank in range(ranks)]


def finish(job: Job, cwd: Path) -> list[tuple[int, str]]:
    """What a run that ends well has logged."""
    job.finish()
    return logged(cwd)


def logged(cwd: Path, name: str = "losses") -> list[tuple[int, str]]:
    """Steps and losses of all runs in a directory; the losses as hexadecimal text."""
    records = map(json.loads, (cwd / name).read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records]


def held_port() -> socket.socket:
    """A socket bound to a port on which c10d's store can listen: as long as it is open, nobody else
    who binds port 0 is given this one.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
