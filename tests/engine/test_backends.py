"""Which way the bytes go, and that it makes no difference to them: io_uring and threads, direct and
buffered, on every file system that can be made here, and where the kernel, a sandbox, the build or
the file system refuses one of them. Must not know how a backend transfers.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.saving.pipeline import Pipeline
from tests.kit.doubles import save_through
from tests.kit.interpreters import Program
from tests.kit.mounts import mounted
from tests.kit.paths import ROOT
from tests.kit.programs import run_python
from tests.kit.saves import temporaries

SWITCH = Path("/proc/sys/kernel/io_uring_disabled")
# What "auto" takes: O_DIRECT where it reaches a device, io_uring where direct writes run abreast.
AUTO = {
    "ext4": ("io_uring", True),
    "xfs": ("io_uring", True),
    "btrfs": ("threads", False),
    "tmpfs": ("threads", False),
    "ramfs": ("threads", False),
    "ext2": ("threads", True),
}


def state() -> dict[str, Any]:
    """Sizes that end on no boundary, and a tensor that crosses blocks."""
    generator = torch.Generator().manual_seed(7)
    return {
        "w": torch.randn(2_100_003, generator=generator),
        "layers": [torch.randn(100 * i + 1, generator=generator) for i in range(20)],
        "bytes": torch.arange(257, dtype=torch.uint8),
        "step": 3,
    }


def io_uring_works(directory: Path) -> bool:
    handle = fastckpt.save(
        torch.ones(3), directory / "probe.pt", options=fastckpt.SaveOptions(backend="io_uring")
    )
    error = handle.exception(60)
    assert error is None or isinstance(error, fastckpt.BackendUnavailable), error
    (directory / "probe.pt").unlink(missing_ok=True)
    return error is None


# On real file systems.


@pytest.mark.filesystem
@pytest.mark.parametrize("kind", AUTO)
def test_every_backend_writes_the_same_bytes(disk: Path, kind: str) -> None:
    expected, content = state(), set()
    with mounted(kind, disk, 64 << 20 if kind == "tmpfs" else 0) as mount:
        with_ring = io_uring_works(mount)
        for backend in ("auto", "threads", "io_uring"):
            path = mount / f"{backend}.pt"
            if backend == "io_uring" and not with_ring:
                continue
            stats = fastckpt.save(
                expected,
                path,
                options=fastckpt.SaveOptions(backend=backend, staging_bytes=24 << 20),
            ).result(60)
            name, direct = AUTO[kind]
            if backend == "auto":
                assert stats.backend == (name if with_ring else "threads")
            else:
                assert stats.backend == backend
            asked = kind == "btrfs" and backend == "io_uring"
            assert stats.direct is (direct or asked), stats
            assert stats.why.startswith(f"{kind}: "), stats
            assert stats.nbytes == path.stat().st_size
            content.add(path.read_bytes())
            for loaded in (fastckpt.load(path), torch.load(path)):
                assert torch.equal(loaded["w"], expected["w"])
                assert all(map(torch.equal, loaded["layers"], expected["layers"]))
        assert len(content) == 1, "the backends wrote different bytes"
        assert not temporaries(mount)


@pytest.mark.filesystem
def test_direct_io_refused_by_the_file_system(disk: Path) -> None:
    """ramfs has no O_DIRECT at all."""
    path_here = disk / "a.pt"
    fastckpt.save(state(), path_here).result(60)
    with mounted("ramfs", disk) as mount:
        for backend in ("auto", "threads"):
            stats = fastckpt.save(
                state(), mount / "a.pt", options=fastckpt.SaveOptions(backend=backend)
            ).result(60)
            assert (stats.backend, stats.direct) == ("threads", False)
            assert "O_DIRECT" in stats.why and os.strerror(errno.EINVAL) in stats.why
            assert (mount / "a.pt").read_bytes() == path_here.read_bytes()


@pytest.mark.filesystem
def test_direct_io_that_a_file_system_only_pretends(disk: Path) -> None:
    """ext4 that journals its data takes O_DIRECT and buffers: the sync still makes it durable."""
    with mounted("ext4", disk, 96 << 20, "data=journal") as mount:
        path = mount / "a.pt"
        stats = fastckpt.save(state(), path).result(60)
        assert stats.committed_s is not None
        assert torch.equal(fastckpt.load(path)["w"], state()["w"])


@pytest.mark.parametrize("backend", ["threads", "io_uring"])
@pytest.mark.parametrize("durable", [True, False])
def test_backend_asked_for_is_the_one_that_serves(
    disk: Path, backend: str, durable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if backend == "io_uring" and not io_uring_works(disk):
        pytest.skip("io_uring does not work here")
    with caplog.at_level(logging.INFO, "fastckpt"):
        for _ in range(3):
            handle = fastckpt.save(
                state(),
                disk / "a.pt",
                options=fastckpt.SaveOptions(backend=backend, durable=durable),
            )
            assert handle.result(60).backend == backend
    lines = [record.getMessage() for record in caplog.records if record.name == "fastckpt"]
    lines = [line for line in lines if not line.startswith("saved ")]
    assert len(lines) <= 1, "one line for each decision, not for each save"
    assert all(f" for {handle.path!r} and similar files: " in line for line in lines)
    assert torch.equal(fastckpt.load(disk / "a.pt")["w"], state()["w"])


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_the_backend_is_logged_by_the_first_rank_of_a_machine(
    variable: str, disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = []
    for rank in range(3):
        monkeypatch.setenv(variable, str(rank))
        pipeline = Pipeline()
        with caplog.at_level(logging.DEBUG, "fastckpt"):
            save_through(pipeline, state(), disk / "a.pt").result(60)
            pipeline.close()
        levels += [each.levelno for each in caplog.records if "similar files" in each.message]
        caplog.clear()
    assert levels == [logging.INFO, logging.DEBUG, logging.DEBUG]


# io_uring forbidden.

SECCOMP = """
import ctypes, errno, os, platform, struct

NUMBERS = {
    "x86_64": {"io_uring_setup": 425, "io_uring_enter": 426, "pwritev": 296,
               "pwritev2": 328},
    "aarch64": {"io_uring_setup": 425, "io_uring_enter": 426, "pwritev": 70,
                "pwritev2": 287},
}[platform.machine()]
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06  # of classic BPF: linux/bpf_common.h
ALLOW, ERRNO = 0x7FFF0000, 0x00050000

def forbid(call, error, everywhere=False):
    '''From now on this thread and those it starts get `error` from that system call; with
    `everywhere`, all threads of the process.
    '''
    program = b"".join(struct.pack("HBBI", *row) for row in (
        (LOAD, 0, 0, 0),  # seccomp_data.nr
        (JUMP_EQUAL, 0, 1, NUMBERS[call]),
        (RETURN, 0, 0, ERRNO | error),
        (RETURN, 0, 0, ALLOW),
    ))
    rows = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(rows)))
    libc = ctypes.CDLL(None, use_errno=True)
    zero, one = ctypes.c_ulong(0), ctypes.c_ulong(1)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, one, zero, zero, zero) != 0:
        raise SystemExit(77)
    if everywhere:
        seccomp = ctypes.c_long({"x86_64": 317, "aarch64": 277}[platform.machine()])
        if libc.syscall(seccomp, one, one, ctypes.byref(header)) != 0:  # for all: seccomp(2), TSYNC
            raise SystemExit(77)
        return
    mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)
    if libc.prctl(PR_SET_SECCOMP, mode, ctypes.byref(header), zero, zero) != 0:
        raise SystemExit(77)
"""

FORBIDDEN_RING = (
    SECCOMP
    + """
import logging, sys
import torch, fastckpt

records = []
handler = logging.Handler()
handler.emit = records.append
log = logging.getLogger("fastckpt")
log.addHandler(handler)
log.setLevel(logging.INFO)
log.propagate = False

folder, call, name = sys.argv[1:]
error = getattr(errno, name)
forbid(call, error)
state = {"w": torch.arange(3 << 20)}
for turn in range(3):
    stats = fastckpt.save(state, f"{folder}/a.pt").result(60)
    assert stats.backend == "threads", stats
    assert os.strerror(error) in stats.why and "io_uring" in stats.why, stats
for turn in range(2):
    handle = fastckpt.save(
        state, f"{folder}/b.pt", options=fastckpt.SaveOptions(backend="io_uring")
    )
    refusal = handle.exception(60)
    assert isinstance(refusal, fastckpt.BackendUnavailable), repr(refusal)
    assert isinstance(refusal, fastckpt.CheckpointError)
    assert os.strerror(error) in str(refusal) and "io_uring" in str(refusal), refusal
    assert call in str(refusal), refusal
warnings = [r for r in records if r.levelno >= logging.WARNING]
assert len(warnings) == 1, [r.getMessage() for r in records]
assert os.strerror(error) in warnings[0].getMessage()
assert (
    fastckpt.save(state, f"{folder}/c.pt", options=fastckpt.SaveOptions(backend="threads"))
    .result(60)
    .backend
    == "threads"
)
assert torch.equal(fastckpt.load(f"{folder}/a.pt")["w"], state["w"])
"""
)


RING_LOST = (
    SECCOMP
    + """
import sys
import torch, fastckpt

folder, name = sys.argv[1:]
state = {"w": torch.arange(3 << 20)}
stats = fastckpt.save(state, f"{folder}/a.pt").result(60)
if stats.backend != "io_uring":
    print("skip:", stats.why)
    sys.exit(42)
forbid("io_uring_enter", getattr(errno, name), everywhere=True)
for turn in range(3):
    state["w"] += 1
    fastckpt.save(state, f"{folder}/a.pt").result(60)
    assert torch.equal(fastckpt.load(f"{folder}/a.pt")["w"], state["w"])
assert torch.equal(torch.load(f"{folder}/a.pt")["w"], state["w"])
fastckpt.Checkpointer(f"{folder}/run").save(1, state).result(60)
"""
)


def run_sandboxed(program: str, *arguments: object) -> str:
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip(f"the system call numbers of {platform.machine()} are not known here")
    result = run_python(program + "\nsys.exit(42)", *arguments, returncode=42)
    assert result.stderr == ""
    return result.stdout


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("io_uring_setup", "EPERM"),
        ("io_uring_setup", "ENOSYS"),
        ("io_uring_setup", "ENOMEM"),
        ("io_uring_enter", "EPERM"),
    ],
)
def test_io_uring_forbidden_by_a_sandbox(disk: Path, call: str, error: str) -> None:
    run_sandboxed(FORBIDDEN_RING, disk, call, error)
    assert sorted(path.name for path in disk.iterdir()) == ["a.pt", "c.pt"]


@pytest.mark.multiprocess
@pytest.mark.uring
@pytest.mark.parametrize("error", ["ENOMEM", "EPERM"])
def test_a_ring_that_the_kernel_no_longer_serves(disk: Path, error: str) -> None:
    """What is under way and what comes later is transferred without it."""
    said = run_sandboxed(RING_LOST, disk, error)
    if said:
        pytest.skip(said)


REFUSED_TRANSFER = (
    SECCOMP
    + """
import sys
import torch, fastckpt
error = getattr(errno, sys.argv[2])
for call in ("pwritev", "pwritev2"):  # which the probe uses; plain pwrite stays allowed
    forbid(call, error)
state = {"w": torch.arange(3 << 20)}
stats = fastckpt.save(state, sys.argv[1]).result(60)
assert (stats.backend, stats.direct) == ("threads", False), stats
assert "O_DIRECT" in stats.why and os.strerror(error) in stats.why, stats
assert torch.equal(fastckpt.load(sys.argv[1])["w"], state["w"])
"""
)


@pytest.mark.multiprocess
@pytest.mark.parametrize("error", ["EINVAL", "EOPNOTSUPP"])
def test_first_direct_transfer_refused(disk: Path, error: str) -> None:
    run_sandboxed(REFUSED_TRANSFER, disk / "a.pt", error)
    fastckpt.save({"w": torch.arange(3 << 20)}, disk / "b.pt").result(60)
    assert (disk / "a.pt").read_bytes() == (disk / "b.pt").read_bytes()


SWITCHED_OFF = """
import sys
import torch, fastckpt
state = torch.arange(3 << 20)
print("ready", flush=True)
sys.stdin.readline()
stats = fastckpt.save(state, sys.argv[1] + "/a.pt").result(60)
error = fastckpt.save(
    state, sys.argv[1] + "/b.pt", options=fastckpt.SaveOptions(backend="io_uring")
).exception(60)
assert stats.backend == "threads" and "io_uring_disabled" in stats.why, stats
assert isinstance(error, fastckpt.BackendUnavailable), repr(error)
assert "io_uring_disabled" in str(error), error
assert torch.equal(fastckpt.load(sys.argv[1] + "/a.pt"), state)
"""


@pytest.mark.torture  # tests that run beside this one would do without io_uring, too
@pytest.mark.multiprocess
def test_io_uring_switched_off_for_the_machine(disk: Path) -> None:
    if not os.access(SWITCH, os.W_OK) or os.geteuid() != 0:
        pytest.skip("sysctl kernel.io_uring_disabled cannot be written")
    before = SWITCH.read_text()
    with Program(SWITCHED_OFF, disk) as process:
        assert process.stdout.readline() == "ready\n"
        # The switch is everybody's on this machine: it is turned for the moments of two saves.
        try:
            SWITCH.write_text("2\n")
        except OSError as error:
            pytest.skip(f"sysctl kernel.io_uring_disabled cannot be written: {error}")
        try:
            _, stderr = process.communicate("go\n", timeout=60)
        finally:
            SWITCH.write_text(before)
    assert process.returncode == 0, stderr
    assert not (disk / "b.pt").exists()
    assert SWITCH.read_text() == before


# A build without liburing.

WITHOUT_LIBURING = """
import sys
import torch, fastckpt
from fastckpt import _engine
assert fastckpt.__file__.startswith(sys.argv[1]) and _engine.__file__.startswith(sys.argv[1])
try:
    _engine.uring_backend(8)
    sys.exit("there is a ring without liburing")
except _engine.BackendUnavailable as error:
    assert "without liburing" in str(error), error
state = torch.arange(3 << 20)
stats = fastckpt.save(state, sys.argv[2]).result(60)
assert stats.backend == "threads" and "without liburing" in stats.why, stats
refusal = fastckpt.save(
    state, sys.argv[2], options=fastckpt.SaveOptions(backend="io_uring")
).exception(60)
assert isinstance(refusal, fastckpt.BackendUnavailable) and "liburing" in str(refusal), refusal
assert torch.equal(fastckpt.load(sys.argv[2]), state)
"""


@pytest.fixture
def package_without_liburing(tmp_path: Path) -> Path:
    """A directory with this package, its extension compiled as where there is no liburing."""
    pybind11 = pytest.importorskip("pybind11")
    compiler = shutil.which("g++") or shutil.which("c++")
    sources = sorted((ROOT / "csrc").rglob("*.cc"))
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if compiler is None or not sources or not header.exists():
        pytest.skip("no C++ compiler, no sources, or no headers of Python")
    package = tmp_path / "fastckpt"
    shutil.copytree(
        Path(fastckpt.__file__).parent,
        package,
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    flags = ["-O0", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread"]
    flags += ["-DFASTCKPT_WITH_URING=0", f"-I{ROOT / 'csrc'}"]
    flags += [f"-I{pybind11.get_include()}", f"-I{header.parent}"]

    def compiled(source: Path) -> str:
        target = tmp_path / f"{source.stem}.o"
        subprocess.run([compiler, *flags, "-c", source, "-o", target], check=True)
        return str(target)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, sorted(sources, key=lambda source: source.stem)))
    module = package / f"_engine{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run([compiler, "-shared", "-pthread", *objects, "-o", module], check=True)
    return tmp_path


@pytest.mark.torture
@pytest.mark.multiprocess
def test_build_without_liburing(package_without_liburing: Path, disk: Path) -> None:
    here = str(package_without_liburing)
    # Before the path that run_python adds: this package, not the installed one.
    program = f"import sys\nsys.path.insert(0, {here!r})\n" + WITHOUT_LIBURING
    run_python(program, here, disk / "a.pt", started=True)
    fastckpt.save(torch.arange(3 << 20), disk / "b.pt").result(60)
    assert (disk / "a.pt").read_bytes() == (disk / "b.pt").read_bytes()
