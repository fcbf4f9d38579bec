"""A Source under other names, whose tensors are split and joined when they are read.

It must not know which names and parts are asked for, or formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fastckpt.arguments.near_names import listed
from fastckpt.errors import IncompatibleCheckpoint
from fastckpt.lazy.selection import selected
from fastckpt.lazy.source import Shard, Source, Stored, Wanted
from fastckpt.plan import layouts
from fastckpt.plan.boxes import Box, intersect
from fastckpt.plan.layouts import Form
from fastckpt.reading.parts import parts
from fastckpt.state.fit import Fit, name_taken
from fastckpt.state.layouts import Misfit, Named

_APART_BYTES = 64 << 20  # of memory for what cannot be read to where it belongs


class ArrangedSource:
    """A Source of the tensors of another one as `fit.rename` arranges them.

    Args:
        source: the other one, which is closed with this.
        fit: has the rules.
        path: of the checkpoint, for messages.

    Attributes:
        origins: for the tensors that have another name than what they come from, that in words.
        renamed: the new names of the other's tensors that have got others, as in Differences.

    Raises:
        IncompatibleCheckpoint: two tensors get one name, or some cannot be split or joined so.
    """

    def __init__(self, source: Source, fit: Fit, path: str) -> None:
        self._source = source
        self.kind, self.facts, self.rest = source.kind, source.facts, source.rest
        self.has_paths, self.is_verified = source.has_paths, source.is_verified
        self._forms: dict[str, Form] = {}
        self.tensors: dict[str, Stored] = {}
        self.origins: dict[str, str] = {}
        renamed: dict[str, list[str]] = {}
        stored = source.tensors
        try:
            arranged = fit.arranged(
                [Named(n, its.dtype, layouts.source(n, its.shape)) for n, its in stored.items()]
            )
        except Misfit as error:
            raise IncompatibleCheckpoint(f"{path!r} does not fit: {error}") from None
        for name, dtype, form in arranged:
            olds = [*dict.fromkeys(each.source for each in form.slices)]
            if name in self._forms:
                raise name_taken(path, listed(olds), name)
            if form.is_source:
                self.tensors[name] = stored[olds[0]]
            else:
                self.tensors[name] = Stored(dtype, form.shape, tuple(_shards(form, stored)))
            self._forms[name] = form
            if olds != [name]:
                self.origins[name] = listed(map(repr, olds))
                for old in olds:
                    renamed.setdefault(old, []).append(name)
        self.renamed = {old: ", ".join(names) for old, names in renamed.items()}

    def read(self, wanted: Sequence[Wanted]) -> None:
        direct, apart = list[Wanted](), list[Wanted]()
        for want in wanted:
            form = self._forms[want.name]
            if form.is_source:
                direct.append(want._replace(name=form.slices[0].source))
                continue
            for each in form.slices:
                if (found := each.within(want.box)) is None:
                    continue
                common, box = found
                begins = map(int.__sub__, common.offsets, want.box.offsets)
                at = [slice(a, a + n) for a, n in zip(begins, common.sizes, strict=True)]
                part = Wanted(each.source, box, want.target[tuple(at)].view(box.sizes))
                is_direct = part.target.is_contiguous() and not self._repeated(part.name)
                (direct if is_direct else apart).append(part)
        if direct:
            self._source.read(direct)
        self._read_apart(apart)

    def _read_apart(self, wanted: Sequence[Wanted]) -> None:
        """Reads parts to memory of their own first, and of that so much at a time as may be."""
        batch, nbytes = list[tuple[Wanted, torch.Tensor]](), 0

        def read() -> None:
            self._source.read([want for want, _target in batch])
            with torch.no_grad():
                for want, target in batch:
                    target.copy_(want.target.expand(target.shape))
            batch.clear()

        for name, box, target in wanted:
            for index in parts(box.sizes, target.itemsize, _APART_BYTES):
                offsets, sizes = selected(index, box.sizes).box
                repeated = self._repeated(name)
                fewer = tuple(1 if dim in repeated else n for dim, n in enumerate(sizes))
                memory = torch.empty(fewer, dtype=target.dtype, device=target.device)
                if nbytes + memory.nbytes > _APART_BYTES and batch:
                    read()
                    nbytes = 0
                nbytes += memory.nbytes
                where = Box(tuple(map(int.__add__, box.offsets, offsets)), fewer)
                batch.append((Wanted(name, where, memory), target[index]))
        if batch:
            read()

    def _repeated(self, name: str) -> frozenset[int]:
        return self._source.tensors[name].repeated

    def close(self) -> None:
        self._source.close()


def _shards(form: Form, stored: Mapping[str, Stored]) -> list[Shard]:
    """Returns where the parts of a tensor lie."""
    found = list[Shard]()
    for each in form.slices:
        for path, box in stored[each.source].shards:
            if (common := intersect(box, each.box)) is not None:
                found.append(Shard(path, each.placed(common)))
    return found
