"""A client of Lustre behind the system calls that fastckpt makes: open with delayed creation, the
ioctl and the attribute that set a layout, statfs and mountinfo.

Responsible for checking the bytes it is given against the public struct layouts, field by field and
without the code under test, for the errors that servers answer with, and for what a layout does.
The bytes of files are the real file system's.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fastckpt.storage import lustre, policies
from fastckpt.storage.policies import Mount

NAME = "scratch"
DELAYED = os.O_NOCTTY | os.O_ASYNC
# _IOW('f', 154, long) where a long has 8 bytes, as the compiler makes it of lustre_user.h.
LL_IOC_LOV_SETSTRIPE = 0x4008669A


class OstId(ctypes.LittleEndianStructure):
    _pack_ = 1
    _fields_ = [("oi_id", ctypes.c_uint64), ("oi_seq", ctypes.c_uint64)]


class UserObject(ctypes.LittleEndianStructure):
    """struct lov_user_ost_data_v1."""

    _pack_ = 1
    _fields_ = [("l_ost_oi", OstId), ("l_ost_gen", ctypes.c_uint32), ("l_ost_idx", ctypes.c_uint32)]


class UserMd(ctypes.LittleEndianStructure):
    """struct lov_user_md_v1."""

    _pack_ = 1
    _fields_ = [
        ("lmm_magic", ctypes.c_uint32),
        ("lmm_pattern", ctypes.c_uint32),
        ("lmm_oi", OstId),
        ("lmm_stripe_size", ctypes.c_uint32),
        ("lmm_stripe_count", ctypes.c_uint16),
        ("lmm_stripe_offset", ctypes.c_uint16),
    ]


class UserMdV3(UserMd):
    """struct lov_user_md_v3."""

    _pack_ = 1
    _fields_ = [("lmm_pool_name", ctypes.c_char * 16)]


class CompositeMd(ctypes.LittleEndianStructure):
    """struct lov_comp_md_v1."""

    _pack_ = 1
    _fields_ = [
        ("lcm_magic", ctypes.c_uint32),
        ("lcm_size", ctypes.c_uint32),
        ("lcm_layout_gen", ctypes.c_uint32),
        ("lcm_flags", ctypes.c_uint16),
        ("lcm_entry_count", ctypes.c_uint16),
        ("lcm_mirror_count", ctypes.c_uint16),
        ("lcm_padding1", ctypes.c_uint16 * 3),
        ("lcm_padding2", ctypes.c_uint64),
    ]


V1, V3, SPECIFIC, COMPOSITE = 0x0BD10BD0, 0x0BD30BD0, 0x0BD50BD0, 0x0BD60BD0


def plain(stripes: int, size: int, osts: tuple[int, ...] = (), pool: str = "") -> bytes:
    """The attribute of a file or a directory with a plain layout, as the client answers."""
    magic = V3 if pool else V1
    head = UserMdV3(magic, 1, OstId(), size, stripes, 0, pool.encode()) if pool else None
    content = bytes(head or UserMd(magic, 1, OstId(), size, stripes, 0))
    return content + b"".join(bytes(UserObject(OstId(1, 2), 0, ost)) for ost in osts)


def progressive() -> bytes:
    """The attribute of a directory with a progressive layout of two components, its head alone."""
    head = CompositeMd(COMPOSITE, ctypes.sizeof(CompositeMd) + 2 * 48, 1, 0, 2, 0)
    return bytes(head) + bytes(2 * 48)


@dataclass
class LustreClient:
    """What of Lustre a test needs.

    Attributes:
        free: bytes free on each OST.
        defaults: the attribute of directories that have one.
        ioctl_error, setxattr_error: the errno that setting a layout fails with, or 0.
        restricted: setting a layout does nothing and says "done", as it does outside of the group
            llite.*.enable_setstripe_gid of a real client (2.17).
        files: for each file that was made here, the layout's attribute; by inode.
        set_by: "ioctl" or "xattr" for each layout that was set.
        full: OSTs on which nothing more can be allocated.
        calls: system calls, in order.
    """

    free: dict[int, int]
    defaults: dict[str, bytes] = field(default_factory=dict)
    ioctl_error: int = 0
    setxattr_error: int = 0
    restricted: bool = False
    files: dict[int, bytes] = field(default_factory=dict)
    set_by: list[str] = field(default_factory=list)
    full: set[int] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    delayed: set[int] = field(default_factory=set)
    real_open: Callable[..., int] = os.open

    def layout(self, path: str | Path) -> tuple[int, int, tuple[int, ...]]:
        """(stripe count, stripe size, OSTs) of a file."""
        content = self.files[os.stat(path).st_ino]
        return self._fields(content)

    def _fields(self, content: bytes) -> tuple[int, int, tuple[int, ...]]:
        md = UserMd.from_buffer_copy(content)
        at = ctypes.sizeof(UserMd if md.lmm_magic == V1 else UserMdV3)
        count = (len(content) - at) // ctypes.sizeof(UserObject)
        objects = [UserObject.from_buffer_copy(content, at + 24 * i) for i in range(count)]
        return md.lmm_stripe_count, md.lmm_stripe_size, tuple(o.l_ost_idx for o in objects)

    def set_layout(self, fd: int, content: bytes, way: str) -> None:
        """As ll_lov_setstripe and lod_verify_v1v3 do it."""
        inode = os.fstat(fd).st_ino
        if inode in self.files:
            raise OSError(errno.EEXIST, "it has a layout")
        assert inode in self.delayed, "the file was not opened with its creation delayed"
        md = UserMd.from_buffer_copy(content)
        assert md.lmm_pattern == 1 and (md.lmm_oi.oi_id, md.lmm_oi.oi_seq) == (0, 0)
        size = {V1: 32, V3: 48, SPECIFIC: 48 + 24 * md.lmm_stripe_count}[md.lmm_magic]
        assert len(content) == size, "neither more nor less than the struct has"
        if md.lmm_stripe_size % 65536 or not md.lmm_stripe_count:
            raise OSError(errno.EINVAL, "a stripe that cannot be")
        count, stripe, osts = self._fields(content)
        pool = ""
        if md.lmm_magic != V1:
            pool = UserMdV3.from_buffer_copy(content).lmm_pool_name.decode()
        if md.lmm_magic == SPECIFIC:
            assert md.lmm_stripe_offset in osts and len(set(osts)) == len(osts)
            if not set(osts) <= set(self.free):
                raise OSError(errno.EINVAL, "no such OST")
        else:
            assert md.lmm_stripe_offset == 0xFFFF, "the server chooses where to begin"
            count = min(count, len(self.free))
            osts = tuple(sorted(self.free)[:count])
        self.files[inode] = plain(count, stripe, osts, pool)
        self.delayed.discard(inode)
        self._reopen(fd, os.O_RDWR)
        self.set_by.append(way)

    def delay(self, fd: int) -> None:
        """Opens a file without a layout: until it has one, whoever writes to it gets EBADF, as from
        ll_file_write.
        """
        self.delayed.add(os.fstat(fd).st_ino)
        self._reopen(fd, os.O_RDONLY)

    def _reopen(self, fd: int, flags: int) -> None:
        again = self.real_open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
        os.dup2(again, fd, inheritable=False)
        os.close(again)


@pytest.fixture
def lustre_client(disk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LustreClient:
    """Everything below `disk` is on Lustre with six OSTs."""
    client = LustreClient({ost: (ost + 1) << 40 for ost in range(6)})
    real_open, real_magic = os.open, policies.magic_of
    real_ioctl, real_get, real_set = fcntl.ioctl, os.getxattr, os.setxattr

    def is_here(file: Any) -> bool:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        return str(path).startswith(str(disk))

    def opened(path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        fd = real_open(path, flags, mode, **rest)
        if is_here(fd) and flags & os.O_CREAT:
            client.calls.append("create")
            client.files.pop(os.fstat(fd).st_ino, None)  # of a file that was removed
            if flags & DELAYED == DELAYED:
                client.delay(fd)
            else:
                default = client.defaults.get(os.path.dirname(path), plain(1, 1 << 20))
                if not default.startswith(progressive()[:4]):
                    count, size, _osts = client._fields(default)
                    default = plain(count, size, tuple(range(count)))
                client.files[os.fstat(fd).st_ino] = default
        return fd

    def ioctl(fd: int, request: int, *rest: Any) -> Any:
        if request != LL_IOC_LOV_SETSTRIPE:
            return real_ioctl(fd, request, *rest)
        client.calls.append("ioctl")
        if client.ioctl_error == errno.EEXIST:  # a default, given in spite of the delay
            client.set_layout(fd, plain(1, 1 << 20)[:30] + b"\xff\xff", "server")
        if client.ioctl_error:
            raise OSError(client.ioctl_error, os.strerror(client.ioctl_error))
        if not client.restricted:
            client.set_layout(fd, bytes(rest[0]), "ioctl")
        return 0

    def getxattr(file: Any, name: str, **rest: Any) -> bytes:
        if name != "lustre.lov" or not is_here(file):
            return real_get(file, name, **rest)
        client.calls.append("getxattr")
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file
        found = client.defaults.get(str(path)) if os.path.isdir(path) else None
        found = found or client.files.get(os.stat(file).st_ino)
        if found is None:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        return found

    def setxattr(file: Any, name: str, content: bytes, **rest: Any) -> None:
        if name != "lustre.lov":
            return real_set(file, name, content, **rest)
        client.calls.append("setxattr")
        if client.setxattr_error:
            raise OSError(client.setxattr_error, os.strerror(client.setxattr_error))
        if not client.restricted:
            client.set_layout(file, content, "xattr")

    def magic_of(file: int | str) -> int | None:
        return 0x0BD00BD0 if is_here(file) else real_magic(file)

    def mount_of(fd: int) -> Mount | None:
        source = f"mgs1@tcp:mgs2@tcp:/{NAME}/project"
        return Mount("lustre" if is_here(fd) else "ext4", source, str(disk))

    tree = tmp_path / "osc"
    for ost, free in client.free.items():
        target = tree / f"{NAME}-OST{ost:04x}-osc-ffff9d1c"
        target.mkdir(parents=True)
        (target / "kbytesavail").write_text(f"{free >> 10}\n")
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    monkeypatch.setattr(os, "getxattr", getxattr)
    monkeypatch.setattr(os, "setxattr", setxattr)
    monkeypatch.setattr(policies, "magic_of", magic_of)
    monkeypatch.setattr(policies, "mount_of", mount_of)
    monkeypatch.setattr(lustre, "TREES", (str(tree),))
    monkeypatch.setattr(lustre, "_places", {})
    monkeypatch.setattr(lustre, "_forbidding", set())
    return client
