"""Steps that somebody has changed and sealed again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fastckpt

WAIT_S = 60.0
ALLOWED_MIB = 64


def sealed_bytes(content: bytes) -> bytes:
    """This, with its digest at its end as a manifest has it."""
    digest = hashlib.sha256(content).hexdigest()
    return content + f',"sha256":"{digest}"}}\n'.encode()


@contextmanager
def small_shards() -> Iterator[None]:
    """Saves put tensors of any size into the shards, so that a file of theirs can be small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastckpt.state.tree.SMALL_BYTES", 1)
        yield


class Harm:
    """Unpickled, it would leave a trace."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


class Forgery:
    """Changes the JSON of a step and makes every digest right again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._manifest = directory / "manifest.json"

    def manifest(self, change: Callable[[dict[str, Any]], Any]) -> None:
        written = json.loads(self._manifest.read_bytes())
        del written["sha256"]
        change(written)
        self.sign(json.dumps(written, separators=(",", ":")))

    def sign(self, text: str) -> None:
        """Of a manifest as JSON, whatever it says; its closing brace is replaced."""
        body = text[:-1].encode()
        digest = hashlib.sha256(body).hexdigest()
        self._manifest.write_bytes(body + f',"sha256":"{digest}"}}\n'.encode())

    def index(self, change: Callable[[dict[str, Any]], Any]) -> None:
        path = self.directory / "rank-00000.json"
        written = json.loads(path.read_bytes())
        change(written)
        self.index_text(json.dumps(written, separators=(",", ":")))

    def index_text(self, text: str) -> None:
        content = text.encode()
        (self.directory / "rank-00000.json").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        self.manifest(
            lambda m: m["writers"][0].update(index_nbytes=len(content), index_sha256=digest)
        )

    def shard(self, content: bytes, **index: Any) -> None:
        """Another shard, of one block."""
        (self.directory / "rank-00000.safetensors").write_bytes(content)
        sizes = {"file_nbytes": len(content), "nbytes": len(content)}
        crc32 = f"{zlib.crc32(content):08x}"
        self.manifest(lambda m: m["writers"][0].update(nbytes=len(content)))
        self.index(lambda i: i.update(crc32=crc32, **(sizes | index)))

    def objects(self, nest: Any) -> None:
        path = self.directory / "objects.pt"
        fastckpt.save(nest, path).result(WAIT_S)
        content = path.read_bytes()
        crc32 = content[-8:].decode()
        self.manifest(lambda m: m["objects"].update(nbytes=len(content), crc32=crc32))


def resident_mib() -> float:
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


@contextmanager
def little_memory() -> Iterator[None]:
    """The process grows by at most ALLOWED_MIB meanwhile, even for a moment."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_mib()
    yield
    grown = resident_mib() - before
    assert grown < ALLOWED_MIB, f"took {grown:.0f} MiB"
