"""The benchmark of several ranks: picks parts, runs them, prints a table of bars and verdicts.

    python benchmarks/ranks.py --size 2 --rounds 5 --parts file,scaling,balance,call,restore,codec

It must not know how anything is measured. Progress goes to stderr, the result to stdout.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import report

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # an installed fastckpt comes first

from rank_bars import Line, as_json, markdown, surroundings, write  # noqa: E402
from rank_parts import PARTS, Surroundings, run  # noqa: E402

STARTED = time.monotonic()


def progress(line: str) -> None:
    """Say on stderr what was just measured."""
    print(f"[{time.monotonic() - STARTED:7.1f} s] {line}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Benchmark fastckpt on several ranks.")
    parser.add_argument(
        "--size",
        type=float,
        default=2.0,
        help="GiB of the object that two ranks save; the other parts save fractions of it",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all that is compared")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="directory on the file system to measure"
    )
    parser.add_argument(
        "--backing",
        type=Path,
        default=Path("/dev/shm"),
        help="directory for the files behind throttled devices",
    )
    parser.add_argument(
        "--parts",
        type=lambda text: [word.strip() for word in text.split(",") if word.strip()],
        default=list(PARTS),
        help=f"of {','.join(PARTS)}",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}")
    if options.rounds < 1 or options.size <= 0:
        parser.error("--rounds and --size must be positive")
    return options


def text(environment: report.Row, lines: dict[str, list[Line]], missing: dict[str, str]) -> str:
    """Return the whole run as Markdown."""
    parts = [surroundings(environment)]
    parts += [f"### {PARTS[name][0]}\n\n{markdown(found)}" for name, found in lines.items()]
    if missing:
        reasons = [f"- {name}: {reason}" for name, reason in missing.items()]
        parts.append("### Not measured\n\n" + "\n".join(reasons))
    return "\n\n".join(parts)


def main() -> None:
    """Run what the command line asks for; exits with 1 when a bar was missed."""
    options = arguments()
    # As Ctrl-C: devices, mounts and processes are taken away on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(128 + signal.SIGHUP))
    directory = Path(tempfile.mkdtemp(prefix="bench-ranks-", dir=options.dir)).resolve()
    try:
        environment = report.environment(directory, sys.argv[1:])
        nbytes = int(options.size * 2**30)
        here = Surroundings(nbytes, options.rounds, directory, options.backing, progress)
        results, lines = run(options.parts, here)
    finally:
        shutil.rmtree(directory)
    record = {
        "environment": environment,
        "missing": here.missing,
        "lines": {name: as_json(found) for name, found in lines.items()},
        "results": results,
    }
    progress(f"wrote {write(record, options.out, 'ranks').name}")
    print(text(environment, lines, here.missing))
    if any(line.passed is False for found in lines.values() for line in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
