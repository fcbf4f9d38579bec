"""torchtitan's contract of a checkpoint manager: what fastckpt's saves and when, where a run
begins, and which settings are refused. Real containers of torchtitan hold a small model.

Must not know how a step is written: tests/steps does.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

pytest.importorskip("torchtitan", reason="torchtitan is missing, which needs Python 3.11")

import tyro
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager

import fastckpt
from fastckpt.errors import IncompatibleCheckpoint
from fastckpt.integrations.torchtitan import FastckptCheckpointer, _of_all, _OwnData
from tests.crews import torchtitan_bodies as bodies
from tests.crews.group_crew import Nursery
from tests.kit.jobs import Job, logged
from tests.kit.torchtitan import Adapter, Loader, Model, Run

pytestmark = pytest.mark.usefixtures("drained")
IMPORTS = "tests.crews.torchtitan_imports"


class Halves(Model):
    """A model whose state_dict() has new tensors, as torchtitan's with fused weights have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._split)

    @staticmethod
    def _split(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        whole = state.pop("weight")
        state["left"], state["right"] = whole[:, :450].contiguous(), whole[:, 450:].contiguous()


@pytest.fixture
def run(disk: Path) -> Iterator[Callable[..., Run]]:
    """`run(...)`: a Run in the test's directory, closed when the test is over."""
    made: list[Run] = []

    def make(**settings: Any) -> Run:
        made.append(Run(disk, **settings))
        return made[-1]

    yield make
    for each in made:
        each.checkpointer.close()


Runs = Callable[..., Run]
Same = Callable[[Any, Any], None]


@pytest.mark.parametrize("fence", ["call", "step"])
def test_save_and_load_restore_all_of_the_state(run: Runs, fence: str, assert_same: Same) -> None:
    before = run(options=fastckpt.SaveOptions(fence=fence))
    before.train(3)
    expected = before.state()
    before.checkpointer.maybe_wait_for_saving()
    assert before.checkpointer.save_future is None
    after = run()
    assert after.checkpointer.load()
    assert_same(after.state(), expected)


def test_what_follows_the_wait_for_staging_is_not_in_the_step(run: Runs, assert_same: Same) -> None:
    before = run()
    expected = before.state()["model"]
    before.checkpointer.save(1)
    before.checkpointer.maybe_wait_for_staging()
    before.model.weight.data.zero_()
    before.checkpointer.maybe_wait_for_saving()
    after = run()
    after.checkpointer.load()
    assert_same(dict(after.model.state_dict()), expected)
    stored = fastckpt.open(before.folder / "step-00000001")
    assert not [name for name in stored if "frequencies" in name]  # a buffer that is not saved


def test_tensors_that_hooks_of_the_model_make_can_be_saved_again_at_once(run: Runs) -> None:
    here = run(model=Halves)
    for step in (1, 2, 3):
        here.checkpointer.save(step)
        here.model.bias.data.add_(1)
    assert here.steps() == [1, 2, 3]
    assert torch.equal(
        fastckpt.open(here.folder / "step-00000002")["model/right"][:],
        here.model.weight[:, 450:],
    )


@pytest.mark.parametrize(
    ("settings", "saved"),
    [
        ({"interval": 3}, [3, 4]),
        ({"interval": 3, "enable_first_step_checkpoint": True}, [1, 3, 4]),
        ({"interval": 1, "keep_latest_k": 2}, [3, 4]),
        ({"interval": 1, "keep_latest_k": 0}, [1, 2, 3, 4]),
        ({"interval": 1, "load_only": True}, []),
        ({"interval": 1, "enable": False}, []),
    ],
)
def test_policies_say_which_steps_there_are(
    run: Runs, settings: dict[str, Any], saved: list[int]
) -> None:
    here = run(**settings)
    begun = [step for step in (1, 2, 3) if here.checkpointer.save(step)]
    begun += [4] if here.checkpointer.save(4, last_step=True) else []
    assert {*saved} <= {*begun}
    here.checkpointer.close()
    assert fastckpt.Checkpointer(here.folder).steps() == saved


def test_a_disabled_one_does_nothing(run: Runs) -> None:
    checkpointer = run(enable=False).checkpointer
    assert not checkpointer.load() and not checkpointer.save(1, last_step=True)
    checkpointer.maybe_wait_for_staging()
    checkpointer.maybe_wait_for_saving()


def test_a_run_begins_anew_where_nothing_is_saved(run: Runs) -> None:
    assert not run().checkpointer.load()


@pytest.mark.parametrize("saved", [False, True])
def test_a_step_that_is_not_there_is_named(run: Runs, saved: bool) -> None:
    before = run()
    if saved:
        before.train(2)
        before.checkpointer.maybe_wait_for_saving()
    there = r"has the steps \[1, 2\]" if saved else "has no steps"
    with pytest.raises(FileNotFoundError, match=f"--checkpoint.load_step=5 not found.*{there}"):
        run().checkpointer.load(step=5)


@pytest.mark.multiprocess
def test_the_first_ranks_listing_decides_for_all(nursery: Nursery, disk: Path) -> None:
    with nursery.crew(2) as crew:
        assert crew(bodies.train_and_load, str(disk)) == [(True, 2)] * 2


def test_the_step_that_is_asked_for_is_loaded(run: Runs) -> None:
    before = run()
    before.train(3)
    before.checkpointer.maybe_wait_for_saving()
    after = run()
    after.checkpointer.load(step=2)
    assert after.trainer.step == 2


def test_the_last_step_has_the_model_alone_in_the_dtype_of_exports(run: Runs) -> None:
    before = run(last_save_model_only=True, export_dtype="bfloat16")
    before.checkpointer.save(1, last_step=True)
    path = before.folder / "step-00000001"
    assert before.checkpointer.save_future is None  # it was waited for
    stored = fastckpt.open(path)
    assert sorted(stored) == ["model/bias", "model/weight"]
    assert {stored[name].dtype for name in stored} == {torch.bfloat16}
    after = run(folder="other", initial_load_path=str(path))
    assert after.checkpointer.load()
    assert torch.equal(after.model.weight, before.model.weight.bfloat16().float())
    with pytest.raises(
        IncompatibleCheckpoint, match="optimizer"
    ):  # as a whole it cannot be resumed
        run().checkpointer.load()


def test_an_initial_step_is_loaded_as_a_whole_if_the_folder_has_none(
    run: Runs, assert_same: Same
) -> None:
    before = run(folder="first")
    before.train(2)
    before.checkpointer.maybe_wait_for_saving()
    path = str(before.folder.rename(before.folder.parent / "moved") / "best")
    Path(path).with_name("step-00000002").rename(path)
    begin = {"initial_load_path": path, "initial_load_model_only": False}
    after = run(**begin)
    assert after.checkpointer.load()
    assert_same(after.state(), before.state())
    after.train(3)
    after.checkpointer.maybe_wait_for_saving()
    resumed = run(**begin)  # the same settings after a failure: what the folder has comes first
    assert resumed.checkpointer.load()
    assert resumed.trainer.step == 3


def test_an_initial_path_that_is_no_directory_is_refused(run: Runs, disk: Path) -> None:
    with pytest.raises(
        ValueError, match=r"checkpoint.initial_load_path is .*must be the directory"
    ):
        run(initial_load_path=str(disk / "nothing")).checkpointer.load()
    with pytest.raises(ValueError, match="hf_assets_path is None"):
        run(initial_load_in_hf=True, adapter=Adapter()).checkpointer.load()
    with pytest.raises(ValueError, match="sd_adapter is not provided"):
        run(initial_load_in_hf=True, initial_load_path=str(disk)).checkpointer.load()
    with pytest.raises(ValueError, match="sd_adapter is not provided"):
        run(last_save_in_hf=True, last_save_model_only=True)


@pytest.mark.parametrize("model_only", [False, True])
def test_what_torchtitan_itself_saved_is_a_beginning(
    run: Runs, disk: Path, model_only: bool, assert_same: Same
) -> None:
    before = run(kind=CheckpointManager, keep_latest_k=0)
    before.train(2)
    path = str(before.folder / "step-2")
    begin = {"initial_load_path": path, "initial_load_model_only": model_only}
    with pytest.raises(ValueError, match=f"cannot continue.*initial_load_path={path!r}"):
        run(**begin).checkpointer.load()
    after = run(folder="other", **begin)
    assert after.checkpointer.load()
    assert_same(after.state()["model"], before.state()["model"])
    assert after.trainer.step == (0 if model_only else 2)
    if not model_only:
        assert_same(after.state(), before.state())


@pytest.mark.parametrize("quantized", [False, True])
def test_the_last_step_goes_to_hugging_face_and_comes_from_there(
    run: Runs, disk: Path, quantized: bool
) -> None:
    assets = disk / "assets"
    assets.mkdir()
    (assets / "config.json").write_text('{"torch_dtype": "float32"}')
    adapter = Adapter(assets)
    settings = {"last_save_model_only": True, "last_save_in_hf": True, "export_dtype": "bfloat16"}
    before = run(adapter=adapter, **settings)
    before.checkpointer.save(7, last_step=True)
    path = before.folder / "hf" / "step-00000007"
    stored = safetensors.torch.load_file(path / "model.safetensors")
    assert torch.equal(stored["model.bias"], before.model.bias.flip(0).bfloat16())
    assert json.loads((path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert before.steps() == []
    begin = {"initial_load_in_hf": True, "initial_load_path": str(path)}
    after = run(adapter=adapter, initial_load_in_hf_quantized=quantized, **begin)
    assert after.checkpointer.load()
    assert torch.equal(after.model.weight, before.model.weight.bfloat16().float())
    assert adapter.quantized == [True] * quantized
    adapter.hf_assets_path = str(path)
    assert run(adapter=adapter, initial_load_in_hf=True).checkpointer.load()


def test_a_seed_is_a_model_without_steps(run: Runs, assert_same: Same) -> None:
    seed = run(create_seed_checkpoint=True, last_save_model_only=True)
    seed.checkpointer.save(curr_step=0, last_step=True)
    after = run()
    assert after.checkpointer.load()
    assert_same(after.state()["model"], seed.state()["model"])
    seed.checkpointer.close()
    after.train(1)
    after.checkpointer.maybe_wait_for_saving()
    resumed = run()
    resumed.checkpointer.load()
    assert resumed.trainer.step == 1


def test_excluded_keys_keep_what_they_are(run: Runs) -> None:
    before = run()
    before.train(2)
    before.checkpointer.maybe_wait_for_saving()
    after = run(exclude_from_loading=["dataloader", "lr_scheduler"])
    after.checkpointer.load()
    assert (after.loader.at, after.schedulers.state_dict()["last_epoch"]) == (0, 0)
    assert after.trainer.step == 2
    with pytest.raises(ValueError, match="'schedule', which is not found"):
        run(exclude_from_loading=["schedule"]).checkpointer.load()


def test_the_data_of_another_rank_is_refused(run: Runs) -> None:
    before = run()
    before.train(1)
    before.checkpointer.maybe_wait_for_saving()
    with pytest.raises(IncompatibleCheckpoint, match=r"no \['dp_rank_1'\].*exclude_from_loading"):
        run(dp_rank=1).checkpointer.load()
    fewer = run()
    fewer.loader.dp_world_size = 1
    with pytest.raises(IncompatibleCheckpoint, match=r"(?s)dp_degree is .*exclude_from_loading"):
        fewer.checkpointer.load()
    other = run(dp_rank=1, exclude_from_loading=["dataloader"])
    assert other.checkpointer.load() and other.loader.at == 0


def test_data_goes_on_where_ranks_are_in_another_order_or_fewer() -> None:
    loader = Loader(dp_rank=1)
    own = _OwnData(loader)
    saved = [{"dp_rank_0": b"3", "world_size": 2}, {"dp_rank_1": b"4", "world_size": 2}]
    own.per_rank.read_saved = lambda: [saved[0], saved[0], saved[1], saved[1]]
    own.load_state_dict(saved[0])  # as the second of four ranks of which two share a tensor
    assert loader.at == 4
    loader.at = 0
    own.load_state_dict(_of_all(saved + saved))  # as one of two ranks, where four have saved
    assert loader.at == 4
    with pytest.raises(IncompatibleCheckpoint, match=r"different dataloaders as 'at'.*exclude_"):
        _of_all([{"at": 1}, {"at": 2}])


def test_an_error_of_a_save_is_told_by_what_waits_for_it(run: Runs, disk: Path) -> None:
    here = run()
    here.folder.touch()  # a file where the directory of steps is to be
    with pytest.raises(fastckpt.CheckpointError):
        here.checkpointer.save(1, last_step=True)


def test_the_command_line_of_torchtitan_takes_the_options() -> None:
    given = ["--options.fence", "step", "--options.staging-bytes", "1GiB", "--codec", "zstd"]
    config = tyro.cli(FastckptCheckpointer.Config, args=given)
    assert config.options == fastckpt.SaveOptions(fence="step", staging_bytes="1GiB")
    assert config.codec == "zstd"
    assert FastckptCheckpointer.Config().options == fastckpt.SaveOptions()
    with pytest.raises(TypeError, match=r"options is .* must be a fastckpt\.SaveOptions"):
        FastckptCheckpointer.Config(options={"fence": "step"})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"codec": "zip"}, "checkpoint.codec"),
        ({"create_seed_checkpoint": True, "load_only": True}, "cannot save with load_only"),
        (
            {
                "create_seed_checkpoint": True,
                "last_save_in_hf": True,
                "last_save_model_only": True,
            },
            "no step to start from",
        ),
        ({"interval": 0}, "at least 1 step"),
        ({"keep_latest_k": 1}, "at least 2 checkpoint replicas"),
        ({"exclude_from_loading": ["model"]}, "model key shouldn't be in"),
    ],
)
def test_settings_that_cannot_be_obeyed_are_refused(
    run: Runs, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        run(**settings)


def test_the_config_is_one_of_torchtitan() -> None:
    config = FastckptCheckpointer.Config()
    assert isinstance(config, BaseCheckpointManager.Config)
    own = {each.name for each in fields(config)}
    assert own - {each.name for each in fields(BaseCheckpointManager.Config)} == {
        "codec",
        "options",
    }
    json.dumps(config.to_dict())


@pytest.fixture
def of_ranks(nursery: Nursery) -> Callable[..., dict[str, Any]]:
    """`of_ranks(body, n, ...)`: what all of n ranks have returned, in one dict."""

    def call(body: Any, ranks: int, *args: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for values in nursery.lasting_crew(ranks)(body, *args):
            assert all(found.setdefault(name, its) == its for name, its in values.items())
        return found

    return call


WAYS = [("alone", 1), ("1F1B", 2), ("interleaved", 2), ("1F1B", 4)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("saved", WAYS, ids=str)
def test_stages_of_a_pipeline_are_saved_by_their_names_and_go_on_in_any_other(
    saved: tuple[str, int], of_ranks: Callable[..., dict[str, Any]], disk: Path
) -> None:
    """With several ranks of a stage its parts are sharded among these."""
    expected = of_ranks(bodies.save_stages, saved[1], str(disk), saved[0])
    assert sum(name.startswith("layers.") for name in expected) == 8
    assert expected["step"] == 3
    stored = fastckpt.open(disk / "run" / "step-00000003")
    assert stored["model/layers.3.weight"][:].tolist() == expected["layers.3.weight"]
    for schedule, ranks in WAYS:
        assert of_ranks(bodies.load_stages, ranks, str(disk), schedule) == expected


@pytest.mark.multiprocess
def test_what_a_pipeline_cannot_have_saved_is_refused(nursery: Nursery, disk: Path) -> None:
    for shared, export in nursery.lasting_crew(2)(bodies.refused_stages, str(disk)):
        assert "two pipeline stages have 'layers.1" in str(shared)
        assert "last_save_in_hf is True, but with pipeline" in str(export)


@pytest.mark.torture  # torchtitan takes seconds to import, and more to start
@pytest.mark.multiprocess
def test_a_trainer_goes_on_bit_by_bit_after_a_kill(tmp_path: Path) -> None:
    def job(name: str, steps: int, *options: object, ranks: int = 2) -> Job:
        given = ("--steps", steps, "--every", 2, "--context", 32, "--loss-log", "losses", *options)
        script = "examples/torchtitan_cpu.py"
        return Job(script, tmp_path / name, *given, ranks=ranks, imports=IMPORTS)

    job("whole", 14, "--manager", "dcp").finish()
    expected = logged(tmp_path / "whole")
    here = tmp_path / "killed"
    with job("killed", 12) as killed:
        while not (here / "run/checkpoint/step-00000004/manifest.json").exists():
            assert killed.poll() is None, killed.output
            time.sleep(0.01)
        killed.kill()
    (here / "losses").unlink()
    saved = fastckpt.Checkpointer(here / "run/checkpoint").latest()
    assert saved is not None and saved < 12
    said = job("killed", saved + 2).finish()
    printed = [int(step) for step in re.findall(r"^step +(\d+)   loss \d", said, re.MULTILINE)]
    assert printed[-2:] == [saved + 1, saved + 2]
    assert logged(here) == expected[saved : saved + 2]
    # One rank has other data, which it begins anew: with the weights of two.
    job("killed", saved + 3, "--exclude", "dataloader", ranks=1).finish()
    assert [step for step, _ in logged(here)][2:] == [saved + 3]


@pytest.mark.torture
@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_pipeline_goes_on_bit_by_bit_and_on_one_rank(schedule: str, tmp_path: Path) -> None:
    def train(name: str, steps: int, *options: object, ranks: int = 2) -> list[tuple[int, str]]:
        shape = ("--pp", 2, "--schedule", schedule) if ranks > 1 else ()
        given = ("--steps", steps, "--every", 2, "--context", 32, "--loss-log", "losses")
        script, cwd = "examples/torchtitan_cpu.py", tmp_path / name
        Job(script, cwd, *given, *shape, *options, ranks=ranks, imports=IMPORTS).finish()
        return logged(cwd)

    expected = train("whole", 6, "--manager", "dcp")
    assert train("ours", 4) == expected[:4]
    shutil.copytree(tmp_path / "ours", tmp_path / "alone")
    assert train("ours", 6) == expected
    again = train("alone", 5, ranks=1)
    assert float.fromhex(again[4][1]) == pytest.approx(float.fromhex(expected[4][1]), rel=1e-5)
