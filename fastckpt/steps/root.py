"""The choice of the store that a root's steps lie in, by its path."""

from __future__ import annotations

from fastckpt.arguments.urls import is_mounted
from fastckpt.saving.lease import Lease
from fastckpt.steps.bucket import BucketSteps
from fastckpt.steps.posix import PosixSteps
from fastckpt.steps.store import StepStore
from fastckpt.storage.file_system import Storage
from fastckpt.storage.objects import PathStorage


def store_at(storage: Storage, root: str, lease: Lease | None = None) -> StepStore:
    """Returns the steps under a root; the arguments are StepStore's."""
    if is_mounted(root):
        assert isinstance(storage, PathStorage)
        return BucketSteps(storage, root, lease)
    return PosixSteps(storage, root, lease)
