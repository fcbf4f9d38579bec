"""The stub of cuFile (tests/stubs/cufile.cc): builds it, and steers it from Python.

Responsible for compiling it once and for its functions' types. Must not know what is tested.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

from tests.kit import compiler
from tests.kit.paths import TESTS

SOURCE = TESTS / "stubs" / "cufile.cc"
ALL = -1
# Not a code of cuFile's: the transfer fails with an errno.
FILE_SYSTEM = 1


class Alive(NamedTuple):
    """What callers have made and not freed."""

    drivers: int
    files: int
    buffers: int


def built(directory: Path, *defines: str) -> Path:
    """The library, in a directory; compiled with these macros."""
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    flags += [f"-D{name}" for name in defines]
    name = f"{'-'.join(['libcufile', *defines])}.so"
    return compiler.library(directory, name, SOURCE, *flags, "-ldl")


class CufileStub:
    """The stub as loaded into this process.

    Attributes:
        path: for those who load it by name.
    """

    def __init__(self, path: Path, driver: str) -> None:
        self.path = str(path)
        self._driver = driver
        self._library = ctypes.CDLL(self.path)
        self.configure()

    def configure(self) -> None:
        """Forgets calls, failures and properties."""
        self._library.stub_configure(self._driver.encode())

    def fail(
        self, name: str, code: int, number: int = 0, *, after: int = 0, times: int = ALL
    ) -> None:
        """So many calls of a function fail after so many that do not.

        Args:
            name: of the function.
            code: of cuFile; FILE_SYSTEM for a failure of the file system's.
            number: the CUresult, or the errno of the file system's.
            after: calls that do not fail.
            times: calls that do.
        """
        self._library.stub_fail(name.encode(), after, times, code, number)

    def at_most(self, nbytes: int) -> None:
        """What a transfer moves at most."""
        self._library.stub_at_most(ctypes.c_size_t(nbytes))

    def properties(
        self,
        version: tuple[int, int] = (0, 0),
        status: int = 0,
        control: int = 0,
        features: int = 0,
    ) -> None:
        """What the driver says of itself."""
        self._library.stub_properties(*version, status, control, features)

    def calls(self, name: str) -> int:
        """How often a function was called."""
        return int(self._library.stub_calls(name.encode()))

    def alive(self) -> Alive:
        """What is alive."""
        values = (ctypes.c_uint64 * 3)()
        self._library.stub_alive(values)
        return Alive(*values)
