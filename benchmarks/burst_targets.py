"""Storage targets of a known rate that reads and writes share, as loop devices over loop devices.

cgroups throttle reads and writes apart, so that a read would never wait for a write. Here the lower
device is throttled for writes, and the upper one, on a file of it, has so short a queue that its
requests, waiting below, keep others out: what a busy storage target does to who else uses it. It
owns devices, mounts and the cgroup, and takes all of them away again; it must not know what is
written to them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

BLKIO = Path("/sys/fs/cgroup/blkio")  # cgroup v1: the kernel throttles direct and buffered writes
PROGRAMS = ("losetup", "mkfs.ext4", "mount", "unshare")
GONE_S = 10.0  # a namespace, and what is mounted in it, outlives its last process by moments
QUEUE = 4  # requests of a target; the fewest that a kernel allows
SLACK_BYTES = 96 << 20  # of file systems and journals
# Puts a target of its own under the common path, for one process alone, which is throttled.
ENTER = 'mount --bind "$1" "$2" && echo $$ > "$3/cgroup.procs" && shift 3 && exec "$@"'


def reason_missing() -> str | None:
    """Return why there can be no such targets here, or None when there can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not (BLKIO / "blkio.throttle.write_bps_device").exists():
        return "there is no cgroup v1 blkio controller that throttles"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


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
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command)}: {error.stderr.strip()}") from None


@dataclass(frozen=True)
class Targets:
    """Where the targets are mounted, and how a process gets one as its own.

    Attributes:
        mounted: of each target, for everybody.
        common: the path under which a process finds its own.
        cgroup: in which they are slow.
    """

    mounted: tuple[Path, ...]
    common: Path
    cgroup: Path

    def given(self, number: int) -> list[str]:
        """What a command line begins with whose process has that target."""
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh"]
        return [*enter, str(self.mounted[number]), str(self.common), str(self.cgroup)]


@contextmanager
def targets(count: int, nbytes: int, write_bps: int, backing: Path) -> Iterator[Targets]:
    """Make targets, and remove them in the end.

    Args:
        count: how many.
        nbytes: what each can hold.
        write_bps: bytes a second that each takes.
        backing: directory for the files behind them; fast, with room for all.
    """
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="burst-", dir=backing))
        )
        cgroup = Path(tempfile.mkdtemp(prefix="fastckpt-burst-", dir=BLKIO))
        stack.callback(patiently, cgroup.rmdir)
        common = folder / "common"
        common.mkdir()
        mounted = []
        for number in range(count):
            lower, upper = (folder / f"{layer}-{number}" for layer in ("lower", "upper"))
            below = stack.enter_context(_mounted(folder / f"{number}.img", nbytes, lower))
            stack.enter_context(_mounted(lower / "upper.img", nbytes - SLACK_BYTES, upper))
            device = os.stat(below).st_rdev
            rule = f"{os.major(device)}:{os.minor(device)} {write_bps}"
            (cgroup / "blkio.throttle.write_bps_device").write_text(rule)
            mounted.append(upper)
        yield Targets(tuple(mounted), common, cgroup)


@contextmanager
def _mounted(image: Path, nbytes: int, where: Path) -> Iterator[str]:
    """A loop device with an ext4 on it, over the new file `image`."""
    layered = image.parent.is_mount()
    with open(image, "wb") as file:
        if layered:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            file.truncate(nbytes)
    where.mkdir()
    options = ["--find", "--show", f"--direct-io={'on' if layered else 'off'}"]
    device = run("losetup", *options, str(image)).strip()
    try:
        run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        if layered:
            queue = Path("/sys/block", Path(device).name, "queue")
            (queue / "scheduler").write_text("none")
            (queue / "nr_requests").write_text(str(QUEUE))
        run("mount", "-t", "ext4", device, str(where))
        try:
            yield device
        finally:
            patiently(lambda: run("umount", str(where)))
    finally:
        patiently(lambda: run("losetup", "--detach", device))
        image.unlink()
