"""What each rank does in the tests of torchtitan's checkpoint manager.

Responsible for a folder that only the first rank sees at first, and for the parts of a model that a
pipeline's ranks have. Must not know what should come of it.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fastckpt import SaveOptions
from fastckpt.storage.file_system import Storage
from tests.crews.group_crew import Member, attempt
from tests.kit.doubles import process_on
from tests.kit.torchtitan import Run


class Lagging(Storage):
    """What is in the folder is there if it is looked at by its name, but is not listed yet."""

    def names(self, directory: str, *, directories: bool = False) -> list[str]:
        found = super().names(directory, directories=directories)
        return [] if os.path.basename(directory) == "run" else found


def train_and_load(member: Member, disk: str) -> tuple[bool, int]:
    """Whether anything was loaded, and the step with which training goes on."""
    before = Run(Path(disk), options=SaveOptions(fence="step", timeout_s=20))
    before.train(2)
    before.checkpointer.maybe_wait_for_saving()
    before.checkpointer.close()
    with process_on(Lagging() if member.rank else Storage()):
        after = Run(Path(disk), options=SaveOptions(fence="step", timeout_s=20))
        is_loaded = after.checkpointer.load()
        after.checkpointer.close()
    return is_loaded, after.trainer.step


# Pipelines: the layers of each part of the model that each stage has. A stage may have more ranks.
SCHEDULES: dict[str, list[list[list[int]]]] = {
    "alone": [[[0, 1, 2, 3]]],
    "1F1B": [[[0, 1]], [[2, 3]]],
    "interleaved": [[[0], [2]], [[1], [3]]],
    "overlapping": [[[0, 1]], [[1, 2, 3]]],
}


class Layers(nn.Module):
    """Some layers of a model, by their numbers in it: a large one, and small ones."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(30, 900 if n else 7) for n in numbers})


def numbered(name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """A tensor that follows from the name, as it is spread."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    whole = torch.rand(like.shape, generator=generator)
    if isinstance(like, DTensor):
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return whole


@contextlib.contextmanager
def pipeline(member: Member, disk: str, schedule: str, **settings: Any) -> Iterator[Run]:
    """A Run with the parts of this rank, whose numbers nobody has set."""
    stages = SCHEDULES[schedule]
    ranks = member.world_size // len(stages)
    parts = [Layers(numbers) for numbers in stages[member.rank // ranks]]
    if ranks > 1:
        sizes, names = (len(stages), ranks), ("pp", "fsdp")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)["fsdp"]
        for part in parts:
            fully_shard(part, mesh=mesh)
    options = SaveOptions(fence="step", timeout_s=20)
    run = Run(Path(disk), parts=parts, options=options, **settings)
    with contextlib.closing(run.checkpointer):
        yield run


def values_of(run: Run) -> dict[str, Any]:
    """What the optimizers and the model have, by name, and how far the run is."""
    held = run.optimizers.state_dict() | run.checkpointer.states["model"].state_dict()
    held |= {"schedule": run.schedulers.state_dict(), "step": run.trainer.step}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value.clone()).tolist()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in held.items()
    }


def save_stages(member: Member, disk: str, schedule: str) -> dict[str, Any]:
    with pipeline(member, disk, schedule) as run:
        for step in (1, 2, 3):
            for part in run.parts:
                for name, parameter in part.named_parameters():
                    if step == 1:
                        parameter.data.copy_(numbered(name, parameter, 0))
                    parameter.grad = numbered(name, parameter, step)
            run.checkpointer.maybe_wait_for_staging()
            run.optimizers.step()
            run.schedulers.step()
            run.trainer.step = step
            run.checkpointer.save(step)
        return values_of(run)


def load_stages(member: Member, disk: str, schedule: str) -> dict[str, Any]:
    with pipeline(member, disk, schedule) as run:
        assert run.checkpointer.load()
        return values_of(run)


def refused_stages(member: Member, disk: str) -> list[BaseException | None]:
    """What is told of stages that share a name, and of a whole model for Hugging Face."""

    def save() -> None:
        with pipeline(member, disk, "overlapping") as run:
            run.checkpointer.save(1)

    def export() -> None:
        settings: Any = {"last_save_in_hf": True, "last_save_model_only": True, "adapter": object()}
        with pipeline(member, disk, "1F1B", **settings):
            pass

    return [attempt(save).error, attempt(export).error]
