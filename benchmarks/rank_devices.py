"""Disks of a known speed: ext4 on loop devices, each throttled for the processes that are given it.

It owns devices, file systems and the cgroup, and takes all of them away again, whatever happens. It
must not know what is written to them.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from report import mount_of

BLKIO = Path("/sys/fs/cgroup/blkio")  # cgroup v1: the kernel throttles direct and buffered writes
PROGRAMS = ("losetup", "mkfs.ext4", "mount", "unshare")
METADATA_BYTES = 64 << 20
GONE_S = 10.0  # a namespace, and what is mounted in it, outlives its last process by moments
# Mounts a device for one process alone, throttles that, and becomes it: the process id stays.
ENTER = 'mount -t ext4 "$1" "$2" && echo $$ > "$3/cgroup.procs" && shift 3 && exec "$@"'


def reason_missing() -> str | None:
    """Return why there can be no such disks here, or None when there can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not (BLKIO / "blkio.throttle.write_bps_device").exists():
        return "there is no cgroup v1 blkio controller that throttles"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


@dataclass(frozen=True)
class Disks:
    """Throttled devices, and where each process that asks for one finds it mounted.

    Attributes:
        devices: paths of the loop devices.
        mountpoint: of the device that a process was given; empty to everybody else.
        cgroup: in which the devices are slow.
        write_bps: bytes a second that may be written to each.
    """

    devices: tuple[str, ...]
    mountpoint: Path
    cgroup: Path
    write_bps: int

    def given(self, number: int) -> list[str]:
        """Return what a command line begins with whose process has that device, alone."""
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh"]
        return [*enter, self.devices[number], str(self.mountpoint), str(self.cgroup)]


@contextmanager
def throttled(count: int, nbytes: int, write_bps: int, backing: Path) -> Iterator[Disks]:
    """Make disks, and remove them in the end.

    Args:
        count: how many.
        nbytes: what each can hold.
        write_bps: bytes a second that may be written to each.
        backing: directory for the files behind them; fast, with room for all.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disk-", dir=backing)))
        mountpoint = folder / "mounted"
        mountpoint.mkdir()
        cgroup = stack.enter_context(_cgroup())
        devices = [
            stack.enter_context(_device(folder / f"{number}.img", nbytes + METADATA_BYTES))
            for number in range(count)
        ]
        for device in devices:
            number = os.stat(device).st_rdev
            rule = f"{os.major(number)}:{os.minor(number)} {write_bps}"
            (cgroup / "blkio.throttle.write_bps_device").write_text(rule)
        yield Disks(tuple(devices), mountpoint, cgroup, write_bps)


@contextmanager
def _cgroup() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="fastckpt-bench-", dir=BLKIO))
    try:
        yield path
    finally:
        patiently(path.rmdir)


@contextmanager
def _device(image: Path, nbytes: int) -> Iterator[str]:
    """A loop device with an ext4 on it, behind which lies the new file `image`."""
    with open(image, "wb") as file:
        file.truncate(nbytes)
    is_memory = mount_of(image.parent)["filesystem"] == "tmpfs"
    direct = "off" if is_memory else "on"
    try:
        device = run("losetup", "--find", "--show", f"--direct-io={direct}", str(image)).strip()
        assert stat.S_ISBLK(os.stat(device).st_mode)
        run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        yield device
    finally:
        # While it is mounted somewhere still, it goes as soon as it is not. Asked by the file: the
        # number may be somebody else's by then.
        for name in run("losetup", "-j", str(image), "-n", "-O", "NAME").split():
            run("losetup", "--detach", name)
        patiently(lambda: _check_detached(image))
        image.unlink()


def _check_detached(image: Path) -> None:
    if run("losetup", "-j", str(image)).strip():
        raise OSError(f"{image} is still attached")


def patiently(action: Callable[[], object]) -> None:
    """Do something again until it works; raise what it raises after GONE_S."""
    end = time.monotonic() + GONE_S
    while True:
        try:
            action()
            return
        except OSError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.05)


def run(*command: str) -> str:
    """Run a program; returns what it printed, or raises OSError with what it complained of."""
    try:
        done: Sequence[str] = command
        return subprocess.run(done, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command)}: {error.stderr.strip()}") from None
