"""The tensors of any checkpoint, read into those of a state that exists.

Responsible for finding which stored tensor goes into which, by their names, and for reading no more
than the state holds of each.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch

from fastckpt.arguments.names import listed, missing_from_checkpoint, nearest
from fastckpt.arguments.urls import StorageOptions, path_of
from fastckpt.errors import CheckpointError
from fastckpt.formats.conversion import put_converted
from fastckpt.formats.value_names import joined
from fastckpt.lazy.open import RenamedSource, opened
from fastckpt.lazy.source import Source, Stored, Wanted
from fastckpt.plan.boxes import Box
from fastckpt.saving import pipeline
from fastckpt.state.dtensors import dtensor_identity
from fastckpt.state.filling import Filling, check_shape
from fastckpt.state.fit import (
    Differences,
    Dtypes,
    Fit,
    Missing,
    Rename,
    Unexpected,
    nothing_chosen,
    refusal,
    unexpected,
)
from fastckpt.state.kinds import is_sharded, memory_of
from fastckpt.state.targets import note_overwritten, takes_bytes, tell_lossy
from fastckpt.state.tree import is_stateful, tensors_in

log = logging.getLogger("fastckpt")

_CONVERTED_BYTES = 256 << 20  # of memory beside the state, for what has to be converted


class _Part(NamedTuple):
    """The part that this process holds of a state's tensor, and the stored tensor for it."""

    own_name: str  # in the state
    name: str  # of the stored tensor
    stored: Stored
    tensor: torch.Tensor
    memory: torch.Tensor
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.stored.dtype.itemsize


def load_into(
    state: Any,
    path: str | os.PathLike[str],
    *,
    missing: Missing = "raise",
    unexpected: Unexpected | None = None,
    dtype: Dtypes = "cast",
    rename: Rename | None = None,
    only: str | None = None,
    storage_options: StorageOptions | None = None,
) -> Differences:
    """Reads the tensors of any checkpoint into those of a state, in place: into a model, say, on
    any number of ranks. Each rank calls it by itself, and reads the ranges that it holds.

    A tensor gets the stored one of its name, which is the keys that lead to it, joined by "/" as
    fastckpt.open names tensors, or by ".", as Hugging Face and torch.distributed.checkpoint do. It
    keeps its dtype, device and sharding. Nothing else of the checkpoint is read, and no code from
    it is run. Of an object, the tensors of its state_dict() are filled, which have to be those that
    it lives by, as a module's are; an optimizer that has no state yet gets none. (To go on with a
    training, use Checkpointer.restore.) Tensors that share memory, such as tied weights, get one
    value: the checkpoint may have it under one of their names or several, but not different ones.

    Args:
        state: a nest of dicts, lists, tuples and objects with state_dict(), such as a module.
        path, storage_options: as open()'s.
        missing: what becomes of tensors of the state that the checkpoint has not: "raise", "keep".
        unexpected: what becomes of stored tensors that the state has not: they are skipped, with a
            warning (None) or without ("ignore"); or "raise".
        dtype: "cast", with a warning that names the tensors that cannot hold their values: as an
            integer that becomes another number, or a finite number that becomes infinite; or
            "raise" for tensors whose stored dtype is another.
        rename: gives stored tensors other names first: a function, which returns None for what is
            left out; or a dict of regular expressions and replacements, each of which is applied to
            each name (re.sub), in order. An expression that fits no name is an error.
        only: read what has names in the state like this glob, such as "model/*".

    Returns:
        What was missing, unexpected, renamed and cast.

    Raises:
        IncompatibleCheckpoint: the checkpoint does not fit, by the arguments above; the message
            tells all differences, and nothing has changed. Or it is of another version.
        CorruptCheckpoint, StorageError: it is damaged, or cannot be read; the message names the
            tensors that may have been overwritten.
        TypeError: a tensor cannot be filled (meta, overlapping, another layout), or the state is
            nothing that has tensors.
        CheckpointError, pickle.UnpicklingError, ValueError: as open().
    """
    fit = Fit(missing, unexpected, dtype, rename, only)
    if not isinstance(state, dict | list | tuple | torch.Tensor) and not is_stateful(state):
        kind = type(state).__name__
        raise TypeError(f"state is {kind}, must be a dict, list, tuple or tensor, or stateful")
    current, checked = pipeline.current(), path_of("path", path, storage_options)
    current.wait_for(os.path.realpath(checked))
    where, source = opened(current.storage, current.staging, checked)
    with closing(source):
        differences = _load_into(source, state, fit, where)
    if differences.unexpected and unexpected is None:
        names = listed(map(repr, differences.unexpected))
        log.warning(
            "%r holds values that are not in the state and were not loaded: %s", where, names
        )
    return differences


def _load_into(source: Source, state: Any, fit: Fit, path: str) -> Differences:
    olds = dict[str, str]()
    if fit.rename is not None:
        source = RenamedSource(source, fit, path)
        olds = source.olds
    parts, missing, used = list[_Part](), dict[str, torch.Tensor](), set[str]()
    filling = Filling(fit)
    misfits = filling.misfits
    times: dict[str, int] = {}
    was_asked = False
    for keys, tensor in tensors_in(state):
        name = joined(keys)
        times[name] = times.get(name, 0) + 1
        if times[name] > 1:  # 0 and "0" are two keys
            name, keys = f"{name}#{times[name]}", (*keys[:-1], f"{keys[-1]}#{times[name]}")
        if not fit.asks_for(name):
            continue
        was_asked = True
        check_shape(repr(name), tensor)
        # Hugging Face and torch.distributed.checkpoint join keys by a dot.
        source_name = name if name in source.tensors else ".".join(keys)
        if source_name not in source.tensors:
            missing[name] = tensor
            continue
        used.add(source_name)
        stored = source.tensors[source_name]
        old = olds.get(source_name, source_name)
        there = "in the checkpoint" + (f", where it is {old!r}" if old != name else "")
        origin = (source_name, stored)
        place = filling.place(repr(name), name, tensor, source_name, stored, origin, there)
        if place is not None:
            memory, box = place
            parts.append(_Part(name, source_name, stored, tensor, memory.detach(), box))
    if missing:  # of weights that are tied, a checkpoint may hold one name
        filled = {_identity(part.tensor) for part in parts}
        missing = {name: its for name, its in missing.items() if _identity(its) not in filled}
    if is_missing := bool(missing) and fit.missing == "raise":
        near = nearest(next(iter(missing)), source.tensors) or _passed_over(source)
        misfits.append(missing_from_checkpoint(missing, near))
    unused = (new for new in source.tensors if new not in used)
    extra = [new for new in unused if fit.asks_for(new) or fit.asks_for(new.replace(".", "/"))]
    if extra and fit.unexpected == "raise":
        misfits.append(unexpected(listed(map(repr, extra))))
    if fit.only is not None and not was_asked:
        misfits.append(nothing_chosen(fit.only))
    if misfits := misfits or filling.tied.conflicts(partial(_whole_part, source)):
        raise refusal(path, misfits, is_missing=is_missing)
    tell_lossy(path, _read(source, parts))
    renamed = {old: new for new, old in olds.items() if new != old}
    return Differences(tuple(missing), tuple(extra), renamed, tuple(filling.cast))


def _passed_over(source: Source) -> str:
    """Returns words, to follow the names of missing tensors, about the objects in their place."""
    count = sum(its for maker, its in source.rest.others.items() if maker.endswith(".DTensor"))
    if count:
        return (
            f": it has {count} DTensors instead, and torch.save writes only one rank's part of "
            "each: save them with a Checkpointer, or save the results of full_tensor()"
        )
    objects = [f"{count} of {maker}" for maker, count in source.rest.others.items()]
    return (
        f": it has objects instead, whose contents are not read ({listed(objects)})"
        if objects
        else ""
    )


def _identity(tensor: torch.Tensor) -> object:
    """Returns what tensors that are the same elements in memory have in common."""
    return dtensor_identity(tensor) if is_sharded(tensor) else memory_of(tensor) or id(tensor)


def _read(source: Source, parts: Sequence[_Part]) -> list[str]:
    """Reads parts into their memory, those that have to be converted by way of other memory.

    Returns the names of tensors that cannot hold some of their values. A CheckpointError names
    those that may have been overwritten.
    """
    for part in parts:  # of a DTensor both, since both may be watched
        note_overwritten({part.tensor, part.memory})
    as_they_are, converted = list[_Part](), list[_Part]()
    for part in parts:
        if not part.box.numel:
            continue
        is_as_stored = part.memory.dtype == part.stored.dtype and not part.stored.repeated
        if is_as_stored and part.memory.is_contiguous() and takes_bytes(part.memory, ("cpu",)):
            as_they_are.append(part)
        else:
            converted.append(part)
    lossy, overwritten = list[str](), [part.own_name for part in as_they_are]
    try:
        if as_they_are:
            source.read([Wanted(part.name, part.box, part.memory) for part in as_they_are])
        while converted:
            some, nbytes = list[_Part](), 0
            while converted and (not some or nbytes + converted[-1].nbytes <= _CONVERTED_BYTES):
                some.append(converted.pop())
                nbytes += some[-1].nbytes
            lossy += _read_converted(source, some)
            overwritten += [part.own_name for part in some]
    except CheckpointError as error:
        if overwritten:
            names = listed(map(repr, overwritten))
            error.reword(f"{error}; tensors of the state may have been overwritten: {names}")
        raise
    return lossy[::-1]  # they were read from the last on


def _whole_part(source: Source, named: tuple[str, Stored], box: Box) -> torch.Tensor:
    """Returns a part of a stored tensor, read for itself."""
    request = _to_memory(*named, box)
    source.read([request])
    return request.target.expand(box.sizes)


def _to_memory(name: str, stored: Stored, box: Box) -> Wanted:
    """Returns what is to be read of a part, with memory of its own for that."""
    sizes = tuple(1 if dim in stored.repeated else n for dim, n in enumerate(box.sizes))
    target = torch.empty(sizes, dtype=stored.dtype, device="cpu")
    return Wanted(name, Box(box.offsets, sizes), target)


def _read_converted(source: Source, parts: Sequence[_Part]) -> list[str]:
    requests = [_to_memory(part.name, part.stored, part.box) for part in parts]
    source.read(requests)
    return [
        part.name
        for part, want in zip(parts, requests, strict=True)
        if put_converted(part.memory, want.target.expand(part.box.sizes))
    ]
