"""A Source whose tensors have other names."""

from __future__ import annotations

from collections.abc import Sequence

from fastckpt.errors import IncompatibleCheckpoint
from fastckpt.lazy.extents import Described
from fastckpt.lazy.source import Source, Wanted
from fastckpt.state.fit import Fit, name_taken


class RenamedSource:
    """A Source of the tensors of another one, under the names that `fit.rename` gives them.

    Args:
        source: the other one, which is closed with this.
        fit: has the rules.
        path: of the checkpoint, for messages.

    Attributes:
        olds: the names that the tensors have in the checkpoint, by those that they have here.

    Raises:
        IncompatibleCheckpoint: two tensors get one name, or a pattern fits none.
    """

    def __init__(self, source: Source, fit: Fit, path: str) -> None:
        self._source = source
        self.kind, self.facts, self.rest = source.kind, source.facts, source.rest
        self.has_paths, self.is_verified = source.has_paths, source.is_verified
        names, useless = fit.new_names([*source.tensors])
        if useless:
            raise IncompatibleCheckpoint(f"{path!r} does not fit: {useless[0]}")
        self.olds: dict[str, str] = {}
        for old, name in zip(source.tensors, names, strict=True):
            if name in self.olds:
                raise name_taken(path, old, name)
            if name is not None:
                self.olds[name] = old
        self.tensors = Described(self.olds, source.tensors.__getitem__)

    def read(self, wanted: Sequence[Wanted]) -> None:
        self._source.read([want._replace(name=self.olds[want.name]) for want in wanted])

    def close(self) -> None:
        self._source.close()
