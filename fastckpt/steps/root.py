"""The choice of the store for a root, by the root's path."""

from __future__ import annotations

from fastckpt.arguments.urls import is_mounted
from fastckpt.saving.lease import Lease
from fastckpt.steps.bucket import BucketSteps
from fastckpt.steps.posix import PosixSteps
from fastckpt.steps.store import StepStore
from fastckpt.storage.file_system import Storage


def store_at(storage: Storage, root: str, lease: Lease | None = None) -> StepStore:
    """Returns the steps under a root. For the arguments see StepStore."""
    return (BucketSteps if is_mounted(root) else PosixSteps)(storage, root, lease)
