"""What ranks do with DeepSpeed in test_deepspeed.py: train a little, save, fail, die, load.

Responsible for small engines of every ZeRO stage whose steps are reproducible, and for what ranks
see on the way. It must not know what is right: that is for the test to say. Imported by the nursery
before it forks ranks, with everything that an engine imports when it is first made.
"""

from __future__ import annotations

import errno
import functools
import gc
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import deepspeed.runtime.zero.stage3
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from fastckpt import SaveOptions
from fastckpt.integrations import deepspeed as integration
from fastckpt.saving import pipeline
from tests.crews.group_crew import Member, attempt
from tests.kit.doubles import file_size_limit
from tests.kit.options import gathered
from tests.kit.saves import wait_until

with suppress(ImportError):  # older versions have none
    import deepspeed.runtime.zero.muon.muon_optimizer

FEATURES, HIDDEN, WAIT_S = 64, 128, 30.0
# A kernel that DeepSpeed would compile first, and whose ranks spin for each other.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logger.setLevel(logging.ERROR)
torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
gc.freeze()  # ZeRO-3 collects garbage, and need not look at all that was imported


def engine_of(stage: int, dtype: str = "fp32", seed: int = 0) -> Any:
    """An engine on the CPU whose parameters follow from the seed."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as a launcher does
    deepspeed.init_distributed("gloo")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 8))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


def installed(stage: int, **options: Any) -> tuple[Any, Any]:
    engine = engine_of(stage)
    return engine, integration.install(engine, **gathered(**options))


def train(engine: Any, first: int, steps: int) -> list[str]:
    """Trains so many steps, each on data of its own; this rank's losses as hexadecimal text."""
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(1000 * step + dist.get_rank())
        inputs = torch.randn(4, FEATURES, dtype=next(engine.parameters()).dtype)
        loss = engine(inputs).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    return losses


def latest(root: str) -> str:
    return (Path(root) / "latest").read_text()


def visible(directory: Path) -> list[str]:
    """Names of files, but for hidden ones, which are temporary."""
    return sorted(path.name for path in directory.glob("*") if path.name[0] != ".")


def is_durable(root: str, tag: str) -> bool:
    """Whether a file of the tag has all its bytes, but not yet its name."""
    return any(path.name[0] != "." for path in Path(root).glob(f".{tag}.*.tmp/*"))


@contextmanager
def held_up(here: bool) -> Iterator[None]:
    """Nothing that this rank saves becomes durable before the end."""
    storage, gate = pipeline.current().storage, threading.Event()
    real = storage.sync

    def sync(fd: int) -> None:
        gate.wait()
        real(fd)

    with patch.object(storage, "sync", sync if here else real):
        try:
            yield
        finally:
            gate.set()


def round_trip(member: Member, root: str, stage: int, dtype: str) -> dict[str, Any]:
    """Saves in both ways, goes on at once, and loads what either saved in both ways."""
    seen: dict[str, Any] = {}
    for way in ("ours", "stock"):
        engine = engine_of(stage, dtype)
        saving = integration.install(engine) if way == "ours" else None
        train(engine, 0, 2)
        engine.save_checkpoint(f"{root}/{way}", client_state={"mine": member.rank})
        seen[f"{way} goes on"] = train(engine, 2, 2)
        if saving is not None:
            saving.wait()
            seen["stats"] = saving.handle.stats
        engine.destroy()
    for saved in ("ours", "stock"):
        for way in ("ours", "stock"):
            engine = engine_of(stage, dtype, seed=1)
            if way == "ours":
                integration.install(engine)
            path, client = engine.load_checkpoint(f"{root}/{saved}")
            assert path is not None and "mine" in client
            seen[f"{saved} loaded by {way}"] = train(engine, 2, 2)
            engine.destroy()
    return seen


def keep_weights(member: Member, root: str, stage: int) -> None:
    """Saves, and keeps the whole parameters as they were then in weights.pt."""
    engine, saving = installed(stage)
    train(engine, 0, 1)
    engine.save_checkpoint(root)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        weights = {k: v.detach().clone() for k, v in engine.module.state_dict().items()}
    train(engine, 1, 1)
    saving.wait()
    engine.destroy()
    if member.rank == 0:
        torch.save(weights, f"{root}/weights.pt")


def wait_for_the_last(member: Member, root: str) -> dict[str, Any]:
    """What there is while one rank is not done, and when it is, though nobody steps any more."""
    engine, saving = installed(1)
    train(engine, 0, 1)
    engine.save_checkpoint(root, "a")
    saving.wait()
    with held_up(member.rank == 1):
        engine.save_checkpoint(root, "b")
        train(engine, 1, 2)
        wait_until(lambda: is_durable(root, "b"))
        seen = {
            "meanwhile": (latest(root), visible(Path(root) / "b")),
            "done": saving.handle.done(),
        }
        dist.barrier()
    wait_until(lambda: latest(root) == "b")
    seen["then"] = visible(Path(root) / "b")
    engine.load_checkpoint(root)
    engine.destroy()
    return seen


def read_at_once(member: Member, root: str) -> tuple[str | None, list[str]]:
    """Loads right after a save that takes its time on the other rank."""
    engine, _saving = installed(2)
    train(engine, 0, 1)
    storage, real = pipeline.current().storage, pipeline.current().storage.sync

    def late(fd: int) -> None:
        time.sleep(0.3)
        real(fd)

    with patch.object(storage, "sync", late if member.rank == 1 else real):
        engine.save_checkpoint(root)
        path, _client = engine.load_checkpoint(root)
    losses = train(engine, 1, 1)
    engine.destroy()
    return path, losses


def fail_once(member: Member, root: str, tags: list[str], on_error: str) -> dict[str, Any]:
    """Saves three tags; there is no room on rank 1 for the second."""
    engine, saving = installed(2, on_error=on_error)
    train(engine, 0, 1)
    engine.save_checkpoint(root, tags[0])
    saving.wait()
    train(engine, 1, 1)
    with file_size_limit(16 << 10 if member.rank == 1 else None):
        engine.save_checkpoint(root, tags[1])
        losses = train(engine, 2, 1)
        saving.drain()
    seen: dict[str, Any] = {"losses": losses, "error": saving.handle.failure()}
    dist.barrier()
    seen["latest"], seen["second"] = latest(root), sorted(os.listdir(Path(root) / tags[1]))
    seen["files"] = {
        path.name: path.read_bytes() for path in sorted((Path(root) / tags[0]).glob("*.pt"))
    }
    third = functools.partial(engine.save_checkpoint, root, tags[2])
    seen["next"] = attempt(third).error
    if on_error == "raise":
        third()  # it was told
    saving.wait()
    seen["finally"] = latest(root)
    engine.destroy()
    return seen


def fail_and_tell_one_rank(member: Member, root: str) -> list[BaseException | None]:
    """What two saves raise after one that failed, of which rank 0 has asked for the error; and how
    the first of them ended.
    """
    engine, saving = installed(1, timeout_s=30)
    with file_size_limit(16 << 10 if member.rank == 1 else None):
        engine.save_checkpoint(root, "a")
        saving.drain()
    if member.rank == 0:
        assert saving.handle.exception() is not None
    dist.barrier()
    told = [attempt(lambda: engine.save_checkpoint(root, "b")).error]
    saving.drain()
    told.append(saving.handle.exception())
    dist.barrier()
    told.append(attempt(lambda: engine.save_checkpoint(root, "c")).error)
    saving.wait()
    engine.destroy()
    return told


def save_where_no_directory_is(member: Member, root: str, on_error: str) -> list[Any]:
    """What saves raise: to a path below a file, where no directory can be made, then elsewhere."""
    engine, _saving = installed(1, on_error=on_error, timeout_s=30)
    first = attempt(lambda: engine.save_checkpoint(f"{root}/file/run")).error
    second = attempt(lambda: engine.save_checkpoint(f"{root}/run", "a")).error
    if on_error == "raise":
        engine.save_checkpoint(f"{root}/run", "a")  # it was told
    engine.destroy()
    return [first, second, latest(f"{root}/run")]


def destroy_after_failure(member: Member, root: str) -> Any:
    engine, _saving = installed(1)
    with file_size_limit(
        16 << 10 if member.rank == 0 else None
    ):  # not even DeepSpeed's scripts have room
        engine.save_checkpoint(root)
        return attempt(engine.destroy).error


def fail_in_the_midst(member: Member, root: str) -> dict[str, Any]:
    """DeepSpeed's own save_checkpoint raises on all ranks, then an object that only rank 0 saves
    cannot be pickled; the tag before stays the latest.
    """
    engine, saving = installed(1)
    engine.save_checkpoint(root, "a")
    with patch.object(engine, "_save_zero_checkpoint", side_effect=KeyError("no such shard")):
        seen = {"b": attempt(lambda: engine.save_checkpoint(root, "b")).error}
    unpicklable = {"mine": lambda: None}
    seen["c"] = attempt(lambda: engine.save_checkpoint(root, "c", unpicklable)).error
    train(engine, 0, 1)
    saving.drain()
    seen["latest"], seen["told"] = latest(root), saving.handle.exception()
    dist.barrier()
    engine.save_checkpoint(root, "d")
    saving.wait()
    engine.destroy()
    return seen | {"finally": latest(root)}


def save_and_end(member: Member, root: str) -> None:
    """Saves, and leaves the rest to the end of the process."""
    engine, _saving = installed(2)
    train(engine, 0, 1)
    engine.save_checkpoint(root, "only")


def save_and_die(member: Member, root: str, durable: bool) -> None:
    """All ranks are killed while they save the second tag, on rank 1; or when `latest` names it,
    before DeepSpeed is called again.
    """
    engine, saving = installed(2)
    train(engine, 0, 1)
    engine.save_checkpoint(root, "a")
    saving.wait()
    train(engine, 1, 1)
    with held_up(member.rank == 1 and not durable):
        engine.save_checkpoint(root, "b")
        if durable:
            wait_until(lambda: latest(root) == "b")
        else:
            wait_until(lambda: is_durable(root, "b"))  # what rank 0 saves
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def save_again(member: Member, root: str, way: str) -> list[str]:
    """Saves a tag twice, in which others keep files; what it holds then. `way` says which part of
    the quickest way there is not: "no exchange" of two directories, "no link" to a file, or "all"
    is there.
    """
    engine, saving = installed(2)
    storage = pipeline.current().storage

    def refuse(*_paths: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    double = {} if way == "all" else {way[3:]: refuse}
    with patch.multiple(storage, **double) if double else nullcontext():
        for step in range(2):
            train(engine, step, 1)
            engine.save_checkpoint(root, "a")
            saving.wait()
            if member.rank == 0:
                Path(root, "a", "deep").mkdir(exist_ok=True)
                Path(root, "a", "deep", "mine.txt").write_text("mine")
            dist.barrier()
    engine.destroy()
    return visible(Path(root) / "a")


def save_again_and_die(member: Member, root: str, changes: int) -> None:
    """Saves a tag twice. The second time rank 0 is killed when it has changed so many names, and
    rank 1 then.
    """
    engine, saving = installed(2)
    train(engine, 0, 1)
    engine.save_checkpoint(root, "a")
    saving.wait()
    train(engine, 1, 1)
    killed, left = Path(root, "killed"), itertools.count(changes, -1)
    storage = pipeline.current().storage

    def before(change: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def changed(one: str, other: str) -> None:
            if next(left) == 0:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            change(one, other)

        return changed

    if member.rank == 0:
        storage.rename = before(storage.rename)  # type: ignore[method-assign]
        storage.exchange = before(storage.exchange)  # type: ignore[method-assign]
    try:
        engine.save_checkpoint(root, "a")
        if member.rank == 0:
            saving.wait(WAIT_S)
    except RuntimeError:  # of DeepSpeed's barrier, where rank 0 is gone already
        assert member.rank == 1
    wait_until(killed.exists)
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_rank(member: Member, root: str) -> BaseException | None:
    """Rank 1 is killed while it saves the second tag; what the other one is told."""
    engine, saving = installed(2)
    engine.save_checkpoint(root, "a")
    saving.wait()
    # Of the tags from here on: "a" had to succeed, however slow the disk.
    saving._options = replace(saving._options, timeout_s=1.0)
    with held_up(member.rank == 1):
        engine.save_checkpoint(root, "b")
        if member.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt(lambda: saving.wait(WAIT_S)).error


def two_engines(member: Member, root: str) -> list[str]:
    """Two engines that save at a time, one of which is destroyed before the other saves again."""
    pairs = [installed(stage) for stage in (1, 2)]
    for number, (engine, _saving) in enumerate(pairs):
        engine.save_checkpoint(f"{root}/{number}", "a")
    pairs[0][0].destroy()
    train(pairs[1][0], 0, 1)
    pairs[1][0].save_checkpoint(f"{root}/1", "b")
    pairs[1][0].destroy()
    return [latest(f"{root}/{number}") for number in range(2)]


def resume(member: Member, root: str) -> tuple[int, list[str]]:
    """Goes on where `latest` says, up to step 4; also what a run without a break makes of it."""
    engine, saving = installed(2)
    engine.load_checkpoint(root)
    first = engine.global_steps
    losses = train(engine, first, 4 - first)
    engine.save_checkpoint(root, "c")
    saving.wait()
    engine.destroy()
    unbroken = engine_of(2)
    assert train(unbroken, 0, 4)[first:] == losses
    unbroken.destroy()
    return first, losses


def save_by_threads(member: Member, root: str) -> list[str]:
    """Why the files of this rank were written in the way that they were."""
    engine, saving = installed(1, backend="threads", staging_bytes="64MiB")
    engine.save_checkpoint(root)
    saving.wait()
    engine.destroy()
    return [saving.handle.stats.why]


def save_once(member: Member, root: str) -> None:
    engine, saving = installed(1)
    train(engine, 0, 1)
    engine.save_checkpoint(root, "a")
    saving.wait()
    engine.destroy()


def save_16bit(member: Member, root: str) -> list[str]:
    """A model for others to use, which is there when the call returns."""
    engine, _saving = installed(1)
    engine.save_checkpoint(root, save_latest=False)
    assert engine.save_16bit_model(root)
    found = sorted(os.listdir(root)) if member.rank == 0 else []
    engine.destroy()
    return found


def refusals(member: Member) -> list[BaseException | None]:
    engine = engine_of(1)
    step = SaveOptions(fence="step")
    errors = [attempt(lambda: integration.install(engine, options=step)).error]
    stock = engine.checkpoint_engine
    integration.install(engine)
    errors.append(attempt(lambda: integration.install(engine)).error)
    assert engine.checkpoint_engine is not stock
    engine.destroy()
    return errors
