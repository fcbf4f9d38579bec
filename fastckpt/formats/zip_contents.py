"""The verified directory of a torch zip of ours says which records lie where in its body.

Responsible for names of what is damaged, and for what of the body is large. It must not know how
bytes are read, nor what the records hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import islice

from fastckpt.formats import torch_zip, zip_records
from fastckpt.plan.image import BLOCK_BYTES, Index

_HEADER_BYTES_MAX = 1 << 16  # a record's header and what aligns its data


def damaged_records(
    read_at: Callable[[int, int], bytes], index: Index, begin: int, end: int
) -> list[str]:
    """Names the records whose own CRC-32 fails, of those that lie in a damaged range of a file.

    Args:
        read_at: (offset, nbytes) -> that much of the file, unverified.
        index: the file's index.
        begin, end: the range whose block checksum is wrong.

    Returns:
        Names as "data/3"; empty if the damage is in a zip header or in padding.
    """
    names = []
    directory_end = len(index.tail) - torch_zip.END_BYTES
    for entry in zip_records.directory(index.tail, directory_end):
        if entry.offset >= end or entry.nbytes > index.body_nbytes:
            continue
        data = zip_records.data_offset(read_at(entry.offset, zip_records.LOCAL_BYTES), entry.offset)
        if data is None or data >= end or data + entry.nbytes <= begin:
            continue
        crc = 0
        for at in range(data, data + entry.nbytes, BLOCK_BYTES):
            crc = zlib.crc32(read_at(at, min(BLOCK_BYTES, data + entry.nbytes - at)), crc)
        if crc != entry.crc:
            names.append(entry.name.split("/", 1)[-1])
    return names


def storages_offset(index: Index) -> int:
    """From where on the body holds no record that is large and no storage: behind data.pkl."""
    entries = [*islice(zip_records.directory(index.tail, len(index.tail) - torch_zip.END_BYTES), 2)]
    return entries[1].offset if len(entries) == 2 and entries[0].name.endswith("data.pkl") else 0


def blocks_of_large(index: Index, nbytes_min: int) -> set[int]:
    """Numbers of blocks in which nothing lies but the data of one record of this size or more.

    Not of all: what is near a header is left out.
    """
    found: set[int] = set()
    size = index.block_bytes
    for entry in zip_records.directory(index.tail, len(index.tail) - torch_zip.END_BYTES):
        if nbytes_min <= entry.nbytes <= index.body_nbytes - entry.offset:
            first = -(-(entry.offset + _HEADER_BYTES_MAX) // size)
            found.update(range(first, (entry.offset + entry.nbytes) // size))
    return found
