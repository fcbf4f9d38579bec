"""The records in the body of a torch zip of ours, as its verified directory lists them.

Responsible for naming damaged records, and for finding large ones. It must not know how bytes are
read, nor what the records hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from fastckpt.formats import torch_zip, zip_records
from fastckpt.plan.image import BLOCK_BYTES, BlockChecksums

_HEADER_BYTES_MAX = 1 << 16  # a record's header and what aligns its data


def damaged_records(
    read_at: Callable[[int, int], bytes], index: BlockChecksums, begin: int, end: int
) -> list[str]:
    """Returns the names of damaged records, by their own CRC-32s, in a damaged range of a file.

    Args:
        read_at: (offset, nbytes) -> that much of the file, unverified.
        index: the file's index.
        begin, end: the range whose block checksum is wrong.

    Returns:
        Names such as "data/3"; none if the damage is in a zip header or in padding.
    """
    names = []
    directory = _directory(index)
    for name, offset, nbytes, expected in zip(
        directory.names, directory.offsets, directory.sizes, directory.crcs, strict=True
    ):
        if offset >= end or nbytes > index.body_nbytes:
            continue
        data = zip_records.data_offset(read_at(offset, zip_records.LOCAL_BYTES), offset)
        if data is None or data >= end or data + nbytes <= begin:
            continue
        crc = 0
        for at in range(data, data + nbytes, BLOCK_BYTES):
            crc = zlib.crc32(read_at(at, min(BLOCK_BYTES, data + nbytes - at)), crc)
        if crc != expected:
            names.append(name.split("/", 1)[-1])
    return names


def _directory(index: BlockChecksums) -> zip_records.Directory:
    return zip_records.directory(index.tail, len(index.tail) - torch_zip.END_BYTES)


def storages_offset(index: BlockChecksums) -> int:
    """Returns where, behind data.pkl, the storages begin; 0 if data.pkl is not the first record."""
    names, offsets = _directory(index)[:2]
    return offsets[1] if len(names) >= 2 and names[0].endswith("data.pkl") else 0


def blocks_of_large(index: BlockChecksums, nbytes_min: int) -> set[int]:
    """Returns blocks that hold only data of one record of this size or more, by their numbers.

    Blocks near a header are left out.
    """
    found: set[int] = set()
    size = index.block_bytes
    directory = _directory(index)
    for offset, nbytes in zip(directory.offsets, directory.sizes, strict=True):
        if nbytes_min <= nbytes <= index.body_nbytes - offset:
            first = -(-(offset + _HEADER_BYTES_MAX) // size)
            found.update(range(first, (offset + nbytes) // size))
    return found
