"""What each rank does in the tests of Megatron-core; the module whose functions the ranks call.

Responsible for models and optimizers of the real megatron-core on the CPU, whose values say which
element of which tensor they are, and for telling what came of a save or a load. Must not know what
should come of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from fastckpt import SaveOptions
from tests.crews.group_crew import GROUP_OF_MEMBERS, Member, Outcome, attempt
from tests.kit.doubles import file_size_limit

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import megatron.core.dist_checkpointing as mdc
import megatron_gpt
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, apply_factories
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron_cpu import on_cpu

from fastckpt.integrations import megatron
from fastckpt.integrations.megatron import load
from fastckpt.integrations.megatron import optimizer as optimizers
from fastckpt.integrations.megatron.save import chunks, content_metadata, model_state
from fastckpt.saving import pipeline
from tests.kit.options import gathered

SIZES = (
    parallel_state.get_tensor_model_parallel_world_size,
    parallel_state.get_pipeline_model_parallel_world_size,
    parallel_state.get_virtual_pipeline_model_parallel_world_size,
    parallel_state.get_expert_model_parallel_world_size,
)
TEXT = torch.arange(4096) * 7 % 251


def on_the_cpu(body: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with on_cpu():
            return body(*args, **kwargs)

    inside.__name__ = inside.__qualname__ = body.__name__
    inside.__module__ = body.__module__
    return inside


# Values that tell where they belong.


def numbered(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Of a parameter the same as of the optimizer's copy, which is it itself if it is float32."""
    seed = zlib.crc32(key.removeprefix("optimizer.state.param.").encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected(shard: ShardedTensor) -> torch.Tensor:
    """A shard's part of the numbered tensor of its key."""
    whole = numbered(shard.key, tuple(shard.global_shape))
    box = shard.global_slice()
    return whole[box].reshape(shard.local_shape).to(shard.dtype)


def optimizer_state(model: Any, optimizer: Any, loading: bool) -> Any:
    """As Megatron's own fully_reshardable format has it."""
    metadata = content_metadata("fully_reshardable")
    state = model_state(chunks(model), metadata)
    return optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)


def fill(value: Any) -> Any:
    """A state dict with the numbered values in place of its shards."""
    if isinstance(value, ShardedTensorFactory):
        return value.merge_fn([fill(part) for part in value.build()])
    if isinstance(value, ShardedTensor):
        return expected(value)
    if isinstance(value, dict):
        return {key: fill(each) for key, each in value.items()}
    return value


@torch.no_grad()
def make_numbered(model: Any, optimizer: Any) -> None:
    optimizers.allocate(optimizer)
    with optimizers.steps_known(optimizer):
        optimizer.load_state_dict(fill(optimizer_state(model, optimizer, True)))
    optimizers.part_steps(optimizer)
    for chunk in chunks(model):
        values = fill(chunk.sharded_state_dict(metadata=content_metadata("")))
        chunk.load_state_dict(
            {key: value for key, value in values.items() if isinstance(value, torch.Tensor)},
            strict=False,
        )


@torch.no_grad()
def wrong_keys(model: Any, optimizer: Any) -> list[str]:
    """Keys of shards, of the model and of its optimizer, that are not bit for bit as numbered."""
    state: Any = model_state(chunks(model), content_metadata(""))
    state["optimizer"] = optimizer_state(model, optimizer, False)
    apply_factories(state)
    shards = [each for each in nested_values(state) if isinstance(each, ShardedTensor)]
    assert any(".exp_avg_sq." in shard.key for shard in shards)
    return sorted({s.key for s in shards if not torch.equal(s.data, expected(s))})


def regroup(tp: int, pp: int, vp: int | None = None, ep: int = 1) -> None:
    """Makes way for a parallelism: the groups of another one, each of which has threads, are
    destroyed.
    """
    is_initialized = parallel_state.model_parallel_is_initialized()
    if is_initialized and [size() for size in SIZES] != [tp, pp, vp, ep]:
        parallel_state.destroy_model_parallel()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group.group_desc not in ("default_pg", GROUP_OF_MEMBERS):
                dist.destroy_process_group(group)


def build(tp: int, pp: int, **options: Any) -> tuple[Any, Any, Any]:
    regroup(tp, pp)
    return megatron_gpt.build(tp, pp, **{"hidden": 32, **options})


def ready(tp: int, pp: int) -> tuple[Any, Any, Any]:
    """With state, as if it had been trained: Megatron cannot save an optimizer that never was."""
    model = build(tp, pp)
    optimizers.allocate(model[1])
    return model


def train(model: tuple[Any, Any, Any], first: int, count: int) -> list[str]:
    return [
        megatron_gpt.train_step(*model, megatron_gpt.batch(TEXT, first + number)).hex()
        for number in range(count)
    ]


# What tests call.


@on_the_cpu
def save_numbered(_member: Member, root: str, tp: int, pp: int, options: Any, how: Any) -> None:
    model, optimizer, scheduler = build(tp, pp, **options)
    make_numbered(model, optimizer)
    megatron.save_checkpoint(1, model, optimizer, scheduler, 5, save=root, **how).result(60)


@on_the_cpu
def load_numbered(
    _member: Member, root: str, tp: int, pp: int, options: Any
) -> tuple[Any, list[str]]:
    model, optimizer, scheduler = build(tp, pp, seed=3, **options)
    found = megatron.load_checkpoint(model, optimizer, scheduler, load=root)
    return found, wrong_keys(model, optimizer)


@on_the_cpu
def refuse(_member: Member, root: str, tp: int, pp: int) -> Outcome:
    model, optimizer, scheduler = build(tp, pp)
    return attempt(lambda: megatron.load_checkpoint(model, optimizer, scheduler, load=root))


@on_the_cpu
def train_save_train(
    _member: Member, root: str, tp: int, bf16: bool, fence: str
) -> tuple[list[str], list[float], float | None]:
    """Three iterations and a save; losses of three more, and random numbers after the save."""
    model = build(tp, 1, bf16=bf16)
    train(model, 1, 3)
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    handle = megatron.save_checkpoint(3, *model, 77, save=root, options=SaveOptions(fence=fence))
    numbers = [random.random(), np.random.rand(), float(torch.rand(()))]
    losses = train(model, 4, 3)
    handle.result(60)
    return losses, numbers, handle.stats.stall_s


@on_the_cpu
def load_what_is_removed(member: Member, root: str) -> Outcome:
    """Another job saves iteration 3 and removes 2 when the first rank is about to look at that."""
    newest, look = Path(root) / "iter_0000002", load._Loading.look

    def look_too_late(loading: Any) -> None:
        if member.rank == 0 and newest.exists():
            shutil.copytree(newest, newest.with_name("iter_0000003"))
            shutil.rmtree(newest)
        look(loading)

    model = build(1, 1, seed=3)
    with mock.patch.object(load._Loading, "look", look_too_late):
        return attempt(lambda: megatron.load_checkpoint(*model, load=root))


@on_the_cpu
def load_and_train(
    _member: Member, root: str, tp: int, bf16: bool
) -> tuple[tuple[int, int], list[str], list[float]]:
    model = build(tp, 1, bf16=bf16, seed=9)
    train(model, 1, 2)  # it goes back to what it loads
    found = megatron.load_checkpoint(*model, load=root)
    numbers = [random.random(), np.random.rand(), float(torch.rand(()))]
    return found, train(model, 4, 3), numbers


@on_the_cpu
def train_on_from_stock(_member: Member, root: str) -> tuple[list[str], list[str]]:
    """Losses after a save by stock Megatron, and those after loading it here."""
    model = build(2, 1)
    train(model, 1, 3)
    megatron_gpt.save_as_megatron(*model[:2], Path(root, "iter_0000003"))
    schedule = model[2].state_dict()
    losses = train(model, 4, 3)
    model = build(2, 1, seed=9)
    assert megatron.load_checkpoint(*model[:2], load=root) == (3, 0)
    model[2].load_state_dict(schedule)
    return losses, train(model, 4, 3)


def small_state(rank: int, value: float) -> dict[str, Any]:
    """One of each kind of thing that a sharded state dict has."""

    def halves(key: str, data: torch.Tensor, replica_id: Any, _range: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(key, part, (0, at, 4), replica_id=replica_id)
            for at, part in zip((rank, 2 + rank), data.chunk(2), strict=True)
        ]

    full = torch.full
    return {
        "split": ShardedTensor.from_rank_offsets("split", full((3, 5), value + rank), (0, rank, 2)),
        "layer": ShardedTensor.from_rank_offsets(
            "layers.weight", full((4,), value + rank), (0, rank, 2), prepend_axis_num=1
        ),
        "same": ShardedTensor.from_rank_offsets(
            "same", full((600, 1000), value), replica_id=(0, 0, rank)
        ),
        "cut": ShardedTensorFactory("cut", full((8, 2), value + rank), halves, torch.cat),
        "object": ShardedObject("object", {"rank": rank, "value": value}, (2,), (rank,)),
        "one": ShardedObject("one", [value], (1,), (0,), replica_id=rank),
        "local": LocalNonpersistentObject([value]),
        "common": {"value": value, "list": [1, 2.5, "three"]},
        3: {"integer key": full((2,), 1.0)},
    }


def plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


def loaded_small(rank: int, path: str, strategy: Any) -> Any:
    state = mdc.load(small_state(rank, -1.0), path, sharded_strategy=strategy)
    same = state.pop("same")
    return plain(state) | {"same": sorted({*same.flatten().tolist()})}


@on_the_cpu
def exchange_with_stock(member: Member, root: str) -> dict[str, Any]:
    """What comes back of a small state, by who saved and who loaded it."""
    found = {}
    for saver, strategy in (("ours", megatron.SaveStrategy()), ("stock", None)):
        path = os.path.join(root, saver)
        os.makedirs(path, exist_ok=True)
        dist.barrier()
        mdc.save(small_state(member.rank, 2.0), path, strategy)
        for loader in ("ours", "stock"):
            ours = megatron.LoadStrategy() if loader == "ours" else None
            found[f"{saver} by {loader}"] = loaded_small(member.rank, path, ours)
        found[f"{saver} keys"] = sorted(megatron.LoadStrategy().load_sharded_metadata(path))
        found[f"{saver} nbytes"] = [f.stat().st_size for f in sorted(Path(path).glob("*.distcp"))]
    return found


def empty_directory(path: str) -> str:
    os.makedirs(path, exist_ok=True)
    dist.barrier()
    return path


@on_the_cpu
def save_through(member: Member, root: str, wrapped: bool, asynchronous: bool) -> Any:
    """What is loaded of a small state after saves by Megatron's save(), and the files' names."""
    path = empty_directory(root)
    strategy: Any = megatron.SaveStrategy()
    if wrapped:
        strategy = FullyParallelSaveStrategyWrapper(strategy, dist.group.WORLD)
    for value in (4.0, 2.0):  # the second time the strategy is known
        state = small_state(member.rank, value)
        request = mdc.save(state, path, strategy, async_sharded_save=asynchronous)
        for finalize in request.finalize_fns if asynchronous else ():
            finalize()
    dist.barrier()
    found = {
        "ours": loaded_small(member.rank, path, megatron.LoadStrategy()),
        "stock": loaded_small(member.rank, path, None),
    }
    return found, sorted(os.listdir(path))


@on_the_cpu
def save_without_finalizing(member: Member, path: str, die: bool) -> Any:
    """An async request that nobody finalizes; then the rank is killed."""
    os.makedirs(path, exist_ok=True)
    dist.barrier()
    model, _optimizer, _scheduler = build(2, 1)
    if die:
        metadata = content_metadata("dp_reshardable")
        state: Any = {"model": model.module.sharded_state_dict(metadata=metadata)}
        state |= {"content_metadata": {k: v for k, v in metadata.items() if k != "dp_cp_group"}}
    else:
        state = small_state(member.rank, 4.0)
    request = mdc.save(state, path, megatron.SaveStrategy(), async_sharded_save=True)
    deadline = time.monotonic() + 30
    while not os.path.exists(os.path.join(path, ".metadata")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    for finalize in request.finalize_fns:
        finalize()
    return request.async_fn, request.preload_fn, sorted(os.listdir(path))


@on_the_cpu
def load_into_fsdp(_member: Member, root: str) -> Outcome:
    """What comes of a load into a model that says that it is Megatron-FSDP's."""
    model, _optimizer, _scheduler = build(2, 1)
    model.module.ddp_config = argparse.Namespace(use_megatron_fsdp=True)
    return attempt(lambda: megatron.load_checkpoint(model, load=root))


@on_the_cpu
def load_model(_member: Member, root: str) -> tuple[int, int]:
    model, _optimizer, _scheduler = build(2, 1)
    return megatron.load_checkpoint(model, load=root)


@on_the_cpu
def save_on_full_disk(member: Member, root: str, on_error: str) -> dict[str, Any]:
    """Iterations 1 and 3 have room; iteration 2 has none on the last rank."""
    model = ready(2, 1)
    how: dict[str, Any] = {"save": root, "on_error": on_error}
    megatron.save_checkpoint(1, *model, **gathered(**how)).result(60)
    with file_size_limit(4096) if member.rank == 1 else contextlib.nullcontext():
        handle = megatron.save_checkpoint(2, *model, **gathered(**how))
        handle.wait_done()
    dist.barrier()
    told: dict[str, Any] = {"tracker": Path(root, "latest_checkpointed_iteration.txt").read_text()}
    again = attempt(lambda: megatron.save_checkpoint(3, *model, **gathered(**how)).result(60))
    if on_error == "raise":
        told["again"] = type(again.error).__name__
        again = attempt(lambda: megatron.save_checkpoint(4, *model, **gathered(**how)).result(60))
    told |= {"error": again.error, "at": megatron.load_checkpoint(*model, load=root)[0]}
    return told


@on_the_cpu
def save_many(_member: Member, root: str, numbers: list[int], how: Any) -> list[str]:
    model = ready(2, 1)
    with megatron.Saves() as saves:
        for number in numbers:
            megatron.save_checkpoint(
                number, *model, number * 10, save=root, saves=saves, **gathered(**how)
            )
    dist.barrier()
    return sorted(os.listdir(root))


@on_the_cpu
def save_with_random_init(_member: Member, root: str) -> None:
    """Data parallel ranks have random numbers of their own."""
    args = argparse.Namespace(data_parallel_random_init=True)
    megatron.save_checkpoint(1, *ready(1, 1), save=root, args=args).result()


@on_the_cpu
def load_any(_member: Member, root: str, iteration: int | None = None) -> Outcome:
    model = build(2, 1)
    return attempt(lambda: megatron.load_checkpoint(*model, load=root, iteration=iteration))


@on_the_cpu
def bytes_of_reshard(_member: Member, root: str, save: Any, load: Any) -> tuple[int, int]:
    """(bytes that reading optimizer state took, bytes needed) on another parallelism."""
    options = {"hidden": 640}  # so much that blocks of 8 MiB count little
    model, optimizer, scheduler = build(*save, **options)
    optimizers.allocate(optimizer)
    megatron.save_checkpoint(1, model, optimizer, scheduler, save=root).result(60)
    del model, optimizer, scheduler
    model, optimizer, _ = build(*load, **options)
    optimizers.allocate(optimizer)
    streams: list[Any] = []
    staging = pipeline.current().staging
    reading = staging.read

    def noted(*args: Any) -> Any:
        streams.append(reading(*args))
        return streams[-1]

    staging.read = noted  # type: ignore[method-assign]
    try:
        path = os.path.join(root, "iter_0000001")
        state = {"model": model.module.sharded_state_dict(metadata=content_metadata(""))}
        metadata = megatron.strategies.stored_metadata(path)
        with torch.no_grad():
            needed = optimizers.load_buckets(optimizer, state, path, metadata)
        took = sum(stream.nbytes_read() for stream in streams)
    finally:
        del staging.read
    return took, needed
