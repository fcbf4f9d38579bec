"""fastckpt: asynchronous checkpoints for PyTorch. This module has its public names.

The modules that save() and load() need are imported with the package, so that the first save does
not wait for an import; the others are imported when one of their names is first used. The command
line imports torch only for commands that need it.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec("fastckpt._engine") is None:
    raise ImportError(
        f"{os.path.dirname(__file__)!r} is fastckpt's source, which has no compiled engine: run "
        "Python in another directory to use the fastckpt that is installed, or build the engine "
        "there with `pip install -e .`"
    )

from fastckpt.engine.save_stats import SaveStats
from fastckpt.errors import (
    BackendUnavailable,
    CheckpointError,
    CorruptCheckpoint,
    DeviceError,
    IncompatibleCheckpoint,
    NoPath,
    PeerFailed,
    RanksDisagree,
    RootInUse,
    SaveCancelled,
    StagingConflict,
    StorageError,
    TruncatedFile,
)
from fastckpt.saving.handle import SaveHandle

# `python -m fastckpt` or the script: --help must not take as long as importing torch does.
_is_command_line = sys.orig_argv[1:3] == ["-m", "fastckpt"] or (
    [os.path.basename(argument) for argument in sys.orig_argv[1:2]] == ["fastckpt"]
)
if TYPE_CHECKING or not _is_command_line:
    from fastckpt.api.files import SaveOptions, load, prepare, save

if TYPE_CHECKING:
    from fastckpt.api.checkpointer import Checkpointer, Memory
    from fastckpt.api.weights import WeightPublisher
    from fastckpt.directories.export import export
    from fastckpt.lazy.into import load_into
    from fastckpt.lazy.open import open as open
    from fastckpt.lazy.tensors import LazyTensor, LazyTensors
    from fastckpt.lazy.weights import WeightSubscriber, WeightUpdate
    from fastckpt.ranks.stop_signals import StopSignals
    from fastckpt.state.fit import Differences
    from fastckpt.state.generators import Generators
    from fastckpt.state.resumable_loader import ResumableLoader
    from fastckpt.state.tree import PerRank

__version__ = "0.1.0"

__all__ = [  # without open: `import *` must not hide the built-in
    "BackendUnavailable",
    "CheckpointError",
    "Checkpointer",
    "CorruptCheckpoint",
    "DeviceError",
    "Differences",
    "Generators",
    "IncompatibleCheckpoint",
    "LazyTensor",
    "LazyTensors",
    "Memory",
    "NoPath",
    "PeerFailed",
    "PerRank",
    "RanksDisagree",
    "ResumableLoader",
    "RootInUse",
    "SaveCancelled",
    "SaveHandle",
    "SaveOptions",
    "SaveStats",
    "StagingConflict",
    "StopSignals",
    "StorageError",
    "TruncatedFile",
    "WeightPublisher",
    "WeightSubscriber",
    "WeightUpdate",
    "__version__",
    "export",
    "load",
    "load_into",
    "prepare",
    "save",
]

_NAMED_LATER = {
    "Checkpointer": "fastckpt.api.checkpointer",
    "Differences": "fastckpt.state.fit",
    "Generators": "fastckpt.state.generators",
    "LazyTensor": "fastckpt.lazy.tensors",
    "LazyTensors": "fastckpt.lazy.tensors",
    "Memory": "fastckpt.api.checkpointer",
    "PerRank": "fastckpt.state.tree",
    "ResumableLoader": "fastckpt.state.resumable_loader",
    "SaveOptions": "fastckpt.api.files",
    "StopSignals": "fastckpt.ranks.stop_signals",
    "WeightPublisher": "fastckpt.api.weights",
    "WeightSubscriber": "fastckpt.lazy.weights",
    "WeightUpdate": "fastckpt.lazy.weights",
    "export": "fastckpt.directories.export",
    "load": "fastckpt.api.files",
    "load_into": "fastckpt.lazy.into",
    "open": "fastckpt.lazy.open",
    "prepare": "fastckpt.api.files",
    "save": "fastckpt.api.files",
}

if not TYPE_CHECKING:  # or type checkers would take any name for one of the package

    def __getattr__(name: str) -> object:
        """Imports the module of a public name and returns the object of that name."""
        if name not in _NAMED_LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_NAMED_LATER[name]), name)
        return value

    def __dir__() -> list[str]:
        """Returns the public names, including those that are not imported yet."""
        return sorted({*__all__, *_NAMED_LATER})
