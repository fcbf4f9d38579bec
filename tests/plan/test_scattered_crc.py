"""The CRC-32 of any number of zeros, which contributions to a file's are joined with."""

from __future__ import annotations

import zlib

import pytest

from fastckpt.directories.shared_files import crc_of_zeros
from fastckpt.engine.staging import combine_crcs


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 7, 4096, 100_001])
def test_the_crc_of_zeros(nbytes: int) -> None:
    assert crc_of_zeros(nbytes, combine_crcs) == zlib.crc32(bytes(nbytes))
