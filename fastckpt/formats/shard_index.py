"""The index of one writer in a step directory: its pieces of tensors, and its file's checksums.

Responsible for the bytes of an index, and for the names of files and pieces
(docs/reference/format.md). It must not know the manifest, files, or how tensors are split and
moved.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats.safetensors import DTYPES, METADATA, kind_of
from fastckpt.formats.strict_json import (
    KINDS_MAX,
    check_block_bytes,
    check_members,
    check_texts,
    columns_of,
    decode,
    encode,
    is_numbers,
    refuse_other_version,
    shown,
    without_numbers,
)
from fastckpt.plan.boxes import Box
from fastckpt.plan.image import PAGE_BYTES, block_count

FORMAT, VERSION = "fastckpt-index", 3
DELTA_VERSION = 4  # of the index of a file that holds a difference
INDEX_BYTES_MAX = 1 << 30
PER_RANK = "fastckpt.per_rank"
_SUFFIXES = {None: "", "zstd": ".zst", "planes": ".planes"}  # of files, by their codec
_CRC_DIGITS = 8
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_NONCE = re.compile("[0-9a-f]{16,64}")
_HEX = re.compile("[0-9a-f]*")


class Piece(NamedTuple):
    """A rectangle of a tensor, and its offset in a writer's (uncompressed) safetensors file.

    `dtype` is a name of the safetensors format, and `shape` that of the complete tensor. `box` is
    the stored part, row-major from offset `begin` of the file.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    begin: int


# As Piece._make, without a function of Python for each of 100,000.
_piece: Callable[[Sequence[Any]], Piece] = partial(tuple.__new__, Piece)


class Delta(NamedTuple):
    """The checksums of a file that holds the XOR of two files with the same layout: the file that
    the index describes, and the file of the same writer in an earlier step.

    Attributes:
        base: the nonce of the earlier step.
        block_crcs: CRC-32 of each block of the file that the index describes.
    """

    base: str
    block_crcs: tuple[int, ...]


@dataclass(frozen=True)
class ShardIndex:
    """The index of the data that one writer stored, with the checksums to verify it.

    Attributes:
        nonce: 16 to 64 hex digits, the same in every file of one save.
        rank: the writer's rank.
        file: name of its safetensors file.
        file_nbytes: size of that file as stored.
        nbytes: size of the uncompressed safetensors file.
        block_bytes: size of a block of that file; the last block may be shorter.
        block_crcs: CRC-32 of each block.
        codec: None; or "zstd" or "planes" if each block is stored as a frame of this codec.
        frames: with a codec, the stored size of each block's frame including its padding; else
            empty.
        pieces: the pieces of tensors.
        per_rank: begin and size in bytes of the entry PER_RANK, or None.
        delta: set if the file holds a difference; None if it holds the pieces themselves.
    """

    nonce: str
    rank: int
    file: str
    file_nbytes: int
    nbytes: int
    block_bytes: int
    block_crcs: tuple[int, ...]
    codec: str | None
    frames: tuple[int, ...]
    pieces: tuple[Piece, ...]
    per_rank: tuple[int, int] | None
    delta: Delta | None = None

    @property
    def whole_crcs(self) -> tuple[int, ...]:
        """CRC-32 of each block of the file with the pieces, of which the stored one may be the
        difference from another.
        """
        return self.block_crcs if self.delta is None else self.delta.block_crcs

    def is_difference_from(self, base: ShardIndex) -> bool:
        """Returns whether the file is the difference of the file that this index describes from
        that of another index, by their checksums. For blocks of equal size, crc(a ^ b) is
        crc(a) ^ crc(b) ^ crc(zeros).
        """
        own, other = ((it.nbytes, it.block_bytes, it.pieces) for it in (self, base))
        if own != other:
            return False
        last = self.nbytes - (len(self.block_crcs) - 1) * self.block_bytes
        zeros = [zlib.crc32(bytes(nbytes)) for nbytes in (self.block_bytes, last)]
        columns = zip(self.whole_crcs, base.whole_crcs, self.block_crcs, strict=True)
        sums = [whole ^ before ^ difference for whole, before, difference in columns]
        return sums == [zeros[0]] * (len(sums) - 1) + zeros[1:]

    @cached_property
    def by_key(self) -> dict[str, list[Piece]]:
        """The pieces of each tensor, by its key."""
        pieces_of: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            pieces_of.setdefault(piece.key, []).append(piece)
        return pieces_of

    def keys_in(self, begin: int, end: int) -> list[str]:
        """Returns the keys of the tensors with bytes in a range of the uncompressed file."""
        return sorted(
            {
                piece.key
                for piece in self.pieces
                if piece.begin < end
                and piece.begin + piece.box.numel * DTYPES[piece.dtype].itemsize > begin
            }
        )

    def to_bytes(self) -> bytes:
        """Returns the content of the index's file. Raises ValueError like validate()."""
        lists: dict[tuple[int, ...], list[int]] = {}  # of which pieces have many in common

        def listed(numbers: tuple[int, ...]) -> list[int]:
            return lists.setdefault(numbers, [*numbers])

        delta = self.delta
        written = {
            "format": FORMAT,
            "version": VERSION if delta is None else DELTA_VERSION,
            "nonce": self.nonce,
            "rank": self.rank,
            "file": self.file,
            "file_nbytes": self.file_nbytes,
            "nbytes": self.nbytes,
            "block_bytes": self.block_bytes,
            "crc32": "".join(map(crc_digits, self.block_crcs)),
            "codec": self.codec,
            "frames": [*self.frames],
            "per_rank": None if self.per_rank is None else [*self.per_rank],
            **({} if delta is None else _written(delta)),
            "pieces": [
                {
                    "key": piece.key,
                    "dtype": piece.dtype,
                    "shape": listed(piece.shape),
                    "offset": listed(piece.box.offsets),
                    "size": listed(piece.box.sizes),
                    "at": piece.begin,
                }
                for piece in self.pieces
            ],
        }
        validate(written)
        content = lines(written) + b"}\n"
        if len(content) > INDEX_BYTES_MAX:
            raise ValueError(
                f"an index has {len(content)} bytes, must be at most {INDEX_BYTES_MAX}"
            )
        return content

    @classmethod
    def from_bytes(cls, content: bytes) -> ShardIndex:
        """Decodes the result of to_bytes(); Writer.parse_index() verifies its checksum first.

        Raises:
            CorruptCheckpoint: it is malformed.
            IncompatibleCheckpoint: it has another version.
        """
        if len(content) > INDEX_BYTES_MAX:
            raise CorruptCheckpoint(f"{len(content)} bytes are too many for an index")
        try:
            written: Any = decode(content)
            check_version(written, FORMAT, (VERSION, DELTA_VERSION))
            pieces = validate(written)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"the index is malformed: {error}") from None
        per_rank = written["per_rank"]
        return cls(
            nonce=written["nonce"],
            rank=written["rank"],
            file=written["file"],
            file_nbytes=written["file_nbytes"],
            nbytes=written["nbytes"],
            block_bytes=written["block_bytes"],
            block_crcs=_unpacked(written["crc32"]),
            codec=written["codec"],
            frames=tuple(written["frames"]),
            pieces=pieces,
            per_rank=None if per_rank is None else (per_rank[0], per_rank[1]),
            delta=_delta_of(written),
        )


def _written(delta: Delta) -> dict[str, str]:
    return {
        "base": delta.base,
        "whole_crc32": "".join(map(crc_digits, delta.block_crcs)),
    }


def _delta_of(written: Any) -> Delta | None:
    if written["version"] == VERSION:
        return None
    return Delta(written["base"], _unpacked(written["whole_crc32"]))


def _unpacked(digits: str) -> tuple[int, ...]:
    return struct.unpack(f">{len(digits) // _CRC_DIGITS}I", bytes.fromhex(digits))


def validate(index: Any) -> tuple[Piece, ...]:
    """Returns the pieces; raises ValueError unless this is an index's JSON. Both writers and
    readers use this check.
    """
    kinds: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(("format", "nonce", "file", "crc32"), str),
        **dict.fromkeys(("version", "rank", "file_nbytes", "nbytes", "block_bytes"), int),
        **dict.fromkeys(("frames", "pieces"), list),
        "codec": (str, type(None)),
        "per_rank": (list, type(None)),
    }
    is_delta = isinstance(index, dict) and index.get("version") == DELTA_VERSION
    if is_delta:
        kinds |= dict.fromkeys(("base", "whole_crc32"), str)
    check_members(index, kinds, "it")
    if index["format"] != FORMAT or index["version"] not in (VERSION, DELTA_VERSION):
        raise ValueError(f"it is a {shown(index['format'])} of version {index['version']}")
    check_nonce(index["nonce"])
    check_file_name(index["file"])
    block_bytes = index["block_bytes"]
    check_block_bytes(block_bytes)
    blocks = block_count(index["nbytes"], block_bytes)
    _check_crcs(index["crc32"], blocks)
    if is_delta:
        check_nonce(index["base"])
        _check_crcs(index["whole_crc32"], blocks)
        if index["per_rank"] is not None:
            raise ValueError("per_rank must be null in a difference")
    _check_frames(index, blocks)
    return _check_pieces(index)


def _check_crcs(digits: str, blocks: int) -> None:
    if blocks == 0 or len(digits) != _CRC_DIGITS * blocks or _HEX.fullmatch(digits) is None:
        raise ValueError(f"crc32 must be one CRC-32 of 8 hex digits for each of {blocks} blocks")


def _check_frames(index: Any, blocks: int) -> None:
    codec, frames, file_nbytes = index["codec"], index["frames"], index["file_nbytes"]
    if codec is None:
        if frames or file_nbytes != index["nbytes"]:
            raise ValueError("frames or a different stored size need a codec")
        return
    if codec not in _SUFFIXES:
        raise ValueError(f"codec is {shown(codec)}, must be null, zstd or planes")
    if not is_numbers(frames) or len(frames) != blocks:
        raise ValueError(f"frames must be {blocks} numbers, one for each block")
    if any(not frame or frame % PAGE_BYTES for frame in frames) or sum(frames) != file_nbytes:
        raise ValueError(f"frames must be multiples of {PAGE_BYTES} with the sum {file_nbytes}")


_PIECE_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("key", "dtype"), str),
    **dict.fromkeys(("shape", "offset", "size"), list),
    "at": int,
}


def _check_pieces(index: Any) -> tuple[Piece, ...]:
    """Returns the pieces; raises ValueError unless they are inside their tensors and disjoint."""
    columns = columns_of(index["pieces"], _PIECE_KINDS, "a piece")
    keys, dtypes, shapes, offsets, sizes, begins = columns
    check_texts(keys)
    for lists in (shapes, offsets, sizes):
        wrong = without_numbers(lists)
        if wrong is not None:
            _check_piece(*(column[wrong] for column in columns[:5]))  # raises
    rectangles: dict[tuple[Any, ...], tuple[tuple[int, ...], Box, int]] = {}
    found = []
    for number, form in enumerate(
        zip(dtypes, map(tuple, shapes), map(tuple, offsets), map(tuple, sizes), strict=True)
    ):
        rectangle = rectangles.get(form)
        if rectangle is None:
            its_nbytes = _check_piece(*(column[number] for column in columns[:5]))
            rectangle = form[1], Box(*form[2:]), its_nbytes
            if len(rectangles) < KINDS_MAX:
                rectangles[form] = rectangle
        found.append(rectangle)
    wholes, boxes, nbytes = ([*map(itemgetter(member), found)] for member in range(3))
    pieces = tuple(map(_piece, zip(keys, dtypes, wholes, boxes, begins, strict=True)))
    extents = [*zip(begins, nbytes, keys, strict=True)]
    if index["per_rank"] is not None:
        if not is_numbers(index["per_rank"]) or len(index["per_rank"]) != 2:
            raise ValueError("per_rank must be a list of two numbers")
        if index["per_rank"][1] == 0:
            raise ValueError("per_rank must be an entry with bytes")
        extents.append((*index["per_rank"], PER_RANK))
    _check_extents(extents, index["nbytes"])
    return pieces


def _check_extents(extents: list[tuple[int, int, str]], file_nbytes: int) -> None:
    """Raises ValueError if pieces (first byte, size, key) overlap or exceed the file."""
    extents.sort()
    end = 0
    for begin, nbytes, key in extents:
        if begin < end and nbytes:
            raise ValueError(f"a piece of {shown(key)} overlaps another in the file")
        end = max(end, begin + nbytes)
    if end > file_nbytes:
        raise ValueError(f"pieces end at {end}, but the file ends at {file_nbytes}")


def _check_piece(key: str, dtype: Any, shape: Any, offset: Any, size: Any) -> int:
    """Returns a piece's size in bytes; raises ValueError unless it is inside its tensor."""
    kind_of(dtype, shape, key)
    nbytes = kind_of(dtype, size, key).nbytes
    if not is_numbers(offset) or not len(offset) == len(size) == len(shape):
        raise ValueError(f"a piece of {shown(key)} must have the tensor's dimensions")
    if any(o + s > end for o, s, end in zip(offset, size, shape, strict=True)):
        raise ValueError(f"a piece of {shown(key)} must be inside its tensor")
    return nbytes


def check_version(written: object, form: str, versions: Sequence[int]) -> None:
    """Raises IncompatibleCheckpoint if this is the format `form`, but in none of these versions."""
    if isinstance(written, dict) and written.get("format") == form:
        refuse_other_version(f"the {form}", written.get("version"), *versions)


def check_nonce(nonce: str) -> None:
    if _NONCE.fullmatch(nonce) is None:
        raise ValueError(f"nonce {shown(nonce)} must be 16 to 64 hex digits")


def check_file_name(name: str) -> None:
    """Raises ValueError unless this is a name of a visible file in the directory itself."""
    if _FILE_NAME.fullmatch(name) is None:
        raise ValueError(
            f"file name {shown(name)} must be 1 to 100 characters of [A-Za-z0-9._-], and not hidden"
        )


def crc_digits(crc: int) -> str:
    return f"{crc:08x}"


def lines(written: dict[str, Any]) -> bytes:
    """Encodes JSON without the closing brace; each item of the last member, a list, has a line."""
    *_, (name, items) = written.items()
    opening = encode(written | {name: []})[: -len("]}")]
    rows = ",".join(f"\n{encode(item)}" for item in items)
    return f"{opening}{rows}\n]".encode()


def shard_name(rank: int, codec: str | None, part: str | None = None) -> str:
    return f"{_of_rank(rank, part)}.safetensors{_SUFFIXES[codec]}"


def index_name(rank: int, part: str | None = None) -> str:
    return f"{_of_rank(rank, part)}.json"


def _of_rank(rank: int, part: str | None) -> str:
    return f"rank-{rank:05d}" + (f"-{part}" if part else "")


def entry_name(key: str, shape: Sequence[int], box: Box) -> str:
    """Returns a piece's name in its safetensors file; different pieces have different names."""
    if box.sizes != tuple(shape):
        return f"{key}@{','.join(map(str, box.offsets))}"
    # With "@" behind it, a key is not taken for another tensor's piece or for a reserved name.
    return f"{key}@" if "@" in key or key in (PER_RANK, METADATA) else key
