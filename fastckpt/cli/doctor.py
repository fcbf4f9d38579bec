"""`fastckpt doctor`: what fastckpt would do here, and why.

Responsible for showing what storage, staging and the budget decide for a directory, and what of GPU
libraries is there. It must not decide anything itself.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
from collections.abc import Iterator
from typing import Any

import torch

import fastckpt
from fastckpt import budget, commit, devices, gds, pipeline
from fastckpt.errors import BackendUnavailable, CheckpointError
from fastckpt.quantities import shown_size
from fastckpt.staging import Route, crc32_kernel, stager_count

_NAME = "fastckpt-doctor"


def add_arguments(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show what fastckpt does on this machine and in a directory, and why",
        description="Shows file system, backend, O_DIRECT, staging memory and GPU libraries, with "
        "the reasons. Writes one page to a file in DIR, and removes it.",
    )
    parser.add_argument("directory", nargs="?", default=".", metavar="DIR", help="default: .")
    parser.add_argument(
        "--gpu", action="store_true", help="use the GPU to find out more; else it stays untouched"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    directory = os.path.realpath(arguments.directory)
    rows = [*_machine(), *_directory(directory), *_libraries()]
    if arguments.gpu:
        rows += _gpu(directory)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:{width}}  {text}")
    return 0


def _machine() -> Iterator[tuple[str, str]]:
    yield "fastckpt", f"{fastckpt.__version__}, torch {torch.__version__}"
    yield "kernel", f"Linux {platform.release()}, {platform.machine()}"
    yield "CPUs", f"{len(os.sched_getaffinity(0))}, {stager_count()} of them copy and checksum"
    yield "CRC-32", crc32_kernel()
    try:
        yield "staging memory", f"at most {shown_size(budget.default_budget_bytes())} now"
    except ValueError as error:
        yield "staging memory", str(error)


def _directory(directory: str) -> Iterator[tuple[str, str]]:
    """What saves to a directory would do, found out by doing it to one page."""
    yield "directory", directory
    current = pipeline.current()
    path = os.path.join(directory, _NAME)
    try:
        with commit.temporary(current.storage, path) as (fd, name):
            try:
                kind, policy = current.storage.policy(fd)
                yield "file system", f"{kind}: {policy.why}"
                yield "backend", _told(current.staging.route(fd, path, "auto", writing=True))
                yield "io_uring", _ring(fd, path)
            finally:
                current.storage.remove(name)
    except (CheckpointError, OSError) as error:
        yield "saves", f"impossible: {error}"


def _told(route: Route) -> str:
    return f"{route.backend.name}, {'O_DIRECT' if route.direct else 'buffered'}: {route.why}"


def _ring(fd: int, path: str) -> str:
    try:
        pipeline.current().staging.route(fd, path, "io_uring", writing=True)
    except BackendUnavailable as error:
        return str(error)
    return "works"


def _libraries() -> Iterator[tuple[str, str]]:
    """Looked for by loading them, which initialises nothing."""
    for name, library in (("GPU driver", devices.LIBRARY), ("cuFile", gds.LIBRARY)):
        try:
            ctypes.CDLL(library)
            yield name, f"{library} found"
        except OSError as error:
            yield name, f"not found: {error}"
    yield "torch", f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"


def _gpu(directory: str) -> Iterator[tuple[str, str]]:
    if not torch.cuda.is_available():
        yield "GPU", "torch finds none"
        return
    for number in range(torch.cuda.device_count()):
        yield f"GPU {number}", torch.cuda.get_device_name(number)
    staging = pipeline.current().staging
    storage = torch.zeros(1, device="cuda").untyped_storage()
    if "cuda" not in staging.devices.readable():
        yield "copies", "by torch, within save(): the driver cannot be used"
        return
    yield "copies", "beside compute, to pinned memory"
    queue = staging.devices.reads([storage]).ranges[0].queue
    direct, refusal = staging.gds.way("gds", queue, 0)
    if direct is None:
        yield "GPUDirect Storage", refusal
        return
    path = os.path.join(directory, _NAME)
    current = pipeline.current()
    try:
        with commit.temporary(current.storage, path) as (fd, name):
            try:
                current.storage.set_direct(fd, writing=True)
                yield "GPUDirect Storage", direct.begin_file(fd)
                direct.end_file(fd)
            finally:
                current.storage.remove(name)
    except (CheckpointError, OSError) as error:
        yield "GPUDirect Storage", f"could not be tried: {error}"
