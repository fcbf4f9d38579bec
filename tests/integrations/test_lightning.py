"""Lightning's checkpoints through fastckpt, with real Trainers on the CPU and jobs that are killed.

Responsible for: files that stock Lightning and torch read and the other way round, old checkpoints
that outlive the saves of newer ones, links that name what is there, and errors that are told. It
must not know how a file is written.
"""

from __future__ import annotations

import copy
import errno
import importlib
import json
import logging
import os
import pickle
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from tests.kit import jobs
from tests.kit.doubles import file_size_limit
from tests.kit.interpreters import let_go
from tests.kit.jobs import Job
from tests.kit.noise import flip
from tests.kit.saves import wait_until
from tests.kit.storm import Storm

pytest.importorskip("lightning")

import lightning.pytorch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import OnExceptionCheckpoint

import fastckpt
from fastckpt import CorruptCheckpoint, StorageError
from fastckpt.directories.verify import check
from fastckpt.integrations import _lightning
from fastckpt.integrations.lightning import FastckptCheckpointIO, FastckptModelParallelStrategy
from fastckpt.latch import Latch
from fastckpt.saving import pipeline
from tests.kit.doubles import Crash, Recorder, power_cuts, process_on

STEPS, EVERY = 9, 2
FIRST, SECOND = "a.ckpt", "b.ckpt"
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


def package_of(name: str) -> Any:
    """What a test needs of `lightning` or of `pytorch_lightning`."""
    base = {"lightning": "lightning.pytorch"}.get(name, name)
    module = pytest.importorskip(base)
    return SimpleNamespace(
        Trainer=module.Trainer,
        Module=module.LightningModule,
        ModelCheckpoint=importlib.import_module(f"{base}.callbacks").ModelCheckpoint,
        IO=importlib.import_module(f"fastckpt.integrations.{name}").FastckptCheckpointIO,
    )


def model_of(base: Any, fails_at: int | None = None) -> Any:
    """A small model whose batch follows from the step."""

    class Model(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))

        def training_step(self, _batch: Any, _number: int) -> torch.Tensor:
            if self.global_step == fails_at:
                raise ArithmeticError("no more")
            generator = torch.Generator().manual_seed(self.global_step)
            loss: torch.Tensor = self.layers(torch.randn(4, 64, generator=generator)).pow(2).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Model()


def fit(
    directory: Path,
    io: Any = None,
    *,
    package: str = "lightning",
    steps: int = STEPS,
    resume: Path | str | None = None,
    fails_at: int | None = None,
    callbacks: tuple[Any, ...] = (),
    **options: Any,
) -> Any:
    """Trains with a ModelCheckpoint, by default one of the top two and the last; the model."""
    names = package_of(package)
    kept = {"monitor": "step", "mode": "max", "save_top_k": 2, "save_last": True} | options
    checkpoint = names.ModelCheckpoint(
        dirpath=directory, filename="{step}", every_n_train_steps=EVERY, **kept
    )
    trainer = names.Trainer(
        plugins=[] if io is None else [io],
        callbacks=[checkpoint, *callbacks],
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = model_of(names.Module, fails_at)
    trainer.fit(model, torch.utils.data.DataLoader(range(1000)), ckpt_path=resume)
    return model


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def state(value: float = 0.0) -> dict[str, Any]:
    return {"weight": torch.full((1 << 15,), value), "global_step": int(value)}


@contextmanager
def held_up() -> Iterator[Callable[[], None]]:
    """No save becomes durable before the end, or before what is given is called."""
    storage, gate = pipeline.current().storage, threading.Event()
    real = storage.sync

    def sync(fd: int) -> None:
        gate.wait()
        real(fd)

    with patch.object(storage, "sync", sync):
        try:
            yield gate.set
        finally:
            gate.set()


class FullAt(lightning.pytorch.Callback):  # type: ignore[misc]
    """The disk is full for the save after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.set(trainer, full=trainer.global_step == self.step - 1)

    def on_exception(self, trainer: Any, *_: Any) -> None:
        self.set(trainer, full=False)

    def set(self, trainer: Any, full: bool) -> None:
        for handle in trainer.strategy.checkpoint_io._saves:
            handle.wait_done()
        soft, hard = self.limit
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10 if full else soft, hard))


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_files_are_those_of_stock_lightning(
    package: str, asynchronous: bool, disk: Path, assert_same: Callable[[Any, Any], None]
) -> None:
    fit(disk / "ours", package_of(package).IO(asynchronous=asynchronous), package=package)
    fit(disk / "stock", package=package)
    assert names(disk / "ours") == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"]
    assert names(disk / "ours") == names(disk / "stock")
    for name in names(disk / "ours"):
        ours, stock = (torch.load(disk / way / name) for way in ("ours", "stock"))
        del ours["callbacks"], stock["callbacks"]  # these hold paths
        assert_same(ours, stock)


@pytest.mark.parametrize(("saved", "loaded"), [("ours", "stock"), ("stock", "ours")])
def test_a_resumed_fit_goes_on_bit_by_bit(saved: str, loaded: str, disk: Path) -> None:
    plugins = {"ours": FastckptCheckpointIO(), "stock": None}
    unbroken = fit(disk / "unbroken")
    fit(disk / "run", plugins[saved], steps=5)
    resumed = fit(disk / "run", plugins[loaded], resume="last")
    for name, value in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    ends = [torch.load(disk / run / "last.ckpt")["global_step"] for run in ("run", "unbroken")]
    assert ends[0] == ends[1]


def test_an_asynchronous_one_returns_before_and_what_it_was_given_may_change(disk: Path) -> None:
    io, given = FastckptCheckpointIO(), state(1)
    with held_up() as release:
        io.save_checkpoint(given, disk / "new" / FIRST)
        given["weight"].fill_(7)
        assert not (disk / "new" / FIRST).exists()
        threading.Timer(0.1, release).start()
        found = io.load_checkpoint(disk / "new" / FIRST)  # waits
    assert torch.equal(found["weight"], torch.ones(1 << 15))
    io.teardown()


def test_a_file_is_removed_when_a_newer_one_has_committed(disk: Path) -> None:
    io = FastckptCheckpointIO()
    io.save_checkpoint(state(1), disk / FIRST)
    io.teardown()
    with held_up() as release:
        io.save_checkpoint(state(2), disk / SECOND)
        io.remove_checkpoint(disk / FIRST)
        time.sleep(0.05)
        assert FIRST in names(disk)
        release()
        io.teardown()
    assert names(disk) == [SECOND]


def test_a_file_stays_when_the_newer_one_failed_until_one_has_committed(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = FastckptCheckpointIO(options=fastckpt.SaveOptions(on_error="warn"))
    io.save_checkpoint(state(1), disk / FIRST)
    io.teardown()
    with file_size_limit(16 << 10):
        io.save_checkpoint(state(2), disk / SECOND)
        io.remove_checkpoint(disk / FIRST)
        io.teardown()
    assert names(disk) == [FIRST]
    wait_until(lambda: f"{str(disk / SECOND)!r} was not saved" in caplog.text)
    io.save_checkpoint(state(3), disk / "c.ckpt")
    io.teardown()
    assert names(disk) == ["c.ckpt"]


def test_whoever_waits_for_a_removal_finds_the_file_that_is_kept(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io, found = FastckptCheckpointIO(options=fastckpt.SaveOptions(on_error="warn")), []

    class Seen(Latch):
        def set(self) -> None:
            found.append(list(io._kept))
            super().set()

    monkeypatch.setattr(_lightning, "Latch", Seen)
    with file_size_limit(16 << 10):
        io.save_checkpoint(state(2), disk / SECOND)
        io.remove_checkpoint(disk / FIRST)
        io.teardown()
    assert found == [[str(disk / FIRST)]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", ["first", "next", "again", "over a link"])
def test_any_operation_of_a_save_may_be_the_last(memory: Path, kind: str, storm: Storm) -> None:
    """Of the checkpoints before and the new one there is one, and every one is whole, where a save
    is followed by the removal of the one before.
    """
    before = memory / "before"
    inside = Path("new/er") if kind == "first" else Path()
    name = {"again": FIRST, "over a link": "last.ckpt"}.get(kind, SECOND)
    before.mkdir()
    if kind != "first":
        FastckptCheckpointIO(asynchronous=False).save_checkpoint(state(1), before / FIRST)
    if kind == "over a link":
        (before / name).symlink_to(FIRST)

    def save(storage: Crash, live: Path) -> bool:
        io = FastckptCheckpointIO()
        with process_on(storage) as current:
            io.save_checkpoint(state(2), live / inside / name)
            if kind == "next":
                io.remove_checkpoint(live / FIRST)
            current.drain()
            io.teardown()
        return True

    def find(after: Path) -> dict[str, float]:
        there = [path.name for path in (after / inside).glob("*.ckpt")]
        found = {each: fastckpt.load(after / inside / each) for each in there}
        assert all(bool((its["weight"] == its["global_step"]).all()) for its in found.values())
        return {each: value["global_step"] for each, value in found.items()}

    steps = set()
    for cut in power_cuts(before, save, find, storm=storm):
        assert kind == "first" or FIRST in cut.found or cut.found.get(name) == 2, cut.text
        assert kind != "over a link" or cut.found.keys() == {FIRST, name}, cut.text
        assert cut.found.get(name) == 2 or not cut.told, cut.text
        steps.add(cut.found.get(name))
    assert cut.count > 15 and steps >= {2}


def test_a_directory_that_cannot_be_made_is_a_failed_save(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (disk / "file").touch()
    io = FastckptCheckpointIO(options=fastckpt.SaveOptions(on_error="warn"))
    io.save_checkpoint(state(1), disk / FIRST)
    io.save_checkpoint(state(2), disk / "file" / SECOND)
    io.remove_checkpoint(disk / FIRST)
    io.teardown()
    assert names(disk) == [FIRST, "file"]
    assert f"{str(disk / 'file' / SECOND)!r} was not saved" in caplog.text
    with pytest.raises(StorageError, match="make directory"):
        FastckptCheckpointIO().save_checkpoint(state(3), disk / "file" / SECOND)


def test_a_file_whose_save_is_in_flight_is_removed_after_it(disk: Path) -> None:
    io = FastckptCheckpointIO()
    with held_up():
        io.save_checkpoint(state(1), disk / FIRST)
        io.save_checkpoint(state(2), disk / SECOND)
        io.remove_checkpoint(disk / FIRST)
    io.teardown()
    assert names(disk) == [SECOND]
    io.remove_checkpoint(disk / SECOND)
    assert names(disk) == []
    io.remove_checkpoint(disk / SECOND)  # as the stock one


def test_a_file_that_is_saved_again_is_not_removed(disk: Path) -> None:
    io = FastckptCheckpointIO()
    io.save_checkpoint(state(1), disk / FIRST)
    with held_up():
        io.save_checkpoint(state(2), disk / SECOND)
        io.remove_checkpoint(disk / FIRST)
        io.save_checkpoint(state(3), disk / FIRST)
    io.teardown()
    assert torch.load(disk / FIRST)["global_step"] == 3


def test_a_failure_is_raised_at_the_next_save_or_at_the_end(disk: Path) -> None:
    io = FastckptCheckpointIO()
    not_begun = f"; this save, to {str(disk / SECOND)!r}, was not begun"
    for told, consequence in (
        (io.teardown, ""),
        (lambda: io.save_checkpoint(state(3), disk / SECOND), not_begun),
    ):
        with file_size_limit(16 << 10):
            io.save_checkpoint(state(1), disk / FIRST)
            io._saves.wait()
        with pytest.raises(StorageError) as failure:
            told()
        assert failure.value.errno == errno.EFBIG
        earlier = f"an earlier save, to {str(disk / FIRST)!r}, failed: {failure.value.__cause__}"
        assert str(failure.value) == earlier + consequence
        io.teardown()  # it was told
    assert names(disk) == []


def test_a_full_disk_ends_the_fit_with_what_was_saved_before(disk: Path) -> None:
    with pytest.raises(StorageError):
        fit(disk, FastckptCheckpointIO(), callbacks=(FullAt(6),))
    assert names(disk) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert {torch.load(path)["global_step"] for path in disk.iterdir()} == {2, 4}


def test_a_save_on_an_exception_is_there_when_it_is_raised(disk: Path) -> None:
    with pytest.raises(ArithmeticError, match="no more"):
        fit(
            disk,
            FastckptCheckpointIO(),
            fails_at=7,
            callbacks=(OnExceptionCheckpoint(disk, filename="exception"),),
        )
    assert torch.load(disk / "exception.ckpt")["global_step"] == 7
    resumed = fit(disk, FastckptCheckpointIO(), resume=disk / "exception.ckpt")
    unbroken = fit(disk / "unbroken")
    for name, value in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


class LinksHold(lightning.pytorch.Callback):  # type: ignore[misc]
    """Looks after each step whether last.ckpt names a whole checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.last, self.seen = directory / "last.ckpt", []

    def on_train_batch_end(self, *_: Any) -> None:
        if self.last.is_symlink():
            self.seen.append(self.last.exists() and torch.load(self.last)["global_step"])


def test_a_link_to_the_last_names_what_is_there(disk: Path) -> None:
    links = LinksHold(disk)
    fit(disk, FastckptCheckpointIO(), callbacks=(links,), save_last="link")
    # The first is made when there was nothing that a link could lose.
    assert set(links.seen[:2]) <= {False, 2} and links.seen[2:] == [4, 4, 6, 6, 8]
    assert os.readlink(disk / "last.ckpt") == "step=8.ckpt"
    fit(disk, FastckptCheckpointIO(), resume="last", steps=11, save_last="link")
    assert torch.load(disk / "last.ckpt")["global_step"] == 10


def test_a_failed_save_leaves_the_link(disk: Path) -> None:
    for on_error in ("raise", "warn"):
        io = FastckptCheckpointIO(options=fastckpt.SaveOptions(on_error=on_error))
        with pytest.raises(StorageError):
            fit(disk / on_error, io, callbacks=(FullAt(6),), save_last="link")
        assert os.readlink(disk / on_error / "last.ckpt") == "step=4.ckpt"
        assert torch.load(disk / on_error / "last.ckpt")["global_step"] == 4


def test_a_save_replaces_a_link_and_not_what_it_names(disk: Path) -> None:
    io = FastckptCheckpointIO()
    io.save_checkpoint(state(1), disk / FIRST)
    io.teardown()
    (disk / "last.ckpt").symlink_to(FIRST)
    (disk / "nowhere.ckpt").symlink_to("missing.ckpt")
    with file_size_limit(16 << 10), pytest.raises(StorageError):
        io.save_checkpoint(state(2), disk / "last.ckpt")
    assert torch.load(disk / "last.ckpt")["global_step"] == 1
    for name in ("last.ckpt", "nowhere.ckpt"):
        io.save_checkpoint(state(2), disk / name)
        io.teardown()
        assert not (disk / name).is_symlink()
        assert torch.load(disk / name)["global_step"] == 2
    assert torch.load(disk / FIRST)["global_step"] == 1


def test_what_slurm_requeues_is_there_before(disk: Path) -> None:
    io = FastckptCheckpointIO()
    io.save_checkpoint(state(1), disk / "hpc_ckpt_1.ckpt")
    assert torch.load(disk / "hpc_ckpt_1.ckpt")["global_step"] == 1


class Interrupting:
    """Has a signal come while it is pickled."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(100):
            pass  # the handler runs between two instructions
        return (list, ())


def test_a_signal_handler_may_save_in_the_midst_of_a_save(disk: Path) -> None:
    io = FastckptCheckpointIO()
    before = signal.signal(signal.SIGUSR1, lambda *_: io.save_checkpoint(state(2), disk / SECOND))
    try:
        io.save_checkpoint({"odd": Interrupting()}, disk / FIRST)
    finally:
        signal.signal(signal.SIGUSR1, before)
    io.teardown()
    assert torch.load(disk / FIRST, weights_only=False) == {"odd": []}
    assert torch.load(disk / SECOND)["global_step"] == 2


def test_urls_of_files_are_paths_and_others_are_not_ours(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = FastckptCheckpointIO(asynchronous=False)
    io.save_checkpoint(state(1), f"file://{disk / FIRST}")
    assert io.load_checkpoint(f"file://{disk / FIRST}")["global_step"] == 1
    with pytest.raises(ValueError, match="must be on a mounted file system"):
        io.save_checkpoint(state(1), "memory://a.ckpt")
    TorchCheckpointIO().save_checkpoint(state(2), "memory://a.ckpt")
    assert io.load_checkpoint("memory://a.ckpt")["global_step"] == 2
    io.remove_checkpoint("memory://a.ckpt")
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint("memory://a.ckpt")


def test_what_it_does_not_know_is_refused(disk: Path) -> None:
    with pytest.raises(ValueError, match=r"fence is 'step', must be 'call' here: callbacks"):
        FastckptCheckpointIO(options=fastckpt.SaveOptions(fence="step"))
    with pytest.raises(TypeError, match="storage_options"):
        FastckptCheckpointIO().save_checkpoint(state(), disk / FIRST, {"a": 1})
    assert names(disk) == []


def test_options_of_the_engine_arrive(disk: Path) -> None:
    options = fastckpt.SaveOptions(
        backend="threads", staging_bytes="8MiB", durable=False, staging="gds"
    )
    io, storage = FastckptCheckpointIO(options=options), Recorder(by_engine=True)
    with process_on(storage):
        io.save_checkpoint({"weight": torch.zeros(3 << 20)}, disk / FIRST)
        stats = cast(Any, io._saves.last).result()
        assert not storage.numbers_of("sync")
    assert "backend 'threads' was" in stats.why
    assert stats.nbytes > 12 << 20 and stats.staged_bytes_max <= 8 << 20


def test_fabric_saves_and_loads_too(disk: Path) -> None:
    io = FastckptCheckpointIO()
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[io])
    model = torch.nn.Linear(4, 4)
    fabric.save(disk / FIRST, {"model": model, "step": 3})
    other = torch.nn.Linear(4, 4)
    remainder = fabric.load(disk / FIRST, {"model": other})
    assert torch.equal(other.weight, model.weight) and remainder == {"step": 3}
    io.teardown()


def job(cwd: Path, *options: object, ranks: int = 1) -> Job:
    """The example, in a process of its own or one for each rank; its output goes to a file."""
    saving = ("--devices", ranks, "--preset", "tiny", "--every", 3, "--loss-log", "losses")
    script = "examples/lightning_fit.py"
    return Job(script, cwd, *saving, *options, ranks=ranks, imports="tests.crews.lightning_imports")


def losses(cwd: Path) -> list[tuple[int, str]]:
    records = [json.loads(line) for line in (cwd / "losses").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_killed_fit_goes_on_with_ddp_from_its_last_whole_checkpoint(disk: Path) -> None:
    killed = job(disk, "--steps", 1000, "--ballast", 24)
    run, deadline = disk / "run", time.monotonic() + 120
    while not ((run / "last.ckpt").exists() and list(run.glob(".*.tmp"))):
        assert killed.poll() is None and time.monotonic() < deadline, (disk / "output").read_text()
        time.sleep(0.002)
    killed.kill()
    let_go(run)
    steps = {path.name: fastckpt.load(path)["global_step"] for path in run.glob("*.ckpt")}
    first = steps.pop("last.ckpt")
    assert all(name == f"step={step}.ckpt" for name, step in steps.items())
    before = dict(losses(disk))
    (disk / "losses").unlink()
    options = ("--steps", first + 4, "--ballast", 24)
    assert job(disk, *options, ranks=2).wait(150) == 0, (disk / "output").read_text()
    after = losses(disk)
    assert [step for step, _loss in after] == [*range(first, first + 4)]
    saved = fastckpt.load(run / "last.ckpt")
    assert f"step={first + 3}.ckpt" in names(run)
    assert saved["global_step"] in (first + 3, first + 4)  # Lightning 2.5 saves at the end, too
    assert after[0][0] in before  # of this rank's half of the batch, so not comparable by value
    assert not list(run.glob(".last.ckpt*"))
    shutil.rmtree(run)  # debris of names that no later save has


def test_a_copy_after_a_save_has_the_settings_alone(disk: Path) -> None:
    """As of a Trainer that is copied, or sent to another process."""
    plugin = FastckptCheckpointIO(options=fastckpt.SaveOptions(on_error="warn", durable=False))
    plugin.save_checkpoint(state(1), disk / FIRST)
    plugin.save_checkpoint(state(2), disk / SECOND)
    plugin.remove_checkpoint(disk / FIRST)
    for other in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert other._options == fastckpt.SaveOptions(on_error="warn", durable=False)
        assert not list(other._saves) and not other._removals
        other.save_checkpoint(state(3), disk / "c.ckpt")
        other.teardown()
    plugin.teardown()
    assert sorted(path.name for path in disk.iterdir()) == [SECOND, "c.ckpt"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_shards_go_on_another_number_of_ranks(disk: Path) -> None:
    script, imports = "tests/crews/lightning_shards.py", "tests.crews.lightning_imports"
    for of_rank in jobs.told(script, disk, "save", 2, imports=imports):
        assert of_rank["ours"] == of_rank["stock"]
        assert of_rank["copies of stock"] > 0 == of_rank["copies of ours"]
    assert names(disk / "ours") == names(disk / "stock") == ["step=2.ckpt", "step=3.ckpt"]
    assert check(str(disk / "ours/step=2.ckpt"))
    resumed = jobs.told(script, disk, "load", 3, imports=imports)[0]
    assert resumed["ours by ours"] == resumed["ours by stock"] == resumed["stock by stock"]
    flip(disk / "ours/step=2.ckpt/meta.pt", -9)
    with pytest.raises(CorruptCheckpoint, match=r"meta\.pt"):
        FastckptModelParallelStrategy().load_checkpoint(disk / "ours/step=2.ckpt")


def test_a_strategy_for_shards_needs_the_checkpoint_io(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TorchCheckpointIO.*needs Trainer\(plugins="):
        FastckptModelParallelStrategy().save_checkpoint({}, tmp_path / "a.ckpt")
