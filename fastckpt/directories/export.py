"""export(): a model's tensors as a Hugging Face directory, written by all ranks that hold them.

Responsible for which tensors a state has under which names, and for dividing them among files.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.nn import Module

from fastckpt.arguments.checks import check_path, check_size
from fastckpt.arguments.names import listed, without_wrappers
from fastckpt.arguments.options import Pacing, SaveOptions, WriteOptions
from fastckpt.arguments.quantities import shown_size
from fastckpt.directories.draft import Draft
from fastckpt.directories.save import save_directory
from fastckpt.directories.shared_files import SharedFiles, SharedTensor
from fastckpt.engine.save_stats import SaveStats
from fastckpt.formats import file_list, hugging_face, safetensors
from fastckpt.formats.file_list import File
from fastckpt.formats.strict_json import check_text
from fastckpt.formats.value_names import dotted, joined
from fastckpt.plan.boxes import whole
from fastckpt.plan.image import PORTION_BYTES
from fastckpt.ranks import per_group
from fastckpt.ranks.coordinator import ranks_within
from fastckpt.ranks.per_group import together
from fastckpt.ranks.round import Round
from fastckpt.saving import pipeline
from fastckpt.saving.handle import SaveHandle
from fastckpt.saving.image_file import Make, write_portions
from fastckpt.saving.pacing import Pace
from fastckpt.state.dtensors import OtherRanks, Parts, wraps_others
from fastckpt.state.fit import Fit, Rename
from fastckpt.state.kinds import NO_MEMORY, PLAIN_TENSORS, is_sharded, memory_of
from fastckpt.state.tree import Leaf, tensors_in
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.lustre_layout import Purpose
from fastckpt.storage.object_upload import Upload


class Tensor(hugging_face.Tensor, Protocol):
    """A tensor of a file: its name there, its dtype and its shape."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Tensor)
# Yields the bytes of tensors, one after the other.
Read = Callable[[Sequence[T]], Iterator[memoryview]]


def add_files(draft: Draft, tensors: Sequence[T], read: Read[T], shard_bytes: int) -> None:
    """Writes the files of an export into its directory, and adds their index."""
    files = hugging_face.divided(tensors, shard_bytes)
    for name, its in files.items():
        path, make = os.path.join(draft.directory, name), partial(draft.made, name)
        draft.listed[name] = _write(path, its, read, draft.agreement, make)
    if index := hugging_face.index(files):
        draft.add_content(index, hugging_face.INDEX)


def write_file(file: int | Upload, path: str, tensors: Sequence[T], read: Read[T]) -> None:
    """Writes one file, by its descriptor, or an object, and makes it durable; it is still empty."""
    agreement = together(None).coordinator.begin(f"conversion to {path!r}")
    with agreement.failing():
        _write(path, tensors, read, agreement, lambda _purpose: nullcontext((file, path)))
    agreement.close()


def _write(
    path: str,
    tensors: Sequence[T],
    read: Read[T],
    agreement: Round,
    make: Make,
) -> File:
    """Writes a file, which `make` makes as for ImageFile, and returns its size and CRC-32."""
    # Those with larger items come first, so that each is aligned to its items.
    tensors = sorted(tensors, key=lambda its: -its.dtype.itemsize)
    entries = [(its.name, safetensors.NAMES[its.dtype], tuple(its.shape)) for its in tensors]
    header = safetensors.header(entries, hugging_face.METADATA, safetensors.LENGTH_BYTES)
    nbytes, crc = len(header) + sum(its.nbytes for its in tensors), 0

    def portions() -> Iterator[bytearray]:
        nonlocal crc
        for portion in _portions(chain([memoryview(header)], read(tensors))):
            crc = zlib.crc32(portion, crc)
            yield portion

    current = pipeline.current()
    pace = Pace(Pacing(), agreement, current.rates, path, SaveStats())
    write_portions(current, portions(), path, WriteOptions(), pace, make, Purpose(nbytes))
    return File(nbytes, crc)


def _portions(contents: Iterator[memoryview]) -> Iterator[bytearray]:
    """Yields the bytes of some contents, one after the other, as write_portions() takes them."""
    portion, other, filled = bytearray(PORTION_BYTES), bytearray(PORTION_BYTES), 0
    for content in contents:
        while content:
            count = min(len(content), PORTION_BYTES - filled)
            memoryview(portion)[filled : filled + count] = content[:count]
            filled, content = filled + count, content[count:]
            if filled == PORTION_BYTES:
                yield portion
                portion, other, filled = other, portion, 0
    if filled:
        yield portion[:filled]


log = logging.getLogger("fastckpt")

_FILE_BYTES_MAX = 1 << 30  # of what is copied beside the tensors


def export(
    state: Any,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    only: str | None = None,
    shard_bytes: int | str = "5GB",
    files: Sequence[str | os.PathLike[str]] = (),
    group: Any = None,
    options: SaveOptions = SaveOptions(),
) -> SaveHandle:
    """Writes the tensors of a model in the background as a Hugging Face directory of safetensors
    files, which transformers' from_pretrained opens, and commits it atomically.

    Until the commit, the directory stays what it was; a crash leaves the old or the new one. Each
    rank of `group` writes the elements that it holds straight to where they belong in the files: no
    rank gathers the model. Tensors are converted to `dtype` when they are copied, and those of GPUs
    when they are written. Of tensors that share all of their memory, such as tied
    weights, the first one is written, as transformers does. What is no tensor is left out.

    Args:
        state: a state dict, a module, or a nest of dicts, lists, tuples and objects with
            state_dict(). The exported name of a tensor is the keys that lead to it, joined by ".",
            without what torch.compile() puts into them ("_orig_mod.") and, where all begin so,
            DataParallel and DistributedDataParallel ("module.").
        directory: the path to write. An old export there is replaced as a whole; other files there
            stay, and the export fails if one of them has the name of a file that it needs.
        dtype: the dtype of tensors of floating-point numbers in the files; None: their own. A
            warning names, once, those whose finite numbers do not stay finite in it.
        rename: gives tensors other names: as load_into()'s, applied to the keys joined by "/".
        only: export what has names in the state like this glob, such as "model/*".
        shard_bytes: the most bytes of tensors in a file, as a number or a text such as "5GB".
        files: files to copy into the directory, of 1 GiB each at most: config.json, without which
            from_pretrained opens nothing, and those of the tokenizer, say. Those that the first
            rank names count, and are read before this returns. A config.json that names a dtype
            names `dtype` instead in the copy. Without one, the config of a `state` that is a
            model of transformers is written; of any other state a warning says that there is none.
        group: a torch.distributed process group whose ranks all call this, with DTensors on these
            ranks, and the same plain tensors on each. Ranks talk over the job's store; no
            collective runs. None: this process alone.
        options: the fence, what becomes of errors, and how files are written (see SaveOptions); not
            staging="gds", since the files are put together in the host's memory.

    Returns:
        A SaveHandle; result() returns its SaveStats when the directory is committed on all ranks.
        With group it may raise RanksDisagree or PeerFailed, as fastckpt.save's.

    Raises:
        TypeError: tensors are none that safetensors files can hold (the message names all);
            DTensors are spread over other ranks than the group's; or an argument has another type.
        ValueError: two tensors get the same name, or none is left; `rename` has a pattern that fits
            none; one of `files` has the name of another file of the export, is a directory, or has
            more than 1 GiB; or an argument is out of range.
        CheckpointError: an earlier save failed, and nobody asked for its error (on_error="raise").
        StorageError: one of `files` cannot be read, or the look at `directory` has not returned for
            timeout_s. All other errors of the file system are raised by result().
    """
    _check_dtype(dtype)
    file_bytes = check_size("shard_bytes", shard_bytes)
    if isinstance(files, str | os.PathLike):
        raise TypeError(f"files is {files!r}, must be a list of paths")
    copied = [check_path("files", file) for file in files]
    shared, rank_of = per_group.together(group), ranks_within(group)

    def fill(draft: Draft) -> None:
        # Read once: an earlier export, which still runs, may add to it meanwhile.
        unequal, held = shared.unequal(), Parts(shared.coordinator.world_size, rank_of)
        tensors = _named(state, rename, only, dtype, draft, held, unequal)
        contents = hugging_face.divided(tensors, file_bytes)
        if shared.coordinator.rank == 0:
            _add_others(draft, copied, contents, dtype, state)
        alike = [("the argument shard_bytes", str(file_bytes))]
        draft.add_shared(
            SharedFiles(contents, hugging_face.METADATA, alike, unequal, shared.note_unequal),
            {tensor.leaf.key: tensor.leaf.local for tensor in tensors},
        )

    return save_directory(
        check_path("directory", directory),
        fill,
        group=group,
        options=options,
        later=True,
    )


def _check_dtype(dtype: object) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {type(dtype).__name__}, must be a torch.dtype, or None")
    if not dtype.is_floating_point or not safetensors.supported(dtype):
        raise ValueError(
            f"dtype is {dtype}, must be one of floating-point numbers that safetensors files hold"
        )


def _named(
    state: Any,
    rename: Rename | None,
    only: str | None,
    dtype: torch.dtype | None,
    draft: Draft,
    parts: Parts,
    unequal: frozenset[str],
) -> list[SharedTensor]:
    """Returns the tensors to export as this rank holds them, captured, in the state's order; those
    that are `unequal` are the first rank's.
    """
    # Of all, so that their memory does not become others'.
    tensors = [(joined(keys), tensor) for keys, tensor in tensors_in(state)]
    named = [(old, tensor.dtype) for old, tensor in tensors]
    found, taken = list[SharedTensor](), dict[str, str]()
    identities: set[object] = set()
    misfits: list[str] = []
    for number, name, stored in chosen(named, dtype, rename, only):
        old, tensor = tensors[number]
        try:
            held = _held(old, tensor, parts, old in unequal)
        except OtherRanks:  # as all DTensors are, so one name is enough
            raise
        except TypeError as error:
            misfits.append(str(error))
            continue
        if held.identity in identities:
            continue
        identities.add(held.identity)
        take_name(name, old, taken)
        leaf = held.leaf._replace(local=draft.held(held.leaf.local))
        found.append(SharedTensor(name, stored, leaf))
    if misfits:
        raise TypeError(f"safetensors files cannot hold all of the state: {'; '.join(misfits)}")
    if not found:
        names = listed(old for old, _tensor in tensors)
        hint = f": only={only!r} and rename leave out {names}" if names else ""
        raise ValueError(f"the state holds no tensor to export{hint}")
    return found


class Chosen(NamedTuple):
    """A tensor to export: its number among those of the state, its name and dtype in the files."""

    number: int
    name: str
    dtype: torch.dtype


def names_in_model(names: Sequence[str]) -> list[str]:
    """Returns names that were keys joined by "/" as the model has them that is to read them."""
    return without_wrappers([dotted(name) for name in names])


def chosen(
    tensors: Sequence[tuple[str, torch.dtype]],
    dtype: torch.dtype | None,
    rename: Rename | None,
    only: str | None,
    spelled: Callable[[Sequence[str]], list[str]] = names_in_model,
    may_be_empty: bool = False,
) -> list[Chosen]:
    """Returns which tensors are exported, in their order.

    Args:
        tensors: their names, which are keys joined by "/", and dtypes.
        dtype, rename, only: as export()'s.
        spelled: returns the names that the files have for those that `rename` has given.
        may_be_empty: whether a tensor in the files may have the name "".

    Raises:
        ValueError, TypeError: as export().
    """
    fit = Fit(rename=rename, only=only)
    numbers = [number for number, (old, _dtype) in enumerate(tensors) if fit.asks_for(old)]
    if not may_be_empty and any(not tensors[number][0] for number in numbers):
        raise ValueError(
            "a tensor has no name (it is alone, or its key is ''): put it into a dict, under a "
            "name, or leave it out"
        )
    news, useless = fit.new_names([tensors[number][0] for number in numbers])
    if useless:
        raise ValueError(useless[0])
    pairs = [(number, new) for number, new in zip(numbers, news, strict=True) if new is not None]
    for number, new in pairs:
        if not new and not (may_be_empty and new == tensors[number][0]):
            raise ValueError(
                f"nothing is left of the name {tensors[number][0]!r}: give the tensor another one, "
                "or leave it out"
            )
    names = spelled([new for _number, new in pairs])
    result = list[Chosen]()
    for (number, _new), name in zip(pairs, names, strict=True):
        own = tensors[number][1]
        is_cast = dtype is not None and own.is_floating_point
        result.append(Chosen(number, name, dtype if dtype is not None and is_cast else own))
    return result


def take_name(
    name: str, old: str, taken: dict[str, str], reserved: str | None = safetensors.METADATA
) -> None:
    """Notes that a tensor gets a name in the files; `taken` has the old ones by such names. Raises
    ValueError if another has it, or if the format has reserved it.
    """
    check_text(name)
    if name in taken or name == reserved:
        other = repr(taken[name]) if name in taken else "the header of safetensors files"
        raise ValueError(
            f"{old!r} would be named {name!r}, which is already the name of {other}: give it "
            "another name, or leave one out"
        )
    taken[name] = old


class _Held(NamedTuple):
    """A tensor as this rank holds it; `identity` is that of tensors which share all memory."""

    leaf: Leaf
    identity: object


def _held(key: str, tensor: Any, parts: Parts, is_first_ranks: bool) -> _Held:
    """Returns this rank's part of a tensor; raises TypeError for what files cannot hold."""
    replicas = (0,) if is_first_ranks else parts.everybody
    if is_sharded(tensor):
        local, box, holders, placement, _spread, identity = parts.of(key, tensor)
        if wraps_others(local):
            raise TypeError(f"{key!r} is a DTensor with parts that are a {type(local).__name__}")
        if holders is parts.everybody:
            holders = replicas
        shape = tuple(tensor.shape)
        return _Held(Leaf(key, _plain(local), shape, box, holders, placement), identity)
    kind = None
    if type(tensor) not in PLAIN_TENSORS:
        kind = f"a {type(tensor).__name__}"
    elif tensor.layout != torch.strided or tensor.is_nested:
        kind = f"of layout {tensor.layout}"
    elif tensor.is_meta:
        kind = "on the meta device"
    elif tensor.is_quantized or not safetensors.supported(tensor.dtype):
        kind = f"of {tensor.dtype}"
    elif tensor.numel() and memory_of(tensor) is None:
        kind = NO_MEMORY
    if kind is not None:
        raise TypeError(f"{key!r} is {kind}")
    local, shape = _plain(tensor), tuple(tensor.shape)
    leaf = Leaf(key, local, shape, whole(shape), replicas, "replicated")
    return _Held(leaf, memory_of(tensor) or object())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_neg()


def _add_others(
    draft: Draft,
    copied: Sequence[str],
    contents: Mapping[str, Sequence[SharedTensor]],
    dtype: torch.dtype | None,
    state: object,
) -> None:
    """Adds the files that the first rank writes alone: the index, what is copied, and without a
    config.json among that, the config of the model.
    """
    # The first two are taken whether or not they are written: without an index, one that is copied
    # would name files that are not there.
    names = {file_list.NAME, hugging_face.INDEX, *contents}
    if index := hugging_face.index(contents):
        draft.add_content(index, hugging_face.INDEX)
    storage = pipeline.current().storage
    for path in copied:
        name = os.path.basename(path)
        if name in names:
            raise ValueError(
                f"files has {path!r}, but {name!r} is the name of another file of the export: "
                "leave it out"
            )
        names.add(name)
        _check_file(storage, path)
        with reported("read", path):
            content = storage.read_file(os.path.realpath(path), _FILE_BYTES_MAX)
        if name == hugging_face.CONFIG and dtype is not None:
            content = hugging_face.config(content, str(dtype)[6:])  # without "torch."
        draft.add_content(content, name)
    if not names & {hugging_face.CONFIG, hugging_face.ADAPTER_CONFIG}:
        own = [tensor.dtype for shard in contents.values() for tensor in shard]
        stored = next((each for each in own if each.is_floating_point), own[0])
        if config := _config_of(state):
            draft.add_content(hugging_face.config(config, str(stored)[6:]), hugging_face.CONFIG)


_has_warned = False  # of an export without a config.json


def _config_of(state: object) -> bytes:
    """Returns the config.json of a model of transformers, with its class among the architectures;
    b"" for anything else, of which it warns once.
    """
    global _has_warned
    model = state
    while isinstance(inner := getattr(model, "module", getattr(model, "_orig_mod", None)), Module):
        model = inner  # of torch.compile or DistributedDataParallel
    config: Any = getattr(model, "config", None) if isinstance(model, Module) else None
    try:
        values = json.loads(config.to_json_string())
        values["architectures"] = values.get("architectures") or [type(model).__name__]
        return json.dumps(values, indent=2).encode() + b"\n"
    except (AttributeError, TypeError, ValueError) as error:
        if not _has_warned:
            _has_warned = True
            why = "the state is not a model with a config" if config is None else str(error)
            log.warning(
                "an export has no config.json, and from_pretrained() cannot open it without one: "
                "pass the path of one in files= (%s; this warning is given once)",
                why,
            )
        return b""


def _check_file(storage: Storage, path: str) -> None:
    """Raises ValueError or StorageError unless there is a file to copy."""
    with reported("read", path):
        status = storage.status(path)
        if status is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise ValueError(f"files has {path!r}, which is {kind}: give the path of each file")
    if status.st_size > _FILE_BYTES_MAX:
        raise ValueError(
            f"files has {path!r}, which is larger than {shown_size(_FILE_BYTES_MAX)}: files= is "
            "for small files such as config.json, which are read into memory; leave it out"
        )
