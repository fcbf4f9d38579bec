"""Loads to a GPU by GPUDirect Storage: what comes that way, what does not, and that all is right.

On the devices of kit/accelerator.py, with a stub of cuFile. Must not know how blocks are moved.
"""

from __future__ import annotations

import logging
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastckpt
from fastckpt import errors
from fastckpt.engine.gds import BLOCKS
from fastckpt.formats import zip_records
from fastckpt.formats.zip_records import Directory
from fastckpt.plan.boxes import blocks_of
from fastckpt.plan.image import BLOCK_BYTES, BlockChecksums
from fastckpt.reading import verified
from fastckpt.reading.verified import GdsReadStream, whole_blocks
from fastckpt.saving import pipeline
from fastckpt.storage.input_files import PosixFile
from tests.kit.accelerator import KIND, Runtime, installed
from tests.kit.cuda_stub import ILLEGAL_ADDRESS, TO_DEVICE, CudaStub
from tests.kit.cufile_stub import FILE_SYSTEM, CufileStub
from tests.kit.noise import noise
from tests.kit.saves import warnings_in
from tests.kit.storm import Chance

MIB = 1 << 20
WAIT_S = 60.0
EIO = 5


def octets(nbytes: int, seed: int = 0) -> torch.Tensor:
    return noise(nbytes, seed)


def saved(path: Path, **sizes: int) -> dict[str, torch.Tensor]:
    state = {name: octets(nbytes, seed) for seed, (name, nbytes) in enumerate(sizes.items())}
    fastckpt.save(state, path).result(WAIT_S)
    return state


def same(loaded: dict[str, Any], state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(loaded[key].cpu(), value.cpu()) for key, value in state.items())


def through_host(driver: CudaStub) -> int:
    return sum(op.nbytes for op in driver.log() if op.kind == TO_DEVICE)


@pytest.mark.parametrize("where", [KIND, f"{KIND}:0"])
def test_whole_blocks_never_come_to_the_host(
    cufile: CufileStub, driver: CudaStub, disk: Path, where: Any
) -> None:
    state = saved(disk / "a.pt", w=44 * MIB + 77, v=28 * MIB, small=1000)
    loaded = fastckpt.load(disk / "a.pt", map_location=where, staging="gds")
    assert same(loaded, state) and loaded["w"].device.type == KIND
    assert cufile.calls("cuFileRead") >= 4 + 2
    assert through_host(driver) <= 4 * BLOCK_BYTES + 1000


def test_where_the_file_says(cufile: CufileStub, driver: CudaStub, disk: Path) -> None:
    """Tensors of the GPU, of another one and of the host in one file."""
    state = {
        "gpu": octets(40 * MIB).to(KIND),
        "other": octets(30 * MIB, 1).to(f"{KIND}:1"),
        "host": octets(20 * MIB, 2),
    }
    fastckpt.save(state, disk / "a.pt").result(WAIT_S)
    loaded = fastckpt.load(disk / "a.pt", staging="gds")
    assert same(loaded, state)
    assert [str(t.device) for t in loaded.values()] == [f"{KIND}:0", f"{KIND}:1", "cpu"]
    assert cufile.calls("cuFileRead") >= 4


def test_to_the_host_nothing_goes_by_cufile(cufile: CufileStub, disk: Path) -> None:
    state = saved(disk / "a.pt", w=20 * MIB)
    assert same(fastckpt.load(disk / "a.pt", map_location="cpu", staging="gds"), state)
    assert cufile.calls("cuFileRead") == 0


def test_code_as_map_location_comes_through_the_host(cufile: CufileStub, disk: Path) -> None:
    state = saved(disk / "a.pt", w=20 * MIB)
    loaded = fastckpt.load(disk / "a.pt", lambda storage, _where: storage, staging="gds")
    assert same(loaded, state) and cufile.calls("cuFileRead") == 0


@settings(
    max_examples=Chance.examples(6),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(sizes=st.lists(st.integers(0, 20 * MIB), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_any_sizes(cufile: CufileStub, disk: Path, sizes: list[int], seed: int) -> None:
    state = {str(i): octets(nbytes, seed + i) for i, nbytes in enumerate(sizes)}
    fastckpt.save(state, disk / "a.pt", options=fastckpt.SaveOptions(durable=False)).result(WAIT_S)
    assert same(fastckpt.load(disk / "a.pt", map_location=KIND, staging="gds"), state)
    with fastckpt.Checkpointer(
        disk / "run", options=fastckpt.SaveOptions(staging="gds", durable=False)
    ) as checkpointer:
        checkpointer.save(1, {key: value.to(KIND) for key, value in state.items()})
        blank = {key: torch.zeros_like(value, device=KIND) for key, value in state.items()}
        assert checkpointer.restore(blank) == 1
    assert same(blank, state)


def test_restore_in_place(cufile: CufileStub, driver: CudaStub, disk: Path) -> None:
    state = {f"w{i}": octets(24 * MIB + i, i).to(KIND) for i in range(3)}
    state["host"] = octets(10 * MIB, 9)
    with fastckpt.Checkpointer(
        disk / "run", options=fastckpt.SaveOptions(staging="gds")
    ) as checkpointer:
        checkpointer.save(1, state).result(WAIT_S)
        blank = {key: torch.zeros_like(value) for key, value in state.items()}
        addresses = {key: value.data_ptr() for key, value in blank.items()}
        driver.configure()
        assert checkpointer.restore(blank) == 1
    assert same(blank, state)
    assert addresses == {key: value.data_ptr() for key, value in blank.items()}
    # What crosses from a tensor into the next goes to the GPU all the same.
    assert cufile.calls("cuFileRead") >= 9
    assert through_host(driver) <= 2 * BLOCK_BYTES


def test_what_is_stored_in_another_order_comes_through_the_host(
    cufile: CufileStub, disk: Path
) -> None:
    """A part of each row: rows with strides."""
    whole = octets(20 * MIB).view(20, MIB)
    with fastckpt.Checkpointer(
        disk / "run", options=fastckpt.SaveOptions(staging="gds")
    ) as checkpointer:
        checkpointer.save(1, {"w": whole.to(KIND)}).result(WAIT_S)
        turned = torch.zeros(20, MIB, dtype=torch.int16, device=KIND)  # converted, too
        assert checkpointer.restore({"w": turned}) == 1
    assert torch.equal(turned.cpu(), whole.to(torch.int16))


@pytest.mark.parametrize("at", [3 * MIB, 12 * MIB, 28 * MIB])
def test_damage_is_found(cufile: CufileStub, disk: Path, at: int) -> None:
    saved(disk / "a.pt", w=30 * MIB)
    content = bytearray((disk / "a.pt").read_bytes())
    content[at] ^= 4
    (disk / "a.pt").write_bytes(content)
    with pytest.raises(errors.CorruptCheckpoint, match="data/0"):
        fastckpt.load(disk / "a.pt", map_location=KIND, staging="gds")
    assert fastckpt.load(disk / "a.pt", KIND, staging="gds", verify=False)["w"].numel() == 30 * MIB


def test_damage_of_a_step_is_found(cufile: CufileStub, disk: Path) -> None:
    state = {"w": octets(30 * MIB).to(KIND)}
    with fastckpt.Checkpointer(
        disk / "run", options=fastckpt.SaveOptions(staging="gds")
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).result(WAIT_S)
        newest = max(disk.rglob("*.safetensors"), key=lambda path: path.parent.name)
        content = bytearray(newest.read_bytes())
        content[12 * MIB] ^= 1
        newest.write_bytes(content)
        blank = {"w": torch.zeros_like(state["w"])}
        assert checkpointer.restore(blank) == 1
    assert same(blank, state)


@pytest.mark.parametrize("call", ["cuFileRead", "cuFileHandleRegister", "cuFileBufRegister"])
@pytest.mark.parametrize(("code", "number", "after"), [(5030, 0, 2), (FILE_SYSTEM, EIO, 0)])
def test_what_cufile_refuses_comes_through_the_host(
    cufile: CufileStub,
    disk: Path,
    caplog: pytest.LogCaptureFixture,
    call: str,
    code: int,
    number: int,
    after: int,
) -> None:
    state = saved(disk / "a.pt", w=28 * MIB)
    cufile.fail(call, code, number, after=after)
    with caplog.at_level(logging.WARNING, "fastckpt"):
        for _ in range(3):
            assert same(fastckpt.load(disk / "a.pt", KIND, staging="gds"), state)
    # Three loads register three files, and the blocks once.
    refused = after == 0 or call != "cuFileBufRegister"
    assert len(warnings_in(caplog.records)) == int(refused)


@pytest.mark.parametrize("nbytes", [MIB + 4096, MIB + 100])
def test_short_reads(cufile: CufileStub, disk: Path, nbytes: int) -> None:
    """Whole pages, and parts of one, which are no end of the file."""
    cufile.at_most(nbytes)
    state = saved(disk / "a.pt", w=30 * MIB)
    assert same(fastckpt.load(disk / "a.pt", KIND, staging="gds"), state)


def test_without_cufile(gpu: CudaStub, disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = saved(disk / "a.pt", w=20 * MIB)
    with caplog.at_level(logging.WARNING, "fastckpt"):
        for _ in range(2):
            assert same(fastckpt.load(disk / "a.pt", KIND, staging="gds"), state)
    (warning,) = warnings_in(caplog.records)
    assert "GPUDirect Storage" in warning.message


@pytest.mark.parametrize("call", ["cuMemcpyDtoDAsync_v2", "cuLaunchKernel", "cuEventRecord"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_device_that_refuses(
    cufile: CufileStub, driver: CudaStub, disk: Path, call: str, after: int
) -> None:
    state = saved(disk / "a.pt", w=46 * MIB)
    assert same(fastckpt.load(disk / "a.pt", KIND, staging="gds"), state)
    driver.fail(call, ILLEGAL_ADDRESS, after=after)
    with pytest.raises(errors.DeviceError, match="ILLEGAL_ADDRESS"):
        fastckpt.load(disk / "a.pt", KIND, staging="gds")


def test_a_file_that_shrinks_while_it_is_read(cufile: CufileStub, disk: Path) -> None:
    saved(disk / "a.pt", w=60 * MIB)
    current = pipeline.current()
    with open(disk / "a.pt", "r+b") as file:
        stream = current.staging.read(
            PosixFile(current.storage, file.fileno(), "a.pt"),
            60 * MIB,
            BLOCK_BYTES,
            (),
            [5, 6],
            direct=current.staging.gds.way(
                "gds", current.staging.devices.queue(torch.device(KIND, 0))
            )[0],
        )
        stream.close()
        file.truncate(30 * MIB)
    with pytest.raises(errors.CheckpointError):
        fastckpt.load(disk / "a.pt", KIND, staging="gds")


def test_loads_and_saves_share_the_blocks(cufile: CufileStub, disk: Path) -> None:
    """More at a time than there are blocks for; each waits for the others."""
    nbytes = (BLOCKS // 2 + 1) * BLOCK_BYTES  # a load reads half of the blocks ahead
    state = saved(disk / "a.pt", w=nbytes)
    on_gpu = {"w": state["w"].to(KIND)}
    found: list[bool] = []

    def load() -> None:
        found.append(same(fastckpt.load(disk / "a.pt", KIND, staging="gds"), state))

    def save(number: int) -> None:
        fastckpt.save(
            on_gpu, disk / f"{number}.pt", options=fastckpt.SaveOptions(staging="gds")
        ).result(WAIT_S)
        found.append(same(fastckpt.load(disk / f"{number}.pt", "cpu"), state))

    threads = [threading.Thread(target=load) for _ in range(2)]
    threads += [threading.Thread(target=save, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == [True] * 4


@pytest.mark.parametrize(("blocks", "loads"), [(1, 1), (2, 3)])
def test_loads_by_several_streams_do_not_wait_for_each_other(
    cufile: CufileStub, driver: CudaStub, runtime: Runtime, disk: Path, blocks: int, loads: int
) -> None:
    """Of staging memory there is less than all their streams would keep."""
    state = {str(i): octets(17 * MIB, i).to(KIND if i % 2 else "cpu") for i in range(4)}
    fastckpt.save(state, disk / "a.pt").result(WAIT_S)
    found: list[bool] = []

    def load() -> None:
        found.append(same(fastckpt.load(disk / "a.pt", staging="gds"), state))

    with installed(runtime, driver.path, None, blocks * BLOCK_BYTES, cufile.path):
        threads = [threading.Thread(target=load, daemon=True) for _ in range(loads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert found == [True] * loads


class Interrupting(logging.Handler):
    """Ctrl-C while a load that has told cuFile its file says so."""

    def emit(self, record: logging.LogRecord) -> None:
        if "cuFile" in record.getMessage():
            raise KeyboardInterrupt


def test_an_interrupted_load_leaves_no_file_with_cufile(
    cufile: CufileStub, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next load opens its file by the same number."""
    state = saved(disk / "a.pt", w=40 * MIB)
    assert same(fastckpt.load(disk / "a.pt", KIND, staging="gds"), state)
    logger, handler = logging.getLogger("fastckpt"), Interrupting()
    with caplog.at_level(logging.INFO, "fastckpt"):
        logger.addHandler(handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                fastckpt.load(disk / "a.pt", KIND, staging="gds")
        finally:
            logger.removeHandler(handler)
    assert cufile.alive().files == 0
    assert same(fastckpt.load(disk / "a.pt", KIND, staging="gds"), state)


def test_records_beyond_the_end_are_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a forged directory: the engine is asked for no block that the file does not have."""
    forged = Directory(["a/data/0"], [100 * BLOCK_BYTES], [2 * BLOCK_BYTES], [0], [0])
    monkeypatch.setattr(zip_records, "directory", lambda _data, _end: forged)
    index = BlockChecksums(3 * BLOCK_BYTES, BLOCK_BYTES, (0, 0, 0), b"")
    assert verified.blocks_of_large(index, MIB) == set()


class Memory:
    """A stream over bytes, and what was asked of it."""

    def __init__(self, content: bytes, wanted: list[int], to_gpu: bool, log: list[Any]) -> None:
        self.content, self.wanted, self.to_gpu, self.log = content, wanted, to_gpu, log

    def read_runs(self, runs: array[int], _devices: Any) -> bool:
        for at in range(0, len(runs), 6):
            offset, address, nbytes, count, stride, address_stride = runs[at : at + 6]
            for number in range(count):
                begin = offset + number * stride
                assert all(
                    block in self.wanted
                    for block in range(begin // 16, (begin + nbytes - 1) // 16 + 1)
                )
                target = address + number * address_stride
                self.log.append((self.to_gpu, target, self.content[begin : begin + nbytes]))
        return True

    def beside(self, other: Memory) -> None:
        assert other is not self


class Range:
    def __init__(self, begin: int, end: int, queue: object) -> None:
        self.begin, self.end, self.queue = begin, end, queue


@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 150),
            st.integers(1, 60),
            st.integers(1, 3),
            st.sampled_from(["gpu", "other", "host"]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_every_byte_comes_once_and_only_whole_blocks_by_the_gpu(
    rows: list[tuple[int, int, int, str]],
) -> None:
    """Against a file of 16-byte blocks, whose streams refuse what they were not opened for."""
    content = bytes(range(256)) * 2
    queue, other = object(), object()
    devices = [Range(1000, 2000, queue), Range(2000, 3000, other)]
    base = {"gpu": 1000, "other": 2000, "host": 5000}
    runs, expected, at = [], {}, dict.fromkeys(base, 0)
    for offset, nbytes, count, where in sorted(rows):
        address = base[where] + at[where]
        at[where] += nbytes * count
        stride = nbytes + 7 if count > 1 else 0
        runs.append((offset, address, nbytes, count, stride, nbytes))
        for number in range(count):
            begin = offset + number * stride
            for i in range(nbytes):
                expected[address + number * nbytes + i] = content[begin + i]
    log: list[Any] = []
    whole = whole_blocks(runs, 16, queue, devices)

    def opened(wanted: Any, direct: Any) -> Any:
        return Memory(content, list(wanted), direct is not None, log)

    divided = GdsReadStream(
        opened,
        blocks_of(runs, 16),
        16,
        whole,
        type("Direct", (), {"queue": queue})(),
    )
    assert divided.read_runs(array("Q", [value for row in runs for value in row]), devices)
    received: dict[int, int] = {}
    for to_gpu, target, piece in log:
        assert not to_gpu or 1000 <= target < 2000
        for i, value in enumerate(piece):
            assert target + i not in received
            received[target + i] = value
    assert received == expected
