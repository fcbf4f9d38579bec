"""Kinds of file systems: which one a file lies on, and how bytes are moved there.

Responsible for recognising them and for THE table of what is done on each; docs/filesystems.md
gives the reason and the source of every line. It must not know formats, nor who asks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from typing import NamedTuple

LUSTRE_MAGIC = 0x0BD00BD0


class Policy(NamedTuple):
    """A policy says how bytes are moved to and from one kind of file system.

    The size of a block is no matter of it: 8 MiB is a multiple of every page, sector and usual
    stripe, and enough for every one of them.

    Attributes:
        backend: "io_uring" or "threads", what "auto" means there.
        direct: whether O_DIRECT is tried; a probe of the real file has the last word.
        why: the reason for both.
        allocates: whether fallocate(2) is asked for blocks ahead of writes; else a file is given
            its size only. A refusal leaves the size alone, too.
        syncs_all: fsync(2) makes a file durable; else fdatasync(2), which may leave out times.
        renames_at_once: a reader sees the old file or the new one at any moment, and so does who
            looks after a crash.
        remote: who writes proves who he is to a server, by what may expire and be renewed.
        mandatory_locks: flock(2) keeps every other descriptor from reading or writing what is
            locked, those of other ranks too.
        measured: neither way of writing is faster everywhere: long files decide, by their own
            time, whether later ones are written with O_DIRECT (storage/direct_choice.py), and
            `direct` is what is done until then.
        caches_names: a machine may go on for a while believing that a name is not there, or means
            what it did, when another machine has given it.
    """

    backend: str
    direct: bool
    why: str
    allocates: bool = True
    syncs_all: bool = True
    renames_at_once: bool = True
    remote: bool = True
    mandatory_locks: bool = False
    measured: bool = False
    caches_names: bool = True

    def text(self) -> str:
        """All of it in words."""
        ahead = "blocks are allocated ahead" if self.allocates else "the size is set ahead"
        sync = "fsync" if self.syncs_all else "fdatasync"
        rename = "" if self.renames_at_once else "; a rename copies, so a crash may lose both files"
        again = "; what the server refuses is tried again" if self.remote else ""
        locks = "; what is written is not locked" if self.mandatory_locks else ""
        return f"{self.why}; {ahead}, made durable by {sync}{rename}{again}{locks}"


_DEEP = "direct I/O runs in parallel here, and io_uring keeps it deep without threads"
_SERIAL = "io_uring would punt every write to one kernel worker per file here; threads do not"
_DAEMON = "a process of its own serves this file system, which may drop O_DIRECT"


def _local(backend: str, direct: bool, why: str, measured: bool = False) -> Policy:
    near = {"syncs_all": False, "remote": False, "caches_names": False}
    return Policy(backend, direct, why, measured=measured, **near)


def _coherent(allocates: bool = False) -> Policy:
    return Policy("threads", True, _SERIAL, allocates=allocates, caches_names=False)


# What "unknown" stands for is the safe line: what works everywhere.
POLICIES = {
    "ext4": _local("io_uring", True, _DEEP),
    "xfs": _local("io_uring", True, _DEEP),
    "btrfs": _local("io_uring", True, _DEEP, measured=True),
    "ext3": _local("threads", True, "no blocks ahead of writes here, so direct writes are serial"),
    "ext2": _local("threads", True, "no blocks ahead of writes here, so direct writes are serial"),
    "tmpfs": _local("threads", False, "memory, which has no device to reach directly and no power"),
    "overlay": _local("threads", True, "a layer over another file system, gone with its container"),
    "lustre": _coherent(allocates=True),
    "nfs": Policy("threads", True, _SERIAL),
    "gpfs": _coherent(),
    "beegfs": _coherent(),
    "wekafs": _coherent(),
    "ceph": _coherent(),
    "cifs": Policy(
        "threads",
        False,
        "the mount decides about direct I/O here",
        allocates=False,
        mandatory_locks=True,
    ),
    "fuse": Policy("threads", False, _DAEMON, allocates=False, measured=True),
    "object store": Policy(
        "threads",
        False,
        "objects behind a daemon, no files: buffered, threads",
        allocates=False,
        renames_at_once=False,
    ),
    "unknown": Policy(
        "threads", True, "an unknown file system gets what works everywhere", measured=True
    ),
}

# By mount type (proc(5)), which tells what shares a magic number, or has none of its own.
_BY_TYPE = {
    **{kind: kind for kind in POLICIES if kind not in ("unknown", "object store")},
    "nfs4": "nfs",
    "fhgfs": "beegfs",
    "smb3": "cifs",
    "9p": "unknown",  # its statfs passes the number on that the server's file system has
    **{
        f"fuse.{daemon}": "object store"
        for daemon in ("gcsfuse", "s3fs", "mount-s3", "mountpoint-s3", "goofys", "geesefs")
    },
    **{f"fuse.{daemon}": "object store" for daemon in ("blobfuse", "blobfuse2", "rclone", "ossfs")},
}
# By statfs(2).
_BY_MAGIC = {
    0xEF53: "ext4",  # ext2 and ext3 too, which the mount type tells
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
    LUSTRE_MAGIC: "lustre",
    0x6969: "nfs",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x00C36400: "ceph",
    0xFF534D42: "cifs",
    0xFE534D42: "cifs",
    0x65735546: "fuse",
}


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo: the type, what is mounted, and where."""

    kind: str
    source: str
    point: str = "/"


def recognised(magic: int | None, mount: Mount | None) -> str:
    """Returns the line of POLICIES that is for a file system.

    Args:
        magic: its number by statfs(2); None if that is not known.
        mount: None if that is not known.
    """
    named = "" if mount is None else mount.kind
    if named in _BY_TYPE:
        return _BY_TYPE[named]
    if named.startswith("fuse"):
        return "fuse"
    return _BY_MAGIC.get(magic or 0, "unknown")


def policy_of(fd: int) -> tuple[str, Policy]:
    """Name of the file system that an open file lies on, and what is done there."""
    mount = mount_of(fd)
    kind = recognised(magic_of(fd), mount)
    named = kind if mount is None or kind == mount.kind else mount.kind
    return named, POLICIES[kind]


def mount_of(fd: int) -> Mount | None:
    """The mount an open file lies on, by /proc/self/{fdinfo,mountinfo} (proc(5)); None if that
    cannot be told. By mount and not by device: the files of btrfs have a device number of their
    own.
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
            number = dict(line.split(":", 1) for line in info)["mnt_id"].strip()
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[0] == number:
                    dash = fields.index("-")
                    return Mount(fields[dash + 1], fields[dash + 2], _plain(fields[4]))
    except (OSError, ValueError, LookupError):
        return None  # no /proc, or a line of another shape: the magic number has to do
    return None


def _plain(text: str) -> str:
    """A path without the escapes of mountinfo (a space is \\040)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def magic_of(file: int | str) -> int | None:
    """f_type of statfs(2), of an open file or of what a path names; None if it cannot be told."""
    status = ctypes.create_string_buffer(512)  # struct statfs is of 120 bytes at most
    try:
        if isinstance(file, str):
            refused = _libc.statfs(os.fsencode(file), status)
        else:
            refused = _libc.fstatfs(file, status)
    except AttributeError:  # another libc
        return None
    if refused:
        return None
    magic: int = struct.unpack_from("@l", status.raw)[0]
    return magic & 0xFFFFFFFF


_libc = ctypes.CDLL(None)

# Names under which a client keeps a file that was removed while somebody had it open there: NFS,
# CIFS, libfuse. They go by themselves; until then their directory is not empty.
LINGERING = re.compile(r"\.nfs[0-9a-fA-F]{8,}|\.__smb[0-9a-fA-F]+|\.fuse_hidden[0-9a-fA-F]{8,}")

# By these a server refuses what it would do for somebody whose credentials are valid.
REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.EKEYEXPIRED, errno.ESTALE})
