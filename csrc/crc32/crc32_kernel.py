"""Makes crc32_ptx.h from crc32_kernel.h with NVRTC, NVIDIA's run-time compiler; needs no GPU.

    python csrc/crc32/crc32_kernel.py libnvrtc.so.12

NVRTC comes with a CUDA toolkit, or alone as
nvidia-cuda-nvrtc-cu12.
"""

from __future__ import annotations

import ctypes
import re
import sys
import textwrap
from pathlib import Path

SOURCE = Path(__file__).with_name("crc32_kernel.h")
TARGET = Path(__file__).with_name("crc32_ptx.h")
# Pascal's, which drivers compile for every later GPU, too.
OPTIONS = (b"--gpu-architecture=compute_60", b"--std=c++17")
# NVRTC writes the version of its own release, which older drivers refuse. This version has all the
# instructions used, as ptxas confirms.
PTX_VERSION = "6.0"

HEADER = """\
// Made by crc32_kernel.py from crc32_kernel.h with NVRTC {version}; do not edit. The kernel in
// the assembly language that every driver since CUDA 9 compiles for its GPU.
#pragma once

namespace fastckpt {{

inline constexpr char kCrc32Ptx[] = R"ptx({ptx})ptx";

}}  // namespace fastckpt
"""


class Compiler:
    """NVRTC, loaded from a library."""

    def __init__(self, library: str) -> None:
        self._nvrtc = ctypes.CDLL(library)
        self._nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _require(self, result: int, log: bytes = b"") -> None:
        if result != 0:
            reason = self._nvrtc.nvrtcGetErrorString(result).decode()
            raise RuntimeError(f"NVRTC: {reason}\n{log.decode()}")

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._require(self._nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return f"{major.value}.{minor.value}"

    def _text(self, kind: str, program: ctypes.c_void_p) -> bytes:
        nbytes = ctypes.c_size_t()
        self._require(getattr(self._nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(nbytes)))
        text = ctypes.create_string_buffer(nbytes.value)
        self._require(getattr(self._nvrtc, f"nvrtcGet{kind}")(program, text))
        return text.value

    def ptx(self, source: str) -> str:
        """Returns the PTX that the compiler makes from a source."""
        program = ctypes.c_void_p()
        self._require(
            self._nvrtc.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), SOURCE.name.encode(), 0, None, None
            )
        )
        try:
            options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
            result = self._nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
            self._require(result, self._text("ProgramLog", program))
            return self._text("PTX", program).decode()
        finally:
            self._nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def tidied(ptx: str) -> str:
    """Removes comments, sets PTX_VERSION, and fills lines, since nobody reads them."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    ptx = re.sub(r"(?m)^\.version \d+\.\d+ *$", f".version {PTX_VERSION}", ptx)
    head, body = ptx.split(".visible", 1)
    lines = [" ".join(line.split()) for line in head.splitlines()]
    body = " ".join(f".visible{body}".split())
    lines += textwrap.wrap(body, 100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line for line in lines if line) + "\n"


def made_by(library: str) -> str:
    """Returns the text of the header."""
    compiler = Compiler(library)
    ptx = tidied(compiler.ptx(SOURCE.read_text(encoding="utf-8")))
    return HEADER.format(version=compiler.version(), ptx=ptx)


if __name__ == "__main__":
    TARGET.write_text(made_by(*sys.argv[1:]), encoding="utf-8")
