"""The one benchmark driver: picks peers and workloads, runs them, hands the rows to the report.

Every library is measured at the versions that its file in rivals/ names, in an environment that is
made below build/ when it is first needed.

    python benchmarks/bench.py --gib 2 --rounds 5 --workloads stall,drain,load

It must not know how anything is measured or shown. Progress goes to stderr, the result to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import harness
from ceiling import Ceiling
from dragging import run_drag
from harness import progress
from one_core import run_codecs
from report import SECTIONS, failures
from rivals import PEERS
from rivals.environment import file_of, requirements
from rivals.fastckpt_save import Fastckpt
from rivals.peer import Peer, try_out
from rivals.process import in_process_of, reason_of
from rivals.torch_save import TorchSave
from saving import run_again, run_saves, run_small, run_thinned

WORKLOADS = ("stall", "drain", "load", "drag", "many", "small", "again", "thinned", "codec")
SAVE_WORKLOADS = {"stall", "drain", "load"}
DRAG_BYTES = 1 << 30
SMALL_ROUNDS, AGAIN_ROUNDS = 60, 12


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = harness.options_of("Benchmark fastckpt beside its peers.")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state in GiB")
    harness.choice(parser, "--peers", [kind.name for kind in PEERS])
    harness.choice(parser, "--workloads", WORKLOADS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    options = parser.parse_args()
    if options.gib <= 0:
        parser.error("--gib must be positive")
    return options


def available(names: list[str]) -> tuple[list[Peer], dict[str, str]]:
    """Try the named peers; returns those that run here, and why others do not."""
    known = {kind.name: kind for kind in PEERS}
    running, missing = [], {}
    for name in names:
        peer = known[name]()
        started = time.monotonic()
        try:
            in_process_of(peer, try_out)
        except Exception as error:  # any failure of a rival to start is its reason, not ours
            missing[name] = reason_of(error)
        else:
            running.append(peer)
        progress(f"try {name}: {missing.get(name) or f'{time.monotonic() - started:.1f} s'}")
    return running, missing


def run(options: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Run the chosen workloads; returns their rows, and why anything is missing."""
    chosen, rounds = set(options.workloads), options.rounds
    nbytes = int(options.gib * 2**30)
    peers, missing = available(options.peers)
    results: dict[str, Any] = {}
    for kind, loading in (("saves", "load" in chosen), ("many", True)):
        if kind in chosen or (kind == "saves" and chosen & SAVE_WORKLOADS):
            ceiling = Ceiling(directory, nbytes, quick=options.gib < 1)
            if ceiling.missing:
                missing["fio"] = ceiling.missing
            found = run_saves(kind, peers, nbytes, directory, rounds, loading, ceiling)
            results[kind] = {**found, "limit": ceiling.name}
    if "drag" in chosen:
        size = min(nbytes, DRAG_BYTES)
        results["drag"] = run_drag(beside_training(peers), size, directory, rounds)
    if "small" in chosen:
        results["small"] = run_small(peers, directory, max(rounds, SMALL_ROUNDS))
    if "again" in chosen:
        results["again"] = run_again(nbytes, directory, max(rounds, AGAIN_ROUNDS))
    if "thinned" in chosen:
        results["thinned"] = run_thinned(nbytes, directory, rounds)
    if "codec" in chosen:
        results["codec"] = run_codecs(rounds)
    return results, missing


def beside_training(peers: list[Peer]) -> list[Peer]:
    """Return the peers that work in the background, and the baseline."""
    return [peer for peer in peers if peer.background or type(peer) is TorchSave]


def main() -> None:
    """Run the benchmark the command line asks for; exits with 1 when fastckpt failed in it."""
    options = arguments()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes started from here
    # Some rivals log to stdout; that is for the result alone.
    with harness.place("bench", options.dir) as directory, contextlib.redirect_stdout(sys.stderr):
        record: dict[str, Any] = {"environment": harness.environment(directory)}
        results, missing = run(options, directory)
    record |= {"missing": missing, "failures": failures(results), "results": results}
    record["requirements"] = {kind.name: requirements(file_of(kind)) for kind in PEERS}
    rivals = sorted(set().union(*record["requirements"].values()))
    record["notes"] = [f"Rivals: {', '.join(rivals)}"]
    record["lines"], record["tables"] = {}, {}
    for name, result in results.items():
        section = SECTIONS[name]
        title, lines = section.title(result), harness.recorded({"": section.lines(result)})
        record["lines"][title], record["tables"][title] = lines[""], section.tables(result)
    harness.write(record, options.out, "bench")
    print(json.dumps(record, indent=1) if options.json else harness.text(record))
    if any(line.startswith(Fastckpt.name) for line in record["failures"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
