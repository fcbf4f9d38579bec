"""Files that several ranks write and read together: fastckpt.save(group=) and load(group=).

Ranks are real processes with a process group over gloo. What they wrote is judged from outside: by
stock torch, by unzip and zipfile, and by the bytes, which may not depend on the number of ranks.
Must not know which rank writes which part, nor how ranks agree; step directories are not the
business here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import hashlib
import io
import itertools
import logging
import os
import signal
import struct
import subprocess
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.nested._internal.nested_tensor  # here, that it takes no time in every rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastckpt
from fastckpt.errors import CorruptCheckpoint, PeerFailed, RanksDisagree, StorageError
from fastckpt.formats import torch_pickle, torch_zip
from fastckpt.saving import pipeline
from fastckpt.storage.file_system import Opening, Storage
from tests.crews.group_crew import WAIT_S, Crew, Member, Nursery, Outcome, RankDied, Told, attempt
from tests.kit.doubles import Deadly, FailAt, Operation, Recorder, process_on
from tests.kit.interpreters import let_go
from tests.kit.mounts import leave_free, mounted
from tests.kit.network_double import Cifs, RemembersAbsence
from tests.kit.noise import flip, noise
from tests.kit.options import gathered
from tests.kit.saves import warnings_in
from tests.kit.storm import Storm

pytestmark = pytest.mark.multiprocess
T = TypeVar("T")
State = Callable[[int], Any]  # what a rank saves

MIB = 1 << 20
BLOCK = 8 * MIB
RANKS = 4
BUDGET_BYTES = 64 * MIB
torch_config = pytest.importorskip("torch.utils.serialization").config


@pytest.fixture
def crew(nursery: Nursery) -> Crew:
    """Four ranks, the same ones for many tests."""
    return nursery.lasting_crew(RANKS)


# --- what ranks do


def save(member: Member, path: Path, state: State, **options: Any) -> Outcome:
    """Saves together with the other ranks and waits for it."""
    return attempt(
        lambda: fastckpt.save(
            state(member.rank), path, group=member.group, **gathered(**options)
        ).result(WAIT_S)
    )


def save_in_turn(member: Member, path: Path, states: list[State], **options: Any) -> list[Outcome]:
    return [save(member, path, state, **options) for state in states]


def digest_of(obj: Any) -> str:
    """Equal for equal objects: what torch.save writes of them."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return hashlib.sha256(buffer.getbuffer()).hexdigest()


def load(member: Member, path: Path, **options: Any) -> Outcome:
    """Loads together with the other ranks; returns a digest of what came."""
    return attempt(lambda: digest_of(fastckpt.load(path, group=member.group, **options)))


# --- what is expected of it


def all_saved(outcomes: list[Outcome]) -> None:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)


def same_error(outcomes: list[Outcome], kind: type[Exception], *words: str) -> str:
    """That all ranks raised the same; returns the text."""
    assert {type(outcome.error) for outcome in outcomes} == {kind}, outcomes
    (text,) = {str(outcome.error) for outcome in outcomes}
    assert [word for word in words if word not in text] == [], text
    return text


def one_failed(outcomes: list[Outcome], rank: int, kind: type[Exception]) -> Exception:
    """That one rank failed, and all others for its reason, without waiting for a time-out, which
    comes after that of the crew.
    """
    error = outcomes[rank].error
    assert type(error) is kind, outcomes
    others = outcomes[:rank] + outcomes[rank + 1 :]
    text = same_error(others, PeerFailed, f"rank {rank} failed", kind.__name__, str(error))
    assert "nothing was committed" in text
    assert all(outcome.error.ranks == (rank,) for outcome in others)
    return error


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def check_readable(
    path: Path, expected: Any, assert_same: Callable[[Any, Any], None], monkeypatch: Any
) -> None:
    """That every stock reader opens a file, and that fastckpt verifies it."""
    assert_same(torch.load(path, weights_only=False), expected)
    assert_same(torch.load(path, weights_only=True), expected)
    assert_same(torch.load(path, mmap=True), expected)
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch checks each computed offset
    with torch_config.patch({"load.calculate_storage_offsets": True}):
        assert_same(torch.load(path), expected)
        assert_same(torch.load(path, mmap=True), expected)
    raw = path.read_bytes()
    for meta, tensor in zip(
        tensors_in(torch.load(path, map_location="meta")), tensors_in(expected), strict=True
    ):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            begin = meta.untyped_storage()._checkpoint_offset
            content = ctypes.string_at(storage.data_ptr(), storage.nbytes())
            assert raw[begin : begin + len(content)] == content
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert len(names) == len(set(names))
    unzip = subprocess.run(["unzip", "-tqq", path], capture_output=True, text=True)
    assert (unzip.returncode, unzip.stdout, unzip.stderr) == (0, "", "")
    assert_same(fastckpt.load(path), expected)
    assert_same(fastckpt.load(path, mmap=True), expected)


def tensors_in(obj: Any) -> Iterator[torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        yield obj
    elif isinstance(obj, dict):
        yield from itertools.chain.from_iterable(map(tensors_in, obj.values()))
    elif isinstance(obj, list | tuple):
        yield from itertools.chain.from_iterable(map(tensors_in, obj))


# --- the file


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64)


def varied(rank: int) -> Any:
    """27 MB of everything; what is small differs from rank to rank."""
    source = noise(MIB // 2, 0)
    base = noise(3 * MIB + 17, 1)
    parameter = torch.nn.Parameter(noise(4 * MIB, 2).view(torch.int32).float())
    generator = torch.Generator().manual_seed(rank)
    return {
        "dtypes": {str(dtype): source.to(dtype) for dtype in DTYPES},
        "exactly a MiB": noise(MIB, 0) > 100,
        "a byte less": noise(MIB - 1, 3),
        "aliases": [base, base, base[5:500], base[:MIB].view(1024, 1024).t()],
        "nested": OrderedDict(a=(parameter, [None, {"b": parameter[:100].detach()}]), c={}),
        "empty": [torch.empty(0), torch.empty(3, 0, 7, dtype=torch.int8)],
        "step": 7 * rank + 1,
        "random state": generator.get_state(),
        "small": torch.full((300,), float(rank)),
        "of rank": f"rank {rank}" + "," * 3000 * rank,
        "history": list(range(1000 * rank)),
    }


def small_only(rank: int) -> Any:
    return {"step": rank, "weights": [torch.full((50, 3), float(rank)) for _ in range(20)]}


def one_tensor(rank: int) -> Any:
    return noise(4 * BLOCK + 3 * MIB + 123, 0)


def two_blocks(rank: int) -> Any:
    return {"w": noise(BLOCK + 5000, 0), "rank": rank}


def nothing(rank: int) -> Any:
    return None if rank == 0 else "x" * rank


def edges(rank: int, shifts: tuple[int, ...]) -> Any:
    """Tensors whose checksum, which follows them, ends so many bytes before a block does."""
    lead = 4096 + 8
    return [noise(BLOCK - lead - shift, number) for number, shift in enumerate(shifts)]


STATES: dict[str, State] = {
    "varied": varied,
    "small only": small_only,
    "one tensor": one_tensor,
    "more ranks than blocks": two_blocks,
    "nothing": nothing,
    "edges 1": functools.partial(edges, shifts=(0, 1, 2, 3, -1)),
    "edges 2": functools.partial(edges, shifts=(-3, -4, -1, -2, 4095)),
    "edges 3": functools.partial(edges, shifts=(-5, -2, -3, -20, -4096)),
}


@pytest.mark.parametrize("name", STATES)
def test_any_number_of_ranks_writes_the_same_file(
    crew: Crew, disk: Path, assert_same: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # On which rank an edge of a block falls depends on their number; its place does not.
    numbers = (1, 3) if name.startswith("edges") else range(1, RANKS + 1)
    paths = [disk / f"{ranks}.pt" for ranks in numbers]
    for ranks, path in zip(numbers, paths, strict=True):
        outcomes = crew(save, path, STATES[name], ranks=ranks)
        all_saved(outcomes)
        assert sum(outcome.value.nbytes for outcome in outcomes) == path.stat().st_size
    assert len(set(map(sha256, paths))) == 1
    check_readable(paths[-1], STATES[name](0), assert_same, monkeypatch)
    assert len(names_in(disk)) == len(paths)


@pytest.mark.parametrize(
    "options",
    [
        {"fence": "step"},
        {"backend": "threads"},
        {"durable": False},
        {"staging_bytes": BLOCK},
        {"staging_bytes": 3 * BLOCK, "fence": "step", "backend": "threads", "durable": False},
    ],
    ids=str,
)
def test_options_do_not_change_the_file(crew: Crew, disk: Path, options: dict[str, Any]) -> None:
    all_saved(crew(save, disk / "plain.pt", varied, ranks=1))
    outcomes = crew(functools.partial(save, **options), disk / "a.pt", varied, ranks=3)
    all_saved(outcomes)
    assert sha256(disk / "a.pt") == sha256(disk / "plain.pt")
    for outcome in outcomes:
        stats = outcome.value
        limit = options.get("staging_bytes", 1 << 40)
        assert stats.staged_bytes_max <= limit
        assert stats.backend == "threads" or options.get("backend") is None
        assert stats.stall_s > 0 and stats.staged_s <= stats.committed_s


def many_small(rank: int, count: int, nbytes: int) -> Any:
    return [torch.full((nbytes,), rank, dtype=torch.uint8) for _ in range(count)]


def test_many_small_tensors(crew: Crew, disk: Path, assert_same: Any) -> None:
    """More of them than are kept behind the checksum record, which is read at once."""
    state = functools.partial(many_small, count=100, nbytes=700 << 10)
    for number, (ranks, fence) in enumerate([(1, "call"), (3, "step")]):
        path = disk / f"{number}.pt"
        all_saved(
            crew(
                functools.partial(save, options=fastckpt.SaveOptions(fence=fence)),
                path,
                state,
                ranks=ranks,
            )
        )
        assert sha256(path) == sha256(disk / "0.pt")
    assert_same(torch.load(path), state(0))
    assert_same(fastckpt.load(path), state(0))
    raw = path.read_bytes()
    assert len(raw) - torch_zip.tail_offset(raw[-1000:], len(raw)) < 65 * MIB


def exotic() -> Any:
    torch.manual_seed(0)
    ragged = [torch.ones(2), torch.ones(3)]
    return {
        "strided nested": torch.nested.nested_tensor(ragged),
        "jagged": torch.nested.nested_tensor(ragged, layout=torch.jagged),
        "lazy": torch.nn.UninitializedParameter(),
        "meta": torch.ones(3, device="meta"),
        "sparse": torch.eye(600).to_sparse(),
        "module": torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(700, 700)),
    }


def save_exotic(member: Member, path: Path) -> Outcome:
    for _ in range(member.rank):
        exotic()  # torch numbers the shapes of jagged tensors, in each process for itself
    return save(member, path, lambda _rank: exotic())


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_a_plain_storage(crew: Crew, disk: Path, assert_same: Any) -> None:
    all_saved(crew(save_exotic, disk / "a.pt", ranks=2))
    assert_same(fastckpt.load(disk / "a.pt", weights_only=False), exotic())


CAPABILITIES_VERSION = 0x20080522
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2


def obey_permissions() -> None:
    """Gives up what lets root open every file, for this thread and those it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", CAPABILITIES_VERSION, 0)
    words = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    assert libc.capget(header, words) == 0
    words[0] &= ~(1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH)
    assert libc.capset(header, words) == 0


def save_over_read_only(member: Member, path: Path) -> list[Outcome]:
    obey_permissions()
    first = save(member, path, two_blocks)
    if member.rank == 0:
        path.chmod(0o440)
    meet(member, "read-only")
    refused = attempt(lambda: path.open("r+b"))
    return [first, save(member, path, one_tensor), refused]


def test_replaced_file_was_read_only(nursery: Nursery, disk: Path) -> None:
    with nursery.crew(2) as crew:
        first, second, refused = zip(*crew(save_over_read_only, disk / "a.pt"), strict=True)
    assert all(type(outcome.error) is PermissionError for outcome in refused), "still root"
    all_saved(list(first))
    all_saved(list(second))
    assert (disk / "a.pt").stat().st_mode & 0o777 == 0o440
    assert torch.equal(torch.load(disk / "a.pt"), one_tensor(0))


class NoteModes(Recorder):
    """Keeps the permissions that files have when they are written to."""

    def __init__(self) -> None:
        super().__init__(by_engine=True)
        self.modes: set[int] = set()

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name in ("allocate", "truncate", "sync"):
            self.modes.add(Path(operation.path).stat().st_mode & 0o777)
        return real()


def test_secret_file_is_replaced_by_a_secret_file(disk: Path) -> None:
    """From the beginning: what is not yet complete may be read by nobody else either."""
    path = disk / "a.pt"
    fastckpt.save("old", path).result(WAIT_S)
    path.chmod(0o600)
    storage = NoteModes()
    with saving_through(storage):
        fastckpt.save(two_blocks(0), path).result(WAIT_S)
    assert storage.modes == {0o600} and path.stat().st_mode & 0o777 == 0o600


# --- what counts of which rank


@pytest.mark.parametrize(("ranks", "fence"), [(4, "call"), (2, "step")])
def test_what_is_small_is_the_first_ranks(
    crew: Crew, disk: Path, ranks: int, fence: str, assert_same: Any
) -> None:
    for first in (0, 1):  # overwriting, and with the longest pickle on either side
        state = functools.partial(turned, ranks=ranks, by=first)
        all_saved(
            crew(
                functools.partial(save, options=fastckpt.SaveOptions(fence=fence)),
                disk / "a.pt",
                state,
                ranks=ranks,
            )
        )
        assert_same(fastckpt.load(disk / "a.pt"), state(0))


def turned(rank: int, ranks: int, by: int) -> Any:
    return varied((rank + by * (ranks - 1)) % ranks)


def base() -> dict[str, Any]:
    return {name: noise(3 * MIB, ord(name)) for name in "abc"} | {"tiny": torch.ones(3)}


# What is otherwise on ranks that differ, and what all ranks tell of it.
MISMATCHES: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {
    "missing": (
        lambda state: {name: state[name] for name in state if name != "b"},
        ["b is missing on {}"],
    ),
    "extra": (
        lambda state: state | {"x": noise(2 * MIB, 9)},
        ["x is on {} but not on rank 0"],
    ),
    "shape": (
        lambda state: state | {"b": state["b"].view(3, -1)},
        ["b is uint8 [3, 1048576] on {} but uint8 [3145728] on rank 0"],
    ),
    "dtype": (
        lambda state: state | {"b": state["b"].view(torch.int8)},
        ["b is int8 [3145728] on {} but uint8 [3145728] on rank 0"],
    ),
    "small shape": (
        lambda state: state | {"tiny": torch.ones(4)},
        ["tiny is float32 [4] on {} but float32 [3] on rank 0"],
    ),
    "order": (
        lambda state: {name: state[name] for name in ("b", "a", "c", "tiny")},
        ["the order of the tensors on {} differs from that on rank 0"],
    ),
    "storage": (
        lambda state: state | {"b": noise(4 * MIB, 9)[: 3 * MIB]},
        ["the storage of b is data/", "4194304 bytes on {} but data/", "3145728"],
    ),
    "tied": (
        lambda state: state | {"c": state["b"][:]},
        ["the storage of c is ", "on {}"],
    ),
    "unseen": (  # the records of all tensors behind it have other names
        lambda state: {"hidden": {frozenset([torch.ones(3)])}} | state,
        ["the storage of a is data/1", "on {} but data/0", "on rank 0"],
    ),
}


def mismatch(rank: int, name: str, differing: tuple[int, ...]) -> Any:
    return MISMATCHES[name][0](base()) if rank in differing else base()


@pytest.mark.parametrize(
    ("name", "ranks", "differing", "named"),
    [
        *((name, 3, (1, 2), "ranks 1, 2") for name in MISMATCHES),
        ("storage", 2, (1,), "rank 1"),
    ],
)
def test_other_structure_is_refused_on_every_rank(
    crew: Crew,
    disk: Path,
    name: str,
    ranks: int,
    differing: tuple[int, ...],
    named: str,
) -> None:
    path = disk / "a.pt"
    states = [
        functools.partial(mismatch, name=name, differing=those) for those in ((), differing, ())
    ]
    all_saved(crew(save, path, states[0], ranks=ranks))
    before = path.read_bytes()
    words = [word.format(named) for word in MISMATCHES[name][1]]
    text = same_error(
        crew(save, path, states[1], ranks=ranks),
        RanksDisagree,
        *words,
        "nothing was committed",
        "every rank must save the same tensors",
    )
    assert "tiny" not in text or name == "small shape"
    assert path.read_bytes() == before and names_in(disk) == ["a.pt"]
    all_saved(crew(save, path, states[2], ranks=ranks))


def test_the_first_rank_may_be_the_odd_one_out(crew: Crew, disk: Path) -> None:
    state = functools.partial(mismatch, name="missing", differing=(0,))
    outcomes = crew(save, disk / "a.pt", state)
    same_error(outcomes, RanksDisagree, "b is on ranks 1, 2, 3 but not on rank 0")
    assert names_in(disk) == []


def drifting(rank: int, differing: tuple[int, ...]) -> Any:
    return {
        "steady": noise(2 * MIB, 0),
        "drifted": noise(BLOCK + 77, 10 + (rank in differing) * rank),
        "also": noise(2 * MIB, 20 + (rank == 3)),
        "step": rank,
    }


class Heard(logging.Handler):
    """Keeps what the library logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += [each.getMessage() for each in warnings_in([record])]


def save_drifting(
    member: Member, path: Path, differing: tuple[int, ...]
) -> tuple[list[Outcome], list[str], list[str]]:
    heard = Heard()
    logging.getLogger("fastckpt").addHandler(heard)
    state = functools.partial(drifting, differing=differing)
    saw = []
    outcomes = []
    for _ in range(3):
        outcomes.append(save(member, path, state))
        saw.append(sha256(path) if path.exists() else "")
    logging.getLogger("fastckpt").removeHandler(heard)
    return outcomes, heard.lines, saw


def test_other_contents_are_refused_once_then_taken_from_the_first_rank(
    nursery: Nursery, disk: Path, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = disk / "a.pt"
    fastckpt.save("old", path).result(WAIT_S)
    with nursery.crew(RANKS) as crew:
        results = crew(save_drifting, path, (1, 2))
        first, second, third = zip(*[outcomes for outcomes, _, _ in results], strict=True)
        text = same_error(list(first), RanksDisagree, "drifted", "nothing was committed")
        drifted = "the content of drifted differs: one on ranks 0, 3, another on rank 1, another on"
        also = "the content of also differs: one on ranks 0, 1, 2, another on rank 3"
        assert f"{drifted} rank 2" in text and also in text
        assert "steady" not in text and "from the next save on they are taken from rank 0" in text
        all_saved(list(second))
        all_saved(list(third))
        for rank, (_, lines, _) in enumerate(results):
            still = [line for line in lines if "with the contents of rank 0" in line]
            assert len(still) == (0 if rank else 2), "the first rank warns at each save"
            assert all(drifted in line and also in line for line in still)
            lines = [line for line in lines if line not in still]
            assert len(lines) == 2, "a warning for each tensor, once"
            assert "also differs between ranks" in lines[0]
            assert "drifted differs between ranks" in lines[1] and "rank 0" in lines[1]
        check_readable(path, drifting(0, ()), assert_same, monkeypatch)
        # Another group knows nothing of it, and finds it out for itself.
        same_error(
            crew(save, disk / "b.pt", functools.partial(drifting, differing=(1,)), ranks=2),
            RanksDisagree,
            "drifted differs: one on rank 0, another on rank 1",
        )
    assert not (disk / "b.pt").exists()


# --- fences, and several saves at a time


class Add(torch.optim.Optimizer):
    """An optimizer whose step() adds one."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1)


def train(member: Member, disk: Path, fence: str, steps: int, one_path: bool) -> list[Outcome]:
    weights = torch.nn.Parameter(torch.zeros(5 * MIB))
    optimizer = Add([weights])
    handles = []
    for step in range(steps):
        path = disk / ("a.pt" if one_path else f"{step}.pt")
        state = {"weights": weights, "step": step}
        handles.append(
            fastckpt.save(
                state, path, options=fastckpt.SaveOptions(fence=fence), group=member.group
            )
        )
        if fence == "call":
            with torch.no_grad():
                weights += 1
        else:
            optimizer.step()
    loaded = fastckpt.load(path)  # waits for the saves in flight to it
    assert bool((loaded["weights"] == steps - 1).all())
    return [attempt(lambda handle=handle: handle.result(WAIT_S)) for handle in handles]


@pytest.mark.parametrize("fence", ["call", "step"])
@pytest.mark.parametrize(("one_path", "ranks"), [(True, 2), (False, 4)])
def test_training_goes_on_while_saves_are_in_flight(
    crew: Crew, disk: Path, fence: str, one_path: bool, ranks: int
) -> None:
    steps = 5
    for outcomes in crew(train, disk, fence, steps, one_path, ranks=ranks):
        all_saved(outcomes)
    for path in disk.iterdir():
        loaded = torch.load(path)
        step = loaded["step"]
        assert path.name == ("a.pt" if one_path else f"{step}.pt")
        assert bool((loaded["weights"] == step).all())
    assert len(names_in(disk)) == (1 if one_path else steps)


def change_too_early(member: Member, path: Path) -> Outcome:
    """One rank changes a tensor, and no optimizer step waits for the save. It cannot have been
    copied: there is one block for it, and no file to write that to.
    """
    weights = torch.zeros(20 * MIB)
    options = {"fence": "step", "staging_bytes": BLOCK, "group": member.group}
    if member.rank == 0:
        member.store.wait([f"changed {path}"])
    handle = fastckpt.save({"weights": weights}, path, **gathered(**options))
    if member.rank == 1:
        weights[0] = 0
        member.store.set(f"changed {path}", b"")
    return attempt(lambda: handle.result(WAIT_S))


def test_conflict_on_one_rank(crew: Crew, disk: Path) -> None:
    outcomes = crew(change_too_early, disk / "a.pt", ranks=3)
    error = one_failed(outcomes, 1, fastckpt.StagingConflict)
    assert "weights" in str(error) and names_in(disk) == []


# --- ranks that fail, stay away or come late


class NotPicklable:
    def __reduce__(self) -> Any:
        raise ValueError("cannot be pickled")


def unpicklable(rank: int, who: int) -> Any:
    return {"w": noise(BLOCK, 0), "x": NotPicklable() if rank == who else 1}


@pytest.mark.parametrize("who", [0, 2])
def test_object_of_one_rank_cannot_be_pickled(crew: Crew, disk: Path, who: int) -> None:
    path = disk / "a.pt"
    all_saved(crew(save, path, two_blocks, ranks=3))
    before = path.read_bytes()
    outcomes = crew(save, path, functools.partial(unpicklable, who=who), ranks=3)
    error = one_failed(outcomes, who, ValueError)
    assert str(error) == "cannot be pickled"
    assert path.read_bytes() == before and names_in(disk) == ["a.pt"]
    all_saved(crew(save, path, one_tensor, ranks=3))


def come_late(member: Member, disk: Path) -> list[Outcome]:
    """Rank 0 does not call before the saves of all others have returned."""
    others = [f"returned {rank}" for rank in range(1, member.world_size)]
    if member.rank == 0:
        member.store.wait(others)
    handles = []
    for fence in ("call", "step"):
        state = varied(member.rank)
        handles.append(
            fastckpt.save(
                state,
                disk / f"{fence}.pt",
                options=fastckpt.SaveOptions(fence=fence),
                group=member.group,
            )
        )
    if member.rank:
        assert not any(handle.done() for handle in handles)
        member.store.set(f"returned {member.rank}", b"")
    return [attempt(lambda handle=handle: handle.result(WAIT_S)) for handle in handles]


def test_one_rank_is_late_and_nobody_waits_in_save(nursery: Nursery, disk: Path) -> None:
    with nursery.crew(3) as crew:
        for outcomes in crew(come_late, disk):
            all_saved(outcomes)
    assert sha256(disk / "call.pt") == sha256(disk / "step.pt")


def forget(member: Member, disk: Path) -> list[Outcome]:
    """The first save fails on all ranks, and only rank 0 asks; the others hear at the next."""
    too_long = disk / ("n" * 256)
    failed = fastckpt.save(two_blocks(member.rank), too_long, group=member.group)
    failed.wait_done()
    if member.rank == 0:
        failed.exception()
    return save_in_turn(member, disk / "b.pt", [two_blocks, one_tensor])


def test_failure_that_one_rank_did_not_ask_for_fails_the_next_save(crew: Crew, disk: Path) -> None:
    second, third = zip(*crew(forget, disk, ranks=2), strict=True)
    error = one_failed(list(second), 1, PeerFailed)
    assert str(disk / ("n" * 256)) in str(error) and "ENAMETOOLONG" in str(error)
    assert "an earlier save, to " in str(error)
    assert f"this save, to {str(disk / 'b.pt')!r}, was not begun" in str(error)
    all_saved(list(third))
    assert torch.equal(torch.load(disk / "b.pt"), one_tensor(0))


def interrupt_or_wait(member: Member, disk: Path, moment: str) -> list[Outcome]:
    """Ctrl-C on rank 1, which has begun a save that no thread has taken over yet."""
    if member.rank == 1:
        owner, name = {
            "pickling": (torch_pickle, "_pickler_of"),
            "the thread": (pipeline, "start_thread"),
        }[moment]
        real = getattr(owner, name)

        def interrupt(*_args: Any, **_options: Any) -> None:
            setattr(owner, name, real)
            raise KeyboardInterrupt

        setattr(owner, name, interrupt)
    with contextlib.suppress(KeyboardInterrupt):  # as a notebook does, which goes on
        first = save(member, disk / "a.pt", two_blocks)
        return [first, save(member, disk / "b.pt", one_tensor)]
    return [save(member, disk / "b.pt", one_tensor)]


@pytest.mark.parametrize("moment", ["pickling", "the thread"])
def test_interrupt_of_one_rank_in_save(crew: Crew, disk: Path, moment: str) -> None:
    outcomes = crew(interrupt_or_wait, disk, moment, ranks=3)
    assert [len(each) for each in outcomes] == [2, 1, 2], "the interrupt is the caller's"
    for rank in (0, 2):
        error = outcomes[rank][0].error
        assert isinstance(error, PeerFailed) and error.ranks == (1,), error
    all_saved([each[-1] for each in outcomes])
    assert names_in(disk) == ["b.pt"]


def leave_at_once(member: Member, path: Path) -> None:
    fastckpt.save(
        varied(member.rank), path, options=fastckpt.SaveOptions(fence="step"), group=member.group
    )


def test_exit_waits_for_the_save(nursery: Nursery, disk: Path) -> None:
    with nursery.crew(2, orderly=True) as crew:
        crew(leave_at_once, disk / "a.pt")
    assert names_in(disk) == ["a.pt"]
    assert fastckpt.load(disk / "a.pt")["step"] == 1


# --- storage that refuses


def test_missing_directory(crew: Crew, disk: Path) -> None:
    error = one_failed(crew(save, disk / "missing" / "a.pt", varied), 0, StorageError)
    assert error.errno == errno.ENOENT and error.op == "open"
    assert names_in(disk) == []


@pytest.mark.filesystem
@pytest.mark.parametrize("kind", ["tmpfs", "ext2"])
def test_full_disk(crew: Crew, disk: Path, kind: str) -> None:
    """ext2 allocates nothing ahead: there any rank may be the one whose write meets the end."""
    with mounted(kind, disk, 64 * MIB if kind == "tmpfs" else 0) as mount:
        path = mount / "a.pt"
        all_saved(crew(save, path, two_blocks))
        ballast = leave_free(mount, 20 * MIB)
        outcomes = crew(save, path, one_tensor)
        own = [outcome.error for outcome in outcomes if isinstance(outcome.error, StorageError)]
        assert own and all(error.errno == errno.ENOSPC for error in own)
        for outcome in outcomes:
            assert isinstance(outcome.error, StorageError | PeerFailed), outcomes
            assert any(str(error) in str(outcome.error) for error in own)
        if kind == "tmpfs":
            one_failed(outcomes, 0, StorageError)
        assert torch.load(path)["rank"] == 0
        assert names_in(mount) == sorted(["a.pt", "ballast", *lost_and_found(mount)])
        ballast.unlink()
        all_saved(crew(save, path, one_tensor))
        assert torch.equal(torch.load(path), one_tensor(0))


def lost_and_found(mount: Path) -> list[str]:
    return [name for name in ("lost+found",) if (mount / name).exists()]


saving_through = functools.partial(process_on, budget_bytes=BUDGET_BYTES)


def meet(member: Member, name: str) -> None:
    """Waits for the other ranks."""
    member.store.set(f"{name} {member.rank}", b"")
    member.store.wait([f"{name} {rank}" for rank in range(member.world_size)])


def save_with_faults(
    member: Member, path: Path, victim: int
) -> list[tuple[str, Outcome, str, list[str]]]:
    """For each operation of the victim: its name, what became of a save in which it failed, the
    file and the directory afterwards.
    """
    old = path.read_bytes()
    results = []
    recorder = Recorder()
    with saving_through(recorder):
        save(member, path, two_blocks)
    count = len(recorder.log)
    for number in itertools.count():
        meet(member, f"{victim} before {number}")
        if member.rank == victim:
            path.write_bytes(old)
            member.store.set(f"{victim} on {number}", b"" if number < count else b"over")
        if member.store.get(f"{victim} on {number}"):
            return results
        storage = FailAt(number, errno.EIO) if member.rank == victim else Recorder()
        with saving_through(storage):
            outcome = save(member, path, two_blocks)
        meet(member, f"{victim} after {number}")
        name = storage.log[number].name if member.rank == victim else ""
        results.append((name, outcome, sha256(path), names_in(path.parent)))


# A commit can do without these, as it can when one rank saves alone.
DISPENSABLE = {"lock", "open", "close", "look_again"}


@pytest.mark.parametrize("victim", [0, 1])
def test_any_operation_of_a_rank_fails(crew: Crew, disk: Path, victim: int) -> None:
    path = disk / "a.pt"
    fastckpt.save("new", path).result(WAIT_S)
    all_saved(crew(save, path, two_blocks, ranks=2))
    new = sha256(path)
    fastckpt.save("old", path).result(WAIT_S)
    old = sha256(path)
    results = crew(save_with_faults, path, victim, ranks=2)
    failed = set()
    for number in range(len(results[0])):
        (name, hurt, digest, names), (_, other, _, _) = (
            results[rank][number] for rank in (victim, 1 - victim)
        )
        assert names == ["a.pt"], name
        if hurt.error is None:
            looked = number == victim == 0  # the call's own: whether there is the directory
            assert looked or name in DISPENSABLE, name
            assert other.error is None and digest == new
            continue
        failed.add(name)
        assert type(hurt.error) is StorageError and hurt.error.errno == errno.EIO, name
        assert type(other.error) is PeerFailed and str(hurt.error) in str(other.error), name
        # The directory is synced when the file has its name; whether it keeps that, nobody knows.
        visible = name == "sync_directory"
        assert digest == (new if visible else old), name
        assert hurt.error.visible == other.error.visible == visible, name
    wanted = {"write", "sync"}
    wanted |= {"create", "allocate", "rename", "sync_directory"} if victim == 0 else {"open write"}
    assert wanted <= failed, "no save does this"


# --- network file systems


def save_on_cifs(member: Member, path: Path) -> Outcome:
    double = Cifs()
    with double.mounted(), saving_through(double):
        return save(member, path, one_tensor)


def test_ranks_write_one_file_on_cifs(crew: Crew, disk: Path) -> None:
    """Were the temporary locked, the other rank could not write to it."""
    for _ in range(2):
        all_saved(crew(save_on_cifs, disk / "a.pt", ranks=2))
    assert names_in(disk) == ["a.pt"]
    assert torch.equal(fastckpt.load(disk / "a.pt"), one_tensor(0))


def load_what_was_absent(member: Member, path: Path, openings: int) -> Outcome:
    """Rank 0 saves it alone; rank 1 has looked for it before."""
    double = RemembersAbsence(path, openings if member.rank else 0)
    with double.mounted(), saving_through(double):
        if member.rank == 0:
            fastckpt.save(two_blocks(0), path).result(WAIT_S)
        meet(member, f"saved {openings}")
        return load(member, path)


def save_what_was_absent(member: Member, path: Path) -> Outcome:
    """Each rank loads it alone as soon as it has been saved together."""
    double = RemembersAbsence(path, 1 if member.rank else 0)
    with double.mounted(), saving_through(double):
        outcome = save(member, path, two_blocks)
        return outcome if outcome.error else attempt(lambda: digest_of(fastckpt.load(path)))


def test_a_rank_that_looked_too_early_finds_what_was_saved(crew: Crew, disk: Path) -> None:
    for openings in (1, 3):
        path = disk / f"{openings}.pt"
        all_saved(crew(load_what_was_absent, path, openings, ranks=2))
    all_saved(crew(save_what_was_absent, disk / "a.pt", ranks=2))


# --- ranks that are killed


def save_and_die(member: Member, path: Path, victim: int, name: str) -> Outcome:
    one_tensor(member.rank)  # the noise takes a new process a while
    member.make_groups(range(1, 3))  # for those who survive the first rank
    meet(member, "begun")
    if member.rank != victim:
        return save(member, path, one_tensor, options=fastckpt.SaveOptions(timeout_s=10))
    with saving_through(Deadly.at(name)):
        return save(member, path, one_tensor, options=fastckpt.SaveOptions(timeout_s=10))


def save_as_survivors(member: Member, path: Path, begin: int, end: int) -> Outcome:
    group = member.group_of(begin, end)
    return attempt(lambda: fastckpt.save("next", path, group=group).result(WAIT_S))


KILLS = [
    (0, "rename"),
    (0, "allocate"),
    (0, "sync"),
    (2, "open write"),
    (2, "sync"),
    (0, "sync_directory"),
]


def test_killed_ranks(nursery: Nursery, disk: Path, storm: Storm) -> None:
    """Each in a job of its own, all of them at the same time; some of them in `make test`."""
    kills = storm.some(KILLS, 4)
    with contextlib.ExitStack() as stack:
        crews = []
        for victim, name in kills:
            directory = disk / f"{victim} {name}"
            directory.mkdir()
            fastckpt.save("old", directory / "a.pt").result(WAIT_S)
            crews.append(stack.enter_context(nursery.crew(3)))
            crews[-1].begin(save_and_die, directory / "a.pt", victim, name)
        for crew, (victim, name) in zip(crews, kills, strict=True):
            check_killed(crew, disk / f"{victim} {name}", victim, name)


def check_killed(crew: Crew, directory: Path, victim: int, name: str) -> None:
    path = directory / "a.pt"
    outcomes = crew.end()
    assert isinstance(outcomes.pop(victim), RankDied), "it was not killed"
    text = same_error(outcomes, PeerFailed)
    if name in ("rename", "sync_directory"):
        assert "may or may not be visible" in text
        assert all(its.error.visible and its.error.in_doubt for its in outcomes)
    else:
        assert f"rank {victim}" in text and "nothing was committed" in text
        assert not any(its.error.visible for its in outcomes)
    loaded = fastckpt.load(path)
    if name == "sync_directory":
        assert torch.equal(loaded, one_tensor(0))
    else:
        assert loaded == "old"
    begin, end = (1, 3) if victim == 0 else (0, 2)
    let_go(directory)
    all_saved(crew(save_as_survivors, path, begin, end, ranks=range(begin, end)))
    assert names_in(directory) == ["a.pt"] and fastckpt.load(path) == "next"


# --- groups and arguments


def save_in_a_part(member: Member, path: Path) -> Outcome:
    member.make_groups(range(1, 3))
    group = member.group_of(1, 3)
    return attempt(
        lambda: fastckpt.save(varied(member.rank), path, group=group).result(WAIT_S) and None
    )


def test_group_of_some_ranks(crew: Crew, disk: Path, assert_same: Any) -> None:
    outcomes = crew(save_in_a_part, disk / "a.pt")
    all_saved(outcomes[1:3])
    assert_same(fastckpt.load(disk / "a.pt"), varied(1))
    for outcome in (outcomes[0], outcomes[3]):
        assert type(outcome.error) is ValueError and "not one of its ranks" in str(outcome.error)


def ask_wrongly(member: Member, path: Path) -> dict[str, Outcome]:
    group, state = member.group, small_only(0)
    stock = {"_use_new_zipfile_serialization": False}
    outcomes = {
        "file-like": attempt(lambda: fastckpt.save(state, io.BytesIO(), group=group)),
        "device": attempt(lambda: fastckpt.save(state, "/dev/null", group=group)),
        "legacy": attempt(lambda: fastckpt.save(state, path, group=group, **stock)),
        "timeout": attempt(
            lambda: fastckpt.save(
                state, path, group=group, options=fastckpt.SaveOptions(timeout_s=0)
            )
        ),
        "load file-like": attempt(lambda: fastckpt.load(io.BytesIO(), group=group)),
        "load mmap": attempt(lambda: fastckpt.load(path, mmap=True, group=group)),
    }
    with torch.serialization.skip_data():
        outcomes["skip data"] = attempt(lambda: fastckpt.save(state, path, group=group))
    return outcomes


def test_wrong_arguments(crew: Crew, disk: Path) -> None:
    for outcomes in crew(ask_wrongly, disk / "a.pt", ranks=2):
        assert {type(outcome.error) for outcome in outcomes.values()} == {ValueError}
        assert "timeout_s" in str(outcomes.pop("timeout").error)
        assert all("group" in str(outcome.error) for outcome in outcomes.values())
    assert names_in(disk) == []
    all_saved(crew(save, disk / "a.pt", small_only, ranks=2))


def save_sharded(member: Member, path: Path) -> Outcome:
    mesh = init_device_mesh("cpu", (member.world_size,))
    part = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
    return save(member, path, lambda _rank: {"model": part})


def save_part_alone(member: Member, path: Path) -> list[str]:
    """The warnings of two saves by one rank of what each has a part of, and of what each has."""
    mesh, told = init_device_mesh("cpu", (member.world_size,)), Told()
    whole = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
    part = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
    state = {"c": part.clone(), "a": whole, "b": part}
    logging.getLogger("fastckpt").addHandler(told)
    if member.rank == 0:
        for saved in ({"a": whole}, state, state):
            fastckpt.save(saved, path).result(WAIT_S)
    logging.getLogger("fastckpt").removeHandler(told)
    return told.lines


def test_sharded_tensors_are_refused(nursery: Nursery, disk: Path) -> None:
    with nursery.crew(2) as crew:
        outcomes = crew(save_sharded, disk / "a.pt")
        (told,), none = crew(save_part_alone, disk / "part.pt")
    assert "only this rank's part of the DTensor b" in told and none == []
    (disk / "part.pt").unlink()
    same_error(outcomes, TypeError, "model is a DTensor", "fastckpt.Checkpointer")
    assert names_in(disk) == []


# --- loading together


@pytest.fixture(scope="module")
def files(nursery: Nursery, real_disk: Path) -> Iterator[dict[str, Path]]:
    """The same object as several writers wrote it."""
    directory = real_disk / "group-load"
    directory.mkdir()
    files = {name: directory / f"{name}.pt" for name in ("together", "alone", "torch", "legacy")}
    all_saved(nursery.lasting_crew(RANKS)(save, files["together"], varied, ranks=3))
    fastckpt.save(varied(0), files["alone"]).result(WAIT_S)
    torch.save(varied(0), files["torch"])
    torch.save(varied(0), files["legacy"], _use_new_zipfile_serialization=False)
    yield files
    for path in files.values():
        path.unlink()
    directory.rmdir()


@pytest.mark.parametrize("writer", ["together", "alone", "torch", "legacy"])
def test_loading_together_is_loading(crew: Crew, files: dict[str, Path], writer: str) -> None:
    path = files[writer]
    expected = digest_of(fastckpt.load(path))
    for ranks in range(1, RANKS + 1) if writer == "together" else (3,):
        outcomes = crew(load, path, ranks=ranks)
        all_saved(outcomes)
        assert {outcome.value for outcome in outcomes} == {expected}
    for options in ({"weights_only": False}, {"verify": False}, {"map_location": "cpu"}):
        outcomes = crew(functools.partial(load, **options), path, ranks=2)
        all_saved(outcomes)
        assert {outcome.value for outcome in outcomes} == {expected}


def load_to_meta(member: Member, path: Path) -> list[Any]:
    """A rank that needs no bytes and ranks that need all of them."""
    location = "meta" if member.rank == 1 else None
    loaded = fastckpt.load(path, map_location=location, group=member.group)
    return [[(tensor.device.type, tensor.shape) for tensor in tensors_in(loaded)]]


def test_ranks_may_need_different_bytes(crew: Crew, files: dict[str, Path]) -> None:
    (first,), (second,), (third,) = crew(load_to_meta, files["together"], ranks=3)
    assert first == third and [shape for _, shape in second] == [shape for _, shape in first]
    assert {device for device, _ in second} == {"meta"}


@pytest.mark.parametrize(("block", "ranks"), [(0, 2), (3, 4)])
def test_damage_that_one_rank_finds_is_told_by_all(
    crew: Crew, disk: Path, block: int, ranks: int
) -> None:
    path = disk / "a.pt"
    all_saved(crew(save, path, one_tensor, ranks=2))
    flip(path, block * BLOCK + 5000)
    outcomes = crew(load, path, ranks=ranks)
    text = same_error(outcomes, CorruptCheckpoint, str(path), "data/0", f"{block * BLOCK} to")
    assert "nothing was loaded" in text
    all_saved(crew(save, path, two_blocks, ranks=ranks))
    all_saved(crew(load, path, ranks=ranks))


def test_truncated_and_missing_file(crew: Crew, files: dict[str, Path], disk: Path) -> None:
    path = disk / "a.pt"
    path.write_bytes(files["together"].read_bytes()[:-5000])
    same_error(crew(load, path), CorruptCheckpoint, "truncated", str(path))
    same_error(crew(load, disk / "nothing.pt"), FileNotFoundError, "nothing.pt")


class Elsewhere(Storage):
    """Whoever opens a path gets another file."""

    def __init__(self, other: Path) -> None:
        self._other = other

    def open(self, file: str | int, how: Opening = "read") -> int:
        return super().open(str(self._other))


def load_another(member: Member, path: Path, other: Path) -> Outcome:
    if member.rank != 1:
        return load(member, path)
    with saving_through(Elsewhere(other)):
        return load(member, path)


def test_ranks_find_different_files(crew: Crew, files: dict[str, Path], disk: Path) -> None:
    other = disk / "other.pt"
    fastckpt.save(one_tensor(0), other).result(WAIT_S)
    for another in (other, files["torch"]):
        outcomes = crew(load_another, files["together"], another, ranks=3)
        same_error(outcomes, RanksDisagree, str(files["together"]), "ranks [1]", "ranks [0, 2]")
    all_saved(crew(load, files["together"], ranks=3))


class Fragile:
    """Cannot be restored where `breaks` is set."""

    breaks = False

    def __setstate__(self, state: Any) -> None:
        if Fragile.breaks:
            raise ZeroDivisionError("this rank cannot")

    def __getstate__(self) -> Any:
        return {"a": 1}


def load_fragile(member: Member, path: Path, who: int) -> Outcome:
    Fragile.breaks = member.rank == who
    outcome = attempt(lambda: len(fastckpt.load(path, weights_only=False, group=member.group)))
    gc.collect()
    return outcome


@pytest.mark.parametrize(("who", "first"), [(0, True), (1, True), (1, False)])
def test_unpickling_fails_on_one_rank(crew: Crew, disk: Path, who: int, first: bool) -> None:
    items = [noise(10 * BLOCK, 0), noise(BLOCK, 1)]
    fastckpt.save([Fragile(), *items] if first else [*items, Fragile()], disk / "a.pt").result()
    outcomes = crew(load_fragile, disk / "a.pt", who, ranks=3)
    assert type(outcomes.pop(who).error) is ZeroDivisionError
    for outcome in outcomes:
        if first:
            assert type(outcome.error) is PeerFailed and outcome.error.ranks == (who,)
            assert f"rank {who} failed" in str(outcome.error)
        else:
            assert outcome.error is None and outcome.value == 3
    all_saved(crew(load_fragile, disk / "a.pt", -1, ranks=3))


def load_and_log(member: Member, path: Path) -> set[int]:
    """Numbers of the blocks that this rank read."""
    recorder = Recorder()
    with saving_through(recorder):
        loaded = fastckpt.load(path, group=member.group)
    assert torch.equal(loaded, one_tensor(0))
    return {operation.args[0] // BLOCK for operation in recorder.log if operation.name == "read"}


def test_each_rank_reads_a_share(crew: Crew, disk: Path) -> None:
    """Though torch looks at the end of the file first, where the last block may begin."""
    all_saved(crew(save, disk / "a.pt", one_tensor))
    for ranks in (2, 4):
        read = crew(load_and_log, disk / "a.pt", ranks=ranks)
        assert set().union(*read) == set(range(5))
        for rank, blocks in enumerate(read):
            assert blocks <= {*range(rank, 5, ranks), 4}


class DieReading(Recorder):
    """The process is killed before it reads a block, so the others never have those that are its
    own. Killed later, it might have sent them all.
    """

    def attempt(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


class DieOpening(Recorder):
    """The process is killed before it opens a file."""

    def open(self, file: str | int, how: Opening = "read") -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


IMPATIENT_S = 6.0


def load_and_die(
    member: Member, path: Path, victim: int, storage: Callable[[], Storage]
) -> Outcome:
    # What waits for blocks obeys that, while gloo's loop spins on what the dead rank has closed.
    impatient = dist.new_group(timeout=timedelta(seconds=IMPATIENT_S))
    member.store.set(f"connected {member.rank}", b"")  # or the victim dies while others connect
    member.store.wait([f"connected {rank}" for rank in range(member.world_size)])
    options = {"group": impatient, "timeout_s": IMPATIENT_S}
    if member.rank == victim:
        with saving_through(storage()):
            return attempt(lambda: fastckpt.load(path, **options))
    return attempt(lambda: fastckpt.load(path, **options) and None)


def test_ranks_are_killed_while_they_load(
    nursery: Nursery, files: dict[str, Path], storm: Storm
) -> None:
    """Each in a job of its own, all of them at the same time; some of them in `make test`."""
    kills = [(0, DieOpening), (0, DieReading), (2, DieOpening), (2, DieReading)]
    with contextlib.ExitStack() as stack:
        jobs = []
        for victim, storage in storm.some(kills, 2):
            jobs.append((victim, stack.enter_context(nursery.crew(3))))
            jobs[-1][1].begin(load_and_die, files["alone"], victim, storage)
        for victim, crew in jobs:
            outcomes = crew.end()
            assert isinstance(outcomes.pop(victim), RankDied), "it was not killed"
            assert {type(outcome.error) for outcome in outcomes} == {PeerFailed}, outcomes
