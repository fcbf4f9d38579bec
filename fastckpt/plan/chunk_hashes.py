"""The hashes of the chunks of a file, which tell what it has in common with another one."""

from __future__ import annotations

from typing import NamedTuple

HASH_BYTES = 16


class ChunkHashes(NamedTuple):
    """The hashes by which the next file finds what it has in common with this one.

    Attributes:
        key: the key of POLYVAL (RFC 8452), HASH_BYTES.
        chunk_bytes: size of a chunk; the last may be shorter.
        values: POLYVAL of each chunk, one after the other, HASH_BYTES each.
    """

    key: bytes
    chunk_bytes: int
    values: bytes
