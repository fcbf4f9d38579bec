"""Device memory to and from files by cuFile, and checksums computed on the device.

Driver and cuFile are stubs over host memory, so that every refusal can be made to happen; files are
on a real disk. What only NVIDIA's own parts can show is compared where they are at hand: the header
that declares cuFile, and the compiler that made the kernel. Must not know torch or formats.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import random
import signal
import subprocess
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastckpt import _engine
from fastckpt.plan.image import address_of
from fastckpt.storage.file_system import Storage
from tests.kit import cuda_stub, cufile_stub, interpreters
from tests.kit.cuda_stub import ILLEGAL_ADDRESS, LAUNCH, OUT_OF_MEMORY, TO_HOST, CudaStub
from tests.kit.cufile_stub import FILE_SYSTEM, CufileStub
from tests.kit.devices import places
from tests.kit.engines import opened, relaxed
from tests.kit.paths import ROOT
from tests.kit.saves import wait_until

PAGE = 4096
BLOCK = 64 * PAGE
BLOCKS = 6
WAIT_S = 60.0
CREATE = os.O_RDWR | os.O_CREAT | os.O_TRUNC
KERNEL_CHUNK = 65536
Op = tuple[str, int, int, int, int, bool]


class Stubs(NamedTuple):
    cuda: CudaStub
    cufile: CufileStub

    def alive(self) -> tuple[object, ...]:
        return (self.cuda.alive(), self.cuda.memory(), self.cufile.alive())


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Stubs:
    interpreters.run("")  # from now on there is one that forks others, and the descriptor to it
    directory = tmp_path_factory.mktemp("stubs")
    cuda = CudaStub(cuda_stub.built(directory))
    return Stubs(cuda, CufileStub(cufile_stub.built(directory), cuda.path))


def reset(stubs: Stubs) -> None:
    stubs.cuda.configure()
    stubs.cufile.configure()


@pytest.fixture
def stubs(libraries: Stubs) -> Iterator[Stubs]:
    """Whatever is made of the driver and of cuFile is given back, and no descriptor stays open."""
    reset(libraries)
    before, descriptors = libraries.alive(), len(os.listdir("/proc/self/fd"))
    yield libraries
    reset(libraries)
    # The last reference may be that of a backend's thread, which has just ended a write.
    wait_until(lambda: libraries.alive() == before, "all was given back")
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def library_of(path: str, driver: _engine.CudaDriver) -> _engine.CufileLibrary:
    """Also where a sandbox has no /proc/modules."""
    return _engine.CufileLibrary(path, driver, modules=os.devnull)


class Gds(NamedTuple):
    queue: _engine.DeviceQueue
    blocks: _engine.GdsBlocks
    threads: _engine.Backend


class File(NamedTuple):
    fd: int
    sink: _engine.GdsSink


def made(stubs: Stubs, threads: int = 2, blocks: int = BLOCKS, block_bytes: int = BLOCK) -> Gds:
    driver = _engine.CudaDriver(stubs.cuda.path)
    queue = _engine.DeviceQueue(driver, 0)
    library = library_of(stubs.cufile.path, driver)
    memory = _engine.GdsBlocks(library, queue, blocks, block_bytes)
    return Gds(queue, memory, _engine.threads_backend(threads))


@contextmanager
def gds_of(stubs: Stubs, threads: int = 2) -> Iterator[Gds]:
    gds = made(stubs, threads)
    try:
        yield gds
    finally:
        gds.threads.close()
        reset(stubs)  # what is alive is freed, whatever the test made fail


def begun(gds: Gds, fd: int) -> File:
    return File(fd, _engine.GdsSink(fd, gds.blocks, gds.threads))


def fill(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))


def held(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def content_of(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def write_blocks(
    gds: Gds, file: File, content: bytes, direct: bool = True
) -> list[tuple[int, ...]]:
    """All blocks at once; the file gets them in reverse."""
    ops: list[Op] = []
    for index in range(BLOCKS):
        address = gds.blocks.address(index)
        fill(address, content[index * BLOCK : (index + 1) * BLOCK])
        ops.append(("write", file.fd, address, BLOCK, (BLOCKS - 1 - index) * BLOCK, direct))
    return _engine.run_ops(file.sink, ops)


def read_blocks(gds: Gds, file: File, direct: bool = True) -> tuple[list[tuple[int, ...]], bytes]:
    for index in range(BLOCKS):
        fill(gds.blocks.address(index), bytes(BLOCK))
    ends = _engine.run_ops(
        file.sink,
        [
            ("read", file.fd, gds.blocks.address(index), BLOCK, index * BLOCK, direct)
            for index in range(BLOCKS)
        ],
    )
    return ends, b"".join(held(gds.blocks.address(index), BLOCK) for index in range(BLOCKS))


def reversed_blocks(content: bytes) -> bytes:
    return b"".join(content[i * BLOCK : (i + 1) * BLOCK] for i in reversed(range(BLOCKS)))


@contextmanager
def direct_file(gds: Gds, path: Path, flags: int = CREATE | os.O_DIRECT) -> Iterator[File]:
    with opened(path, flags) as fd:
        yield begun(gds, fd)


CONTENT = content_of(1, BLOCKS * BLOCK)
WHOLE = [(BLOCK, 0, 0)] * BLOCKS


# The library.


def test_what_is_missing_is_named(stubs: Stubs, tmp_path: Path) -> None:
    driver = _engine.CudaDriver(stubs.cuda.path)
    with pytest.raises(_engine.CufileUnavailable, match=r"cannot be loaded: .*libcufile-none"):
        library_of("libcufile-none.so.0", driver)
    with pytest.raises(_engine.CufileUnavailable, match=r"libc\.so\.6 has no cuFileDriverOpen"):
        library_of("libc.so.6", driver)
    stubs.cufile.fail("cuFileDriverOpen", 5001)
    with pytest.raises(_engine.CufileUnavailable, match="nvidia-fs is not loaded") as raised:
        library_of(stubs.cufile.path, driver)
    assert "CU_FILE_DRIVER_NOT_INITIALIZED (5001)" in str(raised.value)
    assert ("/run/udev does not exist" in str(raised.value)) is not os.path.exists("/run/udev")
    assert stubs.cufile.calls("cuFileDriverClose") == 0
    calls = stubs.cufile.calls("cuFileDriverOpen")
    with pytest.raises(_engine.CufileUnavailable, match="none cannot be read"):
        _engine.CufileLibrary(stubs.cufile.path, driver, modules=str(tmp_path / "none"))
    assert stubs.cufile.calls("cuFileDriverOpen") == calls, "it would not return"


def test_a_driver_that_others_opened_stays_theirs(stubs: Stubs) -> None:
    driver = _engine.CudaDriver(stubs.cuda.path)
    library = library_of(stubs.cufile.path, driver)
    assert library.version == 1140 and stubs.cufile.alive().drivers == 1
    stubs.cufile.fail("cuFileDriverOpen", 5026)
    second = library_of(stubs.cufile.path, driver)
    del second
    assert stubs.cufile.alive().drivers == 1
    del library
    assert stubs.cufile.alive().drivers == 0
    stubs.cufile.fail("cuFileGetVersion", 5030)
    stubs.cufile.fail("cuFileDriverOpen", 0)
    assert library_of(stubs.cufile.path, driver).version == 0


def test_an_old_release_lacks_what_is_optional(stubs: Stubs, tmp_path: Path) -> None:
    old = CufileStub(cufile_stub.built(tmp_path, "STUB_OLD"), stubs.cuda.path)
    library = library_of(old.path, _engine.CudaDriver(stubs.cuda.path))
    assert library.version == 0 and old.alive().drivers == 1
    del library
    assert old.alive().drivers == 0 and old.calls("cuFileDriverClose") == 1


def test_errors_in_words(stubs: Stubs) -> None:
    library = library_of(stubs.cufile.path, _engine.CudaDriver(stubs.cuda.path))
    assert library.text(5011, OUT_OF_MEMORY) == (
        "CU_FILE_CUDA_DRIVER_ERROR (5011): the CUDA driver refused a call: "
        "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
    )
    assert library.text(5016, 0) == "CU_FILE_INVALID_MAPPING_SIZE (5016): more than may be pinned"
    assert "/run/udev" in library.text(5027, 0) and "tmpfs" in library.text(5027, 0)
    assert library.text(5999, 0) == "unknown error (5999): no text"


# Whether cuFile goes directly.

NVME, NVMEOF, NVME_P2P, LUSTRE, POSIX, P2P = 1 << 4, 1 << 5, 1 << 11, 1 << 0, 1 << 2, 1 << 4


@pytest.mark.parametrize(
    ("properties", "file_system", "expected"),
    [
        ({}, "ext4", ("compat", "nvidia-fs is not loaded, and there is no PCI P2PDMA")),
        (
            {"version": (2, 25), "status": NVME},
            "ext4",
            ("direct", "nvidia-fs 2.25 serves ext4"),
        ),
        ({"version": (2, 25), "status": NVMEOF}, "xfs", ("direct", "nvidia-fs 2.25 serves xfs")),
        (
            {"version": (2, 25), "status": NVME},
            "lustre",
            ("compat", "cuFile's driver does not serve lustre here"),
        ),
        (
            {"version": (2, 25), "status": LUSTRE},
            "lustre",
            ("direct", "nvidia-fs 2.25 serves lustre"),
        ),
        ({"version": (2, 25), "status": NVME}, "tmpfs", ("compat", "cuFile does not know tmpfs")),
        (
            {"version": (2, 25), "status": NVME},
            "",
            ("compat", "cuFile does not know an unknown file system"),
        ),
        ({"features": P2P}, "xfs", ("direct", "PCI P2PDMA serves xfs")),
        ({"status": NVME_P2P}, "ext4", ("direct", "PCI P2PDMA serves ext4")),
        (
            {"features": P2P, "status": LUSTRE},
            "lustre",
            ("compat", "cuFile's driver does not serve lustre here"),
        ),
        (
            {"version": (2, 25), "status": NVME, "control": POSIX},
            "ext4",
            ("compat", "cuFile is configured to use POSIX calls"),
        ),
    ],
)
def test_mode_is_what_the_properties_say(
    stubs: Stubs, properties: dict[str, int], file_system: str, expected: tuple[str, str]
) -> None:
    library = library_of(stubs.cufile.path, _engine.CudaDriver(stubs.cuda.path))
    stubs.cufile.properties(**properties)
    assert library.mode(file_system) == expected
    stubs.cufile.fail("cuFileDriverGetProperties", 5002)
    assert library.mode(file_system)[0] == "compat"


def test_the_mount_table_names_the_file_system(disk: Path) -> None:
    with opened(disk / "image", CREATE) as fd, open("/proc/self/stat") as proc:
        named = subprocess.run(
            ["findmnt", "-n", "-o", "FSTYPE", "-T", str(disk)], capture_output=True, text=True
        )
        assert named.returncode != 0 or _engine.file_system_of(fd) in (named.stdout.strip(), "")
        assert _engine.file_system_of(proc.fileno()) == "proc"
    assert _engine.file_system_of(-1) == ""


def test_mode_of_a_file_that_fell_back_says_why(stubs: Stubs, disk: Path) -> None:
    with gds_of(stubs) as gds, opened(disk / "image", CREATE) as fd:
        assert begun(gds, fd).sink.mode() == ("compat", "the file was not opened with O_DIRECT")
    with gds_of(stubs) as gds, direct_file(gds, disk / "image") as file:
        assert file.sink.mode()[0] == "compat"
    stubs.cufile.fail("cuFileBufRegister", 5036)
    with gds_of(stubs) as gds, direct_file(gds, disk / "image") as file:
        assert file.sink.mode() == ("compat", gds.blocks.refusal)


# Blocks.


def test_blocks_are_aligned_registered_once_and_freed(stubs: Stubs) -> None:
    gds = made(stubs)
    assert (gds.blocks.count, gds.blocks.block_bytes, gds.blocks.refusal) == (BLOCKS, BLOCK, "")
    addresses = [gds.blocks.address(index) for index in range(BLOCKS)]
    assert addresses[0] % 65536 == 0
    assert addresses == [addresses[0] + index * BLOCK for index in range(BLOCKS)]
    assert stubs.cufile.alive().buffers == 1 and stubs.cuda.memory().allocations == 1
    assert stubs.cufile.calls("cuFileBufRegister") == 1


def test_no_memory_for_blocks(stubs: Stubs) -> None:
    stubs.cuda.fail("cuMemAlloc_v2", OUT_OF_MEMORY)
    with pytest.raises(_engine.DeviceError, match=r"cuda:0: memory: .*out of memory"):
        made(stubs)


# Transfers.


@pytest.mark.parametrize("most", [0, PAGE, 5 * PAGE])
@pytest.mark.parametrize("threads", [1, 4])
def test_blocks_come_back_from_a_file(stubs: Stubs, disk: Path, most: int, threads: int) -> None:
    """By cuFile alone, which may transfer less than it is asked for."""
    with gds_of(stubs, threads) as gds:
        stubs.cufile.at_most(most)
        with direct_file(gds, disk / "image") as file:
            assert write_blocks(gds, file, CONTENT) == WHOLE
            assert file.sink.end() == (len(CONTENT), 0, "")
        assert (disk / "image").read_bytes() == reversed_blocks(CONTENT)
        with direct_file(gds, disk / "image", os.O_RDONLY | os.O_DIRECT) as file:
            assert read_blocks(gds, file) == (WHOLE, reversed_blocks(CONTENT))
            assert file.sink.end() == (len(CONTENT), 0, "")
        assert stubs.cufile.alive().files == 0
        assert not stubs.cuda.log(), "nothing was copied"


REFUSALS = [
    *[("cuFileWrite", 5008, "CU_FILE_IO_NOT_SUPPORTED (5008)", after) for after in (0, 1, 4)],
    *[("cuFileRead", 5010, "CU_FILE_NVFS_DRIVER_ERROR (5010)", after) for after in (0, 1, 4)],
    ("cuFileWrite", 5045, "unknown error (5045)", 0),
    ("cuFileHandleRegister", 5011, "CUDA_ERROR_OUT_OF_MEMORY (2)", 0),
    ("cuFileHandleRegister", 5019, "CU_FILE_INVALID_FILE_OPEN_FLAG (5019)", 0),
    ("cuFileBufRegister", 5016, "CU_FILE_INVALID_MAPPING_SIZE (5016)", 0),
]


@pytest.mark.parametrize(("name", "code", "words", "after"), REFUSALS)
def test_what_cufile_refuses_goes_through_the_host(
    stubs: Stubs, disk: Path, name: str, code: int, words: str, after: int
) -> None:
    """From the first refusal on, the whole file; nothing is lost, and the next file is new."""
    stubs.cufile.fail(name, code, OUT_OF_MEMORY, after=after, times=1)
    with gds_of(stubs, 1) as gds:
        reports = []
        for flags in (CREATE | os.O_DIRECT, os.O_RDWR | os.O_DIRECT):
            with direct_file(gds, disk / "image", flags) as file:
                assert write_blocks(gds, file, CONTENT) == WHOLE
                assert (disk / "image").read_bytes() == reversed_blocks(CONTENT)
                assert read_blocks(gds, file) == (WHOLE, reversed_blocks(CONTENT))
                reports.append(file.sink.end())
        direct, by_host, reason = reports[0]
        assert direct + by_host == 2 * len(CONTENT) and by_host > 0
        assert words in reason and reason.startswith(f"{name}: ")
        if name == "cuFileWrite":
            assert direct == after * BLOCK and stubs.cufile.calls(name) == after + 1 + BLOCKS
        if name == "cuFileBufRegister":
            assert gds.blocks.refusal == reason and reports[1] == reports[0]
        else:
            assert reports[1] == (2 * len(CONTENT), 0, "")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EAGAIN])
def test_what_the_file_system_refuses_cufile_is_tried_by_the_host(
    stubs: Stubs, disk: Path, number: int
) -> None:
    stubs.cufile.fail("cuFileWrite", FILE_SYSTEM, number, after=2, times=1)
    with gds_of(stubs) as gds, direct_file(gds, disk / "image") as file:
        assert write_blocks(gds, file, CONTENT) == WHOLE
        assert (disk / "image").read_bytes() == reversed_blocks(CONTENT)
        reason = f"cuFileWrite: {os.strerror(number)} (errno {number})"
        assert file.sink.end()[2] == reason


def test_a_refusal_in_the_middle_of_an_op(stubs: Stubs, disk: Path) -> None:
    """What cuFile has moved stays; the rest goes through the host."""
    with gds_of(stubs, 1) as gds, direct_file(gds, disk / "image") as file:
        stubs.cufile.at_most(8 * PAGE)
        stubs.cufile.fail("cuFileWrite", 5030, after=5, times=1)
        assert write_blocks(gds, file, CONTENT) == WHOLE
        assert file.sink.end()[:2] == (40 * PAGE, len(CONTENT) - 40 * PAGE)
        assert (disk / "image").read_bytes() == reversed_blocks(CONTENT)


def test_interruptions_are_tried_again(stubs: Stubs, disk: Path) -> None:
    with gds_of(stubs, 1) as gds, direct_file(gds, disk / "image") as file:
        stubs.cufile.fail("cuFileWrite", FILE_SYSTEM, errno.EINTR, times=3)
        assert write_blocks(gds, file, CONTENT) == [(BLOCK, 0, 3), *WHOLE[1:]]
        stubs.cufile.fail("cuFileRead", FILE_SYSTEM, errno.EINTR)
        ends, found = read_blocks(gds, file)
        assert [end[:2] for end in ends] == [(BLOCK, 0)] * BLOCKS, "not for ever"
        assert found == reversed_blocks(CONTENT)
        assert "errno 4" in file.sink.end()[2]


def test_a_write_that_moves_nothing_is_a_refusal(stubs: Stubs, disk: Path) -> None:
    path = disk / "image"
    path.write_bytes(CONTENT)
    with gds_of(stubs) as gds, direct_file(gds, path, os.O_RDWR | os.O_DIRECT) as file:
        empty = ("write", file.fd, gds.blocks.address(0), BLOCK, 0, True)
        stubs.cufile.fail("cuFileWrite", FILE_SYSTEM, 0, times=1)
        assert _engine.run_ops(file.sink, [empty]) == [(BLOCK, 0, 0)]
        assert "(errno 0)" in file.sink.end()[2]


@pytest.mark.parametrize("flag", ["O_NOFOLLOW", "O_NONBLOCK", "O_APPEND"])
def test_flags_that_cufile_refuses_are_named(stubs: Stubs, disk: Path, flag: str) -> None:
    flags = CREATE | os.O_DIRECT | getattr(os, flag)
    with gds_of(stubs) as gds, direct_file(gds, disk / "a", flags) as file:
        assert "5019" in file.sink.end()[2]


@pytest.mark.parametrize("opening", ["create", "read", "write"])
def test_cufile_takes_what_the_seam_opens(stubs: Stubs, disk: Path, opening: Any) -> None:
    """No file keeps a flag that was there to refuse links, or not to wait for a FIFO."""
    storage, path = Storage(), str(disk / "a")
    if opening != "create":
        (disk / "a").write_bytes(CONTENT)
    with gds_of(stubs) as gds:
        fd = storage.create(path, 0o600) if opening == "create" else storage.open(path, opening)
        try:
            assert storage.set_direct(fd, writing=opening == "create") is None
            file = begun(gds, fd)
            assert file.sink.end() == (0, 0, "")
        finally:
            storage.close(fd)


@pytest.mark.parametrize("opening", ["create", "write"])
@pytest.mark.parametrize("target", ["content", "fifo", "nowhere"])
def test_what_is_written_to_is_no_link(disk: Path, opening: str, target: str) -> None:
    (disk / "content").write_bytes(CONTENT)
    os.mkfifo(disk / "fifo")
    (disk / "link").symlink_to(target)
    storage, link = Storage(), str(disk / "link")
    with pytest.raises(OSError) as caught:
        storage.create(link, 0o600) if opening == "create" else storage.open(link, "write")
    assert caught.value.errno == (errno.EEXIST if opening == "create" else errno.ELOOP)
    assert sorted(os.listdir(disk)) == ["content", "fifo", "link"]
    assert (disk / "content").read_bytes() == CONTENT


def test_files_opened_without_o_direct_go_through_the_host(stubs: Stubs, disk: Path) -> None:
    with gds_of(stubs) as gds, opened(disk / "image", CREATE) as fd:
        file = begun(gds, fd)
        assert write_blocks(gds, file, CONTENT, direct=False) == WHOLE
        assert read_blocks(gds, file, direct=False) == (WHOLE, reversed_blocks(CONTENT))
        report = file.sink.end()
        assert report == (0, 2 * len(CONTENT), "the file was not opened with O_DIRECT")
        assert stubs.cufile.calls("cuFileHandleRegister") == 0


@pytest.mark.parametrize("refused", [False, True])
def test_reads_end_with_the_file(stubs: Stubs, disk: Path, refused: bool) -> None:
    path = disk / "image"
    path.write_bytes(CONTENT[: BLOCK + PAGE + 100])
    if refused:
        stubs.cufile.fail("cuFileHandleRegister", 5008)
    with gds_of(stubs) as gds, direct_file(gds, path, os.O_RDONLY | os.O_DIRECT) as file:
        ends, found = read_blocks(gds, file)
        assert ends == [(BLOCK, 0, 0), (PAGE + 100, 0, 0), *[(0, 0, 0)] * (BLOCKS - 2)]
        assert found[: BLOCK + PAGE + 100] == path.read_bytes()
        file.sink.end()


def test_what_no_one_can_write_is_an_error(stubs: Stubs) -> None:
    with gds_of(stubs) as gds, opened(Path("/dev/full"), os.O_RDWR) as fd:
        file = begun(gds, fd)
        ends = write_blocks(gds, file, CONTENT, direct=False)
        assert [end[:2] for end in ends] == [(0, errno.ENOSPC)] * BLOCKS
        assert file.sink.end()[:2] == (0, 0)


@pytest.mark.parametrize(
    "name",
    ["cuMemcpyDtoHAsync_v2", "cuEventCreate", "cuEventRecord", "cuEventSynchronize"],
)
def test_a_device_that_fails_fails_the_op(stubs: Stubs, disk: Path, name: str) -> None:
    """Only once neither way is left."""
    with gds_of(stubs) as gds, opened(disk / "image", CREATE) as fd:
        stubs.cufile.fail("cuFileHandleRegister", 5008)
        file = begun(gds, fd)
        stubs.cuda.fail(name, ILLEGAL_ADDRESS, times=1)
        ends = write_blocks(gds, file, CONTENT, direct=False)
        assert sorted(end[1] for end in ends) == [0] * (BLOCKS - 1) + [errno.EIO]
        file.sink.end()


def test_a_device_without_context_fails_the_op(stubs: Stubs, disk: Path) -> None:
    with gds_of(stubs) as gds, direct_file(gds, disk / "image") as file:
        stubs.cuda.fail("cuCtxPushCurrent_v2", ILLEGAL_ADDRESS)
        ends = write_blocks(gds, file, CONTENT)
        assert [end[:2] for end in ends] == [(0, errno.EIO)] * BLOCKS
        stubs.cuda.configure()
        direct, by_host, reason = file.sink.end()
        assert (direct, by_host) == (0, 0)
        assert reason == "context: CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access"


def test_a_read_whose_copy_fails_is_an_error(stubs: Stubs, disk: Path) -> None:
    path = disk / "image"
    path.write_bytes(CONTENT)
    with gds_of(stubs) as gds, opened(path, os.O_RDONLY) as fd:
        file = begun(gds, fd)
        stubs.cuda.fail("cuMemcpyHtoDAsync_v2", ILLEGAL_ADDRESS)
        ends, _ = read_blocks(gds, file, direct=False)
        assert [end[:2] for end in ends] == [(0, errno.EIO)] * BLOCKS
        file.sink.end()


def test_unpinned_buffers_will_do(stubs: Stubs, disk: Path) -> None:
    with gds_of(stubs) as gds, opened(disk / "image", CREATE) as fd:
        stubs.cuda.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
        file = begun(gds, fd)
        assert write_blocks(gds, file, CONTENT, direct=False) == WHOLE
        assert stubs.cuda.alive().pinned_parts == 0
        file.sink.end()
    assert (disk / "image").read_bytes() == reversed_blocks(CONTENT)


def test_buffers_are_few_and_freed_with_the_blocks(stubs: Stubs, disk: Path) -> None:
    gds = made(stubs, threads=2)
    with opened(disk / "image", CREATE) as fd:
        file = begun(gds, fd)
        for _ in range(3):
            write_blocks(gds, file, CONTENT, direct=False)
        alive = stubs.cuda.alive()
        assert 1 <= alive.pinned_parts <= 2 and alive.pinned_bytes == alive.pinned_parts * BLOCK
        file.sink.end()
    gds.threads.close()
    del gds, file
    assert stubs.cuda.alive().pinned_parts == 0


def test_a_file_that_was_not_ended_is_deregistered_with_its_sink(stubs: Stubs, disk: Path) -> None:
    with gds_of(stubs) as gds, direct_file(gds, disk / "image") as file:
        assert stubs.cufile.alive().files == 1
        del file
    assert stubs.cufile.alive().files == 0


def test_memory_of_the_host_is_written_as_ever(stubs: Stubs, disk: Path) -> None:
    """Ops beside the blocks need no cuFile."""
    memory = bytearray(CONTENT[:PAGE])
    with gds_of(stubs) as gds, direct_file(gds, disk / "image", CREATE) as file:
        op = ("write", file.fd, address_of(memory), PAGE, 0, False)
        assert _engine.run_ops(file.sink, [op]) == [(PAGE, 0, 0)]
        assert stubs.cufile.calls("cuFileWrite") == 0
    assert (disk / "image").read_bytes() == CONTENT[:PAGE]


@relaxed
@given(
    data=st.data(),
    pieces=st.lists(st.integers(1, 64), min_size=1, max_size=BLOCKS),
    most=st.sampled_from([0, PAGE, 7 * PAGE]),
)
def test_whatever_fails_nothing_is_lost(
    libraries: Stubs, disk: Path, data: st.DataObject, pieces: list[int], most: int
) -> None:
    """Any call of cuFile's fails in any way: what was written is read, bit for bit."""
    reset(libraries)
    failures = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(
                    ["cuFileWrite", "cuFileRead", "cuFileHandleRegister", "cuFileBufRegister"]
                ),
                st.sampled_from([5008, 5010, 5016, 5030]),
                st.integers(0, 8),
                st.integers(1, 3),
            ),
            max_size=3,
        )
    )
    for name, code, after, times in failures:
        libraries.cufile.fail(name, code, after=after, times=times)
    libraries.cufile.at_most(most)
    expected = [content_of(index, pages * PAGE) for index, pages in enumerate(pieces)]
    with gds_of(libraries) as gds, direct_file(gds, disk / "image") as file:
        where = list(enumerate(expected))
        offsets = [sum(pieces[:index]) * PAGE for index in range(len(pieces))]
        for index, content in where:
            fill(gds.blocks.address(index), content)
        for kind in ("write", "read"):
            ends = _engine.run_ops(
                file.sink,
                [
                    (kind, file.fd, gds.blocks.address(index), len(content), offsets[index], True)
                    for index, content in where
                ],
            )
            assert ends == [(len(content), 0, 0) for content in expected]
            if kind == "write":
                assert (disk / "image").read_bytes() == b"".join(expected)
                for index, _ in where:
                    fill(gds.blocks.address(index), bytes(BLOCK))
        assert [held(gds.blocks.address(i), len(content)) for i, content in where] == expected
        direct, by_host, reason = file.sink.end()
        assert direct + by_host == 2 * sum(map(len, expected))
        assert (by_host > 0) is (reason != "")
    del gds, file
    assert libraries.cufile.alive() == (0, 0, 0) and libraries.cuda.memory().allocations == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("run(('write', 1, blocks.address(1) + 4096, 8192, 0, True))", "last <= end"),
        ("blocks.address(2)", "index < count_"),
        ("_engine.GdsBlocks(library, queue, 2, 1000)", "block_bytes % kPageBytes"),
    ],
)
def test_programmers_errors_are_checked(stubs: Stubs, wrong: str, words: str) -> None:
    code = (
        "import torch\nfrom fastckpt import _engine\n"
        f"driver = _engine.CudaDriver({stubs.cuda.path!r})\n"
        "queue = _engine.DeviceQueue(driver, 0)\n"
        f"library = _engine.CufileLibrary({stubs.cufile.path!r}, driver, {os.devnull!r})\n"
        "blocks = _engine.GdsBlocks(library, queue, 2, 8192)\n"
        "sink = _engine.GdsSink(1, blocks, _engine.threads_backend(1))\n"
        "run = lambda op: _engine.run_ops(sink, [op])\n"
        f"{wrong}\n"
    )
    ended = interpreters.run(code)
    assert ended.returncode == -signal.SIGABRT and "CHECK failed" in ended.stderr
    assert words in ended.stderr


# Checksums on the device.


class Checksums(NamedTuple):
    gpu: _engine.Crc32Gpu
    queue: _engine.DeviceQueue


def checksums(stubs: Stubs) -> Checksums:
    queue = _engine.DeviceQueue(_engine.CudaDriver(stubs.cuda.path), 0)
    return Checksums(_engine.Crc32Gpu(queue), queue)


POOL = bytearray(content_of(2, 3 * KERNEL_CHUNK))
ZEROS = bytearray(KERNEL_CHUNK)


def crcs(found: Checksums, pool: bytearray, cuts: list[tuple[int, int]]) -> list[int]:
    address = address_of(pool)
    return found.gpu.crcs(found.queue, [(address + begin, nbytes) for begin, nbytes in cuts])


def expected_crcs(pool: bytearray, cuts: list[tuple[int, int]]) -> list[int]:
    return [zlib.crc32(pool[begin : begin + nbytes]) for begin, nbytes in cuts]


cut = st.integers(0, len(POOL)).flatmap(
    lambda begin: st.tuples(
        st.just(begin),
        st.one_of(st.integers(0, min(70, len(POOL) - begin)), st.integers(0, len(POOL) - begin)),
    )
)


@relaxed
@given(cuts=st.lists(cut, max_size=8))
def test_crcs_of_the_device_are_those_of_zlib(
    libraries: Stubs, cuts: list[tuple[int, int]]
) -> None:
    reset(libraries)
    assert crcs(checksums(libraries), POOL, cuts) == expected_crcs(POOL, cuts)


def test_crcs_at_every_edge(stubs: Stubs) -> None:
    """Ends of 16 bytes, of rows of 4 KiB and of chunks of 64 KiB, and one byte to either side."""
    edges = [0, 16, 4096, 4112, KERNEL_CHUNK - 4096, KERNEL_CHUNK, 2 * KERNEL_CHUNK]
    near = sorted({edge + by for edge in edges for by in (-1, 0, 1) if edge + by >= 0})
    cuts = [(begin, end - begin) for begin in near for end in near if begin <= end]
    found = checksums(stubs)
    assert crcs(found, POOL, cuts) == expected_crcs(POOL, cuts)
    lengths = [(begin, nbytes) for begin in range(17) for nbytes in range(50)]
    assert crcs(found, POOL, lengths) == expected_crcs(POOL, lengths)
    assert crcs(found, ZEROS, [(3, 40_000)]) == [zlib.crc32(bytes(40_000))]
    assert crcs(found, POOL, []) == [] and crcs(found, POOL, [(5, 0)]) == [0]


def test_more_ranges_than_a_launch_takes(stubs: Stubs) -> None:
    """By count, and by what they leave."""
    found = checksums(stubs)
    launches = stubs.cuda.calls("cuLaunchKernel")
    cuts = [(begin, 100 + begin) for begin in range(300)]
    assert crcs(found, POOL, cuts) == expected_crcs(POOL, cuts)
    assert stubs.cuda.calls("cuLaunchKernel") == launches + 3
    big = bytearray(40 << 20)
    big[::4097] = content_of(3, len(big[::4097]))
    cuts = [(7 + begin, len(big) - 100) for begin in range(7)]
    assert crcs(found, big, cuts) == expected_crcs(big, cuts)
    assert stubs.cuda.calls("cuLaunchKernel") == launches + 5
    with pytest.raises(ValueError, match="too long"):
        found.gpu.crcs(found.queue, [(4096, (256 << 20) + 1)])


def test_results_come_after_the_kernel_on_one_stream(stubs: Stubs) -> None:
    found = checksums(stubs)
    before = len(stubs.cuda.log())
    crcs(found, POOL, [(0, 1000)])
    log = stubs.cuda.log()[before:]
    assert [done.kind for done in log] == [LAUNCH, TO_HOST]
    assert len({done.stream for done in log}) == 1


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("cuModuleLoadData", 222),
        ("cuModuleGetFunction", 500),
        ("cuLaunchKernel", 701),
        ("cuMemcpyHtoDAsync_v2", ILLEGAL_ADDRESS),
        ("cuMemcpyDtoHAsync_v2", ILLEGAL_ADDRESS),
        ("cuEventSynchronize", ILLEGAL_ADDRESS),
    ],
)
def test_a_kernel_that_is_not_taken_says_why(stubs: Stubs, name: str, result: int) -> None:
    stubs.cuda.fail(name, result)
    with pytest.raises(_engine.DeviceUnavailable, match=rf"CRC-32 kernel: .*\({result}\)"):
        checksums(stubs)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_no_memory_for_the_kernel(stubs: Stubs, after: int) -> None:
    stubs.cuda.fail("cuMemAlloc_v2", OUT_OF_MEMORY, after=after)
    with pytest.raises(_engine.DeviceError, match="out of memory"):
        checksums(stubs)


def test_a_gpu_that_miscalculates_is_refused(stubs: Stubs) -> None:
    stubs.cuda.miscalculate(True)
    with pytest.raises(_engine.DeviceUnavailable, match="CRC-32 of known bytes is wrong"):
        checksums(stubs)


def test_a_launch_that_fails_later_is_reported(stubs: Stubs) -> None:
    found = checksums(stubs)
    stubs.cuda.fail("cuLaunchKernel", ILLEGAL_ADDRESS)
    with pytest.raises(_engine.DeviceError, match="illegal memory access"):
        crcs(found, POOL, [(0, 1000)])
    stubs.cuda.configure()
    assert crcs(found, POOL, [(0, 1000)]) == [zlib.crc32(POOL[:1000])]


# What NVIDIA's parts say.


def declared_otherwise(shim: str, source: str, tmp_path: Path, *includes: Path) -> str:
    """What the compiler says of a shim of csrc/ beside NVIDIA's headers; "" if they agree.

    Args:
        shim: its text.
        source: which of tests/stubs compares them.
        tmp_path: where it is compiled.
        includes: where the headers are.
    """
    (tmp_path / "gpu").mkdir(exist_ok=True)
    (tmp_path / "gds").mkdir(exist_ok=True)
    (tmp_path / "gpu" / "cuda_shim.h").write_bytes((ROOT / "csrc/gpu/cuda_shim.h").read_bytes())
    room = "gpu" if source == "cuda_headers.cc" else "gds"
    (tmp_path / room / ("cuda_shim.h" if room == "gpu" else "cufile_shim.h")).write_text(shim)
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{tmp_path}"]
    command += [part for include in includes for part in ("-isystem", str(include))]
    command.append(str(ROOT / "tests" / "stubs" / source))
    return subprocess.run(command, capture_output=True, check=False, text=True).stderr


def changed(shim: str, changes: list[tuple[str, str, str]]) -> str:
    """A shim with wrong declarations instead of right ones: (right, wrong, what it is about)."""
    for right, wrong, _ in changes:
        assert shim.count(right) == 1, right
        shim = shim.replace(right, wrong)
    return shim


def test_cufile_is_declared_as_nvidia_declares_it(tmp_path: Path) -> None:
    cufile, cuda = places("include/cufile.h"), places("include/cuda.h")
    if not (cufile and cuda):
        pytest.skip("NVIDIA's cufile.h and cuda.h are not both on this machine")
    shim = (ROOT / "csrc" / "gds" / "cufile_shim.h").read_text()
    wrong = [
        (
            "(const void* base, size_t nbytes, int flags)",
            "(const void* base, size_t nbytes)",
            "cuFileBufRegister",
        ),
        ("(void, handle_deregister", "(int, handle_deregister", "cuFileHandleDeregister"),
        (
            "size_t poll_threshold, max_direct_io;",
            "unsigned poll_threshold, max_direct_io;",
            "poll_thresh_size",
        ),
        ("X(5016, ", "X(5015, ", "INVALID_MAPPING_SIZE"),
        ("kNvme = 4", "kNvme = 5", "CU_FILE_NVME_SUPPORTED"),
    ]
    for header in cufile:
        places_of = header.parent, cuda[0].parent
        assert declared_otherwise(shim, "cufile_headers.cc", tmp_path, *places_of) == "", header
        told = declared_otherwise(changed(shim, wrong), "cufile_headers.cc", tmp_path, *places_of)
        assert not [about for _, _, about in wrong if about not in told], told


def test_the_driver_is_declared_as_nvidia_declares_it(tmp_path: Path) -> None:
    if not places("include/cuda.h"):
        pytest.skip("NVIDIA's cuda.h is not on this machine")
    shim = (ROOT / "csrc" / "gpu" / "cuda_shim.h").read_text()
    wrong = [
        (
            "(void* memory, size_t nbytes, unsigned flags)",
            "(void* memory, size_t nbytes)",
            "cuMemHostRegister",
        ),
        ("(float* ms,", "(double* ms,", "cuEventElapsedTime"),
        ("kNotReady = 600", "kNotReady = 601", "CUDA_ERROR_NOT_READY"),
    ]
    for header in places("include/cuda.h"):
        assert declared_otherwise(shim, "cuda_headers.cc", tmp_path, header.parent) == "", header
    told = declared_otherwise(changed(shim, wrong), "cuda_headers.cc", tmp_path, header.parent)
    assert not [about for _, _, about in wrong if about not in told], told


def kernel_compiler() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "crc32_kernel", ROOT / "csrc" / "crc32" / "crc32_kernel.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_kernel_checked_in_is_what_its_source_gives() -> None:
    """By the release that made it: others order the same instructions otherwise."""
    compiler = kernel_compiler()
    text = compiler.TARGET.read_text()
    for library in places("lib*/libnvrtc.so.1[0-9]"):
        ctypes.CDLL(str(next(library.parent.glob("libnvrtc-builtins.so.*"))))
        if f"NVRTC {compiler.Compiler(str(library)).version()};" in text:
            assert compiler.made_by(str(library)) == text
            return
    pytest.skip("the release of NVRTC that made the kernel is not on this machine")


# In the engine.


def test_a_job_without_a_block_of_its_gpu_holds_up_no_other(stubs: Stubs, disk: Path) -> None:
    with gds_of(stubs) as gds:
        stage = _engine.GdsStage(gds.blocks)
        content = bytearray(content_of(3, (BLOCKS + 2) * BLOCK))
        begin = address_of(content)
        device = _engine.DeviceRange(begin, begin + len(content), gds.queue)
        engine = _engine.Engine(4 * BLOCK, BLOCK, 2)
        columns = array("Q", (0, len(content), begin)), array("Q")
        waiting = engine.stage(*columns, _engine.Allowance(99), 2, [device], stage)
        host = bytearray(content_of(4, 3 * BLOCK))
        columns = array("Q", (0, len(host), address_of(host))), array("Q")
        other = engine.stage(*columns, _engine.Allowance(3), 2)
        assert other.wait_staged(WAIT_S), "it waits behind the job that no block is left for"
        assert not waiting.wait_queued(0)
        other.cancel()
        with direct_file(gds, disk / "image") as file:
            waiting.write_to(file.fd, 0, file.sink, True)
            assert waiting.wait_written(WAIT_S) and waiting.failure() is None
            file.sink.end()
        assert (disk / "image").read_bytes() == content
        engine.close()
        del waiting, other, engine, stage, device
