"""Interpreters that have imported torch, forked when a test asks for one: a start takes seconds.

Run as a program this file is the ancestor, which imports torch and fastckpt, never saves, and forks
a process for each program: with its own session, standard streams, arguments and environment. It
ends as every interpreter does, with its exit handlers; a program of run() that ends well frees
nothing. A test about a real start needs one: about options of the interpreter, variables that are
read at import, or the memory of a fresh process.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

from tests.kit.paths import ROOT

_STATUS = struct.Struct("<ii")
_LENGTH = struct.Struct("<I")
_STREAMS = 3
_FDS_MAX = 64
# What takes long of almost everything that others import: they are forked from one that has it.
TRAINING = "tests.crews.training_imports"


# The last line of a program that ends well: Python takes half a second to free what was imported.
LEAVE = "\nLEAVE()\n"


def leave() -> None:
    """Ends this process as every interpreter does, with its exit handlers, but frees nothing."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def let_go(directory: Path) -> None:
    """Waits until nobody holds a lock of a temporary below `directory`, whose writers have ended.

    The last writes of io_uring may outlive a process that was killed, and its locks with them.
    """
    for path in directory.rglob(".*.tmp"):
        fd = os.open(path, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.close(fd)


class Program:
    """A process that runs a program, or a function.

    Args:
        text: the program.
        arguments: sys.argv after the first.
        variables: set in its environment; None removes one.
        cwd: where it runs.
        imports: a module that an interpreter has imported before it is forked, beside torch and
            fastckpt; for modules that take long, since such an interpreter stays. It is forked from
            one that has imported TRAINING.
        fds: further descriptors; the program finds their numbers in INHERITED.
        inherit_stderr: its errors go where pytest's go, rather than into a pipe.
        output: a file that is given all that it says, at its end.

    Attributes:
        pid: of the process, the leader of its session.
        stdin, stdout, stderr: pipes, as text.
        returncode: as subprocess has it; None until wait() has returned.
    """

    def __init__(
        self,
        text: str,
        *arguments: object,
        variables: dict[str, str | None] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        imports: str = "",
        fds: tuple[int, ...] = (),
        inherit_stderr: bool = False,
        output: str | os.PathLike[str] | None = None,
    ) -> None:
        ancestor = _ancestor(imports)
        pipes = [os.pipe() for _ in range(_STREAMS)]
        child_ends = [pipes[0][0], pipes[1][1], 2 if inherit_stderr else pipes[2][1]]
        if output is not None:
            into = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            child_ends[1:] = [into, into]
        order = {
            "text": text,
            "arguments": [*map(str, arguments)],
            "variables": variables or {},
            "cwd": os.fspath(cwd or os.getcwd()),
        }
        self._status, theirs = socket.socketpair()
        with theirs:
            data = json.dumps(order).encode()
            given = [theirs.fileno(), *child_ends, *fds]
            socket.send_fds(ancestor, [_LENGTH.pack(len(data))], given)
            ancestor.sendall(data)
        for fd in {pipes[0][0], pipes[1][1], pipes[2][1], *child_ends} - {2}:
            os.close(fd)
        self.stdin = os.fdopen(pipes[0][1], "w")
        self.stdout = os.fdopen(pipes[1][0])
        self.stderr = os.fdopen(pipes[2][0])
        self.returncode: int | None = None
        (self.pid, _) = _STATUS.unpack(self._status.recv(_STATUS.size))

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills what still runs."""
        if self.poll() is None:
            self.kill()
            self.wait()
        self._status.close()
        for stream in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):  # what was not read by a dead process
                stream.close()

    def poll(self) -> int | None:
        """The exit status, if the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it runs
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the process is gone."""
        if self.returncode is None:
            ready, _, _ = select.select([self._status], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(
                    f"the program of process {self.pid}", timeout or 0.0
                )
            _, status = _STATUS.unpack(self._status.recv(_STATUS.size))
            self.returncode = os.waitstatus_to_exitcode(status)
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process and what it has started."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.killpg(self.pid, signal.SIGKILL)

    def communicate(self, given: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Writes to stdin, reads both streams to their ends and waits for the process."""
        said = {"stdout": "", "stderr": ""}

        def read(name: str) -> None:
            said[name] = getattr(self, name).read()

        readers = [threading.Thread(target=read, args=(name,)) for name in said]
        for reader in readers:
            reader.start()
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended without reading
                self.stdin.write(given)
                self.stdin.close()
            for reader in readers:
                reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except BaseException:
            self.kill()
            raise
        finally:
            for reader in readers:
                reader.join()
        return said["stdout"], said["stderr"]


def run(
    text: str,
    *arguments: object,
    variables: dict[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    imports: str = "",
    given: str = "",
    timeout: float = 60.0,
    frees: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; one that takes longer is killed with all that it started.

    Args:
        frees: if it ends well, it ends as every interpreter does, and does not leave(): for tests
            about that.
    """
    text = text if frees else text + LEAVE
    with Program(text, *arguments, variables=variables, cwd=cwd, imports=imports) as program:
        stdout, stderr = program.communicate(given, timeout)
        assert program.returncode is not None
        return subprocess.CompletedProcess("program", program.returncode, stdout, stderr)


@functools.cache
def _ancestor(imports: str) -> socket.socket:
    """A connection to an interpreter that forks others, and ends with this process."""
    ours, theirs = socket.socketpair()
    with theirs:
        if imports:
            _kept.append(
                Program(
                    f"import {imports}\n"
                    "from tests.kit.interpreters import next_program\n"
                    "exec(*next_program(INHERITED[0]))",
                    imports="" if imports == TRAINING else TRAINING,
                    fds=(theirs.fileno(),),
                    inherit_stderr=True,
                )
            )
        else:
            search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            ancestor = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                # Not by torch.set_num_threads(): in a child of fork() torch makes a pool anew that
                # this has made, and a second thread that needs it meanwhile aborts the process.
                # Unbuffered, print() would write the parts of a line one by one, and a kill between
                # two would leave a part.
                env=os.environ
                | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
                pass_fds=[theirs.fileno()],
            )
            _kept.append(ancestor)  # else it would warn that it still runs, in any test
    return ours


_kept: list[Program | subprocess.Popen[bytes]] = []  # the ancestors


def next_program(fd: int) -> tuple[types.CodeType, dict[str, Any]]:
    """Serves orders for programs; returns in the process of each, with what it is to execute."""
    # A collection of garbage writes to what it looks at: programs would copy what they share.
    gc.collect()
    gc.freeze()
    order, fds = _next_order(socket.socket(fileno=fd))
    return compile(order["text"], "<program>", "exec"), vars(_become(order, fds))


def _next_order(orders: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The life of the ancestor, and of the parent of each program: returns in a program's process
    only, with what it is to do and the descriptors for it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the parents of programs need not be waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        head, fds, _, _ = socket.recv_fds(orders, _LENGTH.size, _FDS_MAX)
        if not head:
            os._exit(0)
        (left,) = _LENGTH.unpack(head)
        data = b""
        while len(data) < left:
            data += orders.recv(left - len(data))
        if os.fork() == 0:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            led, leads = os.pipe()
            pid = os.fork()
            if pid:
                os.close(leads)
                os.read(led, 1)
                _await(pid, fds)
            os.setsid()
            os.close(led)
            os.close(leads)
            return json.loads(data), fds
        for fd in fds:
            os.close(fd)


def _await(pid: int, fds: list[int]) -> None:
    """Tells the number of a program's process, and its exit status when it is gone."""
    for fd in fds[1:]:
        os.close(fd)
    # Nobody may be there any more who asks.
    with socket.socket(fileno=fds[0]) as status, contextlib.suppress(OSError):
        status.send(_STATUS.pack(pid, 0))
        status.send(_STATUS.pack(*os.waitpid(pid, 0)))
    os._exit(0)


def _become(order: dict[str, Any], fds: list[int]) -> types.ModuleType:
    """Gives this process what the program was promised; returns its module."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.close(fds[0])
    for number, fd in enumerate(fds[1 : 1 + _STREAMS]):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(order["cwd"])
    for name, value in order["variables"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.argv[:] = ["-c", *order["arguments"]]
    module = types.ModuleType("__main__")
    vars(module).update(INHERITED=fds[1 + _STREAMS :], LEAVE=leave)
    sys.modules["__main__"] = module
    return module


if __name__ == "__main__":
    import torch

    import fastckpt

    assert torch.get_num_threads() == 1
    assert fastckpt.__file__
    sys.path[0] = ""  # as for `python -c`
    exec(*next_program(int(sys.argv[1])))
