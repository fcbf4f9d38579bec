"""The examples, run as a user runs them: in processes of their own, judged by what they leave.

This file is responsible for the promises that examples/train_gpt.py makes: a resumed run goes on
bit by bit where the saved one stopped, and the demonstration proves all of its claims. It must not
know how the examples or the library work inside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.multiprocess


def train_gpt(*options: object, cwd: Path, timeout_s: float = 60, **variables: str) -> str:
    """Runs the example in `cwd` with environment `variables`; returns its standard output."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_WAIT_POLICY": "passive",  # spinning threads crawl when the cores are shared
        **variables,
    }
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--preset", "tiny"]
    done = subprocess.run(
        command + [str(option) for option in options],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(log: Path) -> list[tuple[int, str]]:
    """Steps and losses in the order in which they were logged; the losses as hexadecimal text."""
    records = map(json.loads, log.read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Twelve steps without a save."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    train_gpt("--steps", 12, "--save-every", 0, "--loss-log", "losses", cwd=directory)
    assert [path.name for path in directory.iterdir()] == ["losses"]
    return losses(directory / "losses")


@pytest.mark.parametrize("fence", ["call", "step"])
def test_resumed_losses_are_bitwise_equal(
    fence: str, uninterrupted: list[tuple[int, str]], tmp_path: Path
) -> None:
    options = ("--save-every", 3, "--path", "ckpt.pt", "--fence", fence)
    train_gpt("--steps", 8, *options, "--loss-log", "before", cwd=tmp_path)
    assert losses(tmp_path / "before") == uninterrupted[:8]
    train_gpt("--steps", 12, *options, "--loss-log", "after", "--resume", cwd=tmp_path)
    # The last save was that of step 6: steps 6 and 7 are made again.
    assert losses(tmp_path / "after") == uninterrupted[6:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before", "ckpt.pt"]


def test_another_seed_gives_other_losses(
    uninterrupted: list[tuple[int, str]], tmp_path: Path
) -> None:
    options = ("--save-every", 0, "--loss-log", "losses")
    train_gpt("--steps", 2, "--seed", 1, *options, cwd=tmp_path)
    other = losses(tmp_path / "losses")
    assert len(other) == 2
    assert not set(other) & set(uninterrupted)


@pytest.mark.slow
def test_demo_proves_its_claims(tmp_path: Path) -> None:
    output = train_gpt("--demo", cwd=tmp_path, timeout_s=240, TMPDIR=str(tmp_path))
    assert "FAIL" not in output
    assert "Every claim held." in output
    kinds = ("torch.save", "torch.save + fsync", "fastckpt, call fence", "fastckpt, step fence")
    for kind in kinds:
        assert any(line.startswith(f"  {kind}  ") for line in output.splitlines()), output
    assert not list(tmp_path.glob("fastckpt*")), "the demonstration left files behind"
