"""The GPU as the benchmark uses it, and a stand-in on the CPU that takes the same steps.

All that needs CUDA objects is here: events, pinned memory, counters of memory, facts about the
hardware. It must not know what is measured with them.
"""

from __future__ import annotations

import gc
import math
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastckpt import SaveStats
from fastckpt.saving import pipeline

Row = dict[str, Any]
POLL_S = 0.001
PRODUCT_WIDTH = 8192
BURST_BYTES = 64 << 20
BURST_COPIES = 500  # half a second on a link of 64 GB/s
SMI_FIELDS = (
    "driver_version",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "pcie.link.gen.max",
    "pcie.link.width.max",
)


def wait_for_copies(device: torch.device, stream: int) -> None:
    """Have a stream, by torch's number, wait for all copies that fastckpt has queued so far."""
    pipeline.current().staging.devices.queue(device).lead(stream)


class Cuda:
    """The current GPU, where tensors lie that are saved.

    Attributes:
        device: torch's name of it.
        judged: whether numbers measured on it mean anything.
        optimizer_options: what an optimizer is made with there.
    """

    device: torch.device
    judged = True
    optimizer_options: dict[str, Any]

    def __init__(self) -> None:
        torch.cuda.init()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.optimizer_options = {"fused": True}
        self._factors: list[torch.Tensor] = []
        self._beside: Any = None
        self._product_s = 0.0

    def synchronize(self) -> None:
        """Wait for all that the device was given."""
        torch.cuda.synchronize(self.device)

    def wait_for_stream(self) -> None:
        """Wait for the current stream alone: others may go on copying."""
        torch.cuda.current_stream(self.device).synchronize()

    def is_idle(self) -> bool:
        """Say whether the current stream has done all it was given."""
        return bool(torch.cuda.current_stream(self.device).query())

    def mark(self) -> Any:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def mark_of_copies(self) -> Any:
        """Record an event that comes when fastckpt has copied all that it has queued."""
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.device)
        wait_for_copies(self.device, self._beside.cuda_stream)
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._beside)
        return event

    def wait_for(self, mark: Any) -> None:
        """Wait until the current stream has come to an event."""
        mark.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the device's time between two events, having waited for the second."""
        end.synchronize()
        return float(begin.elapsed_time(end) / 1e3)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return page-locked host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def occupy(self, seconds: float) -> None:
        """Give the current stream about so much work, and return at once."""
        if not self._factors:
            one = torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH, device=self.device).bfloat16()
            self._factors = [one, one.clone(), torch.empty_like(one)]
            self._multiply(3)
            begin = self.mark()
            self._multiply(10)
            self._product_s = self.seconds(begin, self.mark()) / 10
        self._multiply(math.ceil(seconds / self._product_s))

    def _multiply(self, times: int) -> None:
        first, second, product = self._factors
        for _ in range(times):
            torch.mm(first, second, out=product)

    def memory_added(self, action: Callable[[], object]) -> Row:
        """Return the most memory of the device that an action took at a time, by torch's counter
        (allocated_bytes) and by the device's own (device_bytes).
        """
        self.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        free = least = torch.cuda.mem_get_info(self.device)[0]
        over = threading.Event()

        def watch() -> None:
            nonlocal least
            while not over.wait(POLL_S):
                least = min(least, torch.cuda.mem_get_info(self.device)[0])

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            action()
        finally:
            over.set()
            thread.join()
        # What stays taken counts too, however short the action was.
        least = min(least, torch.cuda.mem_get_info(self.device)[0])
        peak = torch.cuda.max_memory_allocated(self.device)
        return {"allocated_bytes": peak - allocated, "device_bytes": free - least}

    def copied(self, stats: SaveStats) -> tuple[float, float]:
        """Return how long a save copied from the device, and with how many 10^9 bytes a second."""
        if stats.d2h_s is None or stats.d2h_gbps is None:
            raise RuntimeError(f"fastckpt copied nothing from the GPU by itself ({stats.staging})")
        return stats.d2h_s, stats.d2h_gbps

    def facts(self) -> Row:
        """Return what a reader needs to know of the device."""
        properties = torch.cuda.get_device_properties(self.device)
        # An idle link goes down to the slowest generation: it is asked about while it is used.
        host = self.pinned(BURST_BYTES)
        there = torch.empty_like(host, device=self.device, pin_memory=False)
        for _ in range(BURST_COPIES):
            there.copy_(host, non_blocking=True)
        found = asked_of_nvidia_smi(f"GPU-{getattr(properties, 'uuid', '')}")
        self.synchronize()
        link = "PCIe link unknown"
        if "pcie.link.gen.current" in found:
            link = (
                f"PCIe gen {found['pcie.link.gen.current']} x{found['pcie.link.width.current']}, "
                f"at most gen {found['pcie.link.gen.max']} x{found['pcie.link.width.max']}"
            )
        return {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver": found.get("driver_version") or driver_of_kernel(),
            "pcie": link,
        }


def asked_of_nvidia_smi(gpu: str) -> dict[str, str]:
    """Return what nvidia-smi says of a GPU; nothing where it does not run or know that GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            [*command, "-i", gpu], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else {}


def driver_of_kernel() -> str:
    """Return the line of the kernel's driver, for where nvidia-smi is missing."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return "unknown"


class StandIn(Cuda):
    """Host memory in the place of a GPU, so that every step can be tested without one."""

    judged = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.optimizer_options = {}

    def nothing(self, *_: object) -> None:
        """Takes the place of waits and of work."""

    synchronize = wait_for_stream = wait_for = occupy = nothing

    def is_idle(self) -> bool:
        return True

    def mark(self) -> Any:
        return time.perf_counter()

    mark_of_copies = mark

    def seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def memory_added(self, action: Callable[[], object]) -> Row:
        action()
        return {"allocated_bytes": 0, "device_bytes": 0}

    def copied(self, stats: SaveStats) -> tuple[float, float]:
        assert stats.staged_s is not None
        return stats.staged_s, stats.nbytes / stats.staged_s / 1e9

    def facts(self) -> Row:
        return {"name": "no GPU, its stand-in on the CPU", "driver": "none", "pcie": "no link"}
