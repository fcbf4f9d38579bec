"""Promise: a step in memory outlives its node, by the files that neighbours have, and no more.

Nodes are directories on a tmpfs. What the ranks do stands in crews/memory_bodies.py; what one node
does with memory is test_memory.py's business.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fastckpt import Checkpointer, PeerFailed, StorageError
from fastckpt.cli import main
from tests.crews import memory_bodies as bodies
from tests.crews.group_crew import Crew, Nursery, RankDied
from tests.kit.noise import flip
from tests.kit.saves import wait_until
from tests.kit.steps import directories
from tests.kit.storm import Storm
from tests.kit.tiers import local, local_step

RANKS_IMPORT = "tests.crews.memory_imports"

__all__ = ["local"]
pytestmark = pytest.mark.multiprocess


class Nodes:
    """The memory of some nodes, and a root.

    Args:
        disk, local: directories on a disk and a tmpfs.
        count: of nodes.
        ranks: on each.
    """

    def __init__(self, disk: Path, local: Path, count: int, ranks: int = 1) -> None:
        self.root = disk / "run"
        self.each = [local / name for name in "abcd"[:count]]
        for path in self.each:
            path.mkdir()
        self.locals = [str(path) for path in self.each for _ in range(ranks)]

    def lose(self, number: int) -> None:
        """Another machine takes the place of a node."""
        shutil.rmtree(self.each[number])
        self.each[number].mkdir()

    def restored(
        self, crew: Crew, options: dict[str, Any], step: int | None = None
    ) -> tuple[int | None, list[dict[str, str]], list[str]]:
        """The step that all ranks find, where each read its files, and all warnings."""
        results = crew(bodies.restore, str(self.root), self.locals, options, step)
        for outcome, _taken, lines in results:
            if outcome.error is not None:
                raise AssertionError(lines) from outcome.error
        assert len({outcome.value for outcome, *_ in results}) == 1
        lines = [line for *_, lines in results for line in lines]
        return results[0][0].value, [taken for _, taken, _ in results], lines


MIB = 1 << 20
SOME = {"root_every": 100}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lost_node_is_restored_from_its_neighbour(
    nursery: Nursery, disk: Path, local: Path, ranks: int
) -> None:
    nodes = Nodes(disk, local, 2, ranks)
    with nursery.crew(2 * ranks) as crew:
        results = crew(bodies.save_and_die, str(nodes.root), nodes.locals, [1, 2, 3], SOME)
        assert all(isinstance(result, RankDied) for result in results)
    assert not nodes.root.exists() or directories(nodes.root) == []
    for path in nodes.each:
        assert {*directories(local_step(path, 3))} >= {
            f"rank-{rank:05d}.safetensors" for rank in range(2 * ranks)
        }
    nodes.lose(0)
    with nursery.crew(2 * ranks) as crew:
        step, taken, _lines = nodes.restored(crew, SOME)
    assert step == 3
    sent = {each["rank-00000.safetensors"] for each in taken[:ranks]}
    assert any(path.startswith(f"127.0.0.1:{nodes.each[1]}") for path in sent), "one rank fetches"
    assert all(path.startswith(str(nodes.each[1])) for path in taken[-1].values())
    with Checkpointer(nodes.root) as checkpointer:
        assert checkpointer.steps() == [3], "it is in the root when the job has ended"


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [(3, 2, 0), (2, 3, 0), pytest.param(2, 1, 0, marks=pytest.mark.torture)],
)
def test_a_job_goes_on_with_other_nodes(
    nursery: Nursery, disk: Path, local: Path, before: int, after: int, lost: int
) -> None:
    """Fewer of them, without the node that was lost; or more, of which one is new."""
    nodes = Nodes(disk, local, 3)
    with nursery.crew(before) as crew:
        crew(bodies.save_and_die, str(nodes.root), nodes.locals, [1, 2], SOME)
    nodes.lose(lost)
    if after < before:
        del nodes.locals[lost]
    with nursery.crew(after) as crew:
        step, taken, _lines = nodes.restored(crew, SOME)
        assert step == 2
        assert not any(path.startswith(str(nodes.root)) for each in taken for path in each.values())
        results = crew(bodies.save_steps, str(nodes.root), nodes.locals, [3], SOME)
        assert all(kept == (after > 1) for ((kept, _why, _replicated_s),) in results)


def test_close_waits_for_copies_under_way(nursery: Nursery, disk: Path, local: Path) -> None:
    """With fewer neighbours than asked for, all of them have one."""
    nodes = Nodes(disk, local, 2)
    with nursery.crew(2) as crew:
        results = crew(bodies.save_and_close, str(nodes.root), nodes.locals, 1, {"peers": 2})
    assert all(replicated_s is not None for replicated_s in results), results
    assert {*directories(local_step(nodes.each[0], 1))} == {
        *directories(local_step(nodes.each[1], 1))
    }


def test_a_damaged_copy_is_passed_over_and_named(nursery: Nursery, disk: Path, local: Path) -> None:
    """Another neighbour has a whole one; where none has, all ranks go back a step."""
    nodes, options = Nodes(disk, local, 3), {**SOME, "peers": 2}
    with nursery.crew(3) as crew:
        crew(bodies.save_and_die, str(nodes.root), nodes.locals, [1, 2], options)
    nodes.lose(0)
    shard = "rank-00000.safetensors"
    flip(local_step(nodes.each[1], 2) / shard, 0.5)
    with nursery.crew(3) as crew:
        step, taken, lines = nodes.restored(crew, options)
    assert step == 2
    assert taken[0][shard].startswith(f"127.0.0.1:{local}")
    assert any("CRC-32 mismatch" in line for line in lines), "who met it first has another one sent"
    for path in nodes.each:
        flip(local_step(path, 2) / shard, 0.5)
    shutil.rmtree(nodes.root)
    with nursery.crew(3) as crew:
        step, _taken, lines = nodes.restored(crew, options)
    assert step == 1 and any("skipping" in line and "step-00000002" in line for line in lines)


def test_what_is_no_file_is_replaced_by_a_copy(nursery: Nursery, disk: Path, local: Path) -> None:
    """In the place of any file of a step: a directory, a FIFO, a socket, and a link in a circle."""
    nodes = Nodes(disk, local, 2)
    with nursery.crew(2) as crew:
        crew(bodies.save_and_die, str(nodes.root), nodes.locals, [1, 2], SOME)
    step_2 = local_step(nodes.each[0], 2)
    shard, index, other_index, objects = (
        step_2 / name
        for name in ("rank-00001.safetensors", "rank-00000.json", "rank-00001.json", "objects.pt")
    )
    for path in (shard, index, other_index, objects):
        path.unlink()
    (shard / "inner").mkdir(parents=True)
    os.mkfifo(index)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(other_index))
    objects.symlink_to(objects)
    with nursery.crew(2) as crew:
        step, taken, lines = nodes.restored(crew, SOME)
    assert step == 2
    assert not any(path.startswith(str(nodes.root)) for each in taken for path in each.values())
    for path in (index, objects):  # of what both ranks read; the others, only the second one did
        assert any(repr(str(path)) in line and "not a regular file" in line for line in lines), (
            lines
        )


def test_a_lease_of_another_node_is_taken_over_or_fails(
    nursery: Nursery, disk: Path, local: Path
) -> None:
    (disk / "1").mkdir()
    nodes = Nodes(disk / "1", local, 2)
    with nursery.crew(2) as crew:
        asked = disk / "asked"
        crew.begin(bodies.save_with_another_lease, str(nodes.root), nodes.locals, str(asked))
        wait_until(asked.exists, "a rank asks")
        (tier,) = nodes.each[1].iterdir()
        assert main(["repair", str(tier), "--takeover"]) == 0
        asked.unlink()
        assert crew.end() == [["RootInUse", ""]] * 2
        shutil.rmtree(nodes.each[1])
        nodes.each[1].mkdir()
        other = str(disk / "run")
        first, second = crew(bodies.save_with_another_lease, other, nodes.locals, None)
    assert first[0] == "PeerFailed" and second[0] in ("PeerFailed", "StorageError")
    assert all("rank 1 failed: " in why for why in (first[1], second[1])), "the next one goes past"
    with Checkpointer(other) as checkpointer:
        assert checkpointer.steps() == [1, 3]
    for path in nodes.each:
        assert not [*path.glob("*/step-00000002*")], "it is committed on none"


def test_ranks_that_send_different_steps_to_the_root_are_told(
    nursery: Nursery, disk: Path, local: Path
) -> None:
    nodes = Nodes(disk, local, 2)
    with nursery.crew(2) as crew:
        errors = crew(bodies.save_unlike, str(nodes.root), nodes.locals, [{"root_every": 5}, {}])
    for error in errors:
        assert "Memory(root_every=) is 5 on rank 0 and 1 on rank 1" in str(error)


def test_the_root_gets_a_whole_copy_if_one_is_damaged(
    nursery: Nursery, disk: Path, local: Path
) -> None:
    nodes = Nodes(disk, local, 2)
    with nursery.crew(2) as crew:
        crew(bodies.save_and_die, str(nodes.root), nodes.locals, [1], SOME)
    for name in ("rank-00000.safetensors", "rank-00001.json", "objects.pt"):
        flip(local_step(nodes.each[0], 1) / name, 0.5)
    with nursery.crew(2) as crew:
        assert nodes.restored(crew, SOME)[0] == 1
    for path in nodes.each:
        shutil.rmtree(path)
        path.mkdir()
    with nursery.crew(2) as crew:
        assert nodes.restored(crew, SOME)[0] == 1, "the root has all of it"


def test_a_deleted_step_does_not_come_back_from_neighbours(
    nursery: Nursery, disk: Path, local: Path
) -> None:
    """Not even if the node is lost on which it was deleted."""
    nodes = Nodes(disk, local, 2)
    with nursery.crew(2) as crew:
        crew(bodies.save_and_die, str(nodes.root), nodes.locals, [1, 2], SOME, 2)
    assert local_step(nodes.each[1], 2).exists(), "the neighbour has all of it"
    nodes.lose(0)
    with nursery.crew(2) as crew:
        step, _taken, _lines = nodes.restored(crew, SOME)
    assert step == 1
    assert directories(local_step(nodes.each[1], 1).parent) == ["step-00000001"]


def test_a_step_that_other_nodes_alone_have_is_deleted(
    nursery: Nursery, disk: Path, local: Path
) -> None:
    nodes = Nodes(disk, local, 3)
    with nursery.crew(3) as crew:
        crew(bodies.save_and_die, str(nodes.root), nodes.locals, [1, 2], SOME)
    nodes.lose(0)
    with nursery.crew(3) as crew:
        told = crew(bodies.delete, str(nodes.root), nodes.locals, 2, SOME, False)
        assert "steps of other nodes are only known after a restore" in str(told[0])
        told = crew(bodies.delete, str(nodes.root), nodes.locals, 2, SOME, True)
        assert told == [None, None, None]
    with nursery.crew(3) as crew:
        assert nodes.restored(crew, SOME)[0] == 1


def test_an_address_that_other_machines_do_not_reach_is_told(
    nursery: Nursery, disk: Path, local: Path
) -> None:
    """Unless the nodes are of one machine."""
    nodes = Nodes(disk, local, 2)
    with nursery.crew(2) as crew:
        told = "which other machines cannot reach"
        results = crew(bodies.meet_as_machines, str(nodes.root), nodes.locals, 1)
        assert not any(told in line for lines in results for line in lines)
        results = crew(bodies.meet_as_machines, str(nodes.root), nodes.locals, 2)
        (line,) = [line for lines in results for line in lines if told in line]
        assert line.startswith("rank 0 listens for its neighbours at 127.0.0.1")


def test_copies_count_in_the_budget(nursery: Nursery, disk: Path, local: Path) -> None:
    """What neighbours send counts, too; the step goes past the memory if that is too much."""
    nodes, taken, over = Nodes(disk, local, 2), [0], threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            with suppress(FileNotFoundError):  # a file is gone since it was listed
                paths = nodes.each[0].rglob("*.*")
                taken.append(sum(path.stat().st_blocks * 512 for path in paths))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with nursery.crew(2) as crew:
            for budget, fits in ((48 * MIB, True), (18 * MIB, False)):
                options = {"budget": budget, "keep": 9}
                steps = [*range(1, 8)]
                results = crew(bodies.save_steps, str(nodes.root), nodes.locals, steps, options)
                for told in results:
                    for kept, why, _replicated_s in told:
                        assert kept == fits and ("has a budget of" in why) != fits, why
    finally:
        over.set()
        looking.join()
    assert 16 * MIB < max(taken) <= 48 * MIB


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.torture)]
)
def test_a_rank_is_stopped_while_a_file_comes_to_it(
    nursery: Nursery, disk: Path, local: Path, how: int
) -> None:
    """The others are told who it was within timeout_s; the next job has the step from memory."""
    nodes = Nodes(disk, local, 3)
    with nursery.crew(3) as crew:
        crew.begin(bodies.save_beside_who_is_stopped, str(nodes.root), nodes.locals, 1, how, 1.5)
        crew.await_one(0)
        with suppress(ProcessLookupError):  # it has died before
            os.kill(crew._pids[1], signal.SIGKILL)
        first, died, last = crew.end()
    assert isinstance(died, RankDied)
    for error, is_committed, is_replicated in (first, last):
        assert isinstance(error, PeerFailed) and error.ranks == (1,)
        assert is_committed and not is_replicated
        assert "rank 1 joined but did not send" in str(error)
    with nursery.crew(3) as crew:
        step, taken, _lines = nodes.restored(crew, {})
    assert step == 1
    assert not any(path.startswith(str(nodes.root)) for each in taken for path in each.values())
    assert not [*local.rglob("*.tmp")], "the file that came is gone"


@pytest.mark.torture  # it waits for a third of a timeout
def test_a_neighbour_that_hangs_is_passed_over(nursery: Nursery, disk: Path, local: Path) -> None:
    """All ranks are told who it was, and the steps are in the root all the same."""
    nodes = Nodes(disk, local, 2)
    with nursery.crew(2) as crew:
        results = crew(bodies.save_beside_who_hangs, str(nodes.root), nodes.locals, 1, [1, 2])
    for told in results:
        for (kept, why), wanted in zip(told, ("timed out", "in time"), strict=True):
            assert not kept and why.startswith("rank 0: sending to rank 1 at 127.0.0.1:"), why
            assert why.endswith(wanted), why
    with Checkpointer(nodes.root) as checkpointer:
        assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize("beside", [True, False], ids=["a job beside", "the next job"])
def test_what_neighbours_have_stays_until_they_have_something_newer(
    nursery: Nursery, disk: Path, local: Path, beside: bool
) -> None:
    """Though others restore a newer step, which only the nodes have that wrote it."""
    nodes, report, options = Nodes(disk, local, 2), disk / "report", {**SOME, "keep": 1}
    arguments = (bodies.save_unsent, str(nodes.root), nodes.locals, options)

    with nursery.crew(2) as crew:
        crew.begin(*arguments, 0, [1], [2, 3] if beside else [2], str(report))
        await_saves(report, 2)
        if beside:
            with nursery.crew(2) as other:
                assert nodes.restored(other, options)[0] == 2
            assert not [*local.rglob("drained")], "the root has none of them"
            crew._store.set("test/after 2", b"")
            await_saves(report, 3)
        kill(crew)
    if not beside:
        with nursery.crew(2) as crew:
            crew.begin(*arguments, 2, [], [3], str(report))
            await_saves(report, 3)
            kill(crew)
    for path in nodes.each:
        assert "rank-00000.safetensors" in directories(local_step(path, 1))
    nodes.lose(0)
    with nursery.crew(2) as crew:
        assert nodes.restored(crew, options)[0] in (1, 2), "a reader may have fetched all of 2"


def test_all_nodes_note_what_one_has_noted(nursery: Nursery, disk: Path, local: Path) -> None:
    """A job may be killed when its caller was told that a step is safe, and one node has noted it:
    the next job removes that step on no node before it has a newer one that is safe.
    """
    nodes = Nodes(disk, local, 2)
    with nursery.crew(2) as crew:
        crew(bodies.save_and_die, str(nodes.root), nodes.locals, [1], SOME)
    noted = [local_step(path, 1) / "replicated" for path in nodes.each]
    noted[1].unlink()
    with nursery.crew(2) as crew:
        assert nodes.restored(crew, SOME)[0] == 1
    assert noted[1].exists()


def await_saves(report: Path, step: int) -> None:
    """Waits until both ranks have reported a step."""

    def have_both() -> bool:
        paths = [report.with_name(f"{report.name}-{rank}") for rank in (0, 1)]
        return all(str(step) in path.read_text("ascii").split() for path in paths if path.exists())

    wait_until(lambda: len(reported(report)) > 0 and have_both())


def kill(crew: Crew) -> None:
    """Kills all ranks at once."""
    for pid in crew._pids:
        os.kill(pid, signal.SIGKILL)
    assert all(isinstance(result, RankDied) for result in crew.end())


@pytest.mark.parametrize(
    "trouble", ["refused", "full", pytest.param("hung", marks=pytest.mark.torture)]
)
def test_what_cannot_be_fetched_is_read_from_the_root(
    nursery: Nursery, disk: Path, local: Path, trouble: str
) -> None:
    """Once it was copied there: the root has an older step, which is not taken in its place."""
    nodes = Nodes(disk, local, 2)
    with nursery.crew(2) as crew:
        crew(bodies.save_steps, str(nodes.root), nodes.locals, [1], {})
        crew(bodies.save_and_die, str(nodes.root), nodes.locals, [4], SOME)
    nodes.lose(1)
    arguments = (str(nodes.root), nodes.locals, SOME, (trouble, 1), [None])
    with nursery.crew(2) as crew:
        results = crew(bodies.restore_in_trouble, *arguments)
    for ((outcome, _taken),) in results:
        assert outcome.value == 4, outcome.error
    shard = results[1][0][1]["rank-00001.safetensors"]
    assert shard == str(nodes.root / "step-00000004/rank-00001.safetensors")


def test_what_cannot_be_fetched_and_does_not_come_to_the_root_is_an_error(
    nursery: Nursery, disk: Path, local: Path
) -> None:
    """The job lives that saves it, and does not send it. An older step is restored on request."""
    nodes, report = Nodes(disk, local, 2), disk / "report"
    with nursery.crew(2) as crew:
        crew.begin(
            bodies.save_unsent, str(nodes.root), nodes.locals, SOME, 0, [1], [2], str(report)
        )
        await_saves(report, 2)
        arguments = (str(nodes.root), nodes.locals, SOME, ("refused", 0), [None, 1])
        with nursery.crew(2) as other:
            results = other(bodies.restore_in_trouble, *arguments)
        kill(crew)
    failures = [its[0][0].error for its in results]
    assert all(isinstance(failure, StorageError | PeerFailed) for failure in failures), failures
    text = " ".join(map(str, failures))
    for part in ("step 2 could not be fetched from rank", "at 127.0.0.1:", "Connection refused"):
        assert part in text
    assert "restore another step by its number" in text
    assert [its[1][0].value for its in results] == [1, 1]


def test_a_step_of_one_node_alone_gives_way_to_a_later_job_s(
    nursery: Nursery, tmp_path: Path, local: Path
) -> None:
    """The second node was killed before it published a step, and knew nothing of it; the job that
    went on there had another one committed, which everybody was told of.
    """
    nodes, arguments = Nodes(tmp_path, local, 2), bodies.save_small
    with nursery.crew(2) as crew:
        first, died = crew(arguments, str(nodes.root), nodes.locals, [10, 20], 20)
    assert first == (None, [True, False]) and isinstance(died, RankDied)
    assert (local_step(nodes.each[0], 20) / "manifest.json").exists()
    with nursery.crew(1) as crew:
        assert crew(arguments, str(nodes.root), nodes.locals[1:], [15], None) == [(10, [True])]
    with nursery.crew(2) as crew:
        assert crew(arguments, str(nodes.root), nodes.locals, [], None) == [(15, [])] * 2


def is_frozen(crew: Crew, report: Path) -> bool:
    """Waits until a rank has reported that it is about to stop, or is done."""
    wait_until(lambda: report.exists() or crew._connections[0].poll())
    return report.exists()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.torture)])
def test_a_job_is_frozen_at_any_operation_and_taken_over(
    nursery: Nursery, disk: Path, local: Path, stride: int
) -> None:
    """What the other job was told of is restored, whole, whatever the first one does afterwards."""
    for number in itertools.count(3, stride):
        (disk / f"{number}").mkdir()
        (local / f"{number}").mkdir()
        nodes = Nodes(disk / f"{number}", local / f"{number}", 1)
        arguments, report = (str(nodes.root), nodes.locals), disk / f"report-{number}"
        with nursery.crew(1) as crew:
            crew.begin(bodies.save_frozen, *arguments, number, str(report))
            is_over = not is_frozen(crew, report)
            if not is_over:
                # Its status tells of what the frozen job has begun, too, which stays.
                main(["repair", arguments[0], "--takeover", "--local", str(nodes.each[0])])
                with nursery.crew(1) as other:
                    more = ({"root_every": 1000, "peers": 0}, ("", 0), [(5, "local"), (6, "local")])
                    other(bodies.live, *arguments, *more, str(report), True, 5.0)
                told = Path(f"{report}-0").read_text("utf-8").split("\n")
                is_taken_over = "local 6" in told
                # Between a step's name and its acknowledgement the frozen job has the lock that
                # readers of this machine wait for: they are refused, and restore none before.
                is_refused = told[0].startswith("refused StorageError lock of")
                is_named = any(nodes.each[0].glob("*/step-00000002*/manifest.json"))
                assert is_taken_over or (is_refused and is_named), (report.read_text("utf-8"), told)
                os.kill(crew._pids[0], signal.SIGCONT)
            (error,) = crew.end()
        with nursery.crew(1) as crew:
            step, _taken, _lines = nodes.restored(crew, SOME)
        if is_over:
            assert (error, step) == (None, 2)
            return
        # Its step 2 is acknowledged, or it was waited for too long while it was frozen.
        expected = {2} if error is None or not is_taken_over else set()
        expected |= {6} if is_taken_over else set()
        assert step in expected, (report.read_text("utf-8"), error, step)


@pytest.mark.torture
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_node_is_lost_at_any_moment(
    nursery: Nursery, disk: Path, local: Path, storm: Storm, ranks: int
) -> None:
    """Its processes die, its memory is gone, and the launcher ends the others a moment later. All
    ranks of the next job agree on a step that is no older than the newest at all neighbours.
    """
    nodes, report, begin, saves = Nodes(disk, local, 3, ranks), disk / "report", 1, 0
    for rng in storm.rounds(suite=1, torture=300 // ranks**2):
        with nursery.crew(3 * ranks) as crew:
            crew.begin(
                bodies.save_for_ever, str(nodes.root), nodes.locals, begin, SOME, str(report)
            )
            wanted, until = rng.randrange(5), time.monotonic() + 60
            while len(reported(report)) < wanted or not crew._pids:
                assert time.monotonic() < until
                time.sleep(0.005)
            time.sleep(rng.uniform(0.0, 0.1))
            lost, grace_s = rng.randrange(3), rng.choice([0.0, rng.uniform(0.0, 0.2)])
            there = range(lost * ranks, (lost + 1) * ranks)
            for pid in crew._pids[there.start : there.stop]:
                os.kill(pid, signal.SIGKILL)
            crew.await_one(there.start)
            crew.await_one(there.stop - 1)
            nodes.lose(lost)
            time.sleep(grace_s)
            for pid in {*crew._pids} - {*crew._pids[there.start : there.stop]}:
                os.kill(pid, signal.SIGKILL)
            assert all(isinstance(result, RankDied) for result in crew.end())
        known = max(reported(report), default=0)
        for path in disk.glob("report-*"):
            path.unlink()
        with nursery.crew(3 * ranks) as crew:
            step, _taken, lines = nodes.restored(crew, SOME)
        assert (step or 0) >= max(known, begin - 1), lines
        saves, begin = saves + max(known - begin + 1, 0), (step or 0) + 1
    with Checkpointer(nodes.root) as checkpointer:
        assert (checkpointer.latest() or 0) == begin - 1
    print(saves, "saves that all neighbours had")


def reported(report: Path) -> list[int]:
    """The steps that some rank has seen at all neighbours."""
    found = [path.read_text("ascii").split() for path in report.parent.glob(f"{report.name}-*")]
    return sorted({int(step) for steps in found for step in steps})
