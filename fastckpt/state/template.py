"""The restore into an existing state: assigns each stored value to its place in the state.

The module walks a state in parallel with the saved nest, creates tensors that the state lacks, and
puts values in place after all have been read. It must not know files or ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from fastckpt.arguments.names import listed, missing_from_checkpoint, nearest
from fastckpt.errors import IncompatibleCheckpoint, retold
from fastckpt.formats.conversion import put_converted
from fastckpt.formats.partial_objects import left_out, notes_in
from fastckpt.plan.boxes import Box, whole
from fastckpt.state.additions import Additions, is_other, saved_shape
from fastckpt.state.dtensors import dtensor_part, identity_of
from fastckpt.state.filling import Filling, part_at
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
from fastckpt.state.modules import adapted, is_strict, load
from fastckpt.state.nests import (
    At,
    copied,
    counted,
    described,
    holds_stored,
    holds_tensors,
    names_within,
    nest_of,
    refill,
)
from fastckpt.state.optimizers import (
    completed,
    counts_parameters,
    is_of_optimizer,
    other_parameters,
    parameters_of,
    reshaped,
    sizes,
)
from fastckpt.state.targets import Place, Target, tell_kept, tell_lossy
from fastckpt.state.tree import (
    DEPTH_MAX,
    PER_RANK,
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
        self._ignored: list[At] = []
        self._refused: list[tuple[str, str]] = []  # names of what weights_only has left out
        self._missing: list[str] = []
        self._is_missing = False  # whether values that have to be there were not saved
        self._taken = 0  # values that are restored
        self._was_asked = False  # for any value
        self._filling = Filling(self._fit, overwritten)
        self._renamed: dict[str, str] = {}
        self._useless: list[str] = []  # patterns of rename
        self._left_out = set[str]()  # names, by rename
        if self._fit.rename is not None:
            saved, self._renamed, names = renamed(saved, self._fit, where)
            self._useless = names.useless
            for name in names.left_out:  # and what they are in
                self._left_out.update(accumulate(name.split("/"), "{}/{}".format))
        self._saved = saved
        self._additions = Additions(state, saved, per_rank, find, self.targets, self._refused)
        self._level = logging.WARNING
        self._keeps = self._fit.mismatched == "keep"
        self._copies: list[At] = []  # dicts that are the state of an optimizer, not the optimizer
        self._within = 0  # the objects with state_dict() that are being visited
        self._filled: dict[int, Any] = {}  # by identity; self._saved keeps the objects alive
        # Of tensors that stay as they are: lists of names that they are told in, by identity. Of
        # the state of optimizers for them, by name.
        self._kept: dict[object, list[str]] = {}
        self._kept_state: dict[str, list[str]] = {}
        self._later: list[tuple[Fit, torch.optim.Optimizer, Any, At, int]] = []
        self._in_place(state, saved, At(), 0)
        self._within = 1
        for fit, *optimizer in self._later:
            with self._fitting(fit):
                (self._stateful_in if fit == Fit() else self._optimizer)(*optimizer)
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
            others = self._filling.is_refused
            raise refusal(self._where, texts, is_missing=self._is_missing, is_mismatched=others)

    def check_tied(self, read: Callable[[Sequence[Target]], object]) -> None:
        """Raises IncompatibleCheckpoint if tensors that share memory would receive different
        values.

        Args:
            read: reads targets, like StepReader.read; only called for such tensors.
        """

        def part_of(stored: Stored | torch.Tensor, box: Box) -> torch.Tensor:
            if isinstance(stored, torch.Tensor):
                return part_at(stored, box)
            part = torch.empty(box.sizes, dtype=stored.dtype, device="cpu")
            read([Target(*stored, box, part)])
            return part

        if conflicts := self._filling.tied.conflicts(part_of):
            raise refusal(self._where, conflicts)

    def differences(self) -> Differences:
        """Returns the differences between the state and the checkpoint."""
        unexpected = tuple(at.name for at in self._ignored)
        cast, mismatched = tuple(self._filling.cast), tuple(self._filling.mismatched)
        return Differences(tuple(self._missing), unexpected, self._renamed, cast, mismatched)

    def _takes(self, saved: Any, at: At) -> bool:
        """Returns whether a value of the state is restored; records a value that was not saved."""
        return self._fit.asks_for(at.name) and self._has(saved, at)

    def _has(self, saved: Any, at: At) -> bool:
        """Returns whether a requested value was saved; records a value that was not."""
        self._was_asked = True
        if saved is _ABSENT:
            if self._fit.missing == "raise" and at.name not in self._left_out:
                self._filling.misfits.append(f"{at} is missing in the checkpoint")
                self._is_missing = True
            else:
                self._missing.append(at.name)
            return False
        self._taken += 1
        return True

    def tell(self, level: int) -> None:
        """Logs saved values that are not restored into the state, or not in the intended way."""
        self._level = level
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
        tell_kept(self._level, self._where, self._filling.mismatched)

    def _in_place(self, value: Any, saved: Any, at: At, depth: int) -> None:
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
            if (nest := nest_of(saved)) is None:
                raise self._misfit(f"{at} is a dict, but the checkpoint has {described(saved)}")
            self._note_optimizer(value, nest, at)
            self._match_dict(value, nest, at, depth)
            return
        new = self._visit(value, saved, at, depth)
        if new is not value:
            if not (isinstance(value, list) and isinstance(new, list)):
                kind = "a list" if isinstance(value, list) else "a dict"
                raise self._misfit(f"{at} is {kind}, but the checkpoint has {described(new)}")
            self._actions.append(partial(value.__setitem__, slice(None), new))

    def _visit(self, value: Any, saved: Any, at: At, depth: int, is_exact: bool = False) -> Any:
        """Returns the value that the state has at this place after the restore, which is the old
        object where possible. With `is_exact`, it is whatever was saved. Otherwise a tensor, or a
        dict or list with tensors, must have a counterpart.
        """
        if depth > DEPTH_MAX:
            raise self._misfit(f"{at} is nested more than {DEPTH_MAX} deep")
        if not self._fit.asks_within(at.name):
            return value
        if self._kept_state and (name := self._kept_state.get(at.name)) is not None:
            name.append(at.name)
            self._was_asked = True
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
            elif at.name in self._left_out:
                self._kept[identity_of(value)] = self._missing
            return value
        if is_stateful(value):
            self._stateful(value, saved, at, depth)
            return value
        if isinstance(value, dict) and (saved is _ABSENT or nest_of(saved) is not None):
            self._dict(value, saved, at, depth, is_exact)
            return value
        if isinstance(value, dict) and value and not is_exact:
            raise self._misfit(f"{at} is a dict, but the checkpoint has {described(saved)}")
        if isinstance(value, list | tuple) and holds_tensors(value):
            is_alike = type(saved) is type(value) and len(saved) == len(value)
            if is_alike or not is_exact:
                return self._items(value, saved, at, depth, is_exact)
        return self._loaded(saved, at) if self._takes(saved, at) else value

    def _items(self, value: Any, saved: Any, at: At, depth: int, is_exact: bool) -> Any:
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

    def _check_items(self, value: Sequence[Any], saved: Any, at: At, depth: int) -> None:
        """Raises an error if a list or tuple does not have as many items as were saved."""
        if depth > DEPTH_MAX:
            raise self._misfit(f"{at} is nested more than {DEPTH_MAX} deep")
        if not isinstance(saved, list | tuple) or len(saved) != len(value):
            raise self._misfit(
                f"{at} has {counted(value)}, but the checkpoint has {described(saved)}"
            )

    def _dict(self, value: dict[Any, Any], saved: Any, at: At, depth: int, is_exact: bool) -> None:
        """Visits a dict inside the state. If no value in it is filled in place, its content is
        replaced.
        """
        nest = nest_of(saved) or {}
        self._note_optimizer(value, nest, at)
        if (holds_tensors(value) and not is_exact) or not self._asks_for_all(at):
            self._match_dict(value, nest, at, depth)
            return
        with self._fitting(self._fit.without_only()):
            if self._has(saved, at):
                self._replace_dict(value, nest, at, depth)

    def _note_optimizer(self, value: dict[Any, Any], saved: Mapping[Any, Any], at: At) -> None:
        """Records a dict that contains the state of an optimizer, and what of it stays."""
        if not is_of_optimizer(value):
            return
        if not self._within:
            self._copies.append(at)
        if self._keeps:
            names = (At((*at.keys, *map(str, keys))).name for keys in reshaped(value, saved))
            self._kept_state |= dict.fromkeys(names, self._filling.mismatched)

    def _match_dict(
        self,
        value: dict[Any, Any],
        saved: Mapping[Any, Any],
        at: At,
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
        self, value: dict[Any, Any], saved: Mapping[Any, Any], at: At, depth: int
    ) -> None:
        """Makes a dict equal to the saved dict. The dict stays the same object, and so do the dicts
        and tensors in it that have a counterpart. `fit` determines the treatment of tensors without
        one.
        """
        absent = [key for key in value if key not in saved]
        named = [key for key in absent if at.of(key).name in self._left_out]
        extra = [key for key in absent if key in named or holds_tensors(value[key])]
        self._check_missing(extra, at)
        skips = self._fit.unexpected is not None and holds_tensors(value)
        new = dict[Any, Any]()
        for key, item in saved.items():
            if skips and key not in value and holds_stored(item):
                self._ignored.append(at.of(key))
            elif type(saved) is not dict:  # it was pickled whole: no placeholders are in it
                new[key] = item
            else:
                new[key] = self._visit(value.get(key), item, at.of(key), depth + 1, True)
        for key in extra:
            new[key] = self._visit(value[key], _ABSENT, at.of(key), depth + 1)
        self._actions.append(partial(refill, value, new))

    def _check_missing(self, keys: Sequence[Any], at: At) -> None:
        """Raises an error if required entries of a dict are missing in the checkpoint."""
        missing = [name for key in keys if (name := at.of(key).name) not in self._left_out]
        if missing and self._fit.missing == "raise" and self._fit.only is None:
            near = nearest(missing[0], names_within(self._saved, At()))
            misfits = [missing_from_checkpoint(missing, near), *self._useless]
            raise refusal(self._where, misfits, is_missing=True)

    def _asks_for_all(self, at: At) -> bool:
        """Returns whether everything in a container is requested."""
        return self._fit.asks_for(at.name) or self._fit.asks_for(f"{at.name}/")

    @contextmanager
    def _fitting(self, fit: Fit) -> Iterator[None]:
        """Applies other rules to the values that the body visits."""
        before, self._fit = self._fit, fit
        yield
        self._fit = before

    def _own_value(self, value: PerRank, saved: Any, at: At) -> None:
        if not isinstance(saved, dict) or not isinstance(saved.get(PER_RANK), str):
            raise self._misfit(f"{at} is a PerRank, but the checkpoint has {described(saved)}")
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

    def _nested(self, tensor: torch.Tensor, saved: Any, at: At) -> torch.Tensor:
        """Returns the saved nested tensor, which replaces the state's, whose memory may have other
        sizes.
        """
        if not isinstance(saved, torch.Tensor) or not saved.is_nested:
            raise self._misfit(
                f"{at} is a nested tensor, but the checkpoint has {described(saved)}"
            )
        return saved.to(tensor.device)

    def _tensor(self, tensor: Any, saved: Any, at: At) -> None:
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
            raise self._misfit(f"{at} is a tensor, but the checkpoint has {described(saved)}")
        place = self._filling.place(
            str(at), at.name, tensor, key, saved if stored is None else stored
        )
        if place is None:
            self._note_kept(tensor)
            return
        local, box = place
        if stored is not None:
            self.targets.append(Target(*stored, box, local))
            self.names_of_targets.append(at.name)
            return
        part = saved if box == whole(saved.shape) else part_at(saved, box)

        def put() -> None:
            if put_converted(local, part):
                self._lossy.append(at.name)

        if local.numel():
            self._actions.append(put)

    def _note_kept(self, tensor: torch.Tensor) -> None:
        """Records a tensor that stays as it is because of its shape, unless this is an error."""
        if self._keeps:
            self._kept[identity_of(tensor)] = self._filling.mismatched

    def _put_part(self, tensor: Any, parted: Parted, at: At) -> None:
        """Adds an action that fills this rank's part of a DTensor with the saved part."""
        if not is_sharded(tensor) or tuple(tensor.shape) != parted.shape:
            kind = "DTensor" if is_sharded(tensor) else type(tensor).__name__
            text = (
                f"{at} is a {kind} of shape {[*tensor.shape]}, but the checkpoint has a DTensor of "
                f"shape {[*parted.shape]}, whose parts are of the class {parted.spread.kind}"
            )
            if tuple(tensor.shape) == parted.shape:
                self._filling.misfits.append(text)
            else:
                self._filling.note_mismatch(at.name, text)
                self._note_kept(tensor)
            return
        local, box = dtensor_part(str(at), tensor)
        if (part := self._additions.part(parted, box)) is not None:
            self._actions.append(lambda: put_converted(local, part))

    def _stateful(self, value: Any, saved: Any, at: At, depth: int) -> None:
        """Restores an object by its load_state_dict(), after its tensors are filled in place."""
        value = unwrapped(value)
        if isinstance(value, torch.optim.Optimizer):
            self._later.append(
                (self._fit, value, saved, at, depth)
            )  # when all parameters are known
            return
        self._within += 1
        self._stateful_in(value, saved, at, depth)
        self._within -= 1

    def _stateful_in(self, value: Any, saved: Any, at: At, depth: int) -> None:
        """Restores an object with the state that it saved, keeping its own tensors where it has
        them.
        """
        own, nest = value.state_dict(), nest_of(saved)
        if not isinstance(own, dict) or not (own or nest is not None):
            if self._takes(saved, at):
                self._give(value, self._loaded(saved, at), at)
            return
        is_there = saved is not _ABSENT
        if is_there and nest is None:
            raise self._misfit(f"{at} has a dict, but the checkpoint has {described(saved)}")
        nest = {} if nest is None else nest
        if isinstance(value, torch.optim.Optimizer):
            if is_there and counts_parameters(value) and sizes(nest) != sizes(own):
                self._filling.misfits.append(other_parameters(at, own, nest))
                return
            if is_there and counts_parameters(value):  # it drops the state that it had
                self._filling.optimizers[at.name] = set()
            had, (nest, staying) = own, self._with_kept_state(value, own, nest, at)
            own = completed(value, own, nest)
            own = own | {"state": own["state"] | staying} if staying else own
        elif not isinstance(value, torch.nn.Module):
            self._note_optimizer(own, nest, at)
        own = copied(own)  # it may be the very dict that the object keeps its state in
        count, targets = self._taken, len(self.names_of_targets)
        replaced = dict[Any, torch.Tensor]()
        if isinstance(value, torch.nn.Module):
            replaced = self._module(value, own, nest, at, depth)
        elif is_there and self._asks_for_all(at):
            with self._fitting(self._fit.without_only()):
                self._has(saved, at)
                self._replace_dict(own, nest, at, depth)
        else:
            self._match_dict(own, nest, at, depth)
        if isinstance(value, torch.optim.Optimizer):  # it has no tensors that were only made here
            names = {*names_within(had, at)}
            new = [name for name in self.names_of_targets[targets:] if name in names]
            self.names_of_targets[targets:] = new
        if is_there and (self._taken > count or self._fit.only is None):
            self._give(value, own, at, replaced)

    def _with_kept_state(
        self, optimizer: torch.optim.Optimizer, own: dict[str, Any], saved: dict[str, Any], at: At
    ) -> tuple[dict[str, Any], dict[Any, Any]]:
        """Records the state of those parameters of an optimizer that stay as they are. Returns the
        saved state without these, and what the optimizer has for them.
        """
        theirs, mine = nest_of(saved.get("state")), own.get("state")
        may_stay = self._keeps or self._kept or self._left_out
        if not may_stay or theirs is None or not isinstance(mine, dict):
            return saved, {}
        self._note_optimizer(own, saved, at)
        staying, rest = dict[Any, Any](), dict(theirs)
        for number, parameter in parameters_of(optimizer, own).items():
            name = at.of("state").of(number).name
            keys = (id(parameter), identity_of(parameter))
            lists = [self._kept.get(keys[0]), self._kept.get(keys[1]), self._kept_state.get(name)]
            lists += [self._missing] if name in self._left_out else []
            first = next((its for its in lists if its is not None), None)
            if first is None:
                continue
            self._kept_state[name] = first
            is_saved = rest.pop(number, None) is not None
            if is_saved and first is self._filling.mismatched and not self._keeps:
                text = "is the state of an optimizer for a tensor of another shape"
                self._filling.note_mismatch(name, f"{name!r} {text} in the checkpoint")
            elif number in mine:
                staying[number] = mine[number]
                stay = self._filling.optimizers.get(at.name, set())
                stay.update(names_within(mine[number], at.of("state").of(number)))
            elif is_saved:
                first.append(name)
        return saved | {"state": rest | {key: {} for key in staying}}, staying

    def _module(
        self,
        module: torch.nn.Module,
        own: dict[Any, Any],
        saved: Mapping[Any, Any],
        at: At,
        depth: int,
    ) -> dict[Any, torch.Tensor]:
        """Visits the state_dict of a module, in which the names are fixed. Returns its tensors in
        whose place the dict gets others, for code of the module's own.
        """
        selected = {key: item for key, item in own.items() if self._fit.asks_for(at.of(key).name)}
        new = adapted(module, selected, lambda key: saved_shape(saved.get(key)))
        replaced = {key: own[key] for key in new}
        own.update(new)
        unknown = [key for key in saved if key not in own and self._fit.asks_for(at.of(key).name)]
        if self._fit.unexpected is None:
            own.update(dict.fromkeys(unknown))  # load_state_dict() decides whether they fit
        self._match_dict(own, saved, at, depth, is_module=True)
        are_any = bool(self._kept or replaced)
        for key, parameter in module.named_parameters(remove_duplicate=False) if are_any else ():
            name = self._kept.get(identity_of(own[key])) if key in own else None
            if key in replaced and not torch.nn.parameter.is_lazy(parameter):
                name = self._filling.mismatched
            if name is not None:
                self._kept[id(parameter)] = name  # a part of a DTensor may have no memory
        if unknown and is_strict(module) and self._fit.unexpected is None:
            names = listed(repr(at.of(key).name) for key in unknown)
            raise self._misfit(
                f"{at} is a module without {names}, which the checkpoint has: restore into a dict "
                "of the values that you want, or pass unexpected='ignore'"
            )
        return replaced

    def _give(
        self, value: Any, state_dict: Any, at: At, replaced: Mapping[Any, torch.Tensor] = {}
    ) -> None:
        """Adds an action that makes an object load a state, after everything has been read."""

        def give() -> None:
            try:
                refused = load(value, state_dict, replaced, self._keeps)
                self._filling.mismatched += [at.of(key).name for key in refused]
            except Exception as error:
                kind = type(value).__name__
                message = f"{at}, {kind}, rejected its state from {self._where!r}: {error}"
                raise retold(error, message) from error

        (self._last if isinstance(value, Generators) else self._actions).append(give)

    def _optimizer(self, value: torch.optim.Optimizer, saved: Any, at: At, depth: int) -> None:
        """Restores an optimizer completely or not at all: its parameters have numbers instead of
        names, and it cannot continue with half of its state.
        """
        if not self._asks_for_all(at):
            # Whoever asks for a part of it has not mistyped a name.
            inside = names_within(value.state_dict(), at)
            self._was_asked = self._was_asked or any(map(self._fit.asks_for, inside))
            return
        if not self._has(saved, at):
            self._filling.optimizers[at.name] = {*names_within(value.state_dict(), at)}
            return
        theirs = unescaped(saved)
        if not isinstance(theirs, dict) or sizes(theirs) != sizes(value.state_dict()):
            self._filling.misfits.append(other_parameters(at, value.state_dict(), theirs))
            return
        with self._fitting(Fit(dtype=self._fit.dtype)):
            self._stateful_in(value, saved, at, depth)

    def _loaded(self, saved: Any, at: At) -> Any:
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
