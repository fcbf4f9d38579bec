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
from fastckpt.directories.verify import check
from fastckpt.integrations import dcp as ours
from fastckpt.integrations._tag import Tag
from fastckpt.integrations.megatron import SaveStrategy
from fastckpt.integrations.megatron.saves import Saves
from fastckpt.integrations.transformers import _rotate
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.saving import pipeline
from tests.noise import flip, noise
from tests.recordings.recorder import WAIT_S
from tests.recordings.stage import Scene, Stage

MIB = 1 << 20
ROWS_BYTES = 8 * MIB  # of each rank


class Variant(NamedTuple):
    """What is otherwise than in a plain save.

    Attributes:
        durable: the commit is made durable.
        budget_bytes: of staging memory; None: more than the state.
        over: there is a checkpoint of that name.
        codec: of steps.
        storage: arguments of the StageStorage on the first rank.
        anywhere: arguments of those on all ranks.
    """

    durable: bool = True
    budget_bytes: int | None = None
    over: bool = False
    codec: str | None = None
    storage: dict[str, Any] = {}  # noqa: RUF012
    anywhere: dict[str, Any] = {}  # noqa: RUF012


_REFUSED = {"truncate": errno.EACCES, "rename": errno.EACCES, "write_at": errno.EACCES}
VARIANTS = {
    "": Variant(),
    "direct": Variant(anywhere={"by_engine": True}),
    "over": Variant(over=True),
    "not-durable": Variant(durable=False),
    "one-block": Variant(budget_bytes=BLOCK_BYTES),
    "zstd": Variant(codec="zstd"),
    "full": Variant(storage={"faults": {"allocate": errno.ENOSPC}}),
    "refused": Variant(storage={"faults": _REFUSED, "kind": "nfs", "by_engine": True}),
    "sync-fails": Variant(storage={"faults": {"sync": errno.EIO}}),
    "rename-fails": Variant(storage={"faults": {"rename": errno.EIO}}),
}
ALONE = ("", "direct", "over", "not-durable", "one-block")
FAILING = ("full", "refused", "sync-fails", "rename-fails")


@functools.cache
def octets(nbytes: int, number: int) -> torch.Tensor:
    return noise(nbytes, number)


@functools.cache
def few_octets(nbytes: int, number: int) -> torch.Tensor:
    """Which a codec makes shorter."""
    return octets(nbytes, number) & 3


def state(number: int, ranks: int = 1) -> dict[str, Any]:
    """Values that tell their number, more than a block for each rank, and small objects."""
    sizes = (6 * MIB * ranks + 64, 5 * MIB * ranks + 4, 1000)
    return {"t": [octets(size, number) for size in sizes], "number": number, "note": "n" * 100}


def state_of_ranks(stage: Stage, number: int) -> dict[str, Any]:
    """Of each rank a part, replicas, and values of its own."""
    own: dict[str, Any] = {"own": PerRank({"rank": stage.rank, "of": octets(5000, stage.rank)})}
    own |= {"all": octets(3 * MIB, number), "number": number, "lr": 0.5}
    rows = few_octets(ROWS_BYTES * stage.ranks, number + 1).view(torch.float32).reshape(-1, 1024)
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
    fastckpt.save(state(number, stage.ranks), path, **options).result(WAIT_S)


def save_by_torch(stage: Stage, number: int, variant: Variant) -> None:
    """In torch's legacy format, which torch writes by itself."""
    options: dict[str, Any] = {"_use_new_zipfile_serialization": False, "durable": variant.durable}
    fastckpt.save({"number": number}, stage.root / "a.pt", **options).result(WAIT_S)


def save_steps(stage: Stage, number: int, variant: Variant, **options: Any) -> None:
    """The step is the same each time, the values are not."""
    options |= {"durable": variant.durable, "codec": variant.codec}
    if stage.ranks > 1:  # it is not certain which one would make it
        (stage.root / "run").mkdir(exist_ok=True)
    with checkpointer(stage, **options) as saving:
        saving.save(1, state_of_ranks(stage, number)).result(WAIT_S)


def checkpointer(stage: Stage, **options: Any) -> Checkpointer:
    return Checkpointer(stage.root / "run", group=stage.group, timeout_s=WAIT_S, **options)


def save_tiered(stage: Stage, number: int, variant: Variant) -> None:
    save_steps(stage, number, variant, local=stage.local)


def save_items(stage: Stage, number: int, variant: Variant) -> None:
    options: dict[str, Any] = {"process_group": stage.group, "timeout_s": WAIT_S}
    values = items(stage, number)
    if stage.ranks > 1:  # it is not certain which one would make it
        (stage.root / "items").mkdir(exist_ok=True)
    options |= {"checkpoint_id": stage.root / "items", "durable": variant.durable}
    ours.async_save(values, **options).result(WAIT_S)


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
    save_directory(path, fill, timeout_s=WAIT_S, **options).result(WAIT_S)
    wait_for_directories(str(stage.root))


def save_exports(stage: Stage, number: int, variant: Variant) -> None:
    """Two files, with rows and columns that ranks hold, and what all of them hold; converted."""
    rows = few_octets(256 << 10, number).view(torch.float32).reshape(-1, 1024)
    values = {"rows": rows, "columns": rows[:8], "all": octets(MIB, number)}
    if stage.ranks > 1:
        values["rows"] = distributed(stage, rows)
        values["columns"] = distributed(stage, rows[:8], 1)
    options: dict[str, Any] = {"group": stage.group, "durable": variant.durable}
    options |= {"dtype": torch.bfloat16, "shard_bytes": MIB, "timeout_s": WAIT_S}
    fastckpt.export(values, stage.root / "export", **options).result(WAIT_S)
    wait_for_directories(str(stage.root))


def save_tags(stage: Stage, number: int, variant: Variant) -> None:
    """A tag of DeepSpeed's, the same each time, with a file of each rank."""
    run = stage.root / "run"
    run.mkdir(exist_ok=True)
    coordinator = Coordinator.of_group(stage.group, "tags")
    options = WriteOptions(durable=variant.durable)
    agreement = coordinator.begin("tag", WAIT_S)
    tag = Tag(str(run / "tag"), agreement, str(run / "latest"), "tag", options)
    tag.add(state(number), f"rank-{stage.rank}.pt")
    tag.conclude(None)
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
    strategy, retention = SaveStrategy(timeout_s=WAIT_S), iterations.Retention(**options)
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
    if variant.budget_bytes is not None:
        options["budget_bytes"] = variant.budget_bytes
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


def pinned(stage: Stage) -> None:
    """A step is pinned, and then unpinned."""
    with stage.unrecorded(), checkpointer(stage) as saving:
        saving.save(1, state_of_ranks(stage, 1)).result(WAIT_S)
    with stage.recorded(), checkpointer(stage) as saving:
        saving.pin(1)
        saving.unpin(1)


def reuse(stage: Stage) -> None:
    """The second step shares with the first what has not changed."""
    first = state_of_ranks(stage, 1)
    with stage.unrecorded(), checkpointer(stage, codec="reuse") as saving:
        saving.save(1, first).result(WAIT_S)
    with stage.recorded(), checkpointer(stage, codec="reuse") as saving:
        saving.save(2, first | {"all": octets(3 * MIB, 2)}).result(WAIT_S)


def keep_local(stage: Stage) -> None:
    """The third step removes the first from the local tier."""
    with stage.unrecorded(), checkpointer(stage, local=stage.local) as saving:
        for step in (1, 2):
            saving.save(step, state_of_ranks(stage, step)).result(WAIT_S)
    with stage.recorded(), checkpointer(stage, local=stage.local) as saving:
        saving.save(3, state_of_ranks(stage, 3)).result(WAIT_S)


def keep_iterations(stage: Stage) -> None:
    """The third iteration removes the first."""
    variant = VARIANTS[""]
    with stage.unrecorded():
        for number in (1, 2):
            save_iterations(stage, number, variant, number)
    with stage.recorded():
        save_iterations(stage, 3, variant, 3, keep_last=2)


def rotate(stage: Stage) -> None:
    """The third checkpoint of a Trainer removes the second: the first is the best."""
    root = str(stage.root)

    def save(number: int) -> None:
        path = f"{root}/checkpoint-{number}"
        options: dict[str, Any] = {"timeout_s": WAIT_S}
        options["retain"] = partial(_rotate, path, 2, f"{root}/checkpoint-1")
        save_directory(path, lambda draft: draft.add(state(number), "a.pt"), **options).result()
        wait_for_directories(root)

    with stage.unrecorded():
        save(1)
        save(2)
    with stage.recorded():
        save(3)


def past_the_tier(stage: Stage) -> None:
    """There is no room in the local tier."""
    with stage.recorded(is_full=True):
        save_tiered(stage, 1, VARIANTS[""])


def drained_later(stage: Stage) -> None:
    """The root fails; the next job finds it in the local tier."""
    with stage.recorded("a save", faults={"allocate /root/": errno.EIO}):
        save_tiered(stage, 1, VARIANTS[""])
    with (
        stage.recorded("a restore, and what it drains then") as double,
        checkpointer(stage, local=stage.local) as restoring,
    ):
        double.gate.clear()  # they would read the same files at the same time
        assert restoring.restore(blank(stage)) == 1
        double.gate.set()


# ---- restores


def loading(
    save: Save, load: Callable[[Stage], None], stage: Stage, name: str = "", **options: Any
) -> None:
    """Records a load of what was saved."""
    with stage.unrecorded():
        save(stage, 1, VARIANTS[name])
    with stage.recorded(**options):
        load(stage)


def load_file(stage: Stage, **options: Any) -> None:
    found = fastckpt.load(stage.root / "a.pt", group=stage.group, **options)
    assert found["number"] == 1 and torch.equal(found["t"][0], state(1, stage.ranks)["t"][0])


def load_other_file(stage: Stage) -> None:
    """Which torch.save wrote."""
    with stage.unrecorded():
        torch.save({"number": 1}, stage.root / "a.pt")
    with stage.recorded():
        assert fastckpt.load(stage.root / "a.pt")["number"] == 1


def restore(stage: Stage, **options: Any) -> None:
    values = blank(stage)
    with checkpointer(stage, **options) as restoring:
        assert restoring.restore(values) == 1
    assert values["number"] == 1 and values["own"].value["rank"] == stage.rank


def restore_near(stage: Stage) -> None:
    restore(stage, local=stage.local)


def restore_lost(stage: Stage) -> None:
    """The first node has lost its local tier."""
    with stage.unrecorded():
        save_tiered(stage, 1, VARIANTS[""])
    if stage.rank == 0:
        for path in stage.local.iterdir():
            shutil.rmtree(path)
    with stage.recorded():
        restore(stage, local=stage.local)


def load_whole_step(stage: Stage) -> None:
    with checkpointer(stage) as restoring:
        assert restoring.load(1)["number"] == 1
        assert restoring.steps() == [1] and restoring.latest() == 1


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


def restore_nothing(stage: Stage) -> None:
    with stage.recorded(), checkpointer(stage) as restoring:
        assert restoring.restore(blank(stage)) is None


def restore_elsewhere(stage: Stage) -> None:
    """What two ranks have saved comes back on one."""
    with stage.unrecorded():
        save_steps(stage, 1, VARIANTS[""])
    with stage.recorded():
        if stage.rank == 0:
            alone = Checkpointer(stage.root / "run", group=stage.group_of_first)
            with alone:
                found = {
                    "rows": torch.zeros(2 * ROWS_BYTES // 4096, 1024),
                    "all": octets(3 * MIB, 9),
                }
                assert alone.restore(found) == 1


def load_items(stage: Stage, *names: str) -> None:
    values = items(stage, 7)
    values = {name: values[name] for name in names or values}
    reader = ours.Reader(stage.root / "items")
    dcp.load(values, storage_reader=reader, process_group=stage.group, no_dist=stage.ranks == 1)
    assert values.get("number", 1) == 1


def load_other_items(stage: Stage) -> None:
    """Which torch has saved: one, for several are in no order."""
    with stage.unrecorded():
        rows = {"rows": items(stage, 1)["rows"]}
        dcp.save(rows, checkpoint_id=stage.root / "items", no_dist=True)
    with stage.recorded():
        load_items(stage, "rows")


def check_directory(stage: Stage) -> None:
    assert check(str(stage.root / "directory"))


class Cast(NamedTuple):
    """A scene and by how many ranks it is played."""

    scene: Scene
    ranks: int


def _saves() -> dict[str, Cast]:
    kinds: dict[str, tuple[Save, int, tuple[str, ...]]] = {
        "file": (save_file, 1, (*ALONE, *FAILING)),
        "file-by-2": (save_file, 2, ALONE),
        "file-by-4": (save_file, 4, ("", "direct")),
        "stock": (save_by_torch, 1, ("", "over", "not-durable", "rename-fails")),
        "step": (save_steps, 1, (*ALONE, "zstd", *FAILING)),
        "step-by-2": (save_steps, 2, (*ALONE, "zstd")),
        "tiered": (save_tiered, 1, (*ALONE, "zstd", "sync-fails", "rename-fails")),
        "tiered-by-2": (save_tiered, 2, ("", "not-durable", "zstd")),
        "items": (save_items, 1, (*ALONE, *FAILING)),
        "items-by-2": (save_items, 2, ALONE),
        "directory": (save_directories, 1, (*ALONE, *FAILING)),
        "directory-by-2": (save_directories, 2, ALONE),
        "export": (
            save_exports,
            1,
            ("", "over", "one-block", "full", "sync-fails", "rename-fails"),
        ),
        "tag": (save_tags, 1, ("", "over", "not-durable", *FAILING)),
        "tag-by-2": (save_tags, 2, ("",)),
        "iteration": (save_iterations, 1, ("", "over", *FAILING)),
        "iteration-by-2": (save_iterations, 2, ("", "over")),
        "export-by-2": (save_exports, 2, ("", "over", "not-durable")),
    }
    return {
        "-".join(filter(None, ("save", kind, name))): Cast(partial(saving, save, name), ranks)
        for kind, (save, ranks, names) in kinds.items()
        for name in names
    }


def _loads() -> dict[str, Cast]:
    direct = {"by_engine": True}
    near = partial(loading, save_tiered, restore_near)
    return {
        "load-file": Cast(partial(loading, save_file, load_file), 1),
        "load-file-direct": Cast(partial(loading, save_file, load_file, **direct), 1),
        "load-file-mapped": Cast(partial(loading, save_file, partial(load_file, mmap=True)), 1),
        "load-file-of-torch": Cast(load_other_file, 1),
        "load-file-by-2": Cast(partial(loading, save_file, load_file), 2),
        "load-file-by-4": Cast(partial(loading, save_file, load_file), 4),
        "restore-step": Cast(partial(loading, save_steps, restore), 1),
        "restore-step-direct": Cast(partial(loading, save_steps, restore, **direct), 1),
        "restore-step-zstd": Cast(partial(loading, save_steps, restore, name="zstd"), 1),
        "restore-step-by-2": Cast(partial(loading, save_steps, restore), 2),
        "restore-step-by-1-of-2": Cast(restore_elsewhere, 2),
        "restore-step-older": Cast(restore_older, 1),
        "restore-step-none": Cast(restore_nothing, 1),
        "restore-tiered": Cast(near, 1),
        "restore-tiered-by-2": Cast(near, 2),
        "restore-tiered-lost": Cast(restore_lost, 1),
        "restore-tiered-lost-by-2": Cast(restore_lost, 2),
        "load-step": Cast(partial(loading, save_steps, load_whole_step), 1),
        "load-items": Cast(partial(loading, save_items, load_items), 1),
        "load-items-direct": Cast(partial(loading, save_items, load_items, **direct), 1),
        "load-items-by-2": Cast(partial(loading, save_items, load_items), 2),
        "load-items-of-torch": Cast(load_other_items, 1),
        "check-directory": Cast(partial(loading, save_directories, check_directory), 1),
    }


CASTS: dict[str, Cast] = {
    **_saves(),
    "save-step-and-remove": Cast(keep_last, 1),
    "pin-step": Cast(pinned, 1),
    "save-step-reused": Cast(reuse, 1),
    "save-iteration-and-remove": Cast(keep_iterations, 1),
    "save-directory-and-rotate": Cast(rotate, 1),
    "save-tiered-and-remove": Cast(keep_local, 1),
    "save-tiered-past": Cast(past_the_tier, 1),
    "save-tiered-past-by-2": Cast(past_the_tier, 2),
    "save-tiered-drained-later": Cast(drained_later, 1),
    **_loads(),
}
