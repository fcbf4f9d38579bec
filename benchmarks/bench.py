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
from rivals import PEERS
from rivals.environment import file_of, requirements
from rivals.fastckpt_save import Fastckpt
from rivals.peer import Peer, try_out
from rivals.process import in_process_of, reason_of
from rivals.torch_save import TorchSave
from saving import run_saves, run_small

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
    unknown = set(options.peers or ()) - {kind.name for kind in PEERS}
    if unknown:
        parser.error(f"unknown peers {', '.join(sorted(unknown))}")
    if options.rounds < 1 or options.gib <= 0:
        parser.error("--rounds and --gib must be positive")
    return options


def available(names: list[str] | None) -> tuple[list[Peer], dict[str, str]]:
    """Try the named peers, all when None; returns those that run here, and why others do not."""
    known = {kind.name: kind for kind in PEERS}
    running, missing = [], {}
    for name in names or known:
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
    if chosen & SAVE_WORKLOADS:
        loading = "load" in chosen
        fio = None
        if (reason := Fio.reason_missing()) is None:
            fio = Fio(directory, nbytes, progress)
            fio.scan()
        else:
            missing["fio"] = reason
        timed = peers if loading else savers(peers)
        saves = run_saves(timed, nbytes, directory, rounds, loading, fio, progress)
        if fio is not None:
            saves["fio_cells"] = {"write": fio.write_cells, "read": fio.read_cells}
        results["saves"] = saves
    if "drag" in chosen:
        size = min(nbytes, DRAG_BYTES)
        results["drag"] = run_drag(beside_training(peers), size, directory, rounds, progress)
    if "small" in chosen:
        results["small"] = run_small(peers, directory, max(rounds, SMALL_ROUNDS), progress)
    if "crc" in chosen:
        results["crc"] = run_crc(rounds, progress)
    if "memory" in chosen:
        results["memory"] = run_memory(beside_training(peers), nbytes, directory, progress)
    if "saves200" in chosen:
        results["saves200"] = run_saves200(lasting(peers, options), directory, progress)
    return results, missing


def savers(peers: list[Peer]) -> list[Peer]:
    """Return the peers that do not only load."""
    return [peer for peer in peers if not peer.loads_only]


def beside_training(peers: list[Peer]) -> list[Peer]:
    """Return the peers that work in the background, and the baseline."""
    return [peer for peer in peers if peer.background or type(peer) is TorchSave]


def lasting(peers: list[Peer], options: argparse.Namespace) -> list[Peer]:
    """Return the peers for the many saves: those asked for, else fastckpt and the baseline."""
    if options.peers is not None:
        return savers(peers)
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
        "requirements": {kind.name: requirements(file_of(kind)) for kind in PEERS},
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
