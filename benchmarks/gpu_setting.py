"""What all measurements on a GPU share: the device, the sizes, the disk and its limits, the peers.

What is costly is made when it is first asked for. It must not know what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ceiling import Ceiling
from gpu_device import Cuda
from harness import Line, Row, progress
from rivals.dcp import DcpAsyncStager
from rivals.fastckpt_save import Fastckpt, FastckptStep
from rivals.peer import Peer
from rivals.process import reason_of
from rivals.torch_checkpointing_save import TorchCheckpointing
from rivals.torch_save import TorchSave
from saving import blank_like
from storage import drop_page_cache

from fastckpt.cli.bench.saves import Save, State, gpt_state

# Of the state: for a smaller one, a minute of looking at the disk would be too long.
WHOLE_SCAN_BYTES = 4 << 30


class DcpPinned(DcpAsyncStager):
    """torch.distributed.checkpoint.async_save with its pinned-memory stager."""

    name = "dcp-async-pinned"
    contract = (
        "background threads; pinned memory, reused; state may change after staging_completion; "
        "the GPU is synchronized before the call, for its copies do not wait for the caller's"
    )

    def __init__(self, device: Cuda) -> None:
        self.device = device

    def options(self) -> dict[str, bool]:
        pinned = self.device.device.type == "cuda"
        # Shared memory is for its writer in another process; this one's is a thread.
        return super().options() | {"use_pinned_memory": pinned, "use_non_blocking_copy": pinned}

    def save(self, state: State, target: Path) -> Save:
        # Its stream is ordered after nothing: without this it may copy what an optimizer step that
        # is still queued has yet to write.
        self.device.wait_for_stream()
        return super().save(state, target)


def load_to_host(peer: Peer, target: Path, state: State) -> Any:
    """Load with a peer what it saved of a state like this one: a check needs no second copy of the
    state on the GPU.
    """
    template = blank_like(state, "cpu") if peer.fills_template else {}
    return peer.load(target, template)


@dataclass
class Measured:
    """What one part found: rows as they were measured, lines of bars, tables side by side."""

    rows: Any
    lines: list[Line]
    tables: list[str] = field(default_factory=list)


@dataclass
class Here:
    """Where and how much is measured.

    Attributes:
        device: that holds the state.
        nbytes: of the state, and about of the one that is trained.
        rounds: how often.
        every: training steps from one save to the next.
        step_s: how long a training step is made, at least.
        seconds: since the start, by which the last round that compares fences is to end.
        directory: on the file system to measure.
        missing: what was not measured, and why.
        failures: what went wrong.
    """

    device: Cuda
    nbytes: int
    rounds: int
    every: int
    step_s: float
    seconds: float
    directory: Path
    missing: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @cached_property
    def state(self) -> State:
        """The state that is saved where nothing is trained."""
        return gpt_state(self.nbytes, device=self.device.device)

    @cached_property
    def peers(self) -> list[Peer]:
        """The peers that run here."""
        running: list[Peer] = []
        for peer in (
            TorchSave(),
            DcpPinned(self.device),
            TorchCheckpointing(),
            Fastckpt(),
            FastckptStep(),
        ):
            try:
                peer.load_modules()
                peer.open()
            except Exception as error:  # any failure of a rival to start is its reason, not ours
                self.missing[peer.name] = reason_of(error)
            else:
                running.append(peer)
            progress(f"open {peer.name}: {self.missing.get(peer.name) or 'done'}")
        return running

    @cached_property
    def ceiling(self) -> Ceiling:
        """What the disk can do, scanned once."""
        found = Ceiling(self.directory, self.nbytes, quick=self.nbytes < WHOLE_SCAN_BYTES)
        if found.missing:
            self.missing["fio"] = found.missing
        return found

    def disk(self, *, reading: bool) -> Row:
        """Return the bytes a second that the disk can do now: write_bps, and read_bps if asked."""
        return {f"{key}_bps": rate for key, rate in self.ceiling.measure(reading).items()}

    def cool(self, path: Path) -> str:
        """Empty the page cache before a load; returns how."""
        if not self.device.judged:  # a test does not slow down the machine it runs on
            return "not emptied"
        return drop_page_cache(path)

    def release(self) -> None:
        """Free the state; another is made when it is asked for."""
        self.__dict__.pop("state", None)

    def close(self) -> None:
        """Free the state and what the peers hold."""
        self.release()
        for peer in self.__dict__.pop("peers", []):
            peer.close()
