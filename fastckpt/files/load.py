"""The load of one file: passes verified bytes to torch.load, on one rank or on several together.

The module determines which file is at a path, and when torch.load must read it alone.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import pickle
import stat
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import _weights_only_unpickler

from fastckpt.arguments.quantities import shown_time, shown_transfer
from fastckpt.arguments.urls import is_mounted
from fastckpt.engine.devices import Devices
from fastckpt.errors import (
    CheckpointError,
    NoPath,
    RanksDisagree,
    StorageError,
    TruncatedFile,
    telling,
)
from fastckpt.formats.torch_pickle import torch_load
from fastckpt.plan.image import PORTION_BYTES
from fastckpt.ranks import per_group, same_state
from fastckpt.reading.verified import OtherByteOrder, VerifiedFile, open_verified
from fastckpt.saving import pipeline
from fastckpt.storage.file_system import (
    APPEARS_S,
    Storage,
    close_scratch,
    from_the_path,
    reported,
    scratch,
)
from fastckpt.storage.input_files import InputFile, PosixFile, input_file
from fastckpt.storage.objects import ObjectFile


class DeferredStorages:
    """A map_location for torch.load that defers the reads of large storages.

    torch first requests the bytes of a storage in host memory, and then its device. The file defers
    the read until then. Host memory that is never accessed costs nothing.

    Args:
        file: the file that is loaded; its reads are deferred from now on.
        devices: the devices that can be read to directly.
        map_location: see torch.load and possible().
    """

    def __init__(self, file: VerifiedFile, devices: Devices, map_location: Any) -> None:
        self._file = file
        self._devices = devices
        self._map_location = map_location
        file.defer()

    @staticmethod
    def possible(devices: Devices, map_location: Any) -> bool:
        """Returns whether there is a device to read to, and map_location is not a function."""
        if map_location is not None and not isinstance(map_location, str | torch.device | dict):
            return False
        if isinstance(map_location, str | torch.device):
            return devices.target(str(map_location)) is not None
        # The file names the devices. Looking for devices would affect forked children, so it is
        # done only in a process that uses them anyway.
        return devices.in_use()

    @staticmethod
    def queue(devices: Devices, map_location: Any) -> Any:
        """Returns the queue of the device that most likely receives the storages, or None."""
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


log = logging.getLogger("fastckpt")

_APPEARS_POLL_S = 0.2


class TorchLoad(NamedTuple):
    """The arguments of torch.load."""

    f: Any
    map_location: Any
    pickle_module: Any
    options: dict[str, Any]

    def read(self, source: Any, place: Any = None) -> Any:
        """Lets torch.load read `source`, a file with the content of f. `place` replaces
        map_location.
        """
        f, where = self.f, self.map_location
        simple = where is None or isinstance(where, str | torch.device)
        with _no_memory_told(f), _end_told(f), _no_pickle_told(f):
            is_path = isinstance(source, str | os.PathLike)
            if is_path and simple and str(f).endswith(".safetensors"):
                # Newer versions of torch.load do the same by themselves.
                from safetensors.torch import load_file

                return load_file(source, device=str(where or "cpu"))
            where = where if place is None else place
            return torch_load(source, where, self.pickle_module, **self.options)


@telling
def _no_memory_told(error: BaseException, f: Any) -> None:
    """Converts the errors of torch and Python for a shortage of memory or address space to
    StorageError.
    """
    # torch raises a bare RuntimeError with the system's words.
    is_torchs = isinstance(error, RuntimeError) and os.strerror(errno.ENOMEM) in str(error)
    if isinstance(error, MemoryError) or (is_torchs and not isinstance(error, CheckpointError)):
        path = str(f if isinstance(f, str | os.PathLike) else getattr(f, "name", f))
        op, detail = "allocate memory to load", str(error) or type(error).__name__
        raise StorageError(op, path, errno.ENOMEM, detail=detail) from error


@telling
def _end_told(error: BaseException, f: Any) -> None:
    """Adds the path to torch's error for a file that ends before its pickle does."""
    is_torchs = isinstance(error, EOFError) and not isinstance(error, CheckpointError)
    if is_torchs and isinstance(f, str | os.PathLike):
        raise TruncatedFile(
            f"{os.fspath(f)!r} is empty or was cut off, perhaps by a crash while it was written: "
            "load an older checkpoint"
        ) from error


@telling
def _no_pickle_told(error: BaseException, f: Any) -> None:
    """Converts the KeyError, IndexError or UnicodeDecodeError of torch's pickle interpreter for a
    file without a pickle, such as a text, to the UnpicklingError that other such files cause.
    """
    if not isinstance(error, KeyError | IndexError | UnicodeDecodeError):
        return
    *_others, (frame, _line) = traceback.walk_tb(error.__traceback__)
    if frame.f_code.co_filename == _weights_only_unpickler.__file__:
        path = os.fspath(f) if isinstance(f, str | os.PathLike) else getattr(f, "name", f)
        raise pickle.UnpicklingError(
            f"{path!r} is damaged or was not written by torch.save: its pickle raises "
            f"{type(error).__name__}: {error}"
        ) from error


def load_alone(asked: TorchLoad, verify: bool, maps: bool, staging: str) -> Any:
    """Loads a file on this rank alone.

    Args:
        verify: whether to verify the file's checksums.
        maps: whether torch.load maps the file.
        staging: how large storages are transferred to a GPU.
    """
    load = partial(_load_alone, asked, verify, maps, staging)
    return from_the_path(load) if isinstance(asked.f, str | os.PathLike) else load()


def _load_alone(asked: TorchLoad, verify: bool, maps: bool, staging: str) -> Any:
    started = time.perf_counter()
    opened = _open_regular(asked.f)
    if opened is None:
        return _read_by_torch(asked, None)
    current = pipeline.current()
    try:
        direct = None
        if staging != "host" and not maps:
            queue = DeferredStorages.queue(current.staging.devices, asked.map_location)
            direct, _why = current.staging.gds.way(staging, queue)
        file = open_verified(current.staging, opened, verify, direct=direct)
        if file is None:
            obj = _read_by_torch(asked, opened)
        else:
            with file:
                if not maps:
                    obj = _load_placed(asked, file)
                elif not verify or not isinstance(asked.f, str | os.PathLike):
                    obj = _read_by_torch(asked, opened)
                else:
                    file.verify_all()
                    # A save may have committed another file under the path since it was verified.
                    with _for_torch(opened) as path:
                        obj = asked.read(path)
    finally:
        opened.close()
    _tell_loaded(opened.path, file, started)
    return obj


def _read_by_torch(asked: TorchLoad, opened: InputFile | None) -> Any:
    """Lets torch.load read f. `opened` is None if f is not a regular file or does not exist. If f
    is a URL without an object, raises NoPath.
    """
    if isinstance(opened, ObjectFile):
        with _for_torch(opened) as path:
            return asked.read(path)
    if opened is None and isinstance(asked.f, str) and is_mounted(asked.f):
        detail = (
            "there is no such object; to read a step, use Checkpointer, fastckpt.open or "
            "fastckpt.load_into"
        )
        raise NoPath("open", asked.f, errno.ENOENT, detail=detail)
    return asked.read(asked.f)


@contextmanager
def _for_torch(opened: InputFile) -> Iterator[str]:
    """Yields a path by which torch.load can open the open file. An object is first copied to
    memory.
    """
    if not isinstance(opened, ObjectFile):
        yield f"/proc/self/fd/{opened.fd}"
        return
    fd = scratch()
    try:
        offset, nbytes = 0, opened.nbytes()
        while offset < nbytes:
            offset += os.pwrite(fd, opened.read_at(PORTION_BYTES, offset), offset)
        yield f"/proc/self/fd/{fd}"
    finally:
        close_scratch(fd)


def _tell_loaded(path: str, file: VerifiedFile | None, started: float, rank: int = 0) -> None:
    """Logs the size of the file and the duration of the load, in one line on the first rank."""
    seconds = time.perf_counter() - started
    if file is None:
        summary = (
            f"in {shown_time(seconds)} by torch.load, since the file has no checksums of fastckpt"
        )
    else:
        summary = shown_transfer(file.nbytes, seconds)
    log.log(logging.DEBUG if rank else logging.INFO, "loaded %r: %s", path, summary)


def _load_placed(asked: TorchLoad, file: VerifiedFile) -> Any:
    """Loads the file like _load_verified(), but reads large storages directly to their device if
    the map_location permits it.
    """
    devices = pipeline.current().staging.devices
    if not DeferredStorages.possible(devices, asked.map_location):
        return _load_verified(asked, file)
    try:
        place = DeferredStorages(file, devices, asked.map_location)
        return _load_verified(asked, file, place)
    except OtherByteOrder:
        file.stop_deferring()
        return _load_verified(asked, file)


def _load_verified(asked: TorchLoad, file: VerifiedFile, place: Any = None) -> Any:
    """Lets torch read from `file` instead of f, and moves f to the position where torch would leave
    it.
    """
    obj = file.read_by(lambda file: asked.read(file, place))
    if not isinstance(asked.f, str | os.PathLike):
        asked.f.seek(file.tell())
    return obj


def load_together(asked: TorchLoad, verify: bool, group: Any, timeout_s: float) -> Any:
    """Loads a file on the ranks of a group, each of which reads a share of the file."""
    started = time.perf_counter()
    current = pipeline.current()
    path = os.path.realpath(asked.f)
    agreement = per_group.together(group).coordinator.begin(
        f"load of {path!r}", timeout_s, "nothing was loaded"
    )
    with ExitStack() as stack:
        stack.callback(agreement.close)
        file: VerifiedFile | None = None
        try:
            # The file that the first rank finds exists, though an NFS client may not see it yet.
            reference = b"" if agreement.rank == 0 else agreement.get("found")
            until = time.monotonic() + min(timeout_s, APPEARS_S)
            while True:
                digest = b""
                try:
                    opened, file, digest = from_the_path(lambda: _found(asked.f, verify, group))
                finally:
                    if agreement.rank == 0:  # b"": the file is damaged, as other ranks will find
                        agreement.put("found", digest)
                if digest == reference or not reference or time.monotonic() >= until:
                    break
                if not current.storage.look_again(path):
                    break
                _forget(opened, file)
                agreement.check()
                time.sleep(_APPEARS_POLL_S)
            if opened is not None:
                stack.callback(opened.close)
            differing = same_state.same(agreement, "file", digest, lambda: digest)
            if differing is not None:
                details = "; ".join(f"ranks {ranks}: {text.decode()}" for ranks, text in differing)
                raise RanksDisagree(f"ranks found different files at {path!r}: {details}")
        except BaseException as error:
            agreement.fail(error)
            if file is not None:
                file.abandon()
            raise
        if file is None:
            obj = _read_by_torch(asked, opened)
        else:
            with file:
                obj = _load_placed(asked, file)
    _tell_loaded(path, file, started, agreement.rank)
    return obj


def _found(
    f: str | os.PathLike[str], verify: bool, group: Any
) -> tuple[InputFile | None, VerifiedFile | None, bytes]:
    """Opens a path on one of several ranks. Returns the open file (None if torch opens f), the
    verified file (None if fastckpt did not write it), and a text that identifies the file.
    """
    current, opened = pipeline.current(), _open_regular(f)
    if opened is None:
        with reported("open", str(f)):
            is_there = current.storage.status(os.path.realpath(f)) is not None
        return None, None, b"none of fastckpt's" if is_there else b"nothing"
    try:
        file = open_verified(current.staging, opened, verify, group)
    except BaseException:
        opened.close()
        raise
    digest = b"none of fastckpt's" if file is None else f"{file.closing_crc:08x}".encode()
    return opened, file, digest


def _forget(opened: InputFile | None, file: VerifiedFile | None) -> None:
    if file is not None:
        file.abandon()
    if opened is not None:
        opened.close()


def _open_regular(f: Any) -> InputFile | None:
    """Opens a path, or opens again a file that the caller has open at its beginning. Returns None
    if torch.load must open f itself, or must report why that is impossible.
    """
    current = pipeline.current()
    if isinstance(f, str | os.PathLike):
        path = os.path.realpath(f)
        current.wait_for(path)
        if not _is_regular(current.storage, path):
            return None
        try:
            return input_file(current.storage, path)
        except (FileNotFoundError, PermissionError):
            return None
        except OSError as error:  # say, no descriptor is left; torch would load f unverified
            raise StorageError("open", path, error.errno or errno.EIO) from error
    try:
        if isinstance(f, io.TextIOBase) or f.tell() != 0:
            return None
        # An open file description of our own: reads must not change the caller's position or flags.
        fd = current.storage.open(f.fileno())
    except (AttributeError, OSError, io.UnsupportedOperation):
        return None
    return PosixFile(current.storage, fd, str(getattr(f, "name", fd)))


_NO_FILE = (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM)


def _is_regular(storage: Storage, path: str) -> bool:
    """Returns os.path.isfile(path), but raises an error for a file that is being replaced."""
    try:
        status = storage.status(path)
    except OSError as error:
        if error.errno in _NO_FILE:
            return False  # torch.load raises its own error
        op = "open" if error.errno == errno.ESTALE else "stat"
        raise StorageError(op, path, error.errno or errno.EIO) from error
    except ValueError:  # no file can have this path; or the client of a URL refuses its options
        if is_mounted(path):
            raise
        return False
    if status is not None and stat.S_ISFIFO(status.st_mode):
        # torch.load would wait for a writer, and then fail: it has to seek.
        raise StorageError("open", path, errno.EINVAL, detail="it is a FIFO, not a regular file")
    return status is not None and stat.S_ISREG(status.st_mode)
