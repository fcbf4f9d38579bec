"""The pickling of objects to a torch zip's records, like torch.save but with references to tensors.

Responsible for the bytes of data.pkl, for recording the storages and tensors in the object, and for
unpickling verified records.
"""

from __future__ import annotations

import copyreg
import ctypes
import gc
import hashlib
import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats import plain_pickle
from fastckpt.formats.plain_pickle import Kept
from fastckpt.plan.image import BY_VALUE_BYTES

with suppress(ImportError):  # torch's pickler would import it in the stall of the first save
    import torch.utils.serialization.config

# Bound once, here: a program may put fastckpt.save and fastckpt.load in their places.
torch_save, torch_load = torch.save, torch.load


_CPU = frozenset(("cpu",))
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class SkipDataActive(Exception):
    """torch.serialization.skip_data() is active, so there is nothing to stage."""


@dataclass
class Capture:
    """The records, in order, that torch's pickler made from an object.

    Attributes:
        records: name and content of each record. The content is bytes, or a storage from which the
            record is copied.
        tensors: the pickled tensors, with their version counters at that moment.
    """

    records: list[tuple[str, bytes | torch.UntypedStorage]] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """Returns the storages among the records' contents."""
        return (content for _, content in self.records if isinstance(content, torch.UntypedStorage))


def capture(
    obj: object,
    pickle_module: Any,
    pickle_protocol: int,
    disable_byteorder_record: bool,
    observe_tensors: bool,
    readable: frozenset[str] = _CPU,
) -> Capture:
    """Pickles obj like torch.save, and records its storages without copying readable ones.

    Args:
        obj, pickle_module, pickle_protocol, disable_byteorder_record: torch.save's arguments.
        observe_tensors: whether training continues before everything is copied. If so, each tensor
            and its version counter are recorded. Small storages, such as buffers that a forward
            pass updates, and storages that belong to no tensor are copied.
        readable: types of devices whose storages are used in place; other storages are copied to
            the CPU.

    Raises:
        SkipDataActive: torch.serialization.skip_data() is active.
        Exception: the error of torch.save for an object that cannot be pickled.
    """
    if getattr(getattr(torch.serialization, "_serialization_tls", None), "skip_data", False):
        raise SkipDataActive
    met, file = _Met(observe_tensors, readable), io.BytesIO()
    with collection_paused():
        _pickler_of(pickle_module.Pickler)(file, met, pickle_protocol).dump(obj)
        first = [("data.pkl", file.getvalue()), *small_records(disable_byteorder_record)]
        return Capture([*first, *met.records()], met.tensors)


def small_records(disable_byteorder_record: bool = False) -> tuple[tuple[str, bytes], ...]:
    """Returns the records that this torch writes between data.pkl and the storages."""
    config = getattr(getattr(torch.utils, "serialization", None), "config", None)
    alignment = getattr(getattr(config, "save", None), "storage_alignment", None)
    return _small_records(disable_byteorder_record, alignment, sys.byteorder)


@lru_cache(4)
def _small_records(disable_byteorder_record: bool, *_told: object) -> tuple[tuple[str, bytes], ...]:
    """Computes small_records(); the other arguments are settings that affect the records."""
    buffer = io.BytesIO()
    torch_save(None, buffer)
    others = {"data.pkl", "version", ".data/serialization_id"}  # the layout writes the last two
    if disable_byteorder_record:
        others.add("byteorder")
    with zipfile.ZipFile(buffer) as archive:
        names = [(name, name.split("/", 1)[1]) for name in archive.namelist()]
        return tuple((short, archive.read(name)) for name, short in names if short not in others)


class _Met:
    """The storages and tensors that a pickler meets."""

    def __init__(self, observes: bool, readable: frozenset[str]) -> None:
        self.tensors: list[tuple[torch.Tensor, int]] = []
        self._observes = observes
        self._readable = readable
        self._storages: list[tuple[torch.UntypedStorage, torch.device, int]] = []
        self._types: dict[torch.device, str] = {}  # as a device's attribute they take long
        self._keys: dict[int, str] = {}
        self._of_tensors: set[int] = set()
        self._dtypes: dict[int, torch.dtype] = {}
        self._locations: dict[torch.device, str] = {}
        self._tags_devices = _tags_devices()

    def note(self, tensor: torch.Tensor, number: int | None = None) -> None:
        """Records a pickled tensor, if tensors are observed: its version counter, and its storage's
        number (_cdata), which is looked up if it is not given.
        """
        if not self._observes:
            return
        if number is None:
            if type(tensor) not in _PLAIN and torch.nn.parameter.is_lazy(tensor):
                return  # it has no data yet
            try:
                number = tensor.untyped_storage()._cdata
            except (NotImplementedError, RuntimeError):
                number = 0  # it has no storage of its own
        self._of_tensors.add(number)
        with suppress(RuntimeError):  # a tensor of inference mode counts no changes
            self.tensors.append((tensor, tensor._version))

    def _type_of(self, device: torch.device) -> str:
        kind = self._types.get(device)
        if kind is None:
            kind = self._types[device] = device.type
        return kind

    def identified(self, storage: torch.UntypedStorage, dtype: torch.dtype, kind: Any) -> Any:
        """Returns torch's persistent id for a storage that is viewed as this dtype; `kind` is the
        dtype's legacy class.
        """
        number, nbytes, device = storage._cdata, storage.nbytes(), storage.device
        address = 0 if self._type_of(device) == "meta" else storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) is not dtype:
            raise RuntimeError(
                "Cannot save multiple tensors or storages that view the same data as different "
                "types"
            )
        key = self._keys.get(number)
        if key is None:
            key = self._keys[number] = str(len(self._storages))
            self._storages.append((storage, device, nbytes))
        location = self._locations.get(device)
        if location is None:
            location = torch.serialization.location_tag(storage)
            if self._tags_devices:
                self._locations[device] = location
        return "storage", kind, key, location, nbytes // dtype.itemsize

    def reduced(self, tensor: torch.Tensor) -> Any:
        """Returns the result of a torch.Tensor's __reduce_ex__ in a third of the time, and records
        the tensor; returns NotImplemented for a tensor with special attributes.
        """
        dtype = tensor.dtype
        kind = _LEGACY.get(dtype)
        if kind is None or tensor.layout is not torch.strided or tensor.is_nested:
            return NotImplemented
        if tensor.__dict__ or tensor._backward_hooks or tensor.is_neg():
            return NotImplemented
        if self._type_of(tensor.device) not in self._readable:
            return NotImplemented
        storage = tensor.untyped_storage()
        self.note(tensor, storage._cdata)
        identity = _Identity(self.identified(storage, dtype, kind))
        begin, sizes, strides = tensor.storage_offset(), tuple(tensor.size()), tensor.stride()
        return _REBUILD, (identity, begin, sizes, strides, tensor.requires_grad, OrderedDict())

    def records(self) -> list[tuple[str, bytes | torch.UntypedStorage]]:
        """Returns the storages' records, with copies of storages that cannot be read later."""
        result: list[tuple[str, bytes | torch.UntypedStorage]] = []
        copies: list[torch.Tensor] = []
        originals: list[torch.Tensor] = []
        for storage, device, nbytes in self._storages:
            content: bytes | torch.UntypedStorage = storage
            kind = self._type_of(device)
            if kind not in self._readable:
                content = storage.cpu()  # type: ignore[no-untyped-call]
            elif self._observes and nbytes and not self._lasts(storage, nbytes):
                if kind == "cpu":
                    content = ctypes.string_at(storage.data_ptr(), nbytes)
                else:
                    octets = torch.empty(0, dtype=torch.uint8, device=device)
                    originals.append(octets.set_(storage))
                    copies.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
                    content = copies[-1].untyped_storage()
            result.append((f"data/{len(result)}", content))
        if copies:  # hundreds by one kernel, in the order of the streams; the host does not wait
            torch._foreach_copy_(copies, originals)
        return result

    def _lasts(self, storage: torch.UntypedStorage, nbytes: int) -> bool:
        """Returns whether a storage may be read later, because torch counts its changes."""
        return nbytes > BY_VALUE_BYTES and storage._cdata in self._of_tensors


def _tags_devices() -> bool:
    """Returns whether only torch's own functions determine the locations of storages, which are
    then those of their devices. A program may have registered other functions.
    """
    taggers = [row[1] for row in getattr(torch.serialization, "_package_registry", ())]
    modules = {getattr(tagger, "func", tagger).__module__ for tagger in taggers}
    return modules == {torch.serialization.__name__}


class _Identity:
    """Stands for a storage in the arguments of a pickled tensor; holds the id that is written."""

    __slots__ = ("written",)

    def __init__(self, written: Any) -> None:
        self.written = written


@lru_cache(8)
def _pickler_of(base: Any) -> Any:
    """Returns a subclass of a pickle module's Pickler that pickles like torch.save and records
    storages and tensors. Its arguments are a file, a _Met and a protocol.
    """
    inherited = getattr(base, "reducer_override", None)

    class Pickler(base):  # type: ignore[misc]
        def __init__(self, file: io.BytesIO, met: _Met, protocol: int) -> None:
            super().__init__(file, protocol=protocol)
            registered = copyreg.dispatch_table.keys()
            self._met = met
            self._knows_dicts = inherited is None and OrderedDict not in registered
            is_stock = base is pickle.Pickler and torch.Tensor.__reduce_ex__ is _REDUCE
            self._knows_tensors = is_stock and torch.Tensor not in registered and _knows_tensors()

        def persistent_id(self, obj: Any) -> Any:
            kind = type(obj)
            if kind is _Identity:
                return obj.written
            if kind in _NO_STORAGES:  # pickle asks for some twenty objects for each tensor
                return None
            if isinstance(obj, torch.storage.TypedStorage):
                name = obj._pickle_storage_type()  # type: ignore[no-untyped-call]
                whole, dtype = obj._untyped_storage, obj.dtype
                return self._met.identified(whole, dtype, getattr(torch, name))
            if kind is torch.UntypedStorage:
                return self._met.identified(obj, torch.uint8, kind)
            return None

        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if kind is torch.Tensor and self._knows_tensors:
                reduced = self._met.reduced(obj)
                if reduced is not NotImplemented:
                    return reduced
            if kind is OrderedDict and self._knows_dicts and not obj and not obj.__dict__:
                return _EMPTY  # every tensor has one, and Python takes long to say so
            if isinstance(obj, torch.Tensor):
                self._met.note(obj)
            return NotImplemented if inherited is None else inherited(self, obj)

    return Pickler


@lru_cache(1)
def _knows_tensors() -> bool:
    """Returns whether this version of torch reduces a tensor like _Met.reduced()."""
    tensor = torch.empty_strided((2, 3), (5, 1), device="cpu")
    found, rest = tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
    wanted: Any = (0, (2, 3), (5, 1), False, OrderedDict())
    return found is _REBUILD and type(rest[0]) is torch.storage.TypedStorage and rest[1:] == wanted


_EMPTY = OrderedDict, ()
_REBUILD, _REDUCE = torch._utils._rebuild_tensor_v2, torch.Tensor.__reduce_ex__
# Complex numbers may be conjugates, which is told.
_LEGACY = {
    getattr(torch, name): getattr(torch, legacy)
    for name, legacy in (
        *(("float32", "FloatStorage"), ("float64", "DoubleStorage"), ("float16", "HalfStorage")),
        *(("bfloat16", "BFloat16Storage"), ("bool", "BoolStorage"), ("uint8", "ByteStorage")),
        *(("int64", "LongStorage"), ("int32", "IntStorage"), ("int16", "ShortStorage")),
        ("int8", "CharStorage"),
    )
}
# No object of these very types is a storage.
_NO_STORAGES = _PLAIN | {
    *(str, bytes, int, float, bool, type(None), tuple, list, dict, OrderedDict, type),
    *(torch.dtype, types.FunctionType),
    type(torch.FloatStorage),  # the class of storages' names
}


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses garbage collection for code that makes many objects but no cycles. A collection would
    only take time, in proportion to all objects of the program.
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
    """Returns a wanted tensor that the pickling of a value reaches, at any depth, or None; and the
    pickle without the contents of tensors and large arrays, or b"" if it exceeds nbytes_max.

    It keeps no reference to other objects. An error of pickling ends the search and is not raised.
    """
    file = _Beginning(nbytes_max)
    search = _Search(wanted, file, nbytes_max)
    try:
        search.dump(value)
    except Exception:  # the search has found a tensor, or an error that pickling will meet, too
        return search.found, b""
    return search.found, file.content if file.nbytes <= nbytes_max else b""


class Pickled(bytes):
    """The pickle of an object, for the comparison with the pickle of another process."""

    def tobytes(self) -> bytes:
        """Returns a digest that is equal for equal objects, although their pickles may differ in
        the order of sets and dicts, and in which equal parts are one object. Returns b"" if the
        pickle cannot be read.
        """
        return _digest_of(bytes(self))


@lru_cache(128)  # most objects are the same from one save to the next
def _digest_of(pickled: bytes) -> bytes:
    try:
        value, _end = plain_pickle.loads(
            pickled, lambda module, name: Kept(f"{module}.{name}"), lambda _tensor: None
        )
        return _digest(value, {})
    except Exception:  # it is nested too deeply, or has operations of old protocols
        return b""


def _digest(value: Any, done: dict[int, bytes]) -> bytes:
    """Returns a digest of a value of plain_pickle. It ignores the order of lists, because some
    classes pickle their sets as lists.
    """
    if id(value) in done:
        return done[id(value)]
    done[id(value)] = b"itself"
    kind = type(value)
    if kind is Kept:
        parts = [value.name.encode(), *(_digest(part, done) for part in value.parts)]
    elif kind is dict:
        parts = sorted(_digest(key, done) + _digest(its, done) for key, its in value.items())
    elif kind in (list, set, frozenset):
        parts = sorted(_digest(item, done) for item in value)
    elif kind is tuple:
        parts = [_digest(item, done) for item in value]
    else:
        parts = [repr(value).encode(errors="replace")]
    digest = hashlib.blake2b(b" ".join((kind.__name__.encode(), *parts)), digest_size=16).digest()
    done[id(value)] = digest
    return digest


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
    """A file that keeps only the first bytes written to it, up to a limit."""

    def __init__(self, nbytes_max: int) -> None:
        self.content, self.nbytes = b"", 0
        self._nbytes_max = nbytes_max

    def write(self, content: bytes) -> int:
        nbytes = memoryview(content).nbytes
        self.nbytes += nbytes
        if self.nbytes <= self._nbytes_max:
            self.content += content
        return nbytes


def is_shortage(error: BaseException) -> bool:
    """Returns whether an error of torch.load means a lack of memory; a file cannot fake this."""
    shortage = "[enforce fail at alloc_cpu.cpp"
    return isinstance(error, MemoryError) or (
        type(error) is RuntimeError and str(error).startswith(shortage)
    )


def unpickled(
    source: Any, weights_only: bool, what: str, how: str = "pass it to restore() or load()"
) -> Any:
    """Returns the result of torch.load for verified bytes.

    Args:
        what: the name of the bytes in messages.
        how: instructions in messages for a read with weights_only=False.

    Raises:
        CorruptCheckpoint: torch.save did not write the bytes.
        MemoryError, RuntimeError: there is not enough memory for the object.
        pickle.UnpicklingError: the object needs more than weights_only=True allows.
    """
    try:
        return torch_load(source, map_location="cpu", weights_only=weights_only)
    except MemoryError:
        raise
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        lines = str(error).splitlines() or [""]
        reason = next((line for line in lines if "WeightsUnpickler" in line), lines[0]).strip()
        raise pickle.UnpicklingError(
            f"{what}: some of the objects need weights_only=False, which runs code that the file "
            f"names: if you trust its writer, {how}. "
            f"torch's error: {reason}"
        ) from None
    except Exception as error:
        # Without weights_only, code that the file names may have failed: that is not damage.
        if (not weights_only and "PytorchStreamReader" not in str(error)) or is_shortage(error):
            raise
        raise CorruptCheckpoint(f"{what}: torch.save did not write these bytes: {error}") from None
