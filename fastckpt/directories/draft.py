"""A hidden directory, with files that are captured now and written later."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping

import torch

from fastckpt.arguments.options import SaveOptions
from fastckpt.directories.hidden_directory import HiddenDirectory
from fastckpt.directories.items_plan import ItemsPlan
from fastckpt.directories.shared_files import SharedFiles
from fastckpt.engine.devices import Devices, DeviceSources
from fastckpt.formats import safetensors, torch_pickle, torch_zip
from fastckpt.formats.file_list import File
from fastckpt.formats.torch_pickle import torch_save
from fastckpt.plan.image import Image
from fastckpt.ranks.round import Round
from fastckpt.saving.mutation_check import WatchedTensors
from fastckpt.state.kinds import PLAIN_TENSORS, copied_later
from fastckpt.storage.file_system import Storage


class CapturedFile:
    """A file whose content was captured, to be laid out and written later. Its name is relative."""

    def __init__(self, name: str) -> None:
        self.name = name

    def storages(self) -> list[torch.UntypedStorage]:
        """Returns the storages that are copied."""
        raise NotImplementedError

    def layout(self) -> Image:
        """Returns the image of the file."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drops the references to the captured objects."""
        raise NotImplementedError


class Zip(CapturedFile):
    """A file with the bytes that torch.save would write."""

    def __init__(self, name: str, captured: torch_pickle.Capture) -> None:
        super().__init__(name)
        self._captured = captured

    def storages(self) -> list[torch.UntypedStorage]:
        return [*self._captured.storages()]

    def layout(self) -> Image:
        return torch_zip.layout(self._captured)

    def forget(self) -> None:
        self._captured.forget()


class _Tensors(CapturedFile):
    def __init__(
        self, name: str, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> None:
        super().__init__(name)
        self._tensors = tensors
        self._metadata = metadata

    def storages(self) -> list[torch.UntypedStorage]:
        return [tensor.untyped_storage() for tensor in self._tensors.values()]

    def layout(self) -> Image:
        entries = [
            safetensors.Entry(name, tensor.dtype, tuple(tensor.shape), tensor.data_ptr())
            for name, tensor in self._tensors.items()
        ]
        return safetensors.layout(entries, [*self._tensors.values()], self._metadata)[0]

    def forget(self) -> None:
        self._tensors = {}


class _Content(CapturedFile):
    def __init__(self, name: str, content: bytes) -> None:
        super().__init__(name)
        self._content = bytearray(content)

    def storages(self) -> list[torch.UntypedStorage]:
        return []

    def layout(self) -> Image:
        return Image.of_bytes(self._content) if self._content else Image.tailless()

    def forget(self) -> None:
        self._content = bytearray()


class Failure(CapturedFile):
    """A placeholder for the files of a rank whose capture failed; laying it out raises the
    error.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(os.curdir)
        self._error: BaseException | None = error

    def storages(self) -> list[torch.UntypedStorage]:
        return []

    def layout(self) -> Image:
        assert self._error is not None
        raise self._error

    def forget(self) -> None:
        self._error = None


class Draft(HiddenDirectory):
    """A hidden directory, with its files that are written later.

    Args:
        storage, path, beside, later: like HiddenDirectory's.
        devices: the devices whose memory may be read later.
        options: the save's options. With the step fence, small tensors are copied now, and a change
            of another tensor before its copy is detected.
        agreement: the save's round.

    Attributes:
        path: the path that the directory will have.
        options, agreement: the arguments.
        pending: this rank's files that are written later.
        items: the plans of subdirectories to which each rank adds a file.
        shared: the files that several ranks write together later; None if there are none.
        watched: the tensors that must not change before they are copied.
        listed: the size and CRC-32 of files written at once, if their writer has computed these;
            other files are read to compute them.

    Raises:
        StorageError: the directory cannot be created.
    """

    def __init__(
        self,
        storage: Storage,
        devices: Devices,
        path: str,
        beside: str | None,
        options: SaveOptions,
        agreement: Round,
        *,
        later: bool = False,
    ) -> None:
        super().__init__(storage, path, beside, later=later)
        self.path = path
        self.options = options
        self.agreement = agreement
        self._devices = devices
        self._copies_small = options.fence == "step"
        self.pending: list[CapturedFile] = []
        self.items: list[ItemsPlan] = []
        self.shared: SharedFiles | None = None
        self.listed: dict[str, File] = {}
        self.watched: list[WatchedTensors] = []

    def add(self, obj: object, name: str) -> None:
        """Adds the file that torch.save(obj, name) would write, or raises torch.save's errors. obj
        may change when the fence allows it.
        """
        protocol = torch.serialization.DEFAULT_PROTOCOL
        on_devices = self._devices.readable()
        try:
            captured = torch_pickle.capture(
                obj, pickle, protocol, False, self._copies_small, on_devices
            )
        except torch_pickle.SkipDataActive:
            torch_save(obj, os.path.join(self.directory, name))
            return
        self.pending.append(Zip(name, captured))
        if captured.tensors:
            self.watched.append(WatchedTensors(captured.tensors, obj))

    def fail(self, error: BaseException) -> None:
        """Makes the save fail on all ranks with an error of this rank. If the error were raised
        here, the other ranks would continue and wait for this rank.
        """
        self.pending = [Failure(error)]

    def add_tensors(
        self, tensors: Mapping[str, torch.Tensor], name: str, metadata: Mapping[str, str]
    ) -> bool:
        """Adds a safetensors file; tensors that share memory are written separately. Returns False
        and adds nothing for tensors that only the safetensors library may be able to write:
        subclasses, sparse tensors, and tensors of new dtypes.
        """
        for tensor in tensors.values():
            if type(tensor) not in PLAIN_TENSORS or not safetensors.supported(tensor.dtype):
                return False
            if tensor.numel() and not safetensors.fits(tensor):
                return False
        copies = {key: self.held(tensor.detach()) for key, tensor in tensors.items()}
        self.pending.append(_Tensors(name, copies, dict(metadata)))
        self._watch(copies)
        return True

    def add_content(self, content: bytes, name: str) -> None:
        """Adds a small file with this content."""
        self.pending.append(_Content(name, content))

    def add_shared(self, files: SharedFiles, tensors: Mapping[str, torch.Tensor]) -> None:
        """Adds the files that all ranks of the save write together; called once. `tensors` are this
        rank's parts, from held().
        """
        self.shared = files
        self._watch(tensors)

    def add_items(self, items: ItemsPlan) -> None:
        """Adds this rank's file of a subdirectory to which each rank of the save adds a file."""
        self.items.append(items)
        self.watched += items.watched

    def _watch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Registers tensors, if the fence requires this, so that changes before their copy are
        detected.
        """
        if self._copies_small:
            versions = [(tensor, tensor._version) for tensor in tensors.values()]
            self.watched.append(WatchedTensors(versions, tensors))

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor, or a copy if its memory cannot be copied later in place."""
        return copied_later(tensor, self._devices.readable(), self._copies_small)

    def reads(self) -> DeviceSources:
        """Returns the device memory to copy, as of the current streams."""
        storages = [
            s for files in (self.pending, self.items) for each in files for s in each.storages()
        ]
        return self._devices.reads(
            storages if self.shared is None else [*storages, *self.shared.storages()]
        )
