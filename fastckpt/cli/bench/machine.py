"""The description of the measured machine for the JSON, and control of its page cache."""

from __future__ import annotations

import mmap
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors
import torch

import fastckpt
from fastckpt.saving import pipeline
from fastckpt.storage.file_system import cached_share
from fastckpt.storage.machine import memory_left_bytes

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_CHUNK = 8 << 20
_PAGE = 4096


def environment(directory: str) -> dict[str, Any]:
    """Returns the hardware, kernel, file system and versions."""
    storage = pipeline.current().storage
    fd = storage.open(directory, "directory")
    try:
        file_system = storage.policy(fd)[0]
    finally:
        storage.close(fd)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "directory": directory,
        "file_system": file_system,
        "kernel": f"Linux {platform.release()}, {platform.machine()}",
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": [torch.cuda.get_device_name(number) for number in range(gpus)],
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "fastckpt": fastckpt.__version__,
    }


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def touch_memory(nbytes: int) -> None:
    """Allocates `nbytes` of memory, or half of the available memory, writes a byte of each page,
    and frees it. A virtual machine's host may have reclaimed free pages, and their first use costs
    up to 2.5 s per GiB.
    """
    nbytes = min(nbytes, memory_left_bytes() // 2)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, max(nbytes, _PAGE), flags=private) as memory:
        # With huge pages, which are split if small pages are needed; small pages are not merged.
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        torch.frombuffer(memory, dtype=torch.uint8)[::_PAGE].fill_(1)


def make_cold(path: Path) -> str:
    """Drops a durable file from the page cache; returns the method.

    The caches of the whole machine are dropped only if a part of the file stays otherwise, and if
    this is allowed.
    """
    storage = pipeline.current().storage
    fd = storage.open(str(path))
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not cached_share(fd):
            return "posix_fadvise"
        try:
            _DROP_CACHES.write_text("1")
            way = "posix_fadvise, drop_caches"
        except OSError:
            way = "posix_fadvise"
        share = cached_share(fd)
        return f"{way}; {share:.0%} of a file stayed in the page cache" if share > 0.005 else way
    finally:
        storage.close(fd)


def make_warm(path: Path) -> None:
    """Reads a file into the page cache."""
    with open(path, "rb", buffering=0) as file:
        while file.read(_CHUNK):
            pass


def fsync_path(path: Path) -> None:
    """Makes a file or a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def removed(path: Path) -> None:
    """Removes a file durably, so that the next measurement does not include the removal."""
    path.unlink()
    pipeline.current().storage.sync_directory(str(path.parent))
