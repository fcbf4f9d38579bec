"""Weights in a bucket: a subscriber has exactly one published version's bytes there, too, by chains
of differences, of damaged ones none; and opens a version by its own URL.
"""

from __future__ import annotations

from typing import Any

import pytest

import fastckpt
from fastckpt import WeightPublisher, WeightSubscriber
from fastckpt.errors import CheckpointError
from tests.kit.objects.stores import settle
from tests.kit.objects.weed import BUCKET, Weed, options
from tests.kit.weights import WAIT_S, assert_is, assert_same, weights


def shards(store: Any, root: str) -> list[str]:
    """The keys of the shards of differences below a root, by version."""
    prefix = root.removeprefix(f"s3://{BUCKET}/") + "/"
    found = [each["path"] for each in store.list(prefix).collect()]
    return sorted(path for path in found if path.endswith(".planes"))


def test_versions_of_a_bucket(weed: Weed, root: str, bare: Any, client: Any) -> None:
    told = options(weed.port)
    with (
        WeightPublisher(root, keep=1, full_every=4, storage_options=told) as publisher,
        WeightSubscriber(root, storage_options=told) as beside,
    ):
        assert beside.next() is None
        urls = []
        for version in (1, 2, 3):
            handle = publisher.publish(weights(version), version)
            handle.result(WAIT_S)
            urls.append(handle.path)
            assert_is(beside.next(), version)
        settle()
        for version, url in enumerate(urls, 1):  # all are needed by the last one
            with fastckpt.open(url, storage_options=told) as tensors:
                assert_same({name: tensors[name][...] for name in tensors}, weights(version))
        of_second, _of_third = shards(bare, root)
        content = bytearray(bytes(client.get(bare, of_second).bytes()))
        content[len(content) // 2] ^= 1
        client.put(bare, of_second, bytes(content))
        for url in urls[1:]:
            with (
                pytest.raises(CheckpointError),
                fastckpt.open(url, storage_options=told) as tensors,
            ):
                [tensors[name][...] for name in tensors]
        with WeightSubscriber(root, storage_options=told) as fresh:
            assert_is(fresh.next(), 1)
            publisher.publish(weights(4), 4).result(WAIT_S)
            assert_is(beside.next(), 4)  # which holds version 3
            assert fresh.next() is None
            publisher.publish(weights(5), 5).result(WAIT_S)
            assert_is(fresh.next(), 5)
            assert_is(beside.next(), 5)
