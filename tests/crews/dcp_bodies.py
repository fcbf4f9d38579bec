"""What each rank does in the tests of torch.distributed.checkpoint.

Responsible for calling fastckpt's and torch's savers and readers with whatever is wrong on one
rank, and for telling what came of it. Must not know what should come of it.
"""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fastckpt
from fastckpt.directories.draft import Draft
from fastckpt.directories.save import save_directory
from fastckpt.errors import CheckpointError
from fastckpt.integrations import dcp as ours
from tests.crews.dcp_states import blank, is_same, numbers, sharded
from tests.crews.group_crew import Member, Outcome, attempt
from tests.kit.doubles import Recorder, process_on
from tests.kit.options import gathered

TIMEOUT_S = 20.0


def mesh_of(member: Member) -> DeviceMesh:
    ranks = [*range(member.world_size)]
    return DeviceMesh.from_group(member.group, "cpu", mesh=torch.tensor(ranks))


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def saved(member: Member, how: str, seed: int, path: str) -> Outcome:
    """Saves the sharded state; the ShardedTensor only where all ranks of the job are there."""

    def act() -> Any:
        with quiet():
            # torch's stager knows no ShardedTensor.
            state = state_of(member, seed, how != "torch async writer")
            group = member.group
            if how == "torch":
                return type(dcp.save(state, checkpoint_id=path, process_group=group))
            if how == "writer":
                writer = ours.Writer(path)
                return type(dcp.save(state, storage_writer=writer, process_group=group))
            if how == "torch async writer":
                writer = ours.Writer(path)
                saving = dcp.async_save(state, storage_writer=writer, process_group=group)
                return type(saving.result())
            fence = how.removeprefix("async ")
            saving = ours.async_save(
                state,
                checkpoint_id=path,
                process_group=group,
                options=fastckpt.SaveOptions(fence=fence, timeout_s=TIMEOUT_S),
            )
            assert isinstance(saving.result(60), Metadata)
            return Metadata

    return attempt(act)


def state_of(member: Member, seed: int, with_old: bool = True) -> dict[str, Any]:
    """With ShardedTensors only where the whole job is there, all of which has to make them."""
    alone = member.world_size != dist.get_world_size()
    without = alone or not with_old
    return {"model": sharded(seed, mesh_of(member), without_old=without), "at": [seed]}


def loaded(member: Member, how: str, seed: int, path: str, with_old: bool = True) -> Outcome:
    """Whether what is there is the sharded state of a seed."""

    def act() -> bool:
        with quiet():
            state = state_of(member, seed + 1, with_old)
            expected = state_of(member, seed, with_old)
            reader = dcp.FileSystemReader(path) if how == "torch" else ours.Reader(path)
            dcp.load(state, storage_reader=reader, process_group=member.group)
            return is_same(state, expected)

    return attempt(act)


class Net:
    """A small FSDP2 model, its optimizer, and what the tests save of them."""

    def __init__(self, member: Member) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(3)))
        mesh = mesh_of(member)
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, seed: int) -> float:
        torch.manual_seed(seed)
        loss = self.model(torch.randn(4, 24)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
        }

    def take(self, state: dict[str, Any]) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)


def train_and_save(member: Member, path: str, fence: str) -> tuple[list[float], int]:
    """Losses of the steps after a save that goes on meanwhile; exchanges of plans in the end."""
    with quiet():
        net = Net(member)
        net.step(0)
        savings = []
        losses = []
        for number in range(3):
            savings.append(
                ours.async_save(
                    net.state(),
                    checkpoint_id=f"{path}/{number}",
                    process_group=member.group,
                    options=fastckpt.SaveOptions(fence=fence),
                )
            )
            losses.append(net.step(number + 1))
        for saving in savings:
            assert saving.result(60) is not None
        return losses, ours._shared.of(member.group).plans.exchanges


def load_and_train(member: Member, path: str, reader: str) -> list[float]:
    """Losses of the steps after the first save of train_and_save()."""
    with quiet():
        net = Net(member)
        net.step(7)
        state = net.state()
        source = f"{path}/0"
        kind = dcp.FileSystemReader(source) if reader == "torch" else ours.Reader(source)
        dcp.load(state, storage_reader=kind, process_group=member.group)
        net.take(state)
        return [net.step(number + 1) for number in range(3)]


def told(outcome: Outcome) -> Outcome:
    """What can be sent to the test."""
    error = outcome.error
    if error is not None:
        outcome.error = RuntimeError(f"{type(error).__name__}: {error}")
    outcome.value = repr(outcome.value)
    return outcome


def big(member: Member, seed: int) -> dict[str, torch.Tensor]:
    """Four MiB of each rank's own."""
    generator = torch.Generator().manual_seed(seed * 100 + member.rank)
    return {f"part of {member.rank}": torch.randn(1 << 20, generator=generator)}


def save_big(member: Member, path: str, seed: int) -> None:
    with quiet():
        ours.save({"model": big(member, seed)}, checkpoint_id=path, process_group=member.group)


def result_of_a_save(member: Member, path: str) -> tuple[list[str], list[str], list[str], bool]:
    """What result(), a first and a second use of its members open; whether those are the file's."""
    opened = list[list[str]]()
    with quiet(), process_on(storage := Recorder()) as own:
        state = {"model": big(member, 1)}
        saving = ours.async_save(state, checkpoint_id=path, process_group=member.group)
        saving.wait_done()
        own.drain()

        def noted(use: Callable[[], Any]) -> Any:
            count = len(storage.log)
            value = use()
            opened.append([str(each) for each in storage.log[count:]])
            return value

        metadata = noted(saving.result)
        noted(lambda: metadata.storage_data)
        noted(lambda: metadata.state_dict_metadata)
    again = copy.deepcopy(metadata)
    stored = ours.Reader(path).read_metadata()
    is_equal = metadata == again == saving.result() and (
        metadata.state_dict_metadata == stored.state_dict_metadata
    )
    return *opened, is_equal and type(pickle.loads(pickle.dumps(metadata))) is Metadata


def results_that_are_gone(member: Member, path: str) -> list[str]:
    """What the results of a save that was replaced, and of one that was removed, are."""
    with quiet():
        savings = []
        for seed in (1, 2):
            state = {"model": big(member, seed)}
            savings.append(ours.async_save(state, checkpoint_id=path, process_group=member.group))
            savings[-1].wait_done()
        results = [saving.result() for saving in savings]
        found = []
        for result in results:
            dist.barrier(member.group)
            try:
                found.append(type(copy.deepcopy(result)).__name__)
            except CheckpointError as error:
                found.append("removed" if "was removed" in str(error) else "replaced")
            dist.barrier(member.group)
            if member.rank == 0:
                shutil.rmtree(path, ignore_errors=True)
        return found


def save_once(member: Member, path: str, seed: int, how: str) -> Outcome:
    """Saves where nothing may be overwritten."""

    def act() -> str:
        with quiet():
            writer = ours.Writer(path, overwrite=False)
            state = {"model": big(member, seed)}
            kind = ours if how == "ours" else dcp
            try:
                kind.save(state, storage_writer=writer, process_group=member.group)
            except CheckpointException as error:  # which is no Exception
                raise RuntimeError(str(error.failures)) from None
            return "saved"

    return told(attempt(act))


def holds_big(member: Member, path: str, seed: int) -> bool:
    with quiet():
        state = {"model": {key: torch.zeros_like(v) for key, v in big(member, seed).items()}}
        dcp.load(state, storage_reader=ours.Reader(path), process_group=member.group)
        return is_same(state, {"model": big(member, seed)})


def fail_to_plan(member: Member, path: str, bad: int, on_error: str) -> Outcome:
    """Saves an object that cannot be pickled on one rank; then what can be, everywhere."""

    def act() -> Any:
        own: Any = (lambda: None) if member.rank == bad else 5
        state = {"model": big(member, 1), f"own {member.rank}": own}
        saving = ours.async_save(
            state,
            checkpoint_id=path,
            process_group=member.group,
            options=fastckpt.SaveOptions(on_error=on_error),
        )
        assert saving.exception(60) is not None
        return str(saving.exception())

    outcome = told(attempt(act))
    save_big(member, path, 3)
    return outcome


def save_before_the_others(member: Member, path: str, fence: str, late: int) -> bool:
    """Saves twice; the second time, one rank calls when the others' calls have returned. Tells
    whether both saves hold what the state was when each was called.
    """
    expected = []
    with quiet():
        for seed in range(2):
            state = {"own": big(member, seed), "shared": numbers(seed, 50), "step": seed}
            expected.append(copy.deepcopy(state))
            if seed and member.rank == late:
                dist.barrier(member.group)
            saving = ours.async_save(
                state,
                checkpoint_id=f"{path}/{seed}",
                process_group=member.group,
                options=fastckpt.SaveOptions(fence=fence, timeout_s=5.0),
            )
            if seed and member.rank != late:
                dist.barrier(member.group)
            saving.wait_staged(60)
            for tensor in (*state["own"].values(), state["shared"]):
                tensor.zero_()
            state.clear()
            assert saving.result(60) is not None
        for seed in range(2):
            state = {"own": blank(big(member, seed)), "shared": torch.zeros(50), "step": 9}
            reader = ours.Reader(f"{path}/{seed}")
            dcp.load(state, storage_reader=reader, process_group=member.group)
            if not is_same(state, expected[seed]):
                return False
    return True


def save_what_grows(member: Member, path: str, grown: int) -> list[bool]:
    """Saves what all ranks hold alike, the second time with more on one rank. Tells whether each
    checkpoint holds it all.
    """

    def state_of_save(number: int) -> dict[str, Any]:
        own = {"own": numbers(number, 5000)} if number == 1 and member.rank == grown else {}
        return {"shared": {str(its): numbers(number + its, 1000) for its in range(6)}, **own}

    same = []
    with quiet():
        options = {"process_group": member.group, "timeout_s": TIMEOUT_S}
        for number in range(3):
            ours.save(
                state_of_save(number), checkpoint_id=f"{path}/{number}", **gathered(**options)
            )
        for number in range(3):
            state = blank(state_of_save(number))
            reader = ours.Reader(f"{path}/{number}")
            dcp.load(state, storage_reader=reader, process_group=member.group)
            same.append(is_same(state, state_of_save(number)))
    return same


class Unwilling(DefaultSavePlanner):
    """Plans for no two ranks whose parts differ in number."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        if len({len(plan.items) for plan in all_plans}) > 1:
            raise ArithmeticError("the ranks have unequal parts")
        return super().create_global_plan(all_plans)


def fail_to_plan_together(member: Member, path: str, changed: int) -> tuple[bool, Outcome]:
    """Saves twice by a planner that refuses what one rank then has; tells whether the second call
    returned, and how it ended. A third save, of what was saved first, goes well.
    """
    returned = False

    def act() -> Any:
        nonlocal returned
        with quiet():
            for number in (1, 2, 1):
                state: dict[str, Any] = {"model": big(member, number)}
                if number == 2 and member.rank == changed:
                    state["more"] = torch.ones(3)
                options = {"process_group": member.group, "timeout_s": TIMEOUT_S}
                try:
                    saving = ours.async_save(
                        state, checkpoint_id=path, planner=Unwilling(), **gathered(**options)
                    )
                    returned |= number == 2
                    saving.result(60)
                except fastckpt.PeerFailed as error:
                    failure: Any = error
                except ArithmeticError as error:
                    failure = error
            return f"{type(failure).__name__}: {failure}"

    outcome = attempt(act)
    return returned, outcome


def die_in_overwrite(member: Member, path: str, seed: int, victim: int, after_s: float) -> str:
    """Overwrites a checkpoint; one rank, or every one (-1), is killed in the midst of it."""
    with quiet():
        saving = ours.async_save(
            {"model": big(member, seed)},
            checkpoint_id=path,
            process_group=member.group,
            options=fastckpt.SaveOptions(timeout_s=3.0),
        )
        if victim in (member.rank, -1):
            time.sleep(after_s)
            os.kill(os.getpid(), signal.SIGKILL)
        return repr(saving.exception(60))


def hang_before_commit(member: Member, path: str) -> list[bool]:
    """Saves and never asks; a callback on the first rank tells of the commit."""
    told: list[float] = []
    with quiet():
        saving = ours.async_save(
            {"model": big(member, 4)}, checkpoint_id=path, process_group=member.group
        )
        saving.add_done_callback(lambda done: told.append(time.monotonic()))
        end = time.monotonic() + 30
        while not told and time.monotonic() < end:
            time.sleep(0.01)
        return [bool(told), os.path.exists(os.path.join(path, ".metadata"))]


def megatron_state(member: Member, seed: int, loading: bool) -> dict[str, Any]:
    """What Megatron-core makes of its own: shards, several of them on a rank, prepended axes."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import mcore_to_pyt_state_dict

    rank, size = member.rank, member.world_size

    def values(number: int, *sizes: int) -> torch.Tensor:
        return torch.zeros(*sizes) if loading else numbers(seed * 100 + number, *sizes)

    def of(key: str, data: torch.Tensor, *offsets: Any, axes: int = 0) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, data, *offsets, prepend_axis_num=axes)

    state = {
        "rows": [of("rows", values(rank, 8, 6), (0, rank, size))],
        "two": [
            of("two", values(10 + 2 * rank + part, 4, 6), (0, 2 * rank + part, 2 * size))
            for part in range(2)
        ],
        "layers": [of("layers", values(20 + rank, 5, 7), (0, rank, size), axes=1)],
        "object": [ShardedObject("object", {"seed": seed}, (size,), (rank,))],
    }
    state[f"object/shard_{rank}_{size}"] = state.pop("object")
    return mcore_to_pyt_state_dict(state, loading)


def save_megatron(member: Member, path: str, seed: int, how: str) -> None:
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

    with quiet():
        state = megatron_state(member, seed, False)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        if how == "ours":
            ours.async_save(state, checkpoint_id=path, planner=planner).result(60)
        elif how == "writer":
            dcp.save(state, storage_writer=ours.Writer(path), planner=planner)
        else:
            dcp.save(state, checkpoint_id=path, planner=planner)


def load_megatron(member: Member, path: str, seed: int, how: str) -> bool:
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreLoadPlanner,
        _unwrap_pyt_sharded_tensor,
    )

    with quiet():
        state = megatron_state(member, seed, True)
        expected = megatron_state(member, seed, False)
        reader = dcp.FileSystemReader(path) if how == "torch" else ours.Reader(path)
        dcp.load(state, storage_reader=reader, planner=MCoreLoadPlanner())
        for key, value in expected.items():
            if key.startswith("object"):
                if state[key] != [{"seed": seed}]:
                    return False
            elif not is_same(
                _unwrap_pyt_sharded_tensor(state[key]), _unwrap_pyt_sharded_tensor(value)
            ):
                return False
        return True


def save_two_in_one(member: Member, path: str) -> list[BaseException | None]:
    """Saves a directory with two checkpoints twice; the second time the plan of the first one is
    new to rank 0 alone, and that of the other one to rank 1.
    """
    errors = []
    for size in (1, 2):
        states = [
            {f"{name} of {member.rank}": torch.zeros(size if member.rank == new_to else 1)}
            for new_to, name in enumerate(("first", "second"))
        ]

        def fill(draft: Draft, states: list[dict[str, Any]] = states) -> None:
            for name, state in zip("ab", states, strict=True):
                ours.add_to(draft, name, state)

        def save(fill: Any = fill) -> None:
            save_directory(
                path, fill, group=member.group, options=fastckpt.SaveOptions(timeout_s=TIMEOUT_S)
            ).result()

        errors.append(attempt(save).error)
    return errors
