"""The way a DTensor is spread over a mesh, as the placeholder of a checkpoint says it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats.strict_json import decode, encode

SPREAD, PARTS = "spread", "parts"  # keys of a placeholder
_CHARACTERS_MAX = 4096  # of the text under SPREAD


class Spread(NamedTuple):
    """The way in which a saved DTensor was spread over a mesh.

    Attributes:
        sizes, names: of the dimensions of the mesh; a name is None where it has none.
        dims: for each of these, the dimension of the tensor that it shards; None: replicated.
        strided: for each of these, whether it is applied after those on its right (_StridedShard).
        kind: the name of the class of its parts; "" if they are plain tensors.
    """

    sizes: tuple[int, ...]
    names: tuple[str | None, ...]
    dims: tuple[int | None, ...]
    strided: tuple[bool, ...]
    kind: str = ""

    def __str__(self) -> str:
        placements = ", ".join("R" if dim is None else f"S({dim})" for dim in self.dims)
        return f"({placements}) on a mesh {self.sizes}"

    @property
    def order(self) -> list[int]:
        """The dimensions of the mesh in the order in which they cut the tensor."""
        late = [number for number, is_late in enumerate(self.strided) if is_late]
        return [number for number in range(len(self.dims)) if number not in late] + late[::-1]

    def text(self) -> str:
        """Returns it as a placeholder has it under SPREAD: a row for each dimension of the mesh."""
        columns = zip(self.sizes, self.names, self.dims, self.strided, strict=True)
        return encode([*columns])


def spread_of(placeholder: Mapping[str, Any]) -> Spread | None:
    """Returns the spread that a placeholder has; None if a plain tensor was saved.

    Raises CorruptCheckpoint for one that no save writes.
    """
    text, kind = placeholder.get(SPREAD), placeholder.get(PARTS, "")
    if text is None:
        return None
    ndim, rows = len(shape_of(placeholder)), None
    if type(text) is str and len(text) <= _CHARACTERS_MAX and type(kind) is str:
        with suppress(ValueError, RecursionError):  # it is no JSON
            rows = decode(text.encode())
    if type(rows) is not list or not rows or not all(_is_row(row, ndim) for row in rows):
        raise CorruptCheckpoint("a placeholder for a DTensor is malformed: its spread")
    sizes, names, dims, strided = zip(*rows, strict=True)
    return Spread(sizes, names, dims, strided, kind)


def shape_of(placeholder: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the shape of the whole tensor. Raises CorruptCheckpoint if it is none."""
    shape = placeholder.get("shape")
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise CorruptCheckpoint("a placeholder for a DTensor is malformed: its shape")
    return tuple(shape)


def _is_row(row: object, ndim: int) -> bool:
    if type(row) is not list or len(row) != 4:
        return False
    size, name, dim, strided = row
    return (
        type(size) is int
        and size > 0
        and isinstance(name, str | None)
        and (dim is None or (type(dim) is int and 0 <= dim < ndim))
        and type(strided) is bool
    )
