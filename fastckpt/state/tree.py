"""A training state as a tree, whose leaves are tensors of the shards, or objects.

The module takes a state apart into named tensors with their places in global tensors, values of
single ranks, and a nest of everything else. It also puts values back into that nest. It must not
know files, which rank writes what, or how ranks communicate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats import safetensors
from fastckpt.formats.strict_json import check_text, check_texts
from fastckpt.formats.torch_pickle import Pickled, pickles
from fastckpt.formats.torch_zip import SMALL_BYTES, SMALL_SUM_BYTES_MAX
from fastckpt.formats.value_names import below, items_in, joined, key_among
from fastckpt.plan.boxes import Box, whole
from fastckpt.state.dtensors import (
    PARTS,
    SPREAD,
    Part,
    Parts,
    Spread,
    part_kind,
    shape_of,
    spread_of,
    wraps_others,
)
from fastckpt.state.kinds import (
    NO_MEMORY,
    PLAIN_TENSORS,
    is_of_several_ranks,
    is_sharded,
    memory_of,
)

TENSOR, PER_RANK, ESCAPED = "fastckpt.tensor", "fastckpt.per_rank", "fastckpt.escaped"
_PLACEHOLDERS = frozenset({TENSOR, PER_RANK, ESCAPED})
DEPTH_MAX = 200
_PICKLED_BYTES_MAX = 64 << 10  # of all objects, for that comparison
_NESTS = (dict, OrderedDict, list, tuple)
ATOMS = frozenset({int, float, bool, str, bytes, type(None)})  # long lists are made of these


# Makes a rank's value of those that all ranks had saved, given the rank and the number of ranks.
Merge: TypeAlias = Callable[[list[Any], int, int], Any]


class PerRank:
    """A value that is specific to each rank, such as the state of a random generator.

    restore() gives each rank the value that the same rank saved. On a rank that the saving job did
    not have, `value` stays unchanged and `found` is False. If another number of ranks saved,
    restore() gives the result of `merge` for the values of all ranks; without `merge`, it warns.

    Args:
        merge: a function that returns this rank's value, for example lambda values, rank,
            world_size: sum(values) // world_size. Its arguments are the list of saved values in the
            order of ranks, this rank, and the present number of ranks. Either all ranks pass a
            function, or none does.

    Attributes:
        value: any value that can be pickled, or an object with state_dict and load_state_dict,
            which save and restore its state.
        found: whether the checkpoint has a value for this rank; None before restore() or load().
    """

    __module__ = "fastckpt"  # pickles name the class by this, wherever it is defined

    def __init__(self, value: Any = None, *, merge: Merge | None = None) -> None:
        self.value = value
        self.merge = merge
        self.found: bool | None = None
        self.read_saved: Callable[[], list[Any]] = list

    @property
    def saved(self) -> list[Any]:
        """The values of all ranks of the job that saved, in the order of ranks, from the checkpoint
        last restored or loaded. They are read at each access. The list is empty before a restore,
        and in a copy of this object.

        Raises the errors of restore(); also CheckpointError if the step has been removed since.
        """
        return self.read_saved()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for a copy or a pickle, without the function that reads `saved`,
        because it only works in this job.
        """
        return {**self.__dict__, "read_saved": list}

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class TensorFacts(NamedTuple):
    """The facts that ranks know about a tensor that they do not hold. For `placement` and `spread`
    see Part; `spread` is None for a plain tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    placement: str
    spread: str | None


class OfSomeRanks(NamedTuple):
    """A tensor that only some ranks of the group hold, such as those of a pipeline stage.

    Attributes:
        ranks: the ranks that hold it, ascending.
        tensor: the tensor on these ranks; None on the others.
        facts: the tensor's facts on the other ranks.
    """

    ranks: tuple[int, ...]
    tensor: Any
    facts: TensorFacts | None = None


class Stored(NamedTuple):
    """The key, dtype and shape of a tensor of the shards, as stored in its placeholder."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_of(value: object) -> Stored | None:
    """Returns the tensor that a placeholder represents; None if the value is not a placeholder.

    Raises CorruptCheckpoint for a placeholder that flatten() does not create.
    """
    if type(value) is not dict or TENSOR not in value:
        return None
    key, dtype, shape = value[TENSOR], value.get("dtype"), value.get("shape")
    try:
        if not isinstance(key, str):
            raise ValueError("its key is not a string")
        check_text(key)
        kind = safetensors.kind_of(dtype, shape, key)
    except ValueError as error:
        raise CorruptCheckpoint(f"a placeholder for a tensor is malformed: {error}") from None
    return Stored(key, safetensors.DTYPES[str(dtype)], kind.shape)


def _placeholder(leaf: Leaf) -> dict[str, Any]:
    dtype = safetensors.NAMES[leaf.local.dtype]
    entry = {TENSOR: leaf.key, "dtype": dtype, "shape": list(leaf.shape)}
    return entry if leaf.spread is None else entry | _spread(leaf.spread, leaf.local)


def _spread(spread: str, local: torch.Tensor) -> dict[str, Any]:
    """Returns the entries of a DTensor's placeholder about its spread."""
    kind = type(local)
    return {SPREAD: spread} if kind in PLAIN_TENSORS else {SPREAD: spread, PARTS: kind.__qualname__}


class Parted(NamedTuple):
    """A DTensor whose parts are saved as values of single ranks, as stored in its placeholder.

    Attributes:
        name: the name of the values. Each is a dict of the part and its place: {"local": ...,
            "offsets": ...}.
        shape: the shape of the complete tensor.
        spread: its spread over a mesh.
    """

    name: str
    shape: tuple[int, ...]
    spread: Spread


def parted_of(value: object) -> Parted | None:
    """Returns the DTensor that a placeholder represents, if its parts are values of single ranks.

    Raises CorruptCheckpoint for a placeholder that flatten() does not create.
    """
    if type(value) is not dict or not isinstance(value.get(PER_RANK), str):
        return None
    spread = spread_of(value)
    return None if spread is None else Parted(value[PER_RANK], shape_of(value), spread)


class Leaf(NamedTuple):
    """One tensor of the shards, as this rank holds it.

    Attributes:
        key: its name, unique in the state: path components joined by "/".
        local: the part in this rank's memory; its sizes are the box's.
        shape: the shape of the global tensor.
        box: the part of the global tensor that `local` is.
        holders: the ranks that hold the same part, ascending; a tuple shared between leaves.
        placement: a description of how the global tensor is spread; equal on all ranks.
        spread: the spread of a DTensor, for its placeholder; None for other tensors.
    """

    key: str
    local: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...]
    placement: str
    spread: str | None = None


class TensorSpec(NamedTuple):
    """The type of a tensor that only the first rank stores. It must be the same on all ranks."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def text(self) -> tuple[str, str]:
        """Returns the tensor's name, and a text of its dtype and shape."""
        return self.name, f"{str(self.dtype)[6:]} {list(self.shape)}"


@dataclass
class Flat:
    """A state taken apart.

    Attributes:
        leaves: the tensors for the shards, in the order of the state.
        objects: the state, with placeholders in place of leaves and values of single ranks.
        per_rank: this rank's values, by name.
        kinds: the types of the tensors that stay in `objects`, except those inside other objects.
        aside: values in `objects` that ranks compare, by name; empty if one rank saves. These are
            plain values, the keys of dicts (a frozenset), the type, length and plain items of lists
            and tuples (a tuple), NumPy arrays, pickles of other objects, which never change, and
            small tensors.
    """

    leaves: list[Leaf] = field(default_factory=list)
    objects: Any = None
    per_rank: dict[str, PerRank] = field(default_factory=dict)
    kinds: list[TensorSpec] = field(default_factory=list)
    aside: dict[str, Any] = field(default_factory=dict)


class Stateful(Protocol):
    """An object with a state_dict() that saves it and a load_state_dict() that restores it."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


# A Checkpointer restores these in place; a tuple, if its items are of these types.
State: TypeAlias = dict[Any, Any] | list[Any] | tuple[Any, ...] | torch.Tensor | PerRank | Stateful


def is_stateful(value: object) -> bool:
    """Returns whether an object is Stateful. Classes themselves are not."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def unwrapped(value: Any) -> Any:
    """Returns the module inside a DistributedDataParallel, whose keys lack the prefix; else the
    value.
    """
    if isinstance(value, torch.nn.parallel.DistributedDataParallel):
        return value.module
    return value


def flatten(
    state: object,
    rank: int,
    world_size: int,
    *,
    first_rank: frozenset[str] = frozenset(),
    rank_of: Mapping[int, int] | None = None,
    checks_numbers: bool = False,
    apart: Collection[str] = (),
) -> Flat:
    """Takes a state apart.

    Args:
        state: nested dicts, lists and tuples of tensors, DTensors, PerRank, objects with state_dict
            and load_state_dict, and any values that can be pickled.
        rank, world_size: this rank and the number of ranks of the group that saves; plain tensors
            are the same on all its ranks.
        first_rank: keys of tensors of which only the first rank's copy is saved.
        rank_of: maps global ranks to ranks in the group; None if they are the same.
        checks_numbers: whether small floating-point tensors are also put into shards, where the
            first rank's numbers can be checked.
        apart: keys of the state; what is under one of them shares no leaf with what is not.

    Raises:
        TypeError: the state contains a ShardedTensor, a tensor without memory, or a DTensor that
            cannot be saved: because of its placement or dtype, because its mesh has other ranks
            than the group, or because it is inside a pickled object.
        ValueError: the state is nested too deeply or contains itself, or a path in it is not
            Unicode.
    """
    return _Flattening(rank, world_size, first_rank, rank_of, checks_numbers, apart).run(state)


def comparable(
    leaves: Sequence[Leaf], world_size: int, first_rank: Collection[str]
) -> list[tuple[str, int, int]]:
    """Returns key, address and size of the tensors that should be the same on all ranks, of which
    samples are compared. They include those in `first_rank`, of which only the first rank's copy is
    saved.
    """
    return [
        (leaf.key, leaf.local.data_ptr(), leaf.local.numel() * leaf.local.element_size())
        for leaf in leaves
        if len(leaf.holders) == world_size > 1 or (leaf.holders == (0,) and leaf.key in first_rank)
    ]


class _Small(NamedTuple):
    """A tensor that is too small for the shards, except if there are too many such tensors."""

    tensor: torch.Tensor
    name: str


class _Flattening:
    """The working state of one call of flatten()."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        first_rank: frozenset[str],
        rank_of: Mapping[int, int] | None,
        checks_numbers: bool,
        apart: Collection[str],
    ) -> None:
        self.rank, self.checks_numbers, self.first_rank = rank, checks_numbers, first_rank
        self.apart = apart
        self.parts = Parts(world_size, rank_of)
        self.is_one_of_several = world_size > 1
        self.pickled_left = _PICKLED_BYTES_MAX if world_size > 1 else 0
        self.flat, self.keys, self.small = Flat(), set[str](), list[_Small]()
        self.boxes: dict[tuple[int, ...], Box] = {}  # of whole tensors, by their shape
        self.leaf_of: dict[tuple[Any, ...], Leaf] = {}
        self.own_parts: dict[Any, dict[str, Any]] = {}  # placeholders, by identity of the tensor
        self.searched: dict[int, Any] = {}  # keeps objects alive, so that their ids stay theirs
        self.above: dict[int, str | None] = {}  # names of what is being visited, by identity

    def run(self, state: object) -> Flat:
        nest = self.visit(state, None, 0)
        sizes = [item.tensor.nbytes for item in self.small]
        remaining, moved = sum(sizes), set()
        for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
            if remaining <= SMALL_SUM_BYTES_MAX:
                break
            remaining -= sizes[number]
            moved.add(id(self.small[number]))
        self.flat.kinds += [
            TensorSpec(item.name, item.tensor.dtype, item.tensor.shape)
            for item in self.small
            if id(item) not in moved
        ]
        if self.is_one_of_several:
            rest = (its for its in self.small if id(its) not in moved)
            self.flat.aside |= {its.name: its.tensor for its in rest if its.tensor.is_contiguous()}
        self.flat.objects = self.settled(nest, moved)
        check_texts(self.keys)  # ValueError now, rather than when they are written
        return self.flat

    def settled(self, value: Any, moved: set[int]) -> Any:
        """Returns the nest with its small tensors; those in `moved` are replaced by
        placeholders.
        """
        if type(value) is _Small:
            if id(value) in moved:
                return _placeholder(self._leaf(value.tensor, value.name))
            return _apart(value)
        if type(value) is dict:
            return {k: self.settled(v, moved) for k, v in value.items()}
        if type(value) is list:
            return [v if type(v) in ATOMS else self.settled(v, moved) for v in value]
        if type(value) is tuple:
            return tuple(self.settled(v, moved) for v in value)
        return value

    def visit(self, value: Any, name: str | None, depth: int) -> Any:
        """Returns the value or placeholder for the place of a value; `name` is None for the state
        itself.
        """
        if depth > DEPTH_MAX:
            raise ValueError(f"state is nested more than {DEPTH_MAX} deep at {name or ''!r}")
        if isinstance(value, torch.Tensor):
            return self._visit_tensor(value, name)
        if type(value) is OfSomeRanks:
            tensor = value.facts if value.tensor is None else value.tensor
            return _placeholder(self._leaf(tensor, name or "", part_of(self.parts, name, value)))
        if isinstance(value, PerRank):
            key = self._unique(name or "")
            self.flat.per_rank[key] = value
            return {PER_RANK: key}
        if type(value) not in _NESTS and not is_stateful(value):
            return self._as_it_is(value, name)
        if id(value) in self.above:
            raise _contains_itself(name or "", self.above[id(value)])
        self.above[id(value)] = name
        nest: Any
        if type(value) in (dict, OrderedDict):
            self._note(name, frozenset(value))
            nest = {k: self.visit(v, below(name, str(k)), depth + 1) for k, v in value.items()}
            nest = {ESCAPED: nest} if nest.keys() & _PLACEHOLDERS else nest
        elif type(value) in (list, tuple):
            is_plain = {*map(type, value)} <= ATOMS
            plain = value if is_plain else (v for v in value if type(v) in ATOMS)
            self._note(name, (type(value).__name__, len(value), *plain))
            nest = (
                [*value]
                if is_plain
                else [
                    v if type(v) in ATOMS else self.visit(v, below(name, str(i)), depth + 1)
                    for i, v in enumerate(value)
                ]
            )
            nest = nest if type(value) is list else tuple(nest)
        else:
            nest = self.visit(unwrapped(value).state_dict(), name, depth + 1)
        del self.above[id(value)]
        return nest

    def _visit_tensor(self, value: Any, name: str | None) -> Any:
        if not is_sharded(value):
            if not (type(value) in PLAIN_TENSORS and safetensors.fits(value)):
                return self._as_it_is(value, name)
            if value.nbytes < SMALL_BYTES:
                if self.checks_numbers and value.is_floating_point():
                    return _placeholder(self._leaf(value, name or "", is_small=True))
                self.small.append(_Small(value, name or ""))
                return self.small[-1]
            return _placeholder(self._leaf(value, name or ""))
        part = self.parts.of(name or "", value)
        if wraps_others(part.local):
            return self._own_part(value, part, name or "")
        return _placeholder(self._leaf(value, name or "", part))

    def _own_part(self, tensor: Any, part: Part, name: str) -> dict[str, Any]:
        """Adds a DTensor's part to the values of this rank, because shards cannot hold it."""
        identity = key_among(self.apart, name), id(tensor)
        if identity not in self.own_parts:
            key = self._unique(name)
            value = {"local": part.local.detach(), "offsets": [*part.box.offsets]}
            self.flat.per_rank[key] = PerRank(value)
            entry = {PER_RANK: key, "shape": [*tensor.shape], **_spread(part.spread, part.local)}
            self.own_parts[identity] = entry  # self.parts keeps it alive
        return self.own_parts[identity]

    def _as_it_is(self, value: Any, name: str | None) -> Any:
        """Returns a value that the first rank pickles in one piece; raises an error if it contains
        DTensors.
        """
        kind = type(value)
        if kind in ATOMS:
            self._note(name, value)
        elif self.is_one_of_several and kind.__module__ == "numpy":
            is_small = 0 < getattr(value, "nbytes", 0) <= SMALL_BYTES
            if is_small and not value.dtype.hasobject:
                self._note(name, value.copy())
        if kind in PLAIN_TENSORS:
            if not value.is_nested:
                self.flat.kinds.append(TensorSpec(name or "", value.dtype, value.shape))
        elif kind not in _WITHOUT_TENSORS and id(value) not in self.searched:
            self.searched[id(value)] = value
            dtensor, content = pickles(value, is_of_several_ranks, self.pickled_left)
            if content and not isinstance(value, torch.Tensor):
                self.pickled_left -= len(content)
                self.flat.aside.setdefault(name or "", Pickled(content))
            if dtensor is not None:
                where = "the state" if name is None else repr(name)
                inside = "" if dtensor is value else f" inside a {type(value).__name__}"
                raise TypeError(
                    f"{where} is a {type(dtensor).__name__}{inside}, and only this rank's part of "
                    "it would be saved: put DTensors into plain dicts, lists and tuples"
                )
        return value

    def _note(self, name: str | None, its: Any) -> None:
        """Records a value that ranks compare."""
        if self.is_one_of_several:
            self.flat.aside[name or ""] = its

    def _unique(self, name: str) -> str:
        key, number = name, 1
        while key in self.keys:  # 0 and "0" are two keys of a dict
            number += 1
            key = f"{name}#{number}"
        self.keys.add(key)
        return key

    def _leaf(
        self, tensor: Any, name: str, part: Part | None = None, is_small: bool = False
    ) -> Leaf:
        """Adds a leaf for a tensor, or for a part of a DTensor, and returns it. A tensor that
        occurs twice in the state gets one leaf. Of a small tensor, only the first rank's copy is
        saved.
        """
        everybody, spread = self.parts.everybody, None
        if part is not None:
            local, box, holders, placement, spread, identity = part
            local, shape, spread = local.detach().resolve_neg(), tuple(tensor.shape), spread or None
        else:
            memory, placement, holders = memory_of(tensor), "replicated", everybody
            if memory is None:
                raise _no_memory(name)
            identity, local, box = memory, tensor.detach(), self._whole(tensor.shape)
            shape = box.sizes
        identity = (key_among(self.apart, name), *identity)
        if identity in self.leaf_of:
            return self.leaf_of[identity]
        key = self._unique(name)
        if is_small or (holders is everybody and key in self.first_rank):
            holders = (0,)
        leaf = Leaf(key, local, shape, box, holders, placement, spread)
        self.flat.leaves.append(leaf)
        self.leaf_of[identity] = leaf
        return leaf

    def _whole(self, shape: tuple[int, ...]) -> Box:
        box = self.boxes.get(shape)
        if box is None:
            box = self.boxes[shape] = whole(shape)
        return box


def part_of(parts: Parts, name: str | None, value: OfSomeRanks) -> Part:
    """Returns this rank's part of a tensor that some ranks hold; it is empty if this rank holds
    none.

    Raises:
        TypeError: shards cannot hold the tensor.
    """
    holders, tensor, key = parts.some(value.ranks), value.tensor, name or ""
    if tensor is None:
        assert value.facts is not None
        dtype, shape, placement, spread = value.facts
        nothing = torch.empty(0, dtype=dtype, device="cpu")
        nowhere = (0,) * len(shape)
        return Part(nothing, Box(nowhere, nowhere), holders, placement, spread or "", (id(value),))
    if is_sharded(tensor):
        part = parts.of(key, tensor, holders)
        if wraps_others(part.local):
            raise TypeError(f"{key!r} is a {part_kind(tensor)}, and only some ranks hold it")
        return part._replace(identity=(id(value),))
    if not (type(tensor) in PLAIN_TENSORS and safetensors.fits(tensor)):
        raise TypeError(f"{key!r} is a {type(tensor).__name__}, which shards cannot hold")
    placement = f"replicated on the ranks {holders}"
    return Part(tensor, whole(tensor.shape), holders, placement, "", (id(value),))


def facts_of(parts: Parts, name: str, value: OfSomeRanks) -> TensorFacts:
    """Returns the facts of a tensor that this rank holds, for the ranks that do not."""
    part = part_of(parts, name, value)
    return TensorFacts(
        part.local.dtype, tuple(value.tensor.shape), part.placement, part.spread or None
    )


# Types that are common in states and hold no tensor, whatever they are.
_WITHOUT_TENSORS = ATOMS | {complex, type, torch.dtype, torch.device, torch.Size}


def _apart(small: _Small) -> torch.Tensor:
    """Returns a small tensor, copied if its storage is large, because pickle writes entire
    storages.
    """
    nbytes = small.tensor.untyped_storage().nbytes()
    if not nbytes:  # no reader could make a tensor of what would be pickled
        raise _no_memory(small.name)
    return small.tensor if nbytes < SMALL_BYTES else small.tensor.detach().clone()


def _no_memory(name: str) -> TypeError:
    return TypeError(f"{name!r} is {NO_MEMORY}: gather it before it is saved")


def _contains_itself(name: str, above: str | None) -> ValueError:
    """Returns the error for a value that contains itself, with the names of both places."""
    where = f"the value at {above!r}" if above else "the state"
    return ValueError(f"state contains itself: the value at {name!r} is {where} again")


def tensors_in(state: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yields the tensors of a nest of dicts, lists, tuples and objects with state_dict(), each with
    the keys that lead to it.

    Raises:
        ValueError: the nest is nested too deeply, or contains itself.
    """
    above: dict[int, tuple[str, ...]] = {}

    def visit(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        if len(keys) > DEPTH_MAX:
            raise ValueError(f"state is nested more than {DEPTH_MAX} deep at {joined(keys)!r}")
        if isinstance(value, torch.Tensor):
            yield keys, value
            return
        if id(value) in above:
            raise _contains_itself(joined(keys), joined(above[id(value)]))
        above[id(value)] = keys
        nest = unwrapped(value).state_dict() if is_stateful(value) else value
        if isinstance(nest, dict | list | tuple):
            for key, item in items_in(nest):
                yield from visit(item, (*keys, str(key)))
        del above[id(value)]

    yield from visit(state, ())


def fill(
    objects: Any,
    tensor: Callable[[Stored, Spread | None], Any],
    per_rank: Callable[[str, Parted | None], Any],
    done: dict[int, Any] | None = None,
) -> Any:
    """Replaces the placeholders that flatten() created with values.

    Args:
        objects: see Flat; read from a file.
        tensor: returns the value for a tensor of the shards; the spread is None for a plain tensor.
        per_rank: returns this rank's value for a name, which may be a part of a DTensor.
        done: containers that were already filled, by identity. A container that occurs many times
            in `objects` is filled once; otherwise a small file could require any amount of memory.

    Raises:
        IncompatibleCheckpoint: the nest is deeper than flatten() permits.
        CorruptCheckpoint: a placeholder is malformed.
    """
    filled: dict[int, Any] = {} if done is None else done

    def visit(value: Any, depth: int) -> Any:
        if depth > 2 * DEPTH_MAX:
            raise IncompatibleCheckpoint("objects are nested too deeply")
        if type(value) not in (dict, list, tuple):
            return value
        if id(value) in filled:
            return filled[id(value)]
        new: Any
        if type(value) is not dict:
            new = [v if type(v) in ATOMS else visit(v, depth + 1) for v in value]
            new = new if type(value) is list else tuple(new)
        elif (stored := stored_of(value)) is not None:
            new = tensor(stored, spread_of(value))
        elif isinstance(value.get(PER_RANK), str):
            new = per_rank(value[PER_RANK], parted_of(value))
        else:
            new = {k: visit(v, depth + 1) for k, v in unescaped(value).items()}
        filled[id(value)] = new
        return new

    return visit(objects, 0)


class OwnValues(NamedTuple):
    """The values of single ranks in a step, as one rank restores them.

    Attributes:
        own: this rank's values, by name; None if the saving job had no such rank.
        rank, world_size: those of this job.
        saving_ranks: the number of ranks of the saving job.
        of_all: reads the values of all ranks of that job for a name.
    """

    own: Mapping[str, Any] | None
    rank: int
    world_size: int
    saving_ranks: int
    of_all: Callable[[str], list[Any]]

    def value(self, name: str, _parted: Parted | None = None) -> PerRank:
        """Returns a PerRank with the value that this rank saved under `name`, if there is one. For
        a DTensor, the value is a dict of its part (see Parted).
        """
        result = PerRank()
        result.found = self.own is not None and name in self.own
        result.value = self.own[name] if self.own is not None and result.found else None
        result.read_saved = partial(self.of_all, name)
        return result


def unescaped(value: Any) -> Any:
    """Returns the original dict if a user's dict that looked like a placeholder was escaped;
    returns other values unchanged.
    """
    if type(value) is dict and len(value) == 1 and type(value.get(ESCAPED)) is dict:
        return value[ESCAPED]
    return value
