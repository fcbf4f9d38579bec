"""The lease of a root: of two live jobs the second is refused by name, whatever hosts and pid
namespaces they are in, and however long it saves nothing; what a dead job left counts for nothing;
and a job whose root was taken over commits nothing more. What becomes of the steps themselves is
test_steps.py's, and test_frozen_jobs.py's.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt import Checkpointer
from fastckpt.cli import main
from fastckpt.errors import RootInUse
from fastckpt.formats.step_names import step_name as name
from fastckpt.saving import lease as lease_module
from fastckpt.saving import pipeline
from fastckpt.saving.lease import BEATING, LASTS_S, LEASE_FILE, Lease
from fastckpt.saving.lease_records import NBYTES, LeaseRecord
from fastckpt.storage.file_system import Storage
from fastckpt.storage.machine import pid_space
from tests.kit.doubles import Delay, Operation, Recorder, T, dead_pid, path_of, process_on
from tests.kit.hosts import needs_root
from tests.kit.interpreters import Program
from tests.kit.network_double import NetworkClient
from tests.kit.programs import run_python, tell, told
from tests.kit.saves import wait_until
from tests.kit.steps import WAIT_S, directories, record, restored, state

SAVES = """
import os, sys
from fastckpt import Checkpointer
from tests.kit.hosts import become
from tests.kit.steps import state
if sys.argv[2]:
    become(sys.argv[2], own_pids="own pids" in sys.argv)
checkpointer = Checkpointer(sys.argv[1])
for line in sys.stdin:
    error = checkpointer.save(int(line), state(int(line))).exception(60)
    print(f"{os.getpid()} {type(error).__name__}: {error}" if error else os.getpid(), flush=True)
"""

HOSTS = [
    ("", ""),
    pytest.param("node-a", "node-b", marks=needs_root),
    pytest.param("node-a", "own pids", marks=needs_root),
]


def saved(program: Program, step: int) -> str:
    tell(program, str(step))
    return told(program)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("first", "second"), HOSTS)
def test_the_second_of_two_live_jobs_is_refused(disk: Path, first: str, second: str) -> None:
    """After kill -9 of the first it is not. As processes of one host, on hosts of two names, and
    in two pid namespaces, such as containers have.
    """
    others = ("pod", "own pids") if second == "own pids" else (second,)
    with Program(SAVES, disk, first) as one, Program(SAVES, disk, *others) as other:
        pid = saved(one, 1)
        refused = saved(other, 2)
        host = first or socket.gethostname()
        assert "RootInUse" in refused and f"process {pid} on host {host!r}" in refused
        assert repr(str(disk)) in refused and f"`fastckpt repair {disk} --takeover`" in refused
        assert "or wait" not in refused, "its lease counts for nothing once it is gone"
        assert directories(disk) == [name(1)]
        assert saved(one, 3) == pid
        one.kill()
        one.wait(WAIT_S)
        assert saved(other, 4).isdigit()
    assert directories(disk) == [name(1), name(3), name(4)] and restored(disk) == 4


def test_what_is_taken_in_passing_is_given_back_by_the_last(disk: Path) -> None:
    """Unless somebody has taken it for longer meanwhile, which release() alone ends."""
    lease = Lease(Storage(), str(disk))
    for is_kept in (False, True):
        lease.take(passing=True)
        lease.take(passing=True)
        if is_kept:
            lease.take()
        lease.give_back()
        assert lease.is_held, "for the other one"
        lease.give_back()
        assert lease.is_held == is_kept == (disk / LEASE_FILE).exists()
    lease.release()
    assert not (disk / LEASE_FILE).exists()


def test_nodes_have_no_lease_of_what_several_machines_see(disk: Path) -> None:
    """Each has steps of its own there, by other names; tmpfs and disks are no such place."""
    double = NetworkClient()
    with double.mounted():
        shared = Lease(double, str(disk), of_node=True)
        shared.take()
        shared.renew()
        assert not (disk / LEASE_FILE).exists() and not shared.is_of_another()
    local = Lease(Storage(), str(disk), of_node=True)
    local.take()
    assert (disk / LEASE_FILE).exists()
    local.release()
    assert not (disk / LEASE_FILE).exists()


@pytest.mark.multiprocess
@needs_root
def test_a_first_job_in_another_pid_namespace(disk: Path) -> None:
    """Its lock tells: its pid is 1 there, and says nothing here."""
    with Program(SAVES, disk, "pod", "own pids") as one, Checkpointer(disk) as checkpointer:
        assert saved(one, 1) == "1"
        with pytest.raises(RootInUse, match="process 1 on host 'pod'"):
            checkpointer.save(2, state(2)).result(WAIT_S)
        one.kill()
        with open(disk / LEASE_FILE, "rb") as lease:
            fcntl.flock(lease, fcntl.LOCK_EX)  # until the process is gone, whose parent is, too
        checkpointer.save(3, state(3)).result(WAIT_S)


@pytest.mark.multiprocess
def test_a_job_that_was_taken_over_commits_nothing_more(disk: Path) -> None:
    """Nor when the job that took the root has ended; but then it may begin again."""
    with Program(SAVES, disk, "") as one:
        pid = saved(one, 1)
        assert main(["repair", str(disk), "--takeover"]) == 0
        with Checkpointer(disk) as checkpointer:
            checkpointer.save(2, state(2)).result(WAIT_S)
            refused = saved(one, 3)
            assert "RootInUse" in refused and f"process {os.getpid()} on host" in refused
            assert "was taken over by another job" in refused
            assert f"process {os.getpid()}" in saved(one, 4), "as any other job's"
            checkpointer.save(5, state(5)).result(WAIT_S)
        assert directories(disk) == [*map(name, (1, 2, 5))]
        assert saved(one, 6) == pid
    assert restored(disk) == 6


@pytest.mark.multiprocess
def test_a_job_that_was_taken_over_and_comes_back_late(disk: Path) -> None:
    with Program(SAVES, disk, "") as one:
        pid = saved(one, 1)
        assert main(["repair", str(disk), "--takeover"]) == 0
        with Checkpointer(disk) as checkpointer:
            checkpointer.save(2, state(2)).result(WAIT_S)
        assert "was taken over by another job" in saved(one, 3)
        assert directories(disk) == [name(1), name(2)]
        assert saved(one, 4) == pid


def test_a_job_whose_lease_had_run_out_and_that_comes_back_late(disk: Path) -> None:
    """The job that took the root because of its age has ended, and left word of it."""
    double = NetworkClient()
    with double.mounted(), process_on(double):
        put(disk, record(space="of another machine", pid=7).to_bytes(), 7300)
        with Checkpointer(disk) as checkpointer:
            checkpointer.save(1, state(1)).result(WAIT_S)
    left = LeaseRecord.from_bytes((disk / LEASE_FILE).read_bytes())
    assert left is not None and left.is_over and left.pid == os.getpid()


TAKES_OVER = """
import sys
from fastckpt.cli import main
sys.exit(main(["repair", sys.argv[1], "--takeover"]))
"""


class TakenOver(Storage):
    """As soon as step 2 has its name, somebody takes the root over."""

    def rename(self, source: str, target: str, *, replaces: bool = True) -> None:
        super().rename(source, target, replaces=replaces)
        if os.path.basename(os.path.dirname(target)) == name(2):
            root = os.path.dirname(os.path.dirname(target))
            run_python(TAKES_OVER, root)


@pytest.mark.multiprocess
def test_a_job_that_was_taken_over_as_it_committed_removes_nothing(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other job may be restoring what this one's keep_last would remove."""
    with process_on(TakenOver()), Checkpointer(disk, keep_last=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).result(WAIT_S)
    assert directories(disk) == [*map(name, (1, 2))]
    assert "was taken over by another job, so old steps are not" in caplog.text


class RemovedByHand(Storage):
    """As the manifest of step 2 is written, somebody removes the lease, and another job saves."""

    def write_at(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        super().write_at(fd, data, offset)
        directory = os.path.dirname(path_of(fd))
        lease = os.path.join(os.path.dirname(directory), LEASE_FILE)
        others = os.path.join(os.path.dirname(directory), name(7))
        if os.path.basename(directory) == name(2) and not os.path.exists(others):
            os.unlink(lease)
            run_python(SAVES_7, os.path.dirname(directory))


SAVES_7 = """
import sys
from fastckpt import Checkpointer
from tests.kit.steps import state
Checkpointer(sys.argv[1]).save(7, state(7)).result(60)
"""


@pytest.mark.multiprocess
def test_what_another_job_commits_once_a_lease_was_removed_by_hand_comes_before(disk: Path) -> None:
    """The number of the commit under way was counted before the other job's."""
    with process_on(RemovedByHand()), Checkpointer(disk) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).result(WAIT_S)
        assert checkpointer.latest() == 2
    assert directories(disk) == [*map(name, (1, 2, 7))] and restored(disk) == 2


RACES = """
import sys
from fastckpt.errors import RootInUse
from fastckpt.saving.lease import Lease
from fastckpt.storage.file_system import Storage
lease = Lease(Storage(), sys.argv[1])
for line in sys.stdin:
    if line == "take\\n":
        try:
            lease.take()
            print("won", flush=True)
        except RootInUse:
            print("lost", flush=True)
    else:
        lease.release()
        print("released", flush=True)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("left", [None, "dead", "garbage"])
def test_of_jobs_that_race_one_wins(disk: Path, left: str | None) -> None:
    with Program(RACES, disk) as one, Program(RACES, disk) as two, Program(RACES, disk) as three:
        racers = (one, two, three)
        for _ in range(20):
            if left is not None:
                content = record(pid=dead_pid()).to_bytes() if left == "dead" else b"\0" * NBYTES
                (disk / LEASE_FILE).write_bytes(content)
            for each in racers:
                tell(each, "take")
            assert sorted(map(told, racers)) == ["lost", "lost", "won"]
            for each in racers:
                tell(each, "release")
            assert [*map(told, racers)] == ["released"] * 3


def put(disk: Path, content: bytes, age_s: float = 0.0) -> None:
    (disk / LEASE_FILE).write_bytes(content)
    when = time.time() - age_s
    os.utime(disk / LEASE_FILE, (when, when))


def test_a_lease_of_another_host(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process cannot be asked, and its locks may be its own: its age tells, or that the
    scheduler has begun the same job again. The job's name does not: two steps of an allocation have
    one, and a --rdzv-id may be copied.
    """
    for variable in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    double = NetworkClient()
    far = record(space="of another machine", pid=7, job="SLURM_JOB_ID=41")

    def refused() -> str:
        with Checkpointer(disk) as checkpointer:
            error = checkpointer.save(1, state(1)).exception(WAIT_S)
        assert error is None or type(error) is RootInUse
        return str(error or "")

    with double.mounted(), process_on(double):
        put(disk, far.to_bytes(), 7100)
        assert "process 7 on host 'elsewhere' (job SLURM_JOB_ID=41)" in refused()
        assert "or wait: its lease expires 7200 s after the last renewal" in refused()
        put(disk, record().to_bytes())
        assert "in use by another job" in (told := refused()) and "or wait" not in told
        put(disk, far.to_bytes(), 7300)
        assert refused() == ""
        put(disk, far.to_bytes())
        monkeypatch.setenv("SLURM_JOB_ID", "42")
        assert refused() != ""
        monkeypatch.setenv("SLURM_JOB_ID", "41")
        assert refused() != "", "another step of the allocation"
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert refused() == "", "the scheduler has begun the job again"
        put(disk, far._replace(restarts=1).to_bytes())
        assert refused() != ""
        monkeypatch.delenv("SLURM_JOB_ID")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "copied")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        put(disk, far._replace(job="TORCHELASTIC_RUN_ID=copied").to_bytes())
        assert refused() != ""
        put(disk, b"")
        assert "an unknown process" in refused()
        put(disk, b"", 100)
        assert refused() == ""
        put(disk, far._replace(is_over=True).to_bytes())
        assert refused() == ""


class Beats(Recorder):
    """Tells when a lease was renewed without a save, and which threads have done what."""

    def __init__(self) -> None:
        super().__init__(by_engine=True)
        self.renewed, self.read = threading.Event(), threading.Event()
        self.by: list[tuple[str, str]] = []

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        result, name = real(), threading.current_thread().name
        self.by.append((name, operation.name))
        if name == BEATING and operation.name in ("write_at", "read_file"):
            (self.renewed if operation.name == "write_at" else self.read).set()
        return result


def await_beats_of(count: int) -> None:
    """Waits until so many leases of this process are renewed by threads."""
    deadline = time.monotonic() + WAIT_S
    while sum(thread.name == BEATING for thread in threading.enumerate()) > count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_job_that_saves_nothing_renews_its_lease(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is given up, and not once it is another job's."""
    monkeypatch.setattr(lease_module, "BEAT_S", 0.001)
    double = Beats()
    lease = Lease(double, str(disk))
    lease.take()
    assert double.renewed.wait(WAIT_S)
    now = LeaseRecord.from_bytes((disk / LEASE_FILE).read_bytes())
    assert now is not None and (disk / LEASE_FILE).stat().st_size == NBYTES
    assert (now.pid, now.host, now.space) == (os.getpid(), socket.gethostname(), pid_space())
    assert now.lasts_s == LASTS_S
    (disk / "others").write_bytes(record().to_bytes())
    os.rename(disk / "others", disk / LEASE_FILE)
    for _ in range(2):  # what was read before may be of the own one
        double.read.clear()
        assert double.read.wait(WAIT_S)
    double.renewed.clear()
    for _ in range(3):
        double.read.clear()
        assert double.read.wait(WAIT_S)
    assert not double.renewed.is_set()
    with pytest.raises(RootInUse, match="was taken over"):
        lease.renew()
    await_beats_of(0)
    assert (disk / LEASE_FILE).read_bytes() == record().to_bytes()
    (disk / LEASE_FILE).unlink()
    lease.take()
    lease.release()
    await_beats_of(0)
    assert not (disk / LEASE_FILE).exists()


def test_who_collects_a_forgotten_checkpointer_asks_the_file_system_nothing(disk: Path) -> None:
    """The thread that renews its lease gives it up, unless a new Checkpointer has it, too."""
    double = Beats()
    with process_on(double):
        for is_another_there in (False, True):
            forgotten = Checkpointer(disk)
            forgotten.save(1, state(1)).result(WAIT_S)
            pipeline.current().drain()
            other = Checkpointer(disk) if is_another_there else None
            double.by.clear()
            del forgotten
            gc.collect()
            assert threading.current_thread().name not in {name for name, _what in double.by}
            if other is None:
                await_beats_of(0)
                assert ("remove", BEATING) in {(what, name) for name, what in double.by}
                assert not (disk / LEASE_FILE).exists()
            else:
                other.save(2, state(2)).result(WAIT_S)
                await_beats_of(1)
                assert (disk / LEASE_FILE).exists()
                other.close()
                assert not (disk / LEASE_FILE).exists()


def test_a_second_lease_of_a_process_outlives_the_first(disk: Path) -> None:
    """It has its lock, too."""
    storage = Storage()
    leases = [Lease(storage, str(disk)) for _ in range(2)]
    for each in leases:
        each.take()
    leases[0].release()
    assert leases[1].is_held and (disk / LEASE_FILE).exists()
    with open(disk / LEASE_FILE, "r+b") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    leases[1].release()
    assert not (disk / LEASE_FILE).exists()


def test_a_forked_child_leaves_a_lease_alone_that_was_being_renewed(disk: Path) -> None:
    lease, at_fork, over = Lease(Storage(), str(disk)), threading.Event(), threading.Event()
    lease.take()

    def renew() -> None:
        with lease._lock:
            at_fork.set()
            over.wait(WAIT_S)

    thread = threading.Thread(target=renew)
    thread.start()
    at_fork.wait(WAIT_S)
    child = os.fork()
    if child == 0:
        signal.alarm(int(WAIT_S))
        lease.release()
        lease_module._release_all()
        os._exit(int(lease.is_held))
    assert os.waitpid(child, 0)[1] == 0
    over.set()
    thread.join()
    assert lease.is_held and (disk / LEASE_FILE).exists()
    lease.release()


def test_it_lasts_as_long_as_a_checkpointer_that_saves(disk: Path) -> None:
    with Checkpointer(disk) as first, Checkpointer(disk) as second, Checkpointer(disk) as reader:
        first.save(1, state(1)).result(WAIT_S)
        assert (disk / LEASE_FILE).exists()
        first.close()
        second.save(2, state(2)).result(WAIT_S)
        assert reader.restore(state(0)) == 2
        reader.close()
        second.save(3, state(3)).result(WAIT_S)
        assert (disk / LEASE_FILE).exists()
    assert not (disk / LEASE_FILE).exists()
    with Checkpointer(disk) as reader:
        assert reader.restore(state(0)) == 3
        assert not (disk / LEASE_FILE).exists(), "who reads takes none"
    with Checkpointer(disk) as checkpointer:
        checkpointer.save(4, state(4)).result(WAIT_S)
        (disk / LEASE_FILE).unlink()  # by hand
        checkpointer.save(5, state(5)).result(WAIT_S)
        assert (disk / LEASE_FILE).exists()


def test_a_process_that_ends_without_close_releases_it(disk: Path) -> None:
    run_python(
        "import sys; from fastckpt import Checkpointer;"
        "from tests.kit.steps import state;"
        "Checkpointer(sys.argv[1]).save(1, state(1))",
        disk,
    )
    assert os.listdir(disk) == [name(1)]


FORKS = """
import os, sys
from fastckpt import Checkpointer
from tests.kit.steps import state
with Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(1, state(1)).result(60)
    child = os.fork()
    if child == 0:
        error = Checkpointer(sys.argv[1]).save(2, state(2)).exception(60)
        print(type(error).__name__, f"process {os.getppid()} on" in str(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    checkpointer.save(3, state(3)).result(60)
"""


def test_a_forked_child_is_another_process(disk: Path) -> None:
    assert run_python(FORKS, disk).stdout.split() == ["RootInUse", "True"]
    assert directories(disk) == [name(1), name(3)]


def test_commands_pass_over_it_and_repair_removes_a_dead_one(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpointer(disk) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        pipeline.current().drain()
        for command in ("ls", "verify", "repair"):
            assert main([command, str(disk)]) == 0
            assert LEASE_FILE not in capsys.readouterr().out
    put(disk, record(pid=dead_pid()).to_bytes())
    assert main(["repair", str(disk)]) == 1
    assert "the lease of a dead job" in capsys.readouterr().out and (disk / LEASE_FILE).exists()
    assert main(["repair", str(disk), "--yes"]) == 0
    assert not (disk / LEASE_FILE).exists()


def test_a_lease_is_handed_over_only_between_two_renewals(disk: Path) -> None:
    """Two Checkpointers of a process have the record's file in turn."""
    through, gate = threading.Event(), threading.Event()
    through.set()
    storage, failures = Delay("write_at", through, gate), list[BaseException]()
    first, other = Lease(storage, str(disk)), Lease(storage, str(disk))
    first.take()
    other.take()

    def renew() -> None:
        try:
            other.renew()
        except BaseException as error:
            failures.append(error)

    renewing, releasing = threading.Thread(target=renew), threading.Thread(target=first.release)
    renewing.start()
    wait_until(lambda: not storage._gates)  # it is about to write
    releasing.start()
    releasing.join(0.3)  # for as long as it may take to do what it must not do yet
    gate.set()
    renewing.join(WAIT_S)
    releasing.join(WAIT_S)
    assert failures == [] and other.is_held and not first.is_held
    other.renew()
    other.release()
    assert not (disk / LEASE_FILE).exists()


def test_a_lease_that_is_taken_for_a_user_who_is_gone_is_released(disk: Path) -> None:
    """By the commit of a save whose Checkpointer was forgotten."""

    class User:
        pass

    user, lease = User(), Lease(Storage(), str(disk))
    lease.release_with(user)
    del user
    gc.collect()
    lease.renew()
    wait_until(lambda: not lease.is_held)
    assert not (disk / LEASE_FILE).exists()
