"""Types of file systems: determines the type of a file's file system, and how bytes are moved
there.

POLICIES is THE table of types; docs/reference/filesystems.md gives the reason and the source of
every line. Staging.route() (engine/staging.py) uses it for each file. This module must not know
formats.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import struct
from typing import NamedTuple

LUSTRE_MAGIC = 0x0BD00BD0


class Policy(NamedTuple):
    """How bytes are moved to and from one type of file system. On all types they are moved in
    blocks of 8 MiB, a multiple of every page, sector and usual stripe.

    Attributes:
        backend: the backend that "auto" selects: "io_uring" or "threads".
        direct: whether O_DIRECT is tried; a probe of the real file decides.
        why: the reason for both.
        allocates: whether fallocate(2) allocates a file's blocks before the writes. Otherwise, and
            if fallocate is refused, only the size of the file is set.
        syncs_all: whether a file is made durable by fsync(2), or else by fdatasync(2), which may
            omit times.
        renames_at_once: whether a reader sees either the old or the new file at any moment, even
            after a crash.
        remote: whether a server checks credentials, which may expire and be renewed.
        mandatory_locks: whether flock(2) prevents all other descriptors, including those of other
            ranks, from reading or writing the file.
        direct_if_asked: whether backend="io_uring" makes writes try O_DIRECT although `direct` is
            False. Used where neither method is faster everywhere.
        caches_names: whether a machine may see outdated names for a while after another machine has
            created or replaced a file.
        readers: the number of threads that read a file.
    """

    backend: str
    direct: bool
    why: str
    allocates: bool = True
    syncs_all: bool = True
    renames_at_once: bool = True
    remote: bool = True
    mandatory_locks: bool = False
    direct_if_asked: bool = False
    caches_names: bool = True
    # A buffered read waits for each piece of read-ahead (FUSE: 128 KiB), so only threads keep a
    # server busy: 16 took 0.87 and 0.94 x the time of 4 to load from sshfs, 0.67 and 1.06 x from
    # Gluster. More writers gained on Gluster and lost on sshfs.
    readers: int = 16

    def text(self) -> str:
        """Returns a description of the policy."""
        ahead = "blocks are allocated ahead" if self.allocates else "the size is set ahead"
        sync = "fsync" if self.syncs_all else "fdatasync"
        rename = "" if self.renames_at_once else "; a rename copies, so a crash may lose both files"
        again = "; calls that the server refuses are repeated" if self.remote else ""
        locks = "; files are not locked during writes" if self.mandatory_locks else ""
        return f"{self.why}; {ahead}, made durable by {sync}{rename}{again}{locks}"


# The four classes. Remote file systems with locks keep the caches of clients coherent.
_LOCAL = Policy(
    "threads",
    True,
    "direct writes may be serial here, so io_uring would gain nothing",
    syncs_all=False,
    remote=False,
    caches_names=False,
    readers=4,
)
_PARALLEL = _LOCAL._replace(
    backend="io_uring",
    why="direct I/O runs in parallel here, and io_uring keeps it deep without threads",
)
_WITH_LOCKS = Policy(
    "threads",
    True,
    "io_uring would punt every write to one kernel worker per file here",
    allocates=False,
    caches_names=False,
)
_REMOTE = Policy("threads", True, "a server or an unknown file system: this works everywhere")
_OBJECTS = Policy(
    "threads",
    False,
    "a daemon presents objects as files: buffered, threads",
    allocates=False,
    renames_at_once=False,
)
_FUSE = _REMOTE._replace(
    direct=False,
    why="a daemon serves this file system and may ignore O_DIRECT",
    allocates=False,
    direct_if_asked=True,
)

# A class, or an exception from one. Unknown file systems are "remote", which works everywhere.
POLICIES = {
    "local": _LOCAL,
    "ext4": _PARALLEL,
    "xfs": _PARALLEL,
    "btrfs": _LOCAL._replace(
        direct=False,
        why="the kernel may buffer direct writes here, for checksums of the data",
        direct_if_asked=True,
    ),
    "tmpfs": _LOCAL._replace(
        direct=False, why="files are in memory: there is no device for direct I/O"
    ),
    "remote with locks": _WITH_LOCKS,
    "lustre": _WITH_LOCKS._replace(allocates=True),
    "remote": _REMOTE,
    # Servers such as diod and QEMU know a file by its name until it is opened. A load with O_DIRECT
    # opens the file again, and may get another file that has received the name in the meantime.
    "9p": _REMOTE._replace(
        direct=False, why="its servers reopen a file by name, and may open another one"
    ),
    "cifs": _REMOTE._replace(
        direct=False,
        why="the mount options decide about direct I/O here",
        allocates=False,
        mandatory_locks=True,
    ),
    "fuse": _FUSE,
    # Its client reads ahead for one sequential reader: with 2 to 16 threads a load took 1.35 to 1.5
    # x the time of torch.load, with one thread 0.9 x.
    "moosefs": _FUSE._replace(readers=1),
    "object store": _OBJECTS,
}

# By mount type (proc(5)), which distinguishes file systems that share a magic number or have none.
# 9p passes on the magic number of the server's file system.
_BY_TYPE = {
    **{kind: kind for kind in ("ext4", "xfs", "btrfs", "tmpfs", "lustre", "9p", "cifs", "fuse")},
    **dict.fromkeys(("ext3", "ext2", "overlay"), "local"),
    **dict.fromkeys(("gpfs", "beegfs", "fhgfs", "wekafs", "ceph"), "remote with locks"),
    **dict.fromkeys(("nfs", "nfs4"), "remote"),
    "smb3": "cifs",
    **{
        f"fuse.{daemon}": "object store"
        for daemon in ("gcsfuse", "s3fs", "mount-s3", "mountpoint-s3", "goofys", "geesefs")
    },
    **{f"fuse.{daemon}": "object store" for daemon in ("blobfuse", "blobfuse2", "rclone", "ossfs")},
}
# By statfs(2).
_BY_MAGIC = {
    0xEF53: "ext4",  # also of ext2 and ext3; the mount type distinguishes them
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x794C7630: "local",
    LUSTRE_MAGIC: "lustre",
    0x6969: "remote",
    0x47504653: "remote with locks",
    0x19830326: "remote with locks",
    0x00C36400: "remote with locks",
    0xFF534D42: "cifs",
    0xFE534D42: "cifs",
    0x65735546: "fuse",
}


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo: the file system's type, source and mount point."""

    kind: str
    source: str
    point: str = "/"


def recognised(magic: int | None, mount: Mount | None) -> str:
    """Returns the key in POLICIES for a file system's magic number (statfs(2)) and mount."""
    named, source = ("", "") if mount is None else mount[:2]
    if named.startswith("fuse") and source.startswith("mfs#"):
        return "moosefs"
    if named in _BY_TYPE:
        return _BY_TYPE[named]
    if named.startswith("fuse"):
        return "fuse"
    return _BY_MAGIC.get(magic or 0, "remote")


def policy_of(fd: int) -> tuple[str, Policy]:
    """Returns the name of an open file's file system, and its policy."""
    mount = mount_of(fd)
    kind = recognised(magic_of(fd), mount)
    named = kind if mount is None or mount.kind == "fuse" else mount.kind
    return named, POLICIES[kind]


def mount_of(fd: int) -> Mount | None:
    """Returns the mount of an open file, from /proc/self/{fdinfo,mountinfo} (proc(5)), or None if
    unknown. The device number is not enough, because on btrfs the files have other numbers than the
    mount.
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
            number = dict(line.split(":", 1) for line in info)["mnt_id"].strip()
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[0] == number:
                    dash = fields.index("-")
                    return Mount(fields[dash + 1], *map(_plain, (fields[dash + 2], fields[4])))
    except (OSError, ValueError, LookupError):
        return None  # /proc is missing or of unknown form: the magic number must suffice
    return None


def _plain(text: str) -> str:
    """Returns a path without mountinfo's escapes (a space is \\040)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def magic_of(file: int | str) -> int | None:
    """Returns statfs(2)'s f_type for an open file or a path; None if unknown."""
    status = ctypes.create_string_buffer(512)  # struct statfs has 120 bytes at most
    try:
        if isinstance(file, str):
            refused = _libc.statfs(os.fsencode(file), status)
        else:
            refused = _libc.fstatfs(file, status)
    except AttributeError:  # this libc has no such function
        return None
    if refused:
        return None
    magic: int = struct.unpack_from("@l", status.raw)[0]
    return magic & 0xFFFFFFFF


_libc = ctypes.CDLL(None)

# Names that clients of NFS, CIFS and libfuse give to a file that was removed while it was open. The
# files vanish when they are closed; until then their directory is not empty.
LINGERING = re.compile(r"\.nfs[0-9a-fA-F]{8,}|\.__smb[0-9a-fA-F]+|\.fuse_hidden[0-9a-fA-F]{8,}")

# Errors by which a server refuses calls that it would accept with valid credentials.
REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.EKEYEXPIRED, errno.ESTALE})


def is_written_through(path: str) -> bool:
    """Returns whether a path cannot be replaced and must be written to: a device, FIFO or socket,
    or the path of a descriptor (/dev/fd, /proc/self/fd).
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False  # opening it will raise the error
    if os.path.realpath(os.path.dirname(os.path.abspath(path))).startswith("/proc/"):
        return True
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
