"""The scenes that are recorded: each kind of save and restore, and what may be otherwise in it.

Responsible for what is saved and restored, and by how many ranks. Values follow from numbers alone,
and span several blocks. It must not know what comes of a scene.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import fastckpt
from fastckpt import Checkpointer, PerRank
from fastckpt.arguments.options import WriteOptions
from fastckpt.directories import iterations
from fastckpt.directories.draft import Draft
from fastckpt.directories.save import save_directory, wait_for_directories
from fastckpt.integrations import dcp as ours
from fastckpt.integrations._tag import Tag
from fastckpt.integrations.megatron import SaveStrategy
from fastckpt.integrations.megatron.saves import Saves
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.saving import pipeline
from tests.kit.noise import flip, noise
from tests.kit.options import gathered
from tests.recordings.recorder import WAIT_S
from tests.recordings.stage import Scene, Stage

MIB = 1 << 20
ROWS_BYTES = 8 * MIB  # of each rank


class Variant(NamedTuple):
    """What is otherwise than in a plain save.

    Attributes:
        durable: the commit is made durable.
        over: there is a checkpoint of that name.
        storage: arguments of the StageStorage on the first rank.
        anywhere: arguments of those on all ranks.
    """

    durable: bool = True
    over: bool = False
    storage: dict[str, Any] = {}  # noqa: RUF012
    anywhere: dict[str, Any] = {}  # noqa: RUF012


_REFUSED = {"truncate": errno.EACCES, "rename": errno.EACCES, "write_at": errno.EACCES}
VARIANTS = {
    "": Variant(),
    "direct": Variant(anywhere={"by_engine": True}),
    "over": Variant(over=True),
    "not-durable": Variant(durable=False),
    "full": Variant(storage={"faults": {"allocate": errno.ENOSPC}}),
    "refused": Variant(storage={"faults": _REFUSED, "kind": "nfs", "by_engine": True}),
    "sync-fails": Variant(storage={"faults": {"sync": errno.EIO}}),
    "rename-fails": Variant(storage={"faults": {"rename": errno.EIO}}),
}


@functools.cache
def octets(nbytes: int, number: int) -> torch.Tensor:
    return noise(nbytes, number)


@functools.cache
def small_octets(nbytes: int, number: int) -> torch.Tensor:
    """The bytes of floating-point numbers that a narrower dtype can hold."""
    return octets(nbytes, number) & 3


def state(number: int, ranks: int = 1) -> dict[str, Any]:
    """Values that tell their number, more than a block for each rank, and small objects."""
    sizes = (6 * MIB * ranks + 64, 5 * MIB * ranks + 4, 1000)
    return {"t": [octets(size, number) for size in sizes], "number": number, "note": "n" * 100}


def state_of_ranks(stage: Stage, number: int) -> dict[str, Any]:
    """Of each rank a part, replicas, and values of its own."""
    own: dict[str, Any] = {"own": PerRank({"rank": stage.rank, "of": octets(5000, stage.rank)})}
    own |= {"all": octets(3 * MIB, number), "number": number, "lr": 0.5}
    rows = small_octets(ROWS_BYTES * stage.ranks, number + 1).view(torch.float32).reshape(-1, 1024)
    return own | {"rows": rows if stage.ranks == 1 else distributed(stage, rows)}


def distributed(stage: Stage, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
    ranks = torch.arange(stage.ranks)
    mesh = DeviceMesh.from_group(stage.group, "cpu", mesh=ranks)
    return distribute_tensor(rows, mesh, [Shard(dim)])


def blank(stage: Stage) -> dict[str, Any]:
    return state_of_ranks(stage, 7) | {"own": PerRank()}


# ---- kinds of saves: each saves a number by a variant, and waits for it


def save_file(stage: Stage, number: int, variant: Variant) -> None:
    path = stage.root / "a.pt"
    options: dict[str, Any] = {"group": stage.group, "durable": variant.durable}
    fastckpt.save(state(number, stage.ranks), path, **gathered(**options)).result(WAIT_S)


def save_by_torch(stage: Stage, number: int, variant: Variant) -> None:
    """In torch's legacy format, which torch writes by itself."""
    options: dict[str, Any] = {"_use_new_zipfile_serialization": False, "durable": variant.durable}
    fastckpt.save({"number": number}, stage.root / "a.pt", **gathered(**options)).result(WAIT_S)


def save_steps(stage: Stage, number: int, variant: Variant, **options: Any) -> None:
    """The step is the same each time, the values are not."""
    options |= {"durable": variant.durable}
    if stage.ranks > 1:  # it is not certain which one would make it
        (stage.root / "run").mkdir(exist_ok=True)
    with checkpointer(stage, **options) as saving:
        saving.save(1, state_of_ranks(stage, number)).result(WAIT_S)


def checkpointer(stage: Stage, **options: Any) -> Checkpointer:
    return Checkpointer(
        stage.root / "run",
        group=stage.group,
        **gathered(timeout_s=WAIT_S, **options),
    )


def save_tiered(stage: Stage, number: int, variant: Variant) -> None:
    save_steps(stage, number, variant, local=stage.local)


def save_items(stage: Stage, number: int, variant: Variant) -> None:
    options: dict[str, Any] = {"process_group": stage.group, "timeout_s": WAIT_S}
    values = items(stage, number)
    if stage.ranks > 1:  # it is not certain which one would make it
        (stage.root / "items").mkdir(exist_ok=True)
    options |= {"checkpoint_id": stage.root / "items", "durable": variant.durable}
    ours.async_save(values, **gathered(**options)).result(WAIT_S)


def items(stage: Stage, number: int) -> dict[str, Any]:
    values = state_of_ranks(stage, number)
    return {name: values[name] for name in ("rows", "all", "number")}


def save_directories(stage: Stage, number: int, variant: Variant) -> None:
    def fill(draft: Draft) -> None:
        draft.add(state(number), f"of-{stage.rank}.pt")
        if stage.rank == 0:
            assert draft.add_tensors({"a": octets(MIB, number)}, "model.safetensors", {})
            Path(draft.directory, "notes").mkdir()
            Path(draft.directory, "notes", "number.txt").write_text(str(number))

    path = str(stage.root / "directory")
    options: dict[str, Any] = {"group": stage.group, "durable": variant.durable}
    save_directory(path, fill, **gathered(timeout_s=WAIT_S, **options)).result(WAIT_S)
    wait_for_directories(str(stage.root))


def save_exports(stage: Stage, number: int, variant: Variant) -> None:
    """Two files, with rows and columns that ranks hold, and what all of them hold; converted."""
    rows = small_octets(256 << 10, number).view(torch.float32).reshape(-1, 1024)
    values = {"rows": rows, "columns": rows[:8], "all": octets(MIB, number)}
    if stage.ranks > 1:
        values["rows"] = distributed(stage, rows)
        values["columns"] = distributed(stage, rows[:8], 1)
    options: dict[str, Any] = {"group": stage.group, "durable": variant.durable}
    options |= {"dtype": torch.bfloat16, "shard_bytes": MIB, "timeout_s": WAIT_S}
    fastckpt.export(values, stage.root / "export", **gathered(**options)).result(WAIT_S)
    wait_for_directories(str(stage.root))


def save_tags(stage: Stage, number: int, variant: Variant) -> None:
    """A tag of DeepSpeed's, the same each time, with a file of each rank."""
    run = stage.root / "run"
    run.mkdir(exist_ok=True)
    coordinator = Coordinator.of_group(stage.group, "tags")
    options = WriteOptions(durable=variant.durable)
    tag = Tag(str(run / "tag"), str(run / "latest"), "tag", options, lease=str(run))
    tag.add(state(number), f"rank-{stage.rank}.pt")
    tag.conclude(coordinator.begin("tag", WAIT_S), None)
    pipeline.current().wait_for(tag.handle.path, ended=True)
    coordinator.close()
    tag.handle.result(WAIT_S)


def save_iterations(
    stage: Stage, number: int, variant: Variant, iteration: int = 7, **options: Any
) -> None:
    """An iteration of Megatron's, the same each time, and the tracker."""
    root = str(stage.root / "run")
    path = os.path.join(root, iterations.directory_name(iteration))
    if stage.ranks > 1:  # it is not certain which one would make it
        os.makedirs(path, exist_ok=True)
    rows = octets(ROWS_BYTES, number + stage.rank).reshape(-1, 4096)
    values = {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, stage.rank, stage.ranks)),
        "mine": ShardedObject("mine", number, (stage.ranks,), (stage.rank,)),
    }
    common = b"common" * number if stage.rank == 0 else None
    strategy, retention = (
        SaveStrategy(options=fastckpt.SaveOptions(timeout_s=WAIT_S)),
        iterations.Retention(**options),
    )
    with Saves() as saves:
        saves.begin(
            root, iteration, retention, lambda after: strategy.begin(values, path, common, after)
        ).result(WAIT_S)


Save = Callable[[Stage, int, Variant], None]


def saving(save: Save, name: str, stage: Stage) -> None:
    """Records a save."""
    variant = VARIANTS[name]
    if variant.over:
        with stage.unrecorded():
            save(stage, 1, variant)
    options = variant.anywhere | (variant.storage if stage.rank == 0 else {})
    with stage.recorded(**options):
        save(stage, 2, variant)


# ---- more of steps


def keep_last(stage: Stage) -> None:
    """The third step removes the first, and a step that a dead process has begun."""
    with stage.unrecorded(), checkpointer(stage) as saving:
        for step in (1, 2):
            saving.save(step, state_of_ranks(stage, step)).result(WAIT_S)
    with stage.recorded(), checkpointer(stage, keep_last=2) as saving:
        saving.save(3, state_of_ranks(stage, 3)).result(WAIT_S)


def keep_iterations(stage: Stage) -> None:
    """The third iteration removes the first."""
    variant = VARIANTS[""]
    with stage.unrecorded():
        for number in (1, 2):
            save_iterations(stage, number, variant, number)
    with stage.recorded():
        save_iterations(stage, 3, variant, 3, keep_last=2)


def past_the_tier(stage: Stage) -> None:
    """There is no room in the local tier."""
    with stage.recorded(is_full=True):
        save_tiered(stage, 1, VARIANTS[""])


def drained_later(stage: Stage) -> None:
    """The root fails; the next job finds it in the local tier."""
    with stage.recorded("a save", faults={f"allocate {stage.root}": errno.EIO}):
        save_tiered(stage, 1, VARIANTS[""])
    with (
        stage.recorded("a restore, and what it drains then") as double,
        checkpointer(stage, local=stage.local) as restoring,
    ):
        double.gate.clear()  # they would read the same files at the same time
        assert restoring.restore(blank(stage)) == 1
        double.gate.set()


# ---- restores


def loading(save: Save, load: Callable[[Stage], None], stage: Stage) -> None:
    """Records a load of what was saved."""
    with stage.unrecorded():
        save(stage, 1, VARIANTS[""])
    with stage.recorded():
        load(stage)


def load_file(stage: Stage) -> None:
    found = fastckpt.load(stage.root / "a.pt", group=stage.group)
    assert found["number"] == 1 and torch.equal(found["t"][0], state(1, stage.ranks)["t"][0])


def restore(stage: Stage, **options: Any) -> None:
    values = blank(stage)
    with checkpointer(stage, **options) as restoring:
        assert restoring.restore(values) == 1
    assert values["number"] == 1 and values["own"].value["rank"] == stage.rank


def restore_lost(stage: Stage) -> None:
    """The first node has lost its local tier."""
    with stage.unrecorded():
        save_tiered(stage, 1, VARIANTS[""])
    if stage.rank == 0:
        for path in stage.local.iterdir():
            shutil.rmtree(path)
    with stage.recorded():
        restore(stage, local=stage.local)


def restore_older(stage: Stage) -> None:
    """The newest step is damaged."""
    with stage.unrecorded(), checkpointer(stage) as saving:
        for step in (1, 2):
            saving.save(step, state_of_ranks(stage, step)).result(WAIT_S)
    if stage.rank == 0:
        damaged = stage.root / "run" / "step-00000002" / "rank-00000.safetensors"
        flip(damaged, -100)
    with stage.recorded():
        restore(stage)


def load_items(stage: Stage) -> None:
    values = items(stage, 7)
    reader = ours.Reader(stage.root / "items")
    dcp.load(values, storage_reader=reader, process_group=stage.group, no_dist=stage.ranks == 1)
    assert values["number"] == 1


class Cast(NamedTuple):
    """A scene and by how many ranks it is played."""

    scene: Scene
    ranks: int


def _saves() -> dict[str, Cast]:
    """One save of each Place, by one rank or two, and one of each outcome."""
    kinds: dict[str, tuple[Save, int, tuple[str, ...]]] = {
        "file": (save_file, 1, ("", "over", "sync-fails", "rename-fails")),
        "file-by-2": (save_file, 2, ("direct",)),
        "stock": (save_by_torch, 1, ("",)),
        "step": (save_steps, 1, ("not-durable", "full", "refused", "rename-fails")),
        "step-by-2": (save_steps, 2, ("", "over")),
        "tiered": (save_tiered, 1, ("rename-fails",)),
        "tiered-by-2": (save_tiered, 2, ("",)),
        "items-by-2": (save_items, 2, ("",)),
        "directory": (save_directories, 1, ("over", "sync-fails")),
        "directory-by-2": (save_directories, 2, ("",)),
        "export-by-2": (save_exports, 2, ("over",)),
        "tag": (save_tags, 1, ("over", "rename-fails")),
        "iteration-by-2": (save_iterations, 2, ("over",)),
    }
    return {
        "-".join(filter(None, ("save", kind, name))): Cast(partial(saving, save, name), ranks)
        for kind, (save, ranks, names) in kinds.items()
        for name in names
    }


def _loads() -> dict[str, Cast]:
    return {
        "load-file-by-2": Cast(partial(loading, save_file, load_file), 2),
        "restore-step-by-2": Cast(partial(loading, save_steps, restore), 2),
        "restore-step-older": Cast(restore_older, 1),
        "restore-tiered-lost-by-2": Cast(restore_lost, 2),
        "load-items": Cast(partial(loading, save_items, load_items), 1),
    }


CASTS: dict[str, Cast] = {
    **_saves(),
    "save-step-and-remove": Cast(keep_last, 1),
    "save-iteration-and-remove": Cast(keep_iterations, 1),
    "save-tiered-past": Cast(past_the_tier, 1),
    "save-tiered-drained-later": Cast(drained_later, 1),
    **_loads(),
}
