"""The benchmark of several ranks: picks parts, runs them, prints a table of bars and verdicts.

    python benchmarks/ranks.py --size 2 --rounds 5 --parts file,call,restore

It must not know how anything is measured.
"""

from __future__ import annotations

import sys
from typing import Any

import harness
from rank_parts import PARTS, Surroundings


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    parser = harness.options_of("Benchmark fastckpt on several ranks.")
    help_of_size = "GiB of the object that two ranks save; the part call saves an eighth of it"
    parser.add_argument("--size", type=float, default=2.0, help=help_of_size)
    harness.choice(parser, "--parts", [*PARTS])
    options = parser.parse_args()
    lines: dict[str, Any] = {}
    results = {}
    with harness.place("ranks", options.dir) as directory:
        environment = harness.environment(directory)
        here = Surroundings(int(options.size * 2**30), options.rounds, directory)
        for name in options.parts:
            title, part = PARTS[name]
            harness.progress(title)
            results[name], lines[title] = part(here)
    record = {"environment": environment, "missing": here.missing, "results": results}
    return harness.concluded(record | {"lines": harness.recorded(lines)}, options.out, "ranks")


if __name__ == "__main__":
    sys.exit(main())
