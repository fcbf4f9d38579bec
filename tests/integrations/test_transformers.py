"""transformers' Trainer with checkpoints by fastckpt, against the real package: what a checkpoint
holds, who resumes from it and how exactly, and what is there after a failure or a kill. Also, that
from_pretrained opens an export.

Must not know how a directory is written: tests/directories/test_directory_save.py does.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.kit import jobs
from tests.kit.doubles import file_size_limit
from tests.kit.jobs import finish
from tests.kit.noise import flip
from tests.kit.paths import ROOT

pytest.importorskip("transformers")

from tqdm import tqdm
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    modeling_utils,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import fastckpt
from fastckpt.cli import main
from fastckpt.directories import shelf
from fastckpt.directories.save import wait_for_directories
from fastckpt.directories.verify import check
from fastckpt.errors import CorruptCheckpoint, StorageError
from fastckpt.integrations._fsdp import replaced
from fastckpt.integrations.transformers import AsyncTrainer, _rotate
from fastckpt.saving.pipeline import Pipeline
from tests.kit.doubles import Delay, Recorder, process_on
from tests.kit.options import gathered

tqdm.monitor_interval = 0  # its thread would stay, and a test would take it for one of a save

pytestmark = pytest.mark.usefixtures("drained")
OF_ARGUMENTS = inspect.getsource(inspect.getmodule(TrainingArguments))
LOADS_OPTIMIZER = inspect.getsource(Trainer._load_optimizer_and_scheduler)
CONTEXT, STEPS, EVERY = 16, 8, 2
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
}


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.text = torch.tensor(list((ROOT / "README.md").read_bytes()[: 64 * CONTEXT]))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        window = self.text[number * CONTEXT : (number + 1) * CONTEXT]
        return {"input_ids": window, "labels": window}


class Plain(nn.Module):
    """No PreTrainedModel; two names of one weight, as stock save_file refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def make_model() -> GPT2LMHeadModel:
    set_seed(3)
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))  # with dropout


def make(
    kind: type[Trainer],
    directory: Path,
    model: nn.Module | None = None,
    callbacks: list[TrainerCallback] | None = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    given = {
        "max_steps": STEPS,
        "save_steps": EVERY,
        "per_device_train_batch_size": 4,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return kind(
        model=model or make_model(),
        args=TrainingArguments(output_dir=str(directory), **(given | arguments)),
        train_dataset=Text(),
        eval_dataset=Text(),
        callbacks=callbacks,
        **gathered(**options or {}),
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def numbers(directory: Path) -> list[int]:
    return sorted(int(path.name[11:]) for path in directory.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A run of the stock Trainer that nothing interrupts."""
    directory = tmp_path_factory.mktemp("stock")
    trainer = make(Trainer, directory)
    trainer.train()
    yield directory, trainer
    shutil.rmtree(directory)


def assert_goes_on_like(trainer: Any, stock: Any) -> None:
    """That a resumed run ended where an uninterrupted one did, bit by bit."""
    assert losses(trainer) == losses(stock)
    expected = weights(stock)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(trainer).items())


class Ballast(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ballast", torch.zeros(3 << 20))


class Begun(TrainerCallback):
    """Keeps the handles of saves."""

    def __init__(self) -> None:
        self.handles: list[fastckpt.SaveHandle] = []
        self.trainer: Any = None

    def on_save(self, *_args: Any, **_kwargs: Any) -> None:
        self.handles += self.trainer._saves


class Looks(TrainerCallback):
    """Looks for each checkpoint when it is told of it, as those of W&B and MLflow do."""

    def __init__(self, gate: threading.Event) -> None:
        self.seen: list[bool] = []
        self._gate = gate

    def on_save(self, args: Any, state: Any, *_args: Any, **_kwargs: Any) -> None:
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.seen.append((path / "trainer_state.json").exists())
        self._gate.set()

    def on_step_begin(self, args: Any, state: Any, *_args: Any, **_kwargs: Any) -> None:
        if state.global_step == EVERY:
            self._gate.set()


def test_callbacks_are_told_of_a_checkpoint_when_it_is_there(disk: Path) -> None:
    gate = threading.Event()
    looks = Looks(gate)
    with process_on(Delay("sync", gate)):
        make(AsyncTrainer, disk, Plain(), [looks], max_steps=EVERY + 1).train()
    assert looks.seen == [True, True]


def test_options_of_the_engine_arrive(disk: Path) -> None:
    options: dict[str, Any] = {"backend": "threads", "staging_bytes": "8MiB", "durable": False}
    storage, begun = Recorder(by_engine=True), Begun()
    with process_on(storage):
        trainer = make(AsyncTrainer, disk, Ballast(), [begun], options, max_steps=EVERY)
        begun.trainer = trainer
        trainer.train()
        assert not storage.numbers_of("sync")
    (stats,) = [handle.stats for handle in begun.handles]
    assert "backend 'threads' was" in stats.why
    assert stats.nbytes > 12 << 20 and stats.staged_bytes_max <= 8 << 20
    with pytest.raises(ValueError, match="staging is 'gds', must be 'host' here"):
        make(AsyncTrainer, disk, options={"staging": "gds"})


@pytest.mark.parametrize("fence", ["call", "step"])
def test_checkpoints_are_those_of_the_stock_trainer(
    disk: Path,
    fence: str,
    stock: tuple[Path, Any],
    assert_same: Callable[[Any, Any], None],
) -> None:
    trainer = make(AsyncTrainer, disk, options={"fence": fence})
    trainer.train()
    assert_goes_on_like(trainer, stock[1])
    assert numbers(disk) == numbers(stock[0]) == [2, 4, 6, 8]
    for number in numbers(disk):
        ours, theirs = disk / f"checkpoint-{number}", stock[0] / f"checkpoint-{number}"
        assert {path.name for path in theirs.iterdir()} == FILES
        assert {path.name for path in ours.iterdir()} == FILES | {"fastckpt.json"}
        assert check(str(ours))
        loaded, expected = (
            safetensors.torch.load_file(path / "model.safetensors") for path in (ours, theirs)
        )
        assert "lm_head.weight" not in loaded, "a tied weight was stored twice"
        assert dict(sorted(loaded.items())).keys() == dict(sorted(expected.items())).keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            pair = [torch.load(path / name, weights_only=False) for path in (ours, theirs)]
            assert_same(*pair)
        for name in ("config.json", "generation_config.json", "trainer_state.json"):
            assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())
    with safetensors.safe_open(disk / "checkpoint-2" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    GPT2LMHeadModel.from_pretrained(disk / "checkpoint-8")


def test_the_command_line_tells_whose_checkpoints_they_are(
    disk: Path, stock: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    make(AsyncTrainer, disk, max_steps=EVERY).train()
    capsys.readouterr()
    assert main(["ls", str(stock[0])]) == main(["ls", str(disk)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == [f"checkpoint-{n}" for n in (8, 6, 4, 2)]
    assert all("  no fastckpt.json: " in line for line in lines[:4])
    assert lines[4].endswith(f"  {len(FILES)} files in fastckpt.json  committed")
    for directory in (disk, stock[0]):
        assert main(["inspect", str(directory / "checkpoint-2"), "--json"]) == 0
        sizes = json.loads(capsys.readouterr().out)["file_sizes"]
        assert sizes.keys() - {"fastckpt.json"} == FILES


@pytest.mark.parametrize("kinds", [(AsyncTrainer, AsyncTrainer), (AsyncTrainer, Trainer)])
def test_a_resumed_run_is_bitwise_equal(
    disk: Path, kinds: tuple[type[Trainer], type[Trainer]], stock: tuple[Path, Any]
) -> None:
    make(kinds[0], disk).train()
    for number in (6, 8):
        shutil.rmtree(disk / f"checkpoint-{number}")
    trainer = make(kinds[1], disk)
    trainer.train(resume_from_checkpoint=True)
    assert_goes_on_like(trainer, stock[1])
    assert numbers(disk) == [2, 4, 6, 8]


def test_it_resumes_from_checkpoints_of_the_stock_trainer(
    disk: Path, stock: tuple[Path, Any]
) -> None:
    shutil.copytree(stock[0] / "checkpoint-4", disk / "checkpoint-4")
    trainer = make(AsyncTrainer, disk)
    trainer.train(resume_from_checkpoint=str(disk / "checkpoint-4"))
    assert_goes_on_like(trainer, stock[1])


def test_a_model_of_another_kind_with_tied_weights(disk: Path) -> None:
    set_seed(0)
    trainer = make(AsyncTrainer, disk, Plain())
    trainer.train()
    path = disk / "checkpoint-8" / "model.safetensors"
    loaded = safetensors.torch.load_file(path)
    assert torch.equal(loaded["head.weight"], trainer.model.head.weight)
    set_seed(1)
    resumed = make(Trainer, disk, Plain(), max_steps=9, save_strategy="no")
    resumed._load_from_checkpoint(str(disk / "checkpoint-8"))
    assert torch.equal(resumed.model.embedding.weight, trainer.model.embedding.weight)


def test_the_model_alone(disk: Path) -> None:
    make(AsyncTrainer, disk, save_only_model=True, max_steps=2).train()
    there = {path.name for path in (disk / "checkpoint-2").iterdir()}
    absent = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert there == FILES - absent | {"fastckpt.json"}


def test_old_checkpoints_go_when_newer_ones_are_there(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def remove(path: str, beside: str | None) -> None:
        newest = Path(str(get_last_checkpoint(disk)))
        assert check(str(newest)) and newest != Path(path)
        seen.append((Path(path).name, newest.name))
        real(path)

    real = shelf.remove_directory
    monkeypatch.setattr(shelf, "remove_directory", remove)
    make(AsyncTrainer, disk, save_total_limit=2).train()
    assert numbers(disk) == [6, 8]
    assert [old for old, _new in seen] == ["checkpoint-2", "checkpoint-4"]
    assert not list(disk.glob(".*"))


def test_what_was_just_saved_stays_whatever_its_step(disk: Path) -> None:
    """Trainer takes steps for the order where times are close to each other."""
    for number, time_ns in ((6, 1), (7, 2), (3, 3), (8, 4)):  # 8 was committed meanwhile
        path = disk / f"checkpoint-{number}"
        path.mkdir()
        os.utime(path, ns=(time_ns, time_ns))
    _rotate(str(disk / "checkpoint-3"), 1, None)
    assert numbers(disk) == [3, 8]
    _rotate(str(disk / "checkpoint-7"), 1, None)  # that is gone
    assert numbers(disk) == [3, 8]


@contextmanager
def best_at(*scores: float) -> Iterator[TrainerCallback]:
    """Makes evaluations give these scores, one after another."""

    left = list(scores)

    class Scores(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            given["metrics"]["eval_score"] = left.pop(0)

    yield Scores()


BEST = {
    "eval_strategy": "steps",
    "eval_steps": EVERY,
    "load_best_model_at_end": True,
    "metric_for_best_model": "score",
    "greater_is_better": True,
}


@pytest.mark.parametrize("kind", [Trainer, AsyncTrainer])
@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_model_is_kept_and_loaded(disk: Path, limit: int, kind: type[Trainer]) -> None:
    with best_at(1.0, 5.0, 2.0, 3.0) as scores:
        trainer = make(kind, disk, callbacks=[scores], save_total_limit=limit, **BEST)
        trainer.train()
    assert numbers(disk) == ([4] if limit == 1 else [4, 8])
    assert trainer.state.best_model_checkpoint == str(disk / "checkpoint-4")
    best = safetensors.torch.load_file(disk / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(weights(trainer)[name], tensor) for name, tensor in best.items())
    state = json.loads((disk / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(disk / "checkpoint-4")
    assert state["best_global_step"] == 4


class Full(TrainerCallback):
    """No file may become large between two steps: as if the disk was full."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 in (self.first, self.last + 1):
            wait_for_directories(args.output_dir)  # those that there was room for, or not
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        full = self.first <= state.global_step + 1 <= self.last
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10 if full else most, most))


@file_size_limit(None)  # around a whole test, for pytest's own output may go to a file as well
def test_a_full_disk_ends_training(disk: Path) -> None:
    trainer = make(AsyncTrainer, disk, callbacks=[Full(4, 100)])
    # The saves of steps 4 and 6 may be in flight together: either may fail first.
    with pytest.raises(StorageError, match=r"an earlier save, to .*checkpoint-[46].*too large"):
        trainer.train()
    with suppress(StorageError):  # of a save that was begun before the first one had failed
        trainer.wait_for_checkpoints()
    assert numbers(disk) == [2]
    assert check(str(disk / "checkpoint-2"))


class Steps(TrainerCallback):
    """Keeps the steps of the checkpoints that it is told of."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save(self, args: Any, state: Any, *_args: Any, **_kwargs: Any) -> None:
        self.steps.append(state.global_step)


@file_size_limit(None)  # around a whole test, for pytest's own output may go to a file as well
def test_a_best_checkpoint_that_could_not_be_saved_is_none(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with best_at(1.0, 5.0, 2.0, 3.0) as scores:
        options = {"on_error": "warn"}
        callbacks = [scores, Full(4, 4), steps := Steps()]
        trainer = make(
            AsyncTrainer, disk, callbacks=callbacks, options=options, save_total_limit=1, **BEST
        )
        trainer.train()
    assert "could not be saved, so no best checkpoint exists" in caplog.text
    assert trainer.state.best_model_checkpoint is None
    assert numbers(disk)[-1] == 8
    assert steps.steps == [2, 6, 8], "a callback is told of a checkpoint that is not there"


DAMAGE: dict[str, Callable[[Path], None]] = {
    "model.safetensors": lambda path: flip(path, -5),
    "optimizer.pt": lambda path: flip(path, -5),
    "rng_state.pth": lambda path: path.unlink(),
    "trainer_state.json": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "fastckpt.json": lambda path: path.write_bytes(path.read_bytes()[:-1]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(
    disk: Path, name: str, stock: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    make(AsyncTrainer, disk, save_total_limit=2).train()
    DAMAGE[name](disk / "checkpoint-8" / name)
    trainer = make(AsyncTrainer, disk)
    trainer.train(resume_from_checkpoint=True)
    assert "skipping " in caplog.text and name in caplog.text
    assert_goes_on_like(trainer, stock[1])
    assert check(str(disk / "checkpoint-8")), "the damaged one was not replaced"


def test_a_damaged_checkpoint_that_was_named_is_refused(disk: Path) -> None:
    make(AsyncTrainer, disk, max_steps=2).train()
    flip(disk / "checkpoint-2" / "model.safetensors", -5)
    for named in (str(disk / "checkpoint-2"), True):
        with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors"):
            make(AsyncTrainer, disk).train(resume_from_checkpoint=named)
    unverified = make(AsyncTrainer, disk, options={"verify": False}, max_steps=3)
    unverified.train(resume_from_checkpoint=str(disk / "checkpoint-2"))


class Ends(TrainerCallback):
    """Ends training by an error at the step after the first save."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == EVERY:
            raise InterruptedError


@pytest.mark.parametrize("named", [True, False])
def test_a_new_trainer_resumes_from_what_the_one_before_is_saving(
    named: bool, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, wait_for = threading.Event(), Pipeline.wait_for

    def waited(pipeline: Pipeline, *given: Any, **options: Any) -> None:
        gate.set()
        wait_for(pipeline, *given, **options)

    with process_on(Delay("sync", gate)):
        with pytest.raises(InterruptedError):
            make(AsyncTrainer, disk / "run", callbacks=[Ends()]).train()
        assert numbers(disk / "run") == []
        monkeypatch.setattr(Pipeline, "wait_for", waited)
        where = disk / ("another" if named else "run")
        trainer = make(AsyncTrainer, where, max_steps=EVERY + 1)
        newest = str(disk / "run" / "checkpoint-2") if named else True
        trainer.train(resume_from_checkpoint=newest)
    assert len(losses(trainer)) == EVERY + 1 and numbers(disk / "run") == [2] + [3] * (not named)


def test_nothing_to_resume_from_is_told_by_trainer(disk: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        make(AsyncTrainer, disk).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        pytest.param(
            {"enable_jit_checkpoint": True},
            "enable_jit_checkpoint",
            marks=pytest.mark.skipif(
                "enable_jit_checkpoint" not in OF_ARGUMENTS,
                reason="this Trainer has no such option",
            ),
        ),
        ({"push_to_hub": True, "hub_model_id": "a/b"}, "push_to_hub"),
    ],
)
def test_what_would_be_written_in_other_ways_is_refused(
    disk: Path, arguments: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncTrainer, "init_hf_repo", lambda *_args, **_given: None)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ValueError, match=what):
            make(AsyncTrainer, disk, **arguments)
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_another_trainer_can_be_extended(disk: Path) -> None:
    class Theirs(Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            within = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            (within / "theirs.json").write_text("1")

    class Ours(AsyncTrainer, Theirs):
        pass

    make(Ours, disk, max_steps=2).train()
    listed = json.loads((disk / "checkpoint-2" / "fastckpt.json").read_text())["files"]
    assert "theirs.json" in listed and check(str(disk / "checkpoint-2"))


def test_models_saved_by_hand_are_written_by_transformers(disk: Path) -> None:
    trainer = make(AsyncTrainer, disk)
    trainer.save_model(str(disk / "mine"))
    assert {path.name for path in (disk / "mine").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "training_args.bin",
    }


def test_other_threads_do_not_see_what_is_replaced() -> None:
    original = modeling_utils.safe_save_file
    calls: list[str] = []

    def by(_original: Any, name: str) -> None:
        calls.append(name)

    def elsewhere() -> None:
        try:
            modeling_utils.safe_save_file("elsewhere")
        except TypeError:
            calls.append("the original, which wants a file name")

    with replaced(modeling_utils, "safe_save_file", by):
        modeling_utils.safe_save_file("here")
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert calls == ["here", "the original, which wants a file name"]
    assert modeling_utils.safe_save_file is original


run_example = functools.partial(
    jobs.start, "transformers_trainer", imports="tests.crews.trainer_imports"
)


SAVING = ("--steps", 12, "--every", 3, "--ballast", 128)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_ranks_go_on_bit_by_bit(disk: Path) -> None:
    options = ("--steps", 4, "--every", 2)
    whole = finish(run_example(disk / "whole", *options, ranks=2), disk / "whole")
    shutil.copytree(disk / "whole", disk / "again")
    directories = [disk / "again" / "run" / f"checkpoint-{number}" for number in (2, 4)]
    for directory in directories:
        found = {path.name for path in directory.iterdir()}
        both = {"rng_state_0.pth", "rng_state_1.pth", "fastckpt.json"}
        assert found == FILES - {"rng_state.pth"} | both
        listed = json.loads((directory / "fastckpt.json").read_text())["files"]
        assert listed.keys() == found - {"fastckpt.json"} and check(str(directory))
    shutil.rmtree(directories[1])
    if 'device.type != "cpu"' not in LOADS_OPTIMIZER:
        pytest.skip("this Trainer loads no optimizer to the CPUs of several ranks")
    again = finish(run_example(disk / "again", *options, ranks=2), disk / "again")
    assert again == whole + whole[2:]
    assert check(str(directories[1]))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif("fsdp_version" not in OF_ARGUMENTS, reason="this Trainer has no FSDP2")
def test_shards_of_fsdp2_go_on_another_number_of_ranks(disk: Path) -> None:
    told = functools.partial(
        jobs.told, "tests/crews/trainer_fsdp.py", disk, imports="tests.crews.trainer_imports"
    )
    first = told("save", 2)[0]
    assert first["whole"]["ours"] == first["whole"]["stock"] == first["again"]
    assert "{'state_dict_type': 'SHARDED_STATE_DICT'}" in first["refusal"]
    assert numbers(disk / "ours") == [1, 2]
    listed = json.loads((disk / "ours/checkpoint-1/fastckpt.json").read_text())["files"]
    assert sum(name.endswith(".distcp") for name in listed) == 4
    assert check(str(disk / "ours/checkpoint-1"))
    resumed = told("load", 3)[0]
    assert resumed["stock"] == resumed["ours"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("when", ["within", "before"])
def test_a_rank_that_fails_keeps_all_from_committing(when: str, disk: Path) -> None:
    """Whether or not Trainer's own save, which runs collectives, has begun there."""
    job = jobs.Job(
        "tests/crews/trainer_life.py",
        disk,
        disk / "run",
        when,
        ranks=2,
        imports="tests.crews.trainer_imports",
    )
    said = job.finish()
    assert numbers(disk / "run") == [2, 6]
    assert not list((disk / "run").glob(".*"))
    told = re.findall(r"checkpoint-4' was not saved: (\w+): ", said)
    own = "CheckpointError" if when == "within" else "StorageError"
    assert sorted(told) == sorted(["PeerFailed", own])
    assert said.count("trained to step 6") == 2


def test_from_pretrained_opens_an_export(disk: Path) -> None:
    config = GPT2Config(vocab_size=90, n_positions=16, n_embd=24, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    config.save_pretrained(disk / "config")
    (file,) = (disk / "config").iterdir()
    for shard_bytes in ("5GB", 10_000):
        fastckpt.export(model, disk / "a", files=[file], shard_bytes=shard_bytes).result()
        again = GPT2LMHeadModel.from_pretrained(disk / "a")
        assert again.lm_head.weight is again.transformer.wte.weight, "written once, and tied anew"
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
    assert (disk / "a" / "config.json").read_bytes() == file.read_bytes()
    assert len([*disk.glob("a/model-*.safetensors")]) > 2
    fastckpt.export(model, disk / "a", dtype=torch.bfloat16, files=[file]).result()
    argument = "dtype" if hasattr(PretrainedConfig, "dtype") else "torch_dtype"
    half = GPT2LMHeadModel.from_pretrained(disk / "a", **{argument: torch.bfloat16})
    for name, tensor in model.state_dict().items():
        assert torch.equal(half.state_dict()[name], tensor.to(torch.bfloat16)), name
    wait_for_directories(str(disk))
