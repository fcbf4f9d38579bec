"""The benchmark of stalls by the number of tensors: how long a save with the step fence holds up
its caller, for fastckpt.save and for a Checkpointer.

    python benchmarks/many_tensors.py --tensors 745,10000,50000 --rounds 7

All tensors have 66 KiB, a little more than what a save copies at the call. Every size is saved in
turns, `--rounds` times after two saves that are not counted. It must not know what a save does.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # an installed fastckpt comes first

import torch  # noqa: E402

import fastckpt  # noqa: E402

ELEMENTS = (66 << 10) // 4
WARM_UPS = 2


def state_of(count: int) -> dict[str, dict[str, torch.Tensor]]:
    """Makes a state of so many tensors, with names as those of a transformer."""
    names = (f"transformer.h.{i // 12}.part.{i % 12}.weight" for i in range(count))
    return {"model": {name: torch.randn(ELEMENTS) for name in names}}


def stalls(count: int, rounds: int, directory: Path) -> tuple[list[float], list[float]]:
    """Returns the seconds for which save() did not return: of files, and of steps."""
    state, files, steps = state_of(count), [], []
    with fastckpt.Checkpointer(directory / "steps", keep_last=1, fence="step") as checkpointer:
        for step in range(WARM_UPS + rounds):
            file = fastckpt.save(state, directory / "file.pt", fence="step").result()
            files.append(file.stall_s)
            steps.append(checkpointer.save(step, state).result().stall_s)
    return files[WARM_UPS:], steps[WARM_UPS:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", default="745,10000,50000", help="sizes of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to be measured")
    options = parser.parse_args()
    print("| tensors | save: ms | us a tensor | Checkpointer.save: ms | us a tensor |")
    print("|---:|---:|---:|---:|---:|")
    for count in map(int, options.tensors.split(",")):
        directory = Path(tempfile.mkdtemp(prefix="many-", dir=options.dir))
        try:
            found = map(statistics.median, stalls(count, options.rounds, directory))
            cells = [f"{s * 1e3:.1f} | {s / count * 1e6:.1f}" for s in found]
        finally:
            shutil.rmtree(directory)
        print(f"| {count} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
