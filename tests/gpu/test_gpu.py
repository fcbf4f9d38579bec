"""Saves of tensors on a GPU: what is copied when, and what comes of refusals.

On a device of torch over host memory, whose copies a stub of the CUDA driver makes, with streams
that are threads: order is real and times are exact. What only a real GPU can show is in
test_gpu_real.py. Must not know the engine's insides.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastckpt
from fastckpt import SaveHandle, SaveStats
from fastckpt.engine import transfer
from fastckpt.errors import DeviceError, PeerFailed, RanksDisagree, StagingConflict, StorageError
from fastckpt.saving import pipeline
from tests.crews.group_crew import Crew, Member, Nursery, Outcome, Told
from tests.kit import accelerator, cuda_stub
from tests.kit.accelerator import KIND, Runtime, here
from tests.kit.cuda_stub import ILLEGAL_ADDRESS, KERNEL, OUT_OF_MEMORY, TO_HOST, CudaStub
from tests.kit.devices import Files, Kernels, Steps, Way, fill, octets, on_device, paint, way
from tests.kit.doubles import Delay
from tests.kit.options import gathered
from tests.kit.programs import run_python
from tests.kit.saves import interrupted_in, running, stands_in, wait_until, warnings_in
from tests.kit.storm import Storm
from tests.kit.tiers import await_spares, has_landed, local, memory, shard

__all__ = ["local", "way"]

# A PCIe 5 link of 16 lanes, as it is measured: 8 microseconds to begin, then 55 GB/s.
LATENCY_US, BYTES_PER_US = 8.0, 55_000.0
MIB = 1 << 20
KIB = 1 << 10
BLOCK = 8 * MIB
WAIT_S = 60.0
BATCH = "cuMemcpyBatchAsync"
COPY, EVENT_RECORD = "cuMemcpyDtoHAsync_v2", "cuEventRecord"
ARRIVED = "cuEventQuery", "cuEventSynchronize"  # either tells that copies have ended


def content(tensor: torch.Tensor) -> bytes:
    """What a tensor of bytes has by now, whatever is still to be done to it."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def copies(gpu: CudaStub) -> list[cuda_stub.Done]:
    """What was copied to the host."""
    return [done for done in gpu.log() if done.kind == TO_HOST]


def test_a_state_comes_back_where_it_was(
    gpu: CudaStub, disk: Path, assert_same: Callable[[Any, Any], None]
) -> None:
    """Aliasing, views, optimizers, mixed devices, as torch.save has it."""
    module = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.BatchNorm1d(700)).to(here())
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weight = module[0].weight.detach()
    state = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "view": weight[10:20, ::3],
        "again": weight,
        "host": torch.randn(1000, 1000),
        "empty": torch.empty(0, device=here()),
        "step": 7,
    }
    stats = fastckpt.save(state, disk / "a.pt").result(60)
    assert stats.staging == "pinned"
    assert_same(fastckpt.load(disk / "a.pt"), state)
    assert_same(torch.load(disk / "a.pt"), state)
    torch.save(state, disk / "b.pt")
    on_host = torch.load(disk / "b.pt", map_location="cpu")
    assert_same(torch.load(disk / "a.pt", map_location="cpu"), on_host)
    assert_same(fastckpt.load(disk / "a.pt", map_location="cpu"), on_host)


class HeldCommit(Delay):
    """Keeps the next save from its commit until `commit` is set."""

    def __init__(self) -> None:
        self.commit = threading.Event()
        super().__init__("sync", self.commit)


def commit_held() -> HeldCommit:
    pipeline.current().storage = held = HeldCommit()
    return held


def told(handle: SaveHandle, gpu: CudaStub, held: HeldCommit) -> SaveStats:
    """Lets the GPU go on, and then the commit: a save that commits before the streams have passed
    their waits does not know how long these were.
    """
    gpu.hold(False)
    gpu.synchronize()
    assert held.reached.wait(WAIT_S), "nothing was synced, so that nothing held the commit"
    assert not handle.done()
    held.commit.set()
    return handle.result(WAIT_S)


def test_time_of_copies_is_told_in_whatever_order_they_are_queued(
    gpu: CudaStub, disk: Path
) -> None:
    gpu.configure(LATENCY_US, BYTES_PER_US)
    blocks = 12
    tensor = torch.zeros((8 * blocks - 1) * MIB, dtype=torch.uint8, device=KIND)
    for _ in range(4):  # two threads queue copies
        before = len(copies(gpu))
        stats = fastckpt.save(
            {"w": tensor}, disk / "a.pt", options=fastckpt.SaveOptions(durable=False)
        ).result(60)
        count = len(copies(gpu)) - before
        seconds = (count * LATENCY_US + tensor.nbytes / BYTES_PER_US) / 1e6
        assert stats.d2h_s == pytest.approx(seconds, rel=1e-3)


def test_call_fence_orders_streams_and_does_not_wait(gpu: CudaStub, disk: Path) -> None:
    gpu.configure(LATENCY_US, BYTES_PER_US)
    nbytes = 20 * MIB
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=KIND)
    held = commit_held()
    gpu.hold(True)
    fill(tensor, 1, gpu, took_us=500)
    handle = fastckpt.save({"w": tensor}, disk / "a.pt")
    fill(tensor, 2, gpu, took_us=100)
    assert not handle.is_staged(), "no copy has begun, and the caller is here"
    stats = told(handle, gpu, held)
    copied_us = 500 + len(copies(gpu)) * LATENCY_US + nbytes / BYTES_PER_US
    assert gpu.synchronize() == pytest.approx(copied_us + 100)
    assert fastckpt.load(disk / "a.pt", map_location="cpu")["w"].eq(1).all()
    assert tensor.cpu().eq(2).all()
    assert stats.d2h_s == pytest.approx((copied_us - 500) / 1e6, rel=1e-3)
    assert stats.d2h_gbps == pytest.approx(nbytes / 1e3 / (copied_us - 500), rel=1e-2)
    assert stats.gpu_stall_s == pytest.approx((copied_us - 500) / 1e6, rel=1e-3)


# --- every save has what the state was


@pytest.mark.parametrize("fence", ["call", "step"])
def test_every_save_has_what_the_state_was(
    gpu: CudaStub, runtime: Runtime, way: Callable[..., Way], fence: str, storm: Storm
) -> None:
    """12 saves on each way with each fence (125 in torture), on one stream after the other; the
    state is painted over as soon as the fence allows, before a copy has begun in every second one.
    """
    sizes = {"big": MIB + 12345, "middle": 100 * KIB + 1, "small": 40 * KIB + 3, "tiny": 1}
    state = {name: octets(nbytes) for name, nbytes in sizes.items()}
    optimizer = Kernels(list(state.values()), gpu, runtime)
    saves = way(fence)
    with gpu.streams(3) as others:
        for number, _ in enumerate(storm.rounds(suite=12, torture=125)):
            runtime.stream = [0, *others][number % 4]
            painted = paint(state, number, gpu, runtime.stream)
            gpu.hold(number % 2 == 0)
            handle = saves.save(number, state)
            if fence == "step":
                optimizer.step()
            else:
                for tensor in state.values():
                    fill(tensor, 0xEE, gpu, stream=runtime.stream)
            gpu.hold(False)
            assert handle.result(WAIT_S).staging == "pinned"
            gpu.synchronize(runtime.stream)  # the next one is not ordered after it
            assert all(tensor.eq(0xEE).all() for tensor in state.values())
            loaded = saves.load(number)
            assert {name: loaded[name].numpy().tobytes() for name in state} == painted


@pytest.mark.parametrize("fence", ["call", "step"])
def test_saves_in_flight_each_have_their_own(
    gpu: CudaStub, runtime: Runtime, way: Callable[..., Way], fence: str
) -> None:
    """Six at a time, none of which has been copied when the last one is saved."""
    state = {"big": octets(3 * MIB), "middle": octets(200 * KIB)}
    optimizer = Kernels(list(state.values()), gpu, runtime)
    saves, handles, painted = way(fence), [], []
    gpu.hold(True)
    for number in range(6):
        painted.append(paint(state, number, gpu, 0))
        handles.append(saves.save(number, state))
        if fence == "step":
            optimizer.step()
    assert not any(handle.is_staged() for handle in handles)
    gpu.hold(False)
    for number, handle in enumerate(handles):
        handle.result(WAIT_S)
        loaded = saves.load(number)
        assert {name: loaded[name].numpy().tobytes() for name in state} == painted[number]


# --- the step fence


def test_an_optimizer_step_waits_on_the_stream_and_not_on_the_host(
    gpu: CudaStub, runtime: Runtime, way: Callable[..., Way]
) -> None:
    """Copies overlap the forward pass; the step's kernels begin with the last copy's end."""
    saves = way("step")
    gpu.configure(LATENCY_US, BYTES_PER_US)
    nbytes = 20 * MIB
    tensor = octets(nbytes, 1)
    optimizer = Kernels([tensor], gpu, runtime)
    optimizer.took_us = 50.0
    activations = bytearray(100)
    held = commit_held()
    gpu.hold(True)
    handle = saves.save(0, {"w": tensor})
    gpu.kernel(activations, 1, 300.0)
    gpu.synchronize()
    optimizer.step()
    assert not handle.is_staged(), "no copy has begun, and the step was taken"
    stats = told(handle, gpu, held)
    copied_us = len(copies(gpu)) * LATENCY_US + nbytes / BYTES_PER_US
    assert gpu.synchronize() == pytest.approx(copied_us + 50)
    forward, step = [done for done in gpu.log() if done.kind == KERNEL]
    big = [done for done in copies(gpu) if done.nbytes > MIB]
    assert len(big) <= 3 and sum(done.nbytes for done in big) == nbytes
    assert (forward.begin_us, forward.end_us) == (0, 300), "computed while it was being copied"
    assert big[0].begin_us == 0 and big[-1].end_us == pytest.approx(copied_us)
    assert step.begin_us == pytest.approx(copied_us)
    assert stats.gpu_stall_s == pytest.approx((copied_us - 300) / 1e6, rel=1e-3)
    assert saves.load(0)["w"].eq(1).all()


@pytest.mark.parametrize("nbytes", [65 * KIB, 3 * MIB])
@pytest.mark.parametrize("look", ["step", "save"])
def test_a_change_before_the_step_fails_loudly(
    gpu: CudaStub, runtime: Runtime, way: Callable[..., Way], nbytes: int, look: str
) -> None:
    """Whether the optimizer sees it first or the save itself; the next save is right."""
    saves = way("step")
    state = {"same": octets(nbytes), "changed": octets(nbytes, 1)}
    optimizer = Kernels(list(state.values()), gpu, runtime)
    gpu.hold(True)
    handle = saves.save(0, state)
    state["changed"].add_(1)
    if look == "step":
        optimizer.step()
    gpu.hold(False)
    with pytest.raises(StagingConflict, match=r"tensor 'changed' was changed in place"):
        handle.result(WAIT_S)
    saves.save(1, state).result(WAIT_S)
    assert saves.load(1)["changed"].eq(0xEE if look == "step" else 2).all()


class Launched(TorchDispatchMode):
    """A kernel below it is launched, and counted when `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.launched, self.go = threading.Event(), threading.Event()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.launched.set()
        assert self.go.wait(WAIT_S)
        return result


def test_a_kernel_that_another_thread_launches_before_the_step_is_counted(
    gpu: CudaStub, runtime: Runtime, way: Callable[..., Way]
) -> None:
    """The step comes after what was launched before it has been counted, and is told of it."""
    saves, mode = way("step"), Launched()
    tensor = octets(3 * MIB)
    optimizer = Kernels([tensor], gpu, runtime)
    gpu.hold(True)
    handle = saves.save(0, {"w": tensor})
    stepped = threading.Event()

    def launch() -> None:
        with mode:
            tensor.add_(1)

    def step() -> None:
        optimizer.step()
        stepped.set()

    with running(launch):
        assert mode.launched.wait(WAIT_S) and tensor._version == 0
        with running(step) as thread:
            wait_until(lambda: stands_in(thread, "give") and stands_in(thread, "wait"), "it waits")
            assert not stepped.is_set()
            mode.go.set()
    gpu.hold(False)
    with pytest.raises(StagingConflict, match=r"tensor 'w' was changed in place"):
        handle.result(WAIT_S)


def test_small_buffers_may_change_in_the_forward_pass(
    gpu: CudaStub, way: Callable[..., Way]
) -> None:
    """As BatchNorm's do, in place and by kernels; what is saved is what they were."""
    saves = way("step")
    state = {"mean": octets(64 * KIB, 1), "batches": octets(8, 2), "big": octets(2 * MIB, 3)}
    gpu.hold(True)
    handle = saves.save(0, state)
    fill(state["mean"], 9, gpu)
    state["batches"].add_(1)
    gpu.hold(False)
    handle.result(WAIT_S)
    loaded = saves.load(0)
    assert [loaded[name].unique().tolist() for name in state] == [[1], [2], [3]]


def test_a_step_under_capture_waits_on_the_host(
    gpu: CudaStub, runtime: Runtime, way: Callable[..., Way]
) -> None:
    """A stream that is being captured cannot be told to wait for copies: the step returns when all
    was copied.
    """
    saves = way("step")
    tensor = octets(2 * MIB, 1)
    handle = saves.save(0, {"w": tensor})
    gpu.capture(True)
    Kernels([tensor], gpu, runtime).step()
    assert handle.is_staged()
    gpu.capture(False)
    assert handle.result(WAIT_S).gpu_stall_s == 0
    assert saves.load(0)["w"].eq(1).all()


# --- what a state is made of


def test_shared_and_overlapping_memory_on_two_devices_and_the_host(
    gpu: CudaStub, runtime: Runtime, disk: Path, assert_same: Callable[[Any, Any], None]
) -> None:
    """Each device's copies follow its own current stream, and lead it."""
    first, second = (octets(3 * MIB, device=f"{KIND}:{ordinal}") for ordinal in (0, 1))
    whole = first.untyped_storage()
    slices = [torch.tensor([], dtype=torch.uint8, device=f"{KIND}:0") for _ in range(2)]
    for tensor, begin in zip(slices, (512, MIB), strict=True):
        tensor.set_(whole[begin : begin + MIB + 4096])
    state = {
        "views": [first[10:MIB], first.view(-1, 64).t(), first],
        "overlapping": slices,
        "other device": [second, second[MIB:], torch.arange(100, device=f"{KIND}:1")],
        "host": [torch.arange(300_000), torch.ones(3)],
    }
    with gpu.streams(2) as streams:
        runtime.stream_of = dict(enumerate(streams))
        mine = [(first, 1, streams[0]), (second, 2, streams[1])]
        gpu.hold(True)
        for tensor, value, stream in mine:
            fill(tensor, value, gpu, 100, stream)
        handle = fastckpt.save(state, disk / "a.pt")
        assert gpu.calls(COPY) > 0 and not handle.is_staged()
        for tensor, _, stream in mine:
            fill(tensor, 0xEE, gpu, 0, stream)
        gpu.hold(False)
        handle.result(WAIT_S)
        for tensor, value, stream in mine:
            gpu.synchronize(stream)
            assert content(tensor) == b"\xee" * tensor.nbytes
            fill(tensor, value, gpu, 0, stream)  # as it was saved
            gpu.synchronize(stream)
        assert_same(fastckpt.load(disk / "a.pt"), state)


def test_steps_hold_what_lies_on_two_devices_and_the_host(gpu: CudaStub, disk: Path) -> None:
    """Leaves and small tensors, contiguous or not, and a view of what another leaf is."""
    first, second = (torch.randn(800, 700, device=f"{KIND}:{ordinal}") for ordinal in (0, 1))
    state = {
        "first": first,
        "second": second,
        "transposed": second.t(),
        "part": first[100:700],
        "host": torch.randn(600, 600),
        "small": [torch.randn(10, device=f"{KIND}:1"), torch.randn(10)],
    }
    saves = Steps(disk)
    saves.save(0, state).result(WAIT_S)
    loaded = saves.load(0)
    saves.close()
    small = loaded.pop("small"), state.pop("small")
    for actual, expected in [*zip(*small, strict=True), *((loaded[k], state[k]) for k in state)]:
        assert actual.device.type == "cpu" and torch.equal(actual, expected.cpu())


# --- refusals


def test_without_pinned_memory_a_save_is_right_and_says_so_once(
    gpu: CudaStub, way: Callable[..., Way], caplog: pytest.LogCaptureFixture
) -> None:
    saves = way()
    gpu.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
    for number in range(5):
        stats = saves.save(number, {"w": octets(2 * MIB, number)}).result(WAIT_S)
        assert stats.staging == "pageable" and "OUT_OF_MEMORY" in stats.staging_why
        assert saves.load(number)["w"].eq(number).all()
    (warning,) = warnings_in(caplog.records)
    assert "not pinned" in warning.message and "OUT_OF_MEMORY" in warning.message


REFUSED = [
    *((COPY, after) for after in (0, 1, 3)),
    *((EVENT_RECORD, after) for after in (0, 1, 2, 5)),
    *(("cuEventSynchronize", after) for after in (0, 2)),
    *(("cuStreamWaitEvent", after) for after in (0, 1)),
    ("cuEventCreate", 1),
    ("cuStreamIsCapturing", 0),
    ("cuCtxPushCurrent_v2", 0),
]


@pytest.mark.parametrize("fence", ["call", "step"])
def test_what_a_device_refuses_is_told_and_leaves_nothing(
    gpu: CudaStub, runtime: Runtime, way: Callable[..., Way], fence: str
) -> None:
    """From save() or from result(); or the save is right all the same. The checkpoint that was
    there stays, and when the device obeys again the next save is right.
    """
    told = set()
    # A step is saved by the same pipeline: the first call of each name will do.
    some = REFUSED if isinstance(way(fence), Files) else [*dict(REFUSED[::-1]).items()]
    for name, after in some:
        with accelerator.installed(runtime, gpu.path, budget_bytes=2 * BLOCK):
            gpu.configure()
            saves = way(fence)
            state = {"w": octets(BLOCK + MIB, 1), "v": octets(2 * MIB, 2)}
            saves.save(0, {"w": octets(MIB, 7)}).result(WAIT_S)
            gpu.configure()
            gpu.fail(name, ILLEGAL_ADDRESS, after=after)
            if name == COPY:
                gpu.fail(BATCH, ILLEGAL_ADDRESS)
            if name in ARRIVED:
                gpu.fail("cuEventQuery", ILLEGAL_ADDRESS, after=after)
            try:
                saves.save(0, state).result(WAIT_S)
                refused = False
            except DeviceError as error:
                assert "ILLEGAL_ADDRESS" in str(error)
                refused = True
            gpu.configure()
            pipeline.current().drain()  # what was replaced is removed after the result is told
            assert not [*saves.directory.rglob(".*.tmp")], name
            assert len(saves.load(0)["w"]) == (MIB if refused else len(state["w"])), name
            told |= {name} if refused else set()
            saves.save(1, state).result(WAIT_S)
            assert saves.load(1)["w"].eq(1).all() and saves.load(1)["v"].eq(2).all()
            saves.close()
    assert told >= {COPY, EVENT_RECORD, "cuEventSynchronize", "cuStreamIsCapturing"}


def test_a_refusal_to_order_the_stream_makes_the_host_wait(
    gpu: CudaStub, runtime: Runtime, disk: Path
) -> None:
    """Wherever it comes, the step begins when all was copied, and no event is left behind."""
    tensor = octets(MIB, 1)
    optimizer = Kernels([tensor], gpu, runtime)
    # lead() records three events, and makes the third of one that the second has given back.
    refusals = [(EVENT_RECORD, 3), ("cuEventCreate", 2)]
    refusals += [("cuStreamWaitEvent", 1), ("cuCtxPushCurrent_v2", 1)]
    for name, after in ((name, after) for name, count in refusals for after in range(count)):
        with accelerator.installed(runtime, gpu.path, budget_bytes=BLOCK):
            gpu.configure()
            fill(tensor, 1, gpu)
            gpu.hold(True)
            handle = fastckpt.save(
                {"w": tensor}, disk / "a.pt", options=fastckpt.SaveOptions(fence="step")
            )

            def step(name: str = name, after: int = after) -> None:
                # The thread that waits for the copy calls the driver at the same time.
                gpu.fail(name, ILLEGAL_ADDRESS, after=after, times=1, here=True)
                optimizer.step()

            with running(step):
                wait_until(lambda name=name: gpu.failed(name) == 1, f"{name} is refused")
                gpu.hold(False)
            handle.result(WAIT_S)
            assert fastckpt.load(disk / "a.pt", map_location="cpu")["w"].eq(1).all()
            del handle


def test_without_the_driver_torch_copies(
    gpu: CudaStub,
    runtime: Runtime,
    way: Callable[..., Way],
    disk: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with accelerator.installed(runtime, str(disk / "libcuda.so.1")):
        saves = way()
        for number in range(3):
            tensor = octets(2 * MIB)
            fill(tensor, number, gpu, took_us=10)
            stats = saves.save(number, {"w": tensor}).result(WAIT_S)
            assert stats.staging == "host" and stats.d2h_s is None
            assert saves.load(number)["w"].eq(number).all()
        saves.close()
    (warning,) = warnings_in(caplog.records)
    assert "torch copies from GPUs instead" in warning.message
    assert gpu.calls("cuInit") == 0


def test_the_driver_is_not_loaded_before_torch_uses_it(
    gpu: CudaStub, runtime: Runtime, way: Callable[..., Way]
) -> None:
    """Nor for a state on the host, which needs nothing of it."""
    saves = way()
    runtime.initialized = False
    saves.save(0, {"w": torch.ones(MIB)}).result(WAIT_S)
    assert gpu.calls("cuInit") == 0
    runtime.initialized = True
    saves.save(1, {"w": torch.ones(MIB)}).result(WAIT_S)
    assert gpu.calls("cuDevicePrimaryCtxRetain") == 0, "no device has anything to copy"
    saves.save(2, {"w": octets(MIB)}).result(WAIT_S)
    assert gpu.calls("cuInit") == gpu.calls("cuDevicePrimaryCtxRetain") == 1


def test_a_device_that_cannot_be_begun_is_told(gpu: CudaStub, way: Callable[..., Way]) -> None:
    """And is asked again by the next save."""
    saves = way()
    for name in ("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuStreamCreate"):
        gpu.fail(name, OUT_OF_MEMORY)
        with pytest.raises(DeviceError, match=r"OUT_OF_MEMORY.*nothing was copied"):
            saves.save(0, {"w": octets(MIB)})
        gpu.configure()
        assert gpu.alive().contexts == gpu.alive().streams == 0, name
    saves.save(0, {"w": octets(MIB, 1)}).result(WAIT_S)
    assert saves.load(0)["w"].eq(1).all()


def test_a_save_under_capture_is_refused(gpu: CudaStub, way: Callable[..., Way]) -> None:
    saves = way()
    gpu.capture(True)
    with pytest.raises(DeviceError, match="outside of the capture"):
        saves.save(0, {"w": octets(MIB)})
    gpu.capture(False)
    assert gpu.calls(COPY) == 0
    saves.save(0, {"w": octets(MIB, 1)}).result(WAIT_S)
    assert saves.load(0)["w"].eq(1).all()


# --- lifetimes


@pytest.mark.parametrize("fence", ["call", "step"])
@pytest.mark.parametrize("fails", [False, True])
def test_tensors_are_kept_until_copied_and_no_longer(
    gpu: CudaStub,
    accelerator_library: Path,
    way: Callable[..., Way],
    fence: str,
    fails: bool,
) -> None:
    """The caller drops all of them in the moment of return; also small ones, taken by value."""
    saves = way(fence)
    gc.collect()  # tensors of tests before this one, which errors hold in cycles
    before = accelerator.pieces_alive(accelerator_library)
    state = {"big": octets(3 * MIB, 1), "middle": octets(100 * KIB, 2), "small": octets(9, 3)}
    gpu.hold(True)
    for name in (*ARRIVED, "cuStreamSynchronize") if fails else ():  # the device is lost
        gpu.fail(name, ILLEGAL_ADDRESS)
    handle = saves.save(0, state)
    state.clear()
    # A failure may have come before this line, and all have been let go of.
    assert fails or accelerator.pieces_alive(accelerator_library) >= before + 3
    gpu.hold(False)
    error = handle.exception(WAIT_S)
    assert accelerator.pieces_alive(accelerator_library) == before
    assert type(error) is (DeviceError if fails else type(None))
    if not fails:
        loaded = saves.load(0)
        found = [loaded[name].unique().item() for name in ("big", "middle", "small")]
        assert found == [1, 2, 3]


@pytest.mark.parametrize("fence", ["call", "step"])
@pytest.mark.parametrize("budget_bytes", [1, 3 * BLOCK])
def test_more_than_the_budget_is_copied_block_by_block(
    gpu: CudaStub, runtime: Runtime, way: Callable[..., Way], fence: str, budget_bytes: int
) -> None:
    """With a budget of one block, or of three of which a save may have one."""
    with accelerator.installed(runtime, gpu.path, budget_bytes=budget_bytes):
        saves = way(fence, staging_bytes=1)
        state = {"big": octets(3 * BLOCK), "middle": octets(200 * KIB), "host": torch.ones(MIB)}
        for number in range(3):
            on_device = {name: state[name] for name in ("big", "middle")}
            painted = paint(on_device, number, gpu, 0)
            handle = saves.save(number, state)
            handle.wait_staged(WAIT_S)
            assert handle.result(WAIT_S).staged_bytes_max <= BLOCK
            loaded = saves.load(number)
            assert {name: loaded[name].numpy().tobytes() for name in on_device} == painted
            assert loaded["host"].eq(1).all()
        if not gpu.real:
            assert gpu.alive().pinned_bytes == max(BLOCK, budget_bytes)
        saves.close()
    assert gpu.real or gpu.alive().pinned_bytes == 0


# --- order and clocks, exactly


def test_all_copies_are_queued_when_save_returns_and_their_times_add_up(
    gpu: CudaStub, disk: Path
) -> None:
    """Many tensors in few blocks: a call for each block, and what a device did is counted once,
    whoever queued it.
    """
    gpu.configure(LATENCY_US, BYTES_PER_US)
    state = [octets(100_000, number) for number in range(200)]
    held = commit_held()
    gpu.hold(True)
    handle = fastckpt.save(state, disk / "a.pt")
    calls = gpu.calls(BATCH) + gpu.calls(COPY)
    assert calls <= 3  # as many as blocks
    assert not gpu.log()
    stats = told(handle, gpu, held)
    done = copies(gpu)
    assert len(done) >= len(state)
    assert sum(copy.nbytes for copy in done) == 200 * 100_000
    copied_us = calls * LATENCY_US + 200 * 100_000 / BYTES_PER_US
    assert done[-1].end_us == pytest.approx(copied_us)
    assert stats.d2h_s == pytest.approx(copied_us / 1e6, rel=1e-3)
    assert stats.d2h_gbps == pytest.approx(200 * 100_000 / copied_us / 1e3, rel=1e-3)
    assert stats.gpu_stall_s == pytest.approx(copied_us / 1e6, rel=1e-3)
    assert stats.staged_s is not None and stats.stall_s is not None
    assert stats.stall_s < stats.staged_s


@pytest.mark.parametrize("after", [0, 2])
def test_a_driver_that_refuses_batches_is_asked_copy_by_copy(
    gpu: CudaStub, disk: Path, after: int
) -> None:
    state = [octets(100_000, number % 251) for number in range(400)]
    gpu.fail(BATCH, OUT_OF_MEMORY, after=after)
    for _ in range(2):
        assert fastckpt.save(state, disk / "a.pt").result(WAIT_S).staging == "pinned"
        loaded = fastckpt.load(disk / "a.pt", map_location="cpu")
        assert all(torch.equal(a, b.cpu()) for a, b in zip(loaded, state, strict=True))
    # Two threads may have asked at once; from then on nobody does.
    assert after < gpu.calls(BATCH) <= after + 2 and gpu.calls(COPY) > 400


def test_a_device_that_refuses_batches_and_copies_is_an_error(gpu: CudaStub, disk: Path) -> None:
    state = [octets(100_000, number) for number in range(100)]
    for name in (BATCH, COPY):
        gpu.fail(name, ILLEGAL_ADDRESS)
    with pytest.raises(fastckpt.CheckpointError, match="ILLEGAL_ADDRESS"):
        fastckpt.save(state, disk / "a.pt").result(WAIT_S)
    assert not list(disk.iterdir())


def test_a_second_step_waits_no_longer_than_the_first(
    gpu: CudaStub, runtime: Runtime, disk: Path
) -> None:
    """Two optimizers on one stream: together they wait once for the copies."""
    gpu.configure(LATENCY_US, BYTES_PER_US)
    tensors = [octets(2 * MIB, 1), octets(2 * MIB, 1)]
    optimizers = [Kernels([tensor], gpu, runtime) for tensor in tensors]
    held = commit_held()
    gpu.hold(True)
    handle = fastckpt.save(tensors, disk / "a.pt", options=fastckpt.SaveOptions(fence="step"))
    for optimizer in optimizers:
        optimizer.step()
    stats = told(handle, gpu, held)
    copied_us = max(done.end_us for done in copies(gpu))
    assert copied_us == pytest.approx(LATENCY_US + 4 * MIB / BYTES_PER_US)
    assert stats.gpu_stall_s == pytest.approx(copied_us / 1e6, rel=1e-3)
    assert [t.eq(1).all() for t in fastckpt.load(disk / "a.pt", map_location="cpu")]


@pytest.mark.parametrize("fence", ["call", "step"])
@pytest.mark.parametrize("device", ["cpu", KIND])
def test_a_slow_file_system_holds_nobody_up(
    gpu: CudaStub, runtime: Runtime, disk: Path, fence: str, device: str
) -> None:
    """Neither the call nor the step waits for a file to be made."""
    gate = threading.Event()
    with accelerator.installed(runtime, gpu.path, Delay("create", gate)):
        weight = torch.nn.Parameter(torch.ones(3 * MIB, device=here(device)))
        weight.grad = torch.ones_like(weight)
        handle = fastckpt.save(
            {"w": weight}, disk / "a.pt", options=fastckpt.SaveOptions(fence=fence)
        )
        torch.optim.SGD([weight], lr=1.0).step()
        handle.wait_staged(WAIT_S)
        assert not gate.is_set() and not handle.done()
        gate.set()
        handle.result(WAIT_S)
        assert fastckpt.load(disk / "a.pt", map_location="cpu")["w"].eq(1).all()
        assert weight.eq(0).all()


@pytest.mark.parametrize("device", ["cpu", KIND])
def test_an_interrupted_call_commits_nothing_that_was_changed(
    gpu: CudaStub, runtime: Runtime, disk: Path, device: str
) -> None:
    """save() did not return, so the caller waits for nothing: the old file stays."""
    with accelerator.installed(runtime, gpu.path, budget_bytes=2 * BLOCK):
        path = disk / "a.pt"
        state = {"w": torch.ones(9 * BLOCK, dtype=torch.uint8, device=here(device))}
        fastckpt.save({"w": torch.zeros(3)}, path).result(WAIT_S)
        gate = threading.Event()  # until then only two blocks can be copied
        pipeline.current().storage = Delay("create", gate)
        with interrupted_in("pass_fence"):
            fastckpt.save(state, path)
        state["w"].fill_(2)
        gate.set()
        pipeline.current().drain()
        assert fastckpt.load(path)["w"].eq(0).all()
        fastckpt.save(state, path).result(WAIT_S)
        assert fastckpt.load(path, map_location="cpu")["w"].eq(2).all()


def test_an_object_that_changes_does_not_keep_a_conflict_from_being_told(
    gpu: CudaStub, disk: Path
) -> None:
    """The tensor is looked for by name in a dict that another thread adds to all the while."""
    log = {number: 0.0 for number in range(100_000)}
    tensor = torch.ones(MIB, device=KIND)
    gpu.hold(True)
    handle = fastckpt.save(
        {"t": tensor, "log": log}, disk / "a.pt", options=fastckpt.SaveOptions(fence="step")
    )
    with torch.no_grad():
        tensor.add_(1)
    stop = threading.Event()

    def grow() -> None:
        while not stop.is_set():
            log[len(log)] = 0.0

    growing = threading.Thread(target=grow)
    growing.start()
    gpu.hold(False)
    try:
        with pytest.raises(StagingConflict):
            handle.result(WAIT_S)
    finally:
        stop.set()
        growing.join()
    fastckpt.save({"t": tensor}, disk / "a.pt").result(WAIT_S)


# --- several ranks


def state_of(rank: int, device: str, big: int = 3, other: int = 0) -> dict[str, Any]:
    """Big tensors that are the same on all ranks, and a small one that is not."""
    random = torch.Generator().manual_seed(0)
    state = {
        "big": torch.randn(big * BLOCK // 4 + 100, generator=random),
        "views": [torch.randn(1000, 1000, generator=random)] * 2,
        "small": torch.full((50 * KIB,), rank),
        "host": torch.randn(MIB, generator=random),
    }
    state["big"] += rank * other
    for name in ("big", "small"):
        state[name] = state[name].to(device)
    state["views"] = [view.to(device) for view in state["views"]][:1] * 2
    return state


def save_file(member: Member, path: Path, device: str, fence: str, big: int, other: int) -> Any:
    state = state_of(member.rank, device, big if member.rank else 3, other)
    options: dict[str, Any] = {"fence": fence, "group": member.group}
    return fastckpt.save(state, path, **gathered(**options)).result(WAIT_S).staging


def save_steps(member: Member, path: Path, device: str, fence: str, big: int, other: int) -> Any:
    told = Told()
    logging.getLogger("fastckpt").addHandler(told)
    with fastckpt.Checkpointer(
        path, group=member.group, options=fastckpt.SaveOptions(fence=fence)
    ) as checkpointer:
        state = state_of(member.rank, device, big if member.rank else 3, other)
        state |= {"alike": torch.ones(9).to(device), "scattered": torch.ones(9).to(device)[::4]}
        staging = checkpointer.save(0, state).result(WAIT_S).staging
    logging.getLogger("fastckpt").removeHandler(told)
    return staging, [line for line in told.lines if "PerRank" in line]


@pytest.fixture
def crew(nursery: Nursery) -> Crew:
    return nursery.lasting_crew(2)


@pytest.fixture
def together(
    crew: Crew, driver: CudaStub, accelerator_library: Path
) -> Callable[..., list[Outcome]]:
    """`together(body, path, device=, fence=, big=, other=)`: what came of it on two ranks."""

    def call(
        body: Callable[..., Any],
        path: Path,
        device: str = KIND,
        fence: str = "call",
        big: int = 3,
        other: int = 0,
    ) -> list[Outcome]:
        common = accelerator_library, driver.path, body
        return crew(on_device, *common, path, device, fence, big, other)

    return call


def records(path: Path) -> dict[str, bytes]:
    """What a file holds but for the pickle, which names devices, and what depends on it."""
    with zipfile.ZipFile(path) as archive:
        found = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
    return {name: found[name] for name in found if name.startswith("data/")}


@pytest.mark.multiprocess
@pytest.mark.parametrize("fence", ["call", "step"])
def test_ranks_write_the_file_that_they_write_of_the_same_state_on_the_host(
    runtime: Runtime,
    together: Callable[..., list[Outcome]],
    disk: Path,
    fence: str,
    assert_same: Callable[[Any, Any], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Record by record; small ones are rank 0's, gathered from its device."""
    monkeypatch.setattr(runtime, "available", True)
    for device in (KIND, "cpu"):
        outcomes = together(save_file, disk / f"{device}.pt", device, fence)
        assert [outcome.error for outcome in outcomes] == [None, None]
        assert {outcome.value for outcome in outcomes} == {"host" if device == "cpu" else "pinned"}
    assert records(disk / f"{KIND}.pt") == records(disk / "cpu.pt")
    assert len(records(disk / "cpu.pt")) == 4
    loaded = fastckpt.load(disk / f"{KIND}.pt", map_location="cpu")
    assert_same(loaded, state_of(0, "cpu"))
    assert torch.load(disk / f"{KIND}.pt")["big"].device.type == KIND


@pytest.mark.multiprocess
@pytest.mark.parametrize("body", [save_file, save_steps])
def test_ranks_that_hold_something_else_on_the_device_are_told_where(
    together: Callable[..., list[Outcome]], disk: Path, body: Callable[..., Any]
) -> None:
    """By the name of the tensor, not that of a record; and nothing is committed."""
    for options, what in (
        ({"other": 1}, "the content of big differs: one on rank 0, another on rank 1"),
        ({"big": 4}, "big is float32 [8388708]"),
    ):
        outcomes = together(body, disk / "a.pt", **options)
        assert {type(outcome.error) for outcome in outcomes} == {RanksDisagree}, outcomes
        (text,) = {str(outcome.error) for outcome in outcomes}
        assert what in text and "data/" not in text
        assert not (disk / "a.pt").is_file() and not [*disk.glob("a.pt/step*/manifest.json")]


@pytest.mark.multiprocess
@pytest.mark.parametrize("fence", ["call", "step"])
def test_ranks_save_steps_from_the_device(
    runtime: Runtime, together: Callable[..., list[Outcome]], disk: Path, fence: str
) -> None:
    """Samples of device tensors are compared, small ones only for a warning; pieces of both ranks
    make the whole.
    """
    outcomes = together(save_steps, disk / "run", fence=fence)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert {outcome.value[0] for outcome in outcomes} == {"pinned"}
    first, second = (outcome.value[1] for outcome in outcomes)
    assert second == [] and len(first) == 1
    assert "is saved with rank 0's values of 'small', but rank 1 has other values" in first[0]
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        loaded = checkpointer.load(0)
    expected = state_of(0, "cpu")
    assert torch.equal(loaded["views"][0], expected["views"][0])
    for name in ("big", "small", "host"):
        assert torch.equal(loaded[name], expected[name]), name


def save_without_scratch(member: Member, path: Path, *_: Any) -> Any:
    """The second rank finds no descriptor for what it gathers from its device."""

    def refused() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with mock.patch.object(transfer, "scratch", refused if member.rank else transfer.scratch):
        return fastckpt.save(state_of(member.rank, KIND), path, group=member.group).result(WAIT_S)


@pytest.mark.multiprocess
def test_a_rank_that_cannot_gather_fails_and_ends(
    together: Callable[..., list[Outcome]], disk: Path
) -> None:
    """Blocks that were staged by then are given back: closing the pipeline waits for them."""
    first, second = together(save_without_scratch, disk / "a.pt")
    assert type(second.error) is StorageError and "Too many open files" in str(second.error)
    assert type(first.error) is PeerFailed and "rank 1 failed" in str(first.error)
    assert not [*disk.iterdir()]


# --- the end of a process, and its children

BEGIN = """
import os, sys, threading
from pathlib import Path
import torch, fastckpt
from tests.kit import accelerator
from tests.kit.cuda_stub import CudaStub
from fastckpt.saving import pipeline
from fastckpt.engine.devices import Devices

library, driver, path = sys.argv[1:]
runtime = accelerator.registered(Path(library))
stub = runtime.driver = CudaStub(Path(driver))
pipeline._current = pipeline.Pipeline(None, 64 << 20, Devices("stub", runtime, driver))
state = {"w": torch.ones(3_000_000, device="stub"), "host": torch.ones(10)}
stub.hold(True)
handle = fastckpt.save(state, path, options=fastckpt.SaveOptions(fence=FENCE))
"""
EXIT = """
at_end = threading.Event()
threading._register_atexit(at_end.set)

def go_on():  # no copy begins before the program has come to its end
    at_end.wait()
    assert not handle.is_staged()
    stub.hold(False)

threading.Thread(target=go_on).start()
del state
"""
FORK = """
child = os.fork()
if child == 0:
    try:
        handle.result(60)
    except fastckpt.CheckpointError as error:
        assert "belongs to process" in str(error)
        fastckpt.save({"w": torch.ones(9), "on": [1]}, path + ".child").result(60)
        sys.exit(7)
    os._exit(1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert not handle.is_staged()
stub.hold(False)
assert handle.result(60).staging == "pinned"
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("program", [EXIT, FORK])
def test_a_save_in_flight_outlives_the_program_and_is_not_the_child_s(
    driver: CudaStub, accelerator_library: Path, disk: Path, program: str
) -> None:
    fence = "call" if program is EXIT else "step"
    begin = BEGIN.replace("FENCE", repr(fence))
    ended = run_python(begin + program, accelerator_library, driver.path, disk / "a.pt", frees=True)
    assert "FAILED" not in ended.stderr and "Error" not in ended.stderr
    loaded = fastckpt.load(disk / "a.pt", map_location="cpu")
    assert loaded["w"].eq(1).all() and len(loaded["w"]) == 3_000_000
    if program is FORK:
        assert fastckpt.load(disk / "a.pt.child")["on"] == [1]


def test_pages_of_a_file_are_pinned_once(gpu: CudaStub, disk: Path, local: Path) -> None:
    """A device copies into the mapped file itself, which stays registered while it is recycled."""
    state = {"w": octets(20 * MIB)}
    with fastckpt.Checkpointer(disk / "run", local=memory(local)) as checkpointer:
        registered = []
        for step in range(1, 10):
            fill(state["w"], step, gpu)
            stats = checkpointer.save(step, state).result()
            assert stats.staging == "pinned" and has_landed(stats.why) is (step > 3)
            await_spares(local, step > 2)
            registered.append(gpu.calls("cuMemHostRegister_v2"))
        assert registered[5] > registered[2] and registered[8] == registered[5]
        assert shard(local, 9).read_bytes().count(9) >= 20 * MIB
        fill(state["w"], 0, gpu)
        assert checkpointer.restore(state) == 9
        assert content(state["w"]) == bytes([9]) * (20 * MIB)
