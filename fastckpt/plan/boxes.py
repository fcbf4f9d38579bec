"""Rectangles of row-major tensors: the pieces that a rank writes, and the copies that a load makes.

Responsible for splitting, intersecting and covering. The results are the same on every rank, so
ranks agree without communication.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from math import inf, nextafter, prod
from operator import add, mul
from random import SystemRandom
from typing import NamedTuple
from zlib import crc32

# ---- Rows: runs of bytes, with strides, that the engine moves between a file and memory.
# Responsible for making few and long runs of a rectangle, and for the blocks that these lie in.

# File offset, address, bytes of a run, number of runs, stride in the file, stride in memory.
CopyRow = tuple[int, int, int, int, int, int]


def strided_copies(
    sizes: Sequence[int],
    file_offset: int,
    file_strides: Sequence[int],
    address: int,
    address_strides: Sequence[int],
    itemsize: int,
) -> list[CopyRow]:
    """Returns the rows that copy a rectangle between a file and memory.

    Each size is at least 1; strides are in elements. Runs have the greatest possible length.
    """
    nbytes = itemsize
    steps: list[tuple[int, int, int]] = []  # count, file stride, address stride; innermost first
    for dim in reversed(range(len(sizes))):
        size = sizes[dim]
        file_stride, address_stride = file_strides[dim] * itemsize, address_strides[dim] * itemsize
        if size > 1:
            count, file_step, address_step = steps[-1] if steps else (nbytes, 1, 1)
            if file_stride == count * file_step and address_stride == count * address_step:
                # In the file and in memory, this dimension continues the one inside it.
                if steps:
                    steps[-1] = (count * size, file_step, address_step)
                else:
                    nbytes *= size
            else:
                steps.append((size, file_stride, address_stride))
    row, outer = (steps[0], steps[1:]) if steps else ((1, nbytes, nbytes), [])
    starts = [(file_offset, address)]
    for count, file_step, address_step in reversed(outer):
        starts = [
            (in_file + i * file_step, in_memory + i * address_step)
            for in_file, in_memory in starts
            for i in range(count)
        ]
    return [(in_file, in_memory, nbytes, *row) for in_file, in_memory in starts]


def blocks_of(rows: Iterable[CopyRow], block_bytes: int) -> list[int]:
    """Returns the numbers of the blocks that contain parts of the rows, ascending."""
    blocks: set[int] = set()
    for offset, _address, nbytes, count, stride, _address_stride in rows:
        if stride <= block_bytes:
            end = offset + (count - 1) * stride + nbytes
            blocks.update(range(offset // block_bytes, (end - 1) // block_bytes + 1))
            continue
        for number in range(count):
            begin = offset + number * stride
            blocks.update(range(begin // block_bytes, (begin + nbytes - 1) // block_bytes + 1))
    return sorted(blocks)


# One rank writes a tensor below this size: cutting it would cost more in indexes than it saves.
UNCUT_BYTES = 64 << 10
# A cut moves to the end of a row, by at most half of 1/ROUNDING of what a rank writes.
ROUNDING = 1000

_FIELD = (1 << 127) - 1  # a prime


class Box(NamedTuple):
    """A rectangle of a tensor: one offset and one size for each dimension; () and () in 0-d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements; 1 in 0-d."""
        return prod(self.sizes)


class Held(NamedTuple):
    """A rank's part of one tensor: a box, contiguous and row-major in its memory.

    `itemsize` is in bytes; `shape` is that of the complete tensor. `holders` are all ranks that
    hold exactly this box, ascending, including this rank. Tensors with the same holders should
    share one tuple, which is then hashed only once.
    """

    key: str
    itemsize: int
    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...]


class Piece(NamedTuple):
    """A non-empty rectangle that a rank writes, part of the held tensor with index `held`.

    `box` is in coordinates of the complete tensor. In the rank's memory it is one contiguous run,
    which begins at element `begin` of the rank's part.
    """

    held: int
    box: Box
    begin: int


def shard_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[int | None],
) -> Box:
    """Returns the part of a tensor that a rank of a device mesh holds.

    Args:
        shape: the shape of the complete tensor.
        mesh_shape: number of ranks along each dimension of the mesh.
        coordinate: the rank's index along each dimension of the mesh.
        placements: for each dimension of the mesh, the tensor dimension that is sharded along it
            (negative ones count from the last), or None if the tensor is replicated.

    Returns:
        The box. Shards are those of torch.chunk, applied along the mesh's dimensions from left to
            right. They are equal in size, except that the last ones are smaller or empty.

    Raises:
        ValueError: the arguments' lengths differ, or a coordinate or placement is out of range.
    """
    _check_coordinate(mesh_shape, coordinate, placements)
    offsets, sizes = [0] * len(shape), list(shape)
    for ranks, position, dim in zip(mesh_shape, coordinate, placements, strict=True):
        if dim is None:
            continue
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"a tensor of shape {tuple(shape)} has no dimension {dim} to shard")
        chunk = -(-sizes[dim] // ranks)
        begin = min(position * chunk, sizes[dim])
        offsets[dim] += begin
        sizes[dim] = min(chunk, sizes[dim] - begin)
    return Box(tuple(offsets), tuple(sizes))


def mesh_holders(
    mesh: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[int | None],
) -> tuple[int, ...]:
    """Returns the ranks, ascending, that hold the same shard as the rank at `coordinate`.

    The time depends on the size of the result, not on that of the mesh. Call this once for each
    distinct mesh and placements, so that tensors share the tuple.

    Args:
        mesh: the ranks of the mesh, flat and row-major.
        mesh_shape, coordinate, placements: see shard_box().

    Raises:
        ValueError: the arguments' lengths differ, or a coordinate is out of range.
    """
    _check_coordinate(mesh_shape, coordinate, placements)
    strides = row_major(mesh_shape)
    if len(mesh) != prod(mesh_shape):
        raise ValueError(f"a mesh of shape {tuple(mesh_shape)} cannot have {len(mesh)} ranks")
    places = [0]
    for ranks, stride, position, dim in zip(
        mesh_shape, strides, coordinate, placements, strict=True
    ):
        positions = range(ranks) if dim is None else (position,)
        places = [place + stride * along for place in places for along in positions]
    return tuple(sorted(mesh[place] for place in places))


def plan(held: Sequence[Held], rank: int) -> list[Piece]:
    """Returns the pieces that a rank writes. All ranks together write every element exactly once.

    Tensors with the same holders are concatenated, and this line of bytes is cut into one interval
    per holder. Holder number i gets interval i. If there are fewer tensors than holders, the
    intervals are rotated among the holders by a hash of the first key, because otherwise the same
    holder would get the only tensor of every line. Intervals are equal to within one element (two,
    if item sizes are mixed), except that a tensor below UNCUT_BYTES is not cut, and that a cut is
    rounded to a multiple of the largest subarray (a row of a matrix, or the whole tensor) that is
    at most 1/ROUNDING of an interval. The work is O(len(held)), plus O(len(holders)) for each
    distinct tuple of holders.

    Args:
        held: the parts that this rank holds. Tensors with the same holders are in the same order on
            each rank.
        rank: this rank.

    Returns:
        Pieces in the order of `held` and of memory. A tensor of n dimensions has at most 2n - 1
            pieces, a tensor without dimensions at most one, an empty box none.

    Raises:
        ValueError: `rank` must be among the holders of a tensor.
    """
    lines: dict[tuple[int, ...], list[int]] = {}
    line_of: dict[int, list[int]] = {}  # by identity: the hash of a tuple is computed each time
    for index, item in enumerate(held):
        if item.box.numel == 0:
            continue
        line = line_of.get(id(item.holders))
        if line is None:
            line = line_of[id(item.holders)] = lines.setdefault(item.holders, [])
        line.append(index)
    pieces: list[Piece] = []
    for holders, line in lines.items():
        pieces.extend(_share(held, line, holders, rank))
    pieces.sort(key=lambda piece: (piece.held, piece.begin))
    return pieces


def whole(shape: Sequence[int]) -> Box:
    """Returns the box of all elements of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two boxes of one tensor; None if it is empty.

    Raises:
        ValueError: the boxes differ in their number of dimensions.
    """
    offsets = tuple(map(max, a.offsets, b.offsets))
    sizes = tuple(
        min(a_offset + a_size, b_offset + b_size) - offset
        for offset, a_offset, a_size, b_offset, b_size in zip(
            offsets, a.offsets, a.sizes, b.offsets, b.sizes, strict=True
        )
    )
    return None if sizes and min(sizes) <= 0 else Box(offsets, sizes)


def copies(piece: Box, file_offset: int, target: Box, address: int, itemsize: int) -> list[CopyRow]:
    """Returns the rows that copy the intersection of a stored piece and a box in memory.

    Args:
        piece: the stored box, contiguous and row-major.
        file_offset: the piece's offset in the file, in bytes.
        target: the box of the same tensor in memory, contiguous and row-major.
        address: the target's address.
        itemsize: the size of an element in bytes.

    Returns:
        Rows (file offset, address, nbytes, count, file stride, address stride): `count` runs of
            `nbytes`, at distances of the strides. Runs have the greatest possible length. Rows
            ascend in the file and do not interleave. Empty if piece and target do not intersect.

    Raises:
        ValueError: the boxes differ in their number of dimensions.
    """
    common = intersect(piece, target)
    if common is None:
        return []
    file_strides, address_strides = row_major(piece.sizes), row_major(target.sizes)
    for dim, begin in enumerate(common.offsets):
        file_offset += (begin - piece.offsets[dim]) * file_strides[dim] * itemsize
        address += (begin - target.offsets[dim]) * address_strides[dim] * itemsize
    return strided_copies(
        common.sizes, file_offset, file_strides, address, address_strides, itemsize
    )


def covers(target: Box, parts: Sequence[Box]) -> bool:
    """Returns whether every element of the target is in exactly one of the parts.

    Elements of parts outside of the target are ignored. If a part has another number of dimensions,
    the result is False. The time is linear in the number of parts and of dimensions. The test is
    randomized: for any parts, even hostile ones, it is wrong with a probability below 2^-100.
    """
    if any(len(part.sizes) != len(target.sizes) for part in parts):
        return False
    inside = [common for part in parts if (common := intersect(part, target)) is not None]
    # A wrong volume is the cheapest sign of a gap.
    if not inside or sum(box.numel for box in inside) != target.numel:
        return target.numel == 0
    divided = [
        dim
        for dim, size in enumerate(target.sizes)
        if any(box.sizes[dim] != size for box in inside)
    ]
    # Cut every dimension at each bound of a part: then the parts and the target are sums of cells.
    # Give each cut a random number. A cell weighs the product, over the dimensions, of the
    # differences between its bounds' numbers, and so does a box. Different sums of cells are
    # different polynomials in these numbers, of a degree of at most the number of dimensions, and
    # different polynomials are hardly ever equal at a random point of a field.
    draw = SystemRandom().randrange
    numbers: list[dict[int, int]] = [{} for _ in divided]
    volume = 0
    for box, sign in chain([(target, -1)], zip(inside, repeat(1))):
        weight = sign
        for dim, number_of in zip(divided, numbers, strict=True):
            begin = box.offsets[dim]
            end = begin + box.sizes[dim]
            for cut in (begin, end):
                if cut not in number_of:
                    number_of[cut] = draw(_FIELD)
            weight = weight * (number_of[end] - number_of[begin]) % _FIELD
        volume += weight
    return volume % _FIELD == 0


def span(box: Box, shape: Sequence[int]) -> tuple[float, float]:
    """Returns a box's bounds in the row-major order of its tensor, as fractions of the elements.

    Returns:
        (low, high) within 0..1, rounded outwards, so that for two boxes that share an element, each
            box's low is below the other's high. (0, 0) for an empty box.
    """
    if box.numel == 0:
        return 0.0, 0.0
    strides = row_major(shape)
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    extent = sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
    numel, last = prod(shape), first + extent + 1
    low, high = first / numel, last / numel
    numerator, denominator = low.as_integer_ratio()
    if numerator * numel > first * denominator:
        low = nextafter(low, -inf)
    numerator, denominator = high.as_integer_ratio()
    if numerator * numel < last * denominator:
        high = nextafter(high, inf)
    return low, high


def _check_coordinate(
    mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[int | None]
) -> None:
    if not len(mesh_shape) == len(coordinate) == len(placements):
        raise ValueError(
            f"a mesh of shape {tuple(mesh_shape)} must have one coordinate and one "
            f"placement per dimension; found {tuple(coordinate)} and {tuple(placements)}"
        )
    if not all(0 <= at < ranks for at, ranks in zip(coordinate, mesh_shape, strict=True)):
        raise ValueError(f"{tuple(coordinate)} is outside of a mesh of shape {tuple(mesh_shape)}")


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a row-major array."""
    return tuple(accumulate(reversed(sizes[1:]), mul, initial=1))[::-1] if sizes else ()


def _grain(item: Held, interval_nbytes: int) -> int:
    """Returns the unit of a tensor's cuts in bytes, which divides the tensor's size."""
    rounding_nbytes = interval_nbytes // ROUNDING
    nbytes = item.box.numel * item.itemsize
    if nbytes < UNCUT_BYTES:
        return nbytes
    grain = item.itemsize
    for size in reversed(item.box.sizes):
        if grain * size > rounding_nbytes:
            break
        grain *= size
    return grain


def _share(
    held: Sequence[Held], line: Sequence[int], holders: tuple[int, ...], rank: int
) -> Iterator[Piece]:
    """Yields a rank's non-empty pieces of one line, the tensors `held[i] for i in line`."""
    number = bisect_left(holders, rank)
    first_key = held[line[0]].key
    if number == len(holders) or holders[number] != rank:
        raise ValueError(f"rank {rank} must be among the holders of {first_key!r}")
    if len(line) < len(holders):
        number = (number + crc32(first_key.encode())) % len(holders)
    nbytes = (held[index].box.numel * held[index].itemsize for index in line)
    starts = list(accumulate(nbytes, initial=0))
    total = starts[-1]

    def cut(interval: int) -> int:
        exact = total * interval // len(holders)
        at = bisect_right(starts, exact) - 1
        if at == len(line):
            return total
        grain = _grain(held[line[at]], total // len(holders))
        return starts[at] + (exact - starts[at] + grain // 2) // grain * grain

    begin, end = cut(number), cut(number + 1)
    for at in range(bisect_right(starts, begin) - 1, bisect_left(starts, end)):
        item = held[line[at]]
        first = max(begin - starts[at], 0) // item.itemsize
        last = (min(end, starts[at + 1]) - starts[at]) // item.itemsize
        for box, offset in _rectangles(item.box, first, last):
            yield Piece(line[at], box, offset)


def _rectangles(box: Box, begin: int, end: int) -> Iterator[tuple[Box, int]]:
    """Divides elements [begin, end) of a box, in row-major order, into rectangles: at most
    2n - 1 of them for n dimensions.

    Yields each rectangle with the element of the box at which it begins. The first ones complete
    partial rows, from the innermost dimension outwards; then come complete rows; the last ones
    contain the remaining elements.
    """
    if end - begin == box.numel:
        yield box, begin
        return
    strides = row_major(box.sizes)
    while begin < end:
        dim = next(
            dim
            for dim, stride in enumerate(strides)
            if begin % stride == 0 and begin + stride <= end
        )
        index = [begin // stride % size for stride, size in zip(strides, box.sizes, strict=True)]
        count = min((end - begin) // strides[dim], box.sizes[dim] - index[dim])
        offsets = tuple(map(add, box.offsets, index))
        yield Box(offsets, (1,) * dim + (count,) + box.sizes[dim + 1 :]), begin
        begin += count * strides[dim]
