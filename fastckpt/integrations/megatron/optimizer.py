"""The state of Megatron's distributed optimizer, saved by bucket and loaded onto any parallel
sizes.

Responsible for the map of each parameter's location, which is saved with the buckets, and for
loading each rank's part with this map when parallel sizes have changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import (
    HAVE_APEX_OR_TE,
    DistributedOptimizer,
)
from torch.distributed.checkpoint.metadata import Metadata

from fastckpt import IncompatibleCheckpoint
from fastckpt.integrations.megatron.reshard import Catalog, Piece, Uncovered
from fastckpt.integrations.megatron.stored_buckets import (
    MAP,
    ONE_OF_ONE,
    BucketCopy,
    StoredBuckets,
    identity,
)

CONTENT, SHARDING = "content_metadata", "distrib_optim_sharding_type"


def distributed(optimizer: Any) -> list[tuple[str, DistributedOptimizer]]:
    """Returns the distributed optimizers in an optimizer, each with the prefix of its saved
    keys.
    """
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    prefixes = [f"chained_{n}." for n in range(len(chained))] if len(chained) > 1 else [""]
    return [
        (f"{prefix}optimizer.distributed.dp_group_idx_{each.data_parallel_group_idx}", each)
        for prefix, each in zip(prefixes, chained, strict=True)
        if isinstance(each, DistributedOptimizer)
    ]


def saved_maps(optimizer: Any, model_state: ShardedStateDict) -> list[ShardedObject]:
    """Returns the maps to save with the buckets, so that the buckets can be resharded. model_state
    is the model's sharded state dict before its factories are applied.

    Raises:
        IncompatibleCheckpoint: a factory does more than split a parameter.
    """
    sharded = _sharded_of(model_state)
    return [
        ShardedObject(
            f"{group}.{MAP}",
            {name: [tuple(piece) for piece in pieces] for name, pieces in arrays.items()},
            (1,),
            (0,),
            replica_id=(each.distributed_optimizer_instance_id, 0, each.data_parallel_group.rank()),
        )
        for group, each in distributed(optimizer)
        for arrays in [_arrays(group, each, sharded)]
    ]


def has_maps(metadata: Metadata) -> bool:
    """Whether a checkpoint's buckets can be resharded."""
    return any(key.endswith(f".{MAP}{ONE_OF_ONE}") for key in metadata.state_dict_metadata)


def allocate(optimizer: Any) -> None:
    """Allocates the state of torch's Adam, if it has none, for loading to overwrite.

    Megatron itself does this for other optimizers, but would fail without Adam's "step".
    """
    for _group, each in distributed(optimizer):
        if not HAVE_APEX_OR_TE and not each.optimizer.state:
            each._init_optimizer_states_with_dummy_values()


def part_steps(optimizer: Any) -> None:
    """Gives each state its own "step" tensor. Megatron's load_state_dict shares one tensor between
    all states, and torch's Adam would then increment it once for each state.
    """
    for _group, each in distributed(optimizer):
        for state in each.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


@contextmanager
def steps_known(optimizer: Any) -> Iterator[None]:
    """Makes Megatron's own loading work with torch's Adam in the body.

    Adam's state has a "step", which checkpoints store only in the parameter groups. Megatron does
    not find it in fully_reshardable state, and in dp_reshardable state keeps the old "step".
    """
    patched = [each for _group, each in distributed(optimizer) if not HAVE_APEX_OR_TE]
    for each in patched:

        def put(param: Any, tensors: dict[str, Any], each: Any = each) -> None:
            state = type(each)._get_main_param_and_optimizer_states(each, param)
            rest = {"step": state["step"]} if "step" in state else {}
            type(each)._set_main_param_and_optimizer_states(each, param, {**tensors, **rest})

        each._set_main_param_and_optimizer_states = put
    try:
        yield
    finally:
        for each in patched:
            del each._set_main_param_and_optimizer_states


def prepare_load(optimizer: Any) -> None:
    """Makes Megatron's next load of an optimizer work with torch's Adam."""
    if HAVE_APEX_OR_TE or not distributed(optimizer):
        return
    allocate(optimizer)

    def load_state_dict(state: Any) -> None:
        del optimizer.load_state_dict
        with torch.no_grad(), steps_known(optimizer):  # float32 parameters are the optimizer's own
            optimizer.load_state_dict(state)
        part_steps(optimizer)

    optimizer.load_state_dict = load_state_dict


def load_buckets(
    optimizer: Any,
    model_state: ShardedStateDict,
    directory: str,
    metadata: Metadata,
    weights_only: bool = True,
) -> int:
    """Loads this rank's part of dp_reshardable state that was saved with its maps, into the
    optimizer's tensors (see allocate()). Returns the number of bytes of state that were requested.

    Raises:
        IncompatibleCheckpoint: the checkpoint lacks the state of some parameters, which the message
            names.
        CorruptCheckpoint: bytes differ from those that were written.
    """
    stored = StoredBuckets(directory, metadata, weights_only)
    sharded = _sharded_of(model_state)
    loads: list[tuple[Any, Any, dict[str, torch.Tensor]]] = []
    copies: list[BucketCopy] = []
    for group, each in distributed(optimizer):
        arrays = _arrays(group, each, sharded)
        catalog, groups = Catalog(stored.arrays(group, arrays)), set()
        runs_of = []
        for param, at in _own_ranges(each):
            runs = _runs(catalog, _pieces(param, sharded), at.start, at.end, sharded[param])
            runs_of.append((param, runs))
            groups |= {name.partition(".gbuf_idx_")[0] for name in runs}
        _load_groups(each, stored.load_state(sorted(groups) or stored.groups[:1]))
        for param, runs in runs_of:
            tensors = each._get_main_param_and_optimizer_states(param)
            loads.append((each, param, tensors))
            for state, tensor in tensors.items():
                if state != "step":
                    copies += [BucketCopy(f"{name}.{state}", tensor, r) for name, r in runs.items()]
                    if sum(r.size for r in runs.values()) < tensor.numel():
                        tensor.zero_()  # the vocabulary has more padding than the saved one
    stored.read(copies)
    for each, param, tensors in loads:
        each._set_main_param_and_optimizer_states(param, tensors)
    return sum(copy.runs.size * copy.tensor.element_size() for copy in copies)


def _load_groups(optimizer: DistributedOptimizer, state: dict[str, Any]) -> None:
    """Loads the stored parameter groups into an optimizer. A group that is not stored is kept, with
    the stored step.
    """
    groups = state["optimizer"]["param_groups"]
    identities = {identity(values) for values in groups}
    steps = {"step": groups[0]["step"]} if groups and "step" in groups[0] else {}
    for own in optimizer.optimizer.param_groups:
        if identity(own) not in identities:
            groups.append({name: own[name] for name in own if name != "params"} | steps)
    optimizer.load_state_dict(state)


def _own_ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[Any, Any]]:
    """Yields each parameter that this rank holds a range of, with the range."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    yield param, ranges["param"]


def _sharded_of(model_state: ShardedStateDict) -> dict[Any, Any]:
    """Returns each parameter's ShardedTensor or ShardedTensorFactory."""
    values, _others = extract_sharded_tensors_and_factories(model_state)
    return {value.data: value for value in nested_values(values)}


def _arrays(
    group: str, optimizer: DistributedOptimizer, sharded: Mapping[Any, Any]
) -> dict[str, list[Piece]]:
    """Returns the pieces in each bucket of a group of ranks, by the bucket's saved name."""
    arrays: dict[str, list[Piece]] = {}
    for number, buffer in enumerate(optimizer.buffers):
        (dtype,) = optimizer.gbuf_ranges[number]
        names = [
            f"{group}.gbuf_idx_{number}.dtype_{dtype}.bucket_idx_{bucket}"
            for bucket in range(len(buffer.buckets))
        ]
        arrays |= {name: [] for name in names}
        for param, (start, _end, bucket) in buffer.param_index_map.items():
            at = start - buffer.buckets[bucket].offset
            arrays[names[bucket]] += [piece.moved(at) for piece in _pieces(param, sharded)]
    return arrays


def _pieces(param: torch.Tensor, sharded: Mapping[Any, Any]) -> list[Piece]:
    """Returns the boxes of global tensors that make up a flat parameter."""
    how = sharded.get(param)
    if how is None:
        raise IncompatibleCheckpoint(
            f"a parameter of shape {tuple(param.shape)} is not in the model's sharded state dict"
        )
    # The factory is called with a tensor without memory. If it only splits, its parts are views of
    # the tensor, whose offsets and strides identify their elements.
    probe = torch.empty(param.shape, dtype=param.dtype, device="meta")
    if isinstance(how, ShardedTensorFactory):
        parts = list(nested_values([how.build_fn(how.key, probe, how.replica_id, None)]))
    else:
        parts = [replace(how, data=probe, dtype=probe.dtype)]
    storage = probe.untyped_storage()._cdata
    if not all(isinstance(part, ShardedTensor) for part in parts) or any(
        part.data.untyped_storage()._cdata != storage for part in parts
    ):
        raise IncompatibleCheckpoint(
            f"{how.key!r} is saved by a factory that does more than split it, so its optimizer "
            "state cannot be resharded: save with distrib_optim_sharding_type='fully_reshardable'"
        )
    return [
        Piece(
            part.key,
            tuple(part.global_offset),
            (1,) * part.prepend_axis_num + tuple(part.local_shape),
            part.data.storage_offset(),
            (0,) * part.prepend_axis_num + tuple(part.data.stride()),
        )
        for part in parts
    ]


def _runs(catalog: Catalog, pieces: list[Piece], start: int, stop: int, how: Any) -> Any:
    partial = bool(getattr(how, "allow_shape_mismatch", False))
    try:
        return catalog.runs(pieces, start, stop, partial=partial)
    except Uncovered as error:
        raise IncompatibleCheckpoint(f"optimizer state cannot be resharded: {error}") from error
