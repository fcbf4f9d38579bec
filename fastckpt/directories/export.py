"""export(): a model's tensors as a Hugging Face directory, written by all ranks that hold them.

Responsible for the names of a state's tensors, and for dividing the tensors among files.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch.nn import Module

from fastckpt.arguments.checks import check_path, check_size
from fastckpt.arguments.names import listed, nearest, without_wrappers
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
    """A tensor of a file: its name in the file, its dtype and its shape."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Tensor)
# A function that yields the bytes of tensors, one tensor after another.
Read = Callable[[Sequence[T]], Iterator[memoryview]]


def add_files(
    draft: Draft,
    tensors: Sequence[T],
    read: Read[T],
    shard_bytes: int,
    copied: Sequence[str],
) -> None:
    """Writes the files of an export into its directory, and adds the index file and the copies of
    other files.
    """
    files = hugging_face.divided(tensors, shard_bytes)
    _add_copies(draft, copied, files)
    for name, its in files.items():
        path, make = os.path.join(draft.directory, name), partial(draft.made, name)
        draft.listed[name] = _write(path, its, read, draft.agreement, make)
    if index := hugging_face.index(files):
        draft.add_content(index, hugging_face.INDEX)


def write_file(file: int | Upload, path: str, tensors: Sequence[T], read: Read[T]) -> None:
    """Writes the content of an empty file (given its descriptor) or of an object, and makes it
    durable.
    """
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
    """Writes a file, which `make` creates (see ImageFile), and returns its size and CRC-32."""
    # Tensors with larger items come first, so that each tensor is aligned to its items.
    tensors = sorted(tensors, key=lambda its: -its.dtype.itemsize)
    entries = [(its.name, *safetensors.written(its.dtype, its.shape)) for its in tensors]
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
    """Yields the bytes of contents, one after another, for write_portions()."""
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

# The dtypes to cast floating-point tensors to: one for all, or one for each glob of names.
Casts: TypeAlias = torch.dtype | str | Mapping[str, torch.dtype | str | None] | None
_SPELLED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16} | {
    str(dtype)[6:]: dtype for dtype in safetensors.NAMES if dtype.is_floating_point
}
_FILE_BYTES_MAX = 1 << 30  # of a file copied with the tensors


def export(
    state: Any,
    directory: str | os.PathLike[str],
    *,
    dtype: Casts = None,
    rename: Rename | None = None,
    only: str | None = None,
    shard_bytes: int | str = "5GB",
    files: Sequence[str | os.PathLike[str]] = (),
    group: Any = None,
    options: SaveOptions = SaveOptions(),
) -> SaveHandle:
    """Writes a model's tensors in the background to a Hugging Face directory of safetensors files,
    for transformers' from_pretrained, and commits it atomically.

    Until the commit, the directory is unchanged; a crash leaves the old or the new directory. Each
    rank of `group` writes its own elements directly into the files, so no rank gathers the model.
    CPU tensors are converted to `dtype` when they are copied, GPU tensors when they are written. Of
    tensors that share all of their memory, such as tied weights, only the first is written, as in
    transformers. Values that are not tensors are omitted.

    Args:
        state: a state dict, a module, or a nest of dicts, lists, tuples and objects with
            state_dict(). A tensor's exported name consists of its keys joined by ".", without the
            prefixes of torch.compile() ("_orig_mod.") and, if all names have it, of DataParallel
            and DistributedDataParallel ("module.").
        directory: the path to write. An old export there is replaced completely. Other files there
            stay, but the export fails if it needs the name of one of them.
        dtype: the dtype of floating-point tensors in the files, as torch.bfloat16 or as a text such
            as "bf16", "fp16", "fp32" or "float64"; None: each tensor's own. Or a dict of globs and
            dtypes, such as {"*.router.bias": "fp32", "*": "bf16"}: the first glob that matches a
            tensor's name in the files gives its dtype, and a glob that matches no name is an error.
            Tensors of F4, F8_E8M0 and other dtypes that only block formats use are never cast.
            Tensors whose finite numbers overflow in their new dtype are named in a warning, once.
        rename: renames tensors, like load_into()'s `rename`; it is applied to the keys joined by
            "/".
        only: export only tensors whose names in the state match this glob, such as "model/*".
        shard_bytes: the largest size of a file's tensors, in bytes or as a text such as "5GB".
        files: files to copy into the directory, of at most 1 GiB each, such as the tokenizer's and
            config.json, which from_pretrained needs. Only the first rank's list is used, and its
            files are read before this returns. If config.json contains a dtype, the copy contains
            instead the one that most elements have, among the floating-point dtypes of at least 16
            bits, or of 8 if there are no others. If no config.json is given, the config of a
            transformers model is written, and a warning is logged for any other state.
        group: a torch.distributed process group whose ranks all call this, with DTensors on these
            ranks, and the same plain tensors on each rank. Ranks communicate over the job's store;
            no collective runs. None: this process alone.
        options: the fence, how errors are handled, and how files are written (see SaveOptions);
            staging="gds" is not supported, because files are assembled in host memory.

    Returns:
        A SaveHandle; its result() returns the SaveStats when the directory is committed on all
        ranks. With a group, result() may raise RanksDisagree or PeerFailed, like fastckpt.save's.

    Raises:
        TypeError: safetensors files cannot store some of the tensors, all of which the message
            names; DTensors are on ranks outside the group; or an argument has the wrong type.
        ValueError: two tensors get the same name, or no tensor is selected; a pattern of `rename`
            matches no tensor; one of `files` has the name of another file of the export, is a
            directory, or is larger than 1 GiB; or an argument is out of range.
        CheckpointError: with on_error="raise", an earlier save failed and its error was not raised
            yet.
        StorageError: one of `files` cannot be read, or examining `directory` took longer than
            timeout_s. All other errors of the file system are raised by result().
    """
    check_dtype(dtype)
    file_bytes = check_size("shard_bytes", shard_bytes)
    if isinstance(files, str | os.PathLike):
        raise TypeError(f"files is {files!r}, must be a list of paths")
    copied = [check_path("files", file) for file in files]
    shared, rank_of = per_group.together(group), ranks_within(group)

    def fill(draft: Draft) -> None:
        # Read once, because an earlier export, which still runs, may add to it.
        unequal, held = shared.unequal(), Parts(shared.coordinator.world_size, rank_of)
        tensors = _named(state, rename, only, dtype, draft, held, unequal)
        contents = hugging_face.divided(tensors, file_bytes)
        if shared.coordinator.rank == 0:
            _add_others(draft, copied, contents, state)
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


def check_dtype(dtype: Casts) -> dict[str, torch.dtype | None]:
    """Returns the dtypes by the globs of names for which they are; raises like export()."""
    rules = dict[str, torch.dtype | None]()
    for glob, value in (dtype if isinstance(dtype, Mapping) else {"*": dtype}).items():
        found = _SPELLED.get(value) if isinstance(value, str) else value
        if isinstance(value, str) and found is None:
            raise ValueError(
                f"dtype is {value!r}, must be one of {listed(_SPELLED, len(_SPELLED))}"
            )
        if not isinstance(found, torch.dtype | None):
            raise TypeError(
                f"dtype is {dtype!r}, must be a torch.dtype, its name, a dict of globs and these, "
                "or None"
            )
        if found is not None and not (found.is_floating_point and safetensors.supported(found)):
            raise ValueError(
                f"dtype is {found}, must be a floating-point dtype that safetensors files support"
            )
        rules[glob] = found
    return rules


def _named(
    state: Any,
    rename: Rename | None,
    only: str | None,
    dtype: Casts,
    draft: Draft,
    parts: Parts,
    unequal: frozenset[str],
) -> list[SharedTensor]:
    """Captures the tensors to export, and returns this rank's parts in the state's order. Of
    tensors in `unequal`, the first rank's copy is exported.
    """
    # All tensors are kept, so that their memory is not reused.
    tensors = [(joined(keys), tensor) for keys, tensor in tensors_in(state)]
    named = [(old, tensor.dtype) for old, tensor in tensors]
    shared, taken = list[SharedTensor](), dict[str, str]()
    identities: set[object] = set()
    misfits: list[str] = []
    for number, name, stored in chosen(named, dtype, rename, only):
        old, tensor = tensors[number]
        try:
            held = _held(old, tensor, parts, old in unequal)
        except OtherRanks:  # all DTensors are alike, so one name is enough
            raise
        except TypeError as error:
            misfits.append(str(error))
            continue
        if held.identity in identities:
            continue
        identities.add(held.identity)
        take_name(name, old, taken)
        leaf = held.leaf._replace(local=draft.held(held.leaf.local))
        shared.append(SharedTensor(name, stored, leaf))
    if misfits:
        raise TypeError(f"safetensors files cannot hold all of the state: {'; '.join(misfits)}")
    if not shared:
        names = listed(old for old, _tensor in tensors)
        hint = f": only={only!r} and rename leave out {names}" if names else ""
        raise ValueError(f"the state holds no tensor to export{hint}")
    return shared


class Chosen(NamedTuple):
    """A tensor to export: its number among those of the state, its name and dtype in the files."""

    number: int
    name: str
    dtype: torch.dtype


def names_in_model(names: Sequence[str]) -> list[str]:
    """Converts names of keys joined by "/" to the names in the model that will read them."""
    return without_wrappers([dotted(name) for name in names])


def chosen(
    tensors: Sequence[tuple[str, torch.dtype]],
    dtype: Casts,
    rename: Rename | None,
    only: str | None,
    spelled: Callable[[Sequence[str]], list[str]] = names_in_model,
    may_be_empty: bool = False,
) -> list[Chosen]:
    """Returns the tensors to export, in their order.

    Args:
        tensors: the names (keys joined by "/") and dtypes of all tensors.
        dtype, rename, only: like export()'s.
        spelled: converts names after `rename` to names in the files.
        may_be_empty: whether a tensor in the files may have the name "".

    Raises:
        ValueError, TypeError: like export().
    """
    fit = Fit(rename=rename, only=only)
    numbers = [number for number, (old, _dtype) in enumerate(tensors) if fit.asks_for(old)]
    if not may_be_empty and any(not tensors[number][0] for number in numbers):
        raise ValueError(
            "a tensor has no name, because it is not in a dict or its key is '': give it a name "
            "in a dict, or leave it out"
        )
    news, useless, _left_out = fit.new_names([tensors[number][0] for number in numbers])
    if useless:
        raise ValueError(useless[0])
    pairs = [(number, new) for number, new in zip(numbers, news, strict=True) if new is not None]
    for number, new in pairs:
        if not new and not (may_be_empty and new == tensors[number][0]):
            raise ValueError(
                f"the new name of {tensors[number][0]!r} is empty: give the tensor another name, "
                "or leave it out"
            )
    names = spelled([new for _number, new in pairs])
    rules = check_dtype(dtype)
    useless = [glob for glob in rules if not any(fnmatchcase(name, glob) for name in names)]
    if useless and isinstance(dtype, Mapping):
        raise ValueError(
            f"dtype has the glob {useless[0]!r}, which matches no name of a tensor in the files"
            f"{nearest(useless[0], names)}"
        )
    result = list[Chosen]()
    for (number, _new), name in zip(pairs, names, strict=True):
        own = tensors[number][1]
        cast = next((rules[glob] for glob in rules if fnmatchcase(name, glob)), None)
        is_cast = own.is_floating_point and safetensors.supported(own)
        result.append(Chosen(number, name, cast if cast is not None and is_cast else own))
    return result


def take_name(
    name: str, old: str, taken: dict[str, str], reserved: str | None = safetensors.METADATA
) -> None:
    """Records a tensor's name in the files; `taken` maps these names to the old names. Raises
    ValueError if another tensor has the name, or if the format has reserved it.
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
    """This rank's part of a tensor. Tensors that share all memory have the same `identity`."""

    leaf: Leaf
    identity: object


def _held(key: str, tensor: Any, parts: Parts, is_first_ranks: bool) -> _Held:
    """Returns this rank's part of a tensor; raises TypeError if files cannot store the tensor."""
    replicas = (0,) if is_first_ranks else parts.everybody
    if is_sharded(tensor):
        local, box, holders, placement, _spread, identity = parts.of(key, tensor)
        if wraps_others(local):
            raise TypeError(f"{key!r} is a DTensor with parts that are a {type(local).__name__}")
        if holders is parts.everybody:
            holders = replicas
        shape = tuple(tensor.shape)
        return _Held(Leaf(key, _plain(local), shape, box, holders, placement), identity)
    check_storable(key, tensor)
    local, shape = _plain(tensor), tuple(tensor.shape)
    leaf = Leaf(key, local, shape, whole(shape), replicas, "replicated")
    return _Held(leaf, memory_of(tensor) or object())


def check_storable(key: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor, not a DTensor, that safetensors files cannot hold."""
    kind = None
    if type(tensor) not in PLAIN_TENSORS:
        kind = f"a {type(tensor).__name__}"
    elif tensor.layout != torch.strided or tensor.is_nested:
        kind = f"of layout {tensor.layout}"
    elif tensor.is_meta:
        kind = "on the meta device"
    elif tensor.is_quantized or not safetensors.can_hold(tensor.dtype, tensor.shape):
        kind = f"of {tensor.dtype}"
    elif tensor.numel() and memory_of(tensor) is None:
        kind = NO_MEMORY
    if kind is not None:
        raise TypeError(f"{key!r} is {kind}")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_neg().resolve_conj()


def _add_others(
    draft: Draft,
    copied: Sequence[str],
    contents: Mapping[str, Sequence[SharedTensor]],
    state: object,
) -> None:
    """Adds the files that the first rank writes alone: the index, the copied files and, if these
    have no config.json, the model's config.
    """
    if index := hugging_face.index(contents):
        draft.add_content(index, hugging_face.INDEX)
    names = _add_copies(draft, copied, contents)
    has_config = not names.isdisjoint({hugging_face.CONFIG, hugging_face.ADAPTER_CONFIG})
    if not has_config and (config := _config_of(state)):
        config = hugging_face.config(config, _common_dtype(contents))
        draft.add_content(config, hugging_face.CONFIG)


def _add_copies(
    draft: Draft, copied: Sequence[str], contents: Mapping[str, Sequence[Tensor]]
) -> set[str]:
    """Adds copies of files to those with tensors, and returns the names of all."""
    # The first two names are reserved even if they are not written, because a copied index would
    # name missing files.
    names = {file_list.NAME, hugging_face.INDEX, *contents}
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
        if name == hugging_face.CONFIG:
            content = hugging_face.config(content, _common_dtype(contents))
        draft.add_content(content, name)
    return names


def _common_dtype(files: Mapping[str, Sequence[Tensor]]) -> str:
    """Returns the name of the floating-point dtype that most elements have, among those of at least
    16 bits or, if there are none, among all; "" if no tensor has one. Models do not compute in the
    smaller ones, which quantized weights have.
    """
    counts = Counter[torch.dtype]()
    for tensor in chain.from_iterable(files.values()):
        if tensor.dtype.is_floating_point and safetensors.supported(tensor.dtype):
            counts[tensor.dtype] += tensor.nbytes // tensor.dtype.itemsize
    wide = {dtype: count for dtype, count in counts.items() if dtype.itemsize > 1}
    named = ((count, str(dtype)[6:]) for dtype, count in (wide or counts).items())
    return max(named, default=(0, ""))[1]


_has_warned = False  # of an export without a config.json


def _config_of(state: object) -> bytes:
    """Returns the config.json of a transformers model, with its class as the architecture; b"" for
    any other state, with one warning per process.
    """
    global _has_warned
    model = state
    while isinstance(inner := getattr(model, "module", getattr(model, "_orig_mod", None)), Module):
        model = inner  # removes torch.compile's or DistributedDataParallel's wrapper
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
                "an export has no config.json, which from_pretrained() needs: pass the path of a "
                "config.json in files= (%s; this warning is given once)",
                why,
            )
        return b""


def _check_file(storage: Storage, path: str) -> None:
    """Raises ValueError or StorageError if the path is not a file that can be copied."""
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
