"""The engine with memory of devices: what is copied, in which order, and what comes of refusals.

The driver is a stub over host memory whose streams are threads and whose clock is its own, so order
is real and times are exact. Must not know torch, formats or checkpoints.
"""

from __future__ import annotations

import itertools
import os
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt import _engine
from fastckpt.plan.image import address_of
from tests.kit import interpreters
from tests.kit.cuda_stub import ILLEGAL_ADDRESS, KERNEL, OUT_OF_MEMORY, TO_HOST, CudaStub, built
from tests.kit.engines import (
    BLOCK_SIZES,
    PAGE,
    POOL,
    POOL_ADDRESS,
    WAIT_S,
    Plan,
    crcs_of,
    engine_of,
    opened,
    plain,
    plans,
    relaxed,
)
from tests.kit.saves import wait_until
from tests.kit.storm import Chance

# A PCIe 5 link of 16 lanes, as it is measured: 8 microseconds to begin, then 55 GB/s.
LATENCY_US, BYTES_PER_US = 8.0, 55_000.0
Queue = _engine.DeviceQueue
Range = _engine.DeviceRange


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    return CudaStub(built(tmp_path_factory.mktemp("stub")))


@pytest.fixture
def stub(library: CudaStub) -> Iterator[CudaStub]:
    before = library.alive()
    library.configure()
    yield library
    library.configure()
    # The last reference may be that of a backend's thread, which has just ended a write.
    wait_until(lambda: library.alive() == before, "what was made of the driver was freed")


@pytest.fixture
def driver(stub: CudaStub) -> _engine.CudaDriver:
    return _engine.CudaDriver(stub.path)


@pytest.fixture(scope="module")
def backend() -> Iterator[_engine.Backend]:
    made = _engine.threads_backend(2)
    yield made
    made.close()


def ranges(queues: list[Queue], cuts: list[int]) -> list[Range]:
    """Every second part of POOL is a device's, of one queue after the other."""
    bounds = sorted({0, *cuts, len(POOL)})
    return [
        Range(POOL_ADDRESS + begin, POOL_ADDRESS + end, queues[number // 2 % len(queues)])
        for number, (begin, end) in enumerate(itertools.pairwise(bounds))
        if number % 2 == 0
    ]


def stage(
    engine: _engine.Engine, plan: Plan, devices: list[Range], limit: int = 1 << 20, stagers: int = 4
) -> _engine.WriteJob:
    segments, slots = plan.columns()
    return engine.stage(segments, slots, _engine.Allowance(limit), stagers, devices)


def write(job: _engine.WriteJob, path: Path, backend: _engine.Backend) -> bytes:
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd:
        job.write_to(fd, 0, backend, False)
        assert job.wait_written(WAIT_S)
    return path.read_bytes()


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
@settings(relaxed, max_examples=Chance.examples(20))
@given(data=st.data(), blocks=st.integers(1, 6), stagers=st.sampled_from([1, 4]))
def test_written_file_is_the_rendering(
    library: CudaStub,
    backend: _engine.Backend,
    disk: Path,
    block_bytes: int,
    data: st.DataObject,
    blocks: int,
    stagers: int,
) -> None:
    """Host and device memory, of one device or two, in one image."""
    library.configure()
    driver = _engine.CudaDriver(library.path)
    plan = data.draw(plans(block_bytes))
    cuts = data.draw(st.lists(st.integers(1, len(POOL) - 1), max_size=6))
    queues = [Queue(driver, ordinal) for ordinal in range(data.draw(st.integers(1, 2)))]
    expected, slot_crcs = plan.render()
    with engine_of(blocks, block_bytes, stagers) as engine:
        job = stage(engine, plan, ranges(queues, cuts), data.draw(st.integers(1, blocks)))
        assert write(job, disk / "image", backend) == expected
        assert job.failure() is None and job.pin_error() == 0
        assert job.block_crcs() == crcs_of(expected, block_bytes)
        assert job.slot_crcs() == slot_crcs


def test_copies_follow_what_the_stream_was_given_and_lead_what_comes(
    stub: CudaStub, driver: _engine.CudaDriver, backend: _engine.Backend, disk: Path
) -> None:
    """The call fence: the caller waits for no copy, and its next kernel waits for all of them."""
    stub.configure(LATENCY_US, BYTES_PER_US)
    nbytes = 40 * PAGE
    tensor = bytearray(nbytes)
    address = address_of(tensor)
    queue = Queue(driver, 0)
    with engine_of(64) as engine:
        stub.hold(True)
        stub.kernel(tensor, 1, 500.0)
        queue.follow(0)
        job = engine.stage(
            array("Q", [0, nbytes, address]),
            array("Q"),
            _engine.Allowance(64),
            2,
            [Range(address, address + nbytes, queue)],
        )
        assert job.wait_queued(WAIT_S)
        queue.lead(0)
        stub.kernel(tensor, 2, 100.0)
        assert not job.wait_staged(0.05), "no copy has begun, and the caller is here"
        stub.hold(False)
        assert write(job, disk / "image", backend) == b"\1" * nbytes
        copies = sum(done.kind == TO_HOST for done in stub.log())
        assert stub.synchronize(0) == pytest.approx(
            500 + copies * LATENCY_US + nbytes / BYTES_PER_US + 100
        )
    assert set(tensor) == {2}
    log = stub.log()
    copies = [done for done in log if done.kind == TO_HOST]
    kernels = [done for done in log if done.kind == KERNEL]
    assert sum(done.nbytes for done in copies) == nbytes
    assert kernels[0].end_us <= min(done.begin_us for done in copies)
    assert max(done.end_us for done in copies) <= kernels[1].begin_us


def test_copies_run_beside_kernels(
    stub: CudaStub, driver: _engine.CudaDriver, backend: _engine.Backend, disk: Path
) -> None:
    """The step fence: compute that was queued after the save began takes no longer for it."""
    stub.configure(LATENCY_US, BYTES_PER_US)
    nbytes, scratch = 32 * PAGE, bytearray(PAGE)
    queue = Queue(driver, 0)
    address = POOL_ADDRESS
    with engine_of(64) as engine:
        queue.follow(0)
        stub.kernel(scratch, 1, 10_000.0)  # forward and backward
        job = engine.stage(
            array("Q", [0, nbytes, address]),
            array("Q"),
            _engine.Allowance(64),
            2,
            [Range(address, address + nbytes, queue)],
        )
        assert job.wait_queued(WAIT_S)
        queue.lead(0)
        stub.kernel(scratch, 2, 50.0)  # the optimizer
        assert stub.synchronize(0) == pytest.approx(10_050.0), "all was copied by then"
        write(job, disk / "image", backend)


def test_copies_of_one_job_keep_the_link_busy(
    stub: CudaStub, driver: _engine.CudaDriver, backend: _engine.Backend, disk: Path
) -> None:
    """Queued ahead: between two blocks the link waits for nothing, though the host sums up each."""
    stub.configure(LATENCY_US, BYTES_PER_US)
    block = 65536
    queue = Queue(driver, 0)
    with engine_of(16, block) as engine:
        engine.prefault(0, 16 * block, 1, queue)  # until it is pinned, one copy fills many blocks
        job = stage(
            engine, plain(15 * block), [Range(POOL_ADDRESS, POOL_ADDRESS + len(POOL), queue)]
        )
        assert write(job, disk / "image", backend) == bytes(POOL[: 15 * block])
    copies = [done for done in stub.log() if done.kind == TO_HOST]
    assert sum(done.nbytes for done in copies) == 15 * block and len(copies) > 1
    begin, end = min(d.begin_us for d in copies), max(d.end_us for d in copies)
    assert end - begin == pytest.approx(len(copies) * LATENCY_US + 15 * block / BYTES_PER_US)


def test_the_arena_is_pinned_once_and_by_parts(
    stub: CudaStub, driver: _engine.CudaDriver, backend: _engine.Backend, disk: Path
) -> None:
    queue = Queue(driver, 0)
    with engine_of(40) as engine:
        for _ in range(3):
            job = stage(
                engine, plain(16 * PAGE), [Range(POOL_ADDRESS, POOL_ADDRESS + PAGE * 16, queue)]
            )
            write(job, disk / "image", backend)
        host_only = stage(engine, plain(PAGE), [])
        write(host_only, disk / "image", backend)
        parts = stub.alive().pinned_parts
        assert 1 <= parts <= 2, "what no copy came to is not pinned"
        assert stub.calls("cuMemHostRegister_v2") == parts
    del engine
    assert stub.alive().pinned_bytes == 0


def test_what_cannot_be_pinned_is_copied_all_the_same(
    stub: CudaStub, driver: _engine.CudaDriver, backend: _engine.Backend, disk: Path
) -> None:
    stub.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
    queue = Queue(driver, 0)
    with engine_of(40) as engine:
        job = stage(
            engine, plain(40 * PAGE), [Range(POOL_ADDRESS, POOL_ADDRESS + PAGE * 40, queue)]
        )
        assert write(job, disk / "image", backend) == bytes(POOL[: 40 * PAGE])
        assert job.failure() is None and job.pin_error() == OUT_OF_MEMORY
        assert "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory" in driver.text(job.pin_error())
    assert stub.calls("cuMemHostRegister_v2") <= 2, "each stager may ask once, and none again"


@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize(
    "name",
    [
        "cuMemcpyDtoHAsync_v2",
        "cuEventRecord",
        "cuEventCreate",
        "cuEventSynchronize",
        "cuCtxPushCurrent_v2",
    ],
)
def test_a_refusal_fails_the_job(
    stub: CudaStub, backend: _engine.Backend, disk: Path, name: str, after: int
) -> None:
    """Whatever the driver refuses from some call on: the job ends, with the code, and the engine
    goes on."""
    driver = _engine.CudaDriver(stub.path)
    queue = Queue(driver, 0)
    found = [Range(POOL_ADDRESS, POOL_ADDRESS + PAGE * 200, queue)]
    with engine_of(8) as engine:
        names = ["cuEventQuery", name] if name == "cuEventSynchronize" else [name]
        for each in names:  # either tells that copies have ended
            stub.fail(each, ILLEGAL_ADDRESS, after=after)
        job = stage(engine, plain(200 * PAGE), found)
        write(job, disk / "image", backend)
        assert job.wait_staged(WAIT_S)
        failure = job.failure()
        assert failure is not None and (failure[0], failure[2]) == ("copy", ILLEGAL_ADDRESS)
        for each in names:
            stub.fail(each, 0, times=0)
        job = stage(engine, plain(200 * PAGE), found)
        assert write(job, disk / "image", backend) == bytes(POOL[: 200 * PAGE])
        assert job.failure() is None


def test_stagers_pin_parts_at_once(
    stub: CudaStub, driver: _engine.CudaDriver, backend: _engine.Backend, disk: Path
) -> None:
    """Pinning is slow: another stager pins the next part meanwhile, and copies to it."""
    queue = Queue(driver, 0)
    with engine_of(40) as engine:
        found = [Range(POOL_ADDRESS, POOL_ADDRESS + PAGE * 40, queue)]
        with stub.silent("cuMemHostRegister_v2") as reached:
            job = stage(engine, plain(40 * PAGE), found)
            reached(2)
        assert write(job, disk / "image", backend) == bytes(POOL[: 40 * PAGE])


# As many as there are of 8 MiB in 64 GiB.
BLOCKS = 8192


@pytest.mark.parametrize(
    ("tensors", "batches", "pinned"), [(1, True, False), (900, True, True), (1, False, True)]
)
def test_a_stream_takes_all_copies_of_64_gib_at_once(
    stub: CudaStub,
    driver: _engine.CudaDriver,
    backend: _engine.Backend,
    disk: Path,
    tensors: int,
    batches: bool,
    pinned: bool,
) -> None:
    """None has begun, and no call waited for that. A driver without batches is asked once for each
    part that is pinned, and for each tensor, of which it must not have hundreds.
    """
    memory = bytearray(os.urandom(BLOCKS * PAGE))
    address, queue = address_of(memory), Queue(driver, 0)
    cuts = [BLOCKS * PAGE * number // tensors for number in range(tensors + 1)]
    segments = array("Q")
    for begin, end in itertools.pairwise(cuts):
        segments.extend((begin, end - begin, address + begin))
    found = [Range(address, address + len(memory), queue)]
    with engine_of(BLOCKS) as engine:
        if pinned:
            engine.prefault(0, BLOCKS * PAGE, 1, queue)
        if not batches:
            stub.fail("cuMemcpyBatchAsync", OUT_OF_MEMORY)
        stub.hold(True)
        queue.follow(0)
        job = engine.stage(segments, array("Q"), _engine.Allowance(BLOCKS), 2, found)
        assert job.wait_queued(WAIT_S)
        wait = queue.lead(0)
        assert wait.seconds() < 0 and not job.wait_staged(0)
        pending = stub.pending()
        assert pending.waited == 0
        assert pending.operations <= (128 if batches else 1000)
        stub.hold(False)
        assert write(job, disk / "image", backend) == memory


def test_host_jobs_go_on_while_copies_are_awaited(
    stub: CudaStub, driver: _engine.CudaDriver, backend: _engine.Backend, disk: Path
) -> None:
    queue = Queue(driver, 0)
    with engine_of(8) as engine:
        stub.hold(True)
        waiting = stage(
            engine, plain(4 * PAGE), [Range(POOL_ADDRESS, POOL_ADDRESS + PAGE * 4, queue)]
        )
        assert waiting.wait_queued(WAIT_S)
        for _ in range(5):
            job = stage(engine, plain(30 * PAGE), [])
            assert write(job, disk / "host", backend) == bytes(POOL[: 30 * PAGE])
        assert not waiting.wait_staged(0.01)
        stub.hold(False)
        assert write(waiting, disk / "image", backend) == bytes(POOL[: 4 * PAGE])


def answers(job: _engine.WriteJob) -> bool:
    """Whether the engine's mutex can be had, which a thread must not keep in a call of the driver:
    others that use the GPU may hold the driver's locks for long.
    """
    asking = threading.Thread(target=job.wait_written, args=(0,), daemon=True)
    asking.start()
    asking.join(WAIT_S)
    return not asking.is_alive()


@pytest.mark.parametrize("name", ["cuEventQuery", "cuEventSynchronize", "cuEventElapsedTime"])
def test_a_driver_that_does_not_answer_holds_up_no_other_job(
    stub: CudaStub, driver: _engine.CudaDriver, backend: _engine.Backend, disk: Path, name: str
) -> None:
    queue = Queue(driver, 0)
    stub.hold(name == "cuEventSynchronize")  # which nobody calls for what has arrived
    with engine_of(8) as engine:
        with stub.silent(name) as reached:
            found = [Range(POOL_ADDRESS, POOL_ADDRESS + PAGE * 4, queue)]
            waiting = stage(engine, plain(4 * PAGE), found)
            reached(1)
            assert answers(waiting)
            job = stage(engine, plain(30 * PAGE), [])
            assert write(job, disk / "host", backend) == bytes(POOL[: 30 * PAGE])
        stub.hold(False)
        assert write(waiting, disk / "image", backend) == bytes(POOL[: 4 * PAGE])


def test_a_driver_that_does_not_answer_a_reader_holds_up_no_job(
    stub: CudaStub, driver: _engine.CudaDriver, backend: _engine.Backend, disk: Path
) -> None:
    content = os.urandom(8 * PAGE)
    (disk / "file").write_bytes(content)
    target = bytearray(len(content))
    address, queue = address_of(target), Queue(driver, 0)
    with engine_of(8) as engine, opened(disk / "file", os.O_RDONLY) as fd:
        reader = engine.read(fd, len(content), crcs_of(content, PAGE), backend, False, 2)
        run = array("Q", [0, address, len(content), 1, 0, 0])
        found = [Range(address, address + len(content), queue)]
        with stub.silent("cuEventQuery") as reached:
            reading = threading.Thread(target=reader.read_runs, args=(run, found))
            reading.start()
            reached(1)
            job = stage(engine, plain(PAGE), [])
            assert answers(job)
            assert write(job, disk / "host", backend) == bytes(POOL[:PAGE])
        reading.join()
        assert reader.arrive() and bytes(target) == content
        reader.close()


def test_a_cancelled_job_waits_for_copies_in_flight(
    stub: CudaStub, driver: _engine.CudaDriver
) -> None:
    """The block belongs to the copy until that is over."""
    queue = Queue(driver, 0)
    with engine_of(4) as engine:
        stub.hold(True)
        job = stage(
            engine, plain(10 * PAGE), [Range(POOL_ADDRESS, POOL_ADDRESS + PAGE * 10, queue)]
        )
        while engine.arena_blocks_in_use() < 4:
            pass
        job.cancel()
        assert not job.wait_written(0.05) and engine.arena_blocks_in_use() == 4
        stub.hold(False)
        assert job.wait_written(WAIT_S) and engine.arena_blocks_in_use() == 0


def test_a_stream_that_is_captured_is_refused(stub: CudaStub, driver: _engine.CudaDriver) -> None:
    queue = Queue(driver, 0)
    stub.capture(True)
    with pytest.raises(_engine.StreamCaptured, match="captured into a CUDA graph"):
        queue.follow(0)


def test_what_is_missing_is_named(stub: CudaStub, tmp_path: Path) -> None:
    with pytest.raises(_engine.DeviceUnavailable, match="libcuda-none"):
        _engine.CudaDriver("libcuda-none.so.1")
    with pytest.raises(_engine.DeviceUnavailable, match=r"libc\.so\.6 has no cuInit: update"):
        _engine.CudaDriver("libc.so.6")
    stub.fail("cuInit", 100)
    with pytest.raises(
        _engine.DeviceUnavailable, match=r"cuInit failed: CUDA_ERROR_UNKNOWN \(100\)"
    ):
        _engine.CudaDriver(stub.path)
    stub.configure()
    driver = _engine.CudaDriver(stub.path)
    with pytest.raises(_engine.DeviceError, match=r"cuda:9: device: .*\(101\)"):
        Queue(driver, 9)
    for name in ("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuStreamCreate"):
        stub.configure()
        stub.fail(name, OUT_OF_MEMORY, times=1)
        with pytest.raises(_engine.DeviceError, match="out of memory"):
            Queue(driver, 0)
    assert Queue(driver, 1).bus_id == "0000:01:00.0"


def test_a_process_without_a_gpu_loads_no_driver() -> None:
    code = (
        "import torch, fastckpt, tempfile, os\n"
        "with tempfile.TemporaryDirectory() as d:\n"
        "    fastckpt.save({'w': torch.ones(9)}, os.path.join(d, 'a.pt')).result()\n"
        "    fastckpt.load(os.path.join(d, 'a.pt'))\n"
        "assert 'libcuda.so' not in open('/proc/self/maps').read()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    interpreters.run(code).check_returncode()


def test_a_process_that_used_a_device_ends(stub: CudaStub) -> None:
    code = (
        "import torch\n"
        "from fastckpt import _engine\n"
        f"queue = _engine.DeviceQueue(_engine.CudaDriver({stub.path!r}), 0)\n"
        "queue.follow(0)\n"
    )
    interpreters.run(code, frees=True).check_returncode()
