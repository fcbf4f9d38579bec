"""Creates files on Lustre with a layout, without liblustreapi, and reports which storage targets
(OSTs) are full.

Like liblustreapi, the module opens a file with delayed creation and sets the layout by an ioctl,
which fails with EEXIST if the file already has a layout. If the ioctl is unknown, the attribute
lustre.lov sets the layout. Success is not reliable: if the administrator lets only one group set
layouts (llite.*.enable_setstripe_gid), the ioctl returns 0 without effect (EACCES for a process
named "lfs"), and every write fails with EBADF. The layout is therefore read back.
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
TREES = ("/sys/fs/lustre/osc", "/proc/fs/lustre/osc")  # with a directory for each OST
_OST = re.compile(r"-OST(?P<number>[0-9a-f]{4})-osc-")
_HAS_ONE = (errno.EEXIST, errno.EALREADY)
_FORBIDDEN = (errno.EACCES, errno.EPERM)  # llite.enable_setstripe_gid


@dataclass
class _Place:
    """A directory: its default layout, the name and mount point of its file system, and whether the
    mount's type is Lustre as well. The magic number alone is not enough, because 9p passes on the
    server's.
    """

    default: Layout
    name: str
    mount: str
    is_lustre: bool = True


_places: dict[str, _Place] = {}  # a cache that spares the metadata server
_forbidding: set[str] = set()  # mounts on which this process may not set layouts
_lock = threading.Lock()


def is_lustre(path: str) -> bool:
    return policies.magic_of(path) == policies.LUSTRE_MAGIC


def create(path: str, flags: int, mode: int, purpose: Purpose) -> tuple[int, str]:
    """Creates a file with the layout that suits its purpose. Returns its descriptor, and a text
    with its layout and the reason. `flags` are those of open(2), with O_CREAT and O_EXCL.
    """
    place = _place(purpose.directory or os.path.dirname(path))
    if not place.is_lustre:
        return os.open(path, flags, mode), "the server chooses the layout"
    layout, why = decide(place.default, purpose, len(free_bytes(place.name)) or None)
    if layout is None:
        return os.open(path, flags, mode), why
    if place.mount in _forbidding:
        return os.open(path, flags, mode), "the administrator does not let this process set layouts"
    fd = os.open(path, flags | DELAY_CREATE, mode)
    try:
        _lay_out(fd, layout)
        return fd, f"{layout.text()}: {why}"
    except OSError as error:
        if error.errno in _FORBIDDEN:
            _forbidding.add(place.mount)
        refusal = os.strerror(error.errno or errno.EIO)
    # A file without a layout cannot be written: create it again with the server's default.
    os.close(fd)
    os.unlink(path)
    why = f"the server refused {layout.text()} ({refusal}): the default layout is used"
    return os.open(path, flags, mode), why


def _lay_out(fd: int, layout: Layout) -> None:
    """Sets the layout of a file that was opened with DELAY_CREATE."""
    content = encoded(layout)
    try:
        fcntl.ioctl(fd, SETSTRIPE, bytearray(content))
    except OSError as error:
        if error.errno in _HAS_ONE:
            return  # the server set a default in spite of the delay: it stays
        if error.errno not in (errno.ENOTTY, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        os.setxattr(fd, ATTRIBUTE, content)
    if layout_of(fd) is None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def layout_of(file: int | str) -> Layout | None:
    """Returns a file's layout or a directory's default layout; None if there is none."""
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
        if default is None and mount is not None:  # the root's default holds for all below it
            default = layout_of(mount.point)
        point = directory if mount is None else mount.point
        is_lustre = policies.recognised(policies.LUSTRE_MAGIC, mount) == "lustre"
        place = _Place(default or Layout(0, 0), _name(mount), point, is_lustre)
        with _lock:
            _places[directory] = place
    return place


def free_bytes(name: str) -> dict[int, int]:
    """Returns the free bytes of each OST of a file system, by OST number, as far as known."""
    free: dict[int, int] = {}
    for tree in TREES:
        for path in glob.glob(f"{tree}/{glob.escape(name)}-OST*/kbytesavail"):
            match = _OST.search(path)
            with suppress(OSError, ValueError), open(path, encoding="ascii") as file:
                # an OST that is not connected reports nothing
                if match is not None:
                    free[int(match["number"], 16)] = int(file.read()) << 10
    return free


def another_layout(fd: int) -> Layout | None:
    """Returns the layout to try next after a file found no room; None if its layout is not
    plain.
    """
    layout = layout_of(fd)
    if layout is None or layout.is_composite:
        return None
    return elsewhere(layout, free_bytes(_name_of(fd)))


def targets_text(fd: int) -> str:
    """Returns a text with the OSTs of a file and their free space, for a message that an OST is
    full.
    """
    layout, free = layout_of(fd), free_bytes(_name_of(fd))
    osts = layout.osts if layout is not None else ()
    if not osts and not free:
        return "`lfs df` shows which OST is full"
    texts = [
        f"OST{ost:04x} ({free[ost] >> 20} MiB free)" if ost in free else f"OST{ost:04x}"
        for ost in osts or sorted(free, key=lambda ost: free[ost])[:4]
    ]
    return f"{'the file is on' if osts else 'the fullest OSTs are'} {', '.join(texts)}"


def _name_of(fd: int) -> str:
    return _name(policies.mount_of(fd))


def _name(mount: policies.Mount | None) -> str:
    """Returns the NAME of a file system that is mounted as SERVERS:/NAME[/DIRECTORY]."""
    return "" if mount is None else mount.source.rpartition(":/")[2].split("/")[0]
