"""File systems that tests mount: small ones, and ones that hang."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit import compiler
from tests.kit.paths import TESTS
from tests.kit.saves import wait_until

MIB = 1 << 20
# The smallest that mkfs makes without special options, and room for a few checkpoints.
DISK_BYTES = {"ext2": 64 * MIB, "ext4": 64 * MIB, "xfs": 320 * MIB, "btrfs": 256 * MIB}
MKFS_OPTIONS = {"ext2": ["-q"], "ext4": ["-q"], "xfs": ["-q"], "btrfs": ["-q"]}
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror")


def run_as_root(*command: str) -> None:
    """Runs a command of mount(8) and its kind; where it is not allowed, the test is skipped."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"{command[0]} does not work here: {result.stderr.strip()}")


@contextmanager
def mounted(kind: str, disk: Path, nbytes: int = 0, options: str = "") -> Iterator[Path]:
    """A new file system of this kind, on a loop device unless it lives in memory."""
    point = disk / f"mount-{kind}"
    point.mkdir()
    wanted = [options] if options else []
    image = disk / f"{kind}.img"
    if kind in ("tmpfs", "ramfs"):
        wanted += [f"size={nbytes}"] if nbytes else []
        source = ["none"]
    else:
        with image.open("wb") as file:
            file.truncate(nbytes or DISK_BYTES[kind])
        run_as_root(f"mkfs.{kind}", *MKFS_OPTIONS[kind], str(image))
        wanted.append("loop")
        source = [str(image)]
    run_as_root(
        "mount", "-t", kind, *(["-o", ",".join(wanted)] if wanted else []), *source, str(point)
    )
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)
        image.unlink(missing_ok=True)
        point.rmdir()


def leave_free(directory: Path, nbytes: int) -> Path:
    """Fills the file system of a directory until so much is left; returns the file to remove."""
    ballast = directory / "ballast"
    free = os.statvfs(directory)
    with ballast.open("wb") as file:
        for _ in range(4):  # its own metadata takes space as well
            more = free.f_bfree * free.f_frsize - nbytes
            if more > 0:
                os.posix_fallocate(file.fileno(), file.tell(), more)
                file.seek(0, io.SEEK_END)
            os.fsync(file.fileno())
            free = os.statvfs(directory)
    return ballast


class Mount(NamedTuple):
    """A mounted directory, the one that has its files, and the file that asks for a fault."""

    point: Path
    files: Path
    control: Path


def fuse_flags() -> list[str]:
    """How to compile for libfuse; without it, or FUSE itself, the test is skipped."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse here")
    if not os.path.exists("/usr/include/fuse3/fuse.h"):
        pytest.skip("libfuse is missing (apt-get install libfuse3-dev)")
    return ["-D_FILE_OFFSET_BITS=64", "-lfuse3"]


@contextmanager
def mounted_fuse(disk: Path, cache: str) -> Iterator[Mount]:
    """Mounts a FUSE file system, of which the kernel caches writes if `cache` is "back"."""
    source = TESTS / "stubs" / "fuse_files.cc"
    library = compiler.library(disk, "fuse_files.so", source, *FLAGS, *fuse_flags())
    mount = Mount(disk / "mount", disk / "files", disk / "fault")
    mount.point.mkdir()
    mount.files.mkdir()
    serve = (
        "import ctypes, sys; arguments = [b'fuse_files', *map(str.encode, sys.argv[2:])];"
        "array = (ctypes.c_char_p * (len(arguments) + 1))(*arguments);"
        "sys.exit(ctypes.CDLL(sys.argv[1]).serve(len(arguments), array))"
    )
    arguments = [library, mount.files, mount.control, cache, mount.point, "-f"]
    daemon = subprocess.Popen(
        [sys.executable, "-S", "-c", serve, *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(
            lambda: os.path.ismount(mount.point) or daemon.poll() is not None, "FUSE is mounted"
        )
        if daemon.poll() is not None:
            pytest.skip(f"FUSE does not work here: {daemon.communicate()[1].strip()}")
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount.point)], check=False)
        daemon.communicate(timeout=60)


def file_system(path: Path) -> str:
    """Type of the file system that holds `path`, as /proc/self/mounts names it."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    holding = [(len(point), kind) for point, kind in mounts if path.is_relative_to(point)]
    return max(holding)[1]
