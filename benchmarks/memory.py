"""The benchmark of memory: what a step costs there, what it costs training, and how fast it comes
back from there and from a neighbour, against a restore from a root with a cold page cache.

    make bench-memory BENCH_ARGS="--gib 2 --rounds 5"

It must not know how anything is saved.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import harness
import memory_parts as parts
from harness import Line, Row, at_most, by_round, goal, holds, progress
from rank_crew import crew
from rivals.process import in_process

PARTS = ("steps", "training", "restores", "peers")
STEP_S = 0.34
TRAINED_MIB = 200
PYTHON = Path(sys.executable)


def ratios(rows: list[Row], one: str, other: str) -> list[float]:
    """The ratios of two columns."""
    return [row[one] / row[other] for row in rows]


def of_steps(given: Any, place: Path, memory: Path) -> tuple[list[Row], list[Line]]:
    rows, nbytes = list[Row](), int(given.step_gib * 2**30)
    for number in range(given.rounds):
        for fence in ("call", "step"):
            for way in ("memory", "root"):
                local = memory / f"{number}-{fence}" if way == "memory" else None
                root = place / f"{way}-{number}-{fence}"
                row = in_process(PYTHON, parts.steps, nbytes, local, root, fence)
                rows.append({"way": way, "fence": fence, **row})
                harness.progress(f"{way}, {fence}: cpu {row['cpu_s']:.3f} s")
    mine = [row for row in rows if row["way"] == "memory"]
    stepped = {
        way: [row for row in rows if row["way"] == way and row["fence"] == "step"]
        for way in ("memory", "root")
    }
    pairs = zip(stepped["memory"], stepped["root"], strict=True)
    stalls = [{"memory": one["stall_s"], "root": other["stall_s"]} for one, other in pairs]
    cpu_s = [row["cpu_s"] / given.step_gib for row in mine]
    note = f" ({harness.middle(stepped['memory'], 'stall_s') * 1e3:.2f} ms)"
    return rows, [
        at_most("a step in memory, CPU of a GiB", cpu_s, 0.15, ".3f", " s"),
        holds("no second copy", all(row["is_one_copy"] for row in mine)),
        at_most(
            "step fence: stall, of a save to the root",
            ratios(stalls, "memory", "root"),
            1.1,
            ".2f",
            " x",
            note,
        ),
        at_most("memory taken, of the budget", max(row["of_budget"] for row in mine), 1.0, ".2f"),
    ]


def of_training(given: Any, place: Path, memory: Path) -> tuple[list[Row], list[Line]]:
    where = memory / "train", place / "train"
    row = in_process(PYTHON, parts.training, TRAINED_MIB << 20, STEP_S, *where, given.rounds)
    what = f"{TRAINED_MIB} MiB, each step of {row['step_s']:.2f} s saved: lost"
    note = f" (CPU beside training {row['cpu_s'] / TRAINED_MIB * 1024:.3f} s of a GiB)"
    line = at_most(what, [100 * each for each in row["lost"]], 3.0, ".1f", " %", note)
    progress(f"{what} {line.measured}")
    return [row], [line]


def of_restores(given: Any, place: Path, memory: Path) -> tuple[list[Row], list[Line]]:
    nbytes = int(given.gib * 2**30)
    where = memory / "restores", place / "restores"
    rows = in_process(PYTHON, parts.restores, nbytes, *where, given.rounds)
    what = f"{given.gib:g} GiB from own memory"
    return rows, [beside_root(what, rows, "own memory", ("Tensor.copy_", by_round(rows, "copy")))]


def beside_root(what: str, rows: list[Row], way: str, limit: tuple[str, harness.Rounds]) -> Line:
    """Hold a restore against its limit and one from the root with a cold page cache."""
    return goal(what, by_round(rows, way), limit, ("the cold root", by_round(rows, "root")))


def of_peers(given: Any, place: Path, memory: Path) -> tuple[list[Row], list[Line]]:
    nbytes, gib = int(given.peer_gib * 2**30), given.peer_gib
    where = {"locals_": [memory / f"node-{at}" for at in range(2)], "nbytes": nbytes}
    with crew(2) as ranks:
        call = partial(ranks, "memory_part", **where)
        copies = call(part="peer_copies", root=place / "copies")
        rows = call(part="peer_restores", root=place / "peers", rounds=given.rounds)[0]
    cpu_s = sum(row["cpu_s"] for row in copies) / gib
    what = f"{gib:g} GiB for each of two ranks, a node lost"
    limit = ("a bare socket", by_round(rows, "socket"))
    return [*copies, *rows], [
        at_most("peer copy, CPU of a GiB at both ends", cpu_s, 0.5, ".2f", " s"),
        beside_root(what, rows, "peer", limit),
    ]


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    parser = harness.options_of("Benchmark steps in memory.", rounds=3)
    parser.add_argument("--gib", type=float, default=2.0, help="that is restored")
    parser.add_argument("--step-gib", type=float, default=1.0, help="that is saved")
    parser.add_argument("--peer-gib", type=float, default=1.0, help="of each rank's state")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="on a tmpfs")
    harness.choice(parser, "--parts", PARTS)
    given = parser.parse_args()
    environment = harness.environment(given.dir)
    measure = dict(zip(PARTS, (of_steps, of_training, of_restores, of_peers), strict=True))
    sections, results = {}, {}
    for part in given.parts:
        with (
            harness.place("memory", given.dir) as place,
            harness.place("memory", given.memory) as memory,
        ):
            results[part], sections[part] = measure[part](given, place, memory)
    record = {
        "environment": environment,
        "lines": harness.recorded(sections),
        "results": results,
    }
    return harness.concluded(record, given.out, "memory")


if __name__ == "__main__":
    sys.exit(main())
