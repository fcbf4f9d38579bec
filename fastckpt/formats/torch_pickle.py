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
import os
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from fastckpt.errors import CheckpointError, CorruptCheckpoint, ensure
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


class Capture:
    """The records and tensors of an object, as torch.save's pickler meets them.

    Attributes:
        tensors: the pickled tensors, with their version counters at that moment.
    """

    def __init__(
        self,
        pickled: Pickle,
        others: list[tuple[str, bytes | torch.UntypedStorage]],
        tensors: list[tuple[torch.Tensor, int]],
    ) -> None:
        self._pickled, self._others, self.tensors = pickled, others, tensors
        self._records: list[tuple[str, bytes | torch.UntypedStorage]] | None = None

    @property
    def records(self) -> list[tuple[str, bytes | torch.UntypedStorage]]:
        """The name and content of each record, in order. The content is bytes, or a storage from
        which the record is copied. The pickle is completed here, while nobody waits for the save.
        """
        if self._records is None:
            self._records = [("data.pkl", self._pickled.complete()), *self._others]
        return self._records

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """Returns the storages among the records' contents."""
        return (content for _, content in self._others if isinstance(content, torch.UntypedStorage))

    def mentions(self, name: bytes) -> bool:
        """Returns whether the pickle may refer to a class of this name apart from what it says of
        plain tensors. To be called before `records` is read.
        """
        return name in self._pickled.content

    def forget(self) -> None:
        """Drops all references to the object's memory except those in `tensors`."""
        self._records, self._others, self._pickled = [], [], Pickle(b"")


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
        pickler = _pickler_of(pickle_module.Pickler)(file, met, pickle_protocol)
        pickler.dump(obj)
        pickled = Pickle.of(pickler, file, met)
        others = [*small_records(disable_byteorder_record), *met.records()]
        return Capture(pickled, others, met.tensors)


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
    """The storages and tensors that a pickler meets.

    Attributes:
        holes: for each tensor that the pickler left out, in order: what Pickle writes in its place;
            for one that it met before, only the place of the first time.
        hole: the number that the pickler writes instead of these, which occurs nowhere else.
    """

    def __init__(self, observes: bool, readable: frozenset[str]) -> None:
        self.tensors: list[tuple[torch.Tensor, int]] = []
        self.holes: list[_Tensor | int] = []
        self.hole = int.from_bytes(b"\1" + os.urandom(16), "big")
        self._observes = observes
        self._readable = readable
        self._storages: list[tuple[torch.UntypedStorage, str, int]] = []  # device type, size
        self._types: dict[torch.device, str] = {}  # as a device's attribute they take long
        self._facts: dict[int, tuple[str, str, int]] = {}  # see _meet(); by _cdata
        self._of_tensors: set[int] = set()
        self._dtypes: dict[int, torch.dtype] = {}
        self._locations: dict[torch.device, str] = {}
        self._tags_devices = _tags_devices()
        # In holes, by the tensor's identity; None for a tensor that the pickler has reduced.
        self._place_of: dict[int, int | None] = {}
        self._alive: list[torch.Tensor] = []  # so that identities stay theirs

    def note(self, tensor: torch.Tensor) -> None:
        """Records a pickled tensor, if tensors are observed: its version counter."""
        if not self._observes:
            return
        if type(tensor) not in _PLAIN and torch.nn.parameter.is_lazy(tensor):
            return  # it has no data yet
        try:
            self._of_tensors.add(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            pass  # it has no storage of its own
        self._count(tensor)

    def _count(self, tensor: torch.Tensor) -> None:
        try:
            self.tensors.append((tensor, tensor._version))
        except RuntimeError:
            pass  # a tensor of inference mode counts no changes

    def _type_of(self, device: torch.device) -> str:
        kind = self._types.get(device)
        if kind is None:
            kind = self._types[device] = device.type
        return kind

    def identified(self, storage: torch.UntypedStorage, dtype: torch.dtype, kind: Any) -> Any:
        """Returns torch's persistent id for a storage that is viewed as this dtype; `kind` is the
        dtype's legacy class.
        """
        number, device, nbytes = storage._cdata, storage.device, storage.nbytes()
        facts = self._facts.get(number)
        if facts is None:
            facts = self._facts[number] = self._meet(storage, device, nbytes)
        key, location, address = facts
        if address and self._dtypes.setdefault(address, dtype) is not dtype:
            raise RuntimeError(
                "Cannot save multiple tensors or storages that view the same data as different "
                "types"
            )
        return "storage", kind, key, location, nbytes // dtype.itemsize

    def _meet(
        self, storage: torch.UntypedStorage, device: torch.device, nbytes: int
    ) -> tuple[str, str, int]:
        """Returns the key, the location and the address of a storage that is met for the first
        time.
        """
        device_type = self._type_of(device)
        location = self._locations.get(device)
        if location is None:
            location = torch.serialization.location_tag(storage)
            if self._tags_devices:
                self._locations[device] = location
        self._storages.append((storage, device_type, nbytes))
        address = 0 if device_type == "meta" else storage.data_ptr()
        return str(len(self._storages) - 1), location, address

    def left_out(self, tensor: torch.Tensor) -> int | None:
        """Returns the number that the pickler writes instead of a torch.Tensor, and records what
        the tensor's __reduce_ex__ would return; returns None for a tensor of a subclass or with
        special attributes.

        The first time decides, because other code may change the class of a tensor during the call.
        """
        place = self._place_of.get(id(tensor), -1)
        if place is None:
            return None
        if place >= 0:
            self.holes.append(place)
            return self.hole
        kind = _LEGACY.get(tensor.dtype) if type(tensor) is torch.Tensor else None
        if (
            kind is None
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.__dict__
            or tensor._backward_hooks
            or tensor.is_neg()
            or (_has_names is not None and _has_names(tensor))
            or self._type_of(tensor.device) not in self._readable
        ):
            self._place_of[id(tensor)] = None  # the pickler's memo keeps it alive
            return None
        storage = tensor.untyped_storage()
        identity = self.identified(storage, tensor.dtype, kind)
        if self._observes:
            self._of_tensors.add(storage._cdata)
            if storage.nbytes() > BY_VALUE_BYTES:
                self._count(tensor)
        self._place_of[id(tensor)] = len(self.holes)
        self._alive.append(tensor)
        offset, sizes, strides = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        self.holes.append((identity, offset, sizes, strides, tensor.requires_grad))
        return self.hole

    def records(self) -> list[tuple[str, bytes | torch.UntypedStorage]]:
        """Returns the storages' records, with copies of storages that cannot be read later."""
        result: list[tuple[str, bytes | torch.UntypedStorage]] = []
        copies: list[torch.Tensor] = []
        originals: list[torch.Tensor] = []
        observes, readable = self._observes, self._readable
        for storage, kind, nbytes in self._storages:
            content: bytes | torch.UntypedStorage = storage
            if storage.nbytes() != nbytes:
                raise CheckpointError(
                    f"the storage of record data/{len(result)} has {storage.nbytes()} bytes, but "
                    f"had {nbytes} when its tensor was pickled: other code resized it during the "
                    "save; save while nothing resizes the state"
                )
            if kind not in readable:
                content = storage.cpu()  # type: ignore[no-untyped-call]
            elif not observes or not nbytes:
                pass
            elif nbytes > BY_VALUE_BYTES and storage._cdata in self._of_tensors:
                pass  # it may be read later, because torch counts its changes
            elif kind == "cpu":
                content = ctypes.string_at(storage.data_ptr(), nbytes)
            else:
                octets = torch.empty(0, dtype=torch.uint8, device=storage.device)
                originals.append(octets.set_(storage))
                copies.append(torch.empty(nbytes, dtype=torch.uint8, device=storage.device))
                content = copies[-1].untyped_storage()
            result.append((f"data/{len(result)}", content))
        if copies:  # hundreds by one kernel, in the order of the streams; the host does not wait
            torch._foreach_copy_(copies, originals)
        return result


# The arguments of torch._utils._rebuild_tensor_v2 for a tensor. The first one is the result of
# _Met.identified.
_Tensor: TypeAlias = tuple[tuple[str, Any, str, str, int], int, torch.Size, tuple[int, ...], bool]


class Pickle:
    """A pickle with a hole in the place of each plain tensor.

    torch's pickler asks Python some twenty times for each tensor. So the caller waits only until
    the rest is pickled, and what a tensor's pickle consists of is put in later.

    Attributes:
        content: the pickle, with the holes.
    """

    def __init__(
        self,
        content: bytes,
        marker: bytes = b"",
        holes: Sequence[_Tensor | int] = (),
        memo_size: int = 0,
    ) -> None:
        self.content = content
        self._marker, self._holes = marker, holes
        self._memo_size = memo_size  # memo entries from here on are free
        self._memo: dict[bytes | int, bytes] = {}  # how a text, a class or a tensor is repeated

    @classmethod
    def of(cls, pickler: Any, file: io.BytesIO, met: _Met) -> Pickle:
        """Returns the pickle that a pickler has written to a file."""
        if not met.holes:
            return cls(file.getvalue())
        end = file.tell()
        pickler.dump([])  # its place in the memo is the first free one
        put = file.getbuffer()[end + 3 : -1].tobytes()
        file.truncate(end)
        memo_size = int.from_bytes(put[1:], "little")
        return cls(
            file.getvalue(), _LONG + met.hole.to_bytes(17, "little") + b"Q", met.holes, memo_size
        )

    def complete(self) -> bytes:
        """Returns the pickle with all tensors, and drops the one with the holes."""
        content, self.content = self.content, b""
        ensure(content != b"", "a pickle is completed once")
        holes, self._holes = self._holes, ()
        if not holes:
            return content
        aliases = {place for place in holes if isinstance(place, int)}
        view, at = memoryview(content), 0  # other objects in it may be large
        parts: list[bytes | memoryview] = []
        for place, tensor in enumerate(holes):
            end = content.index(self._marker, at)
            parts.append(view[at:end])
            if isinstance(tensor, int):
                parts.append(self._memo[tensor])
            else:
                parts.append(self._operations(tensor))
                if place in aliases:
                    parts.append(self._put(place))
            at = end + len(self._marker)
        ensure(content.find(self._marker, at) < 0, "each hole is one of a tensor")
        return b"".join([*parts, view[at:]])

    def _operations(self, tensor: _Tensor) -> bytes:
        (word, kind, key, location, count), offset, sizes, strides, requires_grad = tensor
        return b"".join(
            (
                self._once(b"ctorch._utils\n_rebuild_tensor_v2\n"),
                b"((",
                self._once(_text(word)),
                self._once(f"c{kind.__module__}\n{kind.__name__}\n".encode()),
                _text(key),
                self._once(_text(location)),
                _integer(count),
                b"tQ",
                _integer(offset),
                _integers(sizes),
                _integers(strides),
                b"\x88" if requires_grad else b"\x89",
                self._once(b"ccollections\nOrderedDict\n"),
                b")RtR",
            )
        )

    def _once(self, operations: bytes) -> bytes:
        """Returns operations that push a value; the next time, the one that repeats it."""
        again = self._memo.get(operations)
        return operations + self._put(operations) if again is None else again

    def _put(self, what: bytes | int) -> bytes:
        """Returns the operation that puts the last value into the memo."""
        number = self._memo_size
        self._memo_size += 1
        if number < 256:
            self._memo[what] = b"h%c" % number
            return b"q%c" % number
        place = number.to_bytes(4, "little")
        self._memo[what] = b"j" + place
        return b"r" + place


_LONG = b"\x8a\x11"  # an integer of 17 bytes follows


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


@lru_cache(4096)
def _integer(number: int) -> bytes:
    return pickle.dumps(number, 2)[2:-1]


@lru_cache(4096)
def _integers(numbers: tuple[int, ...]) -> bytes:
    """Returns the operations that push a tuple of integers."""
    each = b"".join(map(_integer, numbers))
    return (b")", each + b"\x85", each + b"\x86", each + b"\x87", b"(" + each + b"t")[
        min(len(numbers), 4)
    ]


def _tags_devices() -> bool:
    """Returns whether only torch's own functions determine the locations of storages, which are
    then those of their devices. A program may have registered other functions.
    """
    taggers = [row[1] for row in getattr(torch.serialization, "_package_registry", ())]
    modules = {getattr(tagger, "func", tagger).__module__ for tagger in taggers}
    return modules == {torch.serialization.__name__}


@lru_cache(8)
def _pickler_of(base: Any) -> Any:
    """Returns a subclass of a pickle module's Pickler that pickles like torch.save and records
    storages and tensors. Its arguments are a file, a _Met and a protocol.
    """
    inherited = getattr(base, "reducer_override", None)

    class Pickler(base):  # type: ignore[misc]
        def __init__(self, file: io.BytesIO, met: _Met, protocol: int) -> None:
            super().__init__(file, protocol=protocol)
            self._met = met
            # Later protocols number the memo's entries by themselves, also those in holes.
            is_stock = base is _STOCK and protocol in (2, 3)
            registered = copyreg.dispatch_table.keys() & {torch.Tensor, OrderedDict}
            is_stock = is_stock and torch.Tensor.__reduce_ex__ is _REDUCE and not registered
            self._leaves_out = is_stock and _knows_tensors()

        def persistent_id(self, obj: Any) -> Any:
            kind = type(obj)
            if kind in _NO_STORAGES:  # pickle asks for each object
                return None
            if isinstance(obj, torch.Tensor):
                return self._met.left_out(obj) if self._leaves_out else None
            if isinstance(obj, torch.storage.TypedStorage):
                name = obj._pickle_storage_type()  # type: ignore[no-untyped-call]
                whole, dtype = obj._untyped_storage, obj.dtype
                return self._met.identified(whole, dtype, getattr(torch, name))
            if kind is torch.UntypedStorage:
                return self._met.identified(obj, torch.uint8, kind)
            return None

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                self._met.note(obj)
            return NotImplemented if inherited is None else inherited(self, obj)

    return Pickler


@lru_cache(1)
def _knows_tensors() -> bool:
    """Returns whether this version of torch reduces a tensor to the arguments in _Tensor."""
    tensor = torch.empty_strided((2, 3), (5, 1), device="cpu")
    found, rest = tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
    wanted: Any = (0, (2, 3), (5, 1), False, OrderedDict())
    return found is _REBUILD and type(rest[0]) is torch.storage.TypedStorage and rest[1:] == wanted


_REBUILD, _REDUCE = torch._utils._rebuild_tensor_v2, torch.Tensor.__reduce_ex__
_STOCK = pickle.Pickler
_has_names = getattr(torch.Tensor, "has_names", None)  # before torch 2.13; torch.save refuses them
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
# No object of these very types is a storage or a tensor.
_NO_STORAGES = {
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
        # Inside of the try: a signal handler may raise as soon as this has returned. Another thread
        # may end its pause at this moment, so only who has seen it enabled may disable it: nobody
        # else enables it again.
        if collecting:
            gc.disable()
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
