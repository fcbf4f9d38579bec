"""`fastckpt convert`: copies the tensors of a checkpoint into another format, in bounded memory.

Responsible for names, and for assigning tensors to files.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import mmap
import os
import shutil
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

import fastckpt
from fastckpt.arguments.checks import check_path, check_size
from fastckpt.arguments.names import listed, without_wrappers
from fastckpt.arguments.quantities import shown_size
from fastckpt.arguments.urls import is_mounted
from fastckpt.cli.local_tiers import opened
from fastckpt.cli.progress import progress
from fastckpt.cli.shared_arguments import is_directory, is_there, parts, shown_name, shown_others
from fastckpt.directories.directory_plan import tell_lossy
from fastckpt.directories.draft import Draft
from fastckpt.directories.export import add_files, chosen, names_in_model, take_name, write_file
from fastckpt.directories.save import save_directory, wait_for_directories
from fastckpt.errors import CheckpointError, IncompatibleCheckpoint, StorageError, telling
from fastckpt.formats import safetensors
from fastckpt.formats.conversion import put_converted
from fastckpt.formats.hugging_face import ADAPTER_CONFIG, CONFIG, files_for_a_model
from fastckpt.formats.step_names import NAME as STEP_NAME
from fastckpt.formats.value_names import keys_of
from fastckpt.saving import pipeline
from fastckpt.saving.lease import give_up
from fastckpt.steps.log import NAME as LOG_NAME
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage, patiently, reported
from fastckpt.storage.lustre_layout import Purpose
from fastckpt.storage.objects import objects_of

log = logging.getLogger("fastckpt")

_PART_BYTES, _READERS = 32 << 20, 2  # bytes per read, number of reading threads
_STAGING_BYTES = 64 << 20
_ALIGNMENT = 64


class Copy(NamedTuple):
    """A tensor to copy, with its new name and its new dtype."""

    name: str
    tensor: fastckpt.LazyTensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape."""
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        """The tensor's new size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def run(arguments: argparse.Namespace) -> int:
    target = os.path.realpath(arguments.target)
    is_step, is_dotted = arguments.to == "step", arguments.to in ("safetensors", "hf")
    _check_absent(target, is_step)
    if arguments.step is not None and arguments.step < 0:
        raise CheckpointError(f"--step is {arguments.step}, must be 0 or more")
    if arguments.files is not None and arguments.to != "hf":
        raise CheckpointError("--files is for --to hf, since only that is a directory of a model")
    if arguments.to in ("hf", "dcp"):
        check_path("DST", target)  # a URL is not supported
    if is_step and is_directory(target):
        _check_root(target)
    shard_bytes = check_size("--shard-size", arguments.shard_size)
    if not is_mounted(target):
        atomic.check_directory(pipeline.current().storage, target)
    with opened(arguments.source, arguments.local, arguments.rename or None) as tensors:
        copies = _chosen(tensors, arguments)
        if not is_dotted and tensors.has_paths:
            _nested({copy.name: None for copy in copies})  # raises before any copy
        _check_room(os.path.dirname(target), sum(copy.nbytes for copy in copies))
        if arguments.to == "hf":
            files = _files(arguments.source, arguments.files, tensors)
            _to_hugging_face(target, tensors, copies, shard_bytes, files)
        elif arguments.to == "safetensors":
            _to_safetensors(target, tensors, copies)
        else:
            number = arguments.step if arguments.step is not None else tensors.facts.get("step", 0)
            beside = tempfile.gettempdir() if is_mounted(target) else os.path.dirname(target)
            with _in_file(tensors, copies, beside) as state:
                _check_absent(target, is_step)
                nest = _nested(state) if tensors.has_paths else state
                _SAVERS[arguments.to](target, nest, int(number))
        nbytes, others = sum(copy.nbytes for copy in copies), tensors.others
        count, names = tensors.left_out
    if arguments.json:
        summary = {"path": target, "tensors": len(copies), "nbytes": nbytes, "others": others}
        print(json.dumps({**summary, "left_out": count}, indent=1))
        return 0
    words = [f"{target}: {len(copies)} tensors, {shown_size(nbytes)}"]
    if count:
        first = listed(map(shown_name, names), count)
        where = " of the whole checkpoint" if arguments.prefix or arguments.glob != "*" else ""
        words.append(f"left out: {count} values{where} that are not tensors ({first})")
    print("; ".join([*words, *filter(None, [shown_others(others)])]))
    return 0


def _check_absent(target: str, is_step: bool) -> None:
    if is_there(target, link=True) and not (is_step and is_directory(target)):
        raise CheckpointError(
            f"{target!r} exists, but convert never replaces a file: remove it first"
        )


def _publish(storage: Storage, fd: int, name: str, path: str) -> None:
    """Renames a durable file to its final name, which must be free."""
    directory = os.path.dirname(path)
    with (
        _replacing_nothing(path),
        atomic.naming_in(storage, [directory], path) as make_durable,
    ):
        with reported("rename", path):
            patiently(storage, fd, lambda: atomic.rename_to_free_name(storage, name, path))
        make_durable()


@telling
def _replacing_nothing(error: BaseException, target: str) -> None:
    """Raises a clearer error if the body failed because the target now exists."""
    if isinstance(error, StorageError) and not error.visible:
        _check_absent(target, False)


def _check_room(directory: str, nbytes: int) -> None:
    """Raises CheckpointError if there is too little space for the tensors alone."""
    free = pipeline.current().storage.free_bytes(directory)
    if nbytes > free:
        raise CheckpointError(
            f"{directory!r} has {shown_size(free)} free, but the tensors need {shown_size(nbytes)}"
        )


def _check_root(path: str) -> None:
    """Raises CheckpointError if a directory has entries other than steps."""
    names = pipeline.current().storage.names(path)
    others = [name for name in names if not STEP_NAME.match(name) and name != LOG_NAME]
    if others:
        raise CheckpointError(f"{path!r} holds {others[0]!r}, so it is not a root of steps")


def _chosen(tensors: fastckpt.LazyTensors, arguments: argparse.Namespace) -> list[Copy]:
    """Returns the tensors to copy with their new names, in the checkpoint's order."""
    is_dotted, prefix = arguments.to in ("safetensors", "hf"), arguments.prefix

    def without_prefix(name: str) -> str | None:
        return name.removeprefix(prefix) if name.startswith(prefix) else None

    named = [(name, stored.dtype) for name, stored in tensors.listed()]
    # If names are paths of keys, the name of a tensor without any key is also empty.
    has_empty = not is_dotted and not tensors.has_paths
    spelled: Callable[[Sequence[str]], list[str]] = list
    if is_dotted:
        spelled = names_in_model if tensors.has_paths else without_wrappers
    olds, old_names, copies = [*tensors], dict[str, str](), list[Copy]()
    for number, name, dtype in chosen(
        named, arguments.dtype, without_prefix, arguments.glob, spelled, has_empty
    ):
        take_name(name, olds[number], old_names, safetensors.METADATA if is_dotted else None)
        copies.append(Copy(name, tensors[olds[number]], dtype))
    if not copies:
        raise CheckpointError(
            f"{tensors.path!r} holds no tensor that matches --glob {arguments.glob!r} and --prefix "
            f"{prefix!r}; its names are {listed(map(shown_name, tensors))}"
        )
    unknown = [copy.name for copy in copies if not safetensors.can_hold(copy.dtype, copy.shape)]
    if unknown and is_dotted:
        names = listed(map(shown_name, unknown))
        raise IncompatibleCheckpoint(
            f"safetensors files have no dtype for {names}: choose other tensors with --glob, or "
            "use --to pt"
        )
    return copies


def _nested(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts, given names that are paths of keys."""
    nest: dict[str, Any] = {}
    for name, tensor in state.items():
        inside, keys = nest, keys_of(name)
        for key in keys[:-1]:
            below = inside.setdefault(key, {})
            if not isinstance(below, dict):
                raise CheckpointError(
                    f"{name!r} begins with the name of another tensor: choose one of them with "
                    "--glob"
                )
            inside = below
        if keys[-1] in inside:
            raise CheckpointError(
                f"{name!r} is also the beginning of another tensor's name: choose one of them "
                "with --glob"
            )
        inside[keys[-1]] = tensor
    return nest


def _read(
    tensors: fastckpt.LazyTensors, batch: Sequence[tuple[Copy, Any]], lossy: set[str]
) -> list[torch.Tensor]:
    """Returns the bytes of parts of tensors. If numbers overflow in the new dtype, adds the
    tensor's new name to `lossy`.
    """
    values = tensors.read([(copy.tensor.name, index) for copy, index in batch])
    for number, ((copy, _index), part) in enumerate(zip(batch, values, strict=True)):
        if part.dtype != copy.dtype:
            values[number] = torch.empty(part.shape, dtype=copy.dtype, device="cpu")
            if put_converted(values[number], part):
                lossy.add(copy.name)
    return [part.contiguous().view(-1).view(torch.uint8) for part in values]


def _batches(copies: Sequence[Copy]) -> Iterator[list[tuple[Copy, Any]]]:
    """Yields the batches that are read at once: some whole tensors, or a part of a large tensor."""
    batch: list[tuple[Copy, Any]] = []
    nbytes = 0
    for copy in copies:
        size = max(copy.nbytes, copy.tensor.nbytes)
        if batch and nbytes + size > _PART_BYTES:
            yield batch
            batch, nbytes = [], 0
        if size <= _PART_BYTES:
            batch.append((copy, ...))
            nbytes += size
            continue
        itemsize = max(copy.dtype.itemsize, copy.tensor.dtype.itemsize)
        for index in parts(copy.tensor.shape, itemsize, _PART_BYTES):
            yield [(copy, index)]
    if batch:
        yield batch


def _stream(
    tensors: fastckpt.LazyTensors, copies: Sequence[Copy]
) -> Iterator[tuple[Copy, torch.Tensor]]:
    """Yields the bytes of the tensors in order, and those of a large tensor in parts. While the
    caller uses one batch, the next batches are read.
    """
    total, lossy = sum(copy.nbytes for copy in copies), set[str]()
    with (
        progress(total, "converted") as report,
        ThreadPoolExecutor(_READERS, "fastckpt-convert") as reader,
    ):
        ahead: deque[tuple[Sequence[tuple[Copy, Any]], Future[list[torch.Tensor]]]] = deque()

        def arrived() -> Iterator[tuple[Copy, torch.Tensor]]:
            batch, future = ahead.popleft()
            for (copy, _index), content in zip(batch, future.result(), strict=True):
                yield copy, content
                report(content.numel())

        for batch in _batches(copies):
            ahead.append((batch, reader.submit(_read, tensors, batch, lossy)))
            if len(ahead) > _READERS:
                yield from arrived()
        while ahead:
            yield from arrived()
    tell_lossy(tensors.path, lossy)


def _memory(content: torch.Tensor) -> memoryview:
    """Returns a memoryview of a tensor of bytes, which the tensor must outlive."""
    if not content.numel():  # it has no address, and zlib.crc32() restarts at NULL
        return memoryview(b"")
    array = (ctypes.c_char * content.numel()).from_address(content.data_ptr())
    return memoryview(array).cast("B")


def _to_safetensors(path: str, tensors: fastckpt.LazyTensors, copies: Sequence[Copy]) -> None:
    storage = pipeline.current().storage
    if is_mounted(path):  # the object appears when it is completed
        nbytes = sum(its.nbytes for its in copies)
        with closing(objects_of(storage).upload(path, nbytes)) as upload:
            write_file(upload, path, copies, partial(_contents, tensors))
            _check_absent(path, False)
            with reported("write", path):
                upload.finish()
        return
    with atomic.temporary(storage, path, Purpose(sum(its.nbytes for its in copies))) as (fd, name):
        write_file(fd, path, copies, partial(_contents, tensors))
        _publish(storage, fd, name, path)


def _to_hugging_face(
    path: str,
    tensors: fastckpt.LazyTensors,
    copies: Sequence[Copy],
    shard_bytes: int,
    files: Sequence[str],
) -> None:
    read = partial(_contents, tensors)
    _save_directory(path, lambda draft: add_files(draft, copies, read, shard_bytes, files))


def _files(source: str, given: str | None, tensors: fastckpt.LazyTensors) -> list[str]:
    """Returns the paths of the files that a model needs beside its tensors: those in the given
    directory or, if none is given, those in the source if it is a directory with a config.
    """
    if given is None and (tensors.has_paths or not is_directory(source)):
        return []
    directory = os.path.realpath(source if given is None else given)
    with reported("list", directory):
        names = files_for_a_model(pipeline.current().storage.names(directory))
    if given is None and not {CONFIG, ADAPTER_CONFIG} & {*names}:
        return []
    if not names:
        raise CheckpointError(f"--files: {directory!r} holds no config or tokenizer files")
    return [os.path.join(directory, name) for name in names]


def _contents(tensors: fastckpt.LazyTensors, copies: Sequence[Copy]) -> Iterator[memoryview]:
    return (_memory(content) for _copy, content in _stream(tensors, copies))


def _save_directory(path: str, fill: Callable[[Draft], None]) -> None:
    """Saves a directory, and waits until its temporary files are removed."""
    try:
        with _replacing_nothing(path):
            save_directory(path, fill, replaces=False).result()
    finally:
        wait_for_directories(os.path.dirname(path))


@contextmanager
def _in_file(
    tensors: fastckpt.LazyTensors, copies: Sequence[Copy], directory: str
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the tensors in the mapped memory of an unnamed file. The kernel can reclaim this
    memory if memory is short, and the file disappears when the process ends in any way.
    """
    places: list[int] = []
    end = 0
    for copy in copies:
        places.append(end)
        end += -(-copy.nbytes // _ALIGNMENT) * _ALIGNMENT
    storage, free = pipeline.current().storage, shutil.disk_usage(directory).free
    if end > free:
        raise CheckpointError(
            f"{directory!r} has {shown_size(free)} free, but a temporary file needs "
            f"{shown_size(end)}"
        )
    with (
        reported("write", directory),
        tempfile.TemporaryFile(dir=directory, buffering=0) as file,
    ):
        file.truncate(max(end, 1))
        at = dict(zip((copy.name for copy in copies), places, strict=True))
        for copy, content in _stream(tensors, copies):
            view = _memory(content)
            storage.write_at(file.fileno(), view, at[copy.name])
            at[copy.name] += len(view)
        # Mapped copy-on-write, because torch warns of read-only memory; nothing writes to it.
        memory = mmap.mmap(file.fileno(), max(end, 1), access=mmap.ACCESS_COPY)
    state = {
        copy.name: torch.frombuffer(
            memory, dtype=copy.dtype, count=prod(copy.tensor.shape), offset=at
        )
        if copy.nbytes
        else torch.empty(0, dtype=copy.dtype, device="cpu")
        for copy, at in zip(copies, places, strict=True)
    }
    yield {copy.name: state[copy.name].view(copy.tensor.shape) for copy in copies}


def _to_file(path: str, nest: dict[str, Any], _step: int) -> None:
    if is_mounted(path):  # objects cannot be renamed, and appear only when complete
        fastckpt.save(
            nest, path, options=fastckpt.SaveOptions(staging_bytes=_STAGING_BYTES)
        ).result()
        return
    storage = pipeline.current().storage
    with atomic.temporary(storage, path) as (fd, name):  # a save replaces an existing file
        fastckpt.save(
            nest, name, options=fastckpt.SaveOptions(staging_bytes=_STAGING_BYTES)
        ).result()
        _publish(storage, fd, name, path)


def _to_dcp(path: str, nest: dict[str, Any], _step: int) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    from fastckpt.integrations.dcp import Writer

    def fill(draft: Draft) -> None:
        writer = Writer(draft.directory, options=fastckpt.SaveOptions(staging_bytes=_STAGING_BYTES))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is")
                save(nest, storage_writer=writer, no_dist=True)
        except CheckpointException as error:  # a BaseException that holds the ranks' errors
            (cause, *_), *_ = error.failures.values()
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            raise CheckpointError(f"torch.distributed.checkpoint failed: {cause}") from None
        finally:  # or its file would be part of the copy
            give_up(os.path.realpath(draft.directory))

    _save_directory(path, fill)


def _to_step(path: str, nest: dict[str, Any], step: int) -> None:
    options = fastckpt.SaveOptions(staging_bytes=_STAGING_BYTES)
    is_new = not is_there(path)
    try:
        with fastckpt.Checkpointer(path, options=options) as checkpointer:
            if step in checkpointer.steps():
                raise CheckpointError(
                    f"{path!r} has step {step}: choose another number with --step"
                )
            checkpointer.save(step, nest).result()
    except BaseException:
        if is_new:
            with suppress(OSError):  # another job has saved there meanwhile
                pipeline.current().storage.remove_directory(path)
        raise


_SAVERS: dict[str, Callable[[str, dict[str, Any], int], None]] = {
    "pt": _to_file,
    "dcp": _to_dcp,
    "step": _to_step,
}
