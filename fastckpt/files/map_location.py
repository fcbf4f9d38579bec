"""The placing of a loaded file's storages: large ones are read straight to the memory of the device
that map_location says.

Responsible for what torch means by map_location, and for reading a storage once its device is
known. It must not know the bytes of the file, nor how they are verified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastckpt.engine.devices import Devices
from fastckpt.reading.verified_file import VerifiedFile


class DeferredStorages:
    """A map_location for torch.load of a file whose large storages are read late.

    torch first asks for the bytes of a storage, in memory of the host, and then for its device. The
    file defers the bytes until then; host memory that nobody touches costs nothing.

    Args:
        file: the file that is loaded; it defers from now on.
        devices: the devices that can be read to directly.
        map_location: as torch.load's; see possible().
    """

    def __init__(self, file: VerifiedFile, devices: Devices, map_location: Any) -> None:
        self._file = file
        self._devices = devices
        self._map_location = map_location
        file.defer()

    @staticmethod
    def possible(devices: Devices, map_location: Any) -> bool:
        """Returns whether there is a device to read to, and map_location is no function."""
        if map_location is not None and not isinstance(map_location, str | torch.device | dict):
            return False
        if isinstance(map_location, str | torch.device):
            return devices.target(str(map_location)) is not None
        # The file names the devices. Looking for devices would affect forked children, so it is
        # done only in a process that uses them anyway.
        return devices.in_use()

    @staticmethod
    def queue(devices: Devices, map_location: Any) -> Any:
        """Returns the queue of the device that storages are likely to go to, or None."""
        if not DeferredStorages.possible(devices, map_location):
            return None
        named = isinstance(map_location, str | torch.device)
        device = devices.target(str(map_location) if named else None)
        return None if device is None else devices.queue(device)

    def __call__(self, storage: torch.UntypedStorage, location: str) -> Any:
        where = self._map_location
        if where is None:
            where = location
        elif isinstance(where, dict):
            where = where.get(location, location)
        elif isinstance(where, torch.device):
            where = str(where)
        address, nbytes = storage.data_ptr(), storage.nbytes()
        offset = self._file.deferred(address, nbytes) if nbytes else None
        if offset is None:
            return _by_torch(storage, where)
        device = self._devices.target(where) if isinstance(where, str) else None
        if device is None:
            self._file.fill(storage, offset, ())
            return _by_torch(storage, where)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        reads = self._devices.reads([memory])
        led = False
        try:
            self._file.fill(memory, offset, reads.ranges)
        finally:
            # Unpickling may compute with the storage at once, or free its memory.
            led = reads.lead()
            reads.forget_waits()
        if not led:
            self._file.arrive()
        return memory


_by_torch: Callable[[Any, str], Any] = torch.serialization.default_restore_location
