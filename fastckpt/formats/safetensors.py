"""The safetensors format: the layout of one writer's part of a step, which standard readers open.

Responsible for the bytes of such a file and for reading its header (docs/reference/format.md). It
must not know which tensors the pieces belong to, files, ranks, or compression.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats.strict_json import (
    KINDS_MAX,
    NUMBER_END,
    check_text,
    check_texts,
    decode,
    is_numbers,
    shown,
    without_numbers,
)
from fastckpt.plan.image import PAGE_BYTES, Image

# The dtypes of steps by their names in the format; all stock readers of safetensors know them.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
# The other dtypes of the format: the bits of a number, and the name of the dtype in torch, if any.
_OTHERS = {
    "C64": (64, "complex64"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
    "F4": (4, "float4_e2m1fn_x2"),  # torch has two numbers in an item
}
_BITS = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | {
    name: bits for name, (bits, _torch_name) in _OTHERS.items()
}
_IN_TORCH: dict[str, torch.dtype] = DTYPES | {
    name: getattr(torch, torch_name)
    for name, (_bits, torch_name) in _OTHERS.items()
    if hasattr(torch, torch_name)
}
_IN_FILES = {dtype: name for name, dtype in _IN_TORCH.items()}
LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000  # of JSON; stock readers refuse more
METADATA = "__metadata__"
_MEMBERS = dict.fromkeys(("dtype", "shape", "data_offsets")).keys()  # of a tensor in the header


class Entry(NamedTuple):
    """A tensor to be stored: its key in the header, and the address of its elements.

    The elements are contiguous and row-major; without elements, the address is 0.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    address: int


class Kind(NamedTuple):
    """A dtype and shape, which many tensors of a file often share.

    For a tensor that torch has no dtype for, `dtype` is a text that says which dtype this is.
    """

    dtype: torch.dtype | str
    shape: tuple[int, ...]
    nbytes: int


class UnknownDtype(ValueError):
    """A dtype is not supported by this module, though perhaps by other writers of the format."""


def supported(dtype: torch.dtype) -> bool:
    """Returns whether all standard readers support this dtype."""
    return dtype in NAMES


def can_hold(dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Returns whether the format has a dtype for such a tensor, which new readers know."""
    return dtype in _IN_FILES and (_IN_FILES[dtype] != "F4" or len(shape) > 0)


def written(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and shape that the header has for a tensor that files can_hold()."""
    name = _IN_FILES[dtype]
    return name, (*shape[:-1], 2 * shape[-1]) if name == "F4" else (*shape,)


def fits(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor consists of plain elements in memory, of a dtype of the format."""
    return (  # no such dtype is quantized, or may be read as its conjugate
        tensor.dtype in NAMES
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_neg()
        and not tensor.is_nested
        and tensor.numel() > 0
    )


def layout(
    entries: Sequence[Entry], owners: Sequence[object], metadata: Mapping[str, str]
) -> tuple[Image, list[int]]:
    """Lays out tensors as one safetensors file, without copies.

    Args:
        entries: the tensors to store. In the file, tensors with larger items come first, so that
            each is aligned to its item size; otherwise the order is kept.
        owners: objects that own the entries' memory; the image keeps references to them.
        metadata: strings for the header's `__metadata__`, which is left out if this is empty.

    Returns:
        The image, without a tail, and each entry's offset in the file, in the order of `entries`.

    Raises:
        ValueError: a name is used twice, is reserved or is not Unicode; the format does not support
            a dtype; or the header has more than 100 MB.
    """
    order = sorted(range(len(entries)), key=lambda number: -entries[number].dtype.itemsize)
    for name, dtype, _shape, _address in entries:
        if dtype not in NAMES:
            raise ValueError(f"{name!r} is {dtype}, which safetensors files cannot hold")
    tensors = [(entries[n].name, NAMES[entries[n].dtype], entries[n].shape) for n in order]
    content = bytearray(header(tensors, metadata, PAGE_BYTES))
    offsets, end = [0] * len(entries), len(content)
    for number in order:
        offsets[number] = end
        end += math.prod(entries[number].shape) * entries[number].dtype.itemsize

    image = Image.of_bytes(content)
    image.sources.extend(owners)
    for number in order:
        nbytes = math.prod(entries[number].shape) * entries[number].dtype.itemsize
        if nbytes:
            image.append(entries[number].address, nbytes)
    return image, offsets


def header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], grain: int
) -> bytes:
    """Returns the header, which consists of a length and JSON, for the data of these tensors.

    Args:
        tensors: for each tensor in the file's order, its name, the format's name of its dtype, and
            its shape.
        metadata: see layout().
        grain: a number of bytes; the header's size is a multiple of it.

    Raises:
        ValueError: see layout().
    """
    written: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        if name in written or name == METADATA:
            raise ValueError(f"two entries are named {name!r}, or the name is reserved")
        begin, end = end, end + math.prod(shape) * _BITS[dtype] // 8
        written[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(written, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % grain)
    validate(written, LENGTH_BYTES + len(text), LENGTH_BYTES + len(text) + end)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_nbytes(head: bytes, nbytes: int) -> int:
    """Returns the number of bytes before the data of a file of nbytes, which parse() needs.

    Args:
        head: the first 8 bytes or more.

    Raises:
        CorruptCheckpoint: no such file can begin with this head.
    """
    size = LENGTH_BYTES + int.from_bytes(head[:LENGTH_BYTES], "little")
    try:
        if len(head) < LENGTH_BYTES:
            raise ValueError(f"it ends after {len(head)} bytes")
        _check_header_nbytes(size, nbytes)
    except ValueError as error:
        raise CorruptCheckpoint(f"its safetensors header is malformed: {error}") from None
    return size


def parse(head: bytes, nbytes: int) -> dict[str, tuple[Kind, int]]:
    """Parses the header of any safetensors file, in memory proportional to the header's size.

    Args:
        head: the first header_nbytes() bytes of the file, or more. They contain no checksum; a
            caller that has one must verify them first.
        nbytes: size of the file.

    Returns:
        The result of validate().

    Raises:
        CorruptCheckpoint: the header is malformed, or does not fit the file's size.
        IncompatibleCheckpoint: a tensor has an unsupported dtype.
    """
    size = header_nbytes(head, nbytes)
    try:
        if len(head) < size:
            raise ValueError(f"it has only {len(head)} of its {size} bytes")
        return validate(decode(head[LENGTH_BYTES:size]), size, nbytes)
    except UnknownDtype as error:
        raise IncompatibleCheckpoint(f"its safetensors header: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"its safetensors header is malformed: {error}") from None


def validate(header: object, size: int, nbytes: int) -> dict[str, tuple[Kind, int]]:
    """Raises ValueError unless this is a header; both writers and readers use this check.

    Args:
        header: the decoded JSON.
        size: the number of bytes before the data, including the eight of the length.
        nbytes: the size of the file.

    Returns:
        A dict from each tensor's name, in the header's order, to its kind and the offset of its
        first byte.
    """
    _check_header_nbytes(size, nbytes)
    if type(header) is not dict:
        raise ValueError("it must be an object")
    tensors = {**header}
    _check_metadata(tensors.pop(METADATA, {}))
    check_texts(tensors)
    for name, tensor in tensors.items():
        if type(tensor) is not dict or tensor.keys() != _MEMBERS:
            raise ValueError(f"{shown(name)} must have exactly dtype, shape and data_offsets")
    # A column for each member: what holds for all of 100,000 tensors is looked at for all at once.
    names = [*tensors]
    columns = [*zip(*map(itemgetter(*_MEMBERS), tensors.values()), strict=True)]
    dtypes, shapes, offsets = columns or ((), (), ())
    wrong = without_numbers(offsets)
    if wrong is None and {*map(len, offsets)} - {2}:
        wrong = next(at for at, pair in enumerate(offsets) if len(pair) != 2)
    if wrong is not None:
        raise ValueError(f"data_offsets of {shown(names[wrong])} must be two numbers")
    entries: dict[str, tuple[Kind, int]] = {}
    kinds = _kinds_of(dtypes, shapes, names)
    for name, kind, (begin, end) in zip(names, kinds, offsets, strict=True):
        if end - begin != kind.nbytes:
            raise ValueError(f"data_offsets of {shown(name)} must span its {kind.nbytes} bytes")
        entries[name] = kind, size + begin
    end = 0
    for (begin, following), name in sorted(zip(offsets, names, strict=True)):
        if begin != end:
            what = "leaves a gap before" if begin > end else "overlaps the data before"
            raise ValueError(f"{shown(name)} begins at {begin}, which {what} it")
        end = following
    if size + end != nbytes:
        raise ValueError(f"its data ends at {size + end}, but the file at {nbytes}")
    return entries


def _check_header_nbytes(size: int, nbytes: int) -> None:
    if size - LENGTH_BYTES > HEADER_BYTES_MAX:
        raise ValueError(f"it has {size - LENGTH_BYTES} bytes, must be at most {HEADER_BYTES_MAX}")
    if size > nbytes:
        raise ValueError(f"it would end at {size}, but the file ends at {nbytes}")


def _check_metadata(metadata: object) -> None:
    if type(metadata) is not dict:
        raise ValueError(f"{METADATA} must be an object")
    for key, value in metadata.items():
        if type(value) is not str:
            raise ValueError(f"all values of {METADATA} must be strings")
        check_text(key)
        check_text(value)


def kind_of(dtype: Any, shape: Any, name: str, known: Container[str] = DTYPES.keys()) -> Kind:
    """Returns the kind of a tensor with this shape and dtype, given by its name in the format.

    Raises:
        ValueError: the dtype is not one of `known`, the shape is not a list of numbers from 0, or
            the size is no number of bytes of 63 bits (computed without dimensions of size 0, so
            that strides also fit).
    """
    if type(dtype) is not str or dtype not in known:
        raise UnknownDtype(f"dtype of {shown(name)} is {shown(dtype)}, which is not supported")
    if not is_numbers(shape):
        raise ValueError(f"shape of {shown(name)} must be a list of numbers from 0 to 2^63")
    kind = _kind(dtype, tuple(shape))
    if kind is None:
        raise ValueError(f"shape of {shown(name)} must have whole bytes, fewer than 2^63 bytes")
    return kind


def _kinds_of(dtypes: Sequence[Any], shapes: Sequence[Any], names: Sequence[str]) -> list[Kind]:
    """Returns the kinds of the tensors of a header; raises kind_of()'s error for the first invalid
    one.
    """
    are_known = {*map(type, dtypes)} <= {str} and {*dtypes} <= _BITS.keys()
    if are_known and without_numbers(shapes) is None:
        kinds = [*filter(None, map(_kind, dtypes, map(tuple, shapes)))]
        if len(kinds) == len(names):
            return kinds
    return [*map(partial(kind_of, known=_BITS.keys()), dtypes, shapes, names)]


@lru_cache(KINDS_MAX)
def _kind(dtype: str, shape: tuple[int, ...]) -> Kind | None:
    """Returns a kind; None if its size does not fit in 63 bits."""
    bits = _BITS[dtype]
    for size in shape:  # step by step: the product of a hostile shape has millions of digits
        bits *= size or 1
        if bits >= 8 * NUMBER_END:
            return None
    if 0 in shape:
        bits = 0
    if bits % 8:
        return None
    form: torch.dtype | str = _IN_TORCH.get(dtype, dtype)
    if dtype == "F4" and shape:
        if shape[-1] % 2:
            form = "F4 with an odd last dimension"
        elif form != dtype:
            shape = (*shape[:-1], shape[-1] // 2)
    return Kind(form, shape, bits // 8)
