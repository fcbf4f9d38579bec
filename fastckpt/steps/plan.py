"""The plan of a step: each rank writes its shard and the shard's index. The first rank also writes
the objects that are in no shard. The manifest consists of the records of these files.
"""

from __future__ import annotations

import io
import json
import logging
import os
import secrets
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from fastckpt.engine.codec import FrameWriter, encoder_of
from fastckpt.errors import CheckpointError
from fastckpt.formats import safetensors, torch_zip
from fastckpt.formats.manifest import OBJECTS, Manifest, ObjectsFile, Writer
from fastckpt.formats.shard_index import (
    PER_RANK,
    Delta,
    Piece,
    ShardIndex,
    entry_name,
    index_name,
    shard_name,
)
from fastckpt.formats.value_names import key_among
from fastckpt.plan.boxes import Held, plan
from fastckpt.plan.image import BLOCK_BYTES, Image, ItemRun
from fastckpt.ranks.per_group import GroupMemo
from fastckpt.ranks.round import Round
from fastckpt.ranks.same_state import Description, compare
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.plan import Output, Place, Plan, WholeFile
from fastckpt.state.fit import refused_later
from fastckpt.state.tree import Leaf, comparable
from fastckpt.steps.capture import Content
from fastckpt.steps.options import StepOptions
from fastckpt.steps.retention import tidy
from fastckpt.steps.store import StepStore
from fastckpt.storage.file_system import Storage
from fastckpt.storage.lustre_layout import Purpose

# ---- StepPlace: a step becomes visible under the root, in a directory that a manifest commits.


class StepPlace(Place):
    """The place of a step: the store of its root, as one rank of a save sees it. `number` is the
    step's.

    Attributes:
        step: the step's directory, as this rank sees it.
    """

    def __init__(
        self, steps: StepStore, agreement: Round, number: int, options: StepOptions
    ) -> None:
        self.step = steps.draft(agreement.check)
        self.directory = steps.root
        self._steps = steps
        self._agreement = agreement
        self._number = number
        self._options = options

    def awaited(self, previous: Sequence[InnerHandle], pipeline: Pipeline) -> Sequence[InnerHandle]:
        # A step that was not committed is no base.
        return () if self._options.snapshot is None else previous

    def begin(self) -> None:
        if self._agreement.rank == 0:
            self.step.begin(self._number)

    def agree(self, meets: bool) -> tuple[str, bool]:
        """Sends the directory's name to all ranks. Returns the first rank's nonce and its `meets`,
        which is whether the ranks of a node wait for each other before they write.
        """
        if self._agreement.rank == 0:
            message = {"name": self.step.name, "nonce": secrets.token_hex(16), "meet": meets}
            self._agreement.put("place", json.dumps(message).encode())
        else:
            message = json.loads(self._agreement.get("place"))
            self.step.join(str(message["name"]))
            if self._options.durable:
                self._steps.sync_grown()  # the first rank does so when it commits
        return str(message["nonce"]), bool(message["meet"])

    def publish(self, manifest: Callable[[int], Manifest]) -> None:
        """Commits the step on the first rank. `manifest` creates the manifest from the sequence
        number of this commit.
        """
        committed = manifest(self._next_sequence())
        if committed.bases:
            there = {item.manifest.nonce for item in self._steps.committed()[0]}
            if not committed.bases <= there:
                raise CheckpointError(
                    f"the step from which {self.step.path()!r} is a difference was removed; "
                    "nothing was committed, and the next save is stored in full"
                )
        self.step.commit(committed, self._options.durable)

    def _next_sequence(self) -> int:
        return self._steps.next_sequence()

    def abandon(self) -> None:
        self.step.abandon()

    def close(self) -> None:
        self.step.close()

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        if failure is None and self.step.is_begun:
            tidy(self._steps, self.step.name, self._options)


# The bits of the exponent, which are all ones in infinities and NaNs. float8_e4m3fn has no
# infinities, and its NaNs have ones in all bits but the sign.
_NON_FINITE = {
    torch.float64: 0x7FF << 52,
    torch.float32: 0xFF << 23,
    torch.bfloat16: 0xFF << 7,
    torch.float16: 0x1F << 10,
    torch.float8_e5m2: 0x1F << 2,
    torch.float8_e4m3fn: 0x7F,
}


class Shard:
    """The layout of one writer's file, and the file's index once the file is written.

    Args:
        leaves: see Content.
        per_rank: a torch zip of this rank's own values; b"" if there are none.
        rank: this rank.
        has_file: whether the writer has a file even if it is empty. The first rank has one for each
            key with files of its own, so that the manifest names all of these keys.

    Attributes:
        image: the image of the file; empty if the shard is empty.
        nbytes: the size of the file.
    """

    def __init__(
        self, leaves: Sequence[Leaf], per_rank: bytes, rank: int, *, has_file: bool = False
    ) -> None:
        self._rank = rank
        entries: list[safetensors.Entry] = []
        owners: list[object] = []
        is_holder: dict[int, bool] = {}  # holders are shared between leaves
        own_leaves = []
        for leaf in leaves:
            if is_holder.setdefault(id(leaf.holders), rank in leaf.holders):
                own_leaves.append(leaf)
        pieces = plan([held_of(leaf) for leaf in own_leaves], rank)
        for piece in pieces:
            leaf = own_leaves[piece.held]
            local = leaf.local
            address = local.data_ptr() + piece.begin * local.element_size()
            name = entry_name(leaf.key, leaf.shape, piece.box)
            entries.append(safetensors.Entry(name, local.dtype, piece.box.sizes, address))
            owners.append(local)
        self._pieces = [(own_leaves[piece.held], piece.box) for piece in pieces]
        self._per_rank_nbytes = len(per_rank)
        if per_rank:
            values = bytearray(per_rank)
            tensor = torch.frombuffer(values, dtype=torch.uint8)
            owners.append(tensor)
            entries.append(
                safetensors.Entry(PER_RANK, torch.uint8, (len(values),), tensor.data_ptr())
            )
        self.is_empty = not (entries or has_file)
        self.image, self._offsets = safetensors.layout(entries, owners, {"format": "pt"})
        if self.is_empty:
            self.image = Image.tailless()
        self.nbytes = self.image.body_nbytes

    def runs(self) -> list[ItemRun]:
        """Returns where runs of items of the same type begin in the file; the first run is the
        header.
        """
        dtypes = [leaf.local.dtype for leaf, _box in self._pieces]
        dtypes += [torch.uint8] * (len(self._offsets) - len(dtypes))  # of the per_rank values
        runs = [ItemRun(0, 1, False)]
        for begin, dtype in sorted(zip(self._offsets, dtypes, strict=True), key=itemgetter(0)):
            run = ItemRun(begin, dtype.itemsize, dtype.is_floating_point)
            if run[1:] != runs[-1][1:]:
                runs.append(run)
        return runs

    def look_at_numbers(self) -> list[str]:
        """Marks the image's floating-point numbers to be checked; returns the names of their
        tensors.
        """
        names = []
        pieces = zip(self._pieces, self._offsets, strict=False)
        for (leaf, box), begin in sorted(pieces, key=itemgetter(1)):
            width, mask = leaf.local.element_size(), _NON_FINITE.get(leaf.local.dtype)
            if mask is not None and box.numel:
                self.image.numbers.extend((begin, begin + box.numel * width, width, mask))
                names.append(leaf.key)
        return names

    def pieces(self) -> tuple[Piece, ...]:
        return tuple(
            Piece(leaf.key, safetensors.NAMES[leaf.local.dtype], leaf.shape, box, begin)
            for (leaf, box), begin in zip(self._pieces, self._offsets, strict=False)
        )

    def index(
        self,
        nonce: str,
        name: str,
        block_crcs: list[int],
        codec: str | None = None,
        frames: tuple[int, ...] = (),
        delta: Delta | None = None,
    ) -> ShardIndex:
        own = (self._offsets[-1], self._per_rank_nbytes) if self._per_rank_nbytes else None
        return ShardIndex(
            nonce=nonce,
            rank=self._rank,
            file=name,
            file_nbytes=self.nbytes if codec is None else sum(frames),
            nbytes=self.nbytes,
            block_bytes=BLOCK_BYTES,
            block_crcs=tuple(block_crcs),
            codec=codec,
            frames=frames,
            pieces=self.pieces(),
            per_rank=own,
            delta=delta,
        )


def held_of(leaf: Leaf) -> Held:
    """Converts a leaf to the planner's type."""
    return Held(leaf.key, leaf.local.element_size(), leaf.shape, leaf.box, leaf.holders)


log = logging.getLogger("fastckpt")

# Makers of values that were checked for whether a restore refuses them.
_checked_makers = set[tuple[str, str]]()


class StepPlan(Plan):
    """One rank's plan of a step.

    Args:
        content: this rank's part of the state.
        metrics, metadata: those of the step, which the manifest records.
        memo: records the names of tensors and values that differ between ranks.
    """

    def __init__(
        self,
        handle: InnerHandle,
        agreement: Round,
        step: int,
        content: Content,
        metrics: Mapping[str, float | str],
        metadata: Any,
        place: StepPlace,
        options: StepOptions,
        storage: Storage,
        memo: GroupMemo,
    ) -> None:
        super().__init__(content.reads, content.watched)
        # A codec makes one frame of each block.
        self.whole = options.codec is not None or options.snapshot is not None
        self._handle = handle
        self._agreement = agreement
        self._step = step
        self._content: Content | None = content
        self._metrics, self._metadata = metrics, metadata
        self._place = place
        self._options = options
        self._storage = storage
        self._memo = memo
        self._shards = list[_ShardOutput]()
        self._objects: _ObjectsOutput | None = None
        self._nonce = ""
        self._pickled = list[bytes | torch.UntypedStorage]()

    def lay_out(self, pace: Pace) -> list[Output]:
        content, agreement = self._content, self._agreement
        assert content is not None
        options, path = self._options, self._handle.path
        for part, leaves in _divided(content.leaves, options.parts).items():
            per_rank, rank = content.per_rank.get(part, b""), agreement.rank
            own = Shard(leaves, per_rank, rank, has_file=part is not None and rank == 0)
            names = own.look_at_numbers() if options.check_finite else []
            if options.snapshot is not None:
                is_delta = options.snapshot.begin(own.image, own.pieces())
                options = replace(options, codec="planes" if is_delta else None)
            if self.whole or names:
                self.way = "host"
            shard = _ShardOutput(
                own, part, self._handle, agreement, self._storage, self._place, options
            )
            shard.names = names
            self._shards.append(shard)
        description = content.description
        compared = comparable(content.leaves, agreement.world_size, description.first_rank)
        seed = zlib.crc32(agreement.label.encode())
        description.sample(compared, seed)
        tensors = [(name, tensor) for name, (tensor, _version) in content.small.items()]
        small = [(name, tensor.data_ptr(), tensor.nbytes) for name, tensor in tensors]
        if small:
            description.small = Description([])
            description.small.sample(small, seed)
        captured, content.objects = content.objects, None
        records = [] if captured is None else captured.records
        self._pickled = [record for name, record in records if name == "data.pkl"]
        if captured is None:
            return [*self._shards]
        path = os.path.join(path, OBJECTS)
        self._objects = _ObjectsOutput(torch_zip.layout(captured), path, self._place, options)
        return [*self._shards, self._objects]

    def samples(self) -> list[tuple[int, bytearray]]:
        assert self._content is not None
        return self._content.description.samples()

    def go_to(self, place: Place) -> None:
        assert isinstance(place, StepPlace)
        self._place = place
        for shard in self._shards:
            shard.place = place
        if self._objects is not None:
            self._objects.place = place

    def agree(self, pace: Pace, nbytes: int) -> None:
        self._nonce, meets = self._place.agree(pace.meets)
        for shard in self._shards:
            shard.nonce = self._nonce
        self._handle.path = self._place.step.path()
        if meets:
            pace.meet(nbytes)

    def compare(self) -> None:
        assert self._content is not None
        description, path = self._content.description, self._handle.path
        memo = self._memo
        if self._agreement.rank == 0:
            self._warn_of_refusals()
        compare(self._agreement, "state", description, path, memo.note_unequal, memo.told)

    def _warn_of_refusals(self) -> None:
        """Warns, once for each class, of values that a restore with weights_only=True will
        refuse.
        """
        assert self._content is not None
        pickles, self._pickled = [each for each in self._pickled if isinstance(each, bytes)], []
        for content in self._content.per_rank.values():
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                pickles += [archive.read(n) for n in archive.namelist() if n.endswith("/data.pkl")]
        if warning := refused_later(self._handle.path, pickles, _checked_makers, reads_numpy=True):
            log.warning("%s", warning)

    def record(self) -> bytes:
        """Returns the manifest's entries for the files of this rank, a line for each."""
        return b"\n".join(shard.record for shard in self._shards if shard.record)

    def publish(self, records: list[bytes]) -> None:
        objects = self._objects
        assert objects is not None
        lines = (line for record in records for line in record.splitlines())
        writers = tuple(map(Writer.from_bytes, lines))
        sizes = (writer.nbytes + writer.index_nbytes for writer in writers)
        self._handle.stats.stored_nbytes = objects.written.nbytes + sum(sizes)

        def manifest(sequence: int) -> Manifest:
            return Manifest(
                step=self._step,
                nonce=self._nonce,
                sequence=sequence,
                world_size=self._agreement.world_size,
                created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                objects=objects.written,
                writers=writers,
                metrics=self._metrics,
                metadata=self._metadata,
            )

        self._place.publish(manifest)

    def forget(self) -> None:
        assert self._content is not None
        content = self._content
        content.leaves.clear()
        if content.description.small is not None:  # tensors that changed meanwhile may differ
            content.description.small.first_rank = frozenset(
                name
                for name, (tensor, version) in content.small.items()
                if version >= 0 and tensor._version != version
            )
        content.small.clear()

    def release(self) -> None:
        self._content = self._objects = None
        self._shards.clear()


def _divided(leaves: Sequence[Leaf], parts: Sequence[str]) -> dict[str | None, list[Leaf]]:
    """Divides tensors by the key of the state they are under; None for keys without a file of
    their own. In the order of the manifest's entries.
    """
    divided: dict[str | None, list[Leaf]] = {None: [], **{part: [] for part in parts}}
    for leaf in leaves:
        divided[key_among(parts, leaf.key)].append(leaf)
    return divided


class _ShardOutput(Output):
    """The file of this rank's shard, or of a part of it.

    Attributes:
        place: the place that the file is written to.
        nonce: the save's nonce, which the index contains.
        record: the manifest's entry for the shard, set when the files have been written.
    """

    def __init__(
        self,
        shard: Shard,
        part: str | None,
        handle: InnerHandle,
        agreement: Round,
        storage: Storage,
        place: StepPlace,
        options: StepOptions,
    ) -> None:
        super().__init__(shard.image, handle.path)
        self._part = part
        self._shard, self._handle = shard, handle
        self.nonce, self.record = "", b""
        self._storage = storage
        self.place = place
        self._options = options
        self._rank = agreement.rank
        self._name = shard_name(agreement.rank, options.codec, part)
        is_coded = options.codec is not None or options.snapshot is not None
        self.slot_label = "" if shard.is_empty or is_coded else self._name
        self._writer: FrameWriter | None = None

    def open(self) -> None:
        shard, file, step = self._shard, self.file, self.place.step
        codec = self._options.codec
        self._writer = None
        if shard.is_empty:
            return
        path, make = step.path(self._name), partial(step.made, self._name)
        if file.slot is not None and step.has_beside(file.slot.path):
            file.use_slot(step.adopt(self._name, file.slot.path), path)
            return
        purpose = Purpose(shard.nbytes, 1, self._options.striping, self.place.directory)
        file.make(make, purpose, path, allocates=codec is None)
        if codec is not None:
            encoder = encoder_of(codec, shard.runs(), BLOCK_BYTES)
            self._writer = FrameWriter(file.target, shard.nbytes, BLOCK_BYTES, encoder)
            file.through(self._writer.transfer)

    def fill_in(self) -> None:
        """Does nothing, because the checksums of a shard are in its index."""

    def end(self) -> None:
        shard, file, step = self._shard, self.file, self.place.step
        frames = () if self._writer is None else self._writer.frames()
        crcs, snapshot = file.transfer.block_crcs(), self._options.snapshot
        delta = None if snapshot is None else snapshot.delta(file.transfer.base_crcs)
        index = shard.index(self.nonce, self._name, crcs, self._options.codec, frames, delta)
        if snapshot is not None:
            snapshot.end(self._handle, index)
        file.end(shard.nbytes)
        name, content = index_name(self._rank, self._part), index.to_bytes()
        step.write(name, content, file.fd, self._options.durable)
        file.close()
        if self._options.durable:
            step.sync_own_directory()
        self.record = Writer.of(index, name, content, self._part).to_bytes()


class _ObjectsOutput(WholeFile):
    """The file of the objects that are in no shard: a torch zip, written to `place`."""

    is_small = True

    def __init__(self, image: Image, path: str, place: StepPlace, options: StepOptions) -> None:
        # A stripe count is meant for shards. This file is small, and a layout costs a request to
        # the metadata server.
        purpose = Purpose(image.nbytes, 1, "keep" if options.stripe == "keep" else "auto")
        super().__init__(image, path, partial(place.step.made, OBJECTS), purpose)
        self.place = place

    def open(self) -> None:
        place = self.place
        purpose = self._purpose._replace(directory=place.directory)
        make = partial(place.step.made, OBJECTS)
        self.file.make(make, purpose, place.step.path(OBJECTS))

    @property
    def written(self) -> ObjectsFile:
        """The manifest's entry for the file; valid when the file has been written."""
        return ObjectsFile(OBJECTS, self.image.nbytes, torch_zip.closing_crc(self.tail))
