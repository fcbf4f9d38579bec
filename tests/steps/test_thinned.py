"""Promise: a step that retention does not keep whole is thinned to the parts that keep_parts names,
or removed: **whole or thinned, never less**, whoever is killed, reads, pins or fails at any moment.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import Checkpointer, PerRank
from fastckpt.cli import main
from fastckpt.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats.manifest import Manifest
from fastckpt.steps.options import common_terms
from fastckpt.steps.pins import pin
from fastckpt.steps.posix import PosixSteps
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import (
    Crash,
    FailAt,
    Operation,
    PowerCut,
    Recorder,
    T,
    assert_old_or_new,
    dead_pid,
    plant,
    power_cuts,
    process_on,
)
from tests.kit.forgeries import small_shards
from tests.kit.interpreters import Program
from tests.kit.network_double import NetworkClient
from tests.kit.noise import flip
from tests.kit.options import gathered
from tests.kit.parts import BOTH, KEEP, WHOLE, flat, found, left_over, of, state
from tests.kit.saves import wait_until
from tests.kit.steps import place_of_commit
from tests.kit.storm import Storm

WAIT_S, SEED = 60.0, 20261130
BEST = ("loss", "min", 1)
PARTS = {"model", "ema"}


@pytest.fixture(autouse=True)
def shards_of_any_size() -> Any:
    with small_shards():
        yield


@pytest.fixture
def root(memory: Path) -> Path:
    return memory / "run"


def job(root: Path, **options: Any) -> Checkpointer:
    return Checkpointer(
        root, **gathered(**{"keep_last": 1, "keep_parts": KEEP, "durable": False, **options})
    )


def saved(root: Path, *steps: int, losses: Mapping[int, float] = {}, **options: Any) -> Any:
    """Saves steps by a job of its own; returns what is there then, as found() does."""
    with job(root, **options) as checkpointer:
        for step in steps:
            metrics = {"loss": losses[step]} if step in losses else None
            checkpointer.save(step, state(step), metrics=metrics).result(WAIT_S)
    return found(root)


# ---- which steps ----


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {7: WHOLE, 6: BOTH, 5: "model", 4: "model"}),
        ({"keep_last": 2}, {7: WHOLE, 6: WHOLE, 5: BOTH, 4: "model", 3: "model"}),
        ({"keep_last": 9}, dict.fromkeys(range(1, 8), WHOLE)),
        ({"keep_parts": {"ema": 2}}, {7: WHOLE, 6: "ema", 5: "ema"}),
        ({"keep_parts": {"step": 2}}, {7: WHOLE, 6: "step", 5: "step"}),
        ({"keep_parts": {"rng": 1, "step": 2}}, {7: WHOLE, 6: "rng step", 5: "step"}),
        ({"keep_parts": {"model": 2, "ema": 2}}, {7: WHOLE, 6: BOTH, 5: BOTH}),
        ({"keep_parts": {"model": 99}}, {7: WHOLE} | dict.fromkeys(range(1, 7), "model")),
        ({"keep_every": 3}, {7: WHOLE, 6: WHOLE, 5: BOTH, 4: "model", 3: WHOLE, 2: "model"}),
        (
            {"keep_best": BEST},
            {7: WHOLE, 6: BOTH, 5: "model", 4: "model", 3: WHOLE},
        ),
        (
            {"keep_best": BEST, "keep_every": 5, "keep_parts": {"model": 2, "ema": 4}},
            {7: WHOLE, 6: BOTH, 5: WHOLE, 4: BOTH, 3: WHOLE, 2: "ema", 1: "ema"},
        ),
        ({"codec": "planes"}, {7: WHOLE, 6: BOTH, 5: "model", 4: "model"}),
        ({"codec": "zstd"}, {7: WHOLE, 6: BOTH, 5: "model", 4: "model"}),
        ({"check_finite": True}, {7: WHOLE, 6: BOTH, 5: "model", 4: "model"}),
    ],
)
def test_the_newest_of_those_that_go_are_thinned(
    options: Any, expected: dict[int, str], root: Path
) -> None:
    losses = {1: 5.0, 2: 4.0, 3: 1.0, 4: 2.0, 5: 3.0, 6: 9.0, 7: 9.0}
    assert saved(root, *range(1, 8), losses=losses, **options) == expected
    assert not left_over(root)
    assert main(["verify", str(root)]) == 0


def test_it_is_thinned_step_by_step(root: Path) -> None:
    """Of what is left there is never more than was promised, and never less."""
    with job(root) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, state(step)).result(WAIT_S)
            checkpointer.latest()
            wait = {
                number: kind
                for number, kind in zip(
                    range(step, 0, -1), [WHOLE, BOTH, "model", "model"], strict=False
                )
            }
            checkpointer.best("loss")  # waits until the retention is over
            assert found(root) == wait
            assert not left_over(root)


def test_the_best_that_is_no_longer_the_best_is_thinned(root: Path) -> None:
    losses = {1: 5.0, 2: 9.0, 3: 4.0, 4: 9.0}
    assert saved(root, 1, 2, losses=losses, keep_best=BEST) == {2: WHOLE, 1: WHOLE}
    assert saved(root, 3, 4, losses=losses, keep_best=BEST) == {
        **{4: WHOLE, 3: WHOLE, 2: BOTH, 1: "model"}
    }
    with job(root, keep_best=BEST) as checkpointer:
        assert checkpointer.best() == 3


def test_a_pinned_step_is_not_thinned_and_does_not_count(root: Path) -> None:
    saved(root, 1, 2, keep_last=9)
    pin(PosixSteps(Storage(), str(root)), 1)
    pin(PosixSteps(Storage(), str(root)), 2)
    expected = {6: WHOLE, 5: BOTH, 4: "model", 3: "model", 2: WHOLE, 1: WHOLE}
    assert saved(root, 3, 4, 5, 6) == expected
    with job(root) as checkpointer:
        checkpointer.unpin(2)
        checkpointer.pin(4)
        checkpointer.pin(1)
    assert saved(root, 7) == {7: WHOLE, 6: BOTH, 5: "model", 4: "model", 3: "model", 1: WHOLE}
    with job(root) as checkpointer:
        with pytest.raises(CheckpointError, match="pinned"):
            checkpointer.delete(4)
        checkpointer.delete(5)
    assert saved(root, 8) == {8: WHOLE, 7: BOTH, 6: "model", 4: "model", 3: "model", 1: WHOLE}


def test_a_damaged_step_is_removed_rather_than_thinned(root: Path) -> None:
    """It takes no place of a step that can be read."""
    saved(root, 1, 2, 3, 4, keep_last=9)
    flip(root / "step-00000003" / "rank-00000-model.safetensors", -1)
    with job(root) as checkpointer:
        with pytest.raises(CorruptCheckpoint):
            checkpointer.restore(state(0), 3)
        checkpointer.save(5, state(5)).result(WAIT_S)
    assert found(root) == {5: WHOLE, 4: BOTH, 2: "model", 1: "model"}


def test_a_thinned_step_does_not_count_among_the_last(root: Path) -> None:
    """Of the steps that keep_last counts, a job could go on from each."""
    there = saved(root, 1, 2, 3, 4, losses={1: 0.0}, keep_best=BEST)
    assert there == {4: WHOLE, 3: BOTH, 2: "model", 1: WHOLE}
    flip(root / "step-00000004" / "rank-00000.safetensors", 0.8)
    with job(root, keep_last=2) as checkpointer:
        assert checkpointer.restore(state(9)) == 1
        checkpointer.save(5, state(5)).result(WAIT_S)
    assert kept(root, 1) is None and kept(root, 5) is None
    assert saved(root, 6, keep_last=2)[5] == WHOLE


def test_the_attempts_at_one_step_count_once(root: Path) -> None:
    """The newest attempt alone is thinned; an older one neither stays nor comes back."""
    saved(root, 1, 2, keep_last=9)
    pin(PosixSteps(Storage(), str(root)), 1)
    with job(root, keep_last=9) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step + 100)).result(WAIT_S)
    os.unlink(root / "step-00000001" / "pinned")
    assert len([*root.glob("step-00000001*")]) == 2
    with job(root, keep_parts={"model": 9, "ema": 1}) as checkpointer:
        for step in (3, 4):
            checkpointer.save(step, state(step + 100)).result(WAIT_S)
    assert found(root, lambda step: step + 100) == {**{4: WHOLE, 3: BOTH, 2: "model", 1: "model"}}
    assert len([*root.glob("step-00000001*")]) == 1


def test_resumed_jobs_go_on_with_what_is_there(root: Path) -> None:
    saved(root, 1, 2, 3)
    with job(root) as checkpointer:
        into = state(0)
        assert checkpointer.restore(into) == 3 and into["step"] == 3
        checkpointer.save(4, into | {"step": 4}).result(WAIT_S)
        checkpointer.save(4, state(4)).result(WAIT_S)
        checkpointer.save(5, state(5)).result(WAIT_S)
    assert found(root) == {5: WHOLE, 4: BOTH, 3: "model", 2: "model"}
    assert saved(root, 3) == {3: WHOLE, 5: BOTH, 4: "model", 2: "model"}, "it has gone back"
    assert saved(root, 6, keep_parts={"ema": 9}) == {6: WHOLE, 5: "ema", 3: "ema"}
    assert saved(root, 7, keep_last=9) == {7: WHOLE, 6: WHOLE, 5: "ema", 3: "ema"}
    assert saved(root, 8, keep_parts=None) == {8: WHOLE}
    assert saved(root, 9) == {9: WHOLE}, "step 8 has no files of its parts"


def test_parts_that_a_later_job_keeps_have_all_of_their_values(root: Path) -> None:
    """Whatever the job that saved them would have kept longest."""
    saved(root, 1, 2, keep_last=9, keep_parts={"model": 9, "ema": 1})
    assert saved(root, 3, keep_parts={"ema": 5}) == {3: WHOLE, 2: "ema", 1: "ema"}
    saved(root, 4, 5, keep_last=9, keep_parts={"model": 1, "ema": 9, "rng": 1})
    assert saved(root, 6, keep_parts={"rng": 2}) == {6: WHOLE, 5: "rng", 4: "rng"}


def test_a_tensor_of_two_keys_is_kept_with_each(root: Path) -> None:
    """A model that is its own average yet, tied weights, views of one storage."""
    common = torch.arange(9000.0)

    def tied(step: int) -> dict[str, Any]:
        own = common + step
        model = {"w": own, "view": own[100:8000], "again": own}
        return {"model": model, "ema": {"w": own, "t": own.view(90, 100)}, "optimizer": [own]}

    for keep in ({"ema": 9}, {"model": 9}, {"ema": 1, "model": 1}):
        shutil.rmtree(root, ignore_errors=True)
        with job(root, keep_parts=keep) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, tied(step)).result(WAIT_S)
        with job(root) as checkpointer:
            for key in keep:
                assert flat(checkpointer.load(1)[key]) == flat(tied(1)[key])
                into = tied(5)
                assert checkpointer.restore(into, 1, only=f"{key}/*") == 1
                assert flat(into[key]) == flat(tied(1)[key])
            assert flat(checkpointer.load(2)) == flat(tied(2))


def test_a_part_whose_values_are_all_small_stays(memory: Path) -> None:
    """They lie in the file of the small values; also an empty part, and one without tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastckpt.state.tree.SMALL_BYTES", 1 << 20)
        with job(memory / "run", keep_parts={"model": 1, "none": 2, "text": 2}) as checkpointer:
            for step in (1, 2, 3):
                parts = {"model": {"w": torch.full((9,), step)}, "none": {}, "text": f"{step}"}
                checkpointer.save(step, {**parts, "rest": step}).result(WAIT_S)
        with job(memory / "run") as checkpointer:
            assert checkpointer.steps() == [1, 2, 3]
            assert checkpointer.load(1) == {"none": {}, "text": "1"}
            second = checkpointer.load(2)
            assert second.keys() == {"model", "none", "text"}
            assert second["model"]["w"].tolist() == [2] * 9


# ---- wrong arguments ----


@pytest.mark.parametrize(
    ("keep_parts", "kind", "told"),
    [
        ({}, TypeError, "must be a dict of keys"),
        ([("model", 1)], TypeError, "must be a dict of keys"),
        ("model", TypeError, "must be a dict of keys"),
        (7, TypeError, "must be a dict of keys"),
        ({"model": 0}, ValueError, r"keep_parts\['model'\] is 0, must be at least 1"),
        ({"model": -1}, ValueError, "must be at least 1"),
        ({"model": "2"}, TypeError, r"keep_parts\['model'\]"),
        ({"model": 1.5}, TypeError, r"keep_parts\['model'\]"),
        ({"model": None}, TypeError, r"keep_parts\['model'\]"),
        ({7: 1}, ValueError, "has the key 7, which becomes part of a file's name"),
        ({7: 1, "model": 1}, ValueError, "has the key 7"),
        *[
            ({key: 1}, ValueError, "becomes part of a file's name and must match")
            for key in ("", "a/b", ".hidden", "..", "a b", "\u00e9", "m\n", "a" * 65, "~", "a\0")
        ],
    ],
)
def test_wrong_arguments_are_refused(keep_parts: Any, kind: type, told: str, root: Path) -> None:
    with pytest.raises(kind, match=told):
        Checkpointer(root, keep_last=1, keep_parts=keep_parts)
    assert not root.exists()


def test_it_needs_keep_last(root: Path) -> None:
    with pytest.raises(ValueError, match="keep_parts has no effect without keep_last"):
        Checkpointer(root, keep_parts=KEEP)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"model": 1, "rest": 2}, "names 'ema', but the state has the keys 'model', 'rest'"),
        ({}, "names 'ema', but the state has no keys"),
        ([torch.ones(3)], "names 'ema', but the state has no keys"),
        (torch.ones(3), "names 'ema', but the state has no keys"),
    ],
)
def test_a_state_without_the_key_is_refused(wrong: Any, told: str, root: Path) -> None:
    """Before anything is written; the next save works."""
    with job(root) as checkpointer:
        with pytest.raises(ValueError, match=told):
            checkpointer.save(1, wrong)
        checkpointer.save(2, state(2)).result(WAIT_S)
    assert found(root) == {2: WHOLE}


def test_two_keys_of_one_name_are_refused(root: Path) -> None:
    with (
        job(root, keep_parts={"7": 1}) as checkpointer,
        pytest.raises(ValueError, match="keep_parts names '7'"),
    ):
        checkpointer.save(1, {"7": torch.ones(3), 7: torch.zeros(3)})


def test_the_longest_key_fits(root: Path) -> None:
    key = "k" * 64
    tensors = {f"{number}": torch.full((3,), number) for number in range(128)}
    with job(root, keep_parts={key: 1}, codec="planes") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {key: tensors, "rest": 1}).result(WAIT_S)
        assert flat(checkpointer.load(1)) == flat({key: tensors})


# ---- reading a thinned step ----


@pytest.fixture(params=[None, "planes"])
def thinned(request: pytest.FixtureRequest, root: Path) -> Path:
    """A root with step 3, and steps 2 and 1, which were thinned."""
    assert saved(root, 1, 2, 3, codec=request.param) == {3: WHOLE, 2: BOTH, 1: "model"}
    return root


def test_restore_of_some_of_it(thinned: Path) -> None:
    with job(thinned) as checkpointer:
        into = state(9)
        assert checkpointer.restore(into, 2, only="ema/*") == 2
        assert flat(into) == flat(state(9) | {"ema": state(2)["ema"]})
        into = state(9)
        assert checkpointer.restore(into, 1, only="model/*") == 1
        assert flat(into) == flat(state(9) | {"model": state(1)["model"]})
        into = state(9)
        assert checkpointer.restore(into, 2, missing="keep") == 2
        assert flat(into) == flat(state(9) | {key: state(2)[key] for key in PARTS})
        into = {"model": state(9)["model"]}
        assert checkpointer.restore(into, 1) == 1
        assert flat(into) == of(1, "model")
        assert checkpointer.restore(into) == 3 and flat(into) == of(3, "model")


def test_restore_of_all_of_it_is_refused(thinned: Path) -> None:
    """The error says what is lacking, and where it is not."""
    for step, lacking in ((2, ("'optimizer'", "'rng'", "'step'")), (1, ("'ema'", "'optimizer'"))):
        with job(thinned) as checkpointer:
            into = state(9)
            with pytest.raises(IncompatibleCheckpoint) as raised:
                checkpointer.restore(into, step)
            told = str(raised.value)
            assert all(each in told for each in lacking) and "keep_parts" in told
            assert "the newest whole step is step 3" in told and "only='" in told
            assert flat(into) == flat(state(9))
    shutil.rmtree(thinned / "step-00000003")
    with (
        job(thinned) as checkpointer,
        pytest.raises(IncompatibleCheckpoint, match="no step is whole: pass only='ema/"),
    ):
        checkpointer.restore(state(9))


def test_a_damaged_step_is_not_the_newest_whole_one(thinned: Path) -> None:
    flip(thinned / "step-00000003" / "objects.pt", 0.5)
    with (
        job(thinned) as checkpointer,
        pytest.raises(IncompatibleCheckpoint, match=r"is damaged: .*no step is whole"),
    ):
        checkpointer.restore(state(9))


def test_a_job_goes_back_to_a_whole_step(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Past newer ones that were thinned, when the newest is damaged."""
    options: dict[str, Any] = {"keep_best": BEST}
    there = saved(root, 1, 2, 3, 4, losses={1: 0.0}, **options)
    assert there == {4: WHOLE, 3: BOTH, 2: "model", 1: WHOLE}
    with job(root, **options) as checkpointer:
        assert checkpointer.restore(state(9)) == 4
    flip(root / "step-00000004" / "rank-00000.safetensors", 0.8)
    with job(root, **options) as checkpointer:
        into = state(9)
        assert checkpointer.restore(into) == 1 and flat(into) == of(1, WHOLE)
        assert checkpointer.restore(into, 3, only="ema/*") == 3
        with pytest.raises(IncompatibleCheckpoint, match="newest whole step is step 1"):
            checkpointer.restore(into, 3)
    assert "step-00000004" in caplog.text
    flip(root / "step-00000001" / "rank-00000.safetensors", 0.8)
    with job(root, **options) as checkpointer:
        assert checkpointer.restore({"model": state(9)["model"]}) == 3


def test_load_tells_of_it(thinned: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job(thinned) as checkpointer:
        assert flat(checkpointer.load(2)) == of(2, BOTH)
    assert "step-00000002' was thinned to 'ema', 'model'" in caplog.text
    caplog.clear()
    with Checkpointer(thinned / "step-00000001") as checkpointer:
        assert flat(checkpointer.load()) == of(1, "model")
    assert "was thinned to 'model'" in caplog.text


def test_values_of_ranks_that_are_not_kept_are_not_looked_at(root: Path) -> None:
    """A value that weights_only refuses makes nothing unreadable that was kept."""
    with job(root, keep_parts={"model": 2}) as checkpointer:
        for step in (1, 2):
            odd = PerRank(Path("/odd"))
            checkpointer.save(step, {"model": torch.full((5,), step), "odd": odd}).result(WAIT_S)
        assert checkpointer.load(1)["model"].tolist() == [1] * 5


def test_it_is_opened(thinned: Path) -> None:
    with fastckpt.open(thinned / "step-00000001") as tensors:
        assert {*tensors} == {"model/w", "model/b"} and tensors.facts["thinned to"] == "model"
        assert torch.equal(tensors["model/w"][:], state(1)["model"]["w"])
        model = {"w": torch.zeros(5000), "b": torch.zeros(3, dtype=torch.int64)}
        fastckpt.load_into({"model": model}, thinned / "step-00000001")
        assert flat({"model": model}) == {
            name: its for name, its in of(1, "model").items() if name != "/model/n"
        }
    with fastckpt.open(thinned) as tensors:
        assert "optimizer/m" in tensors and "thinned to" not in tensors.facts


def test_the_commands_tell_of_it(
    thinned: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(*arguments: str, status: int = 0) -> str:
        assert main([*arguments]) == status, capsys.readouterr()
        return capsys.readouterr().out

    assert lines("ls", str(thinned)).count("thinned to") == 2
    rows = json.loads(lines("ls", str(thinned), "--json"))["steps"]
    assert [row["kept"] for row in rows] == [None, ["ema", "model"], ["model"]]
    first, second = (thinned / f"step-{step:08d}" for step in (1, 2))
    assert lines("verify", str(thinned)).count("ok  ") == 3
    for file in first.iterdir():
        lines("verify", str(file))
    told = lines("inspect", str(second))
    assert "thinned to ema, model" in told and "model/w" in told and "optimizer" not in told
    assert json.loads(lines("inspect", str(first), "--json"))["thinned to"] == "model"
    assert "only in A: ema/w" in lines("diff", str(second), str(first), status=1)
    lines("diff", str(first), str(first))
    for kind in ("step", "safetensors", "pt"):
        target = memory / kind
        lines("convert", str(first), str(target), "--to", kind)
        assert main(["verify", str(target)]) == (4 if kind == "safetensors" else 0)
        with fastckpt.open(target) as tensors:
            (name,) = (each for each in tensors if each.endswith("w"))
            assert torch.equal(tensors[name][:], state(1)["model"]["w"])
    (shard,) = first.glob("rank-00000-model.safetensors*")
    flip(shard, 0.5)
    assert "damaged" in lines("verify", str(thinned), status=1)
    capsys.readouterr()


def test_verify_finds_what_is_missing(thinned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shard,) = thinned.glob("step-00000002/rank-00000-ema.safetensors*")
    shard.unlink()
    assert main(["verify", str(thinned)]) == 1
    assert "rank-00000-ema.safetensors" in capsys.readouterr().out


# ---- readers ----


def test_a_step_that_is_read_is_thinned_later(root: Path) -> None:
    saved(root, 1, 2, keep_last=9)
    with fastckpt.open(root / "step-00000001") as tensors:
        assert saved(root, 3) == {3: WHOLE, 2: BOTH, 1: WHOLE}
        assert torch.equal(tensors["optimizer/m"][:], state(1)["optimizer"]["m"])
        with fastckpt.open(root / "step-00000002") as again:
            assert "optimizer/m" not in again
    assert saved(root, 4) == {4: WHOLE, 3: BOTH, 2: "model", 1: "model"}


class Beside(Recorder):
    """Another process does something before an operation on a path, or after it, once.

    Args:
        name, path: of the operation.
    """

    def __init__(self, name: str, path: Path, other: Callable[[], object], is_before: bool) -> None:
        super().__init__(by_engine=True)
        self._what, self._other, self._is_before = (name, str(path)), other, is_before
        self.has_met = False

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        is_it = (operation.name, operation.path) == self._what and not self.has_met
        self.has_met |= is_it
        if is_it and self._is_before:
            self._other()
        result = real()
        if is_it and not self._is_before:
            self._other()
        return result


def nonce_of(root: Path, step: int) -> str:
    (manifest,) = root.glob(f"step-{step:08d}*/manifest.json")
    return Manifest.from_bytes(manifest.read_bytes()).nonce


def kept(root: Path, step: int) -> tuple[str, ...] | None:
    """What the manifest of a step says at this moment."""
    (manifest,) = root.glob(f"step-{step:08d}*/manifest.json")
    return Manifest.from_bytes(manifest.read_bytes()).kept


def thin(root: Path, step: int, storage: Storage | None = None, parts: Any = ("model",)) -> bool:
    """What retention does with one step."""
    steps = PosixSteps(storage or Storage(), str(root))
    (path,) = root.glob(f"step-{step:08d}*")
    return steps.thin(path.name, nonce_of(root, step), parts)


READS = [
    ("open", False),
    ("lock shared", True),
    ("lock shared", False),
    ("open", True),
    ("read_file", True),
    ("fstat", True),
]


@pytest.mark.parametrize(("name", "is_before"), READS)
@pytest.mark.parametrize("step", [None, 2])
def test_a_reader_beside_a_thinning(
    name: str, is_before: bool, step: int | None, root: Path
) -> None:
    """Whoever is first: the reader holds the step, or it finds the thinned one."""
    saved(root, 2, keep_last=9)
    done = list[bool]()
    manifest = root / "step-00000002" / "manifest.json"
    storage = Beside(name, manifest, lambda: done.append(thin(root, 2)), is_before)
    into = {"model": state(9)["model"], "optimizer": state(9)["optimizer"]}
    with process_on(storage), Checkpointer(root) as checkpointer:
        try:
            assert checkpointer.restore(into, step) == 2
            assert flat(into["optimizer"]) == flat(state(2)["optimizer"])
        except IncompatibleCheckpoint as error:
            assert done == [True] and "'optimizer' is missing" in str(error)
            assert checkpointer.restore(into, 2, only="model/*") == 2
        assert flat(into["model"]) == flat(state(2)["model"])
    assert storage.has_met and done in ([True], [False])
    assert found(root) == {2: "model" if done == [True] else WHOLE}


@pytest.mark.parametrize(("name", "is_before"), READS)
@pytest.mark.parametrize("inside", ["", "step-00000001"])
def test_whoever_opens_it_beside_a_thinning(
    inside: str, name: str, is_before: bool, root: Path
) -> None:
    saved(root, 1, keep_last=9)
    manifest = root / "step-00000001" / "manifest.json"
    done = list[bool]()
    storage = Beside(name, manifest, lambda: done.append(thin(root, 1)), is_before)
    with process_on(storage), fastckpt.open(root / inside) as tensors:
        is_thinned = "optimizer/m" not in tensors
        assert is_thinned == (tensors.facts.get("thinned to") == "model")
        assert torch.equal(tensors["model/w"][:], state(1)["model"]["w"])
        assert is_thinned or torch.equal(tensors["optimizer/m"][:], state(1)["optimizer"]["m"])
    assert storage.has_met and (done == [True] or not is_thinned)


def test_a_manifest_that_needs_no_change_is_not_written_again(root: Path) -> None:
    """Each new one makes readers look again."""
    saved(root, 1, 2, keep_last=9)
    assert thin(root, 1)
    manifest = root / "step-00000001" / "manifest.json"
    before, left_behind = manifest.stat().st_ino, manifest.with_name("rank-00000.json")
    left_behind.write_bytes(b"{}")
    assert thin(root, 1) and manifest.stat().st_ino == before and not left_behind.exists()


def test_ranks_compare_all_of_it() -> None:
    """Their messages show a part of long values."""
    long = [dict.fromkeys((*"abcdefgh", last), 1) for last in "ij"]
    terms = [common_terms("/run", None, 1, None, None, parts, None) for parts in long]
    assert terms[0]["keep_parts"] != terms[1]["keep_parts"]


def test_what_is_passed_may_change_later(root: Path) -> None:
    keep_parts = {"model": 2}
    with Checkpointer(root, keep_last=1, keep_parts=keep_parts) as checkpointer:
        keep_parts["optimizer"] = 1
        for step in (1, 2):
            checkpointer.save(step, state(step)).result(WAIT_S)
    assert found(root) == {1: "model", 2: WHOLE}


def test_a_job_that_keeps_other_parts_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(root, 1, 2, 3, keep_parts={"model": 2})
    caplog.clear()
    for parts in ({"ema": 2}, None):
        saved(root, 4, keep_parts=parts)
    (line,) = [each for each in caplog.messages if "thinned" in each]
    assert "2 steps that an earlier job has thinned to 'model' are removed" in line


def test_small_tensors_go_with_their_part(root: Path) -> None:
    small = {"model": {"w": torch.ones(9)}, "optimizer": {"m": torch.ones(1000), "step": 7}}
    with Checkpointer(root, keep_last=1, keep_parts={"model": 2}) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, small).result(WAIT_S)
    thinned, whole = (
        sum(path.stat().st_size for path in root.glob(f"step-0000000{step}/*")) for step in (1, 2)
    )
    assert whole - thinned > 4000


def test_the_best_step_may_be_a_thinned_one(root: Path) -> None:
    losses = {1: 1.0, 2: 3.0, 3: 2.0}
    with Checkpointer(root, keep_last=1, keep_parts={"model": 5}) as checkpointer:
        for step, loss in losses.items():
            checkpointer.save(step, state(step), metrics={"loss": loss}).result(WAIT_S)
        checkpointer.wait()
        assert checkpointer.best("loss") == 1 and kept(root, 1) == ("model",)
        assert checkpointer.metrics(1) == {"loss": 1.0}


@pytest.mark.parametrize("is_before", [True, False])
def test_a_pin_beside_a_thinning(is_before: bool, root: Path) -> None:
    """The step is pinned in any case: whole if the pin was first, else thinned."""
    saved(root, 1, keep_last=9)
    pinning = threading.Thread(target=lambda: pin(PosixSteps(Storage(), str(root)), 1))

    def other() -> None:
        pinning.start()
        if is_before:
            pinning.join(WAIT_S)

    storage = Beside("lock", root / "step-00000001" / "manifest.json", other, is_before)
    assert thin(root, 1, storage) is not is_before
    pinning.join(WAIT_S)
    assert not pinning.is_alive() and (root / "step-00000001" / "pinned").exists()
    assert found(root) == {1: WHOLE if is_before else "model"}
    with pytest.raises(CheckpointError, match="pinned"), job(root) as checkpointer:
        checkpointer.delete(1)


def test_a_removal_beside_a_thinning(root: Path) -> None:
    """Nothing is left of the step, and nothing comes back."""
    for is_before in (True, False):
        saved(root, 1, 2, keep_last=9)
        told = list[bool]()

        def remove(root: Path = root, told: list[bool] = told) -> None:
            steps = PosixSteps(Storage(), str(root))
            told.append(steps.remove("step-00000001", nonce_of(root, 1)))

        storage = Beside("lock", root / "step-00000001" / "manifest.json", remove, is_before)
        thin(root, 1, storage)
        assert told == [is_before]
        assert found(root) == ({2: WHOLE} if is_before else {2: WHOLE, 1: "model"})
        shutil.rmtree(root)


class Elsewhere(NetworkClient):
    """A client of a server where hosts do not see each other's locks."""

    def lock(self, fd: int, *, shared: bool = False) -> bool:
        return True


@pytest.mark.parametrize("step", [None, 1])
def test_without_locks_a_reader_whose_step_is_thinned_tries_again(
    step: int | None, root: Path
) -> None:
    """Files vanish while it reads them, which is no damage."""
    saved(root, 1, keep_last=9)
    shard = root / "step-00000001" / "rank-00000.json"
    into = {"model": state(9)["model"], "optimizer": state(9)["optimizer"]}
    steps = PosixSteps(Elsewhere(), str(root))

    def other() -> None:
        assert steps.thin("step-00000001", nonce_of(root, 1), {"model"})

    for name in ("read_file", "open", "open regular"):
        storage = Beside(name, shard, other, True)
        with (
            process_on(storage),
            Checkpointer(root) as checkpointer,
            suppress(IncompatibleCheckpoint),  # it has looked again
        ):
            checkpointer.restore(into, step)
        if storage.has_met:
            break
    assert storage.has_met and found(root) == {1: "model"}
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(into, step, only="model/*") == 1
    assert flat(into["model"]) == flat(state(1)["model"])


class Replacing(NetworkClient):
    """A client of NFS, which renames a file away that is open and is to be replaced: its name is
    gone, if the client dies before the other file gets it.

    Args:
        other: is done before a manifest is replaced.

    Attributes:
        gaps: the names that were gone for a moment.
    """

    def __init__(self, other: Callable[[], object] = int) -> None:
        super().__init__()
        self._others, self.gaps = [other], list[str]()

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "rename" and operation.args[0].endswith("/manifest.json"):
            while self._others:
                self._others.pop()()
            if self._is_open(operation.args[0]):
                self.gaps.append(operation.args[0])
        return super().perform(number, operation, real)


def test_on_a_network_no_open_manifest_is_replaced(root: Path) -> None:
    saved(root, 1, 2, keep_last=9)
    storage = Replacing()
    with storage.mounted():
        assert thin(root, 1, storage)
    assert storage.gaps == [] and found(root) == {2: WHOLE, 1: "model"} and not left_over(root)


def test_a_pin_on_a_network_beside_a_thinning(root: Path) -> None:
    """The manifest is not locked when it is replaced there; the step is whole all the same."""
    saved(root, 1, 2, keep_last=9)
    storage = Replacing(lambda: pin(PosixSteps(Storage(), str(root)), 1))
    with storage.mounted():
        assert not thin(root, 1, storage)
    assert found(root) == {2: WHOLE, 1: WHOLE} and not left_over(root)


def test_a_retention_that_is_late_brings_nothing_back(root: Path) -> None:
    """It has decided before that of the next save, which was faster."""
    saved(root, 1, 2, keep_last=9)
    assert thin(root, 1) and not thin(root, 1, parts={"model", "ema"})
    assert not thin(root, 1, parts={"ema"}) and not thin(root, 1, parts={"optimizer"})
    assert found(root) == {2: WHOLE, 1: "model"} and not left_over(root)


def test_retentions_of_saves_that_overlap(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a save waits until those of the next ones have ended."""
    thin_now, waiting, go_on = PosixSteps.thin, threading.Event(), threading.Event()

    def late(steps: PosixSteps, name: str, nonce: str, parts: Any) -> bool:
        if name.endswith("1") and {*parts} == PARTS and not waiting.is_set():
            waiting.set()
            assert go_on.wait(WAIT_S)
        return thin_now(steps, name, nonce, parts)

    monkeypatch.setattr(PosixSteps, "thin", late)
    with job(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).result(WAIT_S)
        assert waiting.wait(WAIT_S)
        for step in (3, 4):
            checkpointer.save(step, state(step)).result(WAIT_S)
        wait_until(lambda: kept(root, 1) == ("model",), "the other retention is there")
        go_on.set()
    assert found(root) == {4: WHOLE, 3: BOTH, 2: "model", 1: "model"}


# ---- the last operation ----


def thinned_files(root: Path, step: int) -> bool:
    """Whether retention has ended what it does with a step."""
    return not any(str(step) in name for name in left_over(root))


def test_any_operation_of_a_thinning_may_be_the_last(memory: Path) -> None:
    """Whatever a power cut leaves, the step is whole or thinned; the next job removes the rest."""
    before = memory / "before"
    saved(before / "run", 1, 2, keep_last=9)

    def call(storage: Crash, live: Path) -> bool:
        assert thin(live / "run", 1, storage)
        return True

    def find(after: Path) -> Any:
        there = found(after / "run")
        assert there.pop(2) == WHOLE and main(["verify", str(after / "run")]) == 0
        again = saved(after / "run", 3, keep_parts={"model": 9})
        assert again == {3: WHOLE, 2: "model", 1: "model"} and not left_over(after / "run")
        return there

    assert_old_or_new(power_cuts(before, call, find), {1: WHOLE}, {1: "model"}, 15)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_any_operation_of_the_retention_may_be_the_last(memory: Path, storm: Storm) -> None:
    """A step that is thinned, another one that is thinned further, and one that goes."""
    before, live = memory / "before", memory / "live"
    saved(before / "run", 1, 2, 3, 4)
    assert found(before / "run") == {4: WHOLE, 3: BOTH, 2: "model", 1: "model"}

    def crashed(count: int) -> Crash:
        shutil.copytree(before, live)
        storage = Crash(live, count)
        with process_on(storage), suppress(PowerCut):  # what it is for
            job(live / "run", durable=True).save(5, state(5)).exception(WAIT_S)
        return storage

    storage = crashed(10**6)
    assert found(live / "run") == {5: WHOLE, 4: BOTH, 3: "model", 2: "model"}
    shutil.rmtree(live)
    counts = range(int(place_of_commit(storage)[1]) + 1, len(storage.log) + 1)
    seen, kinds = set(), set()
    for count in storm.some(counts, 10):
        storage = crashed(count)
        for label, image in storage.images(SEED + count, 0):
            key = hash(tuple(image.items()))
            if key in seen:
                continue
            seen.add(key)
            plant(image, memory / "after", dead_pid())
            root, about = memory / "after" / "run", f"{count} operations; survived: {label}"
            there = found(root)
            assert there[5] == WHOLE and there[4] in (WHOLE, BOTH), about
            assert there[3] in (BOTH, "model") and there[2] == "model", about
            assert {*there} - {1} == {2, 3, 4, 5} and main(["verify", str(root)]) == 0, about
            assert saved(root, 6) == {6: WHOLE, 5: BOTH, 4: "model", 3: "model"}, about
            assert not left_over(root), about
            kinds.add((there[4], there[3], 1 in there))
            shutil.rmtree(memory / "after")
        shutil.rmtree(live)
    assert len(seen) > 7 and len(kinds) > 2


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_any_operation_of_a_thinning_may_fail(code: int, memory: Path) -> None:
    """The save is committed all the same; the next save of the job does what is left to do."""
    before, root = memory / "before", memory / "run"
    saved(before, 1, 2, keep_last=9)
    kinds = set()
    for number in range(10**6):
        shutil.copytree(before, root)
        storage = FailAt(number, code)
        steps = PosixSteps(storage, str(root))
        with suppress(CheckpointError, OSError):  # retention logs it
            steps.thin("step-00000001", nonce_of(root, 1), {"model"})
        there = found(root)
        assert there.pop(2) == WHOLE and there in ({1: WHOLE}, {1: "model"}), storage.log[number]
        assert main(["verify", str(root)]) == 0
        kinds.add((there[1], bool(left_over(root))))
        again = PosixSteps(Storage(), str(root))
        assert again.thin("step-00000001", nonce_of(root, 1), {"model"}), storage.log[number]
        assert found(root) == {2: WHOLE, 1: "model"} and not left_over(root)
        shutil.rmtree(root)
        if number >= len(storage.log):
            break
    assert kinds >= {(WHOLE, False), ("model", True), ("model", False)}


def test_files_that_could_not_be_removed_are_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next save of the same job."""
    remove, faults = Storage.remove, list[str]()

    def refused(storage: Storage, path: str) -> None:
        if path.endswith("00000.safetensors") and len(faults) < 2:
            faults.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        remove(storage, path)

    monkeypatch.setattr(Storage, "remove", refused)
    with job(root) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, state(step)).result(WAIT_S)
    assert len(faults) == 2
    assert found(root) == {4: WHOLE, 3: BOTH, 2: "model", 1: "model"} and not left_over(root)


KEEP_LAST = 2
# Restores, and saves step after step; dies before an operation of its retention, or as it is told.
LIFE = """
import sys
from fastckpt import Checkpointer, SaveOptions
from tests.kit.doubles import Deadly, process_on
from tests.kit.forgeries import small_shards
from tests.kit.parts import KEEP, flat, of, state
root, count, keep_last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
committed = [0]
def is_due(number, operation):
    committed[0] += operation.name in ("rename", "remove", "sync_directory", "lock", "open lock")
    return committed[0] > count
with small_shards(), process_on(Deadly(is_due)):
    saver = Checkpointer(root, keep_last=keep_last, keep_parts=KEEP)
    into = state(0)
    found = saver.restore(into)
    assert found is None or flat(into) == of(found, "whole"), found
    print("has", -1 if found is None else found, flush=True)
    for step in range(0 if found is None else found + 1, 1 << 30):
        saver.save(step, state(step)).result()
        print("saved", step, flush=True)
"""


def has_all(there: dict[int, str], keep_last: int) -> bool:
    """Whether each step has at least what its place among the steps promises."""
    numbers = sorted(there, reverse=True)
    kinds = [(WHOLE, BOTH, "model").index(there[number]) for number in numbers]
    least = [0] * keep_last + [1, 2, 2]
    return (
        all(kind <= most for kind, most in zip(kinds, least, strict=False))
        and numbers == [*range(numbers[0], numbers[0] - len(numbers), -1)]
        and len(numbers) >= min(numbers[0] + 1, len(least))
    )


@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_a_process_that_is_killed(root: Path, storm: Storm) -> None:
    """At any moment: each step that was there is whole or thinned, as its place among them says."""
    last, kills, kinds = -1, 0, set()
    for rng in storm.rounds(12, 300):
        with Program(LIFE, root, rng.randrange(1, 120), KEEP_LAST) as life:
            for line in life.stdout:
                word, number = line.split()
                if word == "has":
                    assert int(number) in (last, last + 1), (line, last)
                last = int(number)
            assert life.wait(WAIT_S) == -signal.SIGKILL, life.stderr.read()
        kills += 1
        there = found(root) if root.exists() else {}
        if there:
            assert has_all(there, KEEP_LAST), there
            assert max(there) in (last, last + 1)
            kinds.add((*there.values(), bool(left_over(root))))
    print(f"{kills} kills left {len(kinds)} kinds of roots")
    saved(root, last + 2, keep_last=KEEP_LAST)
    assert not left_over(root)
    there = found(root)
    assert [there[step] for step in sorted(there)] == ["model", "model", BOTH, WHOLE, WHOLE]
