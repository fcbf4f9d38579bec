"""fastckpt: asynchronous checkpoints for PyTorch. The public names, nothing else."""

from fastckpt.api import load, save
from fastckpt.errors import (
    BackendUnavailable,
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    StagingConflict,
    StorageError,
)
from fastckpt.handle import SaveHandle, SaveStats

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "CorruptCheckpoint",
    "IncompatibleCheckpoint",
    "SaveHandle",
    "SaveStats",
    "StagingConflict",
    "StorageError",
    "__version__",
    "load",
    "save",
]
