"""Torture: what is long, random or statistical, for as long as it is told, from a seed it prints.

    python -m tests.torture --seconds 600 --seed 7 [what pytest is given]
    python -m tests.torture --each 8

Runs pytest with a new seed again and again until the time is over; the first failure ends it, and
is repeated by the seed that is printed last. Properties shrink what fails by themselves; a storm
names the round that failed. Ten minutes reach a few of the tests: --each runs all of them once,
whatever fails, each for about so many seconds where its length is open.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time

from tests.kit.paths import ROOT

ROUND_S = 20.0  # a run that has less time than this has not collected the tests yet
NOTHING_RAN = 5
# Of one test. Whatever takes longer than this, also beside other work, hangs: torture is to say so
# before whoever runs it loses patience.
TIMEOUT_S = 900
WORKERS = 3  # of --each: ranks wait for each other, so two cores have room for a third


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--each", type=float, metavar="SECONDS", help="of each test, all of them")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    options, more = parser.parse_known_args()
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    if options.each is not None:
        print(f"== torture: seed {seed}, each test for {options.each:.0f} s", flush=True)
        return run_pytest(seed, options.each, ["--each", f"-n{WORKERS}", *more])
    end = time.monotonic() + options.seconds
    while (left_s := end - time.monotonic()) > ROUND_S or options.seconds <= ROUND_S:
        print(f"== torture: seed {seed}, {left_s:.0f} s", flush=True)
        code = run_pytest(seed, left_s, ["-x", *more])
        if code not in (0, NOTHING_RAN):
            again = f"make torture SECONDS={options.seconds:.0f} SEED={seed}"
            print(f"== torture: failed with seed {seed}; again: {again}", flush=True)
            return code
        if options.seconds <= ROUND_S or (options.seed is not None and "--round" in more):
            break
        seed += 1
    return 0


def run_pytest(seed: int, seconds: float, more: list[str]) -> int:
    """Returns the status of one run of the tests of torture."""
    command = [sys.executable, "-m", "pytest", "-q", f"--seed={seed}", f"--hypothesis-seed={seed}"]
    command += [f"--timeout={TIMEOUT_S}", "-o", "faulthandler_timeout=0"]
    command += [f"--torture={seconds:.0f}", *more, "tests"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
