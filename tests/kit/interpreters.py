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
import errno
import fcntl
import functools
import gc
import importlib
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
_PEER = struct.Struct("3i")  # struct ucred, unix(7): process, user, group
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
        ancestor = _ancestor()
        pipes = [os.pipe() for _ in range(_STREAMS)]
        child_ends = [pipes[0][0], pipes[1][1], 2 if inherit_stderr else pipes[2][1]]
        if output is not None:
            into = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            child_ends[1:] = [into, into]
        order = {
            "text": text,
            "imports": imports,
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
        begun = self._status.recv(_STATUS.size)
        assert begun, f"no process for the program: stderr says how its imports {imports!r} failed"
        (self.pid, _) = _STATUS.unpack(begun)

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
def _ancestor() -> socket.socket:
    """A connection to the interpreter that forks others: one for all workers of a run of pytest,
    since each import of what training needs takes seconds. It ends when no worker is left.
    """
    run = str(os.getpid())
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = f"{os.environ['PYTEST_XDIST_TESTRUNUID']}-{os.getppid()}"
    address = f"\0fastckpt-tests-{run}"
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return _connection(address)
        listener.listen()
        ours, theirs = socket.socketpair()
        search = os.pathsep.join(filter(None, [str(ROOT), _ENVIRONMENT.get("PYTHONPATH")]))
        with theirs:
            fds = [listener.fileno(), theirs.fileno()]
            ancestor = subprocess.Popen(
                [sys.executable, __file__, *map(str, fds)],
                # Not by torch.set_num_threads(): in a child of fork() torch makes a pool anew that
                # this has made, and a second thread that needs it meanwhile aborts the process.
                # Unbuffered, print() would write the parts of a line one by one, and a kill between
                # two would leave a part.
                env=_ENVIRONMENT
                | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # who kills this worker's does not mean the others'
            )
        _kept.append(ancestor)  # else it would warn that it still runs, in any test
        return ours


def _connection(address: str) -> socket.socket:
    """A connection to an address that another worker has bound, and may not listen to yet."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(ConnectionRefusedError):  # it does not listen yet
            connection.connect(address)
            return connection
        connection.close()


_ENVIRONMENT = dict(os.environ)  # as it is while tests are collected: tests change theirs
_kept: list[subprocess.Popen[bytes]] = []  # the ancestor, if this process has started it


class Ancestor:
    """The life of an interpreter that forks others.

    Args:
        listener: where other workers connect.
        client: the connection to the one that started it.
    """

    def __init__(self, listener: socket.socket, client: socket.socket) -> None:
        self._imported = ""  # the module, beside torch and fastckpt
        self._listeners = [listener]  # none in a descendant
        self._clients = [client]
        self._programs: dict[int, tuple[int, socket.socket]] = {}  # by their pidfds
        self._descendants: dict[str, socket.socket] = {}  # by the module that they have imported

    def next_program(self) -> tuple[types.CodeType, dict[str, Any]]:
        """Serves orders; returns in the process of each program, with what it is to execute."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._freeze()
        while self._clients:
            waits = [*self._programs, *self._listeners, *self._clients]
            first = select.select(waits, [], [])[0][0]
            if isinstance(first, int):
                self._tell_end(first)
            elif first in self._listeners:
                self._accept(first)
            else:
                data, fds = self._read(first)
                if data and self._begins(data, fds):
                    order = json.loads(data)
                    return compile(order["text"], "<program>", "exec"), vars(_become(order, fds))
                for fd in fds:
                    os.close(fd)
        os._exit(0)

    def _freeze(self) -> None:
        # A collection of garbage writes to what it looks at: programs would copy what they share.
        gc.collect()
        gc.freeze()

    def _accept(self, listener: socket.socket) -> None:
        """Another worker; whoever connects has code run, so no other user may."""
        client, _ = listener.accept()
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        _, uid, _ = _PEER.unpack(peer)
        if uid == os.getuid():
            self._clients.append(client)
        else:
            client.close()

    def _read(self, client: socket.socket) -> tuple[bytes, list[int]]:
        """An order and its descriptors; nothing at the end of a connection, which is closed."""
        head, fds, _, _ = socket.recv_fds(client, _LENGTH.size, _FDS_MAX)
        data = b""
        while head and len(data) < _LENGTH.unpack(head)[0]:
            more = client.recv(_LENGTH.unpack(head)[0] - len(data))
            head = head if more else b""  # the worker was killed while it wrote
            data += more
        if head:
            return data, fds
        self._clients.remove(client)
        client.close()
        return b"", fds

    def _begins(self, data: bytes, fds: list[int]) -> bool:
        """Whether this is the process of the program, which was forked here, or the order is done
        with, because another process is.
        """
        imports = json.loads(data)["imports"]
        if imports != self._imported:
            # All but TRAINING are forked from one that has it.
            self._pass_on(data, fds, imports if self._imported else TRAINING)
            return False
        pid = os.fork()
        if pid == 0:
            self._close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            with socket.socket(fileno=fds.pop(0)) as status:
                _tell(status, os.getpid(), 0)
            return True
        self._programs[os.pidfd_open(pid)] = pid, socket.socket(fileno=fds.pop(0))
        return False

    def _tell_end(self, pidfd: int) -> None:
        pid, status = self._programs.pop(pidfd)
        os.close(pidfd)
        with status:
            _tell(status, *os.waitpid(pid, 0))

    def _pass_on(self, data: bytes, fds: list[int], module: str) -> None:
        """Gives an order to the descendant that has imported `module`; in that descendant, which
        it may fork, the order comes by its connection as later ones do.
        """
        if module not in self._descendants:
            ours, theirs = socket.socketpair()
            if os.fork() == 0:
                self._close()
                ours.close()
                self._imported, self._clients = module, [theirs]
                importlib.import_module(module)
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()  # or each program would write what the import has printed
                self._freeze()
                return
            theirs.close()
            self._descendants[module] = ours
        descendant = self._descendants[module]
        with contextlib.suppress(OSError):  # its import failed, which is on stderr
            socket.send_fds(descendant, [_LENGTH.pack(len(data))], fds)
            descendant.sendall(data)

    def _close(self) -> None:
        """In a child: what is of its parent alone."""
        told = [status for _, status in self._programs.values()]
        for each in [*self._listeners, *self._clients, *self._descendants.values(), *told]:
            each.close()
        for pidfd in self._programs:
            os.close(pidfd)
        for kept in (self._listeners, self._clients, self._descendants, self._programs):
            kept.clear()


def _tell(status: socket.socket, pid: int, code: int) -> None:
    """Tells the number of a program's process, and later its exit status."""
    with contextlib.suppress(OSError):  # nobody is there any more who asks
        status.send(_STATUS.pack(pid, code))


def _become(order: dict[str, Any], fds: list[int]) -> types.ModuleType:
    """Gives this process what the program was promised; returns its module."""
    for number, fd in enumerate(fds[:_STREAMS]):
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
    vars(module).update(INHERITED=fds[_STREAMS:], LEAVE=leave)
    sys.modules["__main__"] = module
    return module


if __name__ == "__main__":
    import torch

    import fastckpt

    assert torch.get_num_threads() == 1
    assert fastckpt.__file__
    given = [socket.socket(fileno=int(fd)) for fd in sys.argv[1:]]
    sys.path[0], sys.argv[:] = "", ["-c"]  # as for `python -c`
    exec(*Ancestor(*given).next_program())
