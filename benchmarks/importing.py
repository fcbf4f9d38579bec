"""How long `import fastckpt` takes beyond `import torch`, in fresh processes that take turns.

    python benchmarks/importing.py --rounds 20

It prints minima and medians of whole processes, and what they are above those that import torch
alone. CPU seconds are told beside the clock's, since other processes disturb these less.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from statistics import median

KINDS = {
    "torch": "import torch",
    "torch, fastckpt": "import torch, fastckpt",
    "and all public names": "import torch\nfrom fastckpt import *\nfrom fastckpt import open",
}


def measured(code: str) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of a process that runs the code."""
    # As after an installation, byte code is there: the first round writes it.
    environment = {**os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    begun = time.perf_counter()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], environment)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - begun
    if status != 0:
        raise SystemExit(f"a process that ran {code!r} failed")
    return seconds, usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind, code in KINDS.items():
            times = measured(code)
            if number > 0:  # the first brings the files to the page cache
                found[kind].append(times)
    print("| process imports | s, least | s, median | CPU s, least | CPU s, median |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for above in (False, True):
        for kind in [*KINDS][above:]:
            columns = []
            for clock in (0, 1):
                for of in (min, median):
                    value = of(times[clock] for times in found[kind])
                    least = of(times[clock] for times in found["torch"]) if above else 0.0
                    columns.append(f"{value - least:.3f}")
            told = f"{kind}, above torch" if above else kind
            print(f"| {told} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
