"""fastckpt as a checkpoint mechanism of DLIO, which is loaded by its name (docs/project/dlio.md).

DLIO calls save_state() for each file of a rank, one after the other, and its clock stops when
save_checkpoint() returns. Must not know how a benchmark compares mechanisms. The metadata has what
DLIO's PyTorch part imports, and an MPI; its own list has TensorFlow and DALI, too.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["mpich==5.0.2", "mpi4py==4.1.2", "hydra-core==1.3.2", "omegaconf==2.3.1",
#   "pydftracer==2.0.6", "h5py==3.16.0", "pandas==3.1.1", "psutil==7.2.2", "pillow==13.0.0"]
# ///

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing

import fastckpt

READERS = 4  # files of a rank that are read at a time


class TorchSaveSynced(PyTorchCheckpointing):
    """DLIO's own mechanism with an fsync of each file: what `fsync: True` asks for in DLIO's
    configuration is stored under another name than the one that it reads.
    """

    _only: ClassVar[Any] = None

    @classmethod
    def get_instance(cls) -> Any:
        """Return the one mechanism of this process."""
        if cls._only is None:
            cls._only = cls()
        return cls._only

    def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:
        """Write one file."""
        super().save_state(suffix, state, True)


class FastckptBehind(TorchSaveSynced):
    """fastckpt.save for each file, written while DLIO goes on: its clock tells how long training
    would have waited. What is in flight is waited for before the next checkpoint and at the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begun: list[fastckpt.SaveHandle] = []
        self._readers: ThreadPoolExecutor
        self._read: list[Future[Any]] = []

    def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:
        """Begin one file."""
        self._begun.append(fastckpt.save(state, self.get_name(suffix)))

    def load_state(self, suffix: str, state: Any) -> None:
        """Begin to read one file, verified."""
        self._read.append(self._readers.submit(fastckpt.load, self.get_name(suffix)))

    def wait(self) -> None:
        """Wait until all that was begun has ended; raises the error of the first that failed."""
        begun, self._begun = self._begun, []
        errors = [error for handle in begun if (error := handle.exception()) is not None]
        if errors:
            raise errors[0]

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        """Begin all files of this rank."""
        self.wait()
        super().save_checkpoint(epoch, step_number)

    def load_checkpoint(self, epoch: int, step_number: int) -> None:
        """Read all files of this rank; as DLIO's own does, it drops what it has read."""
        self.wait()
        with ThreadPoolExecutor(READERS) as self._readers:
            super().load_checkpoint(epoch, step_number)
        while self._read:
            assert self._read.pop(0).result()

    def finalize(self) -> None:
        """End, with nothing in flight."""
        self.wait()
        super().finalize()


class Fastckpt(FastckptBehind):
    """The same, durable when save_checkpoint() returns: all files are begun, then waited for."""

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        """Write all files of this rank."""
        try:
            super().save_checkpoint(epoch, step_number)
        finally:
            self.wait()
