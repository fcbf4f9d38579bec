"""The life of a process around its saves: exits of every kind, forks, workers, interrupts. Each
test runs a program of its own, as a user would write it. Must not know how a save is done.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastckpt
from tests.kit.interpreters import TRAINING
from tests.kit.programs import run_python

pytestmark = pytest.mark.multiprocess


def ones(path: Path) -> int:
    """The number of elements of the tensor in a checkpoint, all of which are one."""
    loaded = fastckpt.load(path)
    assert bool((loaded == 1).all())
    return loaded.numel()


# Exits.

EXIT = """
import sys
import torch, fastckpt
path, fence, way = sys.argv[1:]
fastckpt.save(torch.ones(6 << 20), path, options=fastckpt.SaveOptions(fence=fence))
if way == "exit":
    sys.exit(3)
if way == "raise":
    raise ValueError("the training loop broke")
if way == "interrupt":
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize(
    ("fence", "way", "returncode"),
    [
        ("step", "return", 0),
        ("call", "exit", 3),
        ("step", "raise", 1),
        ("call", "interrupt", -signal.SIGINT),
    ],
)
def test_exit_waits_for_the_save(disk: Path, fence: str, way: str, returncode: int) -> None:
    result = run_python(EXIT, disk / "a.pt", fence, way, returncode=returncode, frees=True)
    assert ones(disk / "a.pt") == 6 << 20
    assert ("the training loop broke" in result.stderr) == (way == "raise")
    assert "FAILED" not in result.stderr


SAVES_THAT_FAIL = """
import atexit, sys
atexit.register(print, "the program's own handler")  # runs after fastckpt's
import torch, fastckpt
folder, status = sys.argv[1:]
fastckpt.save(torch.ones(9), f"{folder}/good.pt").result(60)
asked = fastckpt.save(torch.ones(9), f"{folder}/good.pt/asked.pt")
assert isinstance(asked.exception(60), fastckpt.StorageError)
if status != "none":
    fastckpt.save(
        torch.ones(9), f"{folder}/good.pt/forgotten.pt", options=fastckpt.SaveOptions(fence="step")
    )
    sys.exit(int(status))
"""


@pytest.mark.parametrize(("status", "returncode"), [("none", 0), ("0", 1), ("256", 1), ("3", 3)])
def test_failure_nobody_asked_for_is_told_at_exit(disk: Path, status: str, returncode: int) -> None:
    ended = run_python(SAVES_THAT_FAIL, disk, status, returncode=returncode, frees=True)
    assert ended.stdout == "the program's own handler\n", "it ran, and was flushed"
    assert "asked.pt" not in ended.stderr
    if status != "none":
        message, last = ended.stderr.splitlines()
        path = str(disk / "good.pt" / "forgotten.pt")
        assert message.startswith(f"fastckpt: the save to {path!r} FAILED and was not committed")
        assert os.strerror(20) in message and "ENOTDIR" in message
        assert path in last and last.endswith(f"exit status {returncode}")
    assert ones(disk / "good.pt") == 9


def test_failure_without_a_stderr_gives_the_status(disk: Path) -> None:
    closed = "import os, sys; os.close(2); sys.stderr = sys.__stderr__ = None\n"
    run_python(closed + SAVES_THAT_FAIL, disk, 0, returncode=1, frees=True)


SAVE_AT_EXIT = """
import atexit, sys
path, order, fence = sys.argv[1:4]

def last_save():
    import torch, fastckpt
    fastckpt.save(torch.ones(6 << 20), path, options=fastckpt.SaveOptions(fence=fence))

if order == "before":
    atexit.register(last_save)
import torch, fastckpt
if len(sys.argv) > 4:
    fastckpt.save(torch.ones(9), sys.argv[4]).result(60)
if order == "after":
    atexit.register(last_save)
"""


@pytest.mark.parametrize(
    ("order", "fence", "used"),
    [
        pytest.param("before", "step", True, marks=pytest.mark.torture),
        ("after", "call", True),
        ("after", "step", False),
    ],
)
def test_save_in_an_exit_handler_commits(disk: Path, order: str, fence: str, used: bool) -> None:
    # A handler registered before fastckpt was imported runs after fastckpt's own.
    more = [disk / "first.pt"] if used else []
    result = run_python(
        SAVE_AT_EXIT,
        disk / "a.pt",
        order,
        fence,
        *more,
        started=order == "before",
        frees=True,
    )
    assert (disk / "a.pt").exists(), f"lost without a word: {result.stderr!r}"
    assert ones(disk / "a.pt") == 6 << 20
    assert result.stderr == ""


LATE_SAVES = """
import atexit, sys

def last_saves():
    fastckpt.save(torch.ones(6 << 20), sys.argv[1] + "/good.pt")
    fastckpt.save(torch.ones(9), sys.argv[1] + "/file/a.pt")

atexit.register(last_saves)
import torch, fastckpt
"""


def test_of_saves_in_an_exit_handler_one_commits_and_one_is_told_to_have_failed(disk: Path) -> None:
    """Though the handler, which was registered first, runs after fastckpt's own."""
    (disk / "file").touch()
    stderr = run_python(LATE_SAVES, disk, started=True, returncode=1).stderr
    assert str(disk / "file" / "a.pt") in stderr and "ENOTDIR" in stderr
    assert ones(disk / "good.pt") == 6 << 20 and "good.pt" not in stderr


DAEMON_THREADS = """
import sys, threading
import torch, fastckpt
from tests.kit.saves import HeldTensor, running, stands_in, wait_until

path, waits_path = sys.argv[1:]
saved, forever = threading.Event(), threading.Event()

def save():
    fastckpt.save(torch.ones(6 << 20), path)
    saved.set()
    forever.wait()

threading.Thread(target=save, daemon=True).start()
assert saved.wait(60)
held = HeldTensor(value=1.0)
handle = fastckpt.save(held.tensor, waits_path, options=fastckpt.SaveOptions(fence="step"))
waiting = threading.Thread(target=handle.result, daemon=True)
waiting.start()
wait_until(lambda: stands_in(waiting, "result"), "the thread waits for the save")
threading.Thread(target=held.release).start()
"""


def test_exit_with_daemon_threads_that_save_and_wait(disk: Path) -> None:
    result = run_python(DAEMON_THREADS, disk / "a.pt", disk / "b.pt", frees=True)
    assert ones(disk / "a.pt") == 6 << 20 and ones(disk / "b.pt") == 1 << 19
    assert result.stderr == ""


DAEMON_LOOP = """
import sys, threading
import torch, fastckpt

saved = threading.Event()
state = torch.ones(6 << 20)  # once: a daemon that is inside torch when Python ends is aborted

def save():
    while True:
        fastckpt.save(state, sys.argv[1], options=fastckpt.SaveOptions(fence="step"))
        saved.set()

threading.excepthook = lambda raised: None  # that no more saves begin is told to the daemon
threading.Thread(target=save, daemon=True).start()
assert saved.wait(60)
"""


def test_exit_waits_for_no_daemon_that_saves_for_ever(disk: Path) -> None:
    assert run_python(DAEMON_LOOP, disk / "a.pt", frees=True).stderr == ""
    assert ones(disk / "a.pt") == 6 << 20


STRICT = """
import threading
import fastckpt
assert threading.active_count() == 1, "importing it starts a thread"
import gc, os, sys
import torch
folder = sys.argv[1]
for fence in ("call", "step"):
    for target in ("a", "b"):
        last = fastckpt.save(
            {"w": torch.ones(5 << 20)},
            f"{folder}/{target}.pt",
            options=fastckpt.SaveOptions(fence=fence),
        )
fastckpt.load(f"{folder}/a.pt")
fastckpt.load(f"{folder}/a.pt", mmap=True)
with open(f"{folder}/a.pt", "rb") as file:
    fastckpt.load(file)
with open(f"{folder}/c.pt", "wb") as file:
    fastckpt.save(torch.ones(9), file)
try:
    fastckpt.save(torch.ones(9), f"{folder}/b.pt/a.pt").result(60)
except fastckpt.StorageError:
    pass
last.result(60)  # later it would replace what is damaged here
with open(f"{folder}/b.pt", "r+b") as file:
    file.seek(8 << 20)
    file.write(b"damage")
try:
    fastckpt.load(f"{folder}/b.pt")
    sys.exit("damage was not found")
except fastckpt.CorruptCheckpoint:
    pass
gc.collect()
fastckpt.save(torch.ones(9), f"{folder}/d.pt", _use_new_zipfile_serialization=False)
fastckpt.save(torch.ones(5 << 20), f"{folder}/e.pt")
"""


def test_development_mode_finds_nothing(disk: Path) -> None:
    """Nor does an import alone do or say anything."""
    result = run_python(STRICT, disk, options=("-X", "dev", "-W", "error"))
    assert (result.stdout, result.stderr) == ("", "")
    assert ones(disk / "e.pt") == 5 << 20


# Forks.

FORK = """
import faulthandler, os, signal, sys, warnings
import torch, fastckpt
from tests.kit.saves import HeldTensor
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
# The threads of OpenMP do not survive a fork, whoever forks: torch computes on this one.
torch.set_num_threads(1)

folder, way = sys.argv[1:]
fastckpt.save(torch.ones(1 << 20), f"{folder}/before.pt").result(60)
weight = torch.nn.Parameter(torch.ones(10))
weight.grad = torch.ones(10)
optimizer = torch.optim.SGD([weight], lr=1.0)
with HeldTensor(value=1.0) as held:
    handle = fastckpt.save(
        [held.tensor, weight], f"{folder}/parent.pt", options=fastckpt.SaveOptions(fence="step")
    )
    held.wait_reached()
    pid = os.fork()
    if pid == 0:
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(40)
        optimizer.step()
        assert bool((weight == 0).all())
        for wait in (handle.result, handle.exception, handle.wait_staged):
            try:
                wait(30)
                sys.exit("the child got the parent's result")
            except fastckpt.CheckpointError as error:
                assert "parent.pt" in str(error), error
        assert fastckpt.load(f"{folder}/before.pt").numel() == 1 << 20
        mine = fastckpt.save(
            torch.ones(2 << 20), f"{folder}/child.pt", options=fastckpt.SaveOptions(fence="step")
        )
        optimizer.step()
        assert mine.stats.staged_s is not None
        assert mine.result(30).committed_s
        assert fastckpt.load(f"{folder}/child.pt").numel() == 2 << 20
        fastckpt.save(torch.ones(2 << 20), f"{folder}/last.pt")
        if way == "_exit":
            fastckpt.load(f"{folder}/last.pt")  # waits for it
            os._exit(7)
        sys.exit(7)
    while True:
        _, status = os.waitpid(pid, 0)
        break
    assert not handle.done()
assert os.waitstatus_to_exitcode(status) == 7, os.waitstatus_to_exitcode(status)
optimizer.step()
handle.result(60)
fastckpt.save(torch.ones(2 << 20), f"{folder}/after.pt")
saved = fastckpt.load(f"{folder}/parent.pt")
assert bool((saved[0] == 1).all()) and bool((saved[1] == 1).all())
"""


@pytest.mark.parametrize("way", ["exit", "_exit"])
def test_fork_while_a_save_is_in_flight(disk: Path, way: str) -> None:
    result = run_python(FORK, disk, way, imports=TRAINING, frees=way == "exit")
    assert result.stderr == ""
    names = ["after.pt", "before.pt", "child.pt", "last.pt", "parent.pt"]
    assert sorted(path.name for path in disk.iterdir()) == names
    assert ones(disk / "last.pt") == ones(disk / "after.pt") == 2 << 20


FORK_STORM = """
import faulthandler, os, signal, sys, threading
import torch, fastckpt
# The threads of OpenMP do not survive a fork, whoever forks: torch computes on this one.
torch.set_num_threads(1)

folder = sys.argv[1]
state = torch.ones(40_000)
# Every module is imported: a fork while another thread imports one is fatal to the child anyway.
fastckpt.save(state, f"{folder}/a.pt").result(60)
fastckpt.load(f"{folder}/a.pt")
stop = threading.Event()
handles = []

def save(name):
    while not stop.is_set():
        handles.append(
            fastckpt.save(state, f"{folder}/{name}.pt", options=fastckpt.SaveOptions(durable=False))
        )

threads = [threading.Thread(target=save, args=(name,)) for name in "ab"]
for thread in threads:
    thread.start()
try:
    for turn in range(10):
        latest = list(handles[-3:])
        pid = os.fork()
        if pid == 0:
            faulthandler.register(signal.SIGALRM, chain=True)
            signal.alarm(50)
            for handle in latest:
                try:
                    handle.result(40)
                except fastckpt.CheckpointError:
                    pass
            fastckpt.save(
                state, f"{folder}/child.pt", options=fastckpt.SaveOptions(durable=False)
            ).result(40)
            fastckpt.load(f"{folder}/child.pt")
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"child {turn}: {os.waitstatus_to_exitcode(status)}"
finally:
    stop.set()
for thread in threads:
    thread.join()
for handle in handles:
    handle.result(60)
"""


def test_fork_at_any_moment(disk: Path) -> None:
    run_python(FORK_STORM, disk)
    assert all(ones(disk / f"{name}.pt") == 40_000 for name in ("a", "b", "child"))


FORK_UNDER_LOCK = """
import faulthandler, os, signal, sys, threading
import torch, fastckpt
from tests.kit.saves import HeldTensor
# The threads of OpenMP do not survive a fork, whoever forks: torch computes on this one.
torch.set_num_threads(1)

taken, forked = threading.Event(), threading.Event()

def hold_lock():
    with handle._condition:  # as the thread does that sets the result
        taken.set()
        forked.wait(60)

with HeldTensor() as held:
    handle = fastckpt.save(held.tensor, sys.argv[1], options=fastckpt.SaveOptions(fence="step"))
    held.wait_reached()
    threading.Thread(target=hold_lock).start()
    assert taken.wait(60)
    pid = os.fork()
    if pid == 0:
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(50)
        try:
            handle.result(40)
        except fastckpt.CheckpointError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    forked.set()
handle.result(60)
assert status == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"
"""


def test_fork_while_a_thread_sets_the_result(disk: Path) -> None:
    run_python(FORK_UNDER_LOCK, disk / "a.pt")


# Workers.


WORKERS = """
import multiprocessing, sys
import torch, fastckpt
from tests.kit.saves import HeldTensor
from tests.kit.programs import Shards, save_and_return

if __name__ == "__main__":
    folder, method = sys.argv[1:]
    torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
    for i in range(3):
        fastckpt.save(torch.ones(3 << 20), f"{folder}/{i}.pt").result(60)
    with HeldTensor(value=1.0) as held:
        handle = fastckpt.save(
            held.tensor, f"{folder}/held.pt", options=fastckpt.SaveOptions(fence="step")
        )
        held.wait_reached()
        workers = 2 if method == "fork" else 1  # a spawned one takes seconds to import torch
        loader = torch.utils.data.DataLoader(
            Shards(folder), batch_size=None, num_workers=workers, multiprocessing_context=method
        )
        assert list(loader) == 6 * [3 << 20]
        context = multiprocessing.get_context(method)
        worker = context.Process(target=save_and_return, args=(f"{folder}/worker.pt",))
        worker.start()
        worker.join(60)
        assert worker.exitcode == 0, worker.exitcode
        assert not handle.done()
    handle.result(60)
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.torture)])
def test_workers_save_and_load(disk: Path, method: str) -> None:
    result = run_python(WORKERS, disk, method)
    assert result.stderr == ""
    assert [ones(disk / f"copy-{i}.pt") for i in range(6)] == 6 * [3 << 20]
    assert ones(disk / "worker.pt") == 5 << 20 and ones(disk / "held.pt") == 1 << 19


LOST_IN_A_WORKER = """
import multiprocessing, sys
import torch, fastckpt
from tests.kit.programs import save_and_return

worker = multiprocessing.get_context("fork").Process(target=save_and_return, args=sys.argv[1:])
worker.start()
worker.join(60)
sys.exit(worker.exitcode)
"""


def test_failure_in_a_forked_worker_is_told_at_its_end(disk: Path) -> None:
    (disk / "file").touch()
    path = str(disk / "file" / "a.pt")
    stderr = run_python(LOST_IN_A_WORKER, path, returncode=1).stderr
    assert f"the save to {path!r} FAILED" in stderr and "Traceback" not in stderr


@pytest.fixture(autouse=True)
def no_temporaries(disk: Path) -> Iterator[None]:
    """Programs that have ended leave no temporary, whatever way they ended."""
    yield
    assert [path.name for path in disk.iterdir() if path.suffix == ".tmp"] == []
