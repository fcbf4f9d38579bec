"""The torch zip image before it is a file: its plan, and the bytes it stands for.

A reference renderer turns an Image into bytes in plain Python; torch's own writer, zipfile and
torch.load judge them. Knows layout(), validate() and parse(); must not know the engine or a disk,
apart from the sparse files by which torch shows its headers beyond 4 GiB.
"""

from __future__ import annotations

import ctypes
import io
import json
import pickle
import random
import struct
import types
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats import torch_zip
from fastckpt.formats.image_builder import TAIL_BYTES_MAX
from fastckpt.formats.torch_pickle import Capture, Pickle, capture
from fastckpt.plan.image import BLOCK_BYTES, PAGE_BYTES, Image, address_of, block_count
from fastckpt.reading import verified
from tests.kit.slots import slots_of

config = pytest.importorskip("torch.utils.serialization", reason="torch 2.7 has it first").config

GIB = 1 << 30
FOUR_GIB = 1 << 32
LOCAL_HEADER_BYTES = 30
PREFIX = f"{torch_zip.ARCHIVE}/"
# What torch puts before the storages; the alignment is the layout's to fill in.
PREAMBLE: list[tuple[str, bytes | torch.UntypedStorage]] = [
    ("data.pkl", pickle.dumps("any", protocol=2)),
    (".format_version", b"1"),
    (".storage_alignment", b"64"),
    ("byteorder", b"little"),
]

relaxed = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
around_boundaries = st.builds(
    lambda unit, count, off: max(0, unit * count + off),
    st.sampled_from([64, PAGE_BYTES]),
    st.integers(1, 4),
    st.integers(-2, 2),
)
small_sizes = st.one_of(st.sampled_from([0, 1, 4]), st.integers(0, 300), around_boundaries)
sizes_to_render = st.lists(st.one_of(small_sizes, st.integers(0, 60_000)), max_size=24)
# Sizes of storages that nobody touches: only their place in the plan counts.
virtual_sizes = st.one_of(
    small_sizes,
    st.integers(0, 2 * BLOCK_BYTES),
    st.builds(lambda off: BLOCK_BYTES + off, st.integers(-2, 2)),
    st.builds(lambda off: FOUR_GIB + off, st.integers(-2, 2)),
    st.integers(GIB, 6 * GIB),
)


def storage_of(nbytes: int, seed: int) -> torch.UntypedStorage:
    """A storage of random bytes that depend on the seed."""
    content = random.Random(seed).randbytes(nbytes)
    storage = torch.UntypedStorage(nbytes)
    if nbytes:
        ctypes.memmove(storage.data_ptr(), content, nbytes)
    return storage


def tensor_of(nbytes: int, seed: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage_of(nbytes, seed))


def untouched(sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """Tensors of these sizes in bytes whose memory has no pages yet."""
    return {
        f"tensor {number}": torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage(nbytes))
        for number, nbytes in enumerate(sizes)
    }


def captured(obj: object) -> Capture:
    return capture(obj, pickle, 2, False, False)


def with_records(records: Sequence[tuple[str, bytes | torch.UntypedStorage]]) -> Capture:
    return of_records([*PREAMBLE, *records])


def of_records(records: Sequence[tuple[str, bytes | torch.UntypedStorage]]) -> Capture:
    (_name, pickled), *others = records
    assert isinstance(pickled, bytes)
    return Capture(Pickle(pickled), others, [])


def storages_of(taken: Capture) -> list[torch.UntypedStorage]:
    contents = [content for _, content in taken.records]
    return [c for c in contents if isinstance(c, torch.UntypedStorage) and c.nbytes()]


def render(image: Image) -> bytes:
    """The file an Image stands for, in the plainest way."""
    body = bytearray(image.body_nbytes)
    segment_crcs = []
    for segment in image.rows():
        content = ctypes.string_at(segment.address, segment.nbytes)
        body[segment.offset : segment.offset + segment.nbytes] = content
        segment_crcs.append(zlib.crc32(content))
    slot_crcs = [segment_crcs[slot.segment] for slot in slots_of(image)]
    for slot, crc in zip(slots_of(image), slot_crcs, strict=True):
        body[slot.offset : slot.offset + 4] = crc.to_bytes(4, "little")
    blocks = [body[at : at + BLOCK_BYTES] for at in range(0, len(body), BLOCK_BYTES)]
    return bytes(body) + image.tail([zlib.crc32(block) for block in blocks], slot_crcs)


def tail_without_crcs(image: Image) -> bytes:
    blocks = block_count(image.body_nbytes, BLOCK_BYTES)
    return image.tail([0] * blocks, [0] * len(slots_of(image)))


def check_plan(image: Image, storages: Sequence[torch.UntypedStorage]) -> None:
    """Every byte of the body belongs to one segment, every storage to one slot."""
    rows = list(image.rows())
    end = 0
    for segment in rows:
        assert segment.offset == end
        assert segment.nbytes > 0
        assert segment.address != 0
        end += segment.nbytes
    assert end == image.body_nbytes
    assert image.body_nbytes % PAGE_BYTES == 0
    assert image.nbytes == image.body_nbytes + image.tail_nbytes
    described = []
    for slot in slots_of(image):
        holder = rows[slot.segment + 1]
        assert holder.offset <= slot.offset
        assert slot.offset + 4 <= holder.offset + holder.nbytes
        described.append((rows[slot.segment].address, rows[slot.segment].nbytes))
    assert described == [(storage.data_ptr(), storage.nbytes()) for storage in storages]
    assert len(tail_without_crcs(image)) == image.tail_nbytes


def entries(file: bytes) -> dict[str, zipfile.ZipInfo]:
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        return {info.filename.split("/", 1)[1]: info for info in archive.infolist()}


def alignment_of(file: bytes) -> int:
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        return int(archive.read(f"{PREFIX}.storage_alignment"))


def without_mark(file: bytes) -> bytes:
    """The file with torch's padding where the mark stands."""
    mark_offset = file.index(torch_zip.MARK)
    mark = slice(mark_offset, mark_offset + len(torch_zip.MARK))
    assert file[mark] == torch_zip.MARK
    return file[: mark.start] + b"Z" * len(torch_zip.MARK) + file[mark.stop :]


def assert_same_records(ours: bytes, stock: bytes) -> None:
    """Equal byte for byte to where the last data record ends, but for the mark."""
    end = entries(stock)["version"].header_offset
    assert entries(ours)[torch_zip.RECORD].header_offset == end
    assert without_mark(ours)[:end] == stock[:end]


def with_our_pickle(obj: object) -> Any:
    """A pickle module that gives torch.save our pickle of an object, so that all else that torch
    writes can be compared.
    """
    content = dict(captured(obj).records)["data.pkl"]

    class Pickler(pickle.Pickler):
        def __init__(self, file: io.BytesIO, protocol: int) -> None:
            super().__init__(io.BytesIO(), protocol)
            file.write(content)  # type: ignore[arg-type]

    return types.SimpleNamespace(__name__="ours", Pickler=Pickler)


def stock_save(obj: object, alignment: int) -> bytes:
    buffer = io.BytesIO()
    with config.patch({"save.storage_alignment": alignment}):
        torch.save(obj, buffer, with_our_pickle(obj))
    return buffer.getvalue()


def stock_records(
    records: Sequence[tuple[str, bytes | torch.UntypedStorage]], alignment: int
) -> bytes:
    """The file torch's own zip writer makes of these records."""
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer, True, alignment)
    for name, content in records:
        if name == ".storage_alignment":
            content = str(alignment).encode()
        nbytes = content.nbytes() if isinstance(content, torch.UntypedStorage) else len(content)
        writer.write_record(name, content, nbytes)
    writer.write_end_of_file()
    return buffer.getvalue()


def stock_end_of_records(obj: object, path: Path, alignment: int) -> int:
    """Where the last data record ends in the file torch makes, found without writing any data."""
    module = with_our_pickle(obj)
    with (
        config.patch({"save.storage_alignment": alignment}),
        torch.serialization.skip_data(),
    ):
        torch.save(obj, path, module)
    with zipfile.ZipFile(path) as archive:
        return archive.getinfo(f"{PREFIX}version").header_offset


# ---- The plan ----


@relaxed
@given(st.lists(virtual_sizes, max_size=40))
def test_body_is_covered_once(sizes: list[int]) -> None:
    taken = captured(untouched(sizes))
    check_plan(torch_zip.layout(taken), storages_of(taken))


@pytest.mark.parametrize(
    "sizes",
    [[0] * 5_000, [1] * 5_000, [64] * 5_000, [6 * GIB] * 8, [0], []],
    ids=["empty", "one byte", "64 bytes", "6 GiB", "one empty", "none"],
)
def test_many_and_large_storages_are_covered_once(sizes: list[int]) -> None:
    taken = captured(untouched(sizes))
    check_plan(torch_zip.layout(taken), storages_of(taken))


@relaxed
@given(st.lists(virtual_sizes, max_size=12), st.integers(0, 2**32))
def test_equal_captures_give_equal_images(sizes: list[int], seed: int) -> None:
    obj = untouched(sizes) | {"seed": seed}
    first, second = torch_zip.layout(captured(obj)), torch_zip.layout(captured(obj))
    assert first.slots == second.slots
    storages = {storage.data_ptr() for storage in storages_of(captured(obj))}
    for ours, theirs in zip(first.rows(), second.rows(), strict=True):
        assert ours[:2] == theirs[:2]
        if ours.address in storages:
            assert ours.address == theirs.address
        else:
            header = ctypes.string_at(ours.address, ours.nbytes)
            assert header == ctypes.string_at(theirs.address, theirs.nbytes)
    assert tail_without_crcs(first) == tail_without_crcs(second)


def test_image_holds_what_its_addresses_point_to() -> None:
    image = torch_zip.layout(captured({"a": tensor_of(100_000, 1)}))
    before = render(image)
    scribbles = [bytearray(b"\xff" * segment.nbytes) for segment in image.rows()]
    assert render(image) == before
    assert scribbles


def test_image_of_bytes_is_one_segment() -> None:
    content = bytearray(b"closing")
    image = Image.of_bytes(content)
    assert list(image.rows()) == [(0, 7, address_of(content))]
    assert slots_of(image) == []
    assert (image.nbytes, image.tail_nbytes) == (7, 0)


# ---- The bytes ----


@relaxed
@given(st.dictionaries(st.text(max_size=20), st.integers(0, 60_000)), sizes_to_render)
@example({}, [])
@example({"": 0, "\0": 1}, [0, 0, 1])
def test_bytes_are_those_of_torch_save(named: dict[str, int], sizes: list[int]) -> None:
    obj: dict[str, Any] = {name: tensor_of(n, i) for i, (name, n) in enumerate(named.items())}
    obj["in order"] = [tensor_of(n, -i) for i, n in enumerate(sizes)]
    ours = render(torch_zip.layout(captured(obj)))
    assert_same_records(ours, stock_save(obj, alignment_of(ours)))
    with zipfile.ZipFile(io.BytesIO(ours)) as archive:
        assert archive.testzip() is None
    loaded = torch.load(io.BytesIO(ours), weights_only=True)
    assert list(loaded) == list(obj)
    assert all(torch.equal(loaded[name], obj[name]) for name in named)
    assert all(map(torch.equal, loaded["in order"], obj["in order"]))


@pytest.mark.parametrize(
    "sizes",
    [
        [BLOCK_BYTES - 1],
        [BLOCK_BYTES],
        [2 * BLOCK_BYTES + 1, 5, BLOCK_BYTES],
        [100] * 3_000,
        [900_000] * 12,
    ],
    ids=["below a block", "a block", "blocks", "many small", "few large"],
)
def test_bytes_of_large_files_are_those_of_torch_save(sizes: list[int], tmp_path: Path) -> None:
    obj = [tensor_of(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    ours = render(torch_zip.layout(captured(obj)))
    assert_same_records(ours, stock_save(obj, alignment_of(ours)))
    path = tmp_path / "image.pt"
    path.write_bytes(ours)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    for mmap in (False, True):
        assert all(map(torch.equal, torch.load(path, mmap=mmap), obj))
    path.unlink()


record_names = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\\"), min_size=1, max_size=60
).filter(lambda name: not (name.startswith((".", "/")) or name.endswith("/") or ".." in name))


@relaxed
@given(
    st.dictionaries(record_names, st.tuples(small_sizes, st.booleans()), max_size=12),
    st.sampled_from([64, PAGE_BYTES]),
)
def test_records_of_any_name_are_those_of_torchs_writer(
    contents: dict[str, tuple[int, bool]], alignment: int
) -> None:
    records: list[tuple[str, bytes | torch.UntypedStorage]] = []
    for seed, (name, (nbytes, as_storage)) in enumerate(contents.items()):
        if name not in {"version", "data.pkl", "byteorder"}:
            storage = storage_of(nbytes, seed)
            records.append((name, storage if as_storage else bytes(storage.tolist())))
    taken = with_records(records)
    with config.patch({"save.storage_alignment": alignment}):
        image = torch_zip.layout(taken)
    check_plan(image, storages_of(taken))
    ours = render(image)
    assert_same_records(ours, stock_records(taken.records, alignment_of(ours)))
    with zipfile.ZipFile(io.BytesIO(ours)) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("alignment", [1, 2, 3, 4, 8, 16, 24, 32, 128, 512, 4096, 8192, 65536])
def test_alignment_of_the_users_choice(alignment: int, tmp_path: Path) -> None:
    obj = [tensor_of(nbytes, nbytes) for nbytes in (0, 1, 63, 64, 65, 4096, 100_000)]
    with config.patch({"save.storage_alignment": alignment}):
        ours = render(torch_zip.layout(captured(obj)))
    path = tmp_path / "image.pt"
    path.write_bytes(ours)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert alignment_of(ours) == alignment
    for calculated in (False, True):  # torch may compute where the storages lie instead of looking
        with config.patch({"load.calculate_storage_offsets": calculated}):
            assert all(map(torch.equal, torch.load(path, mmap=True), obj))
            assert all(map(torch.equal, torch.load(path), obj))
    if alignment > len(torch_zip.MARK):  # a smaller one leaves no room for the mark
        assert_same_records(ours, stock_save(obj, alignment))


def check_alignment_rule(sizes: Sequence[int], path: Path) -> int:
    """Asserts that pages are chosen iff they cost less than 1%, by torch's own file sizes."""
    obj = untouched(sizes)
    image = torch_zip.layout(captured(obj))
    packed = stock_end_of_records(obj, path, 64)
    paged = stock_end_of_records(obj, path, PAGE_BYTES)
    expected = PAGE_BYTES if (paged - packed) * 100 < packed else 64
    end = paged if expected == PAGE_BYTES else packed
    assert end < image.body_nbytes <= end + PAGE_BYTES + 256
    storages = {tensor.data_ptr() for tensor in obj.values()}
    offsets = [segment.offset for segment in image.rows() if segment.address in storages]
    assert all(offset % expected == 0 for offset in offsets)
    return expected


@relaxed
@given(st.lists(st.one_of(virtual_sizes, st.integers(0, 1 << 20)), max_size=12))
def test_pages_are_chosen_where_they_are_cheap(tmp_path: Path, sizes: list[int]) -> None:
    check_alignment_rule(sizes, tmp_path / "archive.pt")


def test_alignment_changes_at_one_percent(tmp_path: Path) -> None:
    cheap, dear = 8 << 20, 0  # one storage of that many bytes; between them lies the threshold
    assert check_alignment_rule([cheap], tmp_path / "archive.pt") == PAGE_BYTES
    assert check_alignment_rule([dear], tmp_path / "archive.pt") == 64
    while cheap - dear > 1:
        middle = (cheap + dear) // 2
        if check_alignment_rule([middle], tmp_path / "archive.pt") == PAGE_BYTES:
            cheap = middle
        else:
            dear = middle


def test_capture_that_cannot_tell_its_alignment_gets_torchs() -> None:
    records = [record for record in PREAMBLE if record[0] != ".storage_alignment"]
    image = torch_zip.layout(of_records([*records, ("data/0", torch.UntypedStorage(64 << 20))]))
    (data,) = [segment for segment in image.rows() if segment.nbytes == 64 << 20]
    assert data.offset < PAGE_BYTES


# ---- Beyond 4 GiB ----

BEYOND = [
    [FOUR_GIB - 2, 7],
    [FOUR_GIB - 1, 7],
    [FOUR_GIB, 7],
    [5 * GIB + 3, 0, 7, 1, FOUR_GIB - 1, 4096],
    [3 * GIB, 2 * GIB, 0, 100],
    [0, 6 * GIB, 6 * GIB],
]


@pytest.mark.parametrize("sizes", BEYOND, ids=lambda sizes: "-".join(map(str, sizes)))
def test_headers_beyond_4_gib_are_those_of_torch(sizes: list[int], tmp_path: Path) -> None:
    obj = untouched(sizes)
    taken = captured(obj)
    image = torch_zip.layout(taken)
    path = tmp_path / "archive.pt"  # torch names the records after the file
    stock_end_of_records(obj, path, PAGE_BYTES)
    slots = {slot.offset for slot in slots_of(image)}
    storages = {storage.data_ptr() for storage in storages_of(taken)}
    rows = [segment for segment in image.rows() if segment.address not in storages]
    record_nbytes = LOCAL_HEADER_BYTES + len(PREFIX) + len(torch_zip.RECORD)
    with path.open("rb") as stock, zipfile.ZipFile(path) as archive:
        end = archive.getinfo(f"{PREFIX}version").header_offset
        for segment in rows:
            ours = bytearray(ctypes.string_at(segment.address, segment.nbytes))
            stock.seek(segment.offset)
            theirs = bytearray(stock.read(segment.nbytes))
            if segment.offset == 0:
                ours = bytearray(without_mark(bytes(ours)))
            if segment is rows[-1]:
                assert len(ours) - (end - segment.offset) >= record_nbytes
                del ours[end - segment.offset :], theirs[end - segment.offset :]
            for at in slots:  # torch skipped the data, and so its CRC
                if segment.offset <= at < segment.offset + len(ours):
                    theirs[at - segment.offset : at - segment.offset + 4] = bytes(4)
                    ours[at - segment.offset : at - segment.offset + 4] = bytes(4)
            assert ours == theirs, f"at {segment.offset}"


@pytest.mark.parametrize("sizes", BEYOND, ids=lambda sizes: "-".join(map(str, sizes)))
def test_directory_beyond_4_gib_is_that_of_torch(sizes: list[int], tmp_path: Path) -> None:
    obj = untouched(sizes)
    image = torch_zip.layout(captured(obj))
    path = tmp_path / "archive.pt"
    stock_end_of_records(obj, path, PAGE_BYTES)
    with path.open("rb") as file, zipfile.ZipFile(path) as archive:
        theirs = {info.filename: info for info in archive.infolist()}
        file.seek(archive.start_dir)
        their_directory = file.read()
    tail = tail_without_crcs(image)
    at = len(tail) - torch_zip.END_BYTES - 20 - 56
    nbytes, offset = struct.unpack_from("<QQ", tail, at + 40)
    assert offset == image.body_nbytes + at - nbytes
    our_directory = tail[at - nbytes : at]
    fixed = 46
    for name, info in theirs.items():
        short = name.removeprefix(PREFIX)
        if short in {"version", ".data/serialization_id", ".storage_alignment"}:
            continue  # elsewhere in our file, or with our alignment in it
        needle = struct.pack("<H", len(name.encode()))
        entry_nbytes = fixed + len(name.encode()) + len(info.extra)
        begin = their_directory.index(name.encode()) - fixed
        assert their_directory[begin + 28 : begin + 30] == needle
        ours_begin = our_directory.index(name.encode()) - fixed
        ours = bytearray(our_directory[ours_begin : ours_begin + entry_nbytes])
        entry = bytearray(their_directory[begin : begin + entry_nbytes])
        if short.startswith("data/"):
            ours[16:20] = entry[16:20] = bytes(4)  # the CRC of data that torch skipped
        assert ours == entry, name


# ---- The tail ----


def parts_of(file: bytes) -> tuple[bytes, bytes]:
    """Body and tail, told apart as a reader does."""
    offset = torch_zip.tail_offset(file[-torch_zip.END_BYTES :], len(file))
    assert offset is not None
    return file[:offset], file[offset:]


@relaxed
@given(sizes_to_render)
@example([BLOCK_BYTES, 3 * PAGE_BYTES])
def test_parsed_tail_tells_what_was_rendered(sizes: list[int]) -> None:
    image = torch_zip.layout(captured([tensor_of(n, i) for i, n in enumerate(sizes)]))
    file = render(image)
    assert torch_zip.is_marked(file[: torch_zip.HEAD_BYTES])
    body, tail = parts_of(file)
    assert len(body) == image.body_nbytes
    index = torch_zip.parse(tail, len(body))
    assert (index.body_nbytes, index.block_bytes, index.tail) == (len(body), BLOCK_BYTES, tail)
    blocks = [body[at : at + BLOCK_BYTES] for at in range(0, len(body), BLOCK_BYTES)]
    assert list(index.block_crcs) == [zlib.crc32(block) for block in blocks]


def test_files_of_torch_are_not_ours() -> None:
    stock = stock_save({"a": torch.ones(1_000)}, 64)
    assert not torch_zip.is_marked(stock[: torch_zip.HEAD_BYTES])
    assert torch_zip.tail_offset(stock[-torch_zip.END_BYTES :], len(stock)) is None
    assert not torch_zip.is_marked(b"")
    assert torch_zip.tail_offset(b"", 0) is None


def test_flipped_bits_of_the_tail_are_noticed() -> None:
    body, tail = parts_of(render(torch_zip.layout(captured([tensor_of(3_000, 1)]))))
    for at in range(len(tail)):
        damaged = bytearray(tail)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(CorruptCheckpoint):
            torch_zip.parse(bytes(damaged), len(body))


def test_tail_of_another_body_is_noticed() -> None:
    body, tail = parts_of(render(torch_zip.layout(captured([tensor_of(3_000, 1)]))))
    with pytest.raises(CorruptCheckpoint, match="body_bytes"):
        torch_zip.parse(tail, len(body) + PAGE_BYTES)


def comment(version: int, offset: int) -> bytes:
    return f"fastckpt {version:02d} {offset:016x} {0:08x}".encode()


def test_tail_offset_is_checked_against_the_file() -> None:
    assert torch_zip.tail_offset(comment(torch_zip.VERSION, 4096), 8192) == 4096
    for offset in (0, 8192, 8193, 1 << 63):
        assert torch_zip.tail_offset(comment(torch_zip.VERSION, offset), 8192) is None
    too_much = TAIL_BYTES_MAX + 4097
    assert torch_zip.tail_offset(comment(torch_zip.VERSION, 4096), too_much) is None


def good_record(**changes: Any) -> dict[str, Any]:
    record = {
        "version": torch_zip.VERSION,
        "body_bytes": 3 * PAGE_BYTES,
        "block_bytes": 2 * PAGE_BYTES,
        "crc32": "0123abcd" * 2,
    }
    return {key: value for key, value in (record | changes).items() if value is not ...}


@pytest.mark.parametrize("body_nbytes", [0, -PAGE_BYTES, PAGE_BYTES + 1])
def test_wrong_body_is_refused(body_nbytes: int) -> None:
    crcs = "0" * 8 * max(0, block_count(body_nbytes, 2 * PAGE_BYTES))
    with pytest.raises(ValueError, match="body_bytes"):
        torch_zip.validate(good_record(body_bytes=body_nbytes, crc32=crcs), body_nbytes)


def test_right_record_is_accepted() -> None:
    torch_zip.validate(good_record(), 3 * PAGE_BYTES)
    index = torch_zip.parse(sealed(json.dumps(good_record()).encode()), 3 * PAGE_BYTES)
    assert index.block_crcs == (0x0123ABCD, 0x0123ABCD)


def sealed(record: bytes, version: int = torch_zip.VERSION) -> bytes:
    """A tail whose own CRC-32 is right, whatever stands in it."""
    text = record + f"fastckpt {version:02d} {3 * PAGE_BYTES:016x} ".encode()
    return text + f"{zlib.crc32(text):08x}".encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@relaxed
@example(b"[" * 100_000 + b"}")
@given(
    st.one_of(
        st.binary(max_size=200),
        json_values.map(lambda value: json.dumps(value).encode()),
        st.fixed_dictionaries(dict.fromkeys(good_record(), json_values)).map(
            lambda record: json.dumps(record).encode()
        ),
    )
)
def test_any_sealed_tail_is_parsed_or_refused(record: bytes) -> None:
    try:
        index = torch_zip.parse(sealed(record), 3 * PAGE_BYTES)
    except (CorruptCheckpoint, IncompatibleCheckpoint):
        return
    torch_zip.validate(json.loads(record), 3 * PAGE_BYTES)
    assert len(index.block_crcs) == block_count(3 * PAGE_BYTES, index.block_bytes)


# ---- Naming what is damaged ----


def reader_of(content: bytes | bytearray) -> Callable[[int, int], bytes]:
    return lambda offset, nbytes: bytes(content[offset : offset + nbytes])


def test_damaged_record_is_named() -> None:
    sizes = [0, 10_000, 1, 30_000, 5_000]
    file = render(torch_zip.layout(captured([tensor_of(n, i) for i, n in enumerate(sizes)])))
    body, tail = parts_of(file)
    index = torch_zip.parse(tail, len(body))
    tried = set()
    for name, info in entries(file).items():
        if info.header_offset + LOCAL_HEADER_BYTES > len(body) or name == torch_zip.RECORD:
            continue
        lengths = struct.unpack_from("<HH", body, info.header_offset + 26)
        begin = info.header_offset + LOCAL_HEADER_BYTES + sum(lengths)
        for at in {begin, begin + info.file_size - 1} if info.file_size else ():
            damaged = bytearray(file)
            damaged[at] ^= 0x80
            page = at - at % PAGE_BYTES
            for first, end in ((0, len(body)), (page, page + PAGE_BYTES)):
                found = verified.damaged_records(reader_of(damaged), index, first, end)
                assert found == [name]
            tried.add(name)
        damaged = bytearray(file)
        damaged[begin - 1] ^= 0x80  # the padding before the data belongs to no record
        assert verified.damaged_records(reader_of(damaged), index, 0, len(body)) == []
    assert {"data.pkl", "byteorder", "data/1", "data/2", "data/3", "data/4"} <= tried


def test_damaged_record_beyond_4_gib_is_named() -> None:
    last = storage_of(5_000, 1)
    records: list[tuple[str, bytes | torch.UntypedStorage]] = [
        ("data/0", torch.UntypedStorage(FOUR_GIB + 5)),
        ("data/1", torch.UntypedStorage(0)),
        ("data/2", last),
    ]
    image = torch_zip.layout(with_records(records))
    rows = list(image.rows())
    (record,) = [row for row in rows if row.address == last.data_ptr()]

    def read_at(offset: int, nbytes: int) -> bytes:
        if offset >= image.body_nbytes:
            return b""
        row = max(row for row in rows if row.offset <= offset)
        assert offset + nbytes <= row.offset + row.nbytes
        return ctypes.string_at(row.address + offset - row.offset, nbytes)

    blocks = block_count(image.body_nbytes, BLOCK_BYTES)
    tail = image.tail([0] * blocks, [0, zlib.crc32(bytes(last.tolist()))])
    index = torch_zip.parse(tail, image.body_nbytes)
    begin, end = record.offset - record.offset % PAGE_BYTES, image.body_nbytes
    assert verified.damaged_records(read_at, index, begin, end) == []
    last[2_500] = last[2_500] ^ 1
    assert verified.damaged_records(read_at, index, begin, end) == ["data/2"]
