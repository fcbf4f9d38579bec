"""What of the Megatron integration needs no ranks: arithmetic of buckets, division of work, and
names of iterations.

Responsible for properties over all shapes, and for what is refused.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dist_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch.distributed.checkpoint.planner import SavePlan

from fastckpt import CorruptCheckpoint, IncompatibleCheckpoint, SaveHandle, StorageError
from fastckpt.cli import main
from fastckpt.directories import iterations
from fastckpt.directories.iterations import Retention
from fastckpt.integrations import dcp, megatron
from fastckpt.integrations.megatron import (
    load,
    partial_reads,
    save_planner,
    saves,
    strategies,
)
from fastckpt.integrations.megatron import optimizer as optimizers
from fastckpt.integrations.megatron.reshard import (
    Catalog,
    Piece,
    Runs,
    Uncovered,
    common_runs,
    split_at,
)
from fastckpt.integrations.megatron.stored_buckets import _scatter
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle
from fastckpt.storage.atomic import DEAD_AFTER_S, temporary_path
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import Delay, Operation, Recorder, process_on
from tests.kit.noise import flip
from tests.kit.steps import WAIT_S
from tests.kit.storm import Chance

# Buckets.


def grid(draw: Callable[[Any], Any], shape: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Boxes that tile a tensor: (offset, shape)."""
    axes = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3)) if size > 1 else set()
        cuts = [0, *sorted(inner), size]
        axes.append(list(itertools.pairwise(cuts)))
    return [
        (tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*axes)
    ]


@st.composite
def bucketed(draw: Any) -> tuple[dict[str, list[Piece]], dict[str, np.ndarray], Any]:
    """Tensors cut into boxes that are strewn over 1-D arrays with padding between them; some
    boxes lie there transposed.
    """
    tensors: dict[str, np.ndarray] = {}
    arrays: dict[str, list[Piece]] = {}
    contents: dict[str, list[np.ndarray]] = {}
    for number in range(draw(st.integers(1, 2))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        values = np.arange(np.prod(shape)).reshape(shape) + 1000 * number
        tensors[f"t{number}"] = values
        for offset, size in grid(draw, shape):
            name = draw(st.sampled_from(["a", "b", "c"]))
            held = contents.setdefault(name, [])
            held.append(np.full(draw(st.integers(0, 3)), -1))
            start = sum(map(len, held))
            box = values[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
            order = draw(st.permutations(range(len(shape))))
            held.append(box.transpose(order).ravel())
            strides = [0] * len(shape)
            step = 1
            for axis in reversed(order):
                strides[axis] = step
                step *= size[axis]
            piece = Piece(f"t{number}", offset, size, start, tuple(strides))
            arrays.setdefault(name, []).append(piece)
    return arrays, {name: np.concatenate(held) for name, held in contents.items()}, tensors


@settings(deadline=None, max_examples=Chance.examples(25))
@given(bucketed(), st.data())
def test_any_range_of_any_box_is_found(stored: Any, data: st.DataObject) -> None:
    arrays, contents, tensors = stored
    catalog = Catalog(arrays)
    for key, values in tensors.items():
        for offset, size in grid(data.draw, values.shape):
            box = values[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
            strides = tuple(s // box.itemsize for s in np.zeros(size, box.dtype).strides)
            piece = Piece(key, offset, size, 0, strides)
            start = data.draw(st.integers(0, box.size - 1))
            stop = data.draw(st.integers(start + 1, box.size))
            found = np.full(stop - start, -2)
            scattered = torch.full((stop - start + 1,), -2)[1:]  # not where its storage begins
            for name, runs in catalog.runs([piece], start, stop).items():
                assert (np.diff(runs.source) > 0).all()
                for source, target, length in zip(
                    runs.source, runs.target, runs.length, strict=True
                ):
                    found[target : target + length] = contents[name][source : source + length]
                for span in runs.spans():
                    base, end = span.source[0], span.source[-1] + span.length[-1]
                    assert end - base <= 5 * span.size
                    _scatter(torch.from_numpy(contents[name][base:end].copy()), span, scattered)
            assert (found == box.ravel()[start:stop]).all()
            assert (scattered.numpy() == found).all()


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_runs_are_cut_where_fragments_end(sizes: list[int], data: st.DataObject) -> None:
    starts = np.cumsum([0, *sizes[:-1]])
    total = sum(sizes)
    source = data.draw(st.integers(0, total - 1))
    length = data.draw(st.integers(1, total - source))
    cuts = split_at(Runs.one(source, 5, length), starts, np.array(sizes))
    whole = [(starts[n] + at + i, to + i) for n, at, to, size in cuts for i in range(size)]
    assert whole == [(source + i, 5 + i) for i in range(length)]
    assert all(at + size <= sizes[number] for number, at, _, size in cuts)


def test_rows_of_equal_width_are_one_run() -> None:
    source = Piece("w", (0, 0), (64, 8), 100, (8, 1))
    runs = common_runs(source, Piece("w", (16, 0), (32, 8), 0, (8, 1)))
    assert runs is not None
    assert [a.tolist() for a in (runs.source, runs.target, runs.length)] == [[228], [0], [256]]


def test_replicas_are_read_once_and_holes_are_named() -> None:
    piece = Piece("w", (0,), (8,), 0, (1,))
    catalog = Catalog({"first": [piece], "second": [piece.moved(4)]})
    assert list(catalog.runs([piece], 0, 8)) == ["first"]
    half = Catalog({"first": [Piece("w", (0,), (4,), 0, (1,))]})
    with pytest.raises(Uncovered, match=r"'w': 4 elements are stored, but 8 are needed"):
        half.runs([piece], 0, 8)
    assert half.runs([piece], 0, 8, partial=True)["first"].size == 4
    twice = Catalog({"a": [piece], "b": [Piece("w", (2,), (4,), 0, (1,))]})
    with pytest.raises(Uncovered, match="12 elements"):
        twice.runs([piece], 0, 8)
    with pytest.raises(Uncovered):
        split_at(Runs.one(3, 0, 4), np.array([0]), np.array([5]))


def test_what_cuts_a_parameter_is_understood_and_other_things_refused_by_name() -> None:
    def halves(key: str, data: torch.Tensor, *_: Any) -> list[ShardedTensor]:
        parts = enumerate(data.chunk(2, dim=1))
        return [ShardedTensor.from_rank_offsets(key, part, (1, at, 2)) for at, part in parts]

    param = torch.zeros(4, 6)
    cut = ShardedTensorFactory("gate", param, halves, torch.cat)
    pieces = optimizers._pieces(param, {param: cut})
    assert pieces == [
        Piece("gate", (0, 0), (4, 3), 0, (6, 1)),
        Piece("gate", (0, 3), (4, 3), 3, (6, 1)),
    ]
    copied = ShardedTensorFactory("gate", param, lambda k, t, *a: halves(k, t + 1, *a), torch.cat)
    with pytest.raises(IncompatibleCheckpoint, match="'gate' is saved by a factory"):
        optimizers._pieces(param, {param: copied})


@pytest.mark.parametrize("record", [("k", [0], [1, 2], 0, [1]), ("k", [0])])
def test_a_broken_record_of_a_map_is_refused(record: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Piece.of(record)


# DividingSavePlanner.


def offer(*shards: ShardedTensor, objects: tuple[str, ...] = ()) -> SavePlan:
    planner = save_planner.DividingSavePlanner()
    held: dict[Any, Any] = {(shard.key, shard.global_offset): shard for shard in shards}
    planner.set_up_planner(held | {key: io.BytesIO(b"x") for key in objects})
    return planner.create_local_plan()


def shard(key: str, rows: int, columns: int, at: int = 0, of: int = 1) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(rows, columns), (0, at, of))


@settings(deadline=None, max_examples=Chance.examples(8))
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 700), st.integers(1, 700)), min_size=1, max_size=6),
)
def test_what_all_hold_is_divided_evenly_and_covered(ranks: int, shapes: Any) -> None:
    shards = [shard(f"k{number}", *shape) for number, shape in enumerate(shapes)]
    plans, metadata = save_planner.divide([offer(*shards) for _ in range(ranks)])
    covered = {s.key: torch.zeros(s.global_shape, dtype=torch.int) for s in shards}
    sizes = []
    for plan in plans:
        sizes.append(0)
        for item in plan.items:
            chunk = item.tensor_data.chunk
            box = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            covered[item.index.fqn][box] += 1
            sizes[-1] += 4 * chunk.sizes.numel()
            its = metadata.state_dict_metadata[item.index.fqn].chunks[item.index.index]
            assert its == chunk
    assert all((each == 1).all() for each in covered.values())
    assert max(sizes) - min(sizes) <= save_planner.CUT_BYTES_MIN + 4 * 700 * len(shapes)


def flat(key: str, size: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(size))


def test_states_of_a_parameter_are_written_in_turns() -> None:
    size = 3 * save_planner.TURN_BYTES_MIN // 4  # float32: three turns
    shards = [flat("param", size), flat("exp_avg", size), flat("small", 9), shard("w", 2, size)]
    ((plan,), metadata) = save_planner.divide([offer(*shards)])
    third = size // 3
    assert [(item.index.fqn, tuple(item.index.offset)) for item in plan.items] == [
        *((key, (third * turn,)) for turn in range(3) for key in ("param", "exp_avg")),
        ("small", (0,)),
        ("w", (0, 0)),
    ]
    chunks = metadata.state_dict_metadata["exp_avg"].chunks
    assert [tuple(chunk.sizes) for chunk in chunks] == [(third,)] * 3
    many = [flat(key, 400 * save_planner.TURN_BYTES_MIN // 4) for key in ("param", "exp_avg")]
    ((plan,), _) = save_planner.divide([offer(*many)])
    assert len(plan.items) <= save_planner.TURNS_MAX + 2


def test_objects_are_read_without_their_block_and_verified(tmp_path: Path) -> None:
    state = {"w": torch.ones(1 << 20), "o": {"step": 7}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    metadata = dcp.Reader(tmp_path).read_metadata()
    (info,) = [info for key, info in metadata.storage_data.items() if key.fqn == "o.step"]
    path = tmp_path / info.relative_path
    counted: list[int] = []
    storage = pipeline.current().storage
    read_at = storage.read_at

    def noted(fd: int, nbytes: int, offset: int) -> bytes:
        counted.append(nbytes)
        return read_at(fd, nbytes, offset)

    with (
        mock.patch.object(storage, "read_at", noted),
        mock.patch.object(pipeline.current().staging, "read", side_effect=AssertionError),
    ):
        (content,) = partial_reads.read_objects(str(tmp_path), ["o.step"]).values()
    assert partial_reads.unpickled(content, "o.step") == 7
    assert sum(counted) < 1 << 16
    flip(path, info.offset + info.length // 2)
    with pytest.raises(CorruptCheckpoint, match=r"CRC-32 mismatch in bytes .* in 'o.step'"):
        partial_reads.read_objects(str(tmp_path), ["o.step"])


def test_what_does_not_fit_together_is_refused() -> None:
    half, other = shard("w", 4, 4, 0, 2), shard("w", 4, 4, 1, 2)
    save_planner.divide([offer(half), offer(other)])
    with pytest.raises(IncompatibleCheckpoint, match="hold 16 elements of 'w', which has 32"):
        save_planner.divide([offer(half), offer(half)])
    with pytest.raises(IncompatibleCheckpoint, match=r"'w' is \(8, 4\) .* \(9, 4\)"):
        save_planner.divide([offer(half), offer(ShardedTensor(*_uneven()))])
    shape = torch.zeros(4), torch.float32, (4,), (8,)
    shifted = [ShardedTensor("v", *shape, (begin,), None) for begin in (0, 2)]
    with pytest.raises(IncompatibleCheckpoint, match="'v', which has 8, so shards overlap or are"):
        save_planner.divide(
            [offer(each) for each in shifted]
        )  # as many elements as there should be
    with pytest.raises(IncompatibleCheckpoint, match="both an object and a tensor"):
        save_planner.divide([offer(half, other), offer(objects=("w",))])


def _uneven() -> Any:
    return "w", torch.zeros(4, 4), torch.float32, (4, 4), (9, 4), (4, 0), None


def test_only_data_parallel_replicas_share_the_work() -> None:
    assert save_planner.may_write((0, 0, 3)) and save_planner.may_write(2)
    assert not save_planner.may_write((0, 1, 0)) and not save_planner.may_write((1, 0, 0))


# Iterations.


def complete_in(root: str) -> list[int]:
    return sorted(number for number, _path in iterations.candidates(root))


def test_retention_spares_links_the_newest_and_what_is_newer(tmp_path: Path) -> None:
    for number in range(1, 8):
        (tmp_path / f"iter_{number:07d}").mkdir()
        if number not in (2, 7):
            (tmp_path / f"iter_{number:07d}" / ".metadata").touch()
    elsewhere = tmp_path / "elsewhere"
    os.rename(tmp_path / "iter_0000003", elsewhere)
    os.symlink(elsewhere, tmp_path / "iter_0000003")
    assert iterations.retain(str(tmp_path), 6, Retention(2, 4)) == [1, 2]
    assert complete_in(str(tmp_path)) == [3, 4, 5, 6]
    assert iterations.retain(str(tmp_path), 6, Retention(1), {str(tmp_path / "iter_0000004")}) == [
        5
    ]
    assert (tmp_path / "iter_0000007").is_dir()


@pytest.mark.parametrize(
    ("names", "goes"),
    [
        (["__0_0.distcp", "common.pt", "metadata.json", ".metadata.tmp"], True),
        ([os.path.basename(temporary_path("common.pt"))], False),
        ([os.path.basename(temporary_path("a")).replace(f"-{os.getpid()}-", "-1-")], True),
        (["mp_rank_00/model_optim_rng.pt"], False),  # of the format "torch"
        (["common.pt", "metadata.json", "decoder.weight/.zarray"], False),
        (["__0_0.distcp", "thesis.txt"], False),
    ],
)
def test_retention_removes_of_incomplete_iterations_only_what_saves_leave(
    tmp_path: Path, names: list[str], goes: bool
) -> None:
    """What goes or stays does not count as one of the last."""
    for name in names:
        path = tmp_path / "iter_0000003" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (0, time.time() - DEAD_AFTER_S))
    for number in (1, 2, 4):
        (tmp_path / f"iter_{number:07d}").mkdir()
        (tmp_path / f"iter_{number:07d}" / ".metadata").touch()
    assert iterations.retain(str(tmp_path), 4, Retention(2)) == ([1, 3] if goes else [1])
    assert complete_in(str(tmp_path)) == [2, 4]


class NoSync(Recorder):
    """Directories cannot be synced once a file was renamed."""

    def perform(self, number: int, operation: Operation, real: Callable[[], Any]) -> Any:
        if operation.name == "sync_directory" and self.numbers_of("rename"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real()


def test_a_tracker_that_is_perhaps_not_durable(tmp_path: Path) -> None:
    """A crash may bring back what it named: that iteration stays until a later one is named."""
    root, run = str(tmp_path), saves._Run(str(tmp_path))
    for number in (1, 2, 3):
        (tmp_path / iterations.directory_name(number)).mkdir()
        (tmp_path / iterations.directory_name(number) / ".metadata").touch()
    told = r"sync directory .*iteration 2 is committed, but .* names it, but perhaps not durably"
    for number, storage in ((1, Recorder()), (2, NoSync()), (3, Recorder())):
        fails = pytest.raises(StorageError, match=told) if number == 2 else nullcontext()
        with process_on(storage):
            with fails:
                run.committed(number)
            run.retain(number, Retention(1))
        assert iterations.tracked(root) == number
        left = {1: [1, 2, 3], 2: [1, 2, 3], 3: [3]}[number]
        assert complete_in(root) == left


class NoTracker(Recorder):
    """The tracker cannot be replaced."""

    def perform(self, number: int, operation: Operation, real: Callable[[], Any]) -> Any:
        if operation.name == "rename" and iterations.TRACKER in operation.path:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real()


def test_a_save_whose_tracker_does_not_move_fails_and_stays(tmp_path: Path) -> None:
    """A restart begins with what the tracker names: nobody is told that this one is kept for it."""
    root, run = str(tmp_path), megatron.Saves()
    rows = ShardedTensor.from_rank_offsets("rows", torch.ones(4, 2), (0, 0, 1))

    def begin(number: int) -> SaveHandle:
        path = os.path.join(root, iterations.directory_name(number))
        begun = partial(megatron.SaveStrategy().begin, {"rows": rows}, path, b"common")
        return run.begin(root, number, Retention(1), begun)

    begin(1).result(WAIT_S)
    with process_on(NoTracker()):
        handle = begin(2)
        with pytest.raises(StorageError, match=r"committed, but .* does not name it") as told:
            handle.result(WAIT_S)
        assert told.value.visible and told.value.errno == errno.EDQUOT
        run.wait()
    assert iterations.tracked(root) == 1 and complete_in(root) == [1, 2]


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1)])
def test_iterations_commit_in_the_order_of_their_saves(
    tmp_path: Path, numbers: tuple[int, int]
) -> None:
    """The tracker names the one that was begun last, and older ones are removed."""
    root, gate, run = str(tmp_path), threading.Event(), megatron.Saves()
    storage, rows = Delay("sync", gate), torch.ones(4, 2)
    state = {"rows": ShardedTensor.from_rank_offsets("rows", rows, (0, 0, 1))}

    def begin(number: int) -> SaveHandle:
        path = os.path.join(root, iterations.directory_name(number))
        strategy, retention = megatron.SaveStrategy(), Retention(1)
        return run.begin(
            root, number, retention, lambda after: strategy.begin(state, path, b"common", after)
        )

    assert run.is_first(root)
    with process_on(storage):
        first = begin(numbers[0])
        assert storage.reached.wait(WAIT_S)  # before that the second might be the one that waits
        second = begin(numbers[1])
        second.wait_staged(WAIT_S)
        assert not (run.is_first(root) or first.done() or second.done())
        assert complete_in(root) == []
        gate.set()
        run.wait()
    assert iterations.tracked(root) == numbers[1]
    assert complete_in(root) == ([2] if numbers == (1, 2) else [1, 2])


def begun(
    root: Path,
    number: int,
    value: float,
    retention: Retention | None = None,
    common: bytes = b"common",
) -> SaveHandle:
    """A save by a job of its own."""
    path = str(root / iterations.directory_name(number))
    state = {"rows": ShardedTensor.from_rank_offsets("rows", torch.full((4, 2), value), (0, 0, 1))}
    return megatron.Saves().begin(
        str(root),
        number,
        retention or Retention(),
        lambda after: megatron.SaveStrategy().begin(state, path, common, after),
    )


def test_verify_compares_all_of_an_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = io.BytesIO()
    torch.save({"iteration": 1}, content)
    begun(tmp_path, 1, 1.0, common=content.getvalue()).result(WAIT_S)
    common = tmp_path / iterations.directory_name(1) / iterations.COMMON
    assert main(["verify", str(tmp_path)]) == main(["verify", str(common)]) == 0
    content.seek(0)
    torch.save({"iteration": 2}, content)
    common.write_bytes(content.getvalue())  # of another save, whole by itself
    capsys.readouterr()
    assert main(["verify", str(tmp_path)]) == main(["verify", str(common)]) == 1
    assert (
        f"{str(common)!r} is damaged, or belongs to another save: its CRC-32"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("number", [1, 2])
def test_what_another_job_is_saving_stays(number: int, tmp_path: Path) -> None:
    """Another iteration of it is no debris; of one iteration that stays which commits first."""
    gate, error = threading.Event(), None
    with process_on(storage := Delay("sync", gate)):
        theirs = begun(tmp_path, 1, 1.0)
        assert storage.reached.wait(WAIT_S)
        with process_on(Storage()):
            begun(tmp_path, number, 2.0, Retention(1)).result(WAIT_S)
            pipeline.current().drain()
        gate.set()
        error = theirs.exception(WAIT_S)
    assert complete_in(str(tmp_path)) == sorted({1, number})
    assert (str(error) if error else "").startswith("another job saved to") == (number == 1)
    path = tmp_path / iterations.directory_name(1)
    rows = {"rows": torch.zeros(4, 2)}
    dist_checkpoint.load(rows, storage_reader=dcp.Reader(path), no_dist=True)
    assert rows["rows"].unique().tolist() == [2.0 if number == 1 else 1.0]
    assert len(list(path.glob("*.distcp"))) == 1


def test_the_state_of_modelopt_is_not_left_out(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0]._modelopt_state = []
    with pytest.raises(NotImplementedError, match="NVIDIA ModelOpt changed"):
        megatron.save_checkpoint(1, model, save=str(tmp_path))
    assert not list(tmp_path.iterdir())
    begun(tmp_path, 1, 1.0).result(WAIT_S)
    (tmp_path / iterations.directory_name(1) / "modelopt_state").mkdir()
    with pytest.raises(IncompatibleCheckpoint, match="load it with Megatron's load_checkpoint"):
        megatron.load_checkpoint(torch.nn.Linear(2, 2), load=str(tmp_path))


def test_random_states_of_cuda_graphs_are_loaded() -> None:
    """They are generators, not tensors."""
    generator = torch.Generator().manual_seed(5)
    content = strategies.serialized([{"rng_tracker_states": {"model-parallel-rng": generator}}])
    (back,) = partial_reads.unpickled(content, "rng_state")
    found = back["rng_tracker_states"]["model-parallel-rng"]
    assert torch.equal(found.get_state(), generator.get_state())


def test_what_this_process_is_saving_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, wait_for = threading.Event(), pipeline.Pipeline.wait_for

    def waited(own: pipeline.Pipeline, *given: Any, **options: Any) -> None:
        gate.set()
        wait_for(own, *given, **options)

    with process_on(Delay("sync", gate)):
        begun(tmp_path, 1, 1.0)
        monkeypatch.setattr(pipeline.Pipeline, "wait_for", waited)
        found = load._found(str(tmp_path), None, warns=True)
    assert found == [(1, str(tmp_path / iterations.directory_name(1)))]


def test_the_failure_of_a_save_is_told_by_waiting_once(tmp_path: Path) -> None:
    run, handle = megatron.Saves(), InnerHandle("second", 0.0)
    run.begin(str(tmp_path), 1, Retention(1), lambda _after: handle)
    handle.set_exception(StorageError("write", "second", 28))
    with pytest.raises(StorageError, match=r"an earlier save, to .*, failed: write of 'second'"):
        run.wait()
    run.wait()  # it has been told
    assert megatron.Saves().is_first(str(tmp_path))  # others know nothing of it


@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (CorruptCheckpoint("a byte differs"), True),
        (StorageError("open", "/run/iter_0000002/a", errno.ENOENT), True),
        (FileNotFoundError(errno.ENOENT, "gone"), True),
        (StorageError("read", "/run/iter_0000002/a", errno.EIO), False),
        (StorageError("open", "/run/iter_0000002/a", errno.EMFILE), False),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_no_damage(error: Exception, is_damage: bool) -> None:
    """An older iteration is not loaded in its place."""
    assert load._is_damage(error) is is_damage
