"""Stores blocks as byte planes, of which those that compress are zstd frames (docs/format.md).

The exponents of a tensor's numbers are alike, and their mantissas are noise. So a block is cut into
runs of items of one kind, and a run into planes: the first bytes of all items, their second bytes
and so on. A run that is the rounding of others has none, but names these. The module must not know
what the items belong to, files, or checksums.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import zstandard

from fastckpt._engine import join_planes, put_literals, round_to_bf16, split_planes
from fastckpt.engine.roundings import ITEMS_MIN, Roundings
from fastckpt.plan.image import ItemRun

# A block's runs are cut here, so that there are few of them: small ones become part of others.
GRAIN_BYTES = 64 << 10
RUNS_MAX = 4096  # of a block that is read; a writer has few for each grain

_MAGIC = 0x314E4C50  # "PLN1"
_HEAD = struct.Struct("<II")  # the magic and the number of runs; or a run's size and kind
_TURNED = 16  # added to the width of items that are turned, to make their kind
_DERIVED = 2 + 32  # items of two bytes, whose two planes are none: the halves of an offset instead
_KINDS = (1, 2, 4, 8, 2 + _TURNED, 4 + _TURNED, 8 + _TURNED, _DERIVED)
_WIDTHS = {kind: kind % _TURNED for kind in _KINDS}
_HEADER_BYTES_MAX = _HEAD.size + RUNS_MAX * (_HEAD.size + 4 * 8)
_DERIVED_BYTES_MIN = 2 * ITEMS_MIN  # so that a block has few, each of which reads other blocks
_DERIVED_AT_A_TIME = 1 << 20  # bytes
_FRAMES_KEPT = 2  # while a block is derived, whose sources ascend as a rule
# That are opened for one block, of which those of one tensor need three: a bound on the time that a
# forged block may take.
FRAMES_MAX = 16
_OCTETS = 1
_WIDTH_MAX = 8
_LEVEL = 1
# For planes, whose short repeats are chance, and take more room than the codes of their bytes.
_HASH_LOG = 6
_SAMPLES, _SAMPLE_BYTES = 32, 512
_SHARE_MAX = 15 / 16  # of a sample, for a plane to be compressed
# Of what literals take: a search for repeats is worth its time, here and in the reader, if they are
# no chance.
_REPEATS_SHARE_MAX = 7 / 8


F = TypeVar("F")
# Its size and kind, and the stored sizes of its planes, or the halves of an offset.
_StoredRun = tuple[int, int, tuple[int, ...]]
Read = Callable[[int, int], memoryview | bytes]  # so many bytes from an offset on, of a frame
Derive = Callable[[int, int, memoryview], None]  # as Masters.derive()


class PlanesEncoder:
    """Makes the stored form of blocks of an image, one at a time.

    Args:
        runs: where runs of equal items begin, ascending, the first at 0.
        block_bytes: the size of the image's blocks.
        roundings: those of the image, which its encoders share.
    """

    def __init__(
        self, runs: Sequence[ItemRun], block_bytes: int, roundings: Roundings | None = None
    ) -> None:
        self._roundings = roundings or Roundings()
        self._begins = [run.begin for run in runs]
        # An exponent fills a byte of its own only in items of several bytes.
        self._kinds = [
            run.width + (_TURNED if run.is_float and run.width > 1 else 0) for run in runs
        ]
        few = zstandard.ZstdCompressionParameters.from_level(_LEVEL, hash_log=_HASH_LOG)
        self._compressor = zstandard.ZstdCompressor(compression_params=few)
        self._octets_compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._block_bytes = block_bytes
        self._planes = memoryview(mmap.mmap(-1, block_bytes))

    def see(self, block: memoryview, offset: int) -> bool:
        return self._roundings.see(block, offset, self._planes)

    def encode(self, block: memoryview, offset: int, target: memoryview) -> int:
        """Fills target from the block at this offset of the image; returns how many bytes."""
        runs = self._runs_of(block, offset)
        words = [_MAGIC, len(runs)]
        begin, end = 0, _HEAD.size + sum(_HEAD.size + 4 * _WIDTHS[kind] for _, kind, _ in runs)
        for nbytes, kind, source in runs:
            words += (nbytes, kind)
            if kind == _DERIVED:
                words += (source % (1 << 32), source >> 32)
                self._roundings.count(nbytes)
            else:
                stored = self._put_run(block[begin : begin + nbytes], kind, target[end:])
                words += stored
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

    def _runs_of(self, block: memoryview, offset: int) -> list[tuple[int, int, int]]:
        """Returns size, kind and, if it is derived, source of each run of a block."""
        runs: list[tuple[int, int, int]] = []
        end, opened = 0, _Opened(self._block_bytes, lambda _number: None)
        for begin, nbytes, source in self._roundings.of(block, offset):
            try:
                for _ in opened.parts(source, 2 * nbytes):
                    pass
            except ValueError:
                break  # from here on, the block's runs are stored
            runs += self._stored_runs(offset + end, begin - end)
            runs.append((nbytes, _DERIVED, source))
            end = begin + nbytes
        return runs + self._stored_runs(offset + end, len(block) - end)

    def _stored_runs(self, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """Returns the runs of a part of a block: each grain is of the kind of its middle."""
        runs: list[tuple[int, int, int]] = []
        even = nbytes - nbytes % _WIDTH_MAX
        for at in range(0, even, GRAIN_BYTES):
            size = min(GRAIN_BYTES, even - at)
            kind = self._kinds[bisect_right(self._begins, offset + at + size // 2) - 1]
            before = runs.pop()[0] if runs and runs[-1][1] == kind else 0
            runs.append((before + size, kind, 0))
        return runs + [(nbytes - even, _OCTETS, 0)] * (even < nbytes)


def _put(compressor: zstandard.ZstdCompressor, plane: memoryview, target: memoryview) -> int:
    """Fills target from a plane, compressed if that makes it smaller; returns how many bytes."""
    sample = _sample(plane)
    of_literals = put_literals(sample, target[: len(sample)]) or len(sample)
    of_repeats = len(compressor.compress(sample))
    limit, smaller = _SHARE_MAX * len(sample), target[: len(plane) - 1]
    if of_repeats < _REPEATS_SHARE_MAX * of_literals and of_repeats <= limit:
        frame = compressor.compress(plane)  # a stream into target would go through a buffer
        if len(frame) <= len(smaller):
            _copy(frame, target[: len(frame)])
            return len(frame)
    elif of_literals <= limit and (nbytes := put_literals(plane, smaller)):
        return nbytes
    _copy(plane, target[: len(plane)])
    return len(plane)


def _sample(plane: memoryview) -> memoryview | bytes:
    """Returns a few parts of a plane, which tell how it is best stored; of a small one, all."""
    step = len(plane) // _SAMPLES
    if step < 2 * _SAMPLE_BYTES:
        return plane
    places = range(step // 2, len(plane), step)
    return b"".join(plane[at : at + _SAMPLE_BYTES] for at in places)


class Frame:
    """The stored form of one block, which gives any part of it.

    Args:
        read: returns as many bytes of the frame from an offset on.
        stored_nbytes, nbytes: the size of the frame, and of the block.

    Raises:
        ValueError, struct.error: it is not a frame of such a block. What `read` raises.
    """

    def __init__(self, read: Read, stored_nbytes: int, nbytes: int) -> None:
        self._read = read
        head = read(0, min(stored_nbytes, _HEADER_BYTES_MAX))
        self._runs, self._planes_at = _header(head, stored_nbytes, nbytes)
        self._planes: dict[int, bytes] = {}  # those that were compressed, by their place

    def fill(self, begin: int, target: memoryview, derive: Derive) -> None:
        """Fills target from the block's bytes from `begin` on, of which it has to have as many.

        Raises:
            ValueError, ZstdError: a plane is damaged. What `read` and `derive` raise.
        """
        end, first, at = begin + len(target), 0, self._planes_at
        for nbytes, kind, words in self._runs:
            low, high = max(begin, first), min(end, first + nbytes)
            if low < high:
                part = target[low - begin : high - begin]
                if kind == _DERIVED:
                    derive(words[0] + (words[1] << 32) + 2 * (low - first), low, part)
                else:
                    self._join(kind, nbytes, words, at, low - first, part)
            first += nbytes
            at += 0 if kind == _DERIVED else sum(words)

    def _join(
        self, kind: int, nbytes: int, sizes: Sequence[int], at: int, begin: int, target: memoryview
    ) -> None:
        """Fills target from byte `begin` on of a run, whose planes are stored from `at` on."""
        width = len(sizes)
        low, high = begin // width, -(-(begin + len(target)) // width)
        planes = []
        for size in sizes:
            planes.append(self._plane(at, size, nbytes // width, low, high))
            at += size
        if (high - low) * width == len(target):
            join_planes(planes, kind > _TURNED, target)
            return
        items = memoryview(bytearray((high - low) * width))  # some of their bytes are not wanted
        join_planes(planes, kind > _TURNED, items)
        _copy(items[begin - low * width :][: len(target)], target)

    def _plane(self, at: int, size: int, count: int, low: int, high: int) -> memoryview | bytes:
        """Returns bytes [low, high) of a plane of `count`, which is stored in `size`."""
        if size == count:
            return self._read(at + low, high - low)
        if at not in self._planes:
            stored = self._read(at, size)
            # Checked first, so that a forged size allocates no more than a block.
            if zstandard.frame_content_size(stored) != count:
                raise ValueError("a frame of another size")
            decompressor = zstandard.ZstdDecompressor()
            self._planes[at] = decompressor.decompress(stored, max_output_size=count)
        return memoryview(self._planes[at])[low:high]


class _Opened(Generic[F]):
    """The frames that have been opened to derive one block, of which the last ones are kept.

    Args:
        block_bytes: the size of the image's blocks.
        open_frame: returns the frame of a block, by its number.
    """

    def __init__(self, block_bytes: int, open_frame: Callable[[int], F]) -> None:
        self._block_bytes = block_bytes
        self._open_frame = open_frame
        self._left = FRAMES_MAX
        self._kept: dict[int, F] = {}  # in the order of their use

    def parts(self, offset: int, nbytes: int) -> Iterator[tuple[F, int, int]]:
        """Yields the frames that have a range of the image, each with where that begins in the
        frame's block, and how many bytes of it that block has.

        Raises:
            ValueError: more than FRAMES_MAX would have been opened.
        """
        end = offset + nbytes
        while offset < end:
            number, inside = divmod(offset, self._block_bytes)
            count = min(end - offset, self._block_bytes - inside)
            yield self._frame(number), inside, count
            offset += count

    def _frame(self, number: int) -> F:
        if number in self._kept:
            frame = self._kept.pop(number)
        elif self._left == 0:
            raise ValueError(f"a block is derived from more than {FRAMES_MAX} others")
        else:
            frame = self._open_frame(number)
            self._left -= 1
        self._kept[number] = frame
        if len(self._kept) > _FRAMES_KEPT:
            del self._kept[next(iter(self._kept))]
        return frame


class Masters:
    """The fp32 items of an image to which derived runs of one block are rounded.

    Args:
        open_frame: returns the frame of a block, by its number.
        block_bytes: the size of the image's blocks.
        offset: the offset of the block that is derived.
    """

    def __init__(self, open_frame: Callable[[int], Frame], block_bytes: int, offset: int) -> None:
        self._opened = _Opened(block_bytes, open_frame)
        self._offset = offset

    def derive(self, source: int, at: int, target: memoryview) -> None:
        """Fills the target, which is at byte `at` of the block, from the fp32 items from the
        image's byte `source` on.

        Raises:
            ValueError: these do not lie before it, are themselves derived, or lie in too many
                blocks. What reading their frames raises.
        """
        if source + 2 * len(target) > self._offset + at:
            raise ValueError("items are derived from what follows them")
        items = memoryview(bytearray(2 * min(len(target), _DERIVED_AT_A_TIME)))
        for begin in range(0, len(target), _DERIVED_AT_A_TIME):
            part = target[begin : begin + _DERIVED_AT_A_TIME]
            taken = items[: 2 * len(part)]
            self._fill(source + 2 * begin, taken)
            round_to_bf16(taken, part)

    def _fill(self, offset: int, target: memoryview) -> None:
        """Fills target from the image's bytes from this offset on."""
        begin = 0
        for frame, inside, nbytes in self._opened.parts(offset, len(target)):
            frame.fill(inside, target[begin : begin + nbytes], refuse_to_derive)
            begin += nbytes


def refuse_to_derive(_source: int, _at: int, _target: memoryview) -> None:
    """Raises ValueError: where one frame is all there is, or what is derived would be again."""
    raise ValueError("derived items have nothing to be derived from")


def decode(stored: bytes, block: memoryview, derive: Derive = refuse_to_derive) -> bool:
    """Fills the block from what a PlanesEncoder made; returns False if it cannot.

    Args:
        derive: as Masters.derive(); what else than a ValueError it raises is raised here.
    """
    content = memoryview(stored)
    try:
        frame = Frame(lambda at, nbytes: content[at : at + nbytes], len(stored), len(block))
        frame.fill(0, block, derive)
    except (ValueError, struct.error, zstandard.ZstdError):
        return False
    return True


def frame_nbytes(stored: bytes, nbytes: int) -> int:
    """Returns the size of what a PlanesEncoder made of a block of nbytes, if it can be decoded."""
    runs, at = _header(stored, len(stored), nbytes)
    return at + sum(sum(words) for _size, kind, words in runs if kind != _DERIVED)


def _header(
    stored: memoryview | bytes, stored_nbytes: int, nbytes: int
) -> tuple[list[_StoredRun], int]:
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
        if kind == _DERIVED and size < _DERIVED_BYTES_MIN:
            raise ValueError("a derived run is too small")
        words = struct.unpack_from(f"<{width}I", stored, at + _HEAD.size)
        runs.append((size, kind, words))
        at += _HEAD.size + 4 * width
        end += 0 if kind == _DERIVED else sum(words)
    if sum(size for size, _kind, _words in runs) != nbytes:
        raise ValueError("runs and block differ in their sizes")
    if at + end > stored_nbytes:
        raise ValueError("a plane is cut off")
    return runs, at


def _copy(source: memoryview | bytes, target: memoryview) -> None:
    join_planes([source], False, target)  # without the GIL
