"""Where the storages of a file go that is being loaded: large ones from verified blocks straight
into the memory of the device that map_location says.

Responsible for torch's meaning of map_location, and for reading a storage when it is known where
to. It must not know the bytes of the file, nor how they are verified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastckpt.engine.devices import Devices
from fastckpt.reading.verified_file import VerifiedFile


class Placing:
    """A map_location for torch.load of a file whose large storages are read late.

    torch first asks for the bytes of a storage, into memory of the host, and then where it belongs.
    The file leaves the first question open, and memory of the host that nobody touches costs
    nothing.

    Args:
        file: what is loaded; from now on it defers.
        devices: what may be read to directly.
        map_location: as torch.load's; see possible().
    """

    def __init__(self, file: VerifiedFile, devices: Devices, map_location: Any) -> None:
        self._file = file
        self._devices = devices
        self._map_location = map_location
        file.defer()

    @staticmethod
    def possible(devices: Devices, map_location: Any) -> bool:
        """Whether there is a device to read to, and map_location is not code that looks at
        storages.
        """
        if map_location is not None and not isinstance(map_location, str | torch.device | dict):
            return False
        if isinstance(map_location, str | torch.device):
            return devices.target(str(map_location)) is not None
        # The file says where to. Asking whether there are devices would be felt by child processes,
        # so it is done for a process that uses them anyway.
        return devices.in_use()

    @staticmethod
    def queue(devices: Devices, map_location: Any) -> Any:
        """Of the device that storages are likely to go to; None if there is none."""
        if not Placing.possible(devices, map_location):
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
            # What is unpickled may compute with the storage at once, or let go of its memory.
            led = reads.lead()
            reads.forget_waits()
        if not led:
            self._file.arrive()
        return memory


_by_torch: Callable[[Any, str], Any] = torch.serialization.default_restore_location
