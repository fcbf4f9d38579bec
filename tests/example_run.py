"""Runs of the examples that log their losses: started, killed by whoever wants to, and waited for.

Knows how an example is started by one or several ranks; must not know what it saves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WAIT_S = 200.0


def start(example: str, cwd: Path, *options: object, ranks: int = 1) -> subprocess.Popen[bytes]:
    """The example of this name, at work in a directory that is made for it."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    cwd.mkdir(exist_ok=True)
    command += [str(ROOT / "examples" / f"{example}.py"), "--loss-log", "losses"]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    with open(cwd / "output", "ab") as output:
        return subprocess.Popen(
            command + [str(option) for option in options],
            cwd=cwd,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(process: subprocess.Popen[bytes], cwd: Path) -> list[tuple[int, str]]:
    """What a run that ends well has logged."""
    assert process.wait(timeout=WAIT_S) == 0, (cwd / "output").read_text()[-3000:]
    return logged(cwd)


def logged(cwd: Path) -> list[tuple[int, str]]:
    """Steps and losses of all runs in a directory."""
    records = map(json.loads, (cwd / "losses").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records]
