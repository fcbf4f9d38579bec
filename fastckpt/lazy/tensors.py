"""LazyTensors and LazyTensor: a checkpoint's tensors by name, read when they are indexed."""

from __future__ import annotations

import errno
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import torch

from fastckpt.arguments.names import nearest
from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint, StorageError, as_url
from fastckpt.lazy.source import Shard, Source, Stored, Wanted
from fastckpt.plan.boxes import Box, whole


class Selection(NamedTuple):
    """The part of a tensor that an index selects.

    Attributes:
        box: the rectangle that contains the part.
        rest: the index that selects the part from the rectangle after it is read.
    """

    box: Box
    rest: tuple[Any, ...]


def selected(index: Any, shape: Sequence[int]) -> Selection:
    """Returns the selection of an index of integers, slices, None and "...", like for torch.Tensor.

    Raises:
        IndexError: a number is out of range, or there are more numbers and slices than dimensions.
        ValueError: a slice has a step below 1.
        TypeError: the index has a value of another type, such as a list or a tensor.
    """
    items = index if isinstance(index, tuple) else (index,)
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > len(shape):
        raise IndexError(f"{used} indices for a tensor of {len(shape)} dimensions")
    dots = [number for number, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError('an index must have at most one "..."')
    at = dots[0] if dots else len(items)
    fill = (slice(None),) * (len(shape) - used)
    offsets: list[int] = []
    sizes: list[int] = []
    rest: list[Any] = []
    for item in (*items[:at], *fill, *items[at + 1 :]):
        if item is None:
            rest.append(None)
            continue
        size = shape[len(sizes)]
        begin, length, then = _along(item, size, len(sizes))
        offsets.append(begin)
        sizes.append(length)
        rest.append(then)
    return Selection(Box(tuple(offsets), tuple(sizes)), tuple(rest))


def _along(item: Any, size: int, dim: int) -> tuple[int, int, Any]:
    """Returns the selection in one dimension: the first element, the number of elements to read,
    and the index into these elements.
    """
    if isinstance(item, slice):
        begin, end, step = item.indices(size)
        if step < 1:
            raise ValueError(f"a slice of dimension {dim} has the step {step}, must be at least 1")
        length = max(0, end - begin)
        length -= (length - 1) % step if length else 0
        return begin, length, slice(None, None, step)
    # A tensor or array of one element has an index, too, but selects something else.
    kind = str(getattr(item, "dtype", ""))
    if isinstance(item, bool) or tuple(getattr(item, "shape", ())) or "bool" in kind:
        raise _other(item)
    try:
        number = operator.index(item)
    except TypeError:
        raise _other(item) from None
    if not -size <= number < size:
        raise IndexError(f"index {number} is out of range for dimension {dim} of size {size}")
    return number % size, 1, 0


def _other(item: Any) -> TypeError:
    return TypeError(
        f"an index of type {type(item).__name__}: a stored tensor is indexed by integers, slices, "
        'None and "..."; read a slice first, and index that'
    )


class LazyTensors(Mapping[str, "LazyTensor"]):
    """The tensors of an open checkpoint, by name; the result of fastckpt.open().

    A name whose tensor has a dtype that torch does not have, such as F6_E2M3 of safetensors, raises
    IncompatibleCheckpoint when it is looked up. A tensor of F4 has torch's dtype float4_e2m1fn_x2
    and shape, in which each item of the last dimension holds two numbers.

    Several threads may read at the same time, but a process that is forked later may not. Close it,
    or use it in a `with` statement, because until then files are open and a Checkpointer's step is
    protected from removal.

    Attributes:
        path: the path that was opened; for a root, that of the step.
        kind: the kind of checkpoint, such as "a step of fastckpt".
        facts: other facts about the checkpoint, by name: the number of "files", and for a step its
            number ("step"), the time when it was "saved", and the number of "ranks" that saved it.
        is_verified: whether every byte is compared with a checksum before it is returned. Only
            files that fastckpt wrote have checksums of their blocks.
        has_paths: whether names are paths of keys, joined by "/"; in files of safetensors and DCP,
            the writer chose the names.
        others: maps each class or function, such as "torch._utils._rebuild_sparse_tensor", to the
            number of other objects that it makes. These objects may contain tensors. Their contents
            are not read, since this would run code. Values of PerRank and attributes of tensors and
            dicts do not count.
        left_out: how many values other than tensors the checkpoint has, including those objects,
            and the names of the first ones. A list of plain values counts as one, and so does a
            PerRank.
    """

    def __init__(self, path: str, source: Source) -> None:
        self.path = as_url(path)
        self.kind, self.is_verified = source.kind, source.is_verified
        self.has_paths = source.has_paths
        self.facts, self.others = dict(source.facts), dict(source.rest.others)
        self.left_out = source.rest.total, source.rest.names
        self._source = source
        self._pid = os.getpid()
        # Whoever forgets to close this gets its files closed when it is collected.
        self._close_source = weakref.finalize(self, _close_in, self._pid, source)
        self._lock = threading.Lock()
        # One for each read that is under way, held by it: the files stay open until all are free.
        # Locks of C are held and freed by "with" whatever a signal handler raises, and when.
        self._reads: set[threading.Lock] = set()
        self._ahead: dict[str, Future[dict[str, torch.Tensor]]] = {}
        self._reader: ThreadPoolExecutor | None = None
        self._closed = False

    def __getitem__(self, name: str) -> LazyTensor:
        try:
            stored = self._source.tensors[name]
        except KeyError:
            hint = f"{name!r}{nearest(name, self)}"
            raise KeyError(f"{self.path!r} holds no tensor {hint}") from None
        if stored.unreadable:
            raise IncompatibleCheckpoint(f"{self.path!r}: {stored.refusal(name)}")
        return LazyTensor(self, name, stored)

    def __contains__(self, name: object) -> bool:
        return name in self._source.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.tensors)

    def __len__(self) -> int:
        return len(self._source.tensors)

    def listed(self) -> Iterable[tuple[str, Stored]]:
        """Returns each tensor's name with its dtype, shape and shards, in the checkpoint's order.
        For very many tensors this is faster than an iteration over LazyTensors.
        """
        return self._source.tensors.items()

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        """Returns these names of tensors in the order in which the files hold the tensors. Reads in
        this order are the fastest, because each block of a file is read once.
        """
        positions = self._source.positions()
        return sorted(names, key=positions.__getitem__)

    def digests(self) -> Mapping[str, str | None]:
        """Returns a digest of each value that is not a tensor, by name. Equal values have the same
        digest, also if a dict has another order or another pickler wrote them. It is the value
        itself if that is short. No code of the checkpoint is run.

        None stands for a value that cannot be compared so: an object that contains tensors or
        itself, or a PerRank. A list of plain values counts as one value.

        Raises:
            CorruptCheckpoint, StorageError: the values are damaged, or cannot be read.
            ValueError: this is closed.
        """
        digests: Mapping[str, str | None] = self._read((), self._source.rest.digests)
        return digests

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of {self.path!r}, {self.kind}>"

    def prefetch(self, names: Iterable[str], device: str | torch.device = "cpu") -> None:
        """Begins to read complete tensors in the background; the next access to each returns it.

        The tensors of one call are read together; calls are served in order. A tensor takes memory
        until it is accessed or this is closed.

        Args:
            names: the names of the tensors.
            device: the device to which they are read.

        Raises:
            KeyError: there is no tensor of this name.
            IncompatibleCheckpoint: torch does not have the tensor's dtype.
            TypeError: names is a string.
            ValueError: this is closed.
        """
        if isinstance(names, str):
            raise TypeError(f"names is {names!r}, must be a list of names")
        tensors = [self[name] for name in names]
        where = torch.device(device)
        self._check_open()  # before the lock, which another thread may have held in a fork
        with self._lock:
            self._check_open()
            new = [tensor for tensor in tensors if tensor.name not in self._ahead]
            if not new:
                return
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, "fastckpt-prefetch")
            future = self._reader.submit(self._read_all, new, where)
            self._ahead.update({tensor.name: future for tensor in new})

    def _read_all(self, tensors: list[LazyTensor], device: torch.device) -> dict[str, torch.Tensor]:
        requests = [self._wanted(tensor.name, whole(tensor.shape), device) for tensor in tensors]
        self._read(requests)
        return {want.name: want.target for want in requests}

    def _wanted(self, name: str, box: Box, device: torch.device) -> Wanted:
        """Returns a request for a rectangle, with its memory; repeated dimensions are read once."""
        stored = self._source.tensors[name]
        sizes = tuple(
            min(size, 1) if dim in stored.repeated else size for dim, size in enumerate(box.sizes)
        )
        torch.empty(0, dtype=stored.dtype, device=device)  # raises if there is no such device
        try:
            target = torch.empty(sizes, dtype=stored.dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            op, detail = f"allocate memory for {name!r}", str(error)
            raise StorageError(op, self.path, errno.ENOMEM, detail=detail) from None
        return Wanted(name, Box(box.offsets, sizes), target)

    def _read(self, wanted: Sequence[Wanted], read: Callable[[], Any] | None = None) -> Any:
        """Reads parts, or calls another function that reads, while the files stay open."""
        under_way = threading.Lock()
        with under_way:
            self._reads.add(under_way)
            try:
                self._check_open()
                return self._source.read(wanted) if read is None else read()
            finally:
                self._reads.discard(under_way)

    def _taken(self, name: str) -> torch.Tensor | None:
        """Returns a prefetched tensor, once; None if it was not prefetched, or if the read of it or
        of another tensor of the same prefetch() failed.
        """
        self._check_open()
        prefetched = self._ahead.pop(name, None)
        try:
            return None if prefetched is None else prefetched.result().pop(name)
        except CancelledError:
            raise self._closed_error() from None
        except (CorruptCheckpoint, StorageError):
            return None  # it is read alone, and raises then if it is the one

    def read(
        self, parts: Sequence[tuple[str, Any]], device: str | torch.device = "cpu"
    ) -> list[torch.Tensor]:
        """Reads several parts together, with fewer reads than one after the other.

        Args:
            parts: for each part, the name of the tensor and an index as for LazyTensor.

        Returns:
            The parts, on `device`.

        Raises:
            KeyError: there is no tensor of this name.
            IncompatibleCheckpoint: torch does not have the tensor's dtype.
            Others: see LazyTensor.__getitem__().
        """
        chosen = [(name, *selected(index, self[name].shape)) for name, index in parts]
        where = torch.device(device)
        requests = [self._wanted(name, box, where) for name, box, _rest in chosen]
        self._read(requests)
        return [
            want.target.expand(box.sizes)[rest]
            for want, (_name, box, rest) in zip(requests, chosen, strict=True)
        ]

    def _part(self, name: str, index: Any, device: torch.device) -> torch.Tensor:
        """Returns a part of a tensor, from the prefetched tensor if there is one."""
        prefetched = self._taken(name)
        if prefetched is None:
            return self.read([(name, index)], device)[0]
        stored = self._source.tensors[name]
        box, rest = selected(index, stored.shape)
        part = tuple(
            slice(0, 1) if dim in stored.repeated else slice(at, at + size)
            for dim, (at, size) in enumerate(zip(*box, strict=True))
        )
        result = prefetched[part].to(device)
        if result.shape != prefetched.shape and result.device == prefetched.device:
            result = result.clone()  # it must not keep the memory of the whole
        return result.expand(box.sizes)[rest]

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise ValueError(
                f"{self.path!r} was opened before this process was forked: open it again in this "
                "process"
            )
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> ValueError:
        return ValueError(f"{self.path!r} is closed")

    def close(self) -> None:
        """Closes the files after the reads in flight have ended. Idempotent."""
        if self._pid != os.getpid():
            return  # the numbers of its files are those of others here
        with self._lock:
            self._closed = True
            self._ahead.clear()
            reader = self._reader
        for under_way in self._reads.copy():  # later ones find that this is closed
            with under_way:
                pass
        if reader is not None:
            reader.shutdown(cancel_futures=True)
        self._close_source()

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError(
            f"the open {self.path!r} belongs to this process and cannot be copied or pickled: "
            "open it again where it is needed"
        )

    def __enter__(self) -> LazyTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Sources that a forked process inherited. The fork has closed their files, whose numbers belong to
# others by now, which collecting the sources would close.
_inherited: list[Source] = []


def _close_in(pid: int, source: Source) -> None:
    """Closes a source in the process that opened it."""
    if os.getpid() == pid:
        source.close()
    else:
        _inherited.append(source)


class LazyTensor:
    """A tensor of an open checkpoint; `tensor[...]` reads only the requested part.

    An index may have integers, slices with steps of at least 1, None and "...", like for a
    torch.Tensor; it returns a new torch.Tensor. To read the complete tensor, use `tensor[...]`,
    torch.as_tensor(tensor) or, if numpy has the dtype, numpy.asarray(tensor).

    Attributes:
        name: its name in the checkpoint.
        dtype, shape: the stored tensor's.
        shards: the path of each file that holds a part of it, and the part's offsets and sizes.
    """

    def __init__(self, tensors: LazyTensors, name: str, stored: Stored) -> None:
        self._tensors = tensors
        self.name = name
        self.dtype: torch.dtype = stored.dtype
        self.shape = torch.Size(stored.shape)
        self.shards: tuple[Shard, ...] = stored.shards

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the complete tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def numel(self) -> int:
        """Returns the number of elements."""
        return prod(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no len()")
        return self.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Reads a part to the CPU.

        Files are read in blocks of 8 MiB. The blocks of the last small parts (up to 1 MiB) are kept
        in memory until the checkpoint is closed, 64 MiB at most, and further small parts of them
        are copied from there. So read many small tensors in the order of in_file_order(), or
        together by prefetch() or LazyTensors.read().

        Raises:
            IndexError, ValueError, TypeError: the index is out of range or unsupported.
            CorruptCheckpoint: the part is damaged.
            StorageError: the part cannot be read, or there is not enough memory for it (ENOMEM).
        """
        return self._tensors._part(self.name, index, torch.device("cpu"))

    def read(self, device: str | torch.device = "cpu", index: Any = ...) -> torch.Tensor:
        """Reads a part to a device; raises like `tensor[index]`.

        Args:
            device: the device of the result.
            index: the index of `tensor[index]`; default: the complete tensor.
        """
        return self._tensors._part(self.name, index, torch.device(device))

    # torch and numpy would read what lacks the next three as a sequence, element by element.
    def __dlpack__(self, **options: Any) -> Any:
        """Reads the complete tensor, once, for torch.as_tensor() and other users of DLPack."""
        return self[...].__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns DLPack's device for CPU memory."""
        return 1, 0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Reads the complete tensor, once, for numpy.

        Raises:
            TypeError: numpy does not have the stored dtype.
            ValueError: `copy` is False.
            Others: see __getitem__().
        """
        if copy is False:
            raise ValueError(
                f"{self.name!r} is not in memory, so a read must copy it: omit copy=False"
            )
        try:
            torch.empty(0, dtype=self.dtype, device="cpu").numpy()
        except TypeError:
            raise TypeError(
                f"{self.name!r} is of {self.dtype}, which numpy does not support: convert the "
                "tensor that indexing returns, as in tensor[...].float()"
            ) from None
        array = self[...].numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<{self.name}: {dtype} {list(self.shape)}, not read>"
