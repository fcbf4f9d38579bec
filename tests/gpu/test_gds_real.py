"""GPUDirect Storage by NVIDIA's own libcufile, without a GPU: what test_gpu_real.py has of it runs.

In a process of its own, which has what that library wants of a machine: an empty /proc/modules, so
that it runs in compat mode, and a /run/udev that knows the disk. Must not know what is tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import compiler
from tests.kit.devices import places
from tests.kit.mounts import file_system
from tests.kit.paths import ROOT, TESTS

TESTED = (TESTS / "gpu" / "test_gpu_real.py", "-m", "not gpu", "-k", "cufile")
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror")
# cuFile asks udev for what it knows of a disk; containers and virtual machines seldom have one.
ISOLATED = """
mount -t tmpfs none /run && mkdir -p /run/udev/data && touch /run/udev/control &&
printf 'E:ID_FS_USAGE=filesystem\\nE:ID_FS_TYPE=%s\\n' "$1" > "/run/udev/data/b$2" && shift 2 &&
exec "$@"
"""


@pytest.mark.filesystem
@pytest.mark.multiprocess
def test_nvidias_cufile_over_the_stub_of_the_driver(disk: Path) -> None:
    libraries = places("lib*/libcufile.so.0")
    if not libraries:
        pytest.skip("NVIDIA's libcufile is not on this machine: pip install nvidia-cufile")
    kind, device = file_system(disk), disk.stat().st_dev
    if kind not in ("ext4", "xfs"):
        pytest.skip(f"cuFile takes files of ext4 and xfs, and the tests' disk has {kind}")
    alone = ["unshare", "--mount", "sh", "-c"]
    tried = subprocess.run([*alone, "mount -t tmpfs none /run"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"a process may not mount for itself alone here: {tried.stderr.strip()}")
    shim = compiler.library(disk, "no_modules.so", TESTS / "stubs" / "no_modules.cc", *FLAGS)
    number, log = f"{os.major(device)}:{os.minor(device)}", disk / "cufile.log"
    variables = {"FASTCKPT_TEST_CUFILE": str(libraries[0]), "CUFILE_LOGFILE_PATH": str(log)}
    command = [*alone, ISOLATED, "sh", kind, number, "env", f"LD_PRELOAD={shim}", sys.executable]
    command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={disk / 'own'}"]
    inherited = {name: os.environ[name] for name in os.environ if not name.startswith("PYTEST_")}
    ended = subprocess.run(
        [*command, *TESTED], cwd=ROOT, env=inherited | variables, capture_output=True, text=True
    )
    told = ended.stdout + ended.stderr + (log.read_text() if log.exists() else "")
    assert ended.returncode == 0 and "skipped" not in ended.stdout, told
