"""StepReader: reads a committed step. It reads only the ranges that are needed, and verifies every
byte.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import torch

from fastckpt.arguments.names import listed
from fastckpt.engine.devices import DeviceSources
from fastckpt.engine.gds import GdsDevice
from fastckpt.engine.staging import Staging
from fastckpt.errors import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    StorageError,
    Vanished,
    ensure,
)
from fastckpt.formats import partial_objects, safetensors
from fastckpt.formats.conversion import put_converted
from fastckpt.formats.manifest import Manifest, Writer, key_hash, may_hold
from fastckpt.formats.shard_index import Piece, ShardIndex
from fastckpt.plan.boxes import Box, CopyRow, blocks_of, copies, covers, intersect, span, whole
from fastckpt.plan.image import address_of
from fastckpt.reading.verified import whole_blocks
from fastckpt.state.fit import refused
from fastckpt.state.targets import (
    Place,
    Target,
    note_overwritten,
    takes_bytes,
    tell_lossy,
)
from fastckpt.state.tree import OwnValues, Stored, fill
from fastckpt.steps.copies import StepCopies
from fastckpt.steps.root import store_at
from fastckpt.steps.store import Committed, StepStore
from fastckpt.storage.file_system import Storage

log = logging.getLogger("fastckpt")

_PART_BYTES = 64 << 20  # of a rank's own values, read at a time
# If a part of a tensor consists of more than _RUNS_MAX runs of fewer than _RUN_ITEMS_MIN items, it
# is read to the host and copied at once: each copy to a device takes microseconds to begin.
_RUNS_MAX = 64
_RUN_ITEMS_MIN = 8192


def _common(index: ShardIndex, keys: Collection[str]) -> list[str]:
    """Returns the keys that have pieces in an index. The function iterates over the smaller
    collection, because a step may have thousands of indexes with few keys, or one index with
    100,000.
    """
    if len(keys) < len(index.by_key):
        return [key for key in keys if key in index.by_key]
    return [key for key in index.by_key if key in keys]


def _rows_of(
    indexes: Iterable[ShardIndex], buffers: Mapping[str, Sequence[tuple[Target, torch.Tensor]]]
) -> Iterator[tuple[ShardIndex, list[CopyRow]]]:
    """Yields the indexes of the shards that hold parts of the targets, and the copies of each."""
    for index in indexes:
        rows: list[CopyRow] = []
        for key in _common(index, buffers):
            for piece, (target, tensor) in product(index.by_key[key], buffers[key]):
                rows += copies(
                    piece.box, piece.begin, target.box, tensor.data_ptr(), tensor.element_size()
                )
        if rows:
            yield index, rows


def base_beside(
    storage: Storage,
    staging: Staging,
    steps: StepStore,
    name: str,
    holding: ExitStack,
    held: StepReader | None = None,
    near: StepStore | None = None,
) -> Callable[[str], StepReader]:
    """Returns StepReader's `base` for a step of a store. `holding` keeps the bases that it opens
    from being removed. `held` is a base whose tensors are in memory. `near` is a store from which
    files are read if it has them.
    """
    if not name:  # the store is the step itself
        steps = store_at(storage, os.path.dirname(steps.root))

    return _Bases(storage, staging, [steps] if near is None else [near, steps], holding, held)


@dataclass(frozen=True)
class _Bases:
    """See base_beside(). No closure that refers to itself: what it holds is freed at once."""

    storage: Storage
    staging: Staging
    stores: list[StepStore]  # the nearest first
    holding: ExitStack
    held: StepReader | None

    def __call__(self, nonce: str) -> StepReader:
        held = self.held
        if held is not None and nonce == held.manifest.nonce:
            return held
        listed = [(steps, item) for steps in self.stores for item in steps.committed()[0]]
        places = [(steps, item) for steps, item in listed if item.manifest.nonce == nonce]
        paths = hold_all(places, self.holding)
        if not paths:
            raise CorruptCheckpoint(
                f"a step under {self.stores[-1].root!r} is a difference from one with the nonce "
                f"{nonce}, which is not there"
            )
        copies = StepCopies(self.storage, self.staging, paths)
        return StepReader(self.staging, paths[-1], places[-1][1].manifest, copies, self)


def hold_all(places: Sequence[tuple[StepStore, Committed]], holding: ExitStack) -> list[str]:
    """Keeps the directories of one step from being removed, until `holding` is closed. Returns
    those that are still there, in the same order. Raises Vanished if the last one is not.
    """
    paths = list[str]()
    for steps, item in places:
        try:
            holding.enter_context(steps.hold(item.name))
            if steps.read(item.name).nonce != item.manifest.nonce:
                raise Vanished(steps.path(item.name))
        except Vanished:
            if (steps, item) == places[-1]:
                raise
            continue
        paths.append(steps.path(item.name))
    return paths


class StepReader:
    """One committed step, opened for reading.

    Args:
        staging: reads the files.
        path: the step's directory.
        manifest: the step's manifest.
        copies: opens the step's files.
        base: returns the reader of the step with a nonce, which files here are differences from.

    Attributes:
        path, manifest, copies: the arguments.
        nbytes_read: bytes of the files read so far, not counting manifest and indexes.
    """

    def __init__(
        self,
        staging: Staging,
        path: str,
        manifest: Manifest,
        copies: StepCopies,
        base: Callable[[str], StepReader] | None = None,
    ) -> None:
        self._staging = staging
        self._base = base
        self._bases: dict[str, StepReader] = {}
        self.path = path
        self.manifest = manifest
        self.copies = copies
        self._indexes: dict[str, ShardIndex] = {}  # by the name of the index
        self.nbytes_read = 0

    def _path(self, file: str) -> str:
        return self.copies.path(file) if file else self.path

    def pieces(self) -> Iterator[tuple[str, Sequence[Piece]]]:
        """Yields the path of each file and the pieces of tensors in the file.

        Raises:
            CorruptCheckpoint: an index is damaged.
            StorageError: an index cannot be read.
        """
        for writer in self.manifest.writers:
            index = self._index(writer)
            yield self._path(index.file), index.pieces

    def bases(self) -> Iterator[StepReader]:
        """Yields the steps that files here build on, as check_bases() has opened them."""
        for base in self._bases.values():
            yield base
            yield from base.bases()

    def check_bases(self) -> int:
        """Compares the checksums of each difference with those of the files that it connects, in
        this step and in those that it builds on. Returns 0, the bytes read for it. Raises as
        _base_of().
        """
        for writer in self.manifest.writers:
            if writer.base is not None:
                self._base_of(self._index(writer))
        return sum(base.check_bases() for base in self._bases.values())

    def objects(self, weights_only: bool) -> Any:
        """Returns the nest of all values that are not in shards. With weights_only, each value that
        torch refuses is replaced by a note (see partial_objects.loaded).

        Raises:
            CorruptCheckpoint: the file of objects is damaged, or belongs to another save.
            pickle.UnpicklingError: weights_only is true, and torch's pickler did not write the
                file.
        """
        file = self.manifest.objects.file
        return self.copies.whole(file, lambda: self._objects(weights_only))

    def _objects(self, weights_only: bool) -> Any:
        with self.copies.objects(self.manifest) as file:
            what = repr(self._path(self.manifest.objects.file))
            nest = file.read_by(lambda file: partial_objects.loaded(file, weights_only, what))
            self.nbytes_read += file.nbytes
            keys = self.manifest.kept
            if keys is None or type(nest) is not dict:
                return nest
            return {key: value for key, value in nest.items() if key in keys}

    def values(self, rank: int, weights_only: bool) -> Any:
        """Returns the entire state: the nest, with all tensors on the CPU, and one rank's own
        values.

        Raises:
            Exception: see objects(), per_rank() and read().
            pickle.UnpicklingError: a value was replaced by a note.
        """
        own_values = self.own_values(rank, 1, weights_only)
        own, keys = own_values.own, self.manifest.kept
        objects = self.objects(weights_only)
        if keys is not None and rank == 0:
            log.warning("%r was thinned to %s", self.path, listed(map(repr, keys)))
        left_out = [*partial_objects.notes_in(objects, None)]
        for name, value in (own or {}).items():
            left_out += partial_objects.notes_in(value, name)
        if left_out:
            raise refused(self.path, left_out, is_restore=False)
        by_key: dict[str, Stored] = {}
        fill(objects, lambda stored, _: by_key.setdefault(stored.key, stored), lambda *_: None)
        self.find([(*stored, whole(stored.shape)) for stored in by_key.values()])
        tensors = {
            key: torch.empty(shape, dtype=dtype, device="cpu")
            for key, dtype, shape in by_key.values()
        }
        self.read(
            [Target(*stored, whole(stored.shape), tensors[key]) for key, stored in by_key.items()]
        )
        return fill(objects, lambda stored, _: tensors[stored.key], own_values.value)

    def own_values(self, rank: int, world_size: int, weights_only: bool) -> OwnValues:
        """Returns the PerRank values as a rank of a job of `world_size` ranks restores them. Raises
        the errors of per_rank(), also later, when values of other ranks are read.
        """
        ranks = self.manifest.world_size

        def of_all(name: str) -> list[Any]:
            values = (self.per_rank(number, weights_only) for number in range(ranks))
            each = [(own or {}).get(name) for own in values]
            if left_out := [*partial_objects.notes_in(each, name)]:
                raise refused(self.path, left_out)
            return each

        return OwnValues(self.per_rank(rank, weights_only), rank, world_size, ranks, of_all)

    def per_rank(self, rank: int, weights_only: bool) -> dict[str, Any] | None:
        """Returns a rank's own values by name, with notes as in objects(); None if the job that
        saved the step had no such rank.

        Raises:
            CorruptCheckpoint: the values are damaged.
            StorageError: there is not enough memory for the values.
            pickle.UnpicklingError: see objects().
        """
        if rank >= self.manifest.world_size:
            return None
        own = dict[str, Any]()
        for index in map(self._index, self.manifest.writers_of(rank)):
            if index.per_rank is not None:
                what = f"the values of rank {rank} in {self._path(index.file)!r}"
                content = io.BytesIO(self._read_bytes(index, *index.per_rank))
                values = partial_objects.loaded(content, weights_only, what)
                own |= values if isinstance(values, dict) else {}
        return own

    def _read_bytes(self, index: ShardIndex, begin: int, nbytes: int) -> bytearray:
        """Returns a byte range of a shard, read in parts."""
        # In parts: memory grows only with what was verified, whatever size the index claims.
        content = bytearray()
        try:
            while len(content) < nbytes:
                part = bytearray(min(_PART_BYTES, nbytes - len(content)))
                row = (begin + len(content), address_of(part), len(part), 1, 0, 0)
                self._read_file(index, [row])
                content += part
        except MemoryError:
            op = f"allocate {nbytes} bytes for values from"
            raise StorageError(op, self._path(index.file), errno.ENOMEM) from None
        return content

    def alone(self) -> StepReader:
        """Returns a reader of the same step that keeps no other step's in memory."""
        reader = StepReader(self._staging, self.path, self.manifest, self.copies)
        reader._indexes = self._indexes
        return reader

    def find(
        self, targets: Sequence[Place], indexes: Sequence[ShardIndex] | None = None
    ) -> dict[str, torch.dtype]:
        """Returns the stored dtypes of the tensors that the targets are parts of. `indexes` are
        those of the files that may hold the targets, if they were looked up before.

        Raises:
            IncompatibleCheckpoint: a tensor is missing in this step, or has another shape.
            CorruptCheckpoint: a part of a tensor is missing or stored twice, or a tensor is stored
                in another dtype.
        """
        parts: dict[str, list[Box]] = {}
        formats: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        keys = dict.fromkeys(key for key, *_ in targets)
        for index in self._needed(targets) if indexes is None else indexes:
            for piece in chain.from_iterable(index.by_key[key] for key in _common(index, keys)):
                stored = (safetensors.DTYPES[piece.dtype], piece.shape)
                if formats.setdefault(piece.key, stored) != stored:
                    raise CorruptCheckpoint(
                        f"{self._path(index.file)!r} stores {piece.key!r} as {stored}, but another "
                        f"file stores this tensor as {formats[piece.key]}"
                    )
                parts.setdefault(piece.key, []).append(piece.box)
        missing = sorted({key for key, *_, box in targets if key not in formats and box.numel})
        if missing:
            raise IncompatibleCheckpoint(
                f"{self._path('')!r} holds no tensor {listed(map(repr, missing))}: the state to "
                "restore has tensors that were not saved"
            )
        for key, dtype, shape, box in targets:
            if box.numel and formats[key][0] != dtype:
                raise CorruptCheckpoint(
                    f"{self._path('')!r} stores {key!r} as {formats[key][0]}, but its objects file "
                    f"says {dtype}"
                )
            if box.numel and formats[key][1] != shape:
                raise IncompatibleCheckpoint(
                    f"{key!r} has shape {list(formats[key][1])} in {self._path('')!r}, "
                    f"must have {list(shape)}"
                )
            inside = (intersect(part, box) for part in parts.get(key, ()))
            is_one_part = parts.get(key) == [box]
            if (
                box.numel
                and not is_one_part
                and not covers(box, [part for part in inside if part is not None])
            ):
                raise CorruptCheckpoint(
                    f"{self._path('')!r} must hold every element of {key!r} exactly once, but "
                    "parts are missing or overlap"
                )
        return {key: dtype for key, (dtype, _shape) in formats.items()}

    def read(
        self, targets: Sequence[Target], staging: str = "host", *, in_place: bool = False
    ) -> int:
        """Reads parts of tensors into the targets' memory, converting dtypes where they differ.

        Args:
            targets: the parts to read, each with its memory.
            staging: how bytes are transferred to a GPU: "host" or "gds", see fastckpt.load.
            in_place: whether differences may be added in the targets' own memory, of which no two
                share any.

        Returns:
            The number of bytes that were needed.

        Raises:
            IncompatibleCheckpoint, CorruptCheckpoint: see find().
            CorruptCheckpoint, StorageError: a file is damaged or cannot be read; targets may be
                partly overwritten.
        """
        places = [target.place for target in targets]
        indexes = [*self._needed(places)]
        dtypes = self.find(places, indexes)
        buffers: dict[str, list[tuple[Target, torch.Tensor]]] = {}
        needed = 0
        readable = self._staging.devices.readable()
        for target in targets:
            if target.box.numel == 0:
                continue
            dtype = dtypes[target.key]
            tensor = target.tensor.detach()
            # Tied tensors are targets with the same memory, which must receive a difference once.
            is_readable = in_place or not self.manifest.bases
            as_it_lies = is_readable and (
                tensor.dtype == dtype and takes_bytes(tensor, readable) and tensor.is_contiguous()
            )
            if not as_it_lies or (tensor.device.type != "cpu" and self._in_bits(target)):
                tensor = torch.empty(target.box.sizes, dtype=dtype, device="cpu")
            ensure(tuple(tensor.shape) == target.box.sizes, "the target has its box's shape")
            buffers.setdefault(target.key, []).append((target, tensor))
            needed += tensor.numel() * tensor.element_size()
        reads = self._staging.devices.reads(
            tensor.untyped_storage() for pairs in buffers.values() for _, tensor in pairs
        )
        queue = reads.ranges[0].queue if reads.ranges else None
        direct, _why = self._staging.gds.way(staging, queue)
        note_overwritten(target.tensor for target in targets)
        with self.copies.ahead(_rows_of(indexes, buffers)) as shards:
            for index, rows in shards:
                self._read_file(index, sorted(rows), reads, direct)
        converted = (
            key
            for key, pairs in buffers.items()
            for target, tensor in pairs
            if tensor.data_ptr() != target.tensor.data_ptr()
            and put_converted(target.tensor, tensor)
        )
        tell_lossy(self.path, [*dict.fromkeys(converted)])
        return needed

    def _in_bits(self, target: Target) -> bool:
        """Returns whether a part consists of so many small runs that reading it to the host and
        copying it at once is faster.
        """
        for index in self._needed([target.place]):
            for piece in index.by_key.get(target.key, ()):
                for _, _, nbytes, count, _, _ in copies(piece.box, 0, target.box, 0, 1):
                    if count > _RUNS_MAX and nbytes < _RUN_ITEMS_MIN:
                        return True
        return False

    def _needed(self, targets: Iterable[Place]) -> Iterator[ShardIndex]:
        """Yields, in the order of ranks, the indexes of the files that may hold parts of the
        targets.
        """
        spans: dict[int, tuple[float, float]] = {}
        for key, _dtype, shape, box in targets:
            if box.numel:
                low, high = span(box, shape)
                earlier = spans.get(key_hash(key), (low, high))
                spans[key_hash(key)] = (min(earlier[0], low), max(earlier[1], high))
        if not spans:
            return
        bounds = min(low for low, _ in spans.values()), max(high for _, high in spans.values())
        for writer in self.manifest.writers:
            low, high = bounds
            if writer.keys is not None:
                shared = [spans[key] for key in writer.keys if key in spans]
                low = min((low for low, _ in shared), default=low)
                high = max((high for _, high in shared), default=high)
            if may_hold(writer, spans.keys(), low, high):
                yield self._index(writer)

    def _index(self, writer: Writer) -> ShardIndex:
        if writer.index not in self._indexes:
            read = partial(self.copies.index, writer, self.manifest.nonce)
            self._indexes[writer.index] = self.copies.whole(writer.index, read)[0]
        return self._indexes[writer.index]

    def _read_file(
        self,
        index: ShardIndex,
        rows: Sequence[CopyRow],
        reads: DeviceSources | None = None,
        direct: GdsDevice | None = None,
    ) -> None:
        """Reads rows of a shard, sorted by position, into memory of the host or of the devices in
        `reads`. Bytes are staged in host memory, except for blocks that `direct` can read.
        """
        chain: list[tuple[StepReader, ShardIndex]] = [(self, index)]
        while index.delta is not None and not isinstance(chain[-1][0], StepInMemory):
            chain.append(chain[-1][0]._base_of(index))
            index = chain[-1][1]
        chain.reverse()
        if len(chain) > 1:
            reads = direct = None  # a difference is added in memory of the host

        def read(count: int) -> None:
            for number, (reader, its) in enumerate(chain[:count]):
                reader.copies.whole(its.file, partial(attempt, number, Counter()))

        def attempt(number: int, attempts: Counter[str]) -> None:
            if attempts["begun"]:  # the last one may have added a part of the difference
                read(number)
            attempts["begun"] += 1
            reader, its = chain[number]
            reader._read_rows(its, rows, reads, direct)

        read(len(chain))

    def _base_of(self, index: ShardIndex) -> tuple[StepReader, ShardIndex]:
        """Returns the reader of the step from which a shard is a difference, and the index there.

        Raises:
            CorruptCheckpoint: there is no such step, or it is not the one that was subtracted.
        """
        assert index.delta is not None
        nonce = index.delta.base
        if nonce not in self._bases:
            if self._base is None:
                raise CorruptCheckpoint(
                    f"{self._path(index.file)!r} is a difference from another step"
                )
            self._bases[nonce] = self._base(nonce)
        base = self._bases[nonce]
        if base.manifest.sequence >= self.manifest.sequence:  # so that each chain has an end
            raise CorruptCheckpoint(
                f"{self._path(index.file)!r} is a difference from {base.path!r}, which was not "
                "committed before it"
            )
        writer = next((its for its in base.manifest.writers if its.rank == index.rank), None)
        of_base = None if writer is None else base._index(writer)
        if of_base is None or not index.is_difference_from(of_base):
            raise CorruptCheckpoint(
                f"{self._path(index.file)!r} is a difference from another file than that of rank "
                f"{index.rank} in {base.path!r}, although the step has the base's nonce"
            )
        return base, of_base

    def _read_rows(
        self,
        index: ShardIndex,
        rows: Sequence[CopyRow],
        reads: DeviceSources | None,
        direct: GdsDevice | None,
    ) -> None:
        devices = [] if reads is None else reads.ranges
        blocks = None if devices or index.delta is not None else self.copies.kept
        with self.copies.shard(index) as body:
            if blocks is not None and blocks.gives(body, rows):
                return
            numbers = blocks_of(rows, index.block_bytes)
            large = set[int]()
            if direct is not None:
                large = whole_blocks(rows, index.block_bytes, direct.queue, devices)
            with closing(body.divided(numbers, direct, large)) as stream:
                try:
                    body.move(stream, rows, devices, xors=index.delta is not None)
                    body.check(stream, stream.arrive())
                finally:
                    self.nbytes_read += stream.nbytes_read()


class StepInMemory(StepReader):
    """A step that was read into the memory of its targets, from which a later one differs there.
    That memory holds it until a difference is added; if that fails, it is read again.

    Args:
        held: the reader that has read the step.
        base: as StepReader's.
    """

    def __init__(self, held: StepReader, base: Callable[[str], StepReader]) -> None:
        super().__init__(held._staging, held.path, held.manifest, held.copies)
        self._indexes = held._indexes
        self._again = StepReader(held._staging, held.path, held.manifest, held.copies, base)
        self._given = set[str]()

    def _read_rows(
        self,
        index: ShardIndex,
        rows: Sequence[CopyRow],
        reads: DeviceSources | None,
        direct: GdsDevice | None,
    ) -> None:
        """Does nothing at first, since the rows are in their places."""
        if index.file in self._given:
            self._again._read_file(index, rows)
        self._given.add(index.file)
