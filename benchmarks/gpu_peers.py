"""The peers that are measured on a GPU, and whether what they saved comes back bit by bit.

Each saves from the GPU as its own documentation would have it, and loads into host memory, so that
a check needs no second copy of the state on the GPU. It must not know what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_device import Cuda
from harness import progress
from rivals.dcp import DcpAsyncStager
from rivals.fastckpt_save import Fastckpt, FastckptStep
from rivals.peer import Peer, Save
from rivals.process import reason_of
from rivals.torch_checkpointing_save import TorchCheckpointing
from rivals.torch_save import TorchSave
from saving import blank_like

from fastckpt.cli.bench.state import State


class TorchSaveGpu(TorchSave):
    """torch.save of tensors on a GPU, which it copies one by one."""

    def load(self, target: Path, template: State) -> Any:
        return torch.load(target / "state.pt", map_location="cpu", weights_only=True)


class DcpPinned(DcpAsyncStager):
    """torch.distributed.checkpoint.async_save with its pinned-memory stager."""

    name = "dcp-async-pinned"
    contract = (
        "background threads; pinned memory, reused; may mutate after staging_completion; "
        "the GPU is synchronized before the call, for its copies do not wait for the caller's"
    )

    def __init__(self, device: Cuda) -> None:
        self.device = device

    def options(self) -> dict[str, bool]:
        if self.device.device.type != "cuda":
            return super().options()
        # Shared memory is for its writer in another process; this one's is a thread.
        return {
            "use_pinned_memory": True,
            "use_shared_memory": False,
            "use_async_staging": True,
            "use_non_blocking_copy": True,
        }

    def save(self, state: State, target: Path) -> Save:
        # Its stream is ordered after nothing: without this it may copy what an optimizer step that
        # is still queued has yet to write.
        self.device.wait_for_stream()
        save = super().save(state, target)
        return Save(save.wait_staged, partial(as_exception, save.wait_durable))


def as_exception(wait: Callable[[], object]) -> None:
    """Wait; an error of DCP's that is no Exception becomes one: it is that peer's result and does
    not end the run.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        wait()
    except CheckpointException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


class FastckptGpu(Fastckpt):
    """fastckpt.save under the call fence: the caller's streams wait for the copies."""

    contract = "background engine; when the call returns, streams wait until everything is copied"

    def load(self, target: Path, template: State) -> Any:
        return self.library.load(target / "state.pt", map_location="cpu")


class FastckptStepGpu(FastckptGpu):
    """fastckpt.save under the step fence."""

    name = FastckptStep.name
    contract = "background engine; copies behind, the next optimizer step waits on the GPU"
    fence = "step"


def open_peers(device: Cuda) -> tuple[list[Peer], dict[str, str]]:
    """Start all peers; returns those that run, and for each of the others the reason."""
    candidates: list[Peer] = [
        TorchSaveGpu(),
        DcpPinned(device),
        TorchCheckpointing(),
        FastckptGpu(),
        FastckptStepGpu(),
    ]
    running, missing = [], {}
    for peer in candidates:
        started = time.perf_counter()
        try:
            peer.load_modules()
            peer.open()
        except Exception as error:  # any failure of a rival to start is its reason, not ours
            missing[peer.name] = reason_of(error)
        else:
            running.append(peer)
        told = missing.get(peer.name) or f"{time.perf_counter() - started:.1f} s"
        progress(f"open {peer.name}: {told}")
    return running, missing


def guard_of(peer: Peer, save: Save) -> Callable[[], object] | None:
    """Return what has to be called before the optimizer steps; None where nothing has to.

    Both fences of fastckpt keep their promise by themselves.
    """
    return save.wait_staged if peer.background and not isinstance(peer, Fastckpt) else None


def load_to_host(peer: Peer, target: Path, state: State) -> Any:
    """Load with a peer what it saved of a state like this one."""
    template = blank_like(state, "cpu") if peer.fills_template else {}
    return peer.load(target, template)
