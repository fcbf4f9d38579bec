"""fastckpt.open() gives what a load gives, of any kind of checkpoint, and reads little for it."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    StorageError,
)
from fastckpt.lazy.tensors import LazyTensors
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import Recorder, process_on
from tests.kit.forgeries import sealed_bytes
from tests.kit.kinds import (
    KINDS,
    by_fastckpt,
    by_safetensors,
    by_torch,
    dcp_by_torch,
    flat,
    hugging_face,
    iterations,
    same,
    steps,
)
from tests.kit.noise import flip

INDEXES: list[Any] = [
    ...,
    0,
    -1,
    slice(2, 5),
    slice(None, None, 3),
    slice(7, 2),
    (slice(1, 4), 2),
    (..., slice(0, 3)),
    (None, 1, ..., slice(1, None, 2)),
    (),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_those_of_the_tensor(kind: str, disk: Path) -> None:
    state = flat()
    make, is_verified = KINDS[kind]
    with fastckpt.open(make(state, disk)) as tensors:
        assert {*tensors} == {*state} and len(tensors) == len(state)
        assert tensors.is_verified == is_verified
        for name, expected in state.items():
            lazy = tensors[name]
            assert (lazy.dtype, lazy.shape, lazy.nbytes) == (
                expected.dtype,
                expected.shape,
                expected.numel() * expected.itemsize,
            )
            assert all(os.path.exists(shard.path) for shard in lazy.shards)
            same(lazy[...], expected)
        for index in INDEXES:
            same(tensors["w.bfloat16"][index], state["w.bfloat16"][index])
            same(tensors["large"][index], state["large"][index])


@pytest.mark.parametrize("convert", [torch.as_tensor, torch.tensor, torch.asarray])
def test_torch_makes_a_tensor_of_one_read(convert: Any, disk: Path) -> None:
    state = flat() | {"conj": torch.randn(3, 2, dtype=torch.complex64).conj()}
    with fastckpt.open(by_fastckpt(state, disk)) as tensors:
        reads = counted_reads(tensors)
        for name, expected in state.items():
            same(convert(tensors[name]), expected.resolve_conj())
            assert reads.pop() == 1 and not reads


@pytest.mark.parametrize("convert", [np.asarray, np.array, np.float64])
def test_numpy_makes_an_array_of_one_read(convert: Any, disk: Path) -> None:
    state = flat()
    with fastckpt.open(by_fastckpt(state, disk)) as tensors:
        reads = counted_reads(tensors)
        for name, expected in state.items():
            if expected.dtype in (torch.bfloat16, torch.float8_e4m3fn):
                with pytest.raises(TypeError, match=rf"'{name}' is of torch\..*tensor\[\.\.\.\]"):
                    convert(tensors[name])
                assert not reads
                continue
            array, wanted = convert(tensors[name]), convert(expected.numpy())
            assert array.dtype == wanted.dtype and np.array_equal(array, wanted)
            assert reads.pop() == 1 and not reads


def test_an_array_without_a_copy_is_refused(disk: Path) -> None:
    with (
        fastckpt.open(by_fastckpt(flat(), disk)) as tensors,
        pytest.raises(ValueError, match="'large' is not in memory"),
    ):
        tensors["large"].__array__(copy=False)


def counted_reads(tensors: LazyTensors) -> list[int]:
    """Returns a list that gets the number of parts of each read to come."""
    reads: list[int] = []
    read = tensors._read

    def counting(wanted: Any) -> None:
        reads.append(len(wanted))
        read(wanted)

    tensors._read = counting  # type: ignore[method-assign]
    return reads


def test_views_of_one_storage(disk: Path) -> None:
    base = torch.arange(60.0)
    views = {
        "base": base,
        "t": base.view(6, 10).t(),
        "step": base[3::7],
        "expanded": base[:5].expand(4, 5),
        "overlapping": base.as_strided((4, 6), (3, 1), 2),
        "nested": [{"of": base.view(3, 4, 5).permute(2, 0, 1)}, "text"],
    }
    fastckpt.save(views, disk / "a.pt").result(60)
    with fastckpt.open(disk / "a.pt") as tensors:
        flat = {**views, "nested/0/of": views["nested"][0]["of"]}  # type: ignore[index]
        del flat["nested"]
        assert {*tensors} == {*flat}
        for name, expected in flat.items():
            assert torch.equal(tensors[name][...], expected), name  # type: ignore[arg-type]
            assert torch.equal(tensors[name][1:3], expected[1:3]), name  # type: ignore[index]


def test_a_snapshot_in_the_hub_cache_has_links(disk: Path) -> None:
    state = {"a": torch.ones(3), "b": torch.zeros(2)}
    (disk / "blobs").mkdir()
    (disk / "snapshot").mkdir()
    hugging_face(state, disk / "blobs")
    for number, file in enumerate(sorted((disk / "blobs").iterdir())):
        file.rename(disk / "blobs" / str(number))
        (disk / "snapshot" / file.name).symlink_to(f"../blobs/{number}")
    with fastckpt.open(disk / "snapshot") as tensors:
        assert torch.equal(tensors["a"][...], state["a"]) and [*tensors] == ["a", "b"]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_file_of_dcp_that_leads_elsewhere_is_refused(disk: Path) -> None:
    path = dcp_by_torch({"a": torch.ones(3)}, disk)
    (file,) = path.glob("*.distcp")
    file.rename(disk / "elsewhere")
    file.symlink_to(disk / "elsewhere")
    with pytest.raises(fastckpt.IncompatibleCheckpoint, match="outside the checkpoint"):
        fastckpt.open(path)


class Exploding:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("name", ["step-00000001", "best"])
def test_a_step_that_was_not_committed_is_none(disk: Path, name: str) -> None:
    """Its one file of tensors may hold anything."""
    with fastckpt.Checkpointer(disk) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1 << 18), "n": 1}).result(60)
    directory = (disk / "step-00000001").rename(disk / name)
    (directory / "manifest.json").unlink()
    with pytest.raises(fastckpt.CheckpointError, match="its save was not committed"):
        fastckpt.open(directory)
    (directory / "objects.pt").unlink()
    with pytest.raises(fastckpt.CheckpointError, match="not copied completely"):
        fastckpt.load_into({"w": torch.zeros(1 << 18)}, directory)


@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_a_tracker_that_is_no_file_holds_nobody_up(kind: str, disk: Path) -> None:
    """Nobody may ever write to a FIFO, and a device may never end."""
    run = iterations(flat(), disk)
    tracker = run / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    if kind == "fifo":
        os.mkfifo(tracker)
    elif kind == "directory":
        tracker.mkdir()
    else:
        tracker.symlink_to("/dev/zero")
    failures: list[BaseException] = []

    def look() -> None:
        try:
            fastckpt.open(run)
        except BaseException as error:
            failures.append(error)

    looks = threading.Thread(target=look, daemon=True)
    looks.start()
    looks.join(60)
    assert not looks.is_alive()
    (failure,) = failures
    assert isinstance(failure, StorageError), failure
    assert str(tracker) in str(failure) and "it is not a regular file" in str(failure)


def test_a_tracker_may_be_a_link(disk: Path) -> None:
    run = iterations(flat(), disk)
    tracker = run / "latest_checkpointed_iteration.txt"
    tracker.rename(disk / "elsewhere")
    tracker.symlink_to(disk / "elsewhere")
    with fastckpt.open(run) as tensors:
        assert tensors.path == str(run / "iter_0000012")


def test_no_code_of_the_file_is_run(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(disk)
    torch.save({"w": torch.ones(3), "x": Exploding()}, disk / "a.pt")
    with fastckpt.open(disk / "a.pt") as tensors:
        assert [*tensors] == ["w"] and tensors["w"][...].tolist() == [1, 1, 1]
    assert not (disk / "exploded").exists()


def test_only_the_blocks_asked_for_are_read(disk: Path) -> None:
    state = {"w": torch.randn(16 << 20)}  # 64 MiB, 8 blocks
    fastckpt.save(state, disk / "a.pt").result(60)
    flip(disk / "a.pt", 60 << 20)
    with fastckpt.open(disk / "a.pt") as tensors:
        assert torch.equal(tensors["w"][: 1 << 20], state["w"][: 1 << 20])
        with pytest.raises(CorruptCheckpoint, match="data/0"):
            tensors["w"][15 << 20 :]


@pytest.mark.parametrize("save", [by_fastckpt, steps])
def test_small_tensors_read_one_by_one_read_a_block_once(
    save: Callable[[Any, Path], Path], disk: Path
) -> None:
    state = {f"layer {number}": torch.full((256,), float(number)) for number in range(2000)}
    state["column"] = torch.arange(10.0).reshape(5, 2)
    path = save(state, disk)
    storage = Recorder()
    with process_on(storage), fastckpt.open(path) as tensors:
        storage.log.clear()
        for name, tensor in state.items():
            assert torch.equal(tensors[name][...], tensor)
        assert torch.equal(tensors["column"][::2, 1], state["column"][::2, 1])
    # The last may lie in the tail, whose first page shares a block with them.
    assert 1 <= storage.names_logged().count("read") <= 2


def test_a_damaged_block_is_damaged_for_each_of_its_tensors(disk: Path) -> None:
    state = {f"layer {number}": torch.full((1 << 16,), float(number)) for number in range(100)}
    path = by_fastckpt(state, disk)  # four blocks of 8 MiB
    flip(path, 20 << 20)
    with fastckpt.open(path) as tensors:
        damaged = []
        for name, tensor in state.items():
            try:
                assert torch.equal(tensors[name][...], tensor)
            except CorruptCheckpoint:
                damaged.append(name)
    assert 31 <= len(damaged) <= 34 and "layer 79" in damaged


def test_prefetch_reads_ahead_and_gives_each_once(disk: Path) -> None:
    state = flat()
    with fastckpt.open(by_fastckpt(state, disk)) as tensors:
        tensors.prefetch(["large", "scalar"])
        tensors.prefetch(["large"])
        assert torch.equal(tensors["large"][3], state["large"][3])
        assert torch.equal(tensors["large"][...], state["large"])
        tensors.prefetch(["empty"])
        with pytest.raises(TypeError, match="names is 'large', must be a list"):
            tensors.prefetch("large")
    with pytest.raises(ValueError, match="is closed"):
        tensors["large"][0]


def test_threads_read_at_a_time(disk: Path) -> None:
    state = {f"w{i}": torch.randn(200_000) for i in range(12)}
    with fastckpt.open(steps(state, disk)) as tensors:
        found: dict[str, torch.Tensor] = {}

        def read(name: str) -> None:
            found[name] = tensors[name][...]

        threads = [threading.Thread(target=read, args=(name,)) for name in state]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(found[name], state[name]) for name in state)


def interrupted(tensors: fastckpt.LazyTensors, at: int) -> bool:
    """Reads with an interrupt at one of the places where a signal handler may run: when a function
    that the bookkeeping of a read calls has begun or, if it is one of C, has returned. Returns
    whether there are so many.
    """
    own, count = LazyTensors._read.__code__, 0

    def look(frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        caller = frame.f_back.f_code if event == "call" and frame.f_back else frame.f_code
        if caller is own and event in ("call", "c_return"):
            count += 1
            if count == at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        tensors["w"][...]
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_an_interrupted_read_does_not_hold_up_close(disk: Path) -> None:
    path, at = by_torch({"w": torch.ones(300)}, disk), 1
    while True:
        tensors = fastckpt.open(path)
        was_interrupted = interrupted(tensors, at)
        closing = threading.Thread(target=tensors.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive(), f"the interrupt at place {at} has left a read under way"
        if not was_interrupted:
            break
        at += 1
    assert at > 4


def test_an_open_step_is_not_removed(disk: Path) -> None:
    with fastckpt.Checkpointer(disk / "run", keep_last=1) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1 << 20)}).result(60)
        with fastckpt.open(disk / "run") as tensors:
            for step in (2, 3):
                checkpointer.save(step, {"w": torch.zeros(1 << 20)}).result(60)
            assert tensors["w"][:3].tolist() == [1, 1, 1]
        checkpointer.save(4, {"w": torch.zeros(3)}).result(60)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("kind", ["hugging face", "one file", "dcp of torch", "root"])
def test_a_manifest_of_others_is_passed_over(kind: str, disk: Path) -> None:
    state = flat()
    make = by_safetensors if kind == "one file" else KINDS[kind][0]
    path = make(state, disk)
    path = path if path.is_dir() else disk
    (path / "manifest.json").write_text('{"files": ["model-1.safetensors"]}')
    with fastckpt.open(path) as tensors:
        assert {*tensors} == {*state}
        same(tensors["large"][...], state["large"])


def test_a_step_that_lacks_its_objects_is_damaged(disk: Path) -> None:
    with fastckpt.Checkpointer(disk) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(1 << 20)}).result(60)
    (disk / "step-00000001" / "objects.pt").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"objects\.pt"):
        fastckpt.open(disk / "step-00000001")
    (disk / "mine").mkdir()
    (disk / "mine" / "manifest.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match=r"mine/manifest\.json"):
        fastckpt.open(disk / "mine")


@pytest.mark.parametrize("error", [CorruptCheckpoint, IncompatibleCheckpoint])
def test_a_damaged_manifest_is_not_passed_over_in_silence(
    error: type[Exception], disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fastckpt.Checkpointer(disk) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.zeros(9)}).result(60)
    manifest = disk / "step-00000002" / "manifest.json"
    content = manifest.read_bytes().replace(b'"version":2', b'"version":5')
    unsealed = content.partition(b',"sha256"')[0]
    manifest.write_bytes(content if error is CorruptCheckpoint else sealed_bytes(unsealed))
    caplog.clear()
    with fastckpt.open(disk) as tensors:
        assert tensors.facts["step"] == 1
    (told,) = caplog.messages
    assert told.startswith(f"skipping {disk / 'step-00000002'}: ") and "manifest" in told
    shutil.rmtree(disk / "step-00000001")
    with pytest.raises(error, match=r"no step under .*manifest"):
        fastckpt.open(disk)


@pytest.mark.parametrize("save", [by_fastckpt, by_torch, steps])
def test_the_empty_key_is_a_key(save: Callable[[Any, Path], Path], disk: Path) -> None:
    large = torch.randn(300, 1100)
    state = {"": {"a": large, "": torch.ones(2)}, "a": torch.zeros(4), "b": {"": torch.ones(5)}}
    names = {"/a": (300, 1100), "/": (2,), "a": (4,), "b/": (5,)}
    path = save(state, disk)
    with fastckpt.open(path) as tensors:
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == names
        same(tensors["/a"][...], large)
    mine = {"": {"a": torch.zeros(300, 1100), "": torch.zeros(2)}, "b": {"": torch.zeros(5)}}
    assert fastckpt.load_into(mine, path).unexpected == ("a",)
    same(mine[""]["a"], large)


def test_a_bare_tensor_has_the_name_of_no_keys(disk: Path) -> None:
    torch.save(torch.ones(3), disk / "a.pt")
    with fastckpt.open(disk / "a.pt") as tensors:
        assert [*tensors] == [""]
    target = torch.zeros(3)
    assert not any(fastckpt.load_into(target, disk / "a.pt"))
    same(target, torch.ones(3))
    target = torch.zeros(3)
    assert not any(fastckpt.load_into({"": target}, disk / "a.pt"))
    same(target, torch.ones(3))


def nothing(disk: Path) -> Path:
    return disk / "missing"


def text(disk: Path) -> Path:
    (disk / "a.txt").write_text("not a checkpoint")
    return disk / "a.txt"


def cut(disk: Path) -> Path:
    path = by_torch(flat(), disk)
    path.write_bytes(path.read_bytes()[:5000])
    return path


def emptied(disk: Path) -> Path:
    (disk / "a.pt").touch()
    return disk / "a.pt"


def hostile(disk: Path) -> Path:
    path = disk / "h.pt"
    torch.save({"w": torch.ones(3)}, path)
    content = path.read_bytes()
    path.write_bytes(content.replace(pickle.dumps(3, 2)[2:4], b"K\xff", 1))
    return path


def with_a_record_twice(disk: Path) -> Path:
    path = by_torch(flat(), disk)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr(archive.namelist()[0], archive.read(archive.namelist()[0]))
    return path


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (nothing, StorageError, "ENOENT"),
        (text, CheckpointError, "neither a zip file"),
        (cut, CorruptCheckpoint, "truncated or damaged"),
        (with_a_record_twice, CorruptCheckpoint, "names 'data.pkl' more than once"),
        (emptied, CorruptCheckpoint, r"a\.pt' is empty"),
        (lambda disk: disk, CheckpointError, "the directory is empty"),
    ],
)
def test_what_is_no_checkpoint_is_told(
    make: Callable[[Path], Path], error: type[Exception], words: str, disk: Path
) -> None:
    with pytest.raises(error, match=words):
        fastckpt.open(make(disk))


@pytest.mark.parametrize(
    "index",
    [[0], torch.ones(2).bool(), True, 1.0, "a", torch.tensor([1]), torch.tensor(True)],
)
def test_other_indexes_are_refused(index: Any, disk: Path) -> None:
    with fastckpt.open(by_torch(flat(), disk)) as tensors:
        with pytest.raises(TypeError, match="is indexed by integers, slices"):
            tensors["large"][index]
        with pytest.raises(IndexError):
            tensors["large"][0, 0, 0]
        with pytest.raises(IndexError):
            tensors["large"][300]
        with pytest.raises(ValueError, match="step"):
            tensors["large"][::-1]
        with pytest.raises(KeyError, match="large"):
            tensors["larg"]


def test_parts_of_a_step_are_read_by_the_file_that_is_open(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = flat()
    fastckpt.Checkpointer(disk).save(1, state).result(60)
    with fastckpt.open(disk) as tensors:
        for name, tensor in state.items():
            assert torch.equal(tensors[name][...], tensor)  # opens what it is in
        opened: list[str] = []
        real = Storage.open

        def noted(storage: Storage, path: str) -> int:
            opened.append(path)
            return real(storage, path)

        monkeypatch.setattr(Storage, "open", noted)
        for name, tensor in state.items():
            assert torch.equal(tensors[name][...], tensor)
    assert not opened
