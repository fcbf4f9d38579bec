"""Chooses between pinned staging and GPUDirect for a save, from a timed trial of both, which leaves
no file behind. It must not know cuFile, or what saves write.
"""

from __future__ import annotations

import os
import threading
import time

import torch

from fastckpt.engine.devices import DeviceSources
from fastckpt.engine.gds import GdsDevice
from fastckpt.engine.staging import Staging, stager_count
from fastckpt.engine.transfer import ImageTransfer
from fastckpt.errors import CheckpointError
from fastckpt.handle import SaveStats
from fastckpt.plan.image import BLOCK_BYTES, Image
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage, reported

TRIAL_BLOCKS = 32  # 256 MiB, written six times
_NAME = "fastckpt-trial"


class Choice:
    """The choice between pinned staging and GPUDirect for one save.

    Args:
        way: "host", "gds" or "auto".
        reads: the memory of GPUs that the save reads.
    """

    def __init__(self, storage: Storage, staging: Staging, way: str, reads: DeviceSources) -> None:
        self._storage = storage
        self._staging = staging
        self._way = way
        self._reads = reads
        self._undecided: tuple[str, int] | None = None  # a directory, and its file system

    def direct(self, directory: str, stats: SaveStats) -> GdsDevice | None:
        """Returns what writes from a GPU straight to a directory's files, if that is chosen.

        Raises:
            StorageError: stat(2) of the directory fails.
        """
        if self._way == "host" or not self._reads.ranges:
            return None
        with reported("stat", directory):
            status = self._storage.status(directory)
        number = 0 if status is None else status.st_dev
        gds = self._staging.gds
        if status is not None and gds.undecided(self._way, self._reads, number):
            self._undecided = directory, number
        direct, why = gds.way(self._way, self._reads.ranges[0].queue, number)
        if direct is None:
            stats.staging_why = why
        return direct

    def learn(self) -> None:
        """Runs the trial for later saves, if there was none; call it when the save is over."""
        undecided, device = self._undecided, self._reads.device
        self._undecided, self._reads = None, DeviceSources()
        if undecided is None or device is None or not threading.main_thread().is_alive():
            return
        directory, number = undecided
        gds = self._staging.gds
        try:
            content = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=device)
            trial = _Trial(self._storage, self._staging, os.path.join(directory, _NAME), content)
            gds.decide(number, trial.reads.ranges[0].queue, trial.seconds)
        except (CheckpointError, OSError, RuntimeError, MemoryError) as error:
            gds.note(number, False, f"it could not be measured: {error}")

    def give_up(self) -> None:
        """Leaves the trial to a later save; call it when the save has failed."""
        if self._undecided is not None:
            self._staging.gds.give_up(self._undecided[1])
        self._undecided, self._reads = None, DeviceSources()


class _Trial:
    """A trial file of TRIAL_BLOCKS copies of one GPU block, which is removed again."""

    def __init__(
        self, storage: Storage, staging: Staging, path: str, content: torch.Tensor
    ) -> None:
        self._storage = storage
        self._staging = staging
        self._path = path
        self.reads = staging.devices.reads([content.untyped_storage()])
        self._image = Image.tailless(content)
        for _ in range(TRIAL_BLOCKS):
            self._image.append(content.data_ptr(), BLOCK_BYTES)

    def seconds(self, direct: GdsDevice | None) -> float:
        """Returns after how many seconds the file is durable, written by `direct` or the host."""
        storage, staging, path, image = self._storage, self._staging, self._path, self._image
        with atomic.temporary(storage, path) as (fd, name):
            route = staging.route(fd, path, "auto", writing=True)
            with reported("allocate", path):
                storage.allocate(fd, image.body_nbytes)
            begun = time.perf_counter()
            allowance = staging.allowance(None)
            with ImageTransfer(
                staging, image, path, allowance, stager_count(), self.reads, direct
            ) as transfer:
                transfer.write_to(fd, 0, route)
                transfer.wait_written()
            atomic.settle(storage, fd, path, durable=True)
            took_s = time.perf_counter() - begun
            storage.remove(name)
        return took_s
