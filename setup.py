"""Builds the C++17 extension fastckpt._engine from csrc/ and finds out whether liburing is there.

It knows compilers and flags only; what the package is called, needs and contains stands in
pyproject.toml. It must not import fastckpt, torch or anything of CUDA.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from pybind11 import get_include
from pybind11.setup_helpers import ParallelCompile
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

URING_PROBE = """
#include <liburing.h>
int main() {
    struct io_uring_params params = {};
    struct io_uring ring;
    return io_uring_queue_init_params(2, &ring, &params) == 0 ? 0 : 1;
}
"""

URING_MISSING = (
    "fastckpt: liburing was not found (no <liburing.h>, or -luring does not link): this build has "
    "only the 'threads' backend. For io_uring: apt-get install liburing-dev (Debian, Ubuntu) or "
    "liburing-devel (Fedora, RHEL), then build again."
)


def links_uring(compiler: list[str]) -> bool:
    """Whether a program using liburing compiles and links; it is not run: the kernel may differ."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cc")
        source.write_text(URING_PROBE, encoding="utf-8")
        environment_flags = [
            shlex.split(os.environ.get(name, "")) for name in ("CPPFLAGS", "CFLAGS", "LDFLAGS")
        ]
        cpp, c, ld = environment_flags
        command = [*compiler, *cpp, *c, str(source), "-o", str(Path(folder, "probe")), *ld]
        result = subprocess.run([*command, "-luring"], capture_output=True, check=False)
    return result.returncode == 0


class BuildEngine(build_ext):
    """build_ext that decides about liburing once the compiler is known, and then compiles."""

    def build_extensions(self) -> None:
        # For wheels that go to other machines (`make wheels`): part of the extension, or no build.
        is_static = os.environ.get("FASTCKPT_STATIC_URING") == "1"
        with_uring = is_static or links_uring(list(self.compiler.compiler_cxx))
        if not with_uring:
            print(URING_MISSING, file=sys.stderr, flush=True)
        for extension in self.extensions:
            extension.define_macros.append(("FASTCKPT_WITH_URING", "1" if with_uring else "0"))
            if is_static:
                extension.libraries.append(":liburing.a")
                extension.extra_link_args.append("-Wl,--exclude-libs,liburing.a")
            elif with_uring:
                extension.libraries.append("uring")
        with ParallelCompile("FASTCKPT_BUILD_JOBS", default=len(os.sched_getaffinity(0))):
            super().build_extensions()


def sources(pattern: str) -> list[str]:
    """Files below csrc/, relative to this one."""
    found = sorted((ROOT / "csrc").rglob(pattern))
    return [str(path.relative_to(ROOT)) for path in found]


def engine() -> Extension:
    """The one extension: every .cc in csrc/, rebuilt when any of them or a header is newer."""
    compile_args = ["-O3", "-std=c++17", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]
    # -isystem, so that our warnings are about our code.
    compile_args += ["-isystem", get_include()]
    # Warnings stop our own checks (`make check`), never a user's install: compilers differ.
    if os.environ.get("FASTCKPT_WERROR") == "1":
        compile_args.append("-Werror")
    return Extension(
        "fastckpt._engine",
        sources=sources("*.cc"),
        depends=sources("*.h"),
        include_dirs=["csrc"],
        language="c++",
        extra_compile_args=compile_args,
        extra_link_args=["-pthread"],
    )


setup(ext_modules=[engine()], cmdclass={"build_ext": BuildEngine})
