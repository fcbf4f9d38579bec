"""Files on Lustre: made with a layout, without liblustreapi; and which of its targets (OSTs) are
full.

Responsible for the system calls and for what Lustre's client tells in /sys and /proc. It must not
know which layout is good (storage/lustre_layout.py), nor what a file is for.

A layout is set by the ioctl on a file that was opened with its creation delayed, which is how
liblustreapi does it: it says EEXIST where a layout is there already. Setting the attribute
lustre.lov is the other way, taken where the ioctl is not known. Neither answer is proof: where the
administrator lets only one group set layouts (llite.*.enable_setstripe_gid), the ioctl returns 0
and does nothing, except for a process named "lfs", which gets EACCES; every write then fails with
EBADF. So the layout is read back before the file is used.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

from fastckpt.errors import CorruptCheckpoint
from fastckpt.storage import policies
from fastckpt.storage.lustre_layout import Layout, Purpose, decide, elsewhere, encoded, parsed

# lustre_user.h. O_LOV_DELAY_CREATE_MASK is O_NOCTTY | FASYNC (the older bit 0100000000 beside it
# has another meaning in the kernel by now); LL_IOC_LOV_SETSTRIPE is _IOW('f', 154, long).
DELAY_CREATE = os.O_NOCTTY | os.O_ASYNC
SETSTRIPE = (1 << 30) | (struct.calcsize("l") << 16) | (ord("f") << 8) | 154
ATTRIBUTE = "lustre.lov"  # XATTR_LUSTRE_LOV
TREES = ("/sys/fs/lustre/osc", "/proc/fs/lustre/osc")  # a directory for each OST: osc.*.kbytesavail
_OST = re.compile(r"-OST(?P<number>[0-9a-f]{4})-osc-")
_HAS_ONE = (errno.EEXIST, errno.EALREADY)
_FORBIDDEN = (errno.EACCES, errno.EPERM)  # llite.enable_setstripe_gid


@dataclass
class _Place:
    """What is known of a directory: its default layout, its file system's name, its mount, and
    whether that is Lustre by its type as well, and not by its number alone, which 9p passes on.
    """

    default: Layout
    name: str
    mount: str
    is_lustre: bool = True


_places: dict[str, _Place] = {}  # asked for once: the metadata server has enough to do
_forbidding: set[str] = set()  # mounts whose administrator lets this process set no layout
_lock = threading.Lock()


def is_lustre(path: str) -> bool:
    return policies.magic_of(path) == policies.LUSTRE_MAGIC


def create(path: str, flags: int, mode: int, purpose: Purpose) -> tuple[int, str]:
    """Makes a file on Lustre with the layout that suits it. Returns its descriptor, and in words
    what layout it has and why.

    Args:
        path: of the new file.
        flags: of open(2), with O_CREAT and O_EXCL.
        mode: of it.
        purpose: what the file is for.
    """
    place = _place(purpose.directory or os.path.dirname(path))
    if not place.is_lustre:
        return os.open(path, flags, mode), "a layout is the server's matter"
    layout, why = decide(place.default, purpose, len(free_bytes(place.name)) or None)
    if layout is None:
        return os.open(path, flags, mode), why
    if place.mount in _forbidding:
        return os.open(path, flags, mode), "the administrator lets nobody here set layouts"
    fd = os.open(path, flags | DELAY_CREATE, mode)
    try:
        _lay_out(fd, layout)
        return fd, f"{layout.text()}: {why}"
    except OSError as error:
        if error.errno in _FORBIDDEN:
            _forbidding.add(place.mount)
        refusal = os.strerror(error.errno or errno.EIO)
    # Without a layout nothing can be written to it. What the server gives by itself counts.
    os.close(fd)
    os.unlink(path)
    return os.open(path, flags, mode), f"{layout.text()} were refused ({refusal}): the default"


def _lay_out(fd: int, layout: Layout) -> None:
    """Gives a file that was opened with DELAY_CREATE its layout.

    Raises:
        OSError: the file has no layout, so that nothing can be written to it. EPERM where the
            server answered "done" and did nothing.
    """
    content = encoded(layout)
    try:
        fcntl.ioctl(fd, SETSTRIPE, bytearray(content))
    except OSError as error:
        if error.errno in _HAS_ONE:
            return  # a default that was given in spite of the delay: the administrator's
        if error.errno not in (errno.ENOTTY, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        os.setxattr(fd, ATTRIBUTE, content)
    if layout_of(fd) is None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def layout_of(file: int | str) -> Layout | None:
    """The layout of a file, or the default of a directory; None if it has none of its own."""
    try:
        return parsed(os.getxattr(file, ATTRIBUTE))
    except (OSError, CorruptCheckpoint):
        return None


def _place(directory: str) -> _Place:
    with _lock:
        place = _places.get(directory)
    if place is None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mount = policies.mount_of(fd)
        finally:
            os.close(fd)
        default = layout_of(directory)
        if default is None and mount is not None:  # what is set on the root holds for all below
            default = layout_of(mount.point)
        point = directory if mount is None else mount.point
        is_lustre = policies.recognised(policies.LUSTRE_MAGIC, mount) == "lustre"
        place = _Place(default or Layout(0, 0), _name(mount), point, is_lustre)
        with _lock:
            _places[directory] = place
    return place


def free_bytes(name: str) -> dict[int, int]:
    """Number of each OST of a file system, and the bytes that are free there; empty where the
    client does not tell.
    """
    found: dict[int, int] = {}
    for tree in TREES:
        for path in glob.glob(f"{tree}/{glob.escape(name)}-OST*/kbytesavail"):
            match = _OST.search(path)
            with suppress(OSError, ValueError), open(path, encoding="ascii") as file:
                # one that is not connected does not say
                if match is not None:
                    found[int(match["number"], 16)] = int(file.read()) << 10
    return found


def another_layout(fd: int) -> Layout | None:
    """For a file that found no room: the layout to try next; None if its own is not plain."""
    layout = layout_of(fd)
    if layout is None or layout.is_composite:
        return None
    return elsewhere(layout, free_bytes(_name_of(fd)))


def targets_text(fd: int) -> str:
    """Says which OSTs a file lies on and what is free there, for the message that one was full."""
    layout, free = layout_of(fd), free_bytes(_name_of(fd))
    osts = layout.osts if layout is not None else ()
    if not osts and not free:
        return "which OST is full, `lfs df` tells"
    told = [
        f"OST{ost:04x} ({free[ost] >> 20} MiB free)" if ost in free else f"OST{ost:04x}"
        for ost in osts or sorted(free, key=lambda ost: free[ost])[:4]
    ]
    return f"{'it lies on' if osts else 'fullest are'} {', '.join(told)}"


def _name_of(fd: int) -> str:
    return _name(policies.mount_of(fd))


def _name(mount: policies.Mount | None) -> str:
    """Name of a file system that is mounted as SERVERS:/NAME[/DIRECTORY]."""
    return "" if mount is None else mount.source.rpartition(":/")[2].split("/")[0]
