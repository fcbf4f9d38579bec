"""Reads the tensors of any checkpoint into the tensors of an existing state.

Responsible for matching stored tensors with the state's by their names, and for reading only the
parts that the state holds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from fastckpt.arguments.names import listed, missing_from_checkpoint, nearest
from fastckpt.arguments.urls import StorageOptions, path_of
from fastckpt.errors import CheckpointError, retold
from fastckpt.formats.conversion import put_converted
from fastckpt.formats.value_names import dotted, escaped, items_in, joined
from fastckpt.lazy.open import RenamedSource, opened
from fastckpt.lazy.source import Source, Stored, Wanted
from fastckpt.plan.boxes import Box
from fastckpt.saving import pipeline
from fastckpt.state.dtensors import identity_of
from fastckpt.state.filling import Filling, check_shape
from fastckpt.state.fit import (
    Differences,
    Dtypes,
    Fit,
    Mismatched,
    Missing,
    Rename,
    Unexpected,
    nothing_chosen,
    refusal,
    unexpected,
)
from fastckpt.state.modules import adapted, load
from fastckpt.state.optimizers import is_of_optimizer
from fastckpt.state.targets import note_overwritten, takes_bytes, tell_kept, tell_lossy
from fastckpt.state.tree import is_stateful, tensors_in, unwrapped

log = logging.getLogger("fastckpt")

_CONVERTED_BYTES = 256 << 20  # of memory beside the state, for what has to be converted


class _Part(NamedTuple):
    """The part of a state's tensor that this process holds, and the stored tensor for it."""

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
    mismatched: Mismatched = "error",
    storage_options: StorageOptions | None = None,
) -> Differences:
    """Reads the tensors of any checkpoint in place into the tensors of a state, such as a model, on
    any number of ranks. Each rank calls this independently and reads the ranges that it holds.

    A tensor gets the values of the stored tensor with its name, and keeps its dtype, device and
    sharding. The name consists of the keys that lead to the tensor, joined by "/" like in
    fastckpt.open, or by "." like in Hugging Face and torch.distributed.checkpoint. Only these
    tensors are read, and no code from the checkpoint is run. For an object, the tensors of its
    state_dict() are filled, which must be the object's own memory, like a module's. An optimizer
    that has no state yet gets none; to continue a training, use Checkpointer.restore(). Tensors
    that share memory, such as tied weights, get one value: the checkpoint may have this value under
    one or several of their names, but no different values.

    Args:
        state: a nest of dicts, lists, tuples and objects with state_dict(), such as a module.
        path, storage_options: see open().
        missing: "raise" an error for tensors of the state that are missing in the checkpoint, or
            "keep" their values.
        unexpected: the treatment of stored tensors that are not in the state: None skips them with
            a warning, "ignore" without one; "raise" raises an error.
        dtype: "cast" tensors whose stored dtype differs, or "raise" an error for them. A cast warns
            about tensors that cannot hold some of their values, for example if an integer changes
            or a finite number becomes infinite.
        rename: changes the names of stored tensors before they are matched: a function of the name,
            which returns None to leave the tensor out; or a dict of regular expressions and
            replacements, which are applied to every name in order (re.sub); a replacement that is
            None leaves out the tensors whose names match. An expression that matches no name is an
            error. Tensors of the state with the name of one that is left out stay as they are.
        only: read only tensors whose names in the state match this glob, such as "model/*".
        mismatched: "error": raise an error for tensors that have other shapes in the checkpoint.
            "keep": such tensors stay as they are, with a warning, and so does all state of an
            optimizer for a parameter whose state has other shapes. Modules with code of their own
            for loading, and torch's lazy modules, get the stored tensors of other shapes; errors of
            this code are raised after the other tensors are read.

    Returns:
        The names of the missing, unexpected, renamed, cast and mismatched tensors.

    Raises:
        IncompatibleCheckpoint: the checkpoint does not fit under the arguments above, or has
            another version. The message lists all differences, and the state is unchanged.
        CorruptCheckpoint, StorageError: the checkpoint is damaged or cannot be read; the message
            names the tensors that may have been overwritten.
        TypeError: a tensor cannot be filled (meta, overlapping, another layout), or the state's
            type cannot contain tensors.
        CheckpointError, pickle.UnpicklingError, ValueError: see open().
    """
    fit = Fit(missing, unexpected, dtype, rename, only, mismatched)
    if not isinstance(state, dict | list | tuple | torch.Tensor) and not is_stateful(state):
        kind = type(state).__name__
        raise TypeError(
            f"state is {kind}, must be a dict, list, tuple or tensor, or have state_dict()"
        )
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
    tell_kept(logging.WARNING, where, differences.mismatched)
    return differences


def _load_into(source: Source, state: Any, fit: Fit, path: str) -> Differences:
    olds, left_out = dict[str, str](), set[str]()
    if fit.rename is not None:
        source = RenamedSource(source, fit, path)
        olds, left_out = source.olds, source.left_out
    parts, missing, used = list[_Part](), dict[str, torch.Tensor](), set[str]()
    filling, loading = Filling(fit), _Loading()
    misfits = filling.misfits
    staying, times = set[object](), dict[str, int]()
    was_asked = False
    for keys, tensor in tensors_in(state):
        name = joined(keys)
        times[name] = times.get(name, 0) + 1
        if times[name] > 1:  # 0 and "0" are two keys
            name, keys = f"{name}#{times[name]}", (*keys[:-1], f"{keys[-1]}#{times[name]}")
        if not fit.asks_for(name):
            continue
        was_asked = True
        if not is_lazy(tensor):
            check_shape(repr(name), tensor)
        # Hugging Face and torch.distributed.checkpoint join keys by a dot.
        source_name = name if name in source.tensors else ".".join(keys)
        if source_name not in source.tensors:
            missing[name] = tensor
            continue
        used.add(source_name)
        stored = source.tensors[source_name]
        if refused := stored.refusal(source_name, tensor.dtype):
            misfits.append(refused)
            continue
        if is_lazy(tensor) or tuple(tensor.shape) != tuple(stored.shape):
            tensor = loading.given(state, keys, name, tensor, tuple(stored.shape))
            check_shape(repr(name), tensor)
        old = olds.get(source_name, source_name)
        there = "in the checkpoint" + (f", where it is {old!r}" if old != name else "")
        origin = (source_name, stored)
        place = filling.place(repr(name), name, tensor, source_name, stored, origin, there)
        if place is None:
            staying.add(identity_of(tensor))
        else:
            memory, box = place
            parts.append(_Part(name, source_name, stored, tensor, memory.detach(), box))
    if missing:  # of weights that are tied, a checkpoint may hold one name
        filled = staying | {identity_of(part.tensor) for part in parts}
        missing = {name: its for name, its in missing.items() if identity_of(its) not in filled}
    absent = {name: identity_of(its) for name, its in missing.items()}
    staying = {its for name, its in absent.items() if {name, dotted(name)} & left_out}
    unsaved = [name for name, its in absent.items() if its not in staying]
    if is_missing := bool(unsaved) and fit.missing == "raise":
        near = nearest(unsaved[0], source.tensors) or _passed_over(source)
        misfits.append(missing_from_checkpoint(unsaved, near))
    unused = (new for new in source.tensors if new not in used)
    extra = [new for new in unused if fit.asks_for(new) or fit.asks_for(new.replace(".", "/"))]
    if extra and fit.unexpected == "raise":
        misfits.append(unexpected(listed(map(repr, extra))))
    if fit.only is not None and not was_asked:
        misfits.append(nothing_chosen(fit.only))
    if misfits := misfits or filling.tied.conflicts(partial(_whole_part, source)):
        others = filling.is_refused
        raise refusal(path, misfits, is_missing=is_missing, is_mismatched=others)
    parts, mismatched = _without_kept_state(state, parts, filling.mismatched)
    tell_lossy(path, _read(source, parts))
    mismatched += loading.load(path, keeps=fit.mismatched == "keep")
    renamed = {old: new for new, old in olds.items() if new != old}
    cast = tuple(filling.cast)
    return Differences(tuple(missing), tuple(extra), renamed, cast, tuple(mismatched))


class _Loading:
    """The modules of a state that load some tensors by code of their own."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[torch.nn.Module, str, dict[str, torch.Tensor]]] = {}

    def given(
        self,
        state: Any,
        keys: Sequence[str],
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
    ) -> torch.Tensor:
        """Returns the tensor to read a stored tensor into: the state's or, for a module that loads
        another shape by itself, a new one of that shape.
        """
        module, key = _module_at(state, keys)
        if module is None:
            return tensor
        new = adapted(module, {key: tensor}, lambda _key: shape)
        if new:
            at = name.removesuffix(escaped(key))
            self._modules.setdefault(id(module), (module, at, {}))[2].update(new)
        return new.get(key, tensor)

    def load(self, path: str, *, keeps: bool) -> list[str]:
        """Makes the modules load what was read. Returns the names of tensors that stay."""
        names = list[str]()
        for module, at, new in self._modules.values():
            state_dict = module.state_dict()
            replaced = {key: state_dict[key] for key in new}
            state_dict.update(new)
            try:
                names += [
                    f"{at}{escaped(key)}" for key in load(module, state_dict, replaced, keeps)
                ]
            except Exception as error:
                where = repr(at.rstrip("/")) if at else "the state"
                kind = type(module).__name__
                message = f"{where}, {kind}, rejected its state from {path!r}: {error}"
                raise retold(error, message) from error
        return names


def _module_at(state: Any, keys: Sequence[str]) -> tuple[torch.nn.Module | None, str]:
    """Returns the module in whose state_dict() a tensor is, and the tensor's key there."""
    for key in keys[:-1]:
        if is_stateful(state) or not isinstance(state, dict | list | tuple):
            return None, ""
        if isinstance(state, dict) and key in state:
            state = state[key]
        else:
            state = next((value for each, value in items_in(state) if str(each) == key), None)
    state = unwrapped(state)
    return (state, keys[-1]) if keys and isinstance(state, torch.nn.Module) else (None, "")


def _optimizers(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the keys that lead to the states of optimizers in a state."""
    nest = unwrapped(value).state_dict() if is_stateful(value) else value
    if isinstance(nest, dict) and is_of_optimizer(nest):
        yield keys
    elif isinstance(nest, dict | list | tuple):
        for key, item in items_in(nest):
            yield from _optimizers(item, (*keys, str(key)))


def _without_kept_state(
    state: Any, parts: list[_Part], mismatched: Sequence[str]
) -> tuple[list[_Part], list[str]]:
    """Returns the parts without the state of an optimizer for a parameter of which a tensor stays,
    and the names of the tensors that stay, in which such a state has one name.
    """
    if not mismatched:
        return parts, []
    begins = tuple(f"{joined(keys)}/" if keys else "" for keys in _optimizers(state))

    def name_of(name: str) -> str:
        if not name.startswith(begins):
            return name
        is_flat = name.rpartition("/")[2].startswith("state.")
        return name.rpartition("." if is_flat else "/")[0]

    staying = {name_of(name): None for name in mismatched}
    return [part for part in parts if name_of(part.own_name) not in staying], [*staying]


def _passed_over(source: Source) -> str:
    """Returns text about the objects in place of missing tensors, to put after their names."""
    count = sum(
        number for maker, number in source.rest.others.items() if maker.endswith(".DTensor")
    )
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


def _read(source: Source, parts: Sequence[_Part]) -> list[str]:
    """Reads parts into their memory; parts that need a conversion are read into other memory first.

    Returns the names of the tensors that cannot hold some of their values. A CheckpointError names
    the tensors that may have been overwritten.
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
    """Reads and returns one part of a stored tensor."""
    request = _to_memory(*named, box)
    source.read([request])
    return request.target.expand(box.sizes)


def _to_memory(name: str, stored: Stored, box: Box) -> Wanted:
    """Returns the request to read a part into new memory."""
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
