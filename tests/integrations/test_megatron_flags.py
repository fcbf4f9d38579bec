"""install() obeys every checkpoint flag of Megatron's pretrain(), or ends before training begins.

Responsible for one test of each flag of the list that the documentation shows, and for what is told
while training. The ranks train by a double of megatron.training (crews/megatron_training.py), with
real models, optimizers and checkpoints.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from fastckpt import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.integrations import megatron
from fastckpt.integrations.megatron import flag_support
from fastckpt.integrations.megatron.flag_support import FLAGS, FlagSupport
from fastckpt.integrations.megatron.save import chunks
from fastckpt.integrations.megatron.strategies import stored_common, stored_metadata
from tests.crews import megatron_training as training
from tests.crews.group_crew import Crew, Nursery
from tests.kit.paths import ROOT

pytestmark = pytest.mark.multiprocess
RANKS_IMPORT = "tests.crews.megatron_imports"
TRACKER = training.TRACKER
ALL = ("weight", "optimizer", "schedule", "random")
# A value that is refused, for each flag that has one.
REFUSED: dict[str, Any] = {
    "save": "s3://bucket/run",
    "load": "msc://profile/run",
    "non_persistent_global_ckpt_dir": "msc://profile/run",
    "pretrained_checkpoint": "msc://profile/run",
    "non_persistent_save_interval": 10,
    "non_persistent_ckpt_type": "local",
    "dist_ckpt_strictness": "return_all",
    "ckpt_format": "torch",
    "ckpt_convert_format": "torch",
    "ckpt_convert_save": "converted",
    "strict_fsdp_dtensor_load": False,
    "override_ckpt_iteration": 0,
}


class Run:
    """A run of two ranks, which are one tensor parallel group.

    Args:
        crew: the ranks.
        disk: where the run is.
    """

    def __init__(self, crew: Crew, disk: Path) -> None:
        self._crew = crew
        self.disk, self.root = disk, disk / "run"

    def __call__(self, *script: Any, options: Any = None, **given: Any) -> list[Any]:
        """What came of each part of a script, on the first rank; see crews' play()."""
        where = {"save": str(self.root), "load": str(self.root)}
        told = self._crew(training.play, where | given, list(script), options or {})
        self.said, self.hooked = told[0]["said"], [each["hooked"] for each in told]
        failed = [[isinstance(part, BaseException) for part in each["results"]] for each in told]
        assert failed[0] == failed[1]
        return list(told[0]["results"])

    def loads(self, **given: Any) -> Any:
        """(iteration, operations), and what each part of the model has of it."""
        (_, loaded) = self(("mark", 30), ("setup",), **given)
        if isinstance(loaded, BaseException):
            raise loaded
        return loaded

    def saves(self, *iterations: int, **given: Any) -> list[Any]:
        script = [each for number in iterations for each in (("mark", number), ("save", number))]
        results = self(*script, ("end",), **given)
        assert set(results) == {None}, results
        return results

    def iterations(self, where: str = ".") -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.root / where).glob("iter_*"))

    def said_of(self, text: str) -> list[str]:
        return [line for line in self.said if text in line]


@pytest.fixture
def run(nursery: Nursery, disk: Path) -> Run:
    return Run(nursery.lasting_crew(2, "training"), disk)


@pytest.fixture(scope="module")
def three(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the iterations 1 to 3."""
    made = Run(nursery.lasting_crew(2, "training"), tmp_path_factory.mktemp("three"))
    assert made.saves(1, 2, 3) == [None] * 7
    return made.root


def of(value: float, *parts: str) -> dict[str, float]:
    """Marks of a model of which these parts were loaded from a checkpoint, the others not."""
    return {part: value if part in parts else 30.0 for part in ALL}


# What obeying a flag means. `run.root` has the iterations 1 to 3.


def obeys_save(run: Run) -> None:
    run.saves(4)
    assert run.iterations() == [1, 2, 3, 4]
    assert (run.root / TRACKER).read_text() == "4"


def obeys_load(run: Run) -> None:
    assert run.loads() == ((3, 30), of(3, *ALL))
    assert ("microbatches", 24) in run.hooked[0]
    assert ("loaded iteration", 3) in run.hooked[0]


def obeys_save_retain_interval(run: Run) -> None:
    given = {"save_retain_interval": 2, "log_progress": True}
    *_, progress = run(("save", 4), ("end",), ("save", 5), ("end",), *PROGRESS, **given)
    assert run.iterations() == [1, 2, 4, 5]  # 1 was superseded before the flag was there
    assert "Deleted checkpoint Iteration: 3" in progress
    assert run.said_of("successfully deleted checkpoint from iteration       3 at ")
    (refused,) = run(("setup",), options={"keep_last": 3}, **given)
    assert isinstance(refused, NotImplementedError) and "keep_last=3" in str(refused)


def keys(run: Run, number: int) -> str:
    """All that an iteration has, by its name."""
    path = str(run.root / f"iter_{number:07d}")
    metadata = stored_metadata(path)
    return " ".join([*metadata.state_dict_metadata, *stored_common(path, metadata)])


def obeys_no_save_optim(run: Run) -> None:
    assert "optimizer" in keys(run, 3) and "opt_param_scheduler" in keys(run, 3)
    run.saves(4, no_save_optim=True)
    assert "optimizer" not in keys(run, 4) and "opt_param_scheduler" not in keys(run, 4)
    assert run.loads(no_load_optim=True) == ((4, 40), of(4, "weight", "random"))


def obeys_no_save_rng(run: Run) -> None:
    assert "rng_state" in keys(run, 3)
    run.saves(4, no_save_rng=True)
    assert "rng_state" not in keys(run, 4)
    assert run.loads() == ((4, 40), of(4, "weight", "optimizer", "schedule"))


def obeys_async_save(run: Run) -> None:
    *_, progress = run(("save", 4), ("end",), *PROGRESS, async_save=True, log_progress=True)
    assert progress == [
        "Saving async checkpoint Iteration: 4",
        "Saved async checkpoint Iteration: 4",
    ]
    assert run.said_of("scheduled an async checkpoint save at iteration       4 to ")


def content(run: Run, number: int) -> Any:
    path = str(run.root / f"iter_{number:07d}")
    return stored_common(path, stored_metadata(path))["content_metadata"]


def obeys_fully_reshardable(run: Run) -> None:
    run.saves(4, dist_ckpt_optim_fully_reshardable=True)
    assert content(run, 3)["distrib_optim_sharding_type"] == "dp_reshardable"
    assert content(run, 4)["distrib_optim_sharding_type"] == "fully_reshardable"
    assert run.loads() == ((4, 40), of(4, *ALL))


def obeys_mem_efficient(run: Run) -> None:
    name = "distrib_optim_fully_reshardable_mem_efficient"
    run.saves(4, dist_ckpt_optim_fully_reshardable=True, **{name: True})
    assert content(run, 4)[name]
    assert run.loads() == ((4, 40), of(4, *ALL))


def obeys_dataloader_save(run: Run) -> None:
    run.saves(4, dataloader_save="elsewhere")
    assert ("loader saved", 4, "elsewhere") in run.hooked[0]


def obeys_rerun_mode(run: Run) -> None:
    *_, before, _, after = run(
        ("do", training.rerun_requested, True),
        ("save", 4),
        ("end",),
        ("do", training.rerun_requested, False),
        ("setup",),
        ("do", training.rerun_requested, None),
    )
    assert (before, after) == (False, True)
    assert run.loads(world_size=4)[0] == (4, 40)


def obeys_non_persistent_type(run: Run) -> None:
    run(
        ("mark", 5),
        ("save", 4, True),
        ("save", 5, True),
        ("end",),
        non_persistent_ckpt_type="global",
    )
    assert run.iterations() == [1, 2, 3] and run.iterations("non_persistent") == [5]
    assert run.loads()[0] == (3, 30)
    assert run.loads(non_persistent_ckpt_type="global") == ((5, 50), of(5, *ALL))
    assert run.said_of("Loading from a non-persistent checkpoint (non-persistent iter 5)")


def obeys_non_persistent_dir(run: Run) -> None:
    given = {"non_persistent_ckpt_type": "global"}
    given["non_persistent_global_ckpt_dir"] = str(run.disk / "scratch")
    run(("mark", 5), ("save", 5, True), ("end",), **given)
    assert run.iterations("../scratch") == [5] and not (run.root / "non_persistent").exists()
    assert run.loads(**given) == ((5, 50), of(5, *ALL))


def obeys_ckpt_step(run: Run) -> None:
    assert run.loads(ckpt_step=2) == ((2, 20), of(2, *ALL))


def obeys_exit_on_missing(run: Run) -> None:
    shutil.rmtree(run.root)
    lines = [
        f"WARNING: could not find the metadata file {run.root / TRACKER}",
        "    will not load any checkpoints and will start from random",
    ]
    assert run.loads() == ((0, 0), of(30))
    assert run.said == lines
    with pytest.raises(SystemExit) as ended:
        run.loads(exit_on_missing_checkpoint=True)
    assert ended.value.code == 1
    assert run.said == [*lines, ">> '--exit-on-missing-checkpoint' set ... exiting. <<"]


def obeys_finetune(run: Run) -> None:
    assert run.loads(finetune=True) == ((0, 30), of(3, "weight"))


def obeys_pretrained(run: Run) -> None:
    other = str(run.disk / "empty")
    found = run.loads(load=other, pretrained_checkpoint=str(run.root))
    assert found == ((0, 30), of(3, "weight"))
    assert run.said_of(f"Checkpoint file not found in load directory {other} attempting to finetun")
    assert run.loads(pretrained_checkpoint=other)[0] == (3, 30)
    with pytest.raises(FileNotFoundError, match="No checkpoint found in load directory or pretr"):
        run.loads(load=other, pretrained_checkpoint=other)


def obeys_no_load_optim(run: Run) -> None:
    assert run.loads(no_load_optim=True) == ((3, 30), of(3, "weight", "random"))


def obeys_no_load_rng(run: Run) -> None:
    assert run.loads(no_load_rng=True) == ((3, 30), of(3, "weight", "optimizer", "schedule"))


def obeys_strictness(run: Run) -> None:
    for value in training.STRICTNESS.split():
        if not value.startswith("return"):
            assert run.loads(dist_ckpt_strictness=value) == ((3, 30), of(3, *ALL))
    for value, ends in (
        ("assume_ok_unexpected", True),
        ("log_unexpected", False),
        ("log_all", False),
        ("ignore_all", False),
        ("raise_unexpected", True),
        ("raise_all", True),
    ):
        (asked,) = run(("do", training.load_asking_for_more), dist_ckpt_strictness=value)
        assert isinstance(asked, BaseException) == ends, value
    run(("do", training.save_more, 4), ("end",))
    assert run.loads()[0] == (4, 40)
    with pytest.raises(Exception, match="surplus"):
        run.loads(dist_ckpt_strictness="raise_all")


def obeys_validation(run: Run) -> None:
    for value in (True, False):
        (seen,) = run(("do", training.validation), ckpt_load_validate_sharding_integrity=value)
        assert seen is value


def obeys_checkpoint_args(run: Run) -> None:
    kill_before_tracker(run.root)
    assert run(("load_args",), ("load_args",)) == [3, 3]
    assert run(("load_args",), ckpt_step=1) == [1]
    assert run.loads()[0] == (3, 30)


def obeys_data_parallel_random_init(run: Run) -> None:
    assert run(("do", training.load_as_second_replica, 4))[0] == {"random": 6.0}


def obeys_format(_run: Run) -> None:
    flag_support.check(argparse.Namespace(ckpt_format="torch_dist"))
    for name in ("torch_dcp", "fsdp_dtensor"):
        with pytest.raises(NotImplementedError, match=f"ckpt_format is '{name}'"):
            flag_support.check(argparse.Namespace(ckpt_format=name))


PROGRESS = [("do", training.progress)]


def obeys_log_progress(run: Run) -> None:
    (said, progress), after, *_ = run(("do", training.save_held, 4), *PROGRESS, log_progress=True)
    assert not [line for line in said if "successfully saved" in line] and progress == []
    assert after == ["Saved checkpoint Iteration: 4"]
    *_, failed = run(("do", training.save_on_full_disk, 5), *PROGRESS, log_progress=True)
    assert failed == after and not run.said_of("successfully saved")


def obeys_wandb(run: Run) -> None:
    run(("save", 4), ("end",), ("setup",))
    assert ("wandb saved", "iter_0000004", 4) in run.hooked[1]
    assert ("one_logger", {"async": False}) in run.hooked[1]
    assert ("wandb loaded", str(run.root / "iter_0000004")) in run.hooked[1]
    assert not [each for each in run.hooked[0] if "wandb" in each[0]]
    run(("do", training.save_on_full_disk, 5))
    assert not [each for each in run.hooked[1] if "wandb" in each[0]]


def obeys_ft(run: Run) -> None:
    run(("save", 4), ("poll",), ("end",), ("setup",))
    assert run.hooked[0].count(("ft saved",)) == 1
    assert ("ft loaded", False) in run.hooked[0]


def obeys_exit(run: Run) -> None:
    run(("save", 4), ("end",))
    assert run.said_of("successfully saved checkpoint from iteration       4 to ")
    assert run.hooked[0][-1] == ("stock finalized", True, True)


OBEYED: dict[str, Callable[[Run], None]] = {
    "save": obeys_save,
    "save_retain_interval": obeys_save_retain_interval,
    "no_save_optim": obeys_no_save_optim,
    "no_save_rng": obeys_no_save_rng,
    "async_save": obeys_async_save,
    "dist_ckpt_optim_fully_reshardable": obeys_fully_reshardable,
    "distrib_optim_fully_reshardable_mem_efficient": obeys_mem_efficient,
    "dataloader_save": obeys_dataloader_save,
    "rerun_mode": obeys_rerun_mode,
    "non_persistent_ckpt_type": obeys_non_persistent_type,
    "non_persistent_global_ckpt_dir": obeys_non_persistent_dir,
    "load": obeys_load,
    "ckpt_step": obeys_ckpt_step,
    "exit_on_missing_checkpoint": obeys_exit_on_missing,
    "finetune": obeys_finetune,
    "pretrained_checkpoint": obeys_pretrained,
    "no_load_optim": obeys_no_load_optim,
    "no_load_rng": obeys_no_load_rng,
    "dist_ckpt_strictness": obeys_strictness,
    "ckpt_load_validate_sharding_integrity": obeys_validation,
    "use_checkpoint_args": obeys_checkpoint_args,
    "use_mp_args_from_checkpoint_args": obeys_checkpoint_args,
    "data_parallel_random_init": obeys_data_parallel_random_init,
    "ckpt_format": obeys_format,
    "log_progress": obeys_log_progress,
    "wandb_project": obeys_wandb,
    "enable_ft_package": obeys_ft,
    "calc_ft_timeouts": obeys_ft,
    "exit_signal_handler": obeys_exit,
}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.dest)
def test_every_flag_is_obeyed_or_refused(flag: FlagSupport, run: Run, three: Path) -> None:
    args = training.default_args()
    assert flag_support.check(args) == []
    other = {True: False, False: True}.get(flag.default, "other")
    if flag.kind == "no effect":
        setattr(args, flag.dest, other)
        assert flag_support.check(args) == [flag.name]
    elif flag.kind == "left to Megatron" and flag.refuses is None:
        setattr(args, flag.dest, other)
        assert flag_support.check(args) == []
    elif flag.kind == "obeyed":
        shutil.copytree(three, run.root)
        OBEYED[flag.dest](run)
    if flag.refuses is not None:
        args = training.default_args()
        setattr(args, flag.dest, REFUSED.get(flag.dest, True))
        with pytest.raises(NotImplementedError) as refused:
            flag_support.check(args)
        assert f"{flag.name} ({flag.dest} is " in str(refused.value)
        assert "efused" in flag.text


def test_refusal_comes_before_training(run: Run) -> None:
    (refused,) = run(("setup",), ckpt_format="torch", exit_on_missing_checkpoint=True)
    assert isinstance(refused, NotImplementedError) and "ckpt_format is 'torch'" in str(refused)
    (refused,) = run(("setup",), load=None, replication=True)
    assert isinstance(refused, NotImplementedError) and "--replication" in str(refused)


def set_up_by_modelopt(double: training.Double) -> Any:
    """ModelOpt marks a model that it has changed."""
    given = training.parts()
    (model,) = chunks(given[0])
    model._modelopt_state = []
    try:
        return double.training.setup_model_and_optimizer(*given)
    finally:
        del model._modelopt_state


def test_a_model_whose_state_would_be_left_out_is_refused_before_training(run: Run) -> None:
    (refused,) = run(("do", set_up_by_modelopt))
    assert isinstance(refused, NotImplementedError) and "ModelOpt" in str(refused)


def test_what_has_no_effect_changes_nothing(run: Run) -> None:
    given = {flag.dest: True for flag in FLAGS if flag.kind == "no effect"}
    run.saves(1, **given)
    assert run.loads(**given) == ((1, 10), of(1, *ALL))


def test_flags_are_all_that_megatron_has() -> None:
    """All of its group of checkpoint flags are known, and one that is not is refused if given."""
    parser = argparse.ArgumentParser(add_help=False)
    actions = training.add_checkpointing_args(parser)._actions
    known = {flag.dest: flag for flag in FLAGS}
    for action in actions:
        assert known[action.dest].default in (action.default, None)
        assert known[action.dest].name in action.option_strings
    parser.add_argument("--ckpt-by-carrier-pigeon", action="store_true")
    args = parser.parse_args([])
    assert flag_support.check(args, parser._actions) == []
    args.ckpt_by_carrier_pigeon = True
    with pytest.raises(NotImplementedError, match=r"--ckpt-by-carrier-pigeon .* does not know it"):
        flag_support.check(args, parser._actions)


def test_documentation_lists_every_flag() -> None:
    rows = ["| Flag | | What happens |", "|---|---|---|"]
    for (kind, text), alike in groupby(FLAGS, key=lambda flag: (flag.kind, flag.text)):
        names = ", ".join(f"`{flag.name}`" for flag in alike)
        rows.append(f"| {names} | {kind} | {text} |")
    assert "\n".join(rows) in (ROOT / "docs" / "megatron.md").read_text()


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> training.Double:
    """A double of megatron.training that can be imported, whatever Megatron is installed."""
    made = training.Double()
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, f"megatron.training.{name}", module)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.16.1")
    return made


def test_install_refuses_what_it_does_not_know(
    double: training.Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.20.0")
    with pytest.raises(ImportError, match=r"< 0.20; 0.20.0 is installed"):
        megatron.install()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.16.1")
    stock = double.checkpointing.save_checkpoint
    del double.training.load_checkpoint
    with pytest.raises(ImportError, match=r"megatron.training.training has no load_checkpoint"):
        megatron.install()
    assert double.checkpointing.save_checkpoint == stock
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", None)
    with pytest.raises(ImportError, match="not in the megatron-core package"):
        megatron.install()


def test_what_later_versions_pass_is_refused_if_it_says_more(double: training.Double) -> None:
    megatron.install()
    with pytest.raises(NotImplementedError, match="release is True"):
        double.training.save_checkpoint(7, [], None, None, 9, tp_group=None, release=True)
    with pytest.raises(NotImplementedError, match="skip_load_to_model_and_opt"):
        double.training.load_checkpoint([], None, None, skip_load_to_model_and_opt=True)


# What is told.


def test_megatrons_own_lines_appear(run: Run) -> None:
    os.symlink(run.disk, run.disk / "link")
    run.root = run.disk / "link" / "run"  # it is told as it was given
    run.saves(7)
    waits = "Unfinalized async checkpoint saves. Finalizing them synchronously now."
    begun, ended = (line.partition("] ")[2] for line in run.said if line != waits)
    assert begun == f"saving checkpoint at iteration       7 to {run.root} in torch_dist format"
    at = "[ t 1/2, p 1/1 ]"
    assert ended == f"successfully saved checkpoint from iteration       7 to {run.root} {at}"
    assert run.hooked[0].count(("common state compared",)) == 1
    run.loads()
    assert run.said == [
        f" loading distributed checkpoint from {run.root} at iteration 7",
        " checkpoint version 3.0",
        f"  successfully loaded checkpoint from {run.root} {at} at iteration 7",
    ]


def test_a_release_begins_at_iteration_0_without_optimizer(run: Run, three: Path) -> None:
    shutil.copytree(three, run.root)
    (run.root / "iter_0000003").rename(run.root / "release")
    (run.root / TRACKER).write_text("release")
    assert run.loads() == ((0, 30), of(3, "weight"))
    assert run.said_of(f" loading release distributed checkpoint from {run.root}")


def kill_before_tracker(root: Path) -> None:
    (root / TRACKER).write_text("2")
    os.utime(root / TRACKER, (0, (root / "iter_0000002" / ".metadata").stat().st_mtime))


def remove_metadata(root: Path) -> None:
    (root / "iter_0000003" / ".metadata").unlink()


@pytest.mark.parametrize(
    ("change", "loaded", "why"),
    [
        (lambda root: (root / TRACKER).write_text("3"), 3, None),
        (lambda root: (root / TRACKER).write_text("2"), 2, None),
        (
            kill_before_tracker,
            3,
            "iteration 3 is loaded, the last that was committed: "
            f"{TRACKER} still names iteration 2; to go back to that, ask for it (--ckpt-step 2)",
        ),
        (
            remove_metadata,
            2,
            "iteration 2 is loaded, the last that was committed: iteration 3, which "
            f"{TRACKER} names, has no .metadata",
        ),
        (
            lambda root: shutil.rmtree(root / "iter_0000003"),
            2,
            "iteration 2 is loaded, the last that was committed: iteration 3, which "
            f"{TRACKER} names, is not there",
        ),
        (
            lambda root: (root / TRACKER).unlink(),
            3,
            f"iteration 3 is loaded, the last that was committed: {TRACKER} is missing",
        ),
        (
            lambda root: (root / TRACKER).write_text("3x"),
            3,
            f"iteration 3 is loaded, the last that was committed: {TRACKER} holds '3x', which is "
            "no iteration",
        ),
    ],
    ids=[
        "agrees",
        "went back",
        "did not move",
        "incomplete",
        "missing iteration",
        "no tracker",
        "garbage",
    ],
)
def test_loading_says_why_it_is_not_what_the_tracker_names(
    change: Any, loaded: int, why: str | None, run: Run, three: Path
) -> None:
    shutil.copytree(three, run.root)
    change(run.root)
    found, warned = run(("mark", 30), ("do", training.load_and_listen))[1]
    assert found == (loaded, 10 * loaded)
    assert warned == ([] if why is None else [f"{run.root}: {why}"])


def test_a_tracker_that_names_nothing_whole_is_no_new_beginning(run: Run) -> None:
    run.root.mkdir()
    (run.root / TRACKER).write_text("9")
    with pytest.raises(CorruptCheckpoint, match="names iter_0000009, which is not complete"):
        run.loads()
    legacy = run.root / "iter_0000009" / "mp_rank_00"
    legacy.mkdir(parents=True)
    (legacy / "model_optim_rng.pt").touch()
    with pytest.raises(IncompatibleCheckpoint, match="is in Megatron's format torch, which is not"):
        run.loads()
