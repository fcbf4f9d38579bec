"""SGLang's servers load whole directories: those that the adapter writes, by its request; and a
server that does not load is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt import CheckpointError, StorageError, WeightSubscriber
from fastckpt.integrations.sglang import load
from tests.kit.inference import DiskLoader
from tests.kit.weights import Weights, assert_same, publishing, root, weights

__all__ = ["root"]


@pytest.fixture
def servers() -> Iterator[list[DiskLoader]]:
    made = [DiskLoader(), DiskLoader()]
    yield made
    for each in made:
        each.close()


def test_servers_load_each_version(servers: list[DiskLoader], root: Path, disk: Path) -> None:
    config, directory = disk / "config.json", disk / "policy"
    config.write_text("{}")
    urls = [each.url for each in servers]
    with publishing(root) as publish, WeightSubscriber(root) as subscriber:
        paths = []
        for version in (1, 2, 3):
            publish(version)
            load(
                subscriber.wait_for(version),
                [urls[0], urls[1] + "/"],
                directory,
                files=[config],
                flush_cache=False,
            )
            for each in servers:
                assert_same(dict(sorted(each.weights.items())), sorted_weights(version))
                path = each.requests[-1].pop("model_path")
                assert each.requests[-1] == {"weight_version": str(version), "flush_cache": False}
                assert Path(path).parent == directory
                assert (Path(path) / "config.json").read_text() == "{}"
            paths.append(path)
        assert paths[0] != paths[1] and paths[2] == paths[0], "two directories take turns"


def sorted_weights(version: int) -> Weights:
    return dict(sorted(weights(version).items()))


def test_a_server_that_does_not_load_is_named(
    servers: list[DiskLoader], root: Path, disk: Path
) -> None:
    servers[1].refusal = "no memory is left"
    gone = DiskLoader()
    gone.close()
    with publishing(root) as publish, WeightSubscriber(root) as subscriber:
        publish(1)
        urls = [servers[0].url, servers[1].url, gone.url]
        with pytest.raises(CheckpointError, match="1 was loaded by 1 of 3") as told:
            load(subscriber.wait_for(1), urls, disk / "policy")
        assert re.search(rf"{servers[1].url}: .*no memory is left", str(told.value))
        assert f"{gone.url}: " in str(told.value) and f"{servers[0].url}: " not in str(told.value)
        with pytest.raises(ValueError, match=r"'host:30000' must begin with http"):
            load(subscriber.wait_for(1), [urls[0], "host:30000"], disk / "policy")
        with pytest.raises(CheckpointError, match="unknown request"):
            load(subscriber.wait_for(1), urls[:1], disk / "policy", unknown=1)


def test_without_a_directory_no_server_is_asked(
    servers: list[DiskLoader], root: Path, disk: Path
) -> None:
    (disk / "file").write_text("")
    with publishing(root) as publish, WeightSubscriber(root) as subscriber:
        publish(1)
        with pytest.raises(StorageError):
            load(subscriber.wait_for(1), [servers[0].url], disk / "file" / "policy")
        assert servers[0].requests == []
