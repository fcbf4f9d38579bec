"""fastckpt: asynchronous checkpoints for PyTorch. The public names, nothing else."""

from fastckpt.api import load, prepare, save
from fastckpt.api import open as open  # not in __all__: `import *` must not hide the built-in
from fastckpt.checkpointer import Checkpointer
from fastckpt.directories.export import HuggingFace, export
from fastckpt.errors import (
    BackendUnavailable,
    CheckpointError,
    CorruptCheckpoint,
    DeviceError,
    IncompatibleCheckpoint,
    PeerFailed,
    RanksDisagree,
    SaveCancelled,
    StagingConflict,
    StorageError,
)
from fastckpt.handle import SaveHandle, SaveStats
from fastckpt.lazy.into import load_into
from fastckpt.lazy.tensors import LazyTensor, LazyTensors
from fastckpt.state.fit import Differences
from fastckpt.state.tree import PerRank

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "Checkpointer",
    "CorruptCheckpoint",
    "DeviceError",
    "Differences",
    "HuggingFace",
    "IncompatibleCheckpoint",
    "LazyTensor",
    "LazyTensors",
    "PeerFailed",
    "PerRank",
    "RanksDisagree",
    "SaveCancelled",
    "SaveHandle",
    "SaveStats",
    "StagingConflict",
    "StorageError",
    "__version__",
    "export",
    "load",
    "load_into",
    "prepare",
    "save",
]
