"""The one benchmark driver: picks peers and workloads, runs them, hands the rows to the report.

    python benchmarks/bench.py --gib 2 --rounds 5 --workloads stall,drain,load

It must not know how anything is measured or shown. Progress goes to stderr, the result to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import report
from ceiling import Fio
from dragging import run_drag
from isolated import run_crc, run_memory, run_saves200
from peers import PEERS, Fastckpt, Peer, TorchSave, open_peers
from saving import run_saves, run_small
from state import gpt_state

ROOT = Path(__file__).resolve().parents[1]
WORKLOADS = ("stall", "drain", "load", "drag", "small", "crc", "memory", "saves200")
SAVE_WORKLOADS = {"stall", "drain", "load"}
DRAG_BYTES = 1 << 30
SMALL_ROUNDS = 60
STARTED = time.monotonic()


def progress(line: str) -> None:
    """Say on stderr what was just measured."""
    print(f"[{time.monotonic() - STARTED:7.1f} s] {line}", file=sys.stderr, flush=True)


def words(text: str) -> list[str]:
    """Split a comma-separated option."""
    return [word.strip() for word in text.split(",") if word.strip()]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Benchmark fastckpt beside its peers.")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state in GiB")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all peers")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="directory on the file system to measure"
    )
    parser.add_argument(
        "--peers", type=words, help=f"of {','.join(kind.name for kind in PEERS)}; default all"
    )
    parser.add_argument(
        "--workloads", type=words, default=list(WORKLOADS), help=f"of {','.join(WORKLOADS)}"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    options = parser.parse_args()
    unknown = set(options.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"unknown workloads {', '.join(sorted(unknown))}")
    if options.rounds < 1 or options.gib <= 0:
        parser.error("--rounds and --gib must be positive")
    return options


def run(options: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Run the chosen workloads; returns their rows, and why anything is missing."""
    chosen = set(options.workloads)
    nbytes = int(options.gib * 2**30)
    peers, missing = open_peers(options.peers, progress)
    results: dict[str, Any] = {}
    try:
        if chosen & SAVE_WORKLOADS:
            fio = None
            if (reason := Fio.reason_missing()) is None:
                fio = Fio(directory, nbytes, progress)
                fio.scan()
            else:
                missing["fio"] = reason
            saves = run_saves(
                peers,
                gpt_state(nbytes),
                directory,
                options.rounds,
                "load" in chosen,
                fio,
                progress,
            )
            if fio is not None:
                saves["fio_cells"] = {"write": fio.write_cells, "read": fio.read_cells}
            results["saves"] = saves
        if "drag" in chosen:
            watched = beside_training(peers)
            state = gpt_state(min(nbytes, DRAG_BYTES))
            results["drag"] = run_drag(watched, state, directory, options.rounds, progress)
            del state
        if "small" in chosen:
            rounds = max(options.rounds, SMALL_ROUNDS)
            results["small"] = run_small(peers, directory, rounds, progress)
        if "crc" in chosen:
            results["crc"] = run_crc(options.rounds, progress)
        if "memory" in chosen:
            results["memory"] = run_memory(beside_training(peers), nbytes, directory, progress)
        if "saves200" in chosen:
            results["saves200"] = run_saves200(lasting(peers, options), directory, progress)
    finally:
        for peer in peers:
            peer.close()
    return results, missing


def beside_training(peers: list[Peer]) -> list[Peer]:
    """Return the peers that work in the background, and the baseline."""
    return [peer for peer in peers if peer.background or type(peer) is TorchSave]


def lasting(peers: list[Peer], options: argparse.Namespace) -> list[Peer]:
    """Return the peers for the many saves: those asked for, else fastckpt and the baseline."""
    if options.peers is not None:
        return peers
    return [peer for peer in peers if type(peer) is TorchSave or isinstance(peer, Fastckpt)]


def main() -> None:
    """Run the benchmark the command line asks for; exits with 1 when fastckpt failed in it."""
    options = arguments()
    # An installed fastckpt comes first; the tree serves when the extension was built in place.
    sys.path.append(str(ROOT))
    warnings.filterwarnings("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes started from here
    directory = Path(tempfile.mkdtemp(prefix="bench-", dir=options.dir))
    try:
        # Some rivals log to stdout; that is for the result alone.
        with contextlib.redirect_stdout(sys.stderr):
            environment = report.environment(directory, sys.argv[1:])
            results, missing = run(options, directory)
    finally:
        shutil.rmtree(directory)
    record = {
        "environment": environment,
        "missing": missing,
        "failures": report.failures(results),
        "summary": report.summarize(results),
        "results": results,
    }
    files = report.write(record, options.out)
    progress("wrote " + ", ".join(file.name for file in files))
    print(json.dumps(record, indent=1) if options.json else report.markdown(record))
    if any(line.startswith(Fastckpt.name) for line in record["failures"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
