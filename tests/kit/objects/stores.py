"""Stores as other clients see them."""

from __future__ import annotations

import threading
from typing import Any

from fastckpt.storage.objects import DROPPING
from tests.kit.objects.weed import BUCKET, options


def settle() -> None:
    """Waits until what was left over is removed, for which no save waits."""
    for thread in threading.enumerate():
        if thread.name == DROPPING:
            thread.join()


def store_at(port: int, bucket: str = BUCKET) -> Any:
    """obstore's own store for a bucket of the server at this port."""
    from obstore.store import S3Store

    config = options(port)
    return S3Store(bucket, client_options=config.pop("client_options"), **config)
