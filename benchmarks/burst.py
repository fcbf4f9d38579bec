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
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import harness
from burst_targets import SLACK_BYTES, reason_missing, targets
from harness import Line, Row, at_most, middle, progress, told
from rank_crew import Crew, crew

MIB = 1 << 20
READ_BYTES, READ_EVERY_S = 64 << 10, 0.002
FILE_BYTES = 64 * MIB
LOCAL_FACTOR = 5
QUIET_S = 3.0
BAR = 1.5


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
    pace, tier = {"drain_rate": 0.5 * rate * ranks}, {"local": local}
    found: dict[str, Row | None] = {"sync": None, "async": {}, "async, paced": pace}
    return found | {"tiered": tier, "tiered, paced": tier | pace}


def one_save(members: Crew, root: str, options: Row | None, step: int) -> Row:
    """One burst: the slowest rank's clocks, and what it took until nothing was left to do."""
    began = time.perf_counter()
    if options is None:
        answers = members("torch_save_part", path=f"{root}/sync.pt")
    else:
        members("open_steps", name="steps", root=f"{root}/steps", keep_last=1, **options)
        answers = members("save_step", name="steps", step=step)
        members("close_steps", name="steps")
    drained_s = time.perf_counter() - began
    if options is not None:
        # Each rank its own: the first, which would, does not see the others' targets.
        members("clear", directory=f"{root}/steps")
    clocks = {"stall_s": "stall_s", "committed_s": "root_s"}
    slowest = {key: max(row[of] for row in answers) for key, of in clocks.items()}
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
        crew(options.ranks, storage.given) as members,
    ):
        reader = stack.enter_context(Reader(storage.mounted[0] / "somebody-elses"))
        root = str(storage.common)
        members("hold_part", nbytes=nbytes)
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
    idle_s = middle(rows, "idle_p99_s")
    found: dict[str, Row] = {}
    for name in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == name]
        found[name] = {key: middle(own, key) for key in keys}
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


def main() -> int:
    """Run what the command line asks for; returns 1 when the bar was missed."""
    parser = harness.options_of("Benchmark bursts of saves on shared storage.", rounds=3)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="each with a target of its own")
    add("--size", type=float, default=96, help="MiB that each rank saves")
    add("--rate", type=float, default=100, help="MB/s that each target takes")
    parser.set_defaults(dir=Path("/dev/shm"))  # of the files behind the devices
    options = parser.parse_args()
    if min(options.ranks, options.size, options.rate) <= 0:
        parser.error("numbers must be positive")
    missing = reason_missing()
    if missing is not None:
        sys.exit(f"burst: {missing}")
    with harness.place("burst", options.dir) as directory:
        record = {"environment": harness.environment(directory)}
        rows = measure(options, directory)
    found = summary(rows)
    sections = harness.recorded({"A burst on shared storage": lines(found)})
    record |= {"lines": sections, "results": rows, "summary": found}
    return harness.concluded(record, options.out, "burst")


if __name__ == "__main__":
    sys.exit(main())
