"""fastckpt.open() of what is damaged, or was made to do harm: one error that tells, and no code."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fastckpt
from fastckpt.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.lazy.torch_names import names_of
from fastckpt.state.tree import TENSOR, Stored
from tests.kit.noise import flip
from tests.kit.trees import MALFORMED

STORAGE = (
    b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x0ctQ"
)


def zipped(path: Path, content: bytes, **records: bytes) -> Path:
    """Writes a torch zip of which the pickle is given."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", content)
        archive.writestr("a/data/0", bytes(48))
        for name, record in records.items():
            archive.writestr(f"a/{name}", record)
    return path


def refused(
    path: Path,
    kind: type[Exception] | tuple[type[Exception], ...] = CorruptCheckpoint,
    words: str | None = None,
) -> None:
    with pytest.raises(kind, match=words) as caught:
        fastckpt.open(path)
    assert str(caught.value).count(repr(str(path))) <= 1


@pytest.mark.parametrize("name", ["\ud800.safetensors", "a/b.safetensors", "\0", "..", ""])
def test_an_index_names_files_that_can_be(name: str, disk: Path) -> None:
    """JSON can escape half of a surrogate pair, which no file's name has."""
    index = disk / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CorruptCheckpoint, match=r"index\.json'.* must be the name of a file in"):
        fastckpt.open(disk)


def test_a_foreign_byte_order_is_refused(disk: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3)}, buffer)
    buffer.seek(0)
    with zipfile.ZipFile(buffer) as archive:
        content = archive.read("archive/data.pkl")
    path = zipped(disk / "a.pt", content, byteorder=b"big")
    refused(path, IncompatibleCheckpoint, "byte order is b'big'")
    with fastckpt.open(zipped(disk / "b.pt", content, byteorder=b"little")) as tensors:
        assert tensors["w"].shape == (3,)


BIG = b"\x8a\x08" + struct.pack("<q", 1 << 62)


def tensor(shape: bytes, strides: bytes) -> bytes:
    """Returns the pickle of a tensor over a storage of 12 floats."""
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n"
    return rebuild + STORAGE + b"K\x00" + shape + strides + b"\x89NtR"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def doubling(depth: int) -> bytes:
    """Returns a list that holds a list twice, which holds one twice, and so on, and a tensor."""
    content = b"\x80\x02" + tensor(b"(K\x03t", b"(K\x01t") + b"q\x00"
    for number in range(depth):
        content += b"]q%c(h%ch%ce" % (number + 1, number, number)
    return content + b"."


ORDERED = b"ccollections\nOrderedDict\n"


def many_arguments(count: int) -> bytes:
    """Returns calls with one tuple of many arguments, again and again."""
    content = b"\x80\x02(" + b"N" * count + b"tq\x00" + b"ctorch\ndevice\nq\x01"
    return content + b"h\x01h\x00R" * count + b"."


def long_names(count: int) -> bytes:
    """Returns globals with one long name, again and again."""
    content = b"\x80\x02" + text("x" * 20_000) + b"q\x00"
    return content + b"h\x00h\x00\x93" * count + b"."


def long_keys(count: int) -> bytes:
    """Returns a dict of which each key is a tuple of one long text, many times."""
    content = b"\x80\x02" + text("x" * 20_000) + b"q\x00" + b"N]q\x01}"
    for number in range(count):
        content += b"(" + b"h\x00" * 200 + b"M" + struct.pack("<H", number) + b"th\x01s"
    return content + b"."


def long_storages(count: int) -> bytes:
    """Returns storages with one long name, again and again."""
    content = b"\x80\x02" + text("x" * 20_000) + b"q\x00" + STORAGE
    named = STORAGE.replace(text("0"), b"h\x00")
    return content + named * count + b"."


def circle() -> bytes:
    """Returns a dict that is its own item, under an empty key."""
    return b"\x80\x02}q\x00" + text("") + b"h\x00s" + text("p" * 50_000) + b"0."


def hashed(depth: int) -> bytes:
    """Returns an OrderedDict made of pairs, of which the key is a deep tuple."""
    key = b"K\x01" + b"\x85" * depth
    return b"\x80\x02" + ORDERED + b"](" + key + b"K\x01te" + b"\x85R."


def recursive() -> bytes:
    """Returns a call of _rebuild_from_type_v2 that calls itself, many times."""
    callee = b"ctorch._tensor\n_rebuild_from_type_v2\n"
    content = b"N"
    for _ in range(2000):
        content = b"(" + callee + b"N" + content + b"Nt"
    return b"\x80\x02" + callee + content + b"R."


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02\xff.",
        b"\x80\x02}.more"[:2],
        b"\x80\x02" + tensor(b"(K\x0dt", b"(K\x01t") + b".",
        b"\x80\x02" + tensor(b"(K\x03t", b"(K\x07t") + b".",
        b"\x80\x02" + tensor(b"(K\x03K\x03t", b"(K\x01t") + b".",
        b"\x80\x02" + tensor(b"\x88\x85", b"K\x01\x85") + b".",
        b"\x80\x02" + tensor(b")" + b"\x85" * 100_000, b"K\x01\x85") + b".",
        b"\x80\x02" + tensor(b"(" + b"K\x01" * 65 + b"t", b"(" + b"K\x01" * 65 + b"t") + b".",
        b"\x80\x02" + tensor(b"X\x01\x00\x00\x003", b"X\x01\x00\x00\x001") + b".",
        b"\x80\x02" + tensor(b"(K\x00" + BIG * 2 + b"t", b"(K\x00K\x00K\x00t") + b".",
        doubling(60),
        many_arguments(100_000),
        long_names(20_000),
        long_keys(1000),
        long_storages(1000),
        circle(),
        hashed(100_000),
        b"\x80\x02" + ORDERED + b"]" + b"\x85R.",
        b"\x80\x02" + STORAGE[:-2] + b"K\x0cK\x0ctQ.",
    ],
)
def test_a_hostile_pickle_is_refused(content: bytes, disk: Path) -> None:
    refused(zipped(disk / "a.pt", content), (CorruptCheckpoint, IncompatibleCheckpoint))


def test_deep_nests_are_walked(disk: Path) -> None:
    content = b"\x80\x02" + b"]" * 200 + tensor(b"(K\x03t", b"(K\x01t") + b"a" * 200 + b"."
    with fastckpt.open(zipped(disk / "a.pt", content)) as tensors:
        assert len(tensors) == 1
    with fastckpt.open(zipped(disk / "b.pt", recursive())) as tensors:
        assert not tensors and tensors.others == {"torch.Tensor": 1}


def test_opcodes_of_old_protocols_are_told(disk: Path) -> None:
    torch.save({"w": torch.ones(3), "n": 5}, disk / "a.pt", pickle_protocol=0)
    refused(disk / "a.pt", IncompatibleCheckpoint, "protocol 2 or later")


def test_a_record_across_the_end_of_the_body(disk: Path) -> None:
    """Only somebody who means it makes such a file: its checksums are right."""
    import zlib

    from fastckpt.formats import torch_zip

    path = disk / "a.pt"
    fastckpt.save({"x": torch.ones(7500), "y": torch.ones(100)}, path).result(60)
    content = bytearray(path.read_bytes())
    offset = torch_zip.tail_offset(bytes(content[-torch_zip.END_BYTES :]), len(content))
    assert offset is not None
    name = b"archive/data/1"
    at = content.index(name, content.index(b"PK\x01\x02", offset)) - 46
    struct.pack_into("<I", content, at + 42, offset + 64)  # the record behind data/0
    content[-8:] = f"{zlib.crc32(content[offset:-8]):08x}".encode()
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="has a wrong offset"):
        fastckpt.open(path)


def directory_at(content: bytes) -> int:
    return content.index(b"PK\x01\x02")


@pytest.mark.parametrize("offset", [0xFFFFFFFE, 0x7FFFFFFF, 1])
def test_a_record_that_is_not_where_the_directory_says(offset: int, disk: Path) -> None:
    path = disk / "a.pt"
    torch.save({"w": torch.ones(3)}, path)
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, directory_at(content) + 42, offset)
    path.write_bytes(content)
    refused(path)


def test_a_directory_that_claims_more_than_a_file_may_have(disk: Path) -> None:
    path = disk / "a.pt"
    torch.save({"w": torch.ones(3)}, path)
    content = bytearray(path.read_bytes())
    end = content.rindex(b"PK\x05\x06")
    struct.pack_into("<II", content, end + 12, 0xFFFFFFF0, 16)
    with path.open("wb") as file:
        file.write(content[:4])
        file.truncate(1 << 33)
        file.seek(0, os.SEEK_END)
        file.write(content[end:])
    refused(path)


def test_a_zip_that_another_tool_has_packed(disk: Path) -> None:
    torch.save({"w": torch.ones(3)}, disk / "a.pt")
    extra = struct.pack("<HHQ", 0x5455, 8, 1 << 60)  # a field of another kind
    with zipfile.ZipFile(disk / "a.pt") as old, zipfile.ZipFile(disk / "b.pt", "w") as new:
        new.comment = b"packed anew, PK"
        for info in old.infolist():
            other = zipfile.ZipInfo(info.filename)
            other.extra, other.comment = extra, b"of a record"
            new.writestr(other, old.read(info))
    with fastckpt.open(disk / "b.pt") as tensors:
        assert tensors["w"][...].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("at", "value"), [(8, 0), (10, 1), (10, 0xFFFE), (12, 7), (16, 1)])
def test_an_end_of_a_zip_that_lies(at: int, value: int, disk: Path) -> None:
    zipped(disk / "a.pt", b"\x80\x02].")
    content = bytearray((disk / "a.pt").read_bytes())
    end = content.rindex(b"PK\x05\x06")
    struct.pack_into("<H", content, end + at, value)
    (disk / "a.pt").write_bytes(content)
    if at == 8:  # of this disk; the number in all counts
        fastckpt.open(disk / "a.pt").close()
    else:
        refused(disk / "a.pt")


@pytest.mark.parametrize("part", ["local", "size"])
def test_a_pickle_that_claims_gigabytes(part: str, disk: Path) -> None:
    path = disk / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02].")
    content = bytearray(path.read_bytes())
    at = directory_at(content)
    struct.pack_into("<II", content, at + 20, 0xF0000000, 0xF0000000)
    path.write_bytes(content)
    refused(path)


@pytest.mark.parametrize("nbytes", [0, 3, 4, 100, -30])
@pytest.mark.parametrize("name", ["ours.pt", "torch.pt", "c.safetensors"])
def test_a_cut_file(nbytes: int, name: str, disk: Path) -> None:
    import safetensors.torch

    state, path = {"w": torch.ones(3000)}, disk / name
    fastckpt.save(state, disk / "ours.pt").result(60)
    torch.save(state, disk / "torch.pt")
    safetensors.torch.save_file(state, disk / "c.safetensors")
    os.truncate(path, nbytes if nbytes >= 0 else path.stat().st_size + nbytes)
    refused(path, CheckpointError if nbytes < 4 else CorruptCheckpoint)


def test_the_objects_of_another_step(disk: Path) -> None:
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"n": torch.tensor(step)}).result(60)
    shutil.copy(disk / "run/step-00000001/objects.pt", disk / "run/step-00000002/objects.pt")
    refused(
        disk / "run" / "step-00000002",
        CorruptCheckpoint,
        "and the manifest belong to different saves",
    )
    with fastckpt.open(disk / "run") as tensors:
        assert tensors["n"][...] == 1


@pytest.mark.parametrize("file", ["objects.pt", "manifest.json", "rank-00000.json"])
def test_a_damaged_step_leaves_nothing_open(file: str, disk: Path) -> None:
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(600, 600)}).result(60)
    path = disk / "run" / "step-00000001"
    flip(path / file, 0.5)
    gc.collect()  # what earlier tests have left must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError):
        fastckpt.open(path).close()
    # A thread of an earlier test may close its own in between.
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("value", MALFORMED, ids=str)
def test_a_malformed_placeholder_behind_a_good_one(value: Any) -> None:
    """The good one makes its dtype and shape known."""
    good = {TENSOR: "w", "dtype": "F32", "shape": [3]}
    nest = {"a": good, "b": {"c": good, "d": {**good, TENSOR: "ü"}}}
    found = names_of(pickle.dumps(nest, 2), is_of_step=True)
    stored = Stored("w", torch.float32, (3,))
    assert found.tensors == {"a": stored, "b/c": stored, "b/d": stored._replace(key="ü")}
    assert not found.rest.total
    with pytest.raises(CorruptCheckpoint, match="placeholder for a tensor is malformed"):
        names_of(pickle.dumps({**nest, "e": value}, 2), is_of_step=True)


@pytest.mark.parametrize("nbytes", [None, 0, 100_000])
def test_a_root_is_opened_at_the_newest_step_that_is_whole(
    nbytes: int | None, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fastckpt.Checkpointer(disk) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.full((1 << 19,), float(step))}).result(60)
    shard = disk / "step-00000002" / "rank-00000.safetensors"
    if nbytes is None:
        shard.unlink()
    else:
        os.truncate(shard, nbytes)
    with fastckpt.open(disk) as tensors:
        assert tensors.path == str(disk / "step-00000001")
        assert tensors["w"][0] == 1
    assert str(shard) in caplog.text
    with fastckpt.open(shard.parent) as tensors:  # what was asked for by its name
        assert tensors["w"].shape == (1 << 19,)


def test_one_damaged_tensor_does_not_fail_the_others_that_were_prefetched(disk: Path) -> None:
    state = {"a": torch.randn(4 << 20), "b": torch.randn(4 << 20)}
    fastckpt.save(state, disk / "a.pt").result(60)
    flip(disk / "a.pt", 30 << 20)
    with fastckpt.open(disk / "a.pt") as tensors:
        tensors.prefetch(["a", "b"])
        assert torch.equal(tensors["a"][:1000], state["a"][:1000])
        with pytest.raises(CorruptCheckpoint):
            tensors["b"][...]


class Exploding:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_an_item_of_dcp_that_is_no_tensor(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(disk)
    dcp.save({"a": torch.ones(300)}, checkpoint_id=disk / "dcp")
    (file,) = (disk / "dcp").glob("*.distcp")
    nbytes = file.stat().st_size
    buffer = io.BytesIO()
    torch.save(Exploding(), buffer)
    file.write_bytes(buffer.getvalue()[:nbytes].ljust(nbytes, b"\0"))
    with fastckpt.open(disk / "dcp") as tensors, pytest.raises(CorruptCheckpoint, match="distcp"):
        tensors["a"][...]
    assert not (disk / "exploded").exists()


def test_a_dict_that_stands_in_a_list_fifty_times(disk: Path) -> None:
    state = OrderedDict((f"w{n}", torch.ones(1)) for n in range(100))
    path = disk / "a.pt"
    torch.save([state] * 50, path)
    with fastckpt.open(path) as tensors:
        assert len(tensors) == 5000
