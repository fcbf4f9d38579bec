"""Files of a checkpoint directory by name and size, and the directories of transformers' Trainer.

It must not read what is in the files.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from fastckpt.directories.shelf import numbered
from fastckpt.directories.verify import list_of
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.formats import file_list
from fastckpt.storage.file_system import Storage, reported

_OF_TRAINER = re.compile(r"checkpoint-(\d+)\Z")


def is_of_trainer(path: str) -> bool:
    """Whether a path has the name that Trainer gives to its checkpoints."""
    return _OF_TRAINER.match(os.path.basename(path)) is not None


def sizes_in(storage: Storage, path: str, *, is_deep: bool) -> dict[str, int]:
    """Returns the size of each file in a directory, by relative name; with `is_deep`, also of those
    in its subdirectories. Raises StorageError if the directory cannot be listed.
    """
    sizes: dict[str, int] = {}
    with reported("list", path):
        for name in sorted(storage.names(path)):
            inside = os.path.join(path, name)
            status = storage.status(inside)
            if status is None:  # it was removed meanwhile, or is a broken link
                continue
            if not stat.S_ISDIR(status.st_mode):
                sizes[name] = status.st_size
            elif is_deep and not os.path.islink(inside):
                below = sizes_in(storage, inside, is_deep=True)
                sizes |= {os.path.join(name, each): nbytes for each, nbytes in below.items()}
    return sizes


def fault(files: Mapping[str, file_list.File], sizes: Mapping[str, int]) -> str:
    """Returns a description of the first of the listed files that is missing or has another size;
    or "".
    """
    for name, file in files.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != file.nbytes:
            return f"{name} has {sizes[name]} bytes, must have {file.nbytes}"
    return ""


def trainer_rows(storage: Storage, run: str) -> Iterator[dict[str, Any]]:
    """Yields a row of `fastckpt ls` for each checkpoint of Trainer in a run's directory, the newest
    step first.
    """
    for step, path in numbered(run, _OF_TRAINER):
        row = {"path": path, "name": os.path.basename(path), "where": "root", "step": step}
        try:
            files = list_of(path, storage)
            sizes = sizes_in(storage, path, is_deep=True)
            with reported("status", path):
                saved_s = os.stat(path).st_mtime
        except CheckpointError as error:
            state = "unreadable" if isinstance(error, StorageError) else "damaged"
            yield {**row, "state": state, "why": str(error)}
            continue
        wrong = fault(files, sizes)
        state, why = ("committed", "") if files else (f"no {file_list.NAME}", "it is not verified")
        yield {
            **row,
            "state": "damaged" if wrong else state,
            "why": wrong or why,
            "nbytes": sum(sizes.values()),
            "saved": datetime.fromtimestamp(saved_s, timezone.utc).isoformat(),
            "listed_files": len(files),
        }
