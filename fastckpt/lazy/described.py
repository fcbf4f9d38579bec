"""The tensors of an opened checkpoint by name, of which each is described when it is asked for.

There may be 100,000 of them: describing all takes long, and the collector of garbage would look at
all descriptions again and again. The module must not know what a place is.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from typing import Generic, TypeVar

from fastckpt.lazy.source import Stored

P = TypeVar("P")


class Described(Mapping[str, Stored], Generic[P]):
    """A mapping of names to tensors.

    Args:
        places: where each tensor lies, by name.
        describe: returns the tensor that lies in a place.
    """

    def __init__(self, places: Mapping[str, P], describe: Callable[[P], Stored]) -> None:
        self._places, self._describe = places, describe

    def __getitem__(self, name: str) -> Stored:
        return self._describe(self._places[name])

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def items(self) -> ItemsView[str, Stored]:
        return _Items(self)

    def pairs(self) -> Iterator[tuple[str, Stored]]:
        """Returns an iterator over names and tensors."""
        return zip(self._places, map(self._describe, self._places.values()), strict=True)


class _Items(ItemsView[str, Stored]):
    """The items of Described, without looking up each name."""

    _mapping: Described[object]

    def __iter__(self) -> Iterator[tuple[str, Stored]]:
        return self._mapping.pairs()
