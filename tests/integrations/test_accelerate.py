"""Accelerate's save_state() and load_state() by fastckpt, against the package: what directories
hold, who loads them and how exactly, and what is there after a failure or a kill.

Must not know how a directory is written: tests/directories/test_directory_save.py does.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from fastckpt import SaveOptions
from tests.kit import jobs
from tests.kit.interpreters import let_go
from tests.kit.jobs import finish, logged
from tests.kit.noise import flip
from tests.kit.paths import ROOT

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    ProjectConfiguration,
    set_seed,
)
from torch.distributed.fsdp import StateDictType
from torch.utils.data import DataLoader, TensorDataset

from fastckpt.directories.save import wait_for_directories
from fastckpt.directories.verify import check
from fastckpt.errors import CorruptCheckpoint
from fastckpt.integrations.accelerate import load_state, save_state
from tests.kit.doubles import Recorder, process_on

pytestmark = pytest.mark.usefixtures("drained")
WAIT_S = 60.0
FILES = {
    "custom_checkpoint_0.pkl",
    "model.safetensors",
    "model_1.safetensors",
    "optimizer.bin",
    "optimizer_1.bin",
    "random_states_0.pkl",
    "scheduler.bin",
}


class Tied(nn.Module):
    """Two names of one weight, dropout, and a buffer that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 40)
        self.norm = nn.BatchNorm1d(40)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(40, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.dropout(self.norm(self.embedding(tokens))))
        return out


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Run:
    """Two models, two optimizers, a scheduler, a loader and an object in one Accelerator."""

    def __init__(self, **project: Any) -> None:
        set_seed(4)
        config = ProjectConfiguration(**project) if project else None
        loading = DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator = Accelerator(cpu=True, project_config=config, dataloader_config=loading)
        text = torch.tensor(list((ROOT / "README.md").read_bytes()[:4096]))
        self.loader = DataLoader(TensorDataset(text), 32, shuffle=True, generator=torch.Generator())
        model, other = Tied(), nn.Linear(7, 3)
        optimizers = [torch.optim.AdamW(module.parameters()) for module in (model, other)]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.99)
        self.counter = Counter()
        self.model, self.other, self.optimizer, _, self.scheduler, self.loader = (
            self.accelerator.prepare(model, other, *optimizers, scheduler, self.loader)
        )
        self.accelerator.register_for_checkpointing(self.counter)
        self.losses: list[float] = []

    def train(self, last: int, save: Callable[[Run], Any] | None = None, every: int = 2) -> Run:
        self.loader.set_epoch(0)
        left = self.accelerator.skip_first_batches(self.loader, self.counter.count)
        for (tokens,) in left:
            if self.counter.count == last:
                break
            loss = nn.functional.cross_entropy(self.model(tokens), tokens.roll(1))
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.counter.count += 1
            if save is not None and self.counter.count % every == 0:
                save(self)
        return self


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return Run().train(8).losses


def loaded(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("safe_serialization", [True, False])
@pytest.mark.parametrize("fence", ["call", "step"])
def test_directories_are_those_of_accelerate(
    disk: Path, fence: str, safe_serialization: bool, assert_same: Callable[[Any, Any], None]
) -> None:
    run = Run().train(3)
    options: dict[str, Any] = {"safe_serialization": safe_serialization}
    run.accelerator.save_state(str(disk / "theirs"), **options)
    handle = save_state(run.accelerator, disk / "ours", options=SaveOptions(fence=fence), **options)
    stats = handle.result(WAIT_S)
    assert handle.path == str(disk / "ours") and stats.nbytes > 80_000
    names = {path.name for path in (disk / "theirs").iterdir()}
    if safe_serialization:
        assert names == FILES
    assert {path.name for path in (disk / "ours").iterdir()} == names | {"fastckpt.json"}
    assert check(str(disk / "ours"))
    for name in names:
        ours, theirs = loaded(disk / "ours" / name), loaded(disk / "theirs" / name)
        if name.endswith(".safetensors"):
            ours, theirs = dict(sorted(ours.items())), dict(sorted(theirs.items()))
        assert_same(ours, theirs)


@pytest.mark.parametrize("fence", ["call", "step"])
@pytest.mark.parametrize("by_stock", [True, False])
def test_a_resumed_run_is_bitwise_equal(
    disk: Path, fence: str, by_stock: bool, expected: list[float]
) -> None:
    def save(run: Run) -> None:
        save_state(
            run.accelerator, disk / "latest", options=SaveOptions(fence=fence)
        )  # over the last one

    first = Run().train(5, save)
    assert first.losses == expected[:5]
    wait_for_directories(str(disk))
    assert os.listdir(disk) == ["latest"]
    run = Run()
    if by_stock:
        run.accelerator.load_state(str(disk / "latest"))
    else:
        load_state(run.accelerator, disk / "latest")
    assert run.counter.count == 4
    assert run.train(8).losses == expected[4:]


def test_it_loads_what_accelerate_has_saved(disk: Path, expected: list[float]) -> None:
    Run().train(4).accelerator.save_state(str(disk / "theirs"))
    run = Run()
    load_state(run.accelerator, disk / "theirs")
    assert run.train(8).losses == expected[4:]


def test_hooks_see_what_accelerate_shows_them(disk: Path) -> None:
    run, seen = Run().train(2), []

    def hook(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        seen.append((len(models), len(weights)))
        Path(output_dir, "of the hook").write_text("there")
        weights.pop()  # "is saved by me"

    run.accelerator.register_save_state_pre_hook(hook)
    save_state(run.accelerator, disk / "a").result(WAIT_S)
    assert seen == [(2, 2)]
    there = {path.name for path in (disk / "a").iterdir()}
    assert there == FILES - {"model_1.safetensors"} | {"of the hook", "fastckpt.json"}
    assert "of the hook" in json.loads((disk / "a" / "fastckpt.json").read_text())["files"]


def test_automatic_names(disk: Path, expected: list[float]) -> None:
    project = {"project_dir": str(disk), "automatic_checkpoint_naming": True, "total_limit": 2}
    run = Run(**project).train(6, lambda run: save_state(run.accelerator))
    assert run.accelerator.project_configuration.automatic_checkpoint_naming
    directory = disk / "checkpoints"
    wait_for_directories(str(directory))
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert os.listdir(disk) == ["checkpoints"]
    stock = Run(**project)
    stock.accelerator.load_state()
    assert stock.train(8).losses == expected[6:]
    with pytest.raises(ValueError, match="exists"):
        run.accelerator.project_configuration.iteration = 2
        save_state(run.accelerator)
    flip(directory / "checkpoint_2" / "model.safetensors", -9)
    older = Run(**project)
    load_state(older.accelerator)
    assert older.train(8).losses == expected[4:]
    flip(directory / "checkpoint_1" / "optimizer.bin", -9)
    with pytest.raises(CorruptCheckpoint, match=r"checkpoint_2.*model\.safetensors"):
        load_state(Run(**project).accelerator)


def test_a_run_that_went_back_keeps_what_it_saves(disk: Path) -> None:
    """Of the abandoned checkpoints, whose numbers are higher, the lowest go, as Accelerate's do."""
    run = Run(project_dir=str(disk), automatic_checkpoint_naming=True, total_limit=2)
    for number, left in ((6, [6]), (7, [6, 7]), (3, [3, 7]), (4, [4, 7])):
        run.accelerator.project_configuration.iteration = number
        save_state(run.accelerator).result(WAIT_S)
        wait_for_directories(str(disk / "checkpoints"))
        there = sorted((disk / "checkpoints").iterdir())
        assert [path.name for path in there] == [f"checkpoint_{each}" for each in left]
        for path in there:
            os.utime(path, (1, 1))  # clocks of file systems are coarse


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_damaged_directory_is_not_loaded(disk: Path, name: str) -> None:
    run = Run().train(2)
    save_state(run.accelerator, disk / "a").result(WAIT_S)
    flip(disk / "a" / name, -9)
    before = {key: tensor.clone() for key, tensor in run.model.state_dict().items()}
    with pytest.raises(CorruptCheckpoint, match=name):
        load_state(run.accelerator, disk / "a")
    assert all(torch.equal(before[key], now) for key, now in run.model.state_dict().items())


def test_options_of_the_engine_arrive(disk: Path) -> None:
    run = Run()
    ballast: Any = {"ballast": torch.zeros(3 << 20)}
    run.counter.state_dict = lambda: ballast  # type: ignore[method-assign]
    options = SaveOptions(backend="threads", staging_bytes="8MiB", durable=False)
    storage = Recorder(by_engine=True)
    with process_on(storage):
        stats = save_state(run.accelerator, disk / "a", options=options).result(WAIT_S)
        assert not storage.numbers_of("sync")
    assert "backend 'threads' was" in stats.why
    assert stats.nbytes > 12 << 20 and stats.staged_bytes_max <= 8 << 20
    with pytest.raises(ValueError, match="staging is 'gds', must be 'host' here"):
        save_state(run.accelerator, disk / "a", options=SaveOptions(staging="gds"))


def test_what_cannot_be_pickled_is_told_at_once(disk: Path) -> None:
    run = Run()
    run.counter.state_dict = lambda: {"count": lambda: 0}  # type: ignore[method-assign,dict-item]
    with pytest.raises((AttributeError, TypeError), match=r"[Cc]an't (get|pickle)"):
        save_state(run.accelerator, disk / "a")
    assert os.listdir(disk) == []
    run.counter.state_dict = lambda: {"count": 1}  # type: ignore[method-assign]
    save_state(run.accelerator, disk / "a").result(WAIT_S)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_kinds_whose_files_others_write_are_refused(disk: Path, kind: str) -> None:
    accelerator: Any = SimpleNamespace(distributed_type=SimpleNamespace(value=kind))
    for call in (save_state, load_state):
        with pytest.raises(ValueError, match=f"with {kind} a state is written by"):
            call(accelerator, disk / "a")


def test_a_directory_has_to_be_named(disk: Path) -> None:
    run = Run()
    with pytest.raises(ValueError, match="no automatic naming"):
        save_state(run.accelerator)
    with pytest.raises(ValueError, match="no automatic naming"):
        load_state(run.accelerator)
    with pytest.raises(ValueError, match="does not exist"):
        load_state(run.accelerator, disk / "none")


run_example = functools.partial(
    jobs.start, "accelerate_loop", imports="tests.crews.accelerate_imports"
)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_kill_in_mid_save_costs_no_more_than_that_checkpoint(disk: Path) -> None:
    saving = ("--steps", 12, "--every", 3, "--ballast", 128)
    whole = finish(run_example(disk / "whole", *saving, "--stock"), disk / "whole")
    shutil.rmtree(disk / "whole")
    run = disk / "killed" / "run"

    def there() -> list[int]:
        return sorted(int(path.name[11:]) for path in run.glob("checkpoints/checkpoint_*"))

    def caught() -> bool:
        with suppress(FileNotFoundError):  # glob() lists a draft that has just been removed
            return bool(there() and list(run.glob(".checkpoint_*/checkpoint_*/model.safetensors")))
        return False

    for _ in range(4):
        process = run_example(run.parent, *saving)
        while process.poll() is None and not caught():
            time.sleep(0.001)
        process.kill()
        if caught():
            break
        shutil.rmtree(run.parent)
    else:
        pytest.fail("no save was caught")
    numbers, before = there(), len(logged(run.parent))
    assert all(check(str(run / "checkpoints" / f"checkpoint_{number}")) for number in numbers)
    let_go(run)
    after = finish(run_example(run.parent, *saving), run.parent)
    first = 3 * (numbers[-1] + 1)
    assert after[:before] == whole[:before]
    assert after[before:] == whole[first:]
    assert there() == [1, 2, 3] and os.listdir(run) == ["checkpoints"], "debris is left"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_ranks_go_on_bit_by_bit(disk: Path) -> None:
    options = ("--steps", 6, "--every", 3)
    whole = finish(run_example(disk / "whole", *options, ranks=2), disk / "whole")
    shutil.copytree(disk / "whole", disk / "again")
    directories = [disk / "again/run/checkpoints" / f"checkpoint_{number}" for number in (0, 1)]
    for directory in directories:
        found = {path.name for path in directory.iterdir()}
        assert {"random_states_0.pkl", "random_states_1.pkl", "model.safetensors"} < found
        listed = json.loads((directory / "fastckpt.json").read_text())["files"]
        assert listed.keys() == found - {"fastckpt.json"} and check(str(directory))
    shutil.rmtree(directories[1])
    again = finish(run_example(disk / "again", *options, ranks=2), disk / "again")
    assert again == whole + whole[3:]
    assert check(str(directories[1]))


under_fsdp = functools.partial(
    jobs.told, "tests/crews/accelerate_fsdp.py", imports="tests.crews.accelerate_imports"
)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_shards_of_fsdp2_go_on_another_number_of_ranks(disk: Path) -> None:
    whole = 64 * 64  # elements of the largest weight
    saved = under_fsdp(disk, "save", 2)
    for told in saved:
        for name in ("ours", "again"):
            assert told[name] == {"collectives": [], "largest": whole // 2}
    names = {"pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "scheduler.bin"}
    for name in ("ours", "again"):
        listed = json.loads((disk / name / "fastckpt.json").read_text())["files"]
        assert names | {"random_states_0.pkl", "random_states_1.pkl"} < listed.keys()
        assert sum(path.endswith(".distcp") for path in listed) == 4
        assert check(str(disk / name))
    if saved[0]["loaded"] is None:
        pytest.skip("this Accelerate does not load what it has saved of an optimizer under FSDP2")
    resumed = {2: [told["loaded"] for told in saved], 3: under_fsdp(disk, "load", 3)}
    for ranks, each in resumed.items():
        for told in each:
            assert told["stock"] == told["ours by stock"] == told["ours"]
            assert told["stock"] == saved[0]["losses"] or ranks != 2
            assert told["largest"] < whole


def test_fsdp_that_gathers_is_refused(disk: Path) -> None:
    plugin = SimpleNamespace(state_dict_type=StateDictType.FULL_STATE_DICT)
    accelerator: Any = SimpleNamespace(
        distributed_type=DistributedType.FSDP,
        project_configuration=ProjectConfiguration(),
        state=SimpleNamespace(fsdp_plugin=plugin),
    )
    with pytest.raises(ValueError, match=r"FULL_STATE_DICT, .* choose SHARDED_STATE_DICT"):
        save_state(accelerator, disk / "a")
