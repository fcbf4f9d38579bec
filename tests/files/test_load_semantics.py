"""torch.load's semantics, kept by fastckpt.load for files of either writer: where storages go, what
may be unpickled, which files and streams are understood, what loaded tensors can do. Must not know
how the bytes are read.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import os
import pickle
import sys
import tempfile
import threading
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import LoadEndianness

import fastckpt
from tests.kit.noise import noise

try:
    from torch.utils.serialization import config as torch_config
except ModuleNotFoundError:  # torch before 2.7
    torch_config = None

needs_config = pytest.mark.skipif(torch_config is None, reason="torch 2.7 has it first")

LARGE = 3_000_001  # bytes: more than any buffer, and no multiple of anything


def weights() -> dict[str, Any]:
    shared = torch.arange(2000, dtype=torch.float32)
    return {
        "first": shared[:1000],
        "second": shared[500:1500].reshape(20, 50),
        "large": noise(LARGE, 0),
        "half": torch.arange(33).to(torch.bfloat16),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "bias": torch.nn.Parameter(torch.full((7,), float("nan"))),
        "empty": torch.empty(0, 4),
        "step": 3,
    }


@pytest.fixture(params=["torch", "fastckpt"])
def writer(request: pytest.FixtureRequest, committed: Any) -> Callable[..., Path]:
    """`writer(obj, path)`: saves by torch, or by fastckpt; returns the path."""

    def save(obj: Any, path: Path, **options: Any) -> Path:
        if request.param == "torch":
            torch.save(obj, path, **options)
        else:
            committed(obj, path, **options)
        return path

    return save


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returns, or the exception it raises with its text."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


# Where storages go.


def octets(storage: torch.UntypedStorage) -> bytes:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def to_meta(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    return torch.UntypedStorage(storage.nbytes(), device="meta")


@pytest.mark.parametrize(
    "location",
    [None, "cpu", torch.device("cpu"), {}, {"cpu": "cpu"}, {"cuda:0": "cpu"}],
    ids=["none", "text", "device", "no mapping", "mapping", "unused mapping"],
)
def test_map_location_to_the_cpu(location: Any, writer: Any, disk: Path, assert_same: Any) -> None:
    path = writer(weights(), disk / "object.pt")
    assert_same(fastckpt.load(path, location), weights())
    assert_same(fastckpt.load(path, map_location=location, weights_only=False), weights())


@pytest.mark.parametrize(
    "location",
    ["meta", torch.device("meta"), {"cpu": "meta"}, to_meta],
    ids=["text", "device", "mapping", "callable"],
)
def test_map_location_to_meta(location: Any, writer: Any, disk: Path) -> None:
    path = writer(weights(), disk / "object.pt")
    ours, theirs = (load(path, map_location=location) for load in (fastckpt.load, torch.load))
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        if name == "step":
            assert ours[name] == tensor
            continue
        assert type(ours[name]) is type(tensor)
        for fact in ("device", "dtype", "shape", "requires_grad"):
            assert getattr(ours[name], fact) == getattr(tensor, fact)
        assert ours[name].stride() == tensor.stride()
        offsets = [
            getattr(each[name].untyped_storage(), "_checkpoint_offset", None)
            for each in (ours, theirs)
        ]
        assert offsets[0] == offsets[1]
    assert ours["large"].device.type == "meta"


@pytest.mark.parametrize("answer", ["storage", "None", "copy"])
def test_map_location_callable_is_asked_once_for_each_storage(
    answer: str, writer: Any, disk: Path, assert_same: Any
) -> None:
    path = writer(weights(), disk / "object.pt")

    def asked(load: Any) -> list[tuple[Any, ...]]:
        calls = []

        def place(storage: Any, location: str) -> Any:
            calls.append((type(storage), storage.nbytes(), storage.device, location))
            return {"storage": storage, "None": None, "copy": storage.clone()}[answer]

        assert_same(load(path, map_location=place), weights())
        return calls

    calls = asked(fastckpt.load)
    assert calls == asked(torch.load)
    assert len(calls) == 6  # one of them for the tensor without bytes


def test_map_location_callable_sees_the_bytes(writer: Any, disk: Path) -> None:
    path = writer(weights(), disk / "object.pt")
    seen: dict[int, bytes] = {}

    def look(storage: torch.UntypedStorage, location: str) -> None:
        seen[storage.nbytes()] = octets(storage)

    fastckpt.load(path, look)
    assert seen[LARGE] == octets(weights()["large"].untyped_storage())
    assert seen[8000] == octets(weights()["first"].untyped_storage())


def test_map_location_reaches_wrapper_subclasses_state(writer: Any, disk: Path) -> None:
    path = writer(torch.nn.Linear(3, 4), disk / "object.pt")
    module = fastckpt.load(path, map_location="meta", weights_only=False)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    after = fastckpt.load(path, weights_only=False)  # and does not stay in force
    assert {parameter.device.type for parameter in after.parameters()} == {"cpu"}


# What may be unpickled.


def test_weights_only_is_the_default(writer: Any, disk: Path, assert_same: Any) -> None:
    obj = argparse.Namespace(a=torch.arange(3))
    path = writer(obj, disk / "object.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        fastckpt.load(path)
    assert_same(fastckpt.load(path, weights_only=False), obj)
    assert_same(fastckpt.load(path, pickle_module=pickle), obj)  # which turns the default around
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert_same(fastckpt.load(path), obj)
    with pytest.raises(pickle.UnpicklingError):
        fastckpt.load(path)


class Runs:
    """Runs code when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_weights_only_runs_nothing(writer: Any, disk: Path) -> None:
    path = writer([torch.arange(3), Runs(disk / "ran")], disk / "object.pt")
    with pytest.raises(pickle.UnpicklingError):
        fastckpt.load(path)
    assert not (disk / "ran").exists()
    fastckpt.load(path, weights_only=False)
    assert (disk / "ran").exists()


FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FORCE_NOT = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights_only", [None, True, False])
@pytest.mark.parametrize("switches", [(), (FORCE,), (FORCE_NOT,), (FORCE, FORCE_NOT)], ids=len)
@pytest.mark.parametrize("value", ["1", "YES", "true", "0"])
def test_environment_switches(
    value: str,
    switches: tuple[str, ...],
    weights_only: bool | None,
    writer: Any,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = writer(argparse.Namespace(a=1), disk / "object.pt")
    for switch in switches:
        monkeypatch.setenv(switch, value)
    for module in (None, pickle):
        ours, theirs = (
            outcome(
                lambda load=load, module=module: load(
                    path, pickle_module=module, weights_only=weights_only
                )
            )
            for load in (fastckpt.load, torch.load)
        )
        assert ours == theirs


def test_warning_of_the_environment_switch(
    writer: Any, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = writer(argparse.Namespace(a=1), disk / "object.pt")
    monkeypatch.setenv(FORCE_NOT, "1")
    with pytest.warns(UserWarning, match=FORCE_NOT):
        assert fastckpt.load(path) == argparse.Namespace(a=1)


class Renaming(pickle.Unpickler):
    """Finds a class under its old name, as migrating code does."""

    def find_class(self, module: str, name: str) -> Any:
        return dict if name == "OldName" else super().find_class(module, name)


OldName = type("OldName", (), {})


def test_pickle_module_of_a_load(writer: Any, disk: Path) -> None:
    path = writer([OldName(), torch.arange(4)], disk / "object.pt")
    module = types.SimpleNamespace(__name__="renaming", Unpickler=Renaming, load=pickle.load)
    renamed, tensor = fastckpt.load(path, pickle_module=module)
    assert renamed == {} and torch.equal(tensor, torch.arange(4))
    python = types.SimpleNamespace(__name__="python", Unpickler=pickle._Unpickler)
    assert type(fastckpt.load(path, None, python)[0]) is OldName


@contextlib.contextmanager
def stock_writer(path: Path, records: dict[str, bytes]) -> Iterator[Path]:
    """A file whose records are given one by one."""
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, content in records.items():
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    yield path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("encoding", [None, "latin1", "ascii", "bytes", "utf-8"])
def test_encoding_of_python_2_strings(encoding: str | None, disk: Path) -> None:
    old = b"\x80\x02U\x03\xe9\xe8a."  # a pickle of a Python 2 str
    options = {} if encoding is None else {"encoding": encoding}
    with stock_writer(disk / "object.pt", {"data.pkl": old}) as path:
        ours, theirs = (
            outcome(lambda load=load: load(path, weights_only=False, **options))
            for load in (fastckpt.load, torch.load)
        )
    assert ours == theirs


def test_pickle_load_args_warn_under_weights_only(writer: Any, disk: Path) -> None:
    path = writer(weights(), disk / "object.pt")
    texts = []
    for load in (fastckpt.load, torch.load):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load(path, weights_only=True, encoding="latin1")
        texts.append([(warning.category, str(warning.message)) for warning in caught])
    assert texts[0] == texts[1]


def test_a_plain_load_warns_of_nothing(writer: Any, disk: Path, assert_same: Any) -> None:
    path = writer(weights(), disk / "object.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = fastckpt.load(path)
    assert_same(loaded, weights())


# Files that others wrote.


def rewritten(
    source: Path,
    target: Path,
    folder: str = "object/",
    method: int = zipfile.ZIP_STORED,
    **changes: bytes | None,
) -> Path:
    """A checkpoint zipped anew by a tool that knows nothing of torch."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            record = name.split("/", 1)[1]
            content = changes.get(record, old.read(name))
            if content is not None:
                new.writestr(folder + record, content)
    return target


@pytest.mark.parametrize("folder", ["object/", "another/", "archive/"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_checkpoint_zipped_anew(
    method: int, folder: str, writer: Any, disk: Path, assert_same: Any
) -> None:
    path = rewritten(writer(weights(), disk / "object.pt"), disk / "new.pt", folder, method)
    assert_same(torch.load(path), weights())
    assert_same(fastckpt.load(path), weights())


def test_record_added_by_a_zip_tool(writer: Any, disk: Path, assert_same: Any) -> None:
    """Its bytes are in nobody's checksum: refused, unless the caller does without verification."""
    path = writer(weights(), disk / "object.pt")
    with zipfile.ZipFile(path, "a") as opened:
        opened.writestr(opened.namelist()[0].split("/")[0] + "/extra/note", b"made on Monday")
    assert_same(torch.load(path), weights())
    assert_same(fastckpt.load(path, verify=False), weights())
    if not path.read_bytes()[50:].startswith(b"fastckpt"):
        assert_same(fastckpt.load(path), weights())
    else:
        with pytest.raises(fastckpt.CorruptCheckpoint):
            fastckpt.load(path)


def test_renamed_and_copied_file(writer: Any, disk: Path, assert_same: Any) -> None:
    path = writer(weights(), disk / "object.pt")
    path.rename(disk / "other name.bin")
    assert_same(fastckpt.load(disk / "other name.bin"), weights())


@needs_config
@pytest.mark.parametrize("endianness", [None, *LoadEndianness], ids=str)
@pytest.mark.parametrize("recorded", [b"big", b"little", b"middle", None])
def test_byte_order(
    recorded: bytes | None,
    endianness: Any,
    writer: Any,
    disk: Path,
    assert_same: Any,
) -> None:
    tensors = {"a": torch.arange(300, dtype=torch.int32), "b": torch.arange(5, dtype=torch.int64)}
    path = rewritten(
        writer(tensors, disk / "object.pt"), disk / "new.pt", **{"byteorder": recorded}
    )
    with torch_config.patch({"load.endianness": endianness}):
        ours, theirs = (
            outcome(lambda load=load: load(path)) for load in (fastckpt.load, torch.load)
        )
    assert_same(ours, theirs)
    swapped = recorded == b"big" or (recorded is None and endianness is LoadEndianness.BIG)
    if recorded != b"middle":
        order = {"little": "big", "big": "little"}[sys.byteorder] if swapped else sys.byteorder
        assert (
            ours["a"].numpy().tobytes()
            == tensors["a"].numpy().astype({"big": ">i4", "little": "<i4"}[order]).tobytes()
        )


def test_legacy_file(writer: Any, disk: Path, assert_same: Any) -> None:
    path = writer(weights(), disk / "object.pt", _use_new_zipfile_serialization=False)
    assert_same(fastckpt.load(path), weights())
    assert_same(fastckpt.load(path, weights_only=False), weights())
    with path.open("rb") as file:
        assert_same(fastckpt.load(file), weights())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_file(disk: Path) -> None:
    path = disk / "script.pt"
    torch.jit.save(torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(1, 3)), str(path))
    with pytest.warns(UserWarning, match="TorchScript"):
        module = fastckpt.load(path, weights_only=False)
    assert isinstance(module, torch.jit.ScriptModule)
    assert torch.equal(module(torch.ones(1, 3)), torch.jit.load(str(path))(torch.ones(1, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = (
            outcome(lambda load=load: load(path)) for load in (fastckpt.load, torch.load)
        )
    assert ours == theirs and ours[0] is RuntimeError


@pytest.mark.parametrize("location", [None, "cpu", torch.device("cpu")])
def test_safetensors_file(location: Any, disk: Path, assert_same: Any) -> None:
    saving = pytest.importorskip("safetensors.torch")
    path = disk / "model.safetensors"
    tensors = {"a": torch.arange(1000.0).reshape(10, 100), "b": torch.arange(5).to(torch.bfloat16)}
    saving.save_file(tensors, path)
    ours = fastckpt.load(path, location)
    assert list(ours) == list(saving.load_file(path))
    for name, tensor in tensors.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor)
    assert_same(fastckpt.load(str(path))["a"].clone(), tensors["a"])


@pytest.mark.parametrize("location", [{"cpu": "cpu"}, lambda storage, _: storage, "abacus"])
def test_safetensors_refuses_what_it_refuses_under_torch(location: Any, disk: Path) -> None:
    saving = pytest.importorskip("safetensors.torch")
    saving.save_file({"a": torch.arange(3.0)}, disk / "model.safetensors")
    theirs = outcome(lambda: torch.load(disk / "model.safetensors", location))
    assert outcome(lambda: fastckpt.load(disk / "model.safetensors", location)) == theirs
    assert isinstance(theirs, tuple)


# Streams.


class Minimal:
    """The least that torch.load asks of a file-like."""

    def __init__(self, content: bytes) -> None:
        self._buffer = io.BytesIO(content)
        self.read, self.readline = self._buffer.read, self._buffer.readline
        self.tell, self.seek = self._buffer.tell, self._buffer.seek


def spooled(content: bytes) -> Any:
    file = tempfile.SpooledTemporaryFile()  # noqa: SIM115 - handed to the test
    file.write(content)
    file.seek(0)
    return file


STREAMS: dict[str, Callable[[Path], Any]] = {
    "bytes": lambda path: io.BytesIO(path.read_bytes()),
    "open": lambda path: path.open("rb"),
    "unbuffered": lambda path: path.open("rb", buffering=0),
    "read and write": lambda path: path.open("r+b"),
    "minimal": lambda path: Minimal(path.read_bytes()),
    "spooled": lambda path: spooled(path.read_bytes()),
    "gzip": lambda path: gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(path.read_bytes(), 1))),
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", STREAMS)
def test_streams(name: str, legacy: bool, writer: Any, disk: Path, assert_same: Any) -> None:
    path = writer(weights(), disk / "object.pt", _use_new_zipfile_serialization=not legacy)
    ours, theirs = STREAMS[name](path), STREAMS[name](path)
    assert_same(fastckpt.load(ours), weights())
    torch.load(theirs)
    assert ours.tell() == theirs.tell()
    ours.seek(0)  # neither closed nor used up
    assert_same(fastckpt.load(ours, map_location="cpu", weights_only=False), weights())


def forget(path: Path) -> None:
    """Takes a file out of the page cache, so that a load may read around it."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("buffering", [0, -1], ids=["unbuffered", "buffered"])
def test_an_open_file_is_as_usable_afterwards(
    buffering: int, writer: Any, disk: Path, assert_same: Any
) -> None:
    path = writer(weights(), disk / "object.pt")
    content = path.read_bytes()
    forget(path)
    with path.open("r+b", buffering=buffering) as file:
        assert_same(fastckpt.load(file), weights())
        forget(path)
        file.seek(3)
        assert file.read(1001) == content[3:1004]
        file.seek(0, os.SEEK_END)
        file.write(b"more")
    assert path.read_bytes() == content + b"more"


def test_open_file_without_a_name_any_more(writer: Any, disk: Path, assert_same: Any) -> None:
    path = writer(weights(), disk / "object.pt")
    with path.open("rb") as file:
        path.unlink()
        path.write_bytes(b"something else")
        assert_same(fastckpt.load(file), weights())


@pytest.mark.parametrize("ahead", [b"x", b"preamble" * 1000])
def test_zip_that_begins_at_the_current_position(
    ahead: bytes, writer: Any, disk: Path, assert_same: Any
) -> None:
    path = writer(weights(), disk / "object.pt")
    stream = io.BytesIO(ahead + path.read_bytes())
    stream.seek(len(ahead))
    assert_same(fastckpt.load(stream), weights())


def test_legacy_checkpoints_one_after_another(disk: Path, assert_same: Any) -> None:
    stream = io.BytesIO()
    for step in range(3):
        fastckpt.save(weights() | {"step": step}, stream, _use_new_zipfile_serialization=False)
    stream.seek(0)
    for step in range(3):
        assert_same(fastckpt.load(stream), weights() | {"step": step})
    assert stream.read() == b""


class PathLike:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def test_kinds_of_path(
    writer: Any, disk: Path, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = writer(weights(), disk / "object.pt")
    (disk / "link").symlink_to("object.pt")
    monkeypatch.chdir(disk)
    for each in (path, str(path), PathLike(path), "object.pt", Path("object.pt"), "./link"):
        assert_same(fastckpt.load(each), weights())


# What loaded tensors can do.


@pytest.mark.parametrize("mmap", [None, True], ids=["read", "mmap"])
def test_loaded_storages_are_as_able_as_those_of_torch(
    mmap: bool | None, writer: Any, disk: Path
) -> None:
    path = writer(weights(), disk / "object.pt")

    def abilities(load: Any) -> dict[str, Any]:
        facts = {}
        for name, tensor in load(path, mmap=mmap).items():
            if name == "step":
                continue
            storage = tensor.untyped_storage()
            facts[name] = (
                storage.resizable(),
                storage.nbytes(),
                storage.is_pinned(),
                storage.is_shared(),
                storage.filename,
                tensor.is_inference(),
                tensor._version,
            )
        return facts

    assert abilities(fastckpt.load) == abilities(torch.load)


def test_loaded_tensors_are_written_to_and_shared(writer: Any, disk: Path) -> None:
    loaded = fastckpt.load(writer(weights(), disk / "object.pt"))
    loaded["first"].add_(1)  # of one storage with the second
    assert loaded["second"][0, 0] == 501
    loaded["large"].mul_(2)
    assert torch.equal(loaded["large"], weights()["large"] * 2)
    loaded["scalar"].share_memory_()
    assert loaded["scalar"].is_shared() and loaded["scalar"] == 1.5
    assert loaded["large"].data_ptr() % 64 == 0
    (loaded["bias"] * 2).sum().backward()
    assert loaded["bias"].grad is not None


def test_loaded_tensors_outlive_the_file(writer: Any, disk: Path, assert_same: Any) -> None:
    path = writer(weights(), disk / "object.pt")
    loaded = fastckpt.load(path)
    os.truncate(path, 0)
    path.unlink()
    assert_same(loaded, weights())


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_mmap_maps_the_file_privately(writer: Any, disk: Path, assert_same: Any) -> None:
    path = writer(weights(), disk / "object.pt")
    content = path.read_bytes()
    loaded = fastckpt.load(path, mmap=True)
    assert is_mapped(path)
    assert_same(loaded, weights())
    loaded["large"].fill_(9)
    assert path.read_bytes() == content
    assert_same(fastckpt.load(path), weights())
    del loaded
    assert not is_mapped(path)


def test_mmap_options_of_torch(writer: Any, disk: Path, assert_same: Any) -> None:
    import mmap

    path = writer(weights(), disk / "object.pt")
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        loaded = fastckpt.load(path, mmap=True)
    loaded["large"].fill_(9)
    assert torch.load(path)["large"].eq(9).all()


@needs_config
def test_mmap_by_configuration(writer: Any, disk: Path, assert_same: Any) -> None:
    path = writer(weights(), disk / "object.pt")
    loaded = fastckpt.load(path)
    assert not is_mapped(path)
    with torch_config.patch({"load.mmap": True}):
        loaded = fastckpt.load(path)
        assert is_mapped(path)
        assert_same(loaded, weights())
        unmapped = fastckpt.load(path, mmap=False)
    assert_same(unmapped, weights())


@needs_config
def test_fake_tensor_mode(writer: Any, disk: Path) -> None:
    path = writer(weights(), disk / "object.pt")
    with torch._subclasses.FakeTensorMode():
        ours, theirs = fastckpt.load(path), torch.load(path)
    for name in ("first", "second", "large"):
        assert type(ours[name]) is type(theirs[name])
        assert ours[name].device == theirs[name].device and ours[name].shape == theirs[name].shape
        offsets = [each[name].untyped_storage()._checkpoint_offset for each in (ours, theirs)]
        assert offsets[0] == offsets[1]


def test_sparse_invariants_are_checked(disk: Path, committed: Any) -> None:
    broken = torch.sparse_coo_tensor([[0, 9]], [1.0, 2.0], (3,), check_invariants=False)
    path = committed(broken, disk / "object.pt")
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        ours, theirs = (
            outcome(lambda load=load: load(path)) for load in (fastckpt.load, torch.load)
        )
    assert ours == theirs and isinstance(ours, tuple)


# Loads beside saves and beside each other.


def test_loads_from_many_threads(writer: Any, disk: Path, assert_same: Any) -> None:
    path = writer(weights(), disk / "object.pt")
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                assert_same(fastckpt.load(path), weights())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("place", ["large", "first", "data.pkl"])
def test_flipped_bit_is_noticed_unless_nobody_asks(place: str, disk: Path, committed: Any) -> None:
    path = committed(weights(), disk / "object.pt")
    content = bytearray(path.read_bytes())
    if place == "data.pkl":
        at = content.index(b"scalar")  # the key becomes another one
    else:
        at = content.index(octets(weights()[place].untyped_storage())) + 777
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(fastckpt.CorruptCheckpoint):
        fastckpt.load(path)
    loaded = fastckpt.load(path, verify=False)
    if place == "data.pkl":
        assert "rcalar" in loaded
    else:
        assert not torch.equal(loaded[place], weights()[place])
