"""torch's pickler turns objects into records of a torch zip, with tensors by reference.

Responsible for the one private function of torch that saving needs, for noting which tensors it
meets, and for unpickling verified records. It must not know the bytes of a file.
"""

from __future__ import annotations

import copyreg
import ctypes
import gc
import io
import pickle
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from fastckpt.errors import CorruptCheckpoint, ensure
from fastckpt.plan.image import BY_VALUE_BYTES

with suppress(ImportError):  # torch's pickler would import it in the stall of the first save
    import torch.utils.serialization.config

# Bound once, here: a program may put fastckpt.save and fastckpt.load in their places.
torch_save, torch_load = torch.save, torch.load


_CPU = frozenset(("cpu",))


class SkipDataActive(Exception):
    """torch.serialization.skip_data() is active: there is nothing to stage."""


@dataclass
class Capture:
    """The records of a zip that torch's pickler made of an object, in order.

    Attributes:
        copies_small: whether storages of up to BY_VALUE_BYTES are copied now, to bytes on the CPU
            or to a storage on the same device.
        readable: types of devices whose storages are kept; torch copies others to the CPU.
        records: name and content: bytes, or a storage that the record is copied from.
        tensors: the tensors met while pickling, with their version counters at that moment.
    """

    copies_small: bool = False
    readable: frozenset[str] = _CPU

    records: list[tuple[str, bytes | torch.UntypedStorage]] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Storages by the names of their records, noted before the first record is written. If one
        # is on a device, torch would copy it to the host: it is told to leave out all contents,
        # which then come from here.
        self.met: dict[str, torch.UntypedStorage] = {}
        self._leaving_out = ExitStack()
        self._by_us = False
        self.uncounted: list[torch.Tensor] = []  # tensors met that have no version counter
        self._of_tensors: set[int] | None = None
        self._copies: list[tuple[torch.Tensor, torch.UntypedStorage]] = []

    # torch.serialization._save calls write_record() and, without contents, write_record_metadata().
    def write_record(self, name: str, content: Any, nbytes: int) -> None:
        if name == "data.pkl" and self._on_devices() and not _skips_data():
            self._leaving_out.enter_context(torch.serialization.skip_data())
            self._by_us = True
        if isinstance(content, torch.UntypedStorage):
            if self.copies_small and nbytes:
                content = self._lasting(content, nbytes)
        else:
            content = content.encode() if isinstance(content, str) else content
            ensure(len(content) == nbytes, f"{len(content)} bytes instead of {nbytes}")
        self.records.append((name, content))

    def _lasting(self, storage: torch.UntypedStorage, nbytes: int) -> bytes | torch.UntypedStorage:
        """Returns the storage if it may be read later, else a copy of it."""
        if self._of_tensors is None:
            tensors = [*(tensor for tensor, _ in self.tensors), *self.uncounted]
            self._of_tensors = set(map(_identity, tensors))
        # torch counts no changes of a storage that the object holds without a tensor.
        if nbytes <= BY_VALUE_BYTES or storage._cdata not in self._of_tensors:
            if storage.device.type == "cpu":
                return ctypes.string_at(storage.data_ptr(), storage.nbytes())
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
            self._copies.append((copy, storage))
            return copy.untyped_storage()
        return storage

    def write_record_metadata(self, name: str, nbytes: int) -> None:
        if not self._by_us:
            raise SkipDataActive
        storage = self.met[name]
        if storage.device.type not in self.readable:
            storage = storage.cpu()  # type: ignore[no-untyped-call]
        self.write_record(name, storage, nbytes)

    def note(self, tensor: torch.Tensor) -> None:
        """Notes a tensor that is pickled, and its version counter."""
        if type(tensor) not in _PLAIN and torch.nn.parameter.is_lazy(tensor):
            return  # it has no data yet
        if tensor.is_inference():
            self.uncounted.append(tensor)
        else:
            self.tensors.append((tensor, tensor._version))

    def _on_devices(self) -> bool:
        types = {storage.device.type for storage in self.met.values()}
        return bool(types & self.readable - _CPU)

    def copy_small(self) -> None:
        """Copies the small storages of devices, hundreds by one kernel, in the order of the current
        streams; the host does not wait.
        """
        if self._copies:
            copies = [copy for copy, _ in self._copies]
            torch._foreach_copy_(copies, [_octets(storage) for _, storage in self._copies])

    def finish(self) -> None:
        """Lets torch copy contents again, and drops what only pickling needs."""
        self._leaving_out.close()
        self.met.clear()
        self.uncounted.clear()
        self._copies.clear()

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """Returns the storages among the records' contents."""
        return (content for _, content in self.records if isinstance(content, torch.UntypedStorage))


def _identity(tensor: torch.Tensor) -> int:
    """Returns a number that stands for a tensor's storage; 0 if it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _octets(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _skips_data() -> bool:
    """Tells whether the user has entered torch.serialization.skip_data()."""
    state = getattr(torch.serialization, "_serialization_tls", None)
    return bool(getattr(state, "skip_data", False))


def capture(
    obj: object,
    pickle_module: Any,
    pickle_protocol: int,
    disable_byteorder_record: bool,
    observe_tensors: bool,
    readable: frozenset[str] = _CPU,
) -> Capture:
    """Pickles obj as torch.save does, and notes its storages without copying readable ones.

    Args:
        obj, pickle_module, pickle_protocol, disable_byteorder_record: torch.save's arguments.
        observe_tensors: whether training goes on before all is copied. If so, each tensor and its
            version counter are noted, and small storages, such as buffers that a forward pass
            updates, and storages that belong to no tensor are copied.
        readable: types of devices whose storages stay where they are.

    Raises:
        SkipDataActive: torch.serialization.skip_data() is active.
        Exception: the error that torch.save raises for an object that cannot be pickled.
    """
    captured = Capture(copies_small=observe_tensors, readable=readable)
    save = getattr(torch.serialization, "_save", None)
    if save is None:
        return _capture_by_copy(obj, pickle_module, pickle_protocol)
    met = captured.met if readable - _CPU else None
    module = _Shim(pickle_module, captured if observe_tensors else None, met)
    try:
        with collection_paused():
            save(obj, captured, module, pickle_protocol, disable_byteorder_record)
            captured.copy_small()
    finally:
        try:
            captured.finish()
        finally:
            module.forget()
    return captured


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keeps Python from collecting garbage, where many objects are made but no cycles: a collection
    would only take time, in proportion to the objects of the whole program.
    """
    collecting = gc.isenabled()
    try:
        gc.disable()  # inside of the try: a signal handler may raise as soon as this has returned
        yield
    finally:
        if collecting:
            gc.enable()


def pickles(
    value: object, wanted: Callable[[torch.Tensor], bool], nbytes_max: int = 0
) -> tuple[torch.Tensor | None, bytes]:
    """Returns a wanted tensor that pickling a value would reach, at any depth, or None; and the
    pickle, without what is in tensors and large arrays, if it has at most so many bytes, or b"".

    It keeps nothing else of what it visits. An error of pickling ends the search and is not raised.
    """
    file = _Beginning(nbytes_max)
    search = _Search(wanted, file, nbytes_max)
    try:
        search.dump(value)
    except Exception:  # the search has found a tensor, or an error that pickling will meet, too
        return search.found, b""
    return search.found, file.content if file.nbytes <= nbytes_max else b""


class _Search(pickle.Pickler):
    """A pickler that stops at the first tensor that is wanted."""

    def __init__(
        self, wanted: Callable[[torch.Tensor], bool], file: _Beginning, nbytes_max: int
    ) -> None:
        # With a buffer_callback, arrays stay out of band: they are neither visited nor copied.
        def is_small(buffer: pickle.PickleBuffer) -> bool:
            view = memoryview(buffer)
            return view.contiguous and view.nbytes < nbytes_max

        super().__init__(file, protocol=5, buffer_callback=is_small)
        self._wanted = wanted
        self.found: torch.Tensor | None = None

    def persistent_id(self, obj: object) -> str | None:
        if isinstance(obj, torch.Tensor) and self._wanted(obj):
            self.found = obj
            raise LookupError
        plain = type(obj) in (torch.Tensor, torch.nn.Parameter)
        return "without its contents" if plain or torch.is_storage(obj) else None


class _Beginning:
    """A file that keeps no more than so many bytes of what it is given."""

    def __init__(self, nbytes_max: int) -> None:
        self.content, self.nbytes = b"", 0
        self._nbytes_max = nbytes_max

    def write(self, content: bytes) -> int:
        nbytes = memoryview(content).nbytes
        self.nbytes += nbytes
        if self.nbytes <= self._nbytes_max:
            self.content += content
        return nbytes


class _Shim:
    """A pickle module whose Pickler does the same, and notes the tensors and storages it meets.

    Args:
        pickle_module: the module.
        captured: notes the tensors, if there is one.
        met: gets the storages by the names of their records, if there is one.
    """

    def __init__(
        self,
        pickle_module: Any,
        captured: Capture | None,
        met: dict[str, torch.UntypedStorage] | None,
    ) -> None:
        base: Any = pickle_module.Pickler
        inherited = getattr(base, "reducer_override", None)
        self._note = None if captured is None else captured.note
        self._of_torch: list[Any] = []

        class Pickler(base):  # type: ignore[misc]
            # torch derives from this class and defines persistent_id, which pickle calls for every
            # object, some twenty for each tensor.
            def __init_subclass__(cls) -> None:
                of_torch = cls.persistent_id
                self._of_torch.append(of_torch)

                def persistent_id(pickler: Any, obj: Any) -> Any:
                    if type(obj) in _NO_STORAGES:
                        return None
                    name = of_torch(pickler, obj)
                    if name is not None and met is not None:
                        met[f"data/{name[2]}"] = getattr(obj, "_untyped_storage", obj)
                    return name

                cls.persistent_id = persistent_id

        is_ours = inherited is None and OrderedDict not in copyreg.dispatch_table

        def reducer_override(pickler: Any, obj: Any) -> Any:
            if type(obj) is OrderedDict and is_ours and not obj and not obj.__dict__:
                return _EMPTY  # every tensor has one, and Python takes long to say so
            if self._note is not None and isinstance(obj, torch.Tensor):
                self._note(obj)
            return NotImplemented if inherited is None else inherited(pickler, obj)

        Pickler.reducer_override = reducer_override
        self.Pickler = Pickler

    def forget(self) -> None:
        """Lets go of what was met: a class is part of a cycle, and torch's refers to the storages.
        Older torch, such as 2.9, leaves both to the garbage collector.
        """
        self._note = None
        for function in self._of_torch:
            for cell in function.__closure__ or ():
                del cell.cell_contents


_EMPTY = OrderedDict, ()
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# No object of these very types is a storage, which is all that torch's persistent_id looks for.
_NO_STORAGES = _PLAIN | {
    *(str, bytes, int, float, bool, type(None), tuple, list, dict, OrderedDict, type),
    *(torch.dtype, types.FunctionType),
    type(torch.FloatStorage),  # the class of storages' names
}


def _capture_by_copy(obj: object, pickle_module: Any, pickle_protocol: int) -> Capture:
    """Makes the same records more slowly, for a torch that is unlike those known: torch.save writes
    a zip to memory, which is read back. So it holds a copy of everything.
    """
    buffer = io.BytesIO()
    torch_save(obj, buffer, pickle_module, pickle_protocol)
    captured = Capture()
    skipped = {"version", ".data/serialization_id"}  # layout() writes these itself
    with zipfile.ZipFile(buffer) as archive:
        for name in archive.namelist():
            short = name.split("/", 1)[1]
            if short not in skipped:
                captured.records.append((short, archive.read(name)))
    return captured


def is_shortage(error: BaseException) -> bool:
    """Returns whether an error of torch.load says that memory is short; no text of a file does."""
    shortage = "[enforce fail at alloc_cpu.cpp"
    return isinstance(error, MemoryError) or (
        type(error) is RuntimeError and str(error).startswith(shortage)
    )


def unpickled(
    source: Any, weights_only: bool, what: str, how: str = "pass that to restore() or load()"
) -> Any:
    """Returns what torch.load makes of verified bytes.

    Args:
        what: names the bytes in messages.
        how: tells in messages how to read with weights_only=False.

    Raises:
        CorruptCheckpoint: the bytes are not what torch.save writes.
        MemoryError, RuntimeError: there is not enough memory for what they hold.
        pickle.UnpicklingError: they hold more than weights_only=True allows.
    """
    try:
        return torch_load(source, map_location="cpu", weights_only=weights_only)
    except MemoryError:
        raise
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        said = str(error).splitlines() or [""]
        reason = next((line for line in said if "WeightsUnpickler" in line), said[0]).strip()
        raise pickle.UnpicklingError(
            f"{what}: some of the objects need weights_only=False, which runs code that the file "
            f"names: if you trust whoever wrote it, {how}. "
            f"torch says: {reason}"
        ) from None
    except Exception as error:
        # Without weights_only, code that the file names may have failed: that is not damage.
        if (not weights_only and "PytorchStreamReader" not in str(error)) or is_shortage(error):
            raise
        raise CorruptCheckpoint(f"{what}: these bytes are not from torch.save: {error}") from None
