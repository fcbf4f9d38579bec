"""No commit names bytes that the kernel could not write back. Linux tells an error of a write that
has long returned once for each open file, by whichever call asks first: it must fail the save.

Such errors come from a real FUSE daemon (tests/stubs/fuse_files.cc), and from a system call that is
replaced. Must not know in which order a save uses the file system.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastckpt
from tests.kit import compiler
from tests.kit.mounts import FLAGS, Mount, mounted_fuse
from tests.kit.paths import TESTS
from tests.kit.programs import run_python
from tests.kit.saves import temporaries

MIB = 1 << 20
BLOCK = 8 * MIB
# The engine waits for what was written so far behind: there an error may be told before the sync.
WINDOW = 64 * MIB
NBYTES = WINDOW + 2 * BLOCK


def state() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((BLOCK // 4,), float(i)) for i in range(NBYTES // BLOCK)}


def check_save_at(mount: Mount, fault: str, *, durable: bool = True) -> None:
    """A save during which this fault happens fails and leaves nothing; the next one is whole."""
    mount.control.write_text(fault)
    path = mount.point / "a.pt"
    error = fastckpt.save(state(), path, options=fastckpt.SaveOptions(durable=durable)).exception(
        60
    )
    assert not mount.control.exists(), "the fault has not happened"
    assert isinstance(error, fastckpt.StorageError), f"committed in spite of {fault!r}"
    # A close tells by flags that know no other errors than EIO and ENOSPC.
    told = {int(fault.split()[1]), *([] if durable else [errno.EIO])}
    assert error.errno in told and not error.visible
    assert not temporaries(mount.files) and not path.exists()
    again = torch.arange(BLOCK // 4)
    fastckpt.save(again, path).result(60)
    # What the daemon has, not what the kernel remembers.
    assert torch.equal(fastckpt.load(mount.files / "a.pt"), again)
    path.unlink()


def write_faults(number: int) -> Iterator[str]:
    for begin in range(0, NBYTES + 1, BLOCK):  # the last one is the tail's
        yield f"write {number} {begin} {begin + BLOCK}"


@pytest.mark.filesystem
@pytest.mark.parametrize("cache", ["back", "through"])
def test_a_lost_write_fails_the_save(disk: Path, cache: str) -> None:
    """Of a block that the engine waits for, of one that only the sync waits for, of the sync, and
    of a close.
    """
    with mounted_fuse(disk, cache) as mount:
        check_save_at(mount, f"write {errno.EIO} 0 {BLOCK}")
        check_save_at(mount, f"write {errno.ENOSPC} {WINDOW} {WINDOW + BLOCK}")
        check_save_at(mount, f"sync {errno.EIO} 0 1")
        check_save_at(mount, f"flush {errno.EIO} 0 1")


@pytest.mark.torture
@pytest.mark.filesystem
@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("cache", ["back", "through"])
def test_each_lost_write_fails_the_save(disk: Path, cache: str, durable: bool) -> None:
    with mounted_fuse(disk, cache) as mount:
        for number in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            for fault in write_faults(number):
                check_save_at(mount, fault, durable=durable)
            for operation in ("sync", "flush") if durable else ("flush",):
                check_save_at(mount, f"{operation} {number} 0 1", durable=durable)


PRELOADED = """
import ctypes, errno, os, sys
from array import array
from fastckpt import _engine
from fastckpt.plan.image import address_of

fail = ctypes.CDLL(None).write_back_fail
memory = bytearray(1 << 20)
fd = os.memfd_create("written")
backend = _engine.threads_backend(2)
engine = _engine.Engine(1 << 20, 1 << 20, 1)
for word in sys.argv[2:]:
    name, _, forbidden = word.partition("-")
    fail(getattr(errno, name), bool(forbidden))
    segments = array("Q", (0, len(memory), address_of(memory)))
    job = engine.stage(segments, array("Q"), _engine.Allowance(1), 1)
    job.write_to(fd, int(sys.argv[1]), backend, False, 60.0)
    assert job.wait_written(60)
    print(word, "-" if job.failure() is None else errno.errorcode[job.failure()[2]])
engine.close()
backend.close()
"""


def test_an_error_of_an_earlier_write_is_final(disk: Path) -> None:
    """It is not this write's, which would succeed if it were tried again, as one that a server
    refuses is. A sandbox that forbids the call has no say in it.
    """
    expected = {
        "EIO": "EIO",
        "ENOSPC": "ENOSPC",
        "EINVAL": "EINVAL",  # a FUSE daemon may answer anything
        **dict.fromkeys(["EINTR", "EAGAIN", "EACCES", "EPERM", "EKEYEXPIRED", "ESTALE"], "EIO"),
        **dict.fromkeys(["ENOSYS-forbidden", "EPERM-forbidden"], "-"),
    }
    shim = compiler.library(disk, "write_back.so", TESTS / "stubs" / "write_back.cc", *FLAGS)
    variables = {"LD_PRELOAD": str(shim)}
    result = run_python(PRELOADED, WINDOW, *expected, variables=variables, started=True)
    assert dict(line.split() for line in result.stdout.splitlines()) == expected
