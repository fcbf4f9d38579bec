"""`fastckpt doctor`: shows which methods fastckpt would use on this machine and in a directory, and
why.

The module shows decisions of storage, staging and the budget. It must not make decisions itself.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch

import fastckpt
from fastckpt.arguments.quantities import shown_size
from fastckpt.arguments.urls import is_mounted
from fastckpt.cli.shared_arguments import shown_name
from fastckpt.engine import devices, gds
from fastckpt.engine.staging import Route, crc32_kernel, default_budget_bytes, stager_count
from fastckpt.errors import BackendUnavailable, CheckpointError, StorageError
from fastckpt.saving import pipeline
from fastckpt.storage import atomic
from fastckpt.storage.object_botocore import foreign_keys
from fastckpt.storage.objects import WHY, objects_of

_NAME = "fastckpt-doctor"
_KEYS_TOLD = 10


class Row(NamedTuple):
    """One line of the report. is_wrong means that saves would fail, or that --gpu finds no GPU."""

    name: str
    text: str
    is_wrong: bool = False


def run(arguments: argparse.Namespace) -> int:
    directory = os.path.realpath(arguments.directory)
    rows = [*_machine(), *_directory(directory), *_libraries()]
    if arguments.gpu:
        rows += _gpu(directory)
    if arguments.json:
        print(json.dumps({"rows": [row._asdict() for row in rows]}, indent=1))
    else:
        width = max(len(row.name) for row in rows)
        print(*(f"{row.name:{width}}  {shown_name(row.text)}" for row in rows), sep="\n")
    return int(any(row.is_wrong for row in rows))


def _machine() -> Iterator[Row]:
    yield Row("fastckpt", f"{fastckpt.__version__}, torch {torch.__version__}")
    yield Row("kernel", f"Linux {platform.release()}, {platform.machine()}")
    cpus = len(os.sched_getaffinity(0))
    yield Row("CPUs", f"{cpus}, {stager_count()} of them copy and checksum")
    yield Row("CRC-32", crc32_kernel())
    try:
        yield Row("staging memory", f"at most {shown_size(default_budget_bytes())} now")
    except ValueError as error:
        yield Row("staging memory", str(error), True)


def _directory(directory: str) -> Iterator[Row]:
    """Yields rows that describe how a save to the directory would write, after a test with one
    page.
    """
    yield Row("directory", directory)
    current = pipeline.current()
    path = os.path.join(directory, _NAME)
    try:
        if is_mounted(directory):
            objects_of(current.storage).probe(path)
            with closing(objects_of(current.storage).upload(path, 0)) as upload:
                yield from _ways(WHY, partial(current.staging.upload_route, upload))
            yield from _foreign(directory)
            return
        with atomic.temporary(current.storage, path) as (fd, name):
            try:
                kind, policy = current.storage.policy(fd)
                route = partial(current.staging.route, fd, path, writing=True)
                yield from _ways(f"{kind}: {policy.why}", route)
            finally:
                current.storage.remove(name)
    except (CheckpointError, OSError) as error:
        yield Row("saves", f"impossible: {error}", True)


def _ways(why: str, route: Callable[[str], Route]) -> Iterator[Row]:
    yield Row("file system", why)
    yield Row("backend", _told(route("auto")))
    yield Row("io_uring", _ring(route))


def _foreign(root: str) -> Iterator[Row]:
    """Yields a row that lists other programs' objects, which are ignored because no path can have
    their keys.
    """
    try:
        keys = foreign_keys(root)
    except StorageError as error:
        yield Row("foreign keys", f"cannot be listed: {error}")
        return
    if keys:
        more = f" and {len(keys) - _KEYS_TOLD} more" if len(keys) > _KEYS_TOLD else ""
        named = ", ".join(map(repr, keys[:_KEYS_TOLD])) + more
        yield Row("foreign keys", f"objects of other programs, which are ignored: {named}")


def _told(route: Route) -> str:
    return f"{route.sink.name}, {'O_DIRECT' if route.direct else 'buffered'}: {route.why}"


def _ring(route: Callable[[str], Route]) -> str:
    try:
        route("io_uring")
    except BackendUnavailable as error:
        return str(error)
    return "works"


def _libraries() -> Iterator[Row]:
    """Yields rows that show whether GPU libraries can be loaded; loading does not initialise
    them.
    """
    for name, library in (("GPU driver", devices.LIBRARY), ("cuFile", gds.LIBRARY)):
        try:
            ctypes.CDLL(library)
            yield Row(name, f"{library} found")
        except OSError as error:
            yield Row(name, f"not found: {error}")
    yield Row(
        "torch", f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    )


def _gpu(directory: str) -> Iterator[Row]:
    if not torch.cuda.is_available():
        yield Row("GPU", "torch finds none", True)
        return
    for number in range(torch.cuda.device_count()):
        yield Row(f"GPU {number}", torch.cuda.get_device_name(number))
    staging = pipeline.current().staging
    storage = torch.zeros(1, device="cuda").untyped_storage()
    if "cuda" not in staging.devices.readable():
        yield Row("copies", "by torch, within save(), because the driver cannot be used")
        return
    yield Row("copies", "to pinned memory, while the GPU computes")
    queue = staging.devices.reads([storage]).ranges[0].queue
    direct, refusal = staging.gds.way("gds", queue)
    if direct is None:
        yield Row("GPUDirect Storage", refusal)
        return
    path = os.path.join(directory, _NAME)
    current = pipeline.current()
    try:
        with atomic.temporary(current.storage, path) as (fd, name):
            try:
                current.storage.set_direct(fd, writing=True)
                sink, mode = direct.begin_file(fd)
                direct.end_file(sink)
                yield Row("GPUDirect Storage", mode)
            finally:
                current.storage.remove(name)
    except (CheckpointError, OSError) as error:
        yield Row("GPUDirect Storage", f"could not be tried: {error}")
