"""Saves of one file, by one rank or by several that hold the same object.

Responsible for the order of the stages: each rank stages and writes its interval of the image, the
first one also makes the file, writes what depends on all checksums, and commits. It must not know
the bytes of the format, how a block moves, or how ranks talk.
"""

from __future__ import annotations

import logging
import os
import zlib
from array import array
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch

from fastckpt.arguments.environment import launched_rank
from fastckpt.engine.devices import Devices
from fastckpt.engine.gds_trial import Choice
from fastckpt.engine.staging import combine_crcs
from fastckpt.engine.transfer import Fetch
from fastckpt.formats import torch_pickle, torch_zip
from fastckpt.formats.arrangement import arrange, nbytes_of
from fastckpt.handle import SaveHandle
from fastckpt.options import WriteOptions
from fastckpt.plan.image import BLOCK_BYTES, Image
from fastckpt.plan.intervals import Checksums, Part, bounds
from fastckpt.ranks.groups import Together
from fastckpt.ranks.round import Round
from fastckpt.ranks.same_state import Description, Sampled, disagreement
from fastckpt.saving.fence import Watched, named_tensors
from fastckpt.saving.image_file import ImageFile
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Job, Pipeline
from fastckpt.state.dtensors import is_sharded
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.lustre_layout import Purpose, Stripe, grain_bytes

log = logging.getLogger("fastckpt")


_has_warned = False  # of ranks that save to one path alone


def warn_of_ranks_alone(storage: Storage, path: str) -> None:
    """Says, once, that ranks of a job save to one path at the same time without knowing of each
    other: what happens when `group` is None by mistake, as group.WORLD is before
    init_process_group().

    The first rank looks for nobody: that it saves alone is what most jobs do.
    """
    global _has_warned
    rank, ranks = launched_rank() or (0, 1)
    if _has_warned or rank == 0:
        return
    others = atomic.others_at_work(storage, path)
    if others:
        _has_warned = True
        log.warning(
            "rank %d of %d saves alone to %r, and so does process %d at the same time: they "
            "replace each other's file. To save together, pass group=torch.distributed.group.WORLD "
            "(which is None before init_process_group()); or save on one rank, or to several paths",
            *(rank, ranks, path, others[0]),
        )


class Plan:
    """One rank's plan of a file, made before anything is written.

    Args:
        captured: what was pickled.
        obj: what it is of.
        shared: None where one rank saves alone, else what its group agreed on.
        devices: whose memory may be read.
        stripe: as fastckpt.save's.

    Attributes:
        reads, watched: as Job's.

    Raises:
        TypeError: the object holds a tensor of which each rank has another part.
    """

    def __init__(
        self,
        captured: torch_pickle.Capture,
        obj: object,
        shared: Together | None,
        devices: Devices,
        stripe: Stripe = "auto",
    ) -> None:
        self.captured = captured
        self.reads = devices.reads(captured.storages())
        self.watched = [Watched(captured.tensors, obj)] if captured.tensors else []
        self.together = shared
        self.stripe = stripe
        self.description: Description | None = None
        self._first_rank: frozenset[str] = frozenset()
        self._tensors: list[_Named] = []
        if shared is not None:  # what is made of these can wait, and the caller cannot
            self._first_rank = shared.unequal()
            self._tensors = [_Named.of(*item) for item in named_tensors(obj)]

    def layout(self, rank: int, ranks: int, seed: int) -> tuple[Image, list[int]]:
        """The image, and where its body is cut into the ranks' intervals."""
        if self.together is None:
            image = torch_zip.layout(self.captured)
            return image, bounds(image.body_nbytes, ranks)
        texts = [(tensor.name, tensor.text()) for tensor in self._tensors]
        texts.append(("the argument stripe", repr(self.stripe)))  # decides where parts begin
        self.description = Description(texts, self._first_rank)
        name_at = {tensor.address: tensor.name for tensor in reversed(self._tensors)}
        name_at.pop(0, None)
        names = {
            record: name_at.get(content.data_ptr(), record)
            for record, content in self.captured.records
            if isinstance(content, torch.UntypedStorage)
        }
        first = {record for record, name in names.items() if name in self._first_rank}
        arrangement = arrange(self.captured, first)
        if rank != 0:
            arrangement.tail.clear()  # is the first rank's to write
        image, front_nbytes = torch_zip.layout_shared(arrangement)
        grain = grain_bytes(image.nbytes, ranks, self.stripe)
        cuts = bounds(image.body_nbytes, ranks, front_nbytes, arrangement.small_nbytes, grain)
        self.description.lay_out(
            (names.get(record, record), f"{record} of {nbytes_of(content)} bytes")
            for record, content in [*arrangement.front, *arrangement.shared]
        )
        self.description.sample(
            [
                Sampled(names[record], content.data_ptr(), content.nbytes())
                for record, content in arrangement.shared
            ],
            seed,
        )
        return image, cuts

    def samples(self) -> list[tuple[int, bytearray]]:
        """Memory that ranks compare, and where it is to be copied before the state changes."""
        return [] if self.description is None else self.description.samples()


class _Named(NamedTuple):
    """A tensor that all ranks hold: what they compare of it, and its address (0 if it has none)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    address: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Named:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # the rest takes 1 us of each
        if not plain and is_sharded(tensor):
            raise TypeError(
                f"{name} is a DTensor, of which each rank holds a part: save it with "
                "fastckpt.Checkpointer"
            )
        try:
            address = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError, ValueError):
            address = 0  # sparse, lazy and other tensors without a storage of their own
        # Neither kind has one shape that ranks could compare.
        shapeless = tensor.is_nested or (not plain and torch.nn.parameter.is_lazy(tensor))
        return cls(name, tensor.dtype, None if shapeless else tensor.shape, address)

    def text(self) -> str:
        return f"{str(self.dtype)[6:]} {'' if self.shape is None else list(self.shape)}"


class FileSave(Job):
    """One file. With several ranks each runs its own, for the same file.

    Args:
        handle, agreement, fence: as Job's.
        plan: what is written.
        options: how.
    """

    def __init__(
        self,
        handle: SaveHandle,
        agreement: Round,
        plan: Plan,
        options: WriteOptions,
        *,
        fence: str,
    ) -> None:
        super().__init__(handle, agreement, plan.reads, plan.watched, fence=fence, lane=handle.path)
        self.plan: Plan | None = plan
        self.options = options
        self.replaced: int | None = None
        self._sources: list[object] = []

    def release(self) -> None:
        self.plan = None
        self._sources = []

    def end(self, pipeline: Pipeline) -> None:
        if self.replaced is not None:
            close_quietly(pipeline.storage, self.replaced)
        super().end(pipeline)

    def write(self, pipeline: Pipeline) -> None:
        agreement, staging, path = self.agreement, pipeline.staging, self.handle.path
        assert self.plan is not None
        seed = zlib.crc32(agreement.name.encode())
        image, cuts = self.plan.layout(agreement.rank, agreement.world_size, seed)
        gathered = [*image.gathered, *self.plan.samples()]
        self._sources = image.sources
        part = Part(image, cuts[agreement.rank], cuts[agreement.rank + 1])
        checksums = Checksums(image, cuts, combine_crcs)
        nbytes = part.end - part.begin
        limit, stagers = self.take_budget(staging, nbytes, self.options.limit_bytes)
        # Whatever happens, blocks in flight arrive before the file they go to is closed.
        with ExitStack() as files, self.telling(), ExitStack() as moving:
            fetch = moving.enter_context(
                Fetch(staging, pipeline.storage, gathered, path, self.reads)
            )
            self.choice = Choice(pipeline.storage, staging, self.options.staging, self.reads)
            direct = self.choice.direct(os.path.dirname(path), self.handle.stats)
            file = moving.enter_context(
                ImageFile(pipeline, part.image, path, limit - 1, stagers, self.reads, direct)
            )
            transfer = file.transfer
            self.copying.transfers += [fetch.transfer, transfer]
            self.copying.watch()
            pace = Pace(self.options.pacing, agreement, pipeline.rates, path, self.handle.stats)
            name = self._open(pipeline, files, image, part, file)
            if pace.meets:
                pace.meet(nbytes)
            pace.begin(nbytes)
            file.begin(part.begin, pace)
            self.copying.wait()
            fetch.fill()
            self._compare()
            agreement.put("crc", _packed(transfer.block_crcs(), transfer.slot_crcs()))
            if agreement.rank == 0:
                for rank, record in enumerate(agreement.gather("crc")):
                    checksums.add(rank, *_unpacked(record))
                tail = bytearray(image.tail(*checksums.joined()))
                file.add(Image.of_bytes(tail), image.body_nbytes)
            file.wait_written()
            self._patch(pipeline.storage, file.fd, checksums)
            stats = self.handle.stats
            stats.staged_bytes_max = min(
                transfer.staged_bytes_max() + (agreement.rank == 0) * BLOCK_BYTES,
                limit * BLOCK_BYTES,
            )
            stats.written_s = self.handle.elapsed_s()
            if agreement.rank == 0:
                atomic.take_permissions(pipeline.storage, file.fd, name, path)
            file.end(self.options.durable, image.nbytes if agreement.rank == 0 else None)
            self.conclude(
                b"", lambda _records: self._publish(pipeline, file.fd, name, image.nbytes)
            )

    def _open(
        self, pipeline: Pipeline, files: ExitStack, image: Image, part: Part, file: ImageFile
    ) -> str:
        """Makes the file, or opens it where another rank has made it; returns its name."""
        agreement, storage, path = self.agreement, pipeline.storage, self.handle.path
        stats = self.handle.stats
        assert self.plan is not None
        if agreement.rank == 0:
            purpose = Purpose(image.nbytes, agreement.world_size, self.plan.stripe)
            timed = agreement.world_size == 1 and not self.options.pacing
            make = partial(atomic.temporary, storage, path)
            name = file.make(files, make, purpose, self.options.backend, stats, timed=timed)
            agreement.put("file", os.fsencode(os.path.basename(name)))
            if agreement.world_size == 1:
                warn_of_ranks_alone(storage, path)
        else:
            name = os.fsdecode(agreement.get("file"))
            name = os.path.join(os.path.dirname(path), name)
            with reported("open", name):
                try:
                    fd = storage.open_to_write(name)
                except FileNotFoundError:
                    agreement.check()  # if the save has failed meanwhile, that is why
                    raise
            files.callback(close_quietly, storage, fd)
            # A rank without an interval has no page to try: where it would begin, others have
            # written.
            writes = part.begin < part.end
            route = pipeline.staging.route(
                fd, path, self.options.backend, writing=writes, offset=part.begin
            )
            file.join(fd, route, stats)
        stats.nbytes = part.end - part.begin + (agreement.rank == 0) * image.tail_nbytes
        return name

    def forget(self) -> None:
        assert self.plan is not None
        self.plan.captured.records.clear()
        self._sources.clear()

    def _compare(self) -> None:
        """Makes sure that all ranks hold the same."""
        assert self.plan is not None
        description, shared = self.plan.description, self.plan.together
        if description is None or shared is None:
            return
        groups = self.agreement.same("state", description.digest(), description.detail)
        if groups is not None:
            error, unequal = disagreement(groups, self.handle.path)
            shared.note_unequal(unequal)
            raise error

    def _patch(self, storage: Storage, fd: int, checksums: Checksums) -> None:
        """Fills in what depends on the checksums of the ranks before this one."""
        agreement = self.agreement
        needed = checksums.ranks_needed(agreement.rank)
        for rank in needed:
            checksums.add(rank, *_unpacked(agreement.get("crc", rank)))
        for offset, content in checksums.patches(agreement.rank) if needed else ():
            with reported("write", self.handle.path, offset):
                storage.patch(fd, content, offset)

    def _publish(self, pipeline: Pipeline, fd: int, name: str, nbytes: int) -> None:
        storage, path = pipeline.storage, self.handle.path
        with reported("write", path):
            assert storage.size(fd) == nbytes, "the file is not as long as its image"
        self.replaced = atomic.publish(storage, name, path, self.options.durable, fd)


def _packed(block_crcs: list[int], slot_crcs: list[int]) -> bytes:
    return array("I", [len(block_crcs), *block_crcs, *slot_crcs]).tobytes()


def _unpacked(record: bytes) -> tuple[array[int], array[int]]:
    numbers = array("I", record)
    return numbers[1 : 1 + numbers[0]], numbers[1 + numbers[0] :]
