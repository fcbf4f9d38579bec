"""Compresses and decompresses blocks. The engine calls this where it would read or write otherwise.

A compressed file has one frame for each block, in block order from offset 0. A skippable frame of
zstd pads each frame to full pages. With the codec "zstd", a frame is a zstd frame with its content
size, and `zstd -d` restores the uncompressed file. With "planes", PlanesEncoder makes the frames.
"""

from __future__ import annotations

import errno
import mmap
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Protocol

import zstandard

from fastckpt._engine import join_planes, split_planes
from fastckpt.errors import CorruptCheckpoint, StorageError, ensure
from fastckpt.plan.image import PAGE_BYTES, ItemRun
from fastckpt.storage.file_system import reported
from fastckpt.storage.input_files import InputFile, PosixFile
from fastckpt.storage.object_upload import Upload

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
    """Encodes the blocks of an image, one at a time, with the codec "planes".

    Args:
        runs: the begins of runs of items of equal size, ascending; the first is 0.
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
        """Encodes the block at this offset of the image into target; returns the encoded size."""
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
        """Stores a run's planes in target; returns their stored sizes."""
        count = len(items) // _WIDTHS[kind]
        planes = [self._planes[at : at + count] for at in range(0, len(items), count)]
        split_planes(items, kind > _TURNED, planes)
        compressor = self._octets_compressor if kind == _OCTETS else self._compressor
        sizes: list[int] = []
        for plane in planes:
            sizes.append(_put(compressor, plane, target[sum(sizes) :]))
        return sizes

    def _runs_of(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Returns size and kind of each run of a block. A grain has the kind of its middle."""
        runs: list[tuple[int, int]] = []
        even = nbytes - nbytes % _WIDTH_MAX
        for at in range(0, even, GRAIN_BYTES):
            size = min(GRAIN_BYTES, even - at)
            kind = self._kinds[bisect_right(self._begins, offset + at + size // 2) - 1]
            before = runs.pop()[0] if runs and runs[-1][1] == kind else 0
            runs.append((before + size, kind))
        return runs + [(nbytes - even, _OCTETS)] * (even < nbytes)


def _put(compressor: zstandard.ZstdCompressor, plane: memoryview, target: memoryview) -> int:
    """Stores a plane in target, compressed if this makes it smaller; returns the stored size."""
    sample = _sample(plane)
    if len(compressor.compress(sample)) <= _SHARE_MAX * len(sample):
        frame = compressor.compress(plane)  # a stream into target would go through a buffer
        if len(frame) < len(plane):
            _copy(frame, target[: len(frame)])
            return len(frame)
    _copy(plane, target[: len(plane)])
    return len(plane)


def _sample(plane: memoryview) -> memoryview | bytes:
    """Returns samples of a plane, by which its storage is chosen; all of a small plane."""
    step = len(plane) // _SAMPLES
    if step < 2 * _SAMPLE_BYTES:
        return plane
    places = range(step // 2, len(plane), step)
    return b"".join(plane[at : at + _SAMPLE_BYTES] for at in places)


def decode(stored: bytes, block: memoryview) -> bool:
    """Decodes the output of a PlanesEncoder into the block; returns False if it is damaged."""
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
    """Returns a plane of `count` bytes. Raises ValueError or ZstdError if it is damaged."""
    if len(stored) == count:
        return stored
    # Checked first, so that a forged size allocates no more than a block.
    if zstandard.frame_content_size(stored) != count:
        raise ValueError("a frame must have the size of its plane")
    return zstandard.ZstdDecompressor().decompress(stored, max_output_size=count)


def frame_nbytes(stored: bytes, nbytes: int) -> int:
    """Returns the size of a PlanesEncoder's output for a block of nbytes, if it can be decoded."""
    runs, at = _header(stored, nbytes)
    return at + sum(sum(sizes) for _size, _kind, sizes in runs)


def _header(stored: memoryview | bytes, nbytes: int) -> tuple[list[_StoredRun], int]:
    """Returns the runs of a block of nbytes, and the size of the header."""
    magic, count = _HEAD.unpack_from(stored)
    if magic != _MAGIC or count > RUNS_MAX:
        raise ValueError("the block must begin with a header")
    runs, at, end = list[_StoredRun](), _HEAD.size, 0
    for _ in range(count):
        size, kind = _HEAD.unpack_from(stored, at)
        width = _WIDTHS.get(kind, 0)
        if not size or not width or size % width:
            raise ValueError("a run must have bytes and a known kind")
        words = struct.unpack_from(f"<{width}I", stored, at + _HEAD.size)
        runs.append((size, kind, words))
        at += _HEAD.size + 4 * width
        end += sum(words)
    if sum(size for size, _kind, _words in runs) != nbytes:
        raise ValueError("the sizes of the runs must add up to the size of the block")
    if at + end > len(stored):
        raise ValueError("a plane is truncated")
    return runs, at


def _copy(source: memoryview | bytes, target: memoryview) -> None:
    join_planes([source], False, target)  # without the GIL


# The limit of a block's wait until those before it are compressed, which were begun earlier.
TURN_WAIT_S = 600.0

_SKIPPABLE_MAGIC = 0x184D2A50
_SKIPPABLE_HEADER_BYTES = 8
_REPEATED_BYTE = 1  # the kind of a block of zstd that is one byte, however often


def padding_nbytes(nbytes: int) -> int:
    """Returns the size of the skippable frame that fills the page after a frame of nbytes. It is 0,
    or at least the 8 bytes of the header.
    """
    rest = -nbytes % PAGE_BYTES
    return rest + PAGE_BYTES if 0 < rest < _SKIPPABLE_HEADER_BYTES else rest


def _padding(nbytes: int) -> bytes:
    """Returns the skippable frame after a frame of nbytes; b"" if none is needed."""
    if not (padding := padding_nbytes(nbytes)):
        return b""
    content = padding - _SKIPPABLE_HEADER_BYTES
    header = _SKIPPABLE_MAGIC.to_bytes(4, "little") + content.to_bytes(4, "little")
    return header + bytes(content)


def stored_nbytes_max(nbytes: int) -> int:
    """Returns the most bytes that a block of nbytes takes in the file, padding included."""
    # zstd's own bound, ZSTD_COMPRESSBOUND in zstd.h, is at most nbytes + nbytes / 256 + 64, and a
    # stream adds the three bytes of an empty last block. Planes take no more than the block, but
    # for their header, which has at most 40 bytes for each of the block's runs.
    frame = nbytes + nbytes // 256 + 128
    return frame + padding_nbytes(frame) + PAGE_BYTES


class _Blocks:
    """The blocks of an image of nbytes; only the last may be shorter than block_bytes."""

    def __init__(self, nbytes: int, block_bytes: int) -> None:
        ensure(nbytes > 0 and block_bytes > 0, "a compressed image must have blocks")
        self.nbytes = nbytes
        self.block_bytes = block_bytes
        self.count = -(-nbytes // block_bytes)

    def size(self, index: int) -> int:
        return min(self.block_bytes, self.nbytes - index * self.block_bytes)

    def index_of(self, memory: memoryview, offset: int) -> int:
        """Returns the number of a transfer's block; each transfer is of one complete block."""
        index, inside = divmod(offset, self.block_bytes)
        is_whole = inside == 0 and index < self.count and len(memory) == self.size(index)
        ensure(is_whole, f"{len(memory)} bytes at {offset} must be a complete block")
        return index


class Encoder(Protocol):
    """Encodes blocks as frames, one at a time."""

    def encode(self, block: memoryview, offset: int, target: memoryview) -> int:
        """Encodes the block at this offset of the image into target, mostly without the GIL.

        Returns:
            The size of the frame. With its padding it is at most stored_nbytes_max(), the size of
                target.
        """
        ...


class ZstdEncoder:
    """Compresses each block as one zstd frame.

    Args:
        level: the zstd level. Level 1 compresses the exponents of floating-point weights as well as
            any other level; negative levels do not compress them.

    Raises:
        ValueError: zstd has no such level.
    """

    def __init__(self, level: int = 1) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level)

    def encode(self, block: memoryview, offset: int, target: memoryview) -> int:
        with self._compressor.stream_reader(block, size=len(block)) as frame:
            return frame.readinto(target)


def encoder_of(codec: str, runs: Sequence[ItemRun], block_bytes: int) -> Callable[[], Encoder]:
    """Returns a function that makes a thread's encoder for an image with these runs and blocks."""
    if codec != "planes":
        return ZstdEncoder
    return partial(PlanesEncoder, runs, block_bytes)


class _Workspace:
    """An encoder and the memory for its frames, aligned to pages for O_DIRECT."""

    def __init__(self, encoder: Encoder, block_bytes: int) -> None:
        self.encoder = encoder
        # Shared, so that a fork during a direct write copies none of its pages.
        self._memory = mmap.mmap(-1, stored_nbytes_max(block_bytes))

    def stored(self, block: memoryview, offset: int) -> memoryview:
        """Compresses and pads a block. The returned bytes are valid until the next call."""
        target = memoryview(self._memory)
        nbytes = self.encoder.encode(block, offset, target)
        padding = _padding(nbytes)
        end = nbytes + len(padding)
        ensure(end <= stored_nbytes_max(len(block)), "the frame exceeds its maximal size")
        target[nbytes:end] = padding
        return target[:end]


class FrameWriter:
    """Compresses the blocks of one image and writes their frames, one after the other, to a file.

    Several threads may call transfer() at the same time, each with its own block. Each thread has a
    workspace of slightly more than one block, for "planes" up to three blocks. Compression and
    writes overlap; between them, a block waits until the stored size of the previous block is
    known. Frames begin at a page and fill complete pages in aligned memory, so the descriptor may
    have O_DIRECT; but the engine's job must not be direct, because it would pad the last block.

    The first error ends the writing of the file: all other calls, even waiting ones, also raise it.
    """

    def __init__(
        self,
        file: PosixFile | Upload,
        nbytes: int,
        block_bytes: int,
        encoder: Callable[[], Encoder] = ZstdEncoder,
    ) -> None:
        """Stores the arguments; writes nothing.

        Args:
            file: the file, of any size; it is not read or truncated.
            nbytes: the size of the uncompressed image, at least 1.
            block_bytes: the size of its blocks, of which the last may be shorter.
            encoder: makes the encoder of a workspace.
        """
        self._file = file
        self._path = path = file.path
        self._encoder = encoder
        self._blocks = _Blocks(nbytes, block_bytes)
        self._changed = threading.Condition()
        # State below is protected by _changed. Workspaces are not thread-local, since a thread of
        # the engine is a new one to Python at each call.
        with reported("allocate memory to compress", path):
            self._idle = [_Workspace(encoder(), block_bytes)]
        self._frames: list[int] = []
        self._end = 0  # of the frames whose size is known
        self._blocks_written = 0
        self._failure: StorageError | None = None

    def transfer(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        """Writes one complete block and returns its size.

        Args:
            kind: "write".
            fd: the file's descriptor.
            memory: the block, uncompressed.
            offset: its offset in the uncompressed image.

        Raises:
            StorageError: this or another block could not be written, or this block's turn did not
                come within TURN_WAIT_S.
        """
        ensure(kind == "write" and fd == self._file.fd, "the transfer must be of this file")
        index = self._blocks.index_of(memory, offset)
        try:
            workspace = self._take_workspace()
            stored = workspace.stored(memory, offset)
            at = self._take_offset(index, len(stored))
            with reported("write", self._path, at):
                self._file.write_at(stored, at)
        except BaseException as error:
            self._fail(error)
            raise
        with self._changed:
            self._blocks_written += 1
            if self._blocks_written < self._blocks.count:
                self._idle.append(workspace)
            else:
                self._idle.clear()
        return len(memory)

    def frames(self) -> tuple[int, ...]:
        """Returns each block's stored size with padding; call this after the last transfer.

        Raises:
            StorageError: a block could not be written.
        """
        with self._changed:
            self._raise_failure()
            written = self._blocks_written == len(self._frames) == self._blocks.count
            ensure(written, f"{self._blocks_written} of {self._blocks.count} blocks were written")
            return tuple(self._frames)

    def _take_workspace(self) -> _Workspace:
        with self._changed:
            self._raise_failure()
            if self._idle:
                return self._idle.pop()
        with reported("allocate memory to compress", self._path):
            return _Workspace(self._encoder(), self._blocks.block_bytes)

    def _take_offset(self, index: int, nbytes: int) -> int:
        """Waits until all earlier blocks have their offsets; returns this block's offset."""
        with self._changed:
            ensure(index >= len(self._frames), "each block must be passed once")
            # The blocks before this one were begun earlier, and none of them waits for this one.
            self._changed.wait_for(
                lambda: self._failure is not None or len(self._frames) >= index, TURN_WAIT_S
            )
            self._raise_failure()
            if len(self._frames) < index:
                op = f"wait for block {len(self._frames)} before block {index}"
                raise StorageError(op, self._path, errno.ETIMEDOUT)
            at = self._end
            self._frames.append(nbytes)
            self._end += nbytes
            self._changed.notify_all()
            return at

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                if not isinstance(error, StorageError):
                    # A bug or a lack of memory, which this thread raises; the others only end.
                    error = StorageError("compress", self._path, errno.EIO)
                self._failure = error
            self._idle.clear()
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        """Raises a copy of the first failure, since raising an error changes its traceback."""
        first = self._failure
        if first is not None:
            raise StorageError(first.op, first.path, first.errno or errno.EIO, first.offset)


class FrameReader:
    """Reads blocks of an image from the frames that a FrameWriter wrote.

    Several threads may call transfer(), for any blocks in any order. The caller must verify the
    bytes, because a frame that cannot be decoded is read as zeros. Reads ignore the padding of
    frames, but `zstd -d` needs it.
    """

    def __init__(
        self,
        file: InputFile,
        nbytes: int,
        block_bytes: int,
        frames: Sequence[int],
        codec: str = "zstd",
        kept: dict[int, bytes] | None = None,
        unpadded: list[int] | None = None,
    ) -> None:
        """Stores the arguments; reads nothing.

        Args:
            file: the compressed file, open without O_DIRECT.
            nbytes: the size of the uncompressed image, at least 1.
            block_bytes: the size of its blocks, of which the last may be shorter.
            frames: each block's stored size, as FrameWriter.frames() returned them.
            codec: the codec with which the file was written.
            kept: receives each block's frame as stored, by block number.
            unpadded: receives the numbers of the blocks whose frames were decoded but lack the
                padding of a FrameWriter.

        Raises:
            CorruptCheckpoint: no FrameWriter can have written frames of these sizes.
        """
        self._file, path = file, file.path
        self._blocks = _Blocks(nbytes, block_bytes)
        if len(frames) != self._blocks.count:
            raise CorruptCheckpoint(
                f"{path!r} must have {self._blocks.count} frames for {nbytes} bytes, but its "
                f"index lists {len(frames)}: load another checkpoint"
            )
        for index, stored in enumerate(frames):
            limit = stored_nbytes_max(self._blocks.size(index))
            if not 0 < stored <= limit or stored % PAGE_BYTES:
                raise CorruptCheckpoint(
                    f"frame {index} of {path!r} has {stored} bytes in the index, must have a "
                    f"multiple of {PAGE_BYTES}, at most {limit}: load another checkpoint"
                )
        self._offsets = list(accumulate(frames, initial=0))
        self._codec = codec
        self._kept, self._unpadded = kept, unpadded

    def transfer(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        """Reads one complete block and returns its size. A damaged frame is read as zeros, which
        the block's checksum reveals.

        Args:
            kind: "read".
            fd: the file's descriptor.
            memory: receives the block, uncompressed.
            offset: its offset in the uncompressed image.

        Raises:
            StorageError: the file could not be read, or ends before the frame does (ENODATA).
        """
        ensure(kind == "read" and fd == self._file.fd, "the transfer must be of this file")
        index = self._blocks.index_of(memory, offset)
        is_planes = self._codec == "planes"
        stored = self._stored(index)
        if self._kept is not None:
            self._kept[index] = stored
        if not (decode if is_planes else _decompress)(stored, memory):
            memory[:] = bytes(len(memory))
        elif self._unpadded is not None:
            nbytes = (frame_nbytes if is_planes else _frame_nbytes)(stored, len(memory))
            if stored[nbytes:] != _padding(nbytes):
                self._unpadded.append(index)
        return len(memory)

    def _stored(self, index: int) -> bytes:
        """Reads a frame with its padding."""
        at, end = self._offsets[index : index + 2]
        with reported("read", self._file.path, at):
            stored = self._file.read_at(end - at, at)
        if len(stored) < end - at:
            raise StorageError("read", self._file.path, errno.ENODATA, at + len(stored))
        return stored


def _frame_nbytes(stored: bytes, _nbytes: int) -> int:
    """Returns the size of the first frame in `stored`, which was decompressed before."""
    at, is_last = zstandard.frame_header_size(stored), 0
    # RFC 8878, 3.1.1.2: three bytes before each of the frame's own blocks.
    while not is_last and at < len(stored):
        header = int.from_bytes(stored[at : at + 3], "little")
        is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == _REPEATED_BYTE else size)
    return at + 4 * zstandard.get_frame_parameters(stored).has_checksum


def _decompress(stored: bytes, target: memoryview) -> bool:
    """Decompresses the first frame in `stored` into target; returns whether this succeeded."""
    try:
        # Checked first, so that a forged size or window allocates no more than a block.
        if zstandard.frame_content_size(stored) != len(target):
            return False
        with zstandard.ZstdDecompressor().stream_reader(stored) as frame:
            return frame.readinto(target) == len(target)
    except zstandard.ZstdError:
        return False
