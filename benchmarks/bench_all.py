"""All benchmarks of parts.py, one after another, and the documents that are made of them.

    make bench-all                          # less than an hour
    make bench-all BENCH_ARGS="--tiny"      # a few minutes: whether all runs; no numbers

A part whose record is there, of this code and with these options, is not run again: what was
interrupted goes on. Environments of rivals are made before the first part. Progress goes to stderr,
with each part's own output in build/bench-all. It must not know how anything is measured or shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import documents
import harness
from bench import available
from harness import ROOT, progress
from parts import PARTS, RESULTS, Part
from rivals import PEERS, torchft_transport
from rivals.dcp_s3torchconnector import DcpToS3
from rivals.environment import interpreter
from rivals.peer import try_out
from rivals.process import in_process_of, reason_of

LOGS = ROOT / "build" / "bench-all"
TINY = ROOT / "build" / "bench-tiny"
PART_S = 1800


def prepared() -> None:
    """Make the environments of all rivals."""
    available([kind.name for kind in PEERS])
    others: dict[str, Callable[[], object]] = {
        DcpToS3.name: lambda: in_process_of(DcpToS3({}, ""), try_out),
        "torchft": lambda: interpreter(Path(torchft_transport.__file__)),
    }
    for name, made in others.items():
        try:
            made()
        except Exception as error:  # the part says the same
            progress(f"{name}: {reason_of(error)}")


def is_done(command: str, file: Path) -> bool:
    """Say whether a record is there, of this code and by this command."""
    if not file.exists():
        return False
    record = json.loads(file.read_text())
    if record.get("command") != command:
        return False
    commit, now = record["environment"]["commit"], harness.commit()
    if " " in commit + now:  # local changes: nobody knows which
        return False
    same = ["git", "diff", "--quiet", commit, now, "--", *harness.CODE]
    return (
        commit == now or subprocess.run(same, cwd=ROOT, stderr=subprocess.DEVNULL).returncode == 0
    )


def run(part: Part, more: str, parent: Path, file: Path) -> str:
    """Run a part and keep its record; returns why there is none, or an empty text."""
    out = LOGS / part.name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    environment |= {"OMP_NUM_THREADS": "1"} if part.ranks else {}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(harness.place(part.name, parent))
        log = stack.enter_context(open(LOGS / f"{part.name}.log", "w"))
        command = part.arguments(more, directory, out)
        with subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process:
            try:
                status = process.wait(PART_S)
            except subprocess.TimeoutExpired:
                status = f"none within {PART_S} s"
            finally:
                process.terminate()
    found = sorted(out.glob("*.json"))
    if not found:
        return f"status {status}, see {LOGS.relative_to(ROOT)}/{part.name}.log"
    record = {"command": part.command(more), **json.loads(found[-1].read_text())}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(file)
    return ""


def run_all(parts: Sequence[Part], options: argparse.Namespace, results: Path) -> dict[str, str]:
    """Run parts that are not done; returns those that failed, and why."""
    failed, is_prepared = {}, options.tiny
    for place, part in enumerate(parts, 1):
        more = part.tiny if options.tiny else ""
        more += f" --rounds {options.rounds}" if options.rounds else ""
        file, name = results / f"{part.name}.json", f"{place}/{len(parts)} {part.name}"
        if is_done(part.command(more), file):
            progress(f"{name}: done before")
            continue
        if not is_prepared:
            prepared()
            is_prepared = True
        begun = time.monotonic()
        progress(f"{name}: {part.command(more)}")
        if why := run(part, more, options.dir, file):
            failed[part.name] = why
        progress(f"{name}: {why or 'done'}, {time.monotonic() - begun:.0f} s")
    return failed


def main() -> int:
    """Run what the command line asks for; returns 1 when a part gave no record."""
    parser = harness.options_of("Run all benchmarks, and write their tables into the documents.")
    harness.choice(parser, "--parts", [part.name for part in PARTS])
    parser.add_argument("--tiny", action="store_true", help="see whether all runs; no documents")
    usual = [part.name for part in PARTS if part.usual]
    parser.set_defaults(out=None, parts=usual, rounds=None)
    options = parser.parse_args()
    results = options.out or (TINY if options.tiny else RESULTS)
    chosen = [part for part in PARTS if part.name in options.parts]
    failed = run_all(chosen, options, results)
    if results == RESULTS:
        documents.write()
    for name, why in failed.items():
        print(f"{name}: FAILED: {why}")
    print(f"{len(chosen) - len(failed)} of {len(chosen)} parts, in {results}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
