"""The restore into an existing state: assigns each stored value to its place in the state.

The module walks a state in parallel with the saved nest, creates tensors that the state lacks, and
puts values in place after all have been read. It must not know files or ranks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from fastckpt.arguments.names import listed, missing_from_checkpoint, nearest
from fastckpt.errors import IncompatibleCheckpoint, retold
from fastckpt.formats.conversion import put_converted
from fastckpt.formats.partial_objects import left_out, notes_in
from fastckpt.formats.value_names import items_in, joined
from fastckpt.plan.boxes import Box, whole
from fastckpt.state.additions import Additions, is_other
from fastckpt.state.dtensors import dtensor_part
from fastckpt.state.filling import Filling
from fastckpt.state.fit import (
    Differences,
    Fit,
    nothing_chosen,
    refusal,
    refused,
    renamed,
    unexpected,
)
from fastckpt.state.generators import Generators
from fastckpt.state.kinds import is_sharded
from fastckpt.state.optimizers import (
    completed,
    counts_parameters,
    is_of_optimizer,
    other_parameters,
    sizes,
)
from fastckpt.state.targets import Place, Target, tell_lossy
from fastckpt.state.tree import (
    ATOMS,
    DEPTH_MAX,
    PER_RANK,
    TENSOR,
    OwnValues,
    Parted,
    PerRank,
    Stored,
    fill,
    is_stateful,
    parted_of,
    stored_of,
    unescaped,
    unwrapped,
)

log = logging.getLogger("fastckpt")

_ABSENT = object()  # stands for a value that was not saved


class _At(NamedTuple):
    """A place in a state, given by the keys that lead to it."""

    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return repr(self.name) if self.keys else "the state"

    @property
    def name(self) -> str:
        return joined(self.keys)

    def of(self, key: Any) -> _At:
        """Returns the place of an item."""
        return _At((*self.keys, str(key)))


class Template:
    """A state to restore, together with the saved nest. Before put(), only the memory of targets
    changes.

    Args:
        state, saved: the state to restore, and the nest of a step's objects.
        per_rank: the PerRank values of the step; None if there are none.
        find: raises an error if the step lacks parts of tensors (StepReader.find).
        where: the path of the step, for messages.
        fit: how the state may differ from the checkpoint.
        overwritten: names of tensors that may contain bytes of another step and must be filled.

    Attributes:
        targets: the parts of tensors that must be read before put().
        names_of_targets: the names of the tensors that these targets fill.

    Raises:
        IncompatibleCheckpoint: the state or the checkpoint has values that the other lacks and
            `fit` does not permit this, or shapes differ. The message lists all such values.
        TypeError: the state has a tensor that cannot be filled.
        pickle.UnpicklingError: weights_only left out a part of a value that the state has.
    """

    def __init__(
        self,
        state: Any,
        saved: Any,
        per_rank: OwnValues | None,
        find: Callable[[Sequence[Place]], object],
        where: str,
        fit: Fit | None = None,
        overwritten: Collection[str] = (),
    ) -> None:
        self._where = where
        self._fit = fit or Fit()
        self.targets: list[Target] = []
        self.names_of_targets: list[str] = []
        self._find = find
        self._per_rank = per_rank
        self._actions: list[Callable[[], object]] = []
        self._last: list[Callable[[], object]] = []  # for generators, from which actions may draw
        self._lossy: list[str] = []
        self._unmerged: list[str] = []
        self._ignored: list[_At] = []
        self._refused: list[tuple[str, str]] = []  # names of what weights_only has left out
        self._missing: list[str] = []
        self._is_missing = False  # whether values that have to be there were not saved
        self._taken = 0  # values that are restored
        self._was_asked = False  # for any value
        self._filling = Filling(self._fit, overwritten)
        self._renamed: dict[str, str] = {}
        self._useless: list[str] = []  # patterns of rename
        if self._fit.rename is not None:
            saved, self._renamed, self._useless = renamed(saved, self._fit, where)
        self._saved = saved
        self._additions = Additions(state, saved, per_rank, find, self.targets, self._refused)
        self._copies: list[_At] = []  # dicts that are the state of an optimizer, not the optimizer
        self._within = 0  # the objects with state_dict() that are being visited
        self._filled: dict[int, Any] = {}  # by identity; self._saved keeps the objects alive
        self._in_place(state, saved, _At(), 0)
        self._check()

    def _check(self) -> None:
        """Raises an error if any value does not fit or was left out."""
        if self._refused:
            raise refused(self._where, self._refused)
        texts = [*self._filling.misfits, *self._filling.lost(), *self._additions.misfits()]
        if self._ignored and self._fit.unexpected == "raise":
            texts = [*texts, unexpected(listed(map(str, self._ignored)))]
        texts = [*texts, *self._useless] if self._is_missing else texts
        if self._fit.only is not None and not self._was_asked:
            texts = [*texts, nothing_chosen(self._fit.only)]
        if texts:
            raise refusal(self._where, texts, is_missing=self._is_missing)

    def check_tied(self, read: Callable[[Sequence[Target]], object]) -> None:
        """Raises IncompatibleCheckpoint if tensors that share memory would receive different
        values.

        Args:
            read: reads targets, like StepReader.read; only called for such tensors.
        """

        def part_of(stored: Stored | torch.Tensor, box: Box) -> torch.Tensor:
            if isinstance(stored, torch.Tensor):
                return _part(stored, box)
            part = torch.empty(box.sizes, dtype=stored.dtype, device="cpu")
            read([Target(*stored, box, part)])
            return part

        if conflicts := self._filling.tied.conflicts(part_of):
            raise refusal(self._where, conflicts)

    def differences(self) -> Differences:
        """Returns the differences between the state and the checkpoint."""
        unexpected = tuple(at.name for at in self._ignored)
        return Differences(
            tuple(self._missing), unexpected, self._renamed, tuple(self._filling.cast)
        )

    def _takes(self, saved: Any, at: _At) -> bool:
        """Returns whether a value of the state is restored; records a value that was not saved."""
        return self._fit.asks_for(at.name) and self._has(saved, at)

    def _has(self, saved: Any, at: _At) -> bool:
        """Returns whether a requested value was saved; records a value that was not."""
        self._was_asked = True
        if saved is _ABSENT:
            if self._fit.missing == "raise":
                self._filling.misfits.append(f"{at} is missing in the checkpoint")
                self._is_missing = True
            else:
                self._missing.append(at.name)
            return False
        self._taken += 1
        return True

    def tell(self, level: int) -> None:
        """Logs saved values that are not restored into the state, or not in the intended way."""
        for text in self._useless:
            log.log(level, "%r: %s", self._where, text)
        if self._ignored and self._fit.unexpected is None:
            log.log(
                level,
                "%r holds values that are not in the state and were not restored: %s",
                self._where,
                listed(map(str, self._ignored)),
            )
        if self._copies:
            log.log(
                level,
                "%r: the state has dicts from an optimizer's state_dict(): %s. restore() fills "
                "only these dicts. To give the optimizer its learning rates, and any state that "
                "it did not have, pass the dict to its load_state_dict() after the restore (to "
                "set_optimizer_state_dict(), if get_optimizer_state_dict() made the dict); or "
                "put the optimizer itself into the state",
                self._where,
                listed(map(str, self._copies)),
            )
        if self._unmerged and self._per_rank is not None:
            log.log(
                level,
                "%r was saved by %d ranks and is restored on %d: of %s, each rank gets the value "
                "that it saved itself, if any. PerRank.saved has the values of all ranks, and a "
                "PerRank with merge= gets the merged value",
                self._where,
                self._per_rank.saving_ranks,
                self._per_rank.world_size,
                listed(map(repr, self._unmerged)),
            )

    def _misfit(self, text: str) -> IncompatibleCheckpoint:
        return refusal(self._where, [text])

    def put(self) -> None:
        """Puts the values into the state, after the targets have been read."""
        actions, self._actions, self._last = [*self._actions, *self._last], [], []
        for action in actions:  # which keep the state alive
            action()
        tell_lossy(self._where, self._lossy)

    def _in_place(self, value: Any, saved: Any, at: _At, depth: int) -> None:
        """Visits a state, or an item of a tuple that is a state. It cannot be replaced by another
        object.
        """
        if isinstance(value, tuple) and not is_stateful(value) and left_out(saved) is None:
            self._check_items(value, saved, at, depth)
            for number, item in enumerate(value):
                self._in_place(item, saved[number], at.of(number), depth + 1)
            return
        if not isinstance(value, dict | list | torch.Tensor | PerRank) and not is_stateful(value):
            raise TypeError(
                f"{at} is {type(value).__name__}, must be a dict, a list, a tensor, PerRank or "
                "stateful, or a tuple of these, to be restored in place; load() returns any state"
            )
        if isinstance(value, dict) and not at.keys and not is_stateful(value):
            if (nest := _nest(saved)) is None:
                raise self._misfit(f"{at} is a dict, but the checkpoint has {_described(saved)}")
            self._note_copy(value, at)
            self._match_dict(value, nest, at, depth)
            return
        new = self._visit(value, saved, at, depth)
        if new is not value:
            if not (isinstance(value, list) and isinstance(new, list)):
                kind = "a list" if isinstance(value, list) else "a dict"
                raise self._misfit(f"{at} is {kind}, but the checkpoint has {_described(new)}")
            self._actions.append(partial(value.__setitem__, slice(None), new))

    def _visit(self, value: Any, saved: Any, at: _At, depth: int, is_exact: bool = False) -> Any:
        """Returns the value that the state has at this place after the restore, which is the old
        object where possible. With `is_exact`, it is whatever was saved. Otherwise a tensor, or a
        dict or list with tensors, must have a counterpart.
        """
        if depth > DEPTH_MAX:
            raise self._misfit(f"{at} is nested more than {DEPTH_MAX} deep")
        if not self._fit.asks_within(at.name):
            return value
        if (maker := left_out(saved)) is not None:
            self._refused.append((at.name, maker))
            return value
        if isinstance(value, PerRank):
            if self._takes(saved, at):
                self._own_value(value, saved, at)
            return value
        is_exact = is_exact and saved is not _ABSENT
        if isinstance(value, torch.Tensor) and not (is_exact and is_other(value, saved)):
            if self._takes(saved, at):
                if depth and value.is_nested:
                    return self._nested(value, saved, at)
                self._tensor(value, saved, at)
            return value
        if is_stateful(value):
            self._stateful(value, saved, at, depth)
            return value
        if isinstance(value, dict) and (saved is _ABSENT or _nest(saved) is not None):
            self._dict(value, saved, at, depth, is_exact)
            return value
        if isinstance(value, dict) and value and not is_exact:
            raise self._misfit(f"{at} is a dict, but the checkpoint has {_described(saved)}")
        if isinstance(value, list | tuple) and _holds_tensors(value):
            is_alike = type(saved) is type(value) and len(saved) == len(value)
            if is_alike or not is_exact:
                return self._items(value, saved, at, depth, is_exact)
        return self._loaded(saved, at) if self._takes(saved, at) else value

    def _items(self, value: Any, saved: Any, at: _At, depth: int, is_exact: bool) -> Any:
        """Visits a list or tuple that contains tensors."""
        if saved is _ABSENT:
            saved = [_ABSENT] * len(value)
        self._check_items(value, saved, at, depth)
        items = [
            self._visit(item, saved[number], at.of(number), depth + 1, is_exact)
            for number, item in enumerate(value)
        ]
        if isinstance(value, list):
            self._actions.append(lambda: value.__setitem__(slice(None), items))
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)

    def _check_items(self, value: Sequence[Any], saved: Any, at: _At, depth: int) -> None:
        """Raises an error if a list or tuple does not have as many items as were saved."""
        if depth > DEPTH_MAX:
            raise self._misfit(f"{at} is nested more than {DEPTH_MAX} deep")
        if not isinstance(saved, list | tuple) or len(saved) != len(value):
            raise self._misfit(
                f"{at} has {_items(value)}, but the checkpoint has {_described(saved)}"
            )

    def _dict(self, value: dict[Any, Any], saved: Any, at: _At, depth: int, is_exact: bool) -> None:
        """Visits a dict inside the state. If no value in it is filled in place, its content is
        replaced.
        """
        self._note_copy(value, at)
        nest = _nest(saved) or {}
        if (_holds_tensors(value) and not is_exact) or not self._asks_for_all(at):
            self._match_dict(value, nest, at, depth)
            return
        with self._fitting(self._fit.without_only()):
            if self._has(saved, at):
                self._replace_dict(value, nest, at, depth)

    def _note_copy(self, value: dict[Any, Any], at: _At) -> None:
        """Records a dict of the caller's that contains the state of an optimizer."""
        if not self._within and is_of_optimizer(value):
            self._copies.append(at)

    def _match_dict(
        self,
        value: dict[Any, Any],
        saved: Mapping[Any, Any],
        at: _At,
        depth: int,
        is_module: bool = False,
    ) -> None:
        """Restores the entries of a dict by their keys; none is added or removed. If the dict is
        the state_dict of a module (`is_module`), values that are not tensors are replaced by the
        saved ones.
        """
        self._check_missing([key for key in value if key not in saved], at)
        others = [at.of(key) for key in saved if key not in value]
        self._ignored += [other for other in others if self._fit.asks_for(other.name)]
        for key, item in value.items():
            is_exact = is_module and not isinstance(item, torch.Tensor)
            new = self._visit(item, saved.get(key, _ABSENT), at.of(key), depth + 1, is_exact)
            if new is not item:
                self._actions.append(partial(value.__setitem__, key, new))

    def _replace_dict(
        self, value: dict[Any, Any], saved: Mapping[Any, Any], at: _At, depth: int
    ) -> None:
        """Makes a dict equal to the saved dict. The dict stays the same object, and so do the dicts
        and tensors in it that have a counterpart. `fit` determines the treatment of tensors without
        one.
        """
        extra = [key for key in value if key not in saved and _holds_tensors(value[key])]
        self._check_missing(extra, at)
        skips = self._fit.unexpected is not None and _holds_tensors(value)
        new = dict[Any, Any]()
        for key, item in saved.items():
            if skips and key not in value and _holds_stored(item):
                self._ignored.append(at.of(key))
            elif type(saved) is not dict:  # it was pickled whole: no placeholders are in it
                new[key] = item
            else:
                new[key] = self._visit(value.get(key), item, at.of(key), depth + 1, True)
        for key in extra:
            new[key] = self._visit(value[key], _ABSENT, at.of(key), depth + 1)
        self._actions.append(partial(_refill, value, new))

    def _check_missing(self, keys: Sequence[Any], at: _At) -> None:
        """Raises an error if required entries of a dict are missing in the checkpoint."""
        if keys and self._fit.missing == "raise" and self._fit.only is None:
            missing = [at.of(key).name for key in keys]
            near = nearest(missing[0], _names_within(self._saved, _At()))
            misfits = [missing_from_checkpoint(missing, near), *self._useless]
            raise refusal(self._where, misfits, is_missing=True)

    def _asks_for_all(self, at: _At) -> bool:
        """Returns whether everything in a container is requested."""
        return self._fit.asks_for(at.name) or self._fit.asks_for(f"{at.name}/")

    @contextmanager
    def _fitting(self, fit: Fit) -> Iterator[None]:
        """Applies other rules to the values that the body visits."""
        before, self._fit = self._fit, fit
        yield
        self._fit = before

    def _own_value(self, value: PerRank, saved: Any, at: _At) -> None:
        if not isinstance(saved, dict) or not isinstance(saved.get(PER_RANK), str):
            raise self._misfit(f"{at} is a PerRank, but the checkpoint has {_described(saved)}")
        name, its = saved[PER_RANK], self._per_rank
        assert its is not None
        self._actions.append(lambda: setattr(value, "read_saved", partial(its.of_all, name)))
        is_other = its.saving_ranks != its.world_size
        if is_other and value.merge is not None:
            saved_by_all = its.of_all(name)
            try:
                own = value.merge(saved_by_all, its.rank, its.world_size)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                text = f"{at}: merging the values of {its.saving_ranks} ranks failed with {why}"
                raise self._misfit(text) from error
        else:
            self._unmerged += [at.name] if is_other else []
            if its.own is None or name not in its.own:
                self._actions.append(lambda: setattr(value, "found", False))
                return
            own = its.own[name]
            self._refused += notes_in(own, at.name)
        if is_stateful(value.value):
            self._give(value.value, own, at)
        else:
            self._actions.append(lambda: setattr(value, "value", own))
        self._actions.append(lambda: setattr(value, "found", True))

    def _nested(self, tensor: torch.Tensor, saved: Any, at: _At) -> torch.Tensor:
        """Returns the saved nested tensor, which replaces the state's, whose memory may have other
        sizes.
        """
        if not isinstance(saved, torch.Tensor) or not saved.is_nested:
            raise self._misfit(
                f"{at} is a nested tensor, but the checkpoint has {_described(saved)}"
            )
        return saved.to(tensor.device)

    def _tensor(self, tensor: Any, saved: Any, at: _At) -> None:
        """Adds a target or an action that fills a tensor with its part of a stored tensor."""
        if (parted := parted_of(saved)) is not None:
            self._put_part(tensor, parted, at)
            return
        stored = stored_of(saved)
        if stored is not None:
            key: object = stored.key
        elif isinstance(saved, torch.Tensor) and (tensor.is_nested or not saved.is_nested):
            key = id(saved)
        else:
            raise self._misfit(f"{at} is a tensor, but the checkpoint has {_described(saved)}")
        place = self._filling.place(
            str(at), at.name, tensor, key, saved if stored is None else stored
        )
        if place is None:
            return
        local, box = place
        if stored is not None:
            self.targets.append(Target(*stored, box, local))
            self.names_of_targets.append(at.name)
            return
        part = saved if box == whole(saved.shape) else _part(saved, box)

        def put() -> None:
            if put_converted(local, part):
                self._lossy.append(at.name)

        if local.numel():
            self._actions.append(put)

    def _put_part(self, tensor: Any, parted: Parted, at: _At) -> None:
        """Adds an action that fills this rank's part of a DTensor with the saved part."""
        if not is_sharded(tensor) or tuple(tensor.shape) != parted.shape:
            kind = "DTensor" if is_sharded(tensor) else type(tensor).__name__
            self._filling.misfits.append(
                f"{at} is a {kind} of shape {[*tensor.shape]}, but the checkpoint has a DTensor of "
                f"shape {[*parted.shape]}, whose parts are of the class {parted.spread.kind}"
            )
            return
        local, box = dtensor_part(str(at), tensor)
        if (part := self._additions.part(parted, box)) is not None:
            self._actions.append(lambda: put_converted(local, part))

    def _stateful(self, value: Any, saved: Any, at: _At, depth: int) -> None:
        """Restores an object by its load_state_dict(), after its tensors are filled in place."""
        value = unwrapped(value)
        self._within += 1
        if isinstance(value, torch.optim.Optimizer) and self._fit != Fit():
            self._optimizer(value, saved, at, depth)
        else:
            self._stateful_in(value, saved, at, depth)
        self._within -= 1

    def _stateful_in(self, value: Any, saved: Any, at: _At, depth: int) -> None:
        """Restores an object with the state that it saved, keeping its own tensors where it has
        them.
        """
        own, nest = value.state_dict(), _nest(saved)
        if not isinstance(own, dict) or not (own or nest is not None):
            if self._takes(saved, at):
                self._give(value, self._loaded(saved, at), at)
            return
        is_there = saved is not _ABSENT
        if is_there and nest is None:
            raise self._misfit(f"{at} has a dict, but the checkpoint has {_described(saved)}")
        nest = {} if nest is None else nest
        if isinstance(value, torch.optim.Optimizer):
            if is_there and counts_parameters(value) and sizes(nest) != sizes(own):
                self._filling.misfits.append(other_parameters(at, own, nest))
                return
            if is_there and counts_parameters(value):  # it drops the state that it had
                self._filling.optimizers[at.name] = set()
            had, own = own, completed(value, own, nest)
        own = _copied(own)  # it may be the very dict that the object keeps its state in
        count, targets = self._taken, len(self.names_of_targets)
        if isinstance(value, torch.nn.Module):
            self._module(value, own, nest, at, depth)
        elif is_there and self._asks_for_all(at):
            with self._fitting(self._fit.without_only()):
                self._has(saved, at)
                self._replace_dict(own, nest, at, depth)
        else:
            self._match_dict(own, nest, at, depth)
        if isinstance(value, torch.optim.Optimizer):  # it has no tensors that were only made here
            names = {*_names_within(had, at)}
            new = [name for name in self.names_of_targets[targets:] if name in names]
            self.names_of_targets[targets:] = new
        if is_there and (self._taken > count or self._fit.only is None):
            self._give(value, own, at)

    def _module(
        self,
        module: torch.nn.Module,
        own: dict[Any, Any],
        saved: Mapping[Any, Any],
        at: _At,
        depth: int,
    ) -> None:
        """Visits the state_dict of a module, in which the names are fixed."""
        unknown = [key for key in saved if key not in own and self._fit.asks_for(at.of(key).name)]
        if self._fit.unexpected is None:
            own.update(dict.fromkeys(unknown))  # load_state_dict() decides whether they fit
        self._match_dict(own, saved, at, depth, is_module=True)
        if unknown and _is_strict(module) and self._fit.unexpected is None:
            raise self._misfit(
                f"{at} is a module without {listed(map(repr, unknown))}, which the checkpoint "
                "has: restore into a dict of the values that you want, or pass "
                "unexpected='ignore'"
            )

    def _give(self, value: Any, state_dict: Any, at: _At) -> None:
        """Adds an action that makes an object load a state, after everything has been read."""

        def give() -> None:
            try:
                value.load_state_dict(state_dict)
            except Exception as error:
                kind = type(value).__name__
                message = f"{at}, {kind}, rejected its state from {self._where!r}: {error}"
                raise retold(error, message) from error

        (self._last if isinstance(value, Generators) else self._actions).append(give)

    def _optimizer(self, value: torch.optim.Optimizer, saved: Any, at: _At, depth: int) -> None:
        """Restores an optimizer completely or not at all: its parameters have numbers instead of
        names, and it cannot continue with half of its state.
        """
        if not self._asks_for_all(at):
            # Whoever asks for a part of it has not mistyped a name.
            inside = _names_within(value.state_dict(), at)
            self._was_asked = self._was_asked or any(map(self._fit.asks_for, inside))
            return
        if not self._has(saved, at):
            self._filling.optimizers[at.name] = {*_names_within(value.state_dict(), at)}
            return
        theirs = unescaped(saved)
        if not isinstance(theirs, dict) or sizes(theirs) != sizes(value.state_dict()):
            self._filling.misfits.append(other_parameters(at, value.state_dict(), theirs))
            return
        with self._fitting(Fit(dtype=self._fit.dtype)):
            self._stateful_in(value, saved, at, depth)

    def _loaded(self, saved: Any, at: _At) -> Any:
        """Returns a saved value as a new object, with new tensors."""
        self._refused += notes_in(saved, at.name)
        if self._within and "state" in at.keys:
            self._additions.check(saved, at.name)

        def own_value_of(name: str, parted: Parted | None) -> Any:
            assert self._per_rank is not None
            if parted is not None:
                return self._additions.parted(parted)
            own = self._per_rank.value(name)
            self._refused += notes_in(own.value, name)
            return own

        return fill(saved, self._additions.tensor, own_value_of, self._filled)


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    parts = zip(box.offsets, box.sizes, strict=True)
    return tensor[tuple(slice(offset, offset + size) for offset, size in parts)]


def _names_within(value: Any, at: _At) -> Iterator[str]:
    """Yields the name of each value and of each container in a nest of containers. A container
    that occurs several times is visited once.
    """
    ahead, visited = [(at, value)], set[int]()
    while ahead:
        at, value = ahead.pop()
        yield at.name
        is_nest = isinstance(value, dict) and TENSOR not in value and left_out(value) is None
        if (is_nest or isinstance(value, list | tuple)) and id(value) not in visited:
            ahead += [(at.of(key), item) for key, item in items_in(unescaped(value))]
        visited.add(id(value))


def _copied(value: Any, depth: int = 0) -> Any:
    """Returns a copy of a nest of dicts, with the same types."""
    if not isinstance(value, dict) or depth > DEPTH_MAX:
        return value
    new = copy.copy(value)
    for key, item in value.items():
        new[key] = _copied(item, depth + 1)
    return new


def _nest(saved: Any) -> dict[Any, Any] | None:
    """Returns a dict of saved values; None for placeholders and values that are not dicts."""
    inner = unescaped(saved)
    if not isinstance(inner, dict) or left_out(saved) is not None:
        return None
    is_placeholder = TENSOR in saved or isinstance(saved.get(PER_RANK), str)
    return None if is_placeholder and inner is saved and type(saved) is dict else inner


def _refill(value: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    """Replaces the content of a dict item by item, because a subclass may store and count items in
    its own way.
    """
    value.clear()
    for key, item in items.items():
        value[key] = item


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor | PerRank) or is_stateful(value):
        return True
    if depth > DEPTH_MAX:
        return False
    return isinstance(value, dict | list | tuple) and any(
        type(item) not in ATOMS and _holds_tensors(item, depth + 1) for _, item in items_in(value)
    )


def _holds_stored(saved: Any) -> bool:
    """Returns whether a saved value is or contains a tensor or a PerRank."""
    ahead, visited = [saved], set[int]()
    while ahead:
        value = ahead.pop()
        if isinstance(value, torch.Tensor) or (isinstance(value, dict) and _nest(value) is None):
            return True
        if isinstance(value, dict | list | tuple) and id(value) not in visited:
            ahead += [item for _, item in items_in(unescaped(value))]
            visited.add(id(value))
    return False


def _is_strict(value: Any) -> bool:
    """Returns whether load_state_dict() is torch's own, which refuses keys that a module lacks."""
    if not isinstance(value, torch.nn.Module):
        return False
    hooks = (module._load_state_dict_pre_hooks for module in value.modules())
    return type(value).load_state_dict is torch.nn.Module.load_state_dict and not any(hooks)


def _items(value: Sequence[Any]) -> str:
    return "1 item" if len(value) == 1 else f"{len(value)} items"


def _described(saved: Any) -> str:
    if isinstance(saved, dict) and _nest(saved) is None:
        return "a tensor" if TENSOR in saved else "a PerRank"
    if isinstance(saved, list | tuple):
        return _items(saved)
    if isinstance(saved, torch.Tensor):
        return "a nested tensor" if saved.is_nested else "a tensor"
    return f"a {type(saved).__name__}"
