"""What fastckpt promises to two clients of one shared file system, tried out on a real one.

    python tests/shared/promises.py DIR_A DIR_B [--seconds 5] [--only WORD] [--verbose]

DIR_A and DIR_B are the same directory as two clients see it: two mounts of one volume, best without
a cache in common (NFS: `nosharecache`). One directory given twice tries the same on one client.
Each promise is one function below; its first line is what is printed, with what was counted. The
exit status is 1 if one was broken. Both directories are left as they were found.

As root (or where user namespaces are allowed) each client's processes see their directory under one
common path, as the nodes of a job do, and have a host name of their own; else what several ranks do
is not tried. This is no part of `make test`: tests/shared/run.sh mounts some file systems for it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fastckpt
from fastckpt.storage import policies

WAIT_S = 180.0  # for a process to answer
STATE_BYTES = 24 << 20
BIG_BYTES = 256 << 20
SETTLE_S = 20.0  # for names that a client shows for a while after they went
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER = 0x00020000, 0x04000000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
LEFTOVERS = (".nfs", ".fuse_hidden", ".smb", ".gluster")
_libc = ctypes.CDLL(None, use_errno=True)


class Broken(Exception):
    """A promise was not kept."""


class Skipped(Exception):
    """A promise cannot be tried here."""


# States that tell whether they are whole, and which one they are.


def state_of(number: int, nbytes: int = STATE_BYTES) -> dict[str, Any]:
    count = nbytes // 8 // 4
    tensors = {f"w{i}": torch.full((count,), number, dtype=torch.int32) for i in range(8)}
    return {**tensors, "number": number}


def number_of(state: dict[str, Any]) -> int:
    number = int(state["number"])
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not bool((value == number).all()):
            raise Broken(f"a torn state: number {number}, and {name} holds {value.unique()[:4]}")
    return number


# Processes of a client.


class Here(NamedTuple):
    """What a function knows of the client it runs on.

    Attributes:
        path: the directory.
        connection: to whoever called it.
        shared: a page that all processes see; its first number is for the promise to use.
    """

    path: Path
    connection: Connection
    shared: mmap.mmap

    def said_to_stop(self) -> bool:
        return self.connection.poll()

    def note(self, number: int) -> None:
        self.shared[:8] = struct.pack("q", number)

    def noted(self) -> int:
        return int(struct.unpack("q", self.shared[:8])[0])


class Life:
    """A process on one client: `life(function, *args)` calls function(here, *args) there.

    Args:
        client: on which.
    """

    def __init__(self, client: Client) -> None:
        self._ours, theirs = Pipe()
        self._name = client.name
        self.pid = os.fork()
        if self.pid == 0:
            self._ours.close()
            serve(client, theirs)
        theirs.close()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._ours.send((function, args))

    def end(self) -> Any:
        if not self._ours.poll(WAIT_S):
            raise Broken(f"client {self._name} did not answer within {WAIT_S:.0f} s")
        failed, value = self._ours.recv()
        if failed:
            raise Broken(f"client {self._name}: {value}")
        return value

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        self.begin(function, *args)
        return self.end()

    def stop(self) -> Any:
        """Tells the function that runs to come to an end; its value."""
        self._ours.send("stop")
        return self.end()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self._ours.close()
        for number in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.kill(self.pid, number)
        os.waitpid(self.pid, 0)


class Client:
    """One client of the file system.

    Args:
        name: "a" or "b".
        directory: as it is mounted there.
        common: where its processes see it, if that can be had.
        shared: see Here.
    """

    def __init__(self, name: str, directory: Path, common: Path, shared: mmap.mmap) -> None:
        self.name = name
        self.directory = directory
        self._common = common
        self.shared = shared
        self.lives: list[Life] = []

    def life(self) -> Life:
        self.lives.append(Life(self))
        return self.lives[-1]

    def close(self) -> None:
        while self.lives:
            self.lives.pop().close()

    def enter(self) -> Path:
        """In a new process: becomes one of this client's. Returns where its directory is."""
        ids = os.getuid(), os.getgid()
        if _libc.unshare(CLONE_NEWNS | CLONE_NEWUTS):
            if _libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWUSER):
                return self.directory
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{ids[0]} {ids[0]} 1")
            Path("/proc/self/gid_map").write_text(f"{ids[1]} {ids[1]} 1")
        refused = _libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        source, target = os.fsencode(self.directory), os.fsencode(self._common)
        if refused or _libc.mount(source, target, None, MS_BIND | MS_REC, None):
            return self.directory
        socket.sethostname(f"client-{self.name}")
        return self._common


def serve(client: Client, connection: Connection) -> None:
    """The life of a process: calls functions until there is nobody to ask for more."""
    here = Here(client.enter(), connection, client.shared)
    while True:
        try:
            function, args = connection.recv()
            answer = False, function(here, *args)
        except (EOFError, ConnectionError):
            os._exit(0)
        except BaseException:
            answer = True, traceback.format_exc()
        while connection.poll():
            connection.recv()  # to stop, which it has
        connection.send(answer)


class Clients(NamedTuple):
    """Both of them, for one promise.

    Attributes:
        seconds: how long what goes on at random goes on.
    """

    a: Client
    b: Client
    seconds: float


# What a client's process is asked to do.


def save(here: Here, name: str, number: int) -> str:
    return fastckpt.save(state_of(number), here.path / name).result(WAIT_S).why


def load(here: Here, name: str) -> int:
    return number_of(fastckpt.load(here.path / name))


def exists(here: Here, name: str) -> bool:
    return (here.path / name).exists()


def save_on(here: Here, name: str) -> int:
    """Overwrites a file until it is told to stop; notes what was committed last."""
    number = here.noted()
    while not here.said_to_stop():
        save(here, name, number + 1)
        number += 1
        here.note(number)
    return number


def load_on(here: Here, name: str) -> dict[str, Any]:
    """Loads a file until it is told to stop; counts what came."""
    errors: Counter[str] = Counter()
    stock: Counter[str] = Counter()
    loads = older = newest = 0
    while not here.said_to_stop():
        committed = here.noted()
        try:
            found = load(here, name)
            loads += 1
            older += found < committed
            if found < newest:
                errors[f"went back from {newest} to {found}"] += 1
            newest = max(newest, found)
        except Exception as error:
            errors[f"{type(error).__name__}: {str(error)[-160:]}"] += 1
        try:
            number_of(torch.load(here.path / name))
        except Exception as error:
            stock[type(error).__name__] += 1
    return {"loads": loads, "older": older, "errors": dict(errors), "torch.load": dict(stock)}


def save_steps(here: Here, root: str, keep_last: int, steps: int) -> int:
    """Saves steps until it is told to stop, or so many; notes what was committed last."""
    step = here.noted()
    with fastckpt.Checkpointer(here.path / root, keep_last=keep_last) as checkpointer:
        for _ in range(steps):
            if here.said_to_stop():
                break
            step += 1
            checkpointer.save(step, state_of(step)).result(WAIT_S)
            here.note(step)
    return step


def restore_on(here: Here, root: str) -> dict[str, Any]:
    """Restores the newest step until it is told to stop; counts what came."""
    errors: Counter[str] = Counter()
    restores = older = 0
    checkpointer = fastckpt.Checkpointer(here.path / root)
    while not here.said_to_stop():
        committed, state = here.noted(), state_of(-1)
        try:
            step = checkpointer.restore(state)
            if step is None:
                errors["no committed step"] += 1
                continue
            if number_of(state) != step:
                errors[f"step {step} restored as {number_of(state)}"] += 1
            restores += 1
            older += step < committed
        except Exception as error:
            errors[f"{type(error).__name__}: {str(error)[-160:]}"] += 1
    return {"restores": restores, "older": older, "errors": dict(errors)}


def restore_big(here: Here, root: str, step: int) -> int:
    state = state_of(-1, BIG_BYTES)
    assert fastckpt.Checkpointer(here.path / root).restore(state, step) == step
    return number_of(state)


def save_big(here: Here, root: str, step: int) -> None:
    with fastckpt.Checkpointer(here.path / root, keep_last=1) as checkpointer:
        checkpointer.save(step, state_of(step, BIG_BYTES)).result(WAIT_S)


def steps_there(here: Here, root: str) -> list[int]:
    return fastckpt.Checkpointer(here.path / root).steps()


def join(here: Here, rank: int, port: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def save_together(here: Here, name: str, number: int) -> None:
    fastckpt.save(state_of(number), here.path / name, group=dist.group.WORLD).result(WAIT_S)


def load_together(here: Here, name: str) -> int:
    return number_of(fastckpt.load(here.path / name, group=dist.group.WORLD))


def step_together(here: Here, root: str, step: int) -> int | None:
    """Saves a step with the other rank, and both restore it."""
    state = {**state_of(step), "own": fastckpt.PerRank(dist.get_rank())}
    with fastckpt.Checkpointer(here.path / root, keep_last=2) as checkpointer:
        checkpointer.save(step, state).result(WAIT_S)
        found = {**state_of(-1), "own": fastckpt.PerRank(-1)}
        restored = checkpointer.restore(found)
    assert number_of({**found, "own": None}) == step
    return restored


def flock(here: Here, name: str, how: int) -> bool:
    fd = os.open(here.path / name, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True  # kept until the process ends


# The promises.


def none_of(counted: dict[str, Any]) -> str:
    if counted["errors"]:
        raise Broken(str(counted))
    return ", ".join(f"{value} {name}" for name, value in counted.items() if name != "errors")


def finished_save(clients: Clients) -> str:
    """a finished save is loaded at once by the other client"""
    a, b = clients.a.life(), clients.b.life()
    for number in range(10):
        a(save, f"new-{number}", number)
        if b(load, f"new-{number}") != number:
            raise Broken(f"another state than {number}")
    return "10 files"


def looked_before(clients: Clients) -> str:
    """a client that looked before the file existed sees it soon"""
    a, b = clients.a.life(), clients.b.life()
    if b(exists, "new"):
        raise Broken("it exists before it is saved")
    a(save, "new", 7)
    begun = time.monotonic()
    while not b(exists, "new"):
        if time.monotonic() - begun > 90:
            raise Broken("not within 90 s")
        time.sleep(0.1)
    took_s = time.monotonic() - begun
    if b(load, "new") != 7:
        raise Broken("another state")
    return f"after {took_s:.1f} s"


def overwritten(clients: Clients) -> str:
    """a file that is overwritten is old or new to whoever loads it, never torn or missing"""
    a, b = clients.a.life(), clients.b.life()
    a(save, "f", 1)
    clients.a.shared[:8] = struct.pack("q", 1)
    a.begin(save_on, "f")
    b.begin(load_on, "f")
    time.sleep(2 * clients.seconds)
    loaded, saved = b.stop(), a.stop()
    text = none_of(loaded)
    if a(load, "f") != saved:
        raise Broken("what was committed last is not there")
    return f"{saved} saves, {text}"


def killed_writer(clients: Clients) -> str:
    """a writer killed while it overwrites leaves the old file or the new one, and no debris"""
    b = clients.b.life()
    first = clients.a.life()
    first(save, "f", 1)
    first.close()
    clients.a.lives.remove(first)
    clients.a.shared[:8] = struct.pack("q", 1)
    kills, until = 0, time.monotonic() + 2 * clients.seconds
    newest = 1
    while time.monotonic() < until:
        writer = clients.a.life()
        writer.begin(save_on, "f")
        time.sleep(random.uniform(0.05, 0.6))
        writer.close()
        clients.a.lives.remove(writer)
        kills += 1
        found = b(load, "f")
        if found < newest:
            raise Broken(f"went back from {newest} to {found}")
        newest = found
    clients.a.life()(save, "f", newest + 1)
    if b(load, "f") != newest + 1:
        raise Broken("the next save is not seen")
    return f"{kills} kills"


def restored_beside(clients: Clients) -> str:
    """the newest step is restored at any moment of a run that keeps the last two"""
    a, b = clients.a.life(), clients.b.life()
    a(save_steps, "run", 2, 1)
    a.begin(save_steps, "run", 2, 1 << 30)
    b.begin(restore_on, "run")
    time.sleep(2 * clients.seconds)
    restored, saved = b.stop(), a.stop()
    text = none_of(restored)
    if a(steps_there, "run")[-1] != saved:
        raise Broken("what was committed last is not there")
    return f"{saved} steps, {text}"


def killed_step(clients: Clients) -> str:
    """a job killed while it saves a step resumes from the newest, and its debris goes"""
    clients.a.life()(save_steps, "run", 2, 1)
    clients.a.close()
    kills, until = 0, time.monotonic() + clients.seconds
    while time.monotonic() < until:
        writer = clients.a.life()
        writer.begin(save_steps, "run", 2, 1 << 30)
        time.sleep(random.uniform(0.3, 1.2))
        writer.close()
        clients.a.lives.remove(writer)
        kills += 1
    last = Here(Path(), None, clients.a.shared).noted()  # type: ignore[arg-type]
    found = clients.b.life()(restore_newest, "run")
    if found is None or not last <= found <= last + 1:
        raise Broken(f"restored {found}, committed {last}")
    Here(Path(), None, clients.a.shared).note(found)  # type: ignore[arg-type]
    clients.a.life()(save_steps, "run", 2, 3)
    names = sorted(os.listdir(clients.a.directory / "run"))
    if len(names) != 2:
        raise Broken(f"two steps are kept, and there are {names}")
    return f"{kills} kills, {found} steps"


def restore_newest(here: Here, root: str) -> int | None:
    state = state_of(-1)
    step: int | None = fastckpt.Checkpointer(here.path / root).restore(state)
    assert step is None or number_of(state) == step
    return step


def held_step(clients: Clients) -> str:
    """a step that one client reads is not removed by the other one's keep_last"""
    a, b = clients.a.life(), clients.b.life()
    a(save_big, "run", 1)
    b.begin(restore_big, "run", 1)
    until = time.monotonic() + WAIT_S
    while not has_open(b.pid, ".safetensors"):
        if time.monotonic() > until:
            raise Broken("it was never read")
    b.kill(signal.SIGSTOP)
    try:
        a(save_big, "run", 2)
        during = a(steps_there, "run")
    finally:
        b.kill(signal.SIGCONT)
    try:
        b.end()
    except Broken as broken:
        raise Broken(f"steps were {during} meanwhile; {str(broken).splitlines()[-1]}") from None
    return f"steps were {during} meanwhile"


def has_open(pid: int, ending: str) -> bool:
    with contextlib.suppress(OSError):  # the process has ended
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(f"/proc/{pid}/fd/{fd}").endswith(ending):
                    return True
    return False


def ranks(clients: Clients) -> list[Life]:
    """A rank on each client."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lives = [clients.a.life(), clients.b.life()]
    if lives[0](where) != lives[1](where):
        raise Skipped("the clients have no common path: needs root, or user namespaces")
    both(lives, join, [(0, port), (1, port)])
    return lives


def where(here: Here) -> str:
    return str(here.path)


def both(lives: list[Life], function: Callable[..., Any], args: list[tuple[Any, ...]]) -> list[Any]:
    for life, own in zip(lives, args, strict=True):
        life.begin(function, *own)
    return [life.end() for life in lives]


_jobs: dict[str, fastckpt.Checkpointer] = {}  # that are open in this process


def save_as_job(here: Here, root: str, step: int) -> str:
    """Saves a step by a Checkpointer that stays open; returns the save's error, in words."""
    if root not in _jobs:
        _jobs[root] = fastckpt.Checkpointer(here.path / root)
    error = _jobs[root].save(step, state_of(step)).exception(WAIT_S)
    return "" if error is None else f"{type(error).__name__}: {error}"


def two_jobs(clients: Clients) -> str:
    """of two live jobs on one root the second is refused by name, and goes on after kill -9"""
    a, b = clients.a.life(), clients.b.life()
    for step in (1, 2):
        if error := a(save_as_job, "run", step):
            raise Broken(f"the first job: {error}")
        refused = b(save_as_job, "run", 10 + step)
        if not refused.startswith("RootInUse") or f"process {a.pid} on host" not in refused:
            raise Broken(f"the second job: {refused or 'it committed'}")
    a.kill()
    os.waitid(os.P_PID, a.pid, os.WEXITED | os.WNOWAIT)
    if error := b(save_as_job, "run", 20):
        raise Broken(f"the second job, after the first was killed: {error}")
    if (steps := b(steps_there, "run")) != [1, 2, 20]:
        raise Broken(f"steps are {steps}")
    return "2 refused, 1 saved"


def group_file(clients: Clients) -> str:
    """two ranks, one on each client, save one file and load it together"""
    lives = ranks(clients)
    for number in range(5):
        for name in (f"new-{number}", "again"):
            both(lives, save_together, [(name, number)] * 2)
            if both(lives, load_together, [(name,)] * 2) != [number, number]:
                raise Broken("another state")
    return "5 new files, 5 overwritten"


def group_steps(clients: Clients) -> str:
    """two ranks, one on each client, save steps and restore them"""
    lives = ranks(clients)
    for step in range(5):
        restored = both(lives, step_together, [("run", step)] * 2)
        if restored != [step, step]:
            raise Broken(f"restored {restored} after step {step}")
    if both(lives, steps_there, [("run",)] * 2) != [[3, 4]] * 2:
        raise Broken(f"steps are {both(lives, steps_there, [('run',)] * 2)}, not 3 and 4")
    return "5 steps"


PROMISES = (
    finished_save,
    looked_before,
    overwritten,
    killed_writer,
    restored_beside,
    killed_step,
    held_step,
    two_jobs,
    group_file,
    group_steps,
)


# Running them.


def left(directory: Path) -> list[str]:
    """Names that no save should leave: temporaries, hidden steps, and files kept by a client."""
    found = []
    for parent, directories, files in os.walk(directory):
        for name in directories + files:
            if name.startswith(LEFTOVERS) or name.endswith(".tmp"):
                found.append(os.path.relpath(os.path.join(parent, name), directory))
    return sorted(found)


def tried(promise: Callable[[Clients], str], clients: Clients) -> tuple[str, str]:
    """What came of a promise, and what was counted."""
    with tempfile.TemporaryDirectory(
        prefix="fastckpt-promise-", dir=clients.a.directory, ignore_cleanup_errors=True
    ) as made:
        scratch = Path(made)
        inner = [
            Client(each.name, each.directory / scratch.name, each._common, each.shared)
            for each in (clients.a, clients.b)
        ]
        clients.a.shared[:8] = bytes(8)
        until = time.monotonic() + SETTLE_S
        while not inner[1].directory.exists():
            if time.monotonic() > until:
                return "BROKEN", "client b does not see a new directory"
            time.sleep(0.1)
        try:
            came, text = "held", promise(Clients(*inner, clients.seconds))
        except Broken as broken:
            came, text = "BROKEN", str(broken)
        except Skipped as skipped:
            came, text = "not tried", str(skipped)
        finally:
            for client in inner:
                client.close()
        until = time.monotonic() + SETTLE_S
        while (names := left(scratch)) and time.monotonic() < until:
            time.sleep(0.1)
        if names:
            came, text = "BROKEN", f"{text}; left behind: {names[:5]}"
        return came, text


@contextlib.contextmanager
def two(directories: list[Path], seconds: float) -> Iterator[Clients]:
    common = Path(tempfile.mkdtemp(prefix="fastckpt-common-"))
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        a, b = (Client(n, d, common, shared) for n, d in zip("ab", directories, strict=True))
        yield Clients(a, b, seconds)
    finally:
        common.rmdir()


def facts(clients: Clients) -> Iterator[str]:
    for client in (clients.a, clients.b):
        fd = os.open(client.directory, os.O_RDONLY)
        yield f"client {client.name}: {client.directory}, {policies.mount_of(fd)}"
        os.close(fd)
    name = f"fastckpt-fact-{os.getpid()}"
    a, b = clients.a.life(), clients.b.life()
    try:
        yield f"a save: {a(save, name, 1)}"
        locked = a(flock, name, fcntl.LOCK_EX)
        seen = locked and not b(flock, name, fcntl.LOCK_EX)
        yield f"locks: {'seen by the other client' if seen else 'of each client alone, or none'}"
    finally:
        clients.a.close()
        clients.b.close()
        (clients.a.directory / name).unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directories", nargs=2, type=Path, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=5.0, help="for what goes on at random")
    parser.add_argument("--only", default="", help="promises in whose name this word is")
    parser.add_argument("--verbose", action="store_true", help="what the library logs")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not arguments.verbose:  # kills, and steps that another process removes, are warned of
        logging.getLogger("fastckpt").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    directories = [each.resolve(strict=True) for each in arguments.directories]
    broken = 0
    with two(directories, arguments.seconds) as clients:
        for fact in facts(clients):
            print(fact, flush=True)
        for promise in PROMISES:
            if arguments.only in promise.__name__:
                came, text = tried(promise, clients)
                broken += came == "BROKEN"
                print(f"{came:9} {promise.__doc__}: {text}", flush=True)
    for directory in directories:
        for name in os.listdir(directory):
            if name.startswith("fastckpt-promise-"):
                shutil.rmtree(directory / name, ignore_errors=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
