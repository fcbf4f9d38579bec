"""The layout of a file on Lustre: over which storage targets (OSTs) its bytes are striped.

This module decides on the layout of a new file, and encodes and parses layouts as declared in
Lustre's header `lustre_user.h` (include/uapi/linux/lustre).
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from fastckpt.arguments.checks import STRIPE_COUNT_MAX, Striping
from fastckpt.errors import CorruptCheckpoint, ensure
from fastckpt.plan.image import BLOCK_BYTES

# lustre_user.h: struct lov_user_md_v1, _v3, lov_user_ost_data_v1, lov_comp_md_v1 and its entries,
# all packed.
MAGIC_V1 = 0x0BD10BD0
MAGIC_V3 = 0x0BD30BD0
MAGIC_SPECIFIC = 0x0BD50BD0  # v3 that lists its OSTs
MAGIC_COMPOSITE = 0x0BD60BD0  # LOV_USER_MAGIC_COMP_V1: progressive layouts (PFL) and mirrors
_HEAD = struct.Struct("<II16sIHH")  # magic, pattern, oi, stripe_size, stripe_count, stripe_offset
_POOL = struct.Struct("<16s")  # follows in v3: the pool's name, LOV_MAXPOOLNAME + 1
_OBJECT = struct.Struct("<16sII")  # oi, generation, index of the OST
_COMPOSITE = struct.Struct("<IIIHHH6xQ")  # magic, size, generation, flags, entries, mirrors
_PATTERN_RAID0 = 1  # LOV_PATTERN_RAID0
_OFFSET_ANY = 0xFFFF  # the metadata server chooses the first OST
ALL_STRIPES = 0xFFFF

OWN_BIG_BYTES = 4 << 30  # a longer file that one rank writes gets several stripes
OWN_BYTES_PER_STRIPE = 8 << 30
OWN_STRIPES_MAX = 8
SHARED_BIG_BYTES = 1 << 30
SHARED_STRIPES_MAX = 48
SHARED_SIZES = (32 << 20, 16 << 20, 8 << 20)
SHARED_STRIPES_PER_RANK = 64  # at least, except with the smallest size


class Layout(NamedTuple):
    """The actual or requested striping of a file.

    Attributes:
        stripes: the number of OSTs; ALL_STRIPES for all, 0 for the file system's default.
        stripe_bytes: the size of a stripe; 0 for the file system's default.
        pool: the pool of the OSTs; "" for any.
        osts: the numbers of the OSTs, in order; empty if the server chooses them, or has not chosen
            them yet.
        is_composite: whether the layout has several components; the other attributes then have no
            meaning.
    """

    stripes: int
    stripe_bytes: int
    pool: str = ""
    osts: tuple[int, ...] = ()
    is_composite: bool = False

    def text(self) -> str:
        if self.is_composite:
            return "a progressive layout"
        size = f" of {self.stripe_bytes >> 10} KiB" if self.stripe_bytes else ""
        if self.stripes == ALL_STRIPES:
            return f"one stripe{size} on each OST"
        count = str(self.stripes or "the default number of")
        return f"{count} {'stripe' if self.stripes == 1 else 'stripes'}{size}"


class Purpose(NamedTuple):
    """The facts about a new file that determine its layout.

    Attributes:
        nbytes: the file's final size.
        writers: the number of ranks that write it.
        stripe: see fastckpt.save.
        directory: the directory whose default layout applies; "" for the file's directory.
        instead: the layout to use after the first attempt found no room.
    """

    nbytes: int
    writers: int = 1
    stripe: Striping = "auto"
    directory: str = ""
    instead: Layout | None = None


def encoded(layout: Layout) -> bytes:
    """Encodes a layout in the form of the attribute, which is also that of the ioctl's argument."""
    is_plain = not layout.is_composite and (not layout.osts or len(layout.osts) == layout.stripes)
    ensure(is_plain, "only a plain layout can be given to a new file")
    magic = MAGIC_SPECIFIC if layout.osts else MAGIC_V3 if layout.pool else MAGIC_V1
    first = layout.osts[0] if layout.osts else _OFFSET_ANY
    head = _HEAD.pack(magic, _PATTERN_RAID0, bytes(16), layout.stripe_bytes, layout.stripes, first)
    if magic == MAGIC_V1:
        return head
    objects = b"".join(_OBJECT.pack(bytes(16), 0, ost) for ost in layout.osts)
    return head + _POOL.pack(layout.pool.encode("ascii")) + objects


def parsed(content: bytes) -> Layout:
    """Parses the attribute of a file or directory; returns its layout.

    Raises:
        CorruptCheckpoint: the bytes do not encode a layout.
    """
    try:
        (magic,) = struct.unpack_from("<I", content)
        if magic == MAGIC_COMPOSITE:
            _COMPOSITE.unpack_from(content)
            return Layout(0, 0, is_composite=True)
        if magic not in (MAGIC_V1, MAGIC_V3, MAGIC_SPECIFIC):
            raise ValueError(f"its magic number is {magic:#x}")
        _magic, _pattern, _oi, size, count, _offset = _HEAD.unpack_from(content)
        at, pool = _HEAD.size, ""
        if magic != MAGIC_V1:
            pool = _POOL.unpack_from(content, at)[0].split(b"\0")[0].decode("ascii")
            at += _POOL.size
        there = (len(content) - at) // _OBJECT.size  # 0 for a directory's
        objects = [_OBJECT.unpack_from(content, at + i * _OBJECT.size) for i in range(there)]
        osts = tuple(ost for _oi, _generation, ost in objects) if there == count else ()
    except (struct.error, ValueError) as error:
        raise CorruptCheckpoint(f"the attribute is not a Lustre layout: {error}") from None
    return Layout(count, size, pool, osts)


def shared_stripe_bytes(nbytes: int, ranks: int) -> int:
    """Returns the stripe size of a file that several ranks write, each in complete stripes. It is
    the largest size that leaves each rank enough stripes for equal parts.
    """
    share = nbytes // max(1, ranks)
    fitting = (size for size in SHARED_SIZES if share >= SHARED_STRIPES_PER_RANK * size)
    return next(fitting, SHARED_SIZES[-1])


def shared_striping(nbytes: int, ranks: int, osts: int | None) -> tuple[int, int]:
    """Returns the number and the size of the stripes of a large file that several ranks write."""
    size = shared_stripe_bytes(nbytes, ranks)
    return min(_ost_count(osts), SHARED_STRIPES_MAX, -(-nbytes // size)), size


def own_stripes(nbytes: int, osts: int | None) -> int:
    """Returns the number of stripes of a large file that one rank writes."""
    return min(_ost_count(osts), OWN_STRIPES_MAX, max(2, nbytes // OWN_BYTES_PER_STRIPE))


def _ost_count(osts: int | None) -> int:
    return STRIPE_COUNT_MAX if osts is None else max(1, osts)


def grain_bytes(nbytes: int, ranks: int, stripe: Striping) -> int:
    """Returns the unit in bytes in which ranks divide a file: complete blocks, and where possible
    complete stripes. All ranks have the same arguments, and therefore get the same result.
    """
    if isinstance(stripe, str):
        return shared_stripe_bytes(nbytes, ranks)
    grain = math.lcm(BLOCK_BYTES, stripe[1])
    # With fewer than eight units for each rank, the parts would be too unequal.
    return grain if grain * 8 * ranks <= nbytes or grain == BLOCK_BYTES else BLOCK_BYTES


def decide(default: Layout, purpose: Purpose, osts: int | None) -> tuple[Layout | None, str]:
    """Returns the layout of a new file and the reason; the layout is None for the default.

    Args:
        default: the file's layout if none is set.
        osts: the file system's number of OSTs, if known.
    """
    if purpose.instead is not None:
        return purpose.instead, "no room with the first layout"
    if isinstance(purpose.stripe, tuple):
        return Layout(*purpose.stripe, default.pool), "as requested"
    if purpose.stripe == "keep":
        return None, "the default layout, as requested"
    if default.is_composite:
        return None, "the directory's progressive layout is kept"
    if default.stripes > 1:
        return None, f"the directory's layout of {default.text()} is kept"
    if purpose.writers > 1:
        if purpose.nbytes <= SHARED_BIG_BYTES:
            return None, "a small file keeps the default layout"
        count, size = shared_striping(purpose.nbytes, purpose.writers, osts)
        return Layout(count, size, default.pool), f"{purpose.writers} ranks write the file"
    if purpose.nbytes <= OWN_BIG_BYTES:
        return None, "a small file keeps the default layout"
    count = own_stripes(purpose.nbytes, osts)
    return Layout(count, BLOCK_BYTES, default.pool), f"a file of {purpose.nbytes >> 30} GiB"


def elsewhere(full: Layout, free: dict[int, int]) -> Layout:
    """Returns the layout to try next after a file found no room.

    Args:
        full: that file's layout, with its OSTs as far as known.
        free: the free bytes of each OST, as far as known.
    """
    size = full.stripe_bytes or BLOCK_BYTES
    if full.pool:  # the OSTs of a pool are not known
        free = {}
    count = max(1, len(full.osts) or (len(free) if full.stripes == ALL_STRIPES else full.stripes))
    others = sorted((ost for ost in free if ost not in full.osts), key=lambda o: (-free[o], o))
    if len(others) >= count:
        return Layout(count, size, full.pool, tuple(others[:count]))
    if free:  # the emptiest ones, even if the file used them
        roomy = sorted(free, key=lambda o: (-free[o], o))[: min(count, len(free))]
        return Layout(len(roomy), size, full.pool, tuple(roomy))
    # Nothing is known: put less on each OST, and let the server choose them.
    return Layout(min(2 * count, STRIPE_COUNT_MAX), size, full.pool)
