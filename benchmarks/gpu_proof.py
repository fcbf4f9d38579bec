"""Checks of fastckpt on a GPU, a line each, PASS or FAIL; what gpu_proof.sh runs stage by stage.

    python benchmarks/gpu_proof.py full /tmp/there      # or core, gds, probe
    python benchmarks/gpu_proof.py full /tmp/there --device stub

It needs torch alone, no network and no pytest. Its status is 1 if a check failed, 3 without a GPU
and 4 if nothing of it can be checked; with `--device stub` it runs on the doubles of the tests. How
fast saves are is gpu.py's business.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an installed fastckpt comes first

import fastckpt
from fastckpt import _engine
from fastckpt.cli.bench.saves import leaves, same
from fastckpt.errors import CorruptCheckpoint, DeviceError, StagingConflict
from fastckpt.saving import pipeline

NO_GPU, NOTHING = 3, 4
WAIT_S = 60
CLOCK_HZ = 1.7e9  # about that of a GPU, for waits whose length does not matter
BLOCK = 8 << 20
DTYPES = (torch.bfloat16, torch.half, torch.double, torch.int8, torch.bool, torch.cfloat)
FENCES = ("call", "step")
PROBED_BYTES = 256 << 20  # of one tensor
# Ends, and forks, with a save in flight.
EXITS = """
import os, sys, torch, fastckpt
tensor = torch.arange(9 << 20, device="cuda")
torch.cuda._sleep(500_000_000)
handle = fastckpt.save({"t": tensor}, sys.argv[1])
if os.fork() == 0:
    fastckpt.save({"t": torch.ones(9)}, sys.argv[1] + ".child").result(60)
    os._exit(0)
assert os.wait()[1] == 0
tensor.zero_()
del tensor
"""
Check = Callable[[], "str | None"]


def on_host(tree: Any) -> dict[str, Any]:
    """Return the leaves by dotted name, tensors in host memory, those of ranks as one."""
    found = {}
    for name, leaf in leaves(tree):
        if isinstance(leaf, torch.Tensor):
            whole = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
            leaf = whole.detach().cpu().clone()
        found[name] = leaf
    return found


def assert_same(found: Any, wanted: Any) -> None:
    """Fail if there are other names, values, types, shapes or bytes than there should be."""
    mine, theirs = on_host(found), on_host(wanted)
    assert mine.keys() == theirs.keys(), sorted(mine.keys() ^ theirs.keys())[:9]
    wrong = [
        name
        for name, leaf in theirs.items()
        if not (same(mine[name], leaf) if isinstance(leaf, torch.Tensor) else mine[name] == leaf)
    ]
    assert not wrong, f"{len(wrong)} of {len(theirs)} came back other than they were: {wrong[:9]}"


def as_it_is(_model: Any) -> None:
    """Leave a model unsharded."""


class Proof:
    """The checks, and what they share.

    Args:
        kind: torch's name of the device: "cuda", or "stub" for the double.
        directory: where files are written.
        races: rounds of each check that has rounds.
        mib: elements in what is called a MiB, so that a quick run is possible.
        wait: waits for the device.

    Attributes:
        failed: the names of checks that failed.
        why: the last save went the way that it went, in words.
    """

    def __init__(
        self, kind: str, directory: Path, races: int, mib: int, wait: Callable[[], object]
    ) -> None:
        self.kind, self.directory, self.races, self.mib = kind, directory, races, mib
        self.real = kind == "cuda"
        self.wait = wait
        self.failed: list[str] = []
        self.why = ""

    def check(self, name: str, body: Check) -> None:
        """Run a check and print its line."""
        begun = time.perf_counter()
        try:
            told, verdict = body(), "PASS"
        except Exception as error:  # the other checks may still say something
            traceback.print_exc(limit=-4)
            told, verdict = f"{type(error).__name__}: {error}"[:300], "FAIL"
            self.failed.append(name)
        print(f"{verdict} {name} ({time.perf_counter() - begun:.1f} s) {told or ''}", flush=True)

    def path(self, name: str) -> str:
        """Return a path in the directory."""
        return str(self.directory / name)

    def random(self, *shape: int) -> torch.Tensor:
        """Return random numbers on the device; the double makes none by itself."""
        return torch.randn(*shape).to(self.kind)

    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for about so long; the host goes on."""
        if self.real:
            torch.cuda._sleep(int(seconds * CLOCK_HZ))

    def core(self) -> None:
        """What every save and load promises."""
        for fence in FENCES:
            self.check(f"round trip, fence {fence}", lambda f=fence: self.round_trip(f))
            self.check(f"races, fence {fence}", lambda f=fence: self.race(f))
        self.check("steps: train, save, restore", lambda: self.steps("run"))
        self.check("steps in memory first", self.memory)
        self.check("damage is found", self.damage)
        self.check("a change before the copy is told", self.conflict)

    def full(self) -> None:
        """The core, and what stands beside it."""
        self.core()
        self.check("CRC-32 on the GPU", self.crc)
        self.check("integrations.dcp", self.dcp)
        backend = "NCCL" if self.real else "gloo, on the CPU"
        self.check(f"FSDP2 and a shared file, one rank, {backend}", self.fsdp)
        if self.real:  # which no double has
            self.check("CUDA graphs", self.graphs)
            self.check("exit and fork with a save in flight", self.exits)
            self.check("all is given back", self.given_back)

    def gds(self) -> None:
        """cuFile, which is in compat mode without nvidia-fs. It may hang: give it a limit."""
        self.mib = max(self.mib, 1 << 20)  # it moves whole blocks of 8 MiB
        for fence in FENCES:
            trip = f"round trip by cuFile, fence {fence}"
            self.check(trip, lambda f=fence: self.round_trip(f, staging="gds"))
            races = f"races by cuFile, fence {fence}"
            self.check(races, lambda f=fence: self.race(f, staging="gds"))
        self.check("steps by cuFile", lambda: self.steps("gds-run", staging="gds"))
        self.check("staging host and gds", self.ways)
        if self.real and "compat" in self.why:
            print(f"NOTE cuFile's calls and bytes, through the host's memory; {self.why}")

    def training(
        self, wrap: Callable[[Any], object], kind: str, width: int = 999
    ) -> tuple[Any, Any, Any]:
        """Return a model, its optimizer and a step of them that was taken once."""
        layers = [torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, width)]
        model = torch.nn.Sequential(*layers).to(kind)
        wrap(model)
        fused = True if kind == "cuda" else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)

        def step() -> None:
            model(torch.randn(64, 512).to(kind)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return model, optimizer, step

    def state(self) -> dict[str, Any]:
        """Return tensors of many kinds: views, types, devices, sizes, and an optimizer's."""
        model, optimizer, _ = self.training(as_it_is, self.kind)
        weight = model[0].weight.detach()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
        state |= {"again": weight, "view": weight[3:90, ::3], "turned": weight.t()}
        state |= {"host": torch.randn(self.mib), "none": torch.empty(0, device=self.kind)}
        state["big"] = self.random(9 * self.mib + 1)
        state["many"] = [torch.full((100 + i,), i).to(self.kind) for i in range(300)]
        for dtype in (*DTYPES, torch.float8_e4m3fn):
            state[str(dtype)] = torch.randn(70_001).to(dtype).to(self.kind)
        return state

    def round_trip(self, fence: str, **options: Any) -> str:
        """A state comes back to wherever it is asked for, and torch.load reads it."""
        state, kind = self.state(), self.kind
        stats = fastckpt.save(
            state, self.path("a.pt"), options=fastckpt.SaveOptions(fence=fence, **options)
        ).result(WAIT_S)
        self.went(stats, options)
        targets = (None, kind, f"{kind}:0", torch.device(kind, 0), {"cpu": kind}, "cpu")
        for where in targets:
            with warnings_of_fastckpt() as warned:
                loaded = fastckpt.load(self.path("a.pt"), map_location=where, **options)
            assert not warned, warned
            assert_same(loaded, state)
            assert loaded["big"].device.type == ("cpu" if where == "cpu" else kind), where
        assert_same(torch.load(self.path("a.pt")), state)
        return f"{stats}; {stats.staging_why}"

    def went(self, stats: fastckpt.SaveStats, options: dict[str, Any]) -> None:
        """Fail unless a save went the way that was asked for."""
        wanted, self.why = options.get("staging", "pinned"), stats.staging_why
        assert stats.staging == wanted, f"staged as {stats.staging}: {self.why}"

    def race(self, fence: str, **options: Any) -> str:
        """Kernels that are queued before a save are in it, those after its fence are not."""
        streams = [torch.cuda.Stream(), torch.cuda.Stream(), None] if self.real else [None]
        for number in range(self.races):
            stream = streams[number % len(streams)]
            with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                self.one_race(fence, 0.03 * (number % 2), options)
        return f"{self.races} saves"

    def one_race(self, fence: str, delay_s: float, options: dict[str, Any]) -> None:
        """Save behind kernels, change everything at once, and free it."""
        sizes = (12 * self.mib + 345, 100_001, 40_003, 1)
        values = [self.random(size) for size in sizes]
        tensors = [torch.nn.Parameter(torch.zeros_like(value)) for value in values]
        optimizer = torch.optim.SGD(tensors, lr=1.0)
        self.delay(delay_s)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
                tensor.grad = torch.ones_like(tensor)
        handle = fastckpt.save(
            tensors,
            self.path("r.pt"),
            options=fastckpt.SaveOptions(fence=fence, durable=False, **options),
        )
        if fence == "step":
            optimizer.step()
        else:
            for tensor in tensors:
                tensor.data.fill_(float("nan"))
        del tensors, optimizer, tensor  # the allocator may give the memory to others at once
        others = [torch.full_like(value, -1.0) for value in values]
        self.went(handle.result(WAIT_S), options)
        self.wait()
        loaded = fastckpt.load(self.path("r.pt"), map_location="cpu")
        assert_same([tensor.detach() for tensor in loaded], values)
        del others

    def steps(
        self, name: str, wrap: Callable[[Any], object] = as_it_is, kind: str = "", **options: Any
    ) -> str:
        """A model is trained, saved between steps, and restored."""
        width = 8192 if options else 999  # cuFile moves whole blocks of 8 MiB
        model, optimizer, step = self.training(wrap, kind or self.kind, width)
        own: fastckpt.PerRank = fastckpt.PerRank()
        state = {"model": model, "optimizer": optimizer, "own": own}
        with fastckpt.Checkpointer(
            self.path(name), options=fastckpt.SaveOptions(fence="step", **options)
        ) as checkpointer:
            for number in range(3):
                step()
                own.value, wanted = number, on_host(model.state_dict())
                handle = checkpointer.save(number, state)
                step()
                stats = handle.result(WAIT_S)
                if options:
                    self.went(stats, options)
            assert checkpointer.restore(state) == 2 and own.value == 2
            assert_same(model.state_dict(), wanted)
            step()
        return f"{stats}, {stats.staging}"

    def memory(self) -> str:
        """Steps are staged in files on a tmpfs, which are used again, and restored from there."""
        wanted: list[torch.Tensor] = []
        seen: set[int] = set()
        again = 0
        with tempfile.TemporaryDirectory(dir="/dev/shm") as there:
            memory = fastckpt.Memory(directory=there, root_every=2)
            with fastckpt.Checkpointer(
                self.path("tiered"), local=memory, options=fastckpt.SaveOptions(fence="step")
            ) as checkpointer:
                for number in range(6):  # later ones take over the files of those that were removed
                    wanted = [self.random(BLOCK + 1), self.random(100_001)]
                    stats = checkpointer.save(number, {"t": wanted}).result(WAIT_S)
                    (file,) = Path(there).glob(f"*/step-{number:08}/*.safetensors")
                    again += file.stat().st_ino in seen
                    seen.add(file.stat().st_ino)
            found = {"t": [torch.zeros_like(tensor) for tensor in wanted]}
            with fastckpt.Checkpointer(self.path("tiered"), local=memory) as checkpointer:
                assert checkpointer.restore(found) == 5
            assert_same(found["t"], wanted)
            assert again, "no file was used again"
        return f"{stats}, {stats.staging}: {stats.staging_why}; {again} of 6 steps took over a file"

    def damage(self) -> str:
        """A bit that has turned is found as the file is loaded to the device."""
        fastckpt.save({"t": self.random(8 * self.mib)}, self.path("d.pt")).result(WAIT_S)
        with open(self.path("d.pt"), "r+b") as file:
            (byte,) = os.pread(file.fileno(), 1, 20 * self.mib)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), 20 * self.mib)
        try:
            fastckpt.load(self.path("d.pt"), map_location=self.kind)
        except CorruptCheckpoint as error:
            return str(error).splitlines()[0]
        raise AssertionError("it was not found")

    def conflict(self) -> None:
        """What changes before it is copied fails its save, and not the next."""
        tensor = self.random(3 * self.mib)
        self.delay(0.3)
        handle = fastckpt.save(
            {"t": tensor}, self.path("c.pt"), options=fastckpt.SaveOptions(fence="step")
        )
        tensor.add_(1)
        error = handle.exception(WAIT_S)
        copied = error is None and not self.real  # as the double may have by then
        assert copied or isinstance(error, StagingConflict), f"it was not told: {error}"
        fastckpt.save({"t": tensor}, self.path("c.pt")).result(WAIT_S)

    def crc(self) -> str:
        """The kernel has zlib's checksums; says how fast it is."""
        count, times = (32, 10) if self.real else (10, 1)
        data = torch.randint(0, 256, (count * BLOCK,), dtype=torch.uint8).to(self.kind)
        reads = pipeline.current().staging.devices.reads([data.untyped_storage()])
        queue, at = reads.ranges[0].queue, data.data_ptr()
        host = bytes(data[: 9 * BLOCK].cpu().numpy())
        kernel = _engine.Crc32Gpu(queue)
        parts = [(1, 1 + BLOCK), (7, 106), (0, 9 * BLOCK)]
        found = kernel.crcs(queue, [(at + begin, end - begin) for begin, end in parts])
        assert found == [zlib.crc32(host[begin:end]) for begin, end in parts]
        blocks = [(at + i * BLOCK, BLOCK) for i in range(count)]
        begun = time.perf_counter()
        for _ in range(times):
            kernel.crcs(queue, blocks)
        speed = times * data.nbytes / (time.perf_counter() - begun) / 1e9
        return f"{speed:.1f} GB/s in blocks of 8 MiB, with launches and waits"

    def dcp(self) -> None:
        """torch.distributed.checkpoint's directories, saved and loaded."""
        import torch.distributed.checkpoint as dcp

        from fastckpt.integrations.dcp import Reader, async_save

        state = {"t": self.random(9 * self.mib), "small": torch.arange(9).to(self.kind)}
        wanted = on_host(state)
        saving = async_save(state, checkpoint_id=self.path("dcp"), no_dist=True)
        for tensor in state.values():
            tensor.zero_()
        saving.result(WAIT_S)
        dcp.load(state, storage_reader=Reader(self.path("dcp")), no_dist=True)
        assert_same(state, wanted)

    def fsdp(self) -> str:
        """A sharded model, and a file that a process group saves and loads."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        kind, backend = (self.kind, "nccl") if self.real else ("cpu", "gloo")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh(kind, (1,))
            told = self.steps("fsdp", lambda model: fully_shard(model, mesh=mesh), kind)
            state = {"t": self.random(9 * self.mib), "small": torch.arange(9).to(self.kind)}
            group = {"group": dist.group.WORLD}
            fastckpt.save(state, self.path("f.pt"), **group).result(WAIT_S)
            assert_same(fastckpt.load(self.path("f.pt"), map_location=self.kind, **group), state)
        finally:
            dist.destroy_process_group()
        return told

    def graphs(self) -> None:
        """A save beside the capture of another thread, one under capture, one beside replays."""
        static, tensor = torch.zeros(self.mib, device=self.kind), self.random(9 * self.mib)
        side, errors = torch.cuda.Stream(), []
        static.add_(1)
        self.wait()

        def saving() -> None:
            with torch.cuda.stream(side):
                errors.append(fastckpt.save({"t": tensor}, self.path("g.pt")).exception(WAIT_S))

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static.add_(1)
            thread = threading.Thread(target=saving)
            thread.start()
            thread.join()
            try:
                fastckpt.save({"t": tensor}, self.path("h.pt"))
            except DeviceError as error:
                refusal = str(error)
            else:
                refusal = ""
        assert errors == [None], errors
        assert "outside of the capture" in refusal, f"under capture: {refusal or 'not refused'}"
        wanted = on_host({"t": static})
        handle = fastckpt.save({"t": static}, self.path("g.pt"))
        for _ in range(50):
            graph.replay()
        handle.result(WAIT_S)
        assert_same(fastckpt.load(self.path("g.pt")), wanted)
        assert_same({"t": static}, {"t": wanted["t"] + 50})

    def exits(self) -> None:
        """A process forks, and ends, with a save in flight."""
        command = [sys.executable, "-c", EXITS, self.path("e.pt")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0 and "FAILED" not in done.stderr, done.stderr[-600:]
        loaded = fastckpt.load(self.path("e.pt"), map_location="cpu")
        assert_same(loaded, {"t": torch.arange(9 << 20)})

    def given_back(self) -> str:
        """The device has its memory again when the pipeline is closed."""

        def free() -> int:
            self.wait()
            gc.collect()
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info()[0]

        before = free()
        fastckpt.save({"t": self.random(9 * self.mib)}, self.path("z.pt")).result(WAIT_S)
        pipeline.current().close()
        lost = (before - free()) / 2**20
        assert lost < 32, f"{lost:.0f} MiB of the GPU are not given back"
        return f"{lost:.0f} MiB less are free than before the save"

    def ways(self) -> str:
        """Both ways are measured; says which is faster."""
        state, path = [self.random(64 * self.mib)], self.path("x.pt")
        speeds: dict[str, list[float]] = {"host": [], "gds": []}
        for way in ("host", "gds") * 3:
            begun = time.perf_counter()
            stats = fastckpt.save(state, path, options=fastckpt.SaveOptions(staging=way)).result(
                WAIT_S
            )
            speed = state[0].nbytes / (time.perf_counter() - begun) / 1e9
            speeds[way].append(speed)
            print(f"INFO durable, {stats.staging}: {speed:.2f} GB/s", flush=True)
        return f"{max(speeds, key=lambda way: sorted(speeds[way])[1])} is faster"

    def probe(self) -> None:
        """What no double knows: from how many queued copies on a call waits for the GPU."""
        if not self.real:
            print("only a GPU has queues that become full")
            sys.exit(NOTHING)
        size = (PROBED_BYTES,)
        state = [torch.empty(size, dtype=torch.uint8, device=self.kind) for _ in range(16)]
        for tensor in state:
            tensor.random_()
        told = self.queued(state, 0.0)
        print(f"INFO the first save, which pins memory: {told}", flush=True)
        for count in (2, 4, 8, 10, 12, 16):
            print(f"INFO behind 0.5 s of a kernel: {self.queued(state[:count], 0.5)}", flush=True)

    def queued(self, state: list[torch.Tensor], delay_s: float) -> str:
        """Save behind a kernel while another thread launches others; say who waited how long."""
        self.wait()
        side, tiny, over = torch.cuda.Stream(), torch.zeros(1, device=self.kind), threading.Event()
        took: list[float] = []

        def launching() -> None:
            with torch.cuda.stream(side):
                while not over.wait(0.001):
                    at = time.perf_counter()
                    tiny.add_(1)
                    took.append(time.perf_counter() - at)

        thread = threading.Thread(target=launching)
        thread.start()
        try:
            while len(took) < 9:  # it is warm
                time.sleep(0.01)
            took.clear()
            self.delay(delay_s)
            begun = time.perf_counter()
            handle = fastckpt.save(
                state, self.path("p.pt"), options=fastckpt.SaveOptions(durable=False)
            )
            returned_s = time.perf_counter() - begun
            stats = handle.result(2 * WAIT_S)
        finally:
            over.set()
            thread.join()
        waited = " (IT WAITED FOR THE GPU)" if 0 < delay_s * 0.6 < returned_s else ""
        speed = f"{stats.d2h_gbps:.1f} GB/s" if stats.d2h_gbps else "speed unknown"
        return (
            f"{len(state) * PROBED_BYTES / 2**30:.1f} GiB: save() returned after "
            f"{returned_s * 1e3:.1f} ms{waited}; a launch of another thread took "
            f"{max(took, default=0.0) * 1e3:.1f} ms at most; {speed}, {stats.staging}"
        )


@contextlib.contextmanager
def warnings_of_fastckpt() -> Iterator[list[str]]:
    """Collects what fastckpt warns of: a load by cuFile that goes through the host, say."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fastckpt")
    log.addHandler(handler)
    try:
        yield told
    finally:
        log.removeHandler(handler)


@contextlib.contextmanager
def doubles(directory: Path) -> Iterator[Callable[[], object]]:
    """The device of the tests, under which lie their CUDA driver and their cuFile; what waits."""
    from tests.kit import accelerator, cuda_stub, cufile_stub

    runtime = accelerator.registered(accelerator.built(directory))
    runtime.driver = cuda_stub.CudaStub(cuda_stub.built(directory))
    cufile = cufile_stub.built(directory)
    cufile_stub.CufileStub(cufile, runtime.driver.path)
    size = {"budget_bytes": 1 << 30}
    with accelerator.installed(runtime, runtime.driver.path, cufile=str(cufile), **size):
        yield runtime.wait


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description="Check fastckpt on a GPU.")
    parser.add_argument("what", choices=("core", "full", "gds", "probe"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", choices=("cuda", "stub"), default="cuda")
    parser.add_argument("--races", type=int, default=12, help="saves of each check of races")
    parser.add_argument("--mib", type=int, default=1 << 20, help="elements; less is quicker")
    options = parser.parse_args()
    real = options.device == "cuda"
    if real and not torch.cuda.is_available():
        print("NO GPU: torch.cuda.is_available() is False; nothing was checked")
        sys.exit(NO_GPU)
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory))
        wait = torch.cuda.synchronize if real else stack.enter_context(doubles(Path(made)))
        proof = Proof(options.device, Path(made), options.races, options.mib, wait)
        getattr(proof, options.what)()
    if not real:
        print("NOTE of doubles alone: no GPU, no driver and no cuFile of NVIDIA's has run")
    print(f"{len(proof.failed)} failed: {proof.failed}" if proof.failed else "all passed")
    sys.exit(bool(proof.failed))


if __name__ == "__main__":
    main()
