"""What torch.save and torch.load refuse, fastckpt refuses with the same exception and the same
text, out of the same call, and leaves nothing on disk. Must not know about failing disks: there the
library has errors of its own.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import pickle
import re
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.cli import main


def refusal(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    """Type and text of what `call` raises; addresses in the text are made alike."""
    try:
        accepted = call()
    except RecursionError as error:
        return type(error), "too deep"  # the text tells in whose code it was noticed
    except Exception as error:
        return type(error), re.sub(r"0x[0-9a-f]+", "0x", str(error))
    late = accepted.exception() if isinstance(accepted, fastckpt.SaveHandle) else None
    pytest.fail(f"was not refused by the call itself; later: {late!r}")


def refusal_in_the_end(path: Any) -> tuple[type[BaseException], str]:
    """Type and text of what a save to `path` ends in: the file is opened behind save(), which only
    looks whether there is a directory for it.
    """
    with pytest.raises(fastckpt.CheckpointError) as refused:
        fastckpt.save(tensors(), path).result(timeout=60)
    return type(refused.value), str(refused.value)


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(10.0), "b": torch.arange(2_000_000)}


# What cannot be saved.


class Refuses:
    """Fails while it is pickled, after tensors before it were met."""

    def __reduce__(self) -> Any:
        raise ZeroDivisionError("not today")


class Unfindable:
    """Claims a name under which nobody can find it."""

    __qualname__ = "nowhere.Unfindable"


class Interrupted:
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


Local = type("Local", (), {})
Local.__module__ = "a_module_that_is_not_there"


def endless() -> list[Any]:
    outer: list[Any] = []
    for _ in range(100_000):
        outer = [outer]
    return outer


UNSAVEABLE: dict[str, Callable[[], Any]] = {
    "lambda": lambda: lambda: 0,
    "lock": threading.Lock,
    "open file": lambda: open(os.devnull, "rb"),  # noqa: SIM115 - the object that is refused
    "generator": lambda: (n for n in range(3)),
    "module": lambda: os,
    "own error": Refuses,
    "class not found": Unfindable,
    "module not found": Local,
    "too deep": endless,
    "opaque tensor": lambda: torch.rand(2, 3).to_mkldnn(),
    "two types of one storage": lambda: (lambda t: [t, t.view(torch.int32)])(torch.arange(4.0)),
    "two types of a typed storage": lambda: (
        lambda t: [t.storage(), t.view(torch.int32).storage()]
    )(torch.arange(4.0)),
    "storage and its bytes": lambda: (lambda t: [t, t.untyped_storage()])(torch.arange(4.0)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before", [None, b"an older checkpoint"], ids=["new", "existing"])
@pytest.mark.parametrize("name", UNSAVEABLE)
def test_unsaveable_objects(name: str, before: bytes | None, disk: Path) -> None:
    obj = [tensors(), UNSAVEABLE[name]()]
    path = disk / "object.pt"
    if before is not None:
        path.write_bytes(before)
    theirs = refusal(lambda: torch.save(obj, io.BytesIO()))
    assert refusal(lambda: fastckpt.save(obj, path)) == theirs
    assert refusal(lambda: fastckpt.save(obj, io.BytesIO())) == theirs
    assert os.listdir(disk) == ([] if before is None else ["object.pt"])
    assert before is None or path.read_bytes() == before


def test_fake_tensors_are_refused_or_taken_as_by_torch(disk: Path) -> None:
    with torch._subclasses.FakeTensorMode():
        fake = {"a": torch.ones(3), "b": torch.ones(2000, 2000)}
        theirs = refusal(lambda: torch.save(fake, io.BytesIO()))
        assert refusal(lambda: fastckpt.save(fake, disk / "object.pt")) == theirs
    assert os.listdir(disk) == []


def test_tensor_whose_storage_was_freed(disk: Path, committed: Any) -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    torch.save([tensor], disk / "torch.pt")
    path = committed([tensor], disk / "ours.pt")
    theirs = refusal(lambda: torch.load(disk / "torch.pt"))
    assert refusal(lambda: torch.load(path)) == theirs
    assert refusal(lambda: fastckpt.load(path)) == theirs


def test_message_about_two_types(disk: Path) -> None:
    tensor = torch.arange(4.0)
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        fastckpt.save({"a": tensor, "b": tensor.view(torch.int32)}, disk / "object.pt")


def test_interrupt_while_pickling_passes_through(disk: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fastckpt.save([tensors(), Interrupted()], disk / "object.pt")
    assert os.listdir(disk) == []


# Arguments that are refused.


PICKLE_MODULES = {
    "no pickler": types.SimpleNamespace(__name__="bare"),
    "no name": types.SimpleNamespace(Pickler=pickle.Pickler),
    "old dill": types.SimpleNamespace(__name__="dill", __version__="0.2.0", Pickler=pickle.Pickler),
}


@pytest.mark.parametrize("name", PICKLE_MODULES)
def test_pickle_modules_that_torch_refuses(name: str, disk: Path) -> None:
    module = PICKLE_MODULES[name]
    theirs = refusal(lambda: torch.save(tensors(), io.BytesIO(), pickle_module=module))
    assert refusal(lambda: fastckpt.save(tensors(), disk / "a.pt", pickle_module=module)) == theirs
    assert os.listdir(disk) == []


@pytest.mark.parametrize("protocol", [6, 99, "2", None, 2.0])
def test_pickle_protocols_that_torch_refuses(protocol: Any, disk: Path) -> None:
    def save(saver: Any, f: Any) -> Callable[[], Any]:
        return lambda: saver(tensors(), f, pickle_protocol=protocol)

    if protocol is None:  # the newest protocol, says pickle
        fastckpt.save(tensors(), disk / "a.pt", pickle_protocol=None).result(timeout=60)
        assert torch.equal(torch.load(disk / "a.pt", weights_only=False)["b"], tensors()["b"])
        return
    assert refusal(save(fastckpt.save, disk / "a.pt")) == refusal(save(torch.save, io.BytesIO()))
    assert os.listdir(disk) == []


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"object.pt"


class Unwritable:
    write = "not callable"

    def flush(self) -> None:
        """Nothing to flush."""


class Unflushable:
    def write(self, chunk: Any) -> int:
        return len(bytes(chunk))


class Full:
    """Takes so many bytes, then raises."""

    def __init__(self, room: int) -> None:
        self._room = room

    def write(self, chunk: Any) -> int:
        self._room -= len(bytes(chunk))
        if self._room < 0:
            raise ZeroDivisionError("full")
        return len(bytes(chunk))

    def flush(self) -> None:
        """Nothing to flush."""


def closed() -> io.BytesIO:
    buffer = io.BytesIO()
    buffer.close()
    return buffer


NO_TARGETS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "bytes": lambda: b"object.pt",
    "number": lambda: 3,
    "list": list,
    "write is no method": Unwritable,
    "without flush": Unflushable,
    "opened for reading": lambda: open(os.devnull, "rb"),  # noqa: SIM115 - the target
    "opened for text": lambda: open(os.devnull, "w"),  # noqa: SIM115 - the target
    "text buffer": io.StringIO,
    "closed": closed,
    "full at once": lambda: Full(0),
    "full in the header": lambda: Full(500),
    "full in the data": lambda: Full(1_000_000),
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", NO_TARGETS)
def test_targets_that_torch_refuses(
    name: str, legacy: bool, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(disk)

    def save(saver: Any) -> Callable[[], Any]:
        return lambda: saver(
            tensors(), NO_TARGETS[name](), _use_new_zipfile_serialization=not legacy
        )

    assert refusal(save(fastckpt.save)) == refusal(save(torch.save))
    assert os.listdir(disk) == []


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_path_of_bytes(legacy: bool, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (disk / "torch").mkdir()
    monkeypatch.chdir(disk / "torch")
    options = {"_use_new_zipfile_serialization": not legacy}
    try:
        torch.save(tensors(), BytesPath(), **options)
    except AttributeError as error:
        theirs = type(error), str(error)
    else:
        pytest.skip("this torch writes to a file named after the object")
    assert refusal(lambda: fastckpt.save(tensors(), BytesPath(), **options)) == theirs
    assert os.listdir(disk / "torch") == []


def test_wrong_arguments_are_type_errors(disk: Path) -> None:
    for arguments in ((), (1,), (1, disk / "a.pt", pickle, 2, True, False, "one too many")):
        with pytest.raises(TypeError):
            fastckpt.save(*arguments)
    with pytest.raises(TypeError):
        fastckpt.Checkpointer(disk / "run", None, 3)  # type: ignore[misc]
    assert os.listdir(disk) == []


@pytest.mark.parametrize("fence", ["call", "step"])
@pytest.mark.parametrize("name", ["missing/object.pt", "a file/object.pt", "a folder", "x" * 300])
def test_paths_that_cannot_be_written(name: str, fence: Any, disk: Path) -> None:
    """Raised by result(), and caught by whoever catches what torch or open() raises."""
    (disk / "a file").write_bytes(b"kept")
    (disk / "a folder").mkdir()
    path = disk / name
    theirs, _ = refusal(lambda: torch.save(tensors(), path))
    with pytest.raises(OSError) as python:
        path.open("wb")
    with pytest.raises(theirs) as ours:
        fastckpt.save(tensors(), path, options=fastckpt.SaveOptions(fence=fence)).result(timeout=60)
    assert isinstance(ours.value, fastckpt.StorageError) and isinstance(ours.value, OSError)
    assert ours.value.errno == python.value.errno and ours.value.path == str(path)
    assert str(path.parent) in str(ours.value)
    assert sorted(os.listdir(disk)) == ["a file", "a folder"]
    assert (disk / "a file").read_bytes() == b"kept" and os.listdir(disk / "a folder") == []


@pytest.mark.parametrize("name", ["", "new/", "a file/", "a folder/", "a folder/..", "."])
def test_texts_that_name_no_file(name: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (disk / "a file").write_bytes(b"kept")
    (disk / "a folder").mkdir()
    monkeypatch.chdir(disk)
    theirs, _ = refusal(lambda: torch.save(tensors(), name))
    ours, text = refusal_in_the_end(name)
    assert issubclass(ours, theirs) and text
    assert sorted(os.listdir(disk)) == ["a file", "a folder"]
    assert (disk / "a file").read_bytes() == b"kept"


def test_missing_folder_is_not_made(disk: Path) -> None:
    theirs = refusal(lambda: torch.save(tensors(), disk / "missing" / "object.pt"))
    ours = refusal(lambda: fastckpt.save(tensors(), disk / "missing" / "object.pt"))
    assert issubclass(ours[0], theirs[0]) and issubclass(ours[0], OSError)
    told = theirs[1].rstrip(".")  # "Parent directory ... does not exist"
    assert f"{told}; create the directory first" in ours[1]
    assert os.listdir(disk) == []
    for read in (fastckpt.open, functools.partial(fastckpt.load_into, tensors())):
        _, text = refusal(functools.partial(read, disk / "missing" / "object.pt"))
        assert text.endswith(told), "nobody makes a directory to read from"


def test_a_file_system_that_makes_no_files_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        fastckpt.StorageError, match=r"ENOENT\]; .*refuses to create a file"
    ) as told:
        fastckpt.save(tensors(), "/proc/object.pt").result(timeout=60)
    assert "does not exist" not in str(told.value)
    assert main(["doctor", "/proc"]) == 1
    report = capsys.readouterr().out
    assert "'/proc' exists, but its file system refuses" in report and "not exist" not in report


def test_dangling_symlink_into_a_missing_folder(disk: Path) -> None:
    (disk / "link.pt").symlink_to("missing/object.pt")
    with pytest.raises(RuntimeError):
        fastckpt.save(tensors(), disk / "link.pt").result(timeout=60)
    assert os.listdir(disk) == ["link.pt"] and (disk / "link.pt").is_symlink()


def test_symlink_loop(disk: Path) -> None:
    (disk / "a.pt").symlink_to("b.pt")
    (disk / "b.pt").symlink_to("a.pt")
    theirs, _ = refusal(lambda: torch.save(tensors(), disk / "a.pt"))
    ours, text = refusal_in_the_end(disk / "a.pt")
    assert issubclass(ours, theirs) and "ELOOP" in text
    assert sorted(os.listdir(disk)) == ["a.pt", "b.pt"]


# What cannot be loaded.


@pytest.mark.parametrize("mmap", [None, True], ids=["read", "mmap"])
@pytest.mark.parametrize("weights_only", [None, True, False])
@pytest.mark.parametrize(
    "content", [None, b"PK\x03\x04", b"garbage " * 50, b"\x80\x02}q\x00.", b"\0" * 5000]
)
def test_files_that_are_no_checkpoint(
    content: bytes | None, weights_only: bool | None, mmap: bool | None, disk: Path
) -> None:
    path = disk / "object.pt"
    if content is not None:
        path.write_bytes(content)

    def load(loader: Any, f: Any) -> Callable[[], Any]:
        return lambda: loader(f, weights_only=weights_only, mmap=mmap)

    assert refusal(load(fastckpt.load, path)) == refusal(load(torch.load, path))
    assert refusal(load(fastckpt.load, str(path))) == refusal(load(torch.load, str(path)))


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00"])
@pytest.mark.parametrize("weights_only", [None, False])
def test_a_path_whose_pickle_ends_early_is_named(
    content: bytes, weights_only: bool | None, disk: Path
) -> None:
    path = disk / "object.pt"
    path.write_bytes(content)
    with pytest.raises(EOFError):
        torch.load(path, weights_only=weights_only)
    with pytest.raises(EOFError, match=r"'.*object.pt' is empty or was cut off") as named:
        fastckpt.load(path, weights_only=weights_only)
    assert isinstance(named.value, fastckpt.CorruptCheckpoint)
    assert type(pickle.loads(pickle.dumps(named.value))) is type(named.value)
    with pytest.raises(EOFError) as told:  # a file-like has no name to tell
        fastckpt.load(io.BytesIO(content), weights_only=weights_only)
    assert type(told.value) is EOFError


@pytest.mark.parametrize("content", [b"hello world\n", b"X\x02\0\0\0\xff\xfe.", b"s."])
def test_a_file_that_holds_no_pickle_is_named(content: bytes, disk: Path) -> None:
    """torch's interpreter of pickles lets errors of its own out, such as a KeyError."""
    path = disk / "notes.txt"
    path.write_bytes(content)
    with pytest.raises((KeyError, IndexError, UnicodeDecodeError)):
        torch.load(path)
    with pytest.raises(
        pickle.UnpicklingError, match=r"'.*notes.txt' is damaged or was not written by"
    ):
        fastckpt.load(path)


@pytest.mark.parametrize("weights_only", [None, False])
def test_a_fifo_is_refused(weights_only: bool | None, disk: Path) -> None:
    """A load would wait for who writes to it."""
    os.mkfifo(disk / "a.pt")
    with pytest.raises(fastckpt.errors.StorageError, match=r"'.*a.pt' failed: .* it is a FIFO"):
        fastckpt.load(disk / "a.pt", weights_only=weights_only)


def test_folder_is_no_checkpoint(disk: Path) -> None:
    assert refusal(lambda: fastckpt.load(disk)) == refusal(lambda: torch.load(disk))
    (disk / "dangling").symlink_to("nowhere")
    path = disk / "dangling"
    assert refusal(lambda: fastckpt.load(path)) == refusal(lambda: torch.load(path))


@pytest.mark.parametrize("name", ["None", "bytes", "number", "list"])
def test_sources_that_torch_refuses(name: str) -> None:
    source = NO_TARGETS[name]()
    assert refusal(lambda: fastckpt.load(source)) == refusal(lambda: torch.load(source))


class Stream:
    """A file that can only be read forwards."""

    def __init__(self, content: bytes) -> None:
        self._buffer = io.BytesIO(content)

    def read(self, size: int = -1) -> bytes:
        return self._buffer.read(size)

    def readline(self) -> bytes:
        return self._buffer.readline()


@pytest.mark.parametrize("writer", ["torch", "fastckpt"])
def test_file_likes_that_torch_refuses(writer: str, disk: Path, committed: Any) -> None:
    path = disk / "object.pt"
    torch.save(tensors(), path) if writer == "torch" else committed(tensors(), path)

    def both(make: Callable[[], Any], **options: Any) -> None:
        ours = refusal(lambda: fastckpt.load(make(), **options))
        assert ours == refusal(lambda: torch.load(make(), **options))

    both(lambda: Stream(path.read_bytes()))
    both(lambda: io.BytesIO(path.read_bytes()), mmap=True)
    both(lambda: path.open("rb"), mmap=True)
    both(lambda: path.open("ab"))
    both(lambda: path.open("r", encoding="latin-1"))
    both(io.BytesIO)
    both(closed)


BAD_LOAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "pickle module and weights_only": {"pickle_module": pickle, "weights_only": True},
    "old dill": {"pickle_module": PICKLE_MODULES["old dill"]},
    "no unpickler": {"pickle_module": PICKLE_MODULES["no pickler"]},
    "unknown option": {"weights_only": False, "bogus": 1},
    "device that is not there": {"map_location": "cuda:0"},
    "device not there, as device": {"map_location": torch.device("cuda", 1)},
    "device not there, by dict": {"map_location": {"cpu": "cuda:0"}},
    "unknown device": {"map_location": "abacus"},
    "map_location not callable": {"map_location": 3},
    "map_location that fails": {"map_location": lambda storage, location: 1 // 0},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("writer", ["torch", "fastckpt"])
@pytest.mark.parametrize("name", BAD_LOAD_ARGUMENTS)
def test_load_arguments_that_torch_refuses(
    name: str, writer: str, disk: Path, committed: Any
) -> None:
    if torch.cuda.is_available() and "device" in name and name != "unknown device":
        pytest.skip("the device is there")
    path = disk / "object.pt"
    torch.save(tensors(), path) if writer == "torch" else committed(tensors(), path)
    options = BAD_LOAD_ARGUMENTS[name]
    theirs = refusal(lambda: torch.load(path, **options))
    assert refusal(lambda: fastckpt.load(path, **options)) == theirs


class Forbidden:
    """A class that no one declared safe."""


def forbidden_function() -> None:
    """A function that no one declared safe."""


FORBIDDEN: dict[str, Callable[[], Any]] = {
    "class": Forbidden,
    "class of the library": lambda: argparse.Namespace(a=torch.ones(2)),
    "function": lambda: forbidden_function,
    "blocked module": lambda: os.system,
    "module": lambda: torch.nn.Linear(2, 2),
    "builtin": lambda: [range(3)],
    "subclass": lambda: torch.arange(3.0).as_subclass(Subclass),
}


class Subclass(torch.Tensor):
    """A tensor that no one declared safe."""


@pytest.mark.parametrize("writer", ["torch", "fastckpt"])
@pytest.mark.parametrize("name", FORBIDDEN)
def test_text_about_a_forbidden_global(name: str, writer: str, disk: Path, committed: Any) -> None:
    path = disk / "object.pt"
    obj = {"tensor": torch.arange(100.0), "forbidden": FORBIDDEN[name]()}
    torch.save(obj, path) if writer == "torch" else committed(obj, path)
    kind, text = refusal(lambda: torch.load(path))
    assert kind is pickle.UnpicklingError
    assert refusal(lambda: fastckpt.load(path)) == (kind, text)
    assert refusal(lambda: fastckpt.load(path, weights_only=True)) == (kind, text)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", [4, 5])
def test_text_about_a_protocol_that_weights_only_lacks(
    protocol: int, disk: Path, committed: Any
) -> None:
    path = committed(tensors(), disk / "object.pt", pickle_protocol=protocol)
    kind, text = refusal(lambda: torch.load(path))
    assert kind is pickle.UnpicklingError
    assert refusal(lambda: fastckpt.load(path)) == (kind, text)
