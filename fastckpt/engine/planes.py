"""Stores blocks as byte planes, of which those that compress are zstd frames (docs/format.md).

The exponents of a tensor's numbers are alike, and their mantissas are noise. So a block is cut into
runs of items of one kind, and a run into planes: the first bytes of all items, their second bytes
and so on. The module must not know what the items belong to, files, or checksums.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_right
from collections.abc import Sequence

import zstandard

from fastckpt._engine import join_planes, split_planes
from fastckpt.plan.image import ItemRun

# A block's runs are cut here, so that there are few of them: small ones become part of others.
GRAIN_BYTES = 64 << 10
RUNS_MAX = 4096  # of a block that is read; a writer has few for each grain

_MAGIC = 0x314E4C50  # "PLN1"
_HEAD = struct.Struct("<II")  # the magic and the number of runs; or a run's size and kind
_TURNED = 16  # added to the width of items that are turned, to make their kind
_KINDS = (1, 2, 4, 8, 2 + _TURNED, 4 + _TURNED, 8 + _TURNED)
_WIDTHS = {kind: kind % _TURNED for kind in _KINDS}
_OCTETS = 1
_WIDTH_MAX = 8
_LEVEL = 1
# For planes, whose short repeats are chance, and take more room than the codes of their bytes.
_HASH_LOG = 6
_SAMPLES, _SAMPLE_BYTES = 32, 512
_SHARE_MAX = 15 / 16  # of a sample, for a plane to be compressed

_StoredRun = tuple[int, int, tuple[int, ...]]  # its size and kind, the stored sizes of its planes


class PlanesEncoder:
    """Makes the stored form of blocks of an image, one at a time.

    Args:
        runs: where runs of equal items begin, ascending, the first at 0.
        block_bytes: the size of the image's blocks.
    """

    def __init__(self, runs: Sequence[ItemRun], block_bytes: int) -> None:
        self._begins = [run.begin for run in runs]
        # An exponent fills a byte of its own only in items of several bytes.
        self._kinds = [
            run.width + (_TURNED if run.is_float and run.width > 1 else 0) for run in runs
        ]
        few = zstandard.ZstdCompressionParameters.from_level(_LEVEL, hash_log=_HASH_LOG)
        self._compressor = zstandard.ZstdCompressor(compression_params=few)
        self._octets_compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._planes = memoryview(mmap.mmap(-1, block_bytes))

    def encode(self, block: memoryview, offset: int, target: memoryview) -> int:
        """Fills target from the block at this offset of the image; returns how many bytes."""
        runs = self._runs_of(offset, len(block))
        words = [_MAGIC, len(runs)]
        begin, end = 0, _HEAD.size + sum(_HEAD.size + 4 * _WIDTHS[kind] for _, kind in runs)
        for nbytes, kind in runs:
            stored = self._put_run(block[begin : begin + nbytes], kind, target[end:])
            words += [nbytes, kind, *stored]
            end += sum(stored)
            begin += nbytes
        if end >= len(block):  # nothing was gained: as it is, it is read without being joined
            words = [_MAGIC, 1, len(block), _OCTETS, len(block)]
            end = 4 * len(words) + len(block)
            _copy(block, target[4 * len(words) : end])
        struct.pack_into(f"<{len(words)}I", target, 0, *words)
        return end

    def _put_run(self, items: memoryview, kind: int, target: memoryview) -> list[int]:
        """Fills target from a run's planes; returns their stored sizes."""
        count = len(items) // _WIDTHS[kind]
        planes = [self._planes[at : at + count] for at in range(0, len(items), count)]
        split_planes(items, kind > _TURNED, planes)
        compressor = self._octets_compressor if kind == _OCTETS else self._compressor
        sizes: list[int] = []
        for plane in planes:
            sizes.append(_put(compressor, plane, target[sum(sizes) :]))
        return sizes

    def _runs_of(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Returns size and kind of each run of a block: each grain is of the kind of its middle."""
        runs: list[tuple[int, int]] = []
        even = nbytes - nbytes % _WIDTH_MAX
        for at in range(0, even, GRAIN_BYTES):
            size = min(GRAIN_BYTES, even - at)
            kind = self._kinds[bisect_right(self._begins, offset + at + size // 2) - 1]
            before = runs.pop()[0] if runs and runs[-1][1] == kind else 0
            runs.append((before + size, kind))
        return runs + [(nbytes - even, _OCTETS)] * (even < nbytes)


def _put(compressor: zstandard.ZstdCompressor, plane: memoryview, target: memoryview) -> int:
    """Fills target from a plane, compressed if that makes it smaller; returns how many bytes."""
    sample = _sample(plane)
    if len(compressor.compress(sample)) <= _SHARE_MAX * len(sample):
        frame = compressor.compress(plane)  # a stream into target would go through a buffer
        if len(frame) < len(plane):
            _copy(frame, target[: len(frame)])
            return len(frame)
    _copy(plane, target[: len(plane)])
    return len(plane)


def _sample(plane: memoryview) -> memoryview | bytes:
    """Returns a few parts of a plane, which tell how it is best stored; of a small one, all."""
    step = len(plane) // _SAMPLES
    if step < 2 * _SAMPLE_BYTES:
        return plane
    places = range(step // 2, len(plane), step)
    return b"".join(plane[at : at + _SAMPLE_BYTES] for at in places)


def decode(stored: bytes, block: memoryview) -> bool:
    """Fills the block from what a PlanesEncoder made; returns False if it cannot."""
    content = memoryview(stored)
    try:
        runs, at = _header(content, len(block))
        begin = 0
        for nbytes, kind, sizes in runs:
            planes = []
            for size in sizes:
                planes.append(_plane(content[at : at + size], nbytes // len(sizes)))
                at += size
            join_planes(planes, kind > _TURNED, block[begin : begin + nbytes])
            begin += nbytes
    except (ValueError, struct.error, zstandard.ZstdError):
        return False
    return True


def _plane(stored: memoryview, count: int) -> memoryview | bytes:
    """Returns a plane of `count` bytes. Raises ValueError, ZstdError: it is damaged."""
    if len(stored) == count:
        return stored
    # Checked first, so that a forged size allocates no more than a block.
    if zstandard.frame_content_size(stored) != count:
        raise ValueError("a frame of another size")
    return zstandard.ZstdDecompressor().decompress(stored, max_output_size=count)


def frame_nbytes(stored: bytes, nbytes: int) -> int:
    """Returns the size of what a PlanesEncoder made of a block of nbytes, if it can be decoded."""
    runs, at = _header(stored, nbytes)
    return at + sum(sum(sizes) for _size, _kind, sizes in runs)


def _header(stored: memoryview | bytes, nbytes: int) -> tuple[list[_StoredRun], int]:
    """Returns the runs of a block of nbytes, and the size of the header.

    Raises:
        ValueError, struct.error: it is not the header of such a block.
    """
    magic, count = _HEAD.unpack_from(stored)
    if magic != _MAGIC or count > RUNS_MAX:
        raise ValueError("this is no header")
    runs, at, end = list[_StoredRun](), _HEAD.size, 0
    for _ in range(count):
        size, kind = _HEAD.unpack_from(stored, at)
        width = _WIDTHS.get(kind, 0)
        if not size or not width or size % width:
            raise ValueError("a run has no items, or its kind is not known")
        words = struct.unpack_from(f"<{width}I", stored, at + _HEAD.size)
        runs.append((size, kind, words))
        at += _HEAD.size + 4 * width
        end += sum(words)
    if sum(size for size, _kind, _words in runs) != nbytes:
        raise ValueError("runs and block differ in their sizes")
    if at + end > len(stored):
        raise ValueError("a plane is cut off")
    return runs, at


def _copy(source: memoryview | bytes, target: memoryview) -> None:
    join_planes([source], False, target)  # without the GIL
