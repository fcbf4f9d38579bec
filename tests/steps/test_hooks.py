"""Promise: a run can be watched without code in the training loop: functions are called when steps
are committed or fail, and steps give back what was said of them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import Checkpointer
from fastckpt.cli import main
from fastckpt.errors import CheckpointError, CorruptCheckpoint, SaveCancelled
from fastckpt.formats.manifest import METADATA_BYTES_MAX, Manifest
from fastckpt.formats.step_names import step_name
from tests.kit.saves import HeldTensor

WAIT_S = 60.0
AHEAD = fastckpt.SaveOptions(fence="step")  # save() does not wait for the copies


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((9,), step), "n": step}


class Calls:
    """Functions for on_commit and on_failure that note how they are called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.committed = list[tuple[int, str, bool]]()
        self.failed = list[tuple[int, BaseException]]()
        self.threads = set[int]()

    def on_commit(self, step: int, handle: fastckpt.SaveHandle) -> None:
        self.threads.add(threading.get_ident())
        is_there = (Path(handle.path) / "manifest.json").exists()
        self.committed.append((step, handle.path, is_there and handle.done()))

    def on_failure(self, step: int, error: BaseException) -> None:
        self.failed.append((step, error))


def test_functions_are_called_when_a_step_is_committed_or_fails(memory: Path) -> None:
    root = memory / "run"
    calls = Calls(root)
    hooks = {"on_commit": calls.on_commit, "on_failure": calls.on_failure}
    with Checkpointer(root, options=AHEAD, keep_last=1, **hooks) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
        checkpointer.wait()
        assert calls.committed == [(n, str(root / step_name(n)), True) for n in (1, 2)]
        assert threading.get_ident() not in calls.threads and not calls.failed
        assert checkpointer.steps() == [2]  # the removal of the older step has been awaited
        with HeldTensor() as held:
            handle = checkpointer.save(3, {"w": held.tensor})
            assert handle.cancel()
            held.release()
            assert isinstance(handle.exception(WAIT_S), SaveCancelled)
        checkpointer.wait()
        assert [step for step, _error in calls.failed] == [3]
        assert isinstance(calls.failed[0][1], SaveCancelled) and len(calls.committed) == 2


def test_an_error_of_such_a_function_is_logged_and_fails_nothing(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(step: int, _handle: fastckpt.SaveHandle) -> None:
        raise RuntimeError(f"no room for {step}")

    with Checkpointer(memory / "run", on_commit=refuses) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        assert checkpointer.steps() == [1]
    assert "no room for 1" in caplog.text

    def exits(_step: int, _handle: fastckpt.SaveHandle) -> None:
        sys.exit("enough")

    with Checkpointer(memory / "run", on_commit=exits) as checkpointer:
        for step in (2, 3):
            checkpointer.save(step, state(step))
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]
    assert caplog.text.count("called sys.exit(), which does not end the program") == 2
    for name in ("on_commit", "on_failure"):
        with pytest.raises(TypeError, match=f"{name} is 'print' of type str, must be a function"):
            Checkpointer(memory / "run", **{name: "print"})  # type: ignore[arg-type]


def test_wait_raises_the_first_error_once(memory: Path) -> None:
    def vetoes(_stats: fastckpt.SaveStats, _digest: str) -> None:
        raise ValueError("not this one")

    with Checkpointer(memory / "run", before_commit=vetoes) as checkpointer:
        checkpointer.save(1, state(1))
        with pytest.raises(CheckpointError, match="not this one"):
            checkpointer.wait()
        checkpointer.wait()
    with pytest.raises(ValueError, match="is closed"):
        checkpointer.wait()


METADATA = {"lr": 3e-4, "data": ["a", {"b": None}], "resumed": True, "ü": "\n", "n": 1 << 40}


@pytest.mark.parametrize("metadata", [METADATA, [1, 2.5], "text", 0, -1, False, "", {}, []])
def test_a_step_gives_back_its_metadata_and_metrics(
    metadata: Any, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = memory / "run"
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1), metadata=metadata, metrics={"loss": 0.5, "kind": "a"})
        checkpointer.save(2, state(2))
        assert checkpointer.metadata(1) == metadata
        assert type(checkpointer.metadata(1)) is type(metadata)
        assert checkpointer.metadata(2) is None and checkpointer.metrics(2) == {}
        assert checkpointer.metrics(1) == {"loss": 0.5, "kind": "a"}
        with pytest.raises(CheckpointError, match=r"holds no committed step 3: .* \[1, 2\]"):
            checkpointer.metadata(3)
        with pytest.raises(CheckpointError, match="holds no committed step 3"):
            checkpointer.metrics(3)
        checkpointer.save(1, state(1), metadata="anew").result(WAIT_S)
        assert checkpointer.metadata(1) == "anew"
    assert main(["ls", str(root), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["steps"]
    assert [row["metadata"] for row in rows] == ["anew", None]
    assert main(["verify", str(root)]) == 0


def test_metadata_is_taken_when_save_is_called(memory: Path) -> None:
    metadata = {"seen": [1]}
    with Checkpointer(memory / "run", options=AHEAD) as checkpointer, HeldTensor() as held:
        checkpointer.save(1, {"w": held.tensor}, metadata=metadata)
        metadata["seen"].append(2)
        held.release()
        given = checkpointer.metadata(1)
        assert given == {"seen": [1]}
        given["seen"].clear()
        assert checkpointer.metadata(1) == {"seen": [1]}


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({1: "a"}, "is not a JSON value: it may consist of dicts with texts as keys"),
        ((1, 2), "is not a JSON value: it may consist of dicts"),
        ({"a": {1, 2}}, "is not a JSON value: Object of type set"),
        (float("nan"), "is not a JSON value"),
        (torch.ones(1), "is not a JSON value: Object of type Tensor"),
        ("\ud800", "is not a JSON value|must be Unicode text"),
        ("x" * METADATA_BYTES_MAX, "has 65538 bytes as JSON, must have at most 65536"),
    ],
)
def test_other_metadata_is_refused(metadata: Any, told: str, memory: Path) -> None:
    with Checkpointer(memory / "run") as checkpointer:
        with pytest.raises(ValueError, match=told):
            checkpointer.save(1, state(1), metadata=metadata)
        checkpointer.save(1, state(1)).result(WAIT_S)


def test_a_manifest_with_metadata_is_checked(memory: Path) -> None:
    with Checkpointer(memory / "run") as checkpointer:
        checkpointer.save(1, state(1), metadata=METADATA).result(WAIT_S)
    content = (memory / "run" / step_name(1) / "manifest.json").read_bytes()
    assert Manifest.from_bytes(content).to_bytes() == content
    assert json.loads(content)["version"] == 4
    with pytest.raises(CorruptCheckpoint, match="SHA-256"):
        Manifest.from_bytes(content.replace(b'"resumed":true', b'"resumed":null'))


def test_a_checkpointer_shows_its_root_and_what_it_does(memory: Path) -> None:
    root = memory / "run"
    with Checkpointer(root, options=AHEAD) as checkpointer:
        assert repr(checkpointer) == f"<Checkpointer of {str(root)!r}: 0 saves in flight>"
        with HeldTensor() as held:
            handle = checkpointer.save(1, {"w": held.tensor})
            assert repr(checkpointer) == f"<Checkpointer of {str(root)!r}: 1 save in flight>"
            held.release()
        handle.result(WAIT_S)
    assert repr(checkpointer) == f"<Checkpointer of {os.fspath(root)!r}: closed>"
