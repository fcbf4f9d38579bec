"""Checkpointer with node-local tiers by several ranks: two nodes, played by two directories.

Responsible for what must come of it: each node holds what its ranks wrote, a step is committed
locally on every node or on none, and a restore finds the newest step that is whole in either tier,
whoever was killed and whatever was lost. What the ranks do stands in crews/tiers_bodies.py; what
one process does with tiers is test_tiers.py's business.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastckpt import Checkpointer, PeerFailed, StorageError
from tests.crews import tiers_bodies as bodies
from tests.crews.group_crew import Crew, Nursery, RankDied
from tests.kit.mounts import leave_free, mounted
from tests.kit.noise import flip
from tests.kit.steps import directories
from tests.kit.tiers import local, local_step

RANKS_IMPORT = "tests.crews.tiers_imports"

__all__ = ["local"]
MIB = 1 << 20
pytestmark = pytest.mark.multiprocess


class Nodes:
    """The local directories of two nodes, and a root.

    Args:
        disk, local: directories on two file systems.
    """

    def __init__(self, disk: Path, local: Path) -> None:
        self.root = disk / "run"
        self.a, self.b = local / "a", local / "b"
        for path in (self.a, self.b):
            path.mkdir()
        self.two = [str(path) for path in (self.a, self.a, self.b, self.b)]

    def restored(
        self, crew: Crew, locals_: list[str], step: int | None = None
    ) -> tuple[int | None, list[dict[str, str]]]:
        """The step that all ranks find, and where each read its files."""
        results = crew(bodies.restore_tiered, str(self.root), locals_, step)
        for outcome, _taken in results:
            if outcome.error is not None:
                raise outcome.error
        assert len({outcome.value for outcome, _taken in results}) == 1
        return results[0][0].value, [taken for _outcome, taken in results]


@pytest.fixture
def nodes(disk: Path, local: Path) -> Nodes:
    return Nodes(disk, local)


def local_names(local: Path, step: int) -> list[str]:
    return directories(local_step(local, step))


def test_each_node_holds_what_its_ranks_wrote(crew: Callable[[int], Crew], nodes: Nodes) -> None:
    told = crew(4)(bodies.save_tiered, str(nodes.root), nodes.two, [1, 2, 3], {})
    assert all(when is not None for each in told for when, _why in each)
    for path, ranks in ((nodes.a, (0, 1)), (nodes.b, (2, 3))):
        wanted = {f"rank-{rank:05d}.{kind}" for rank in ranks for kind in ("json", "safetensors")}
        wanted |= {"objects.pt"} if 0 in ranks else set()
        for step in (2, 3):
            assert {*local_names(path, step)} == wanted | {"manifest.json", "drained"}
        assert len(directories(next(path.iterdir()))) == 2
    for step in (2, 3):
        manifests = {
            (place / "manifest.json").read_bytes()
            for place in (
                local_step(nodes.a, step),
                local_step(nodes.b, step),
                nodes.root / f"step-{step:08d}",
            )
        }
        assert len(manifests) == 1
    assert len(list((nodes.root / "step-00000003").iterdir())) == 10
    step, taken = nodes.restored(crew(4), nodes.two)
    assert step == 3
    for rank, files in enumerate(taken):
        own = str(nodes.a if rank < 2 else nodes.b)
        for name, path in files.items():
            is_here = path.startswith(own)
            assert is_here == (Path(path).name in local_names(Path(own), 3)), (rank, name)
            assert is_here or path.startswith(str(nodes.root))
        assert files[f"rank-{rank:05d}.safetensors"].startswith(own)


def test_any_other_number_of_ranks(crew: Callable[[int], Crew], nodes: Nodes) -> None:
    crew(4)(bodies.save_tiered, str(nodes.root), nodes.two, [1], {})
    a, b = str(nodes.a), str(nodes.b)
    for locals_ in ([a], [b], [a, b], [b, a], [a, a, b], [b, b, a, a]):
        step, taken = nodes.restored(crew(len(locals_)), locals_)
        assert step == 1, locals_
        assert any(path.startswith(locals_[0]) for path in taken[0].values())
    crew(3)(bodies.save_tiered, str(nodes.root), [a, b, b], [2], {})
    assert nodes.restored(crew(4), nodes.two)[0] == 2


@pytest.mark.parametrize("lost", ["a", "b"])
def test_what_a_lost_node_had_is_read_from_the_root(
    crew: Callable[[int], Crew], nodes: Nodes, lost: str
) -> None:
    crew(4)(bodies.save_tiered, str(nodes.root), nodes.two, [1, 2], {})
    gone = nodes.a if lost == "a" else nodes.b
    shutil.rmtree(gone)
    step, taken = nodes.restored(crew(4), nodes.two)
    assert step == 2
    for rank, files in enumerate(taken):
        is_lost = nodes.two[rank] == str(gone)
        where = {path.startswith(nodes.two[rank]) for path in files.values()}
        assert where == {False} if is_lost else True in where
    crew(4)(bodies.save_tiered, str(nodes.root), nodes.two, [3], {})
    assert local_step(gone, 3).exists()


@pytest.mark.parametrize("loss", ["root", "step"])
def test_what_the_root_has_lost_is_read_from_the_nodes(
    crew: Callable[[int], Crew], nodes: Nodes, loss: str
) -> None:
    """And is in the root again; what it has removed itself stays away."""
    options = {"keep_last": 1}
    crew(4)(bodies.save_tiered, str(nodes.root), nodes.two, [1, 2], options)
    assert directories(nodes.root) == ["step-00000002"]
    shutil.rmtree(nodes.root if loss == "root" else nodes.root / "step-00000002")
    assert nodes.restored(crew(4), nodes.two)[0] == 2
    assert "step-00000002" in directories(nodes.root)
    assert nodes.restored(crew(1), [str(nodes.a)])[0] == 2
    crew(4)(bodies.save_tiered, str(nodes.root), nodes.two, [3], options)
    assert directories(nodes.root) == ["step-00000003"]
    assert nodes.restored(crew(4), nodes.two)[0] == 3
    assert directories(nodes.root) == ["step-00000003"]


@pytest.mark.parametrize("name", ["shard", "index"])
def test_what_is_damaged_on_one_node_is_read_from_the_root(
    crew: Callable[[int], Crew], nodes: Nodes, name: str
) -> None:
    crew(4)(bodies.save_tiered, str(nodes.root), nodes.two, [1], {})
    file = "rank-00003.safetensors" if name == "shard" else "rank-00003.json"
    flip(local_step(nodes.b, 1) / file, 0.5)
    step, taken = nodes.restored(crew(4), nodes.two)
    assert step == 1
    assert taken[3][file] == str(nodes.root / "step-00000001" / file)
    assert taken[2]["rank-00002.safetensors"].startswith(str(nodes.b))


# Killed between the two commits


@pytest.fixture
def killed(nursery: Nursery, nodes: Nodes) -> Nodes:
    """All ranks were killed after step 2 was committed on both nodes, before it was in the root."""
    deaths = {rank: ("create", f"{nodes.root}/step-00000002/rank-") for rank in range(4)}
    with nursery.crew(4) as crew:
        crew(bodies.save_tiered, str(nodes.root), nodes.two, [1], {})
        results = crew(bodies.save_and_die, str(nodes.root), nodes.two, 2, deaths)
        assert all(isinstance(result, RankDied) for result in results)
    for path in (nodes.a, nodes.b):
        assert "drained" not in local_names(path, 2) and "manifest.json" in local_names(path, 2)
    assert not (nodes.root / "step-00000002" / "manifest.json").exists()
    return nodes


@pytest.mark.parametrize(
    "way",
    [
        "as before",
        "two ranks and one spare",
        *(pytest.param(each, marks=pytest.mark.torture) for each in ("swapped", "two ranks")),
    ],
)
def test_a_job_that_was_killed_goes_on(
    crew: Callable[[int], Crew], killed: Nodes, way: str
) -> None:
    """What the nodes hold is drained, whichever ranks are there now, and read."""
    a, b = str(killed.a), str(killed.b)
    spare = killed.a.with_name("c")
    spare.mkdir()
    locals_ = {
        "as before": killed.two,
        "swapped": [b, b, a, a],
        "two ranks": [b, a],
        "two ranks and one spare": [str(spare), a, b],
    }[way]
    step, taken = killed.restored(crew(len(locals_)), locals_)
    assert step == 2
    assert any(path.startswith((a, b)) for files in taken for path in files.values())
    assert killed.restored(crew(1), [str(spare)])[0] == 2, "all of it is in the root"
    for path in (killed.a, killed.b):
        assert "drained" in local_names(path, 2)
    crew(4)(bodies.save_tiered, str(killed.root), killed.two, [3], {}, 1)
    assert killed.restored(crew(4), killed.two)[0] == 3
    assert not [path for path in killed.root.rglob("*") if ".tmp" in path.name]


@pytest.mark.parametrize(
    "loss",
    [
        "node b",
        "shard",
        "objects",
        *(
            pytest.param(each, marks=pytest.mark.torture)
            for each in ("node a", "index", "half a shard")
        ),
    ],
)
def test_a_job_that_was_killed_and_lost_something(
    crew: Callable[[int], Crew], killed: Nodes, loss: str
) -> None:
    """Then step 2 is nowhere whole: all ranks go back to step 1, and go on from there."""
    if loss.startswith("node"):
        shutil.rmtree(killed.a if loss == "node a" else killed.b)
    elif loss == "objects":
        flip(local_step(killed.a, 2) / "objects.pt", 0.5)
    elif loss == "half a shard":
        os.truncate(local_step(killed.b, 2) / "rank-00003.safetensors", 4096)
    else:
        name = "rank-00003.safetensors" if loss == "shard" else "rank-00003.json"
        flip(local_step(killed.b, 2) / name, 0.5)
    step, _taken = killed.restored(crew(4), killed.two)
    assert step == 1
    with Checkpointer(killed.root) as checkpointer:
        assert checkpointer.steps() == [1]
    crew(4)(bodies.save_tiered, str(killed.root), killed.two, [2, 3, 4], {}, 1)
    assert killed.restored(crew(4), killed.two)[0] == 4


def test_a_job_beside_waits_for_the_copy_to_the_root(nursery: Nursery, nodes: Nodes) -> None:
    """Which the other job makes: ranks need files of each other's nodes, and the root has none."""
    arguments = (str(nodes.root), [str(nodes.a), str(nodes.b)])
    with nursery.crew(2) as crew, nursery.crew(2) as other:
        crew.begin(bodies.save_and_drain_later, *arguments, 1)
        crew._store.wait(["test/saved"])
        other.begin(bodies.restore_beside, *arguments)
        other._store.wait(["test/waits"])
        crew._store.set("test/drain", b"")
        outcomes = other.end()
        crew.end()
    assert [outcome.value for outcome in outcomes] == [1, 1], outcomes[0].error


def test_killed_between_the_commits_of_two_nodes(nursery: Nursery, nodes: Nodes) -> None:
    """One node has published and the other has not: the step was committed nowhere, which no rank
    can know. All name the one that died.
    """
    with nursery.crew(4) as crew:
        crew(bodies.save_tiered, str(nodes.root), nodes.two, [1], {})
        deaths = {2: ("rename", f"{nodes.b}/run")}
        results = crew(bodies.save_and_die, str(nodes.root), nodes.two, 2, deaths)
    assert isinstance(results[2], RankDied)
    for rank in (0, 1, 3):
        local, error, committed_s = results[rank]
        assert isinstance(local.error, PeerFailed) and isinstance(error, PeerFailed)
        assert error.ranks == (2,) and "rank 2 " in str(error) and error.in_doubt, (rank, error)
        assert committed_s is None
    with nursery.crew(4) as crew:
        assert nodes.restored(crew, nodes.two)[0] == 1
        crew(bodies.save_tiered, str(nodes.root), nodes.two, [2], {})
        assert nodes.restored(crew, nodes.two)[0] == 2


def test_one_rank_killed_while_it_drains(nursery: Nursery, nodes: Nodes) -> None:
    """The others are told, and that the step is in the local tier, where it is found."""
    with nursery.crew(4) as crew:
        crew(bodies.save_tiered, str(nodes.root), nodes.two, [1], {})
        deaths = {3: ("create", f"{nodes.root}/step-00000002/rank-00003")}
        results = crew(bodies.save_and_die, str(nodes.root), nodes.two, 2, deaths)
    for rank in (0, 1, 2):
        local, error, committed_s = results[rank]
        assert local.value is True and committed_s is not None
        assert isinstance(error, PeerFailed) and error.ranks == (3,)
        assert "the local tier keeps its steps" in str(error)
    with nursery.crew(4) as crew:
        assert nodes.restored(crew, nodes.two)[0] == 2


# Where one node cannot


@pytest.mark.filesystem
def test_one_node_is_full(crew: Callable[[int], Crew], disk: Path, local: Path) -> None:
    """All ranks go to the root, and nothing of the step stays on any node."""
    nodes = Nodes(disk, local)
    with mounted("tmpfs", disk, 64 * MIB) as small:
        leave_free(small, MIB)
        locals_ = [str(nodes.a), str(nodes.a), str(small), str(small)]
        for told in crew(4)(bodies.save_tiered, str(nodes.root), locals_, [1], {}):
            ((committed_s, why),) = told
            assert committed_s is None and "of rank 2" in why and "No space" in why
        assert directories(next(nodes.a.iterdir())) == []
        assert nodes.restored(crew(4), locals_)[0] == 1


@pytest.mark.filesystem
def test_one_node_is_full_and_ranks_take_turns(
    crew: Callable[[int], Crew], disk: Path, local: Path
) -> None:
    """All go to the root, at the pace that was asked for there."""
    nodes = Nodes(disk, local)
    paced = {"drain_rate": 50e6, "max_writers": 1}
    with mounted("tmpfs", disk, 64 * MIB) as small:
        leave_free(small, MIB)
        locals_ = [str(nodes.a), str(nodes.a), str(small), str(small)]
        for told in crew(4)(bodies.save_paced, str(nodes.root), locals_, 1, paced):
            why, pacing = told
            assert "of rank 2" in why
            assert pacing.startswith("drain_rate 50 MB/s a node, max_writers 1")
            assert pacing.endswith("; 50 MB/s on this rank"), "one of the node's ranks at a time"
        assert nodes.restored(crew(4), locals_)[0] == 1


def test_ranks_that_find_the_copy_given_up_go_back_with_the_first(
    crew: Callable[[int], Crew], killed: Nodes
) -> None:
    flip(local_step(killed.a, 2) / "objects.pt", 0.5)
    results = crew(4)(bodies.restore_after_the_first, str(killed.root), killed.two)
    assert [outcome.error for outcome, _taken in results] == [None] * 4
    assert {outcome.value for outcome, _taken in results} == {1}


@pytest.mark.parametrize(
    ("size", "options"), [(4, {}), (2, {"codec": "zstd"}), (2, {"fence": "step"})], ids=str
)
def test_drains_are_paced(
    crew: Callable[[int], Crew], nodes: Nodes, size: int, options: dict[str, Any]
) -> None:
    """Ranks share the rate of their machine and take turns; nothing of it delays local commits."""
    paced = {"drain_rate": 50e6, "max_writers": 2, **options}
    locals_ = nodes.two[:: 4 // size]
    for why, pacing in crew(size)(bodies.save_paced, str(nodes.root), locals_, 3, paced):
        assert why == "" and pacing.endswith("; 25 MB/s on this rank")
    assert nodes.restored(crew(size), locals_)[0] == 3
    assert not [path for path in nodes.root.rglob("*") if ".tmp" in path.name]


def test_a_paced_drain_ends_when_another_rank_fails(
    crew: Callable[[int], Crew], nodes: Nodes
) -> None:
    """At its pace it would write for longer than the crew waits; the step is in the local tier, and
    found there. No node notes that the root has it.
    """
    locals_ = [str(nodes.a), str(nodes.b)]
    one, other = crew(2)(bodies.drain_and_fail, str(nodes.root), locals_, 1, {"drain_rate": 200e3})
    for node in (nodes.a, nodes.b):
        assert "drained" not in {path.name for path in local_step(node, 1).iterdir()}
    assert isinstance(one.error, PeerFailed) and one.error.ranks == (1,)
    assert isinstance(other.error, StorageError) and "No space" in str(other.error)
    assert not [path for path in nodes.root.rglob("*") if path.is_file()]
