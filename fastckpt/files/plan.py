"""The plan of a file: one rank writes all of it, or each rank writes its interval of a shared
image.

The module lays out and divides the object, defines what ranks compare, and computes the bytes that
depend on the checksums of all ranks.
"""

from __future__ import annotations

import logging
import os
import zlib
from array import array
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from fastckpt.arguments.environment import launched_rank
from fastckpt.arguments.options import WriteOptions
from fastckpt.engine.devices import Devices
from fastckpt.engine.staging import combine_crcs
from fastckpt.errors import CheckpointError
from fastckpt.formats import torch_pickle, torch_zip
from fastckpt.formats.torch_zip import arrange, nbytes_of
from fastckpt.plan.image import Image
from fastckpt.plan.rank_intervals import Checksums, Part, bounds
from fastckpt.ranks.per_group import GroupMemo
from fastckpt.ranks.round import Round
from fastckpt.ranks.same_state import Description, Sampled, compare
from fastckpt.saving.mutation_check import WatchedTensors, named_tensors
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.plan import Output, Place, Plan
from fastckpt.state.fit import refused_later
from fastckpt.state.kinds import is_sharded
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.lustre_layout import Purpose, grain_bytes
from fastckpt.storage.object_upload import Upload

log = logging.getLogger("fastckpt")


_has_warned = False  # whether this process has warned of ranks that save to one path alone


def warn_of_ranks_alone(storage: Storage, path: str) -> None:
    """Warns once if several ranks of a job save to one path at the same time, each one alone. A
    typical cause is that `group` is None by mistake, because group.WORLD is None before
    init_process_group(). The first rank does not check this, because in most jobs it saves alone.
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


class FilePlace(Place):
    """The path of a file that is being saved, as seen by one of the ranks that write the file.

    Args:
        storage, path: the interface to the file system, and the path there.
        agreement: the save's round.
        durable: whether the rename must survive a crash of the machine.

    Attributes:
        is_shared: whether other ranks can also write to the file; else the first rank writes all of
            it.
    """

    is_shared = True

    def __init__(self, storage: Storage, path: str, agreement: Round, durable: bool) -> None:
        self.storage = storage
        self.path = path
        self.directory = os.path.dirname(path)
        self._agreement = agreement
        self._durable = durable
        self._name = ""  # the temporary name
        self._fd, self._nbytes = -1, 0
        self._replaced: int | None = None

    def make(self, purpose: Purpose) -> AbstractContextManager[tuple[int | Upload, str]]:
        """Creates the file under a temporary name, for ImageFile. If an error follows, removes
        it.
        """
        return atomic.temporary(self.storage, self.path, purpose)

    def made(self, name: str) -> None:
        """Sends the name of the file that this rank created to the other ranks."""
        self._name = name
        self._agreement.put("file", os.fsencode(os.path.basename(name)))
        if self._agreement.world_size == 1:
            warn_of_ranks_alone(self.storage, self.path)

    def opened(self) -> int:
        """Waits until the first rank has created the file, and opens it.

        Raises:
            PeerFailed: another rank failed or is missing.
            StorageError: the file cannot be opened.
        """
        name = os.path.join(self.directory, os.fsdecode(self._agreement.get("file")))
        with reported("open", name):
            try:
                return self.storage.open(name, "write")
            except FileNotFoundError:
                self._agreement.check()  # if the save has failed meanwhile, its file is gone
                raise

    def take_permissions(self, fd: int) -> None:
        """Gives the file the permissions of the file that it replaces."""
        atomic.take_permissions(self.storage, fd, self._name, self.path)

    def complete(self, fd: int, nbytes: int) -> None:
        """Records the finished file and its size. The file stays open until publish()."""
        self._fd, self._nbytes = fd, nbytes

    def publish(self) -> None:
        """Commits the file, which is completely written: renames it to the path."""
        with reported("write", self.path):
            size = self.storage.fstat(self._fd).st_size
        if size != self._nbytes:
            raise CheckpointError(
                f"{self._name!r} has {size} bytes, but {self._nbytes} were written: another "
                "program changed it; nothing was committed"
            )
        self._replaced = atomic.publish(
            self.storage, self._name, self.path, self._durable, self._fd
        )

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        replaced, self._replaced = self._replaced, None
        if replaced is not None:  # closed only now, since freeing its blocks may take long
            close_quietly(self.storage, replaced)


_met = set[tuple[str, str]]()  # makers of values, of which was warned if a load will refuse them


class FilePlan(Plan):
    """One rank's plan of a file.

    Args:
        captured, obj: the capture of the object, and the object.
        shared: the GroupMemo of the group that saves; None if one rank saves alone.
        devices: the devices whose memory may be read.
        agreement, place, options: the save's.

    Raises:
        TypeError: several ranks save together, and the object contains a DTensor.
    """

    def __init__(
        self,
        captured: torch_pickle.Capture,
        obj: object,
        shared: GroupMemo | None,
        devices: Devices,
        agreement: Round,
        place: FilePlace,
        options: WriteOptions,
    ) -> None:
        watched = [WatchedTensors(captured.tensors, obj)] if captured.tensors else []
        super().__init__(devices.reads(captured.storages()), watched)
        self._captured = captured
        self._sources: list[object] = []
        self._together = shared
        self._agreement = agreement
        self._place = place
        self._options = options
        self._description: Description | None = None
        self._first_rank: frozenset[str] = frozenset()
        self._tensors: list[_Named] = []
        self._pickled = list[bytes]()
        if shared is not None:  # the texts of these are made later, since the caller waits
            self._first_rank = shared.unequal()
            self._tensors = [_Named.of(*item) for item in named_tensors(obj)]

    def lay_out(self, pace: Pace) -> list[Output]:
        if self._agreement.rank == 0:
            pickled = (its for name, its in self._captured.records if name == "data.pkl")
            self._pickled = [its for its in pickled if isinstance(its, bytes)]
        ranks = self._agreement.world_size
        if self._together is None:
            image = torch_zip.layout(self._captured)
            cuts = bounds(image.body_nbytes, ranks)
        else:
            image, cuts = self._lay_out_shared(ranks)
            if ranks > 1 and not self._place.is_shared:
                cuts[1:] = [image.body_nbytes] * ranks
        self._sources, self._gathered = image.sources, image.gathered
        return [_Interval(image, cuts, self._agreement, self._place, self._options)]

    def _lay_out_shared(self, ranks: int) -> tuple[Image, list[int]]:
        """Returns the image, and the offsets at which its body is divided into the ranks'
        intervals.
        """
        texts = [(tensor.name, tensor.text()) for tensor in self._tensors]
        # The stripe decides where intervals begin, so all ranks have to pass the same one.
        texts.append(("the argument stripe", repr(self._options.striping)))
        self._description = Description(texts, self._first_rank)
        name_at = {tensor.address: tensor.name for tensor in reversed(self._tensors)}
        name_at.pop(0, None)
        names = {
            record: name_at.get(content.data_ptr(), record)
            for record, content in self._captured.records
            if isinstance(content, torch.UntypedStorage)
        }
        first = {record for record, name in names.items() if name in self._first_rank}
        arrangement = arrange(self._captured, first)
        if self._agreement.rank != 0:
            arrangement.tail.clear()  # the first rank alone writes it
        image, front_nbytes = torch_zip.layout_shared(arrangement)
        grain = grain_bytes(image.nbytes, ranks, self._options.striping)
        cuts = bounds(image.body_nbytes, ranks, front_nbytes, arrangement.small_nbytes, grain)
        self._description.lay_out(
            (names.get(record, record), f"{record} of {nbytes_of(content)} bytes")
            for record, content in [*arrangement.front, *arrangement.shared]
        )
        compared = first.union(record for record, _ in arrangement.shared)
        self._description.sample(
            [
                Sampled(names[record], content.data_ptr(), content.nbytes())
                for record, content in [*arrangement.front, *arrangement.shared]
                if record in compared and isinstance(content, torch.UntypedStorage)
            ],
            zlib.crc32(self._agreement.name.encode()),
        )
        return image, cuts

    def samples(self) -> list[tuple[int, bytearray]]:
        described = [] if self._description is None else self._description.samples()
        return [*self._gathered, *described]

    def compare(self) -> None:
        self._tell_refusals()
        description, shared = self._description, self._together
        if description is not None and shared is not None:
            path = self._place.path
            compare(self._agreement, "state", description, path, shared.note_unequal)

    def _tell_refusals(self) -> None:
        """Warns, once for each class, of values that a load with weights_only=True will refuse."""
        path = self._place.path
        if refusals := refused_later(path, self._pickled, _met, reads_numpy=False):
            log.warning("%s", refusals)
        self._pickled = []

    def publish(self, records: list[bytes]) -> None:
        self._place.publish()

    def forget(self) -> None:
        self._captured.forget()
        self._sources.clear()

    def release(self) -> None:
        self.forget()
        self._description, self._tensors, self._gathered = None, [], []


class _Interval(Output):
    """This rank's interval of the image, in the file that the first rank creates."""

    def __init__(
        self,
        whole: Image,
        cuts: list[int],
        agreement: Round,
        place: FilePlace,
        options: WriteOptions,
    ) -> None:
        rank = agreement.rank
        part = Part(whole, cuts[rank], cuts[rank + 1])
        super().__init__(part.image, place.path)
        self.begin = part.begin
        self._whole = whole
        self._part = part
        self._checksums = Checksums(whole, cuts, combine_crcs)
        self._agreement = agreement
        self._place = place
        self._options = options

    @property
    def nbytes(self) -> int:
        tail_nbytes = 0 if self._agreement.rank else self._whole.tail_nbytes
        return self.image.body_nbytes + tail_nbytes

    def open(self) -> None:
        agreement, place, part = self._agreement, self._place, self._part
        if agreement.rank == 0:
            striping = self._options.striping
            purpose = Purpose(self._whole.nbytes, agreement.world_size, striping)
            place.made(self.file.make(place.make, purpose))
        elif not place.is_shared:
            agreement.put("crc", _packed([], []))
        else:
            # A rank with an empty interval must not probe O_DIRECT by a page: others write there.
            writes = part.begin < part.end
            self.file.join(place.opened(), place.path, writing=writes, offset=part.begin)

    def fill_in(self) -> None:
        agreement, transfer, checksums = self._agreement, self.file.transfer, self._checksums
        agreement.put("crc", _packed(transfer.block_crcs(), transfer.slot_crcs()))
        if agreement.rank == 0:
            for rank, record in enumerate(agreement.gather("crc")):
                checksums.add(rank, *_unpacked(record))
            tail = bytearray(self._whole.tail(*checksums.joined()))
            self.file.add(Image.of_bytes(tail), self._whole.body_nbytes)
        self.file.wait_written()
        self._patch()

    def _patch(self) -> None:
        """Writes the bytes of this interval that depend on checksums of earlier ranks."""
        agreement, checksums = self._agreement, self._checksums
        needed = checksums.ranks_needed(agreement.rank)
        for rank in needed:
            checksums.add(rank, *_unpacked(agreement.get("crc", rank)))
        for offset, content in checksums.patches(agreement.rank) if needed else ():
            with reported("write", self.path, offset):
                self._place.storage.write_at(self.file.fd, content, offset)

    def end(self) -> None:
        is_first = self._agreement.rank == 0
        if is_first:
            self._place.take_permissions(self.file.fd)
        self.file.end(self._whole.nbytes if is_first else None)
        self._place.complete(self.file.fd, self._whole.nbytes)


class _Named(NamedTuple):
    """A tensor that all ranks hold, with the facts that ranks compare, and its address (0 if it has
    none).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    address: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Named:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # saves 1 us for each of these
        if not plain and is_sharded(tensor):
            raise TypeError(
                f"{name} is a DTensor, and each rank holds only a part of it: save it with "
                "fastckpt.Checkpointer"
            )
        try:
            address = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError, ValueError):
            address = 0  # sparse, lazy and other tensors without a storage of their own
        # Nested and lazy tensors have no shape that ranks could compare.
        shapeless = tensor.is_nested or (not plain and torch.nn.parameter.is_lazy(tensor))
        return cls(name, tensor.dtype, None if shapeless else tensor.shape, address)

    def text(self) -> str:
        return f"{str(self.dtype)[6:]} {'' if self.shape is None else list(self.shape)}"


def _packed(block_crcs: list[int], slot_crcs: list[int]) -> bytes:
    return array("I", [len(block_crcs), *block_crcs, *slot_crcs]).tobytes()


def _unpacked(record: bytes) -> tuple[array[int], array[int]]:
    numbers = array("I", record)
    return numbers[1 : 1 + numbers[0]], numbers[1 + numbers[0] :]
