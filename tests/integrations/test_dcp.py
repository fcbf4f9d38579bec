"""torch.distributed.checkpoint through fastckpt, held against torch's own saver and reader.

Responsible for what must come of it: what either writes the other reads, bit by bit, on any number
of ranks; only what was asked for is read, and every byte of ours is verified; an overwrite that is
cut short leaves the old checkpoint; a failure on one rank is everybody's. What the ranks do stands
in ranks/dcp_bodies.py. Must not know how a save proceeds.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import inspect
import io
import logging
import os
import pickle
import random
import shutil
import textwrap
import threading
import time
import tracemalloc
import weakref
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastckpt.integrations.dcp", exc_type=ImportError)

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

import fastckpt
from fastckpt import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint, StagingConflict
from fastckpt.directories import dcp_metadata
from fastckpt.directories.items_load import ItemsFile
from fastckpt.engine.staging import Allowance
from fastckpt.errors import RootInUse
from fastckpt.formats import distcp
from fastckpt.integrations.dcp import Reader, Saving, Writer, async_save, save
from fastckpt.ranks import coordinator
from fastckpt.saving import pipeline
from fastckpt.saving.lease import LEASE_FILE
from fastckpt.storage.atomic import DEAD_AFTER_S
from tests.crews import dcp_bodies as bodies
from tests.crews.dcp_states import blank, is_same, numbers, plain, whole
from tests.crews.group_crew import Crew, Nursery, RankDied
from tests.kit import interpreters
from tests.kit.accelerator import KIND
from tests.kit.cuda_stub import CudaStub
from tests.kit.doubles import FailAlways, Recorder, process_on
from tests.kit.storm import Storm
from tests.kit.torches import needs_fsdp2

RANKS_IMPORT = "tests.crews.dcp_imports"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
needs_own_metadata = pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason="this torch has no metadata of one rank",
)


def load(state: Any, path: Path, reader: Any = Reader, **options: Any) -> Any:
    """What a state becomes by loading it."""
    dcp.load(state, storage_reader=reader(path), **options)
    return state


def failure_of(action: Callable[[], Any]) -> BaseException:
    """Our error within what torch's load() raises."""
    with pytest.raises(CheckpointException) as caught:
        action()
    (error, _trace) = next(iter(caught.value.failures.values()))
    return error


def names_in(directory: Path) -> list[str]:
    """What lies in a directory but its lease, which a process has until it exits."""
    return sorted({*os.listdir(directory)} - {LEASE_FILE})


def data_files(path: Path) -> list[Path]:
    """Of a directory, when what a save still does after its commit is done."""
    pipeline.current().drain()
    return sorted(path.glob("*.distcp"))


@pytest.fixture(autouse=True)
def no_device_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own saver would use streams of the stub device that tests of GPUs leave behind."""
    if hasattr(torch, KIND):
        monkeypatch.setattr(getattr(torch, KIND), "is_available", lambda: False)


# One process: what is written, what is read


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "torch": lambda state, path: dcp.save(state, checkpoint_id=path),
    "save": lambda state, path: save(state, checkpoint_id=path),
    "call": lambda state, path: async_save(state, checkpoint_id=path).result(),
    "step": lambda state, path: async_save(
        state, checkpoint_id=path, options=fastckpt.SaveOptions(fence="step")
    ).result(),
    "writer": lambda state, path: dcp.save(state, storage_writer=Writer(path)),
    "writer async": lambda state, path: dcp.async_save(state, storage_writer=Writer(path)).result(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reader", [dcp.FileSystemReader, Reader], ids=["torch reads", "we read"])
def test_what_one_writes_the_other_reads(way: str, reader: Any, tmp_path: Path) -> None:
    state = plain(1)
    metadata = WAYS[way](state, tmp_path / "at" / "1")
    assert isinstance(metadata, Metadata) and "model.weight" in metadata.state_dict_metadata
    assert is_same(load(blank(state), tmp_path / "at" / "1", reader), state)


def test_items_are_what_torch_saves_but_for_the_id(tmp_path: Path) -> None:
    tensors = [
        *plain(1)["dtypes"].values(),
        torch.zeros(()),
        torch.zeros(0, 3),
        numbers(1, 5, 1, 2),
    ]
    image, places = distcp.layout(tensors)
    content = bytearray(image.body_nbytes)
    for segment in image.rows():
        source = ctypes.string_at(segment.address, segment.nbytes)
        content[segment.offset : segment.offset + segment.nbytes] = source
    for tensor, (offset, nbytes) in zip(tensors, places, strict=True):
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        ours, theirs = bytes(content[offset : offset + nbytes]), buffer.getvalue()
        assert len(ours) == len(theirs)
        names = zipfile.ZipFile(io.BytesIO(ours)).namelist()
        assert names == zipfile.ZipFile(io.BytesIO(theirs)).namelist()
        front = next(distcp.fronts(tensor.dtype, tuple(tensor.shape)))
        assert ours.startswith(front) and theirs.startswith(front)


def test_every_zip_of_a_file_is_whole(tmp_path: Path) -> None:
    save(plain(1), checkpoint_id=tmp_path)
    (file,) = data_files(tmp_path)
    content = file.read_bytes()
    metadata = Reader(tmp_path).read_metadata()
    for info in metadata.storage_data.values():
        item = content[info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            assert archive.testzip() is None


def test_a_part_of_the_keys(tmp_path: Path) -> None:
    save(plain(1), checkpoint_id=tmp_path)
    wanted = {"model": {"weight": torch.zeros(700, 900)}, "lr": 0.0}
    load(wanted, tmp_path)
    assert is_same(wanted, {"model": {"weight": plain(1)["model"]["weight"]}, "lr": 1.1})


@pytest.mark.parametrize("reader", [dcp.FileSystemReader, Reader])
def test_missing_keys_and_other_sizes_are_told_as_torch_tells_them(
    reader: Any, tmp_path: Path
) -> None:
    save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    error = failure_of(lambda: load({"a": torch.zeros(3), "b": torch.zeros(2)}, tmp_path, reader))
    assert isinstance(error, RuntimeError) and "Missing key in checkpoint state_dict: b" in str(
        error
    )
    error = failure_of(lambda: load({"a": torch.zeros(4)}, tmp_path, reader))
    assert isinstance(error, ValueError) and "Size mismatch" in str(error)


def test_a_planner_that_is_not_strict(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "extra": torch.ones(1)}, checkpoint_id=tmp_path)
    state = {"a": torch.zeros(3), "b": torch.full((2,), 7.0)}
    load(state, tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert is_same(state, {"a": torch.ones(3), "b": torch.full((2,), 7.0)})


def test_another_dtype_and_other_strides_are_converted(tmp_path: Path) -> None:
    values = numbers(3, 40, 50)
    save({"a": values, "b": values}, checkpoint_id=tmp_path)
    state = {"a": torch.zeros(40, 50, dtype=torch.float64), "b": torch.zeros(50, 40).t()}
    load(state, tmp_path)
    assert torch.equal(state["a"], values.double()) and torch.equal(state["b"], values)


class Doubling(torch.Tensor):
    """A subclass that is saved as what it is."""


def test_subclasses_sparse_and_conjugated_tensors(tmp_path: Path) -> None:
    state = {
        "subclass": numbers(1, 4).as_subclass(Doubling),
        "conjugated": torch.view_as_complex(numbers(2, 5, 2)).conj(),
        "negative": torch.view_as_complex(numbers(2, 5, 2)).conj().imag,
    }
    save(state, checkpoint_id=tmp_path)
    with torch.serialization.safe_globals([Doubling]):
        back = load({key: torch.zeros_like(value) for key, value in state.items()}, tmp_path)
    assert torch.equal(back["conjugated"], state["conjugated"])
    assert torch.equal(back["negative"], state["negative"])
    assert torch.equal(back["subclass"].as_subclass(torch.Tensor), numbers(1, 4))


def test_what_went_through_an_extension_of_torch(tmp_path: Path) -> None:
    extension = pytest.importorskip("torch.distributed.checkpoint._extension", exc_type=ImportError)
    if not extension.ZStandard.is_available():
        pytest.skip("torch's extension needs a package that is not here")
    writer = dcp.FileSystemWriter(tmp_path, _extensions=[extension.ZStandard()])
    dcp.save({"a": numbers(1, 300), "n": 5}, storage_writer=writer)
    assert torch.equal(load({"a": torch.zeros(300)}, tmp_path)["a"], numbers(1, 300))
    error = failure_of(lambda: load({"n": 0}, tmp_path))
    assert isinstance(error, pickle.UnpicklingError)
    state = {"n": 0}
    dcp.load(state, storage_reader=Reader(tmp_path, weights_only=False))
    assert state == {"n": 5}


def test_files_behind_symbolic_links(tmp_path: Path) -> None:
    save({"a": numbers(1, 300)}, checkpoint_id=tmp_path / "real")
    (tmp_path / "linked").mkdir()
    for file in (tmp_path / "real").iterdir():
        (tmp_path / "linked" / file.name).symlink_to(file)
    state = {"a": torch.zeros(300)}
    with pytest.raises(IncompatibleCheckpoint, match=r"\.metadata' is a link to .*follow_links"):
        Reader(tmp_path / "linked").read_metadata()
    (tmp_path / "linked" / ".metadata").unlink()
    shutil.copy(tmp_path / "real" / ".metadata", tmp_path / "linked")
    error = failure_of(lambda: load(state, tmp_path / "linked"))
    assert isinstance(error, IncompatibleCheckpoint) and "distcp' is a link to" in str(error)
    dcp.load(state, storage_reader=Reader(tmp_path / "linked", follow_links=True))
    assert torch.equal(state["a"], numbers(1, 300))
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "old.metadata").symlink_to(".metadata")
    assert torch.equal(load({"a": torch.zeros(300)}, tmp_path / "alias")["a"], numbers(1, 300))


def test_ranks_that_do_not_know_each_other_are_warned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(coordinator, "_has_warned", False)
    save({"a": 1}, checkpoint_id=tmp_path, no_dist=True)
    assert "rank 1 of 2" not in caplog.text, "it says itself that it is alone"
    for _ in range(2):
        save({"a": 1}, checkpoint_id=tmp_path)
    assert caplog.text.count("rank 1 of 2: the save to ") == 1


def test_a_large_object(tmp_path: Path) -> None:
    state = {"text": "y" * (3 << 20), "t": torch.ones(2)}
    save(state, checkpoint_id=tmp_path)
    for reader in (Reader, dcp.FileSystemReader):
        assert is_same(load(blank(state), tmp_path, reader), state)


def test_a_planner_of_the_user(tmp_path: Path) -> None:
    class Half(DefaultSavePlanner):
        """Saves tensors in half precision; counts its central plans."""

        plans = 0

        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            return data.half() if isinstance(data, torch.Tensor) else data

        def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
            type(self).plans += 1
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data=metadata.planner_data | {"note": ("x", 1)})

    values = numbers(1, 30)
    for number in range(3):
        save({"a": values, "n": number}, checkpoint_id=tmp_path / str(number), planner=Half())
    assert Half.plans == 1  # the state had the same parts each time
    assert Reader(tmp_path / "2").read_metadata().planner_data["note"] == ("x", 1)
    for reader in (Reader, dcp.FileSystemReader):
        state = load({"a": torch.zeros(30), "n": 9}, tmp_path / "2", reader)
        assert torch.equal(state["a"], values.half().float()) and state["n"] == 2
    save({"a": numbers(1, 31), "n": 1}, checkpoint_id=tmp_path / "3", planner=Half())
    assert Half.plans == 2
    assert load({"a": torch.zeros(31)}, tmp_path / "3")["a"].abs().sum() > 0


def test_a_planner_that_keeps_plans_itself(tmp_path: Path) -> None:
    if "enable_plan_caching" not in inspect.signature(DefaultSavePlanner).parameters:
        pytest.skip("this torch keeps no plans")
    for number in range(4):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        planner._cached_plans_key = str(tmp_path)
        state = {"a": numbers(number, 5 if number < 3 else 6)}
        save(state, checkpoint_id=tmp_path / str(number), planner=planner)
        assert is_same(load(blank(state), tmp_path / str(number)), state)


class Stateful:
    def __init__(self, value: int) -> None:
        self.value = torch.full((3,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"].clone()


def test_objects_with_state_dict_as_torchtitan_passes_them(tmp_path: Path) -> None:
    """Its wrappers of models and optimizers; a stager, and PROCESS, as its pinned mode has it."""
    if not hasattr(dcp.state_dict_saver, "AsyncSaveResponse"):
        pytest.skip("this torch has no stagers that stage asynchronously")
    writer, states = (
        Writer(tmp_path / "nowhere"),
        {"model": Stateful(4), "train_state": Stateful(5)},
    )
    options = dcp.staging.StagingOptions(False, False, True, False)
    stager = dcp.staging.DefaultStager(options)
    response = async_save(
        states,
        checkpoint_id=str(tmp_path / "step-4"),
        storage_writer=writer,
        async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
        async_stager=stager,
    )
    stager.close()
    assert isinstance(response, dcp.state_dict_saver.AsyncSaveResponse)
    response.staging_completion.result()
    assert response.staging_completion.done()
    states["model"].value.zero_()
    response.upload_completion.result()
    assert not (tmp_path / "nowhere").exists()
    back = {"model": Stateful(0), "train_state": Stateful(0)}
    dcp.load(back, checkpoint_id=str(tmp_path / "step-4"), storage_reader=Reader(tmp_path))
    assert back["model"].value.tolist() == [4.0] * 3
    assert back["train_state"].value.tolist() == [5.0] * 3


def test_what_is_returned_is_a_future(tmp_path: Path) -> None:
    saving = async_save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    assert isinstance(saving, Saving) and isinstance(saving, Future)
    assert isinstance(saving.result(), Metadata)
    assert saving.stats.committed_s is not None


@needs_own_metadata
def test_no_dist_and_no_collectives(tmp_path: Path) -> None:
    save({"a": numbers(1, 9)}, checkpoint_id=tmp_path / "a", no_dist=True)
    save({"a": numbers(2, 9)}, checkpoint_id=tmp_path / "b", use_collectives=False)
    assert (tmp_path / "b" / "__0.metadata").exists()
    for name, seed in (("a", 1), ("b", 2)):
        for reader in (Reader, dcp.FileSystemReader):
            state = load({"a": torch.zeros(9)}, tmp_path / name, reader)
            assert torch.equal(state["a"], numbers(seed, 9))
    dcp.save({"a": numbers(3, 9)}, storage_writer=Writer(tmp_path / "b"), use_collectives=False)
    assert len(data_files(tmp_path / "b")) == 1
    assert torch.equal(load({"a": torch.zeros(9)}, tmp_path / "b")["a"], numbers(3, 9))


def test_an_empty_state(tmp_path: Path) -> None:
    save({}, checkpoint_id=tmp_path / "x")
    assert names_in(tmp_path / "x") == [".metadata"]
    load({}, tmp_path / "x")


def test_arguments_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint_id must be given"):
        save({})
    with pytest.raises(TypeError, match="storage_writer is a FileSystemWriter"):
        save({}, storage_writer=dcp.FileSystemWriter(tmp_path))
    with pytest.raises(ValueError, match="a URL"):
        save({}, checkpoint_id="s3://bucket/key")


def test_the_options_of_a_call_replace_those_of_the_writer(tmp_path: Path) -> None:
    storage, state = Recorder(by_engine=True), {"a": numbers(3, 9)}
    writer = Writer(tmp_path, options=fastckpt.SaveOptions(durable=False, fence="step"))
    with process_on(storage):
        save(state, storage_writer=writer)
        dcp.save(state, storage_writer=writer)
        assert not storage.numbers_of("sync")
        save(state, storage_writer=writer, options=fastckpt.SaveOptions())
        assert storage.numbers_of("sync")
    assert writer.options.fence == "step" and not writer.options.durable


def test_a_writer_takes_what_torchs_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = inspect.signature(dcp.FileSystemWriter).parameters
    ours = inspect.signature(Writer).parameters
    assert [*ours][: len(theirs)] == [*theirs]
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        if name != "serialization_format":  # which torch has since 2.8
            assert ours[name].default == parameter.default
    if "serialization_format" not in theirs:
        pytest.skip("this torch has one format")
    form = theirs["serialization_format"].default
    with caplog.at_level(logging.INFO, "fastckpt"):
        Writer(tmp_path, True, True, 1, 10_000_000, False, True, None, form)
        assert not caplog.records
        writer = Writer(tmp_path, False, False, 4, 0, True, True, [], form)
    assert len(caplog.records) == 1
    for name in ("single_file_per_rank", "thread_count", "per_thread_copy_ahead", "cache_staged"):
        assert name in caplog.text
    assert not writer.options.durable and Writer(tmp_path).options.durable
    dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    assert load({"a": torch.zeros(3)}, tmp_path)["a"].sum() == 3
    with pytest.raises(ValueError, match="_extensions"):
        Writer(tmp_path, _extensions=[object()])
    with pytest.raises(ValueError, match="must be TORCH_SAVE"):
        Writer(tmp_path, serialization_format=type(form).SAFETENSORS)


@needs_own_metadata
@pytest.mark.parametrize("collectives", [True, False])
def test_a_writer_that_may_not_overwrite(collectives: bool, tmp_path: Path) -> None:
    first = {"a": torch.ones(3)}
    for way in (save, dcp.save):
        path = tmp_path / way.__module__
        writer = Writer(path, overwrite=False)
        way(first, storage_writer=writer, use_collectives=collectives)
        before = sorted(os.listdir(path))
        with pytest.raises((CheckpointError, CheckpointException)) as caught:
            way({"a": torch.zeros(3)}, storage_writer=writer, use_collectives=collectives)
        told = str(getattr(caught.value, "failures", caught.value))
        assert "Checkpoint already exists" in told and str(path) in told
        assert sorted(os.listdir(path)) == before
        assert is_same(load({"a": torch.zeros(3)}, path), first)


def test_of_two_saves_begun_at_once_one_may_not_overwrite(tmp_path: Path) -> None:
    writer = Writer(tmp_path, overwrite=False)
    one, other = ({"a": torch.full((1 << 20,), value)} for value in (1.0, 2.0))
    savings = [async_save(state, storage_writer=writer) for state in (one, other)]
    assert savings[0].exception() is None
    assert isinstance(savings[1].exception(), CheckpointError)
    assert "Checkpoint already exists" in str(savings[1].exception())
    assert len(data_files(tmp_path)) == 1
    assert is_same(load(blank(one), tmp_path), one)


@pytest.mark.parametrize("way", [save, dcp.save], ids=["ours", "torch's"])
def test_the_save_id_of_a_writer_is_that_of_what_it_saved(way: Any, tmp_path: Path) -> None:
    writer, told = Writer(tmp_path / "nowhere"), set()
    for name in ("a", "b"):
        metadata = way({"n": 5}, checkpoint_id=tmp_path / name, storage_writer=writer)
        assert writer.checkpoint_id == str(tmp_path / name)
        stored = Reader(tmp_path / name).read_metadata().storage_meta
        assert stored is not None and metadata.storage_meta is not None
        assert stored.save_id == metadata.storage_meta.save_id == writer.save_id
        told.add(writer.save_id)
    assert len(told) == 2


# Fences


def test_the_state_may_change_when_async_save_returns(tmp_path: Path) -> None:
    state = {"a": numbers(1, 1 << 20)}
    expected = state["a"].clone()
    saving = async_save(state, checkpoint_id=tmp_path)
    state["a"].zero_()
    saving.result()
    assert torch.equal(load(blank(state), tmp_path)["a"], expected)


def test_the_step_fence_makes_an_optimizer_wait(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(numbers(1, 1 << 20))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    expected = weight.detach().clone()
    small = torch.ones(4)
    saving = async_save(
        {"a": weight, "b": small},
        checkpoint_id=tmp_path,
        options=fastckpt.SaveOptions(fence="step"),
    )
    small.zero_()  # as a forward pass changes buffers
    optimizer.step()
    saving.result()
    back = load({"a": torch.zeros(1 << 20), "b": torch.zeros(4)}, tmp_path)
    assert torch.equal(back["a"], expected) and back["b"].sum() == 4


def test_a_change_behind_the_step_fence_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"a": numbers(1, 100_000)}, checkpoint_id=tmp_path)
    gate, staging = threading.Event(), pipeline.current().staging
    real = staging.allowance

    def late(nbytes: int | None) -> Allowance:
        assert gate.wait(60)
        return real(nbytes)

    monkeypatch.setattr(staging, "allowance", late)
    weight = numbers(2, 100_000)
    saving = async_save(
        {"a": weight}, checkpoint_id=tmp_path, options=fastckpt.SaveOptions(fence="step")
    )
    weight.zero_()  # before any of it is copied
    gate.set()
    error = saving.exception()
    assert isinstance(error, StagingConflict) and "'a'" in str(error)
    assert len(data_files(tmp_path)) == 1


@pytest.mark.parametrize("fence", ["call", "step"])
def test_tensors_on_a_gpu(fence: str, gpu: CudaStub, disk: Path) -> None:
    """On the device of tests/kit/accelerator.py, whose copies are made in the order of streams."""
    expected = {
        "big": numbers(1, 5 << 20),
        "view": numbers(1, 5 << 20)[77:999_999],
        "permuted": numbers(2, 40, 50).t(),
        "small": numbers(3, 9),
        "host": numbers(4, 300),
        "n": 5,
    }
    state = {k: v.to(KIND) if isinstance(v, torch.Tensor) else v for k, v in expected.items()}
    state |= {"view": state["big"][77:999_999], "host": expected["host"]}
    saving = async_save(state, checkpoint_id=disk / "c", options=fastckpt.SaveOptions(fence=fence))
    saving.result(60)
    assert saving.stats.staging == "pinned"
    for reader in (Reader, dcp.FileSystemReader):
        assert is_same(load(blank(expected), disk / "c", reader), expected)
    empty = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for k, v in state.items()}
    assert empty["big"].device.type == KIND
    back = load(empty, disk / "c")
    back = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in back.items()}
    assert is_same(back, expected)


# Reading


@pytest.mark.parametrize("way", ["save", "torch"])
def test_only_what_is_needed_is_read(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WAYS[way]({f"t{i}": numbers(i, 1 << 22) for i in range(6)}, tmp_path)  # 16 MiB each
    read: list[int] = []
    leave = ItemsFile.__exit__

    def note(self: ItemsFile, *rest: object) -> None:
        read.append(self._stream.nbytes_read())
        leave(self, *rest)

    monkeypatch.setattr(ItemsFile, "__exit__", note)
    assert torch.equal(load({"t3": torch.zeros(1 << 22)}, tmp_path)["t3"], numbers(3, 1 << 22))
    assert 16 << 20 <= sum(read) <= (16 + 2 * 8) << 20


def test_sizes_that_torch_wrote_otherwise_are_left_to_torch(tmp_path: Path) -> None:
    """Elements that do not lie as those of a contiguous tensor of this torch."""
    if not hasattr(torch.utils, "serialization"):
        pytest.skip("this torch aligns tensors in one way")
    state = {"a": numbers(1, 30, 40).t(), "b": numbers(2, 7)}
    torch.utils.serialization.config.save.storage_alignment = 128
    try:
        dcp.save(state, checkpoint_id=tmp_path)
    finally:
        torch.utils.serialization.config.save.storage_alignment = 64
    assert is_same(load(blank(state), tmp_path), state)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Evil.target),)

    target: Path


def test_a_hostile_metadata_file_is_refused(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    Evil.target = tmp_path / "owned"
    metadata = Reader(tmp_path / "c").read_metadata()
    metadata.planner_data = Evil()
    file = tmp_path / "c" / ".metadata"
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match=r"mkdir.*weights_only=False"):
        Reader(tmp_path / "c").read_metadata()
    error = failure_of(lambda: load({"a": torch.zeros(3)}, tmp_path / "c"))
    assert "mkdir" in str(error)
    assert not Evil.target.exists()
    Reader(tmp_path / "c", weights_only=False).read_metadata()
    assert Evil.target.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cbuiltins\ngetattr\n(cos\nsystem\nVx\ntR.",
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nV__init__\ntR.",
        b"ctorch\nload\n(Vx\ntR.",
    ],
)
def test_pickles_that_reach_for_more_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises((pickle.UnpicklingError, CorruptCheckpoint)):
        Reader(tmp_path).read_metadata()


@pytest.mark.parametrize("content", [b"", b"\0" * 99, b"\x80\x02", b"\x80\x04\x8e" + b"\xff" * 8])
def test_what_is_no_pickle_is_damaged_and_not_hostile(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    for weights_only in (True, False):
        with pytest.raises(CorruptCheckpoint, match=r"truncated or damaged|is empty"):
            Reader(tmp_path, weights_only=weights_only).read_metadata()


def test_a_small_metadata_file_takes_little_memory(tmp_path: Path) -> None:
    content = b"\x80\4\x8e" + (1 << 31).to_bytes(8, "little") + b"abc."
    (tmp_path / ".metadata").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CorruptCheckpoint):
        Reader(tmp_path).read_metadata()
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    for weights_only in (True, False):  # where there is no memory, that is told with the file
        (tmp_path / ".metadata").write_bytes(b"\x80\4\x8e" + (1 << 60).to_bytes(8, "little") + b".")
        with pytest.raises(CorruptCheckpoint, match="metadata"):
            Reader(tmp_path, weights_only=weights_only).read_metadata()


class Elsewhere:
    """What a writer of another format might say of where an item lies."""


def _as(**members: Any) -> Callable[[Any], None]:
    def change(target: Any) -> None:
        target.__dict__.update(members)

    return change


def _without(name: str) -> Callable[[Any], None]:
    return lambda target: target.__dict__.pop(name)


FOREIGN: dict[str, tuple[str, Callable[[Any], None]]] = {
    "no keys": ("metadata", _without("state_dict_metadata")),
    "keys of no text": ("metadata", _as(state_dict_metadata={5: None})),
    "keys in a list": ("metadata", _as(state_dict_metadata=["a"])),
    "a text for a tensor": ("metadata", _as(state_dict_metadata={"a": "tensor"})),
    "items in a list": ("metadata", _as(storage_data=[1, 2])),
    "items of no index": ("metadata", _as(storage_data={"a": 5})),
    "a text for its id": ("metadata", _as(storage_meta="here")),
    "no sizes": ("tensor", _without("size")),
    "sizes of no numbers": ("tensor", _as(size=(1.5, "x"))),
    "a size below zero": ("tensor", _as(size=(-1,))),
    "a size of many bits": ("tensor", _as(size=(1 << 200,))),
    "no properties": ("tensor", _as(properties=None)),
    "chunks in a dict": ("tensor", _as(chunks={})),
    "a chunk of nothing": ("tensor", _as(chunks=[None])),
    "no dtype": ("properties", _as(dtype="float32")),
    "a chunk without sizes": ("chunk", _without("sizes")),
    "a chunk of other dimensions": ("chunk", _as(offsets=(0, 0))),
    "a chunk at no number": ("chunk", _as(offsets=(None,))),
    "no file": ("info", _without("relative_path")),
    "a file of a number": ("info", _as(relative_path=5)),
    "an offset below zero": ("info", _as(offset=-1)),
    "an offset of many bits": ("info", _as(offset=1 << 63)),
    "a length of no number": ("info", _as(length=True)),
    "an end of many bits": ("info", _as(offset=1 << 62, length=1 << 62)),
    "extensions of no name": ("info", _as(transform_descriptors=5)),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("what", FOREIGN)
def test_metadata_that_describes_no_checkpoint_is_told(
    what: str, weights_only: bool, tmp_path: Path
) -> None:
    save({"a": torch.ones(3), "n": 5}, checkpoint_id=tmp_path)
    value = Reader(tmp_path).read_metadata()
    stored: Any = value.state_dict_metadata["a"]
    info = next(its for index, its in value.storage_data.items() if index.fqn == "a")
    parts = {"metadata": value, "tensor": stored, "properties": stored.properties}
    parts |= {"chunk": stored.chunks[0], "info": info}
    part, change = FOREIGN[what]
    change(parts[part])
    if part == "properties" and weights_only:
        match = "have the wrong types"
    else:
        match = "does not describe a checkpoint|storage_data is a list"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    kind = IncompatibleCheckpoint if what == "items in a list" else CorruptCheckpoint
    with pytest.raises(kind, match=match):
        Reader(tmp_path, weights_only=weights_only).read_metadata()


def test_what_another_writer_says_is_told_as_such(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    value = Reader(tmp_path).read_metadata()
    value.storage_data = dict.fromkeys(value.storage_data, Elsewhere())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(IncompatibleCheckpoint, match="it locates 'a' with a Elsewhere"):
        Reader(tmp_path, weights_only=False).read_metadata()


def test_what_the_metadata_does_not_locate_is_told(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    value = Reader(tmp_path).read_metadata()
    value.storage_data = {}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    error = failure_of(lambda: load({"a": torch.zeros(3)}, tmp_path))
    assert isinstance(error, CorruptCheckpoint) and "names no file for 'a' at (0,)" in str(error)


@pytest.mark.parametrize("dtype", ["qint8", "quint4x2", "uint1", "int4", "bits8", "float64"])
def test_a_dtype_that_is_not_what_was_stored(dtype: str, tmp_path: Path) -> None:
    for way in ("torch", "save"):
        WAYS[way]({"a": torch.ones(3)}, tmp_path / way)
        value: Any = Reader(tmp_path / way).read_metadata()
        value.state_dict_metadata["a"].properties.dtype = getattr(torch, dtype)
        (tmp_path / way / ".metadata").write_bytes(pickle.dumps(value))
        assert torch.equal(load({"a": torch.zeros(3)}, tmp_path / way)["a"], torch.ones(3))


def test_a_ranks_own_metadata_does_not_stand_in_for_damage(tmp_path: Path) -> None:
    save({"a": torch.zeros(3)}, checkpoint_id=tmp_path, use_collectives=False)
    save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    file, reader = tmp_path / ".metadata", Reader(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    state = {"a": torch.full((3,), 7.0)}
    error = failure_of(lambda: dcp.load(state, storage_reader=reader))
    assert "is damaged" in str(error) and state["a"].tolist() == [7.0] * 3
    file.write_bytes(whole)
    dcp.load(state, storage_reader=reader)
    assert state["a"].tolist() == [1.0] * 3


def test_streams_of_bytes_as_torchtitan_keeps_them(tmp_path: Path) -> None:
    """Values of a state that are io.BytesIO, in which its TrainState has what it pickled itself."""
    losses = io.BytesIO()
    torch.save([0.5, 0.25], losses)
    state = {"step": torch.tensor(5), "losses": losses}
    for way in ("torch", "call"):
        WAYS[way](state, tmp_path / way)
        back = {"step": torch.tensor(0), "losses": io.BytesIO()}
        load(back, tmp_path / way)
        back["losses"].seek(0)
        assert torch.load(back["losses"]) == [0.5, 0.25] and back["step"] == 5
        assert io.BytesIO not in torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([io.BytesIO]):
            load(back, tmp_path / way)
            assert io.BytesIO in torch.serialization.get_safe_globals()


def changed(content: bytes, rng: random.Random) -> bytes:
    """A file with some bytes replaced, left out, or repeated."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 3))):
        at, other = rng.randrange(len(changed) + 1), rng.randrange(len(changed) + 1)
        end = at + rng.choice((0, 1, 1, 8))
        filling = (rng.randbytes(end - at), b"", b"\xff" * 8, bytes(changed[other : other + 20]))
        changed[at:end] = rng.choice(filling)
    return bytes(changed)


def check_changed(path: Path, state: Any) -> None:
    """Whatever a file of a checkpoint says, it is read, or told to be wrong with its path."""
    reader = Reader(path)
    try:
        reader.read_metadata()
        dcp.load(blank(state), storage_reader=reader)
    except (CorruptCheckpoint, IncompatibleCheckpoint, pickle.UnpicklingError) as error:
        assert str(path) in str(error)
    except CheckpointException as error:
        (cause, trace) = next(iter(error.failures.values()))
        ours = isinstance(cause, fastckpt.CheckpointError | pickle.UnpicklingError)
        # torch tells that what is described is not what was asked for.
        theirs = "planner" in str(trace) or "create_read_items" in str(trace)
        assert ours or theirs or isinstance(cause, AssertionError), (cause, trace)


@pytest.mark.parametrize("victim", ["metadata", "data"])
def test_changed_files_are_refused_or_read(
    victim: str, storm: Storm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"a": numbers(1, 30, 4), "n": 5, "b": torch.ones(2), "s": io.BytesIO(b"bytes")}
    dcp.save(state, checkpoint_id=tmp_path)  # which writes no checksums
    file = tmp_path / ".metadata" if victim == "metadata" else data_files(tmp_path)[0]
    content = file.read_bytes()
    for rng in storm.rounds(suite=40, torture=3000):
        file.write_bytes(changed(content, rng))
        check_changed(tmp_path, state)
        assert "SystemError" not in capsys.readouterr().err


def test_what_megatron_adds_to_metadata_is_kept(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    metadata = Reader(tmp_path).read_metadata()
    metadata.mcore_data = {"a": {"shape": (1, 2), "flags": {"x": [1, None, True]}}}
    metadata.all_local_plans = [DefaultSavePlanner.__new__(DefaultSavePlanner).__dict__]
    (tmp_path / ".metadata").write_bytes(dcp_metadata.encode(metadata))
    again = Reader(tmp_path).read_metadata()
    assert again.mcore_data == metadata.mcore_data
    assert torch.equal(load({"a": torch.zeros(3)}, tmp_path)["a"], torch.ones(3))


def test_objects_that_need_more_than_weights_only(tmp_path: Path) -> None:
    state = {"o": slice(1, 2), "t": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path)
    error = failure_of(lambda: load({"o": None, "t": torch.zeros(2)}, tmp_path))
    assert isinstance(error, pickle.UnpicklingError)
    assert "'o'" in str(error) and "Reader(path, weights_only=False)" in str(error)
    trusting = {"o": None, "t": torch.zeros(2)}
    dcp.load(trusting, storage_reader=Reader(tmp_path, weights_only=False))
    assert trusting["o"] == slice(1, 2)
    with torch.serialization.safe_globals([slice]):
        assert load({"o": None}, tmp_path)["o"] == slice(1, 2)


def test_a_writer_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="path is ''"):
        Writer("")
    with pytest.raises(TypeError, match="path is None"):
        Reader(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../b", "", "a/", "\0", "\ud800"]
)
def test_a_path_out_of_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    metadata = Reader(tmp_path / "c").read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = name
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    for weights_only in (True, False):
        with pytest.raises(CorruptCheckpoint, match="'a' is in the file"):
            Reader(tmp_path / "c", weights_only=weights_only).read_metadata()
    error = failure_of(lambda: load({"a": torch.zeros(3)}, tmp_path / "c"))
    assert "'a' is in the file" in str(error)


def test_every_byte_of_our_files_is_verified(tmp_path: Path) -> None:
    state = {"weight": numbers(1, 50, 60), "other": numbers(2, 3000), "n": 5}
    save(state, checkpoint_id=tmp_path)
    (file,) = data_files(tmp_path)
    rng = random.Random(20261122)
    for victim in (file, tmp_path / ".metadata"):
        content = victim.read_bytes()
        places = {0, 1, len(content) - 1, len(content) // 2}
        places |= {rng.randrange(len(content)) for _ in range(60)}
        for place in sorted(places):
            damaged = bytearray(content)
            damaged[place] ^= 1 << rng.randrange(8)
            victim.write_bytes(damaged)
            error = failure_of(lambda: load(blank(state), tmp_path))
            assert str(victim) in str(error), (place, error)
            assert isinstance(error, CorruptCheckpoint) or victim.name == ".metadata"
        victim.write_bytes(content)
    assert is_same(load(blank(state), tmp_path), state)


def test_damage_is_named(tmp_path: Path) -> None:
    state = {"model": {"weight": numbers(1, 500, 600), "bias": numbers(2, 3000)}}
    save(state, checkpoint_id=tmp_path)
    (file,) = data_files(tmp_path)
    content = bytearray(file.read_bytes())
    at = content.index(state["model"]["bias"].numpy().tobytes()[:64])
    content[at + 7] ^= 1
    file.write_bytes(content)
    error = failure_of(lambda: load(blank(state), tmp_path))
    assert isinstance(error, CorruptCheckpoint)
    assert file.name in str(error) and "'model.bias'" in str(error)
    assert "model.weight" not in str(error)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_told(share: float, tmp_path: Path) -> None:
    state = plain(1)
    save(state, checkpoint_id=tmp_path)
    (file,) = data_files(tmp_path)
    os.truncate(file, int(file.stat().st_size * share))
    error = failure_of(lambda: load(blank(state), tmp_path))
    assert isinstance(error, CorruptCheckpoint) and "truncated" in str(error)
    assert file.name in str(error)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, checkpoint_id=tmp_path)
    file = data_files(tmp_path)[0]
    file.unlink()
    error = failure_of(lambda: load({"a": torch.zeros(2)}, tmp_path))
    assert isinstance(error, CorruptCheckpoint)
    assert file.name in str(error) and "is missing" in str(error)


# Overwriting, failures


@pytest.mark.parametrize("first", ["torch", "save"])
@pytest.mark.parametrize("second", ["call", "writer"])
def test_an_overwrite_leaves_one_checkpoint(first: str, second: str, tmp_path: Path) -> None:
    WAYS[first](plain(1), tmp_path)
    debris = tmp_path / f"__0_{'0123456789' * 4}.distcp"
    debris.write_bytes(b"of a save that was killed, on a host that nobody knows")
    os.utime(debris, (0, time.time() - DEAD_AFTER_S))
    keep = tmp_path / "notes.txt"
    keep.write_text("not ours")
    WAYS[second](plain(2), tmp_path)
    pipeline.current().drain()
    assert len(data_files(tmp_path)) == 1 and not debris.exists() and keep.exists()
    assert names_in(tmp_path) == [".metadata", data_files(tmp_path)[0].name, "notes.txt"]
    assert is_same(load(blank(plain(2)), tmp_path), plain(2))


def test_an_overwrite_reads_no_metadata_file_that_nobody_wrote(tmp_path: Path) -> None:
    WAYS["call"](plain(1), tmp_path)
    os.truncate(tmp_path / ".metadata", 1 << 42)  # of holes
    WAYS["call"](plain(2), tmp_path)
    assert is_same(load(blank(plain(2)), tmp_path), plain(2))


ANOTHER_JOB = """
    import sys, threading
    from fastckpt.integrations.dcp import async_save
    from tests.crews.dcp_states import plain
    from tests.kit.doubles import Delay, process_on
    gate = threading.Event()
    with process_on(storage := Delay("sync", gate)):
        saving = async_save(plain(2), checkpoint_id=sys.argv[1])
        assert storage.reached.wait(60)
        print("written", flush=True)
        sys.stdin.readline()
        gate.set()
        saving.result()
    print("committed", flush=True)
"""


def test_what_we_are_saving_where_torch_saves_stays(tmp_path: Path) -> None:
    """Another job that saves by torch's writer is not refused. Both commit: the later one's
    checkpoint is whole, and nothing of the other's is left.
    """
    WAYS["torch"](plain(0), tmp_path)
    with interpreters.Program(textwrap.dedent(ANOTHER_JOB), tmp_path) as other:
        assert other.stdout.readline() == "written\n"
        (theirs,) = tmp_path.glob("__0_" + "?" * 40 + ".distcp")
        WAYS["torch"](plain(1), tmp_path)
        assert theirs.exists() and is_same(load(blank(plain(1)), tmp_path), plain(1))
        other.stdin.write("go on\n")
        other.stdin.flush()
        assert other.stdout.readline() == "committed\n"
    assert is_same(load(blank(plain(2)), tmp_path), plain(2))
    assert names_in(tmp_path) == [".metadata", theirs.name]


class Overtaken(Reader):
    """Before or after it reads what a plan asks of the first file, another job saves there."""

    def __init__(self, path: Path, save: Callable[[], Any], moment: str, **options: Any) -> None:
        super().__init__(path, **options)
        self._save, self._moment, self.saved = save, moment, 0

    def _overtake(self, moment: str) -> None:
        if moment == self._moment and not self.saved:
            self.saved += 1
            self._save()
            pipeline.current().drain()

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(*args, **kwargs)
        self._overtake("metadata")

    def _read_file(self, *args: Any) -> None:
        self._overtake("before")
        super()._read_file(*args)
        self._overtake("after")


@pytest.mark.parametrize("moment", ["metadata", "before", "after"])
@pytest.mark.parametrize("first", ["torch", "files", "save"])
@pytest.mark.parametrize("second", ["torch", "files", "save"])
def test_an_overwrite_in_the_midst_of_a_load(
    first: str, second: str, moment: str, tmp_path: Path
) -> None:
    """It is read as it was, or the load fails and says why; never some of each."""

    def into_files(state: Any, path: Path) -> None:  # each under the name that it had before
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=False))

    ways = WAYS | {"files": into_files}
    ways[first](plain(1), tmp_path)
    reader = Overtaken(tmp_path, lambda: ways[second](plain(2), tmp_path), moment)
    state, error = blank(plain(1)), None
    try:
        dcp.load(state, storage_reader=reader)
    except CheckpointException as caught:
        (error, _trace) = next(iter(caught.failures.values()))
    assert reader.saved == 1
    if error is None:
        assert is_same(state, plain(1))
    else:
        assert type(error) is CheckpointError and "was overwritten while" in str(error)
    if first == "save":
        # torch's writer leaves the file of ours where it is, and ours is read to its end.
        assert (error is None) == (second != "save" or moment == "after")
    assert is_same(load(blank(plain(2)), tmp_path), plain(2))


def test_ranks_that_find_different_saves_do_not_load(tmp_path: Path) -> None:
    """One reads what commits them before, the other after an overwrite."""
    readers, plans = [Reader(tmp_path), Reader(tmp_path)], []
    for seed, reader in enumerate(readers):
        save(plain(seed), checkpoint_id=tmp_path)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, seed == 0)
        plans.append(reader.prepare_local_plan(LoadPlan([], storage_data="kept")))
    with pytest.raises(CheckpointError, match="was overwritten while ranks began to load"):
        readers[0].prepare_global_plan(plans)
    (plan,) = readers[0].prepare_global_plan(plans[:1])
    assert plan.storage_data == "kept"


def test_a_failed_save_leaves_nothing_of_its_state(disk: Path) -> None:
    """Its error leads to frames of torch, and these to the future, which torch keeps in C++."""
    seen = []
    for number in range(3):
        tensor = torch.ones(1000)
        seen.append(weakref.ref(tensor))
        with process_on(FailAlways("sync", errno.ENOSPC)), pytest.raises(CheckpointException):
            dcp.save({"w": tensor}, storage_writer=Writer(disk / str(number)), no_dist=True)
        del tensor
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


def test_a_failure_is_raised_by_the_next_save_or_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    failed = async_save({"a": torch.zeros(3)}, checkpoint_id=blocked / "x")
    failed.wait_done()
    with pytest.raises(fastckpt.StorageError):
        async_save({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "c")
    assert torch.equal(load({"a": torch.zeros(3)}, tmp_path / "c")["a"], torch.ones(3))
    with caplog.at_level(logging.WARNING, "fastckpt"):
        failed = async_save(
            {"a": torch.zeros(3)},
            checkpoint_id=blocked / "x",
            options=fastckpt.SaveOptions(on_error="warn"),
        )
        failed.wait_done()
        pipeline.current().drain()
        assert f"{str(blocked / 'x')!r} was not saved: StorageError" in caplog.text
        save({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(fastckpt.StorageError):
        failed.result()


OVERWRITE = """
    import sys
    from fastckpt.integrations.dcp import async_save
    from tests.crews.dcp_states import numbers
    states = [{f"t{i}": numbers(seed * 10 + i, 1 << 20) for i in range(4)} for seed in range(3)]
    print("ready", flush=True)
    for number in range(1000):
        async_save(states[number % 3], checkpoint_id=sys.argv[1]).result()
        print(number, flush=True)
"""


def test_a_kill_in_an_overwrite_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(20261122)

    def state(seed: int) -> dict[str, torch.Tensor]:
        return {f"t{i}": numbers(seed * 10 + i, 1 << 20) for i in range(4)}

    expected = [state(seed) for seed in range(3)]
    for _ in range(2):
        with interpreters.Program(textwrap.dedent(OVERWRITE), tmp_path) as child:
            assert child.stdout.readline() == "ready\n"
            child.stdout.readline()
            time.sleep(rng.uniform(0, 0.2))
        back = load(blank(expected[0]), tmp_path)
        assert any(is_same(back, its) for its in expected)
        assert is_same(load(blank(back), tmp_path, dcp.FileSystemReader), back)
    interpreters.let_go(tmp_path)
    save(expected[0], checkpoint_id=tmp_path)
    pipeline.current().drain()
    assert len(names_in(tmp_path)) == 2  # what was killed has left nothing behind


# Several ranks


def values(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "how", ["torch", "writer", "torch async writer", "async call", "async step"]
)
def test_any_number_of_ranks_loads_what_any_other_saved(
    how: str, crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    assert values(crew(2)(bodies.saved, how, 1, str(tmp_path))) == [Metadata, Metadata]
    for size in (1, 2, 3):
        for reader in ("torch", "ours"):
            told = crew(size)(bodies.loaded, reader, 1, str(tmp_path), how != "torch async writer")
            assert values(told) == [True] * size
    expected = {"model": whole(1), "at": [1]}
    if how == "torch async writer":
        del expected["model"]["old"]
    assert is_same(load(blank(expected), tmp_path), expected)


@pytest.mark.multiprocess
def test_a_group_of_some_ranks_saves_by_itself(crew: Callable[[int], Crew], tmp_path: Path) -> None:
    assert values(crew(3)(bodies.saved, "async call", 4, str(tmp_path), ranks=2)) == [Metadata] * 2
    assert values(crew(3)(bodies.loaded, "ours", 4, str(tmp_path), ranks=2)) == [True] * 2
    assert values(crew(3)(bodies.loaded, "torch", 4, str(tmp_path), ranks=1)) == [True]
    assert len(data_files(tmp_path)) == 2


@pytest.mark.multiprocess
@pytest.mark.parametrize("fence", ["call", "step"])
@needs_fsdp2
def test_fsdp2_training_goes_on_where_it_was_saved(
    fence: str, crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    told = crew(2)(bodies.train_and_save, str(tmp_path), fence)
    losses = told[0][0]
    assert losses == told[1][0]
    for reader in ("torch", "ours"):
        assert crew(2)(bodies.load_and_train, str(tmp_path), reader) == [losses] * 2
    on_three = crew(3)(bodies.load_and_train, str(tmp_path), "ours")
    assert on_three[0] == pytest.approx(losses, rel=1e-5)


@pytest.mark.multiprocess
@needs_fsdp2
def test_plans_are_exchanged_only_when_they_change(nursery: Nursery, tmp_path: Path) -> None:
    with nursery.crew(2) as fresh:
        told = fresh(bodies.train_and_save, str(tmp_path), "call")
        assert [exchanges for _, exchanges in told] == [1, 0]  # of three saves; the first rank's
        assert fresh(bodies.train_and_save, str(tmp_path), "call")[0][1] == 1


@pytest.mark.multiprocess
def test_the_result_reads_its_file_when_it_is_used(
    crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    first, second = crew(2)(bodies.result_of_a_save, str(tmp_path))
    assert first == ([], [], [], True) and second[0] == [] and second[3]
    assert len(second[1]) > 0 and second[2] == []
    assert crew(2)(bodies.results_that_are_gone, str(tmp_path / "gone")) == [
        ["Metadata", "Metadata"],
        ["replaced", "removed"],
    ]


@pytest.mark.multiprocess
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("fence", ["call", "step"])
def test_the_call_waits_for_no_rank_that_has_yet_to_call(
    fence: str, late: int, crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    told = crew(2)(bodies.save_before_the_others, str(tmp_path), fence, late)
    assert told == [True, True]


@pytest.mark.multiprocess
@pytest.mark.parametrize("grown", [0, 1])
def test_a_part_that_appears_on_one_rank_alone(
    grown: int, crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    """torch's planner then divides what all ranks hold in another way."""
    assert crew(2)(bodies.save_what_grows, str(tmp_path), grown) == [[True] * 3] * 2


@pytest.mark.multiprocess
def test_plans_that_are_new_to_different_ranks_wait_for_each_other_in_order(
    crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    assert crew(2)(bodies.save_two_in_one, str(tmp_path / "a")) == [[None] * 2] * 2


@pytest.mark.multiprocess
def test_a_planner_that_fails_in_the_background_fails_all(
    crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    told = crew(2)(bodies.fail_to_plan_together, str(tmp_path), 1)
    assert [returned for returned, _ in told] == [True, False]  # the second rank's plan was new
    first, second = values([outcome for _, outcome in told])
    assert first == "ArithmeticError: the ranks have unequal parts"
    assert second.startswith("PeerFailed") and "the ranks have unequal parts" in second
    assert crew(2)(bodies.holds_big, str(tmp_path), 1) == [True, True]


@pytest.mark.multiprocess
@pytest.mark.parametrize("how", ["ours", "torch"])
def test_all_ranks_are_told_that_nothing_is_overwritten(
    how: str, crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    told = crew(2)(bodies.save_once, str(tmp_path), 1, how)
    assert [outcome.value for outcome in told] == ["'saved'"] * 2
    told = crew(2)(bodies.save_once, str(tmp_path), 2, how)
    assert all("Checkpoint already exists" in str(outcome.error) for outcome in told), told
    assert crew(2)(bodies.holds_big, str(tmp_path), 1) == [True, True]
    assert len(data_files(tmp_path)) == 2


@pytest.mark.multiprocess
@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_cannot_plan_fails_all(
    bad: int, on_error: str, crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    outcomes = crew(2)(bodies.fail_to_plan, str(tmp_path), bad, on_error)
    for rank, outcome in enumerate(outcomes):
        text = str(outcome.error or outcome.value)
        assert "pickle" in text
        if rank == bad:
            assert outcome.error is not None  # its own mistake, whatever on_error says
    assert crew(2)(bodies.holds_big, str(tmp_path), 3) == [True, True]


@pytest.mark.multiprocess
@pytest.mark.parametrize("victim", [0, 1, -1])
def test_ranks_killed_in_an_overwrite_leave_the_old_or_the_new(
    victim: int, nursery: Nursery, crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    rng = random.Random(victim)
    with nursery.crew(2) as first:
        first(bodies.save_big, str(tmp_path), 0)
    for seed in (1, 2):
        with nursery.crew(2) as doomed:
            told = doomed(
                bodies.die_in_overwrite, str(tmp_path), seed, victim, rng.uniform(0, 0.03)
            )
        assert any(isinstance(outcome, RankDied) for outcome in told)
        held = [crew(2)(bodies.holds_big, str(tmp_path), of) for of in range(seed + 1)]
        assert [True, True] in held
    interpreters.let_go(tmp_path)
    crew(2)(bodies.save_big, str(tmp_path), 3)
    assert crew(2)(bodies.holds_big, str(tmp_path), 3) == [True, True]
    deadline = time.monotonic() + 60
    while len(names_in(tmp_path)) > 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(names_in(tmp_path)) == 3  # one file of each rank, and what commits them


@pytest.mark.multiprocess
def test_all_ranks_of_a_second_job_are_refused(
    nursery: Nursery, crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    how, path = "async call", str(tmp_path)
    with nursery.crew(2) as first:
        for seed in (1, 2):
            values(first(bodies.saved, how, seed, path))
        before = {*names_in(tmp_path)}
        for outcome in crew(2)(bodies.saved, how, 3, path):
            assert isinstance(outcome.error, RootInUse), repr(outcome.error)
        assert {*names_in(tmp_path)} <= before
    values(crew(2)(bodies.saved, how, 4, path))
    assert values(crew(2)(bodies.loaded, "torch", 4, path)) == [True, True]


@pytest.mark.multiprocess
def test_the_commit_needs_nobody_and_is_told_at_once(
    crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    assert crew(2)(bodies.hang_before_commit, str(tmp_path)) == [[True, True]] * 2


@pytest.fixture(scope="module")
def megatron_crew() -> Iterator[Crew]:
    pytest.importorskip("megatron.core")
    nursery = Nursery("tests.crews.megatron_imports")
    with closing(nursery), nursery.crew(2) as crew:
        yield crew


@pytest.mark.multiprocess
@pytest.mark.parametrize("how", ["ours", "writer", "torch"])
def test_planners_and_tensors_of_megatron_core(
    how: str, megatron_crew: Crew, tmp_path: Path
) -> None:
    for seed in (1, 2):
        megatron_crew(bodies.save_megatron, str(tmp_path), seed, how)
    for reader in ("torch", "ours"):
        assert megatron_crew(bodies.load_megatron, str(tmp_path), 2, reader) == [True, True]
