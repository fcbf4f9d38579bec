"""Rows: runs of bytes, with strides, that the engine moves between a file and memory.

Responsible for making few and long runs of a rectangle, and for the blocks that these lie in. It
must not know tensors, files or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    """Returns the rows that move a rectangle between a file and memory.

    Each size is at least 1; strides are in elements. Runs are as long as they can be.
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
    """Returns the numbers of the blocks that rows lie in, ascending."""
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
