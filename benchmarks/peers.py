"""Every checkpoint library that can be measured here, behind one small interface.

Each peer says how its own documentation would have it called, what its call promises on return,
and, when it cannot run, why. A peer must not know what is being timed: it only saves, waits, loads.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from state import State, byte_view, flat_tensors
from storage import fsync_tree


def already() -> None:
    """Wait for something that is over when the call returns."""


@dataclass
class Save:
    """One save under way: when the state may change again, and when the bytes are durable.

    `facts` returns what the peer itself says of the finished save.
    """

    wait_staged: Callable[[], object]
    wait_durable: Callable[[], object]
    facts: Callable[[], dict[str, Any]] = dict


class Peer(ABC):
    """One way to save a state below a directory and to load it back."""

    name: str
    contract: str
    background = False
    fills_template = False
    modules: tuple[str, ...] = ()

    def reason_missing(self) -> str | None:
        """Return why this peer cannot run here, or None when it can."""
        try:
            self.load_modules()
            self.open()
        except Exception as error:  # any failure of a rival to start is its reason, not ours
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None

    def load_modules(self) -> None:
        """Import what this peer needs."""
        for module in self.modules:
            importlib.import_module(module)

    def open(self) -> None:
        """Prepare whatever outlives one save. Called once, before the first."""
        self.held = contextlib.ExitStack()

    @abstractmethod
    def save(self, state: State, target: Path) -> Save:
        """Save `state` below the empty directory `target`; returns when the peer's call does."""

    @abstractmethod
    def load(self, target: Path, template: State) -> Any:
        """Load what `save` wrote. `template` has the state's structure, for loads in place."""

    def close(self) -> None:
        """Release what `open` prepared."""
        self.held.close()


class TorchSave(Peer):
    """torch.save to one file."""

    name = "torch.save"
    contract = "sync; page cache on return, harness fsyncs"

    def save(self, state: State, target: Path) -> Save:
        torch.save(state, target / "state.pt")
        return Save(already, lambda: fsync_tree(target))

    def load(self, target: Path, template: State) -> Any:
        return torch.load(target / "state.pt", weights_only=True)


class TorchSaveNoCrc(TorchSave):
    """torch.save with the zip's CRC-32 switched off."""

    name = "torch.save-nocrc"
    contract = "sync; no checksum; page cache on return, harness fsyncs"

    def save(self, state: State, target: Path) -> Save:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            return super().save(state, target)
        finally:
            torch.serialization.set_crc32_options(before)


class Safetensors(Peer):
    """safetensors.torch.save_file of the flattened tensors; the few non-tensors are left out."""

    name = "safetensors"
    contract = "sync; tensors only, no checksum; page cache on return, harness fsyncs"
    modules = ("safetensors.torch",)

    def save(self, state: State, target: Path) -> Save:
        from safetensors.torch import save_file

        save_file(flat_tensors(state), target / "state.safetensors")
        return Save(already, lambda: fsync_tree(target))

    def load(self, target: Path, template: State) -> Any:
        from safetensors.torch import load_file

        return load_file(target / "state.safetensors")


class Dcp(Peer):
    """torch.distributed.checkpoint.save in one process."""

    name = "dcp"
    contract = "sync; fsyncs its files, harness adds the directory"
    fills_template = True
    modules = ("torch.distributed.checkpoint",)

    def save(self, state: State, target: Path) -> Save:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=target, no_dist=True)
        return Save(already, lambda: fsync_tree(target))

    def load(self, target: Path, template: State) -> Any:
        import torch.distributed.checkpoint as dcp

        dcp.load(template, checkpoint_id=target, no_dist=True)
        return template


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save with its default stager."""

    name = "dcp-async"
    contract = "background thread; a fresh copy of the state is made before the call returns"
    background = True

    def save(self, state: State, target: Path) -> Save:
        import torch.distributed.checkpoint as dcp

        future = dcp.async_save(state, checkpoint_id=target, no_dist=True)
        return Save(already, lambda: (future.result(), fsync_tree(target)))


class DcpAsyncStager(Dcp):
    """torch.distributed.checkpoint.async_save with a reused DefaultStager, staging in a thread."""

    name = "dcp-async-stager"
    contract = "background threads; may mutate after staging_completion; staging memory reused"
    background = True
    modules = ("torch.distributed.checkpoint", "torch.distributed.checkpoint.staging")

    def open(self) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().open()
        # Pinned memory and non-blocking copies need an accelerator; the rest is at its best.
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        self.held.callback(self.stager.close)

    def save(self, state: State, target: Path) -> Save:
        import torch.distributed.checkpoint as dcp

        response = dcp.async_save(
            state, checkpoint_id=target, no_dist=True, async_stager=self.stager
        )
        return Save(
            response.staging_completion.result,
            lambda: (response.upload_completion.result(), fsync_tree(target)),
        )


class TorchSnapshot(Peer):
    """torchsnapshot Snapshot.take."""

    name = "torchsnapshot"
    contract = "sync; page cache on return, harness fsyncs"
    fills_template = True
    modules = ("torchsnapshot",)

    def save(self, state: State, target: Path) -> Save:
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(str(target / "snapshot"), {"state": StateDict(**state)})
        return Save(already, lambda: fsync_tree(target))

    def load(self, target: Path, template: State) -> Any:
        from torchsnapshot import Snapshot, StateDict

        state = StateDict(**template)
        Snapshot(str(target / "snapshot")).restore({"state": state})
        return dict(state)


class TorchSnapshotAsync(TorchSnapshot):
    """torchsnapshot Snapshot.async_take."""

    name = "torchsnapshot-async"
    contract = "background thread; returns when the state is staged within its memory budget"
    background = True

    def save(self, state: State, target: Path) -> Save:
        from torchsnapshot import Snapshot, StateDict

        pending = Snapshot.async_take(str(target / "snapshot"), {"state": StateDict(**state)})
        return Save(already, lambda: (pending.wait(), fsync_tree(target)))


class TorchCheckpointing(Peer):
    """torch_checkpointing's asynchronous saver: shared-memory staging, a writer process."""

    name = "torch_checkpointing"
    contract = "background process; may mutate under its lock(); page cache, harness fsyncs"
    background = True
    fills_template = True
    modules = ("torch_checkpointing",)

    def open(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().open()
        logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)
        # Its O_DIRECT default hands unaligned buffers to write(), which ext4 and XFS refuse.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.checkpoints = CheckpointManager(CheckpointManager.Config(storage_config=storage))
        self.held.callback(self.checkpoints.close)

    def save(self, state: State, target: Path) -> Save:
        future = self.checkpoints.save(str(target / "step"), state)
        if future is None:
            raise RuntimeError("torch_checkpointing saved synchronously although asked not to")

        def wait_staged() -> None:
            with self.checkpoints.lock():
                pass

        return Save(wait_staged, lambda: (future.result(), fsync_tree(target)))

    def load(self, target: Path, template: State) -> Any:
        return self.checkpoints.load(str(target / "step"), into=template)


class DeepSpeed(Peer):
    """DeepSpeed's FastFileWriter (libaio, O_DIRECT, double buffer) as the file of torch.save."""

    name = "deepspeed"
    contract = "sync; torch.save through FastFileWriter, which fsyncs the file"
    modules = ("deepspeed",)
    buffer_bytes = 128 << 20

    def load_modules(self) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        super().load_modules()

    def open(self) -> None:
        import deepspeed.io.fast_file_writer as writer
        from deepspeed.ops.op_builder import AsyncIOBuilder

        super().open()

        class ByteCast:
            """Stands in for the extension op that DeepSpeed does not build for the CPU."""

            def load(self, verbose: bool = False) -> Any:
                return self

            def cast_to_byte_tensor(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
                return [byte_view(tensor) for tensor in tensors]

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        writer.UtilsBuilder = ByteCast
        block, depth, single_submit, overlap, threads = 8 << 20, 32, False, True, 2
        self.handle = (
            AsyncIOBuilder()
            .load(verbose=False)
            .aio_handle(block, depth, single_submit, overlap, threads)
        )
        self.buffer = self.handle.new_cpu_locked_tensor(
            self.buffer_bytes, torch.empty(0, dtype=torch.uint8)
        )
        self.held.callback(self.handle.free_cpu_locked_tensor, self.buffer)

    def writer(self, path: Path) -> Any:
        import deepspeed.io.fast_file_writer as writer

        config = writer.FastFileWriterConfig(
            dnvme_handle=self.handle, pinned_tensor=self.buffer, double_buffer=True
        )
        return writer.FastFileWriter(str(path), config)

    def save(self, state: State, target: Path) -> Save:
        writer = self.writer(target / "state.pt")
        torch.save(state, writer)
        writer.close()
        return Save(already, lambda: fsync_tree(target))

    def load(self, target: Path, template: State) -> Any:
        return torch.load(target / "state.pt", weights_only=True)


class DeepSpeedStorages(DeepSpeed):
    """FastFileWriter fed whole storages, as under DeepSpeed's own copy of torch's serialization.

    That copy exists for another torch and for the legacy format only, so the same thing is done
    here: the legacy header is written by torch and the storages are handed over in one list.
    """

    name = "deepspeed-storages"
    contract = "sync; legacy torch format, storages by list; FastFileWriter fsyncs the file"

    def save(self, state: State, target: Path) -> Save:
        dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        storages: list[tuple[torch.UntypedStorage, torch.dtype]] = []
        writer = self.writer(target / "state.pt")
        with collected_storages(lambda storage, size: storages.append((storage, dtypes[size]))):
            torch.save(state, writer, _use_new_zipfile_serialization=False)
        writer.save_torch_storage_object_list(storages, True)
        writer.close()
        return Save(already, lambda: fsync_tree(target))


@contextlib.contextmanager
def collected_storages(collect: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Make torch's legacy writer hand every storage to `collect` instead of writing it."""
    original = torch.UntypedStorage._write_file
    torch.UntypedStorage._write_file = lambda storage, file, real, sized, element_size: collect(
        storage, element_size
    )
    try:
        yield
    finally:
        torch.UntypedStorage._write_file = original


class Fastckpt(Peer):
    """fastckpt.save: everything is copied when the call returns."""

    name = "fastckpt"
    contract = "background engine; everything is copied when the call returns; durable at result()"
    background = True
    modules = ("fastckpt",)
    fence = "call"

    def __init__(self, staging_bytes: int | None = None) -> None:
        self.staging_bytes = staging_bytes

    def open(self) -> None:
        super().open()
        self.library = importlib.import_module("fastckpt")
        if not hasattr(self.library, "save"):
            raise ImportError("this fastckpt has no save()")

    def save(self, state: State, target: Path) -> Save:
        handle = self.library.save(
            state, target / "state.pt", fence=self.fence, staging_bytes=self.staging_bytes
        )
        return Save(handle.wait_staged, handle.result, lambda: asdict(handle.stats))

    def load(self, target: Path, template: State) -> Any:
        return self.library.load(target / "state.pt")


class FastckptStep(Fastckpt):
    """fastckpt.save under the step fence."""

    name = "fastckpt-step"
    contract = "background engine; copies behind, the next optimizer step waits for it"
    fence = "step"


PEERS: tuple[type[Peer], ...] = (
    TorchSave,
    TorchSaveNoCrc,
    Safetensors,
    Dcp,
    DcpAsync,
    DcpAsyncStager,
    TorchSnapshot,
    TorchSnapshotAsync,
    TorchCheckpointing,
    DeepSpeed,
    DeepSpeedStorages,
    Fastckpt,
    FastckptStep,
)
BASELINE = TorchSave.name


def open_peers(
    names: list[str] | None, progress: Callable[[str], None]
) -> tuple[list[Peer], dict[str, str]]:
    """Start the named peers (all when None).

    Returns those that run, and for each of the others its name and the reason.
    """
    known = {peer.name: peer for peer in PEERS}
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise SystemExit(f"unknown peers {', '.join(unknown)}; there are {', '.join(known)}")
    running, missing = [], {}
    for name in names or list(known):
        peer = known[name]()
        started = time.perf_counter()
        reason = peer.reason_missing()
        if reason is None:
            running.append(peer)
        else:
            missing[name] = reason
        progress(f"open {name}: {reason or f'{time.perf_counter() - started:.1f} s'}")
    return running, missing
