"""The choice of the store that a root's steps lie in, and of its lease, by the root's path."""

from __future__ import annotations

from fastckpt.arguments.urls import is_mounted
from fastckpt.saving.lease import Lease
from fastckpt.steps.bucket import BucketSteps
from fastckpt.steps.bucket_lease import BucketLease
from fastckpt.steps.posix import PosixSteps
from fastckpt.steps.store import StepStore
from fastckpt.storage.file_system import Storage


def store_at(storage: Storage, root: str, lease: Lease | None = None) -> StepStore:
    """Returns the steps under a root; the arguments are StepStore's."""
    return (BucketSteps if is_mounted(root) else PosixSteps)(storage, root, lease)


def lease_at(storage: Storage, root: str) -> Lease:
    """Returns the lease of a root; the arguments are Lease's."""
    return (BucketLease if is_mounted(root) else Lease)(storage, root)
