"""The benchmark of a burst: ranks that save all at once, and who else reads the same storage.

    python benchmarks/burst.py --ranks 2 --size 96 --rounds 3

Each rank has a storage target of its own, throttled (burst_targets.py); a reader of somebody
else's reads from the first of them all the while. Rows: today's blocking save, a save in the
background, the same at half of the targets' rate, and where Checkpointer has tiers, a save to a
faster local device first. It must not know how a save is done. Progress goes to stderr, the result
to stdout.
"""

from __future__ import annotations

import argparse
import inspect
import json
import mmap
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import report

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # an installed fastckpt comes first

from burst_plot import svg  # noqa: E402
from burst_targets import SLACK_BYTES, targets  # noqa: E402
from rank_bars import Line, as_json, at_most, markdown, surroundings, told  # noqa: E402
from rank_crew import Crew, crew  # noqa: E402
from rank_devices import reason_missing  # noqa: E402

import fastckpt  # noqa: E402

STARTED = time.monotonic()
WORKER = Path(__file__).resolve().parent / "burst_worker.py"
MIB = 1 << 20
READ_BYTES, READ_EVERY_S = 64 << 10, 0.002
FILE_BYTES = 64 * MIB
LOCAL_FACTOR = 5
QUIET_S = 3.0
BAR = 1.5
Row = dict[str, Any]


def progress(line: str) -> None:
    """Say on stderr what was just measured."""
    print(f"[{time.monotonic() - STARTED:7.1f} s] {line}", file=sys.stderr, flush=True)


class Reader:
    """Somebody else's reads from a target, directly from the device, at random places.

    Args:
        path: of the file that it makes and reads.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "wb") as file:
            for _ in range(FILE_BYTES // MIB):
                file.write(os.urandom(MIB))
            os.fsync(file.fileno())
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._memory = mmap.mmap(-1, READ_BYTES)

    @contextmanager
    def reading(self) -> Iterator[list[float]]:
        """Reads while the body runs; yields the seconds that each took, complete afterwards."""
        seconds: list[float] = []
        ended = threading.Event()
        thread = threading.Thread(target=self._read, args=(seconds, ended))
        thread.start()
        try:
            yield seconds
        finally:
            ended.set()
            thread.join()

    def _read(self, seconds: list[float], ended: threading.Event) -> None:
        with suppress(PermissionError):  # of storage and not of this machine's CPUs, if it may be
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        while not ended.is_set():
            place = random.randrange(FILE_BYTES // READ_BYTES) * READ_BYTES
            began = time.perf_counter()
            os.preadv(self._fd, [self._memory], place)
            seconds.append(time.perf_counter() - began)
            time.sleep(READ_EVERY_S)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def percentile(seconds: list[float], share: float) -> float:
    """The least that so large a share of them does not exceed."""
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def ways(rate: float, ranks: int, local: str) -> dict[str, Row | None]:
    """What is compared: name, and options of Checkpointer; None: torch.save."""
    pace = {"drain_rate": 0.5 * rate * ranks}
    found: dict[str, Row | None] = {"sync": None, "async": {}, "async, paced": pace}
    if "local" in inspect.signature(fastckpt.Checkpointer).parameters:
        tier = {"local": local}
        found |= {"tiered": tier, "tiered, paced": tier | pace}
    return found


def one_save(members: Crew, root: str, options: Row | None, step: int) -> Row:
    """One burst: the slowest rank's clocks, and what it took until nothing was left to do."""
    began = time.perf_counter()
    if options is None:
        answers = members("save_sync", path=f"{root}/sync.pt")
    else:
        members("open", root=f"{root}/steps", options=options)
        answers = members("save", step=step)
        members("close")
    drained_s = time.perf_counter() - began
    if options is not None:
        members("clear")
    slowest = {key: max(answer[key] for answer in answers) for key in answers[0]}
    return slowest | {"drained_s": drained_s}


def measure(options: argparse.Namespace, backing: Path) -> list[Row]:
    """Every way in every round, a quiet time before each."""
    nbytes, rate = int(options.size * MIB), options.rate * 1e6
    # A step and the next one before the first goes, what the reader reads, and room for both.
    room = 3 * nbytes + 2 * FILE_BYTES + 2 * SLACK_BYTES
    rows: list[Row] = []
    with (
        targets(options.ranks, room, int(rate), backing) as storage,
        targets(1, room * options.ranks, int(LOCAL_FACTOR * rate), backing) as fast,
        ExitStack() as stack,
        crew(options.ranks, storage.given, WORKER) as members,
    ):
        reader = stack.enter_context(Reader(storage.mounted[0] / "somebody-elses"))
        root = str(storage.common)
        members("hold", nbytes=nbytes)
        compared = ways(rate, options.ranks, str(fast.mounted[0] / "local"))
        for number in range(options.rounds):
            for name, settings in compared.items():
                with reader.reading() as idle:
                    time.sleep(QUIET_S)
                with reader.reading() as busy:
                    row = one_save(members, root, settings, len(rows))
                row |= {"way": name, "round": number, "reads": len(busy)}
                for share, key in ((0.5, "p50_s"), (0.99, "p99_s")):
                    row |= {key: percentile(busy, share), f"idle_{key}": percentile(idle, share)}
                rows.append(row)
                progress(
                    f"{number + 1}/{options.rounds} {name}: stall {row['stall_s']:.3f} s, "
                    f"committed {row['committed_s']:.2f} s, reads' p99 {1e3 * row['p99_s']:.1f} "
                    f"ms, idle {1e3 * row['idle_p99_s']:.1f} ms"
                )
    return rows


def summary(rows: list[Row]) -> dict[str, Row]:
    """Medians of each way over the rounds, and of all quiet times together."""
    keys = ("stall_s", "committed_s", "drained_s", "p50_s", "p99_s")
    idle_s = statistics.median(row["idle_p99_s"] for row in rows)
    found: dict[str, Row] = {}
    for name in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == name]
        found[name] = {key: statistics.median(row[key] for row in own) for key in keys}
        found[name] |= {"idle_p99_s": idle_s, "p99_ratio": found[name]["p99_s"] / idle_s}
    return found


def lines(found: dict[str, Row]) -> list[Line]:
    """What is told of each way, and the one bar."""
    told_lines = [
        told(
            name,
            f"stall {row['stall_s']:.3f} s, committed {row['committed_s']:.2f} s, drained "
            f"{row['drained_s']:.2f} s, a reader's p99 {1e3 * row['p99_s']:.1f} ms "
            f"({row['p99_ratio']:.2f} x idle)",
        )
        for name, row in found.items()
    ]
    ratio = found["async, paced"]["p99_ratio"]
    return [*told_lines, at_most("a reader's p99 at half the rate / idle", ratio, BAR)]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Benchmark bursts of saves on shared storage.")
    parser.add_argument("--ranks", type=int, default=2, help="each with a target of its own")
    parser.add_argument("--size", type=float, default=96, help="MiB that each rank saves")
    parser.add_argument("--rate", type=float, default=100, help="MB/s that each target takes")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all that is compared")
    parser.add_argument(
        "--backing", type=Path, default=Path("/dev/shm"), help="directory for the devices' files"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if min(options.ranks, options.size, options.rate, options.rounds) <= 0:
        parser.error("numbers must be positive")
    return options


def main() -> None:
    """Run what the command line asks for; exits with 1 when the bar was missed."""
    options = arguments()
    missing = reason_missing()
    if missing is not None:
        sys.exit(f"burst: {missing}")
    for number in (signal.SIGTERM, signal.SIGHUP):  # devices are taken away on the way out
        signal.signal(number, lambda *_: sys.exit(1))
    environment = report.environment(options.backing, sys.argv[1:])
    rows = measure(options, options.backing)
    found = summary(rows)
    told_lines = lines(found)
    record = {"environment": environment, "lines": as_json(told_lines), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    path = options.out / f"burst-{stamp}.json"
    path.write_text(json.dumps(record | {"summary": found}, indent=1) + "\n")
    path.with_suffix(".svg").write_text(svg(found))
    progress(f"wrote {path.name}")
    print(surroundings(environment) + "\n\n" + markdown(told_lines))
    if any(line.passed is False for line in told_lines):
        sys.exit(1)


if __name__ == "__main__":
    main()
